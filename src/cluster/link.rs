//! The two ends of a conversation: a pair of channels each, and why it ended. Devices of the coordinator's own
//! process use [`pair`]; connections use [`over`], whose two tasks convert frames to messages and back.
//!
//! The pump tasks handle liveness alone: they send and answer pings whatever the threads behind the channels do, and
//! end the link after too long a silence. The holder of a link sees only messages about work, and one form of its
//! end: `recv` gives `None`, and [`End::reason`] says why.

mod framed;
mod pump;

pub use super::codec::{decode, encode};
pub use framed::connected;
pub use pump::{Liveness, ReadFrames, Spoken, WriteFrames, over};

use super::message::{ToCoordinator, ToWorker};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Messages that may queue in each direction of a link: pieces of at most 1 MiB, so 32 MiB.
pub const ROOM: usize = 32;

/// Time limit for the last messages of a conversation whose other side is heard.
pub const FAREWELL: Duration = Duration::from_secs(30);
/// Time limit for the last messages of a connection that has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// One end of a conversation. When it is dropped, queued messages are still sent; then the connection closes.
#[derive(Debug)]
pub struct Link<Out, In> {
    /// Outgoing messages.
    pub to: mpsc::Sender<Out>,
    /// Outgoing messages that overtake those.
    pub first: mpsc::Sender<Out>,
    /// Incoming messages; `None` once the other side has closed and all of its messages were taken.
    pub from: mpsc::Receiver<In>,
    /// Why the link ended, and how to end it.
    pub end: End,
    /// Ends a link within the process, which has no pump to notice that this end is dropped.
    _closes: Option<Closes>,
}

/// Ends a link when it is dropped.
#[derive(Debug)]
struct Closes(End);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.cut("the other side closed the connection");
    }
}

/// A worker's end.
pub type WorkerLink = Link<ToCoordinator, ToWorker>;
/// A coordinator's end.
pub type MemberLink = Link<ToWorker, ToCoordinator>;

/// The state of a link's end, shared by all parts that may end it or wait for it.
#[derive(Debug, Clone)]
pub struct End {
    reason: Arc<watch::Sender<Option<String>>>,
    /// Milliseconds; 0: no limit.
    silence: Arc<AtomicU64>,
    /// Whether this side says farewell, so that nothing else matters.
    parting: Arc<AtomicBool>,
}

impl End {
    fn new(silence: Duration) -> Self {
        let end = End {
            reason: Arc::new(watch::Sender::new(None)),
            silence: Arc::default(),
            parting: Arc::default(),
        };
        end.set_silence(silence);
        end
    }

    /// Why the link ended: the first reason given. `None` while it is open.
    pub fn reason(&self) -> Option<String> {
        self.reason.borrow().clone()
    }

    /// Ends the link now, on both sides. Messages not yet sent over a connection are dropped.
    pub fn cut(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.reason.send_if_modified(|slot| {
            let first = slot.is_none();
            if first {
                *slot = Some(reason);
            }
            first
        });
    }

    /// Sets the time without any byte after which the other side counts as lost; zero: no limit.
    pub fn set_silence(&self, silence: Duration) {
        let millis = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
        self.silence.store(millis, Ordering::Relaxed);
    }

    /// This side has said farewell: messages that wait before it are dropped, and the other side must be heard twice as
    /// often. It sends beats four times as often as it must.
    pub fn part(&self) {
        if !self.parting.swap(true, Ordering::AcqRel) {
            self.set_silence(self.silence().unwrap_or_default() / 2);
        }
    }

    fn is_parting(&self) -> bool {
        self.parting.load(Ordering::Acquire)
    }

    fn silence(&self) -> Option<Duration> {
        match self.silence.load(Ordering::Relaxed) {
            0 => None,
            millis => Some(Duration::from_millis(millis)),
        }
    }

    /// Completes once the link has ended: it was cut, or this side has dropped it, the other side has received every
    /// message, and the other side has closed too.
    pub async fn ended(&self) {
        let mut watched = self.reason.subscribe();
        // The sender is part of `self`, so waiting cannot fail.
        let _ = watched.wait_for(Option::is_some).await;
    }
}

/// Both ends of a conversation within the process.
pub fn pair<A, B>(room: usize) -> (Link<A, B>, Link<B, A>) {
    let ((a_to, b_from), (b_to, a_from)) = (mpsc::channel(room), mpsc::channel(room));
    let end = End::new(Duration::ZERO);
    let closes = || Some(Closes(end.clone()));
    // Nothing waits here for bytes on their way.
    let a = Link { first: a_to.clone(), to: a_to, from: a_from, end: end.clone(), _closes: closes() };
    (a, Link { first: b_to.clone(), to: b_to, from: b_from, end: end.clone(), _closes: closes() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_reason_of_a_closed_link_is_kept() {
        let (a, b) = pair::<ToCoordinator, ToWorker>(4);
        a.end.cut("first");
        b.end.cut("second");
        assert_eq!(b.end.reason(), Some("first".into()));
    }
}
