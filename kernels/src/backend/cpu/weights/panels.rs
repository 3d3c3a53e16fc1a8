//! A frozen matrix in panels, packed once: [N / 32][K][32], so that 32 outputs are side by side for every input,
//! in the dtype of the file. What is widened to f32 is one panel's slice at a time, in L2; bf16 numbers, which are
//! stored in pairs along K, are widened for the f32 kernel and taken as they are by the one for bf16.
//!
//! One layout serves both directions. Forward takes a slice of a panel as stored; the input gradient, whose
//! inner dimension is N, transposes blocks of 16 outputs while it widens them or pairs them again (3 % of the product
//! at 256 rows; a second copy of the weights would save that).

use super::super::gemm::avx512_bf16;
use super::super::gemm::gemv::{Chains, Sums};
use super::super::gemm::tile::Ahead;
use super::super::gemm::tiled::{Right, Tiled};
use super::super::operands::{COLS, Side};
use super::super::runtime::threads::Threads;
use super::panel_unpack::{self, Vectors};
use super::panel_words::Stored;

/// N x K numbers.
pub struct Panels<S: Stored> {
    rows: usize,
    cols: usize,
    data: Vec<S::Word>,
}

impl<S: Stored> Panels<S> {
    /// From row-major numbers; `number(i)` is the i-th.
    pub fn pack(threads: &Threads, (rows, cols): (usize, usize), number: impl Fn(usize) -> S + Sync) -> Self {
        let deep = cols.div_ceil(S::DEPTH);
        let mut data = vec![S::Word::default(); rows.div_ceil(COLS) * deep * COLS];
        threads.chunks(&mut data, deep * COLS, |p, panel| {
            for lane in 0..COLS.min(rows - p * COLS) {
                let from = (p * COLS + lane) * cols;
                for (k, out) in panel.iter_mut().skip(lane).step_by(COLS).enumerate() {
                    let k = k * S::DEPTH;
                    let second = if k + 1 < cols { number(from + k + 1) } else { S::default() };
                    *out = S::word([number(from + k), second]);
                }
            }
        });
        Panels { rows, cols, data }
    }

    /// Words of a column of a panel.
    fn deep(&self) -> usize {
        self.cols.div_ceil(S::DEPTH)
    }
}

impl<S: Vectors> Tiled for Panels<S> {
    fn row(&self, out: &mut [f32], id: usize) {
        let panel = &self.data[id / COLS * self.deep() * COLS..][..self.deep() * COLS];
        for (out, &word) in out.chunks_mut(S::DEPTH).zip(panel.iter().skip(id % COLS).step_by(COLS)) {
            out.iter_mut().enumerate().for_each(|(i, o)| *o = S::widen(word, i));
        }
    }

    fn upright<'a>(
        &'a self,
        wide: &'a mut [f32],
        first: usize,
        (from, k): (usize, usize),
        left: Side,
    ) -> Right<'a> {
        let at = first / COLS * self.deep() + from / S::DEPTH;
        let part = &self.data[at * COLS..][..k.div_ceil(S::DEPTH) * COLS];
        match (left, S::pairs(part), S::plain(part)) {
            (Side::Pairs(..), Some(pairs), _) => Right::Pairs(pairs),
            (Side::Pairs(..), None, _) => unreachable!("products of bf16 have panels of bf16"),
            (Side::Floats(_), _, Some(plain)) => Right::Floats(plain),
            (Side::Floats(_), _, None) => {
                panel_unpack::widen_rows::<S>(&mut wide[..k * COLS], part);
                Right::Floats(&wide[..k * COLS])
            }
        }
    }

    fn transposed<'a>(
        &'a self,
        wide: &'a mut [f32],
        k: usize,
        (from, n): (usize, usize),
        left: Side,
    ) -> Right<'a> {
        let words = (COLS / S::DEPTH).min(self.deep() - k / S::DEPTH);
        let pairs = matches!(left, Side::Pairs(..));
        let wide = &mut wide[..if pairs { n.next_multiple_of(16) / 2 } else { n } * COLS];
        for row in (0..n).step_by(16) {
            let at = ((from + row) / COLS * self.deep() + k / S::DEPTH) * COLS + (from + row) % COLS;
            let x = &self.data[at..];
            assert!((words - 1) * COLS + 16 <= x.len(), "inside the panel");
            match S::pairs(x).filter(|_| pairs) {
                // SAFETY: factors are pairs where the processor has AVX-512; the source is inside `data`, and so are
                // the rows of `wide` that are written.
                Some(x) => unsafe { turn_to_pairs(wide[row / 2 * COLS..].as_mut_ptr().cast(), x, words) },
                None => panel_unpack::turn::<S>(&mut wide[row * COLS..], x, (words, 16.min(n - row))),
            }
        }
        if pairs { Right::Pairs(bytemuck::cast_slice(wide)) } else { Right::Floats(wide) }
    }

    fn next_forward(&self, p: usize, from: usize, k: usize) -> Option<Ahead> {
        let at = (p * self.deep() + from / S::DEPTH) * COLS;
        let run = k.div_ceil(S::DEPTH) * COLS * size_of::<S::Word>();
        let rest = self.data.get(at..).filter(|d| !d.is_empty())?;
        Some(Ahead { at: rest.as_ptr().cast(), run, runs: 1, stride: run })
    }

    fn next_backward(&self, k: usize, from: usize, n: usize) -> Option<Ahead> {
        let words = (COLS / S::DEPTH).min(self.deep().checked_sub(k / S::DEPTH).filter(|&left| left > 0)?);
        let at = self.data.get((from / COLS * self.deep() + k / S::DEPTH) * COLS..)?.as_ptr().cast();
        let (run, stride) = (words * COLS * size_of::<S::Word>(), self.deep() * COLS * size_of::<S::Word>());
        Some(Ahead { at, run, runs: n.div_ceil(COLS), stride })
    }
}

impl<S: Vectors> Chains for Panels<S> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn chains(&self, sums: &mut [Sums], x: &[&[f32]], (first, panels): (usize, usize), from: usize) {
        let deep = self.deep();
        let words = &self.data[(first / COLS * deep + from / S::DEPTH) * COLS..];
        for (sums, x) in sums.iter_mut().zip(x) {
            *sums = panel_unpack::of_words::<S>(x, (words, deep), panels);
        }
    }
}

/// Pairs along N of 16 outputs and 32 numbers of which there are that many words.
unsafe fn turn_to_pairs(out: *mut u32, x: &[u32], words: usize) {
    for half in [0, 8] {
        let x = x[(half * COLS).min(x.len())..].as_ptr();
        // SAFETY: the caller has checked source and target.
        unsafe { avx512_bf16::turn_pairs(out.add(2 * half), x, words.saturating_sub(half).min(8)) };
    }
}
