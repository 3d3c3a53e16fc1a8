//! The folder of a run. The default is `runs/<model>-<n>` with the first free n. The folder is created right before the
//! first step and removed if that step is not reached, so that a run that fails earlier leaves nothing. Only the run
//! itself (--resume) and --overwrite change what a run left; --overwrite moves it aside and restores it unless the new
//! run completes its first step.

use crate::cluster::coordinator::{Lock, RunLockError, run_lock};
use crate::config::groups::{OutputOptions, Resume};
use crate::config::refusal::{self, Refusal};
use crate::support::stderr::say;
use crate::train::TrainError;
use crate::train::checkpoint::{self, Checkpoint, JOURNAL};
use std::path::{Path, PathBuf};

/// Log-probabilities of answers under the reference.
pub const REFERENCE: &str = "reference.bin";

mod claim;

pub use claim::Claim;

/// Parent of default folders.
pub const RUNS: &str = "runs";

/// The file that marks a run's folder.
pub const RUN_FILE: &str = "run.yaml";

/// The file that a finished run has.
const ADAPTER: &str = "adapter_model.safetensors";

/// Destination of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    /// The folder.
    pub dir: PathBuf,
    /// A checkpoint, or the folder of a run whose newest checkpoint is used.
    pub resume: Option<PathBuf>,
    /// Whether an existing run in the folder is replaced.
    overwrite: bool,
    /// The model's name where no folder was named: then another number may be used.
    numbered: Option<String>,
}

impl RunFolder {
    /// Whether the run continues in the folder that it resumes from.
    pub fn goes_on(&self) -> bool {
        self.resume.as_deref().is_some_and(|from| same(&run_of(from), &self.dir))
    }

    /// Locks the run's folder before anything in it is read, chosen or removed. Where the file system has no locks, a
    /// coordinator fails later.
    pub fn hold(&self) -> Result<Option<Lock>, Refusal> {
        match self.goes_on().then(|| Lock::take(&self.dir)) {
            Some(Err(e @ RunLockError::Locked(_))) => Err(e.into()),
            lock => Ok(lock.and_then(Result::ok)),
        }
    }

    /// Removes leftovers of a process that died from the folder of the resumed run: the run's own folder, which is
    /// locked, or another folder that no run uses now. In a folder in use, files being written look like leftovers.
    pub fn recover(&self) -> Result<(), Refusal> {
        let Some(dir) = self.resume.as_deref().map(run_of) else { return Ok(()) };
        let held = (!self.goes_on()).then(|| Lock::take(&dir));
        match &held {
            Some(Err(_)) => Ok(()),
            None | Some(Ok(_)) => checkpoint::recover(&dir).map_err(Refusal::failure),
        }
    }

    /// Refuses a folder with contents that this run must not change.
    fn check(&self) -> Result<(), Refusal> {
        match (self.goes_on(), holds(&self.dir)?) {
            (false, Holds::Run) if !self.overwrite => Err(Refusal::configuration(format!(
                "{}: belongs to another run (it has a run.yaml): choose another --output, go on with --resume, or replace it with --overwrite",
                self.dir.display()
            ))),
            (false, Holds::Other) => Err(not_ours(&self.dir)),
            _ => Ok(()),
        }
    }

    /// Returns the checkpoint that the run continues from. `None` for a new run: nothing is resumed, or the run was
    /// killed before its first checkpoint, which is reported.
    pub fn checkpoint(&self) -> Result<Option<Checkpoint>, Refusal> {
        let Some(from) = &self.resume else { return Ok(None) };
        match checkpoint::find(from) {
            // A finished run without checkpoints does not start again.
            Err(TrainError::NoCheckpoint { .. }) if self.goes_on() && !self.dir.join(ADAPTER).exists() => {
                if holds(&self.dir)? == Holds::Other {
                    return Err(not_ours(&self.dir));
                }
                begins_again(&self.dir, "no checkpoint to resume from");
                Ok(None)
            }
            found => Ok(Some(found?)),
        }
    }
}

/// Chooses the run's folder and refuses one with other contents; nothing is written.
pub fn place(options: &OutputOptions, model: &str) -> Result<RunFolder, Refusal> {
    let both = "--overwrite: either --resume or --overwrite of the same folder, not both";
    if options.overwrite && options.resume == Resume::Output {
        return Err(Refusal::configuration(both));
    }
    let resume = resumed(options, model)?;
    let named = options.output.clone().or_else(|| resume.as_deref().map(run_of));
    let numbered = named.is_none().then(|| stem(model));
    let dir = named.unwrap_or_else(|| free(&stem(model)));
    let place = RunFolder { dir, resume, overwrite: options.overwrite, numbered };
    if place.goes_on() && place.overwrite {
        return Err(Refusal::configuration(both));
    }
    place.check().map(|()| place)
}

/// Path for --resume, `None` for a new run. A missing folder means a new run, so that a scheduler can always pass
/// --resume.
fn resumed(options: &OutputOptions, model: &str) -> Result<Option<PathBuf>, Refusal> {
    match (&options.resume, &options.output) {
        (Resume::No, _) => Ok(None),
        (Resume::From(dir), _) if dir.is_dir() => Ok(Some(dir.clone())),
        (Resume::From(dir), _) => {
            Err(Refusal::failure(format!("{}: nothing to resume there: no such folder", dir.display())))
        }
        (Resume::Output, Some(dir)) if dir.exists() => Ok(Some(dir.clone())),
        (Resume::Output, Some(dir)) => {
            begins_again(dir, "no such folder to resume from");
            Ok(None)
        }
        (Resume::Output, None) => newest(model).map(Some).ok_or_else(|| {
            Refusal::failure(format!(
                "nothing to resume: no run in runs/{}-<n>; name it with --resume=DIR",
                stem(model)
            ))
        }),
    }
}

/// Reports that nothing is resumed, and the reason.
fn begins_again(dir: &Path, fact: &str) {
    say!("note: {}: {fact}: the run begins again at step 0", dir.display());
}

fn not_ours(dir: &Path) -> Refusal {
    Refusal::configuration(format!(
        "{}: is not empty and holds no run: choose another --output",
        dir.display()
    ))
}

/// Whether both paths lead to the same existing folder.
pub fn same(one: &Path, other: &Path) -> bool {
    let real = |dir: &Path| std::fs::canonicalize(dir).ok();
    real(one).is_some_and(|one| real(other) == Some(one))
}

/// Contents of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// Empty, or with the leftovers of a run that was killed while it claimed the folder.
    Nothing,
    Run,
    Other,
}

fn holds(dir: &Path) -> Result<Holds, Refusal> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Holds::Nothing),
        Err(e) => return Err(refusal::at(dir)(e)),
    };
    let names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let marks =
        |name: &String| [RUN_FILE, claim::PREVIOUS, claim::MOVING, run_lock::FILE].contains(&name.as_str());
    Ok(match names.iter().any(marks) {
        true => Holds::Run,
        false if names.iter().all(|name| name == run_lock::LOCK || claim::is_draft(name)) => Holds::Nothing,
        false => Holds::Other,
    })
}

/// The folder of the run of a checkpoint, or of a state of its journal.
pub fn of_checkpoint(dir: &Path) -> &Path {
    let run = dir.parent().unwrap_or(Path::new(""));
    match run.ends_with(JOURNAL) && !run.join(RUN_FILE).exists() {
        true => run.parent().unwrap_or(Path::new("")),
        false => run,
    }
}

/// The folder of the run of `dir`, which is a run's folder, or a checkpoint in it or in its journal.
pub fn run_of(dir: &Path) -> PathBuf {
    let name = dir.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let run = if name.starts_with("checkpoint-") { of_checkpoint(dir) } else { dir };
    if run.as_os_str().is_empty() { ".".into() } else { run.into() }
}

/// A model's name without owner, folders and `.gguf`.
pub fn stem(model: &str) -> String {
    let model = model.split('@').next().unwrap_or(model).trim_end_matches('/');
    let name = Path::new(model).file_name().and_then(|n| n.to_str()).unwrap_or("run");
    name.trim_end_matches(".gguf").to_string()
}

fn numbered(stem: &str, n: usize) -> PathBuf {
    Path::new(RUNS).join(format!("{stem}-{n}"))
}

/// The first free number. Another run may take it before this run does.
fn free(stem: &str) -> PathBuf {
    (1..).map(|n| numbered(stem, n)).find(|p| !p.exists()).unwrap_or_default()
}

/// The folder of that model's run in `runs` with the highest number.
pub fn newest(model: &str) -> Option<PathBuf> {
    let (stem, entries) = (stem(model), std::fs::read_dir(RUNS).ok()?);
    let number = |name: String| name.strip_prefix(&stem)?.strip_prefix('-')?.parse::<usize>().ok();
    let mut taken: Vec<usize> =
        entries.flatten().filter_map(|e| number(e.file_name().to_string_lossy().into())).collect();
    taken.sort_unstable();
    taken.into_iter().rev().map(|n| numbered(&stem, n)).find(|dir| dir.join(RUN_FILE).exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::groups::Every;
    use crate::train::best::Choice;

    #[test]
    fn output_name_is_the_stem_of_the_model() {
        for (model, expected) in [
            ("owner/name", "name"),
            ("owner/name@main", "name"),
            ("/models/x-q4.gguf", "x-q4"),
            ("./dir/", "dir"),
            ("demo", "demo"),
        ] {
            assert_eq!(stem(model), expected, "{model}");
        }
    }

    #[test]
    fn dropped_claim_leaves_no_folder() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/demo-1");
        let options = OutputOptions {
            output: Some(dir.clone()),
            overwrite: false,
            resume: Resume::No,
            eval_steps: Every::Never,
            save_steps: Every::Never,
            choice: Choice::default(),
            best_set: None,
            token_accuracy: false,
            save_total_limit: None,
            sample_prompts: vec![],
            sample_rows: 0,
            log_json: None,
            tensorboard: None,
            dashboard: None,
            quiet: false,
        };
        let mut p = place(&options, "demo").unwrap();
        let claim = Claim::new(&mut p, None).unwrap();
        std::fs::write(dir.join(RUN_FILE), "x").unwrap();
        drop(claim);
        assert!(!root.path().join("runs").exists());

        let claim = Claim::new(&mut p, None).unwrap();
        std::fs::write(dir.join(RUN_FILE), "x").unwrap();
        claim.keep();
        drop(claim);
        let refused = place(&options, "demo").unwrap_err();
        assert_eq!(refused.code(), 78);
        assert!(refused.line.contains("belongs to another run"), "{refused}");
        let mut over = place(&OutputOptions { overwrite: true, ..options.clone() }, "demo").unwrap();
        std::fs::write(dir.join("notes.txt"), "mine").unwrap();
        // A file that cannot be moved aside stays.
        std::fs::write(dir.join(claim::MOVING), "").unwrap();
        assert!(Claim::new(&mut over, None).is_err());
        assert!(dir.join(RUN_FILE).exists() && dir.join("notes.txt").exists());
        std::fs::remove_file(dir.join(claim::MOVING)).unwrap();
        // A process died while it moved the run aside: moved and unmoved files belong to the same run.
        std::fs::write(dir.join("metrics.jsonl"), "m").unwrap();
        std::fs::create_dir(dir.join(claim::MOVING)).unwrap();
        std::fs::rename(dir.join(RUN_FILE), dir.join(claim::MOVING).join(RUN_FILE)).unwrap();
        drop(Claim::new(&mut over, None).unwrap());
        assert!(dir.join(RUN_FILE).exists() && dir.join("metrics.jsonl").exists());
        assert!(!dir.join(claim::MOVING).exists() && !dir.join(claim::PREVIOUS).exists());
        Claim::new(&mut over, None).unwrap().keep();
        assert!(!dir.join(RUN_FILE).exists() && dir.join("notes.txt").exists());
        assert!(place(&options, "demo").unwrap_err().line.contains("holds no run"));
    }
}
