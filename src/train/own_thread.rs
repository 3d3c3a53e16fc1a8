//! A model on its own thread, so that a run does not wait for it: SIGTERM must not wait for a microbatch that takes a
//! minute. The waiting side checks the stop flag twenty times per second. At an immediate stop the call returns a
//! fault, which the stopping run ignores; the thread is asked to stop at the next block and is not joined.

use super::stop::{Stop, Urgency};
use crate::model::stage::{Cancel, Fault, Model};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval between checks of the stop flag.
const GLANCE: Duration = Duration::from_millis(50);

const LEFT: &str = "left alone because the run is to stop now";

type Call = Box<dyn FnOnce(&mut dyn Model) + Send>;

/// Represents a model on another thread of the process.
pub struct OwnThread {
    class: String,
    calls: Sender<Call>,
    /// The thread holds the lock while it computes.
    model: Arc<Mutex<Box<dyn Model>>>,
    cancel: Cancel,
}

impl OwnThread {
    /// Moves the model to its thread.
    pub fn new(mut model: Box<dyn Model>) -> Self {
        let (class, cancel) = (model.class(), Cancel::default());
        model.heed(cancel.clone());
        let (calls, inbox) = mpsc::channel::<Call>();
        let model = Arc::new(Mutex::new(model));
        let there = model.clone();
        std::thread::spawn(move || {
            let lock = || there.lock().unwrap_or_else(PoisonError::into_inner);
            inbox.into_iter().for_each(|call| call(&mut **lock()));
        });
        OwnThread { class, calls, model, cancel }
    }

    /// Sends `work` to the thread and waits for the result, or until an immediate stop.
    pub fn ask<T: Send + 'static>(
        &self,
        stop: &Stop,
        work: impl FnOnce(&mut dyn Model) -> T + Send + 'static,
    ) -> Result<T, Fault> {
        let (reply, answer) = mpsc::channel();
        // Both sends fail only if the other side has gone; `recv_timeout` below detects that.
        let _ = self.calls.send(Box::new(move |model| drop(reply.send(work(model)))));
        loop {
            match answer.recv_timeout(GLANCE) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => return Err(self.fault("its thread died")),
                Err(RecvTimeoutError::Timeout) => {
                    if stop.urgency() == Urgency::Now {
                        // The thread must not compete with the checkpoint for the processor.
                        self.cancel.raise();
                        return Err(self.fault(LEFT));
                    }
                }
            }
        }
    }

    /// Runs `work` on the calling thread, because the other one is idle between calls: what it borrows is not copied.
    pub fn here<T>(&self, work: impl FnOnce(&mut dyn Model) -> T) -> Result<T, Fault> {
        match self.model.lock() {
            Ok(mut model) => Ok(work(&mut **model)),
            Err(_) => Err(self.fault("its thread died")),
        }
    }

    /// The flag that an immediate stop raises.
    pub fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    fn fault(&self, reason: &str) -> Fault {
        Fault::Device { device: self.class.clone(), reason: reason.into() }
    }
}
