//! Measurements of a device before it takes part, sent in `Measured` right after `Ready`.

use crate::model::memory::Used;
use crate::numeric::line::Points;
use serde::{Deserialize, Serialize};

/// Results of a device's trial microbatches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// Tokens and seconds.
    pub time: Points,
    /// Tokens and bytes.
    pub memory: Used,
}
