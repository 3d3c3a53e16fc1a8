//! `--sum-bits`: rounds the gradient of a microbatch before it is added, wherever it was computed.

use crate::model::layout::Layout;
use crate::model::stage::Microbatch;
use crate::numeric::coarse::{self, BLOCK};
use crate::numeric::fixed::CELL;
use crate::numeric::rng;
use rayon::prelude::*;
use std::ops::Range;

/// Separates these draws from those of dropout and shuffling.
const DRAWS: u64 = 0x726f_756e_6469_6e67;

/// How gradients are rounded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rounding {
    bits: u32,
    seed: u64,
    /// The tensors of the flat layout, ascending; none shares a block with another.
    tensors: Vec<Range<usize>>,
}

impl Rounding {
    /// Rounds the values of a flat layout to that many bits; 0 bits: nothing is rounded.
    pub fn new(bits: u32, seed: u64, layout: &Layout) -> Option<Self> {
        let tensors = || layout.entries().iter().map(|entry| entry.range()).collect();
        (bits > 0).then(|| Rounding { bits, seed, tensors: tensors() })
    }

    /// Rounds a gradient, or a part of it that begins with value `first` and holds whole tensors. The draws depend on
    /// the step and the rows of the microbatch.
    pub fn round(&self, batch: &Microbatch, first: usize, gradient: &mut [f32]) {
        let key = rng::hash(&[&[self.seed, DRAWS, batch.step][..], &batch.rows].concat());
        let (mut rest, mut at, mut parts) = (gradient, first, Vec::new());
        let from = self.tensors.partition_point(|tensor| tensor.start < first);
        let begins = self.tensors.get(from).is_none_or(|tensor| tensor.start == first);
        for tensor in &self.tensors[from..] {
            if tensor.len() > rest.len() {
                break;
            }
            let (own, others) = rest.split_at_mut(tensor.len());
            const { assert!(CELL.is_multiple_of(BLOCK), "a part has whole blocks") };
            parts.extend(own.chunks_mut(CELL).enumerate().map(|(i, part)| (at + i * CELL, part)));
            (rest, at) = (others, at + tensor.len());
        }
        assert!(begins && rest.is_empty(), "a part of a gradient holds whole tensors");
        parts.into_par_iter().for_each(|(at, part)| coarse::round(part, self.bits, key, at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stage::Targets;
    use crate::numeric::rng::Stream;

    fn batch(step: u64, rows: &[u64]) -> Microbatch {
        let bounds = (0..=rows.len() as u32).collect();
        let ids = vec![0; rows.len()];
        Microbatch { step, rows: rows.to_vec(), ids, bounds, targets: Targets::Tokens(Vec::new()) }
    }

    #[test]
    fn parts_of_a_gradient_have_the_bits_of_the_whole() {
        let mut layout = Layout::default();
        [(3, 7), (1, 1), (5, 64), (2, 40_000), (9, 9)].iter().for_each(|(m, n)| _ = layout.push("t", *m, *n));
        let mut draws = Stream::new(&[1]);
        let gradient: Vec<f32> = (0..layout.len()).map(|_| draws.unit() - 0.5).collect();
        let rounding = Rounding::new(5, 7, &layout).unwrap();
        let rounded = |batch: &Microbatch, range: Range<usize>| {
            let mut part = gradient[range.clone()].to_vec();
            rounding.round(batch, range.start, &mut part);
            part
        };
        let whole = rounded(&batch(1, &[4, 9]), 0..layout.len());
        assert_ne!(whole, gradient);
        for cut in layout.entries().iter().map(|entry| entry.offset) {
            let parts = [0..cut, cut..layout.len()].map(|range| rounded(&batch(1, &[4, 9]), range));
            assert!(parts.concat() == whole, "cut at {cut}");
        }
        for other in [batch(2, &[4, 9]), batch(1, &[4, 8]), batch(1, &[4])] {
            assert_ne!(rounded(&other, 0..layout.len()), whole);
        }
        let (mut other, seed) = (gradient.clone(), Rounding { seed: 8, ..rounding.clone() });
        seed.round(&batch(1, &[4, 9]), 0, &mut other);
        assert_ne!(other, whole);
        assert_eq!(Rounding::new(0, 7, &layout), None);
    }
}
