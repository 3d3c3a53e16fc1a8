//! Everybody who sees the events of a run: the terminal, metrics.jsonl, TensorBoard, the page, and in the end the
//! report. All are functions of the same stream, so none says what another could not.

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

/// Everybody who watches.
pub struct Watch {
    console: Console,
    metrics: Metrics,
    board: Option<TensorBoard>,
    page: Option<Dashboard>,
    history: Live,
}

impl Watch {
    /// Opens all that the options ask for; a run that is resumed goes on in its files.
    pub fn new(options: &Options, place: &RunFolder, state: &State, look: Look) -> Result<Self, Refusal> {
        let (token, options) = (options.cluster.token_file.as_deref(), &options.output);
        let path = options.log_json.clone().unwrap_or_else(|| place.dir.join(METRICS));
        // A link (/dev/stdout) is followed, so that nothing takes its place.
        let path = path.canonicalize().unwrap_or(path);
        // A log of another run is emptied last, once nothing else refuses; and only a run that goes on reads its own,
        // where it is a file: a pipe has nothing to say.
        let history = Live::default();
        let page = options.dashboard.as_ref().and_then(|at| {
            let opened = dashboard(at, token, surroundings(&place.dir), history.clone());
            // The page is a help, and no reason for a run not to begin.
            opened.inspect_err(|e| say!("warning: no page is shown: {e}")).ok()
        });
        let board = options.tensorboard.as_deref().map(|dir| board(dir, place, &path)).transpose()?;
        let mut console = Console::new(look);
        let metrics = match place.resume.as_deref().filter(|_| path.is_file() || !path.exists()) {
            Some(from) => {
                if !place.goes_on()
                    && let Ok(before) = std::fs::read(run_of(from).join(METRICS))
                {
                    // A run that goes on elsewhere takes along what was said before.
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
        Ok(Watch { console, metrics, board, page, history })
    }

    /// What was seen so far.
    pub fn history(&self) -> Live {
        self.history.clone()
    }

    /// Shows one event to all, with what only this process knows added.
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
        self.history.see(event);
        if let Some(board) = &mut self.board {
            board.see(event);
        }
        if let Some(page) = &self.page {
            page.tell();
        }
    }

    /// The run ended with an error, which is said last: the report in `dir` holds what there was.
    pub fn give_up(mut self, dir: Option<&Path>) {
        self.console.end();
        self.report(dir);
    }

    /// The run ended; its report goes to `dir`.
    pub fn end(mut self, dir: Option<&Path>) -> Result<(), Refusal> {
        self.console.end();
        self.report(dir);
        self.metrics.finish()?;
        Ok(self.board.map_or(Ok(()), TensorBoard::finish)?)
    }

    /// A report that cannot be written takes nothing from the run.
    fn report(&self, dir: Option<&Path>) {
        let history = self.history.now();
        let Some(dir) = dir.filter(|_| !history.steps.is_empty()) else { return };
        if let Err(e) = report::write(dir, &history, &surroundings(dir)) {
            say!("warning: no report: {e}");
        }
    }
}

/// What a page shows beside the events of the run in `dir`.
pub fn surroundings(dir: &Path) -> Surroundings {
    let configuration = std::fs::read_to_string(dir.join(RUN_FILE)).unwrap_or_default();
    Surroundings { configuration, contracts: report::contracts::in_words() }
}

/// The first word of the note that names the run's folder with TensorBoard's files.
const BOARD: &str = "tensorboard";

/// TensorBoard's files of the run. A run that goes on in its own folder goes on in the one that its log names.
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

/// Bytes of memory that this process holds.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Opens the page and says where it is. Whoever comes over a network needs the key in that address.
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
        false => Some(key(token)?),
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

/// Of this machine's token, so that an address that somebody keeps (Prometheus, say) is good for the next run too;
/// where no token can be kept, of one of the moment.
fn key(token_file: Option<&Path>) -> Result<String, Refusal> {
    let kept = Keyring::of_user(token_file).find_or_make();
    let token = match kept {
        Ok(found) => found.token,
        Err(_) => Token::random().map_err(|e| Refusal::failure(e.to_string()))?,
    };
    let key: [u8; 16] = token.derive(b"finetune dashboard");
    Ok(key.iter().map(|byte| format!("{byte:02x}")).collect())
}
