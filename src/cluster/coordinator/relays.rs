//! Relays: workers that add parts of the sums for each other, and pass on parts of the parameters, so that the coordinator's
//! network carries one sum and one set of parameters per step, however many workers there are. Each has a range of the
//! values. No bit depends on it: sums are integers. Relays keep nothing that cannot be sent again: whatever goes wrong,
//! the set is parted, every worker sends its sum to the coordinator, and parameters come from there.

mod driver;
mod worth;

pub use worth::Use;

use super::super::machine::MemberId;
use super::super::message::{RelayPlan, ToCoordinator, ToWorker};
use super::super::reduce::{Claim, Member};
use super::connections::{Cells, Wrong};
use crate::train::event::Link;
use crate::train::shares::Shares;
use crate::train::sum::Scalars;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;
use worth::Worth;

/// The sender of totals, for the reducer; no member has this number.
pub(in crate::cluster) const TOTALS: Member = 0;

/// Most relays of a set.
const MOST: usize = 255;

/// After this long without progress the set is parted.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long no set forms after a first failure; each further one before a total counts doubles it.
const PAUSE: Duration = Duration::from_secs(2);

/// A worker that may be a relay.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::cluster) struct Candidate {
    pub member: MemberId,
    /// Where others reach it; empty for the coordinator's host.
    pub host: String,
    pub link: Option<Link>,
}

/// The relays of a run.
#[derive(Debug)]
pub(in crate::cluster) struct Relays {
    /// Number of values of sums and parameters.
    values: usize,
    worth: Worth,
    /// Numbers of the last set and of the last total.
    numbers: (u64, u64),
    state: State,
    failures: u32,
    not_before: Duration,
    /// A member of the set is gone.
    broken: bool,
}

#[derive(Debug)]
enum State {
    Apart,
    /// The candidates, the ports of those that listen, and those that are connected with all others.
    Forming(Vec<Candidate>, BTreeMap<MemberId, u16>, BTreeSet<MemberId>),
    Together(Set),
}

/// Relays at work. A relay's place is its index.
#[derive(Debug)]
struct Set {
    members: Vec<MemberId>,
    ranges: Vec<Range<usize>>,
    /// Sums whose parts the relays have.
    offers: Vec<Offer>,
    total: Option<Total>,
    /// Relays that have not asked for work since the newest parameters left.
    silent: BTreeSet<MemberId>,
    /// Relays that have shown no result of these parameters: they may lack them.
    lacking: BTreeSet<MemberId>,
    /// When something must have happened.
    until: Option<Duration>,
}

/// A sum whose parts relays have: its last message.
#[derive(Debug, Clone)]
pub(in crate::cluster) struct Offer {
    pub member: MemberId,
    pub message: ToCoordinator,
}

/// A total on its way from the relays.
#[derive(Debug)]
struct Total {
    number: u64,
    offers: Vec<Offer>,
    cells: Cells,
}

/// Why a set ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum Cause {
    /// Its relays did not do their part: the next one waits.
    Failure,
    /// A member is gone, or it is not worth while.
    Other,
}

/// A set that is no more.
#[derive(Debug, PartialEq)]
pub(in crate::cluster) struct Parted {
    pub members: Vec<MemberId>,
    /// Those that may lack the newest parameters.
    pub lacking: BTreeSet<MemberId>,
}

pub(in crate::cluster) type Messages = Vec<(MemberId, ToWorker)>;

impl Relays {
    pub fn new(values: usize, usage: Use) -> Self {
        Relays {
            values,
            worth: Worth::new(usage),
            numbers: (0, 0),
            state: State::Apart,
            failures: 0,
            not_before: Duration::ZERO,
            broken: false,
        }
    }

    /// Whether there is or may be a set.
    pub fn possible(&self) -> bool {
        self.worth.usage != Use::Never
    }

    /// A step took `whole` seconds, in `waits` of which devices waited for sums and parameters.
    pub fn took(&mut self, waits: f64, whole: f64) {
        match self.state {
            State::Together(_) => self.worth.took_together(waits),
            State::Apart | State::Forming(..) => self.worth.took(waits, whole),
        }
    }

    /// Whether the set that works now should be one of all candidates.
    pub fn is_outgrown(&mut self, candidates: &[Candidate], now: Duration) -> bool {
        let of = &candidates[..candidates.len().min(MOST)];
        match &self.state {
            State::Together(set) if set.members != ids(of) => now >= self.not_before && self.wants(of),
            _ => false,
        }
    }

    fn wants(&mut self, candidates: &[Candidate]) -> bool {
        let links: Vec<Option<f64>> = candidates.iter().map(|c| c.link.map(|link| link.bandwidth)).collect();
        self.values > 0 && self.worth.wants(&links, self.values)
    }

    /// Time of the parameters on a network of 1 MB/s.
    fn travels(&self) -> Duration {
        Duration::from_secs_f64(4e-6 * self.values as f64)
    }

    /// Between two steps: asks workers to listen if a set is worth while.
    pub fn consider(&mut self, mut candidates: Vec<Candidate>, now: Duration) -> Messages {
        candidates.truncate(MOST);
        let goes_on = match &self.state {
            State::Apart => false,
            State::Forming(before, ..) => ids(before) == ids(&candidates),
            State::Together(_) => true,
        };
        if goes_on || now < self.not_before || !self.wants(&candidates) {
            return Vec::new();
        }
        let messages = candidates.iter().map(|c| (c.member, ToWorker::Listen)).collect();
        self.broken = false;
        self.state = State::Forming(candidates, BTreeMap::new(), BTreeSet::new());
        messages
    }

    /// Whether the set that works now is not worth while.
    pub fn is_useless(&self) -> bool {
        matches!(self.state, State::Together(_)) && self.worth.is_useless()
    }

    /// A candidate listens at this port; the last one brings all of them their places. `key` is random.
    pub fn listens(&mut self, member: MemberId, port: u16, key: [u8; 16]) -> Messages {
        let State::Forming(candidates, ports, _) = &mut self.state else { return Vec::new() };
        if candidates.iter().all(|c| c.member != member) || ports.len() == candidates.len() {
            return Vec::new();
        }
        ports.insert(member, port);
        if ports.len() < candidates.len() {
            return Vec::new();
        }
        self.numbers.0 += 1;
        let ranges = ranges(candidates, self.values);
        let plan = RelayPlan {
            set: self.numbers.0,
            key,
            place: 0,
            addresses: candidates.iter().map(|c| (c.host.clone(), ports[&c.member])).collect(),
            ranges: ranges.iter().map(|range| (range.start as u64, range.end as u64)).collect(),
        };
        let place = |(c, place): (&Candidate, u16)| {
            (c.member, ToWorker::Relay(Some(Box::new(RelayPlan { place, ..plan.clone() }))))
        };
        candidates.iter().zip(0..).map(place).collect()
    }

    /// A worker is connected with all others. Returns whether the set works from now on.
    pub fn linked(&mut self, member: MemberId) -> bool {
        let State::Forming(candidates, ports, linked) = &mut self.state else { return false };
        if ports.len() < candidates.len() || candidates.iter().all(|c| c.member != member) {
            return false;
        }
        linked.insert(member);
        if linked.len() < candidates.len() {
            return false;
        }
        let (members, ranges) =
            (candidates.iter().map(|c| c.member).collect(), ranges(candidates, self.values));
        self.state = State::Together(Set {
            members,
            ranges,
            offers: Vec::new(),
            total: None,
            silent: BTreeSet::new(),
            lacking: BTreeSet::new(),
            until: None,
        });
        true
    }

    fn together(&mut self) -> Option<&mut Set> {
        match &mut self.state {
            State::Together(set) => Some(set),
            State::Apart | State::Forming(..) => None,
        }
    }

    /// The number of the set, if the member is one of its relays.
    pub fn set_of(&self, member: MemberId) -> Option<u64> {
        match &self.state {
            State::Together(set) if set.members.contains(&member) => Some(self.numbers.0),
            _ => None,
        }
    }

    /// Whether the member belongs to a set, or to one that forms.
    pub fn has(&self, member: MemberId) -> bool {
        match &self.state {
            State::Apart => false,
            State::Forming(candidates, ..) => candidates.iter().any(|c| c.member == member),
            State::Together(set) => set.members.contains(&member),
        }
    }

    /// Whether a message of this member about a set with this number, 0 before it has one, is about the present one.
    pub fn is_current(&self, member: MemberId, set: u64) -> bool {
        let number = match &self.state {
            State::Forming(candidates, ports, _) if ports.len() < candidates.len() => 0,
            _ => self.numbers.0,
        };
        self.has(member) && set == number
    }

    /// A member is gone, while actions of the machine are carried out.
    pub fn breaks(&mut self, member: MemberId) {
        self.broken |= self.has(member);
    }

    /// Whether a member of the set is gone.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Whether nothing has come from the relays for too long.
    pub fn is_late(&self, now: Duration) -> bool {
        matches!(&self.state, State::Together(set) if set.until.is_some_and(|until| now >= until))
    }

    /// Whether relays hold sums, or a total is on its way.
    pub fn has_offers(&self) -> bool {
        matches!(&self.state, State::Together(set) if !set.offers.is_empty() || set.total.is_some())
    }

    /// Takes a sum whose parts the relays have. False: it holds a lease of a sum before.
    pub fn offer(&mut self, offer: Offer) -> bool {
        let Some(set) = self.together() else { return false };
        let before = set.offers.iter().chain(set.total.iter().flat_map(|total| &total.offers));
        let before: BTreeSet<u64> = before.flat_map(Offer::leases).copied().collect();
        let is_new = offer.leases().iter().all(|lease| !before.contains(lease));
        if is_new {
            set.offers.push(offer);
        }
        is_new
    }

    /// Begins a total of all sums that relays hold, if no other is on its way and `ready` says of every relay that it has
    /// nothing more. The round has `of` microbatches.
    pub fn combine(&mut self, ready: impl Fn(MemberId) -> bool, of: u32, now: Duration) -> Messages {
        let (number, travels) = (self.numbers.1 + 1, self.travels());
        let Some(set) = self.together() else { return Vec::new() };
        if set.total.is_some() || set.offers.is_empty() || !set.members.iter().all(|member| ready(*member)) {
            return Vec::new();
        }
        let mut offers = std::mem::take(&mut set.offers);
        offers.sort_by_key(|offer| (offer.member, offer.sum()));
        let place = |member: MemberId| set.members.iter().position(|m| *m == member).unwrap_or_default();
        let sums: Vec<(u16, u64)> =
            offers.iter().map(|offer| (place(offer.member) as u16, offer.sum())).collect();
        // A sum may be behind another one of the same worker.
        let of_one = |m: &MemberId| offers.iter().filter(|offer| offer.member == *m).count() as u32;
        let most = set.members.iter().map(of_one).max().unwrap_or(1);
        set.until = Some(now + PATIENCE + travels * most);
        set.total = Some(Total { number, offers, cells: Cells::new(&set.ranges) });
        let messages = set
            .members
            .iter()
            .map(|&member| (member, ToWorker::Combine { total: number, of, sums: sums.clone() }));
        let messages = messages.collect();
        self.numbers.1 = number;
        messages
    }

    /// The part of a total that this message of a relay brings: cells in their order, which may have waited for others. The
    /// error is why no correct relay sends it.
    pub fn piece(
        &mut self,
        member: MemberId,
        message: ToCoordinator,
        now: Duration,
    ) -> Result<Vec<ToCoordinator>, String> {
        let ToCoordinator::TotalPiece { total, offset, len, packed } = message else { return Ok(Vec::new()) };
        let Some(set) = self.together() else { return Ok(Vec::new()) };
        let place = set.members.iter().position(|m| *m == member);
        let (Some(coming), Some(place)) = (set.total.as_mut().filter(|coming| coming.number == total), place)
        else {
            return Ok(Vec::new());
        };
        set.until = Some(now + PATIENCE);
        match coming.cells.add(place, (offset, len), packed) {
            Ok(cells) => Ok(cells.into_iter().map(|cell| cell.of_sum(total)).collect()),
            Err(Wrong::Piece(reason) | Wrong::Parts(reason)) => Err(format!("a total's part: {reason}")),
        }
    }

    /// The claim of the total, once all of its parts have come.
    pub fn claim(&mut self) -> Option<Claim> {
        let set = self.together()?;
        let total = set.total.as_ref()?;
        if !(0..set.members.len()).all(|place| total.cells.complete(place)) {
            return None;
        }
        let mut claim = Claim { sum: total.number, leases: 0, scalars: Scalars::default() };
        for offer in &total.offers {
            let ToCoordinator::Sum { leases, loss, weight, targets, rewards, .. } = &offer.message else {
                continue;
            };
            claim.leases += leases.len();
            let all = &mut claim.scalars;
            all.loss = all.loss.wrapping_add(*loss);
            all.weight = all.weight.wrapping_add(*weight);
            all.targets = all.targets.wrapping_add(*targets);
            all.rewards.add(rewards);
        }
        Some(claim)
    }

    /// The sums of the total of this number, which is complete.
    pub fn counts(&mut self, number: u64, now: Duration) -> Option<Vec<Offer>> {
        let set = self.together()?;
        let total = set.total.take_if(|total| total.number == number)?;
        set.until = (!set.silent.is_empty()).then_some(now + PATIENCE);
        self.failures = 0;
        Some(total.offers)
    }

    /// The ranges of parameters that relays pass on, which are on their way from now on.
    pub fn spread(&mut self, now: Duration) -> Vec<(MemberId, Range<usize>)> {
        let travels = self.travels();
        let Some(set) = self.together() else { return Vec::new() };
        (set.silent, set.lacking) =
            (set.members.iter().copied().collect(), set.members.iter().copied().collect());
        set.until = Some(now + PATIENCE + travels);
        set.members.iter().copied().zip(set.ranges.iter().cloned()).collect()
    }

    /// A member asks for work: it has the newest parameters.
    pub fn asks(&mut self, member: MemberId) {
        let Some(set) = self.together() else { return };
        if set.silent.remove(&member) && set.silent.is_empty() && set.total.is_none() {
            set.until = None;
        }
    }

    /// A member has a result of the newest parameters.
    pub fn has_parameters(&mut self, member: MemberId) {
        if let Some(set) = self.together() {
            set.lacking.remove(&member);
        }
    }

    /// Ends the set, or the one that forms. After a failure the next one waits.
    pub fn part(&mut self, cause: Cause, now: Duration) -> Option<Parted> {
        self.broken = false;
        let parted = match std::mem::replace(&mut self.state, State::Apart) {
            State::Apart => return None,
            State::Forming(candidates, ..) => {
                let members = candidates.iter().map(|c| c.member).collect();
                Parted { members, lacking: BTreeSet::new() }
            }
            State::Together(set) => Parted { members: set.members, lacking: set.lacking },
        };
        if cause == Cause::Failure {
            self.failures = (self.failures + 1).min(16);
            self.not_before = now + PAUSE * 2u32.pow(self.failures - 1);
        }
        self.worth.parted();
        Some(parted)
    }
}

impl Offer {
    fn leases(&self) -> &[u64] {
        match &self.message {
            ToCoordinator::Sum { leases, .. } => leases,
            _ => &[],
        }
    }

    fn sum(&self) -> u64 {
        match &self.message {
            ToCoordinator::Sum { sum, .. } => *sum,
            _ => 0,
        }
    }
}

fn ids(of: &[Candidate]) -> Vec<MemberId> {
    of.iter().map(|c| c.member).collect()
}

/// The values of each relay: by bandwidth, where that of all is known.
fn ranges(candidates: &[Candidate], values: usize) -> Vec<Range<usize>> {
    let known: Option<Vec<f64>> = candidates.iter().map(|c| c.link.map(|link| link.bandwidth)).collect();
    Shares::of(&known.unwrap_or_else(|| vec![1.0; candidates.len()])).ranges(values)
}
