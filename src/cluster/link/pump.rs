//! The two tasks behind a connection: frames to messages, messages to frames, and liveness. They end together with
//! the first reason. Messages that were sent before a proper end are delivered before that end.

use super::super::codec::{Body, Bulky, decode, encode};
use super::{End, FAREWELL, LAST_WORDS, Link, ROOM};
use crate::cluster::message::{Packed, ToCoordinator, ToWorker};
use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// Messages of one direction, as far as the pumps need to know them.
pub trait Spoken: Serialize + DeserializeOwned + Bulky + Send + 'static {
    /// The messages of the other side.
    type Other: Spoken<Other = Self>;

    /// A message that this side sends at intervals to show that it is alive, whatever else is in transit.
    fn beat(number: u64) -> Self;

    /// Whether the message is about liveness only, and the answer of the other side.
    fn liveness(&self) -> Liveness<Self::Other>;

    /// Whether the sender ends the conversation with it.
    fn is_farewell(&self) -> bool;
}

/// The meaning of a message for a pump.
#[derive(Debug)]
pub enum Liveness<Answer> {
    /// A message for the holder of the link.
    NotAbout,
    /// A question that is answered at once.
    Asks(Answer),
    /// An answer: its arrival alone is its meaning.
    Answers,
}

impl Bulky for ToCoordinator {
    fn bulk(&self) -> Option<&Bytes> {
        match self {
            ToCoordinator::SumPiece { packed: Packed::Fixed(bytes) | Packed::Single(bytes), .. }
            | ToCoordinator::TotalPiece { packed: Packed::Fixed(bytes) | Packed::Single(bytes), .. } => {
                Some(bytes)
            }
            _ => None,
        }
    }
}

impl Bulky for ToWorker {
    fn bulk(&self) -> Option<&Bytes> {
        match self {
            ToWorker::Piece { bytes, .. }
            | ToWorker::ParametersPiece { bytes, .. }
            | ToWorker::Spread { packed: bytes, .. } => Some(bytes),
            ToWorker::ParametersChange { changed, .. } => Some(changed.bytes()),
            _ => None,
        }
    }
}

impl Spoken for ToCoordinator {
    type Other = ToWorker;

    // Sent without a ping too: on a slow connection a ping waits behind megabytes.
    fn beat(number: u64) -> Self {
        ToCoordinator::Pong { number }
    }

    fn liveness(&self) -> Liveness<ToWorker> {
        if matches!(self, ToCoordinator::Pong { .. }) { Liveness::Answers } else { Liveness::NotAbout }
    }

    fn is_farewell(&self) -> bool {
        matches!(self, ToCoordinator::Leave { .. })
    }
}

impl Spoken for ToWorker {
    type Other = ToCoordinator;

    fn beat(number: u64) -> Self {
        ToWorker::Ping { number }
    }

    fn liveness(&self) -> Liveness<ToCoordinator> {
        match *self {
            ToWorker::Ping { number } => Liveness::Asks(ToCoordinator::Pong { number }),
            _ => Liveness::NotAbout,
        }
    }

    fn is_farewell(&self) -> bool {
        matches!(self, ToWorker::Bye(_))
    }
}

/// The source of frames.
pub trait ReadFrames: Send + 'static {
    /// The next frame; `None` at the end of the connection. The error is one line.
    fn next(&mut self) -> impl Future<Output = Result<Option<Bytes>, String>> + Send;

    /// Counts received bytes, including those of an incomplete frame: on a slow connection one frame may take longer
    /// than the silence limit.
    fn heard(&self) -> Arc<AtomicU64> {
        Arc::default()
    }
}

/// The sink of frames.
pub trait WriteFrames: Send + 'static {
    /// Sends a complete frame.
    fn send(&mut self, frame: Body) -> impl Future<Output = Result<(), String>> + Send;

    /// Tells the peer that no more frames follow.
    fn finish(&mut self) -> impl Future<Output = ()> + Send;
}

/// A link over a connection; its pumps run on `runtime`. If `silence` is above zero, the other side must be heard
/// within that time, and this side sends a message four times as often.
pub fn over<Out, R, W>(
    runtime: &tokio::runtime::Handle,
    reader: R,
    writer: W,
    silence: Duration,
) -> Link<Out, Out::Other>
where
    Out: Spoken,
    R: ReadFrames,
    W: WriteFrames,
{
    let (to, outgoing) = mpsc::channel(ROOM);
    let (first, urgent) = mpsc::channel(ROOM);
    let (incoming, from) = mpsc::channel(ROOM);
    // Capacity 1: only the newest ping needs an answer.
    let (answers, answered) = mpsc::channel(1);
    let end = End::new(silence);
    runtime.spawn(read(reader, incoming, answers, end.clone()));
    runtime.spawn(write(writer, (outgoing, urgent), answered, end.clone()));
    Link { to, first, from, end, _closes: None }
}

/// Converts frames to messages until either side or silence ends the link.
async fn read<In: Spoken, R: ReadFrames>(
    mut reader: R,
    incoming: mpsc::Sender<In>,
    answers: mpsc::Sender<In::Other>,
    end: End,
) {
    let heard = reader.heard();
    loop {
        let frame = tokio::select! {
            frame = reader.next() => frame,
            // Only time without incoming bytes counts: a frame that waits for room was heard.
            () = silent(&end, &heard) => Err("nothing was heard for too long".into()),
            () = incoming.closed() => return drain(reader, (&heard, end)).await,
            () = end.ended() => return,
        };
        let message = match frame {
            Ok(Some(frame)) => decode::<In>(&frame),
            Ok(None) => Err("the other side closed the connection".into()),
            Err(reason) => Err(reason),
        };
        let message = match message {
            Ok(message) => message,
            Err(reason) => return end.cut(reason),
        };
        match message.liveness() {
            Liveness::Asks(answer) => drop(answers.try_send(answer)),
            Liveness::Answers => {}
            Liveness::NotAbout => {
                tokio::select! {
                    sent = incoming.send(message) => if sent.is_err() { return drain(reader, (&heard, end)).await },
                    () = end.ended() => return,
                }
            }
        }
    }
}

/// Reads and drops frames after this side stopped receiving, because the other side may not have read everything: a
/// connection that is closed with unread bytes is reset, and the last messages sent would be lost.
async fn drain<R: ReadFrames>(mut reader: R, (heard, end): (&AtomicU64, End)) {
    let rest = async { while let Ok(Some(_)) = reader.next().await {} };
    tokio::select! {
        () = rest => end.cut("both sides have closed"),
        () = silent(&end, heard) => end.cut("nothing was heard for too long"),
        () = end.ended() => {}
    }
}

/// Completes after the silence limit, which may change meanwhile. Any received byte restarts the time.
async fn silent(end: &End, heard: &AtomicU64) {
    let (mut began, mut before) = (tokio::time::Instant::now(), heard.load(Ordering::Relaxed));
    loop {
        let look = end.silence().map_or(Duration::from_secs(1), |s| s.min(Duration::from_secs(1)));
        tokio::time::sleep(look).await;
        let now = heard.load(Ordering::Relaxed);
        if now != before {
            (began, before) = (tokio::time::Instant::now(), now);
        }
        if end.silence().is_some_and(|s| began.elapsed() >= s) {
            return;
        }
    }
}

/// Converts messages to frames until there are no more.
async fn write<Out: Spoken, W: WriteFrames>(
    mut writer: W,
    (mut outgoing, mut urgent): (mpsc::Receiver<Out>, mpsc::Receiver<Out>),
    mut answers: mpsc::Receiver<Out>,
    end: End,
) {
    let (mut number, mut last) = (0, tokio::time::Instant::now());
    loop {
        // By the clock, not after a pause in sending: sent bytes prove nothing about the other side.
        let beat = async {
            match end.silence() {
                Some(s) => tokio::time::sleep_until(last + s / 4).await,
                None => std::future::pending().await,
            }
        };
        let message = tokio::select! {
            biased;
            () = end.ended() => return,
            Some(answer) = answers.recv() => answer,
            () = beat => {
                (number, last) = (number + 1, tokio::time::Instant::now());
                Out::beat(number)
            }
            Some(message) = urgent.recv() => match end.is_parting() {
                true => continue,
                false => message,
            },
            message = outgoing.recv() => match message {
                Some(message) if end.is_parting() && !message.is_farewell() => continue,
                Some(message) => message,
                None => break,
            },
        };
        let sent = match encode(&message) {
            Ok(frame) => tokio::select! {
                sent = writer.send(frame) => sent,
                () = end.ended() => return,
            },
            Err(reason) => Err(reason),
        };
        if let Err(reason) = sent {
            // The other side's last messages may still be in transit; the reader finds their end.
            tokio::time::sleep(LAST_WORDS).await;
            return end.cut(reason);
        }
    }
    // Everything is sent: the other side reads to the end and closes, after a farewell even if that takes long.
    let patience = if end.is_parting() { FAREWELL } else { LAST_WORDS };
    tokio::select! {
        () = async { writer.finish().await; tokio::time::sleep(patience).await } => {}
        () = end.ended() => {}
    }
    end.cut("this side has closed");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::link::{MemberLink, WorkerLink};
    use crate::cluster::message::Bye;
    use std::time::Instant;

    impl ReadFrames for mpsc::Receiver<Bytes> {
        async fn next(&mut self) -> Result<Option<Bytes>, String> {
            Ok(self.recv().await)
        }
    }

    impl WriteFrames for mpsc::Sender<Bytes> {
        async fn send(&mut self, frame: Body) -> Result<(), String> {
            mpsc::Sender::send(self, frame.whole()).await.map_err(|_| "gone".into())
        }

        async fn finish(&mut self) {}
    }

    type Raw = (mpsc::Sender<Bytes>, mpsc::Receiver<Bytes>);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    }

    /// A worker's link, and the raw frames of its other end.
    fn worker(runtime: &tokio::runtime::Runtime, silence: Duration) -> (WorkerLink, Raw) {
        let ((a, b), (c, d)) = (mpsc::channel(4), mpsc::channel(4));
        (over(runtime.handle(), b, c, silence), (a, d))
    }

    #[test]
    fn messages_arrive_in_order_and_queued_ones_are_sent() {
        let runtime = runtime();
        let ((a, b), (c, d)) = (mpsc::channel(4), mpsc::channel(4));
        let mut worker: WorkerLink = over(runtime.handle(), b, c, Duration::ZERO);
        let mut member: MemberLink = over(runtime.handle(), d, a, Duration::ZERO);
        for lease in 0..50 {
            worker.to.blocking_send(ToCoordinator::Stopped { lease, micros: lease * 3 }).unwrap();
            let heard = member.from.blocking_recv();
            assert_eq!(heard, Some(ToCoordinator::Stopped { lease, micros: lease * 3 }));
            member.to.blocking_send(ToWorker::Grant { lease }).unwrap();
        }
        for lease in 0..20 {
            assert_eq!(worker.from.blocking_recv(), Some(ToWorker::Grant { lease }));
        }
        worker.to.blocking_send(ToCoordinator::Leave { reason: "done".into() }).unwrap();
        drop(worker);
        assert_eq!(member.from.blocking_recv(), Some(ToCoordinator::Leave { reason: "done".into() }));
        assert_eq!(member.from.blocking_recv(), None);
        assert!(member.end.reason().unwrap().contains("closed"));
    }

    /// Fills the queue of a member's link.
    fn full(member: MemberLink) -> MemberLink {
        for step in 0..ROOM as u64 {
            member.to.blocking_send(ToWorker::Flush { step, relays: None }).unwrap();
        }
        member
    }

    #[test]
    fn a_farewell_overtakes_what_waits() {
        let runtime = runtime();
        let ((_to, from), (out, mut said)) = (mpsc::channel(4), mpsc::channel::<Bytes>(1));
        let member = full(over(runtime.handle(), from, out, Duration::ZERO));
        member.end.part();
        member.to.blocking_send(ToWorker::Bye(Bye::Done)).unwrap();
        let mut heard = Vec::new();
        while heard.last() != Some(&ToWorker::Bye(Bye::Done)) {
            heard.push(decode(&said.blocking_recv().unwrap()).unwrap());
        }
        // One was sent, and the next one was on its way.
        assert!(heard.len() <= 4, "{heard:?}");
    }

    #[test]
    fn urgent_messages_overtake_what_waits() {
        let runtime = runtime();
        let ((_to, from), (out, mut said)) = (mpsc::channel(4), mpsc::channel::<Bytes>(1));
        let member = full(over(runtime.handle(), from, out, Duration::ZERO));
        let urgent: Vec<ToWorker> = (0..3).map(|lease| ToWorker::Grant { lease }).collect();
        urgent.iter().for_each(|message| member.first.blocking_send(message.clone()).unwrap());
        let heard: Vec<ToWorker> =
            (0..ROOM + 3).map(|_| decode(&said.blocking_recv().unwrap()).unwrap()).collect();
        // One was sent, and the next one or two were on their way.
        let at = heard.iter().position(|message| *message == urgent[0]).unwrap();
        assert!(at <= 3 && heard[at..at + 3] == urgent, "{heard:?}");
        let others = heard.into_iter().filter(|message| !urgent.contains(message));
        assert!(
            others.eq((0..ROOM as u64).map(|step| ToWorker::Flush { step, relays: None })),
            "the others keep their order"
        );
    }

    #[test]
    fn ping_is_answered_while_messages_are_unread() {
        let runtime = runtime();
        let (_worker, (to, mut from)) = worker(&runtime, Duration::ZERO);
        to.blocking_send(encode(&ToWorker::Flush { step: 1, relays: None }).unwrap().whole()).unwrap();
        to.blocking_send(encode(&ToWorker::Ping { number: 7 }).unwrap().whole()).unwrap();
        let heard: ToCoordinator = decode(&from.blocking_recv().unwrap()).unwrap();
        assert_eq!(heard, ToCoordinator::Pong { number: 7 });
    }

    #[test]
    fn silence_ends_a_link_and_pings_keep_it_open() {
        let runtime = runtime();
        let began = Instant::now();
        let (mut alone, _frames) = worker(&runtime, Duration::from_millis(80));
        assert_eq!(alone.from.blocking_recv(), None);
        assert!(alone.end.reason().unwrap().contains("nothing was heard"));
        assert!(began.elapsed() >= Duration::from_millis(80));

        let ((a, b), (c, d)) = (mpsc::channel(4), mpsc::channel(4));
        let worker: WorkerLink = over(runtime.handle(), b, c, Duration::from_secs(2));
        let member: MemberLink = over(runtime.handle(), d, a, Duration::from_secs(2));
        std::thread::sleep(Duration::from_secs(5));
        assert_eq!((worker.end.reason(), member.end.reason()), (None, None));
    }

    /// A reader whose single frame receives one byte every 100 ms.
    struct Slow(mpsc::Receiver<Bytes>, Arc<AtomicU64>);

    impl ReadFrames for Slow {
        async fn next(&mut self) -> Result<Option<Bytes>, String> {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                self.1.fetch_add(1, Ordering::Relaxed);
            }
            Ok(self.0.recv().await)
        }

        fn heard(&self) -> Arc<AtomicU64> {
            self.1.clone()
        }
    }

    #[test]
    fn frame_may_take_longer_than_the_silence_limit() {
        let runtime = runtime();
        let ((to, incoming), (out, mut said)) = (mpsc::channel(4), mpsc::channel::<Bytes>(4));
        to.blocking_send(encode(&ToWorker::Flush { step: 1, relays: None }).unwrap().whole()).unwrap();
        let slow = Slow(incoming, Arc::default());
        let mut worker: WorkerLink = over(runtime.handle(), slow, out, Duration::from_secs(1));
        assert_eq!(
            worker.from.blocking_recv(),
            Some(ToWorker::Flush { step: 1, relays: None }),
            "{:?}",
            worker.end
        );
        // No complete message came that it could have answered.
        let beat: ToCoordinator = decode(&said.blocking_recv().unwrap()).unwrap();
        assert_eq!(beat, ToCoordinator::Pong { number: 1 });
    }

    #[test]
    fn invalid_message_ends_the_link() {
        let long =
            [encode(&ToWorker::Flush { step: 1, relays: None }).unwrap().whole().to_vec(), vec![0]].concat();
        for frame in [vec![0xff; 9], long, Vec::new()] {
            let runtime = runtime();
            let (mut worker, (to, _from)) = worker(&runtime, Duration::ZERO);
            to.blocking_send(frame.into()).unwrap();
            assert_eq!(worker.from.blocking_recv(), None);
            assert!(worker.end.reason().unwrap().contains("no message"));
        }
    }
}
