//! What has become of every item of a round, and of every lease that was given for it. An item is counted exactly
//! once because every way into `Counted` goes through one lease: that which was granted it, and an item is granted
//! to nobody while another grant of it stands.
//!
//! ```text
//! item:   Open -> Leased -> Granted -> Counted          lost member: Leased, Granted -> Open
//! lease:  Live -> Granted -> Counted                    Live -> Cancelled -> Granted | Denied | Void
//! ```
//!
//! A lease that was called back may be granted still: its worker had finished before the cancel reached it.
//! Leases are kept until the round is over, so that whatever is said again is answered in the same way again.

use super::super::message::LeaseId;
use super::action::Purpose;
use super::event::{DeviceId, MemberId};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// What has become of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Nobody works on it.
    Open,
    /// It has a live lease.
    Leased,
    /// The holder of this lease adds it to its sum.
    Granted(LeaseId),
    /// It is in the total (or its result was taken).
    Counted,
}

/// What has become of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// It is queued or computed.
    Live,
    /// It was called back; what comes of it is not known yet.
    Cancelled,
    /// It was finished first.
    Granted,
    /// Its sum has arrived.
    Counted,
    /// Its holder was told to drop it.
    Denied,
    /// It was stopped, failed, or lost with its member.
    Void,
}

#[derive(Debug, Clone)]
pub(super) struct Item {
    pub tokens: u64,
    pub state: State,
    /// Its live leases: the holder's, then the repeater's.
    pub live: Vec<LeaseId>,
}

#[derive(Debug, Clone)]
pub(super) struct Held {
    pub item: usize,
    pub device: DeviceId,
    pub class: Arc<str>,
    pub sent: Duration,
    /// Whether the device had nothing else to do, so that it waits for the lease to reach it.
    pub alone: Alone,
    pub status: Status,
    pub purpose: Purpose,
}

/// What a device was doing when a lease was sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alone {
    /// Nothing, and its parameters were there: what passes beyond computing can be measured.
    Waiting,
    /// Nothing, but its parameters are on their way too.
    Starting,
    /// Another lease.
    Queued,
}

/// What a lease number names.
pub(super) enum Found {
    /// A lease of this round.
    Here(Held),
    /// One of an earlier round.
    Old,
    /// None that was ever given.
    Never,
}

/// The items and leases of one round.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Number of the round's first lease.
    first: LeaseId,
    leases: Vec<Held>,
    items: Vec<Item>,
    /// Open items, largest first: what is given out last, when devices wait for one another, is small.
    open: BTreeSet<(Reverse<u64>, usize)>,
    counted: usize,
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
        }
    }

    /// The number that the next lease will have.
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

    /// A lease that is known to be of this round.
    pub fn lease(&self, lease: LeaseId) -> &Held {
        &self.leases[(lease - self.first) as usize]
    }

    fn lease_mut(&mut self, lease: LeaseId) -> &mut Held {
        &mut self.leases[(lease - self.first) as usize]
    }

    /// Gives out an item, or, with [`Purpose::Recheck`], looks at it beside what becomes of it.
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

    /// Whether nobody was granted it yet.
    pub fn grantable(&self, item: usize) -> bool {
        matches!(self.items[item].state, State::Open | State::Leased)
    }

    /// The lease was finished first: its item is granted. Returns the other live leases, now cancelled.
    pub fn grant(&mut self, lease: LeaseId) -> Vec<LeaseId> {
        let index = self.lease(lease).item;
        assert!(
            matches!(self.items[index].state, State::Open | State::Leased),
            "an item is granted to nobody while another grant of it stands"
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

    /// The sum (or result) of a granted lease has arrived.
    pub fn count(&mut self, lease: LeaseId) {
        let item = self.lease(lease).item;
        assert_eq!(self.items[item].state, State::Granted(lease), "only what was granted is counted");
        self.items[item].state = State::Counted;
        self.lease_mut(lease).status = Status::Counted;
        self.counted += 1;
    }

    /// The holder is to stop: the lease may be announced still. Returns whether its item is open because of that.
    pub fn cancel(&mut self, lease: LeaseId) -> bool {
        self.end(lease, Status::Cancelled)
    }

    /// Nothing will come of the lease. Returns whether its item is open because of that.
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

    /// Leases of a member that stand (live, called back, or granted and not counted), in the order given.
    pub fn standing(&self, member: MemberId) -> Vec<LeaseId> {
        let stands = |h: &Held| matches!(h.status, Status::Live | Status::Cancelled | Status::Granted);
        let of = |(i, h): (usize, &Held)| {
            (h.device.member == member && stands(h)).then_some(self.first + i as u64)
        };
        self.leases.iter().enumerate().filter_map(of).collect()
    }
}
