//! Checks, message by message. Whole runs with liars are in the simulator.

use super::super::tests::{Bed, expelled, said, sum_of};
use super::super::{Config, Event, Machine, Round, Verify};
use super::*;
use crate::cluster::message::{ToCoordinator as From, ToWorker as To, Trouble};
use std::collections::VecDeque;

const HASH: Hash = [7; 32];

/// All microbatches are checked. Members have one device each, of these classes; `own` is this process.
fn bed(classes: &[&str], own: Option<u64>, items: usize) -> Bed {
    let config = Config { verify: Some(Verify::new(1.0, [3; 32])), ..Config::default() };
    bed_of(config, classes, own, items)
}

fn bed_of(config: Config, classes: &[&str], own: Option<u64>, items: usize) -> Bed {
    let mut bed = Bed { machine: Machine::new(config), now: Duration::ZERO };
    bed.event(Event::Parameters { after: 4, hash: HASH });
    for (member, class) in (0..).zip(classes) {
        let here = own == Some(member);
        let name = format!("w{member}");
        bed.join_as(Event::Joined { member: MemberId(member), name, here }, &[class]);
    }
    bed.event(Event::Begin(Round::of(Kind::Train, vec![100; items])));
    bed
}

/// The leases of this purpose: member and number.
fn leases(out: &[Action], purpose: Purpose) -> Vec<(u64, LeaseId)> {
    let lease = |a: &Action| match a {
        Action::Lease { device, lease, purpose: p, .. } if *p == purpose => Some((device.member.0, *lease)),
        _ => None,
    };
    out.iter().filter_map(lease).collect()
}

/// Announces a lease and delivers it as this sum with this hash. Returns all that follows.
fn deliver(bed: &mut Bed, (member, lease): (u64, LeaseId), sum: u64, digest: u8) -> Vec<Action> {
    let announced = bed.announce(member, lease);
    assert_eq!(said(&announced, member)[0], To::Deliver { lease });
    let out = bed.sum(member, sum, &[lease]);
    assert!(out.contains(&Action::Hash { member: MemberId(member), sum }), "{out:?}");
    assert!(said(&out, member).contains(&To::SumTaken { sum }));
    assert!(!out.iter().any(|a| matches!(a, Action::TakeSum { .. })), "it does not count yet");
    let hashed = bed.event(Event::Hashed { member: MemberId(member), sum, digest: [digest; 32] });
    [announced, out, hashed].concat()
}

fn again(bed: &mut Bed, (member, lease): (u64, LeaseId), digest: u8) -> Vec<Action> {
    let digest = [digest; 32];
    bed.said(member, From::Verified { lease, digest, parameters: HASH, micros: 1, memory: 0 })
}

fn done(out: &[Action]) -> bool {
    out.iter().any(|a| matches!(a, Action::RoundDone(_)))
}

fn checks(out: &[Action]) -> (u64, u64) {
    let counts = |a: &Action| match a {
        Action::RoundDone(tally) => Some((tally.checked, tally.unchecked)),
        _ => None,
    };
    out.iter().find_map(counts).expect("the round is over")
}

#[test]
fn equal_results_count_at_the_end_of_the_round() {
    let mut bed = bed(&["a", "a"], None, 1);
    let (first, lease) = (0, 1);
    let out = deliver(&mut bed, (first, lease), 1, 9);
    let asked = leases(&out, Purpose::Verify);
    assert_eq!(asked, [(1, 2)], "the other member computes it again");
    let out = again(&mut bed, asked[0], 9);
    assert!(out.contains(&Action::TakeSum { member: MemberId(0), sum: 1 }) && done(&out), "{out:?}");
    assert_eq!(checks(&out), (1, 0));
    // Late and repeated answers change nothing.
    assert_eq!(again(&mut bed, asked[0], 8), []);
    assert_eq!(said(&bed.announce(first, lease), first), [To::Deliver { lease }]);
}

#[test]
fn third_device_decides_who_is_taken_out() {
    for (third, wrong) in [(9, 1), (8, 0)] {
        let mut bed = bed(&["a", "a", "a", "b", "b"], None, 1);
        let holder = leases(&bed.after(0), Purpose::Round);
        assert_eq!(holder, [], "given when the round began");
        let out = deliver(&mut bed, (0, 1), 1, 9);
        let second = leases(&out, Purpose::Verify)[0];
        assert!(second.0 == 1 || second.0 == 2, "of the class");
        let out = again(&mut bed, second, 8);
        let last = leases(&out, Purpose::Verify)[0];
        assert!([0, second.0].iter().all(|m| *m != last.0) && last.0 < 3, "a third of the class: {last:?}");
        let out = again(&mut bed, last, third);
        let wrong = if wrong == 0 { 0 } else { second.0 };
        assert!(expelled(&out, wrong), "{out:?}");
        let reason = |a: &Action| match a {
            Action::Note(Note::Left { member, reason, .. }) => Some((member.clone(), reason.clone())),
            _ => None,
        };
        let (member, reason) = out.iter().find_map(reason).unwrap();
        assert_eq!(member, format!("w{wrong}"));
        for part in ["removed: in step 5, microbatch 0, cpu 0 has ", "09090909", "08080808", "none counted"] {
            assert!(reason.contains(part), "{part:?} in {reason:?}");
        }
        // The work of the holder is done again if it was wrong; else it counts.
        assert_eq!(done(&out), wrong != 0);
        assert_eq!(leases(&out, Purpose::Round).len(), usize::from(wrong == 0));
    }
}

#[test]
fn everything_of_a_liar_in_the_step_is_done_again() {
    let mut bed = bed(&["a", "a", "a"], None, 4);
    // Items 0 and 3; the first is right, the other is not.
    let mut out = deliver(&mut bed, (0, 1), 1, 5);
    assert!(leases(&out, Purpose::Round).contains(&(0, 4)), "it gets the fourth");
    out.extend(deliver(&mut bed, (0, 4), 2, 5));
    out.extend(deliver(&mut bed, (1, 2), 1, 5));
    out.extend(deliver(&mut bed, (2, 3), 1, 5));
    let check = |a: &Action| match a {
        Action::Lease { device, lease, item, purpose: Purpose::Verify } => {
            Some((device.member.0, *lease, *item))
        }
        _ => None,
    };
    let mut asked: VecDeque<_> = out.iter().filter_map(check).collect();
    while let Some((member, lease, item)) = asked.pop_front() {
        let out = again(&mut bed, (member, lease), if item == 3 { 6 } else { 5 });
        asked.extend(out.iter().filter_map(check));
        if expelled(&out, 0) {
            let reopened = |a: &Action| matches!(a, Action::Note(Note::Left { reopened: 2, .. }));
            assert!(out.iter().any(reopened), "{out:?}");
            return;
        }
    }
    panic!("the liar was not taken out");
}

#[test]
fn two_that_differ_halt_the_run_with_both_names() {
    let mut bed = bed(&["a", "a"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    let second = leases(&out, Purpose::Verify)[0];
    again(&mut bed, second, 8);
    assert!(!bed.after(59_000).iter().any(|a| matches!(a, Action::Dispute { .. })), "a third may come");
    let wake = bed.machine.wake().unwrap();
    assert_eq!(wake, Duration::from_secs(60));
    let out = bed.after(1_001);
    let Some(Action::Dispute { item: 0, results }) = out.last() else { panic!("{out:?}") };
    let names: Vec<(&str, &str)> = results.iter().map(|(p, d)| (&*p.member, &**d)).collect();
    assert_eq!(names, [("w0", "09090909"), ("w1", "08080808")]);
}

#[test]
fn third_that_comes_in_time_decides() {
    let mut bed = bed(&["a", "a"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    again(&mut bed, leases(&out, Purpose::Verify)[0], 8);
    bed.after(30_000);
    let out = bed.join(2, &["a"]);
    let last = leases(&out, Purpose::Verify)[0];
    assert_eq!(last.0, 2);
    assert!(expelled(&again(&mut bed, last, 9), 1));
}

/// This process decides where only one other has its class: it computes once more.
#[test]
fn own_device_decides_between_two() {
    for (once_more, wrong) in [(8, 0), (9, 1)] {
        let mut bed = bed(&["a", "a"], Some(0), 1);
        let out = deliver(&mut bed, (0, 1), 1, 9);
        let other = leases(&out, Purpose::Verify)[0];
        assert_eq!(other.0, 1);
        let out = again(&mut bed, other, 8);
        let own = leases(&out, Purpose::Verify)[0];
        assert_eq!(own.0, 0, "once more");
        assert!(expelled(&again(&mut bed, own, once_more), wrong), "{once_more}");
    }
}

#[test]
fn own_device_of_a_class_of_its_own_is_trusted() {
    let mut bed = bed(&["a", "b", "b"], Some(0), 1);
    let holder = (0, 1);
    let out = deliver(&mut bed, holder, 1, 9);
    assert_eq!(checks(&out), (0, 1));
}

#[test]
fn device_of_a_class_of_its_own_gets_no_work() {
    let mut bed = bed(&["a", "b"], None, 3);
    let out = bed.after(1);
    assert_eq!(leases(&out, Purpose::Round), []);
    let lone = |out: &[Action]| out.iter().filter(|a| matches!(a, Action::Note(Note::Lone { .. }))).count();
    assert_eq!(lone(&out), 0, "said once, when the round began");
    let out = bed.join(2, &["b"]);
    let given = leases(&out, Purpose::Round);
    assert!(!given.is_empty() && given.iter().all(|l| l.0 > 0), "{given:?}");
    // The other leaves: what was delivered cannot be checked, so its worker joins again and waits.
    let one = given[0];
    let out = bed.event(Event::Lost { member: MemberId(3 - one.0), reason: String::new() });
    assert_eq!(lone(&out), 1);
    deliver(&mut bed, one, 1, 9);
    bed.after(1_000);
    let out = bed.after(60_000);
    let bye = said(&out, one.0).into_iter().find_map(|m| if let To::Bye(bye) = m { Some(bye) } else { None });
    let Some(Bye::Out { reason, again: true }) = bye else { panic!("{out:?}") };
    assert!(reason.contains("no other worker has a device of class b"), "{reason}");
}

#[test]
fn run_without_checkable_devices_gives_up() {
    let mut bed = bed(&["a", "b"], None, 1);
    let out = bed.after(600_001);
    let give_up = |a: &Action| match a {
        Action::GiveUp { have, want, counts } => Some((*have, *want, *counts)),
        _ => None,
    };
    let counts = super::super::Counted::Checkable;
    assert_eq!(out.iter().find_map(give_up), Some((0, 1, counts)), "{out:?}");
}

#[test]
fn lost_checker_is_replaced_and_lost_holder_forgotten() {
    let mut bed = bed(&["a", "a", "a"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    let second = leases(&out, Purpose::Verify)[0];
    let out = bed.event(Event::Lost { member: MemberId(second.0), reason: String::new() });
    let third = leases(&out, Purpose::Verify)[0];
    assert!(third.0 != second.0 && third.0 != 0);
    let out = bed.event(Event::Lost { member: MemberId(0), reason: String::new() });
    assert!(out.contains(&Action::TakeBack { member: MemberId(0) }));
    assert_eq!(again(&mut bed, third, 8).iter().filter(|a| matches!(a, Action::Close { .. })).count(), 0);
}

/// A late answer to a check of before says nothing about an item that another class computes now.
#[test]
fn answer_of_another_class_is_no_opinion() {
    let mut bed = bed(&["a", "a", "b", "b"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    let old = leases(&out, Purpose::Verify)[0];
    assert_eq!(old.0, 1);
    let out = bed.event(Event::Lost { member: MemberId(0), reason: String::new() });
    assert!(said(&out, 1).contains(&To::Cancel { lease: old.1 }), "its result is not needed: {out:?}");
    let next = leases(&out, Purpose::Round)[0];
    assert!(next.0 > 1, "of the other class: {next:?}");
    let out = deliver(&mut bed, next, 1, 5);
    let check = leases(&out, Purpose::Verify)[0];
    assert_eq!(again(&mut bed, old, 8), []);
    let out = again(&mut bed, check, 5);
    assert!(done(&out) && !expelled(&out, 1), "{out:?}");
}

/// A device that neither answers nor stops does not block others for ever.
#[test]
fn checker_that_hangs_is_taken_out() {
    let mut bed = bed(&["a", "a"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    let check = leases(&out, Purpose::Verify)[0];
    let mut out = Vec::new();
    for _ in 0..100 {
        out = bed.after(10_000);
        if expelled(&out, check.0) {
            break;
        }
    }
    assert!(expelled(&out, check.0), "{out:?}");
    let out = bed.join(2, &["a"]);
    let last = leases(&out, Purpose::Verify)[0];
    assert!(done(&again(&mut bed, last, 9)));
}

/// Which of the able members checks is a draw of the key.
#[test]
fn no_member_can_choose_whom_it_checks() {
    let asked = |key: u8| {
        let config = Config { verify: Some(Verify::new(1.0, [key; 32])), ..Config::default() };
        let mut bed = bed_of(config, &["a", "a", "a", "a"], None, 1);
        leases(&deliver(&mut bed, (0, 1), 1, 9), Purpose::Verify)[0].0
    };
    let asked: BTreeSet<u64> = (0..32).map(asked).collect();
    assert_eq!(asked, BTreeSet::from([1, 2, 3]));
}

/// A worker that comes back is another member, and its result of before no longer counts.
#[test]
fn returning_worker_has_one_result() {
    let mut bed = bed(&["a", "a", "a"], None, 1);
    let out = deliver(&mut bed, (0, 1), 1, 9);
    let second = leases(&out, Purpose::Verify)[0];
    let out = again(&mut bed, second, 8);
    let third = leases(&out, Purpose::Verify)[0];
    bed.event(Event::Lost { member: MemberId(second.0), reason: String::new() });
    bed.event(Event::Lost { member: MemberId(third.0), reason: String::new() });
    let out = bed.join(3, &["a"]);
    let back = leases(&out, Purpose::Verify)[0];
    let out = again(&mut bed, back, 8);
    assert!(!expelled(&out, 0), "its two results are one: {out:?}");
    let out = bed.join(4, &["a"]);
    let last = leases(&out, Purpose::Verify)[0];
    assert!(expelled(&again(&mut bed, last, 9), 3));
}

/// A message that no correct worker sends where results are checked.
#[test]
fn other_answers_than_asked_for_are_expelled() {
    let mut one = bed(&["a", "a"], None, 4);
    let out = one.announce(0, 1);
    let next = leases(&out, Purpose::Round)[0];
    one.announce(0, next.1);
    assert!(expelled(&one.sum(0, 1, &[1, next.1]), 0), "two in one sum");

    let mut two = bed(&["a", "a"], None, 1);
    let out = deliver(&mut two, (0, 1), 1, 9);
    let (member, lease) = leases(&out, Purpose::Verify)[0];
    assert!(expelled(&two.announce(member, lease), member), "an announcement where a hash is due");

    // It would take back what was delivered and checked.
    let mut other = bed(&["a", "a", "a"], None, 2);
    deliver(&mut other, (0, 1), 1, 9);
    assert!(expelled(&other.said(0, sum_of(2, 4, &[])), 0), "a sum of another step");

    let mut three = bed(&["a", "a"], None, 2);
    assert!(expelled(&again(&mut three, (0, 1), 9), 0), "a hash where an announcement is due");
    assert!(expelled(&Bed::train(1, 1).said(0, verified(1)), 0), "a hash where nothing is checked");
}

fn verified(lease: LeaseId) -> From {
    From::Verified { lease, digest: [1; 32], parameters: HASH, micros: 1, memory: 0 }
}

/// Two members of the class find no bad value: the first is taken out, and the run goes on.
#[test]
fn bad_value_of_one_device_does_not_halt_the_run() {
    let fault = |lease| From::Fault { lease, fault: Trouble::Value { tensor: "q".into(), value: f64::NAN } };
    let mut bed = bed(&["a", "a", "a"], None, 3);
    let out = bed.said(0, fault(1));
    for lease in [2, 3] {
        bed.said(lease - 1, From::Stopped { lease, micros: 0 });
    }
    let mut out = [out, bed.join(3, &["b"])].concat();
    for turn in 0..2 {
        for member in [1, 2] {
            out.extend(bed.said(member, From::Ask { device: 0, room: 4, together: 1 }));
        }
        let asked = leases(&out, Purpose::Recheck);
        let (member, lease) = *asked.last().expect("it is computed again");
        assert!(member == 1 || member == 2, "of the class: {asked:?}");
        out = bed.announce(member, lease);
        assert_eq!(expelled(&out, 0), turn == 1, "{out:?}");
        assert!(!out.iter().any(|a| matches!(a, Action::Halt(_))));
    }
    assert!(!leases(&out, Purpose::Round).is_empty(), "the round goes on");
}

#[test]
fn draws_are_of_the_share_and_of_the_key() {
    for share in [0.02, 0.5] {
        let verify = Verify::new(share, [1; 32]);
        let taken = (0..20_000).filter(|lease| verify.takes(*lease)).count() as f64 / 20_000.0;
        assert!((taken / share - 1.0).abs() < 0.15, "{taken} of {share}");
    }
    let of = |key: u8| (0..256).map(|lease| Verify::new(0.5, [key; 32]).takes(lease)).collect::<Vec<_>>();
    assert_ne!(of(1), of(2));
    assert!((0..1000).all(|lease| Verify::new(1.0, [5; 32]).takes(lease)));
    assert!(!format!("{:?}", Verify::new(1.0, [77; 32])).contains("77"), "the key is not shown");
    assert_eq!(Verify::found_after(0.02), (50, 228));
    assert_eq!(Verify::found_after(1.0), (1, 1));
}

#[test]
fn evaluations_are_not_checked() {
    let mut bed = bed(&["a", "b"], None, 1);
    bed.event(Event::Abandon);
    let out = bed.event(Event::Begin(Round::of(Kind::Eval, vec![100; 2])));
    assert_eq!(leases(&out, Purpose::Round).len(), 2, "also of a class of its own");
}
