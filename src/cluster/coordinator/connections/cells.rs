//! The sum of a line from the parts of its seats. Each seat sends the cells of the flat vector that its range touches,
//! with zeros before its first value. A cell that several ranges share is put together here.

use crate::cluster::message::{Packed, ToCoordinator};
use crate::cluster::sum_chunk::{self, cell_len, little_endian};
use crate::numeric::fixed::CELL;
use crate::numeric::pack;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// A cell of the flat vector.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::cluster::coordinator) struct Cell {
    /// Index of its first value.
    pub offset: u64,
    /// Number of its values.
    pub len: u32,
    pub packed: Packed,
}

impl Cell {
    /// As a piece of the sum with this number.
    pub fn of_sum(self, sum: u64) -> ToCoordinator {
        ToCoordinator::SumPiece { sum, offset: self.offset, len: self.len, packed: self.packed }
    }
}

/// The cells of one sum.
#[derive(Debug)]
pub(in crate::cluster::coordinator) struct Cells {
    /// The values of each seat.
    values: Vec<Range<usize>>,
    /// The cell that each seat sends next.
    next: Vec<usize>,
    /// Parts of cells that are not complete, by the cell's index: seat and values.
    parts: BTreeMap<usize, Vec<(usize, Packed)>>,
    /// Cells that wait for those before them.
    ready: BTreeMap<usize, Packed>,
    /// The cell that leaves next.
    out: usize,
}

/// The cells that a range touches. An empty range touches the cell that it is inside, and none at a cell's start.
fn touched(values: &Range<usize>) -> Range<usize> {
    values.start / CELL..values.end.div_ceil(CELL)
}

/// Why a part is refused.
#[derive(Debug, PartialEq)]
pub(in crate::cluster::coordinator) enum Wrong {
    /// This piece is; the reason in one line.
    Piece(String),
    /// It does not go with those of other seats, any of which may be at fault.
    Parts(String),
}

impl Cells {
    pub fn new(values: &[Range<usize>]) -> Self {
        let next = values.iter().map(|values| values.start / CELL).collect();
        Cells { values: values.to_vec(), next, parts: BTreeMap::new(), ready: BTreeMap::new(), out: 0 }
    }

    fn len(&self) -> usize {
        self.values.last().map_or(0, |values| values.end)
    }

    /// Whether a seat has sent all of its cells.
    pub fn complete(&self, seat: usize) -> bool {
        self.next[seat] == touched(&self.values[seat]).end
    }

    /// Adds a part of a seat. Returns the cells that are complete, in order.
    pub fn add(
        &mut self,
        seat: usize,
        (offset, len): (u64, u32),
        packed: Packed,
    ) -> Result<VecDeque<Cell>, Wrong> {
        let (values, index) = (&self.values[seat], self.next[seat]);
        let due = values.end.min((index + 1) * CELL).saturating_sub(index * CELL);
        let at = (index - values.start / CELL) * CELL;
        if self.complete(seat) || offset != at as u64 || len as usize != due {
            let reason =
                format!("a piece of {len} values from {offset} on, which does not follow the one before");
            return Err(Wrong::Piece(reason));
        }
        sum_chunk::check(&packed, due).map_err(|e| Wrong::Piece(e.to_string()))?;
        self.next[seat] += 1;
        let parts = self.parts.entry(index).or_default();
        parts.push((seat, packed));
        let sharing = self.values.iter().filter(|values| touched(values).contains(&index)).count();
        if parts.len() == sharing {
            let parts = self.parts.remove(&index).unwrap_or_default();
            self.ready.insert(index, self.whole(index, parts).map_err(Wrong::Parts)?);
        }
        let mut out = VecDeque::new();
        while let Some(packed) = self.ready.remove(&self.out) {
            let (offset, len) = ((self.out * CELL) as u64, cell_len(self.len(), self.out) as u32);
            out.push_back(Cell { offset, len, packed });
            self.out += 1;
        }
        Ok(out)
    }

    /// Puts the parts of a cell together.
    fn whole(&self, index: usize, mut parts: Vec<(usize, Packed)>) -> Result<Packed, String> {
        if parts.len() == 1 {
            return Ok(parts.remove(0).1);
        }
        let (start, len) = (index * CELL, cell_len(self.len(), index));
        let within = |seat: usize| {
            let values = &self.values[seat];
            values.start.saturating_sub(start)..values.end.min(start + len) - start
        };
        if parts.iter().all(|(_, packed)| matches!(packed, Packed::Single(_))) {
            let mut cell = vec![0.0; len];
            for (seat, packed) in parts {
                let (range, Packed::Single(bytes)) = (within(seat), packed) else { continue };
                let (floats, _) = bytes.as_chunks::<4>();
                let floats = floats[range.clone()].iter().map(|bytes| f32::from_le_bytes(*bytes));
                cell[range].iter_mut().zip(floats).for_each(|(to, from): (&mut f32, f32)| *to = from);
            }
            return Ok(Packed::Single(little_endian(&cell)));
        }
        let mut cell = vec![0; len];
        for (seat, packed) in parts {
            let (range, Packed::Fixed(bytes)) = (within(seat), packed) else {
                return Err("parts of a sum of different numbers of microbatches".into());
            };
            let mut part = vec![0; range.end];
            pack::set(&bytes, &mut part, i64::MAX).map_err(|e| e.to_string())?;
            cell[range.clone()].copy_from_slice(&part[range]);
        }
        let mut bytes = Vec::new();
        pack::pack(&cell, &mut bytes);
        Ok(Packed::Fixed(bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::sum::Sums;

    /// How a sum is packed.
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Fixed,
        Single,
    }

    fn value(i: usize) -> f32 {
        ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 * 1e-6 - 8.0
    }

    /// The pieces of a seat, as its running sum makes them: local cells with zeros before the first value.
    fn pieces(values: &Range<usize>, kind: Kind) -> Vec<(u64, u32, Packed)> {
        let pad = values.start % CELL;
        let mut gradient = vec![0.0; pad];
        gradient.extend(values.clone().map(value));
        let mut sums = Sums::new(gradient.len());
        sums.add_gradient(&gradient, i64::MAX).unwrap();
        let all: Vec<ToCoordinator> = match kind {
            Kind::Single => sum_chunk::of_gradient(1, &gradient).collect(),
            Kind::Fixed => sum_chunk::of_sum(1, &sums).collect(),
        };
        let piece = |message| match message {
            ToCoordinator::SumPiece { offset, len, packed, .. } => (offset, len, packed),
            other => panic!("{other:?}"),
        };
        all.into_iter().map(piece).collect()
    }

    fn check(ends: &[usize], kind: Kind) {
        let starts = [0].into_iter().chain(ends.iter().copied());
        let values: Vec<Range<usize>> = starts.zip(ends).map(|(a, b)| a..*b).collect();
        let len = *ends.last().unwrap();
        let mut whole = Sums::new(len);
        whole.add_gradient(&(0..len).map(value).collect::<Vec<_>>(), i64::MAX).unwrap();
        // The seats above send first, and each one in its order.
        let mut cells = Cells::new(&values);
        let mut got = Sums::new(len);
        let mut at = 0;
        for (seat, values) in values.iter().enumerate().rev() {
            for (offset, count, packed) in pieces(values, kind) {
                for cell in cells.add(seat, (offset, count), packed).unwrap() {
                    assert_eq!(cell.offset, at as u64, "in order");
                    let to = &mut got.cells_mut()[at / CELL];
                    assert_eq!(cell.len as usize, to.len());
                    sum_chunk::add(&cell.packed, to, i64::MAX).unwrap();
                    at += cell.len as usize;
                }
            }
            assert!(cells.complete(seat));
        }
        assert_eq!(at, len);
        assert!(got == whole, "{ends:?}");
    }

    #[test]
    fn parts_of_seats_are_the_sum_of_the_whole() {
        for kind in [Kind::Fixed, Kind::Single] {
            check(&[40], kind);
            check(&[10, 25, 40], kind);
            check(&[CELL, 2 * CELL], kind);
            check(&[CELL + 1, CELL + 2, 3 * CELL + 17], kind);
            check(&[100, 5 * CELL + 3], kind);
        }
    }

    /// A wrong part is refused when it arrives, before other seats send theirs.
    #[test]
    fn wrong_part_of_a_shared_cell_is_found_when_it_arrives() {
        let single = |len: usize| Packed::Single(vec![0; len].into());
        for wrong in [single(36), Packed::Fixed(vec![0xff; 3].into())] {
            let mut cells = Cells::new(&[0..10, 10..20]);
            assert!(matches!(cells.add(0, (0, 10), wrong), Err(Wrong::Piece(_))));
        }
        let mut cells = Cells::new(&[0..10, 10..20]);
        assert!(cells.add(0, (0, 10), single(40)).unwrap().is_empty());
        let mut fixed = Vec::new();
        pack::pack(&[0; 20], &mut fixed);
        let mixed = cells.add(1, (0, 20), Packed::Fixed(fixed.into()));
        assert!(matches!(mixed, Err(Wrong::Parts(_))), "either may be at fault");
    }

    #[test]
    fn pieces_that_do_not_follow_are_refused() {
        let mut cells = Cells::new(&[0..10, 10..CELL + 5]);
        let packed = || Packed::Single(vec![0; 40].into());
        assert!(cells.add(0, (0, 9), packed()).is_err(), "too short");
        assert!(cells.add(1, (CELL as u64, 5), packed()).is_err(), "not the first");
        assert!(cells.add(0, (0, 10), packed()).unwrap().is_empty());
        assert!(cells.add(0, (0, 10), packed()).is_err(), "twice");
        assert!(cells.add(1, (0, CELL as u32), packed()).is_err(), "fewer bytes than values");
    }
}
