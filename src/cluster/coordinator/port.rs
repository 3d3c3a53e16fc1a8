//! Sources of connections: an open port, and workers that listen and are dialled. Both give the same authenticated
//! connections; the dialling direction makes no difference to the messages.

use super::super::link::{MemberLink, connected};
use super::Reception;
use crate::net::{Closer, Connection, DIAL_TIMEOUT, Endpoint, Listener, NetError, Security, dial};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::runtime::Handle;

/// Pause between two attempts to dial a listening worker.
const PAUSE: Duration = Duration::from_secs(1);

/// Longest pause if a person has to fix the cause there first; the pause doubles up to this.
const LONGEST: Duration = Duration::from_secs(30);

/// A number that another thread raises.
pub type Counter = Arc<AtomicU64>;

/// An open port. Dropping it closes the port; open connections continue.
pub struct Port {
    address: SocketAddr,
    refused: Counter,
    runtime: Handle,
    closer: Closer,
    task: tokio::task::JoinHandle<()>,
}

impl Port {
    /// Listens. The reception gets every connection that proved itself, and a report of every other.
    pub fn open(
        runtime: &Handle,
        (at, security): (&Endpoint, Security),
        reception: Arc<Reception>,
    ) -> Result<Self, NetError> {
        let book = reception.clone();
        let bound = Listener::bind(at, security, move |refusal| {
            let more = match refusal.unreported {
                0 => String::new(),
                n => format!(" (and {n} more that were not shown)"),
            };
            book.rejected_stranger(refusal.peer.to_string(), format!("{}{more}", refusal.reason));
        });
        let mut listener = runtime.block_on(bound)?;
        let (address, refused, closer) = (listener.address(), listener.counter(), listener.closer());
        // Without multicast, workers need the address.
        let _ = listener.show();
        let handle = runtime.clone();
        let task = runtime.spawn(async move {
            while let Ok(connection) = listener.accept().await {
                let peer = connection.peer().to_string();
                reception.receive(link(&handle, connection), peer);
            }
        });
        Ok(Port { address, refused, runtime: runtime.clone(), closer, task })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the port. The reception still gets peers that have connected and prove themselves within `patience`.
    pub fn close(&mut self, patience: Duration) {
        self.closer.close();
        let (runtime, task) = (self.runtime.clone(), &mut self.task);
        // A handshake that is not finished by then is dropped.
        let _ = runtime.block_on(async { tokio::time::timeout(patience, task).await });
    }

    /// The live number of connections that were rejected before they proved the token.
    pub fn rejected(&self) -> Counter {
        self.refused.clone()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dials a listening worker, and again whenever the conversation has ended, until the runtime ends. Each reason of a
/// failure is reported once. A final error does not end the attempts: it is fixed on the worker's side, and this
/// side must not need a restart for it.
pub fn call(
    runtime: &Handle,
    node: Endpoint,
    security: Security,
    reception: Arc<Reception>,
    tell: impl Fn(String) + Send + 'static,
) {
    let handle = runtime.clone();
    runtime.spawn(async move {
        let (mut reported, mut pause) = (String::new(), PAUSE);
        loop {
            match dial(&node, &security, DIAL_TIMEOUT).await {
                Ok(connection) => {
                    reported.clear();
                    pause = PAUSE;
                    let link = link(&handle, connection);
                    let end = link.end.clone();
                    reception.receive(link, node.to_string());
                    end.ended().await;
                }
                Err(e) => {
                    let line = e.to_string();
                    if line != reported {
                        reported.clone_from(&line);
                        tell(line);
                    }
                    pause = if e.is_final() { (2 * pause).min(LONGEST) } else { PAUSE };
                }
            }
            tokio::time::sleep(pause).await;
        }
    });
}

/// The reception sets the silence limit once the peer has said `Hello`.
fn link(runtime: &Handle, connection: Connection) -> MemberLink {
    connected(runtime, connection, Duration::ZERO)
}
