//! Memory with a record of its accesses: every access is checked for bounds, alignment, uninitialized contents, and for
//! races with accesses that no barrier orders.

use std::collections::BTreeMap;

/// The thread of an access, and its order: the barriers of the block and of the warp that the thread has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// Counts launches: accesses of earlier launches are ordered.
    pub launch: u32,
    pub block: u32,
    pub thread: u32,
    pub barriers: u32,
    pub warp_barriers: u32,
    /// Barriers of a part of the block, and their warps (a bit for each; 0 before the first).
    pub part_barriers: u32,
    pub part: u32,
}

const NO_THREAD: Who =
    Who { launch: 0, block: 0, thread: 0, barriers: 0, warp_barriers: 0, part_barriers: 0, part: 0 };
/// Represents several threads, or several blocks.
const MANY: u32 = u32::MAX;

impl Who {
    /// Whether the accesses of `self` are complete before `now`.
    fn before(&self, now: &Who) -> bool {
        self.launch != now.launch
            || (self.block == now.block
                && (self.thread == now.thread
                    || self.barriers < now.barriers
                    || (self.part != 0 && self.part == now.part && self.part_barriers < now.part_barriers)
                    || (self.thread != MANY
                        && self.thread / 32 == now.thread / 32
                        && self.warp_barriers < now.warp_barriers)))
    }
}

#[derive(Debug, Clone, Copy)]
struct Word {
    /// One bit per byte that has been written.
    written: u8,
    writer: Who,
    reader: Who,
    /// The launch that last wrote parts of it, and these bytes.
    parts: (u32, u8),
    /// The launch that last read it as constant.
    constant: u32,
}

/// A range of bytes with a record for each four of them.
pub struct Region {
    pub bytes: Vec<u8>,
    words: Vec<Word>,
}

impl Region {
    /// Uninitialized contents.
    pub fn new(len: usize) -> Region {
        let word = Word { written: 0, writer: NO_THREAD, reader: NO_THREAD, parts: (0, 0), constant: 0 };
        Region { bytes: vec![0; len], words: vec![word; len.div_ceil(4)] }
    }

    fn mask(at: usize, len: usize) -> impl Iterator<Item = (usize, u8)> {
        let end = at + len;
        (at / 4..end.div_ceil(4)).map(move |w| {
            let (from, to) = (at.max(4 * w) - 4 * w, end.min(4 * w + 4) - 4 * w);
            (w, (((1u16 << to) - 1) & !((1u16 << from) - 1)) as u8)
        })
    }

    /// The words of an access of 1, 2, 4, 8 or 16 aligned bytes, and which bytes of each.
    fn words(&mut self, at: usize, len: usize) -> (&mut [Word], u8) {
        let mask = if len < 4 { ((1 << len) - 1) << (at % 4) } else { 0b1111 };
        (&mut self.words[at / 4..][..len.div_ceil(4)], mask)
    }

    /// Checks a range and returns its first byte.
    fn bounds(&self, at: u64, len: usize) -> Result<usize, String> {
        if !len.is_power_of_two() || at & (len as u64 - 1) != 0 {
            return Err(format!("an access of {len} bytes at an address that is no multiple of it"));
        }
        match usize::try_from(at) {
            Ok(at) if at + len <= self.bytes.len() => Ok(at),
            _ => Err(format!("out of bounds: byte {at} of {}", self.bytes.len())),
        }
    }

    /// `len` bytes, at most 16, low bits first.
    pub fn read(&mut self, at: u64, len: usize, who: Who) -> Result<u128, String> {
        let at = self.bounds(at, len)?;
        let (words, mask) = self.words(at, len);
        for word in words {
            if word.written & mask != mask {
                return Err(format!("byte {at} is read but was never written"));
            }
            if !word.writer.before(&who) {
                let t = word.writer.thread;
                return Err(format!(
                    "byte {at} is read, and no barrier orders it after the write of thread {t}"
                ));
            }
            let old = word.reader;
            // Only the next launch is ordered after reads of several blocks: no later reader changes that.
            if old.launch == who.launch && old.block == MANY {
                continue;
            }
            word.reader = who;
            if !old.before(&who) {
                // Both are recorded from now on.
                word.reader = if old.block != who.block {
                    Who { block: MANY, ..who }
                } else {
                    Who { thread: MANY, ..who }
                };
            }
        }
        let from = &self.bytes[at..at + len];
        // Not through a zeroed array of 16 bytes: a load that is wider than the store before it waits for that store.
        Ok(match from.first_chunk::<4>() {
            Some(four) if len == 4 => u128::from(u32::from_le_bytes(*four)),
            _ => match from.first_chunk::<16>() {
                Some(all) => u128::from_le_bytes(*all),
                None => from.iter().rev().fold(0, |out, byte| out << 8 | u128::from(*byte)),
            },
        })
    }

    /// A read that the device may answer from a cache, which writes of this launch do not update.
    pub fn constant(&mut self, at: u64, len: usize, who: Who) -> Result<(), String> {
        let at = self.bounds(at, len)?;
        for word in self.words(at, len).0 {
            if word.writer.launch == who.launch {
                return Err(format!("byte {at} is read as constant, and this launch wrote it"));
            }
            word.constant = who.launch;
        }
        Ok(())
    }

    /// Checks and marks a write; the bytes follow with [`Region::bytes`].
    fn claim(&mut self, at: usize, len: usize, who: Who) -> Result<(), String> {
        let (words, mask) = self.words(at, len);
        for word in words {
            if word.constant == who.launch {
                return Err(format!("byte {at} is written, and this launch reads it as constant"));
            }
            // Bytes of one word may belong to different threads (bf16 outputs), but each byte to one.
            let again = word.parts.0 == who.launch && word.parts.1 & mask != 0;
            if (len >= 4 || again) && !word.writer.before(&who) {
                let t = word.writer.thread;
                return Err(format!(
                    "byte {at} is written, and no barrier orders it after the write of thread {t}"
                ));
            }
            if !word.reader.before(&who) {
                return Err(format!("byte {at} is written, and no barrier orders it after its reading"));
            }
            if len < 4 {
                let earlier = if word.parts.0 == who.launch { word.parts.1 } else { 0 };
                word.parts = (who.launch, earlier | mask);
            }
            word.writer = who;
            word.written |= mask;
        }
        Ok(())
    }

    pub fn write(&mut self, at: u64, bytes: &[u8], who: Who) -> Result<(), String> {
        let at = self.bounds(at, bytes.len())?;
        self.claim(at, bytes.len(), who)?;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// A write that may complete at any time from now on: until a wait for it, a read is an error.
    pub fn announce(&mut self, at: u64, len: usize, who: Who) -> Result<(), String> {
        let at = self.bounds(at, len)?;
        self.claim(at, len, who)?;
        self.forget(at, len);
        Ok(())
    }

    /// A write by the host, which is ordered with every launch.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        Self::mask(at, bytes.len()).for_each(|(w, mask)| self.words[w].written |= mask);
    }

    /// A read by the host.
    pub fn get(&self, at: usize, out: &mut [u8]) -> Result<(), String> {
        let all = Self::mask(at, out.len()).all(|(w, mask)| self.words[w].written & mask == mask);
        out.copy_from_slice(&self.bytes[at..at + out.len()]);
        if all { Ok(()) } else { Err("the host reads bytes that were never written".into()) }
    }

    /// Marks the contents as uninitialized.
    pub fn forget(&mut self, at: usize, len: usize) {
        Self::mask(at, len).for_each(|(w, mask)| self.words[w].written &= !mask);
    }
}

/// Global memory: regions with unmapped gaps.
#[derive(Default)]
pub struct Global {
    regions: BTreeMap<u64, Region>,
    next: u64,
}

impl Global {
    /// Uninitialized bytes; returns their address.
    pub fn alloc(&mut self, len: usize) -> u64 {
        let at = self.next.max(1 << 32);
        self.next = at + (len as u64).next_multiple_of(256) + 4096;
        self.regions.insert(at, Region::new(len));
        at
    }

    /// The number of allocations that are not freed.
    pub fn held(&self) -> usize {
        self.regions.len()
    }

    /// Frees an allocation; false if there is none at this address.
    pub fn free(&mut self, at: u64) -> bool {
        self.regions.remove(&at).is_some()
    }

    /// The region that an address belongs to, and the offset in it.
    pub fn find(&mut self, at: u64) -> Result<(&mut Region, u64), String> {
        match self.regions.range_mut(..=at).next_back() {
            Some((&base, region)) if at - base < region.bytes.len() as u64 + 2048 => Ok((region, at - base)),
            _ => Err(format!("address {at:#x} belongs to nothing")),
        }
    }
}
