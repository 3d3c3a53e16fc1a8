//! A visit to a coordinator: everything that a worker does until it is welcomed, and no more. `finetune doctor` makes it.

use super::reconnect;
use crate::cluster::link::connected;
use crate::cluster::message::{Bye, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::net::{DIAL_TIMEOUT, Endpoint, NetError, Security, dial};
use std::time::Duration;

/// How long a coordinator may take to answer a hello, and to hear that the visit is over.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a coordinator says to a worker of this build that has brought no model and no options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Visit {
    /// It may take part.
    Welcome {
        /// The run's id.
        run: String,
        /// The model's name.
        model: String,
    },
    /// The run has just ended.
    Over,
    /// It may not; one line that says why.
    Rejected(String),
}

/// Dials, proves the token, says hello, hears the answer and leaves: the coordinator notes nothing of it.
pub fn visit(target: &Endpoint, security: &Security) -> Result<Visit, NetError> {
    let failed = |cause: String| NetError::Local { what: "the network's threads", cause };
    let runtime = reconnect::runtime().map_err(|e| failed(e.to_string()))?;
    let hello = reconnect::hello(None, vec![]).map_err(failed)?;
    let visited = runtime.block_on(async {
        let connection = dial(target, security, DIAL_TIMEOUT).await?;
        let mut link = connected(runtime.handle(), connection, PATIENCE);
        let _ = link.to.send(ToCoordinator::Hello(hello)).await;
        loop {
            let visit = match link.from.recv().await {
                Some(ToWorker::Welcome(manifest)) => {
                    let _ = link.to.send(ToCoordinator::Leave { reason: "it only looked".into() }).await;
                    Visit::Welcome { run: plain(&manifest.run), model: plain(&manifest.model) }
                }
                Some(ToWorker::Bye(Bye::Done)) => Visit::Over,
                Some(ToWorker::Bye(
                    Bye::Later { reason }
                    | Bye::Halted { reason }
                    | Bye::Refused { reason }
                    | Bye::Out { reason, .. },
                )) => Visit::Rejected(plain(&reason)),
                Some(_) => continue,
                None => {
                    let cause = link.end.reason().unwrap_or_else(|| "it closed the connection".into());
                    return Err(NetError::Closed { peer: target.to_string(), cause });
                }
            };
            let end = link.end.clone();
            drop(link);
            let _ = tokio::time::timeout(PATIENCE, end.ended()).await;
            return Ok(visit);
        }
    });
    runtime.shutdown_background();
    visited
}
