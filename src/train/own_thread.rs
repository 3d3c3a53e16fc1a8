//! A model on its own thread, so that a run does not wait for it: SIGTERM must not wait for a microbatch that takes a
//! minute. The waiting side checks the stop flag twenty times per second. At an immediate stop the call returns a
//! fault, which the stopping run ignores; the thread is asked to stop at the next block and is not joined.

use super::stop::{Stop, Urgency};

use crate::model::layout::Layout;
use crate::model::stage::{
    Cancel, Fault, Generate, InUse, LossSums, Microbatch, Model, Output, Sampling, Stage, Take, Traffic, Want,
};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval between checks of the stop flag.
const GLANCE: Duration = Duration::from_millis(50);

const LEFT: &str = "left alone because the run is to stop now";

type Call = Box<dyn FnOnce(&mut dyn Model) + Send>;

/// Represents a model on another thread of the process.
pub struct OwnThread<'a> {
    layout: Layout,
    class: String,
    stop: &'a Stop,
    calls: Sender<Call>,
    /// The thread holds the lock while it computes.
    model: Arc<Mutex<Box<dyn Model>>>,
    /// Transfers after the last gradient.
    traffic: Traffic,
    in_use: Option<InUse>,
    cancel: Cancel,
}

impl<'a> OwnThread<'a> {
    /// Moves the model to its thread.
    pub fn new(mut model: Box<dyn Model>, stop: &'a Stop) -> Self {
        let (layout, class, cancel) = (model.layout().clone(), model.class(), Cancel::default());
        model.heed(cancel.clone());
        let (calls, inbox) = mpsc::channel::<Call>();
        let model = Arc::new(Mutex::new(model));
        let there = model.clone();
        std::thread::spawn(move || {
            let lock = || there.lock().unwrap_or_else(PoisonError::into_inner);
            inbox.into_iter().for_each(|call| call(&mut **lock()));
        });
        let (traffic, in_use) = (Traffic::default(), None);
        OwnThread { layout, class, stop, calls, model, traffic, in_use, cancel }
    }

    /// Sends `work` to the thread and waits for the result, or until an immediate stop.
    fn ask<T: Send + 'static>(
        &self,
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
                    if self.stop.urgency() == Urgency::Now {
                        // The thread must not compete with the checkpoint for the processor.
                        self.cancel.raise();
                        return Err(self.fault(LEFT));
                    }
                }
            }
        }
    }

    fn fault(&self, reason: &str) -> Fault {
        Fault::Device { device: self.class.clone(), reason: reason.into() }
    }
}

impl Stage for OwnThread<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn class(&self) -> String {
        self.class.clone()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        // Runs on the calling thread, because the other one is idle between steps: the parameters are not copied.
        match self.model.lock() {
            Ok(mut model) => model.set_parameters(flat),
            Err(_) => Err(self.fault("its thread died")),
        }
    }

    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        let (batch, input) = (batch.clone(), input.map(<[f32]>::to_vec));
        self.ask(move |model| model.forward(&batch, input.as_deref(), want))?
    }

    fn backward(&mut self, grad: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        let (grad, mut buffer) = (grad.map(<[f32]>::to_vec), vec![0.0; gradient.len()]);
        let (out, buffer) = self.ask(move |model| {
            let out = model.backward(grad.as_deref(), &mut buffer);
            (out, buffer)
        })?;
        gradient.copy_from_slice(&buffer);
        out
    }

    fn lend_gradient(&mut self, batch: &Microbatch, take: Take) -> Result<LossSums, Fault> {
        let batch = batch.clone();
        let (sums, traffic, in_use) = self.ask(move |model| {
            let sums = model.lend_gradient(&batch, take);
            (sums, model.traffic(), model.in_use())
        })?;
        (self.traffic, self.in_use) = (traffic, in_use);
        sums
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Memory of the last gradient, else the memory that is in use now.
    fn in_use(&mut self) -> Option<InUse> {
        let last = self.in_use.take();
        let now = || self.ask(|model| model.in_use()).ok().flatten();
        last.or_else(now)
    }
}

impl Generate for OwnThread<'_> {
    fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        each: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, Fault> {
        let (prompt, sampling) = (prompt.to_vec(), sampling.clone());
        // Each token is sent out and a verdict is received, so that `each` runs on the calling thread.
        let (tokens, seen) = mpsc::channel();
        let (verdicts, verdict) = mpsc::channel();
        let (reply, answer) = mpsc::channel();
        let _ = self.calls.send(Box::new(move |model| {
            let mut ask = |token| tokens.send(token).is_ok() && verdict.recv().unwrap_or(false);
            let made = model.generate(&prompt, &sampling, &mut ask);
            let _ = reply.send(made);
        }));
        loop {
            match seen.recv_timeout(GLANCE) {
                Ok(token) => drop(verdicts.send(each(token))),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if self.stop.urgency() == Urgency::Now => {
                    return Err(self.fault(LEFT));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        answer.recv().unwrap_or_else(|_| Err(self.fault("its thread died")))
    }
}
