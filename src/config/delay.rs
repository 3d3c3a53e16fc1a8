//! What `--delay` goes with.

use super::cluster::{ClusterOptions, Relays};
use super::refusal::Refusal;
use super::settings::Settings;
use crate::train::island::Islands;

/// Steps of whole models are delayed, by one. What is checked counts at the end of its step only.
pub fn delay_fits(
    s: &Settings,
    delay: u64,
    islands: Option<&Islands>,
    cluster: &ClusterOptions,
) -> Result<(), Refusal> {
    let why = match delay {
        0 => return Ok(()),
        1 if islands.is_some() => {
            "islands exchange their results every --inner-steps steps: leave one of both out"
        }
        1 if cluster.stages.is_some() => {
            "workers that hold the model together (--stages) compute one step at a time"
        }
        1 if cluster.verify > 0.0 => {
            "microbatches are checked (--verify) within their step: leave one of both out"
        }
        1 if cluster.relays == Relays::Always => {
            "sums and parameters travel while the next step is computed, without relays (--relays): leave one out"
        }
        1 => return Ok(()),
        _ => "expected 0 or 1",
    };
    Err(s.refuse("delay", why))
}
