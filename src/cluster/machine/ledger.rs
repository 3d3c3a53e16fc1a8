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

use super::super::message::LeaseId;
use super::action::Purpose;
use super::event::{DeviceId, MemberId};
use std::cmp::Reverse;
use std::collections::BTreeSet;
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
    /// Number of the round's first lease.
    first: LeaseId,
    leases: Vec<Held>,
    items: Vec<Item>,
    /// Open items, largest first, so that the last items, for which devices wait, are small.
    open: BTreeSet<(Reverse<u64>, usize)>,
    counted: usize,
    /// Tokens of the largest item.
    most: u64,
}

impl Ledger {
    pub fn new(first: LeaseId, tokens: &[u64]) -> Self {
        let item = |&tokens: &u64| Item { tokens, state: State::Open, live: Vec::new() };
        Ledger {
            first,
            leases: Vec::new(),
            items: tokens.iter().map(item).collect(),
            open: tokens.iter().enumerate().map(|(i, &t)| (Reverse(t), i)).collect(),
            counted: 0,
            most: tokens.iter().copied().max().unwrap_or(1),
        }
    }

    /// Tokens of the largest item; 1 if there is no item.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// The number of the next lease.
    pub fn next(&self) -> LeaseId {
        self.first + self.leases.len() as u64
    }

    pub fn complete(&self) -> bool {
        self.counted == self.items.len()
    }

    pub fn items(&self) -> &[Item] {
        &self.items
    }

    pub fn open(&self) -> impl Iterator<Item = usize> {
        self.open.iter().map(|&(_, item)| item)
    }

    pub fn find(&self, lease: LeaseId) -> Found {
        match lease.checked_sub(self.first) {
            None => Found::Old,
            Some(index) => match self.leases.get(index as usize) {
                Some(held) => Found::Here(held.clone()),
                None => Found::Never,
            },
        }
    }

    /// A lease of this round; any other number panics.
    pub fn lease(&self, lease: LeaseId) -> &Held {
        &self.leases[(lease - self.first) as usize]
    }

    fn lease_mut(&mut self, lease: LeaseId) -> &mut Held {
        &mut self.leases[(lease - self.first) as usize]
    }

    /// Leases an item. Only [`Purpose::Round`] changes the state of the item.
    pub fn give(&mut self, held: Held) -> LeaseId {
        let lease = self.next();
        if held.purpose == Purpose::Round {
            let item = &mut self.items[held.item];
            assert!(matches!(item.state, State::Open | State::Leased), "only what is not granted is leased");
            item.state = State::Leased;
            item.live.push(lease);
            self.open.remove(&(Reverse(item.tokens), held.item));
        }
        self.leases.push(held);
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
        self.lease_mut(lease).status = Status::Granted;
        let item = &mut self.items[index];
        self.open.remove(&(Reverse(item.tokens), index));
        item.state = State::Granted(lease);
        let others: Vec<LeaseId> =
            std::mem::take(&mut item.live).into_iter().filter(|&l| l != lease).collect();
        others.iter().for_each(|&l| self.lease_mut(l).status = Status::Cancelled);
        others
    }

    /// The sum of a granted lease has arrived, and counts later.
    pub fn deliver(&mut self, lease: LeaseId) {
        let item = self.lease(lease).item;
        assert_eq!(self.items[item].state, State::Granted(lease), "only what was granted is delivered");
        self.lease_mut(lease).status = Status::Delivered;
    }

    /// The sum or result of a granted lease has arrived.
    pub fn count(&mut self, lease: LeaseId) {
        let item = self.lease(lease).item;
        assert_eq!(self.items[item].state, State::Granted(lease), "only what was granted is counted");
        self.items[item].state = State::Counted;
        self.lease_mut(lease).status = Status::Counted;
        self.counted += 1;
    }

    /// Cancels a lease; it may still be announced. Returns whether its item is open because of that.
    pub fn cancel(&mut self, lease: LeaseId) -> bool {
        self.end(lease, Status::Cancelled)
    }

    /// Ends a lease without a result. Returns whether its item is open because of that.
    pub fn end(&mut self, lease: LeaseId, status: Status) -> bool {
        let held = self.lease_mut(lease);
        let (index, purpose) = (held.item, held.purpose);
        held.status = status;
        let item = &mut self.items[index];
        item.live.retain(|&l| l != lease);
        let held_it = item.state == State::Granted(lease);
        if purpose == Purpose::Round && (held_it || item.state == State::Leased) && item.live.is_empty() {
            item.state = State::Open;
            return self.open.insert((Reverse(item.tokens), index));
        }
        false
    }

    /// A member's leases that are live, cancelled, granted or delivered, and not counted, in the order in which they were
    /// given.
    pub fn standing(&self, member: MemberId) -> Vec<LeaseId> {
        let stands = |h: &Held| {
            matches!(h.status, Status::Live | Status::Cancelled | Status::Granted | Status::Delivered)
        };
        let of = |(i, h): (usize, &Held)| {
            (h.device.member == member && stands(h)).then_some(self.first + i as u64)
        };
        self.leases.iter().enumerate().filter_map(of).collect()
    }
}
