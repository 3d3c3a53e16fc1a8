//! What a device was measured to take before it takes part: a part of what a worker says right after it is ready.

use crate::model::memory::Used;
use crate::numeric::line::Points;
use serde::{Deserialize, Serialize};

/// What trial microbatches of a device took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Trials {
    /// Tokens and seconds.
    pub time: Points,
    /// Tokens and bytes.
    pub memory: Used,
}
