//! Invariants that hold after every tick, checked independently of the code that maintains them.

use super::ledger::{Item, State, Status};
use super::{Machine, Purpose};
use std::collections::BTreeSet;

impl Machine {
    /// Panics if the machine's state is inconsistent.
    pub(in super::super) fn check(&self) {
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
                    assert!(self.fleet.members.contains_key(&ledger.lease(*lease).device.member));
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
            let granted =
                ledger.standing(id.member).into_iter().filter(|&l| status(l) == Status::Granted).count();
            assert!(member.granted == granted || round.done, "{id:?}: {} {granted}", member.granted);
        }
    }
}
