//! `--micro-batch-tokens auto`: the microbatch size with the shortest expected run time, from the measured speeds of
//! its devices. The size is fixed before the first step and recorded in run.yaml and in the log, and a resume keeps it:
//! from then on the run is as reproducible as any other.

use super::folder::{self, RUN_FILE};
use super::prepare::{self, Prepared};
use super::signals;
use crate::config::groups::{Options, Resume};
use crate::config::refusal::Refusal;
use crate::config::{Origin, Settings, yaml};
use crate::data::plan::{Plan, PlanOptions};
use crate::devices::{self, Chosen, Need, Sizes};
use crate::forecast::counts::{Ahead, SOME, count};
use crate::forecast::profile::{self, Basis, Measured, Profiles};
use crate::forecast::team::{Expected, team};
use crate::forecast::time::{Participant, forecast};
use crate::model::decoder::initial_parameters;
use crate::model::layout;
use crate::train::trial::{LONGEST, trials};
use crate::train::{Compute, Local};

/// Candidate sizes in tokens.
const SIZES: [usize; 5] = [256, 512, 1024, 2048, 4096];
/// Name of the option.
const NAME: &str = "micro-batch-tokens";
/// Minimum share of time that a larger size has to save.
const WORTH: f64 = 0.01;

/// Whether devices may be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Devices without measurements are measured.
    Measure,
    /// No device is opened.
    Only,
}

/// Returns the plan of a run; with `auto` this measures devices first, as far as `look` allows.
pub fn plan(
    settings: &mut Settings,
    options: &Options,
    (p, chosen): (&mut Prepared, Option<&Chosen>),
    look: Look,
) -> Result<Plan, Refusal> {
    let typed = prepare::plan_options(options);
    if !options.optim.micro_batch_auto {
        return Ok(prepare::plan(&p.train, options, &typed));
    }
    let (tokens, why) = match kept(options)? {
        Some(kept) => kept,
        None => choose(options, (p, chosen), look)?,
    };
    p.remarks.push(format!("auto     --micro-batch-tokens {tokens}: {why}"));
    settings.put(NAME, vec![tokens.to_string()], Origin::Computed(format!("auto: {why}")));
    Ok(prepare::plan(&p.train, options, &PlanOptions { micro_batch_tokens: Some(tokens), ..typed }))
}

/// The size of the run that is resumed.
fn kept(options: &Options) -> Result<Option<(usize, String)>, Refusal> {
    let from = match (&options.output.resume, &options.output.output) {
        (Resume::No, _) => return Ok(None),
        (Resume::From(dir), _) => folder::run_of(dir),
        (Resume::Output, Some(dir)) => dir.clone(),
        (Resume::Output, None) => match folder::newest(&options.model.model) {
            Some(dir) => dir,
            None => return Ok(None),
        },
    };
    let file = from.join(RUN_FILE);
    if !file.exists() {
        return Ok(None);
    }
    let typed = yaml::read(&file)?;
    let value = typed.iter().find(|t| t.key == NAME.replace('-', "_")).map(|t| t.values.concat());
    let tokens = value.and_then(|text| text.parse().ok());
    Ok(tokens.map(|tokens| (tokens, format!("as {} has it", file.display()))))
}

fn choose(
    options: &Options,
    (p, chosen): (&Prepared, Option<&Chosen>),
    look: Look,
) -> Result<(usize, String), Refusal> {
    let shape = p.shape(options)?;
    if let (Some(chosen), Look::Measure) = (chosen, look) {
        measure(chosen, p, options)?;
    }
    let profiles = Profiles::read();
    // Tokens; seconds; whether a pace is a guess; whether memory was measured, where known.
    let mut best: Option<(usize, f64, bool, Option<bool>)> = None;
    let mut least_read = 0.0;
    for tokens in SIZES {
        let typed = PlanOptions { micro_batch_tokens: Some(tokens), ..prepare::plan_options(options) };
        let planned = prepare::plan(&p.train, options, &typed);
        let (train, eval) = (&p.train, p.eval.as_ref());
        let (counts, mut load) = count(Ahead { plan: &planned, train, eval, done: 0, most: SOME }, options);
        load.trained = shape.trained;
        let team = team(options, (p.model(), chosen), &shape, (&profiles, counts.sizes()))?;
        let measured = |e: &Expected| Some(e.prospect.as_ref()?.takes?.1.basis.line().is_some());
        let room = team.iter().filter_map(measured).reduce(|a, b| a && b);
        // A device without memory for this size would drop out of the run, or read more layers for each token.
        let streams = |e: &Expected| e.prospect.as_ref()?.takes.map(|(_, takes)| takes.streamed);
        let streamed = team.iter().filter_map(streams).max().unwrap_or(0);
        let drops_out = team.iter().any(|e| e.worker.is_none());
        let read = streamed as f64 / tokens as f64;
        if best.is_some() && (drops_out || read > least_read) {
            break;
        }
        least_read = read;
        let workers: Vec<Participant> = team.into_iter().filter_map(|e| e.worker).collect();
        let guessed = workers.iter().any(|w| w.pace.basis == Basis::Guess);
        let seconds = forecast(&workers, &load).total();
        if best.is_none_or(|(_, least, ..)| seconds < least * (1.0 - WORTH)) {
            best = Some((tokens, seconds, guessed, room));
        }
        if counts.microbatches_per_step.1 == 1 {
            break; // larger sizes give the same microbatches
        }
    }
    let (tokens, _, guessed, room) =
        best.ok_or_else(|| Refusal::failure("no size of microbatches was found"))?;
    let why = match guessed {
        true => "the fastest of 256 to 4096, by a guess, because not every device was measured",
        false => "the fastest of 256 to 4096 by what the devices were measured to need",
    };
    let room = match room {
        Some(true) => "; their memory measured",
        Some(false) => "; their memory estimated",
        None => "",
    };
    Ok((tokens, format!("{why}{room}")))
}

/// Measures the device of this process, where it is a CPU without measurements of such a model. For several devices the
/// measurements of the first one are used.
fn measure(chosen: &Chosen, p: &Prepared, options: &Options) -> Result<(), Refusal> {
    let shape = p.shape(options)?;
    let known = team(
        options,
        (p.model(), Some(chosen)),
        &shape,
        (&Profiles::read(), Sizes { tokens: SIZES[0], microbatches: 1 }),
    )?;
    let first = known.first().and_then(|e| e.worker.as_ref());
    if !chosen.is_one_cpu() || first.is_none_or(|w| w.pace.basis == Basis::Measured) {
        return Ok(());
    }
    let weights = p.model();
    let need = |tokens| Need { tokens, microbatches: 1, measured: None, how: None };
    let settled = |tokens: usize| devices::settle(chosen, weights, need(tokens));
    let fits = |tokens: &usize| settled(*tokens).is_ok_and(|how| how.streamed == 0);
    // A size that does not fit is not measured; the choice among all sizes follows.
    let Some(tokens) = [LONGEST, SIZES[1], SIZES[0]].into_iter().find(fits) else { return Ok(()) };
    let mut model = devices::open(chosen, weights, options.data.class_weights.clone(), need(tokens))?;
    let layout = layout::of(&p.config, &p.spec, 0..p.config.layers);
    let flat = initial_parameters(&layout, &p.spec, &*p.base.files.tensors)?;
    let class = model.class();
    let mut local = Local::new(&mut *model, &signals::STOP).measured_with(trials(&p.config, tokens));
    local.set_parameters(0, &flat)?;
    for speed in local.speeds(0) {
        let memory = speed.memory.unwrap_or_default();
        let measured = Measured { train: speed.points, memory, ..Measured::default() };
        Profiles::keep("", &profile::device(&class, &devices::hardware(chosen, 0)), &shape, &measured);
    }
    Ok(())
}
