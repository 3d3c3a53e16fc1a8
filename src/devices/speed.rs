//! Speed of a device in a frozen linear layer, the operation with the most time in training, and of loading such a layer.

use crate::backend::{Backend, Fault, Frozen, Write, view, view_mut};
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use std::time::Instant;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Speed {
    /// Tokens, inputs and outputs of the layer.
    pub size: usize,
    /// 1e9 multiplications and additions per second.
    pub gflops: f64,
    /// 1e9 bytes of packed weights per second, from host memory to where the device computes with them.
    pub loading: f64,
}

impl Speed {
    /// Speed of a card that is not here: few have less.
    pub const ASSUMED: Speed = Speed { size: 0, gflops: 3e3, loading: 10.0 };

    /// Seconds in which both passes of a microbatch read a streamed layer of that many bytes.
    pub fn reads(&self, layer: u64) -> f64 {
        2.0 * layer as f64 / (1e9 * self.loading)
    }
}

/// Sizes: the smallest suffices for a software driver, the largest for a fast card.
const SIZES: [usize; 4] = [512, 1024, 2048, 4096];
/// Minimum seconds of a pass for a valid measurement.
const ENOUGH: f64 = 0.02;

/// Seconds after which no more passes are measured.
const PATIENCE: f64 = 1.0;

/// Fewest seconds of loading that can be measured.
const QUICKEST: f64 = 1e-5;

/// Measures the smallest layer that takes long enough: the fastest of at most three passes after one that compiles.
pub fn of<B: Backend>(mut backend: B) -> Result<Speed, Fault> {
    let mut speed = Speed { size: 0, gflops: 0.0, loading: 0.0 };
    for size in SIZES {
        let bytes = 0x3c00_u16.to_le_bytes().repeat(size * size); // bf16 2^-7
        let frozen = Frozen { rows: size, cols: size, dtype: Dtype::Bf16, bytes: &bytes };
        let weight = backend.weight(frozen)?;
        let (mut x, mut y) = (backend.memory(size * size), backend.memory(size * size));
        backend.fill(view_mut(&mut x, size, size), 1.0);
        let (mut seconds, mut all) = (f64::INFINITY, 0.0);
        for turn in 0..4 {
            if turn > 1 && all > PATIENCE {
                break;
            }
            let began = Instant::now();
            pass(&mut backend, (&mut y, &x, size), &weight)?;
            let took = began.elapsed().as_secs_f64();
            seconds = seconds.min(took);
            all += took;
        }
        backend.release(weight);
        let mut both = f64::INFINITY;
        for _ in 0..2 {
            let began = Instant::now();
            let weight = backend.weight(frozen)?;
            // A backend may load when it computes.
            pass(&mut backend, (&mut y, &x, size), &weight)?;
            both = both.min(began.elapsed().as_secs_f64());
            backend.release(weight);
        }
        let loaded = (both - seconds).max(QUICKEST);
        let packed = backend.matrix_bytes(Encoding::Plain(Dtype::Bf16), size * size);
        let (flops, packed) = (2.0 * (size as f64).powi(3), packed as f64);
        speed = Speed { size, gflops: flops / seconds / 1e9, loading: packed / loaded / 1e9 };
        if seconds >= ENOUGH {
            break;
        }
        backend.recycle(x);
        backend.recycle(y);
    }
    Ok(speed)
}

/// One pass through the layer, which has ended when this returns.
fn pass<B: Backend>(
    backend: &mut B,
    (y, x, size): (&mut B::Memory, &B::Memory, usize),
    weight: &B::Weight,
) -> Result<(), Fault> {
    backend.linear(view_mut(y, size, size), Write::Set, view(x, size, size), weight);
    backend.read(view(y, 1, 1), &mut [0.0])
}
