//! Writes checkpoints.

use super::{BEFORE, Identity, JOURNAL, MOMENTS, RUN_STATE, SUMS, State, TRAINER_STATE, read};
use crate::format::FormatError;
use crate::format::atomic;
use crate::format::safetensors::{self, Spec};
use crate::numeric::dtype::Dtype;
use crate::train::error::TrainError;
use crate::train::optim::AdamW;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Writes a PEFT adapter of the given parameters into a directory.
pub type WriteAdapter<'a> = &'a dyn Fn(&Path, &[f32]) -> Result<(), FormatError>;

/// When and how checkpoints are written.
pub struct Saving<'a> {
    /// The output directory: checkpoints are `OUT/checkpoint-{step}`.
    pub output: PathBuf,
    /// Steps between checkpoints; 0 writes only the last one.
    pub every: u64,
    /// Number of checkpoints to keep, at least one, besides the best one; the oldest are removed after a new one is
    /// safe.
    pub limit: Option<usize>,
    /// The configuration that a resume must match.
    pub identity: Identity,
    /// Writes a PEFT adapter of the given parameters into a directory, under the names of the layout.
    pub adapter: WriteAdapter<'a>,
    /// Whether `output` is still the directory that the run locked: not removed, moved or replaced.
    pub stands: &'a dyn Fn() -> bool,
    /// The newest checkpoint of this run: step and directory. None in a new run.
    pub last: Option<(u64, PathBuf)>,
}

impl Saving<'_> {
    /// The newest checkpoint of this run.
    pub fn newest(&self) -> Option<PathBuf> {
        self.last.as_ref().map(|(_, path)| path.clone())
    }

    /// The step of the newest checkpoint, if it is no state of the journal, and the folder is still this run's.
    pub fn safe(&self) -> Option<u64> {
        let (step, path) = self.last.as_ref()?;
        (!path.starts_with(self.output.join(JOURNAL)) && (self.stands)()).then_some(*step)
    }

    /// Writes a checkpoint of `state`; returns None if that step already has one.
    pub fn write(&mut self, state: &State, steps_per_epoch: u64) -> Result<Option<PathBuf>, TrainError> {
        let path = self.output.join(format!("checkpoint-{}", state.step));
        if self.last.as_ref().is_some_and(|(step, last)| *step == state.step && *last == path) {
            return Ok(None);
        }
        if !(self.stands)() {
            return Err(TrainError::Gone { path: self.output.clone(), step: state.step });
        }
        // A failed clean-up wastes disk space but does not end the run.
        let _ = read::recover_here(&self.output);
        let failed = |error: FormatError| TrainError::Save {
            path: path.clone(),
            step: state.step,
            reason: reason(&error),
            kept: self.newest(),
        };
        let fill = |dir: &Path| fill(dir, (state, steps_per_epoch), &self.identity, self.adapter);
        atomic::write_dir(&path, fill).map_err(failed)?;
        self.last = Some((state.step, path.clone()));
        if let Some(limit) = self.limit {
            let best = state.best.filter(|best| best.kept).map(|best| best.step);
            keep_newest(&self.output, (limit, best), &path);
        }
        Ok(Some(path))
    }
}

/// Writes the files of a checkpoint into a directory.
pub(super) fn fill(
    dir: &Path,
    (state, steps_per_epoch): (&State, u64),
    identity: &Identity,
    adapter: WriteAdapter,
) -> Result<(), FormatError> {
    adapter(dir, &state.parameters)?;
    moments(&dir.join(MOMENTS), state)?;
    let epoch = state.step as f64 / steps_per_epoch.max(1) as f64;
    let mut trainer = json!({ "epoch": epoch, "global_step": state.step, "log_history": state.history });
    if let Some(best) = state.best.filter(|best| best.kept) {
        trainer["best_metric"] = json!(best.value);
        trainer["best_global_step"] = json!(best.step);
        trainer["best_model_checkpoint"] = json!(format!("checkpoint-{}", best.step));
    }
    write_json(&dir.join(TRAINER_STATE), &trainer)?;
    let mut run = json!({
        "version": 1,
        "step": state.step,
        "looked": state.looked,
        "classes": state.classes,
        "identity": identity.to_json(),
    });
    if let Some(best) = &state.best {
        run["best"] = json!(best);
    }
    write_json(&dir.join(RUN_STATE), &run)?;
    let sums = read::sums(dir)?;
    let lines: String = sums.iter().map(|(name, hash)| format!("{hash}  {name}\n")).collect();
    atomic::write_file(&dir.join(SUMS), lines.as_bytes())
}

/// Removes the oldest checkpoints beyond the limit, except that of the step `best`. A failed removal wastes disk space
/// but does not end the run; the next call tries again.
pub(super) fn keep_newest(output: &Path, (limit, best): (usize, Option<u64>), newest: &Path) {
    let mut old = read::list(output);
    old.retain(|(step, path)| path != newest && Some(*step) != best);
    let excess = (old.len() + 1).saturating_sub(limit.max(1));
    for (_, path) in old.iter().take(excess) {
        let _ = std::fs::remove_dir_all(path);
    }
}

fn moments(path: &Path, state: &State) -> Result<(), FormatError> {
    let AdamW { exp_avg, exp_avg_sq, residual, .. } = &state.optimizer;
    let always = [("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)];
    let others = [("residual", residual), ("velocity", &state.velocity), (BEFORE, &state.before)];
    let some = always.into_iter().chain(others.into_iter().filter(|(_, values)| !values.is_empty()));
    let named = some.map(|(name, values)| {
        let spec = Spec { name: name.into(), dtype: Dtype::F32, shape: vec![values.len()] };
        (spec, Dtype::F32.bytes_of(values))
    });
    let named: Vec<_> = named.collect();
    let tensors: Vec<_> = named.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
    safetensors::write(path, &tensors)
}

fn write_json(path: &Path, value: &Value) -> Result<(), FormatError> {
    atomic::write_file(path, format!("{value:#}\n").as_bytes())
}

/// The cause without the temporary path, which is of no use to the user.
fn reason(error: &FormatError) -> String {
    match error {
        FormatError::DiskFull { .. } => "the disk is full".into(),
        FormatError::Io { cause, .. } => cause.to_string(),
        other => other.to_string(),
    }
}
