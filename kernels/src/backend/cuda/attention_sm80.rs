//! Launches of attention on tensor cores. Queries, keys, values and the output's gradient are narrowed to bf16 rows.
//! The kernels read tiles of 128 queries, or of 64 rows in heads above 128 and in the gradient. Heads above 256, and those
//! that are no multiple of 8, stay with the baseline.

use super::attention::scores;
use super::attention_sm90a::SIZES as SIZES_SM90A;
use super::memory::Width;
use super::{Arg, Cuda, Driver, Launch, Memory, Tier, Tokens, at, at_mut, size};
use crate::backend::{AttentionSaved, Heads, Qkv, QkvGrad, View, ViewMut};

/// Head sizes that have kernels.
const SIZES: [usize; 4] = [64, 96, 128, WIDE];
/// The size whose gradient has a file of its own.
const WIDE: usize = 256;
const THREADS: u32 = 128;
const FORWARD: &str = "attention_sm80.ptx";
const BACKWARD: &str = "attention_grad_sm80.ptx";
const BACKWARD_WIDE: &str = "attention_grad_wide_sm80.ptx";

/// The kernel size for these heads: the smallest of [`SIZES`] that holds them. Rows must be whole pieces of 16 bytes.
fn kernel(heads: Heads) -> Option<usize> {
    let fits = heads.size.is_multiple_of(8) && heads.size > 0;
    SIZES.into_iter().find(|d| fits && heads.size <= *d)
}

/// The arguments that all attention launches of a microbatch share.
pub(super) fn shape(heads: Heads) -> [Arg; 5] {
    let [scale, window] = scores(heads);
    [size(heads.query), size(heads.kv), size(heads.size), scale, window]
}

impl<D: Driver> Cuda<D> {
    /// The size of this device's tensor-core kernel for these heads, if it has one.
    pub(super) fn tensor_attention(&self, heads: Heads) -> Option<usize> {
        if self.tier == Tier::Sm80 { kernel(heads) } else { None }
    }

    pub(super) fn attend_sm80(
        &mut self,
        (out, logsumexp): (ViewMut<Memory>, ViewMut<Memory>),
        qkv: Qkv<Memory>,
        heads: Heads,
        (kernel, tokens): (usize, &Tokens),
    ) {
        let narrow = [qkv.q, qkv.k, qkv.v].map(|x| self.narrowed(x));
        let [q, k, v] = narrow.each_ref().map(|m| Arg::Address(m.at(0)));
        if self.flash().forward && SIZES_SM90A.contains(&heads.size) {
            return self.attend_sm90a((&out, &logsumexp), [q, k, v], heads, tokens);
        }
        let width = if kernel == WIDE { Width::Gradient } else { Width::Queries };
        let (list, blocks) = tokens.blocks(width);
        let [hq, hkv, d, scale, window] = shape(heads);
        let args = [at_mut(&out), at_mut(&logsumexp), q, k, v, Arg::Address(list), hq, hkv, d, scale, window];
        let entry = format!("attention_sm80_{kernel}");
        let grid = [blocks as u32, heads.query as u32, 1];
        self.launch(Launch { file: FORWARD, entry: &entry, grid, threads: THREADS, args: &args });
    }

    pub(super) fn attend_grad_sm80(
        &mut self,
        grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        (kernel, tokens): (usize, &Tokens),
    ) {
        let rows = dout.rows * heads.query;
        let Qkv { q, k, v } = saved.qkv;
        let narrow = [q, k, v].map(|x| self.narrowed(x));
        let [q, k, v] = narrow.each_ref().map(|m| Arg::Address(m.at(0)));
        let narrow_dout = self.narrow(dout);
        let dout = Arg::Address(narrow_dout.at(0));
        let delta = self.take(4 * rows);
        let args = [Arg::Address(delta.at(0)), dout, at(&saved.out), size(rows), size(heads.size)];
        let grid = [super::blocks(rows, 4), 1, 1];
        let entry = "attention_grad_sm80_delta";
        self.launch(Launch { file: BACKWARD, entry, grid, threads: THREADS, args: &args });
        let (lse, delta) = (at(&saved.logsumexp), Arg::Address(delta.at(0)));
        if self.flash().backward && SIZES_SM90A.contains(&heads.size) {
            return self.attend_grad_sm90a(&grad, [q, k, v, dout], (lse, delta), heads, tokens);
        }
        let (list, blocks) = tokens.blocks(Width::Gradient);
        let [hq, hkv, d, scale, window] = shape(heads);
        let list = Arg::Address(list);
        let inputs = [q, k, v, dout, lse, delta, list, hq, hkv, d, scale, window];
        let [dq, dk, dv] = [&grad.dq, &grad.dk, &grad.dv].map(at_mut);
        let (queries, keys) = (heads.query, heads.kv);
        let (file, launches): (_, &[(&str, &[Arg], usize)]) = match kernel {
            WIDE => (BACKWARD_WIDE, &[("q", &[dq], queries), ("k", &[dk], keys), ("v", &[dv], keys)]),
            _ => (BACKWARD, &[("q", &[dq], queries), ("kv", &[dk, dv], keys)]),
        };
        for (name, outs, per) in launches {
            let args: Vec<Arg> = outs.iter().chain(&inputs).copied().collect();
            let entry = format!("{}_{name}_{kernel}", file.trim_end_matches(".ptx"));
            let grid = [blocks as u32, *per as u32, 1];
            self.launch(Launch { file, entry: &entry, grid, threads: THREADS, args: &args });
        }
    }
}
