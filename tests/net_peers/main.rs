//! Two ends of a network, with real sockets: which peers are admitted, which are refused, and the messages on both
//! sides. Plain sockets act as peers that are not `finetune`.

mod hostile;
mod lines;
mod messages;
mod roles;
mod token;

use finetune::net::{
    Connection, DIAL_TIMEOUT, Endpoint, Listener, NetError, Party, Refusal, Security, Token, dial,
};
use std::sync::mpsc;
use std::time::Duration;
use tokio::runtime::Runtime;

/// A port of this machine that is open until it is dropped.
struct Open {
    runtime: Runtime,
    listener: Listener,
    refusals: mpsc::Receiver<Refusal>,
}

impl Open {
    fn new(security: Security) -> Self {
        let runtime = runtime();
        let (tell, refusals) = mpsc::channel();
        let at = Endpoint::loopback(0);
        let bind = Listener::bind(&at, security, move |r| drop(tell.send(r)));
        let listener = runtime.block_on(bind).unwrap();
        Open { runtime, listener, refusals }
    }

    fn at(&self) -> Endpoint {
        self.listener.address().to_string().parse().unwrap()
    }

    /// The next refusal, within a time.
    fn refusal(&self, within: Duration) -> Refusal {
        self.refusals.recv_timeout(within).expect("a refusal")
    }

    fn accept(&mut self) -> Connection {
        let accepted = self
            .runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(5), self.listener.accept()).await });
        accepted.expect("a peer connects in time").unwrap()
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Dials on a separate runtime.
fn dialled(at: &Endpoint, security: &Security) -> Result<Connection, NetError> {
    runtime().block_on(dial(at, security, DIAL_TIMEOUT))
}

fn with(party: Party, token: &Token) -> Security {
    Security::with_token(party, token).unwrap()
}
