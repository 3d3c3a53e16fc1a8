//! A worker's end of the link, for its own thread: outgoing messages queue in order and never block receiving, and every
//! wait also checks the stop flag.

use super::Outcome;
use crate::cluster::link::{End, WorkerLink};
use crate::cluster::message::{Bye, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::train::stop::{Stop, Urgency};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Longest delay until a raised stop flag is noticed.
const GLANCE: Duration = Duration::from_millis(50);

/// Time limit for sending the last messages.
const LAST_WORDS: Duration = Duration::from_secs(3);

pub(super) struct Outbox<'a> {
    link: WorkerLink,
    waiting: VecDeque<ToCoordinator>,
    /// Messages that overtake sums.
    small: VecDeque<ToCoordinator>,
    stop: &'a Stop,
    /// Whether all messages but the last one overtake sums on their way, in their own order: where devices compute the
    /// next step meanwhile.
    pub overtakes: bool,
    /// Bytes of the model's files that came over this link, plus those that a partial file already had. The count never
    /// decreases: a file that is fetched again is counted again.
    pub come: Arc<AtomicU64>,
}

impl<'a> Outbox<'a> {
    pub fn new(link: WorkerLink, stop: &'a Stop) -> Self {
        let (waiting, small) = (VecDeque::new(), VecDeque::new());
        Outbox { link, waiting, small, stop, overtakes: false, come: Arc::default() }
    }

    /// Queues a message and sends as much of the queue as the link has room for.
    pub fn say(&mut self, message: ToCoordinator) {
        let in_order = matches!(
            message,
            ToCoordinator::SumPiece { .. } | ToCoordinator::Sum { .. } | ToCoordinator::Leave { .. }
        );
        match self.overtakes && !in_order {
            true => self.small.push_back(message),
            false => self.waiting.push_back(message),
        }
        for (to, queue) in [(&self.link.first, &mut self.small), (&self.link.to, &mut self.waiting)] {
            while let Ok(room) = to.try_reserve()
                && let Some(message) = queue.pop_front()
            {
                room.send(message);
            }
        }
    }

    /// Whether the last message of this sum is still queued.
    pub fn is_sending(&self, number: u64) -> bool {
        let ends =
            |m: &ToCoordinator| matches!(m, ToCoordinator::Sum { sum, relays: None, .. } if *sum == number);
        self.waiting.iter().any(ends)
    }

    /// Drops what is queued for a set of relays that has ended.
    pub fn drop_for_relays(&mut self) {
        let is_for = |m: &ToCoordinator| {
            matches!(m, ToCoordinator::TotalPiece { .. } | ToCoordinator::Sum { relays: Some(_), .. })
        };
        self.waiting.retain(|message| !is_for(message));
    }

    /// Sends the last message of this side.
    pub fn leave(&mut self, reason: &str) {
        self.say(ToCoordinator::Leave { reason: reason.to_string() });
    }

    /// Sets the silence limit of the link.
    pub fn set_silence(&self, silence: Duration) {
        self.link.end.set_silence(silence);
    }

    /// The next message; the error is how the conversation ended. Cancel safe: dropping the future loses no message.
    pub async fn hear(&mut self) -> Result<ToWorker, Outcome> {
        loop {
            if self.stop.urgency() != Urgency::Run {
                return Err(Outcome::Left);
            }
            let WorkerLink { to, first, from, end, .. } = &mut self.link;
            tokio::select! {
                room = first.reserve(), if !self.small.is_empty() => match (room, self.small.pop_front()) {
                    (Ok(room), Some(message)) => room.send(message),
                    (Err(_), _) => self.small.clear(),
                    (Ok(_), None) => {}
                },
                room = to.reserve(), if !self.waiting.is_empty() => match (room, self.waiting.pop_front()) {
                    (Ok(room), Some(message)) => room.send(message),
                    // The other direction may still hold last messages, and its end gives the reason.
                    (Err(_), _) => self.waiting.clear(),
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

    /// Runs slow work on a separate thread while the conversation may end. Messages that arrive meanwhile are
    /// dropped: none was requested.
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

    /// Completes once this side is asked to stop.
    pub async fn stopped(&self) {
        while self.stop.urgency() == Urgency::Run {
            tokio::time::sleep(GLANCE).await;
        }
    }

    /// Sends all queued messages and closes.
    pub async fn finish(self) {
        let said = async {
            for (to, queue) in [(&self.link.first, self.small), (&self.link.to, self.waiting)] {
                for message in queue {
                    if to.send(message).await.is_err() {
                        return;
                    }
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
    use crate::cluster::message::Packed;

    /// Hashing a large model takes longer than a stopping worker may take.
    #[test]
    fn long_work_does_not_delay_stopping() {
        let stop = Stop::new();
        let (link, _other) = pair(4);
        let mut outbox = Outbox::new(link, &stop);
        let (let_go, held) = std::sync::mpsc::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            assert_eq!(outbox.meanwhile(|| 7).await, Ok(7));
            stop.ask(Urgency::Now);
            let work = move || {
                let _ = held.recv_timeout(Duration::from_secs(20));
            };
            assert_eq!(outbox.meanwhile(work).await, Err(Outcome::Left));
        });
        drop(let_go);
    }

    /// With a delay small messages overtake sums, and keep their own order; the last message overtakes nothing.
    #[test]
    fn small_messages_overtake_sums_only_with_a_delay() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for (overtakes, expected) in [(false, "01234abL"), (true, "01ab234L")] {
            let stop = Stop::new();
            // Two messages have room; the others wait.
            let (link, mut other) = pair(2);
            let mut outbox = Outbox::new(link, &stop);
            outbox.overtakes = overtakes;
            for offset in 0..5 {
                let packed = Packed::Fixed(Default::default());
                outbox.say(ToCoordinator::SumPiece { sum: 1, offset, len: 0, packed });
            }
            outbox.say(ToCoordinator::Stopped { lease: 7, micros: 0 });
            outbox.say(ToCoordinator::Ask { device: 0, room: 8, together: 1 });
            outbox.leave("done");
            let heard = async {
                let mut heard = String::new();
                while let Some(message) = other.from.recv().await {
                    heard.push(match message {
                        ToCoordinator::SumPiece { offset, .. } => char::from(b'0' + offset as u8),
                        ToCoordinator::Stopped { .. } => 'a',
                        ToCoordinator::Ask { .. } => 'b',
                        _ => 'L',
                    });
                }
                drop(other.end);
                heard
            };
            let heard = runtime.block_on(async { tokio::join!(outbox.finish(), heard).1 });
            assert_eq!(heard, expected);
        }
    }
}
