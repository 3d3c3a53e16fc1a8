//! Memory: 64-byte aligned f32 values, or bf16 numbers in pairs, recycled. Tests ask for poison: whatever is handed out is then full of
//! NaN, so that a verb that reads values that were never written is detected in any build.
//!
//! A buffer that is asked for takes the smallest free one that it fills by at least three quarters. On a
//! miss, free buffers are let go, the largest first, until what is held with the new one is within a quarter
//! of the most that was ever in use at once: microbatches of changing sizes do not hoard.

use std::collections::BTreeMap;

/// One cache line.
#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Line([f32; LINE]);
const LINE: usize = 16;

/// f32 values, or bf16 numbers in pairs, aligned to cache lines.
#[derive(Default)]
pub struct Memory {
    lines: Vec<Line>,
    /// Words of 32 bits.
    len: usize,
    /// The words are pairs.
    short: bool,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} {})", self.len, if self.short { "pairs" } else { "values" })
    }
}

impl Memory {
    /// Zeros.
    pub fn zeros(len: usize) -> Memory {
        Memory { lines: vec![Line([0.0; LINE]); len.div_ceil(LINE)], len, short: false }
    }

    /// Whether it holds pairs of bf16 numbers, the first of each in the upper half.
    pub fn is_short(&self) -> bool {
        self.short
    }

    /// The values.
    pub fn values(&self) -> &[f32] {
        assert!(!self.short, "this verb takes no numbers in 16 bits");
        &bytemuck::cast_slice::<Line, f32>(&self.lines)[..self.len]
    }

    /// The values, to write.
    pub fn values_mut(&mut self) -> &mut [f32] {
        assert!(!self.short, "this verb takes no numbers in 16 bits");
        &mut bytemuck::cast_slice_mut::<Line, f32>(&mut self.lines)[..self.len]
    }

    /// The pairs.
    pub fn pairs(&self) -> &[u32] {
        assert!(self.short, "numbers in 16 bits");
        &bytemuck::cast_slice::<Line, u32>(&self.lines)[..self.len]
    }

    /// The pairs, to write.
    pub fn pairs_mut(&mut self) -> &mut [u32] {
        assert!(self.short, "numbers in 16 bits");
        &mut bytemuck::cast_slice_mut::<Line, u32>(&mut self.lines)[..self.len]
    }
}

/// Bytes of that many lines.
pub fn bytes(lines: usize) -> u64 {
    (lines * size_of::<Line>()) as u64
}

/// Memory in cache lines, or, for a dry run, only their number.
pub trait Lines {
    /// That many, zeroed.
    fn zeros(lines: usize) -> Self;
    /// Their number.
    fn count(&self) -> usize;
}

impl Lines for Vec<Line> {
    fn zeros(lines: usize) -> Self {
        vec![Line([0.0; LINE]); lines]
    }

    fn count(&self) -> usize {
        self.len()
    }
}

impl Lines for usize {
    fn zeros(lines: usize) -> Self {
        lines
    }

    fn count(&self) -> usize {
        *self
    }
}

/// Free buffers and what is in use.
#[derive(Debug, Clone)]
pub struct Recycling<L = Vec<Line>> {
    /// By lines.
    free: BTreeMap<usize, Vec<L>>,
    free_lines: usize,
    live_lines: usize,
    peak_lines: usize,
    /// The most that was in use since somebody asked.
    since_lines: usize,
    poison: bool,
}

impl<L> Default for Recycling<L> {
    fn default() -> Self {
        let (free_lines, live_lines, peak_lines, since_lines) = (0, 0, 0, 0);
        Recycling { free: BTreeMap::new(), free_lines, live_lines, peak_lines, since_lines, poison: false }
    }
}

impl Recycling {
    /// Fills with NaN whatever it hands out.
    pub fn poisoning() -> Recycling {
        Recycling { poison: true, ..Recycling::default() }
    }

    /// A buffer of `len` values of unspecified contents.
    pub fn take(&mut self, len: usize) -> Memory {
        let mut memory = Memory { lines: self.take_room(len), len, short: false };
        if self.poison {
            // Both halves of it are NaN in bf16.
            memory.values_mut().fill(f32::from_bits(0x7fc0_7fc0));
        }
        memory
    }

    /// The same of that many pairs.
    pub fn take_pairs(&mut self, pairs: usize) -> Memory {
        Memory { short: true, ..self.take(pairs) }
    }

    /// Takes a buffer back.
    pub fn give(&mut self, memory: Memory) {
        self.give_room(memory.lines);
    }
}

impl<L: Lines> Recycling<L> {
    /// Lines for `words` words of unspecified contents.
    pub fn take_room(&mut self, words: usize) -> L {
        let lines = words.div_ceil(LINE);
        let fits = self.free.range(lines..=lines + lines / 3).next().map(|(&size, _)| size);
        let room = fits.and_then(|size| self.pop(size)).unwrap_or_else(|| {
            self.peak_lines = self.peak_lines.max(self.live_lines + lines);
            self.shrink(lines);
            L::zeros(lines)
        });
        self.live_lines += room.count();
        self.peak_lines = self.peak_lines.max(self.live_lines);
        self.since_lines = self.since_lines.max(self.live_lines);
        room
    }

    /// Takes lines back.
    pub fn give_room(&mut self, room: L) {
        let lines = room.count();
        // A buffer that was made outside (Memory::zeros) is welcome too.
        self.live_lines = self.live_lines.saturating_sub(lines);
        self.free_lines += lines;
        self.free.entry(lines).or_default().push(room);
    }

    /// The most bytes that were in use at once since this was last asked.
    pub fn peak(&mut self) -> u64 {
        bytes(std::mem::replace(&mut self.since_lines, self.live_lines))
    }

    /// Bytes in use.
    pub fn live(&self) -> u64 {
        bytes(self.live_lines)
    }

    fn pop(&mut self, size: usize) -> Option<L> {
        let same = self.free.get_mut(&size)?;
        let found = same.pop();
        if same.is_empty() {
            self.free.remove(&size);
        }
        self.free_lines -= found.as_ref().map_or(0, L::count);
        found
    }

    fn shrink(&mut self, wanted: usize) {
        let most = self.peak_lines + self.peak_lines / 4;
        while self.live_lines + self.free_lines + wanted > most {
            let Some((&size, _)) = self.free.last_key_value() else { break };
            self.pop(size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_excess_is_freed() {
        let mut pool = Recycling::poisoning();
        let a = pool.take(1000);
        let address = a.values().as_ptr();
        assert_eq!(address as usize % 64, 0);
        let poisoned = |m: &Memory| m.values().iter().all(|v| v.is_nan());
        assert!(poisoned(&a));
        pool.give(a);
        let mut b = pool.take(900);
        assert_eq!((b.values().as_ptr(), b.values().len()), (address, 900));
        b.values_mut().fill(1.0);
        pool.give(b);
        let c = pool.take(1000);
        assert!(poisoned(&c), "again");
        pool.give(c);
        for len in (1..200).map(|i| i * 977 % 5000 + 1) {
            let m = pool.take(len);
            pool.give(m);
            assert!(pool.free_lines * LINE <= 5000 * 5 / 4 + 2 * LINE, "{}", pool.free_lines);
        }
        pool.peak();
        assert_eq!(pool.peak(), 0, "nothing is in use");
        // The pool holds nothing larger than what is asked for.
        let mut pool = Recycling::default();
        let (one, two) = (pool.take(160), pool.take(320));
        pool.give(two);
        assert_eq!((pool.peak(), pool.peak()), (4 * 480, 4 * 160), "the most, then what is left");
        pool.give(one);
        let none = pool.take(0);
        assert!(none.values().is_empty());
    }
}
