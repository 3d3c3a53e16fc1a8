//! A coordinator that is killed goes on from its step journal.

use crate::draw::{Draw, seed, setting};
use crate::fleet::{Fleet, RUN};
use std::time::Duration;

/// Without a single checkpoint. `FINETUNE_CHAOS_BLOWS` is the number of kills (default: 12).
#[test]
fn killed_coordinator_goes_on_from_its_journal() {
    let kills = setting("FINETUNE_CHAOS_BLOWS").unwrap_or(12) as usize;
    let run = format!("{RUN} --max-steps {}", 20 * kills);
    let mut draw = Draw(seed());
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --expect-workers 2"));
    for name in ["a", "b"] {
        fleet.faulty(name, "--threads 1", "slow=4");
    }
    fleet.wait_for_step(10);
    let mut lost = 0;
    for _ in 0..kills {
        std::thread::sleep(Duration::from_micros(draw.below(400_000)));
        if !fleet.is_running("coordinator") {
            break;
        }
        fleet.kill("coordinator");
        let taken = fleet.steps();
        fleet.coordinator(&format!("{run} --expect-workers 2 --resume"));
        let again = fleet.said("coordinator").matches("listens on").count() + 1;
        while fleet.said("coordinator").matches("listens on").count() < again {
            assert!(fleet.is_running("coordinator"), "{}", fleet.all());
            std::thread::sleep(Duration::from_millis(5));
        }
        lost += taken.saturating_sub(fleet.steps());
    }
    fleet.all_end(&["coordinator", "a", "b"], 0);
    println!("{lost} steps were repeated after {kills} kills");
    assert!(lost <= 10 * kills, "half of the steps: a state is written more often\n{}", fleet.all());
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert_eq!(fleet.steps(), 20 * kills, "metrics.jsonl has every step once");
    assert!(!fleet.said("coordinator").contains("begins again at step 0"), "{}", fleet.all());
    assert!(!fleet.bench.path("out/journal").exists(), "the journal of a finished run is of no use");
    assert!(fleet.bench.path(&format!("out/checkpoint-{}", 20 * kills)).exists());
}
