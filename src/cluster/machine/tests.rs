//! Short conversations, message by message. Interleavings of many conversations are tested by the simulator.

use super::super::message::{Bye, Device, LeaseId, ToCoordinator as From, ToWorker as To, Trouble};
use super::*;
use crate::model::stage::Traffic;
use crate::train::sum::RewardSums;

const HASH: Hash = [7; 32];

/// A machine and the time.
pub(super) struct Bed {
    pub machine: Machine,
    pub now: Duration,
}

impl Bed {
    /// A machine with members 0, 1, ... with one device of class `a` each, in a training round of `items`.
    pub fn train(members: u64, items: usize) -> Self {
        let mut bed = Bed { machine: Machine::new(Config::default()), now: Duration::ZERO };
        bed.event(Event::Parameters { after: 4, hash: HASH });
        (0..members).for_each(|m| drop(bed.join(m, &["a"])));
        bed.event(Event::Begin(Round::of(Kind::Train, vec![100; items])));
        bed
    }

    pub fn event(&mut self, event: Event) -> Vec<Action> {
        self.machine.tick(event, self.now)
    }

    pub fn said(&mut self, member: u64, message: From) -> Vec<Action> {
        self.event(Event::Said { member: MemberId(member), message: &message })
    }

    pub fn join(&mut self, member: u64, classes: &[&str]) -> Vec<Action> {
        self.join_as(
            Event::Joined { member: MemberId(member), name: format!("w{member}"), here: false },
            classes,
        )
    }

    pub fn join_as(&mut self, joined: Event, classes: &[&str]) -> Vec<Action> {
        let Event::Joined { member: MemberId(member), .. } = joined else { panic!("{joined:?}") };
        self.event(joined);
        let device = |(i, c): (usize, &&str)| Device { name: format!("cpu {i}"), class: c.to_string() };
        let devices = classes.iter().enumerate().map(device).collect();
        let mut out = self.said(member, From::Ready { devices, refused: vec![] });
        for device in 0..classes.len() as u16 {
            out.extend(self.said(member, From::Ask { device, room: 4, together: 1 }));
        }
        out
    }

    pub fn announce(&mut self, member: u64, lease: LeaseId) -> Vec<Action> {
        self.said(member, From::Announce { lease, parameters: HASH, micros: 1000, memory: 0 })
    }

    pub fn sum(&mut self, member: u64, sum: u64, leases: &[LeaseId]) -> Vec<Action> {
        self.said(member, sum_of(sum, 5, leases))
    }

    pub fn after(&mut self, millis: u64) -> Vec<Action> {
        self.now += Duration::from_millis(millis);
        self.event(Event::Time)
    }
}

/// The end of a sum of these leases of a step.
pub(super) fn sum_of(sum: u64, step: u64, leases: &[LeaseId]) -> From {
    From::Sum {
        sum,
        step,
        leases: leases.to_vec(),
        loss: 0,
        weight: 0,
        targets: 0,
        rewards: RewardSums::default(),
        parameters: HASH,
        traffic: Traffic::default(),
        relays: None,
    }
}

/// The leases given to a member.
fn leased(out: &[Action], to: u64) -> Vec<LeaseId> {
    let lease = |a: &Action| match a {
        Action::Lease { device, lease, .. } if device.member == MemberId(to) => Some(*lease),
        _ => None,
    };
    out.iter().filter_map(lease).collect()
}

pub(super) fn said(out: &[Action], to: u64) -> Vec<To> {
    let say = |a: &Action| match a {
        Action::Say { member, message } if *member == MemberId(to) => Some(message.clone()),
        _ => None,
    };
    out.iter().filter_map(say).collect()
}

pub(super) fn expelled(out: &[Action], member: u64) -> bool {
    out.contains(&Action::Close { member: MemberId(member) })
        && out.contains(&Action::TakeBack { member: MemberId(member) })
        && said(out, member).iter().any(|m| matches!(m, To::Bye(Bye::Out { again: false, .. })))
}

fn done(out: &[Action]) -> bool {
    out.iter().any(|a| matches!(a, Action::RoundDone(_)))
}

#[test]
fn round_of_one_member_is_granted_summed_and_closed() {
    let mut bed = Bed::train(1, 2);
    bed.now += Duration::from_millis(1);
    let out = bed.announce(0, 1);
    assert_eq!(said(&out, 0), [To::Grant { lease: 1 }]);
    assert_eq!(leased(&out, 0), [2]);
    let out = bed.announce(0, 2);
    assert_eq!(said(&out, 0), [To::Grant { lease: 2 }, To::Flush { step: 5, relays: None }]);
    assert!(bed.machine.wants_sum(MemberId(0), 1) && !bed.machine.wants_sum(MemberId(1), 1));
    let out = bed.sum(0, 1, &[1, 2]);
    assert_eq!(out[0], Action::TakeSum { member: MemberId(0), sum: 1 });
    assert_eq!(said(&out, 0), [To::SumTaken { sum: 1 }]);
    assert!(done(&out) && !bed.machine.wants_sum(MemberId(0), 1));
    let Some(Action::RoundDone(tally)) = out.last() else { panic!("{out:?}") };
    let spans: Vec<(&str, u128, u128)> =
        tally.spans.iter().map(|(p, s)| (p.device.as_str(), s.from.as_millis(), s.to.as_millis())).collect();
    // Each reports one millisecond, which is all the time that passed.
    assert_eq!(spans, [("cpu 0", 0, 1), ("cpu 0", 1, 1)]);
}

#[test]
fn repeated_message_is_answered_and_changes_nothing() {
    let mut bed = Bed::train(2, 4);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    assert_eq!(said(&bed.announce(0, 1), 0), [To::Grant { lease: 1 }]);
    // Leases 1 and 2 go to members 0 and 1; 3 and 4 likewise, or both to the member that was measured first.
    let mut all = vec![(0, 1)];
    for _ in 0..10 {
        for lease in 2..=4 {
            let Some((member, _)) = bed.machine.live_leases().into_iter().find(|&(_, l)| l == lease) else {
                continue;
            };
            bed.now += Duration::from_millis(1);
            bed.announce(member.0, lease);
            all.push((member.0, lease));
        }
    }
    let of = |member| all.iter().filter(|(m, _)| *m == member).map(|&(_, l)| l).collect::<Vec<_>>();
    assert!(!done(&bed.sum(0, 1, &of(0))));
    assert_eq!(said(&bed.sum(0, 1, &of(0)), 0), [To::SumTaken { sum: 1 }]);
    assert!(done(&bed.sum(1, 1, &of(1))));
    assert_eq!(said(&bed.announce(0, 1), 0), [To::Grant { lease: 1 }]);
    bed.event(Event::Parameters { after: 5, hash: [8; 32] });
    bed.event(Event::Begin(Round::of(Kind::Train, vec![1; 4])));
    let late = bed.announce(0, 1);
    assert_eq!(said(&late, 0), [To::Deny { lease: 1 }]);
    assert!(!expelled(&late, 0), "the hash of a late message is that of its own step");
    let late = bed.sum(1, 2, &of(1));
    assert_eq!(late, [Action::TakeBack { member: MemberId(1) }]);
}

#[test]
fn dishonest_message_expels_only_its_sender() {
    let announce = |lease, parameters| From::Announce { lease, parameters, micros: 1, memory: 0 };
    let sum = |step, leases, parameters| From::Sum {
        sum: 1,
        step,
        leases,
        loss: 0,
        weight: 0,
        targets: 0,
        rewards: RewardSums::default(),
        parameters,
        traffic: Traffic::default(),
        relays: None,
    };
    let device = Device { name: "x".into(), class: "a".into() };
    let cases = [
        announce(2, HASH),
        announce(99, HASH),
        announce(1, [0; 32]),
        From::Answer { lease: 1, ids: vec![], parameters: HASH },
        From::Stopped { lease: 2, micros: 0 },
        From::Fault { lease: 99, fault: Trouble::Device { reason: String::new() } },
        From::Ask { device: 1, room: 1, together: 1 },
        From::Ready { devices: vec![], refused: vec![] },
        From::Fallback { device: 9, now: device, reason: String::new() },
        sum(5, vec![], HASH),
        sum(5, vec![1], HASH),
        sum(5, vec![2], HASH),
        sum(5, vec![1], [0; 32]),
    ];
    for case in cases {
        let mut bed = Bed::train(2, 2);
        bed.now += Duration::from_millis(1);
        let out = bed.said(0, case.clone());
        assert!(expelled(&out, 0), "{case:?}: {out:?}");
        // The other member computes all of it.
        bed.announce(1, 2);
        let (_, lease) = bed.machine.live_leases()[0];
        bed.announce(1, lease);
        assert!(done(&bed.sum(1, 1, &[2, lease])), "{case:?}");
    }
}

#[test]
fn granted_work_of_a_lost_member_is_reopened() {
    let mut bed = Bed::train(2, 2);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    let out = bed.event(Event::Lost { member: MemberId(0), reason: "gone".into() });
    assert_eq!(out[0], Action::TakeBack { member: MemberId(0) });
    assert!(matches!(&out[1], Action::Note(Note::Left { reopened: 1, .. })));
    let out = bed.announce(1, 2);
    let again = leased(&out, 1);
    assert_eq!(again.len(), 1);
    bed.announce(1, again[0]);
    let out = bed.sum(1, 1, &[2, again[0]]);
    let Some(Action::RoundDone(tally)) = out.last() else { panic!("{out:?}") };
    assert_eq!((tally.reopened, tally.wasted_tokens, tally.classes["a"]), (1, 100, 2));
}

#[test]
fn idle_device_repeats_late_work_and_the_first_result_counts() {
    let mut bed = Bed::train(2, 2);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    let mut repeated = vec![];
    while repeated.is_empty() {
        let out = bed.after(1);
        repeated = leased(&out, 0);
        assert!(bed.now < Duration::from_millis(10));
    }
    assert_eq!(repeated, [3]);
    assert_eq!(leased(&bed.after(50), 0), [] as [LeaseId; 0], "one at a time");
    let out = bed.announce(0, 3);
    assert_eq!(said(&out, 1), [To::Cancel { lease: 2 }]);
    assert_eq!(said(&bed.announce(1, 2), 1), [To::Deny { lease: 2 }]);
    let out = bed.sum(0, 1, &[1, 3]);
    let Some(Action::RoundDone(tally)) = out.last() else { panic!("{out:?}") };
    assert_eq!((tally.repeats, tally.cancels, tally.wasted_tokens), (1, 1, 100));
}

#[test]
fn leases_in_work_at_the_same_time_are_not_moved() {
    // Member 0 holds three leases, is slow, and computes that many at the same time; member 1 is idle and fast.
    let moved = |together: u16| {
        let mut bed = Bed::train(1, 4);
        bed.said(0, From::Ask { device: 0, room: 4, together });
        bed.now += Duration::from_millis(500);
        let micros = 500_000;
        bed.said(0, From::Announce { lease: 1, parameters: HASH, micros, memory: 0 });
        let mut out = bed.join(1, &["b"]);
        for lease in leased(&out, 1) {
            out.extend(bed.announce(1, lease));
        }
        (0..100).for_each(|_| out.extend(bed.after(1)));
        said(&out, 0).into_iter().filter(|m| matches!(m, To::Cancel { .. })).count()
    };
    assert_eq!(moved(3), 0);
    assert!(moved(1) > 0, "a lease that waits is moved");
}

#[test]
fn repeat_stays_in_its_device_class() {
    let mut bed = Bed::train(0, 2);
    bed.join(0, &["a"]);
    bed.join(1, &["b"]);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    assert_eq!(leased(&bed.after(5000), 0), [] as [LeaseId; 0]);
    let out = bed.event(Event::Lost { member: MemberId(1), reason: String::new() });
    assert_eq!(leased(&out, 0), [3], "once its holder is gone anybody may have it");
}

#[test]
fn bad_value_is_recomputed_elsewhere_and_halts_the_run() {
    let nan =
        |lease| From::Fault { lease, fault: Trouble::Value { tensor: "q".into(), value: f64::INFINITY } };
    let halt = |out: &[Action]| match out.last() {
        Some(Action::Halt(finding)) => finding.again.clone(),
        _ => panic!("{out:?}"),
    };
    for members in [1, 2] {
        let mut bed = Bed::train(members, 8);
        let out = bed.said(0, nan(1));
        let other = members - 1;
        let [lease] = leased(&out, other)[..] else { panic!("{out:?}") };
        assert!(out.iter().any(|a| matches!(a, Action::Lease { purpose: Purpose::Recheck, item: 0, .. })));
        let out = bed.announce(other, lease);
        assert_eq!(said(&out, other), [To::Deny { lease }]);
        assert!(matches!(halt(&out), Some(Again::Not(p)) if p.member == format!("w{other}")));
        assert_eq!(bed.announce(other, lease), [], "it is over");

        let mut bed = Bed::train(members, 8);
        let out = bed.said(0, nan(1));
        let out = bed.said(other, nan(leased(&out, other)[0]));
        assert!(matches!(halt(&out), Some(Again::Also(b)) if b.place.member == format!("w{other}")));

        let mut bed = Bed::train(members, 8);
        bed.said(0, nan(1));
        assert_eq!(halt(&bed.after(60_000)), None);
    }
}

#[test]
fn bad_value_waits_for_a_busy_second_device() {
    let nan = From::Fault { lease: 1, fault: Trouble::Value { tensor: "q".into(), value: f64::NAN } };
    let begin = || {
        let mut bed = Bed::train(1, 8);
        bed.event(Event::Joined { member: MemberId(1), name: "w1".into(), here: false });
        let devices = vec![Device { name: "cpu 0".into(), class: "a".into() }];
        bed.said(1, From::Ready { devices, refused: vec![] });
        let out = bed.said(0, nan.clone());
        assert!(leased(&out, 0).is_empty() && leased(&out, 1).is_empty(), "{out:?}");
        assert_eq!(bed.machine.wake(), Some(Duration::from_secs(30)));
        bed
    };
    let mut bed = begin();
    bed.now += Duration::from_secs(29);
    assert_eq!(leased(&bed.said(1, From::Ask { device: 0, room: 4, together: 1 }), 1).len(), 1);

    // Member 1 is never free: the same device is better than no device.
    let mut bed = begin();
    assert_eq!(bed.after(29_999), []);
    assert_eq!(leased(&bed.after(1), 0).len(), 1);
    assert_eq!(bed.machine.wake(), Some(Duration::from_secs(60)));

    // Member 1 leaves: no other device is left.
    let mut bed = begin();
    let out = bed.event(Event::Lost { member: MemberId(1), reason: String::new() });
    assert_eq!(leased(&out, 0).len(), 1);
}

#[test]
fn failing_device_gets_no_work_before_its_fallback() {
    let mut bed = Bed::train(2, 8);
    let out = bed.said(0, From::Fault { lease: 1, fault: Trouble::Device { reason: "lost".into() } });
    assert_eq!(leased(&out, 0), [] as [LeaseId; 0]);
    let now = Device { name: "cpu".into(), class: "b".into() };
    let out = bed.said(0, From::Fallback { device: 0, now, reason: "lost".into() });
    assert!(
        out.iter().any(|a| matches!(a, Action::Note(Note::Fallback { before, .. }) if before.class == "a"))
    );
    assert_eq!(leased(&out, 0).len(), 1);
}

#[test]
fn machine_waits_pauses_below_the_minimum_and_gives_up() {
    let second = Duration::from_secs(1);
    let config = Config { expect: 3, min: 2, join_timeout: 10 * second, ..Config::default() };
    let mut bed = Bed { machine: Machine::new(config), now: Duration::ZERO };
    bed.event(Event::Parameters { after: 4, hash: HASH });
    let out = bed.event(Event::Begin(Round::of(Kind::Train, vec![1; 9])));
    assert_eq!(out, [Action::Note(Note::Waiting { have: 0, want: 3, counts: Counted::Devices })]);
    assert_eq!(bed.machine.wake(), Some(10 * second));
    let out = bed.join(0, &["a", "a"]);
    assert!(
        out.contains(&Action::Note(Note::Waiting { have: 2, want: 3, counts: Counted::Devices }))
            && leased(&out, 0).is_empty()
    );
    let out = bed.join(1, &["a"]);
    assert!(out.contains(&Action::Note(Note::Running { have: 3 })) && !leased(&out, 0).is_empty());
    let out = bed.event(Event::Lost { member: MemberId(1), reason: String::new() });
    assert!(!out.iter().any(|a| matches!(a, Action::Note(Note::Paused { .. }))), "two are enough now");
    let out = bed.event(Event::Lost { member: MemberId(0), reason: String::new() });
    assert!(out.contains(&Action::Note(Note::Paused { have: 0, want: 2 })));
    assert_eq!(bed.after(9_999), []);
    assert_eq!(bed.after(1), [Action::GiveUp { have: 0, want: 2, counts: Counted::Devices }]);
}

#[test]
fn expected_tasks_count_once_with_any_devices() {
    let config = Config { expect: 2, counts: Counted::Tasks, ..Config::default() };
    let mut bed = Bed { machine: Machine::new(config), now: Duration::ZERO };
    bed.event(Event::Parameters { after: 0, hash: HASH });
    bed.event(Event::Begin(Round::of(Kind::Train, vec![1; 9])));
    let out = bed.join(0, &["a", "a", "a"]);
    let waiting = Note::Waiting { have: 1, want: 2, counts: Counted::Tasks };
    assert!(out.contains(&Action::Note(waiting)) && leased(&out, 0).is_empty(), "{out:?}");
    let out = bed.join(1, &["a"]);
    assert!(out.contains(&Action::Note(Note::Running { have: 4 })) && !leased(&out, 0).is_empty(), "{out:?}");
    // From then on devices count.
    let out = bed.event(Event::Lost { member: MemberId(1), reason: String::new() });
    assert!(!out.iter().any(|a| matches!(a, Action::Note(Note::Paused { .. }))), "{out:?}");
}

#[test]
fn too_few_microbatches_are_noted_once() {
    let mut bed = Bed::train(0, 1);
    bed.join(0, &["a", "a"]);
    bed.event(Event::Abandon);
    let few = Action::Note(Note::Few { microbatches: 5, devices: 2 });
    let begin = |bed: &mut Bed| {
        let out = bed.event(Event::Begin(Round::of(Kind::Train, vec![1; 5])));
        bed.event(Event::Abandon);
        out.contains(&few)
    };
    assert!(begin(&mut bed) && !begin(&mut bed));
}

#[test]
fn missing_sum_is_requested_again() {
    let mut bed = Bed::train(1, 1);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    assert_eq!(bed.machine.wake(), Some(bed.now + Duration::from_secs(30)));
    assert_eq!(bed.after(29_999), []);
    assert_eq!(said(&bed.after(1), 0), [To::Flush { step: 5, relays: None }]);
}

#[test]
fn work_of_a_member_without_a_sum_is_reassigned_at_once() {
    let mut bed = Bed::train(2, 2);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    bed.announce(1, 2);
    assert!(!done(&bed.sum(1, 1, &[2])));
    let mut out = Vec::new();
    while !out.contains(&Action::Close { member: MemberId(0) }) {
        let wake = bed.machine.wake().expect("it goes on");
        bed.now = wake;
        out = bed.event(Event::Time);
    }
    assert_eq!(leased(&out, 1).len(), 1, "{out:?}");
}

#[test]
fn late_device_gets_work_again_after_it_stops() {
    let mut bed = Bed::train(2, 2);
    bed.now += Duration::from_millis(1);
    bed.announce(0, 1);
    bed.after(8);
    bed.announce(0, 3);
    assert!(done(&bed.sum(0, 1, &[1, 3])));
    bed.event(Event::Begin(Round::of(Kind::Train, vec![100; 64])));
    bed.said(1, From::Stopped { lease: 2, micros: 9000 });
    bed.now += Duration::from_secs(30);
    let (_, lease) = *bed.machine.live_leases().iter().find(|(m, _)| *m == MemberId(0)).unwrap();
    let out = bed.announce(0, lease);
    let held = bed.machine.live_leases();
    assert!(held.iter().any(|(m, _)| *m == MemberId(1)), "{held:?} {out:?}");
}

/// A round of one microbatch under older parameters, and the next step with two under the newest, on one device.
fn delayed() -> Bed {
    let mut bed =
        Bed { machine: Machine::new(Config { delay: 1, ..Config::default() }), now: Duration::ZERO };
    bed.event(Event::Parameters { after: 3, hash: OLDER });
    bed.event(Event::Parameters { after: 4, hash: HASH });
    bed.join(0, &["a"]);
    let ahead = vec![100, 100];
    bed.event(Event::Begin(Round { ahead, ..Round::of(Kind::Train, vec![100]) }));
    bed.now += Duration::from_millis(1);
    bed
}

const OLDER: Hash = [6; 32];

fn older(message: From) -> From {
    match message {
        From::Announce { lease, micros, memory, .. } => {
            From::Announce { lease, parameters: OLDER, micros, memory }
        }
        From::Sum { sum, step, leases, loss, weight, targets, rewards, traffic, .. } => From::Sum {
            sum,
            step,
            leases,
            loss,
            weight,
            targets,
            rewards,
            parameters: OLDER,
            traffic,
            relays: None,
        },
        other => other,
    }
}

fn announced(lease: LeaseId) -> From {
    From::Announce { lease, parameters: HASH, micros: 1000, memory: 0 }
}

#[test]
fn next_step_is_computed_while_a_sum_is_on_its_way() {
    let mut bed = delayed();
    let out = bed.said(0, older(announced(1)));
    assert_eq!(said(&out, 0), [To::Grant { lease: 1 }, To::Flush { step: 5, relays: None }]);
    assert_eq!(leased(&out, 0), [2, 3], "the device computes the next step meanwhile");
    assert_eq!(said(&bed.said(0, announced(2)), 0), [To::Grant { lease: 2 }]);
    let out = bed.said(0, older(sum_of(1, 5, &[1])));
    assert!(done(&out) && said(&out, 0) == [To::SumTaken { sum: 1 }]);
    bed.event(Event::Parameters { after: 5, hash: [8; 32] });
    let out = bed.event(Event::Begin(Round::of(Kind::Train, vec![100, 100])));
    assert_eq!((leased(&out, 0), said(&out, 0)), (vec![], vec![]), "lease 3 is still in work");
    let out = bed.said(0, announced(3));
    assert_eq!(said(&out, 0), [To::Grant { lease: 3 }, To::Flush { step: 6, relays: None }]);
    assert_eq!(said(&bed.said(0, older(announced(1))), 0), [To::Deny { lease: 1 }], "its step is over");
    assert!(done(&bed.said(0, sum_of(2, 6, &[2, 3]))));
}

#[test]
fn sums_of_the_wrong_step_do_not_count() {
    // A sum of another step is dropped: after a round it may be late.
    for (message, expels) in
        [(sum_of(1, 5, &[1, 2]), true), (sum_of(1, 5, &[2]), true), (sum_of(1, 6, &[2]), false)]
    {
        let mut bed = delayed();
        bed.said(0, older(announced(1)));
        bed.said(0, announced(2));
        let out = bed.said(0, older(message));
        assert_eq!((expelled(&out, 0), done(&out)), (expels, false), "{out:?}");
    }
}

#[test]
fn results_of_other_parameters_expel_their_sender() {
    let mut bed = delayed();
    assert!(expelled(&bed.said(0, announced(1)), 0), "it is computed with the older parameters");
    let mut bed = delayed();
    bed.said(0, older(announced(1)));
    assert!(expelled(&bed.said(0, older(announced(2))), 0), "it is computed with the newest parameters");
}

#[test]
fn a_bad_value_of_the_next_step_waits_for_that_step() {
    let mut bed = delayed();
    let out = bed.said(0, older(announced(1)));
    assert_eq!(leased(&out, 0), [2, 3]);
    bed.join(1, &["a"]);
    let fault = Trouble::Value { tensor: "q".into(), value: f64::NAN };
    let out = bed.said(0, From::Fault { lease: 2, fault });
    assert!(said(&out, 0).is_empty() && bed.machine.recheck.is_none(), "{out:?}");
    assert!(done(&bed.said(0, older(sum_of(1, 5, &[1])))));
    bed.event(Event::Parameters { after: 5, hash: [8; 32] });
    let out = bed.event(Event::Begin(Round::of(Kind::Train, vec![100, 100])));
    let again = |a: &Action| matches!(a, Action::Lease { item: 0, purpose: Purpose::Recheck, .. });
    assert!(bed.machine.recheck.is_some() && out.iter().any(again), "{out:?}");
}

#[test]
fn work_of_both_steps_is_leased_again_if_its_member_is_lost() {
    let mut bed = delayed();
    bed.said(0, older(announced(1)));
    bed.said(0, announced(2));
    bed.join(1, &["a"]);
    let out = bed.event(Event::Lost { member: MemberId(0), reason: String::new() });
    let own = |bed: &Bed, lease| bed.machine.round.as_ref().is_some_and(|round| round.owns(lease));
    let [first] = leased(&out, 1)[..] else { panic!("{out:?}") };
    assert!(own(&bed, first), "the older step comes first");
    bed.now += Duration::from_millis(1);
    let out = bed.said(1, older(announced(first)));
    assert_eq!(said(&out, 1), [To::Grant { lease: first }, To::Flush { step: 5, relays: None }]);
    let next = leased(&out, 1);
    assert!(next.len() == 2 && next.iter().all(|&lease| !own(&bed, lease)), "{out:?}");
}
