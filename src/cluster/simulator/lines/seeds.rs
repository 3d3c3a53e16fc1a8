//! Thousands of seeded runs of lines.

use super::super::driver::Outcome;
use super::super::seeds::{check, lived, number};
use super::super::worker::Cheats;
use super::Fate;
use super::world::World;

fn live(fate: &Fate) -> Result<(), String> {
    lived(|| {
        let (outcome, time) = World::new(fate).run(fate.bound());
        match outcome {
            Outcome::Done(_) if fate.bad.is_some() => Err("a bad value went unnoticed".into()),
            Outcome::Done(parameters) if parameters != fate.plan().alone() => {
                Err("other parameters than one worker's".into())
            }
            Outcome::Done(_) => Ok(()),
            Outcome::Halted(_) if fate.bad.is_some() => Ok(()),
            other => Err(format!("{other:?} after {} ms", time / super::super::MILLI)),
        }
    })
}

/// Any split, any number of lines, and every fault: the bytes of one worker (P1 to P8 of the protocol's lines).
#[test]
fn thousands_of_runs_of_lines_end_with_the_bits_of_one_worker() {
    if let Some(seed) = number("FINETUNE_SEED") {
        println!("{:#?}", Fate::of(seed));
        return live(&Fate::of(seed)).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    check(0..number("FINETUNE_SEEDS").unwrap_or(2000), |seed| live(&Fate::of(seed)));
}

#[test]
fn a_seat_that_adds_denied_leases_is_detected() {
    let fates = (0..200).map(|seed| Fate { cheats: Cheats::Yes, ..Fate::of(seed) });
    let seen: Vec<String> = fates.filter_map(|fate| live(&fate).err()).collect();
    assert!(seen.iter().any(|why| why.contains("sums are one worker's")), "{seen:?}");
}

/// What seats sum depends on the hidden states of those below.
#[test]
fn wrong_hidden_states_are_detected() {
    let fates = (0..20).map(|seed| Fate { mixes: true, ..Fate::of(seed) });
    let seen: Vec<_> = fates.map(|fate| live(&fate)).collect();
    assert!(seen.iter().all(|seen| seen.as_ref().is_err_and(|why| !why.starts_with("Running"))), "{seen:?}");
}
