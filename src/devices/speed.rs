//! Speed of a device in a frozen linear layer, the operation with the most time in training.

use crate::backend::{Backend, Fault, Frozen, Write, view, view_mut};
use crate::numeric::dtype::Dtype;
use std::time::Instant;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Speed {
    /// Tokens, inputs and outputs of the layer.
    pub size: usize,
    /// 1e9 multiplications and additions per second.
    pub gflops: f64,
}

/// Sizes: the smallest suffices for a software driver, the largest for a fast card.
const SIZES: [usize; 4] = [512, 1024, 2048, 4096];
/// Minimum seconds of a pass for a valid measurement.
const ENOUGH: f64 = 0.02;

/// Seconds after which no more passes are measured.
const PATIENCE: f64 = 1.0;

/// Measures the smallest layer that takes long enough: the fastest of at most three passes after one that compiles.
pub fn of<B: Backend>(mut backend: B) -> Result<Speed, Fault> {
    let mut speed = Speed { size: 0, gflops: 0.0 };
    for size in SIZES {
        let bytes = 0x3c00_u16.to_le_bytes().repeat(size * size); // bf16 2^-7
        let weight = backend.weight(Frozen { rows: size, cols: size, dtype: Dtype::Bf16, bytes: &bytes })?;
        let (mut x, mut y) = (backend.memory(size * size), backend.memory(size * size));
        backend.fill(view_mut(&mut x, size, size), 1.0);
        let (mut seconds, mut all) = (f64::INFINITY, 0.0);
        for pass in 0..4 {
            if pass > 1 && all > PATIENCE {
                break;
            }
            let began = Instant::now();
            backend.linear(view_mut(&mut y, size, size), Write::Set, view(&x, size, size), &weight);
            let mut one = [0.0];
            backend.read(view(&y, 1, 1), &mut one)?;
            let took = began.elapsed().as_secs_f64();
            seconds = seconds.min(took);
            all += took;
        }
        speed = Speed { size, gflops: 2.0 * (size as f64).powi(3) / seconds / 1e9 };
        if seconds >= ENOUGH {
            break;
        }
        backend.recycle(x);
        backend.recycle(y);
    }
    Ok(speed)
}
