//! `--islands`, `--inner-steps`, `--outer-learning-rate` and `--outer-momentum`.

use super::cluster::ClusterOptions;
use super::refusal::Refusal;
use super::settings::Settings;
use super::typed::Origin;
use super::values::{filled, real, whole};
use crate::train::island::{Islands, Outer};

/// Most parts of a step that train apart.
const MOST_ISLANDS: usize = 64;
/// Largest learning rate of the outer optimizer.
const MOST_RATE: f64 = 10.0;

/// Islands, with the steps between exchanges of their results.
pub fn islands(s: &Settings) -> Result<Option<Islands>, Refusal> {
    let inner = filled(s, "inner-steps", whole(s, "inner-steps", 1)?)? as u64;
    let outer = outer(s)?;
    // run.yaml has all of them in any case.
    let typed = |name: &&str| s.get(name).is_some_and(|value| value.source == Origin::Flag);
    match filled(s, "islands", whole(s, "islands", 0)?)? {
        0 => match ["inner-steps", "outer-learning-rate", "outer-momentum"].into_iter().find(typed) {
            Some(name) => Err(s.refuse(name, "is only for runs with islands: add --islands 2")),
            None => Ok(None),
        },
        count @ 1..=MOST_ISLANDS => Ok(Some(Islands { count, inner, outer })),
        _ => Err(s.refuse("islands", format!("expected at most {MOST_ISLANDS}"))),
    }
}

/// The outer optimizer. Within these bounds no parameter overflows: the changes of islands have the range of sums.
fn outer(s: &Settings) -> Result<Outer, Refusal> {
    let rate = |rate: f64| rate as f32 > 0.0 && rate <= MOST_RATE;
    let momentum = |momentum: f64| (0.0..1.0).contains(&(momentum as f32)) && momentum >= 0.0;
    let rate = real(s, "outer-learning-rate", rate, "must be above 0 and at most 10")?;
    let momentum = real(s, "outer-momentum", momentum, "must be at least 0 and below 1")?;
    let rate = filled(s, "outer-learning-rate", rate)?;
    Ok(Outer { rate, momentum: filled(s, "outer-momentum", momentum)? })
}

/// Islands exchange parameters and moments exactly, and each is computed by a device that holds the whole model. `bits`
/// are those to which sums or updates are rounded, 0: neither is.
pub fn islands_fit(
    s: &Settings,
    islands: Option<&Islands>,
    bits: u32,
    cluster: &ClusterOptions,
) -> Result<(), Refusal> {
    let why = match islands {
        None => return Ok(()),
        Some(_) if cluster.stages.is_some() => {
            "an island is computed by one device, and workers that hold the model together (--stages) are several"
        }
        Some(_) if bits > 0 => "what islands exchange is not rounded: leave --sum-bits and --update-bits out",
        Some(_) => return Ok(()),
    };
    Err(s.refuse("islands", why))
}
