//! The table of ops: name, arguments, shapes that must agree, arithmetic and memory traffic. Each method of [`Backend`]
//! and [`Fused`] is here once: without it the compiler, or where there is a default clippy, refuses the code. A row needs
//! its name in [`Op`], and each name there needs its cases in `tests/op_cases`: the compiler refuses both.

use super::check::{Checked, Work, table};
use super::shapes::{
    Shaped, is, is_attended, is_convolved, is_delta, is_linear, is_linear_grad, is_lora_grad, is_normed,
    is_product, is_rotated, is_whole, same,
};
use super::*;

/// A matrix that an op reads.
type In<'a, B> = View<'a, <B as Backend>::Memory>;
/// A matrix that an op writes.
type Out<'a, B> = ViewMut<'a, <B as Backend>::Memory>;

// A provided method that is not passed on would hide what a backend overrides.
#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for Checked<B> {
    type Memory = B::Memory;
    type Weight = B::Weight;
    type Tokens = B::Tokens;
    type Ids = B::Ids;

    table! {
        memory(len: usize) -> B::Memory {};
        short(rows: usize, cols: usize) -> B::Memory {};
        prepare(heads: Heads) -> Result<(), Fault> {};
        ids(values: &[u32]) -> B::Ids {};
        upload(out: Out<B>, values: &[f32]) { is_whole(&out, values) } => Work::moved(2 * values.len());
        read(x: In<B>, out: &mut [f32]) -> Result<(), Fault> { is_whole(&x, out) } => Work::moved(2 * x.len());
        read_all(parts: &mut [(In<B>, &mut [f32])]) -> Result<(), Fault> {
            parts.iter().for_each(|(x, out)| is_whole(x, out));
        } => Work::moved(2 * parts.iter().map(|(x, _)| x.len()).sum::<usize>());

        fill(out: Out<B>, value: f32) {} => Work::moved(out.len());
        copy(out: Out<B>, x: In<B>) { same(&out, &x) } => Work::moved(2 * x.len());
        add(out: Out<B>, x: In<B>) { same(&out, &x) } => Work::moved(3 * x.len());
        embed(out: Out<B>, table: &B::Weight, tokens: &B::Tokens, scale: f32) {
            is(&out, (tokens.shape().0, table.shape().1));
        } => Work::moved(2 * out.len());
        rmsnorm(out: Out<B>, inv_rms: Out<B>, x: In<B>, gain: In<B>, eps: f32) {
            same(&out, &x); is_normed(gain, &inv_rms, &x);
        } => Work::moved(2 * x.len());
        rmsnorm_grad(dx: Out<B>, write: Write, dy: In<B>, x: In<B>, norm: Norm<B::Memory>) {
            same(&dx, &x); same(&dy, &x); is_normed(norm.gain, &norm.inv_rms, &x);
        } => Work::moved(4 * x.len());
        linear(y: Out<B>, write: Write, x: In<B>, w: &B::Weight) {
            is_linear(&y, &x, w);
        } => Work::frozen(x.rows, w.shape(), 0);
        linear_grad(dx: Out<B>, write: Write, dy: In<B>, w: &B::Weight) {
            is_linear_grad(&dx, &dy, w);
        } => Work::frozen(dy.rows, w.shape(), 0);
        matmul(out: Out<B>, write: Write, product: Product<B::Memory>) {
            is_product(&out, product.transpose, &product.a, &product.b);
        } => Work::product(out.len() * product.inner(), product.a.len() + product.b.len() + out.len());
        bias(y: Out<B>, bias: In<B>) { is(&bias, (1, y.cols)) } => Work::moved(2 * y.len());
        rope(x: Out<B>, table: In<B>, tokens: &B::Tokens) {
            is_rotated(&x, &table, tokens);
        } => Work::moved(2 * x.len());
        rope_grad(dx: Out<B>, table: In<B>, tokens: &B::Tokens) {
            is_rotated(&dx, &table, tokens);
        } => Work::moved(2 * dx.len());
        attention(out: Out<B>, logsumexp: Out<B>, qkv: Qkv<B::Memory>, heads: Heads, tokens: &B::Tokens) {
            is_attended((&out, qkv, heads), (tokens.shape().0, tokens.shape().0));
            is(&logsumexp, (out.rows, heads.query));
        } => Work::attention(2.0, heads, 2 * qkv.q.len() + 2 * qkv.k.len());
        attention_grad(
            grad: QkvGrad<B::Memory>, dout: In<B>, saved: AttentionSaved<B::Memory>,
            heads: Heads, tokens: &B::Tokens,
        ) {
            let (t, qkv) = (tokens.shape().0, saved.qkv);
            is_attended((&saved.out, qkv, heads), (t, t));
            is(&saved.logsumexp, (t, heads.query));
            same(&dout, &qkv.q); same(&grad.dq, &qkv.q); same(&grad.dk, &qkv.k); same(&grad.dv, &qkv.v);
        } => Work::attention(5.0, heads, 4 * saved.qkv.q.len() + 4 * saved.qkv.k.len());
        attention_cached(out: Out<B>, logsumexp: Out<B>, qkv: Qkv<B::Memory>, heads: Heads) {
            is_attended((&out, qkv, heads), (qkv.q.rows, qkv.k.rows));
            is(&logsumexp, (out.rows, heads.query));
        } => {
            // A query sees the keys of its window.
            let (keys, head) = (heads.window.map_or(qkv.k.rows, |w| w.min(qkv.k.rows)), qkv.k.cols);
            Work::product(2 * qkv.q.len() * keys, 2 * qkv.q.len() + 2 * keys * head)
        };
        convolution(out: Out<B>, gates: Gates<B::Memory>, taps: In<B>, tokens: &B::Tokens) {
            is_convolved(gates, &taps, tokens, gates.x.rows.saturating_sub(gates.after.rows));
            same(&out, &gates.after);
        } => Work::moved(4 * out.len());
        convolution_grad(
            grad: GatesGrad<B::Memory>, dout: In<B>, gates: Gates<B::Memory>, taps: In<B>, tokens: &B::Tokens,
        ) {
            is_convolved(gates, &taps, tokens, 0);
            same(&dout, &gates.x);
            [&grad.before, &grad.after, &grad.x].into_iter().for_each(|out| same(out, &gates.x));
        } => Work::moved(7 * dout.len());
        convolution_silu(out: Out<B>, x: In<B>, taps: In<B>, tokens: &B::Tokens) {
            is(&out, (tokens.shape().0, taps.shape().1));
            is(&x, (x.rows.max(out.rows), out.cols));
        } => Work::moved(2 * out.len());
        convolution_silu_grad(dx: Out<B>, dout: In<B>, x: In<B>, taps: In<B>, tokens: &B::Tokens) {
            is(&x, (tokens.shape().0, taps.shape().1));
            same(&dout, &x); same(&dx, &x);
        } => Work::moved(3 * dout.len());
        delta_rule(
            out: Out<B>, errors: Out<B>, state: Option<Out<B>>, inputs: Delta<B::Memory>,
            tokens: &B::Tokens,
        ) {
            is_delta(inputs, tokens.shape().0);
            same(&out, &inputs.v); same(&errors, &inputs.v);
            if let Some(state) = &state {
                is(state, (inputs.heads.values * inputs.heads.key_size, inputs.heads.value_size));
                assert_eq!(tokens.shape().1, 1, "one row continues a state");
            }
        } => Work::product(3 * out.len() * inputs.heads.key_size, 3 * out.len() + 2 * inputs.q.len());
        delta_rule_grad(
            grad: DeltaGrad<B::Memory>, dout: In<B>, saved: DeltaSaved<B::Memory>, inputs: Delta<B::Memory>,
            tokens: &B::Tokens,
        ) {
            is_delta(inputs, tokens.shape().0);
            same(&dout, &inputs.v); same(&saved.out, &inputs.v); same(&saved.errors, &inputs.v);
            same(&grad.dq, &inputs.q); same(&grad.dk, &inputs.k); same(&grad.dv, &inputs.v);
            same(&grad.dbeta, &inputs.beta); same(&grad.ddecay, &inputs.decay);
        } => Work::product(8 * dout.len() * inputs.heads.key_size, 4 * dout.len() + 4 * inputs.q.len());
        gated(out: Out<B>, gate: In<B>, up: In<B>, activation: Activation) {
            same(&gate, &out); same(&up, &out);
        } => Work::short(3 * out.len());
        gated_grad(gate: Out<B>, up: Out<B>, dout: In<B>, activation: Activation) {
            same(&gate, &dout); same(&up, &dout);
        } => Work::short(5 * dout.len());
        dropout(out: Out<B>, write: Write, x: In<B>, key: DropoutKey, tokens: &B::Tokens) {
            same(&out, &x);
            assert_eq!((x.rows, key.rows.len()), tokens.shape(), "one id per row");
        } => Work::moved(2 * x.len());
        gather_rows(out: Out<B>, x: In<B>, rows: &B::Ids) {
            is(&out, (rows.shape().0, x.cols));
        } => Work::moved(2 * out.len());
        gather_rows_grad(dx: Out<B>, dout: In<B>, rows: &B::Ids) {
            is(&dout, (rows.shape().0, dx.cols));
        } => Work::moved(dx.len() + 2 * dout.len());
        scale_rows(out: Out<B>, x: In<B>, scales: In<B>) {
            same(&out, &x); is(&scales, (x.rows, 1));
        } => Work::moved(2 * x.len());
        scale_rows_grad(dx: Out<B>, dscales: Out<B>, x: In<B>, scales: In<B>) {
            same(&dx, &x); is(&dscales, (x.rows, 1)); same(&scales, &dscales);
        } => Work::moved(3 * x.len());
        cross_entropy(losses: Out<B>, logits: Out<B>, targets: &B::Ids, class_weights: Option<In<B>>) {
            is(&losses, (logits.rows, 1));
            assert_eq!(targets.shape().0, logits.rows, "one target per row of logits");
            class_weights.iter().for_each(|weights| is(weights, (1, logits.cols)));
        } => Work::moved(2 * logits.len());
    }

    /// Timed where it does something.
    fn settle(&mut self, x: B::Memory, rows: usize, cols: usize) -> B::Memory {
        let bytes = (4 + self.inner.short_bytes()) * rows * cols;
        let work = Work { bytes: bytes as f64, ..Work::default() };
        let work = (self.inner.short_bytes() != 4).then_some(work);
        self.run(Op::settle, work, |inner| inner.settle(x, rows, cols))
    }

    fn weight(&mut self, source: Frozen) -> Result<B::Weight, Fault> {
        self.count(Encoding::Plain(source.dtype), source.rows * source.cols);
        self.run(Op::weight, None, |inner| inner.weight(source))
    }

    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<B::Weight, Fault> {
        self.count(Encoding::Blocks(source.block), source.rows * source.cols);
        self.run(Op::weight_of_blocks, None, |inner| inner.weight_of_blocks(source))
    }

    fn tokens(&mut self, rows: TokenRows) -> B::Tokens {
        assert_eq!(rows.bounds.last().map(|&b| b as usize), Some(rows.ids.len()), "the last bound is T");
        if let Some(times) = &mut self.times {
            times.rows = rows.bounds.windows(2).map(|w| w[1] - w[0]).collect();
        }
        self.run(Op::tokens, None, |inner| inner.tokens(rows))
    }

    /// Nothing while ops are timed, so that what is read is timed too.
    fn lend<'m>(&self, memory: &'m B::Memory) -> Option<&'m [f32]> {
        if self.times.is_some() { None } else { self.inner.lend(memory) }
    }

    fn class(&self) -> String {
        self.inner.class()
    }

    fn weight_bytes(&self, dtype: Dtype) -> usize {
        self.inner.weight_bytes(dtype)
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        self.inner.matrix_bytes(encoding, numbers)
    }

    fn target(&self) -> Target {
        self.inner.target()
    }

    fn has_data(&self) -> bool {
        self.inner.has_data()
    }

    fn short_bytes(&self) -> usize {
        self.inner.short_bytes()
    }

    fn recycle(&mut self, memory: B::Memory) {
        self.inner.recycle(memory);
    }

    fn release(&mut self, weight: B::Weight) {
        self.inner.release(weight);
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn peak(&mut self) -> Option<u64> {
        self.inner.peak()
    }

    fn doing(&mut self, op: &'static str) {
        self.inner.doing(op);
    }

    fn border(&mut self) {
        self.inner.border();
    }
}

impl<B: Backend> Checked<B> {
    /// A frozen matrix that ops are timed with.
    fn count(&mut self, encoding: Encoding, numbers: usize) {
        let bytes = self.inner.matrix_bytes(encoding, numbers);
        if let Some(times) = &mut self.times {
            times.frozen = (times.frozen.0 + bytes, times.frozen.1 + numbers);
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<B: Fused> Fused for Checked<B> {
    table! {
        lora_down(h: Out<B>, x: In<B>, a: In<B>) {
            is_product(&h, Transpose::Right, &x, &a);
        } => Work::product(h.len() * x.cols, h.len() + x.len() + a.len());
        lora(y: Out<B>, h: Out<B>, x: In<B>, ab: (In<B>, In<B>), scale: f32) {
            is_product(&h, Transpose::Right, &x, &ab.0);
            is_product(&y, Transpose::Right, &h, &ab.1);
        } => Work::product(h.len() * (x.cols + y.cols), x.len() + 2 * y.len());
        lora_grad(dx: Option<(Out<B>, Write)>, args: LoraGrad<B::Memory>) {
            is_lora_grad(&args);
            dx.iter().for_each(|(dx, _)| same(dx, &args.x));
        } => {
            let through = usize::from(dx.is_some());
            let terms = args.h.len() * ((2 + through) * args.x.cols + 2 * args.dy.cols);
            Work::product(terms, (1 + 2 * through) * args.x.len() + args.dy.len() + args.dab.len())
        };
        lora_linear(y: (Out<B>, Write), x: In<B>, w: &B::Weight, lora: LoraPart<B::Memory>) {
            is_linear(&y.0, &x, w);
            same(&lora.x, &x);
            is_product(&lora.h, Transpose::Right, &x, &lora.ab.0);
            is_product(&y.0, Transpose::Right, &lora.h, &lora.ab.1);
        } => Work::frozen(x.rows, w.shape(), lora.h.cols);
        sum_rows(out: Out<B>, write: Write, x: In<B>, rows: &[B::Ids]) {
            rows.iter().for_each(|rows| is(rows, (out.rows, 1)));
            assert_eq!(x.cols, out.cols, "rows of one length");
        } => Work::moved((rows.len() + 1) * out.len());
        rmsnorm_for_linear(out: Out<B>, inv_rms: Out<B>, x: In<B>, gain: In<B>, eps: f32) {
            same(&out, &x); is_normed(gain, &inv_rms, &x);
        } => Work::moved(2 * x.len());
        gated_for_linear(out: Out<B>, gate: In<B>, up: In<B>, activation: Activation) {
            same(&gate, &out); same(&up, &out);
        } => Work::short(3 * out.len());
        rope_for_attention(x: Out<B>, table: In<B>, tokens: &B::Tokens) {
            is_rotated(&x, &table, tokens);
        } => Work::moved(2 * x.len());
        lora_linear_grad(dx: (Out<B>, Write), w: &B::Weight, args: LoraGrad<B::Memory>) {
            is_linear_grad(&dx.0, &args.dy, w);
            is_lora_grad(&args);
            same(&args.x, &dx.0);
        } => {
            // The product with its adapter, and the gradients of A and B.
            let product = Work::frozen(args.dy.rows, w.shape(), args.h.cols);
            let terms = args.h.len() * (args.dy.cols + args.x.cols);
            let own = Work::product(terms, args.x.len() + args.dab.len());
            Work { flops: product.flops + own.flops, bytes: product.bytes + own.bytes, ..product }
        };
        lm_head_loss(losses: Out<B>, dx: Option<Out<B>>, args: LmHeadLoss<B::Memory, B::Weight>) {
            let n = args.targets.len();
            assert_eq!(args.x.rows, n, "one target per row of x");
            assert_eq!(args.head.shape(), (args.vocab, args.x.cols), "the head gives logits of x");
            is(&losses, (n, 1));
            dx.iter().for_each(|dx| same(dx, &args.x));
        } => {
            // One product or two; logits need not be anywhere but in a cache.
            let product = Work::frozen(args.x.rows, args.head.shape(), 0);
            let times = if dx.is_some() { 2.0 } else { 1.0 };
            let (logits, x) = (Work::moved(args.x.rows * args.vocab), Work::moved(args.x.len()));
            let bytes = product.bytes - logits.bytes + times * x.bytes;
            Work { flops: times * product.flops, bytes, ..product }
        };
    }
}
