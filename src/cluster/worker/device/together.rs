//! Several leases at the same time, on devices that hold a model together. They are begun and finished in order. Leases
//! that end without a result of their own, because another one was called back or failed, are computed again.

use super::{DeviceWorker, Failed, Report, Shared, bad_value, micros, say, throttle};
use crate::cluster::message::Work;
use crate::cluster::worker::device_queue::QueuedLease;
use crate::cluster::worker::sum::Finished;
use crate::model::layout::Layout;
use crate::model::stage::{LossSums, Microbatch, Traffic};
use crate::numeric::fixed;
use crate::support::panics::caught;
use crate::train::Rounding;
use crate::train::sum::check;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The microbatch of a lease for training.
fn trained(job: &QueuedLease) -> Option<&Microbatch> {
    match &job.lease.work {
        Work::Train(batch) => Some(batch),
        _ => None,
    }
}

impl DeviceWorker {
    /// Whether others may be computed at the same time as this lease.
    pub(super) fn computes_several(&mut self, job: &QueuedLease) -> bool {
        let alone = self.alone > 0;
        self.alone = self.alone.saturating_sub(1);
        !alone && trained(job).is_some() && self.model.as_ref().is_some_and(|model| model.together() > 1)
    }

    /// Computes this lease and those that are queued behind it. Returns false if no backend is left.
    pub(super) fn compute_several(&mut self, first: QueuedLease) -> bool {
        let began = Cell::new(Instant::now());
        let open = RefCell::new(VecDeque::from([first]));
        let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
        let end = caught(|| self.finish_all(&open, &began)).unwrap_or_else(internal);
        let mut open: Vec<QueuedLease> = open.into_inner().into();
        match end {
            Err(Failed::Device(reason) | Failed::Memory(reason)) if !open.is_empty() => {
                let job = open.remove(0);
                self.put_back(open, Some(&job), began.get());
                return self.fall_back(&job, reason);
            }
            Err(Failed::Value(trouble)) if open.len() == 1 => {
                self.queue.finished();
                say(&open[0], Report::Trouble { lease: open[0].lease.lease, trouble });
            }
            // Whose value it is shows when each is computed alone.
            Err(Failed::Value(_)) => {
                self.alone = open.len();
                self.put_back(open, None, began.get());
            }
            Err(Failed::Cancelled | Failed::Device(_) | Failed::Memory(_)) | Ok(()) => {
                self.put_back(open, None, began.get())
            }
        }
        true
    }

    /// Queues leases again, but for those that were called back: the first of these has taken the time since `began`.
    fn put_back(&self, open: Vec<QueuedLease>, running: Option<&QueuedLease>, began: Instant) {
        let ended = self.queue.put_back(open, running.map(|job| job.lease.lease));
        for (at, job) in ended.iter().enumerate() {
            let micros = if at == 0 { micros(began) } else { 0 };
            say(job, Report::Stopped { lease: job.lease.lease, micros });
        }
    }

    /// Computes until no lease is queued. Finished ones are reported and leave `open`; the first of the others is in work
    /// since `began`.
    fn finish_all(
        &mut self,
        open: &RefCell<VecDeque<QueuedLease>>,
        began: &Cell<Instant>,
    ) -> Result<(), Failed> {
        let Some(parameters) = open.borrow().front().map(|job| job.parameters.clone()) else {
            return Ok(());
        };
        self.take_parameters(&parameters)?;
        let DeviceWorker { model, queue, shared, layout, rounding, .. } = self;
        let Some(model) = model else { return Err(Failed::Device("no backend is left".into())) };
        let (mut first, mut broken) = (true, None);
        let next = &mut || {
            if broken.is_some() {
                return None;
            }
            if !std::mem::take(&mut first) {
                let fits =
                    |job: &QueuedLease| trained(job).is_some() && Arc::ptr_eq(&job.parameters, &parameters);
                let job = queue.another(fits)?;
                if open.borrow().is_empty() {
                    began.set(Instant::now());
                }
                open.borrow_mut().push_back(job);
            }
            let open = open.borrow();
            let batch = trained(open.back()?)?;
            #[cfg(feature = "faults")]
            if shared.inject.loses_device(batch.step) {
                self.candidate.chain[self.at].lose();
            }
            broken = shared.inject.before(batch.step).err();
            broken.is_none().then(|| batch.clone())
        };
        let each = &mut |_, sums: &LossSums, values: &[f32]| {
            let report = open.borrow().front().map(|job| {
                // A throttled lease that is called back was computed nevertheless.
                let _ = throttle(&shared.inject, queue, began.get());
                report((shared, layout, rounding.as_ref()), job, (sums, values), began.get())
            });
            let job = open.borrow_mut().pop_front();
            began.set(Instant::now());
            if let (Some(job), Some(report)) = (job, report) {
                queue.finished_one(job.lease.lease);
                say(&job, report);
            }
        };
        model.gradients(next, each)?;
        broken.map_or(Ok(()), |reason| Err(Failed::Device(reason)))
    }
}

/// The report on a computed microbatch, after its check.
fn report(
    (shared, layout, rounding): (&Shared, &Layout, Option<&Rounding>),
    job: &QueuedLease,
    (sums, values): (&LossSums, &[f32]),
    began: Instant,
) -> Report {
    let (lease, cap) = (job.lease.lease, fixed::cap(job.lease.of as usize));
    let mut gradient = shared.buffers.take(layout.len());
    gradient.copy_from_slice(values);
    let rounds = rounding.zip(trained(job));
    rounds.iter().for_each(|(rounding, batch)| rounding.round(batch, 0, &mut gradient));
    shared.inject.after(job.lease.step(), &mut gradient, cap);
    match check(sums, &gradient, cap) {
        Ok(scalars) => {
            let finished = Finished { gradient, scalars, traffic: Traffic::default() };
            let (parameters, micros) = (job.parameters.hash, micros(began));
            Report::Trained { lease, finished, parameters, micros, memory: 0 }
        }
        Err(bad) => {
            shared.buffers.give_back(gradient);
            Report::Trouble { lease, trouble: bad_value(layout, &bad) }
        }
    }
}
