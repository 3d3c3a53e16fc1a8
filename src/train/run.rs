//! The loop. A step is: microbatches forward and backward, exact sums, one division, clip, AdamW, new
//! parameters. It knows no file format, no device and no terminal: everything that is to be shown is an event,
//! and everything that is to be kept goes through [`super::checkpoint`].

use super::checkpoint::{Saving, State};
use super::error::TrainError;
use super::eval::{evaluate, loss_of};
use super::event::{self, Event};
use super::optim;
use super::schedule::Schedule;
use super::stop::{Stop, Urgency};
use super::sum::{Mean, Sums};
use super::work::Work;
use crate::model::stage::{Microbatch, Model, Sampling, Want};
use crate::numeric::fixed::{self, BadValue};
use std::time::Instant;

/// All that a run needs.
pub struct Run<'a> {
    /// The whole model. Its parameters are set from `state` before anything else.
    pub model: &'a mut dyn Model,
    /// Rows and plan.
    pub work: &'a dyn Work,
    /// Where it begins: [`State::new`], or what a checkpoint held.
    pub state: State,
    /// The rate of every step.
    pub schedule: Schedule,
    /// An evaluation every so many steps besides the ones at the start and at the end; 0 for those alone.
    pub eval_steps: u64,
    /// When and how checkpoints are written.
    pub saving: Saving<'a>,
    /// Prompts that are answered before and after, and at every evaluation.
    pub sampler: Option<Sampler<'a>>,
    /// Raised by signals.
    pub stop: &'a Stop,
    /// Lines to be shown with the run's first event.
    pub notes: Vec<String>,
}

/// How prompts are answered during training.
pub struct Sampler<'a> {
    /// The prompt as it was typed, and its tokens.
    pub prompts: Vec<(String, Vec<u32>)>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to text.
    pub decode: &'a dyn Fn(&[u32]) -> String,
}

/// How a run ended.
#[derive(Debug)]
pub struct Finished {
    /// True when the last step was taken; false where a signal ended the run and a checkpoint holds its state.
    pub complete: bool,
    /// The last state: its parameters are what is to be exported.
    pub state: State,
    /// The newest checkpoint.
    pub checkpoint: Option<std::path::PathBuf>,
    /// Wall time.
    pub seconds: f64,
}

/// Trains from `run.state` to the end of the plan, or to a signal. Every event is given to `events` as it
/// happens; [`Event::Done`] is left to the caller, who knows where the adapter lies.
pub fn run(run: Run, events: &mut dyn FnMut(&Event)) -> Result<Finished, TrainError> {
    let began = Instant::now();
    let mut trainer =
        Trainer { sums: Sums::new(0), gradient: vec![0.0; run.state.parameters.len()], run, events };
    let outcome = trainer.all_steps();
    if let Err(error) = &outcome {
        if error.exit_code() == 3 && trainer.run.state.step > 0 {
            // What stands is saved, so that the run can go on from there. Should that fail too, the reason of
            // the halt is still what there is to say.
            let _ = trainer.checkpoint();
        }
        let halt = event::Halt { step: trainer.run.state.step, reason: error.to_string() };
        (trainer.events)(&Event::Fault(halt));
    }
    let complete = outcome?;
    let Run { state, saving, .. } = trainer.run;
    Ok(Finished { complete, checkpoint: saving.newest(), state, seconds: began.elapsed().as_secs_f64() })
}

struct Trainer<'a, 'e> {
    run: Run<'a>,
    events: &'e mut dyn FnMut(&Event),
    sums: Sums,
    gradient: Vec<f32>,
}

impl Trainer<'_, '_> {
    /// True when the plan's last step was taken, false when a signal came first.
    fn all_steps(&mut self) -> Result<bool, TrainError> {
        let total = self.run.work.total_steps();
        self.say(Event::Run(self.start()));
        let parameters = &self.run.state.parameters;
        self.run.model.set_parameters(parameters).map_err(|fault| TrainError::Device { step: 0, fault })?;
        self.look()?;
        while self.run.state.step < total && self.run.stop.urgency() == Urgency::Run {
            let taken = self.one_step(self.run.state.step + 1);
            let Some(done) = self.unless_stopped(taken)? else { break };
            self.say(Event::Step(done));
            self.look()?;
            self.keep()?;
        }
        let stopped = self.run.stop.urgency();
        let complete = self.run.state.step == total && stopped != Urgency::Now;
        if complete || stopped != Urgency::Run {
            self.checkpoint()?;
        }
        Ok(complete)
    }

    /// One optimizer step; None where a signal ended it, and its partial sums are dropped.
    fn one_step(&mut self, step: u64) -> Result<Option<event::Step>, TrainError> {
        let began = Instant::now();
        let microbatches = self.run.work.step(step);
        let cap = fixed::cap(microbatches.len());
        self.sums.reset(self.gradient.len());
        for (index, batch) in microbatches.iter().enumerate() {
            if self.run.stop.urgency() == Urgency::Now {
                return Ok(None);
            }
            let loss = loss_of(self.run.model.forward(batch, None, Want::Gradient), step)?;
            self.sums.add_loss(&loss).map_err(|bad| self.address(bad, index, batch, None))?;
            let backward = self.run.model.backward(None, &mut self.gradient);
            backward.map_err(|fault| TrainError::Device { step, fault })?;
            let added = self.sums.add_gradient(&self.gradient, cap);
            added.map_err(|bad| self.address(bad, index, batch, Some(bad.index)))?;
        }
        let Mean { loss, mut gradient } = self.sums.mean();
        let lr = self.run.schedule.rate(step);
        let grad_norm = optim::norm(&gradient);
        optim::clip(&mut gradient, grad_norm, self.run.state.optimizer.options().max_grad_norm);
        self.update(step, &gradient, lr)?;
        Ok(Some(event::Step {
            step,
            loss,
            grad_norm,
            lr,
            tokens: self.sums.targets,
            total_tokens: microbatches.iter().map(|batch| batch.ids.len() as u64).sum(),
            seconds: began.elapsed().as_secs_f64(),
            epoch: step as f64 / self.run.work.steps_per_epoch().max(1) as f64,
        }))
    }
}

/// The rim of the loop: what surrounds a step.
impl Trainer<'_, '_> {
    fn start(&self) -> event::RunStart {
        let Run { work, model, state, notes, .. } = &self.run;
        let mut classes = state.classes.clone();
        classes.extend([model.class()]);
        classes.dedup();
        event::RunStart {
            total_steps: work.total_steps(),
            steps_per_epoch: work.steps_per_epoch(),
            first_step: state.step + 1,
            rows: work.rows(),
            eval_rows: work.eval_rows(),
            parameters: state.parameters.len() as u64,
            classes,
            notes: notes.clone(),
        }
    }

    /// A fault while the run is to stop now is how [`super::OwnThread`] returns early: nothing was lost but
    /// partial sums.
    fn unless_stopped<T>(&self, taken: Result<Option<T>, TrainError>) -> Result<Option<T>, TrainError> {
        match taken {
            Err(TrainError::Device { .. }) if self.run.stop.urgency() == Urgency::Now => Ok(None),
            other => other,
        }
    }

    fn say(&mut self, event: Event) {
        self.run.state.remember(&event, self.run.work.steps_per_epoch());
        (self.events)(&event);
    }

    /// New parameters and moments, taken over together, and only if every parameter is finite and the model has
    /// them: whatever fails, the state stays that of the last finished step.
    fn update(&mut self, step: u64, gradient: &[f32], lr: f64) -> Result<(), TrainError> {
        let state = &mut self.run.state;
        let (mut next, mut optimizer) = (state.parameters.clone(), state.optimizer.clone());
        optimizer.update(&mut next, gradient, lr);
        if let Some(index) = next.iter().position(|p| !p.is_finite()) {
            let tensor = tensor(&*self.run.model, index);
            return Err(TrainError::Update { step, tensor, value: f64::from(next[index]) });
        }
        self.run.model.set_parameters(&next).map_err(|fault| TrainError::Device { step, fault })?;
        (state.parameters, state.optimizer, state.step) = (next, optimizer, step);
        Ok(())
    }

    /// Evaluates and answers the prompts, where that is due and was not done before a resume. A run that was
    /// asked to end leaves it to the one that goes on; after the last step there is none.
    fn look(&mut self) -> Result<(), TrainError> {
        let step = self.run.state.step;
        let every = self.run.eval_steps;
        let due =
            step == 0 || step == self.run.work.total_steps() || (every > 0 && step.is_multiple_of(every));
        let wanted = match self.run.stop.urgency() {
            Urgency::Run => true,
            Urgency::AfterStep => step == self.run.work.total_steps(),
            Urgency::Now => false,
        };
        if !due || !wanted || self.run.state.looked == Some(step) {
            return Ok(());
        }
        let answered = self.answer(step);
        let Some(()) = self.unless_stopped(answered)? else { return Ok(()) };
        if self.run.work.eval_len() > 0 {
            let Run { model, work, stop, .. } = &mut self.run;
            let scored = evaluate(&mut **model, *work, step, stop);
            let Some(eval) = self.unless_stopped(scored)? else { return Ok(()) };
            self.say(Event::Eval(eval));
        }
        self.run.state.looked = Some(step);
        Ok(())
    }

    /// Answers every prompt; None where a signal ended it.
    fn answer(&mut self, step: u64) -> Result<Option<()>, TrainError> {
        let Run { model, stop, sampler: Some(sampler), .. } = &mut self.run else { return Ok(Some(())) };
        for (prompt, ids) in &sampler.prompts {
            let made = model.generate(ids, &sampler.sampling, &mut |_| stop.urgency() != Urgency::Now);
            let made = made.map_err(|fault| TrainError::Device { step, fault })?;
            if stop.urgency() == Urgency::Now {
                return Ok(None);
            }
            let text = (sampler.decode)(&made);
            (self.events)(&Event::Sample(event::Sample { step, prompt: prompt.clone(), text }));
        }
        Ok(Some(()))
    }

    /// Writes a checkpoint where one is due or was asked for.
    fn keep(&mut self) -> Result<(), TrainError> {
        let asked = self.run.stop.take_checkpoint();
        let every = self.run.saving.every;
        if asked || (every > 0 && self.run.state.step.is_multiple_of(every)) {
            self.checkpoint()
        } else {
            Ok(())
        }
    }

    /// Writes a checkpoint of the last finished step, unless there is one.
    fn checkpoint(&mut self) -> Result<(), TrainError> {
        self.run.state.classes = self.start().classes;
        if let Some(path) = self.run.saving.write(&self.run.state, self.run.work.steps_per_epoch())? {
            self.say(Event::Checkpoint(event::Saved { step: self.run.state.step, path }));
        }
        Ok(())
    }

    /// A bad value with its address.
    fn address(&self, bad: BadValue, index: usize, batch: &Microbatch, at: Option<usize>) -> TrainError {
        TrainError::NonFinite {
            step: batch.step,
            microbatch: index,
            rows: batch.rows.clone(),
            tensor: at.map_or_else(
                || "the loss".into(),
                |i| format!("the gradient of {}", tensor(&*self.run.model, i)),
            ),
            value: bad.value,
        }
    }
}

fn tensor(model: &dyn Model, index: usize) -> String {
    model.layout().at(index).map_or_else(|| format!("value {index}"), |entry| entry.name.clone())
}
