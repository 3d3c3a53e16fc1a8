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

    /// What stands for memory after a fault: nothing is launched any more, so nobody looks at it.
    pub fn nothing(&self) -> Memory {
        Memory { address: 0, bytes: 0, lasts: Lasts::Verb, stamp: Stamp::default(), home: Arc::default() }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Launch;
    use super::*;

    impl Pool {
        /// A buffer of at least so many bytes.
        fn take(&mut self, card: &mut Card, bytes: usize) -> Result<Memory, Fault> {
            let bytes = class(bytes, card.granularity());
            let used = self.again(Lasts::Verb, bytes);
            used.map_or_else(|| self.make(card, Lasts::Verb, bytes), Ok)
        }
    }

    /// Memory alone, of a card of `room` bytes.
    pub struct Card {
        room: usize,
        held: BTreeMap<u64, usize>,
        next: u64,
        most: usize,
        /// What was launched and what was given back, in order.
        pub did: Vec<String>,
    }

    impl Card {
        pub fn of(room: usize) -> Self {
            Card { room, held: BTreeMap::new(), next: 1, most: 0, did: Vec::new() }
        }
        fn bytes(&self) -> usize {
            self.held.values().sum()
        }
    }

    impl Driver for Card {
        fn name(&self) -> &str {
            "card"
        }
        fn capability(&self) -> (u32, u32) {
            (7, 0)
        }
        fn granularity(&self) -> usize {
            512
        }
        fn alloc(&mut self, bytes: usize) -> Result<u64, Fault> {
            if self.bytes() + bytes > self.room {
                return Err(Fault::OutOfMemory { device: "card".into(), needed: bytes as u64 });
            }
            self.next += 1;
            self.held.insert(self.next, bytes);
            self.most = self.most.max(self.bytes());
            Ok(self.next)
        }
        fn free(&mut self, address: u64) {
            self.held.remove(&address).unwrap();
            self.did.push("free".into());
        }
        fn write(&mut self, _: u64, _: &[u8]) -> Result<(), Fault> {
            Ok(())
        }
        fn read(&mut self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
            Ok(())
        }
        fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
            self.did.push(launch.entry.into());
            Ok(())
        }
    }

    #[test]
    fn microbatches_of_many_lengths_hold_little_more_than_the_largest() {
        let (mut card, mut pool) = (Card::of(usize::MAX / 2), Pool::default());
        let mut largest = 0;
        for i in 0..300usize {
            let tokens = 100 + i * 7919 % 3989;
            let sizes = [tokens * 4 * 2560, tokens * 4 * 9728, tokens * 4 * 320];
            largest = largest.max(sizes.map(|b| class(b, 512)).iter().sum::<usize>());
            let taken: Vec<Memory> = sizes.map(|b| pool.take(&mut card, b).unwrap()).into();
            drop(taken);
        }
        assert!(card.most <= largest + largest / 2 + SPARE, "{} of {largest}", card.most);
        let before = pool.made;
        for _ in 0..3 {
            pool.take(&mut card, 4 * 100 * 320).unwrap();
        }
        assert!(pool.made <= before + 1, "the same size again makes nothing");
    }

    #[test]
    fn what_is_spare_goes_back_before_memory_is_out() {
        let (mut card, mut pool) = (Card::of(20 << 20), Pool::default());
        let small: Vec<Memory> = (0..8).map(|_| pool.take(&mut card, 2 << 20).unwrap()).collect();
        drop(small);
        let large = pool.take(&mut card, 16 << 20).unwrap();
        assert!(large.reaches(4 << 20) && !large.reaches((4 << 20) + 1));
        assert_eq!(card.held.len(), 1);
        assert!(matches!(pool.take(&mut card, 8 << 20), Err(Fault::OutOfMemory { .. })));
        drop(large);
        assert!(pool.take(&mut card, 8 << 20).is_ok(), "and a pool goes on after it");
    }

    #[test]
    fn the_same_work_has_the_same_addresses() {
        let (mut card, mut pool) = (Card::of(1 << 30), Pool::default());
        // Given back in an order of its own; what is taken again first is not what was given back last.
        let mut work = || {
            let mut held: Vec<Memory> = (0..6).map(|_| pool.take(&mut card, 1 << 20).unwrap()).collect();
            let addresses: Vec<u64> = held.iter().map(|m| m.at(0)).collect();
            held.swap_remove(2);
            held.swap_remove(0);
            (addresses, pool.take(&mut card, 1 << 20).unwrap().at(0))
        };
        let first = work();
        assert!(work() == first && work() == first);
    }

    #[test]
    fn integers_are_not_written_again_before_what_reads_them_is_sent() {
        let (mut card, mut pool) = (Card::of(1 << 30), Pool::default());
        let bytes = class(400, 512);
        let first = pool.make(&mut card, Lasts::List, bytes).unwrap();
        let address = first.at(0);
        drop(first);
        assert!(pool.again(Lasts::List, bytes).is_none(), "what reads them may still wait");
        pool.sent();
        assert!(
            pool.again(Lasts::Verb, bytes).is_none(),
            "a kernel that waits may write what is not integers"
        );
        assert_eq!(pool.again(Lasts::List, bytes).unwrap().at(0), address);
        pool.sent();
        assert!(pool.freeze(&mut card, 1 << 30).is_ok(), "where the card is full they go back");
    }

    #[test]
    fn a_frozen_matrix_takes_what_it_needs_and_counts_for_no_peak() {
        let (mut card, mut pool) = (Card::of(1 << 40), Pool::default());
        let exact = (1 << 30) + 512;
        let frozen: Vec<Memory> = (0..4).map(|_| pool.freeze(&mut card, exact).unwrap()).collect();
        assert_eq!(card.bytes(), 4 * exact, "no class of sizes");
        for i in 0..40 {
            pool.take(&mut card, (8 + i) << 20).unwrap();
        }
        assert!(card.bytes() <= 4 * exact + (48 << 20) * 3 / 2 + SPARE, "{} bytes", card.bytes());
        drop(frozen);
        pool.take(&mut card, 100 << 20).unwrap();
        assert!(card.bytes() < 1 << 30, "a model that is gone has given its memory back");
    }

    #[test]
    fn two_devices_of_a_card_stay_within_their_budgets() {
        let mut card = Card::of(32 << 20);
        let mut pools = [Pool::default(), Pool::default()];
        for pool in &mut pools {
            pool.within(16 << 20);
        }
        let [one, two] = &mut pools;
        let _weights = one.freeze(&mut card, 6 << 20).unwrap();
        // One after the other: what lies spare would add up to more than the budget.
        for bytes in [4 << 20, 6 << 20, 8 << 20] {
            one.take(&mut card, bytes).unwrap();
        }
        assert!(card.bytes() <= 16 << 20, "{} bytes", card.bytes());
        assert!(matches!(one.take(&mut card, 12 << 20), Err(Fault::OutOfMemory { .. })));
        assert!(matches!(one.freeze(&mut card, 12 << 20), Err(Fault::OutOfMemory { .. })));
        assert!(two.take(&mut card, 16 << 20).is_ok(), "the other one has its half");
    }
}
