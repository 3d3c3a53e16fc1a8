//! Several leases at the same time, on devices that hold a model together. They are begun and finished in order. Leases
//! that end without a result of their own, because another one was called back or failed, are computed again.

use super::{DeviceWorker, Failed, Report, bad_value, micros, say, throttle};
use crate::cluster::message::Work;
use crate::cluster::worker::device_queue::QueuedLease;
use crate::cluster::worker::sum::Finished;
use crate::model::stage::{LossSums, Microbatch, Traffic};
use crate::numeric::fixed;
use crate::support::panics::caught;
use crate::train::sum::check;
use std::cell::RefCell;
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
        let open = RefCell::new(VecDeque::from([(first, Instant::now())]));
        let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
        let end = caught(|| self.finish_all(&open)).unwrap_or_else(internal);
        let mut open: VecDeque<QueuedLease> = open.into_inner().into_iter().map(|(job, _)| job).collect();
        match end {
            Err(Failed::Device(reason)) => {
                let Some(job) = open.pop_front() else { return true };
                self.put_back(open);
                return self.fall_back(&job, reason);
            }
            Err(Failed::Value(trouble)) if open.len() == 1 => {
                self.queue.finished();
                open.iter().for_each(|job| {
                    say(job, Report::Trouble { lease: job.lease.lease, trouble: trouble.clone() });
                });
            }
            // Whose value it is shows when each is computed alone.
            Err(Failed::Value(_)) => {
                self.alone = open.len();
                self.put_back(open);
            }
            Err(Failed::Cancelled) | Ok(()) => self.put_back(open),
        }
        true
    }

    /// Queues leases again, but for those that were called back.
    fn put_back(&self, open: VecDeque<QueuedLease>) {
        for job in self.queue.put_back(open) {
            say(&job, Report::Stopped { lease: job.lease.lease, micros: 0 });
        }
    }

    /// Computes until no lease is queued. Finished ones are reported and leave `open`.
    fn finish_all(&mut self, open: &RefCell<VecDeque<(QueuedLease, Instant)>>) -> Result<(), Failed> {
        let Some(parameters) = open.borrow().front().map(|(job, _)| job.parameters.clone()) else {
            return Ok(());
        };
        self.take_parameters(&parameters)?;
        let DeviceWorker { model, queue, shared, layout, .. } = self;
        let Some(model) = model else { return Err(Failed::Device("no backend is left".into())) };
        let (mut first, mut broken, mut before) = (true, None, Instant::now());
        let next = &mut || {
            if broken.is_some() {
                return None;
            }
            if !std::mem::take(&mut first) {
                let fits =
                    |job: &QueuedLease| trained(job).is_some() && Arc::ptr_eq(&job.parameters, &parameters);
                open.borrow_mut().push_back((queue.another(fits)?, Instant::now()));
            }
            let open = open.borrow();
            let batch = trained(&open.back()?.0)?;
            #[cfg(feature = "faults")]
            if shared.inject.loses_device(batch.step) {
                self.candidate.chain[self.at].lose();
            }
            broken = shared.inject.before(batch.step).err();
            broken.is_none().then(|| batch.clone())
        };
        let each = &mut |_, sums: &LossSums, values: &[f32]| {
            let Some((job, began)) = open.borrow_mut().pop_front() else { return };
            let lease = job.lease.lease;
            let (cap, began) = (fixed::cap(job.lease.of as usize), began.max(before));
            let mut gradient = shared.buffers.take(layout.len());
            gradient.copy_from_slice(values);
            shared.inject.after(job.lease.after + 1, &mut gradient, cap);
            let report = match check(sums, &gradient, cap) {
                Ok(scalars) => {
                    // A throttled lease that is called back was computed nevertheless.
                    let _ = throttle(&shared.inject, queue, began);
                    let finished = Finished { gradient, scalars, traffic: Traffic::default() };
                    let (after, parameters) = (job.lease.after, parameters.hash);
                    Report::Trained { lease, after, finished, parameters, micros: micros(began), memory: 0 }
                }
                Err(bad) => {
                    shared.buffers.give_back(gradient);
                    Report::Trouble { lease, trouble: bad_value(layout, &bad) }
                }
            };
            before = Instant::now();
            queue.finished_one(lease);
            say(&job, report);
        };
        model.gradients(next, each)?;
        broken.map_or(Ok(()), |reason| Err(Failed::Device(reason)))
    }
}
