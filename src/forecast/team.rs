//! All devices that are expected in a run: those of this process, and those that the run waits for.

use super::link;
use super::profile::{self, Basis, ModelShape, Pace, Profiles};
use super::time::Participant;
use crate::config::groups::{Expect, Options, Role};
use crate::config::refusal::Refusal;
use crate::devices::{self, Chosen, Prospect, Sizes};
use crate::model::config::Config;
use crate::model::lora::LoraSpec;
use crate::model::memory::Home;
use crate::numeric::tensor::Tensors;

/// A device and its forecast.
pub struct Expected {
    /// Name of the device.
    pub name: String,
    /// Properties of the device, where known.
    pub prospect: Option<Prospect>,
    /// Expected speed; `None` where the device cannot take part or is absent.
    pub worker: Option<Participant>,
    /// Whether its link was measured, given or assumed.
    pub link: Option<&'static str>,
}

impl Expected {
    /// Whether it can take part.
    pub fn fits(&self) -> bool {
        match &self.prospect {
            Some(prospect) => prospect.class.is_ok() && prospect.unfit.is_none(),
            None => self.worker.is_some(),
        }
    }
}

/// All devices that are expected in a run with microbatches of such sizes.
pub fn team(
    options: &Options,
    (model, chosen): ((&Config, &dyn Tensors, &LoraSpec), Option<&Chosen>),
    shape: &ModelShape,
    (profiles, sizes): (&Profiles, Sizes),
) -> Result<Vec<Expected>, Refusal> {
    // The same distinction as in `run::single`.
    let alone = options.cluster.role == Role::Single && chosen.is_some_and(Chosen::is_one_cpu);
    let home = if alone { Home::Host } else { Home::HostInTeam };
    let mut team = here((chosen, home), model, shape, (profiles, sizes))?;
    let others = elsewhere(options, &team, shape, profiles);
    team.extend(others);
    Ok(team)
}

/// The devices of this process.
fn here(
    (chosen, home): (Option<&Chosen>, Home),
    model: (&Config, &dyn Tensors, &LoraSpec),
    shape: &ModelShape,
    (profiles, sizes): (&Profiles, Sizes),
) -> Result<Vec<Expected>, Refusal> {
    let Some(chosen) = chosen else { return Ok(vec![]) };
    let expected = |prospect: Prospect| {
        let able = prospect.class.as_ref().ok().filter(|_| prospect.unfit.is_none());
        let worker = able.map(|class| {
            let measured = profiles.pace("", &profile::device(class, &prospect.hardware), shape);
            let pace = measured.unwrap_or_else(|| Pace::guess(shape, prospect.guess));
            Participant { pace, link: None }
        });
        Expected { name: prospect.name.clone(), worker, link: None, prospect: Some(prospect) }
    };
    let seen = |class: &str, hardware: &str| profiles.memory(&profile::device(class, hardware), shape);
    Ok(devices::prospects(chosen, model, sizes, (&seen, home))?.into_iter().map(expected).collect())
}

/// Devices that the run waits for: with the measurements of earlier workers, else with a guess.
fn elsewhere(options: &Options, team: &[Expected], shape: &ModelShape, profiles: &Profiles) -> Vec<Expected> {
    let here = team.len();
    let first = team.iter().find_map(|e| e.worker.as_ref()).map(|w| w.pace.clone());
    let like = first.unwrap_or_else(|| Pace::guess(shape, link::UNKNOWN));
    // Workers that hold the model together are no devices of their own.
    if options.cluster.role != Role::Coordinator || options.cluster.stages.is_some() {
        return vec![];
    }
    let min = options.cluster.min_workers;
    let all = match options.cluster.expect_workers {
        None => min.max(here),
        Some(Expect::Devices(count)) => count,
        // This process is one; each of the others has at least one device.
        Some(Expect::Tasks(count)) => here + count - usize::from(here > 0),
    };
    let mut known = profiles.elsewhere(shape).into_iter();
    let one = |at: usize| {
        let (name, pace) = match known.next() {
            Some((worker, device, pace)) => (format!("{worker}: {device}"), pace),
            // Unknown device: assumed as fast as the first one here, if there is one.
            None => (format!("device {} (to come)", at + 1), Pace { basis: Basis::Guess, ..like.clone() }),
        };
        let (link, said) = match pace.link {
            Some(link) => (link, "measured"),
            None => (link::ASSUMED, "assumed"),
        };
        let worker = Some(Participant { pace, link: Some(link) });
        Expected { name, prospect: None, worker, link: Some(said) }
    };
    (here..all).map(one).collect()
}
