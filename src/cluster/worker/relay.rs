//! A worker as a relay: it adds the parts of other workers' sums in its range of values. Parts are kept until the
//! coordinator says which sums belong to a total, and a cell of the total is sent once every such sum has brought it.
//! Nothing here cannot be sent again: every worker keeps its sum until the total counts.

use crate::cluster::message::{Packed, RelayPlan, ToCoordinator};
use crate::cluster::sum_chunk::{self, cell_len};
use crate::numeric::fixed::{self, CELL};
use crate::numeric::pack;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most sums of one worker that may wait here.
const MOST: usize = 16;

/// The parts of sums in the range of a relay.
#[derive(Debug)]
pub(in crate::cluster) struct Relay {
    /// Number of values of the flat layout.
    len: usize,
    /// The cells of the range.
    cells: Range<usize>,
    /// By place of the worker and number of its sum: cells from the first of the range on.
    held: BTreeMap<(u16, u64), Vec<Packed>>,
    total: Option<Total>,
}

/// A total that is being added.
#[derive(Debug)]
struct Total {
    number: u64,
    /// The cap of a value of one microbatch.
    cap: i64,
    sums: Vec<(u16, u64)>,
    /// The cell that is added next.
    next: usize,
}

/// The cells of a range of values that begins with a cell.
pub(in crate::cluster) fn cells(range: (u64, u64)) -> Range<usize> {
    let from = range.0 as usize / CELL;
    from..if range.0 < range.1 { (range.1 as usize).div_ceil(CELL) } else { from }
}

/// Checks that the ranges of a plan follow each other, begin with a cell, and are all of `len` values.
pub(in crate::cluster) fn check(plan: &RelayPlan, len: usize) -> Result<(), String> {
    let mut at = 0;
    for &(from, to) in &plan.ranges {
        if from != at || to < from || from % CELL as u64 != 0 && from != to {
            return Err("the ranges of its relays do not follow each other".into());
        }
        at = to;
    }
    let of = plan.ranges.len();
    match at == len as u64 && of == plan.addresses.len() && usize::from(plan.place) < of {
        true => Ok(()),
        false => Err("the ranges of its relays are not those of the parameters".into()),
    }
}

impl Relay {
    pub fn new(len: usize, range: (u64, u64)) -> Self {
        Relay { len, cells: cells(range), held: BTreeMap::new(), total: None }
    }

    /// Keeps a part of a sum; the error is that it is none that a correct worker sends.
    pub fn keep(&mut self, key: (u16, u64), offset: u64, packed: Packed) -> Result<(), String> {
        let sums = self.held.range((key.0, 0)..=(key.0, u64::MAX)).count();
        let parts = self.held.entry(key).or_default();
        let index = self.cells.start + parts.len();
        let is_new = parts.is_empty();
        if offset != (index * CELL) as u64 || index >= self.cells.end || is_new && sums >= MOST {
            return Err(format!("the relay {} sent a part of a sum that does not belong there", key.0));
        }
        sum_chunk::check(&packed, cell_len(self.len, index)).map_err(|e| e.to_string())?;
        parts.push(packed);
        Ok(())
    }

    /// Begins a total of these sums of a round of `of` microbatches.
    pub fn combine(&mut self, number: u64, of: u32, sums: Vec<(u16, u64)>) {
        let (cap, next) = (fixed::cap(of as usize), self.cells.start);
        self.total = Some(Total { number, cap, sums, next });
    }

    /// The next cell of the total, if it can be added.
    pub fn next(&mut self) -> Option<Result<ToCoordinator, String>> {
        let total = self.total.as_mut()?;
        let at = total.next - self.cells.start;
        let parts = total.sums.iter().map(|sum| self.held.get(sum).and_then(|parts| parts.get(at)));
        let parts: Vec<&Packed> = parts.collect::<Option<_>>().filter(|_| total.next < self.cells.end)?;
        let len = cell_len(self.len, total.next);
        let packed = match added(&parts, len, total.cap) {
            Ok(packed) => packed,
            Err(reason) => return Some(Err(reason)),
        };
        total.next += 1;
        let piece = ToCoordinator::TotalPiece {
            total: total.number,
            offset: (at * CELL) as u64,
            len: len as u32,
            packed,
        };
        if total.next == self.cells.end
            && let Some(total) = self.total.take()
        {
            // Sums come in their order: those before went to the coordinator.
            self.held.retain(|(of, sum), _| total.sums.iter().all(|(place, last)| of != place || sum > last));
        }
        Some(Ok(piece))
    }
}

/// Adds cells of `len` values.
fn added(parts: &[&Packed], len: usize, cap: i64) -> Result<Packed, String> {
    if let [one] = parts {
        return Ok((*one).clone());
    }
    let mut cell = vec![0; len];
    for part in parts {
        sum_chunk::add(part, &mut cell, cap).map_err(|e| e.to_string())?;
    }
    let mut bytes = Vec::new();
    pack::pack(&cell, &mut bytes);
    Ok(Packed::Fixed(bytes.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(place: u16, ranges: &[(u64, u64)]) -> RelayPlan {
        let addresses = vec![(String::new(), 1); ranges.len()];
        RelayPlan { set: 1, key: [0; 16], place, addresses, ranges: ranges.to_vec() }
    }

    #[test]
    fn plans_whose_ranges_are_not_all_values_are_refused() {
        let cell = CELL as u64;
        let fits = |place, ranges: &[(u64, u64)]| check(&plan(place, ranges), CELL + 7).is_ok();
        assert!(fits(1, &[(0, cell), (cell, cell + 7)]) && fits(0, &[(0, cell + 7), (cell + 7, cell + 7)]));
        for (place, ranges) in [
            (2, &[(0, cell), (cell, cell + 7)][..]),
            (0, &[(0, cell), (cell, cell + 6)]),
            (0, &[(0, 5), (5, cell + 7)]),
            (0, &[(0, cell + 9), (cell + 9, 3)]),
            (0, &[(cell, cell + 7)]),
            (0, &[]),
        ] {
            assert!(!fits(place, ranges), "{place} {ranges:?}");
        }
    }

    #[test]
    fn parts_that_do_not_belong_there_are_refused() {
        let cell = CELL as u64;
        let part = |len: usize| Packed::Single(vec![0; 4 * len].into());
        let mut relay = Relay::new(2 * CELL + 7, (cell, 2 * cell + 7));
        assert!(relay.keep((0, 1), 0, part(CELL)).is_err(), "another relay's range");
        relay.keep((0, 1), cell, part(CELL)).unwrap();
        assert!(relay.keep((0, 1), cell, part(CELL)).is_err(), "again");
        assert!(relay.keep((0, 1), 2 * cell, part(8)).is_err(), "too long");
        relay.keep((0, 1), 2 * cell, part(7)).unwrap();
        assert!(relay.keep((0, 1), 2 * cell + 7, part(0)).is_err(), "beyond the end");
        (2..=MOST as u64).for_each(|sum| relay.keep((0, sum), cell, part(CELL)).unwrap());
        assert!(relay.keep((0, 99), cell, part(CELL)).is_err(), "too many sums");
        relay.keep((1, 99), cell, part(CELL)).unwrap();
        assert!(relay.next().is_none());
        relay.combine(1, 8, vec![(0, 1), (1, 99)]);
        assert!(matches!(relay.next(), Some(Ok(ToCoordinator::TotalPiece { total: 1, offset: 0, .. }))));
        assert!(relay.next().is_none(), "the second worker's last cell is not here");
    }
}
