//! The gated delta rule and the convolution before it. A row of tokens is computed by one workgroup for each head (forward:
//! and tile of columns), token after token; the heads of all rows are split if a dispatch would take too long.

use super::device::Call;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::Kernel;
use super::memory::Place;
use super::pipelines::Slot;
use super::rows::{ELEMENT, kernel};
use super::{Memory, Tokens, Wgpu};
use crate::backend::{Backend, Delta, DeltaGrad, DeltaHeads, DeltaSaved, View, ViewMut, view, view_mut};

kernel!(SILU, "convolution_silu", ["usual"], [Written, Read, Read, Read]);
kernel!(SILU_GRAD, "convolution_silu_grad", ["usual"], [Written, Read, Read, Read, Read]);
kernel!(FACTORS, "delta_factors", [], [Written, Read, Read, Read]);
kernel!(RULE, "delta_rule", [], [Written, Written, Written, Read, Read, Read, Read, Read]);
kernel!(BACK, "delta_rule_back", ["delta_rule_rows"], [Written, Written, Read, Read, Read, Read, Read, Read]);
kernel!(
    FORTH,
    "delta_rule_forth",
    ["delta_rule_rows"],
    [Written, Written, Read, Read, Read, Read, Read, Read]
);
kernel!(DOTS, "delta_rule_dots", [], [Written, Written, Read, Read, Read, Read, Read, Read]);
kernel!(SUMS, "delta_rule_sums", [], [Written, Read, Read, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&SILU, &SILU_GRAD, &FACTORS, &RULE, &BACK, &FORTH, &DOTS, &SUMS];

/// Values of a state in shared memory, and lanes of a workgroup.
const STATE: usize = 4096;
const LANES: usize = 32;

/// Cost of an operation in these loops relative to one in a tiled product.
const SCALAR: f64 = 8.0;

/// Columns of a state that a workgroup keeps.
fn columns(heads: DeltaHeads) -> usize {
    (STATE / heads.key_size).clamp(1, LANES)
}

impl Wgpu {
    pub(super) fn convolve_silu(
        &mut self,
        mut out: ViewMut<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let (above, reach) = (x.rows - out.rows, taps.rows - 1);
        let positions = Place { slot: self.integers(&tokens.integers), base: 0 };
        let w = self.at(taps);
        for (from, rows) in self.pieces(out.rows, 2 * out.cols, ELEMENT * taps.len() as f64) {
            let first = (above + from).saturating_sub(reach);
            let part = out.again().rows(from, rows);
            let (o, n, cols) = (self.at_mut(&part), part.len(), part.cols);
            let x = self.at(x.rows(first, above + from + rows - first));
            let sizes = [tokens.len() + from, n, cols, taps.rows, above + from - first].map(|x| x as u32);
            let params = [&[o.base, x.base, w.base][..], &sizes].concat();
            self.each(&SILU, n, &params, &[&o, &x, &w, &positions]);
        }
    }

    pub(super) fn convolve_silu_grad(
        &mut self,
        mut dx: ViewMut<Memory>,
        (dout, x): (View<Memory>, View<Memory>),
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let reach = taps.rows - 1;
        let positions = Place { slot: self.integers(&tokens.integers), base: 0 };
        let w = self.at(taps);
        let work = ELEMENT * (taps.rows * taps.len()) as f64;
        for (from, rows) in self.pieces(dout.rows, 3 * dout.cols, work) {
            let (first, left) = (from.saturating_sub(reach), dout.rows - from);
            let reached = left.min(rows + reach);
            let part = dx.again().rows(from, rows);
            let (o, n, cols) = (self.at_mut(&part), part.len(), part.cols);
            let (d, x) = (self.at(dout.rows(from, reached)), self.at(x.rows(first, from + reached - first)));
            let sizes = [tokens.len() + from, n, cols, taps.rows, left, from - first].map(|x| x as u32);
            let params = [&[o.base, d.base, x.base, w.base][..], &sizes].concat();
            self.each(&SILU_GRAD, n, &params, &[&o, &d, &x, &w, &positions]);
        }
    }

    /// The factors of the states and of the updates [2 T, H].
    fn delta_factors(&mut self, inputs: Delta<Memory>) -> Memory {
        let (n, heads) = (inputs.beta.len(), inputs.beta.cols);
        let mut factors = self.memory(2 * n);
        let o = self.at_mut(&view_mut(&mut factors, 2 * inputs.beta.rows, heads));
        let [b, d, r] = [inputs.beta, inputs.decay, inputs.rates].map(|x| self.at(x));
        let params = [o.base, b.base, d.base, r.base, n as u32, heads as u32];
        self.each(&FACTORS, n, &params, &[&o, &b, &d, &r]);
        factors
    }

    /// Whether its class has no gated delta rule, which is a fault of the device.
    fn lacks_rule(&mut self) -> bool {
        let lacks = self.portable.is_some();
        if lacks {
            self.gpu.faults.raise("--dtype portable has no gated delta rule on GPUs");
        }
        lacks
    }

    /// Runs `count` workgroups for the rows of tokens, each of which takes `work` for a token.
    fn over_rows(
        &mut self,
        kernel: &'static Kernel,
        (bases, places): (&[u32], &[&Place]),
        sizes: &[u32],
        (tokens, each, work): (&Tokens, usize, usize),
    ) {
        let integers = self.integers(&tokens.integers);
        let slots: Vec<Slot> = places.iter().map(|p| p.slot.clone()).chain([integers]).collect();
        let longest = tokens.bounds.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        let work = SCALAR * work as f64 * f64::from(longest);
        let rows = tokens.bounds.len() - 1;
        for (first, count) in self.pieces(rows * each, 0, work) {
            let range = [tokens.len(), first, count].map(|x| x as u32);
            self.gpu.dispatch(Call {
                kernel,
                constants: &[],
                params: &[bases, &range, sizes].concat(),
                slots: &slots,
                groups: count as u64,
                work: work * count as f64,
            });
        }
    }

    pub(super) fn apply_rule(
        &mut self,
        (out, errors): (ViewMut<Memory>, ViewMut<Memory>),
        state: Option<ViewMut<Memory>>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let heads = inputs.heads;
        if tokens.len() == 0 || self.lacks_rule() {
            return;
        }
        let factors = self.delta_factors(inputs);
        let f = self.at(view(&factors, 2 * inputs.beta.rows, heads.values));
        let continues = u32::from(state.is_some());
        let none = self.memory(1);
        let s = state.map_or_else(|| self.at(view(&none, 1, 1)), |state| self.at_mut(&state));
        let [o, e] = [&out, &errors].map(|x| self.at_mut(x));
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|x| self.at(x));
        let places = [&o, &e, &s, &q, &k, &v, &f];
        let bases = places.map(|p| p.base);
        let DeltaHeads { values, keys, value_size, key_size } = heads;
        let columns = columns(heads);
        let sizes = [values, keys, value_size, key_size, columns].map(|x| x as u32);
        let each = values * value_size.div_ceil(columns);
        let (work, sizes) = (3 * key_size * columns, [&sizes[..], &[continues]].concat());
        self.over_rows(&RULE, (&bases, &places), &sizes, (tokens, each, work));
        [factors, none].into_iter().for_each(|m| self.recycle(m));
    }

    pub(super) fn apply_rule_grad(
        &mut self,
        grad: DeltaGrad<Memory>,
        (dout, saved): (View<Memory>, DeltaSaved<Memory>),
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let heads = inputs.heads;
        if tokens.len() == 0 || self.lacks_rule() {
            return;
        }
        let DeltaHeads { values, keys, value_size, key_size } = heads;
        let factors = self.delta_factors(inputs);
        let f = self.at(view(&factors, 2 * inputs.beta.rows, values));
        let [dq, dk, dv, dbeta, ddecay] =
            [&grad.dq, &grad.dk, &grad.dv, &grad.dbeta, &grad.ddecay].map(|x| self.at_mut(x));
        let [q, k, v, d, o, e] =
            [inputs.q, inputs.k, inputs.v, dout, saved.out, saved.errors].map(|x| self.at(x));
        let sizes = [values, keys, value_size, key_size, columns(heads)].map(|x| x as u32);
        let each = (tokens, keys, 3 * values / keys * key_size * value_size);
        for (kernel, places) in
            [(&BACK, [&dv, &dk, &q, &k, &d, &e, &f]), (&FORTH, [&dq, &dk, &k, &dv, &d, &e, &f])]
        {
            self.over_rows(kernel, (&places.map(|p| p.base), &places), &sizes, each);
        }
        let n = inputs.beta.len();
        let places = [&ddecay, &dbeta, &o, &d, &v, &dv, &e, &f];
        let params = [&places.map(|p| p.base)[..], &[n as u32, value_size as u32]].concat();
        self.each(&DOTS, n, &params, &places);
        let (decay, rates) = (self.at(inputs.decay), self.at(inputs.rates));
        let lanes = (tokens.bounds.len() - 1) * values;
        let bases = [&ddecay, &decay, &rates].map(|p| p.base);
        let params = [&bases[..], &[lanes, tokens.len(), values].map(|x| x as u32)].concat();
        let integers = Place { slot: self.integers(&tokens.integers), base: 0 };
        self.each(&SUMS, lanes, &params, &[&ddecay, &decay, &rates, &integers]);
        self.recycle(factors);
    }
}
