//! The pool alone, on a card of limited memory.

use super::super::Launch;
use super::*;

impl Pool {
    /// A buffer of at least `bytes` bytes.
    fn take(&mut self, card: &mut Card, bytes: usize) -> Result<Memory, Fault> {
        let bytes = class(bytes, card.granularity());
        let used = self.again(Lasts::Verb, bytes);
        used.map_or_else(|| self.make(card, Lasts::Verb, bytes), Ok)
    }
}

/// The memory of a card with `room` bytes.
pub struct Card {
    room: usize,
    held: BTreeMap<u64, usize>,
    next: u64,
    most: usize,
    /// Launches and frees, in order.
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
fn pool_holds_little_more_than_the_largest_microbatch() {
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
fn spare_buffers_are_freed_before_out_of_memory() {
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
    // The order of release differs: the first buffer reused is not the last one released.
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
fn integers_are_not_reused_before_their_readers_are_sent() {
    let (mut card, mut pool) = (Card::of(1 << 30), Pool::default());
    let bytes = class(400, 512);
    let first = pool.make(&mut card, Lasts::List, bytes).unwrap();
    let address = first.at(0);
    drop(first);
    assert!(pool.again(Lasts::List, bytes).is_none(), "what reads them may still wait");
    pool.sent();
    assert!(pool.again(Lasts::Verb, bytes).is_none(), "a kernel that waits may write what is not integers");
    assert_eq!(pool.again(Lasts::List, bytes).unwrap().at(0), address);
    pool.sent();
    assert!(pool.freeze(&mut card, 1 << 30).is_ok(), "where the card is full they go back");
}

#[test]
fn frozen_matrix_takes_exact_bytes_and_raises_no_peak() {
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
    // One after the other: the spare buffers together would exceed the budget.
    for bytes in [4 << 20, 6 << 20, 8 << 20] {
        one.take(&mut card, bytes).unwrap();
    }
    assert!(card.bytes() <= 16 << 20, "{} bytes", card.bytes());
    assert!(matches!(one.take(&mut card, 12 << 20), Err(Fault::OutOfMemory { .. })));
    assert!(matches!(one.freeze(&mut card, 12 << 20), Err(Fault::OutOfMemory { .. })));
    assert!(two.take(&mut card, 16 << 20).is_ok(), "the other one has its half");
}
