//! Dealing of open items in thought: each falls to the device that would finish it first after all that it already has.
//!
//! A device that finishes first is looked for in blocks of devices. A block is skipped if the lower bound of its finishes
//! is later than a finish that was found; the bounds are those of the smallest of the next items. So the result is that
//! of looking at every device for every item.

use super::slot::Slot;

/// Devices of a block.
const BLOCK: usize = 32;

/// Items that are dealt with the same bounds.
const ITEMS: usize = 64;

/// The devices, with what they got in thought. A device that may not have any lease is never free.
struct Thought<'s> {
    slots: &'s [Slot],
    free: Vec<f64>,
    lead: Vec<f64>,
    each: Vec<f64>,
    work: Vec<f64>,
    held: Vec<usize>,
    /// Number of devices with room.
    rooms: usize,
    /// The lower bound of each block's finishes.
    bounds: Vec<f64>,
    /// Tokens to which the bounds belong.
    least: f64,
}

impl<'s> Thought<'s> {
    fn of(slots: &'s [Slot]) -> Self {
        let free = |s: &Slot| if s.limit > 0 { s.free } else { f64::INFINITY };
        Thought {
            slots,
            free: slots.iter().map(free).collect(),
            lead: slots.iter().map(|s| s.lead).collect(),
            each: slots.iter().map(|s| s.each).collect(),
            work: slots.iter().map(|s| s.work).collect(),
            held: slots.iter().map(|s| s.held).collect(),
            rooms: slots.iter().filter(|s| s.has_room()).count(),
            bounds: Vec::new(),
            least: 0.0,
        }
    }

    fn finish(&self, slot: usize, tokens: f64) -> f64 {
        self.free[slot] + (tokens + self.lead[slot]) * self.each[slot]
    }

    /// The first of the earliest finishes of a block for an item.
    fn first_of(&self, block: usize, tokens: f64) -> (f64, usize) {
        let from = block * BLOCK;
        let mut first = (f64::INFINITY, usize::MAX);
        for slot in from..self.free.len().min(from + BLOCK) {
            let finish = self.finish(slot, tokens);
            if finish < first.0 || first.1 == usize::MAX {
                first = (finish, slot);
            }
        }
        first
    }

    /// Sets the bounds for items of at least these tokens.
    fn bound(&mut self, least: f64) {
        self.least = least;
        let blocks = 0..self.free.len().div_ceil(BLOCK);
        self.bounds = blocks.map(|block| self.first_of(block, least).0).collect();
    }

    /// The device that finishes an item first, and when: the first such device.
    fn first(&self, tokens: f64) -> Option<(usize, f64)> {
        let (likely, _) = self.bounds.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1))?;
        let mut first = self.first_of(likely, tokens);
        for (block, bound) in self.bounds.iter().enumerate() {
            if *bound <= first.0 && block != likely {
                let other = self.first_of(block, tokens);
                if other.0 < first.0 || (other.0 == first.0 && other.1 < first.1) {
                    first = other;
                }
            }
        }
        Some((first.1, first.0))
    }

    /// Gives an item to a device in thought. Returns whether the device had room for it.
    fn give(&mut self, slot: usize, tokens: f64, finish: f64) -> bool {
        let room = self.has_room(slot);
        self.rooms -= usize::from(room);
        self.held[slot] += usize::from(room);
        self.work[slot] += (tokens + self.lead[slot]) * self.each[slot];
        self.free[slot] = finish;
        self.rooms += usize::from(self.has_room(slot));
        self.bounds[slot / BLOCK] = self.first_of(slot / BLOCK, self.least).0;
        room
    }

    fn has_room(&self, slot: usize) -> bool {
        self.slots[slot].has_room_with(self.held[slot], self.work[slot])
    }
}

/// The items, numbers and tokens, in the order in which they are dealt: the slot to which each falls, and the
/// item if that slot has room for it. It ends when no slot has room: a device without room has work already.
pub(super) fn deal(items: impl Iterator<Item = (usize, u64)>, slots: &[Slot]) -> Vec<(Option<usize>, usize)> {
    let mut dealt = Vec::new();
    let mut items = items.peekable();
    if items.peek().is_none() || !slots.iter().any(Slot::has_room) {
        return dealt;
    }
    let mut thought = Thought::of(slots);
    while thought.rooms > 0 && items.peek().is_some() {
        let next: Vec<(usize, u64)> = items.by_ref().take(ITEMS).collect();
        thought.bound(next.iter().map(|(_, tokens)| *tokens).min().unwrap_or(0) as f64);
        for (item, tokens) in next {
            let tokens = tokens as f64;
            let Some((slot, finish)) = thought.first(tokens).filter(|_| thought.rooms > 0) else {
                return dealt;
            };
            let room = thought.give(slot, tokens, finish);
            dealt.push((room.then_some(item), slot));
        }
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::rng::Stream;

    /// Every device looked at for every item.
    fn plainly(items: &[(usize, u64)], slots: &mut [Slot]) -> Vec<(Option<usize>, usize)> {
        let mut dealt = Vec::new();
        for &(item, tokens) in items {
            if !slots.iter().any(Slot::has_room) {
                break;
            }
            let cost = |s: &Slot| (tokens as f64 + s.lead) * s.each;
            let finish = |s: &Slot| if s.limit > 0 { s.free + cost(s) } else { f64::INFINITY };
            let finishes = slots.iter().map(finish).enumerate();
            let (first, at) = finishes.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            let slot = &mut slots[first];
            let room = slot.has_room();
            slot.free = at;
            slot.held += usize::from(room);
            slot.work += cost(slot);
            dealt.push((room.then_some(item), first));
        }
        dealt
    }

    #[test]
    fn skipped_blocks_have_no_earlier_finish() {
        let mut most = 0;
        for seed in 0..300 {
            let mut draws = Stream::new(&[seed]);
            let mut below = |n: u64| (f64::from(draws.unit()) * n as f64) as u64;
            // Few values of each number, so that many finishes are equal.
            let count = 1 + below(150);
            let mut slots: Vec<Slot> = (0..count)
                .map(|_| {
                    let [each, lead, free, work] =
                        [1 + below(3), below(2) * 8, below(4) * 500, below(2) * 900];
                    let times = [each, lead, free, work].map(|x| x as f64);
                    Slot::made_up(times, (below(3) as usize, below(2) as usize))
                })
                .collect();
            let mut items: Vec<(usize, u64)> = (0..200).map(|i| (i, 1 + below(40) * 10)).collect();
            items.sort_by_key(|&(_, tokens)| std::cmp::Reverse(tokens));
            let dealt = deal(items.iter().copied(), &slots);
            assert_eq!(dealt, plainly(&items, &mut slots), "seed {seed}, {count} devices");
            most = most.max(dealt.len());
        }
        assert!(most > ITEMS, "{most} items are dealt at most");
    }
}
