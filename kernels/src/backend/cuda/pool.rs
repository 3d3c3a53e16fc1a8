//! Device memory. A buffer that is dropped or recycled goes to a list of its size and is reused for the next request of
//! that size, so that the steady state allocates nothing. The buffer with the lowest address is reused first, so that
//! the same work has the same addresses. All work runs in order on one stream, so a buffer may be written again before
//! its earlier readers have run. Buffers of integers are written ahead of the waiting launches; they are pooled
//! separately and reused once those launches are sent. Sizes are rounded to classes, four per doubling. On a miss,
//! spare buffers are freed, the largest first, until at most 1.5 times the peak use plus [`SPARE`] is held, so that
//! microbatches of many lengths do not fill the card. The budget is a further limit, because another device of the same
//! process may use the same card. Frozen matrices have their exact size and no class.

use super::Driver;
use super::copies::Stamp;
use crate::backend::Fault;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that may always be spare: classes peak at different moments.
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

/// What happens to released memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasts {
    /// It is reused at once.
    Verb,
    /// It is reused after the waiting launches are sent.
    List,
    /// It is freed.
    Model,
    /// The next frozen matrix of the same size takes it.
    Slot,
}

impl Memory {
    /// The address of element `offset` of four bytes.
    pub(super) fn at(&self, offset: usize) -> u64 {
        self.address + 4 * offset as u64
    }

    /// The version of its contents.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// Whether it holds values of four bytes up to `end`. The placeholder after a fault holds any number, because no
    /// launch uses it.
    pub(super) fn reaches(&self, end: usize) -> bool {
        self.address == 0 || 4 * end <= self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        lock(&self.home).give(self.address, self.bytes, self.lasts);
    }
}

/// The device memory of one owner.
#[derive(Debug)]
struct Held {
    /// Free addresses by size.
    spare: BTreeMap<usize, BTreeSet<u64>>,
    /// Free addresses of integers by size.
    integers: BTreeMap<usize, BTreeSet<u64>>,
    /// Integers that become free when the waiting launches are sent.
    waiting: Vec<(u64, usize)>,
    spare_bytes: usize,
    live: usize,
    peak: usize,
    /// The peak use since it was last read.
    since: usize,
    /// Bytes of frozen matrices.
    frozen: usize,
    /// Frozen matrices of a model that is gone, freed at the next call with a driver.
    over: Vec<(u64, usize)>,
    /// Released frozen matrices, the oldest first. The next matrix of the same size takes one.
    vacant: Vec<(u64, usize)>,
    /// Most bytes that may be held in total.
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
            vacant: Vec::new(),
            budget: usize::MAX,
        }
    }
}

impl Held {
    fn give(&mut self, address: u64, bytes: usize, lasts: Lasts) {
        match lasts {
            Lasts::Model => return self.over.push((address, bytes)),
            Lasts::Slot => return self.vacant.push((address, bytes)),
            Lasts::List => self.waiting.push((address, bytes)),
            Lasts::Verb => {
                self.spare.entry(bytes).or_default().insert(address);
            }
        }
        self.live = self.live.saturating_sub(bytes);
        self.spare_bytes += bytes;
    }

    /// Takes the free buffer with the lowest address.
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

    /// Frees released matrices, then spare buffers, the largest first, until at most `most` bytes are held after
    /// `wanted` more.
    fn shrink(&mut self, driver: &mut impl Driver, most: usize, wanted: usize) {
        for (address, bytes) in std::mem::take(&mut self.over) {
            self.frozen -= bytes;
            driver.free(address);
        }
        while self.all().saturating_add(wanted) > most {
            if let Some((address, bytes)) = self.vacant.pop() {
                self.frozen -= bytes;
                driver.free(address);
                continue;
            }
            let largest = |all: &BTreeMap<usize, _>| all.last_key_value().map(|(bytes, _)| *bytes);
            let verbs = largest(&self.spare).map(|bytes| (Lasts::Verb, bytes));
            let Some((lasts, bytes)) = verbs.or_else(|| Some((Lasts::List, largest(&self.integers)?))) else {
                return;
            };
            self.pop(lasts, bytes).into_iter().for_each(|address| driver.free(address));
        }
    }

    /// Allocates within the budget. If the device is full, frees all spare buffers and retries.
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

/// The rounded size of a request. A driver with exact sizes (a test's) keeps them, so that an access one byte beyond a
/// matrix is found.
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
    /// Number of buffers allocated.
    pub made: u64,
}

impl Pool {
    /// A spare buffer of a class, with undefined contents.
    pub fn again(&mut self, lasts: Lasts, bytes: usize) -> Option<Memory> {
        let mut held = lock(&self.held);
        let address = held.pop(lasts, bytes)?;
        held.uses(bytes);
        Some(Memory { address, bytes, lasts, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// A new buffer of a class, if no other memory must be freed for it.
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

    /// A new buffer of a class. If the device is full, frees all spare buffers first: no waiting launch uses them.
    pub fn make(&mut self, driver: &mut impl Driver, lasts: Lasts, bytes: usize) -> Result<Memory, Fault> {
        let mut held = lock(&self.held);
        let most = held.most(bytes);
        held.shrink(driver, most, bytes);
        let address = held.make(driver, bytes)?;
        held.uses(bytes);
        self.made += 1;
        Ok(Memory { address, bytes, lasts, stamp: Stamp::default(), home: self.held.clone() })
    }

    /// Marks the waiting launches as sent.
    pub fn sent(&mut self) {
        let mut held = lock(&self.held);
        for (address, bytes) in std::mem::take(&mut held.waiting) {
            held.integers.entry(bytes).or_default().insert(address);
        }
    }

    /// Takes back the memory of a frozen matrix for the next one of the same size.
    pub fn vacate(&self, mut memory: Memory) {
        memory.lasts = Lasts::Slot;
    }

    /// Memory of exactly `bytes` bytes, for a frozen matrix. No waiting launch may use a released one.
    pub fn freeze(&mut self, driver: &mut impl Driver, bytes: usize) -> Result<Memory, Fault> {
        let bytes = bytes.max(4);
        let mut held = lock(&self.held);
        let memory = |address| {
            let (lasts, home) = (Lasts::Model, self.held.clone());
            Memory { address, bytes, lasts, stamp: Stamp::default(), home }
        };
        if let Some(at) = held.vacant.iter().position(|(_, size)| *size == bytes) {
            let (address, _) = held.vacant.remove(at);
            driver.forget(address, bytes);
            return Ok(memory(address));
        }
        let budget = held.budget;
        held.shrink(driver, budget, bytes);
        let address = held.make(driver, bytes)?;
        held.frozen += bytes;
        self.made += 1;
        Ok(memory(address))
    }

    /// Limits the memory held from now on.
    pub fn within(&mut self, bytes: u64) {
        lock(&self.held).budget = usize::try_from(bytes).unwrap_or(usize::MAX);
    }

    /// Peak use in bytes since the last call, without frozen matrices.
    pub fn peak(&mut self) -> u64 {
        let mut held = lock(&self.held);
        let live = held.live;
        std::mem::replace(&mut held.since, live) as u64
    }

    /// Buffers allocated, peak use, peak use since it was last read.
    pub fn counts(&self) -> (u64, usize, usize) {
        let held = lock(&self.held);
        (self.made, held.peak, held.since)
    }

    /// Restores earlier counts and frees spare buffers. No waiting launch uses them.
    pub fn restore(&mut self, driver: &mut impl Driver, (made, peak, since): (u64, usize, usize)) {
        let mut held = lock(&self.held);
        held.shrink(driver, 0, 0);
        (self.made, held.peak, held.since) = (made, peak, since);
    }

    /// A placeholder for memory after a fault, when nothing is launched.
    pub fn nothing(&self) -> Memory {
        Memory { address: 0, bytes: 0, lasts: Lasts::Verb, stamp: Stamp::default(), home: Arc::default() }
    }
}

#[cfg(test)]
pub(super) mod tests;
