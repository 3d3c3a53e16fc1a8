//! Finds and reads a complete checkpoint.

use super::{
    ADAPTER, BEFORE, DELAY, Identity, JOURNAL, MOMENTS, OUTER_MOMENTUM, RUN_STATE, SUMS, State, TRAINER_STATE,
};
use crate::format::FormatError;
use crate::format::{atomic, safetensors};
use crate::model::layout::Layout;
use crate::train::error::TrainError;
use crate::train::optim::{AdamW, Options};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A checkpoint whose files match their hashes.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Directory of the checkpoint.
    pub path: PathBuf,
    /// The last step in the checkpoint.
    pub step: u64,
    /// Newer checkpoints that are incomplete: one line each, for the user.
    pub passed_over: Vec<String>,
    run: Value,
}

/// The newest complete checkpoint in `path` or in its journal, or `path` itself if it is a checkpoint.
pub fn find(path: &Path) -> Result<Checkpoint, TrainError> {
    let error = |path: &Path, reason: String| TrainError::Checkpoint { path: path.to_owned(), reason };
    if path.join(SUMS).exists() || path.join(RUN_STATE).exists() || step_of(path).is_some() {
        let run = verify(path).map_err(|reason| error(path, reason))?;
        return Checkpoint::new(path, run, vec![]);
    }
    let mut passed_over = Vec::new();
    let mut candidates = list(&path.join(JOURNAL));
    candidates.extend(list(path));
    // Of two of the same step, the one that is no journal.
    candidates.sort_by_key(|(step, _)| *step);
    for (_, candidate) in candidates.into_iter().rev() {
        match verify(&candidate) {
            Ok(run) => return Checkpoint::new(&candidate, run, passed_over),
            Err(reason) => passed_over.push(format!("{}: {reason}", candidate.display())),
        }
    }
    let reason = match passed_over.first() {
        Some(first) => {
            format!("no checkpoint is whole ({first}); begin again with --overwrite or another --output")
        }
        None => return Err(TrainError::NoCheckpoint { path: path.to_owned() }),
    };
    Err(error(path, reason))
}

/// The newest complete checkpoint in `path` that is an adapter: none of the journal.
pub fn newest_adapter(path: &Path) -> Option<PathBuf> {
    list(path)
        .into_iter()
        .rev()
        .map(|(_, checkpoint)| checkpoint)
        .find(|checkpoint| verify(checkpoint).is_ok())
}

impl Checkpoint {
    fn new(path: &Path, run: Value, passed_over: Vec<String>) -> Result<Self, TrainError> {
        let missing = || TrainError::Checkpoint {
            path: path.join(RUN_STATE),
            reason: "no version 1 with a step: written by another version of finetune".into(),
        };
        let step = run["step"].as_u64().filter(|_| run["version"] == 1).ok_or_else(missing)?;
        Ok(Checkpoint { path: path.to_owned(), step, passed_over, run })
    }

    /// The state, if the identity of the checkpoint equals `now`. Every different value is named in the error.
    pub fn load(&self, layout: &Layout, options: Options, now: &Identity) -> Result<State, TrainError> {
        let broken = |reason: String| TrainError::Checkpoint { path: self.path.clone(), reason };
        let was = Identity::from_json(&self.run["identity"])
            .ok_or_else(|| broken(format!("{RUN_STATE} has no identity")))?;
        let differences = was.differences(now);
        if !differences.is_empty() {
            return Err(TrainError::Mismatch { path: self.path.clone(), differences });
        }
        let io = |error: FormatError| broken(error.to_string());
        let adapter = safetensors::open(&self.path.join(ADAPTER)).map_err(io)?;
        let moments = safetensors::open(&self.path.join(MOMENTS)).map_err(io)?;
        let values = |file: &safetensors::SafeTensors, name: &str, len: usize| {
            let found = file.get(name).map(|t| t.dtype.widen(&t.bytes)).filter(|v| v.len() == len);
            found.ok_or_else(|| broken(format!("{}: no {name} of {len} values", file.path().display())))
        };
        let mut parameters = Vec::with_capacity(layout.len());
        for entry in layout.entries() {
            parameters.extend(values(&adapter, &entry.name, entry.rows * entry.cols)?);
        }
        let mut optimizer = AdamW::new(options, 0);
        optimizer.step = self.step;
        optimizer.exp_avg = values(&moments, "exp_avg", layout.len())?;
        optimizer.exp_avg_sq = values(&moments, "exp_avg_sq", layout.len())?;
        if options.update_bits > 0 {
            optimizer.residual = values(&moments, "residual", layout.len())?;
        }
        let named = |name: &str, of: &str| match was.values().contains_key(of) {
            true => values(&moments, name, layout.len()),
            false => Ok(Vec::new()),
        };
        let trainer = json(&self.path.join(TRAINER_STATE)).map_err(broken)?;
        let strings = |value: &Value| {
            value.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect()
        };
        Ok(State {
            step: self.step,
            parameters,
            optimizer,
            velocity: named("velocity", OUTER_MOMENTUM)?,
            before: named(BEFORE, DELAY)?,
            history: trainer["log_history"].as_array().cloned().unwrap_or_default(),
            looked: self.run["looked"].as_u64(),
            classes: strings(&self.run["classes"]),
            best: serde_json::from_value(self.run["best"].clone()).ok(),
        })
    }
}

/// The `checkpoint-{step}` directories, ascending by step.
pub(super) fn list(output: &Path) -> Vec<(u64, PathBuf)> {
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> =
        entries.filter_map(|e| Some((step_of(&e.path())?, e.path()))).filter(|(_, p)| p.is_dir()).collect();
    found.sort();
    found
}

/// Whether a folder is a checkpoint, complete or not.
pub fn is_one(dir: &Path) -> bool {
    dir.join(RUN_STATE).exists()
}

/// Cleans up after a process that died while it wrote a checkpoint in `output` or its journal: removes temporary files,
/// and restores a checkpoint that was moved aside if its replacement is missing.
pub fn recover(output: &Path) -> Result<(), FormatError> {
    recover_here(&output.join(JOURNAL))?;
    recover_here(output)
}

/// Like [`recover`], only of the checkpoints in this folder.
pub(super) fn recover_here(output: &Path) -> Result<(), FormatError> {
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    let steps: BTreeSet<u64> = entries.filter_map(|e| left_of(e.file_name().to_str()?)).collect();
    steps.into_iter().try_for_each(|step| atomic::recover(&output.join(format!("checkpoint-{step}"))))
}

/// The number N in `.checkpoint-N.*`.
fn left_of(name: &str) -> Option<u64> {
    name.strip_prefix(".checkpoint-")?.split_once('.')?.0.parse().ok()
}

fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

/// Hashes of all files in `dir` by name, except the hash list itself.
pub(super) fn sums(dir: &Path) -> Result<BTreeMap<String, String>, FormatError> {
    let mut sums = BTreeMap::new();
    for entry in fs::read_dir(dir).map_err(|e| FormatError::io(dir, e))? {
        let path = entry.map_err(|e| FormatError::io(dir, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && name != SUMS {
            let mut hasher = blake3::Hasher::new();
            let file = fs::File::open(&path).map_err(|e| FormatError::io(&path, e))?;
            hasher.update_reader(file).map_err(|e| FormatError::io(&path, e))?;
            sums.insert(name, hasher.finalize().to_hex().to_string());
        }
    }
    Ok(sums)
}

/// Returns run_state.json if every listed file matches its hash, no required file is missing, and the step equals the
/// number in the directory's name, if that has one. Additional files are ignored.
fn verify(dir: &Path) -> Result<Value, String> {
    let listed = fs::read_to_string(dir.join(SUMS)).map_err(|e| format!("{SUMS}: {e}"))?;
    let named: BTreeMap<&str, &str> =
        listed.lines().filter_map(|l| l.split_once("  ")).map(|(h, n)| (n, h)).collect();
    let present = sums(dir).map_err(|e| e.to_string())?;
    for name in [ADAPTER, MOMENTS, TRAINER_STATE, RUN_STATE] {
        if !named.contains_key(name) {
            return Err(format!("{SUMS} does not name {name}"));
        }
    }
    for (name, hash) in named {
        match present.get(name) {
            None => return Err(format!("{name} is missing")),
            Some(found) if found != hash => return Err(format!("{name} is damaged (its hash differs)")),
            Some(_) => {}
        }
    }
    let run = json(&dir.join(RUN_STATE))?;
    match (step_of(dir), run["step"].as_u64()) {
        (Some(name), Some(step)) if name != step => {
            Err(format!("{RUN_STATE} is of step {step}, the folder's name says {name}"))
        }
        _ => Ok(run),
    }
}

fn json(path: &Path) -> Result<Value, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}
