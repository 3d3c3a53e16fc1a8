//! Floor 0: numbers. This folder has no tokens, files or devices.

pub mod activation;
pub mod block;
pub mod coarse;
pub mod correlation;
pub mod difference;
pub mod dtype;
pub mod fixed;
pub mod line;
pub mod pack;
pub mod rng;
pub mod slices;
pub mod tensor;

/// Revision of the numerics: everything that determines the bits of a result, such as kernels, orders of summation,
/// rounding and random numbers. A change of any bit in a golden case increases it (docs/explain/numerics.md); all
/// members of a run, and a run that resumes it, must have the same revision.
pub const REVISION: u32 = 2;
