//! The claim of a run on its folder: created, or taken over with the old contents moved aside; undone unless the run
//! completes its first step; and checked for as long as the run writes there.

use super::{RUNS, RunFolder, free};
use crate::cluster::coordinator::{Lock, RunLockError, run_lock};
use crate::config::refusal::{self, Refusal};
use crate::train::checkpoint::JOURNAL;
use std::cell::Cell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Files of a run, besides `checkpoint-N`: the only ones that --overwrite removes.
const OURS: [&str; 25] = [
    JOURNAL,
    "rewards.svg",
    super::REFERENCE,
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

/// Subfolder with the replaced run of --overwrite, until the new run has completed a step.
pub const PREVIOUS: &str = ".previous";
/// Name of [`PREVIOUS`] while files are being moved: the files beside it then belong to the same run.
pub const MOVING: &str = ".previous.moving";

/// A folder that was created or taken over. The drop undoes this before [`Claim::keep`].
pub struct Claim {
    dir: PathBuf,
    /// The folders that this claim created, outermost first.
    made: Vec<PathBuf>,
    /// Actions of the drop where the run has not begun.
    undo: Undo,
    began: Cell<bool>,
    /// Held until the run ends.
    lock: Option<Lock>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undo {
    /// Nothing: the run continues in its own folder.
    Nothing,
    /// Removes the created folders; they hold nothing of this run yet.
    Folders,
    /// Removes the run's files too, and restores the replaced run.
    Run,
}

impl Claim {
    /// Creates the folder and locks it where the file system has locks; `lock` is the result of [`RunFolder::hold`].
    /// Where no folder was named, `place` gets the created one.
    pub fn new(place: &mut RunFolder, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| match lock.map_or_else(|| Lock::take(dir), Ok) {
            Err(e @ RunLockError::Locked(_)) => Err(e.into()),
            lock => Ok(lock.ok()),
        })
    }

    /// Like [`Claim::new`] for a coordinator, which fails without a lock. Existing files are changed only with the
    /// lock.
    pub fn locked(place: &mut RunFolder, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| Ok(Some(lock.map_or_else(|| Lock::take(dir), Ok)?)))
    }

    fn taking(
        place: &mut RunFolder,
        lock: impl FnOnce(&Path) -> Result<Option<Lock>, Refusal>,
    ) -> Result<Self, Refusal> {
        let (made, dir) = (make(place)?, place.dir.clone());
        let mut claim = Claim { dir, made, undo: Undo::Folders, began: Cell::new(false), lock: None };
        claim.lock = lock(&claim.dir)?;
        // Another run may have begun and ended there since the first check.
        place.check()?;
        if place.overwrite
            && let Err(e) = step_aside(&claim.dir)
        {
            // Files that could not be moved belong to the old run, too.
            let _ = come_back(&claim.dir);
            return Err(refusal::at(&claim.dir)(e));
        }
        claim.undo = if place.goes_on() { Undo::Nothing } else { Undo::Run };
        Ok(claim)
    }

    /// Keeps the folder and removes the replaced run.
    pub fn keep(&self) {
        if !self.began.replace(true) {
            // A failure costs space, not the run.
            let _ = std::fs::remove_dir_all(self.dir.join(PREVIOUS));
        }
    }

    /// Whether the folder is still this run's at its path: not removed, moved or replaced.
    pub fn stands(&self) -> bool {
        self.lock.as_ref().map_or_else(|| self.dir.is_dir(), Lock::stands)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.undo == Undo::Nothing || self.began.get() || !self.stands() {
            return;
        }
        // Only files of this run are removed: a folder that existed before is emptied but kept.
        if self.undo == Undo::Run {
            let _ = clear(&self.dir).and_then(|()| come_back(&self.dir));
        }
        self.lock.take();
        for dir in self.made.iter().rev() {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Creates the folder and returns the folders that were missing. A default folder must be a new one: of several runs
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

/// Whether a file was left by a write that was killed: `.NAME.*.tmp`.
pub fn is_draft(name: &str) -> bool {
    let hidden = name.strip_prefix('.').filter(|rest| rest.ends_with(".tmp"));
    hidden.is_some_and(|rest| OURS.iter().any(|ours| rest.starts_with(&format!("{ours}."))))
}

/// Moves a run into [`PREVIOUS`]. If there is one already, the process that moved it died before its first step: that
/// run is kept, and the files beside it are of a run that never began.
fn step_aside(dir: &Path) -> std::io::Result<()> {
    if dir.join(PREVIOUS).exists() {
        clear(dir)?;
    }
    come_back(dir)?;
    let moving = dir.join(MOVING);
    std::fs::create_dir(&moving)?;
    for path in ours(dir)? {
        std::fs::rename(&path, moving.join(path.file_name().unwrap_or_default()))?;
    }
    std::fs::rename(moving, dir.join(PREVIOUS))
}

/// Moves the run back. [`PREVIOUS`] is renamed first, so that a second attempt removes no restored files.
fn come_back(dir: &Path) -> std::io::Result<()> {
    let (previous, moving) = (dir.join(PREVIOUS), dir.join(MOVING));
    if previous.exists() {
        std::fs::rename(&previous, &moving)?;
    }
    let Ok(entries) = std::fs::read_dir(&moving) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        std::fs::rename(entry.path(), dir.join(entry.file_name()))?;
    }
    std::fs::remove_dir(moving)
}

fn clear(dir: &Path) -> std::io::Result<()> {
    for path in ours(dir)? {
        if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
    }
    Ok(())
}

/// Files of a run in `dir`, including leftovers of checkpoints.
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
