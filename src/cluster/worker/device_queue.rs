//! The work of one device: the lease that it computes, the queue behind it, and the device's current state. The
//! conversation adds and cancels leases here; the device's thread takes the next one. Devices outlive conversations,
//! so the device's thread records its state here, where every conversation reads it.

use super::device::Report;
use super::inbox::{Back, Heard, Inbox, Neighbours};
use super::parameters::Parameters;
use crate::cluster::message::{Device, Lease, LeaseId};
use crate::model::stage::Cancel;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// A lease with everything that is needed to compute it, and the receiver of its report.
pub(super) struct QueuedLease {
    pub lease: Lease,
    pub parameters: Arc<Parameters>,
    /// Belongs to the conversation that the lease came from; closed when that has ended.
    pub reply: UnboundedSender<(u16, Report)>,
}

impl Lease {
    /// The step that its gradient belongs to.
    pub(super) fn step(&self) -> u64 {
        self.work.batch().map_or(self.after + 1, |batch| batch.step)
    }
}

#[derive(Default)]
pub(super) struct DeviceQueue {
    state: Mutex<State>,
    bell: Condvar,
    cancel: Cancel,
}

#[derive(Default)]
struct State {
    queue: VecDeque<QueuedLease>,
    /// The leases in work, in order.
    running: VecDeque<LeaseId>,
    /// Those of them that were called back.
    called_back: Vec<LeaseId>,
    /// Leases that the device computes at the same time.
    together: u16,
    closed: bool,
    /// The device that computes here; the error is why none does any more.
    device: Option<Result<Device, String>>,
    /// The device as the current conversation knows it.
    announced: Option<Device>,
    /// What waits for a seat of a line.
    inbox: Inbox,
}

/// Who decides the order in which a seat of a line begins leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The coordinator: the first seat takes leases in their order.
    OfLeases,
    /// The seat below: the others take them in the order in which hidden states come.
    OfHiddenStates,
}

/// What a seat of a line does next.
pub(super) enum Act {
    /// Runs the forward pass of this lease, with hidden states unless the seat is the first.
    Begin(Box<QueuedLease>, Option<Vec<f32>>),
    /// Continues the text of this lease by hidden states of the next token.
    Continue(LeaseId, Vec<f32>),
    /// Takes what the seat above has sent for this lease.
    Back(LeaseId, Back),
    /// Hidden states of a lease that was called back have come.
    Stray(LeaseId),
    /// Another conversation begins: nothing of the last one goes on.
    Reset(Neighbours),
    /// The queue is closed.
    End,
}

impl State {
    /// The next forward pass of a seat, if one may begin.
    fn begin(&mut self, order: Order, may_begin: &dyn Fn(&QueuedLease) -> bool) -> Option<Act> {
        let at = match self.inbox.hidden.front() {
            _ if order == Order::OfLeases => (!self.queue.is_empty()).then_some(0)?,
            None => return None,
            Some((lease, _)) => match self.queue.iter().position(|job| job.lease.lease == *lease) {
                Some(at) => at,
                None if self.running.contains(lease) => {
                    return self.inbox.hidden.pop_front().map(|(lease, values)| Act::Continue(lease, values));
                }
                // Leases come in order: this one was called back.
                None if *lease <= self.inbox.newest => {
                    return self.inbox.hidden.pop_front().map(|(lease, _)| Act::Stray(lease));
                }
                // Its lease is still on its way.
                None => return None,
            },
        };
        if !may_begin(self.queue.get(at)?) {
            return None;
        }
        let job = self.queue.remove(at)?;
        self.running.push_back(job.lease.lease);
        let hidden = if order == Order::OfLeases { None } else { self.inbox.hidden.pop_front() };
        Some(Act::Begin(Box::new(job), hidden.map(|(_, values)| values)))
    }
}

impl DeviceQueue {
    /// The cancel flag, which the model checks between blocks.
    pub fn flag(&self) -> Cancel {
        self.cancel.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No update of this state can stop half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the current device.
    pub fn stands(&self, device: Device) {
        self.state().device = Some(Ok(device));
    }

    /// Sets the number of leases that the device computes at the same time.
    pub fn takes_together(&self, leases: usize) {
        self.state().together = u16::try_from(leases).unwrap_or(u16::MAX);
    }

    /// The number of leases that the device computes at the same time.
    pub fn together(&self) -> u16 {
        self.state().together.max(1)
    }

    /// Ends the queue because no device is left: no lease is accepted any more. Returns the queued jobs.
    pub fn end(&self, reason: String) -> Vec<QueuedLease> {
        let mut state = self.state();
        state.device = Some(Err(reason));
        state.running.clear();
        state.queue.drain(..).collect()
    }

    /// The device, for a new conversation; the error is why there is none.
    pub fn muster(&self) -> Result<Device, String> {
        let mut state = self.state();
        let device = state.device.clone().unwrap_or_else(|| Err("its thread has ended".into()))?;
        state.announced = Some(device.clone());
        Ok(device)
    }

    /// Why no device is left, or `None` while there is one.
    pub fn gone(&self) -> Option<String> {
        self.state().device.clone().and_then(Result::err)
    }

    /// Records that the conversation knows the current device.
    pub fn announced(&self) {
        let mut state = self.state();
        state.announced = state.device.clone().and_then(Result::ok);
    }

    /// Whether the conversation knows the current device.
    pub fn is_known(&self) -> bool {
        let state = self.state();
        state.device.as_ref().and_then(|device| device.as_ref().ok()) == state.announced.as_ref()
    }

    /// The lease that the device computes; of several, the one that it finishes last.
    pub fn running(&self) -> Option<LeaseId> {
        self.state().running.back().copied()
    }

    /// Clears the running leases. Called before their reports, so that the receiver of a report finds the device free.
    pub fn finished(&self) {
        self.state().running.clear();
    }

    /// Clears one of several running leases, before its report.
    pub fn finished_one(&self, lease: LeaseId) {
        let mut state = self.state();
        state.running.retain(|running| *running != lease);
        state.called_back.retain(|called_back| *called_back != lease);
    }

    /// Queues a job. Returns false if no thread would take it.
    pub fn put(&self, job: QueuedLease) -> bool {
        let mut state = self.state();
        if state.closed || !matches!(state.device, Some(Ok(_))) {
            return false;
        }
        state.inbox.newest = state.inbox.newest.max(job.lease.lease);
        state.queue.push_back(job);
        self.bell.notify_one();
        true
    }

    /// A lease is not taken: hidden states that come for it are not waited for.
    pub fn passes_over(&self, lease: LeaseId) {
        let mut state = self.state();
        state.inbox.newest = state.inbox.newest.max(lease);
        self.bell.notify_one();
    }

    /// Begins a conversation of a seat with these neighbours. Returns its number.
    pub fn join(&self, neighbours: Neighbours) -> u64 {
        let round = self.state().inbox.begin(neighbours);
        self.bell.notify_one();
        round
    }

    /// Takes what a neighbour has sent in the conversation with this number. Returns the number of microbatches whose
    /// values wait.
    pub fn hears(&self, round: u64, heard: Heard) -> usize {
        let waiting = self.state().inbox.take(round, heard);
        self.bell.notify_one();
        waiting
    }

    /// Waits for what a seat does next: what came from the seat above, else a forward pass that may begin. The seat has
    /// begun the conversation number `seen`.
    pub fn act(&self, seen: &mut u64, order: Order, may_begin: impl Fn(&QueuedLease) -> bool) -> Act {
        let mut state = self.state();
        loop {
            if state.closed {
                return Act::End;
            }
            if state.inbox.round != *seen {
                *seen = state.inbox.round;
                state.running.clear();
                state.called_back.clear();
                self.cancel.lower();
                return Act::Reset(state.inbox.neighbours.clone());
            }
            if let Some((lease, back)) = state.inbox.back.pop_front() {
                return Act::Back(lease, back);
            }
            if let Some(act) = state.begin(order, &may_begin) {
                return act;
            }
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the next job. `None` once this queue is closed.
    pub fn next(&self) -> Option<QueuedLease> {
        let mut state = self.state();
        state.running.clear();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                state.running.push_back(job.lease.lease);
                state.called_back.clear();
                self.cancel.lower();
                return Some(job);
            }
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next job if it can be computed beside the running ones, without waiting for one.
    pub fn another(&self, fits: impl Fn(&QueuedLease) -> bool) -> Option<QueuedLease> {
        let mut state = self.state();
        if state.closed || self.cancel.check().is_err() || !state.queue.front().is_some_and(fits) {
            return None;
        }
        let job = state.queue.pop_front()?;
        state.running.push_back(job.lease.lease);
        Some(job)
    }

    /// Puts unfinished jobs back in front of the others; `running` stays in work. Returns those that were called back.
    pub fn put_back(&self, jobs: Vec<QueuedLease>, running: Option<LeaseId>) -> Vec<QueuedLease> {
        let mut state = self.state();
        state.running = running.into_iter().collect();
        let called_back = std::mem::take(&mut state.called_back);
        let (ended, open): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| called_back.contains(&job.lease.lease));
        open.into_iter().rev().for_each(|job| state.queue.push_front(job));
        ended
    }

    /// Cancels a lease. Returns true if it was queued. If it is running, the device is asked to stop and reports
    /// that itself.
    pub fn take_away(&self, lease: LeaseId) -> bool {
        let mut state = self.state();
        if state.running.contains(&lease) {
            state.called_back.push(lease);
            self.cancel.raise();
        }
        let before = state.queue.len();
        state.queue.retain(|job| job.lease.lease != lease);
        state.queue.len() < before
    }

    /// Whether a running lease was called back.
    pub fn is_called_back(&self, lease: LeaseId) -> bool {
        self.state().called_back.contains(&lease)
    }

    /// Removes and returns all queued jobs.
    pub fn empty(&self) -> Vec<QueuedLease> {
        self.state().queue.drain(..).collect()
    }

    /// Removes all queued jobs and stops the running one. Returns their numbers.
    pub fn clear(&self) -> Vec<LeaseId> {
        let mut state = self.state();
        let running: Vec<LeaseId> = state.running.iter().copied().collect();
        if !running.is_empty() {
            state.called_back.extend(&running);
            self.cancel.raise();
        }
        let queued: Vec<QueuedLease> = state.queue.drain(..).collect();
        // A seat keeps nothing of a conversation that is over.
        state.inbox.begin(Neighbours::default());
        self.bell.notify_one();
        running.into_iter().chain(queued.iter().map(|job| job.lease.lease)).collect()
    }

    /// Stops the running lease; the thread ends after it.
    pub fn close(&self) {
        self.clear();
        self.state().closed = true;
        self.bell.notify_all();
    }
}
