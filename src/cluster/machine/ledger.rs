//! The state of every item of a round and of every lease on it. An item is counted exactly once: `Counted` is
//! reached only through the lease that was granted the item, and an item has at most one grant at a time.
//!
//! ```text
//! item:   Open -> Leased -> Granted -> Counted          lost member: Leased, Granted -> Open
//! lease:  Live -> Granted [-> Delivered] -> Counted      Live -> Cancelled -> Granted | Denied | Void
//! ```
//!
//! A cancelled lease may still be granted: its worker had finished before the cancel arrived. Leases are kept until
//! the round is over, so that a repeated message gets the same answer as before.
//!
//! Items of the next step may follow those of the round (`--delay`). They are leased and granted like these, after them,
//! and counted once they are the items of the round.

use super::super::message::LeaseId;
use super::action::Purpose;
use super::event::{DeviceId, MemberId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The state of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// No device works on it.
    Open,
    /// One or two devices hold live leases of it.
    Leased,
    /// The holder of this lease adds it to its running sum.
    Granted(LeaseId),
    /// Added to the total, or its result was taken.
    Counted,
}

/// The state of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// Queued or being computed.
    Live,
    /// Cancelled; its outcome is not known yet.
    Cancelled,
    /// Announced first, and granted the item.
    Granted,
    /// Its sum has arrived, and counts at the end of the round: where results are checked.
    Delivered,
    /// Its sum has arrived.
    Counted,
    /// Its holder was asked to drop it.
    Denied,
    /// Stopped, failed, or lost with its member.
    Void,
}

#[derive(Debug, Clone)]
pub(super) struct Item {
    pub tokens: u64,
    pub state: State,
    /// Its live leases: the holder's first, then the repeater's.
    pub live: Vec<LeaseId>,
}

#[derive(Debug, Clone)]
pub(super) struct Held {
    pub item: usize,
    pub device: DeviceId,
    pub class: Arc<str>,
    pub sent: Duration,
    /// The device's state when the lease was sent.
    pub alone: Alone,
    pub status: Status,
    pub purpose: Purpose,
}

/// What a device was doing when a lease was sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alone {
    /// Idle with its parameters: the time beyond computing can be measured.
    Waiting,
    /// Idle, with its parameters still on their way.
    Starting,
    /// Another lease.
    Queued,
}

/// The meaning of a lease number.
pub(super) enum Found {
    /// A lease of this round.
    Here(Held),
    /// A lease of an earlier round.
    Old,
    /// A number that was never used.
    Never,
}

/// The items and leases of one round.
#[derive(Debug)]
pub(super) struct Ledger {
    /// The number of the next lease.
    next: LeaseId,
    leases: BTreeMap<LeaseId, Held>,
    items: Vec<Item>,
    /// Number of the items of the round; those of the next step follow them.
    own: usize,
    /// Open items by [`Self::rank`].
    open: BTreeSet<(bool, Reverse<u64>, usize)>,
    counted: usize,
    /// Tokens of the largest item.
    most: u64,
}

impl Ledger {
    pub fn new(next: LeaseId, tokens: &[u64]) -> Self {
        let (leases, open) = (BTreeMap::new(), BTreeSet::new());
        let mut ledger =
            Ledger { next, leases, items: Vec::new(), own: tokens.len(), open, counted: 0, most: 1 };
        ledger.append(tokens);
        ledger
    }

    /// Adds open items: those of the next step, after those of the round.
    pub fn append(&mut self, tokens: &[u64]) {
        for &tokens in tokens {
            self.items.push(Item { tokens, state: State::Open, live: Vec::new() });
            self.open.insert(self.rank(self.items.len() - 1));
        }
        self.measure();
    }

    /// Finds the largest item.
    fn measure(&mut self) {
        self.most = self.items.iter().map(|item| item.tokens).max().unwrap_or(1);
    }

    /// The round is complete, and the items of the next step are those of the round now. Leases of its own items are
    /// old.
    pub fn advance(&mut self) {
        assert!(self.complete(), "no step begins before the one before it is complete");
        let gone = self.own;
        self.items.drain(..gone);
        self.leases.retain(|_, held| held.item >= gone);
        self.leases.values_mut().for_each(|held| held.item -= gone);
        (self.own, self.counted) = (self.items.len(), 0);
        let open = |&i: &usize| self.items[i].state == State::Open;
        self.open = (0..self.own).filter(open).map(|i| self.rank(i)).collect();
        self.measure();
    }

    /// The order of open items: those of the next step last, and the largest first, so that the last items, for which
    /// devices wait, are small.
    fn rank(&self, item: usize) -> (bool, Reverse<u64>, usize) {
        (self.is_ahead(item), Reverse(self.items[item].tokens), item)
    }

    /// Whether this is a lease of one of the round's own items.
    pub fn is_own(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease).is_some_and(|held| !self.is_ahead(held.item))
    }

    /// Whether the item belongs to the next step.
    pub fn is_ahead(&self, item: usize) -> bool {
        item >= self.own
    }

    /// Tokens of the largest item; 1 if there is no item.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// The number of the next lease.
    pub fn next(&self) -> LeaseId {
        self.next
    }

    pub fn complete(&self) -> bool {
        self.counted == self.own
    }

    pub fn items(&self) -> &[Item] {
        &self.items
    }

    pub fn open(&self) -> impl Iterator<Item = usize> {
        self.open.iter().map(|&(.., item)| item)
    }

    pub fn find(&self, lease: LeaseId) -> Found {
        match self.leases.get(&lease) {
            Some(held) => Found::Here(held.clone()),
            None if lease < self.next => Found::Old,
            None => Found::Never,
        }
    }

    /// A lease of this round; any other number panics.
    pub fn lease(&self, lease: LeaseId) -> &Held {
        &self.leases[&lease]
    }

    /// Changes the state of a lease, and returns its item.
    fn set(&mut self, lease: LeaseId, status: Status) -> usize {
        let Some(held) = self.leases.get_mut(&lease) else { panic!("lease {lease} is of another round") };
        held.status = status;
        held.item
    }

    /// Leases an item. Only [`Purpose::Round`] changes the state of the item.
    pub fn give(&mut self, held: Held) -> LeaseId {
        let lease = self.next();
        if held.purpose == Purpose::Round {
            let item = &mut self.items[held.item];
            assert!(matches!(item.state, State::Open | State::Leased), "only what is not granted is leased");
            item.state = State::Leased;
            item.live.push(lease);
            self.open.remove(&self.rank(held.item));
        }
        self.leases.insert(lease, held);
        self.next += 1;
        lease
    }

    /// Whether the item is not granted yet.
    pub fn grantable(&self, item: usize) -> bool {
        matches!(self.items[item].state, State::Open | State::Leased)
    }

    /// Grants the lease's item, because it was announced first. Returns the other live leases, now cancelled.
    pub fn grant(&mut self, lease: LeaseId) -> Vec<LeaseId> {
        let index = self.lease(lease).item;
        assert!(
            matches!(self.items[index].state, State::Open | State::Leased),
            "an item is not granted while another grant of it stands"
        );
        self.set(lease, Status::Granted);
        self.open.remove(&self.rank(index));
        let item = &mut self.items[index];
        item.state = State::Granted(lease);
        let others: Vec<LeaseId> =
            std::mem::take(&mut item.live).into_iter().filter(|&l| l != lease).collect();
        for &other in &others {
            self.set(other, Status::Cancelled);
        }
        others
    }

    /// The sum of a granted lease has arrived, and counts later.
    pub fn deliver(&mut self, lease: LeaseId) {
        let item = self.lease(lease).item;
        assert_eq!(self.items[item].state, State::Granted(lease), "only what was granted is delivered");
        self.set(lease, Status::Delivered);
    }

    /// The sum or result of a granted lease has arrived.
    pub fn count(&mut self, lease: LeaseId) {
        let item = self.lease(lease).item;
        assert_eq!(self.items[item].state, State::Granted(lease), "only what was granted is counted");
        assert!(!self.is_ahead(item), "steps are counted in their order");
        self.items[item].state = State::Counted;
        self.set(lease, Status::Counted);
        self.counted += 1;
    }

    /// Cancels a lease; it may still be announced. Returns whether its item is open because of that.
    pub fn cancel(&mut self, lease: LeaseId) -> bool {
        self.end(lease, Status::Cancelled)
    }

    /// Ends a lease without a result. Returns whether its item is open because of that.
    pub fn end(&mut self, lease: LeaseId, status: Status) -> bool {
        let (index, purpose) = (self.set(lease, status), self.lease(lease).purpose);
        let item = &mut self.items[index];
        item.live.retain(|&l| l != lease);
        let held_it = item.state == State::Granted(lease);
        if purpose == Purpose::Round && (held_it || item.state == State::Leased) && item.live.is_empty() {
            item.state = State::Open;
            return self.open.insert(self.rank(index));
        }
        false
    }

    /// A member's leases that are live, cancelled, granted or delivered, and not counted, in the order in which they were
    /// given.
    pub fn standing(&self, member: MemberId) -> Vec<LeaseId> {
        let stands = |h: &Held| {
            matches!(h.status, Status::Live | Status::Cancelled | Status::Granted | Status::Delivered)
        };
        let of = |(&lease, h): (&LeaseId, &Held)| (h.device.member == member && stands(h)).then_some(lease);
        self.leases.iter().filter_map(of).collect()
    }
}
