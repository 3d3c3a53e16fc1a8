//! The runs below the root: those that this process started, and those that are found there. A run is a process of its
//! own, in a process group of its own, and ends with neither the page nor this process.

use super::command::{command, error_of};
use super::options;
use super::process::{holder, signal};
use super::root::{Root, wrong};
use crate::cli::listening::Failure;
use crate::format::peft;
use crate::report::{self, History, RunState, page};
use crate::run::folder::RUN_FILE;
use crate::run::run_file::{self, fact};
use crate::run::watch::surroundings;
use crate::train::stop::Urgency;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// Most folders that are searched for runs, and most runs that are listed.
const MOST: usize = 500;
/// Lines of a run's output that are kept: the first ones say where it listens, the last ones why it ended.
const LINES: (usize, usize) = (60, 200);
const METRICS: &str = "metrics.jsonl";

/// A process that was started here.
struct Started {
    dir: String,
    command: String,
    child: Mutex<Child>,
    lines: Mutex<Vec<String>>,
    /// Exit code; `None` while it runs.
    exit: Mutex<Option<i32>>,
    /// Whether it was asked to stop.
    asked: Mutex<bool>,
    /// The log when it started.
    before: Stamp,
}

/// Size and time of a log.
type Stamp = (u64, Option<SystemTime>);

/// The runs below a root.
pub struct Runs {
    root: Root,
    started: Mutex<Vec<Arc<Started>>>,
    /// Processes of other runs that were asked to stop.
    asked: Mutex<HashSet<u32>>,
    /// Histories of logs that have not changed.
    read: Mutex<HashMap<String, (Stamp, Arc<History>)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Started {
    fn runs(&self) -> bool {
        lock(&self.exit).is_none()
    }

    fn hear(&self, line: String) {
        let mut lines = lock(&self.lines);
        if lines.len() == LINES.0 + LINES.1 {
            lines.remove(LINES.0);
        }
        lines.push(line);
    }

    /// The line with which the process failed; none if its state is saved in `folder`.
    fn error(&self, folder: &Path) -> Option<String> {
        let saved = folder.join(RUN_FILE).exists();
        let failed = lock(&self.exit).is_some_and(|code| code != 0 && !(code == 75 && saved));
        let lines = lock(&self.lines);
        failed
            .then(|| lines.iter().rev().find_map(|line| error_of(line)).unwrap_or("the process ended".into()))
    }
}

/// Reads what a process prints, and waits for its end.
fn attend(started: &Started, output: impl std::io::Read) {
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        started.hear(String::from_utf8_lossy(&line).trim_end().to_string());
    }
    loop {
        // The process is reaped under the lock under which it is signalled: its number cannot be another's then.
        let mut child = lock(&started.child);
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => break *lock(&started.exit) = Some(status.code().unwrap_or(-1)),
            Err(_) => break *lock(&started.exit) = Some(-1),
        }
        drop(child);
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Runs {
    /// The runs below `root`.
    pub fn new(root: Root) -> Self {
        Runs { root, started: Mutex::default(), asked: Mutex::default(), read: Mutex::default() }
    }

    /// Starts a run in the folder `dir`.
    pub fn start(&self, dir: &str, arguments: &[String]) -> Result<Value, Failure> {
        let mut all = lock(&self.started);
        let held = || holder(&self.root.0.join(dir)).is_some();
        if all.iter().any(|one| one.dir == dir && one.runs()) || held() {
            return Err(Failure::of(
                StatusCode::CONFLICT,
                format!("{dir}: a run is at work there: stop it first"),
            ));
        }
        let failed = |e: std::io::Error| wrong(format!("the run cannot start: {e}"));
        let mut command = command(&self.root.0, arguments).map_err(failed)?;
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        // Ctrl-C at the terminal of this process is not for the run.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let before = self.history(dir).0;
        let mut child = command.spawn().map_err(failed)?;
        let output = child.stderr.take();
        let line = options::line(arguments);
        let answer = json!({ "run": dir, "command": line });
        let started = Arc::new(Started {
            dir: dir.into(),
            command: line,
            child: Mutex::new(child),
            lines: Mutex::default(),
            exit: Mutex::default(),
            asked: Mutex::default(),
            before,
        });
        all.retain(|one| one.dir != dir);
        all.push(started.clone());
        if let Some(output) = output {
            std::thread::spawn(move || attend(&started, output));
        }
        Ok(answer)
    }

    /// Whether a process trains in a folder.
    pub fn is_at_work(&self, dir: &str) -> bool {
        self.of(dir).is_some_and(|one| one.runs()) || holder(&self.root.0.join(dir)).is_some()
    }

    /// Folders of runs that were started here, also of those that have no folder yet.
    pub fn taken(&self) -> Vec<String> {
        lock(&self.started).iter().map(|one| one.dir.clone()).collect()
    }

    /// Asks a run to end with a checkpoint: after its step, as Ctrl-C does, or at once. A second request to end after its
    /// step is not sent: a second Ctrl-C ends a run without a checkpoint.
    pub fn stop(&self, dir: &str, urgency: Urgency) -> Result<Value, Failure> {
        let started = self.of(dir).filter(|one| one.runs());
        let again = |asked: bool| asked && urgency == Urgency::AfterStep;
        let sent = match &started {
            Some(one) => {
                let child = lock(&one.child);
                let mut asked = lock(&one.asked);
                // The child is not reaped while it is locked.
                let sent = lock(&one.exit).is_none() && (again(*asked) || signal(child.id(), urgency));
                *asked |= sent;
                sent
            }
            None => holder(&self.root.0.join(dir)).is_some_and(|pid| {
                let mut asked = lock(&self.asked);
                let sent = again(asked.contains(&pid)) || signal(pid, urgency);
                sent.then(|| asked.insert(pid));
                sent
            }),
        };
        match sent {
            true => Ok(json!({ "run": dir, "asked": true })),
            false => {
                let line = format!(
                    "{dir}: there is no run at work that this page can stop: use Ctrl-C in its terminal"
                );
                Err(Failure::of(StatusCode::CONFLICT, line))
            }
        }
    }

    fn of(&self, dir: &str) -> Option<Arc<Started>> {
        lock(&self.started).iter().find(|one| one.dir == dir).cloned()
    }

    /// All runs, the newest first.
    pub fn list(&self) -> Value {
        let mut all: Vec<(Option<SystemTime>, Value)> = Vec::new();
        let mut names = self.taken();
        names.extend(found(&self.root.0));
        names.sort();
        names.dedup();
        for dir in names {
            let found = self.history(&dir);
            let (stamp, history) = &found;
            let changed = stamp.1.or_else(|| Some(SystemTime::now()));
            let p = &history.progress;
            let eval = p.eval.as_ref().map(|(_, last)| last.eval_loss);
            all.push((
                changed,
                json!({
                    "run": dir, "state": self.state(&dir, &found), "step": p.step, "total_steps": p.total_steps,
                    "loss": p.smooth_loss(), "eval_loss": eval,
                    "best_eval_loss": history.best_eval().map(|e| e.eval_loss),
                    "model": history.note("model").map(|note| note.split(" (").next().unwrap_or(note)),
                }),
            ));
        }
        all.sort_by_key(|(changed, _)| std::cmp::Reverse(*changed));
        all.into_iter().map(|(_, value)| value).collect()
    }

    /// The state in a word: that of the log, unless the process says otherwise.
    fn state(&self, dir: &str, (stamp, history): &(Stamp, Arc<History>)) -> &'static str {
        let started = self.of(dir);
        let runs = started.as_ref().map(|one| one.runs());
        let state = history.state();
        let open = matches!(state, RunState::Waiting | RunState::Running | RunState::Paused);
        let path = self.root.0.join(dir);
        let other = holder(&path);
        let alive = runs == Some(true) || other.is_some();
        match &started {
            Some(one) if alive && *lock(&one.asked) => "stopping",
            _ if other.is_some_and(|pid| lock(&self.asked).contains(&pid)) => "stopping",
            // A resumed run has not yet written to its log.
            Some(one) if alive && one.before == *stamp => "starting",
            _ if alive && !open => "finishing",
            _ if alive => state.word(),
            Some(one) if (open || one.before == *stamp) && one.error(&path).is_some() => {
                if *lock(&one.asked) { "stopped" } else { "failed" }
            }
            // Other systems do not say which process holds a lock.
            _ if open && (cfg!(target_os = "linux") || runs == Some(false)) => "interrupted",
            _ => state.word(),
        }
    }

    fn history(&self, dir: &str) -> (Stamp, Arc<History>) {
        let log = self.root.0.join(dir).join(METRICS);
        let stamp: Stamp =
            std::fs::metadata(&log).map_or((0, None), |about| (about.len(), about.modified().ok()));
        if let Some((known, history)) = lock(&self.read).get(dir)
            && *known == stamp
        {
            return (stamp, history.clone());
        }
        let history = Arc::new(History::of(&report::read(&log).unwrap_or_default()));
        lock(&self.read).insert(dir.into(), (stamp, history.clone()));
        (stamp, history)
    }

    /// A run for its page; the drawing is left out if the log has the stamp `seen`.
    pub fn show(&self, dir: &str, seen: &str) -> Result<Value, Failure> {
        let started = self.of(dir);
        let path = self.root.0.join(dir);
        if started.is_none() && !path.join(RUN_FILE).exists() {
            return Err(Failure::of(StatusCode::NOT_FOUND, format!("{dir}: there is no run")));
        }
        let found = self.history(dir);
        let state = self.state(dir, &found);
        let (stamp, history) = found;
        let stamp = format!("{} {:?} {state}", stamp.0, stamp.1);
        let draw = || match &history.start {
            Some(_) => page::body(&history, &surroundings(&path)),
            None => String::new(),
        };
        let html = (stamp != seen).then(draw);
        let prompts = fact(&path.join(RUN_FILE), run_file::PROMPTS);
        let ended = !["starting", "running", "paused", "waiting", "stopping", "finishing"].contains(&state);
        Ok(json!({
            "run": dir, "state": state, "stamp": stamp, "html": html, "ended": ended,
            "saved": path.join(RUN_FILE).exists(),
            "chat": prompts.as_deref() == Some(run_file::CHAT),
            "adapter": has_adapter(&path),
            "lines": started.as_ref().map(|one| lock(&one.lines).clone()),
            "command": started.as_ref().map(|one| one.command.clone()),
            "error": started.as_ref().and_then(|one| one.error(&path)),
        }))
    }

    /// A page that compares runs.
    pub fn compare(&self, dirs: &[String]) -> Result<String, Failure> {
        let named = |dir: &String| {
            let (_, history) = self.history(dir);
            match history.start {
                Some(_) => Ok((dir.clone(), (*history).clone())),
                None => Err(wrong(format!("{dir}: nothing was trained yet"))),
            }
        };
        if dirs.len() < 2 {
            return Err(wrong("choose two runs or more to compare"));
        }
        let runs = dirs.iter().map(named).collect::<Result<Vec<_>, _>>()?;
        let folders: Vec<PathBuf> = dirs.iter().map(|dir| self.root.0.join(dir)).collect();
        let differences = crate::cli::report::difference::between(&folders);
        Ok(report::comparison(&runs, differences.as_deref()))
    }
}

/// Whether a run, or a checkpoint of it, has an adapter.
fn has_adapter(dir: &Path) -> bool {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names
        .map(|name| name.to_string_lossy().into_owned())
        .any(|name| name == peft::WEIGHTS || name.starts_with("checkpoint-"))
}

/// Folders of runs at most two levels below `root`, relative to it.
fn found(root: &Path) -> Vec<String> {
    let folders = |dir: &Path| -> Vec<PathBuf> {
        let hidden =
            |path: &Path| path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        // Links are left out: they may lead elsewhere.
        let all = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        all.map(|entry| entry.path()).filter(|path| !hidden(path)).take(MOST).collect()
    };
    let first = folders(root);
    let below: Vec<PathBuf> =
        first.iter().filter(|dir| !dir.join(RUN_FILE).exists()).flat_map(|dir| folders(dir)).collect();
    let runs = first.into_iter().chain(below).filter(|dir| dir.join(RUN_FILE).exists()).take(MOST);
    runs.filter_map(|dir| Some(dir.strip_prefix(root).ok()?.to_str()?.to_string())).collect()
}
