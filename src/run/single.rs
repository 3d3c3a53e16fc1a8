//! `--role single`: trains in this process. One model on the CPU is trained here; otherwise a coordinator runs with the
//! devices of this process. The parts common to all roles are in [`super::job`].

use super::adapter;
use super::auto_micro_batch;
use super::coordinator;
use super::folder::{self, Claim};
use super::job::{self, Job, Steps, Team, Values};
use super::prepare;
use super::signals;
use crate::config::Settings;
use crate::config::groups::Options;
use crate::config::refusal::Refusal;
use crate::devices::{self, Need};
use crate::forecast::profile::{self, Profiles};
use crate::model::memory::Estimate;
use crate::model::stage::{Microbatch, Output, Stage, Want};
use crate::support::stderr::say;
use crate::train::event::Takes;
use crate::train::{self, Finished, Local, OwnThread};
use std::path::Path;

/// Trains.
pub fn run(settings: &mut Settings, options: &Options) -> Result<(), Refusal> {
    let chosen = devices::choose(&options.devices)?;
    if !options.output.quiet {
        chosen.notes.iter().for_each(|note| say!("{note}"));
    }
    if !chosen.is_one_cpu() {
        return coordinator::run_here(settings, options, &chosen);
    }
    let mut place = folder::place(&options.output, &options.model.model)?;
    let lock = place.hold()?;
    let mut prepared = prepare::prepare(settings, options)?;
    let planned = auto_micro_batch::plan(
        settings,
        options,
        (&mut prepared, Some(&chosen)),
        auto_micro_batch::Look::Measure,
    )?;
    let hardware = devices::hardware(&chosen, 0);
    let device = profile::device(&devices::cpu_class(&chosen), &hardware);
    let measured = Profiles::read().memory(&device, &prepared.shape(options));
    let mut need = Need { measured, ..job::need(&prepared, &planned) };
    // Memory is checked before the adapter is created, because the adapter itself may not fit.
    need.keep = Some(devices::settle(&chosen, prepared.model(), need)?);
    let mut job = Job::new(prepared, planned, options)?;
    job.resume(&place)?;
    let weights = job.prepared.model();
    // Microbatches for measuring may be longer than those of the training.
    let trials = job.trials();
    let longest = trials.iter().map(|batch| batch.ids.len()).fold(job.longest(options), usize::max);
    let takes = devices::takes(&chosen, weights, Need { tokens: longest, ..need })?;
    let model = devices::open(&chosen, weights, options.data.class_weights.clone(), need)?;
    let model = OwnThread::new(model, &signals::STOP);
    // Devices are measured again in every run, because earlier measurements may come from a busy machine.
    let mut team = Alone { model, hardware, trials, takes };
    let claim = Claim::new(&mut place, lock)?;
    job.train((settings, options), &place, claim, &mut team)
}

/// Tokens of the first row that are used to compare the adapter on disk with that in memory.
const COMPARED: usize = 32;

/// One model in this process.
struct Alone {
    model: OwnThread<'static>,
    hardware: String,
    /// Microbatches for measuring before the first step.
    trials: Vec<Microbatch>,
    /// Estimated memory.
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

    /// Compares the logits of both adapters at the beginning of the first row.
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
