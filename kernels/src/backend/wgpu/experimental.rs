//! wgpu requires explicit consent for experimental features; the one in use is matrix units. Their results on real
//! cards are unknown in advance, so a variant that uses them is checked like any other.

use wgpu::{ExperimentalFeatures, Features};

/// The consent, if an experimental feature is requested.
pub fn consent(features: Features) -> ExperimentalFeatures {
    if !features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return ExperimentalFeatures::disabled();
    }
    // SAFETY: the one experimental feature in use is the cooperative matrix; its results are checked against the CPU
    // before anything depends on them.
    unsafe { ExperimentalFeatures::enabled() }
}
