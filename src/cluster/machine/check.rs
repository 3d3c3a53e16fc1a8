//! Invariants that hold after every tick, checked independently of the code that maintains them.

use super::ledger::{Item, State, Status};
use super::{Machine, Member, MemberId, Purpose};
use std::collections::BTreeSet;
use std::time::Duration;

impl Machine {
    /// Panics if the machine's state is inconsistent.
    pub(in super::super) fn check(&self) {
        self.check_sets();
        let Some(round) = &self.round else { return };
        let ledger = &round.ledger;
        let status = |lease| ledger.lease(lease).status;
        let open: BTreeSet<usize> = ledger.open().collect();
        for (index, item) in ledger.items().iter().enumerate() {
            let Item { state, live, .. } = item;
            assert!(live.iter().all(|&l| status(l) == Status::Live && ledger.lease(l).item == index));
            assert_eq!(*state == State::Open, open.contains(&index), "item {index}");
            match state {
                State::Open | State::Counted => assert!(live.is_empty(), "item {index} is {state:?}"),
                State::Leased => {
                    assert!(matches!(live.len(), 1 | 2), "a holder, and one repeater at a time");
                    let classes: Vec<_> = live.iter().map(|&l| ledger.lease(l).class.clone()).collect();
                    assert!(classes.iter().all(|c| *c == classes[0]), "repeats stay in their class");
                }
                State::Granted(lease) => {
                    let stands = matches!(status(*lease), Status::Granted | Status::Delivered);
                    assert!(live.is_empty() && stands);
                    assert!(self.fleet.member(ledger.lease(*lease).device.member).is_some());
                }
            }
        }
        for (id, member, device) in self.fleet.devices() {
            for &lease in &device.queue {
                let held = ledger.lease(lease);
                assert_eq!((held.device, held.status), (id, Status::Live), "a queue holds live leases");
                let listed = ledger.items()[held.item].live.contains(&lease);
                assert_eq!(listed, held.purpose == Purpose::Round);
            }
            let mut granted = ledger.standing(id.member);
            granted.retain(|&l| status(l) == Status::Granted);
            let (own, ahead): (Vec<u64>, Vec<u64>) = granted.into_iter().partition(|&l| round.owns(l));
            assert!(member.granted == own.len() || round.done, "{id:?}: {} {own:?}", member.granted);
            assert_eq!(member.granted_ahead, ahead.len(), "{id:?}");
        }
    }

    /// Panics if a set of the fleet lacks a member or device that belongs to it.
    fn check_sets(&self) {
        let flushed = |(&id, m): (&MemberId, &Member)| m.flushed().map(|at| (at, id));
        let mut asked: Vec<_> = self.fleet.members().iter().filter_map(flushed).collect();
        asked.sort();
        assert!(asked.iter().map(|(_, id)| *id).eq(self.fleet.flushed_until(Duration::MAX)));
        assert_eq!(asked.first().map(|(at, _)| *at), self.fleet.first_flushed());
        for (&id, member) in self.fleet.members() {
            let owes = member.granted > 0 && member.flushed().is_none();
            let rests = owes && (self.verifies() || self.round.as_ref().is_some_and(|r| r.rests(member)));
            assert!(!rests || self.fleet.resting.contains(&id), "{id:?} rests");
        }
        for (id, _, device) in self.fleet.devices() {
            assert!(device.stopping.is_none() || self.fleet.stopping.contains(&id), "{id:?} stops");
        }
        assert_eq!(self.fleet.up(), self.fleet.devices().filter(|(_, _, d)| d.up).count());
    }
}
