//! Device memory. A buffer that is dropped or recycled goes to a list of its size and is used again by whoever next
//! asks for that size: in the steady state nothing is allocated, and because it is the one with the lowest address, the
//! same work has the same addresses. Everything runs in order on one stream, so a buffer
//! may be written again before what reads it has run; those of integers, which are written ahead of launches that wait,
//! are apart, and used again once those are sent. Sizes are rounded to classes, four to a doubling; on a miss spare
//! buffers are given back, the largest first, until what is held is within half as much again as the most that was ever
//! in use at once, and a little more: microbatches of many lengths must not fill the card; nor may they fill more of it
//! than its budget, because another device of the same process may be on the same card. Frozen matrices have exactly
//! the size that they need, and are in no class: they stay.

use super::Driver;
use super::copies::Stamp;
use crate::backend::Fault;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that may always lie spare: classes peak at different moments.
const SPARE: usize = 64 << 20;
/// The smallest class of a driver that has classes.
const LEAST: usize = 512;

/// Device memory of one owner.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    lasts: Lasts,
    stamp: Stamp,
    home: Arc<Mutex<Held>>,
}

/// What becomes of memory that nobody needs any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasts {
    /// It is used again.
    Verb,
    /// It is used again once all that waits is sent.
    List,
    /// It goes back to the device.
    Model,
}

impl Memory {
    /// The address of element `offset` of four bytes.
    pub(super) fn at(&self, offset: usize) -> u64 {
        self.address + 4 * offset as u64
    }

    /// What it holds.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Whether values of four bytes up to `end` are in it. What stands for memory after a fault has room for all:
    /// nothing is launched with it.
    pub(super) fn reaches(&self, end: usize) -> bool {
        self.address == 0 || 4 * end <= self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        lock(&self.home).give(self.address, self.bytes, self.lasts);
    }
}

/// What the device holds for one owner.
#[derive(Debug)]
struct Held {
    /// Addresses that nobody uses, by size.
    spare: BTreeMap<usize, BTreeSet<u64>>,
    /// The same of integers.
    integers: BTreeMap<usize, BTreeSet<u64>>,
    /// Integers that nobody needs any more, once all that waits is sent.
    waiting: Vec<(u64, usize)>,
    spare_bytes: usize,
    live: usize,
    peak: usize,
    /// The most that was in use since somebody asked.
    since: usize,
    /// Bytes of frozen matrices.
    frozen: usize,
    /// Frozen matrices that nobody needs any more, until somebody has the driver at hand.
    over: Vec<(u64, usize)>,
    /// Bytes that may be held, whatever for.
    budget: usize,
}

impl Default for Held {
    fn default() -> Self {
        Held {
            spare: BTreeMap::new(),
            integers: BTreeMap::new(),
            waiting: Vec::new(),
            spare_bytes: 0,
            live: 0,
            peak: 0,
            since: 0,
            frozen: 0,
            over: Vec::new(),
            budget: usize::MAX,
        }
    }
}

impl Held {
    fn give(&mut self, address: u64, bytes: usize, lasts: Lasts) {
        match lasts {
            Lasts::Model => return self.over.push((address, bytes)),
            Lasts::List => self.waiting.push((address, bytes)),
            Lasts::Verb => {
                self.spare.entry(bytes).or_default().insert(address);
            }
        }
        self.live = self.live.saturating_sub(bytes);
        self.spare_bytes += bytes;
    }

    /// The one with the lowest address.
    fn pop(&mut self, lasts: Lasts, bytes: usize) -> Option<u64> {
        let all = if lasts == Lasts::List { &mut self.integers } else { &mut self.spare };
        let same = all.get_mut(&bytes)?;
        let found = same.pop_first();
        if same.is_empty() {
            all.remove(&bytes);
        }
        self.spare_bytes -= found.map_or(0, |_| bytes);
        found
    }

    fn all(&self) -> usize {
        self.live + self.spare_bytes + self.frozen
    }

    /// Bytes that may be held once `wanted` more are in use.
    fn most(&self, wanted: usize) -> usize {
        let peak = self.peak.max(self.live + wanted);
        (peak + peak / 2 + SPARE).saturating_add(self.frozen).min(self.budget)
    }

    /// Gives spare buffers back, the largest first, until at most `most` bytes are held once `wanted` come.
    fn shrink(&mut self, driver: &mut impl Driver, most: usize, wanted: usize) {
        for (address, bytes) in std::mem::take(&mut self.over) {
            self.frozen -= bytes;
            driver.free(address);
        }
        while self.all().saturating_add(wanted) > most {
            let largest = |all: &BTreeMap<usize, _>| all.last_key_value().map(|(bytes, _)| *bytes);
            let verbs = largest(&self.spare).map(|bytes| (Lasts::Verb, bytes));
            let Some((lasts, bytes)) = verbs.or_else(|| Some((Lasts::List, largest(&self.integers)?))) else {
                return;
            };
            self.pop(lasts, bytes).into_iter().for_each(|address| driver.free(address));
        }
    }

    /// New memory, within the budget. Where the device has no more, everything spare is given back first.
    fn make(&mut self, driver: &mut impl Driver, bytes: usize) -> Result<u64, Fault> {
        if self.all().saturating_add(bytes) > self.budget {
            return Err(Fault::OutOfMemory { device: driver.name().into(), needed: bytes as u64 });
        }
        match driver.alloc(bytes) {
            Err(Fault::OutOfMemory { .. }) => {
                self.shrink(driver, 0, bytes);
                driver.alloc(bytes)
            }
            other => other,
        }
    }

    fn uses(&mut self, bytes: usize) {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        self.since = self.since.max(self.live);
    }
}

fn lock(held: &Mutex<Held>) -> MutexGuard<'_, Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The size that a request gets. A driver whose sizes are exact (a test's) keeps them, so that one byte beyond a matrix
/// is found.
pub(super) fn class(bytes: usize, granularity: usize) -> usize {
    match granularity {
        1 => bytes.max(4),
        _ => {
            let bytes = bytes.max(LEAST);
            bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(granularity))
        }
    }
}

/// Hands out buffers.
#[derive(Debug, Default)]
pub(super) struct Pool {
    held: Arc<Mutex<Held>>,
    /// Buffers made so far.
    pub made: u64,
}

impl Pool {
    /// A buffer of a class that lies spare. What it holds means nothing.
    pub fn again(&mut self, lasts: Lasts, bytes: usize) -> Option<Memory> {
        let mut held = lock(&self.held);
        let address = held.pop(lasts, bytes)?;
        held.uses(bytes);
        Some(Memory { address, bytes, lasts, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// A new buffer of a class, where nothing has to be let go of for it.
    pub fn add(&mut self, driver: &mut impl Driver, lasts: Lasts, bytes: usize) -> Option<Memory> {
        let mut held = lock(&self.held);
        if !held.over.is_empty() || held.all().saturating_add(bytes) > held.most(bytes) {
            return None;
        }
        let address = driver.alloc(bytes).ok()?;
        held.uses(bytes);
        self.made += 1;
        Some(Memory { address, bytes, lasts, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// A new buffer of a class. Where the device has no more, everything spare is given back first: nothing waits that
    /// has to do with it.
    pub fn make(&mut self, driver: &mut impl Driver, lasts: Lasts, bytes: usize) -> Result<Memory, Fault> {
        let mut held = lock(&self.held);
        let most = held.most(bytes);
        held.shrink(driver, most, bytes);
        let address = held.make(driver, bytes)?;
        held.uses(bytes);
        self.made += 1;
        Ok(Memory { address, bytes, lasts, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// All that waited is sent.
    pub fn sent(&mut self) {
        let mut held = lock(&self.held);
        for (address, bytes) in std::mem::take(&mut held.waiting) {
            held.integers.entry(bytes).or_default().insert(address);
        }
    }

    /// Memory of exactly so many bytes, for a frozen matrix.
    pub fn freeze(&mut self, driver: &mut impl Driver, bytes: usize) -> Result<Memory, Fault> {
        let bytes = bytes.max(4);
        let mut held = lock(&self.held);
        let budget = held.budget;
        held.shrink(driver, budget, bytes);
        let address = held.make(driver, bytes)?;
        held.frozen += bytes;
        self.made += 1;
        Ok(Memory { address, bytes, lasts: Lasts::Model, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// So many bytes may be held from now on.
    pub fn within(&mut self, bytes: u64) {
        lock(&self.held).budget = usize::try_from(bytes).unwrap_or(usize::MAX);
    }

    /// The most bytes that were in use at once since this was last asked, frozen matrices apart.
    pub fn peak(&mut self) -> u64 {
        let mut held = lock(&self.held);
        let live = held.live;
        std::mem::replace(&mut held.since, live) as u64
    }

    /// Buffers made, the most that was ever in use, the most since somebody asked.
    pub fn counts(&self) -> (u64, usize, usize) {
        let held = lock(&self.held);
        (self.made, held.peak, held.since)
    }

    /// As if nothing had been asked of it since those counts: what lies spare goes back. Nothing waits that has to do with it.
    pub fn restore(&mut self, driver: &mut impl Driver, (made, peak, since): (u64, usize, usize)) {
        let mut held = lock(&self.held);
        held.shrink(driver, 0, 0);
        (self.made, held.peak, held.since) = (made, peak, since);
    }

    /// What stands for memory after a fault: nothing is launched any more, so nobody looks at it.
    pub fn nothing(&self) -> Memory {
        Memory { address: 0, bytes: 0, lasts: Lasts::Verb, stamp: Stamp::default(), home: Arc::default() }
    }
}

#[cfg(test)]
pub(super) mod tests;
