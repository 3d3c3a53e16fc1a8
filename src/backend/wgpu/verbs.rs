//! The verbs: shapes are checked here, and the work is recorded in the file of the verb's kind.

use super::pool::Leased;
use super::{Ids, Memory, Tokens, Weight, Wgpu};
use crate::backend::shapes::{check_heads, check_product, same_shape};
use crate::backend::*;

impl Wgpu {
    /// Integers in a buffer that goes back by itself.
    pub(super) fn lease(&mut self, values: &[u32]) -> Leased {
        let leased = self.gpu.lease(values.len() as u64 * 4);
        self.gpu.upload(&leased.storage, 0, bytemuck::cast_slice(values));
        leased
    }
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

    fn memory(&mut self, len: usize) -> Memory {
        self.gpu.faults.doing("memory");
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
        assert_eq!(out.len(), values.len(), "as many values as the view has");
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

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        assert_eq!(rows.bounds.last().map(|&b| b as usize), Some(rows.ids.len()), "the last bound is T");
        let mut all = rows.ids.to_vec();
        let windows = || rows.bounds.windows(2).flat_map(|w| (w[0]..w[1]).map(|i| (i, w[0], w[1])));
        all.extend(windows().map(|(i, from, _)| rows.past + i - from));
        all.extend(windows().map(|(_, from, _)| from));
        all.extend(windows().map(|(.., end)| end));
        Tokens { integers: self.lease(&all), bounds: rows.bounds.to_vec(), number: Tokens::next_number() }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        Ids { integers: self.lease(values), len: values.len() }
    }

    fn fill(&mut self, out: ViewMut<Memory>, value: f32) {
        self.gpu.faults.doing("fill");
        self.fill_view(out, value);
    }

    fn copy(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.gpu.faults.doing("copy");
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        self.copy_view(out, x);
    }

    fn add(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.gpu.faults.doing("add");
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        self.add_view(out, x);
    }

    fn embed(&mut self, out: ViewMut<Memory>, table: &Weight, tokens: &Tokens) {
        self.gpu.faults.doing("embed");
        same_shape((out.rows, out.cols), (tokens.len(), table.cols));
        self.embed_rows(out, table, tokens);
    }

    fn rmsnorm(
        &mut self,
        out: ViewMut<Memory>,
        inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        self.gpu.faults.doing("rmsnorm");
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        same_shape((inv_rms.rows, inv_rms.cols * gain.cols), (x.rows, x.cols));
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
        self.gpu.faults.doing("rmsnorm_grad");
        same_shape((dx.rows, dx.cols), (x.rows, x.cols));
        same_shape((dy.rows, dy.cols), (x.rows, x.cols));
        same_shape((norm.inv_rms.rows, norm.inv_rms.cols * norm.gain.cols), (x.rows, x.cols));
        self.norm_grad((dx, write), dy, x, norm);
    }

    fn linear(&mut self, y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        self.gpu.faults.doing("linear");
        same_shape((y.rows, y.cols), (x.rows, w.rows));
        assert_eq!(x.cols, w.cols, "x has as many columns as the weight");
        self.frozen(y, write, x, w);
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, write: Write, dy: View<Memory>, w: &Weight) {
        self.gpu.faults.doing("linear_grad");
        same_shape((dx.rows, dx.cols), (dy.rows, w.cols));
        assert_eq!(dy.cols, w.rows, "dy has as many columns as the weight has rows");
        self.frozen_grad(dx, write, dy, w);
    }

    fn matmul(&mut self, out: ViewMut<Memory>, write: Write, product: Product<Memory>) {
        self.gpu.faults.doing("matmul");
        check_product(&product, (out.rows, out.cols));
        self.trained(out, write, product);
    }

    fn bias(&mut self, y: ViewMut<Memory>, bias: View<Memory>) {
        self.gpu.faults.doing("bias");
        same_shape((bias.rows, bias.cols), (1, y.cols));
        self.add_bias(y, bias);
    }

    fn rope(&mut self, x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.gpu.faults.doing("rope");
        assert_eq!(x.rows, tokens.len(), "one position per token");
        assert_eq!((table.cols % 2, x.cols % table.cols), (0, 0), "whole heads of even size");
        self.turn(x, table, tokens, 1.0);
    }

    fn rope_grad(&mut self, dx: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        self.gpu.faults.doing("rope_grad");
        assert_eq!(dx.rows, tokens.len(), "one position per token");
        assert_eq!((table.cols % 2, dx.cols % table.cols), (0, 0), "whole heads of even size");
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
        self.gpu.faults.doing("attention");
        check_heads(qkv, heads, (tokens.len(), tokens.len()));
        same_shape((out.rows, out.cols), (qkv.q.rows, qkv.q.cols));
        same_shape((logsumexp.rows, logsumexp.cols), (qkv.q.rows, heads.query));
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
        self.gpu.faults.doing("attention_grad");
        check_heads(saved.qkv, heads, (tokens.len(), tokens.len()));
        same_shape((dout.rows, dout.cols), (saved.out.rows, saved.out.cols));
        self.attend_grad(grad, dout, saved, heads, tokens);
    }

    fn attention_cached(&mut self, out: ViewMut<Memory>, qkv: Qkv<Memory>, heads: Heads) {
        self.gpu.faults.doing("attention_cached");
        check_heads(qkv, heads, (qkv.q.rows, qkv.k.rows));
        same_shape((out.rows, out.cols), (qkv.q.rows, qkv.q.cols));
        self.attend_cached(out, qkv, heads);
    }

    fn swiglu(&mut self, out: ViewMut<Memory>, gate: View<Memory>, up: View<Memory>) {
        self.gpu.faults.doing("swiglu");
        same_shape((out.rows, out.cols), (gate.rows, gate.cols));
        same_shape((out.rows, out.cols), (up.rows, up.cols));
        self.gate(out, gate, up);
    }

    fn swiglu_grad(&mut self, gate: ViewMut<Memory>, up: ViewMut<Memory>, dout: View<Memory>) {
        self.gpu.faults.doing("swiglu_grad");
        same_shape((gate.rows, gate.cols), (dout.rows, dout.cols));
        same_shape((up.rows, up.cols), (dout.rows, dout.cols));
        self.gate_grad(gate, up, dout);
    }

    fn dropout(
        &mut self,
        out: ViewMut<Memory>,
        write: Write,
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        self.gpu.faults.doing("dropout");
        same_shape((out.rows, out.cols), (x.rows, x.cols));
        assert_eq!((x.rows, key.rows.len() + 1), (tokens.len(), tokens.bounds.len()), "one id per row");
        self.mask((out, write), x, key, tokens);
    }

    fn gather_rows(&mut self, out: ViewMut<Memory>, x: View<Memory>, rows: &Ids) {
        self.gpu.faults.doing("gather_rows");
        same_shape((out.rows, out.cols), (rows.len, x.cols));
        self.gather(out, x, rows);
    }

    fn gather_rows_grad(&mut self, dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        self.gpu.faults.doing("gather_rows_grad");
        same_shape((dout.rows, dout.cols), (rows.len, dx.cols));
        self.scatter(dx, dout, rows);
    }

    fn cross_entropy(
        &mut self,
        losses: ViewMut<Memory>,
        logits: ViewMut<Memory>,
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        self.gpu.faults.doing("cross_entropy");
        same_shape((losses.rows, losses.cols), (logits.rows, 1));
        assert_eq!(targets.len, logits.rows, "one target per row of logits");
        self.loss_rows((losses, logits), targets, class_weights);
    }
}
