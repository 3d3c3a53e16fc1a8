//! A backend that notes what its verbs take: calls, seconds, and the arithmetic and memory traffic that their
//! definitions need at least. For backends whose verbs have finished when they return.

use super::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// What one verb has taken.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Taken {
    /// Calls.
    pub calls: u64,
    /// Seconds.
    pub seconds: f64,
    /// Multiplications and additions.
    pub flops: f64,
    /// Bytes of its inputs and outputs.
    pub bytes: f64,
}

/// By verb.
#[derive(Debug, Clone, Default)]
pub struct Notes(Arc<Mutex<BTreeMap<&'static str, Taken>>>);

impl Notes {
    /// What was noted since the last call.
    pub fn take(&self) -> BTreeMap<&'static str, Taken> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Another backend, and what its verbs took.
pub struct Timed<B> {
    inner: B,
    notes: Notes,
    /// Bytes and numbers of all frozen matrices, whose mean every product is counted with.
    frozen: (usize, usize),
    /// Pairs of query and key of the tokens that came last.
    pairs: f64,
}

impl<B: Backend> Timed<B> {
    /// Around `inner`.
    pub fn new(inner: B) -> (Self, Notes) {
        let notes = Notes::default();
        (Timed { inner, notes: notes.clone(), frozen: (0, 0), pairs: 0.0 }, notes)
    }

    fn time<R>(&mut self, verb: &'static str, work: (f64, f64), run: impl FnOnce(&mut B) -> R) -> R {
        let started = Instant::now();
        let result = run(&mut self.inner);
        let seconds = started.elapsed().as_secs_f64();
        let mut notes = self.notes.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = notes.entry(verb).or_default();
        taken.calls += 1;
        taken.seconds += seconds;
        taken.flops += work.0;
        taken.bytes += work.1;
        result
    }

    fn count(&mut self, encoding: Encoding, numbers: usize) {
        self.frozen.0 += self.inner.matrix_bytes(encoding, numbers);
        self.frozen.1 += numbers;
    }

    /// A product of t x k by n x k frozen numbers, with an adapter of that rank.
    fn frozen(&self, (t, n, k): (usize, usize, usize), rank: usize) -> (f64, f64) {
        let weight = self.frozen.0 as f64 / self.frozen.1.max(1) as f64;
        let (t, n, k, r) = (t as f64, n as f64, k as f64, rank as f64);
        (2.0 * t * (n * k + r * (n + k)), 4.0 * (t * (n + k) + r * (t + n + k)) + weight * n * k)
    }
}

/// No arithmetic worth counting, and that many numbers.
fn moved(numbers: usize) -> (f64, f64) {
    (0.0, 4.0 * numbers as f64)
}

impl<B: Backend> Backend for Timed<B> {
    type Memory = B::Memory;
    type Weight = B::Weight;
    type Tokens = B::Tokens;
    type Ids = B::Ids;

    fn class(&self) -> String {
        self.inner.class()
    }
    fn weight_bytes(&self, dtype: Dtype) -> usize {
        self.inner.weight_bytes(dtype)
    }
    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        self.inner.matrix_bytes(encoding, numbers)
    }
    fn memory(&mut self, len: usize) -> B::Memory {
        self.inner.memory(len)
    }
    fn short(&mut self, rows: usize, cols: usize) -> B::Memory {
        self.inner.short(rows, cols)
    }
    fn settle(&mut self, x: B::Memory, rows: usize, cols: usize) -> B::Memory {
        match self.inner.short_bytes() {
            4 => self.inner.settle(x, rows, cols),
            bytes => {
                self.time("settle", (0.0, ((4 + bytes) * rows * cols) as f64), |b| b.settle(x, rows, cols))
            }
        }
    }
    fn short_bytes(&self) -> usize {
        self.inner.short_bytes()
    }
    fn recycle(&mut self, memory: B::Memory) {
        self.inner.recycle(memory);
    }
    fn upload(&mut self, out: ViewMut<B::Memory>, values: &[f32]) {
        self.time("upload", moved(2 * values.len()), |b| b.upload(out, values));
    }
    fn read(&mut self, x: View<B::Memory>, out: &mut [f32]) -> Result<(), Fault> {
        self.time("read", moved(2 * x.len()), |b| b.read(x, out))
    }
    fn read_all(&mut self, parts: &mut [(View<B::Memory>, &mut [f32])]) -> Result<(), Fault> {
        let numbers = parts.iter().map(|(x, _)| x.len()).sum::<usize>();
        self.time("read", moved(2 * numbers), |b| b.read_all(parts))
    }
    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
    fn peak(&mut self) -> Option<u64> {
        self.inner.peak()
    }
    fn border(&mut self) {
        self.inner.border();
    }
    fn prepare(&mut self, heads: Heads) -> Result<(), Fault> {
        self.inner.prepare(heads)
    }
    fn weight(&mut self, source: Frozen) -> Result<B::Weight, Fault> {
        self.count(Encoding::Plain(source.dtype), source.rows * source.cols);
        self.inner.weight(source)
    }
    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<B::Weight, Fault> {
        self.count(Encoding::Blocks(source.block), source.rows * source.cols);
        self.inner.weight_of_blocks(source)
    }
    fn tokens(&mut self, rows: TokenRows) -> B::Tokens {
        let pairs = |w: &[u32]| f64::from(w[1] - w[0]) * (f64::from(w[1] - w[0]) + 1.0) / 2.0;
        self.pairs = rows.bounds.windows(2).map(pairs).sum();
        self.inner.tokens(rows)
    }
    fn ids(&mut self, values: &[u32]) -> B::Ids {
        self.inner.ids(values)
    }

    fn fill(&mut self, out: ViewMut<B::Memory>, value: f32) {
        self.time("fill", moved(out.len()), |b| b.fill(out, value));
    }
    fn copy(&mut self, out: ViewMut<B::Memory>, x: View<B::Memory>) {
        self.time("copy", moved(2 * x.len()), |b| b.copy(out, x));
    }
    fn add(&mut self, out: ViewMut<B::Memory>, x: View<B::Memory>) {
        self.time("add", moved(3 * x.len()), |b| b.add(out, x));
    }
    fn embed(&mut self, out: ViewMut<B::Memory>, table: &B::Weight, tokens: &B::Tokens) {
        self.time("embed", moved(2 * out.len()), |b| b.embed(out, table, tokens));
    }
    fn rmsnorm(
        &mut self,
        out: ViewMut<B::Memory>,
        inv_rms: ViewMut<B::Memory>,
        x: View<B::Memory>,
        gain: View<B::Memory>,
        eps: f32,
    ) {
        self.time("rmsnorm", moved(2 * x.len()), |b| b.rmsnorm(out, inv_rms, x, gain, eps));
    }
    fn rmsnorm_grad(
        &mut self,
        dx: ViewMut<B::Memory>,
        write: Write,
        dy: View<B::Memory>,
        x: View<B::Memory>,
        norm: Norm<B::Memory>,
    ) {
        self.time("rmsnorm_grad", moved(4 * x.len()), |b| b.rmsnorm_grad(dx, write, dy, x, norm));
    }
    fn linear(&mut self, y: ViewMut<B::Memory>, write: Write, x: View<B::Memory>, w: &B::Weight) {
        let work = self.frozen((x.rows, y.cols, x.cols), 0);
        self.time("linear", work, |b| b.linear(y, write, x, w));
    }
    fn linear_grad(&mut self, dx: ViewMut<B::Memory>, write: Write, dy: View<B::Memory>, w: &B::Weight) {
        let work = self.frozen((dy.rows, dy.cols, dx.cols), 0);
        self.time("linear_grad", work, |b| b.linear_grad(dx, write, dy, w));
    }
    fn matmul(&mut self, out: ViewMut<B::Memory>, write: Write, product: Product<B::Memory>) {
        let inner = if product.transpose == Transpose::Left { product.a.rows } else { product.a.cols };
        let bytes = moved(product.a.len() + product.b.len() + out.len()).1;
        let work = (2.0 * (out.len() * inner) as f64, bytes);
        self.time("matmul", work, |b| b.matmul(out, write, product));
    }
    fn bias(&mut self, y: ViewMut<B::Memory>, bias: View<B::Memory>) {
        self.time("bias", moved(2 * y.len()), |b| b.bias(y, bias));
    }
    fn rope(&mut self, x: ViewMut<B::Memory>, table: View<B::Memory>, tokens: &B::Tokens) {
        self.time("rope", moved(2 * x.len()), |b| b.rope(x, table, tokens));
    }
    fn rope_grad(&mut self, dx: ViewMut<B::Memory>, table: View<B::Memory>, tokens: &B::Tokens) {
        self.time("rope_grad", moved(2 * dx.len()), |b| b.rope_grad(dx, table, tokens));
    }
    fn attention(
        &mut self,
        out: ViewMut<B::Memory>,
        logsumexp: ViewMut<B::Memory>,
        qkv: Qkv<B::Memory>,
        heads: Heads,
        tokens: &B::Tokens,
    ) {
        let flops = 4.0 * self.pairs * (heads.query * heads.size) as f64;
        let work = (flops, moved(2 * qkv.q.len() + 2 * qkv.k.len()).1);
        self.time("attention", work, |b| b.attention(out, logsumexp, qkv, heads, tokens));
    }
    fn attention_grad(
        &mut self,
        grad: QkvGrad<B::Memory>,
        dout: View<B::Memory>,
        saved: AttentionSaved<B::Memory>,
        heads: Heads,
        tokens: &B::Tokens,
    ) {
        let flops = 10.0 * self.pairs * (heads.query * heads.size) as f64;
        let work = (flops, moved(4 * saved.qkv.q.len() + 4 * saved.qkv.k.len()).1);
        self.time("attention_grad", work, |b| b.attention_grad(grad, dout, saved, heads, tokens));
    }
    fn attention_cached(&mut self, out: ViewMut<B::Memory>, qkv: Qkv<B::Memory>, heads: Heads) {
        let flops = 4.0 * (qkv.q.len() * qkv.k.rows) as f64;
        let work = (flops, moved(2 * qkv.q.len() + 2 * qkv.k.len()).1);
        self.time("attention_cached", work, |b| b.attention_cached(out, qkv, heads));
    }
    fn swiglu(&mut self, out: ViewMut<B::Memory>, gate: View<B::Memory>, up: View<B::Memory>) {
        let bytes = (3 * self.inner.short_bytes() * out.len()) as f64;
        self.time("swiglu", (0.0, bytes), |b| b.swiglu(out, gate, up));
    }
    fn swiglu_grad(&mut self, gate: ViewMut<B::Memory>, up: ViewMut<B::Memory>, dout: View<B::Memory>) {
        let bytes = (5 * self.inner.short_bytes() * dout.len()) as f64;
        self.time("swiglu_grad", (0.0, bytes), |b| b.swiglu_grad(gate, up, dout));
    }
    fn dropout(
        &mut self,
        out: ViewMut<B::Memory>,
        write: Write,
        x: View<B::Memory>,
        key: DropoutKey,
        tokens: &B::Tokens,
    ) {
        self.time("dropout", moved(2 * x.len()), |b| b.dropout(out, write, x, key, tokens));
    }
    fn gather_rows(&mut self, out: ViewMut<B::Memory>, x: View<B::Memory>, rows: &B::Ids) {
        self.time("gather_rows", moved(2 * out.len()), |b| b.gather_rows(out, x, rows));
    }
    fn gather_rows_grad(&mut self, dx: ViewMut<B::Memory>, dout: View<B::Memory>, rows: &B::Ids) {
        let numbers = dx.len() + 2 * dout.len();
        self.time("gather_rows_grad", moved(numbers), |b| b.gather_rows_grad(dx, dout, rows));
    }
    fn cross_entropy(
        &mut self,
        losses: ViewMut<B::Memory>,
        logits: ViewMut<B::Memory>,
        targets: &B::Ids,
        class_weights: Option<View<B::Memory>>,
    ) {
        let numbers = 2 * logits.len();
        let run = |b: &mut B| b.cross_entropy(losses, logits, targets, class_weights);
        self.time("cross_entropy", moved(numbers), run);
    }
}

impl<B: Fused> Fused for Timed<B> {
    fn lora_down(&mut self, h: ViewMut<B::Memory>, x: View<B::Memory>, a: View<B::Memory>) {
        let work = (2.0 * (h.len() * x.cols) as f64, moved(h.len() + x.len() + a.len()).1);
        self.time("lora_down", work, |b| b.lora_down(h, x, a));
    }

    fn lora(
        &mut self,
        y: ViewMut<B::Memory>,
        h: ViewMut<B::Memory>,
        x: View<B::Memory>,
        ab: (View<B::Memory>, View<B::Memory>),
        scale: f32,
    ) {
        let (flops, bytes) = (2.0 * (h.len() * (x.cols + y.cols)) as f64, moved(x.len() + 2 * y.len()).1);
        self.time("lora", (flops, bytes), |b| b.lora(y, h, x, ab, scale));
    }

    fn lora_grad(&mut self, dx: Option<(ViewMut<B::Memory>, Write)>, args: LoraGrad<B::Memory>) {
        let through = usize::from(dx.is_some());
        let flops = 4.0 * (args.h.len() * (args.x.cols + args.dy.cols)) as f64
            + 2.0 * (through * args.h.len() * args.x.cols) as f64;
        let bytes = moved((1 + 2 * through) * args.x.len() + args.dy.len() + args.dab.len()).1;
        self.time("lora_grad", (flops, bytes), |b| b.lora_grad(dx, args));
    }

    fn lora_linear(
        &mut self,
        y: (ViewMut<B::Memory>, Write),
        x: View<B::Memory>,
        w: &B::Weight,
        lora: LoraPart<B::Memory>,
    ) {
        let work = self.frozen((x.rows, y.0.cols, x.cols), lora.h.cols);
        self.time("lora_linear", work, |b| b.lora_linear(y, x, w, lora));
    }

    fn rmsnorm_for_linear(
        &mut self,
        out: ViewMut<B::Memory>,
        inv_rms: ViewMut<B::Memory>,
        x: View<B::Memory>,
        gain: View<B::Memory>,
        eps: f32,
    ) {
        self.time("rmsnorm", moved(2 * x.len()), |b| b.rmsnorm_for_linear(out, inv_rms, x, gain, eps));
    }
    fn swiglu_for_linear(&mut self, out: ViewMut<B::Memory>, gate: View<B::Memory>, up: View<B::Memory>) {
        let bytes = (3 * self.inner.short_bytes() * out.len()) as f64;
        self.time("swiglu", (0.0, bytes), |b| b.swiglu_for_linear(out, gate, up));
    }
    fn rope_for_attention(&mut self, x: ViewMut<B::Memory>, table: View<B::Memory>, tokens: &B::Tokens) {
        self.time("rope", moved(2 * x.len()), |b| b.rope_for_attention(x, table, tokens));
    }

    fn lora_linear_grad(
        &mut self,
        dx: (ViewMut<B::Memory>, Write),
        w: &B::Weight,
        args: LoraGrad<B::Memory>,
    ) {
        let (t, n, k) = (args.dy.rows, args.dy.cols, args.x.cols);
        let (flops, bytes) = self.frozen((t, n, k), args.h.cols);
        // Gradients of A and B besides.
        let work = (flops + 2.0 * (args.h.len() * (n + k)) as f64, bytes + moved(t * k + args.dab.len()).1);
        self.time("lora_linear_grad", work, |b| b.lora_linear_grad(dx, w, args));
    }

    fn lm_head_loss(
        &mut self,
        losses: ViewMut<B::Memory>,
        dx: Option<ViewMut<B::Memory>>,
        args: LmHeadLoss<Self>,
    ) {
        let LmHeadLoss { x, head, vocab, targets, chunk } = args;
        let (flops, bytes) = self.frozen((x.rows, vocab, x.cols), 0);
        let times = if dx.is_some() { 2.0 } else { 1.0 };
        // Logits need not be anywhere but in a cache.
        let work = (times * flops, bytes - moved(x.rows * vocab).1 + times * moved(x.len()).1);
        let args = LmHeadLoss { x, head, vocab, targets, chunk };
        self.time("lm_head_loss", work, |b| b.lm_head_loss(losses, dx, args));
    }
}
