//! Thousands of runs, none like another.

use super::driver::Outcome;
use super::fate::{Blow, Fate};
use super::truth::{self, Values};
use super::worker::{Cheats, Ill};
use super::world::{Report, Voice, World};
use crate::cluster::machine::Again;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What one worker alone makes of the plan.
fn alone(fate: &Fate) -> Values {
    let plan = fate.plan();
    (1..=plan.steps).fold(truth::initial(), |p, step| truth::stepped(&p, &plan.whole(&p, step).0))
}

fn judge(fate: &Fate, report: &Report) -> Result<(), String> {
    if !report.wronged.is_empty() {
        return Err(format!("honest workers were taken out: {:?}", report.wronged));
    }
    let ill = fate.blows.iter().any(|(_, b)| matches!(b, Blow::Ill { ill: Ill::Bad, .. }));
    match &report.outcome {
        Outcome::Done(_) if fate.bad.is_some() => Err("a bad value went unnoticed".into()),
        Outcome::Done(parameters) if *parameters != alone(fate) => {
            Err("other parameters than one worker's".into())
        }
        Outcome::Done(_) => Ok(()),
        Outcome::Halted(finding) => match (&finding.again, fate.bad.is_some(), ill) {
            (_, false, false) => Err("halted on a value that was fine".into()),
            (Some(Again::Not(_)), true, false) => Err("bad data was taken for a bad device".into()),
            _ => Ok(()),
        },
        Outcome::Running => {
            Err(format!("no end after {} ms and {} events", report.time / super::MILLI, report.happened))
        }
        Outcome::GaveUp => Err("gave up".into()),
    }
}

fn live(fate: &Fate, voice: Voice) -> Result<Report, String> {
    if voice == Voice::Aloud {
        println!("{fate:#?}");
    }
    let run = AssertUnwindSafe(|| World::new(fate, voice).run(fate.bound()));
    let report = catch_unwind(run).map_err(|p| {
        let text = p.downcast_ref::<String>().cloned();
        text.or_else(|| p.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
    })?;
    judge(fate, &report).map(|()| report)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().expect("a number"))
}

/// Runs seeds on a few threads; the first that fails is named with the line that runs it again.
fn check(seeds: std::ops::Range<u64>) {
    let threads = 2;
    let part = |t: u64| seeds.clone().filter(move |s| s % threads == t);
    let failures: Vec<(u64, String)> = std::thread::scope(|scope| {
        let find = |t| {
            scope.spawn(move || {
                part(t)
                    .filter_map(|s| Some((s, live(&Fate::of(s), Voice::Silent).err()?)))
                    .collect::<Vec<_>>()
            })
        };
        let parts: Vec<_> = (0..threads).map(find).collect();
        parts.into_iter().flat_map(|p| p.join().unwrap()).collect()
    });
    if let Some((seed, why)) = failures.iter().min_by_key(|f| f.0) {
        let again =
            format!("FINETUNE_SEED={seed} cargo test --release --lib cluster::simulator -- --nocapture");
        let all: Vec<u64> = failures.iter().map(|f| f.0).take(20).collect();
        panic!(
            "{} of {} seeds failed ({all:?}); seed {seed}: {why}\nrun it again: {again}",
            failures.len(),
            seeds.count()
        );
    }
}

#[test]
fn thousands_of_runs_end_with_the_bits_of_one_worker() {
    if let Some(seed) = number("FINETUNE_SEED") {
        let report = live(&Fate::of(seed), Voice::Aloud).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        return println!(
            "seed {seed}: {:?} after {} us, {} events",
            report.outcome, report.time, report.happened
        );
    }
    check(0..number("FINETUNE_SEEDS").unwrap_or(2000));
}

#[test]
fn adding_denied_leases_is_detected() {
    let fates = (0..60).map(|seed| Fate { cheats: Cheats::Yes, ..Fate::of(seed) });
    let seen: Vec<String> = fates.filter_map(|fate| live(&fate, Voice::Silent).err()).collect();
    assert!(seen.iter().any(|why| why.contains("sums are one worker's")), "{seen:?}");
}
