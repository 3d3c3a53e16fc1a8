//! `--role single`: trains in this process. One model on the CPU is trained here; otherwise a coordinator runs with the
//! devices of this process. The parts common to all roles are in [`super::job`].

use super::auto_micro_batch;
use super::coordinator;
use super::folder::{self, Claim};
use super::job::{self, Job, Team};
use super::prepare;
use super::signals;
use crate::config::Settings;
use crate::config::groups::Options;
use crate::config::refusal::Refusal;
use crate::devices::{self, Need};
use crate::forecast::profile::{self, Profiles};
use crate::support::stderr::say;
use crate::train::event::Takes;
use crate::train::trial::trials;
use crate::train::{Compute, Local, Rounding};

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
    let measured = Profiles::read().memory(&device, &prepared.shape(options)?);
    let mut need = Need { measured, ..job::need(&prepared, &planned) };
    // Memory is checked before the adapter is created, because the adapter itself may not fit.
    let how = devices::settle(&chosen, prepared.model(), need)?;
    need.how = Some(how);
    if !options.output.quiet {
        devices::note_streaming(how.streamed, prepared.config.layers);
    }
    let hardware = how.measured_on(hardware);
    let mut job = Job::new(prepared, planned, options)?;
    job.resume(&place)?;
    let weights = job.prepared.model();
    // A trial may be longer than the run's own microbatches.
    let trials = trials(weights.0, need.tokens);
    let longest = trials.iter().map(|batch| batch.ids.len()).fold(job.longest(options), usize::max);
    let takes = devices::takes(&chosen, weights, Need { tokens: longest, ..need })?;
    let model = devices::open(&chosen, weights, options.data.class_weights.clone(), need)?;
    // Devices are measured again in every run, because earlier measurements may come from a busy machine.
    let rounding = Rounding::new(options.optim.sum_bits, job.prepared.spec.seed, &job.writer.layout);
    let mut local = Local::apart(model, &signals::STOP).measured_with(trials);
    local = local.rounding(rounding).delayed(options.optim.delay);
    let (classes, device) = (local.classes(), local.classes().concat());
    let takes =
        Takes { worker: String::new(), device, bytes: takes.in_use, basis: takes.basis.word().into() };
    let hardware = vec![(String::new(), hardware)];
    let claim = Claim::new(&mut place, lock)?;
    let team = Team { compute: &mut local, classes, hardware, takes: Some(takes) };
    job.train((settings, options), &place, claim, team)
}
