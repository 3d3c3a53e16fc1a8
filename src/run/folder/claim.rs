//! Taking a run's folder: made, or taken over with what it holds moved aside; given back unless the run takes its first
//! step; and watched for as long as the run writes there.

use super::{RUNS, RunFolder, free};
use crate::cluster::coordinator::{Lock, RunLockError, run_lock};
use crate::config::refusal::{self, Refusal};
use std::cell::Cell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What a run writes, besides `checkpoint-N`: all that --overwrite removes.
const OURS: [&str; 22] = [
    "report.html",
    "loss.svg",
    "speed.svg",
    "learning-rate.svg",
    "grad-norm.svg",
    "timeline.svg",
    "topology.svg",
    "run.yaml",
    run_lock::FILE,
    "metrics.jsonl",
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "label_map.json",
    "generation_config.json",
    "config.json",
    "added_tokens.json",
    "tokenizer.model",
];

/// Where the run that --overwrite replaces waits, in its own folder, until the new one has taken a step.
pub const PREVIOUS: &str = ".previous";

/// A folder that was made, or taken over; [`Claim::keep`] once there is something worth keeping.
pub struct Claim {
    dir: PathBuf,
    /// The folders that did not exist before, outermost first.
    made: Vec<PathBuf>,
    /// Whether it stays though this run never begins: it is the run's own.
    stays: bool,
    began: Cell<bool>,
    /// Held until the run ends.
    lock: Option<Lock>,
}

impl Claim {
    /// Makes the folder, and keeps others out of it where the disk knows locks; `lock` is what [`RunFolder::hold`] gave.
    /// Where no folder was named, `place` has the one that was made.
    pub fn new(place: &mut RunFolder, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| match lock.map_or_else(|| Lock::take(dir), Ok) {
            Err(e @ RunLockError::Locked(_)) => Err(e.into()),
            lock => Ok(lock.ok()),
        })
    }

    /// The same for a coordinator, which does not go on without a lock. What stands there is touched only by who has
    /// the lock.
    pub fn locked(place: &mut RunFolder, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| Ok(Some(lock.map_or_else(|| Lock::take(dir), Ok)?)))
    }

    fn taking(
        place: &mut RunFolder,
        lock: impl FnOnce(&Path) -> Result<Option<Lock>, Refusal>,
    ) -> Result<Self, Refusal> {
        let made = make(place)?;
        let dir = place.dir.clone();
        let lock = lock(&dir)?;
        // Another run may have begun and ended there since the folder was looked at.
        place.check()?;
        let claim = Claim { dir, made, stays: place.goes_on(), began: Cell::new(false), lock };
        if place.overwrite {
            step_aside(&claim.dir).map_err(refusal::at(&claim.dir))?;
        }
        Ok(claim)
    }

    /// The folder stays, and what it replaces goes.
    pub fn keep(&self) {
        if !self.began.replace(true) {
            // A failure costs space, not the run.
            let _ = std::fs::remove_dir_all(self.dir.join(PREVIOUS));
        }
    }

    /// Whether the folder is still where it was and this run's: not removed, moved or replaced.
    pub fn stands(&self) -> bool {
        self.lock.as_ref().map_or_else(|| self.dir.is_dir(), Lock::stands)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.stays || self.began.get() || !self.stands() {
            return;
        }
        // Only what this run made: an empty folder that stood there before is emptied, not removed.
        let _ = clear(&self.dir);
        let _ = come_back(&self.dir);
        self.lock.take();
        for dir in self.made.iter().rev() {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Makes the folder, and says which ones were missing. A folder that no user named must be a new one: of several runs
/// that begin together, each takes another number.
fn make(place: &mut RunFolder) -> Result<Vec<PathBuf>, Refusal> {
    let missing = |dir: &Path| -> Vec<PathBuf> {
        let missing = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
        dir.ancestors().take_while(missing).map(Into::into).collect()
    };
    let Some(stem) = &place.numbered else {
        let mut made = missing(&place.dir);
        made.reverse();
        std::fs::create_dir_all(&place.dir).map_err(refusal::at(&place.dir))?;
        return Ok(made);
    };
    let mut made = missing(Path::new(RUNS));
    std::fs::create_dir_all(RUNS).map_err(refusal::at(Path::new(RUNS)))?;
    loop {
        place.dir = free(stem);
        match std::fs::create_dir(&place.dir) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            outcome => {
                outcome.map_err(refusal::at(&place.dir))?;
                made.push(place.dir.clone());
                return Ok(made);
            }
        }
    }
}

/// What a write leaves that was killed: `.NAME.*.tmp`.
pub fn is_draft(name: &str) -> bool {
    let hidden = name.strip_prefix('.').filter(|rest| rest.ends_with(".tmp"));
    hidden.is_some_and(|rest| OURS.iter().any(|ours| rest.starts_with(&format!("{ours}."))))
}

/// Moves a run into [`PREVIOUS`]. Where there is one already, the process that put it there died before its first
/// step: that run is the one to keep, and what stands beside it never began.
fn step_aside(dir: &Path) -> std::io::Result<()> {
    let previous = dir.join(PREVIOUS);
    if previous.exists() {
        clear(dir)?;
        return come_back(dir).and_then(|()| step_aside(dir));
    }
    std::fs::create_dir(&previous)?;
    for path in ours(dir)? {
        std::fs::rename(&path, previous.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

fn come_back(dir: &Path) -> std::io::Result<()> {
    let previous = dir.join(PREVIOUS);
    let Ok(entries) = std::fs::read_dir(&previous) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        std::fs::rename(entry.path(), dir.join(entry.file_name()))?;
    }
    std::fs::remove_dir(previous)
}

fn clear(dir: &Path) -> std::io::Result<()> {
    for path in ours(dir)? {
        if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
    }
    Ok(())
}

/// What a run wrote in `dir`, leftovers of checkpoints included.
fn ours(dir: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let checkpoint = name.strip_prefix("checkpoint-").is_some_and(|n| n.parse::<u64>().is_ok());
        let left = name.starts_with(".checkpoint-") || is_draft(&name);
        if checkpoint || left || OURS.contains(&name.as_str()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}
