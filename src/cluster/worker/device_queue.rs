//! The queue of a device: the lease that it works on and those behind it, and what the device is. The
//! conversation puts leases here and takes them away again; the device's thread takes the next one. Devices outlive
//! conversations, so what a device has become is kept here, by its thread, and every conversation reads it here.

use super::device::Report;
use super::parameters::Parameters;
use crate::cluster::message::{Device, Lease, LeaseId};
use crate::model::stage::Cancel;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// A lease with all that is needed to work on it, and whom to tell.
pub(super) struct QueuedLease {
    pub lease: Lease,
    pub parameters: Arc<Parameters>,
    /// Of the conversation that the lease came from: when that has ended, nobody listens.
    pub reply: UnboundedSender<(u16, Report)>,
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
    running: Option<LeaseId>,
    closed: bool,
    /// What computes here; the error is why nothing does any more.
    device: Option<Result<Device, String>>,
    /// What the newest conversation takes it for.
    told: Option<Device>,
}

impl DeviceQueue {
    /// Looked at by the model between blocks.
    pub fn flag(&self) -> Cancel {
        self.cancel.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing here can be half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device is this from now on.
    pub fn stands(&self, device: Device) {
        self.state().device = Some(Ok(device));
    }

    /// No device is left, and the thread ends: nothing can be put here any more. What still was.
    pub fn end(&self, reason: String) -> Vec<QueuedLease> {
        let mut state = self.state();
        (state.device, state.running) = (Some(Err(reason)), None);
        state.queue.drain(..).collect()
    }

    /// The device, for a conversation that begins with it; the error is why there is none.
    pub fn muster(&self) -> Result<Device, String> {
        let mut state = self.state();
        let device = state.device.clone().unwrap_or_else(|| Err("its thread has ended".into()))?;
        state.told = Some(device.clone());
        Ok(device)
    }

    /// Why no device is left; None while there is one.
    pub fn gone(&self) -> Option<String> {
        self.state().device.clone().and_then(Result::err)
    }

    /// The conversation has heard what the device is now.
    pub fn told(&self) {
        let mut state = self.state();
        state.told = state.device.clone().and_then(Result::ok);
    }

    /// Whether the conversation takes the device for what it is.
    pub fn is_known(&self) -> bool {
        let state = self.state();
        state.device.as_ref().and_then(|device| device.as_ref().ok()) == state.told.as_ref()
    }

    /// The lease that the device works on.
    pub fn running(&self) -> Option<LeaseId> {
        self.state().running
    }

    /// What it worked on is finished: to be said before that is reported, so that whoever hears it finds it free.
    pub fn finished(&self) {
        self.state().running = None;
    }

    /// One more; false where nobody would take it.
    pub fn put(&self, job: QueuedLease) -> bool {
        let mut state = self.state();
        if state.closed || !matches!(state.device, Some(Ok(_))) {
            return false;
        }
        state.queue.push_back(job);
        self.bell.notify_one();
        true
    }

    /// The next one, once there is one; None when the queue was closed.
    pub fn next(&self) -> Option<QueuedLease> {
        let mut state = self.state();
        state.running = None;
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.queue.pop_front() {
                state.running = Some(job.lease.lease);
                self.cancel.lower();
                return Some(job);
            }
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a lease away: true where it had not been begun; where it is being worked on, the device is told to
    /// stop, and reports that itself.
    pub fn take_away(&self, lease: LeaseId) -> bool {
        let mut state = self.state();
        if state.running == Some(lease) {
            self.cancel.raise();
        }
        let before = state.queue.len();
        state.queue.retain(|job| job.lease.lease != lease);
        state.queue.len() < before
    }

    /// Takes away everything that was not begun.
    pub fn empty(&self) -> Vec<QueuedLease> {
        self.state().queue.drain(..).collect()
    }

    /// Takes away everything, and stops what is being worked on; its number.
    pub fn clear(&self) -> Vec<LeaseId> {
        let mut state = self.state();
        if state.running.is_some() {
            self.cancel.raise();
        }
        let queued: Vec<QueuedLease> = state.queue.drain(..).collect();
        state.running.into_iter().chain(queued.iter().map(|job| job.lease.lease)).collect()
    }

    /// The thread ends after what it is working on, which is stopped.
    pub fn close(&self) {
        self.clear();
        self.state().closed = true;
        self.bell.notify_all();
    }
}
