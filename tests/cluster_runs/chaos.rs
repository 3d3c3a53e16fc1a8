//! Random kills, freezes and restarts of real processes. Under any disturbance the adapter has the bytes of one
//! undisturbed process, nothing panics, and every process ends with a documented exit code.
//!
//! `FINETUNE_CHAOS_SEED` repeats a sequence, `FINETUNE_CHAOS_BLOWS` and `FINETUNE_CHAOS_SECONDS` bound it (default: 60
//! seconds). `benches/chaos.sh` runs 1,000 disturbances.

use crate::cli_fixture::classes;
use crate::draw::{Draw, seed, setting};
use crate::fleet::{Fleet, RUN};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Options of each kind of run. Each takes about 60 short steps.
const RUNS: [&str; 4] = [
    "--max-steps 60 --save-steps 7 --save-total-limit 3",
    "--max-steps 60 --save-steps 9 --rslora --target-modules q_proj,v_proj --no-packing --seed 7",
    "--max-steps 50 --save-steps 11 --quantize q8_0 --eval-data eval.jsonl --eval-steps 13",
    "--max-steps 60 --save-steps 10 --task classify --eval-data classes.eval.jsonl --eval-steps 20",
];
/// Milliseconds by which a worker delays each microbatch, so that disturbances hit steps and not only starts.
const SLOW: &str = "slow=4";
/// Disturbances of one run; after them it ends undisturbed.
const DISTURBANCES: u64 = 30;
/// A run that takes longer is reported as hanging.
const PATIENCE: Duration = Duration::from_secs(300);

/// One disturbed run.
struct Round<'a> {
    fleet: Fleet,
    run: String,
    draw: Draw,
    /// Counts over all rounds, by the name of the disturbance.
    counts: &'a mut BTreeMap<&'static str, u64>,
    /// Frozen processes and when each continues.
    frozen: Vec<(&'static str, Instant)>,
    began: Instant,
}

const WORKERS: [&str; 3] = ["a", "b", "c"];

fn command(kind: usize) -> String {
    match RUNS[kind].contains("classify") {
        true => RUN.replace("many.jsonl", "classes.jsonl") + " " + RUNS[kind],
        false => format!("{RUN} {}", RUNS[kind]),
    }
}

fn fleet() -> Fleet {
    let fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(240));
    fleet.bench.file("classes.eval.jsonl", &classes(11));
    fleet
}

impl Round<'_> {
    fn count(&mut self, blow: &'static str) {
        *self.counts.entry(blow).or_default() += 1;
    }

    fn freeze(&mut self, name: &'static str, longest: u64) {
        if !self.frozen.iter().any(|(n, _)| *n == name) && self.fleet.is_running(name) {
            self.fleet.signal(name, Signal::STOP);
            let until = Instant::now() + self.draw.millis(100, longest);
            self.frozen.push((name, until));
            self.count("freeze");
        }
    }

    /// Continues the frozen processes whose time is over, or all of them if `now` is set.
    fn thaw(&mut self, now: bool) {
        let (over, rest): (Vec<_>, Vec<_>) =
            self.frozen.drain(..).partition(|(_, until)| now || *until <= Instant::now());
        self.frozen = rest;
        for (name, _) in over {
            if self.fleet.is_running(name) {
                self.fleet.signal(name, Signal::CONT);
            }
        }
    }

    fn disturb(&mut self) {
        let worker = WORKERS[self.draw.below(3) as usize];
        let (name, signal, label) = match self.draw.below(100) {
            0..45 => (worker, Signal::KILL, "kill worker"),
            45..55 => (worker, Signal::TERM, "terminate worker"),
            55..70 => return self.freeze(worker, 3000),
            70..75 => return self.freeze("coordinator", 2000),
            75..90 => ("coordinator", Signal::KILL, "kill coordinator"),
            90..95 => ("coordinator", Signal::TERM, "terminate coordinator"),
            _ => ("coordinator", Signal::USR1, "ask for a checkpoint"),
        };
        if self.fleet.is_running(name) {
            self.fleet.signal(name, signal);
            self.count(label);
        }
    }

    /// Restarts processes that ended. Returns whether the run is complete.
    fn restart(&mut self) -> bool {
        for name in WORKERS {
            if let Some(code) = self.fleet.ended(name) {
                // None: killed by a signal.
                assert!(matches!(code, None | Some(0)), "{name} ended with {code:?}\n{}", self.fleet.all());
                self.fleet.faulty(name, "--threads 1", SLOW);
            }
        }
        match self.fleet.ended("coordinator") {
            Some(Some(0)) => return true,
            Some(code @ (None | Some(75))) => {
                self.count(if code.is_none() { "restart after kill" } else { "restart after 75" });
                self.fleet.coordinator(&format!("{} --expect-workers 1 --resume", self.run));
            }
            Some(code) => panic!("the coordinator ended with {code:?}\n{}", self.fleet.all()),
            None => {}
        }
        assert!(self.began.elapsed() < PATIENCE, "the run hangs\n{}", self.fleet.all());
        false
    }

    fn cluster(&mut self) {
        self.fleet.coordinator(&format!("{} --expect-workers 1", self.run));
        for name in WORKERS {
            self.fleet.faulty(name, "--threads 1", SLOW);
        }
        let mut disturbances = 0;
        loop {
            let pause = self.draw.millis(20, 250);
            std::thread::sleep(pause);
            self.thaw(disturbances >= DISTURBANCES);
            if self.restart() {
                break;
            }
            if disturbances < DISTURBANCES {
                self.disturb();
                disturbances += 1;
            }
        }
        self.thaw(true);
    }

    /// One process that trains alone, always started with `--resume`, as a scheduler restarts a job.
    fn single(&mut self) {
        let args = format!("{} --threads 1 -q -o out --resume", self.run);
        for round in 0.. {
            self.fleet.process("single", &args);
            if round < DISTURBANCES / 2 {
                // Start and first steps take about 0.3 s: half of the disturbances hit the start, half the training.
                let pause = self.draw.millis(5, 600);
                std::thread::sleep(pause);
                let signal = if self.draw.below(4) == 0 { Signal::TERM } else { Signal::KILL };
                if self.fleet.is_running("single") {
                    self.fleet.signal("single", signal);
                    self.count("kill or terminate a single process");
                }
            }
            match self.fleet.end("single") {
                Some(0) => break,
                // 143: SIGTERM before the training loop listens.
                None | Some(75) => {}
                code => panic!("the single process ended with {code:?}\n{}", self.fleet.all()),
            }
        }
    }
}

#[test]
fn random_kills_and_freezes_change_no_byte() {
    let seed = seed();
    let blows = setting("FINETUNE_CHAOS_BLOWS").unwrap_or(u64::MAX);
    let limit = Duration::from_secs(setting("FINETUNE_CHAOS_SECONDS").unwrap_or(60));
    let (mut counts, began) = (BTreeMap::new(), Instant::now());
    let mut alone: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    let mut rounds = 0;
    let dealt = |counts: &BTreeMap<&str, u64>| -> u64 {
        counts.iter().filter(|(name, _)| !name.starts_with("restart")).map(|(_, n)| n).sum()
    };
    while dealt(&counts) < blows && began.elapsed() < limit {
        let mut draw = Draw(seed.wrapping_add(rounds));
        let kind = draw.below(RUNS.len() as u64) as usize;
        let (fleet, run) = (fleet(), command(kind));
        let expected = alone.entry(run.clone()).or_insert_with(|| fleet.alone(&run));
        let mut round =
            Round { fleet, run, draw, counts: &mut counts, frozen: Vec::new(), began: Instant::now() };
        match rounds % 4 {
            3 => round.single(),
            _ => round.cluster(),
        }
        let (fleet, run) = (&round.fleet, &round.run);
        let said = fleet.all();
        assert!(fleet.adapter("out") == *expected, "seed {seed}, round {rounds}, {run}: other bytes\n{said}");
        let steps = run.split_whitespace().skip_while(|word| *word != "--max-steps").nth(1).unwrap();
        assert_eq!(fleet.steps().to_string(), steps, "seed {seed}, round {rounds}: steps in metrics.jsonl");
        for word in ["panicked", "internal error"] {
            assert!(!said.contains(word), "seed {seed}, round {rounds}: {word}\n{said}");
        }
        rounds += 1;
    }
    println!("{} blows in {rounds} runs, {} s: {counts:?}", dealt(&counts), began.elapsed().as_secs());
    assert!(dealt(&counts) > 0);
}
