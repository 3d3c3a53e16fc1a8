//! How much each relay does (`--relays`): it follows from the measured networks.

use crate::numeric::fixed::CELL;
use std::ops::Range;

/// The shares of relays.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares(Vec<f64>);

impl Shares {
    /// By the bandwidths of the relays.
    pub fn of(bandwidths: &[f64]) -> Self {
        let all: f64 = bandwidths.iter().sum();
        Shares(bandwidths.iter().map(|of| of / all).collect())
    }

    /// Ranges of `values` values, each of which begins with a cell. All but the last may be empty.
    pub fn ranges(&self, values: usize) -> Vec<Range<usize>> {
        let cells = values.div_ceil(CELL);
        let (mut at, mut sum, mut out) = (0, 0.0, Vec::new());
        for share in &self.0 {
            sum += share;
            let to = ((sum * cells as f64) as usize).min(cells.saturating_sub(1)).max(at);
            out.push(at * CELL..to * CELL);
            at = to;
        }
        out.last_mut().into_iter().for_each(|last| last.end = values);
        out
    }

    /// Seconds of the transfers of a step over networks of these bandwidths, without relays and with them: of `values` values,
    /// which take `up` bytes in a sum and `down` in the parameters. The coordinator's own network is taken to be as fast as
    /// the fastest.
    pub fn seconds(&self, bandwidths: &[f64], values: usize, (up, down): (f64, f64)) -> [f64; 2] {
        let (values, of) = (values as f64, bandwidths.len() as f64);
        let fastest = bandwidths.iter().copied().fold(0.0, f64::max);
        let apart = of * (up + down) / fastest;
        let slowest = |most: &dyn Fn(f64) -> f64| {
            let each = self.0.iter().zip(bandwidths).map(|(share, bandwidth)| most(*share) / bandwidth);
            each.fold(1.0 / fastest, f64::max)
        };
        // Into a relay come the others' parts of its range; out of it go its parts of other ranges and its total.
        let sums = up * slowest(&|share| (share * (of - 1.0)).max(1.0));
        // It passes its range on to all others, and gets all of the parameters.
        let parameters = down * slowest(&|share| (share * (of - 1.0)).max(1.0));
        [values * apart, values * (sums + parameters)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cells_by_bandwidth_and_cover_all_values() {
        let at = |n: usize| n * CELL;
        assert_eq!(Shares::of(&[1.0, 1.0]).ranges(at(4)), [0..at(2), at(2)..at(4)]);
        assert_eq!(Shares::of(&[3.0, 1.0]).ranges(at(3) + 5), [0..at(3), at(3)..at(3) + 5]);
        // Fewer cells than relays.
        assert_eq!(Shares::of(&[1.0; 3]).ranges(7), [0..0, 0..0, 0..7]);
        for (of, values) in [(2, 1), (3, at(1)), (5, at(9) + 1), (64, at(20)), (7, at(100) - 1)] {
            let shares: Vec<f64> = (0..of).map(|n| 1.0 + (n * n % 7) as f64).collect();
            let ranges = Shares::of(&shares).ranges(values);
            assert_eq!((ranges.len(), ranges[0].start, ranges[of - 1].end), (of, 0, values));
            for pair in ranges.windows(2) {
                assert!(pair[0].end == pair[1].start && pair[0].end % CELL == 0);
            }
        }
    }

    #[test]
    fn transfers_do_not_grow_with_the_number_of_relays() {
        // A million values, 1 MB/s.
        let seconds = |of: usize| Shares::of(&vec![1e6; of]).seconds(&vec![1e6; of], 1_000_000, (4.5, 4.0));
        for of in [2, 4, 16] {
            let [apart, together] = seconds(of);
            assert!((apart - 8.5 * of as f64).abs() < 1e-9 && (together - 8.5).abs() < 1e-9, "{of}");
        }
        // A slow worker gets a small range, and all parameters.
        let unlike = [1e6, 1e6, 1e5];
        let [apart, together] = Shares::of(&unlike).seconds(&unlike, 1_000_000, (4.5, 4.0));
        assert!((apart - 25.5).abs() < 1e-9 && together > 45.0 && together <= 85.0 + 1e-9, "{together}");
    }
}
