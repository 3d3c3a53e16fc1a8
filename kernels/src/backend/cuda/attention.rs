//! Launches of attention: which tile a head size takes, and the blocks of tokens that a launch walks.

use super::memory::{self, BLOCK, Width};
use super::{Arg, Cuda, Driver, Launch, Memory, Tokens, at, at_mut, size};
use crate::backend::{AttentionSaved, Heads, Qkv, QkvGrad, View, ViewMut};

/// Queries and keys of a tile, by the head size of the kernel. A tile fits into the 48 KiB of shared memory that every
/// device gives by default.
const FORWARD: [(usize, u32); 3] = [(64, 32), (128, 32), (256, 16)];
const BACKWARD: [(usize, u32); 3] = [(64, 32), (128, 16), (256, 8)];

/// The window of heads without one, in the kernels: no row is as long, and sums with places stay below 2^32.
const UNBOUNDED: usize = 1 << 30;

/// The scale of scores, and the window.
pub(super) fn scores(heads: Heads) -> [Arg; 2] {
    let window = heads.window.unwrap_or(UNBOUNDED).min(UNBOUNDED);
    [Arg::F32(1.0 / (heads.size as f32).sqrt()), size(window)]
}

/// The address of the token blocks, and the number of keys before the first query.
pub(super) struct Walk {
    pub list: u64,
    pub blocks: usize,
    pub past: usize,
}

pub(super) fn walk(tokens: &Tokens) -> Walk {
    let (list, blocks) = tokens.blocks(Width::Baseline);
    Walk { list, blocks, past: 0 }
}

impl<D: Driver> Cuda<D> {
    /// (head size of the kernel, tile)
    fn tile(&mut self, table: [(usize, u32); 3], heads: Heads) -> Option<(usize, u32)> {
        let found = table.into_iter().find(|(d, _)| heads.size <= *d);
        if found.is_none() {
            self.refuse(format!("a head size of {}: attention is written for at most 256", heads.size));
        }
        found
    }

    pub(super) fn attend(
        &mut self,
        out: ViewMut<Memory>,
        logsumexp: ViewMut<Memory>,
        qkv: Qkv<Memory>,
        heads: Heads,
        walk: Walk,
    ) {
        let Some((d, tile)) = self.tile(FORWARD, heads) else { return };
        let [scale, window] = scores(heads);
        let args = [
            at_mut(&out),
            at_mut(&logsumexp),
            at(&qkv.q),
            at(&qkv.k),
            at(&qkv.v),
            Arg::Address(walk.list),
            size(heads.query),
            size(heads.kv),
            size(heads.size),
            size(walk.past),
            scale,
            window,
        ];
        let parts = BLOCK as u32 / tile;
        let grid = [walk.blocks as u32 * parts, heads.query as u32, 1];
        let entry = format!("attention_{d}");
        self.launch(Launch { file: "attention.ptx", entry: &entry, grid, threads: 4 * tile, args: &args });
    }

    pub(super) fn attend_cached(
        &mut self,
        (out, logsumexp): (ViewMut<Memory>, ViewMut<Memory>),
        qkv: Qkv<Memory>,
        heads: Heads,
    ) {
        let (queries, keys) = (qkv.q.rows, qkv.k.rows);
        let list = memory::blocks(&[0, queries as u32], BLOCK);
        let memory = self.integers(&list);
        let walk = Walk { list: memory.at(0), blocks: list.len() / 4, past: keys - queries };
        self.attend(out, logsumexp, qkv, heads, walk);
    }

    pub(super) fn attend_grad(
        &mut self,
        grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        walk: Walk,
    ) {
        let Some((d, tile)) = self.tile(BACKWARD, heads) else { return };
        let rows = dout.rows * heads.query;
        let delta = self.take(4 * rows);
        let at_delta = Arg::Address(delta.at(0));
        let args = [at_delta, at(&dout), at(&saved.out), size(rows), size(heads.size)];
        let grid = [super::blocks(rows, 4), 1, 1];
        let file = "attention_grad.ptx";
        self.launch(Launch { file, entry: "attention_grad_delta", grid, threads: 128, args: &args });
        let Qkv { q, k, v } = saved.qkv;
        let [scale, window] = scores(heads);
        let rest = [
            at(&q),
            at(&k),
            at(&v),
            at(&dout),
            at(&saved.logsumexp),
            at_delta,
            Arg::Address(walk.list),
            size(heads.query),
            size(heads.kv),
            size(heads.size),
            scale,
            window,
        ];
        let parts = BLOCK as u32 / tile;
        let blocks = walk.blocks as u32 * parts;
        let (dq, dkv) = (format!("attention_grad_q_{d}"), format!("attention_grad_kv_{d}"));
        let args: Vec<Arg> = std::iter::once(at_mut(&grad.dq)).chain(rest).collect();
        let grid = [blocks, heads.query as u32, 1];
        self.launch(Launch { file, entry: &dq, grid, threads: 4 * tile, args: &args });
        let args: Vec<Arg> = [at_mut(&grad.dk), at_mut(&grad.dv)].into_iter().chain(rest).collect();
        let grid = [blocks, heads.kv as u32, 1];
        self.launch(Launch { file, entry: &dkv, grid, threads: 4 * tile, args: &args });
    }
}
