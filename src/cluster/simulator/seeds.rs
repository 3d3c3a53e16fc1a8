//! Thousands of seeded runs.

use super::driver::Outcome;
use super::fate::{Blow, Fate};
use super::worker::{Cheats, Forgery, Ill};
use super::world::{Report, Voice, World};
use crate::cluster::machine::{Again, Verify};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn judge(fate: &Fate, report: &Report) -> Result<(), String> {
    if !report.wronged.is_empty() {
        return Err(format!("honest workers were taken out: {:?}", report.wronged));
    }
    let ill = fate.blows.iter().any(|(_, b)| matches!(b, Blow::Ill { ill: Ill::Bad, .. }));
    match &report.outcome {
        Outcome::Done(_) if fate.bad.is_some() => Err("a bad value went unnoticed".into()),
        Outcome::Done(parameters) if *parameters != fate.plan().alone() && !fate.tolerates() => {
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
        Outcome::Disputed => Err("devices differ, and none decided".into()),
    }
}

fn live(fate: &Fate, voice: Voice) -> Result<Report, String> {
    if voice == Voice::Aloud {
        println!("{fate:#?}");
    }
    let report = lived(|| Ok(World::new(fate, voice).run(fate.bound())))?;
    judge(fate, &report).map(|()| report)
}

/// What a run returns; a panic is an error.
pub fn lived<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let run = catch_unwind(AssertUnwindSafe(run)).map_err(|p| {
        let text = p.downcast_ref::<String>().cloned();
        text.or_else(|| p.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default()
    });
    run.flatten()
}

pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().expect("a number"))
}

/// Runs seeds on a few threads. The first failing seed is named with the command that runs it again.
pub fn check(seeds: std::ops::Range<u64>, live: impl Fn(u64) -> Result<(), String> + Sync) {
    let threads = 2;
    let part = |t: u64| seeds.clone().filter(move |s| s % threads == t);
    let failures: Vec<(u64, String)> = std::thread::scope(|scope| {
        let find = |t| {
            let live = &live;
            scope.spawn(move || part(t).filter_map(|s| Some((s, live(s).err()?))).collect::<Vec<_>>())
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

/// Lives a seed without its events.
fn silent(fate: impl Fn(u64) -> Fate) -> impl Fn(u64) -> Result<(), String> {
    move |seed| live(&fate(seed), Voice::Silent).map(drop)
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
    check(0..number("FINETUNE_SEEDS").unwrap_or(2000), silent(Fate::of));
}

/// The next step is computed while sums of the one before it are on their way.
#[test]
fn delayed_runs_end_with_the_bits_of_one_worker() {
    let fate = |seed| Fate { delay: 1, ..Fate::of(seed) };
    if let Some(seed) = number("FINETUNE_SEED") {
        let report = live(&fate(seed), Voice::Aloud).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        return println!("seed {seed}: {:?} after {} us", report.outcome, report.time);
    }
    check(0..number("FINETUNE_SEEDS").unwrap_or(2000), silent(fate));
}

/// Every microbatch is computed again: a forged result of any worker changes no bit, and no honest one is taken out.
#[test]
fn liars_change_no_bit_where_all_is_checked() {
    if let Some(seed) = number("FINETUNE_SEED") {
        let report =
            live(&Fate::checked(seed, 1.0), Voice::Aloud).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        return println!("seed {seed}: {:?} after {} us", report.outcome, report.time);
    }
    check(0..number("FINETUNE_SEEDS").unwrap_or(1000), silent(|seed| Fate::checked(seed, 1.0)));
}

/// A part is computed again: honest workers stay, and a run without a liar ends with the bits of one worker.
#[test]
fn honest_workers_stay_where_a_part_is_checked() {
    check(0..number("FINETUNE_SEEDS").unwrap_or(600), silent(|seed| Fate::checked(seed, 0.3)));
}

/// A worker that forges every result is found after as many as the run says at its start.
#[test]
fn a_liar_is_found_after_the_expected_number() {
    let share = 0.1;
    let fate = |seed: u64| {
        let fate = Fate::checked(seed, share);
        let liar = Some((seed as usize % fate.workers.len(), Forgery::Flipped));
        Fate { blows: vec![], bad: None, steps: 40, items: 24, liar, ..fate }
    };
    let mut found: Vec<u64> = vec![];
    for seed in 0..200 {
        let report = live(&fate(seed), Voice::Silent).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        found.extend(report.found);
    }
    let mean = found.iter().sum::<u64>() as f64 / found.len() as f64;
    let (expected, nearly_all) = Verify::found_after(share);
    assert_eq!((expected, nearly_all), (10, 44));
    // Some more were in work when the comparison came.
    assert!(found.len() > 150, "{} liars were found", found.len());
    assert!((7.0..25.0).contains(&mean), "found after {mean} forgeries on average");
    let late = found.iter().filter(|&&forgeries| forgeries > nearly_all + 24).count();
    assert!(late <= found.len() / 50, "{late} of {} were found late", found.len());
}

#[test]
fn adding_denied_leases_is_detected() {
    let fates = (0..60).map(|seed| Fate { cheats: Cheats::Yes, ..Fate::of(seed) });
    let delayed = (0..60).map(|seed| Fate { cheats: Cheats::Yes, delay: 1, ..Fate::of(seed) });
    for fates in [fates.collect::<Vec<_>>(), delayed.collect()] {
        let seen: Vec<String> = fates.iter().filter_map(|fate| live(fate, Voice::Silent).err()).collect();
        assert!(seen.iter().any(|why| why.contains("sums are one worker's")), "{seen:?}");
    }
}
