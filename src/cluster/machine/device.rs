//! Messages about a worker's own devices: their measurements and their fallbacks. Their values are checked against
//! bounds because they are added up and written to metrics.jsonl.

use super::super::message::{Device as Named, LeaseId, Trials};
use super::Machine;
use super::action::{DeviceReport, Note};
use super::event::{DeviceId, MemberId};
use super::fleet::{self, report};
use crate::train::event::Link;

impl Machine {
    /// Stores the measurements of a member's devices.
    pub(super) fn came_measured(&mut self, member: MemberId, measured: &[Trials], link: Option<Link>) {
        let Some(m) = self.fleet.member_mut(member) else { return };
        if std::mem::replace(&mut m.measured, true) {
            return self.expel(member, "it was measured twice");
        }
        let devices = m.devices.as_deref_mut().unwrap_or_default();
        if devices.len() != measured.len() {
            return self.expel(member, "it measured other devices than it has");
        }
        // These values are written to metrics.jsonl, whose numbers are finite.
        let sound =
            |l: &Link| l.bandwidth.is_normal() && l.bandwidth > 0.0 && (0.0..1e9).contains(&l.round_trip);
        m.link = link.filter(sound);
        devices.iter_mut().zip(measured).for_each(|(device, trials)| device.speed.admit(trials));
        let reports = self.fleet.reports().into_iter();
        let devices = reports.filter(|r| r.id.is_some_and(|id| id.member == member) && r.trials > 0);
        let devices: Vec<DeviceReport> = devices.collect();
        if !devices.is_empty() {
            self.note(Note::Measured { devices });
        }
    }

    /// The device stops: its remaining leases become open again.
    pub(super) fn stand_down(&mut self, id: DeviceId) {
        let Some(device) = self.fleet.device_mut(id) else { return };
        device.up = false;
        let leases: Vec<LeaseId> = device.queue.drain(..).collect();
        self.fleet.recount();
        self.fleet.resting.insert(id.member);
        for lease in leases {
            if let Some(round) = &mut self.round {
                round.tally.reopened += u64::from(round.ledger.cancel(lease));
                self.call_back(lease);
            }
        }
    }

    pub(super) fn fell_back(&mut self, id: DeviceId, named: &Named, reason: &str) {
        if self.fleet.device(id).is_none() {
            return self.expel(id.member, "it spoke of a device that it does not have");
        }
        let before = self.fleet.place(id);
        if self.fleet.device(id).is_some_and(|d| d.fallbacks >= fleet::CHAIN) {
            return self.expel(id.member, "a device of it fell back more often than there are backends");
        }
        self.stand_down(id);
        let Some(m) = self.fleet.member_mut(id.member) else { return };
        let Some(device) = m.devices.as_mut().and_then(|d| d.get_mut(usize::from(id.index))) else { return };
        let old = std::mem::replace(device, fleet::Device::new(named));
        (device.room, device.fallbacks) = (old.room, old.fallbacks + 1);
        let done = report(None, m, &old);
        self.fleet.recount();
        self.fleet.keep(done);
        self.note(Note::Fallback { before, now: named.clone(), reason: reason.to_string() });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Bed, expelled, said};
    use super::super::{Action, Config};
    use super::*;
    use crate::cluster::message::{Packed, ToCoordinator as From, ToWorker as To};
    use crate::numeric::line::Points;
    use std::time::Duration;

    fn trials(n: f64) -> Points {
        Points { n, x: 100.0 * n, y: n, xx: 1e4 * n, xy: 100.0 * n }
    }

    fn measured(points: Points, link: Link) -> From {
        let trials = Trials { time: points, ..Trials::default() };
        From::Measured { devices: vec![trials], link: Some(link) }
    }

    fn noted(out: &[Action]) -> Vec<&DeviceReport> {
        let note = |a| match a {
            &Action::Note(Note::Measured { ref devices }) => Some(devices),
            _ => None,
        };
        out.iter().filter_map(note).flatten().collect()
    }

    /// Every value goes into metrics.jsonl, which has no infinite numbers: a run with one could not resume.
    #[test]
    fn non_finite_measurements_are_dropped_and_repeats_expelled() {
        let fine = Link { bandwidth: 1e9, round_trip: 1e-3 };
        for (link, kept) in [
            (fine, true),
            (Link { round_trip: f64::INFINITY, ..fine }, false),
            (Link { round_trip: f64::NAN, ..fine }, false),
            (Link { round_trip: -1.0, ..fine }, false),
            (Link { bandwidth: f64::INFINITY, ..fine }, false),
        ] {
            let mut bed = Bed::train(1, 2);
            let out = bed.said(0, measured(trials(2.0), link));
            let devices = noted(&out);
            assert_eq!(devices.iter().map(|d| d.link).collect::<Vec<_>>(), [Some(link).filter(|_| kept)]);
            assert!(expelled(&bed.said(0, measured(trials(2.0), fine)), 0), "said once");
        }
        let bad = |change: fn(&mut Points)| {
            let mut points = trials(2.0);
            change(&mut points);
            points
        };
        for points in [
            bad(|p| p.xx = f64::INFINITY),
            bad(|p| p.xy = f64::INFINITY),
            bad(|p| p.x = f64::NAN),
            bad(|p| p.y = f64::INFINITY),
            bad(|p| p.xx = f64::NAN),
            bad(|p| p.xy = -1.0),
        ] {
            let out = Bed::train(1, 2).said(0, measured(points, fine));
            assert!(noted(&out).is_empty() && !expelled(&out, 0), "{points:?}");
        }
    }

    #[test]
    fn number_of_fallbacks_is_limited() {
        let mut bed = Bed::train(1, 1);
        let back = |class: u8| {
            let now = Named { name: "cpu 0".into(), class: format!("class {class}") };
            From::Fallback { device: 0, now, reason: "again".into() }
        };
        for class in 0..fleet::CHAIN {
            assert!(!expelled(&bed.said(0, back(class)), 0), "{class}");
        }
        assert!(expelled(&bed.said(0, back(fleet::CHAIN)), 0));
    }

    /// A member that restarts its sum again and again counts as silent.
    #[test]
    fn restarted_sum_does_not_extend_its_deadline() {
        let Config { reask, reasks, .. } = Config::default();
        let mut bed = Bed::train(1, 1);
        bed.now += Duration::from_millis(1);
        assert!(said(&bed.announce(0, 1), 0).contains(&To::Flush { step: 5, relays: None }));
        let piece =
            |offset| From::SumPiece { sum: 1, offset, len: 9, packed: Packed::Fixed(Default::default()) };
        let wait = |bed: &mut Bed, offsets: &dyn Fn(u32) -> u64| {
            for turn in 0..3 * reasks {
                bed.said(0, piece(offsets(turn)));
                let out = bed.after(reask.as_millis() as u64 - 1);
                if out.iter().any(|a| matches!(a, Action::Close { .. })) {
                    return Some(turn);
                }
                let out = bed.after(1);
                if out.iter().any(|a| matches!(a, Action::Close { .. })) {
                    return Some(turn);
                }
            }
            None
        };
        assert_eq!(wait(&mut bed, &|turn| u64::from(turn) << 16), None, "it comes, however slowly");
        assert!(wait(&mut bed, &|turn| u64::from(turn % 2) << 16).is_some(), "it begins again and again");
    }

    #[test]
    fn member_without_devices_leaves_without_a_second_note() {
        let mut bed = Bed::train(1, 1);
        let noted =
            |out: &[Action]| out.iter().filter(|a| matches!(a, Action::Note(Note::Left { .. }))).count();
        bed.join(1, &[]);
        assert_eq!(noted(&bed.said(1, From::Leave { reason: "no device here can take part".into() })), 0);
        bed.join(2, &["b"]);
        assert_eq!(noted(&bed.said(2, From::Leave { reason: "it was asked to stop".into() })), 1);
        // A removal for a protocol error is always reported.
        bed.join(3, &[]);
        assert_eq!(noted(&bed.said(3, From::Ready { devices: vec![], refused: vec![] })), 1);
    }
}
