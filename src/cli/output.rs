//! The folder of a run. Where none is named it is `runs/<model>-<n>` with the first free n. It is made at the
//! last moment, right before the first step, and goes again if that step is never reached, so that a run that
//! never began leaves nothing. What another run left is touched only with --overwrite or --resume; the former
//! moves it aside, and brings it back unless the new run takes its first step.

use super::options::groups::{OutputOptions, Resume};
use super::refusal::{self, Refusal};
use crate::cluster::coordinator::{HomeError, Lock, home};
use crate::numeric::say::say;
use crate::train::checkpoint;
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
    home::FILE,
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
const PREVIOUS: &str = ".previous";

/// The marker of a run's folder.
pub const RUN_FILE: &str = "run.yaml";

/// Where a run will write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The folder.
    pub dir: PathBuf,
    /// A checkpoint, or a run's folder whose newest one is meant.
    pub resume: Option<PathBuf>,
    /// Whether what stands there is replaced.
    overwrite: bool,
}

impl Place {
    /// Whether the run goes on in the folder that it resumes from, and not in another one.
    pub fn goes_on(&self) -> bool {
        let real = |dir: &Path| std::fs::canonicalize(dir).ok();
        self.resume.as_deref().is_some_and(|from| real(&run_of(from)) == real(&self.dir))
    }

    /// Keeps everybody else out of a run's folder before anything in it is read, chosen or cleared away. Where the
    /// disk knows no locks, a coordinator hears of it later.
    pub fn hold(&self) -> Result<Option<Lock>, Refusal> {
        match self.goes_on().then(|| Lock::take(&self.dir)) {
            Some(Err(e @ HomeError::Locked(_))) => Err(e.into()),
            lock => Ok(lock.and_then(Result::ok)),
        }
    }

    /// Clears away what a process that died left where the run resumes from: its own folder, which is held, or
    /// another one that nobody has now. What is being written there may look just like it.
    pub fn recover(&self) -> Result<(), Refusal> {
        let Some(dir) = self.resume.as_deref().map(run_of) else { return Ok(()) };
        let held = (!self.goes_on()).then(|| Lock::take(&dir));
        match &held {
            Some(Err(_)) => Ok(()),
            None | Some(Ok(_)) => checkpoint::recover(&dir).map_err(Refusal::failure),
        }
    }
}

/// Where the run goes, refused if it is somebody else's; nothing is written.
pub fn place(options: &OutputOptions, model: &str) -> Result<Place, Refusal> {
    let place = |dir, resume| Place { dir, resume, overwrite: options.overwrite };
    let dir = match (&options.resume, &options.output) {
        (Resume::From(from), output) => {
            let dir = output.clone().unwrap_or_else(|| run_of(from));
            return exists(from).map(|()| place(dir, Some(from.clone())));
        }
        (Resume::Output, Some(dir)) => return exists(dir).map(|()| place(dir.clone(), Some(dir.clone()))),
        (Resume::Output, None) => {
            let dir = newest(model).ok_or_else(|| {
                Refusal::failure(format!(
                    "nothing to resume: no run in runs/{}-<n>; name it with --resume=DIR",
                    stem(model)
                ))
            })?;
            return Ok(place(dir.clone(), Some(dir)));
        }
        (Resume::No, Some(dir)) => dir.clone(),
        (Resume::No, None) => return Ok(place(free(model), None)),
    };
    let mut entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(place(dir, None)),
        Err(e) => return Err(refusal::at(&dir)(e)),
    };
    let shown = dir.display();
    let run = dir.join(RUN_FILE).exists() || dir.join(PREVIOUS).exists();
    match (run, entries.next().is_some()) {
        (true, _) if !options.overwrite => Err(Refusal::configuration(format!(
            "{shown}: belongs to another run (it has a run.yaml): choose another --output, go on with --resume, or replace it with --overwrite"
        ))),
        (false, true) => Err(Refusal::configuration(format!(
            "{shown}: is not empty and holds no run: choose another --output"
        ))),
        _ => Ok(place(dir, None)),
    }
}

/// The same for a coordinator, which may have been killed before it made its folder: where --output names one that is
/// not there, the run begins.
pub fn place_to_begin(options: &OutputOptions, model: &str) -> Result<Place, Refusal> {
    match (&options.resume, &options.output) {
        (Resume::Output, Some(dir)) if !dir.exists() => {
            begins_again(dir, "no such folder to resume from");
            place(&OutputOptions { resume: Resume::No, ..options.clone() }, model)
        }
        _ => place(options, model),
    }
}

/// The note that nothing is resumed, and why.
pub fn begins_again(dir: &Path, fact: &str) {
    say!("note: {}: {fact}: the run begins again at step 0", dir.display());
}

fn exists(path: &Path) -> Result<(), Refusal> {
    match path.is_dir() {
        true => Ok(()),
        false => {
            Err(Refusal::failure(format!("{}: nothing to resume there: no such folder", path.display())))
        }
    }
}

/// The run that a folder or a checkpoint in it belongs to.
pub fn run_of(dir: &Path) -> PathBuf {
    let name = dir.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    match dir.parent() {
        Some(parent) if name.starts_with("checkpoint-") && !parent.as_os_str().is_empty() => parent.into(),
        Some(_) if name.starts_with("checkpoint-") => ".".into(),
        _ => dir.into(),
    }
}

/// A model's name without owner, folders and `.gguf`.
pub fn stem(model: &str) -> String {
    let model = model.split('@').next().unwrap_or(model).trim_end_matches('/');
    let name = Path::new(model).file_name().and_then(|n| n.to_str()).unwrap_or("run");
    name.trim_end_matches(".gguf").to_string()
}

fn numbered(model: &str, n: usize) -> PathBuf {
    Path::new("runs").join(format!("{}-{n}", stem(model)))
}

fn free(model: &str) -> PathBuf {
    (1..).map(|n| numbered(model, n)).find(|p| !p.exists()).unwrap_or_default()
}

/// The last run of that model in `runs`, by its number.
pub fn newest(model: &str) -> Option<PathBuf> {
    let stem = format!("{}-", stem(model));
    let entries = std::fs::read_dir("runs").ok()?;
    let number = |name: String| name.strip_prefix(&stem)?.parse::<usize>().ok();
    let last = entries.flatten().filter_map(|e| number(e.file_name().to_string_lossy().into())).max()?;
    Some(numbered(model, last))
}

/// A folder that was made, or taken over; [`Claim::keep`] once there is something worth keeping.
pub struct Claim {
    dir: PathBuf,
    /// The folders that did not exist before, outermost first.
    made: Vec<PathBuf>,
    kept: bool,
    /// Held until the run ends.
    lock: Option<Lock>,
}

impl Claim {
    /// Makes the folder, and keeps others out of it where the disk knows locks; `lock` is what [`Place::hold`] gave.
    pub fn new(place: &Place, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| match lock.map_or_else(|| Lock::take(dir), Ok) {
            Err(e @ HomeError::Locked(_)) => Err(e.into()),
            lock => Ok(lock.ok()),
        })
    }

    /// The same for a coordinator, which does not go on without a lock. What stands there is touched only by who has
    /// the lock.
    pub fn locked(place: &Place, lock: Option<Lock>) -> Result<Self, Refusal> {
        Claim::taking(place, |dir| Ok(Some(lock.map_or_else(|| Lock::take(dir), Ok)?)))
    }

    fn taking(
        place: &Place,
        lock: impl FnOnce(&Path) -> Result<Option<Lock>, Refusal>,
    ) -> Result<Self, Refusal> {
        let dir = place.dir.clone();
        let missing = |p: &&Path| !p.as_os_str().is_empty() && !p.exists();
        let mut made: Vec<PathBuf> = dir.ancestors().take_while(missing).map(Into::into).collect();
        made.reverse();
        std::fs::create_dir_all(&dir).map_err(refusal::at(&dir))?;
        let lock = lock(&dir)?;
        let claim = Claim { dir, made, kept: place.resume.is_some(), lock };
        if place.overwrite {
            step_aside(&claim.dir).map_err(refusal::at(&claim.dir))?;
        }
        Ok(claim)
    }

    /// The folder stays, and what it replaces goes.
    pub fn keep(&mut self) {
        if !self.kept {
            // A failure costs space, not the run.
            let _ = std::fs::remove_dir_all(self.dir.join(PREVIOUS));
        }
        self.kept = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // Only what this run made: an empty folder that stood there before is emptied, not removed.
        let _ = clear(&self.dir);
        let _ = come_back(&self.dir);
        if self.lock.is_some() {
            let _ = std::fs::remove_file(self.dir.join(home::LOCK));
        }
        for dir in self.made.iter().rev() {
            let _ = std::fs::remove_dir(dir);
        }
    }
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
        if checkpoint || name.starts_with(".checkpoint-") || OURS.contains(&name.as_str()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::options::groups::Every;
    use crate::train::best::Choice;

    #[test]
    fn stems() {
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
    fn a_claim_that_is_not_kept_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("runs/demo-1");
        let options = OutputOptions {
            output: Some(dir.clone()),
            overwrite: false,
            resume: Resume::No,
            eval_steps: Every::Never,
            save_steps: Every::Never,
            choice: Choice::default(),
            save_total_limit: None,
            sample_prompts: vec![],
            log_json: None,
            tensorboard: None,
            dashboard: None,
            quiet: false,
        };
        let p = place(&options, "demo").unwrap();
        let claim = Claim::new(&p, None).unwrap();
        std::fs::write(dir.join(RUN_FILE), "x").unwrap();
        drop(claim);
        assert!(!root.path().join("runs").exists());

        let mut claim = Claim::new(&p, None).unwrap();
        std::fs::write(dir.join(RUN_FILE), "x").unwrap();
        claim.keep();
        drop(claim);
        let refused = place(&options, "demo").unwrap_err();
        assert_eq!(refused.code(), 78);
        assert!(refused.line.contains("belongs to another run"), "{refused}");
        let over = place(&OutputOptions { overwrite: true, ..options.clone() }, "demo").unwrap();
        std::fs::write(dir.join("notes.txt"), "mine").unwrap();
        Claim::new(&over, None).unwrap().keep();
        assert!(!dir.join(RUN_FILE).exists() && dir.join("notes.txt").exists());
        assert!(place(&options, "demo").unwrap_err().line.contains("holds no run"));
    }
}
