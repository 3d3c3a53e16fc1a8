//! Who computes: one model in this process ([`Local`]), or a coordinator with any number of devices. The loop
//! asks for exact sums and never learns how many took part, so step, optimizer, checkpoints and events are the
//! same code, and the same bits, either way.

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

/// Takes what is to be shown while a call lasts.
pub type Say<'a> = &'a mut dyn FnMut(Event);

/// Microbatches of an evaluation by their index, made when they are needed: a corpus is not copied at once.
pub struct Scoring<'a> {
    /// Their number.
    pub count: usize,
    /// Makes one.
    pub batch: &'a dyn Fn(usize) -> Microbatch,
    /// Sees every one with its sums exactly once, in any order.
    pub each: &'a mut dyn FnMut(&Microbatch, &LossSums) -> Result<(), TrainError>,
}

/// All that the loop asks of models. `None` is how every call says that a signal ended it; what was half done
/// then is dropped.
pub trait Compute {
    /// The flat parameter vector.
    fn layout(&self) -> &Layout;

    /// Numeric classes that take part, sorted; one may join later.
    fn classes(&self) -> Vec<String>;

    /// Parameters that [`Compute::set_parameters`] is about to set, in order and from value `from` on, while the rest
    /// of them is still being made: whoever has a long way to carry them may begin. They count for nothing until
    /// then, and a stretch from 0 begins anew.
    fn parameters_ahead(&mut self, _step: u64, _from: usize, _stretch: &[f32]) {}

    /// The parameters after `step` steps: everything that follows is computed with them.
    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError>;

    /// Makes `sums`, which may hold an older step's, those of gradient and loss of every one of `work`, the
    /// microbatches of `step`: each exactly once.
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

    /// What its devices were measured to need so far, as far as anybody looked at a clock.
    fn speeds(&self, _step: u64) -> Vec<Speed> {
        Vec::new()
    }
}

/// What a step took besides time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Effort {
    /// How it was shared out; None where one device did it all.
    pub shared: Option<Shared>,
    /// When the one device computed each microbatch, in seconds since it was given the work.
    pub spans: Vec<(f64, f64)>,
    /// What went to devices and back; None of what computes in place.
    pub traffic: Option<Traffic>,
}

/// How long a device may be measured before the first step.
const TRIAL_SECONDS: f64 = 2.0;

/// One whole model in this process.
pub struct Local<'a> {
    model: &'a mut dyn Model,
    stop: &'a Stop,
    /// Tokens and seconds of every microbatch.
    points: Points,
    /// Tokens and bytes.
    used: Used,
    /// Microbatches to be measured with before the first step, and how many were.
    trials: (Vec<Microbatch>, u64),
}

impl<'a> Local<'a> {
    /// Looks at `stop` between microbatches.
    pub fn new(model: &'a mut dyn Model, stop: &'a Stop) -> Self {
        let trials = (Vec::new(), 0);
        Local { model, stop, points: Points::default(), used: Used::default(), trials }
    }

    /// Measures the model with `trials`, the small ones first, once it has parameters. Their gradients go nowhere.
    pub fn measured_with(mut self, trials: Vec<Microbatch>) -> Self {
        self.trials.0 = trials;
        self
    }

    /// Every one of them twice, of which the second counts; no more once that took [`TRIAL_SECONDS`], and once only where
    /// one alone does: what it takes to touch memory first is little of that.
    fn measure(&mut self) -> Result<(), Fault> {
        if self.used.points.n == 0.0 {
            // What loading took is no matter of microbatches: the second answer is what lies there now.
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

    /// One microbatch into `sums`, all or nothing; the inner error is a value that may not enter them. Where nothing
    /// comes back, as after a signal, `sums` are empty.
    fn add(
        &mut self,
        batch: &Microbatch,
        cap: i64,
        sums: &mut Sums,
    ) -> Result<Result<(), Refused>, TrainError> {
        let step = batch.step;
        // What was done before is no part of it.
        self.model.in_use();
        let (reply, answer) = mpsc::channel();
        // The sums go to the gradient, on whichever thread it is: so it is never copied.
        let mut taken = std::mem::take(sums);
        let computed = self.model.lend_gradient(
            batch,
            Box::new(move |loss, gradient| {
                let added = taken.add(loss, gradient, cap);
                // If the run was stopped meanwhile, the receiver is gone.
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

    /// A bad value with its address, after the microbatch was computed once more: a device that gives another
    /// answer to the same question is what is wrong, not the rows. `sums` are not used afterwards.
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

    /// A fault while the run is to stop now is how [`super::OwnThread`] returns early: nothing was lost but
    /// partial sums.
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
