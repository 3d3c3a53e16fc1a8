//! Floor 0: numbers. Nothing here knows of tokens, files or devices.

pub mod block;
pub mod dtype;
pub mod fixed;
pub mod line;
pub mod pack;
pub mod rng;
pub mod tensor;

/// The revision of everything that decides the bits of a result: kernels, orders of summation, rounding, random
/// numbers. A change that moves a bit of a golden case raises it (docs/numerics.md); the members of a run, and what
/// resumes it, must have the same one.
pub const REVISION: u32 = 1;
