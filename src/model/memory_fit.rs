//! Measured device memory of microbatches, and the line fitted to it by tokens. The memory depends on the values that
//! blocks keep, so each measurement carries a number for that policy; measurements of another policy replace the old
//! ones.

use crate::numeric::line::{Line, Points};
use serde::{Deserialize, Serialize};

/// Peak memory in use during a computation, without the frozen weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InUse {
    /// Bytes.
    pub bytes: u64,
    /// Policy for kept values: [`super::decoder::Keep::blocks`].
    pub blocks: u32,
}

/// Memory measurements of microbatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Used {
    /// Bytes in use at once by tokens.
    pub points: Points,
    /// Policy for kept values: [`super::decoder::Keep::blocks`].
    pub blocks: u32,
    /// Largest measured bytes.
    pub most: u64,
    /// Tokens of the largest microbatch.
    #[serde(default)]
    pub tokens: u64,
}

/// Bytes as a linear function of tokens, for one policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fit {
    /// The line of least squares.
    pub line: Line,
    /// Policy for kept values: [`super::decoder::Keep::blocks`].
    pub blocks: u32,
    /// Tokens of the largest measured microbatch.
    pub tokens: u64,
}

impl Fit {
    /// Whether the line is valid for `tokens`. Memory is not linear over all sizes (the head's chunk of logits grows up
    /// to some size and is constant above it), so the line is used only near the largest measured size.
    pub fn reaches(&self, tokens: usize) -> bool {
        let tokens = tokens as u64;
        2 * tokens >= self.tokens && 2 * tokens <= 3 * self.tokens
    }
}

/// Above the memory of any device: bounds the values that a peer reports.
const MOST: u64 = 1 << 50;

impl Used {
    /// Adds the memory in use while nothing is computed.
    pub fn rest(&mut self, seen: InUse) {
        if let Some(bytes) = self.takes(seen) {
            self.points.rest(bytes);
        }
    }

    /// Adds a measurement of a microbatch of `tokens` tokens.
    pub fn add(&mut self, tokens: f64, seen: InUse) {
        if let Some(bytes) = self.takes(seen) {
            self.points.add(tokens, bytes);
            self.most = self.most.max(seen.bytes);
            self.tokens = self.tokens.max(tokens as u64);
        }
    }

    fn takes(&mut self, seen: InUse) -> Option<f64> {
        if seen.bytes == 0 || seen.bytes > MOST {
            return None;
        }
        if seen.blocks != self.blocks {
            *self = Used { blocks: seen.blocks, ..Used::default() };
        }
        Some(seen.bytes as f64)
    }

    /// Adds all measurements of `other`, where the policies are equal.
    pub fn join(&mut self, other: &Used) {
        if self.points.n == 0.0 {
            self.blocks = other.blocks;
        }
        if self.blocks == other.blocks {
            self.points.join(&other.points);
            self.most = self.most.max(other.most);
            self.tokens = self.tokens.max(other.tokens);
        }
    }

    /// Returns the fitted line; `None` if fewer than two sizes were measured (idle counts as one), or the fit is
    /// implausible.
    pub fn fit(&self) -> Option<Fit> {
        let Points { n, x, y, xx, xy } = self.points;
        let sound = [x, y, xx, xy].iter().all(|sum| (0.0..1e24).contains(sum))
            && (2.0..=1e9).contains(&n)
            && self.most <= MOST
            && (1..=1 << 30).contains(&self.tokens);
        let spread = n * xx - x * x > 1e-9 * n * xx;
        let line = self.points.line().filter(|_| sound && spread)?;
        Some(Fit { line, blocks: self.blocks, tokens: self.tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(bytes: f64, blocks: u32) -> InUse {
        InUse { bytes: bytes as u64, blocks }
    }

    #[test]
    fn fit_recovers_the_planted_line() {
        for (fixed, each, sizes) in
            [(4e7, 690e3, vec![128.0, 256.0, 512.0]), (1e6, 1e3, vec![7.0]), (9e9, 4e6, vec![1024.0, 64.0])]
        {
            let mut used = Used::default();
            used.rest(seen(fixed, 30));
            sizes.iter().for_each(|&tokens| used.add(tokens, seen(fixed + each * tokens, 30)));
            let Fit { line, blocks, tokens } = used.fit().unwrap();
            assert!(
                (line.fixed / fixed - 1.0).abs() < 1e-6 && (line.each / each - 1.0).abs() < 1e-6,
                "{line:?}"
            );
            assert_eq!((blocks, tokens as f64), (30, sizes.into_iter().fold(0.0, f64::max)));
        }
    }

    #[test]
    fn one_size_or_invalid_sums_give_no_fit() {
        let mut used = Used::default();
        used.add(128.0, seen(1e6, 2));
        assert_eq!(used.fit(), None);
        used.add(128.0, seen(1e6, 2));
        assert_eq!(used.fit(), None, "the same size again");
        used.add(256.0, seen(3e18, 2));
        assert_eq!((used.points.n, used.most), (2.0, 1_000_000));
        for points in [
            Points { n: f64::NAN, ..used.points },
            Points { xy: f64::INFINITY, ..used.points },
            Points { y: -1.0, ..used.points },
        ] {
            assert_eq!(Used { points, ..used }.fit(), None);
        }
        used.add(256.0, seen(2e6, 2));
        assert!(used.fit().is_some());
        used.add(512.0, seen(1e6, 1));
        assert_eq!(
            (used.points.n, used.blocks, used.most),
            (1.0, 1, 1_000_000),
            "other blocks start a new fit"
        );
    }
}
