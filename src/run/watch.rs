//! All consumers of a run's events: the terminal, metrics.jsonl, TensorBoard, the page, and the report at the end. All
//! read the same stream, so they agree.

use super::folder::{RUN_FILE, RunFolder, run_of};
use crate::config::groups::Options;
use crate::config::refusal::{self, Refusal};
use crate::net::keyring::Keyring;
use crate::net::{Endpoint, Token, default_route};
use crate::report::page::Surroundings;
use crate::report::{self, Console, Dashboard, Live, Look, Metrics, TensorBoard};
use crate::support::stderr::say;
use crate::train::checkpoint::State;
use crate::train::event::Event;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

/// The log, in a run's folder.
const METRICS: &str = "metrics.jsonl";

/// All consumers of a run's events.
pub struct Watch {
    console: Console,
    metrics: Metrics,
    /// Whether standard output gets the log's lines too (`--log-json -`).
    prints: bool,
    board: Option<TensorBoard>,
    page: Option<Dashboard>,
    history: Live,
}

impl Watch {
    /// Opens all outputs of the options; a resumed run appends to its files.
    pub fn new(options: &Options, place: &RunFolder, state: &State, look: Look) -> Result<Self, Refusal> {
        let (token, options) = (options.cluster.token_file.as_deref(), &options.output);
        let prints = options.log_json.as_ref().is_some_and(|path| path.as_os_str() == "-");
        let elsewhere = options.log_json.clone().filter(|_| !prints);
        let path = elsewhere.unwrap_or_else(|| place.dir.join(METRICS));
        // A link (/dev/stdout) is resolved, so that the link itself is not replaced.
        let path = path.canonicalize().unwrap_or(path);
        // A log of another run is truncated last, after all checks. Only a run that continues reads its own log, and
        // only from a regular file: a pipe cannot be read.
        let history = Live::default();
        let page = options.dashboard.as_ref().and_then(|at| {
            let opened = dashboard(at, token, surroundings(&place.dir), history.clone());
            // The run also begins without the page.
            opened.inspect_err(|e| say!("warning: no page is shown: {e}")).ok()
        });
        let board = options.tensorboard.as_deref().map(|dir| board(dir, place, &path)).transpose()?;
        let mut console = Console::new(look);
        let metrics = match place.resume.as_deref().filter(|_| path.is_file() || !path.exists()) {
            Some(from) => {
                if !place.goes_on()
                    && let Ok(before) = std::fs::read(run_of(from).join(METRICS))
                {
                    // A run that continues elsewhere copies the earlier log.
                    std::fs::write(&path, before).map_err(refusal::at(&path))?;
                }
                let metrics = Metrics::resume(&path, state.step, state.looked)?;
                for event in report::read(&path)? {
                    history.see(&event);
                    console.recall(&event);
                }
                metrics
            }
            None => Metrics::create(&path)?,
        };
        Ok(Watch { console, metrics, prints, board, page, history })
    }

    /// The events so far.
    pub fn history(&self) -> Live {
        self.history.clone()
    }

    /// Passes one event to all consumers, with data that only this process has.
    pub fn see(&mut self, event: &Event) {
        let mut event = event.clone();
        match (&mut event, &self.board) {
            (Event::Step(step), _) => step.memory = step.memory.or_else(resident),
            (Event::Run(run), Some(board)) => {
                run.notes.push(format!("{BOARD} {}", board.folder().display()));
            }
            _ => {}
        }
        let event = &event;
        self.console.see(event);
        self.metrics.see(event);
        if self.prints {
            report::print(event);
        }
        self.history.see(event);
        if let Some(board) = &mut self.board {
            board.see(event);
        }
        if let Some(page) = &self.page {
            page.tell();
        }
    }

    /// Ends after an error, which is reported last: the report in `dir` contains the events so far.
    pub fn give_up(mut self, dir: Option<&Path>) {
        self.console.end();
        self.report(dir);
    }

    /// Ends the run; writes its report to `dir`.
    pub fn end(mut self, dir: Option<&Path>) -> Result<(), Refusal> {
        self.console.end();
        self.report(dir);
        self.metrics.finish()?;
        Ok(self.board.map_or(Ok(()), TensorBoard::finish)?)
    }

    /// An error of the report does not fail the run.
    fn report(&self, dir: Option<&Path>) {
        let history = self.history.now();
        let Some(dir) = dir.filter(|_| !history.steps.is_empty()) else { return };
        if let Err(e) = report::write(dir, &history, &surroundings(dir)) {
            say!("warning: no report: {e}");
        }
    }
}

/// Data of a page besides the events of the run in `dir`.
pub fn surroundings(dir: &Path) -> Surroundings {
    let configuration = std::fs::read_to_string(dir.join(RUN_FILE)).unwrap_or_default();
    Surroundings { configuration, contracts: report::contracts::in_words() }
}

/// The first word of the note with the path of TensorBoard's files.
const BOARD: &str = "tensorboard";

/// TensorBoard's files of the run. A run that continues in its own folder appends to the path in its log.
fn board(dir: &Path, place: &RunFolder, log: &Path) -> Result<TensorBoard, Refusal> {
    let before = if place.goes_on() && log.is_file() { report::read(log)? } else { vec![] };
    let noted = |event: &Event| match event {
        Event::Run(run) => {
            run.notes.iter().find_map(|note| note.strip_prefix(BOARD).map(|s| s.trim().into()))
        }
        _ => None,
    };
    let before: Option<PathBuf> = before.iter().rev().find_map(noted);
    let whole = place.dir.canonicalize().unwrap_or_else(|_| place.dir.clone());
    let name = whole.file_name().map_or("run".into(), |name| name.to_string_lossy());
    Ok(TensorBoard::create(dir, &name, before.as_deref())?)
}

/// Bytes of resident memory of this process.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Opens the page and prints its address. Requests over a network need the key in that address.
fn dashboard(
    at: &Endpoint,
    token: Option<&Path>,
    around: Surroundings,
    history: Live,
) -> Result<Dashboard, Refusal> {
    let refuse = |e: std::io::Error| {
        let (host, port) = (&at.host, at.port);
        Refusal::failure(format!("--dashboard {host}:{port}: {e}: name another with --dashboard=HOST:PORT"))
    };
    let host = if at.host.is_empty() { "0.0.0.0" } else { &at.host };
    let mut addresses = (host, at.port).to_socket_addrs().map_err(refuse)?;
    let address: SocketAddr = addresses.next().ok_or_else(|| refuse(std::io::ErrorKind::NotFound.into()))?;
    let key = match address.ip().is_loopback() {
        true => None,
        false => Some(key(token, b"finetune dashboard")?),
    };
    let page = Dashboard::open(address, key.clone(), around, history).map_err(refuse)?;
    let shown = match page.address() {
        a if a.ip().is_unspecified() => SocketAddr::new(default_route().unwrap_or(a.ip()), a.port()),
        a => a,
    };
    let query = key.map(|key| format!("?key={key}")).unwrap_or_default();
    say!("page     http://{shown}/{query}");
    Ok(page)
}

/// A key for `purpose`, derived from this machine's token, so that a stored address (of Prometheus, for example) stays valid for the
/// next run; where no token can be stored, a random key.
pub fn key(token_file: Option<&Path>, purpose: &[u8]) -> Result<String, Refusal> {
    let kept = Keyring::of_user(token_file).find_or_make();
    let token = match kept {
        Ok(found) => found.token,
        Err(_) => Token::random().map_err(|e| Refusal::failure(e.to_string()))?,
    };
    let key: [u8; 16] = token.derive(purpose);
    Ok(key.iter().map(|byte| format!("{byte:02x}")).collect())
}
