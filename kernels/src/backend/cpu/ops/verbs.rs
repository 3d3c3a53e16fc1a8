//! The verbs: the work is done in the file of the verb's stem.

use super::super::attention::block::Pass;
use super::super::attention::block_pairs::PairedKeys;
use super::super::attention::forward as attention;
use super::super::attention::gradient::{self as attention_grad, Outputs, Saved};
use super::super::attention::inputs::{Inputs, Segment};
use super::super::device::{Cpu, Ids, Tokens};
use super::super::gemm::product::product;
use super::super::operands::{Context, Factors, Precision, Products, Sizes, Strided};
use super::super::runtime::math;
use super::super::runtime::memory::Memory;
use super::super::weights::weight::Weight;
use super::bf16_activations as short;
use super::convolution;
use super::convolution_silu as silu;
use super::delta_rule;
use super::elementwise::{self, Mask};
use super::linear::Way;
use super::rope::{Turn, rope};
use super::{loss, norm};
use crate::backend::shapes::shaped;
use crate::backend::*;
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::rng;

shaped! {
    Weight: |w| (w.rows(), w.cols());
    Tokens: |tokens| (tokens.ids.len(), tokens.bounds.len() - 1);
    Ids: |ids| (ids.0.len(), 1);
}

impl Backend for Cpu {
    type Memory = Memory;
    type Weight = Weight;
    type Tokens = Tokens;
    type Ids = Ids;

    fn class(&self) -> String {
        if self.portable && self.products == Products::Tiles {
            return PORTABLE.into();
        }
        let name = self.isa.name();
        let dtype = if self.precision == Precision::F32 { "f32" } else { "bf16" };
        // The reference adds in another order: another class.
        match self.products {
            Products::Tiles => format!("cpu-{name}-{dtype}"),
            Products::Plain => format!("cpu-{name}-plain-{dtype}"),
        }
    }

    fn weight_bytes(&self, dtype: Dtype) -> usize {
        self.precision.weight_bytes(dtype)
    }

    fn target(&self) -> Target {
        Target::Cpu(self.footprint())
    }

    fn memory(&mut self, len: usize) -> Memory {
        self.recycling.take(len)
    }

    fn short(&mut self, rows: usize, cols: usize) -> Memory {
        match self.shortens(cols) {
            true => self.recycling.take_pairs(rows * cols / 2),
            false => self.recycling.take(rows * cols),
        }
    }

    fn settle(&mut self, x: Memory, rows: usize, cols: usize) -> Memory {
        if !self.shortens(cols) {
            return x;
        }
        let mut out = self.recycling.take_pairs(rows * cols / 2);
        short::pair_all(self.context(), out.pairs_mut(), &x.values()[..rows * cols]);
        self.recycling.give(x);
        out
    }

    fn short_bytes(&self) -> usize {
        if self.shortens(2) { 2 } else { 4 }
    }

    fn recycle(&mut self, memory: Memory) {
        self.recycling.give(memory);
    }

    fn peak(&mut self) -> Option<u64> {
        Some(self.recycling.peak())
    }

    fn upload(&mut self, mut out: ViewMut<Memory>, values: &[f32]) {
        self.through(&mut out, |_, out| out.copy_from_slice(values));
    }

    fn read(&mut self, x: View<Memory>, out: &mut [f32]) -> Result<(), Fault> {
        let wide = self.widened(&x);
        out.copy_from_slice(wide.as_ref().map_or_else(|| x.values(), Memory::values));
        wide.into_iter().for_each(|m| self.recycle(m));
        Ok(())
    }

    fn lend<'m>(&self, memory: &'m Memory) -> Option<&'m [f32]> {
        (!memory.is_short()).then(|| memory.values())
    }

    fn weight(&mut self, source: Frozen) -> Result<Weight, Fault> {
        Weight::pack(self.context(), source)
    }

    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        Ok(Weight::of_blocks(self.context(), source))
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        self.precision.matrix_bytes(encoding, numbers)
    }

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        Tokens { ids: rows.ids.to_vec(), bounds: rows.bounds.to_vec(), positions: rows.positions().collect() }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        Ids(values.to_vec())
    }

    fn fill(&mut self, mut out: ViewMut<Memory>, value: f32) {
        elementwise::fill(&self.threads, out.values_mut(), value);
    }

    fn copy(&mut self, mut out: ViewMut<Memory>, x: View<Memory>) {
        elementwise::copy(&self.threads, out.values_mut(), x.values());
    }

    fn add(&mut self, mut out: ViewMut<Memory>, x: View<Memory>) {
        elementwise::add(self.context(), out.values_mut(), x.values());
    }

    fn embed(&mut self, mut out: ViewMut<Memory>, table: &Weight, tokens: &Tokens, scale: f32) {
        let (cols, isa) = (out.cols, self.isa);
        self.threads.chunks(out.values_mut(), cols, |t, out| {
            table.row(out, tokens.ids[t] as usize);
            if scale != 1.0 {
                math::scale_row(isa, out, scale);
            }
        });
    }

    fn rmsnorm(
        &mut self,
        mut out: ViewMut<Memory>,
        mut inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        if out.memory.is_short() && gain.cols == out.cols {
            let outputs = (out.pairs_mut(), inv_rms.values_mut());
            return norm::forward_pairs(self.context(), outputs, (x.values(), gain.values()), eps);
        }
        let outputs = (out.values_mut(), inv_rms.values_mut());
        norm::forward(self.context(), outputs, x.cols, (x.values(), gain.values()), eps);
    }

    fn rmsnorm_grad(
        &mut self,
        mut dx: ViewMut<Memory>,
        write: Write,
        dy: View<Memory>,
        x: View<Memory>,
        norm: Norm<Memory>,
    ) {
        let saved = (norm.gain.values(), norm.inv_rms.values());
        norm::grad(self.context(), (dx.values_mut(), write), x.cols, (dy.values(), x.values()), saved);
    }

    fn linear(&mut self, y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        let x = self.factor(x);
        let left = x.left(self.context());
        self.frozen((y, write), (w, Way::Forward), left, None);
        self.done(x);
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, write: Write, dy: View<Memory>, w: &Weight) {
        let dy = self.factor(dy);
        let left = dy.left(self.context());
        self.frozen((dx, write), (w, Way::Backward), left, None);
        self.done(dy);
    }

    fn matmul(&mut self, mut out: ViewMut<Memory>, write: Write, product_of: Product<Memory>) {
        let sizes = Sizes { m: out.rows, n: out.cols, k: product_of.inner() };
        let Product { a, b, transpose, scale } = product_of;
        let (fa, fb) = (Strided::rows(a.values(), a.cols), Strided::rows(b.values(), b.cols));
        let (fa, fb) = match transpose {
            Transpose::Neither => (fa, fb),
            Transpose::Right => (fa, fb.transposed()),
            Transpose::Left => (fa.transposed(), fb),
        };
        let stride = out.cols;
        let factors = Factors { a: fa, b: fb, scale };
        product(self.context(), (out.values_mut(), stride), write, sizes, factors);
    }

    fn bias(&mut self, mut y: ViewMut<Memory>, bias: View<Memory>) {
        elementwise::bias(self.context(), y.values_mut(), bias.values());
    }

    fn rope(&mut self, mut x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.turn(&mut x, table, tokens, Turn::Forth);
    }

    fn rope_grad(&mut self, mut dx: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.turn(&mut dx, table, tokens, Turn::Back);
    }

    fn attention(
        &mut self,
        mut out: ViewMut<Memory>,
        mut logsumexp: ViewMut<Memory>,
        qkv: Qkv<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        let (x, segments) = (inputs(qkv, heads), tokens.segments());
        let mut room = self.memory(PairedKeys::room(self.context(), (&x, &segments), Pass::Forward));
        let outs = (out.values_mut(), logsumexp.values_mut());
        attention::forward(self.context(), outs, x, &segments, room.values_mut());
        self.recycle(room);
    }

    fn attention_grad(
        &mut self,
        mut grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        let Qkv { q, k, v } = saved.qkv;
        let wide = [q, k, v, saved.out].map(|x| self.widened(&x));
        let [q, k, v, out] = [(q, 0), (k, 1), (v, 2), (saved.out, 3)].map(|(x, i)| in_f32(x, &wide[i]));
        let (x, segments) = (inputs(Qkv { q, k, v }, heads), tokens.segments());
        let (out, logsumexp) = (out.values(), saved.logsumexp.values());
        let saved = Saved { out, logsumexp, dout: dout.values() };
        let mut room = self.memory(PairedKeys::room(self.context(), (&x, &segments), Pass::Backward));
        let dq = grad.dq.values_mut();
        if heads.query == heads.kv {
            let out = Outputs { dq, dk: grad.dk.values_mut(), dv: grad.dv.values_mut() };
            attention_grad::grad(self.context(), out, saved, (x, &segments), room.values_mut());
            return wide.into_iter().flatten().chain([room]).for_each(|m| self.recycle(m));
        }
        let mut parts = (self.memory(dq.len()), self.memory(dq.len()));
        let out = Outputs { dq, dk: parts.0.values_mut(), dv: parts.1.values_mut() };
        attention_grad::grad(self.context(), out, saved, (x, &segments), room.values_mut());
        self.recycle(room);
        attention_grad::gather_heads(self.context(), grad.dk.values_mut(), parts.0.values(), heads);
        attention_grad::gather_heads(self.context(), grad.dv.values_mut(), parts.1.values(), heads);
        wide.into_iter().flatten().chain([parts.0, parts.1]).for_each(|m| self.recycle(m));
    }

    fn attention_cached(
        &mut self,
        mut out: ViewMut<Memory>,
        mut logsumexp: ViewMut<Memory>,
        qkv: Qkv<Memory>,
        heads: Heads,
    ) {
        let (queries, keys) = (qkv.q.rows, qkv.k.rows);
        let segment = Segment { from: 0, queries, keys_from: 0, past: keys - queries };
        // One query or a few: reading the keys is the work, and rounding them would be more of it.
        let cx = Context { precision: Precision::F32, ..self.context() };
        let outs = (out.values_mut(), logsumexp.values_mut());
        attention::forward(cx, outs, inputs(qkv, heads), &[segment], &mut []);
    }

    fn convolution(
        &mut self,
        mut out: ViewMut<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        convolution::forward(self.context(), out.values_mut(), convolved(gates, taps, tokens));
    }

    fn convolution_grad(
        &mut self,
        mut grad: GatesGrad<Memory>,
        dout: View<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let grads = [grad.before.values_mut(), grad.after.values_mut(), grad.x.values_mut()];
        convolution::gradient(self.context(), grads, dout.values(), convolved(gates, taps, tokens));
    }

    fn convolution_silu(
        &mut self,
        mut out: ViewMut<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        silu::forward(self.context(), out.values_mut(), activated(x, taps, tokens));
    }

    fn convolution_silu_grad(
        &mut self,
        mut dx: ViewMut<Memory>,
        dout: View<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        silu::gradient(self.context(), dx.values_mut(), dout.values(), activated(x, taps, tokens));
    }

    fn delta_rule(
        &mut self,
        mut out: ViewMut<Memory>,
        mut errors: ViewMut<Memory>,
        mut state: Option<ViewMut<Memory>>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let out = (out.values_mut(), errors.values_mut());
        let state = state.as_mut().map(|state| state.values_mut());
        delta_rule::forward(self.context(), out, state, ruled(inputs, tokens));
    }

    fn delta_rule_grad(
        &mut self,
        mut grad: DeltaGrad<Memory>,
        dout: View<Memory>,
        saved: DeltaSaved<Memory>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        let out = delta_rule::Outputs {
            dq: grad.dq.values_mut(),
            dk: grad.dk.values_mut(),
            dv: grad.dv.values_mut(),
            dbeta: grad.dbeta.values_mut(),
            ddecay: grad.ddecay.values_mut(),
        };
        let (out_of, errors) = (saved.out.values(), saved.errors.values());
        let known = delta_rule::Known { dout: dout.values(), out: out_of, errors };
        delta_rule::gradient(self.context(), out, known, ruled(inputs, tokens));
    }

    fn gated(
        &mut self,
        mut out: ViewMut<Memory>,
        gate: View<Memory>,
        up: View<Memory>,
        activation: Activation,
    ) {
        if out.memory.is_short() {
            return short::gated(self.context(), out.pairs_mut(), (gate.pairs(), up.pairs()), activation);
        }
        elementwise::gated(self.context(), out.values_mut(), (gate.values(), up.values()), activation);
    }

    fn gated_grad(
        &mut self,
        mut gate: ViewMut<Memory>,
        mut up: ViewMut<Memory>,
        dout: View<Memory>,
        activation: Activation,
    ) {
        if gate.memory.is_short() {
            let gates = (gate.pairs_mut(), up.pairs_mut());
            return short::gated_grad(self.context(), gates, dout.pairs(), activation);
        }
        let gates = (gate.values_mut(), up.values_mut());
        elementwise::gated_grad(self.context(), gates, dout.values(), activation);
    }

    fn dropout(
        &mut self,
        mut out: ViewMut<Memory>,
        write: Write,
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        let of_row = |(&id, w): (&u64, &[u32])| {
            (0..w[1] - w[0]).map(move |i| rng::hash(&[key.seed, key.step, id, key.module, u64::from(i)]))
        };
        let bases = key.rows.iter().zip(tokens.bounds.windows(2)).flat_map(of_row).collect();
        let mask = Mask { bases, threshold: key.threshold(), scale: key.scale() };
        let wide = self.widened(&x);
        let values = wide.as_ref().map_or_else(|| x.values(), Memory::values);
        elementwise::dropout(self.context(), out.values_mut(), write, (values, x.cols), &mask);
        wide.into_iter().for_each(|m| self.recycle(m));
    }

    fn gather_rows(&mut self, mut out: ViewMut<Memory>, x: View<Memory>, rows: &Ids) {
        let (cols, x) = (x.cols, x.values());
        self.threads.chunks(out.values_mut(), cols, |n, out| {
            out.copy_from_slice(&x[rows.0[n] as usize * cols..][..cols]);
        });
    }

    fn gather_rows_grad(&mut self, mut dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        let (cols, dout) = (dx.cols, dout.values());
        let dx = dx.values_mut();
        elementwise::fill(&self.threads, dx, 0.0);
        for (&row, dout) in rows.0.iter().zip(dout.chunks_exact(cols)) {
            dx[row as usize * cols..][..cols].copy_from_slice(dout);
        }
    }

    fn scale_rows(&mut self, mut out: ViewMut<Memory>, x: View<Memory>, scales: View<Memory>) {
        let (cols, isa, x, scales) = (x.cols, self.isa, x.values(), scales.values());
        self.threads.chunks(out.values_mut(), cols, |n, out| {
            out.copy_from_slice(&x[n * cols..][..cols]);
            math::scale_row(isa, out, scales[n]);
        });
    }

    fn scale_rows_grad(
        &mut self,
        mut dx: ViewMut<Memory>,
        mut dscales: ViewMut<Memory>,
        x: View<Memory>,
        scales: View<Memory>,
    ) {
        let (cols, isa, x, scales) = (x.cols, self.isa, x.values(), scales.values());
        self.threads.chunks2((dx.values_mut(), dscales.values_mut()), (cols, 1), |n, dx, dscale| {
            dscale.fill(math::dot_rows(isa, dx, &x[n * cols..][..cols]));
            math::scale_row(isa, dx, scales[n]);
        });
    }

    fn cross_entropy(
        &mut self,
        mut losses: ViewMut<Memory>,
        mut logits: ViewMut<Memory>,
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        let vocab = logits.cols;
        let weights = class_weights.map(|w| w.values());
        let rows = (logits.values_mut(), vocab);
        loss::cross_entropy(self.context(), losses.values_mut(), rows, &targets.0, weights);
    }
}

impl Cpu {
    fn turn(&self, x: &mut ViewMut<Memory>, table: View<Memory>, tokens: &Tokens, turn: Turn) {
        let cols = x.cols;
        rope(self.context(), (x.values_mut(), cols), (table.values(), table.cols), &tokens.positions, turn);
    }
}

impl Tokens {
    fn segments(&self) -> Vec<Segment> {
        let of_row = |w: &[u32]| {
            let (from, to) = (w[0] as usize, w[1] as usize);
            Segment { from, queries: to - from, keys_from: from, past: 0 }
        };
        self.bounds.windows(2).map(of_row).collect()
    }
}

/// x, or what [`Cpu::widened`] made of it.
fn in_f32<'a>(x: View<'a, Memory>, wide: &'a Option<Memory>) -> View<'a, Memory> {
    wide.as_ref().map_or(x, |memory| View { memory, offset: 0, ..x })
}

fn convolved<'a>(
    gates: Gates<'a, Memory>,
    taps: View<'a, Memory>,
    tokens: &'a Tokens,
) -> convolution::Inputs<'a> {
    let [before, after, x] = [gates.before, gates.after, gates.x].map(|view| view.values());
    convolution::Inputs {
        before,
        after,
        x,
        taps: taps.values(),
        cols: taps.cols,
        positions: &tokens.positions,
    }
}

fn activated<'a>(x: View<'a, Memory>, taps: View<'a, Memory>, tokens: &'a Tokens) -> silu::Inputs<'a> {
    silu::Inputs { x: x.values(), taps: taps.values(), cols: taps.cols, positions: &tokens.positions }
}

fn ruled<'a>(inputs: Delta<'a, Memory>, tokens: &'a Tokens) -> delta_rule::Inputs<'a> {
    let Delta { q, k, v, beta, decay, rates, heads } = inputs;
    let [q, k, v, beta, decay, rates] = [q, k, v, beta, decay, rates].map(|x| x.values());
    delta_rule::Inputs { q, k, v, beta, decay, rates, heads, bounds: &tokens.bounds }
}

fn inputs<'a>(qkv: Qkv<'a, Memory>, heads: Heads) -> Inputs<'a> {
    Inputs { q: qkv.q.values(), k: qkv.k.values(), v: qkv.v.values(), heads }
}
