//! Members, their devices, and the leases of each device. A device works through its leases in the order in which
//! they were given, so its finish times follow from its speed.

use super::super::message::{self, LeaseId};
use super::action::{DeviceReport, Place};
use super::event::{DeviceId, Kind, MemberId};
use super::record::Record;
use super::speed::{Estimate, Speed};
use crate::train::event::Link;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Most devices of one member.
pub(super) const MOST: usize = 64;

/// Most fallbacks of one device: more than any chain of backends has entries.
pub(super) const CHAIN: u8 = 8;

/// Number of departed devices with a report of their own; the work of others is added up under one name.
const PAST: usize = 1024;

/// The same devices with unique names, because reports are kept by name.
pub(super) fn distinct(devices: &[message::Device]) -> Vec<message::Device> {
    let mut all: Vec<message::Device> = Vec::with_capacity(devices.len());
    for device in devices {
        let others = (2..).map(|n| format!("{} ({n})", device.name));
        let mut names = std::iter::once(device.name.clone()).chain(others);
        let free = |name: &String| all.iter().all(|d| d.name != *name);
        let name = names.find(free).unwrap_or_default();
        all.push(message::Device { name, class: device.class.clone() });
    }
    all
}

#[derive(Debug)]
pub(super) struct Device {
    pub name: String,
    pub class: Arc<str>,
    /// False after an error, until the device has fallen back or asks again.
    pub up: bool,
    /// Number of leases that may queue behind the lease in work; `None` before its first `Ask`.
    pub room: Option<u16>,
    /// Number of leases that it computes at the same time.
    pub together: usize,
    /// Its leases in order of work; it computes the first.
    pub queue: VecDeque<LeaseId>,
    /// The earliest time at which the first lease of the queue can have started.
    pub began: Duration,
    /// The cancelled lease that it was computing, until it reports that it has stopped.
    pub stopping: Option<Stopping>,
    pub speed: Speed,
    /// Time between a lease and its announcement besides computing, in microseconds.
    pub overhead: Estimate,
    pub microbatches: u64,
    pub tokens: u64,
    pub busy: Duration,
    /// Number of its fallbacks.
    pub fallbacks: u8,
    pub idleness: Idleness,
}

/// Consecutive training rounds without a lease, because other devices were expected to finish earlier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Idleness {
    /// Whether it was given a lease in this round.
    pub used: bool,
    /// Whether its speed was doubted and it has had no lease since.
    tried: bool,
    rounds: u32,
    /// The number of rounds after which its speed estimate is doubted.
    bound: u32,
}

/// First and largest number of idle rounds after which a device's speed is doubted. The number doubles because each
/// trial of a slow device costs the others a repeat.
const DOUBT: (u32, u32) = (16, 1024);

impl Idleness {
    const NONE: Idleness = Idleness { used: false, tried: false, rounds: 0, bound: DOUBT.0 };

    /// Starts a training round. Returns whether the device was idle for so long that its speed must be measured
    /// again. The next bound is twice as long, unless the device got a lease in between for another reason than the
    /// doubt.
    pub fn doubts(&mut self) -> bool {
        let used = std::mem::take(&mut self.used);
        if used && !std::mem::take(&mut self.tried) {
            self.bound = DOUBT.0;
        }
        self.rounds = if used { 0 } else { self.rounds + 1 };
        let doubts = self.rounds >= self.bound;
        if doubts {
            (self.tried, self.rounds, self.bound) = (true, 0, (2 * self.bound).min(DOUBT.1));
        }
        doubts
    }
}

/// A cancelled lease that its device has not stopped yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    pub lease: LeaseId,
    /// From this time the device gets no lease until it has stopped, because it may hang.
    pub until: Duration,
    /// When the cancel is sent again.
    pub again: Duration,
}

#[derive(Debug)]
pub(super) struct Member {
    pub name: String,
    /// Whether it is the coordinator's own process.
    pub here: bool,
    /// `None` before its `Ready`.
    pub devices: Option<Vec<Device>>,
    /// When the parameters were sent; cleared by the first request for work with them.
    pub sent: Option<Duration>,
    /// Time from sending parameters to the first request for work, in microseconds.
    pub transfer: Estimate,
    /// Number of its newest sum that counts.
    pub last_sum: u64,
    /// Its network link, if the worker measured one.
    pub link: Option<Link>,
    /// Number of leases that were granted and are in no counted sum.
    pub granted: usize,
    /// Number of those of them whose sums relays hold.
    pub relayed: usize,
    /// Number of granted leases of the next step.
    pub granted_ahead: usize,
    flushed: Option<Duration>,
    /// Number of repeated requests since then.
    pub reasked: u32,
    /// The furthest piece of a sum so far: number of the sum and offset.
    furthest: Option<(u64, u64)>,
    /// Whether its `Measured` has arrived.
    pub measured: bool,
    pub record: Record,
}

impl Member {
    pub fn new(name: String) -> Self {
        Member {
            name,
            here: false,
            devices: None,
            sent: None,
            transfer: Estimate::default(),
            last_sum: 0,
            link: None,
            granted: 0,
            relayed: 0,
            granted_ahead: 0,
            flushed: None,
            reasked: 0,
            furthest: None,
            measured: false,
            record: Record::default(),
        }
    }

    /// Whether its arrival was never reported: it is not ready, or has no device that can take part.
    pub fn is_unknown(&self) -> bool {
        self.devices.as_ref().is_none_or(Vec::is_empty)
    }

    /// Number of granted leases for which a sum is due.
    pub fn owes(&self) -> usize {
        self.granted.saturating_sub(self.relayed)
    }

    /// When its sum was last requested, or a new piece of that sum arrived.
    pub fn flushed(&self) -> Option<Duration> {
        self.flushed
    }

    /// Estimated arrival time of its parameters; `None` if it has them.
    pub fn arrives(&self) -> Option<Duration> {
        self.sent.map(|sent| sent + micros(self.transfer.get().unwrap_or(0.0)))
    }
}

impl Device {
    /// Whether it has not stopped when it had to: it may hang.
    pub fn hangs(&self, now: Duration) -> bool {
        now >= self.hangs_from()
    }

    /// When it has to have stopped.
    pub fn hangs_from(&self) -> Duration {
        self.stopping.map_or(Duration::MAX, |s| s.until)
    }

    pub fn new(device: &message::Device) -> Self {
        Device {
            name: device.name.clone(),
            class: device.class.as_str().into(),
            up: true,
            room: None,
            together: 1,
            queue: VecDeque::new(),
            began: Duration::ZERO,
            stopping: None,
            speed: Speed::default(),
            overhead: Estimate::default(),
            microbatches: 0,
            tokens: 0,
            busy: Duration::ZERO,
            fallbacks: 0,
            idleness: Idleness::NONE,
        }
    }

    /// Removes a lease from the queue. If it was the first, the next one starts now. Returns whether it was queued.
    pub fn leaves(&mut self, lease: LeaseId, now: Duration) -> bool {
        let was = self.queue.len();
        if self.queue.front() == Some(&lease) {
            self.began = now;
        }
        self.queue.retain(|&l| l != lease);
        self.queue.len() < was
    }

    /// The device sent a message about a lease, so it does not hang in it.
    pub fn moves(&mut self, lease: LeaseId) {
        self.stopping.take_if(|s| s.lease == lease);
    }

    fn place(&self, member: &str) -> Place {
        Place { member: member.to_string(), device: self.name.clone(), class: self.class.to_string() }
    }
}

/// All present members in the order of their numbers, and the reports of departed devices.
///
/// The sets name those that an event can concern, so that no event looks at all members.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    members: BTreeMap<MemberId, Member>,
    past: BTreeMap<Place, DeviceReport>,
    /// Members that may have changed since the planner last looked at them.
    changed: BTreeSet<MemberId>,
    /// Every `Member::flushed`.
    flushed: BTreeSet<(Duration, MemberId)>,
    /// Every member whose sum is due and not requested, and maybe others.
    pub resting: BTreeSet<MemberId>,
    /// Every device that has not stopped a cancelled lease, and maybe others.
    pub stopping: BTreeSet<DeviceId>,
    /// Number of devices that are up, once it is counted.
    up: Cell<Option<usize>>,
}

impl Fleet {
    pub fn members(&self) -> &BTreeMap<MemberId, Member> {
        &self.members
    }

    pub fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.get(&id)
    }

    pub fn member_mut(&mut self, id: MemberId) -> Option<&mut Member> {
        let member = self.members.get_mut(&id)?;
        self.changed.insert(id);
        Some(member)
    }

    /// Every member, to be changed.
    pub fn members_mut(&mut self) -> impl Iterator<Item = (MemberId, &mut Member)> {
        self.changed.extend(self.members.keys());
        self.members.iter_mut().map(|(&id, m)| (id, m))
    }

    pub fn insert(&mut self, id: MemberId, member: Member) {
        self.members.insert(id, member);
        self.changed.insert(id);
        self.recount();
    }

    /// The members that may have changed since the last call, those that are gone included.
    pub fn changed(&mut self) -> BTreeSet<MemberId> {
        std::mem::take(&mut self.changed)
    }

    /// A device may have gone up or down.
    pub fn recount(&mut self) {
        self.up.set(None);
    }

    /// The sum of a member is requested now, or no longer.
    pub fn flush(&mut self, id: MemberId, at: Option<Duration>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let before = std::mem::replace(&mut member.flushed, at);
        if let Some(before) = before {
            self.flushed.remove(&(before, id));
        }
        match at {
            Some(at) => self.flushed.insert((at, id)),
            None => self.resting.insert(id),
        };
    }

    /// No sum is requested or owed.
    pub fn forget_sums(&mut self) {
        self.flushed.clear();
        self.resting.clear();
        for m in self.members.values_mut() {
            (m.granted, m.relayed, m.granted_ahead, m.flushed) = (0, 0, 0, None);
        }
    }

    /// What is owed for the next step is owed now.
    pub fn owes_ahead(&mut self) {
        self.flushed.clear();
        for (&id, m) in &mut self.members {
            (m.granted, m.granted_ahead, m.flushed) = (m.granted_ahead, 0, None);
            self.resting.insert(id);
        }
    }

    /// When the earliest of the requested sums was requested.
    pub fn first_flushed(&self) -> Option<Duration> {
        self.flushed.first().map(|(at, _)| *at)
    }

    /// The members whose sums were requested until then.
    pub fn flushed_until(&self, until: Duration) -> impl Iterator<Item = MemberId> {
        self.flushed.range(..=(until, MemberId(u64::MAX))).map(|(_, id)| *id)
    }

    /// A piece of a sum arrived. Only a piece further than any before extends the wait for the sum: a member that
    /// restarts its sum again and again would hold up the step.
    pub fn comes(&mut self, id: MemberId, piece: (u64, u64), now: Duration) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if member.furthest.is_none_or(|furthest| piece > furthest) {
            (member.furthest, member.reasked) = (Some(piece), 0);
            if member.flushed.is_some() {
                self.flush(id, Some(now));
            }
        }
    }

    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.members.get(&id.member)?.devices.as_ref()?.get(usize::from(id.index))
    }

    pub fn device_mut(&mut self, id: DeviceId) -> Option<&mut Device> {
        self.member_mut(id.member)?.devices.as_mut()?.get_mut(usize::from(id.index))
    }

    /// The devices of a member, up or not.
    pub fn devices_of(&self, member: MemberId) -> impl Iterator<Item = (DeviceId, &Member, &Device)> {
        let of = move |m| of_member(member, m);
        self.members.get(&member).into_iter().flat_map(of)
    }

    /// Every device, up or not.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, &Member, &Device)> {
        self.members.iter().flat_map(|(&member, m)| of_member(member, m))
    }

    /// Number of devices that can compute.
    pub fn up(&self) -> usize {
        let count = || self.devices().filter(|(_, _, d)| d.up).count();
        let up = self.up.get().unwrap_or_else(count);
        self.up.set(Some(up));
        up
    }

    /// Number of members with such a device.
    pub fn able(&self) -> usize {
        self.members.values().filter(|m| m.devices.iter().flatten().any(|d| d.up)).count()
    }

    pub fn place(&self, id: DeviceId) -> Place {
        let gone =
            || Place { member: "a lost worker".into(), device: id.index.to_string(), class: String::new() };
        let member = self.members.get(&id.member);
        member.zip(self.device(id)).map_or_else(gone, |(m, d)| d.place(&m.name))
    }

    /// Removes a member and keeps the reports of its devices.
    pub fn remove(&mut self, id: MemberId) -> Option<Member> {
        let reports: Vec<DeviceReport> = self.devices_of(id).map(|(_, m, d)| report(None, m, d)).collect();
        for report in reports {
            self.keep(report);
        }
        self.flush(id, None);
        self.resting.remove(&id);
        self.changed.insert(id);
        self.recount();
        self.members.remove(&id)
    }

    /// Adds a device's work so far to the report under its name.
    pub fn keep(&mut self, mut report: DeviceReport) {
        if self.past.len() >= PAST && !self.past.contains_key(&report.place) {
            let others = |of: &str| format!("{of} that are gone");
            report.place =
                Place { member: others("workers"), device: others("devices"), class: String::new() };
        }
        match self.past.get_mut(&report.place) {
            Some(past) => {
                past.join(&report);
                past.micros_per_token = report.micros_per_token.or(past.micros_per_token);
                past.link = report.link.or(past.link);
            }
            None => drop(self.past.insert(report.place.clone(), report)),
        }
    }

    pub fn reports(&self) -> Vec<DeviceReport> {
        let mut all = self.past.clone();
        let mut here = Vec::new();
        for (id, m, d) in self.devices() {
            let mut now = report(Some(id), m, d);
            if let Some(past) = all.remove(&now.place) {
                now.join(&past);
            }
            here.push(now);
        }
        here.extend(all.into_values());
        here
    }
}

fn of_member(member: MemberId, m: &Member) -> impl Iterator<Item = (DeviceId, &Member, &Device)> {
    let devices = m.devices.iter().flatten().enumerate();
    devices.map(move |(i, d)| (DeviceId { member, index: i as u16 }, m, d))
}

pub(super) fn report(id: Option<DeviceId>, member: &Member, device: &Device) -> DeviceReport {
    DeviceReport {
        place: device.place(&member.name),
        id,
        microbatches: device.microbatches,
        tokens: device.tokens,
        busy: device.busy,
        micros_per_token: device.speed.known(Kind::Train),
        points: device.speed.points,
        trials: device.speed.trials,
        memory: device.speed.memory,
        link: member.link,
    }
}

/// A time span in microseconds, clamped because the estimate may be absurd.
pub(super) fn micros(span: f64) -> Duration {
    Duration::from_micros(span.clamp(0.0, 1e15) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_interval_doubles_until_a_device_earns_work() {
        let spans = |parts_after_a_trial: u32, rounds: u32| {
            let (mut idleness, mut spans, mut idle, mut parts) = (Idleness::NONE, vec![], 0, 0);
            for _ in 0..rounds {
                idle += 1;
                if idleness.doubts() {
                    spans.push(idle);
                    (idle, parts) = (0, 1 + parts_after_a_trial);
                }
                if parts > 0 {
                    (idleness.used, parts) = (true, parts - 1);
                }
            }
            spans
        };
        // Tried and idle again: only the trial used the device, so the next trial is no sooner.
        assert_eq!(spans(0, 5000), [16, 33, 65, 129, 257, 513, 1025, 1025, 1025]);
        // Fast for a while after the trial.
        assert_eq!(spans(1, 60), [16, 18, 18]);
    }

    /// Memory stays bounded when members come and go under ever new names.
    #[test]
    fn reports_of_past_devices_are_bounded_and_complete() {
        let mut fleet = Fleet::default();
        for i in 0..PAST as u64 + 50 {
            let named = message::Device { name: "cpu 0".into(), class: format!("class {i}") };
            let device = Device { microbatches: 1, ..Device::new(&named) };
            fleet.keep(report(None, &Member::new("w".into()), &device));
        }
        assert_eq!(fleet.past.len(), PAST + 1);
        assert_eq!(fleet.reports().iter().map(|r| r.microbatches).sum::<u64>(), PAST as u64 + 50);
    }

    #[test]
    fn devices_of_one_name_are_numbered() {
        let device = |name: &str| message::Device { name: name.into(), class: "a".into() };
        let named = distinct(&["cpu 0", "cpu 0", "cpu 1", "cpu 0"].map(device));
        let names: Vec<&str> = named.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["cpu 0", "cpu 0 (2)", "cpu 1", "cpu 0 (3)"]);
    }
}
