//! The tier sm_90a: large products of the bf16 class by wgmma, with operands brought by the copy engine. Only
//! capability 9.0 runs it. It is used after a trial on the device itself ([`super::trial`]). The kernel of a product
//! then follows from its shape alone, and the class name states the tier.

use super::frozen::{Added, Direction};
use super::launches::{Shape, adds};
use super::{Arg, Cuda, Driver, Launch, TensorMap, Tier, size};
use crate::backend::{Checked, Write};

/// Rows and columns of a tile of the output.
const TILE: (usize, usize) = (128, 256);
/// Terms of a step, which are also the columns of a box of the copy engine.
const STEP: usize = 64;
/// One producer warpgroup and two that multiply.
const THREADS: u32 = 384;

/// Whether a product is large enough for these tiles and aligned for the copy engine. A part of the outputs (`s.n` of
/// `s.ldo`) takes the same tier as the whole, so that parts have the bits of the whole.
pub(super) fn takes(s: &Shape, (a, b): (Arg, Arg)) -> bool {
    let aligned = |x: &Arg| matches!(x, Arg::Address(at) if at.is_multiple_of(16));
    (s.m >= TILE.0 && s.ldo >= TILE.1 && s.k >= STEP)
        && (aligned(&a) && aligned(&b) && s.lda.is_multiple_of(8) && s.ldb.is_multiple_of(8))
}

/// A matrix as the copy engine reads it, rows `between` numbers apart.
pub(super) fn map(at: Arg, (rows, cols): (usize, usize), between: usize, box_rows: u32) -> Arg {
    match (at, u32::try_from(rows), u32::try_from(cols)) {
        (Arg::Address(address), Ok(rows), Ok(cols)) => {
            Arg::Tensor(TensorMap { address, rows, cols, stride: 2 * between as u64, box_rows })
        }
        _ => Arg::Beyond(rows.max(cols)),
    }
}

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device with large products by wgmma, if it can run them. There is no trial: a verdict allows it, or a
    /// test examines the kernels themselves.
    pub fn untried(mut self) -> Self {
        self.sm90a = self.driver.sm90a().filter(|_| self.tier == Tier::Sm80);
        self
    }
}

impl<D: Driver> Cuda<D> {
    /// Like [`Cuda::product_bf16`](super::tensor), for shapes that [`takes`] accepts.
    pub(super) fn product_sm90a(
        &mut self,
        processors: u32,
        out: (Arg, Write),
        (a, b): (Arg, Arg),
        s: Shape,
        (direction, added): (Direction, Option<Added>),
    ) {
        let a = map(a, (s.m, s.k), s.lda, TILE.0 as u32);
        let (b, name) = match direction {
            Direction::Forward => (map(b, (s.n, s.k), s.ldb, TILE.1 as u32), "nt"),
            Direction::Backward => (map(b, (s.k, s.n), s.ldb, STEP as u32), "nn"),
        };
        let mut args = vec![out.0, a, b, size(s.m), size(s.n), size(s.k), size(s.ldo), adds(out.1)];
        let (file, stem) = match added {
            None => ("product_sm90a.ptx", "product_sm90a"),
            Some(Added { left, right, rank, between, by }) => {
                args.extend([left, right, size(rank), size(between), Arg::F32(by)]);
                ("lora_linear_sm90a.ptx", "lora_linear_sm90a")
            }
        };
        let tiles = s.m.div_ceil(TILE.0) * s.n.div_ceil(TILE.1);
        let grid = [u32::try_from(tiles).unwrap_or(u32::MAX).min(processors), 1, 1];
        let entry = format!("{stem}_{name}");
        self.launch(Launch { file, entry: &entry, grid, threads: THREADS, args: &args });
    }
}
