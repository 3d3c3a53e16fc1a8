//! Launches of attention by wgmma, of heads of exactly 64 or 128. They take what those of sm_80 take and give what those
//! give, so each direction is decided for itself ([`super::trial_attention`]); every other head stays with sm_80.

use super::attention_sm80::shape;
use super::memory::Width;
use super::sm90a::map;
use super::{Arg, Cuda, Driver, Launch, Memory, Tier, Tokens, at_mut};
use crate::backend::{Heads, ViewMut};

/// Sizes of heads that kernels are written for.
pub(super) const SIZES: [usize; 2] = [64, 128];
/// One producer warpgroup and two that multiply.
const THREADS: u32 = 384;
/// Rows of a tile of the forward pass, which the copy engine brings at a time.
const TILE: u32 = 128;

/// What of attention is computed by wgmma.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flash {
    /// Attention itself.
    pub forward: bool,
    /// Its gradient.
    pub backward: bool,
}

impl Flash {
    /// As a class has it.
    pub(super) fn name(self) -> &'static str {
        match (self.forward, self.backward) {
            (false, false) => "",
            (true, false) => "-flashfwd",
            (false, true) => "-flashbwd",
            (true, true) => "-flash",
        }
    }
}

impl<D: Driver> Cuda<D> {
    /// The same device with attention by wgmma where `flash` says so and it can run it, without a trial: another device on
    /// the same card was tried, or a test looks at the kernels themselves.
    pub fn attending(mut self, flash: Flash) -> Self {
        let can = self.driver.sm90a().is_some() && self.tier == Tier::Sm80;
        self.flash = if can { flash } else { Flash::default() };
        self
    }

    /// What of attention is computed by wgmma.
    pub fn flash(&self) -> Flash {
        self.flash
    }

    /// As [`Cuda::attend_sm80`], of narrowed q, k and v; false for heads that it is not written for.
    pub(super) fn attend_sm90a(
        &mut self,
        (out, logsumexp): (&ViewMut<Memory>, &ViewMut<Memory>),
        qkv: [Arg; 3],
        heads: Heads,
        tokens: &Tokens,
    ) -> bool {
        if !self.flash.forward || !SIZES.contains(&heads.size) {
            return false;
        }
        let [q, k, v] = tiles(qkv, heads, (tokens.count, TILE));
        let (list, blocks) = tokens.blocks(Width::Queries);
        let [hq, hkv, _, scale] = shape(heads);
        let args = [at_mut(out), at_mut(logsumexp), q, k, v, Arg::Address(list), hq, hkv, scale];
        let entry = format!("attention_sm90a_{}", heads.size);
        let grid = [blocks as u32, heads.query as u32, 1];
        self.launch(Launch {
            file: "attention_sm90a.ptx",
            entry: &entry,
            grid,
            threads: THREADS,
            args: &args,
        });
        true
    }
}

/// q, k and v as the copy engine reads them, boxes of so many rows.
fn tiles([q, k, v]: [Arg; 3], heads: Heads, (rows, box_rows): (usize, u32)) -> [Arg; 3] {
    let of = |at, count| map(at, (rows, count * heads.size), count * heads.size, box_rows);
    [of(q, heads.query), of(k, heads.kv), of(v, heads.kv)]
}
