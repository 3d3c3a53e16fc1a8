//! A worker's end of the link as its own thread uses it: what it says waits in order and never keeps it from
//! hearing, and it looks at the stop flag whatever it waits for.

use super::Outcome;
use crate::cluster::link::{End, WorkerLink};
use crate::cluster::message::{Bye, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::train::stop::{Stop, Urgency};
use std::collections::VecDeque;
use std::time::Duration;

/// How long a raised stop flag may go unseen.
const GLANCE: Duration = Duration::from_millis(50);

/// How long last words may take.
const LAST_WORDS: Duration = Duration::from_secs(3);

pub(super) struct Wire<'a> {
    link: WorkerLink,
    outbox: VecDeque<ToCoordinator>,
    stop: &'a Stop,
}

impl<'a> Wire<'a> {
    pub fn new(link: WorkerLink, stop: &'a Stop) -> Self {
        Wire { link, outbox: VecDeque::new(), stop }
    }

    /// Sent as soon as there is room for it: at once, where there is.
    pub fn say(&mut self, message: ToCoordinator) {
        self.outbox.push_back(message);
        while let Ok(room) = self.link.to.try_reserve()
            && let Some(message) = self.outbox.pop_front()
        {
            room.send(message);
        }
    }

    /// Whether the end of that sum still waits to be sent.
    pub fn is_sending(&self, number: u64) -> bool {
        self.outbox.iter().any(|m| matches!(m, ToCoordinator::Sum { sum, .. } if *sum == number))
    }

    /// The last word of this side.
    pub fn leave(&mut self, reason: &str) {
        self.say(ToCoordinator::Leave { reason: reason.to_string() });
    }

    /// How long nothing may be heard.
    pub fn set_silence(&self, silence: Duration) {
        self.link.end.set_silence(silence);
    }

    /// The next message; its error is how the conversation ended. Nothing is lost where the future is dropped.
    pub async fn hear(&mut self) -> Result<ToWorker, Outcome> {
        loop {
            if self.stop.urgency() != Urgency::Run {
                return Err(Outcome::Left);
            }
            let WorkerLink { to, from, end, .. } = &mut self.link;
            tokio::select! {
                room = to.reserve(), if !self.outbox.is_empty() => match (room, self.outbox.pop_front()) {
                    (Ok(room), Some(message)) => room.send(message),
                    // The other direction may still hold last words, and its end tells why.
                    (Err(_), _) => self.outbox.clear(),
                    (Ok(_), None) => {}
                },
                heard = from.recv() => return match heard {
                    Some(ToWorker::Bye(bye)) => Err(ended(bye)),
                    Some(message) => Ok(message),
                    None => Err(lost(end)),
                },
                () = tokio::time::sleep(GLANCE) => {}
            }
        }
    }

    /// Does what takes long on a thread of its own, while the conversation may end. What is heard meanwhile was not
    /// asked for.
    pub async fn meanwhile<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Outcome> {
        let (send, mut done) = tokio::sync::oneshot::channel();
        let failed = |e: &dyn std::fmt::Display| Outcome::Failed { reason: format!("a thread: {e}") };
        let thread = std::thread::Builder::new().name("aside".into());
        thread.spawn(move || drop(send.send(work()))).map_err(|e| failed(&e))?;
        loop {
            tokio::select! {
                result = &mut done => return result.map_err(|e| failed(&e)),
                heard = self.hear() => drop(heard?),
            }
        }
    }

    /// Completes once this side was told to stop.
    pub async fn stopped(&self) {
        while self.stop.urgency() == Urgency::Run {
            tokio::time::sleep(GLANCE).await;
        }
    }

    /// Says everything that waits, and closes.
    pub async fn finish(mut self) {
        let said = async {
            while let Some(message) = self.outbox.pop_front() {
                if self.link.to.send(message).await.is_err() {
                    return;
                }
            }
            let end = self.link.end.clone();
            drop(self.link);
            end.ended().await;
        };
        let _ = tokio::time::timeout(LAST_WORDS, said).await;
    }
}

fn lost(end: &End) -> Outcome {
    Outcome::Lost { reason: end.reason().unwrap_or_else(|| "the coordinator is gone".into()) }
}

fn ended(bye: Bye) -> Outcome {
    match bye {
        Bye::Done => Outcome::Done,
        Bye::Later { reason } | Bye::Out { reason, again: true } => Outcome::Lost { reason: plain(&reason) },
        Bye::Halted { reason } => Outcome::Halted { reason: plain(&reason) },
        Bye::Refused { reason } => Outcome::Refused { reason: plain(&reason) },
        Bye::Out { reason, again: false } => Outcome::Out { reason: plain(&reason) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::link::pair;

    /// Hashing a large model takes longer than anybody waits for the end of a worker.
    #[test]
    fn long_work_does_not_delay_stopping() {
        let stop = Stop::new();
        let (link, _other) = pair(4);
        let mut wire = Wire::new(link, &stop);
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            assert_eq!(wire.meanwhile(|| 7).await, Ok(7));
            stop.ask(Urgency::Now);
            let work = move || {
                let _ = held.recv_timeout(Duration::from_secs(20));
            };
            assert_eq!(wire.meanwhile(work).await, Err(Outcome::Left));
        });
        drop(let_go);
    }
}
