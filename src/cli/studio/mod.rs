//! `finetune studio`: a page that starts, shows, stops and resumes runs below a folder, for people who do not type. What
//! it does are commands of this program in processes of their own. (`--dashboard` shows one run, and changes nothing.)

mod command;
mod http;
mod options;
mod process;
mod root;
mod runs;
mod talk;

use super::invocation::Invocation;
use super::listening::{self, Ends, connections};
use crate::config::refusal::{self, Refusal};
use crate::run::watch;
use crate::support::stderr::say;
use http::{COMMANDS, Studio};
use root::Root;
use runs::Runs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use talk::Talk;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch as news};

const PORT: u16 = 9090;
/// How long connections may take to end.
const ENDING: Duration = Duration::from_secs(2);

/// Serves the page until a signal ends it. Runs that were started go on.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let endpoint = listening::endpoint(s, PORT)?;
    let address = listening::resolved(&endpoint)?;
    let key = watch::key(s.text("token-file")?.map(Path::new), b"finetune studio")?;
    let dir = PathBuf::from(s.text("root")?.unwrap_or("."));
    let whole = dir.canonicalize().map_err(refusal::at(&dir))?;
    // Paths of requests, and those of commands, are relative to it.
    std::env::set_current_dir(&whole).map_err(refusal::at(&dir))?;
    let root = Root(whole);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(8)
        .thread_name("studio")
        .enable_all()
        .build()
        .map_err(|e| Refusal::failure(format!("threads for connections: {e}")))?;
    let in_use = |e: std::io::Error| listening::in_use(&endpoint, &e);
    let listener = runtime.block_on(TcpListener::bind(address)).map_err(in_use)?;
    let address = listener.local_addr().map_err(in_use)?;
    let studio = Arc::new(Studio {
        key: key.clone(),
        near: address.ip().is_loopback(),
        runs: Runs::new(root.clone()),
        talk: Talk::new(root.clone()),
        places: Arc::new(Semaphore::new(COMMANDS)),
        root,
    });
    let ends = runtime.block_on(async { Ends::new() });
    let mut ends = ends.map_err(|e| Refusal::failure(format!("signals: {e}")))?;
    let (closing, closed) = news::channel(false);
    let connections = runtime.spawn(connections::listen(listener, studio.clone(), closed));
    say!("studio   http://{}/#key={key}", listening::shown(address));
    say!("root     {}", studio.root.0.display());
    runtime.block_on(ends.next());
    closing.send_replace(true);
    let _ = runtime.block_on(async { tokio::time::timeout(ENDING, connections).await });
    studio.talk.close();
    runtime.shutdown_background();
    Ok(())
}
