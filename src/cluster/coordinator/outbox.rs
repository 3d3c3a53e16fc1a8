//! The queue of messages to one member. Senders never wait: messages are queued in order, and a member whose queue
//! grows too long is disconnected.

use super::super::link::End;
use super::super::message::{ToWorker, Work};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::mpsc::{self, Sender, UnboundedReceiver, UnboundedSender};

/// Messages that may queue, whatever their size.
const MESSAGES: u64 = 1 << 16;

/// The driver's end.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    to: UnboundedSender<ToWorker>,
    first: UnboundedSender<ToWorker>,
    waiting: Arc<Waiting>,
    end: End,
}

/// How a delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivered {
    /// The driver closed the outbox, and the link has every message.
    All,
    /// The link is closed.
    Cut,
}

/// The member task's end.
pub(super) struct Postman {
    from: UnboundedReceiver<ToWorker>,
    first: UnboundedReceiver<ToWorker>,
    waiting: Arc<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    bytes: AtomicU64,
    messages: AtomicU64,
    most: u64,
}

/// An outbox in which `most` bytes of bulk data may queue.
pub(super) fn outbox(most: u64, end: End) -> (Outbox, Postman) {
    let (to, from) = mpsc::unbounded_channel();
    let (say_first, first) = mpsc::unbounded_channel();
    let waiting = Arc::new(Waiting { bytes: AtomicU64::new(0), messages: AtomicU64::new(0), most });
    (Outbox { to, first: say_first, waiting: waiting.clone(), end }, Postman { from, first, waiting })
}

impl Outbox {
    /// Queues a message. A message that can no longer be sent is dropped. A farewell overtakes the messages before it.
    pub fn say(&self, message: ToWorker) {
        self.queue(message, &self.to);
    }

    /// Queues a message that overtakes the others.
    pub fn say_first(&self, message: ToWorker) {
        self.queue(message, &self.first);
    }

    fn queue(&self, message: ToWorker, to: &UnboundedSender<ToWorker>) {
        let bytes = self.waiting.bytes.fetch_add(size(&message), Ordering::Relaxed);
        let messages = self.waiting.messages.fetch_add(1, Ordering::Relaxed);
        if bytes > self.waiting.most || messages > MESSAGES {
            self.end.cut("it did not take what was sent to it");
        }
        if matches!(message, ToWorker::Bye(_)) {
            self.end.part();
        }
        // The receiver is dropped with the member, whose loss is reported separately.
        let _ = to.send(message);
    }
}

impl Postman {
    /// Passes messages to the link until the outbox is dropped or the link is closed.
    pub async fn deliver(self, to: &Sender<ToWorker>, first: &Sender<ToWorker>) -> Delivered {
        let waiting = &self.waiting;
        match tokio::try_join!(pass(self.from, to, waiting), pass(self.first, first, waiting)) {
            Ok(_) => Delivered::All,
            Err(Closed) => Delivered::Cut,
        }
    }
}

/// The link is closed.
struct Closed;

async fn pass(
    mut from: UnboundedReceiver<ToWorker>,
    to: &Sender<ToWorker>,
    waiting: &Waiting,
) -> Result<(), Closed> {
    while let Some(message) = from.recv().await {
        let size = size(&message);
        if to.send(message).await.is_err() {
            return Err(Closed);
        }
        waiting.bytes.fetch_sub(size, Ordering::Relaxed);
        waiting.messages.fetch_sub(1, Ordering::Relaxed);
    }
    Ok(())
}

fn size(message: &ToWorker) -> u64 {
    match message {
        ToWorker::ParametersPiece { bytes, .. }
        | ToWorker::Spread { packed: bytes, .. }
        | ToWorker::Piece { bytes, .. } => bytes.len() as u64,
        // All members share the values.
        ToWorker::ParametersChange { changed, .. } => changed.bytes().len() as u64,
        ToWorker::Lease(lease) => {
            let bytes = if matches!(lease.work, Work::Prompt { .. }) { 4 } else { 8 };
            bytes * lease.work.tokens()
        }
        _ => 0,
    }
}
