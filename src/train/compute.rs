//! The source of gradients: one model in this process ([`Local`]), or a coordinator with any number of devices. The
//! training loop asks for exact sums and does not depend on the number of devices, so step, optimizer, checkpoints and
//! events have the same code and the same bits in both cases.

use super::error::{Again, Finding, TrainError};
use super::event::{Event, Shared, Speed};
use super::stop::{Stop, Urgency};
use super::sum::{Refused, Sums};
use crate::model::layout::Layout;
use crate::model::memory::Used;
use crate::model::stage::{Fault, LossSums, Microbatch, Model, Output, Sampling, Traffic, Want};
use crate::numeric::fixed;
use crate::numeric::line::Points;
use std::sync::mpsc;
use std::time::Instant;

/// Receives the events of a call.
pub type Say<'a> = &'a mut dyn FnMut(Event);

/// The microbatches of an evaluation, made on demand: the rows are not copied at once.
pub struct Scoring<'a> {
    /// Number of microbatches.
    pub count: usize,
    /// Makes the microbatch with the given index.
    pub batch: &'a dyn Fn(usize) -> Microbatch,
    /// Receives each microbatch with its sums exactly once, in any order.
    pub each: &'a mut dyn FnMut(&Microbatch, &LossSums) -> Result<(), TrainError>,
}

/// The interface between the training loop and models. Every call returns `None` if a signal ended it; partial results
/// are then dropped.
pub trait Compute {
    /// The flat parameter vector.
    fn layout(&self) -> &Layout;

    /// Numeric classes that take part, sorted; more classes may join later.
    fn classes(&self) -> Vec<String>;

    /// Announces parameters that [`Compute::set_parameters`] will set, in order and starting at value `from`, while the
    /// others are still being computed, so that a slow network transfer can begin early. Announced values have no
    /// effect before that call; a call with `from` = 0 starts over.
    fn parameters_ahead(&mut self, _step: u64, _from: usize, _stretch: &[f32]) {}

    /// Sets the parameters after `step` steps for all later calls.
    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError>;

    /// Replaces the contents of `sums` by gradient and loss of `work`, the microbatches of `step`: each microbatch is
    /// added exactly once.
    fn gradients(
        &mut self,
        step: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError>;

    /// Scores an evaluation after `step` steps.
    fn losses(&mut self, step: u64, scoring: Scoring, say: Say) -> Result<Option<()>, TrainError>;

    /// Continues a prompt after `step` steps.
    fn answer(
        &mut self,
        step: u64,
        prompt: &[u32],
        sampling: &Sampling,
        say: Say,
    ) -> Result<Option<Vec<u32>>, TrainError>;

    /// Measured costs of the devices so far, if any were measured.
    fn speeds(&self, _step: u64) -> Vec<Speed> {
        Vec::new()
    }
}

/// Costs of a step other than time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effort {
    /// Distribution over devices; None if one device did all the work.
    pub shared: Option<Shared>,
    /// Start and end of each microbatch on the only device, in seconds since the start of the step's work.
    pub spans: Vec<(f64, f64)>,
    /// Transfers between host and device; None for a backend that computes in host memory.
    pub traffic: Option<Traffic>,
}

/// Time limit of the trial measurements before the first step.
const TRIAL_SECONDS: f64 = 2.0;

/// One complete model in this process.
pub struct Local<'a> {
    model: &'a mut dyn Model,
    stop: &'a Stop,
    /// Tokens and seconds of each microbatch.
    points: Points,
    /// Tokens and bytes of each microbatch.
    used: Used,
    /// Trial microbatches before the first step, and the number of measured ones.
    trials: (Vec<Microbatch>, u64),
}

impl<'a> Local<'a> {
    /// A `Compute` that checks `stop` between microbatches.
    pub fn new(model: &'a mut dyn Model, stop: &'a Stop) -> Self {
        let trials = (Vec::new(), 0);
        Local { model, stop, points: Points::default(), used: Used::default(), trials }
    }

    /// Measures the model with `trials`, small ones first, once its parameters are set. The gradients are dropped.
    pub fn measured_with(mut self, trials: Vec<Microbatch>) -> Self {
        self.trials.0 = trials;
        self
    }

    /// Computes each trial twice and measures the second run. No further trial begins after [`TRIAL_SECONDS`]. A trial
    /// that takes longer than that runs once: the first use of memory is then a small part of its time.
    fn measure(&mut self) -> Result<(), Fault> {
        if self.used.points.n == 0.0 {
            // The first answer covers loading; the second is the memory that is in use now.
            let lies = self.model.in_use().and_then(|_| self.model.in_use());
            lies.into_iter().for_each(|seen| self.used.rest(seen));
        }
        let began = Instant::now();
        for batch in std::mem::take(&mut self.trials.0) {
            if self.stopped() || began.elapsed().as_secs_f64() > TRIAL_SECONDS {
                return Ok(());
            }
            let mut once = || -> Result<f64, Fault> {
                let from = Instant::now();
                self.model.lend_gradient(&batch, Box::new(|_, _| ()))?;
                Ok(from.elapsed().as_secs_f64())
            };
            let first = once()?;
            let seconds = if first > TRIAL_SECONDS { first } else { once()? };
            let tokens = batch.ids.len() as f64;
            self.points.add(tokens, seconds);
            self.model.in_use().into_iter().for_each(|seen| self.used.add(tokens, seen));
            self.trials.1 += 1;
        }
        Ok(())
    }

    /// Adds one microbatch to `sums`, all or nothing; the inner error is a value that the sums cannot hold. If no
    /// result arrives, for example after a signal, `sums` is empty.
    fn add(
        &mut self,
        batch: &Microbatch,
        cap: i64,
        sums: &mut Sums,
    ) -> Result<Result<(), Refused>, TrainError> {
        let step = batch.step;
        // Resets the peak memory of earlier work.
        self.model.in_use();
        let (reply, answer) = mpsc::channel();
        // The sums move to the thread that has the gradient, so the gradient is never copied.
        let mut taken = std::mem::take(sums);
        let computed = self.model.lend_gradient(
            batch,
            Box::new(move |loss, gradient| {
                let added = taken.add(loss, gradient, cap);
                // After a stop the receiver is gone.
                let _ = reply.send((taken, added));
            }),
        );
        let tokens = batch.ids.len() as f64;
        self.model.in_use().into_iter().for_each(|seen| self.used.add(tokens, seen));
        let nothing = || Fault::Device { device: self.model.class(), reason: "it gave no gradient".into() };
        let given = computed.and_then(|_| answer.try_recv().map_err(|_| nothing()));
        let (taken, added) = given.map_err(|fault| TrainError::Device { step, fault })?;
        *sums = taken;
        Ok(added)
    }

    /// Reports a bad value with its location, after a second computation of the microbatch: if the two results differ,
    /// the device is at fault, not the rows. `sums` is not valid afterwards.
    fn address(
        &mut self,
        (bad, at): Refused,
        (index, batch): (usize, &Microbatch),
        cap: i64,
        sums: &mut Sums,
    ) -> TrainError {
        let place = self.model.class();
        let again = self.add(batch, cap, sums).ok();
        let again = again.map(|again| Again { place: place.clone(), bad: again.is_err() });
        TrainError::NonFinite {
            step: batch.step,
            microbatch: index,
            rows: batch.rows.clone(),
            tensor: at.map_or_else(
                || "the loss".into(),
                |i| format!("the gradient of {}", self.model.layout().name_at(i)),
            ),
            value: bad.value,
            finding: Box::new(Finding { class: place.clone(), place, again }),
        }
    }

    /// Treats a fault during an immediate stop as the early return of [`super::OwnThread`]: only partial sums were
    /// lost.
    fn unless_stopped<T>(&self, taken: Result<T, TrainError>) -> Result<Option<T>, TrainError> {
        match taken {
            Err(TrainError::Device { .. }) if self.stopped() => Ok(None),
            other => other.map(Some),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.urgency() == Urgency::Now
    }
}

impl Compute for Local<'_> {
    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn classes(&self) -> Vec<String> {
        vec![self.model.class()]
    }

    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError> {
        let set = self.model.set_parameters(flat).and_then(|()| self.measure());
        self.unless_stopped(set.map_err(|fault| TrainError::Device { step, fault }))
    }

    fn gradients(
        &mut self,
        _: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        _: Say,
    ) -> Result<Option<Effort>, TrainError> {
        let (cap, before) = (fixed::cap(work.len()), self.model.traffic());
        sums.reset(self.model.layout().len());
        let (given, mut spans) = (Instant::now(), Vec::with_capacity(work.len()));
        let since = |at: Instant| at.duration_since(given).as_millis() as f64 / 1e3;
        for (index, batch) in work.iter().enumerate() {
            if self.stopped() {
                return Ok(None);
            }
            let began = Instant::now();
            let added = self.add(batch, cap, sums);
            let ended = Instant::now();
            spans.push((since(began), since(ended)));
            self.points.add(batch.ids.len() as f64, (ended - began).as_secs_f64());
            match self.unless_stopped(added)? {
                None => return Ok(None),
                Some(Ok(())) => {}
                Some(Err(bad)) => return Err(self.address(bad, (index, batch), cap, sums)),
            }
        }
        let traffic = Some(self.model.traffic().since(&before)).filter(|t| t.submissions > 0);
        Ok(Some(Effort { shared: None, spans, traffic }))
    }

    fn losses(&mut self, step: u64, scoring: Scoring, _: Say) -> Result<Option<()>, TrainError> {
        for index in 0..scoring.count {
            if self.stopped() {
                return Ok(None);
            }
            let batch = (scoring.batch)(index);
            let out = self.model.forward(&batch, None, Want::Loss).and_then(Output::loss);
            let out = out.map_err(|fault| TrainError::Device { step, fault });
            let Some(out) = self.unless_stopped(out)? else { return Ok(None) };
            (scoring.each)(&batch, &out)?;
        }
        Ok(Some(()))
    }

    fn answer(
        &mut self,
        step: u64,
        prompt: &[u32],
        sampling: &Sampling,
        _: Say,
    ) -> Result<Option<Vec<u32>>, TrainError> {
        let stop = self.stop;
        let made = self.model.generate(prompt, sampling, &mut |_| stop.urgency() != Urgency::Now);
        let made = self.unless_stopped(made.map_err(|fault: Fault| TrainError::Device { step, fault }))?;
        Ok(made.filter(|_| !self.stopped()))
    }

    fn speeds(&self, step: u64) -> Vec<Speed> {
        let Some(line) = self.points.line() else { return Vec::new() };
        let (class, trials) = (self.model.class(), self.trials.1);
        let device = class.clone();
        let (points, memory) = (self.points, Some(self.used).filter(|used| used.fit().is_some()));
        vec![Speed { step, worker: String::new(), device, class, line, points, trials, link: None, memory }]
    }
}
