//! Workers that hold the layers of one model together (`--stages`): they change no byte, whatever the split, the model,
//! the task and the other devices of the run.

use crate::cli_fixture::{classes, stderr};
use crate::fleet::{Fleet, RUN};

/// Runs with these stages on as many workers, and returns the fleet after its end.
fn line(run: &str, (stages, workers): (&str, usize), more: &str) -> Fleet {
    let mut fleet = Fleet::new();
    fleet.bench.file("classes.jsonl", &classes(240));
    fleet.coordinator(&format!("{run} --stages {stages} {more}"));
    let names: Vec<String> = (0..workers).map(|i| format!("seat-{i}")).collect();
    names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
    fleet.all_end(&["coordinator"], 0);
    fleet.all_end(&names.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    fleet
}

#[test]
fn a_line_of_workers_gives_the_bytes_of_one_process() {
    let run = format!("{RUN} --max-steps 5");
    let alone = Fleet::new().alone(&run);
    for (stages, workers) in [("2", 2), ("3", 3), ("3+1", 2), ("1+2+1", 3)] {
        let fleet = line(&run, (stages, workers), "");
        assert!(fleet.adapter("out") == alone, "--stages {stages}\n{}", fleet.all());
        assert!(fleet.said("seat-0").contains("holds    layers "), "{}", fleet.all());
    }
}
