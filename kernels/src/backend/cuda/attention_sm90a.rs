//! Launches of attention by wgmma, for heads of exactly 64 or 128. Inputs and outputs are those of the sm_80 kernels,
//! so each direction is decided separately ([`super::trial_attention`]). All other heads stay with sm_80.

use super::attention_sm80::shape;
use super::memory::Width;
use super::sm90a::map;
use super::{Arg, Cuda, Driver, Launch, Memory, Tier, Tokens, at_mut};
use crate::backend::{Checked, Heads, QkvGrad, ViewMut};

/// Head sizes that have kernels.
pub(super) const SIZES: [usize; 2] = [64, 128];
/// One producer warpgroup and two that multiply.
const THREADS: u32 = 384;
/// Rows of a box that the copy engine brings.
const FORWARD: u32 = 128;
const BACKWARD: u32 = 64;

/// The directions of attention that are computed by wgmma.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flash {
    /// The forward pass.
    pub forward: bool,
    /// The backward pass.
    pub backward: bool,
}

impl Flash {
    /// The part of the class name.
    pub(super) fn name(self) -> &'static str {
        match (self.forward, self.backward) {
            (false, false) => "",
            (true, false) => "-flashfwd",
            (false, true) => "-flashbwd",
            (true, true) => "-flash",
        }
    }
}

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device with attention by wgmma in the directions of `flash`, if the device can run it. There is no
    /// trial: a verdict allows it, or a test examines the kernels themselves.
    pub fn attending(mut self, flash: Flash) -> Self {
        let can = self.driver.sm90a().is_some() && self.tier == Tier::Sm80;
        self.flash = if can { flash } else { Flash::default() };
        self
    }
}

impl<D: Driver> Cuda<D> {
    /// The directions of attention that are computed by wgmma.
    pub fn flash(&self) -> Flash {
        self.flash
    }

    /// Like [`Cuda::attend_sm80`], for narrowed q, k and v in heads of [`SIZES`].
    pub(super) fn attend_sm90a(
        &mut self,
        (out, logsumexp): (&ViewMut<Memory>, &ViewMut<Memory>),
        qkv: [Arg; 3],
        heads: Heads,
        tokens: &Tokens,
    ) {
        let counts = [heads.query, heads.kv, heads.kv];
        let [q, k, v] = tiles(qkv, (counts, heads.size), (tokens.count, FORWARD));
        let (list, blocks) = tokens.blocks(Width::Queries);
        let [hq, hkv, _, scale, window] = shape(heads);
        let args = [at_mut(out), at_mut(logsumexp), q, k, v, Arg::Address(list), hq, hkv, scale, window];
        let entry = format!("attention_sm90a_{}", heads.size);
        let grid = [blocks as u32, heads.query as u32, 1];
        self.launch(Launch {
            file: "attention_sm90a.ptx",
            entry: &entry,
            grid,
            threads: THREADS,
            args: &args,
        });
    }

    /// Computes dq, then dk and dv, like [`Cuda::attend_grad_sm80`] after its delta, from narrowed q, k, v and dout.
    pub(super) fn attend_grad_sm90a(
        &mut self,
        grad: &QkvGrad<Memory>,
        inputs: [Arg; 4],
        (logsumexp, delta): (Arg, Arg),
        heads: Heads,
        tokens: &Tokens,
    ) {
        let counts = [heads.query, heads.kv, heads.kv, heads.query];
        let [q, k, v, dout] = tiles(inputs, (counts, heads.size), (tokens.count, BACKWARD));
        let (list, blocks) = tokens.blocks(Width::Queries);
        let [hq, hkv, _, scale, window] = shape(heads);
        let inputs = [q, k, v, dout, logsumexp, delta, Arg::Address(list), hq, hkv, scale, window];
        let (dq, dkv) = ([at_mut(&grad.dq)], [at_mut(&grad.dk), at_mut(&grad.dv)]);
        for (name, outs, per) in [("q", &dq[..], heads.query), ("kv", &dkv[..], heads.kv)] {
            let args: Vec<Arg> = outs.iter().chain(&inputs).copied().collect();
            let entry = format!("attention_grad_sm90a_{name}_{}", heads.size);
            let grid = [blocks as u32, per as u32, 1];
            let file = "attention_grad_sm90a.ptx";
            self.launch(Launch { file, entry: &entry, grid, threads: THREADS, args: &args });
        }
    }
}

/// Tensor maps of matrices with `heads` heads each, in boxes of `box_rows` rows.
fn tiles<const N: usize>(
    at: [Arg; N],
    (heads, size): ([usize; N], usize),
    (rows, box_rows): (usize, u32),
) -> [Arg; N] {
    std::array::from_fn(|i| map(at[i], (rows, heads[i] * size), heads[i] * size, box_rows))
}
