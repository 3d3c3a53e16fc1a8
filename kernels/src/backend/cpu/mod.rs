//! The CPU backend: the one that everyone has, and the reference for all others.
//!
//! Every verb cuts its output into tasks of a fixed size and has finished when it returns. Results depend on the shapes and the instruction set variant alone: on one class, one thread
//! and seven give the same bits. Orders of summation and bounds are in docs/explain/numerics.md.
//!
//! Each folder sees those before it: `runtime` (threads, memory, instruction sets), `operands.rs`, `gemm` (products),
//! `weights` (frozen matrices), `attention`, `device.rs`, `ops` (the verbs).

mod attention;
mod device;
mod dry;
mod gemm;
mod operands;
mod ops;
mod runtime;
mod weights;

pub use device::{Cpu, Ids, Tokens};
pub use dry::{DryCpu, Footprint};
pub use ops::peak::Peaks;
pub use runtime::isa::refused_limit;
pub use runtime::memory::Memory;
pub use weights::weight::Weight;
