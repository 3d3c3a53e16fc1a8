//! `finetune plan`: forecasts the work, memory and time of a training command line, without running it. Steps are
//! counted by the plan that a run uses, memory by the estimate that a run uses when it opens devices, and options are
//! refused by the same code; only times are a forecast, and each one is shown with its quality. No weights are read and
//! no files of a run are written: for a Hub model that is not in the cache, small files and headers are downloaded to
//! the cache (the whole model, where its shapes depend on its values).

mod lines;
mod memory_words;
mod tell;

use crate::forecast::counts::{ALL, Ahead, Counts, count};
use crate::forecast::team::{Expected, team};
use crate::forecast::time::{Participant, Sent, TimeForecast, forecast, useless};
pub use tell::note_line;

use crate::cli::invocation::Invocation;
use crate::config::groups::{Gpus, Options, Role};
use crate::config::refusal::Refusal;
use crate::config::{Origin, Settings, values};
use crate::devices::{self, Chosen};
use crate::forecast::link;
use crate::forecast::profile::{Basis, ModelShape, Profiles};
use crate::run::auto_micro_batch;
use crate::run::folder;
use crate::run::job;
use crate::run::prepare::{self, Prepared};

/// Content of the plan.
pub struct Outlook {
    prepared: Prepared,
    counts: Counts,
    shape: ModelShape,
    team: Vec<Expected>,
    /// Workers that hold the model together.
    line: Option<lines::Line>,
    forecast: TimeForecast,
    sent: Sent,
    /// Devices that slow the run down, and the seconds saved without each.
    useless: Vec<(usize, f64)>,
    notes: Vec<String>,
}

/// Refuses what has no plan.
fn knows(settings: &Settings, options: &Options) -> Result<(), Refusal> {
    if options.cluster.role == Role::Worker {
        let why = "a worker has no run of its own: plan with the coordinator's command line";
        return Err(settings.refuse("role", why));
    }
    Ok(())
}

/// Prints the plan.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let link = link::typed(&inv.settings)?;
    let assumed = values::memory(&inv.settings, "assume-gpu")?;
    let settings = &mut inv.settings;
    let options = Options::of(settings)?;
    knows(settings, &options)?;
    let mut notes = settings.notes.clone();
    let chosen = match assumed {
        Some(_) => None,
        None => choose(settings, &options)?,
    };
    notes.extend(chosen.iter().flat_map(|c| c.notes.clone()));
    let done = steps_done(&options)?;
    let mut prepared = prepare::prepare_dry(settings, &options)?;
    let plan = auto_micro_batch::plan(
        settings,
        &options,
        (&mut prepared, chosen.as_ref()),
        auto_micro_batch::Look::Only,
    )?;
    job::enough_microbatches(&options.optim, &plan)?;
    job::samples::rows(&prepared, options.output.sample_rows)?;
    notes.extend(prepared.remarks.clone());
    let (train, eval) = (&prepared.train, prepared.eval.as_ref());
    let ahead = Ahead { plan: &plan, train, eval, done, most: ALL };
    let (counts, mut load) = count(ahead, &options);
    let p = &prepared;
    let shape = p.shape(&options)?;
    load.trained = shape.trained;
    let profiles = Profiles::read();
    let sizes = counts.sizes();
    let line = lines::line((settings, &options), p, (&counts, assumed, link))?;
    let mut team = team(&options, (p.model(), chosen.as_ref()), &shape, (&profiles, sizes))?;
    if let (Some(bytes), None) = (assumed, &line) {
        let prospect = devices::assumed(bytes, &options.devices, p.model(), counts.longest)?;
        let name = prospect.name.clone();
        team.insert(0, Expected { name, prospect: Some(prospect), worker: None, link: None });
    }
    if let Some(link) = link {
        let far = team.iter_mut().filter(|e| e.link.is_some());
        far.for_each(|e| {
            e.link = Some("as --link says");
            e.worker.iter_mut().for_each(|w| w.link = Some(link));
        });
    }
    let able: Vec<usize> = (0..team.len()).filter(|&at| team[at].worker.is_some()).collect();
    let workers: Vec<Participant> = able.iter().filter_map(|&at| team[at].worker.clone()).collect();
    let forecast = forecast(&workers, &load);
    let useless = useless(&workers, &load).into_iter().map(|(at, gain)| (able[at], gain)).collect();
    let sent = load.sent;
    let outlook = Outlook { prepared, counts, shape, team, line, forecast, sent, useless, notes };
    match inv.json {
        true => inv.say(&tell::json(&outlook, &options).to_string())?,
        false => tell::lines(&outlook, &options).iter().try_for_each(|line| inv.say(line))?,
    }
    outlook.verdict()
}

/// Chooses devices as a run does; `None` where this process only coordinates.
fn choose(settings: &mut Settings, options: &Options) -> Result<Option<Chosen>, Refusal> {
    let computes = options.cluster.role == Role::Single
        || options.devices.gpus != Gpus::None && settings.is_given("gpus");
    if !computes {
        settings.put("gpus", vec!["none".into()], Origin::Computed("a coordinator's default".into()));
        return Ok(None);
    }
    devices::choose(&options.devices).map(Some)
}

/// Steps of the checkpoint that the run would continue from. A folder that a run would refuse is refused.
fn steps_done(options: &Options) -> Result<u64, Refusal> {
    let place = folder::place(&options.output, &options.model.model)?;
    Ok(place.checkpoint()?.map_or(0, |found| found.step))
}

impl Outlook {
    /// Refuses a run that no device has memory for, as the run itself does.
    fn verdict(&self) -> Result<(), Refusal> {
        if self.team.iter().any(Expected::fits) {
            return Ok(());
        }
        let unfit = self.team.iter().find_map(|e| Some((&e.name, e.prospect.as_ref()?.unfit.clone()?)));
        unfit.map_or(Ok(()), |(name, e)| {
            let refusal: Refusal = e.into();
            Err(Refusal { line: format!("{name}: {}", refusal.line), ..refusal })
        })
    }

    /// Index in the forecast of a device of the team.
    fn place(&self, at: usize) -> Option<usize> {
        self.team[at].worker.as_ref()?;
        Some(self.team[..at].iter().filter(|e| e.worker.is_some()).count())
    }

    /// Average tokens of a microbatch.
    fn mean_size(&self) -> f64 {
        self.counts.tokens as f64 / self.counts.microbatches.max(1) as f64
    }

    /// Whether any number was not measured on this model.
    fn guessed(&self) -> bool {
        self.team.iter().filter_map(|e| e.worker.as_ref()).any(|w| w.pace.basis == Basis::Guess)
    }
}
