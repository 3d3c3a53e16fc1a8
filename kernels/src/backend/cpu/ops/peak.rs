//! What this processor can do at most, measured: its kernel on numbers in the first cache, and copies of
//! what no cache holds. All threads at once, best of several, so that others disturb little.

use super::super::device::Cpu;
use super::super::gemm::avx512_bf16;
use super::super::gemm::product::small;
use super::super::gemm::product_tiles;
use super::super::operands::{COLS, Factors, Pairs, Precision, ROWS, Sizes, Strided, Target};
use super::super::runtime::threads::Shared;
use super::elementwise;
use crate::backend::Write;
use std::time::Instant;

/// Peaks of all threads together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Multiplications and additions of products in a second.
    pub flops: f64,
    /// Bytes read and written in a second by a copy.
    pub bytes: f64,
}

const TERMS: usize = 256;
const REPEATS: usize = 2000;
/// Values that are copied: 128 MB.
const COPIED: usize = 1 << 25;

impl Cpu {
    /// Measures; takes about half a second.
    pub fn peaks(&self) -> Peaks {
        let (rows, cols) = (ROWS, COLS);
        let products = |_: usize| match self.precision {
            Precision::Bf16Dot => self.dots(),
            _ => self.sums(),
        };
        let count = self.threads.count();
        let seconds = best(8, || self.threads.each(count, products));
        let work = 2.0 * (rows * cols * TERMS * REPEATS * count) as f64;
        let (x, mut out) = (vec![1.0; COPIED], vec![0.0; COPIED]);
        let copied = best(4, || elementwise::copy(&self.threads, &mut out, &x));
        Peaks { flops: work / seconds, bytes: 8.0 * COPIED as f64 / copied }
    }

    fn sums(&self) {
        let (m, n, k) = (ROWS, COLS, TERMS);
        let (a, b, mut out) = (vec![0.5; m * k], vec![0.5; k * n], vec![0.0; m * n]);
        let f = Factors { a: Strided::rows(&a, k), b: Strided::rows(&b, n), scale: 1.0 };
        for _ in 0..REPEATS {
            small(self.context(), (&mut out, n), Write::Set, Sizes { m, n, k }, f);
        }
        std::hint::black_box(out);
    }

    fn dots(&self) {
        let (m, n, k) = (ROWS, COLS, TERMS / 2);
        let (a, b, mut out) = (vec![0x3f00_3f00; m * k], vec![0x3f00_3f00; k * n], vec![0.0; m * n]);
        let shared = Shared::new(&mut out);
        let target = Target::rows(&shared, n, Write::Set);
        let pairs = Pairs { k, a: a.as_ptr(), row: k, col: 1, b: b.as_ptr() };
        for _ in 0..REPEATS {
            // SAFETY: the precision was chosen by `Cpu`, which asked the processor; factors and output have the
            // sizes of one tile, and are this function's own.
            unsafe { avx512_bf16::tile(pairs, None, product_tiles::place(target, 0, (m, n), 1.0)) };
        }
        std::hint::black_box(out);
    }
}

/// The shortest of some runs.
fn best(runs: usize, mut run: impl FnMut()) -> f64 {
    let one = |_| {
        let started = Instant::now();
        run();
        started.elapsed().as_secs_f64()
    };
    (0..runs).map(one).fold(f64::INFINITY, f64::min)
}
