//! The training loop. A step is: microbatches forward and backward, exact sums, one division, clip, AdamW, new
//! parameters. [`Compute`] hides the devices. The loop has no file format, device or terminal: all output is an event,
//! and all saved state goes through [`super::checkpoint`].

use super::best::Choice;
use super::checkpoint::{Journal, Saving, State};
use super::compute::{Compute, Effort, Say, Scoring};
use super::error::TrainError;
use super::eval::evaluate;
use super::event::{self, Event, Speed};
use super::island::{self, Island, Islands};
use super::optimizer_step::{self, Means, Stretch};
use super::schedule::Schedule;
use super::stop::{Stop, Urgency};
use super::sum::{Sums, THE_LOSS};
use super::work::Work;
use crate::model::stage::{LossSums, Microbatch, Sampling};
use std::time::Instant;

/// All inputs of a run.
pub struct Run<'a> {
    /// The source of gradients. Its parameters are set from `state` before any other call.
    pub compute: &'a mut dyn Compute,
    /// Rows and plan.
    pub work: &'a dyn Work,
    /// The initial state: [`State::new`], or the state of a checkpoint.
    pub state: State,
    /// What answers are compared with, where the work needs it.
    pub reference: Option<Reference<'a>>,
    /// The learning rate of every step.
    pub schedule: Schedule,
    /// How steps are divided among islands; `None`: every step is one of all microbatches.
    pub islands: Option<Islands>,
    /// Number of steps by which gradients are delayed, 0 or 1; `compute` must know it too. With 1 the gradient of step s is
    /// that of the parameters after step s - 2, and of the initial ones in the first two steps.
    pub delay: u64,
    /// Steps between evaluations, in addition to those at the start and at the end; 0 for only these two.
    pub eval_steps: u64,
    /// Decisions by evaluations: which adapter is kept, and whether the run ends early.
    pub choice: Choice,
    /// When and how checkpoints are written.
    pub saving: Saving<'a>,
    /// Prompts that are answered at the start, at the end and at every evaluation.
    pub sampler: Option<Sampler<'a>>,
    /// The stop flag, which signals raise.
    pub stop: &'a Stop,
    /// Class names of a classifier.
    pub labels: Vec<String>,
    /// Lines in the run's first event.
    pub notes: Vec<String>,
}

/// How prompts are answered during training.
pub struct Sampler<'a> {
    /// The prompts, in order.
    pub prompts: Vec<Asked>,
    /// How tokens are chosen; each prompt has its own maximum.
    pub sampling: Sampling,
    /// Converts tokens to text.
    pub decode: &'a dyn Fn(&[u32]) -> String,
}

/// The reference that scores answers before the first step.
pub struct Reference<'a> {
    /// Its parameters in the flat layout.
    pub parameters: Vec<f32>,
    /// Called once all answers are scored.
    pub keep: &'a dyn Fn(),
}

/// A prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The prompt as text.
    pub prompt: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Maximum tokens of the answer.
    pub most: usize,
    /// The right answer, for a row of the evaluation.
    pub expected: Option<String>,
}

/// How a run ended.
#[derive(Debug)]
pub struct Finished {
    /// True after the last step or an early stop; false if a signal ended the run and a checkpoint contains its state.
    pub complete: bool,
    /// The last state, with the parameters to export.
    pub state: State,
    /// The newest checkpoint.
    pub checkpoint: Option<std::path::PathBuf>,
    /// Wall time in seconds.
    pub seconds: f64,
}

/// Trains from `run.state` to the end of the plan, or until a signal. Each event is passed to `events` when it happens;
/// the caller sends [`Event::Done`], because it knows the path of the adapter.
pub fn run(mut run: Run, events: &mut dyn FnMut(&Event)) -> Result<Finished, TrainError> {
    if let Some(islands) = run.islands.filter(|_| run.state.velocity.is_empty()) {
        run.state.velocity = islands.outer.velocity(run.state.parameters.len());
    }
    if run.delay > 0 && run.state.before.is_empty() {
        run.state.before = run.state.parameters.clone();
    }
    std::thread::scope(|scope| {
        let (saving, layout) = (&run.saving, run.compute.layout());
        let place = (saving.output.as_path(), &saving.identity);
        let journal = Journal::start(scope, place, (layout, &run.state), run.work.steps_per_epoch());
        journalled(run, journal, events)
    })
}

fn journalled(
    run: Run,
    journal: Option<Journal>,
    events: &mut dyn FnMut(&Event),
) -> Result<Finished, TrainError> {
    let began = Instant::now();
    let mut trainer = Trainer { sums: Sums::default(), run, journal, events };
    let outcome = trainer.all_steps();
    if let Err(error) = &outcome {
        if matches!(error.exit_code(), 3 | 75) && trainer.run.state.step > 0 {
            // The state is saved so that the run can be resumed. If saving fails too, the reason of the halt is still
            // the one to report.
            let _ = trainer.checkpoint();
        }
        let (step, code) = (trainer.run.state.step, error.exit_code());
        let halt = event::Halt { step, code, reason: error.to_string() };
        (trainer.events)(&Event::Fault(halt));
    }
    if let Some(journal) = trainer.journal.take() {
        journal.end(trainer.run.saving.safe());
    }
    let complete = outcome?;
    let Run { state, saving, .. } = trainer.run;
    Ok(Finished { complete, checkpoint: saving.newest(), state, seconds: began.elapsed().as_secs_f64() })
}

/// Scores answers that are not known yet with the parameters of the reference, which stay set. Returns the number of
/// answers; `None` if a signal ended it.
pub fn refer(
    compute: &mut dyn Compute,
    work: &dyn Work,
    (step, reference): (u64, &[f32]),
    say: Say,
) -> Result<Option<u64>, TrainError> {
    let (count, mut answers) = (work.unscored(), 0);
    let Some(()) = compute.set_parameters(step, reference)? else { return Ok(None) };
    let mut each = |index, batch: &Microbatch, sums: &LossSums| {
        answers += sums.rows.len() as u64;
        work.scored(index, &sums.rows);
        match sums.rows.iter().find(|row| !row.is_finite()) {
            None => Ok(()),
            Some(&value) => Err(TrainError::Evaluation {
                step,
                rows: batch.rows.clone(),
                tensor: THE_LOSS.into(),
                value,
                finding: None,
            }),
        }
    };
    let predict = false;
    let scoring = Scoring { count, predict, batch: &|index| work.unscored_at(index, step), each: &mut each };
    Ok(compute.losses(step, scoring, say)?.map(|()| answers))
}

/// The result of setting the model's parameters after a step; `None` if a signal ended the call.
type Handed = Result<Option<()>, TrainError>;

struct Trainer<'a, 'e> {
    run: Run<'a>,
    events: &'e mut dyn FnMut(&Event),
    sums: Sums,
    journal: Option<Journal<'e>>,
}

/// Whether the device has computed a microbatch of the run. Trials are reported when the device joins.
fn worked(speed: &Speed) -> bool {
    speed.points.n > speed.trials as f64
}

impl Trainer<'_, '_> {
    /// Returns true if no step is left, false if a signal came first.
    fn all_steps(&mut self) -> Result<bool, TrainError> {
        self.say(Event::Run(self.start()));
        let first = self.run.state.step + 1;
        let Some(()) = self.refer()? else { return self.ended() };
        let Some(()) = self.hand_over_before()? else { return self.ended() };
        let Some(()) = self.hand_over()? else { return self.ended() };
        self.measured(|_| true);
        self.run.state.best = self.run.choice.recall(self.run.state.best);
        if let Some(best) = self.run.state.best {
            self.say(Event::Best(best));
        }
        self.look()?;
        while !self.finished() && self.run.stop.urgency() == Urgency::Run {
            let taken = match self.run.islands {
                None => self.one_step(self.run.state.step + 1)?,
                Some(islands) => self.one_exchange(islands)?,
            };
            let Some((done, handed_over)) = taken else { break };
            let taken = done.step + 1 - first;
            self.say(Event::Step(done));
            let Some(()) = handed_over? else { break };
            // Reports more often at first, while few measurements exist, then less and less.
            if taken >= 8 && taken.is_power_of_two() {
                self.measured(worked);
            }
            self.look()?;
            self.keep()?;
            self.journal();
        }
        self.ended()
    }

    /// Scores answers with the parameters of the reference, where they are not known yet.
    fn refer(&mut self) -> Result<Option<()>, TrainError> {
        let Trainer { run: Run { compute, work, state, reference, islands, .. }, events, .. } = self;
        let (step, began) = (state.step, Instant::now());
        let Some(mut reference) = reference.take().filter(|_| work.unscored() > 0) else {
            return Ok(Some(()));
        };
        if islands.is_some() {
            // What travels has moments, which no score depends on.
            reference.parameters.resize(island::VECTORS * state.parameters.len(), 0.0);
        }
        let scored = refer(*compute, *work, (step, &reference.parameters), &mut |event| events(&event))?;
        let Some(answers) = scored else { return Ok(None) };
        (reference.keep)();
        let seconds = began.elapsed().as_secs_f64();
        let reason = format!("the reference scored {answers} answers in {seconds:.1} s");
        self.note(reason);
        Ok(Some(()))
    }

    /// True if no step is left: the last one was taken, or early stopping applies.
    fn finished(&self) -> bool {
        let Run { state, work, choice, .. } = &self.run;
        state.step >= work.total_steps() || choice.ends(state.best)
    }

    /// Saves the state after the loop and returns true if no step is left; a stopped run without any step saves
    /// nothing.
    fn ended(&mut self) -> Result<bool, TrainError> {
        self.measured(worked);
        let stopped = self.run.stop.urgency();
        let complete = self.finished() && stopped != Urgency::Now;
        if complete || (stopped != Urgency::Run && self.run.state.step > 0) {
            self.checkpoint()?;
        }
        let step = self.run.state.step;
        if let Some(best) = self.run.state.best.filter(|_| complete && step < self.run.work.total_steps()) {
            self.say(Event::Early(event::Early { step, evals: best.since }));
        }
        Ok(complete)
    }

    /// One optimizer step, and the result of setting the new parameters; None if a signal ended it and its partial sums
    /// are dropped.
    fn one_step(&mut self, step: u64) -> Result<Option<(event::Step, Handed)>, TrainError> {
        let began = Instant::now();
        let microbatches = self.run.work.step(step);
        self.announce_ahead(step);
        let Trainer { run, events, sums, .. } = self;
        let taken = run.compute.gradients(step, &microbatches, sums, &mut |event| events(&event))?;
        let Some(effort) = taken else { return Ok(None) };
        let Means { loss, grad_norm } = Means::of(sums);
        let lr = run.schedule.rate(step);
        let before = (run.delay > 0).then(|| run.state.parameters.clone());
        self.update(step, grad_norm, lr)?;
        if let Some(before) = before {
            self.run.state.before = before;
        }
        let handed_over = self.hand_over();
        let tokens = microbatches.iter().map(|batch| batch.ids.len() as u64).sum();
        Ok(Some((self.done((loss, grad_norm, lr), tokens, began, effort), handed_over)))
    }

    /// Lets the step after this one begin before this one is complete, unless something else is computed between them.
    fn announce_ahead(&mut self, step: u64) {
        let looks = self.run.work.eval_len() > 0 || self.run.sampler.is_some();
        let is_between = step == self.run.work.total_steps() || looks && self.looks_after(step);
        if self.run.delay > 0 && !is_between {
            self.run.compute.ahead(self.run.work.step(step + 1));
        }
    }

    /// The next steps on all islands, up to the exchange of their results; as [`Self::one_step`].
    fn one_exchange(&mut self, islands: Islands) -> Result<Option<(event::Step, Handed)>, TrainError> {
        let began = Instant::now();
        let Trainer { run, events, sums, .. } = self;
        let first = run.state.step + 1;
        let last = run.work.total_steps().min(run.state.step + islands.inner);
        let steps = (first..=last).map(|step| (run.schedule.rate(step), run.work.step(step))).collect();
        let optimizer = (*run.state.optimizer.options(), run.state.optimizer.step);
        let work = island::divide(steps, islands.count, optimizer);
        let taken = run.compute.islands(last, &work, sums, &mut |event| events(&event))?;
        let Some(effort) = taken else { return Ok(None) };
        let change = island::merge(&mut run.state, sums, (islands, last + 1 - first));
        let handed_over = self.hand_over();
        let means = (self.sums.mean_loss(), change, self.run.schedule.rate(last));
        let tokens = work.iter().map(Island::tokens).sum();
        Ok(Some((self.done(means, tokens, began, effort), handed_over)))
    }

    /// Where steps are delayed, sets the parameters that the next step is computed with, unless they are those of the
    /// state.
    fn hand_over_before(&mut self) -> Handed {
        let Run { compute, state, delay, .. } = &mut self.run;
        if *delay == 0 || state.step == 0 {
            return Ok(Some(()));
        }
        compute.set_parameters(state.step - 1, &state.before)
    }

    /// Sets the parameters of the state, and the moments that islands begin with.
    fn hand_over(&mut self) -> Handed {
        let Run { compute, state, islands, .. } = &mut self.run;
        match islands {
            None => compute.set_parameters(state.step, &state.parameters),
            Some(_) => compute.set_parameters(state.step, &island::vectors(state)),
        }
    }

    /// The event of the step that the state is after.
    fn done(
        &self,
        (loss, grad_norm, lr): (f64, f64, f64),
        total_tokens: u64,
        began: Instant,
        effort: Effort,
    ) -> event::Step {
        let (step, rewards) = (self.run.state.step, self.sums.scalars().rewards);
        let Effort { shared, spans, traffic } = effort;
        event::Step {
            step,
            loss,
            grad_norm,
            lr,
            rewards: rewards.means(),
            accuracy: rewards.accuracy(),
            tokens: self.sums.targets,
            total_tokens,
            seconds: began.elapsed().as_secs_f64(),
            epoch: step as f64 / self.run.work.steps_per_epoch().max(1) as f64,
            shared,
            spans,
            traffic,
            memory: None,
        }
    }
}

/// The parts of the loop that surround a step.
impl Trainer<'_, '_> {
    fn start(&self) -> event::RunStart {
        let Run { work, compute, state, labels, notes, .. } = &self.run;
        let mut classes = state.classes.clone();
        // The current classes are last, even if they also computed earlier.
        for class in compute.classes() {
            classes.retain(|known| *known != class);
            classes.push(class);
        }
        let mut notes = notes.clone();
        // A coordinator has no devices yet and reports classes as devices join.
        if classes.len() > 1 && !compute.classes().is_empty() {
            notes.push(event::mixed(&classes));
        }
        event::RunStart {
            total_steps: work.total_steps(),
            steps_per_epoch: work.steps_per_epoch(),
            first_step: state.step + 1,
            rows: work.rows(),
            eval_rows: work.eval_rows(),
            parameters: state.parameters.len() as u64,
            classes,
            labels: labels.clone(),
            notes,
        }
    }

    /// Reports the measured costs of the devices that `worth` selects.
    fn measured(&mut self, worth: impl Fn(&Speed) -> bool) {
        let speeds = self.run.compute.speeds(self.run.state.step).into_iter();
        for speed in speeds.filter(worth).collect::<Vec<_>>() {
            self.say(Event::Speed(speed));
        }
    }

    fn say(&mut self, event: Event) {
        self.run.state.remember(&event, self.run.work.steps_per_epoch());
        (self.events)(&event);
    }

    /// Updates parameters and moments together, and only if every parameter is finite; otherwise the state is
    /// unchanged.
    fn update(&mut self, step: u64, grad_norm: f64, lr: f64) -> Result<(), TrainError> {
        let Trainer { run: Run { state, compute, .. }, sums, .. } = self;
        let places = compute.layout().places();
        let mut ahead = |stretch: Stretch| compute.parameters_ahead(step, stretch);
        let updated = optimizer_step::update(state, sums, (grad_norm, lr), &places, &mut ahead);
        updated.map_err(|(index, value)| {
            let tensor = compute.layout().name_at(index);
            TrainError::Update { step, tensor, value: f64::from(value) }
        })
    }

    /// Answers the prompts and evaluates, if due and not already done before a resume. A run that was asked to end
    /// leaves this to the resumed run, unless the last step was taken.
    fn look(&mut self) -> Result<(), TrainError> {
        let step = self.run.state.step;
        let due = self.looks_after(step);
        let wanted = match self.run.stop.urgency() {
            Urgency::Run => true,
            Urgency::AfterStep => step == self.run.work.total_steps(),
            Urgency::Now => false,
        };
        if !due || !wanted || self.run.state.looked == Some(step) {
            return Ok(());
        }
        let Some(()) = self.answer(step)? else { return Ok(()) };
        if self.run.work.eval_len() > 0 {
            let Trainer { run, events, .. } = self;
            let scored = evaluate(&mut *run.compute, run.work, step, &mut |event| events(&event))?;
            let Some(eval) = scored else { return Ok(()) };
            let best = self.run.choice.judge(self.run.state.best, &eval);
            self.say(Event::Eval(eval));
            self.run.state.best = best;
        }
        self.run.state.looked = Some(step);
        let Some(best) = self.run.state.best.filter(|best| best.step == step) else { return Ok(()) };
        self.say(Event::Best(best));
        if best.kept { self.checkpoint() } else { Ok(()) }
    }

    /// Whether prompts and evaluation are due after a step.
    fn looks_after(&self, step: u64) -> bool {
        step == 0 || step == self.run.work.total_steps() || self.passed(step, self.run.eval_steps)
    }

    /// Whether the steps up to this one, since the last event, hold a multiple of `every`; 0 has none.
    fn passed(&self, step: u64, every: u64) -> bool {
        let taken = self.run.islands.map_or(1, |islands| islands.inner);
        every > 0 && step / every > step.saturating_sub(taken) / every
    }

    /// Answers all prompts; None if a signal ended it.
    fn answer(&mut self, step: u64) -> Result<Option<()>, TrainError> {
        let Trainer { run: Run { compute, sampler: Some(sampler), .. }, events, .. } = self else {
            return Ok(Some(()));
        };
        for asked in &sampler.prompts {
            let sampling = Sampling { max_new_tokens: asked.most, ..sampler.sampling.clone() };
            let made = compute.answer(step, &asked.ids, &sampling, &mut |event| events(&event))?;
            let Some(made) = made else { return Ok(None) };
            let text = (sampler.decode)(&made);
            let (prompt, expected) = (asked.prompt.clone(), asked.expected.clone());
            let right = expected.as_ref().map(|expected| expected.trim() == text.trim());
            events(&Event::Sample(event::Sample { step, prompt, text, expected, right }));
        }
        Ok(Some(()))
    }

    /// Writes a checkpoint if one is due or was requested.
    fn keep(&mut self) -> Result<(), TrainError> {
        let asked = self.run.stop.take_checkpoint();
        let due = asked || self.passed(self.run.state.step, self.run.saving.every);
        if due { self.checkpoint() } else { Ok(()) }
    }

    /// Gives the state to the journal, if it is time and no checkpoint contains it.
    fn journal(&mut self) {
        let Some(journal) = &self.journal else { return };
        match journal.is_due() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.note(format!("the step journal ends: {error}")),
        }
        let saved = self.run.saving.last.as_ref().is_some_and(|(step, _)| *step == self.run.state.step);
        if saved || self.finished() || !(self.run.saving.stands)() {
            return;
        }
        let state = State { classes: self.start().classes, ..self.run.state.clone() };
        journal.take(state);
    }

    /// Tells the user something that is no result.
    fn note(&mut self, reason: String) {
        let (what, worker, devices) = (event::What::Note, String::new(), Vec::new());
        let step = self.run.state.step;
        self.say(Event::Device(event::Change { step, what, worker, devices, reason }));
    }

    /// Writes a checkpoint of the last finished step, unless it exists.
    fn checkpoint(&mut self) -> Result<(), TrainError> {
        self.run.state.classes = self.start().classes;
        if let Some(path) = self.run.saving.write(&self.run.state, self.run.work.steps_per_epoch())? {
            self.say(Event::Checkpoint(event::Saved { step: self.run.state.step, path }));
        }
        Ok(())
    }
}
