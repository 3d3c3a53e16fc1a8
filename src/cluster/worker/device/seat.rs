//! The thread of a seat of a line: it holds a part of the model, and computes leases together with its neighbours. One
//! rule decides what it does next: a backward pass that is ready goes first, else a forward pass, if fewer than its
//! depth wait for their backward pass. The first seat decides the order of leases. The order changes no bit.

use super::{DeviceWorker, Failed, Report, bad_value, micros, say};
use crate::cluster::message::{LeaseId, Trouble, Work};
use crate::cluster::worker::blueprint::Portion;
use crate::cluster::worker::device_queue::{Act, Order, QueuedLease};
use crate::cluster::worker::inbox::{Back, Neighbours};
use crate::cluster::worker::parameters::Parameters;
use crate::cluster::worker::sum::Finished;
#[cfg(feature = "faults")]
use crate::model::stage::Fault;
use crate::model::stage::{LossSums, Model, Output, Session, Ticket, Traffic, Want};
use crate::model::wire::Wire;
use crate::numeric::fixed;
use crate::support::panics::caught;
use crate::train::sum::{Refused, Scalars, check};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A microbatch between its passes, or a text that grows.
pub(super) struct Open {
    pub job: QueuedLease,
    pub began: Instant,
    /// Time of its forward pass.
    pub forward: Duration,
    /// The tokens after a prompt.
    pub new: Vec<u32>,
    /// Passes of a text so far: one for the prompt, one for each token after it.
    pub passes: usize,
}

impl Open {
    /// A lease whose first pass began at this time.
    fn new(job: QueuedLease, began: Instant) -> Self {
        Open { job, began, forward: began.elapsed(), new: Vec::new(), passes: 0 }
    }
}

/// The device failed in this lease.
pub(super) struct Lost {
    job: Box<QueuedLease>,
    reason: String,
    /// Whether its memory was too small.
    memory: bool,
}

pub(super) fn lost(job: QueuedLease, reason: String) -> Lost {
    Lost { job: Box::new(job), reason, memory: false }
}

/// The values between two seats, the upper one of which begins with this layer.
fn after(layer: usize) -> String {
    format!("hidden states after layer {}", layer - 1)
}

/// The trouble with the first value that does not arrive as a finite one, under the name `what`.
fn not_finite(wire: Wire, values: &[f32], what: &dyn Fn() -> String) -> Option<Trouble> {
    let value = f64::from(wire.not_finite(values)?);
    Some(Trouble::Value { tensor: what(), value })
}

/// The leases of a seat in one conversation.
pub(super) struct Sitting {
    portion: Portion,
    pub neighbours: Neighbours,
    pub open: BTreeMap<LeaseId, Open>,
    /// The end of the last lease, from which the time of the next one counts if it was waiting.
    ended: Option<Instant>,
    traffic: Traffic,
}

impl Sitting {
    /// Whether a forward pass may begin: there is room, and no pass with other parameters is open.
    fn may_begin(&self, job: &QueuedLease) -> bool {
        let same = |parameters: &Arc<Parameters>| Arc::ptr_eq(parameters, &job.parameters);
        let alike = |open: &&Open| trains(&open.job) == trains(job);
        // The first seat limits the number of texts for all: a text that waits above would keep others from their end.
        let limited = trains(job) || is_prompt(job) && self.portion.layers.start == 0;
        let fits = !limited || self.open.values().filter(alike).count() < self.portion.depth;
        fits && self.open.values().next().is_none_or(|open| same(&open.job.parameters))
    }

    /// The output, unless the seat above would get values that are not finite.
    pub fn sound(&self, output: Output) -> Result<Output, Failed> {
        let bad = match &output {
            Output::Hidden(values) => not_finite(self.neighbours.wire, values, &|| {
                format!("the {}", after(self.portion.layers.end))
            }),
            _ => None,
        };
        bad.map_or(Ok(output), |trouble| Err(Failed::Value(trouble)))
    }

    /// Time that a lease took: since it began, or since the lease before it ended.
    fn micros(&mut self, began: Instant) -> u64 {
        let since = self.ended.map_or(began, |ended| ended.max(began));
        self.ended = Some(Instant::now());
        micros(since)
    }
}

pub(super) fn is_prompt(job: &QueuedLease) -> bool {
    matches!(job.lease.work, Work::Prompt { .. })
}

/// This seat has its part of a result that the last seat reports.
fn fine(job: &QueuedLease, began: Instant) -> Report {
    Report::Fine { lease: job.lease.lease, parameters: job.parameters.hash, micros: micros(began) }
}

/// Whether the lease has a backward pass.
fn trains(job: &QueuedLease) -> bool {
    match &job.lease.work {
        Work::Train(_) | Work::Verify(_) => true,
        Work::Recheck(batch) => batch.step != job.lease.after,
        Work::Eval(_) | Work::Predict(_) | Work::Prompt { .. } => false,
        // No seat computes an island.
        Work::Island(_) | Work::RecheckIsland(_) | Work::VerifyIsland(_) => false,
    }
}

fn forget(model: &mut Box<dyn Model>, lease: LeaseId) {
    model.forget(Ticket(lease));
    model.end(Session(lease));
}

impl DeviceWorker {
    /// Computes leases together with the neighbours until its queue is closed or no backend is left.
    pub fn sit(mut self, portion: Portion) {
        let (mut seen, queue) = (0, self.queue.clone());
        let order = if portion.layers.start == 0 { Order::OfLeases } else { Order::OfHiddenStates };
        let (neighbours, open, traffic) = (Neighbours::default(), BTreeMap::new(), Traffic::default());
        let mut sitting = Sitting { portion, neighbours, open, ended: None, traffic };
        loop {
            let act = queue.act(&mut seen, order, |job| sitting.may_begin(job));
            let end = match act {
                Act::End => {
                    queue.end("it was closed".into());
                    return;
                }
                Act::Reset(neighbours) => {
                    self.forget_all(&mut sitting);
                    sitting.neighbours = neighbours;
                    Ok(())
                }
                Act::Stray(lease) => {
                    sitting.neighbours.dropped(lease);
                    Ok(())
                }
                Act::Begin(job, hidden) => self.begin(&mut sitting, *job, hidden),
                Act::Continue(lease, hidden) => self.speak(&mut sitting, lease, Some(hidden)),
                Act::Back(lease, back) => self.back(&mut sitting, lease, back),
            };
            // The line falls; what is open is computed elsewhere.
            match end {
                Ok(()) => {}
                // The worker comes back for fewer layers.
                Err(Lost { job, reason, memory: true }) => {
                    self.forget_all(&mut sitting);
                    self.shared.too_large.store(true, Ordering::Release);
                    self.hand_back(&job, reason);
                    self.queue.finished();
                }
                Err(Lost { job, reason, .. }) => {
                    self.forget_all(&mut sitting);
                    if !self.fall_back(&job, reason) {
                        return;
                    }
                }
            }
        }
    }

    fn forget_all(&mut self, sitting: &mut Sitting) {
        let open = std::mem::take(&mut sitting.open);
        sitting.ended = None;
        if let Some(model) = &mut self.model {
            // A lost device may panic.
            let _ = caught(|| open.keys().for_each(|lease| forget(model, *lease)));
        }
    }

    /// Runs a forward pass; in the last seat both passes. The error is that of the device.
    fn begin(
        &mut self,
        sitting: &mut Sitting,
        job: QueuedLease,
        hidden: Option<Vec<f32>>,
    ) -> Result<(), Lost> {
        if !self.queue.is_known() {
            self.introduce(&job, "it fell back while the coordinator was away".into());
            return Ok(());
        }
        if is_prompt(&job) {
            let lease = job.lease.lease;
            sitting.open.insert(lease, Open::new(job, Instant::now()));
            return self.speak(sitting, lease, hidden);
        }
        if let Some(hidden) = hidden.as_ref().filter(|hidden| hidden.len() != self.due(&job)) {
            return self.misfit(&job, hidden.len());
        }
        let began = Instant::now();
        let (lease, trains) = (job.lease.lease, trains(&job));
        let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
        let output = caught(|| self.forward(&job, hidden.as_deref())).unwrap_or_else(internal);
        match output.and_then(|output| sitting.sound(output)) {
            Ok(Output::Hidden(values)) => {
                if trains {
                    sitting.open.insert(lease, Open::new(job, began));
                } else {
                    self.queue.finished_one(lease);
                    say(&job, fine(&job, began));
                }
                sitting.neighbours.up(lease, &values);
                Ok(())
            }
            Ok(Output::Loss(sums)) if trains => {
                sitting.open.insert(lease, Open::new(job, began));
                self.backward(sitting, lease, (None, sums))
            }
            Ok(Output::Loss(sums)) => {
                self.scored(sitting, &job, (sums, began));
                Ok(())
            }
            Ok(Output::Logits(_) | Output::Scores(_)) => {
                Err(lost(job, "a stage gave logits that nothing asks for".into()))
            }
            Err(failed) => self.failed(sitting, job, failed),
        }
    }

    /// Number of hidden states of a microbatch.
    fn due(&self, job: &QueuedLease) -> usize {
        job.lease.work.batch().map_or(0, |batch| batch.ids.len()) * self.shared.blueprint.config.hidden
    }

    /// A neighbour has sent another number of values than the microbatch has: the line falls, and the device stays.
    fn misfit(&self, job: &QueuedLease, got: usize) -> Result<(), Lost> {
        self.mislead(job, format!("its neighbour sent {got} values where {} are due", self.due(job)))
    }

    /// A neighbour breaks the protocol: the line falls, and the device stays.
    pub(super) fn mislead(&self, job: &QueuedLease, reason: String) -> Result<(), Lost> {
        self.hand_back(job, reason);
        self.queue.finished();
        Ok(())
    }

    fn forward(&mut self, job: &QueuedLease, hidden: Option<&[f32]>) -> Result<Output, Failed> {
        let Some(batch) = job.lease.work.batch() else {
            return Err(Failed::Device("the work of a seat is a microbatch or a prompt".into()));
        };
        self.take_parameters(&job.parameters)?;
        let trains = trains(job);
        if trains {
            self.shared.inject.before(batch.step).map_err(Failed::Device)?;
            #[cfg(feature = "faults")]
            if self.shared.inject.exhausts_memory(batch.step) {
                return Err(Fault::OutOfMemory { device: self.device().name, needed: 1 << 30 }.into());
            }
        }
        let want = match &job.lease.work {
            _ if trains => Want::Gradient(Ticket(job.lease.lease)),
            // A computation again finds a bad logit too, which a loss may hide.
            Work::Predict(_) | Work::Recheck(_) => Want::Predictions,
            _ => Want::Loss,
        };
        Ok(self.model()?.forward(batch, hidden, want)?)
    }

    /// Takes what the seat above has sent.
    fn back(&mut self, sitting: &mut Sitting, lease: LeaseId, back: Back) -> Result<(), Lost> {
        match back {
            Back::Gradient(values) => self.backward(sitting, lease, (Some(values), LossSums::default())),
            Back::Token(id) => self.token(sitting, lease, id),
            Back::Nothing => {
                if let Some(Open { job, began, .. }) = sitting.open.remove(&lease) {
                    self.forget(lease);
                    self.queue.finished_one(lease);
                    // The seat that has said this first reports why a microbatch ends without a result.
                    if is_prompt(&job) {
                        say(&job, fine(&job, began));
                    }
                }
                sitting.neighbours.dropped(lease);
                Ok(())
            }
        }
    }

    /// Runs a backward pass and reports this seat's part of the gradient.
    fn backward(
        &mut self,
        sitting: &mut Sitting,
        lease: LeaseId,
        (grad, loss): (Option<Vec<f32>>, LossSums),
    ) -> Result<(), Lost> {
        // A lease that is not open was given up with its conversation.
        let Some(Open { job, began, forward, .. }) = sitting.open.remove(&lease) else { return Ok(()) };
        let again = Instant::now();
        if let Some(grad) = grad.as_ref().filter(|grad| grad.len() != self.due(&job)) {
            self.forget(lease);
            return self.misfit(&job, grad.len());
        }
        let pad = sitting.portion.pad();
        let mut gradient = self.shared.buffers.take(pad + sitting.portion.values.len());
        gradient[..pad].fill(0.0);
        let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
        let computed = caught(|| {
            let stage = self.model()?;
            Ok(stage.backward(Ticket(lease), grad.as_deref(), &mut gradient[pad..])?)
        });
        let computed = computed.unwrap_or_else(internal);
        match computed {
            Ok(input) => {
                let below = || format!("the gradient of the {}", after(sitting.portion.layers.start));
                let bad =
                    input.as_ref().and_then(|values| not_finite(sitting.neighbours.wire, values, &below));
                match &bad {
                    Some(_) => sitting.neighbours.dropped(lease),
                    None => input.iter().for_each(|values| sitting.neighbours.down(lease, values)),
                }
                let report = match (self.report(sitting, &job, (loss, gradient), began), bad) {
                    (Report::Trained { finished, .. }, Some(trouble)) => {
                        self.shared.buffers.give_back(finished.gradient);
                        Report::Trouble { lease, trouble }
                    }
                    (Report::Fine { .. }, Some(trouble)) => Report::Trouble { lease, trouble },
                    (report, _) => report,
                };
                self.queue.finished_one(lease);
                if let Report::Trained { .. } = report {
                    let between = again.saturating_duration_since(began + forward);
                    let times = [forward, between, again.elapsed()];
                    let micros = times.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
                    say(&job, Report::Passes { lease, micros });
                }
                say(&job, report);
                Ok(())
            }
            Err(failed) => {
                self.shared.buffers.give_back(gradient);
                self.failed(sitting, job, failed)
            }
        }
    }

    /// The report on a computed part of a gradient, after its check.
    fn report(
        &mut self,
        sitting: &mut Sitting,
        job: &QueuedLease,
        (loss, mut gradient): (LossSums, Vec<f32>),
        began: Instant,
    ) -> Report {
        let (lease, parameters) = (job.lease.lease, job.parameters.hash);
        let (pad, cap) = (sitting.portion.pad(), fixed::cap(job.lease.of as usize));
        let rounds = self.rounding.as_ref().zip(job.lease.work.batch());
        let first = sitting.portion.values.start;
        rounds.iter().for_each(|(rounding, batch)| rounding.round(batch, first, &mut gradient[pad..]));
        self.shared.inject.after(job.lease.step(), &mut gradient[pad..], cap);
        // A throttled lease that is called back was computed nevertheless.
        let _ = self.throttle(sitting.ended.map_or(began, |ended| ended.max(began)));
        let traffic = self.model.as_ref().map_or(sitting.traffic, |model| model.traffic());
        let since = traffic.since(&std::mem::replace(&mut sitting.traffic, traffic));
        let micros = sitting.micros(began);
        match (check(&loss, &gradient, cap), &job.lease.work) {
            (Ok(scalars), Work::Train(_)) => {
                let memory =
                    self.model.as_mut().and_then(|model| model.in_use()).map_or(0, |seen| seen.bytes);
                let finished = Finished { gradient, scalars, traffic: since };
                Report::Trained { lease, finished, parameters, micros, memory }
            }
            (Ok(_), _) => {
                self.shared.buffers.give_back(gradient);
                Report::Fine { lease, parameters, micros }
            }
            (Err(mut bad), _) => {
                self.shared.buffers.give_back(gradient);
                bad.value.index = (bad.value.index + sitting.portion.values.start).saturating_sub(pad);
                Report::Trouble { lease, trouble: bad_value(&self.layout, &bad) }
            }
        }
    }

    /// The last seat has the loss of a microbatch without a backward pass.
    fn scored(&mut self, sitting: &mut Sitting, job: &QueuedLease, (sums, began): (LossSums, Instant)) {
        let _ = self.throttle(began);
        let (lease, parameters, micros) = (job.lease.lease, job.parameters.hash, sitting.micros(began));
        let report = match (Scalars::of(&sums), &job.lease.work) {
            (Err(value), _) => {
                Report::Trouble { lease, trouble: bad_value(&self.layout, &Refused { value, loss: true }) }
            }
            (Ok(_), Work::Eval(_) | Work::Predict(_)) => Report::Scored { lease, sums, parameters, micros },
            (Ok(_), _) => Report::Fine { lease, parameters, micros },
        };
        self.queue.finished_one(lease);
        say(job, report);
    }

    /// Frees what the model keeps for a lease. A lost card may panic.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        let _ = caught(|| self.model.iter_mut().for_each(|model| forget(model, lease)));
    }

    /// Ends a lease without a result: the seats below free what they keep for it. The error is that of the device.
    pub(super) fn failed(
        &mut self,
        sitting: &mut Sitting,
        job: QueuedLease,
        failed: Failed,
    ) -> Result<(), Lost> {
        let lease = job.lease.lease;
        let report = match failed {
            Failed::Device(reason) => return Err(lost(job, reason)),
            Failed::Memory(reason) => return Err(Lost { memory: true, ..lost(job, reason) }),
            Failed::Cancelled => Report::Stopped { lease, micros: 0 },
            Failed::Value(trouble @ (Trouble::Value { .. } | Trouble::Device { .. })) => {
                Report::Trouble { lease, trouble }
            }
        };
        self.forget(lease);
        sitting.neighbours.dropped(lease);
        self.queue.finished_one(lease);
        say(&job, report);
        Ok(())
    }
}
