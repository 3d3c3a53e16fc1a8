//! The CPU backend: the one that everyone has, and the reference for all others.
//!
//! Every verb checks the shapes of its views, cuts its output into tasks of a fixed size and has finished when
//! it returns. Results depend on the shapes and the instruction set variant alone: on one class, one thread
//! and seven give the same bits. Orders of summation and bounds are in docs/numerics.md.

mod attention;
mod attention_grad;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
#[path = "avx512_absent.rs"]
mod avx512;
mod elementwise;
mod fused;
mod head;
mod isa;
mod loss;
mod math;
mod memory;
mod norm;
mod panels;
mod product;
mod product_crate;
mod product_own;
mod rope;
mod threads;
mod verbs;
mod weight;

use isa::Isa;
pub use memory::Memory;
use memory::Recycling;
use product::Products;
use threads::Threads;
pub use weight::Weight;

/// This machine's processor cores.
pub struct Cpu {
    threads: Threads,
    isa: Isa,
    products: Products,
    recycling: Recycling,
}

/// What the implementation of a verb needs to know.
#[derive(Clone, Copy)]
struct Context<'a> {
    threads: &'a Threads,
    isa: Isa,
    products: Products,
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
        let isa = Isa::detect();
        let products = if isa == Isa::Avx512 { Products::Own } else { Products::Crate };
        Cpu { threads: Threads::new(threads), isa, products, recycling: Recycling::default() }
    }

    /// The slow twin: products through the `gemm` crate, fused operations spelled in verbs. A class of its own.
    pub fn twin(threads: usize) -> Cpu {
        Cpu { products: Products::Crate, ..Cpu::new(threads) }
    }

    /// The same with memory that is handed out full of NaN: for tests, in any build.
    pub fn poisoning(self) -> Cpu {
        Cpu { recycling: Recycling::poisoning(), ..self }
    }

    fn context(&self) -> Context<'_> {
        Context { threads: &self.threads, isa: self.isa, products: self.products }
    }
}
