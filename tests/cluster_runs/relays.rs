//! Relays (`--relays`): workers that add parts of the sums for each other and pass on the parameters. No bit depends on them.

use crate::fleet::{Fleet, RUN};
use crate::hosts::{Hosts, Path};
use std::time::Duration;

/// What the coordinator says when a set of relays works, and when it ends one.
const TOGETHER: &str = "workers add parts of the sums for each other";
const APART: &str = "all sums go to the coordinator";

/// More than three cells of values, so that several relays have some.
const LARGE: &str = "demo --data many.jsonl --batch-size 24 --micro-batch-tokens 64 --rank 96 --dropout 0.1";

#[test]
fn sums_of_relays_have_the_bytes_of_one_process() {
    let classifier = "demo --data classes.jsonl --task classify --num-classes 2 --quantize nf4 --batch-size 24 \
                      --micro-batch-tokens 64 --rank 4";
    let preference = "demo --data pairs.jsonl --task dpo --batch-size 24 --micro-batch-tokens 64 --rank 4";
    for (run, names) in [
        (LARGE.to_string(), &["a", "b", "c", "d"][..]),
        (format!("{classifier} --eval-split 8 --eval-steps 2"), &["a", "b"]),
        (format!("{preference} --sum-bits 6 --update-bits 8"), &["a", "b", "c"]),
        (format!("{RUN} --islands 3 --inner-steps 2"), &["a", "b"]),
    ] {
        let run = format!("{run} --max-steps 8");
        let mut fleet = Fleet::of_all_tasks();
        let alone = fleet.alone(&run);
        // The coordinator's own device takes part without being a relay.
        let here = if names.len() == 2 { "--gpus cpu --threads 1" } else { "" };
        let expected = names.len() + usize::from(!here.is_empty());
        fleet.coordinator(&format!("{run} --relays always {here} --expect-workers {expected}"));
        names.iter().for_each(|name| fleet.faulty(name, "--threads 1", "slow=10"));
        fleet.all_end(&[&["coordinator"], names].concat(), 0);
        assert!(fleet.adapter("out") == alone, "{run}\n{}", fleet.all());
        let said = fleet.said("coordinator");
        assert!(said.contains(TOGETHER) && !said.contains(APART), "{}", fleet.all());
    }
}

/// The coordinator gets one sum and sends one set of parameters, however many workers there are.
#[test]
fn relays_lighten_the_coordinators_network() {
    let bytes = |relays: &str| {
        let mut fleet = Fleet::new();
        let names = ["a", "b", "c", "d"];
        fleet.coordinator(&format!("{LARGE} --max-steps 8 --relays {relays} --expect-workers 4"));
        names.iter().for_each(|name| fleet.faulty(name, "--threads 1", "slow=10"));
        fleet.all_end(&[&["coordinator"], &names[..]].concat(), 0);
        let steps = fleet.bench.events("out", "step");
        let last = &steps[steps.len() - 1]["shared"];
        ["bytes_in", "bytes_out"].map(|name| last[name].as_u64().unwrap())
    };
    let ([apart_in, apart_out], [together_in, together_out]) = (bytes("never"), bytes("always"));
    assert!(together_in * 3 < apart_in * 2, "{together_in} of {apart_in} bytes");
    assert_eq!(together_out * 4, apart_out);
}

/// A relay that is killed takes sums and parameters of others with it; all of them are sent again.
#[test]
fn killed_relays_change_no_byte() {
    let run = format!("{LARGE} --max-steps 24");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --relays always --expect-workers 3"));
    let names: Vec<String> = (0..7).map(|n| format!("w{n}")).collect();
    names[..3].iter().for_each(|name| fleet.faulty(name, "--threads 1", "slow=10"));
    for (killed, step) in (0..4).zip([3, 7, 12, 16]) {
        fleet.wait_for_step(step);
        // At different times of a step.
        std::thread::sleep(Duration::from_millis(37 * killed as u64));
        fleet.kill(&names[killed]);
        fleet.faulty(&names[killed + 3], "--threads 1", "slow=10");
    }
    fleet.all_end(&["coordinator"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let said = fleet.said("coordinator");
    assert!(said.matches(TOGETHER).count() > 1 && said.contains(APART), "{}", fleet.all());
}

/// Two workers that do not reach each other are no relays, from the start or from some step on.
#[test]
fn workers_without_a_way_to_each_other_send_their_sums() {
    let path = Path { megabits: 1000.0, delay: Duration::ZERO, loss: 0.0 };
    let run = format!("{LARGE} --max-steps 20");
    for cut_at in [0, 3] {
        let Some(mut fleet) = Fleet::on_hosts(4, path) else { return };
        let alone = fleet.alone(&run);
        let cut = |hosts: &Hosts| {
            hosts.drop_silently(2, 4);
            hosts.drop_silently(4, 2);
        };
        if cut_at == 0 {
            cut(fleet.hosts());
        }
        fleet.coordinator(&format!("{run} --relays always --expect-workers 3"));
        ["two", "three", "four"].iter().for_each(|name| fleet.faulty(name, "--threads 1", "slow=60"));
        if cut_at > 0 {
            fleet.wait_for_step(cut_at);
            cut(fleet.hosts());
        }
        fleet.all_end(&["coordinator"], 0);
        assert!(fleet.adapter("out") == alone, "{}", fleet.all());
        assert_eq!(fleet.said("coordinator").contains(TOGETHER), cut_at > 0, "{}", fleet.all());
    }
}

#[test]
fn relays_that_cannot_be_used_are_refused() {
    let fleet = Fleet::new();
    for (more, part) in [
        ("--relays always", "only for --role coordinator"),
        ("--relays maybe", "expected auto, always or never"),
        ("--relays always --role coordinator --verify 2%", "leave one of both out"),
        ("--relays always --role coordinator --stages 2", "leave one of both out"),
        ("--relays always --role coordinator --delay 1", "without relays (--relays)"),
        ("--relays never --role worker --coordinator 127.0.0.1:1", "only for --role coordinator"),
    ] {
        fleet.bench.refuses(&format!("{RUN} --max-steps 2 {more}"), 78, part);
    }
}
