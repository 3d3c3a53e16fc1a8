//! The CPU backend: the one that everyone has, and the reference for all others.
//!
//! Every verb cuts its output into tasks of a fixed size and has finished when it returns. Results depend on the shapes and the instruction set variant alone: on one class, one thread
//! and seven give the same bits. Orders of summation and bounds are in docs/numerics.md.

mod adapter;
mod attention;
mod attention_block;
mod attention_floats;
mod attention_grad;
mod attention_pairs;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(not(target_arch = "x86_64"))]
#[path = "avx512_bf16_absent.rs"]
mod avx512_bf16;
mod blocks;
#[cfg(target_arch = "x86_64")]
mod decode;
mod elementwise;
mod few;
mod fused;
mod head;
mod isa;
mod left;
mod loss;
mod math;
mod memory;
mod narrow;
mod norm;
mod panels;
mod peak;
mod product;
mod product_crate;
mod product_own;
mod rope;
mod short;
mod stored;
#[cfg(target_arch = "x86_64")]
mod stored_avx512;
mod threads;
mod tile;
mod tiled;
mod unpack;
#[cfg(target_arch = "x86_64")]
mod unpack_avx512;
mod verbs;
mod weight;

use super::Checked;
use isa::Isa;
pub use isa::refused_limit;
use left::Precision;
pub use memory::Memory;
use memory::Recycling;
pub use peak::Peaks;
use product::Products;
use threads::Threads;
pub use weight::Weight;

/// This machine's processor cores.
pub struct Cpu {
    threads: Threads,
    isa: Isa,
    products: Products,
    precision: Precision,
    recycling: Recycling,
}

/// What the implementation of a verb needs to know.
#[derive(Clone, Copy)]
struct Context<'a> {
    threads: &'a Threads,
    isa: Isa,
    products: Products,
    precision: Precision,
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

impl Checked<Cpu> {
    /// The best instruction set variant of this processor, on that many threads (at least one), in f32.
    pub fn new(threads: usize) -> Self {
        let (threads, precision) = (Threads::new(threads), Precision::F32);
        let (isa, products, recycling) = (isa::best(), Products::Own, Recycling::default());
        Checked::around(Cpu { threads, isa, products, precision, recycling })
    }

    /// The same with factors of products rounded to bf16: those of frozen matrices, of attention and, where our own
    /// kernels multiply, of adapters. Sums, the residual stream, parameters and their gradients stay f32; what only
    /// products, swiglu and the gradient of attention read is then kept in 16 bits (`short.rs`).
    pub fn bf16(threads: usize) -> Self {
        let mut cpu = Self::new(threads);
        cpu.precision = match isa::bf16() {
            isa::Bf16::Fast => Precision::Bf16Dot,
            _ => Precision::Bf16Widened,
        };
        cpu
    }

    /// The other bf16 kernel of the same class, None where the processor has one only: it gives the same bits.
    pub fn bf16_twin(threads: usize) -> Option<Self> {
        let mut cpu = Self::bf16(threads);
        cpu.precision = match cpu.precision {
            Precision::Bf16Dot => Precision::Bf16Widened,
            _ if isa::bf16() != isa::Bf16::None => Precision::Bf16Dot,
            _ => return None,
        };
        Some(cpu)
    }

    /// Whether bf16 is worth its rounding here: its instruction does more than the one for f32.
    pub fn bf16_is_fast() -> bool {
        isa::bf16() == isa::Bf16::Fast
    }

    /// The slow twin in f32: products through the `gemm` crate, fused operations spelled in verbs. A class of its
    /// own.
    pub fn twin(threads: usize) -> Self {
        Self::new(threads).spelled()
    }

    /// The slow twin in the same precision.
    pub fn spelled(mut self) -> Self {
        if self.precision != Precision::F32 {
            self.precision = Precision::Bf16Widened;
        }
        self.products = Products::Crate;
        self
    }

    /// The same with memory that is handed out full of NaN: for tests, in any build.
    pub fn poisoning(mut self) -> Self {
        self.recycling = Recycling::poisoning();
        self
    }
}

impl Cpu {
    fn context(&self) -> Context<'_> {
        Context { threads: &self.threads, isa: self.isa, products: self.products, precision: self.precision }
    }
}
