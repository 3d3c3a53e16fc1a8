//! A device's thread: it computes one lease after the other. A device error ends the backend, not the worker: the
//! lease is handed back, and the next backend of the chain takes over. A value that exact sums cannot hold is no
//! device error: it is reported with its tensor, and the device does not fall back.

mod chain;
mod seat;
mod speak;
mod together;
use super::blueprint::{Blueprint, Candidate};
use super::device_queue::{DeviceQueue, QueuedLease};
use super::parameters::Parameters;
use super::selftest::Reference;
use super::sum::Finished;
use crate::cluster::digest;
use crate::cluster::inject::Inject;
use crate::cluster::message::{Device, Hash, Lease, LeaseId, Trouble, Work};
use crate::model::generate::generate;
use crate::model::layout::Layout;
use crate::model::stage::{Fault, LossSums, Microbatch, Model, Want};
use crate::numeric::fixed;
use crate::support::panics::caught;
use crate::train::Rounding;
use crate::train::island::{self, Island};
use crate::train::sum::{Refused, Scalars, check, check_values};
use crate::train::trial::{Passed, Trials, at_rest, trials};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after which no further trial starts: the coordinator waits for the slowest device.
const TRIALS: Duration = Duration::from_millis(300);
/// Stands for the name of a tensor where a result of an island is bad.
const THE_ISLAND: &str = "the result of an island";
/// Interval at which a throttled device checks its cancel flag.
const NAP: Duration = Duration::from_millis(10);

/// A device's report on a lease or on itself.
#[derive(Debug)]
pub(super) enum Report {
    /// A training microbatch is computed and checked, and waits to be granted.
    Trained {
        lease: LeaseId,
        finished: Finished,
        parameters: Hash,
        micros: u64,
        memory: u64,
    },
    /// A microbatch of another worker was computed again.
    Verified {
        lease: LeaseId,
        digest: Hash,
        parameters: Hash,
        micros: u64,
        memory: u64,
    },
    /// A microbatch was computed again and has no bad value on this device.
    Fine {
        lease: LeaseId,
        parameters: Hash,
        micros: u64,
    },
    Scored {
        lease: LeaseId,
        sums: LossSums,
        parameters: Hash,
        micros: u64,
    },
    Answered {
        lease: LeaseId,
        ids: Vec<u32>,
        parameters: Hash,
    },
    Stopped {
        lease: LeaseId,
        micros: u64,
    },
    /// When a seat of a line computed a training microbatch, in microseconds: forward, between, backward.
    Passes {
        lease: LeaseId,
        micros: [u64; 3],
    },
    Trouble {
        lease: LeaseId,
        trouble: Trouble,
    },
    /// The device continues on another backend.
    Fallback {
        now: Device,
        reason: String,
    },
    /// The device has no backend left.
    Down {
        reason: String,
    },
}

/// Why a lease has no result.
enum Failed {
    Cancelled,
    Value(Trouble),
    Device(String),
    /// The device's memory is too small.
    Memory(String),
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Cancelled => Failed::Cancelled,
            Fault::NonFinite { what, value, .. } => {
                Failed::Value(Trouble::Value { tensor: what, value: value.parse().unwrap_or(f64::NAN) })
            }
            Fault::OutOfMemory { .. } => Failed::Memory(fault.to_string()),
            fault => Failed::Device(fault.to_string()),
        }
    }
}

/// Free gradient buffers.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers(Arc<Mutex<Vec<Vec<f32>>>>);

impl Buffers {
    fn take(&self, len: usize) -> Vec<f32> {
        let mut buffer = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        buffer.resize(len, 0.0);
        buffer
    }

    pub fn give_back(&self, buffer: Vec<f32>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

/// Data that all devices of a process share.
#[derive(Clone)]
pub(super) struct Shared {
    pub blueprint: Arc<Blueprint>,
    pub reference: Arc<Reference>,
    pub inject: Inject,
    pub buffers: Buffers,
    /// Whether a seat of a line ran out of memory: its layers are too many for its device.
    pub too_large: Arc<AtomicBool>,
}

pub(super) struct DeviceWorker {
    candidate: Candidate,
    /// Index of its backend in the chain.
    at: usize,
    model: Option<Box<dyn Model>>,
    layout: Layout,
    holds: Option<Arc<Parameters>>,
    queue: Arc<DeviceQueue>,
    shared: Shared,
    /// Leases that are computed alone from now on, because one of several has a bad value.
    alone: usize,
    rounding: Option<Rounding>,
}

impl DeviceWorker {
    /// Opens the first backend of the chain that can be opened and passes the self-test. The lines name the backends
    /// that failed before it, with their errors; the error is the last of them.
    pub fn open(
        candidate: Candidate,
        queue: Arc<DeviceQueue>,
        shared: Shared,
    ) -> Result<(Self, Vec<String>), String> {
        let (layout, shape) = (shared.blueprint.layout(), &shared.blueprint.shape);
        let rounding = Rounding::new(shape.sum_bits, shape.lora.seed, &layout);
        let (at, model, holds, alone) = (0, None, None, 0);
        let mut worker = DeviceWorker { candidate, at, model, layout, holds, queue, shared, alone, rounding };
        let lines = worker.next_backend(0)?;
        Ok((worker, lines))
    }

    /// The current device.
    pub fn device(&self) -> Device {
        let class = self.model.as_ref().map_or_else(String::new, |m| m.class());
        Device { name: self.candidate.name.clone(), class }
    }

    /// Computes leases until its queue is closed or no backend is left.
    pub fn work(mut self) {
        if let Some(portion) = self.shared.blueprint.shape.portion.clone() {
            return self.sit(portion);
        }
        while let Some(job) = self.queue.next() {
            if !self.queue.is_known() {
                self.introduce(&job, "it fell back while the coordinator was away".into());
                continue;
            }
            if self.computes_several(&job) {
                if !self.compute_several(job) {
                    return;
                }
                continue;
            }
            let began = Instant::now();
            let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
            let outcome = caught(|| self.compute(&job, began)).unwrap_or_else(internal);
            let lease = job.lease.lease;
            let report = match outcome {
                Ok(report) => report,
                Err(Failed::Cancelled) => Report::Stopped { lease, micros: micros(began) },
                Err(Failed::Value(trouble)) => Report::Trouble { lease, trouble },
                Err(Failed::Device(reason) | Failed::Memory(reason)) => {
                    if !self.fall_back(&job, reason) {
                        return;
                    }
                    continue;
                }
            };
            self.queue.finished();
            say(&job, report);
        }
        self.queue.end("it was closed".into());
    }

    /// Hands back the lease and all queued behind it: they were given to the previous device.
    fn hand_back(&self, job: &QueuedLease, reason: String) {
        say(job, Report::Trouble { lease: job.lease.lease, trouble: Trouble::Device { reason } });
        for left in self.queue.empty() {
            say(&left, Report::Stopped { lease: left.lease.lease, micros: 0 });
        }
    }

    /// Reports the current device to a conversation that started while the device changed.
    fn introduce(&self, job: &QueuedLease, reason: String) {
        self.hand_back(job, reason.clone());
        self.queue.finished();
        if say(job, Report::Fallback { now: self.device(), reason }) {
            self.queue.announced();
        }
    }

    /// Hands back the lease and all queued behind it at once, because opening another backend may take a while.
    /// Returns false if none is left.
    fn fall_back(&mut self, job: &QueuedLease, reason: String) -> bool {
        self.hand_back(job, reason.clone());
        let reason = match self.next_backend(self.at + 1) {
            Ok(_) => {
                self.queue.stands(self.device());
                self.queue.finished();
                // If this conversation has ended, the next one gets the report, with its first lease at the latest.
                if say(job, Report::Fallback { now: self.device(), reason }) {
                    self.queue.announced();
                }
                return true;
            }
            Err(last) if self.candidate.chain.len() > self.at + 1 => format!("{reason}; {last}"),
            Err(_) => reason,
        };
        for left in self.queue.end(reason.clone()) {
            say(&left, Report::Stopped { lease: left.lease.lease, micros: 0 });
        }
        say(job, Report::Down { reason });
        false
    }

    fn compute(&mut self, job: &QueuedLease, began: Instant) -> Result<Report, Failed> {
        let Lease { lease, after, ref work, .. } = job.lease;
        let parameters = job.parameters.hash;
        // An island sets the parameters of each of its steps.
        if work.island().is_none() {
            self.take_parameters(&job.parameters)?;
        }
        match work {
            Work::Train(_) | Work::Island(_) => {
                let (finished, micros) = (self.trained(job, began)?, micros(began));
                let memory = self.model()?.in_use().map_or(0, |seen| seen.bytes);
                Ok(Report::Trained { lease, finished, parameters, micros, memory })
            }
            Work::Verify(_) | Work::VerifyIsland(_) => {
                let (finished, micros) = (self.trained(job, began)?, micros(began));
                let digest = digest::of_gradient(&finished.gradient, &finished.scalars);
                self.shared.buffers.give_back(finished.gradient);
                let memory = self.model()?.in_use().map_or(0, |seen| seen.bytes);
                Ok(Report::Verified { lease, digest, parameters, micros, memory })
            }
            // A microbatch whose step equals that of the parameters belongs to an evaluation.
            Work::Recheck(batch) if batch.step == after => {
                // Finds a bad logit too, which a loss may hide.
                self.losses(batch, Want::Predictions)?;
                Ok(Report::Fine { lease, parameters, micros: micros(began) })
            }
            Work::Recheck(_) | Work::RecheckIsland(_) => {
                let finished = self.trained(job, began)?;
                self.shared.buffers.give_back(finished.gradient);
                Ok(Report::Fine { lease, parameters, micros: micros(began) })
            }
            Work::Eval(batch) | Work::Predict(batch) => {
                let predicts = matches!(work, Work::Predict(_));
                let sums = self.losses(batch, if predicts { Want::Predictions } else { Want::Loss })?;
                self.throttle(began)?;
                Ok(Report::Scored { lease, sums, parameters, micros: micros(began) })
            }
            Work::Prompt { ids, sampling } => {
                let flag = self.queue.flag();
                let go_on = &mut |_| flag.check().is_ok();
                let ids = generate(&mut **self.model()?, ids, sampling, go_on)?;
                flag.check()?;
                self.throttle(began)?;
                Ok(Report::Answered { lease, ids, parameters })
            }
        }
    }

    fn model(&mut self) -> Result<&mut Box<dyn Model>, Failed> {
        self.model.as_mut().ok_or_else(|| Failed::Device("no backend is left".into()))
    }

    fn take_parameters(&mut self, parameters: &Arc<Parameters>) -> Result<(), Failed> {
        if self.holds.as_ref().is_some_and(|held| Arc::ptr_eq(held, parameters)) {
            return Ok(());
        }
        // Moments follow the parameters where islands are computed; a seat of a line has fewer values than the layout.
        let own = self.layout.len().min(parameters.values.len());
        self.model()?.set_parameters(&parameters.values[..own])?;
        self.holds = Some(parameters.clone());
        Ok(())
    }

    /// The result of a lease for training, which may enter a sum.
    fn trained(&mut self, job: &QueuedLease, began: Instant) -> Result<Finished, Failed> {
        match (job.lease.work.island(), job.lease.work.batch()) {
            (Some(island), _) => self.island(island, job, began),
            (None, Some(batch)) => self.gradient(batch, job.lease.of, began),
            (None, None) => Err(Failed::Device("a prompt has no gradient".into())),
        }
    }

    /// Computes one microbatch and checks it: the result may enter a sum.
    fn gradient(&mut self, batch: &Microbatch, of: u32, began: Instant) -> Result<Finished, Failed> {
        let inject = self.shared.inject.clone();
        #[cfg(feature = "faults")]
        if inject.loses_device(batch.step) {
            self.candidate.chain[self.at].lose();
        }
        inject.before(batch.step).map_err(Failed::Device)?;
        // Resets the peak: earlier memory use is not part of this microbatch.
        self.model()?.in_use();
        let mut gradient = self.shared.buffers.take(self.layout.len());
        let (cap, before) = (fixed::cap(of as usize), self.model()?.traffic());
        let computed = self.model()?.gradient(batch, &mut gradient);
        let traffic = self.model()?.traffic().since(&before);
        // Without a result this rounds what is dropped.
        self.rounding.iter().for_each(|rounding| rounding.round(batch, 0, &mut gradient));
        inject.after(batch.step, &mut gradient, cap);
        let computed = computed
            .map_err(Failed::from)
            .and_then(|sums| check(&sums, &gradient, cap).map_err(|bad| self.bad_value(&bad)));
        match computed.and_then(|scalars| self.throttle(began).map(|()| scalars)) {
            Ok(scalars) => Ok(Finished { gradient, scalars, traffic }),
            Err(failed) => {
                self.shared.buffers.give_back(gradient);
                Err(failed)
            }
        }
    }

    /// Takes the steps of an island from the lease's parameters; the result may enter a sum.
    fn island(&mut self, island: &Island, job: &QueuedLease, began: Instant) -> Result<Finished, Failed> {
        let (inject, cap) = (self.shared.inject.clone(), fixed::cap(job.lease.of as usize));
        // The faults of tests are of the island's first step.
        let step = job.lease.after + 1;
        inject.before(step).map_err(Failed::Device)?;
        // The model is left with other parameters.
        self.holds = None;
        self.model()?.in_use();
        let start = &job.parameters.values;
        if start.len() != island::VECTORS * self.layout.len() {
            return Err(Failed::Device("the moments for an island did not come".into()));
        }
        let mut vectors = self.shared.buffers.take(start.len());
        vectors.copy_from_slice(start);
        let (flag, before) = (self.queue.flag(), self.model()?.traffic());
        let go_on = move || flag.check().is_ok();
        let computed = island.compute(&mut **self.model()?, &mut vectors, (cap, &go_on));
        let traffic = self.model()?.traffic().since(&before);
        inject.after(step, &mut vectors, cap);
        let computed = match computed {
            Ok(scalars) => match check_values(&vectors, cap) {
                Ok(()) => self.throttle(began).map(|()| scalars),
                Err(bad) => {
                    Err(Failed::Value(Trouble::Value { tensor: THE_ISLAND.into(), value: bad.value }))
                }
            },
            Err(island::Failed::Fault(fault)) => Err(fault.into()),
            Err(island::Failed::Value { what, value }) => {
                Err(Failed::Value(Trouble::Value { tensor: what, value }))
            }
        };
        match computed {
            Ok(scalars) => Ok(Finished { gradient: vectors, scalars, traffic }),
            Err(failed) => {
                self.shared.buffers.give_back(vectors);
                Err(failed)
            }
        }
    }

    fn losses(&mut self, batch: &Microbatch, want: Want) -> Result<LossSums, Failed> {
        let sums = self.model()?.forward(batch, None, want)?.loss()?;
        match Scalars::of(&sums) {
            Ok(_) => Ok(sums),
            Err(value) => Err(self.bad_value(&Refused { value, loss: true })),
        }
    }

    fn bad_value(&self, bad: &Refused) -> Failed {
        Failed::Value(bad_value(&self.layout, bad))
    }

    /// Measures trial microbatches of a few sizes, the small ones first.
    pub fn measure(&mut self) -> Trials {
        // A seat of a line has no time of its own.
        if self.shared.blueprint.shape.portion.is_some() {
            return Trials::default();
        }
        let trials = trials(&self.shared.blueprint.config, self.shared.blueprint.shape.tokens);
        let mut gradient = self.shared.buffers.take(self.layout.len());
        gradient.fill(0.0);
        let mut taken = Trials::default();
        let rest = self.model.as_mut().and_then(|model| at_rest(&mut **model));
        rest.into_iter().for_each(|seen| taken.memory.rest(seen));
        // A line is fast only with several microbatches in work.
        let copies = self.model.as_ref().map_or(1, |model| model.together());
        // The adapter keeps its initial values: time does not depend on them. An error occurs again in the first lease.
        let _ = taken.run(&trials, (TRIALS, copies), &mut |batch| -> Result<_, Failed> {
            let began = Instant::now();
            match copies {
                1 => drop(self.model()?.gradient(batch, &mut gradient)?),
                _ => {
                    let mut all = std::iter::repeat_n(batch, copies).cloned();
                    self.model()?.gradients(&mut || all.next(), &mut |_, _, _| ())?;
                }
            }
            self.throttle(began)?;
            Ok(Some(Passed(self.model()?.in_use())))
        });
        self.shared.buffers.give_back(gradient);
        taken
    }

    /// Multiplies the compute time by the injected factor, if there is one.
    fn throttle(&self, began: Instant) -> Result<(), Failed> {
        throttle(&self.shared.inject, &self.queue, began)
    }
}

fn throttle(inject: &Inject, queue: &DeviceQueue, began: Instant) -> Result<(), Failed> {
    let Some(factor) = inject.slow() else { return Ok(()) };
    let until = began + began.elapsed().mul_f64(factor);
    while Instant::now() < until {
        queue.flag().check()?;
        std::thread::sleep(NAP.min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}

fn bad_value(layout: &Layout, bad: &Refused) -> Trouble {
    Trouble::Value { tensor: bad.tensor(layout), value: bad.value.value }
}

/// Returns false if the conversation that the lease came from has ended.
fn say(job: &QueuedLease, report: Report) -> bool {
    job.reply.send((job.lease.device, report)).is_ok()
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
