//! `--islands` and `--inner-steps`.

use super::refusal::Refusal;
use super::settings::Settings;
use super::typed::Origin;
use super::values::{filled, whole};
use crate::train::island::Islands;

/// Most parts of a step that train apart.
const MOST_ISLANDS: usize = 64;

/// Islands, with the steps between exchanges of their results.
pub fn islands(s: &Settings) -> Result<Option<Islands>, Refusal> {
    let inner = filled(s, "inner-steps", whole(s, "inner-steps", 1)?)? as u64;
    match filled(s, "islands", whole(s, "islands", 0)?)? {
        // run.yaml has it in any case.
        0 if s.get("inner-steps").is_some_and(|value| value.source == Origin::Flag) => {
            Err(s.refuse("inner-steps", "is only for runs with islands: add --islands 2"))
        }
        0 => Ok(None),
        count @ 1..=MOST_ISLANDS => Ok(Some(Islands { count, inner })),
        _ => Err(s.refuse("islands", format!("expected at most {MOST_ISLANDS}"))),
    }
}
