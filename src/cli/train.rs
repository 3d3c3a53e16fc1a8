//! `finetune [MODEL]`: trains, in this process with one model. What a run is besides who computes it is
//! [`super::job`]'s.

use super::adapter;
use super::auto;
use super::coordinator;
use super::demo;
use super::devices::{self, Need};
use super::job::{self, Job, Steps, Team, Values};
use super::options::groups::{Options, Role};
use super::options::{Typed, alias, yaml};
use super::output::{self, Claim, RUN_FILE};
use super::plan;
use super::prepare;
use super::profile::{self, Profiles};
use super::refusal::Refusal;
use super::signals;
use super::verb::Invocation;
use super::worker;
use crate::model::memory::Estimate;
use crate::model::stage::{Microbatch, Output, Stage, Want};
use crate::support::stderr::say;
use crate::train::event::Takes;
use crate::train::{self, Finished, Local, OwnThread};
use std::path::{Path, PathBuf};

/// Trains.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let settings = &mut inv.settings;
    let options = Options::of(settings)?;
    if !options.output.quiet {
        settings.notes.iter().for_each(|note| say!("{}", plan::note_line(note)));
    }
    match options.cluster.role {
        Role::Coordinator => return coordinator::run(settings, &options),
        Role::Worker => return worker::run(settings, &options),
        Role::Single => {}
    }
    let chosen = devices::choose(&options.devices)?;
    if !options.output.quiet {
        chosen.notes.iter().for_each(|note| say!("{note}"));
    }
    if !chosen.is_one_cpu() {
        return coordinator::run_here(settings, &options, &chosen);
    }
    let mut place = output::place(&options.output, &options.model.model)?;
    let lock = place.hold()?;
    let mut prepared = prepare::prepare(settings, &options)?;
    let planned = auto::plan(settings, &options, (&mut prepared, Some(&chosen)), auto::Look::Measure)?;
    let hardware = devices::hardware(&chosen, 0);
    let device = profile::device(&devices::cpu_class(&chosen), &hardware);
    let measured = Profiles::read().memory(&device, &plan::shape(&prepared, &options));
    let mut need = Need { measured, ..job::need(&prepared, &planned) };
    // What does not fit is refused before there is an adapter, which may be what does not fit.
    need.keep = Some(devices::settle(&chosen, prepared.model(), need)?);
    let mut job = Job::new(prepared, planned, &options)?;
    job.resume(&place)?;
    let weights = job.prepared.model();
    // What is measured first may be longer than what is trained on.
    let trials = job.trials();
    let longest = trials.iter().map(|batch| batch.ids.len()).fold(job.longest(&options), usize::max);
    let takes = devices::takes(&chosen, weights, Need { tokens: longest, ..need })?;
    let model = devices::open(&chosen, weights, options.data.class_weights.clone(), need)?;
    let model = OwnThread::new(model, &signals::STOP);
    // Measured before or not: what it did in a busy hour says little of what it will do in this one.
    let mut team = Alone { model, hardware, trials, takes };
    let claim = Claim::new(&mut place, lock)?;
    job.train((settings, &options), &place, claim, &mut team)
}

/// Tokens of the first row that the adapter on disk is compared by.
const COMPARED: usize = 32;

/// One model in this process.
struct Alone {
    model: OwnThread<'static>,
    hardware: String,
    /// What it is measured with before the first step.
    trials: Vec<Microbatch>,
    /// What it should take of the memory.
    takes: Estimate,
}

impl Team for Alone {
    fn classes(&self) -> Vec<String> {
        vec![self.model.class()]
    }

    fn train(&mut self, run: Steps) -> Result<Finished, Refusal> {
        let trials = std::mem::take(&mut self.trials);
        run(&mut Local::new(&mut self.model, &signals::STOP).measured_with(trials))
    }

    fn hardware(&self) -> Vec<(String, String)> {
        vec![(String::new(), self.hardware.clone())]
    }

    fn takes(&self) -> Option<Takes> {
        let (worker, device) = (String::new(), self.model.class());
        Some(Takes { worker, device, bytes: self.takes.in_use, basis: self.takes.basis.word().into() })
    }

    /// By what both say of the beginning of the first row.
    fn compare(&mut self, job: &Job, values: Values, dir: &Path) -> Result<(), Refusal> {
        let batch = train::microbatch(&job.prepared.train.samples, &[0], 0).beginning(COMPARED);
        let mut logits = |flat: &[f32]| -> Result<Vec<f32>, Refusal> {
            self.model.set_parameters(flat)?;
            match self.model.forward(&batch, None, Want::Logits)? {
                Output::Logits(logits) => Ok(logits),
                _ => Err(Refusal::failure("the model gave no logits")),
            }
        };
        adapter::same_logits(&logits(values.memory)?, &logits(values.disk)?, dir)
    }
}

/// What speaks below flags, file and environment: run.yaml of the run that is resumed; else, where neither a
/// model nor rows were named, the demonstration's settings.
pub fn more_layers(layers: &[Vec<Typed>]) -> Result<Vec<Vec<Typed>>, Refusal> {
    let find = |names: &[&str]| {
        let is = |t: &&Typed| names.contains(&alias::ours(&t.key).unwrap_or(&t.key));
        layers.iter().find_map(|l| l.iter().find(is)).map(|t| t.values.concat())
    };
    if find(&["role"]).as_deref() == Some("worker") {
        // It has no run of its own, and says nothing about the coordinator's that nobody typed.
        return Ok(Vec::new());
    }
    let model = find(&["model"]);
    let run = match find(&["resume"]).as_deref() {
        None | Some("false") => None,
        Some("" | "true") => find(&["output"])
            .map(PathBuf::from)
            .or_else(|| output::newest(model.as_deref().unwrap_or(demo::NAME))),
        Some(dir) => Some(output::run_of(Path::new(dir))),
    };
    let mut more = Vec::new();
    if let Some(dir) = run.filter(|dir| dir.join(RUN_FILE).exists()) {
        let mut typed = yaml::read(&dir.join(RUN_FILE))?;
        // A run goes on in its present folder; one that goes on in another leaves the log of the first alone.
        let elsewhere = find(&["output"]).is_some_and(|to| !output::same(Path::new(&to), &dir));
        typed.retain(|t| t.key != "output" && !(elsewhere && t.key == "log_json"));
        more.push(typed);
    } else if model.as_deref().is_none_or(|m| m == demo::NAME) && find(&["data"]).is_none() {
        more.push(demo::settings()?);
    }
    Ok(more)
}
