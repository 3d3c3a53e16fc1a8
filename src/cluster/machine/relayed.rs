//! Sums whose parts relays hold: nothing is requested of them, and they count once they are in the total.

use super::super::message::ToCoordinator;
use super::Machine;
use super::answer::Verdict;
use super::event::MemberId;

impl Machine {
    /// Whether this sum would count if its values were in the total.
    pub fn takes(&self, member: MemberId, message: &ToCoordinator) -> bool {
        !self.verifies() && matches!(self.verdict(member, message), Some(Verdict::Counts))
    }

    /// Whether the member has no lease of the round in work, and relays hold the sum of all that it was granted.
    pub fn has_handed_over(&self, member: MemberId) -> bool {
        let (Some(round), Some(m)) = (&self.round, self.fleet.member(member)) else { return true };
        round.rests(m) && m.owes() == 0
    }

    pub(super) fn relayed(&mut self, member: MemberId, leases: usize) {
        if let Some(m) = self.fleet.member_mut(member) {
            m.relayed += leases;
            m.reasked = 0;
            self.fleet.flush(member, None);
        }
    }

    pub(super) fn totalled(&mut self, sums: &[(MemberId, ToCoordinator)]) {
        sums.iter().for_each(|(member, message)| self.summed(*member, message));
    }

    pub(super) fn released(&mut self, members: &[MemberId]) {
        for &member in members {
            if let Some(m) = self.fleet.member_mut(member) {
                (m.relayed, m.reasked) = (0, 0);
                self.fleet.flush(member, None);
            }
        }
    }
}
