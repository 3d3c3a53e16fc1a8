//! The verbs: shapes are checked here, and the work is done in the file of the verb's stem.

use super::super::attention::block::Pass;
use super::super::attention::block_pairs::PairedKeys;
use super::super::attention::forward as attention;
use super::super::attention::gradient::{self as attention_grad, Outputs, Saved};
use super::super::attention::inputs::{Inputs, Segment};
use super::super::device::{Cpu, Ids, Tokens};
use super::super::gemm::product::product;
use super::super::operands::{Context, Factors, Precision, Products, Sizes, Strided};
use super::super::runtime::memory::Memory;
use super::super::weights::weight::Weight;
use super::bf16_activations as short;
use super::elementwise::{self, Mask};
use super::linear::Way;
use super::rope::{Turn, rope};
use super::{loss, norm};
use crate::backend::*;
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::rng;

fn same_shape(a: (usize, usize), b: (usize, usize)) {
    assert_eq!(a, b, "both matrices have one shape");
}

impl Backend for Cpu {
    type Memory = Memory;
    type Weight = Weight;
    type Tokens = Tokens;
    type Ids = Ids;

    fn class(&self) -> String {
        let name = self.isa.name();
        let dtype = if self.precision == Precision::F32 { "f32" } else { "bf16" };
        // The reference adds in another order: another class.
        match self.products {
            Products::Tiles => format!("cpu-{name}-{dtype}"),
            Products::Plain => format!("cpu-{name}-plain-{dtype}"),
        }
    }

    fn weight_bytes(&self, dtype: Dtype) -> usize {
        if self.precision == Precision::F32 { dtype.size() } else { Dtype::Bf16.size() }
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
        match encoding {
            Encoding::Plain(dtype) => numbers * self.weight_bytes(dtype),
            blocks => blocks.size_of(numbers),
        }
    }

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        assert_eq!(rows.bounds.last().map(|&b| b as usize), Some(rows.ids.len()), "the last bound is T");
        let of_row = |w: &[u32]| (0..w[1] - w[0]).map(|i| rows.past + i).collect::<Vec<_>>();
        let positions = rows.bounds.windows(2).flat_map(of_row).collect();
        Tokens { ids: rows.ids.to_vec(), bounds: rows.bounds.to_vec(), positions }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        Ids(values.to_vec())
    }

    fn fill(&mut self, mut out: ViewMut<Memory>, value: f32) {
        elementwise::fill(&self.threads, out.values_mut(), value);
    }

    fn copy(&mut self, mut out: ViewMut<Memory>, x: View<Memory>) {
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        elementwise::copy(&self.threads, out.values_mut(), x.values());
    }

    fn add(&mut self, mut out: ViewMut<Memory>, x: View<Memory>) {
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        elementwise::add(self.context(), out.values_mut(), x.values());
    }

    fn embed(&mut self, mut out: ViewMut<Memory>, table: &Weight, tokens: &Tokens) {
        same_shape((out.rows, out.cols), (tokens.ids.len(), table.cols()));
        let cols = out.cols;
        self.threads.chunks(out.values_mut(), cols, |t, out| table.row(out, tokens.ids[t] as usize));
    }

    fn rmsnorm(
        &mut self,
        mut out: ViewMut<Memory>,
        mut inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        same_shape((inv_rms.rows, inv_rms.cols * gain.cols), (x.rows, x.cols));
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
        same_shape((dx.rows, dx.cols), (x.rows, x.cols));
        same_shape((dy.rows, dy.cols), (x.rows, x.cols));
        same_shape((norm.inv_rms.rows, norm.inv_rms.cols * norm.gain.cols), (x.rows, x.cols));
        let saved = (norm.gain.values(), norm.inv_rms.values());
        norm::grad(self.context(), (dx.values_mut(), write), x.cols, (dy.values(), x.values()), saved);
    }

    fn linear(&mut self, y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        same_shape((y.rows, y.cols), (x.rows, w.rows()));
        assert_eq!(x.cols, w.cols(), "x has as many columns as the weight");
        let x = self.factor(x);
        let left = x.left(self.context());
        self.frozen((y, write), (w, Way::Forward), left, None);
        self.done(x);
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, write: Write, dy: View<Memory>, w: &Weight) {
        same_shape((dx.rows, dx.cols), (dy.rows, w.cols()));
        assert_eq!(dy.cols, w.rows(), "dy has as many columns as the weight has rows");
        let dy = self.factor(dy);
        let left = dy.left(self.context());
        self.frozen((dx, write), (w, Way::Backward), left, None);
        self.done(dy);
    }

    fn matmul(&mut self, mut out: ViewMut<Memory>, write: Write, product_of: Product<Memory>) {
        let Product { a, b, transpose, scale } = product_of;
        let (fa, fb) = (Strided::rows(a.values(), a.cols), Strided::rows(b.values(), b.cols));
        let ((a_shape, fa), (b_shape, fb)) = match transpose {
            Transpose::Neither => (((a.rows, a.cols), fa), ((b.rows, b.cols), fb)),
            Transpose::Right => (((a.rows, a.cols), fa), ((b.cols, b.rows), fb.transposed())),
            Transpose::Left => (((a.cols, a.rows), fa.transposed()), ((b.rows, b.cols), fb)),
        };
        assert_eq!(a_shape.1, b_shape.0, "the inner dimensions are equal");
        same_shape((out.rows, out.cols), (a_shape.0, b_shape.1));
        let sizes = Sizes { m: out.rows, n: out.cols, k: a_shape.1 };
        let stride = out.cols;
        let factors = Factors { a: fa, b: fb, scale };
        product(self.context(), (out.values_mut(), stride), write, sizes, factors);
    }

    fn bias(&mut self, mut y: ViewMut<Memory>, bias: View<Memory>) {
        same_shape((1, y.cols), (bias.rows, bias.cols));
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
        let t = tokens.ids.len();
        check_heads(qkv, heads, (t, t));
        same_shape((out.rows, out.cols), (t, heads.query * heads.size));
        same_shape((logsumexp.rows, logsumexp.cols), (t, heads.query));
        let (x, segments) = (inputs(qkv, heads), tokens.segments());
        let mut room = self.memory(PairedKeys::room(self.context(), (&x, &segments), Pass::Forward));
        let out = (out.values_mut(), Some(logsumexp.values_mut()));
        attention::forward(self.context(), out, x, &segments, room.values_mut());
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
        let t = tokens.ids.len();
        check_heads(saved.qkv, heads, (t, t));
        same_shape((dout.rows, dout.cols), (t, heads.query * heads.size));
        same_shape((grad.dq.rows, grad.dq.cols), (t, heads.query * heads.size));
        same_shape((grad.dk.rows, grad.dk.cols), (t, heads.kv * heads.size));
        same_shape((grad.dv.rows, grad.dv.cols), (t, heads.kv * heads.size));
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

    fn attention_cached(&mut self, mut out: ViewMut<Memory>, qkv: Qkv<Memory>, heads: Heads) {
        let (queries, keys) = (qkv.q.rows, qkv.k.rows);
        check_heads(qkv, heads, (queries, keys));
        same_shape((out.rows, out.cols), (queries, heads.query * heads.size));
        let segment = Segment { from: 0, queries, keys_from: 0, past: keys - queries };
        // One query or a few: reading the keys is the work, and rounding them would be more of it.
        let cx = Context { precision: Precision::F32, ..self.context() };
        attention::forward(cx, (out.values_mut(), None), inputs(qkv, heads), &[segment], &mut []);
    }

    fn swiglu(&mut self, mut out: ViewMut<Memory>, gate: View<Memory>, up: View<Memory>) {
        same_shape((out.rows, out.cols), (gate.rows, gate.cols));
        same_shape((out.rows, out.cols), (up.rows, up.cols));
        if out.memory.is_short() {
            return short::swiglu(self.context(), out.pairs_mut(), gate.pairs(), up.pairs());
        }
        elementwise::swiglu(self.context(), out.values_mut(), gate.values(), up.values());
    }

    fn swiglu_grad(&mut self, mut gate: ViewMut<Memory>, mut up: ViewMut<Memory>, dout: View<Memory>) {
        same_shape((gate.rows, gate.cols), (dout.rows, dout.cols));
        same_shape((up.rows, up.cols), (dout.rows, dout.cols));
        if gate.memory.is_short() {
            return short::swiglu_grad(self.context(), gate.pairs_mut(), up.pairs_mut(), dout.pairs());
        }
        elementwise::swiglu_grad(self.context(), gate.values_mut(), up.values_mut(), dout.values());
    }

    fn dropout(
        &mut self,
        mut out: ViewMut<Memory>,
        write: Write,
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        assert_eq!((x.rows, key.rows.len() + 1), (tokens.ids.len(), tokens.bounds.len()), "one id per row");
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
        same_shape((out.rows, out.cols), (rows.0.len(), x.cols));
        let (cols, x) = (x.cols, x.values());
        self.threads.chunks(out.values_mut(), cols, |n, out| {
            out.copy_from_slice(&x[rows.0[n] as usize * cols..][..cols]);
        });
    }

    fn gather_rows_grad(&mut self, mut dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        same_shape((dout.rows, dout.cols), (rows.0.len(), dx.cols));
        let (cols, dout) = (dx.cols, dout.values());
        let dx = dx.values_mut();
        elementwise::fill(&self.threads, dx, 0.0);
        for (&row, dout) in rows.0.iter().zip(dout.chunks_exact(cols)) {
            dx[row as usize * cols..][..cols].copy_from_slice(dout);
        }
    }

    fn cross_entropy(
        &mut self,
        mut losses: ViewMut<Memory>,
        mut logits: ViewMut<Memory>,
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        same_shape((losses.rows, losses.cols), (logits.rows, 1));
        assert_eq!(targets.0.len(), logits.rows, "one target per row of logits");
        let vocab = logits.cols;
        let weights = class_weights.map(|w| w.values());
        let rows = (logits.values_mut(), vocab);
        loss::cross_entropy(self.context(), losses.values_mut(), rows, &targets.0, weights);
    }
}

impl Cpu {
    fn turn(&self, x: &mut ViewMut<Memory>, table: View<Memory>, tokens: &Tokens, turn: Turn) {
        assert_eq!(x.rows, tokens.positions.len(), "one position per token");
        assert_eq!((table.cols % 2, x.cols % table.cols), (0, 0), "whole heads of even size");
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

fn inputs<'a>(qkv: Qkv<'a, Memory>, heads: Heads) -> Inputs<'a> {
    Inputs { q: qkv.q.values(), k: qkv.k.values(), v: qkv.v.values(), heads }
}

/// `tokens` is (queries, keys).
fn check_heads(qkv: Qkv<Memory>, heads: Heads, tokens: (usize, usize)) {
    assert!(heads.kv > 0 && heads.query.is_multiple_of(heads.kv), "key/value heads divide the query heads");
    same_shape((qkv.q.rows, qkv.q.cols), (tokens.0, heads.query * heads.size));
    same_shape((qkv.k.rows, qkv.k.cols), (tokens.1, heads.kv * heads.size));
    same_shape((qkv.v.rows, qkv.v.cols), (tokens.1, heads.kv * heads.size));
}
