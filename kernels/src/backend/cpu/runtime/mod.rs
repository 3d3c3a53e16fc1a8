//! What kernels stand on: threads, memory, instruction set variants, and the arithmetic that they share.

pub mod bf16;
pub mod isa;
pub mod math;
pub mod memory;
pub mod threads;
