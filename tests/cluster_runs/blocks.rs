//! Bases in blocks: workers without a model receive the file unchanged, at its own size, or quantise the received
//! weights themselves. One of them streams its layers.

use crate::fleet::{Fleet, RUN};
use std::path::{Path, PathBuf};

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().map(|e| e.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn quantised_base_is_sent_unchanged_and_changes_no_byte() {
    for (model, more) in [("./base.gguf", ""), ("demo", "--quantize nf4")] {
        let run = format!("{} {more} --max-steps 3", RUN.replace("demo", model));
        let mut fleet = Fleet::new();
        fleet.bench.ok("demo --data rows.jsonl --max-steps 1 --rank 1 -q -o seed");
        fleet.bench.ok("export seed --to merged-gguf --outtype q8_0 -o base.gguf");
        let alone = fleet.alone(&run);
        fleet.coordinator(&format!("{run} --expect-workers 2"));
        fleet.worker("a", "--threads 1");
        fleet.worker("b", "--threads 1 --offload 2");
        fleet.all_end(&["coordinator", "a", "b"], 0);
        assert!(fleet.adapter("out") == alone, "{model}\n{}", fleet.all());
        assert!(fleet.all().contains("streams  2 of 4 layers"), "{}", fleet.all());
        if more.is_empty() {
            let (base, cached) = (fleet.bench.read("base.gguf"), files(&fleet.bench.path("models")));
            let same = |path: &PathBuf| std::fs::read(path).unwrap() == base;
            assert!(cached.iter().any(same), "{cached:?}");
            let bytes: u64 = cached.iter().map(|path| path.metadata().unwrap().len()).sum();
            assert!(bytes < base.len() as u64 * 11 / 10, "{bytes} bytes for a file of {}", base.len());
        }
    }
}
