//! The CPU backend: the one that everyone has, and the reference for all others.
//!
//! Every verb checks the shapes of its views, cuts its output into tasks of a fixed size and has finished when
//! it returns. Results depend on the shapes and the instruction set variant alone: on one class, one thread
//! and seven give the same bits. Orders of summation and bounds are in docs/numerics.md.

mod attention;
mod attention_grad;
mod elementwise;
mod isa;
mod loss;
mod math;
mod memory;
mod norm;
mod product;
mod rope;
mod threads;
mod verbs;
mod weight;

use isa::Isa;
pub use memory::Memory;
use memory::Recycling;
use threads::Threads;
pub use weight::Weight;

/// This machine's processor cores.
pub struct Cpu {
    threads: Threads,
    isa: Isa,
    recycling: Recycling,
}

/// Ids, row bounds and positions of a microbatch.
#[derive(Debug, Clone)]
pub struct Tokens {
    ids: Vec<u32>,
    bounds: Vec<u32>,
    /// Of every token, in its row.
    positions: Vec<u32>,
}

/// Plain integers.
#[derive(Debug, Clone)]
pub struct Ids(Vec<u32>);

impl Cpu {
    /// The best instruction set variant of this processor, on that many threads (at least one).
    pub fn new(threads: usize) -> Cpu {
        Cpu { threads: Threads::new(threads), isa: Isa::detect(), recycling: Recycling::default() }
    }

    /// What a verb's implementation needs to know.
    fn context(&self) -> (&Threads, Isa) {
        (&self.threads, self.isa)
    }
}

impl crate::backend::Fused for Cpu {}
