//! A visit to a coordinator: the steps of a worker up to its welcome. Used by `finetune doctor`.

use super::reconnect;
use crate::cluster::link::connected;
use crate::cluster::message::{Bye, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::net::{DIAL_TIMEOUT, Endpoint, NetError, Security, dial};
use std::time::Duration;

/// Time limit for the answer to a `Hello`, and for the end of the visit.
const PATIENCE: Duration = Duration::from_secs(5);

/// The coordinator's answer to a worker of this build without model and options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Visit {
    /// The worker may take part.
    Welcome {
        /// The run's id.
        run: String,
        /// The model's name.
        model: String,
    },
    /// The run has just ended.
    Over,
    /// The worker may not take part; the reason in one line.
    Rejected(String),
}

/// Dials, proves the token, sends `Hello`, reads the answer and leaves. The coordinator counts no device, and notes
/// only a refusal or a remark about the version.
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
