//! The device: how it computes, and what it holds.

use super::operands::{Context, Precision, Products};
use super::runtime::isa::{self, Isa};
use super::runtime::memory::Recycling;
use super::runtime::threads::Threads;
use crate::backend::Checked;

/// This machine's processor cores.
pub struct Cpu {
    pub(super) threads: Threads,
    pub(super) isa: Isa,
    pub(super) products: Products,
    pub(super) precision: Precision,
    /// Whether its class is the portable one.
    pub(super) portable: bool,
    pub(super) recycling: Recycling,
}

/// Ids, row bounds and positions of a microbatch.
#[derive(Debug, Clone)]
pub struct Tokens {
    pub(super) ids: Vec<u32>,
    pub(super) bounds: Vec<u32>,
    /// Of every token, in its row.
    pub(super) positions: Vec<u32>,
}

/// Plain integers.
#[derive(Debug, Clone)]
pub struct Ids(pub(super) Vec<u32>);

impl Checked<Cpu> {
    /// The best instruction set variant of this processor, on that many threads (at least one), in f32.
    pub fn new(threads: usize) -> Self {
        let (threads, precision) = (Threads::new(threads), Precision::F32);
        let (isa, products, recycling) = (isa::best(), Products::Tiles, Recycling::default());
        Checked::around(Cpu { threads, isa, products, precision, portable: false, recycling })
    }

    /// The f32 device as one of the portable class, which has its bits; `None` if a multiply-add of this processor rounds twice.
    pub fn portable(threads: usize) -> Option<Self> {
        let mut cpu = Self::new(threads);
        cpu.portable = true;
        Self::is_portable().then_some(cpu)
    }

    /// Whether f32 has the bits of the portable class on this processor.
    pub fn is_portable() -> bool {
        isa::best() != Isa::Generic
    }

    /// The f32 device with factors of products rounded to bf16: those of frozen matrices, of attention and, where our own
    /// kernels multiply, of adapters. Sums, the residual stream, parameters and their gradients stay f32; what only
    /// products, gates and the gradient of attention read is then kept in 16 bits (`bf16_activations.rs`).
    pub fn bf16(threads: usize) -> Self {
        let mut cpu = Self::new(threads);
        cpu.precision = match isa::bf16() {
            isa::Bf16::Fast => Precision::Bf16Dot,
            _ => Precision::Bf16Widened,
        };
        cpu
    }

    /// The other bf16 kernel of the same class, None where the processor has one only: it gives the same bits.
    pub fn bf16_reference(threads: usize) -> Option<Self> {
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

    /// The reference in f32: products in plain loops, fused operations spelled in verbs. A class of its own.
    pub fn reference(threads: usize) -> Self {
        Self::new(threads).spelled()
    }

    /// The reference in the same precision.
    pub fn spelled(mut self) -> Self {
        if self.precision != Precision::F32 {
            self.precision = Precision::Bf16Widened;
        }
        self.products = Products::Plain;
        self
    }

    /// The same with memory that is handed out full of NaN: for tests, in any build.
    pub fn poisoning(mut self) -> Self {
        self.recycling = Recycling::poisoning();
        self
    }
}

impl Cpu {
    /// What implementations of verbs need to know.
    pub(super) fn context(&self) -> Context<'_> {
        Context { threads: &self.threads, isa: self.isa, products: self.products, precision: self.precision }
    }

    /// Whether an adapter's factors are rounded: in bf16, where tiles multiply.
    pub(super) fn rounds(&self) -> bool {
        self.precision != Precision::F32 && self.products == Products::Tiles
    }
}
