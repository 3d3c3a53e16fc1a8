//! wgpu asks for a signature before it hands out what is not finished: matrix units. Only tests on real cards can
//! say how good they are there, so a variant that uses them is checked like any other.

use wgpu::{ExperimentalFeatures, Features};

/// The signature, where an experimental feature is asked for.
pub fn consent(features: Features) -> ExperimentalFeatures {
    if !features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return ExperimentalFeatures::disabled();
    }
    // SAFETY: the one experimental feature that is used is the cooperative matrix; what it computes is checked
    // against the CPU before anything depends on it.
    unsafe { ExperimentalFeatures::enabled() }
}
