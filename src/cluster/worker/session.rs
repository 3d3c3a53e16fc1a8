//! One conversation, from the first lease to its end: leases go to devices, their reports go to the coordinator, and
//! granted gradients go into the running sum. The session makes no decision of its own: all actions follow from
//! messages and reports.

mod relays;

use super::device::Report;
use super::device_queue::QueuedLease;
use super::devices::DeviceThreads;
use super::mesh::Mesh;
use super::outbox::Outbox;
use super::parameters::{Arriving, Parameters};
use super::peers::Attached;
use super::sum::{Finished, Form, Running};
use super::{Outcome, Sight};
use crate::cluster::inject::Inject;
use crate::cluster::message::{Hash, Lease, LeaseId, ToCoordinator, ToWorker, Trouble, Work};
use crate::train::event::Share;
use relays::Relays;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

/// Leases that may queue behind the running one: enough that a device never waits for a round trip.
const PREFETCH: u16 = 8;

/// Poll interval for a late device that does not report to this conversation.
const GLANCE: Duration = Duration::from_millis(50);

/// Time after which an unanswered announcement is repeated.
const AGAIN: Duration = Duration::from_secs(5);

/// How long a seat that has lost a neighbour waits for the coordinator's word: at the end of a run neighbours leave too.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// An announced microbatch that waits to be granted or denied.
struct Waiting {
    finished: Finished,
    step: u64,
    /// Hash of the parameters that it was computed with.
    parameters: Hash,
    announced: Instant,
    message: ToCoordinator,
}

/// The parts of the worker that a conversation uses.
#[derive(Clone, Copy)]
pub(super) struct Holding<'a> {
    pub threads: &'a DeviceThreads,
    pub inject: &'a Inject,
    /// Receives messages for the user, line by line.
    pub say: &'a dyn Fn(&str),
    /// Receives the work so far.
    pub see: &'a dyn Fn(Sight<'_>),
    pub share: &'a Cell<Share>,
}

/// How a worker is connected with others.
pub(super) enum Company {
    /// With the neighbours in its line.
    Line(Attached),
    /// With relays, once the coordinator asks for it; not in the coordinator's own process.
    Relays(Option<Mesh>),
}

pub(super) struct Session<'a, 'w> {
    outbox: &'a mut Outbox<'w>,
    threads: &'a DeviceThreads,
    inject: &'a Inject,
    say: &'a dyn Fn(&str),
    see: &'a dyn Fn(Sight<'_>),
    share: &'a Cell<Share>,
    /// Step and tokens of the microbatches that were leased, of steps that are not complete.
    leased: BTreeMap<LeaseId, (u64, u64)>,
    /// Number of values of the flat layout.
    len: usize,
    arriving: Arriving,
    /// The newest parameters, and before them those of earlier steps that delayed gradients are computed with.
    parameters: Vec<Arc<Parameters>>,
    waiting: BTreeMap<LeaseId, Waiting>,
    /// The sums of steps that are not complete.
    sums: Vec<Running>,
    /// Sums of earlier steps, whose memory is used again.
    spare: Vec<Running>,
    /// Number of the last sum.
    sent: u64,
    /// The step whose sum is sent once no announcement is unanswered, and the set of relays to which it goes.
    flush: Option<(u64, Option<u64>)>,
    /// Whether each device is up.
    up: Vec<bool>,
    /// For each device, the lease of an older step that it still computes. The device may hang in that lease, so it
    /// neither asks for nor takes a lease before that one is finished.
    late: Vec<Option<LeaseId>>,
    /// The neighbours of a seat of a line.
    line: Option<Attached>,
    /// When a neighbour was lost, and why.
    fallen: Option<(Instant, String)>,
    relays: Relays,
    reply: UnboundedSender<(u16, Report)>,
}

impl<'a, 'w> Session<'a, 'w> {
    /// Serves leases until the conversation ends, then removes them all from the devices.
    pub async fn hold(
        outbox: &'a mut Outbox<'w>,
        with: Holding<'a>,
        len: usize,
        company: Company,
    ) -> Outcome {
        let Holding { threads, inject, say, see, share } = with;
        let (line, mesh) = match company {
            Company::Line(line) => (Some(line), None),
            Company::Relays(mesh) => (None, mesh),
        };
        let (reply, reports) = mpsc::unbounded_channel();
        outbox.overtakes = threads.delay() > 0;
        let mut session = Session {
            outbox,
            threads,
            inject,
            say,
            see,
            share,
            leased: BTreeMap::new(),
            len,
            arriving: Arriving::default(),
            parameters: Vec::new(),
            waiting: BTreeMap::new(),
            sums: Vec::new(),
            spare: Vec::new(),
            sent: 0,
            flush: None,
            up: vec![true; threads.devices.len()],
            late: vec![None; threads.devices.len()],
            line,
            fallen: None,
            relays: Relays::new(mesh),
            reply,
        };
        let outcome = session.converse(reports).await;
        let held = threads.clear();
        if outcome == Outcome::Left {
            held.into_iter()
                .for_each(|lease| session.outbox.say(ToCoordinator::Stopped { lease, micros: 0 }));
        }
        for (_, waiting) in std::mem::take(&mut session.waiting) {
            threads.buffers.give_back(waiting.finished.gradient);
        }
        outcome
    }

    async fn converse(&mut self, mut reports: UnboundedReceiver<(u16, Report)>) -> Outcome {
        loop {
            let soon = self.fallen.is_some() || self.late.iter().any(Option::is_some);
            let pause = if soon { GLANCE } else { AGAIN };
            let went = tokio::select! {
                // Reports of a device are handled before the next message for it.
                biased;
                Some((device, report)) = reports.recv() => self.reported(device, report),
                heard = self.outbox.hear() => heard.and_then(|message| self.heard(message)),
                event = self.relays.event() => self.among_relays(event),
                reason = lost_neighbour(&mut self.line), if self.fallen.is_none() => {
                    self.fallen = Some((Instant::now(), reason));
                    Ok(())
                }
                () = tokio::time::sleep(pause) => Ok(()),
            };
            if let Err(outcome) = went {
                return outcome;
            }
            if let Some((_, reason)) = self.fallen.take_if(|(since, _)| since.elapsed() >= LAST_WORDS) {
                return Outcome::Lost { reason: format!("the line fell: {reason}") };
            }
            self.announce_again();
            self.ask_if_free();
        }
    }

    fn heard(&mut self, message: ToWorker) -> Result<(), Outcome> {
        let Some(message) = self.heard_of_relays(message)? else { return Ok(()) };
        match message {
            ToWorker::ParametersPiece { step, offset, bytes } => {
                self.arriving.piece(step, offset, &bytes, self.len).map_err(lost)?;
            }
            // In the coordinator's process.
            ToWorker::ParametersChange { step, offset, values, .. } if !values.is_empty() => {
                self.arriving.piece(step, offset, &values, self.len).map_err(lost)?;
            }
            ToWorker::ParametersChange { step, offset, len, changed, .. } => {
                let follows = |held: &&Parameters| held.step.checked_add(1) == Some(step);
                let before = self.parameters.last().map(|held| &**held).filter(follows);
                self.arriving.change(step, (offset, len), &changed, before).map_err(lost)?;
            }
            ToWorker::Lease(lease) => self.leased(*lease)?,
            ToWorker::Grant { lease } => {
                if let Some(Waiting { finished, step, parameters, .. }) = self.waiting.remove(&lease) {
                    let (busy, at) = (self.threads.busy(), self.sum_of(step, parameters));
                    let free = self.sums[at].add(lease, finished, busy);
                    self.free(free);
                    self.counts(lease);
                }
                self.flush_now();
            }
            ToWorker::Deliver { lease } => {
                if let Some(Waiting { finished, step, parameters, .. }) = self.waiting.remove(&lease) {
                    let at = self.sum_of(step, parameters);
                    let Session { sums, outbox, sent, .. } = self;
                    *sent += 1;
                    sums[at].single(*sent, (lease, &finished), &mut |message| outbox.say(message.clone()));
                    self.threads.buffers.give_back(finished.gradient);
                    self.counts(lease);
                }
                self.flush_now();
            }
            ToWorker::Deny { lease } => {
                self.forget(lease);
                self.flush_now();
            }
            ToWorker::Cancel { lease } => self.cancelled(lease),
            ToWorker::Flush { step, relays } => {
                self.flush = Some((step, relays));
                if self.line.is_none() && relays.is_none() {
                    self.send_again(step);
                }
                self.flush_now();
            }
            ToWorker::SumTaken { sum } => self.sums.iter_mut().for_each(|running| running.taken(sum)),
            // Late pieces of a file, and messages that the link or the code before takes.
            _ => {}
        }
        Ok(())
    }

    /// New parameters: everything of steps that are complete is dropped.
    fn begin(&mut self, mut parameters: Parameters, hash: Hash) -> Result<(), Outcome> {
        let step = parameters.step;
        if parameters.hash != hash {
            return Err(lost(format!("the parameters after step {step} did not arrive as they were sent")));
        }
        // The fault is named by the step that it affects, one after the steps of these parameters.
        if self.inject.damages_parameters(step + 1) {
            parameters.values.first_mut().into_iter().for_each(|value| *value += 1.0);
            parameters = Parameters::new(step, parameters.values);
        }
        let delay = self.threads.delay();
        // Without a delay that is everything.
        let last = if delay == 0 { u64::MAX } else { step };
        let complete = self.waiting.iter().filter(|(_, w)| w.step <= last).map(|(&lease, _)| lease);
        for lease in complete.collect::<Vec<_>>() {
            self.forget(lease);
        }
        while let Some(at) = self.sums.iter().position(|running| running.step() <= last) {
            let mut running = self.sums.swap_remove(at);
            let free = running.begin(0, [0; 32]);
            self.free(free);
            self.spare.push(running);
        }
        // Of the parameters of one step, those that come last count.
        self.parameters.retain(|held| held.step < step && held.step + delay >= step);
        self.parameters.push(Arc::new(parameters));
        self.flush.take_if(|(of, _)| *of <= last);
        self.leased.retain(|_, (of, _)| *of > last);
        self.shows(Share { step, ..self.share.get() });
        let up = self.up.iter().zip(&mut self.late).zip(0..).filter(|((up, _), _)| **up);
        for ((_, late), device) in up {
            let is_over = |lease: &LeaseId| {
                !self.leased.contains_key(lease) || self.threads.is_called_back(device, *lease)
            };
            *late = self.threads.running(device).filter(is_over);
            if late.is_none() {
                self.outbox.say(ask(self.threads, device));
            }
        }
        Ok(())
    }

    /// The index of the sum of a step, whose parameters have this hash.
    fn sum_of(&mut self, step: u64, parameters: Hash) -> usize {
        self.sums.iter().position(|running| running.step() == step).unwrap_or_else(|| {
            let form = if self.threads.rounds() { Form::Fixed } else { Form::Single };
            let mut running = self.spare.pop().unwrap_or_else(|| Running::new(form));
            running.begin(step, parameters);
            self.sums.push(running);
            self.sums.len() - 1
        })
    }

    /// A microbatch of this worker counts.
    fn counts(&mut self, lease: LeaseId) {
        let (share, tokens) = (self.share.get(), self.leased.remove(&lease).map_or(0, |(_, tokens)| tokens));
        let (microbatches, tokens) = (share.microbatches + 1, share.tokens + tokens);
        self.shows(Share { microbatches, tokens, ..share });
    }

    fn shows(&self, share: Share) {
        self.share.set(share);
        (self.see)(Sight::Share(share));
    }

    /// Sends `Ask` for devices that were late when the step began and are free now.
    fn ask_if_free(&mut self) {
        for (device, late) in (0..).zip(&mut self.late) {
            if late.is_some() && *late != self.threads.running(device) {
                *late = None;
                self.outbox.say(ask(self.threads, device));
            }
        }
    }

    fn leased(&mut self, lease: Lease) -> Result<(), Outcome> {
        self.threads.limits.check(&lease.work).map_err(|reason| Outcome::Refused { reason })?;
        let (number, device) = (lease.lease, lease.device);
        let held = self.parameters.iter().find(|p| p.step == lease.after);
        let Some(parameters) = held.cloned() else {
            self.threads.passes_over(device, number);
            self.outbox.say(ToCoordinator::Stopped { lease: number, micros: 0 });
            return Ok(());
        };
        if let Work::Train(_) | Work::Island(_) = &lease.work {
            self.leased.insert(number, (lease.step(), lease.work.tokens()));
        }
        let reply = self.reply.clone();
        let index = usize::from(device);
        let takes = self.up.get(index) == Some(&true) && self.late.get(index) == Some(&None);
        if !takes || !self.threads.put(device, QueuedLease { lease, parameters, reply }) {
            self.threads.passes_over(device, number);
            self.outbox.say(ToCoordinator::Stopped { lease: number, micros: 0 });
        }
        Ok(())
    }

    fn reported(&mut self, device: u16, report: Report) -> Result<(), Outcome> {
        let message = match report {
            Report::Trained { lease, finished, parameters, micros, memory } => {
                let message = ToCoordinator::Announce { lease, parameters, micros, memory };
                let announced = Instant::now();
                if let Some(&(step, _)) = self.leased.get(&lease) {
                    let waiting = Waiting { finished, step, parameters, announced, message: message.clone() };
                    self.waiting.insert(lease, waiting);
                } else {
                    self.threads.buffers.give_back(finished.gradient);
                }
                message
            }
            Report::Fine { lease, parameters, micros } => {
                ToCoordinator::Announce { lease, parameters, micros, memory: 0 }
            }
            Report::Verified { lease, digest, parameters, micros, memory } => {
                ToCoordinator::Verified { lease, digest, parameters, micros, memory }
            }
            Report::Scored { lease, sums, parameters, micros } => {
                ToCoordinator::Score { lease, sums, parameters, micros }
            }
            Report::Answered { lease, ids, parameters } => ToCoordinator::Answer { lease, ids, parameters },
            Report::Passes { lease, micros: [forward, between, backward] } => {
                ToCoordinator::Passes { lease, forward, between, backward }
            }
            Report::Stopped { lease, micros } => ToCoordinator::Stopped { lease, micros },
            Report::Trouble { lease, trouble } => {
                let name = self.name(device);
                match &trouble {
                    Trouble::Device { reason } => (self.say)(&format!("{name}: {reason}")),
                    Trouble::Value { tensor, value } => {
                        (self.say)(&format!("{name}: {tensor} became {value}"))
                    }
                }
                ToCoordinator::Fault { lease, fault: trouble }
            }
            Report::Fallback { now, reason } => {
                (self.say)(&format!("{} falls back to {}", now.name, now.class));
                self.settled(device);
                self.outbox.say(ToCoordinator::Fallback { device, now, reason });
                ask(self.threads, device)
            }
            Report::Down { reason } => return self.down(device, reason),
        };
        self.outbox.say(message);
        Ok(())
    }

    fn name(&self, device: u16) -> &str {
        self.threads.devices.get(usize::from(device)).map_or("a device", |d| d.name.as_str())
    }

    /// Marks a device as down; a worker without any device leaves.
    fn down(&mut self, device: u16, reason: String) -> Result<(), Outcome> {
        self.settled(device);
        if let Some(up) = self.up.get_mut(usize::from(device)) {
            *up = false;
        }
        match self.up.iter().any(|up| *up) {
            true => Ok(()),
            false => Err(Outcome::Failed { reason }),
        }
    }

    /// Clears the late lease of a device.
    fn settled(&mut self, device: u16) {
        self.late.get_mut(usize::from(device)).into_iter().for_each(|late| *late = None);
    }

    /// A running lease reports its own end, and an announced one is denied.
    fn cancelled(&mut self, lease: LeaseId) {
        if self.threads.take_away(lease) {
            self.outbox.say(ToCoordinator::Stopped { lease, micros: 0 });
        }
    }

    fn forget(&mut self, lease: LeaseId) {
        if let Some(Waiting { finished, .. }) = self.waiting.remove(&lease) {
            self.threads.buffers.give_back(finished.gradient);
        }
    }

    /// Sends the running sum if it was requested and no announcement of its step is unanswered.
    fn flush_now(&mut self) {
        let Some((step, relays)) = self.flush else { return };
        // In a line a request names everything that was granted before it, so that the sums of all seats hold the same.
        if self.line.is_none() && self.waiting.values().any(|w| w.step == step) {
            return;
        }
        // The request ends here even if the sum is empty: the coordinator asks again after later grants.
        self.flush = None;
        if let Some(set) = relays {
            return self.flush_to_relays(step, set);
        }
        let Session { sums, outbox, sent, .. } = self;
        let Some(running) = sums.iter_mut().find(|running| running.step() == step && !running.is_empty())
        else {
            return;
        };
        *sent += 1;
        let free = running.flush(*sent, None, &mut |message| outbox.say(message.clone()));
        self.free(free);
    }

    fn free(&self, gradients: Vec<Vec<f32>>) {
        gradients.into_iter().for_each(|gradient| self.threads.buffers.give_back(gradient));
    }

    /// Sends a sum again that was sent completely and is requested again.
    fn send_again(&mut self, step: u64) {
        let of_step = self.sums.iter().filter(|running| running.step() == step);
        for (sum, messages) in of_step.flat_map(Running::kept) {
            if !self.outbox.is_sending(sum) {
                messages.iter().for_each(|message| self.outbox.say(message.clone()));
            }
        }
    }

    fn announce_again(&mut self) {
        let due = self.waiting.values_mut().filter(|w| w.announced.elapsed() >= AGAIN);
        for waiting in due {
            waiting.announced = Instant::now();
            self.outbox.say(waiting.message.clone());
        }
    }
}

/// Why a neighbour in the line is lost, once one is. Cancel safe.
async fn lost_neighbour(line: &mut Option<Attached>) -> String {
    match line {
        Some(line) => line.lost().await,
        None => std::future::pending().await,
    }
}

/// Asks for leases for a device.
fn ask(threads: &DeviceThreads, device: u16) -> ToCoordinator {
    let together = threads.together(device);
    ToCoordinator::Ask { device, room: PREFETCH.max(together.saturating_mul(2)), together }
}

fn lost(reason: String) -> Outcome {
    Outcome::Lost { reason }
}
