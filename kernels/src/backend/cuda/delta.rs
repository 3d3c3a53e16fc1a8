//! The gated delta rule: a row of tokens is computed by one block for each head (forward: and tile of columns), token after
//! token.

use super::{Arg, Cuda, Driver, Launch, Memory, Tokens, at, at_mut, blocks, size};
use crate::backend::{Backend, Delta, DeltaGrad, DeltaHeads, DeltaSaved, View, ViewMut, view, view_mut};

const FILE: &str = "delta_rule.ptx";
/// Values of a state in shared memory, and threads of a block.
const STATE: usize = 4096;
const THREADS: usize = 32;

/// Columns of a state that a block keeps.
fn columns(heads: DeltaHeads) -> usize {
    (STATE / heads.key_size).clamp(1, THREADS)
}

impl<D: Driver> Cuda<D> {
    fn flat(&mut self, entry: &str, n: usize, args: &[Arg]) {
        self.launch(Launch { file: FILE, entry, grid: [blocks(n, 256), 1, 1], threads: 256, args });
    }

    fn over_rows(&mut self, entry: &str, grid: [u32; 3], args: &[Arg]) {
        self.launch(Launch { file: FILE, entry, grid, threads: THREADS as u32, args });
    }

    /// The factors of the states and of the updates [2 T, H].
    fn delta_factors(&mut self, inputs: Delta<Memory>) -> Memory {
        let (rows, heads) = (inputs.beta.rows, inputs.beta.cols);
        let mut factors = self.memory(2 * rows * heads);
        let out = at_mut(&view_mut(&mut factors, 2 * rows, heads));
        let [beta, decay, rates] = [inputs.beta, inputs.decay, inputs.rates].each_ref().map(at);
        let args = [out, beta, decay, rates, size(rows * heads), size(heads)];
        self.flat("delta_factors", rows * heads, &args);
        factors
    }

    pub(super) fn apply_rule(
        &mut self,
        (out, errors): (ViewMut<Memory>, ViewMut<Memory>),
        state: Option<ViewMut<Memory>>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let heads = inputs.heads;
        if tokens.count == 0 {
            return;
        }
        let factors = self.delta_factors(inputs);
        let f = at(&view(&factors, 2 * tokens.count, heads.values));
        let continues = Arg::U32(u32::from(state.is_some()));
        let kept = state.map_or(Arg::Address(0), |state| at_mut(&state));
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].each_ref().map(at);
        let (grid, sizes) = self.shape(heads, tokens);
        let grid = [grid[0], blocks(heads.values, 1), blocks(heads.value_size, columns(heads))];
        let args = [at_mut(&out), at_mut(&errors), kept, q, k, v, f, Arg::Address(tokens.bounds())];
        self.over_rows("delta_rule", grid, &[&args[..], &sizes, &[continues]].concat());
        self.recycle(factors);
    }

    /// Blocks for the rows of tokens and the key heads, and sizes as kernels read them.
    fn shape(&self, heads: DeltaHeads, tokens: &Tokens) -> ([u32; 3], [Arg; 6]) {
        let DeltaHeads { values, keys, value_size, key_size } = heads;
        let sizes = [tokens.count, values, keys, value_size, key_size, columns(heads)].map(size);
        ([blocks(tokens.rows, 1), blocks(keys, 1), 1], sizes)
    }

    pub(super) fn apply_rule_grad(
        &mut self,
        grad: DeltaGrad<Memory>,
        (dout, saved): (View<Memory>, DeltaSaved<Memory>),
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let heads = inputs.heads;
        if tokens.count == 0 {
            return;
        }
        let factors = self.delta_factors(inputs);
        let f = at(&view(&factors, 2 * tokens.count, heads.values));
        let [dq, dk, dv, dbeta, ddecay] =
            [&grad.dq, &grad.dk, &grad.dv, &grad.dbeta, &grad.ddecay].map(at_mut);
        let [q, k, v, d, o, e] =
            [inputs.q, inputs.k, inputs.v, dout, saved.out, saved.errors].each_ref().map(at);
        let bounds = Arg::Address(tokens.bounds());
        let (grid, sizes) = self.shape(heads, tokens);
        self.over_rows("delta_rule_back", grid, &[&[dv, dk, q, k, d, e, f, bounds][..], &sizes].concat());
        self.over_rows("delta_rule_forth", grid, &[&[dq, dk, k, dv, d, e, f, bounds][..], &sizes].concat());
        let n = inputs.beta.len();
        let args = [ddecay, dbeta, o, d, v, dv, e, f, size(n), size(heads.value_size)];
        self.flat("delta_rule_dots", n, &args);
        let (lanes, decay, rates) = (tokens.rows * heads.values, at(&inputs.decay), at(&inputs.rates));
        let args = [ddecay, decay, rates, bounds, size(lanes), size(heads.values)];
        self.flat("delta_rule_sums", lanes, &args);
        self.recycle(factors);
    }
}
