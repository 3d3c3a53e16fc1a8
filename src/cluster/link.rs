//! What both ends of a conversation hold: a pair of channels, and why it ended. Devices of the coordinator's own
//! process talk through [`pair`]; connections through [`over`], whose two tasks pump frames to messages and back.
//!
//! Liveness is the pumps' business alone: they ask and answer pings whatever the threads behind the channels are
//! busy with, and end the link when nothing at all was heard for too long. So whoever holds a link sees only
//! messages that mean something, and one way of its ending: `recv` gives None, [`End::reason`] says why.

pub mod codec;
mod framed;
mod pump;

pub use codec::{decode, encode};
pub use framed::connected;
pub use pump::{Liveness, ReadFrames, Spoken, WriteFrames, over};

use super::message::{ToCoordinator, ToWorker};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Messages that may wait in each direction of a link: pieces of 1 MiB at most, so 32 MiB.
pub const ROOM: usize = 32;

/// How long the end of a conversation is waited for.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// One end of a conversation. Dropping it lets what was said go out, then closes the connection.
#[derive(Debug)]
pub struct Link<Out, In> {
    /// What is said.
    pub to: mpsc::Sender<Out>,
    /// What is heard; None once the other side has gone and everything that it said was taken.
    pub from: mpsc::Receiver<In>,
    /// Why it ended, and how to end it.
    pub end: End,
    /// Within the process there is no pump to notice that this end is gone.
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

/// Shared by whoever may end a link and whoever wants to know.
#[derive(Debug, Clone)]
pub struct End {
    reason: Arc<watch::Sender<Option<String>>>,
    /// Milliseconds; 0: for ever.
    silence: Arc<AtomicU64>,
}

impl End {
    fn new(silence: Duration) -> Self {
        let end = End { reason: Arc::new(watch::Sender::new(None)), silence: Arc::default() };
        end.set_silence(silence);
        end
    }

    /// Why the link ended: the first reason given; None while it stands.
    pub fn reason(&self) -> Option<String> {
        self.reason.borrow().clone()
    }

    /// Ends it now, on both sides; what was not yet sent over a connection is dropped.
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

    /// How long nothing at all may be heard before the other side counts as gone; zero: for ever.
    pub fn set_silence(&self, silence: Duration) {
        let millis = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
        self.silence.store(millis, Ordering::Relaxed);
    }

    fn silence(&self) -> Option<Duration> {
        match self.silence.load(Ordering::Relaxed) {
            0 => None,
            millis => Some(Duration::from_millis(millis)),
        }
    }

    /// Completes once the link has ended: it was cut, or this side has dropped it, everything that it said is with
    /// the other side, and that has closed too.
    pub async fn ended(&self) {
        let mut watched = self.reason.subscribe();
        // The sender lives in `self`.
        let _ = watched.wait_for(Option::is_some).await;
    }
}

/// Both ends of a conversation within the process.
pub fn pair<A, B>(room: usize) -> (Link<A, B>, Link<B, A>) {
    let ((a_to, b_from), (b_to, a_from)) = (mpsc::channel(room), mpsc::channel(room));
    let end = End::new(Duration::ZERO);
    let closes = || Some(Closes(end.clone()));
    let a = Link { to: a_to, from: a_from, end: end.clone(), _closes: closes() };
    (a, Link { to: b_to, from: b_from, end: end.clone(), _closes: closes() })
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
