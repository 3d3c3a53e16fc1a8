//! Where connections come from: an open port, and workers that listen themselves and are dialled. Both give the
//! same authenticated connections; who dialled whom makes no difference to what is said.

use super::super::link::{MemberLink, connected};
use super::Reception;
use crate::net::{Closer, Connection, DIAL_TIMEOUT, Endpoint, Listener, NetError, Security, dial};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::runtime::Handle;

/// Between two attempts to dial a worker that listens.
const PAUSE: Duration = Duration::from_secs(1);

/// The same, where a person has to do something there first: longer and longer, up to this.
const LONGEST: Duration = Duration::from_secs(30);

type Counter = Arc<AtomicU64>;

/// An open port. Dropping it closes it; connections go on.
pub struct Port {
    address: SocketAddr,
    refused: Counter,
    runtime: Handle,
    closer: Closer,
    task: tokio::task::JoinHandle<()>,
}

impl Port {
    /// Listens, and hands every connection that has proved itself to the reception, which hears of others too.
    pub fn open(
        runtime: &Handle,
        (at, security): (&Endpoint, Security),
        reception: Arc<Reception>,
    ) -> Result<Self, NetError> {
        let book = reception.clone();
        let bound = Listener::bind(at, security, move |refusal| {
            let more = match refusal.untold {
                0 => String::new(),
                n => format!(" (and {n} more that were not shown)"),
            };
            book.turned_away(refusal.peer.to_string(), format!("{}{more}", refusal.reason));
        });
        let mut listener = runtime.block_on(bound)?;
        let (address, refused, closer) = (listener.address(), listener.counter(), listener.closer());
        // A network without multicast: whoever is not found so is given the address.
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the port. A peer that has connected by then and proves itself within `patience` is handed to the reception.
    pub fn close(&mut self, patience: Duration) {
        self.closer.close();
        let (runtime, task) = (self.runtime.clone(), &mut self.task);
        // A handshake that is not finished by then is dropped.
        let _ = runtime.block_on(async { tokio::time::timeout(patience, task).await });
    }

    /// Connections that were rejected before they had proved anything.
    pub fn refused(&self) -> u64 {
        self.refused.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dials a worker that listens, and again whenever the conversation has ended, until the runtime goes. What is
/// wrong is told once for each reason; what a person has to mend there is no reason to give up: it is mended there,
/// and this side is not started again for it.
pub fn call(
    runtime: &Handle,
    node: Endpoint,
    security: Security,
    reception: Arc<Reception>,
    tell: impl Fn(String) + Send + 'static,
) {
    let handle = runtime.clone();
    runtime.spawn(async move {
        let (mut told, mut pause) = (String::new(), PAUSE);
        loop {
            match dial(&node, &security, DIAL_TIMEOUT).await {
                Ok(connection) => {
                    told.clear();
                    pause = PAUSE;
                    let link = link(&handle, connection);
                    let end = link.end.clone();
                    reception.receive(link, node.to_string());
                    end.ended().await;
                }
                Err(e) => {
                    let line = e.to_string();
                    if line != told {
                        told.clone_from(&line);
                        tell(line);
                    }
                    pause = if e.is_final() { (2 * pause).min(LONGEST) } else { PAUSE };
                }
            }
            tokio::time::sleep(pause).await;
        }
    });
}

/// The reception sets how long silence may last once it knows who speaks.
fn link(runtime: &Handle, connection: Connection) -> MemberLink {
    connected(runtime, connection, Duration::ZERO)
}
