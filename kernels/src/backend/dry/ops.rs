//! The ops of a dry run: what they take inside is taken and given back, nothing is computed.

use super::{Dry, Ids, Low, Memory, Op, Tokens, Way, Weight, read, written};
use crate::backend::fused::{
    lm_head_loss_in_chunks, lora_grad_of_factors, lora_linear_grad_in_verbs, lora_linear_in_verbs,
    sum_rows_in_verbs,
};
use crate::backend::*;
use crate::numeric::block::{Blocks, Encoding};

/// Ops that take nothing inside.
macro_rules! nothing {
    ($($op:ident($($type:ty),* $(,)?);)*) => {$(
        fn $op(&mut self, $(_: $type),*) {}
    )*};
}

impl Backend for Dry {
    type Memory = Memory;
    type Weight = Weight;
    type Tokens = Tokens;
    type Ids = Ids;

    fn class(&self) -> String {
        "dry".into()
    }

    fn target(&self) -> Target {
        self.target
    }

    fn has_data(&self) -> bool {
        false
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        self.device.matrix_bytes(encoding, numbers)
    }

    fn memory(&mut self, len: usize) -> Memory {
        self.take(len)
    }

    fn short(&mut self, rows: usize, cols: usize) -> Memory {
        match self.device.shortens(cols) {
            true => Memory { short: true, ..self.take(rows * cols / 2) },
            false => self.memory(rows * cols),
        }
    }

    fn settle(&mut self, x: Memory, rows: usize, cols: usize) -> Memory {
        if !self.device.shortens(cols) {
            return x;
        }
        let out = self.short(rows, cols);
        self.recycle(x);
        out
    }

    fn short_bytes(&self) -> usize {
        if self.device.shortens(2) { 2 } else { 4 }
    }

    fn recycle(&mut self, memory: Memory) {
        self.device.give(memory.size);
    }

    fn peak(&mut self) -> Option<u64> {
        Some(self.device.peak())
    }

    fn upload(&mut self, out: ViewMut<Memory>, _: &[f32]) {
        self.device.inside(Op::Copy(written(&out)));
    }

    fn read(&mut self, x: View<Memory>, _: &mut [f32]) -> Result<(), Fault> {
        self.device.inside(Op::Copy(read(&x)));
        Ok(())
    }

    fn weight(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, .. } = source;
        Ok(Weight { rows, cols, encoding: Encoding::Plain(dtype) })
    }

    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        let Blocks { rows, cols, block, .. } = *source;
        Ok(Weight { rows, cols, encoding: Encoding::Blocks(block) })
    }

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        let words = self.device.tokens(rows);
        let keys = rows.bounds.windows(2).map(|w| ((w[1] - w[0]) as usize).next_multiple_of(2)).sum();
        let (count, rows) = (rows.ids.len(), rows.bounds.len() - 1);
        Tokens { count, rows, keys, _integers: self.integers(words) }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        let words = self.device.ids(values.len());
        Ids { count: values.len(), _integers: self.integers(words) }
    }

    fn matmul(&mut self, out: ViewMut<Memory>, _: Write, product: Product<Memory>) {
        if product.transpose == Transpose::Left {
            self.device.inside(Op::Columns(written(&out), product.inner()));
        }
    }

    nothing! {
        fill(ViewMut<Memory>, f32);
        copy(ViewMut<Memory>, View<Memory>);
        add(ViewMut<Memory>, View<Memory>);
        embed(ViewMut<Memory>, &Weight, &Tokens, f32);
        rmsnorm(ViewMut<Memory>, ViewMut<Memory>, View<Memory>, View<Memory>, f32);
        rmsnorm_grad(ViewMut<Memory>, Write, View<Memory>, View<Memory>, Norm<Memory>);
        bias(ViewMut<Memory>, View<Memory>);
        rope(ViewMut<Memory>, View<Memory>, &Tokens);
        rope_grad(ViewMut<Memory>, View<Memory>, &Tokens);
        attention_cached(ViewMut<Memory>, ViewMut<Memory>, Qkv<Memory>, Heads);
        convolution(ViewMut<Memory>, Gates<Memory>, View<Memory>, &Tokens);
        convolution_grad(GatesGrad<Memory>, View<Memory>, Gates<Memory>, View<Memory>, &Tokens);
        convolution_silu(ViewMut<Memory>, View<Memory>, View<Memory>, &Tokens);
        convolution_silu_grad(ViewMut<Memory>, View<Memory>, View<Memory>, View<Memory>, &Tokens);
        gated(ViewMut<Memory>, View<Memory>, View<Memory>, Activation);
        gated_grad(ViewMut<Memory>, ViewMut<Memory>, View<Memory>, Activation);
        gather_rows(ViewMut<Memory>, View<Memory>, &Ids);
        gather_rows_grad(ViewMut<Memory>, View<Memory>, &Ids);
        scale_rows(ViewMut<Memory>, View<Memory>, View<Memory>);
        scale_rows_grad(ViewMut<Memory>, ViewMut<Memory>, View<Memory>, View<Memory>);
        cross_entropy(ViewMut<Memory>, ViewMut<Memory>, &Ids, Option<View<Memory>>);
    }

    fn linear(&mut self, y: ViewMut<Memory>, _: Write, x: View<Memory>, w: &Weight) {
        self.device.inside(Op::Frozen(written(&y), read(&x), w, Way::Forward));
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, _: Write, dy: View<Memory>, w: &Weight) {
        self.device.inside(Op::Frozen(written(&dx), read(&dy), w, Way::Backward));
    }

    fn attention(
        &mut self,
        _: ViewMut<Memory>,
        _: ViewMut<Memory>,
        _: Qkv<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        self.device.inside(Op::Attention(heads, tokens.keys));
    }

    fn attention_grad(
        &mut self,
        _: QkvGrad<Memory>,
        _: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        let Qkv { q, k, v } = saved.qkv;
        let matrices = [q, k, v, saved.out].map(|x| read(&x));
        self.device.inside(Op::AttentionGrad(heads, tokens.keys, matrices));
    }

    fn delta_rule(
        &mut self,
        _: ViewMut<Memory>,
        _: ViewMut<Memory>,
        _: Option<ViewMut<Memory>>,
        inputs: Delta<Memory>,
        _: &Tokens,
    ) {
        self.device.inside(Op::DeltaRule(read(&inputs.beta)));
    }

    fn delta_rule_grad(
        &mut self,
        _: DeltaGrad<Memory>,
        _: View<Memory>,
        _: DeltaSaved<Memory>,
        inputs: Delta<Memory>,
        _: &Tokens,
    ) {
        self.device.inside(Op::DeltaRule(read(&inputs.beta)));
    }

    fn dropout(&mut self, _: ViewMut<Memory>, _: Write, x: View<Memory>, _: DropoutKey, _: &Tokens) {
        self.device.inside(Op::Dropout(read(&x)));
    }
}

impl Fused for Dry {
    fn lora_down(&mut self, _: ViewMut<Memory>, x: View<Memory>, _: View<Memory>) {
        self.device.inside(Op::Down(read(&x)));
    }

    fn lora_linear(
        &mut self,
        (y, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        let masked = !std::ptr::eq(lora.x.memory, x.memory) || lora.x.offset != x.offset;
        let low = Low { x: read(&lora.x), rank: lora.h.cols, scale: lora.scale, masked };
        if !self.device.inside(Op::Adapted(written(&y), read(&x), w, low)) {
            lora_linear_in_verbs(self, (y, write), x, w, lora);
        }
    }

    fn lora_grad(&mut self, _: Option<(ViewMut<Memory>, Write)>, args: LoraGrad<Memory>) {
        if !self.device.inside(Op::AdapterGrad(read(&args.dy), low(&args))) {
            let dh = lora_grad_of_factors(self, args);
            self.recycle(dh);
        }
    }

    fn lora_linear_grad(
        &mut self,
        (dx, write): (ViewMut<Memory>, Write),
        w: &Weight,
        args: LoraGrad<Memory>,
    ) {
        if !self.device.inside(Op::AdaptedGrad(written(&dx), read(&args.dy), w, low(&args))) {
            lora_linear_grad_in_verbs(self, (dx, write), w, args);
        }
    }

    fn sum_rows(&mut self, out: ViewMut<Memory>, write: Write, x: View<Memory>, rows: &[Ids]) {
        if !self.device.inside(Op::Sum) {
            sum_rows_in_verbs(self, (out, write), x, rows);
        }
    }

    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Memory>,
        dx: Option<ViewMut<Memory>>,
        args: LmHeadLoss<Memory, Weight>,
    ) {
        if !self.device.inside(Op::HeadLoss(read(&args.x), args.vocab, dx.as_ref().map_or(0, |dx| dx.cols))) {
            let chunk = args.chunk.min(self.device.chunk(args.vocab));
            lm_head_loss_in_chunks(self, losses, dx, LmHeadLoss { chunk, ..args });
        }
    }
}

fn low(args: &LoraGrad<Memory>) -> Low {
    Low { x: read(&args.x), rank: args.h.cols, scale: args.scale, masked: false }
}
