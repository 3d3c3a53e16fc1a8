//! Differences between the configurations of runs, from their run.yaml.

use crate::config::table::{Section, TABLE};
use crate::config::yaml;
use crate::report::Difference;
use crate::run::folder::RUN_FILE;
use crate::run::run_file::fact;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Sections that affect the result and speed of a run; paths and addresses do not.
const SECTIONS: [Section; 5] =
    [Section::Model, Section::Data, Section::Lora, Section::Optim, Section::Devices];

/// Facts that may differ between runs with equal options: files with the same name, devices of another kind.
const FACTS: [&str; 3] = ["model_hash", "data_hash", "numeric_class"];

/// The keys that differ, in the order of the options; `None` where fewer than two of the folders have a run.yaml.
pub fn between(folders: &[PathBuf]) -> Option<Vec<Difference>> {
    let files: Vec<PathBuf> = folders.iter().map(|dir| dir.join(RUN_FILE)).collect();
    let read = |file: &PathBuf| -> Option<BTreeMap<String, String>> {
        let typed = yaml::read(file).ok()?;
        Some(typed.into_iter().map(|t| (t.key, t.values.join(", "))).collect())
    };
    let runs: Vec<Option<BTreeMap<String, String>>> = files.iter().map(read).collect();
    if runs.iter().flatten().count() < 2 {
        return None;
    }
    // A key without a value is `null` in the file.
    let value = |key: &str| {
        let of = |run: &Option<BTreeMap<String, String>>| {
            Some(run.as_ref()?.get(key).cloned().unwrap_or_default())
        };
        runs.iter().map(of).collect()
    };
    let options = TABLE.iter().filter(|option| SECTIONS.contains(&option.section));
    let options = options.map(|option| (option.key(), value(&option.key())));
    let facts = FACTS.iter().map(|key| (key.to_string(), files.iter().map(|file| fact(file, key)).collect()));
    Some(options.chain(facts).filter(differs).collect())
}

/// Whether values differ. A run without a run.yaml is not compared.
fn differs((_, values): &Difference) -> bool {
    let mut known = values.iter().flatten();
    known.next().is_some_and(|first| known.any(|other| other != first))
}
