//! The verbs: each records its work through the file of its kind.

use super::pool::Leased;
use super::{Ids, Memory, Tokens, Weight, Wgpu};
use crate::backend::shapes::shaped;
use crate::backend::*;

impl Wgpu {
    /// Uploads integers to a buffer that is returned on drop.
    pub(super) fn lease(&mut self, values: &[u32]) -> Leased {
        let leased = self.gpu.lease(values.len() as u64 * 4);
        self.gpu.upload(&leased.storage, 0, bytemuck::cast_slice(values));
        leased
    }
}

shaped! {
    Weight: |w| (w.rows, w.cols);
    Tokens: |tokens| (tokens.len(), tokens.bounds.len() - 1);
    Ids: |ids| (ids.len, 1);
}

impl Backend for Wgpu {
    type Memory = Memory;
    type Weight = Weight;
    type Tokens = Tokens;
    type Ids = Ids;

    fn class(&self) -> String {
        self.class.clone()
    }

    fn weight_bytes(&self, dtype: Dtype) -> usize {
        dtype.size()
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        super::weight::matrix_bytes(encoding, numbers)
    }

    fn target(&self) -> Target {
        Target::Wgpu(self.footprint())
    }

    fn memory(&mut self, len: usize) -> Memory {
        let mut memory = Memory { storage: self.gpu.take(len as u64 * 4), len };
        if self.poison {
            self.fill_view(view_mut(&mut memory, 1, len), f32::NAN);
        }
        memory
    }

    fn recycle(&mut self, memory: Memory) {
        self.gpu.pool.give(memory.storage);
    }

    fn upload(&mut self, out: ViewMut<Memory>, values: &[f32]) {
        assert!(out.offset + out.len() <= out.memory.len, "a view stays inside its memory");
        self.gpu.upload(&out.memory.storage, out.offset as u64 * 4, bytemuck::cast_slice(values));
    }

    fn read(&mut self, x: View<Memory>, out: &mut [f32]) -> Result<(), Fault> {
        self.read_all(&mut [(x, out)])
    }

    fn read_all(&mut self, parts: &mut [(View<Memory>, &mut [f32])]) -> Result<(), Fault> {
        let bytes = |x: &View<Memory>| (x.offset as u64 * 4, x.len() as u64 * 4);
        let wanted: Vec<_> = parts.iter().map(|(x, _)| (&x.memory.storage, bytes(x).0, bytes(x).1)).collect();
        let mut all = vec![0.0f32; parts.iter().map(|(x, _)| x.len()).sum()];
        self.gpu.read(&wanted, bytemuck::cast_slice_mut(&mut all))?;
        let mut rest = &all[..];
        for (x, out) in parts {
            let (own, after) = rest.split_at(x.len());
            out.copy_from_slice(own);
            rest = after;
        }
        self.gpu.lap();
        self.keep_compiled();
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        let made = self.gpu.pool.made + self.gpu.pipelines.groups_made + self.gpu.pipelines.compiled() as u64;
        Traffic { made, ..self.gpu.traffic }
    }

    fn peak(&mut self) -> Option<u64> {
        Some(self.gpu.pool.peak())
    }

    fn doing(&mut self, op: &'static str) {
        self.gpu.faults.doing(op);
    }

    fn border(&mut self) {
        self.gpu.border();
    }

    fn prepare(&mut self, heads: Heads) -> Result<(), Fault> {
        self.try_heads(heads.size)
    }

    fn weight(&mut self, source: Frozen) -> Result<Weight, Fault> {
        self.freeze(source)
    }

    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        self.freeze_blocks(source)
    }

    fn release(&mut self, weight: Weight) {
        weight.parts.into_iter().for_each(|part| self.gpu.pool.vacate(part.storage));
    }

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        let mut all = rows.ids.to_vec();
        let windows = || rows.bounds.windows(2).flat_map(|w| (w[0]..w[1]).map(|_| (w[0], w[1])));
        all.extend(rows.positions());
        all.extend(windows().map(|(from, _)| from));
        all.extend(windows().map(|(_, end)| end));
        all.extend(rows.bounds);
        Tokens { integers: self.lease(&all), bounds: rows.bounds.to_vec(), number: Tokens::next_number() }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        Ids { integers: self.lease(values), len: values.len() }
    }

    fn fill(&mut self, out: ViewMut<Memory>, value: f32) {
        self.fill_view(out, value);
    }

    fn copy(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.copy_view(out, x);
    }

    fn add(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.add_view(out, x);
    }

    fn embed(&mut self, out: ViewMut<Memory>, table: &Weight, tokens: &Tokens, scale: f32) {
        self.embed_rows(out, table, tokens, scale);
    }

    fn rmsnorm(
        &mut self,
        out: ViewMut<Memory>,
        inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        self.norm((out, inv_rms), x, gain, eps);
    }

    fn rmsnorm_grad(
        &mut self,
        dx: ViewMut<Memory>,
        write: Write,
        dy: View<Memory>,
        x: View<Memory>,
        norm: Norm<Memory>,
    ) {
        self.norm_grad((dx, write), dy, x, norm);
    }

    fn linear(&mut self, y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        self.frozen(y, write, x, w);
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, write: Write, dy: View<Memory>, w: &Weight) {
        self.frozen_grad(dx, write, dy, w);
    }

    fn matmul(&mut self, out: ViewMut<Memory>, write: Write, product: Product<Memory>) {
        self.trained(out, write, product);
    }

    fn bias(&mut self, y: ViewMut<Memory>, bias: View<Memory>) {
        self.add_bias(y, bias);
    }

    fn rope(&mut self, x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.turn(x, table, tokens, 1.0);
    }

    fn rope_grad(&mut self, dx: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.turn(dx, table, tokens, -1.0);
    }

    fn attention(
        &mut self,
        out: ViewMut<Memory>,
        logsumexp: ViewMut<Memory>,
        qkv: Qkv<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        self.attend((out, logsumexp), qkv, heads, tokens);
    }

    fn attention_grad(
        &mut self,
        grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        self.attend_grad(grad, dout, saved, heads, tokens);
    }

    fn attention_cached(
        &mut self,
        out: ViewMut<Memory>,
        logsumexp: ViewMut<Memory>,
        qkv: Qkv<Memory>,
        heads: Heads,
    ) {
        self.attend_cached((out, logsumexp), qkv, heads);
    }

    fn convolution(
        &mut self,
        out: ViewMut<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        self.convolve(out, gates, taps, tokens);
    }

    fn convolution_grad(
        &mut self,
        grad: GatesGrad<Memory>,
        dout: View<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        self.convolve_grad(grad, dout, gates, taps, tokens);
    }

    fn convolution_silu(
        &mut self,
        out: ViewMut<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        self.convolve_silu(out, x, taps, tokens);
    }

    fn convolution_silu_grad(
        &mut self,
        dx: ViewMut<Memory>,
        dout: View<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        self.convolve_silu_grad(dx, (dout, x), taps, tokens);
    }

    fn delta_rule(
        &mut self,
        out: ViewMut<Memory>,
        errors: ViewMut<Memory>,
        state: Option<ViewMut<Memory>>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        self.apply_rule((out, errors), state, inputs, tokens);
    }

    fn delta_rule_grad(
        &mut self,
        grad: DeltaGrad<Memory>,
        dout: View<Memory>,
        saved: DeltaSaved<Memory>,
        inputs: Delta<Memory>,
        tokens: &Tokens,
    ) {
        self.apply_rule_grad(grad, (dout, saved), inputs, tokens);
    }

    fn gated(&mut self, out: ViewMut<Memory>, gate: View<Memory>, up: View<Memory>, activation: Activation) {
        self.gate(out, gate, up, activation);
    }

    fn gated_grad(
        &mut self,
        gate: ViewMut<Memory>,
        up: ViewMut<Memory>,
        dout: View<Memory>,
        activation: Activation,
    ) {
        self.gate_grad(gate, up, dout, activation);
    }

    fn dropout(
        &mut self,
        out: ViewMut<Memory>,
        write: Write,
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        self.mask((out, write), x, key, tokens);
    }

    fn gather_rows(&mut self, out: ViewMut<Memory>, x: View<Memory>, rows: &Ids) {
        self.gather(out, x, rows);
    }

    fn gather_rows_grad(&mut self, dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        self.scatter(dx, dout, rows);
    }

    fn scale_rows(&mut self, out: ViewMut<Memory>, x: View<Memory>, scales: View<Memory>) {
        self.scale_by_row(out, x, scales);
    }

    fn scale_rows_grad(
        &mut self,
        dx: ViewMut<Memory>,
        dscales: ViewMut<Memory>,
        x: View<Memory>,
        scales: View<Memory>,
    ) {
        self.scale_by_row_grad((dx, dscales), x, scales);
    }

    fn cross_entropy(
        &mut self,
        losses: ViewMut<Memory>,
        logits: ViewMut<Memory>,
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        self.loss_rows((losses, logits), targets, class_weights);
    }
}
