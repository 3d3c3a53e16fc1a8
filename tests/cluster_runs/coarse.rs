//! Rounded gradients and changes (`--sum-bits`, `--update-bits`): the adapter depends on the numbers of bits, and not on
//! who computes.

use crate::cli_fixture::{classes, pairs};
use crate::fleet::{Fleet, RUN};

const COARSE: &str = "--sum-bits 6 --update-bits 8";

/// A fleet with the rows of both tasks.
fn fleet() -> Fleet {
    let fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(96));
    fleet
}

#[test]
fn rounded_sums_have_the_same_bytes_wherever_they_are_made() {
    let classifier =
        "demo --data classes.jsonl --task classify --num-classes 2 --quantize nf4 --batch-size 24";
    for run in [RUN, &format!("{classifier} --micro-batch-tokens 64 --rank 4")] {
        let (here, exact) = (fleet(), format!("{run} --max-steps 4"));
        let run = format!("{exact} {COARSE}");
        let alone = here.alone(&run);
        assert!(alone != here.alone(&format!("{exact} --overwrite")), "nothing was rounded");
        for (out, gpus) in [("devices", "cpu,cpu,cpu"), ("line", "cpu+cpu")] {
            here.bench.ok(&format!("{run} --gpus {gpus} --threads 2 -q -o {out}"));
            assert!(here.adapter(out) == alone, "{gpus}");
        }
        for (more, names) in [
            ("--expect-workers 1", &["a"][..]),
            ("--expect-workers 3 --verify 50%", &["a", "b", "c"]),
            ("--stages 1+3", &["a", "b"]),
        ] {
            let mut fleet = fleet();
            fleet.coordinator(&format!("{run} {more}"));
            names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
            fleet.all_end(&[&["coordinator"], names].concat(), 0);
            assert!(fleet.adapter("out") == alone, "{more}\n{}", fleet.all());
        }
    }
}

/// The reference has other parameters before the first step, and a worker that comes later has none to change.
#[test]
fn references_and_late_workers_get_whole_parameters() {
    let pairs_run = "demo --data pairs.jsonl --task dpo --batch-size 24 --micro-batch-tokens 64 --rank 4";
    let run = format!("{pairs_run} --max-steps 6 --eval-split 8 --eval-steps 2 --keep-best {COARSE}");
    let mut fleet = Fleet::new();
    fleet.bench.file("pairs.jsonl", &pairs(96));
    let alone = fleet.alone(&run);
    fleet.coordinator(&run);
    fleet.faulty("a", "--threads 1", "slow=12");
    fleet.wait_for_step(2);
    fleet.worker("late", "--threads 1");
    fleet.all_end(&["coordinator", "a", "late"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn a_killed_worker_and_a_resume_change_no_rounded_byte() {
    let run = format!("{RUN} --max-steps 8 --save-steps 3");
    let others = [
        ("--sum-bits 8 --update-bits 8", "sum_bits was 6, is 8"),
        ("--sum-bits 0 --update-bits 8", "sum_bits was 6, is unset"),
        ("--sum-bits 6 --update-bits 9", "update_bits was 8, is 9"),
    ];
    Fleet::new().survives((&run, COARSE), 4, &others);
}

/// One worker gets the parameters and sends one sum in each step.
#[test]
fn rounded_values_are_sent_in_fewer_bytes() {
    let sent = |more: &str| {
        let mut fleet = Fleet::new();
        fleet.coordinator(&format!("{RUN} --max-steps 4 {more}"));
        fleet.worker("a", "--threads 1");
        fleet.all_end(&["coordinator", "a"], 0);
        let steps = fleet.bench.events("out", "step");
        let parameters = fleet.bench.events("out", "run")[0]["parameters"].as_u64().unwrap();
        // The first step has all parameters, the others have differences or rounded changes.
        ["bytes_in", "bytes_out"].map(|name| {
            let bytes = steps[1..].iter().map(|step| step["shared"][name].as_u64().unwrap()).sum::<u64>();
            bytes as f64 / ((steps.len() - 1) as u64 * parameters) as f64
        })
    };
    let ([sum, parameters], rounded) = (sent(""), sent("--sum-bits 8 --update-bits 8"));
    assert!(sum > 3.0 && parameters < 3.0, "{sum} and {parameters} bytes for each value");
    // Eight microbatches: eight bits, three for their sum, and the different units of their blocks.
    assert!(rounded[0] < 0.45 * sum, "{} bytes for each value, of {sum}", rounded[0]);
    assert!(rounded[1] < 1.3f64.min(parameters), "{} bytes for each value", rounded[1]);
}
