//! Floor 0: numbers. Nothing here knows of tokens, files or devices.

pub mod allowance;
pub mod block;
pub mod caught;
pub mod dtype;
pub mod fixed;
pub mod line;
pub mod pack;
pub mod rng;
pub mod say;
pub mod tensor;
