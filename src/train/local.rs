//! One complete model in this process, as a [`Compute`].

use super::compute::{Compute, Effort, Say, Scoring};
use super::error::{Again, Finding, TrainError};
use super::event::Speed;
use super::island::{self, Island};
use super::own_thread::OwnThread;
use super::rounding::Rounding;
use super::stop::{Stop, Urgency};
use super::sum::{Refused, Scalars, Sums};
use super::trial::{Passed, Trials, at_rest};
use crate::model::generate::generate;
use crate::model::layout::Layout;
use crate::model::stage::{Fault, InUse, Microbatch, Model, Output, Sampling, Traffic, Want};
use crate::numeric::fixed;
use std::time::{Duration, Instant};

/// Time after which no further trial starts: a model alone delays no other device.
const ENOUGH: Duration = Duration::from_secs(2);

/// One complete model in this process.
pub struct Local<'a> {
    place: Place<'a>,
    stop: &'a Stop,
    layout: Layout,
    class: String,
    /// Most microbatches that the model computes together.
    together: usize,
    /// Tokens, seconds and bytes of each microbatch.
    measured: Trials,
    /// Trial microbatches before the first step, and the number of measured ones.
    trials: (Vec<Microbatch>, u64),
    rounding: Option<Rounding>,
    /// Parameters and moments that islands begin with.
    start: Vec<f32>,
    /// Where steps are delayed: the parameters that were set last and before, with their steps.
    delayed: Option<[(u64, Vec<f32>); 2]>,
}

/// The thread of the model.
enum Place<'a> {
    /// That of the caller.
    Here(&'a mut dyn Model),
    /// Its own, which an immediate stop does not wait for.
    Apart(OwnThread),
}

impl Place<'_> {
    fn ask<T: Send + 'static>(
        &mut self,
        stop: &Stop,
        work: impl FnOnce(&mut dyn Model) -> T + Send + 'static,
    ) -> Result<T, Fault> {
        match self {
            Place::Here(model) => Ok(work(*model)),
            Place::Apart(thread) => thread.ask(stop, work),
        }
    }

    fn here<T>(&mut self, work: impl FnOnce(&mut dyn Model) -> T) -> Result<T, Fault> {
        match self {
            Place::Here(model) => Ok(work(*model)),
            Place::Apart(thread) => thread.here(work),
        }
    }
}

/// An island's vectors, scalars and transfers, or a bad value with what it is.
type IslandResult = Result<(Vec<f32>, Scalars, Traffic), (String, f64)>;

/// Results of microbatches besides their sums.
struct Added {
    /// Number of gradients.
    given: usize,
    /// The first value that the sums cannot hold, with the index of its microbatch.
    bad: Option<(usize, Refused)>,
    traffic: Traffic,
    in_use: Option<InUse>,
}

impl<'a> Local<'a> {
    /// A model on the thread of the caller, which checks `stop` between microbatches, or groups of them.
    pub fn new(model: &'a mut dyn Model, stop: &'a Stop) -> Self {
        let of = (model.layout().clone(), model.class(), model.together());
        Self::at(Place::Here(model), stop, of)
    }

    /// A model on its own thread: an immediate stop waits for no microbatch.
    pub fn apart(model: Box<dyn Model>, stop: &'a Stop) -> Self {
        let of = (model.layout().clone(), model.class(), model.together());
        Self::at(Place::Apart(OwnThread::new(model)), stop, of)
    }

    fn at(place: Place<'a>, stop: &'a Stop, (layout, class, together): (Layout, String, usize)) -> Self {
        let (measured, trials) = (Trials::default(), (Vec::new(), 0));
        Local {
            place,
            stop,
            layout,
            class,
            together,
            measured,
            trials,
            rounding: None,
            start: Vec::new(),
            delayed: None,
        }
    }

    /// Rounds every gradient before it is added.
    pub fn rounding(mut self, rounding: Option<Rounding>) -> Self {
        self.rounding = rounding;
        self
    }

    /// Computes the gradients of a step with the parameters of this number of steps before, 0 or 1.
    pub fn delayed(mut self, delay: u64) -> Self {
        self.delayed = (delay > 0).then(Default::default);
        self
    }

    /// Sets the parameters of the gradients of a step, where they are not those that were set last.
    fn step_back(&mut self) -> Result<(), Fault> {
        let Some([(newest, _), (before, values)]) = &self.delayed else { return Ok(()) };
        match before + 1 == *newest {
            true => self.place.here(|model| model.set_parameters(values)).and_then(|set| set),
            false => Ok(()),
        }
    }

    /// Measures the model with `trials`, small ones first, once its parameters are set. The gradients are dropped.
    pub fn measured_with(mut self, trials: Vec<Microbatch>) -> Self {
        self.trials.0 = trials;
        self
    }

    fn measure(&mut self) -> Result<(), Fault> {
        if self.measured.memory.points.n == 0.0 {
            let rest = self.place.ask(self.stop, at_rest)?;
            rest.into_iter().for_each(|seen| self.measured.memory.rest(seen));
        }
        let (trials, before) = (std::mem::take(&mut self.trials.0), self.measured.time.n);
        let (place, stop, copies) = (&mut self.place, self.stop, self.together);
        let measured = self.measured.run(&trials, (ENOUGH, copies), &mut |batch| {
            if stop.urgency() == Urgency::Now {
                return Ok(None);
            }
            let mut own = vec![batch.clone(); copies].into_iter();
            place.ask(stop, move |model| {
                model.gradients(&mut || own.next(), &mut |_, _, _| ())?;
                Ok(Some(Passed(model.in_use().filter(|_| copies == 1))))
            })?
        });
        self.trials.1 += (self.measured.time.n - before) as u64;
        measured
    }

    /// Adds microbatches of one step to `sums`, each all or nothing, and returns their transfers. The inner error is the
    /// index of the first microbatch with a value that the sums cannot hold, and that value. If no result arrives, for
    /// example after a signal, `sums` is empty.
    fn add(
        &mut self,
        step: u64,
        batches: &[Microbatch],
        cap: i64,
        sums: &mut Sums,
    ) -> Result<Result<Traffic, (usize, Refused)>, TrainError> {
        let own = batches.to_vec();
        let rounding = self.rounding.clone().map(|rounding| (rounding, own.clone()));
        let mut own = own.into_iter();
        // The sums move to the thread that has the gradients, which are copied only to be rounded.
        let mut taken = std::mem::take(sums);
        let computed = self.place.ask(self.stop, move |model| {
            // Resets the peak memory of earlier work.
            model.in_use();
            let before = model.traffic();
            let (mut given, mut bad, mut rounded) = (0, None, Vec::new());
            let each = &mut |index: usize, loss: &_, gradient: &[f32]| {
                given += 1;
                let gradient = match &rounding {
                    Some((rounding, batches)) => {
                        rounded.clear();
                        rounded.extend_from_slice(gradient);
                        rounding.round(&batches[index], 0, &mut rounded);
                        &rounded
                    }
                    None => gradient,
                };
                if bad.is_none() {
                    bad = taken.add(loss, gradient, cap).err().map(|refused| (index, refused));
                }
            };
            model.gradients(&mut || own.next(), each)?;
            let traffic = model.traffic().since(&before);
            Ok((taken, Added { given, bad, traffic, in_use: model.in_use() }))
        });
        let nothing = || Fault::Device { device: self.class.clone(), reason: "it gave no gradient".into() };
        let computed = computed.and_then(|computed| computed);
        let (taken, added) = computed.map_err(|fault| TrainError::Device { step, fault })?;
        *sums = taken;
        // The memory of several microbatches at the same time is not that of one.
        if let ([batch], 1) = (batches, self.together) {
            let seen = added.in_use.into_iter();
            seen.for_each(|seen| self.measured.memory.add(batch.ids.len() as f64, seen));
        }
        if added.given < batches.len() {
            return Err(TrainError::Device { step, fault: nothing() });
        }
        Ok(added.bad.map_or(Ok(added.traffic), Err))
    }

    /// Reports a bad value with its location, after a second computation of the microbatch: if the two results differ,
    /// the device is at fault, not the rows. `sums` is not valid afterwards.
    fn address(
        &mut self,
        bad: Refused,
        (index, batch): (usize, &Microbatch),
        cap: i64,
        sums: &mut Sums,
    ) -> TrainError {
        let place = self.class.clone();
        let again = self.add(batch.step, std::slice::from_ref(batch), cap, sums).ok();
        let again = again.map(|again| Again { place: place.clone(), bad: again.is_err() });
        TrainError::NonFinite {
            step: batch.step,
            microbatch: index,
            rows: batch.rows.clone(),
            tensor: bad.tensor(&self.layout),
            value: bad.value.value,
            finding: Box::new(Finding { class: place.clone(), place, again }),
        }
    }

    /// The result of an island with its transfers; the inner error is a bad value with what it is.
    fn island(&mut self, island: &Island, cap: i64) -> Result<IslandResult, Fault> {
        let (own, mut vectors, stop) = (island.clone(), self.start.clone(), self.stop);
        let mut compute = move |model: &mut dyn Model, go_on: &dyn Fn() -> bool| {
            let before = model.traffic();
            let scalars = own.compute(model, &mut vectors, (cap, go_on));
            (scalars.map(|scalars| (std::mem::take(&mut vectors), scalars)), model.traffic().since(&before))
        };
        let computed = match &mut self.place {
            Place::Here(model) => compute(*model, &|| stop.urgency() != Urgency::Now),
            Place::Apart(thread) => {
                let cancel = thread.cancel();
                thread.ask(stop, move |model| compute(model, &|| cancel.check().is_ok()))?
            }
        };
        match computed {
            (Ok((vectors, scalars)), traffic) => Ok(Ok((vectors, scalars, traffic))),
            (Err(island::Failed::Value { what, value }), _) => Ok(Err((what, value))),
            (Err(island::Failed::Fault(fault)), _) => Err(fault),
        }
    }

    /// Treats a fault during an immediate stop as an early return: only partial sums were lost.
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
        &self.layout
    }

    fn classes(&self) -> Vec<String> {
        vec![self.class.clone()]
    }

    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError> {
        let own = &flat[..self.layout.len()];
        if flat.len() > own.len() {
            self.start.clear();
            self.start.extend_from_slice(flat);
        }
        if let Some(delayed) = &mut self.delayed {
            delayed.swap(0, 1);
            let (newest, values) = &mut delayed[0];
            *newest = step;
            values.clear();
            values.extend_from_slice(own);
        }
        let set = self.place.here(|model| model.set_parameters(own)).and_then(|set| set);
        let set = set.and_then(|()| self.measure());
        self.unless_stopped(set.map_err(|fault| TrainError::Device { step, fault }))
    }

    fn gradients(
        &mut self,
        step: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        _: Say,
    ) -> Result<Option<Effort>, TrainError> {
        let back = self.step_back().map_err(|fault| TrainError::Device { step, fault });
        let Some(()) = self.unless_stopped(back)? else { return Ok(None) };
        let (cap, mut traffic) = (fixed::cap(work.len()), Traffic::default());
        sums.reset(self.layout.len());
        let (given, mut spans) = (Instant::now(), Vec::with_capacity(work.len()));
        let since = |at: Instant| at.duration_since(given).as_millis() as f64 / 1e3;
        for (nth, group) in work.chunks(self.together).enumerate() {
            if self.stopped() {
                return Ok(None);
            }
            let began = Instant::now();
            let added = self.add(step, group, cap, sums);
            let (mut from, ended) = (began, Instant::now());
            let tokens: f64 = group.iter().map(|batch| batch.ids.len() as f64).sum();
            for batch in group {
                let took = (ended - began).mul_f64(batch.ids.len() as f64 / tokens.max(1.0));
                spans.push((since(from), since(from + took)));
                self.measured.time.add(batch.ids.len() as f64, took.as_secs_f64());
                from += took;
            }
            match self.unless_stopped(added)? {
                None => return Ok(None),
                Some(Ok(moved)) => traffic.add(&moved),
                Some(Err((at, bad))) => {
                    return Err(self.address(bad, (nth * self.together + at, &group[at]), cap, sums));
                }
            }
        }
        let traffic = Some(traffic).filter(|t| t.submissions > 0);
        Ok(Some(Effort { shared: None, spans, traffic }))
    }

    fn islands(
        &mut self,
        last: u64,
        work: &[Island],
        sums: &mut Sums,
        _: Say,
    ) -> Result<Option<Effort>, TrainError> {
        let (cap, mut traffic) = (fixed::cap(work.len()), Traffic::default());
        sums.reset(self.start.len());
        let (given, mut spans) = (Instant::now(), Vec::with_capacity(work.len()));
        for (nth, island) in work.iter().enumerate() {
            if self.stopped() {
                return Ok(None);
            }
            let began = given.elapsed().as_secs_f64();
            let computed = self.island(island, cap);
            let ended = given.elapsed().as_secs_f64();
            spans.push((began, ended));
            match self.unless_stopped(computed.map_err(|fault| TrainError::Device { step: last, fault }))? {
                None => return Ok(None),
                Some(Ok((result, scalars, moved))) => {
                    sums.add_accepted(&result, scalars);
                    traffic.add(&moved);
                }
                Some(Err((what, value))) => {
                    let place = self.class.clone();
                    let again = self.island(island, cap).ok();
                    let again = again.map(|again| Again { place: place.clone(), bad: again.is_err() });
                    let finding = Box::new(Finding { class: place.clone(), place, again });
                    let (after, rows) = (island.after, island.rows());
                    return Err(TrainError::Island { after, last, island: nth, rows, what, value, finding });
                }
            }
        }
        let traffic = Some(traffic).filter(|t| t.submissions > 0);
        Ok(Some(Effort { shared: None, spans, traffic }))
    }

    fn losses(&mut self, step: u64, scoring: Scoring, _: Say) -> Result<Option<()>, TrainError> {
        let want = if scoring.predict { Want::Predictions } else { Want::Loss };
        for index in 0..scoring.count {
            if self.stopped() {
                return Ok(None);
            }
            let batch = (scoring.batch)(index);
            let own = batch.clone();
            let out = self.place.ask(self.stop, move |model| model.forward(&own, None, want));
            let out = out.and_then(|out| out).and_then(Output::loss);
            let out = out.map_err(|fault| TrainError::Device { step, fault });
            let Some(out) = self.unless_stopped(out)? else { return Ok(None) };
            (scoring.each)(index, &batch, &out)?;
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
        let made = match &mut self.place {
            Place::Here(model) => generate(*model, prompt, sampling, &mut |_| stop.urgency() != Urgency::Now),
            Place::Apart(thread) => {
                let (prompt, sampling, cancel) = (prompt.to_vec(), sampling.clone(), thread.cancel());
                let go_on = move |_| cancel.check().is_ok();
                let work = move |model: &mut dyn Model| generate(model, &prompt, &sampling, &mut { go_on });
                thread.ask(stop, work).and_then(|made| made)
            }
        };
        let made = self.unless_stopped(made.map_err(|fault: Fault| TrainError::Device { step, fault }))?;
        Ok(made.filter(|_| !self.stopped()))
    }

    fn speeds(&self, step: u64) -> Vec<Speed> {
        let Trials { time: points, memory } = self.measured;
        let Some(line) = points.line() else { return Vec::new() };
        let (class, device, trials) = (self.class.clone(), self.class.clone(), self.trials.1);
        let memory = Some(memory).filter(|used| used.fit().is_some());
        vec![Speed { step, worker: String::new(), device, class, line, points, trials, link: None, memory }]
    }
}
