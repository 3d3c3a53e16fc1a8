//! What lies before a device: the lease that it works on and those behind it. The conversation puts leases here and
//! takes them away again; the device's thread takes the next one.

use super::device::Report;
use super::parameters::Parameters;
use crate::cluster::message::{Lease, LeaseId};
use crate::model::stage::Cancel;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::UnboundedSender;

/// A lease with all that is needed to work on it, and whom to tell.
pub(super) struct Job {
    pub lease: Lease,
    pub parameters: Arc<Parameters>,
    /// Of the conversation that the lease came from: when that has ended, nobody listens.
    pub reply: UnboundedSender<(u16, Report)>,
}

#[derive(Default)]
pub(super) struct Desk {
    state: Mutex<State>,
    bell: Condvar,
    cancel: Cancel,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    running: Option<LeaseId>,
    closed: bool,
}

impl Desk {
    /// Looked at by the model between blocks.
    pub fn flag(&self) -> Cancel {
        self.cancel.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing here can be half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more.
    pub fn put(&self, job: Job) {
        self.state().queue.push_back(job);
        self.bell.notify_one();
    }

    /// The next one, once there is one; None when the desk was closed.
    pub fn next(&self) -> Option<Job> {
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
    pub fn empty(&self) -> Vec<Job> {
        self.state().queue.drain(..).collect()
    }

    /// Takes away everything, and stops what is being worked on; its number.
    pub fn clear(&self) -> Vec<LeaseId> {
        let mut state = self.state();
        if state.running.is_some() {
            self.cancel.raise();
        }
        let queued: Vec<Job> = state.queue.drain(..).collect();
        state.running.into_iter().chain(queued.iter().map(|job| job.lease.lease)).collect()
    }

    /// The thread ends after what it is working on, which is stopped.
    pub fn close(&self) {
        self.clear();
        self.state().closed = true;
        self.bell.notify_all();
    }
}
