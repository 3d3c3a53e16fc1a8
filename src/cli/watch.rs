//! Everybody who sees the events of a run: the terminal, metrics.jsonl, TensorBoard, the page, and in the end the
//! report. All are functions of the same stream, so none says what another could not.

use super::options::groups::OutputOptions;
use super::output::Place;
use super::refusal::Refusal;
use super::report::surroundings;
use crate::net::{Endpoint, Token, default_route};
use crate::report::page::Surroundings;
use crate::report::{self, Console, Dashboard, History, Look, Metrics, TensorBoard};
use crate::train::checkpoint::State;
use crate::train::event::Event;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Everybody who watches.
pub struct Watch {
    console: Console,
    metrics: Metrics,
    board: Option<TensorBoard>,
    page: Option<Dashboard>,
    history: History,
    dir: PathBuf,
}

impl Watch {
    /// Opens all that the options ask for; a run that is resumed goes on in its files.
    pub fn new(options: &OutputOptions, place: &Place, state: &State, look: Look) -> Result<Self, Refusal> {
        let path = options.log_json.clone().unwrap_or_else(|| place.dir.join("metrics.jsonl"));
        let metrics = match place.resume {
            Some(_) => Metrics::resume(&path, state.step, state.looked)?,
            None => Metrics::create(&path)?,
        };
        let past = report::read(&path)?;
        let board = options.tensorboard.as_deref().map(TensorBoard::create).transpose()?;
        let page =
            options.dashboard.as_ref().map(|at| dashboard(at, surroundings(&place.dir))).transpose()?;
        if let Some(page) = &page {
            past.iter().for_each(|event| page.see(event));
        }
        let history = History::of(&past);
        Ok(Watch { console: Console::new(look), metrics, board, page, history, dir: place.dir.clone() })
    }

    /// Shows one event to all.
    pub fn see(&mut self, event: &Event) {
        self.console.see(event);
        self.metrics.see(event);
        self.history.see(event);
        if let Some(board) = &mut self.board {
            board.see(event);
        }
        if let Some(page) = &self.page {
            page.see(event);
        }
    }

    /// The run ended with an error, which is said last: the report holds what there was.
    pub fn give_up(mut self) {
        self.console.end();
        self.report();
    }

    /// The run ended.
    pub fn end(mut self) -> Result<(), Refusal> {
        self.console.end();
        self.report();
        self.metrics.finish()?;
        Ok(self.board.map_or(Ok(()), TensorBoard::finish)?)
    }

    /// A report that cannot be written takes nothing from the run.
    fn report(&self) {
        if self.history.steps.is_empty() {
            return;
        }
        if let Err(e) = report::write(&self.dir, &self.history, &surroundings(&self.dir)) {
            eprintln!("warning: no report: {e}");
        }
    }
}

/// Opens the page and says where it is. Whoever comes over a network needs the key in that address.
fn dashboard(at: &Endpoint, around: Surroundings) -> Result<Dashboard, Refusal> {
    let refuse = |e: std::io::Error| {
        let (host, port) = (&at.host, at.port);
        Refusal::failure(format!("--dashboard {host}:{port}: {e}: name another with --dashboard=HOST:PORT"))
    };
    let host = if at.host.is_empty() { "0.0.0.0" } else { &at.host };
    let mut addresses = (host, at.port).to_socket_addrs().map_err(refuse)?;
    let address: SocketAddr = addresses.next().ok_or_else(|| refuse(std::io::ErrorKind::NotFound.into()))?;
    let key = match address.ip().is_loopback() {
        true => None,
        false => Some(key()?),
    };
    let page = Dashboard::open(address, key.clone(), around).map_err(refuse)?;
    let shown = match page.address() {
        a if a.ip().is_unspecified() => SocketAddr::new(default_route().unwrap_or(a.ip()), a.port()),
        a => a,
    };
    let query = key.map(|key| format!("?key={key}")).unwrap_or_default();
    eprintln!("page     http://{shown}/{query}");
    Ok(page)
}

fn key() -> Result<String, Refusal> {
    let token = Token::random().map_err(|e| Refusal::failure(e.to_string()))?;
    let key: [u8; 16] = token.derive(b"finetune dashboard");
    Ok(key.iter().map(|byte| format!("{byte:02x}")).collect())
}
