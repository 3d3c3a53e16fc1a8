//! A training run from its options to its end, on any team: its initial state, folder, events and adapter. The order is
//! guaranteed: all checks are made before a folder is created; the folder is kept from the first step on; the adapter
//! is read back before the run is reported as done.

mod best;
mod expect;
mod facts;
mod reference;
pub mod samples;
mod team;

pub use expect::need;
pub use team::Team;

use super::adapter::{self, Writer};
use super::base_model::BaseModel;
use super::folder::{Claim, RUN_FILE, RunFolder};
use super::prepare::Prepared;
use super::run_file::RunFile;
use super::signals;
use super::watch::Watch;
use crate::cluster::coordinator::Hint;
use crate::config::Settings;
use crate::config::groups::{
    ClusterOptions, ComputeDtype, DataOptions, DeviceOptions, OptimOptions, Options, Role,
};
use crate::config::refusal::{Kind, Refusal};
use crate::data::Task;
use crate::data::plan::Plan;
use crate::data::tokenizer::Skip;
use crate::forecast::counts::Counts;
use crate::forecast::recorder::Recorder;
use crate::forecast::time::Workload;
use crate::model::decoder::initial_parameters;
use crate::model::quantised::Recipe;
use crate::model::wire::Wire;
use crate::report::{Live, Look};
use crate::support::plural::count;
use crate::support::stderr::say;
use crate::train::checkpoint::{DELAY, Identity, OUTER_MOMENTUM, Saving, State};
use crate::train::event::{Done, Event, Halt};
use crate::train::island::{Islands, Outer};
use crate::train::schedule::Schedule;
use crate::train::{self, Batches, Compute, Finished, Known, Run, TrainError, Work, optim};
use reference::Reference;
use std::cell::{OnceCell, RefCell};
use std::path::{Path, PathBuf};

/// A checked run, ready to begin.
pub struct Job {
    /// Model and rows.
    pub prepared: Prepared,
    plan: Plan,
    /// The adapter's names and shapes.
    pub writer: Writer,
    /// Learning rates and the number of steps.
    pub schedule: Schedule,
    identity: Identity,
    optim: optim::Options,
    /// blake3 of the model.
    pub model_hash: String,
    state: State,
    reference: Option<Reference>,
    /// The checkpoint that the run continues from.
    from: Option<PathBuf>,
    /// The remaining work, once it has been counted.
    ahead: OnceCell<(Counts, Workload)>,
    /// The events of the run so far, for the model card.
    history: Live,
}

fn optimizer(o: &OptimOptions) -> optim::Options {
    optim::Options {
        beta1: o.betas[0],
        beta2: o.betas[1],
        eps: o.epsilon,
        weight_decay: o.weight_decay,
        max_grad_norm: o.max_grad_norm,
        ratio_of_b: o.ratio_of_b,
        update_bits: o.update_bits,
    }
}

/// The type of numbers between workers, with the division that decides where they are rounded. A process alone rounds
/// nothing.
fn wire(o: &ClusterOptions) -> Option<String> {
    let rounds = o.wire == Wire::Bf16 && o.role == Role::Coordinator;
    let stages = o.stages.as_ref().filter(|_| rounds)?;
    Some(format!("bf16 (--stages {stages})"))
}

/// Refuses islands without work.
pub fn enough_microbatches(o: &OptimOptions, plan: &Plan) -> Result<(), Refusal> {
    let Some(count) = o.islands.map(|islands| islands.count) else { return Ok(()) };
    let have = plan.step(1).microbatches.len();
    if have >= count {
        return Ok(());
    }
    Err(Refusal::configuration(format!(
        "--islands: each of {count} islands needs a microbatch of every step, and the first step has {have}: use fewer \
         islands, a larger --batch-size, or a smaller --micro-batch-tokens"
    )))
}

/// Adds islands, and their outer optimizer where it is not the mean.
fn with_islands(identity: Identity, islands: &Islands) -> Identity {
    let Outer { rate, momentum } = islands.outer;
    identity
        .with("islands", format!("{}, of {} steps", islands.count, islands.inner))
        .with_some("outer_learning_rate", Some(rate).filter(|rate| *rate != Outer::MEAN.rate))
        .with_some(OUTER_MOMENTUM, Some(momentum).filter(|momentum| *momentum > 0.0))
}

/// The type of products that was typed. Without one every device chooses its own.
fn typed_dtype(o: &DeviceOptions) -> Option<String> {
    let dtype = Some(o.dtype).filter(|dtype| *dtype != ComputeDtype::Auto);
    dtype.map(|dtype| format!("{dtype:?}").to_lowercase())
}

/// The task of a run whose head does not classify rows, as part of its identity.
fn task_of_head(data: &DataOptions) -> Option<&'static str> {
    match data.task {
        Task::Regress => Some("regression"),
        Task::Reward => Some("reward"),
        Task::Tag => Some("token-classification"),
        _ => None,
    }
}

impl Job {
    /// Builds the run from its options.
    pub fn new(mut prepared: Prepared, plan: Plan, options: &Options) -> Result<Self, Refusal> {
        let o = &options.optim;
        let schedule = schedule(o, plan.total_steps())?;
        enough_microbatches(o, &plan)?;
        let (optim, model_hash, p) = (optimizer(o), prepared.model_hash()?, &prepared);
        let writer = Writer::new(&p.base, &p.config, &p.spec, options.model.base_id.as_deref());
        let parameters = match &options.lora.init_adapter {
            Some(dir) => adapter::read_flat(dir, &writer.layout)?,
            None => initial_parameters(&writer.layout, &p.spec, &*p.base.files.tensors)?,
        };
        let weights = options.data.class_weights.as_ref().map(|w| format!("{w:?}")).unwrap_or_default();
        let identity = Identity::new(&schedule, &optim, &writer.layout)
            .with("model", &model_hash)
            .with("data", &p.train.hash)
            .with("rank", p.spec.rank)
            .with("target_modules", p.spec.modules().join(" "))
            .with_some("adapters", p.spec.exceptions_in_short())
            .with("alpha", p.spec.alpha)
            .with("rslora", p.spec.rslora)
            .with("dropout", p.spec.dropout)
            .with("seed", o.seed)
            .with("batch_size", o.batch_size)
            .with("micro_batch_tokens", plan.micro_batch_tokens())
            .with("packing", options.data.packing)
            .with("no_shuffle", !options.data.shuffle)
            .with("class_weights", weights)
            .with_some("task", task_of_head(&options.data))
            .with_some("center_rewards_coefficient", Some(options.data.centre).filter(|centre| *centre > 0.0))
            .with_some("mixture", mixture(p, options))
            .with_some("dtype", typed_dtype(&options.devices))
            .with_some("sum_bits", Some(o.sum_bits).filter(|bits| *bits > 0))
            .with_some(DELAY, Some(o.delay).filter(|delay| *delay > 0))
            .with_some("learn", options.data.learn.unusual())
            .with_some("wire", wire(&options.cluster))
            .with_some("quantize", options.model.quantize.map(Recipe::name))
            .with_some("added_tokens", added_tokens(&p.base))
            .with_some("best_metric", p.eval_sets.first().map(|(set, _)| set))
            .with_some("eval_data", p.eval.as_ref().map(|eval| &eval.hash));
        let reference = Reference::new(p, &writer, &model_hash, options)?;
        let identity = o.islands.iter().fold(identity, with_islands);
        let identity = reference.iter().fold(identity, |identity, reference| reference.identify(identity));
        let (state, from, ahead) = (State::new(parameters, optim), None, OnceCell::new());
        let job = Job {
            prepared,
            plan,
            writer,
            schedule,
            identity,
            optim,
            model_hash,
            state,
            reference,
            from,
            ahead,
            history: Live::default(),
        };
        // An invalid prompt is refused before a folder is created.
        job.sampler(options, &|_| String::new())?;
        Ok(job)
    }

    /// Loads the state of the checkpoint for --resume, where there is one.
    pub fn resume(&mut self, place: &RunFolder) -> Result<(), Refusal> {
        place.recover()?;
        let Some(checkpoint) = place.checkpoint()? else { return Ok(()) };
        checkpoint.passed_over.iter().for_each(|line| say!("warning: {line}"));
        self.state = checkpoint.load(&self.writer.layout, self.optim, &self.identity)?;
        let (step, total) = (self.state.step, self.schedule.total);
        if step > total {
            let path = checkpoint.path.display();
            let why = format!("is of step {step}, beyond the {total} steps of the run");
            return Err(Refusal::failure(format!("{path}: {why}: remove it to go on from the one before")));
        }
        self.ahead.take();
        self.find_best(&checkpoint.path);
        self.from = Some(checkpoint.path);
        Ok(())
    }

    /// Numeric classes that computed before a resume.
    pub fn classes(&self) -> &[String] {
        &self.state.classes
    }

    /// The values that determine the run's numbers, by name.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Input of the hint about steps with few microbatches.
    pub fn hint(&self, options: &Options) -> Hint {
        let micro_batch_tokens = self.plan.micro_batch_tokens();
        let islands = options.optim.islands.is_some();
        Hint { batch_size: options.optim.batch_size, micro_batch_tokens, islands }
    }

    /// Trains to the end or to a signal, in the folder of `claim`.
    pub fn train(
        mut self,
        (settings, options): (&Settings, &Options),
        place: &RunFolder,
        claim: Claim,
        team: Team,
    ) -> Result<(), Refusal> {
        // Before anything is written: a signal that ends the process would leave what is there.
        let look = if options.output.quiet { Look::Quiet } else { Look::detect() };
        signals::listen(look).map_err(|e| Refusal::failure(format!("signals: {e}")))?;
        let run_file = place.dir.join(RUN_FILE);
        // A folder other than the resumed run's must itself be resumable.
        let mut file = match self.from.is_some() && place.goes_on() && run_file.exists() {
            true => None,
            false => Some(RunFile::write(run_file, settings, self.facts(), team.classes)?),
        };
        let mut watch = Watch::new(options, place, &self.state, look)?;
        self.history = watch.history();
        let mut recorder =
            Recorder::new(self.shape(options)?, self.counts(options).clone(), (team.hardware, team.takes));
        let compute = team.compute;
        let finished = {
            let mut events = |e: &Event| {
                if matches!(e, Event::Step(_) | Event::Checkpoint(_)) {
                    claim.keep();
                }
                if let Some(file) = file.as_mut().filter(|_| claim.stands()) {
                    file.see(e);
                }
                recorder.before(e).iter().for_each(|said| watch.see(said));
                watch.see(e);
                recorder.after(e).iter().for_each(|said| watch.see(said));
            };
            self.steps(compute, options, (place, &claim), &mut events)
        };
        recorder.keep();
        compute.remarks().into_iter().for_each(|change| watch.see(&Event::Device(change)));
        let finished = match finished {
            Ok(f) => f,
            Err(e) => {
                watch.give_up(report_to(place, &claim));
                return Err(e);
            }
        };
        let outcome = match claim.stands() {
            true => self.outcome(&finished, (place, options)),
            false => Err(TrainError::Gone { path: place.dir.clone(), step: finished.state.step }.into()),
        };
        let path = match (&outcome, &finished.checkpoint) {
            (Ok(()), _) | (_, None) => place.dir.clone(),
            (Err(_), Some(checkpoint)) => checkpoint.clone(),
        };
        let (step, complete, seconds) = (finished.state.step, finished.complete, finished.seconds);
        watch.see(&match &outcome {
            Err(e) if complete => Event::Fault(Halt { step, code: e.code(), reason: e.line.clone() }),
            _ => Event::Done(Done { step, complete, path, seconds }),
        });
        first(outcome, watch.end(report_to(place, &claim)))
    }

    /// Ends a run: writes its adapter, or reports where it stopped.
    fn outcome(
        &mut self,
        finished: &Finished,
        (place, options): (&RunFolder, &Options),
    ) -> Result<(), Refusal> {
        if !finished.complete {
            return Err(saved(finished, place, options));
        }
        self.finish(finished, place)
    }

    fn steps(
        &mut self,
        compute: &mut dyn Compute,
        options: &Options,
        (place, claim): (&RunFolder, &Claim),
        events: &mut dyn FnMut(&Event),
    ) -> Result<Finished, Refusal> {
        self.bring_best(place)?;
        let notes = self.notes(options, place);
        let state = std::mem::replace(&mut self.state, State::new(Vec::new(), self.optim));
        let parameters = self.reference.as_mut().and_then(|reference| reference.parameters.take());
        let p = &self.prepared;
        let known = RefCell::new(Known::default());
        let mut work = self.batches(options);
        if let Some(reference) = &self.reference {
            known.replace(self.known(reference, &place.dir));
            work = work.comparing(reference.objective, &known);
        }
        let keep = || {
            let written = self.reference.as_ref().map(|r| r.write(&place.dir, &known.borrow()));
            if let Some(Err(e)) = written {
                say!("warning: {e}: a resumed run scores the answers of the reference again");
            }
        };
        let write = |dir: &Path, flat: &[f32]| self.writer.write(dir, flat, &self.numbers());
        let decode = |ids: &[u32]| p.tokenizer.decode(ids, Skip::Special).unwrap_or_default();
        let saving = Saving {
            output: place.dir.clone(),
            every: self.every(options.output.save_steps),
            limit: options.output.save_total_limit,
            identity: self.identity.clone(),
            adapter: &write,
            stands: &|| claim.stands(),
            // In another folder, the initial state is saved again.
            last: self.from.clone().filter(|_| place.goes_on()).map(|path| (state.step, path)),
        };
        let run = Run {
            compute,
            work: &work as &dyn Work,
            state,
            reference: parameters.map(|parameters| train::Reference { parameters, keep: &keep }),
            schedule: self.schedule,
            islands: options.optim.islands,
            delay: options.optim.delay,
            eval_steps: self.every(options.output.eval_steps),
            choice: options.output.choice,
            saving,
            sampler: self.sampler(options, &decode)?,
            stop: &signals::STOP,
            labels: p.config.labels.clone().filter(|_| !p.config.numbers).unwrap_or_default(),
            notes,
        };
        let mut finished = train::run(run, events)?;
        // The final state is saved: the adapter is read back into the memory of the moments.
        finished.state.optimizer = optim::AdamW::new(self.optim, 0);
        Ok(finished)
    }

    /// The microbatches of the run, without what a reference gives.
    fn batches(&self, options: &Options) -> Batches<'_> {
        let p = &self.prepared;
        let work = Batches::new(&p.train.samples, &self.plan, p.eval.as_ref().map(|e| &e.samples));
        let mut work = work.in_sets(&p.eval_sets);
        if options.output.token_accuracy {
            work = work.predicting();
        }
        if options.data.task == Task::Reward {
            work = work.ranking(options.data.centre);
        }
        if let (Task::Tag, Some(labels)) = (options.data.task, &p.config.labels) {
            work = work.tagging(labels);
        }
        work
    }

    /// Writes the adapter, reads it back, and compares the two.
    fn finish(&mut self, finished: &Finished, place: &RunFolder) -> Result<(), Refusal> {
        let memory = &*self.result(&finished.state, place)?;
        self.writer.write(&place.dir, memory, &self.numbers())?;
        let disk = &adapter::read_flat(&place.dir, &self.writer.layout)?;
        adapter::same_values(memory, disk, &place.dir)
    }

    /// Notes for the user.
    fn notes(&self, options: &Options, place: &RunFolder) -> Vec<String> {
        let p = &self.prepared;
        let c = &p.train.counts;
        let name = format!("{}, {}", p.config.architecture(), p.base.files.kind);
        let mut rows = format!("rows     {} read, {} tokens, {} supervised", c.rows, c.tokens, c.supervised);
        if c.dropped > 0 {
            let first = c.first_dropped.as_ref().map(|f| format!(", first {f}")).unwrap_or_default();
            rows += &format!("; {} without anything to train on left out{first}", c.dropped);
        }
        rows += &c.weights();
        rows += &c.lengths();
        rows.extend(options.data.learn.unusual().map(|learn| format!("; --learn {learn}")));
        let mut notes = vec![
            format!("output   {}", place.dir.display()),
            format!("model    {} ({name})", options.model.model),
            rows,
            format!("adapter  {}", p.spec.with_modules()),
            format!(
                "batch    {} per step, over all devices, in microbatches of up to {}",
                count(options.optim.batch_size as u64, "row"),
                count(self.plan.micro_batch_tokens() as u64, "token")
            ),
        ];
        let share = Some(p.config.tag_dropout).filter(|share| p.config.tags && *share > 0.0);
        notes.extend(
            share.map(|share| format!("head     labels words; in training {share} of its input is dropped")),
        );
        notes.extend(options.optim.islands.map(|islands| format!("islands  {islands}")));
        if options.optim.delay > 0 {
            notes.push("delay    step s is computed with the parameters after step s - 2".into());
        }
        notes.extend(self.reference.as_ref().map(|reference| reference.note(options)));
        notes.extend(self.unnamed_base(options));
        notes.extend(p.remarks.clone());
        notes
    }
}

/// The sets of a mixture: their rows and their weights.
fn mixture(p: &Prepared, options: &Options) -> Option<String> {
    let sets = p.train.sets().into_iter().zip(&options.data.weights);
    let all: Vec<String> = sets.map(|(rows, weight)| format!("{} x {weight}", rows.len())).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// Tokens that the base's tokenizer got.
fn added_tokens(base: &BaseModel) -> Option<String> {
    let all: Vec<String> = base.added.iter().map(|(id, token)| format!("{id} {:?}", token.text)).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// The learning rates of a run of `total` steps.
fn schedule(o: &OptimOptions, total: u64) -> Result<Schedule, Refusal> {
    let decay = o.scheduler.parse().map_err(Refusal::configuration)?;
    let (peak, warmup) = (o.learning_rate, o.warmup.of(total));
    let floor = if peak > 0.0 { o.min_lr / peak } else { 0.0 };
    let decay_steps = o.decay_steps.of(total).min(total.saturating_sub(warmup));
    Ok(Schedule { peak, decay, warmup, total, floor, decay_steps })
}

/// Path of the report; `None` where the run's folder is gone, because the folder is not created again.
fn report_to<'a>(place: &'a RunFolder, claim: &Claim) -> Option<&'a Path> {
    claim.stands().then_some(&place.dir)
}

/// Returns the run's error first; an error of the log is only a warning beside it.
fn first(outcome: Result<(), Refusal>, logged: Result<(), Refusal>) -> Result<(), Refusal> {
    if let (Err(_), Err(e)) = (&outcome, &logged) {
        say!("warning: {}", e.line);
    }
    outcome.and(logged)
}

/// The refusal for a run that a signal stopped.
fn saved(finished: &Finished, place: &RunFolder, options: &Options) -> Refusal {
    let (step, dir) = (finished.state.step, place.dir.display());
    let again = match options.data.data.iter().any(|path| path.as_os_str() == "-") {
        true => ", and the same rows on stdin",
        false => "",
    };
    let line = match step {
        0 => "stopped by a signal before the first step: nothing is saved".to_string(),
        _ => {
            format!("stopped by a signal after step {step}, which is saved: go on with --resume={dir}{again}")
        }
    };
    Refusal::of(Kind::Saved, line)
}
