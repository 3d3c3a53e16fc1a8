//! The verbs. Each launches one kernel, rarely two. Files and entries carry the verb's stem.

use super::frozen::Direction;
use super::launches::{Shape, THREADS, adds};
use super::memory::{self, Stored, Width};
use super::skinny::Skinny;
use super::{
    Arg, Cuda, Driver, Ids, Launch, Memory, Tier, Tokens, Weight, at, at_mut, attention, blocks, size,
};
use crate::backend::shapes::shaped;
use crate::backend::*;
use crate::numeric::block::{Blocks, Encoding};
use crate::numeric::dtype::Dtype;
use crate::numeric::rng;

shaped! {
    Weight: |w| (w.rows, w.cols);
    Tokens: |tokens| (tokens.count, tokens.rows);
    Ids: |ids| (ids.count, 1);
}

impl<D: Driver> Backend for Cuda<D> {
    type Memory = Memory;
    type Weight = Weight;
    type Tokens = Tokens;
    type Ids = Ids;

    fn class(&self) -> String {
        let (major, minor) = self.driver.capability();
        let numbers = match (self.tier, self.sm90a) {
            (Tier::F32, _) => "f32",
            (Tier::Sm70, _) => "f16",
            (Tier::Sm80, None) => "bf16",
            (Tier::Sm80, Some(_)) => "bf16-wgmma",
        };
        let variant = self.driver.variant();
        let dash = if variant.is_empty() { "" } else { "-" };
        let flash = self.flash.name();
        format!("cuda-sm{major}{minor}-{numbers}{flash}{dash}{variant}")
    }

    fn weight_bytes(&self, dtype: Dtype) -> usize {
        if self.tier == Tier::Sm80 { 2 } else { dtype.size() }
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        match self.tier {
            Tier::F32 | Tier::Sm70 => super::matrix_bytes(encoding, numbers),
            Tier::Sm80 => super::matrix_bytes_bf16(encoding, numbers),
        }
    }

    fn target(&self) -> Target {
        Target::Cuda(self.footprint())
    }

    fn memory(&mut self, len: usize) -> Memory {
        self.take(4 * len)
    }

    fn recycle(&mut self, memory: Memory) {
        drop(memory);
    }

    fn upload(&mut self, out: ViewMut<Memory>, values: &[f32]) {
        let Arg::Address(to) = at_mut(&out) else { return };
        self.write(to, bytemuck::cast_slice(values));
    }

    fn read(&mut self, x: View<Memory>, out: &mut [f32]) -> Result<(), Fault> {
        self.read_all(&mut [(x, out)])
    }

    fn read_all(&mut self, parts: &mut [(View<Memory>, &mut [f32])]) -> Result<(), Fault> {
        for (x, _) in parts.iter() {
            assert!(x.memory.reaches(x.offset + x.len()), "a view is inside its memory");
        }
        self.send();
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let some = parts.iter_mut().filter(|(_, out)| !out.is_empty());
        let mut places: Vec<(u64, &mut [u8])> =
            some.map(|(x, out)| (x.memory.at(x.offset), bytemuck::cast_slice_mut(out))).collect();
        if places.is_empty() {
            return Ok(());
        }
        self.traffic.read_backs += 1;
        self.traffic.read += places.iter().map(|(_, out)| out.len() as u64).sum::<u64>();
        let result = self.driver.read_all(&mut places);
        self.fault = result.clone().err();
        self.copies.clear();
        result
    }

    fn traffic(&self) -> Traffic {
        Traffic { made: self.pool.made, ..self.traffic }
    }

    fn peak(&mut self) -> Option<u64> {
        Some(self.pool.peak())
    }

    fn weight(&mut self, source: Frozen) -> Result<Weight, Fault> {
        self.pack(source)
    }

    fn weight_of_blocks(&mut self, source: &Blocks) -> Result<Weight, Fault> {
        self.pack_blocks(source)
    }

    fn release(&mut self, weight: Weight) {
        self.pool.vacate(weight.memory);
    }

    fn tokens(&mut self, rows: TokenRows) -> Tokens {
        let lengths = || rows.bounds.windows(2).map(|w| w[1] - w[0]);
        let mut all = rows.ids.to_vec();
        all.extend(rows.positions());
        all.extend(lengths().enumerate().flat_map(|(r, n)| std::iter::repeat_n(r as u32, n as usize)));
        all.extend(lengths().flat_map(|n| 0..n));
        let walked = |w: &Width| *w == Width::Baseline || self.tier == Tier::Sm80;
        let lists = Width::ALL.map(|width| {
            let begin = all.len();
            if walked(&width) {
                all.extend(memory::blocks(rows.bounds, width.tokens()));
            }
            (begin, (all.len() - begin) / 4)
        });
        let largest = |x: Option<u32>| x.unwrap_or(0);
        let bounds = all.len();
        all.extend(rows.bounds);
        Tokens {
            memory: self.integers(&all),
            count: rows.ids.len(),
            rows: rows.bounds.len() - 1,
            lists,
            bounds,
            largest: (largest(rows.ids.iter().copied().max()), largest(rows.positions().max())),
        }
    }

    fn ids(&mut self, values: &[u32]) -> Ids {
        let largest = values.iter().copied().max().unwrap_or(0);
        Ids { memory: self.integers(values), count: values.len(), largest }
    }

    fn fill(&mut self, out: ViewMut<Memory>, value: f32) {
        let n = out.len();
        self.each("fill.ptx", n, &[at_mut(&out), size(n), Arg::F32(value)]);
    }

    fn copy(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.each("copy.ptx", out.len(), &[at_mut(&out), at(&x), size(out.len())]);
    }

    fn add(&mut self, out: ViewMut<Memory>, x: View<Memory>) {
        self.each("add.ptx", out.len(), &[at_mut(&out), at(&x), size(out.len())]);
    }

    fn embed(&mut self, out: ViewMut<Memory>, table: &Weight, tokens: &Tokens, scale: f32) {
        if tokens.count > 0 && tokens.largest.0 as usize >= table.rows {
            return self.refuse(format!("token id {} of a table of {}", tokens.largest.0, table.rows));
        }
        if let Stored::Blocks(block) = table.stored {
            return self.embed_blocks(out, (table, block), tokens, scale);
        }
        let args = [
            at_mut(&out),
            Arg::Address(table.memory.at(0)),
            Arg::Address(tokens.ids()),
            size(out.cols),
            size(table.stride),
            Arg::F32(scale),
        ];
        let entry = format!("embed_{}", table.stored.name());
        self.rows("embed.ptx", &entry, (out.rows, out.cols), &args);
    }

    fn rmsnorm(
        &mut self,
        out: ViewMut<Memory>,
        inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        let groups = inv_rms.len();
        let args = [
            at_mut(&out),
            at_mut(&inv_rms),
            at(&x),
            at(&gain),
            size(groups),
            size(gain.cols),
            Arg::F32(1.0 / gain.cols as f32),
            Arg::F32(eps),
        ];
        let grid = [blocks(groups, 4), 1, 1];
        self.launch(Launch { file: "rmsnorm.ptx", entry: "rmsnorm", grid, threads: 128, args: &args });
    }

    fn rmsnorm_grad(
        &mut self,
        dx: ViewMut<Memory>,
        write: Write,
        dy: View<Memory>,
        x: View<Memory>,
        norm: Norm<Memory>,
    ) {
        let groups = norm.inv_rms.len();
        let args = [
            at_mut(&dx),
            at(&dy),
            at(&x),
            at(&norm.gain),
            at(&norm.inv_rms),
            size(groups),
            size(norm.gain.cols),
            Arg::F32(1.0 / norm.gain.cols as f32),
            adds(write),
        ];
        let (file, entry) = ("rmsnorm_grad.ptx", "rmsnorm_grad");
        self.launch(Launch { file, entry, grid: [blocks(groups, 4), 1, 1], threads: 128, args: &args });
    }

    fn linear(&mut self, y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        self.frozen((y, write), x, (w, Direction::Forward), None);
    }

    fn linear_grad(&mut self, dx: ViewMut<Memory>, write: Write, dy: View<Memory>, w: &Weight) {
        self.frozen((dx, write), dy, (w, Direction::Backward), None);
    }

    fn matmul(&mut self, out: ViewMut<Memory>, write: Write, product: Product<Memory>) {
        let k = product.inner();
        let Product { a, b, transpose, scale } = product;
        if self.tier == Tier::Sm80 {
            let (out, (m, n)) = ((at_mut(&out), write), (out.rows, out.cols));
            if self.skinny(&Skinny { transpose, out, a: at(&a), b: at(&b), m, n, k, scale }) {
                return;
            }
        }
        let entry = match transpose {
            Transpose::Neither => "matmul_nn",
            Transpose::Right => "matmul_nt",
            Transpose::Left => "matmul_tn",
        };
        let s = Shape { m: out.rows, n: out.cols, k, lda: a.cols, ldb: b.cols, ldo: out.cols };
        self.product(("matmul.ptx", entry), (at_mut(&out), write), (at(&a), at(&b)), scale, s);
    }

    fn bias(&mut self, y: ViewMut<Memory>, bias: View<Memory>) {
        self.rows("bias.ptx", "bias", (y.rows, y.cols), &[at_mut(&y), at(&bias), size(y.cols)]);
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
        match self.tensor_attention(heads) {
            Some(kernel) => self.attend_sm80((out, logsumexp), qkv, heads, (kernel, tokens)),
            None => self.attend(out, logsumexp, qkv, heads, attention::walk(tokens)),
        }
    }

    fn attention_grad(
        &mut self,
        grad: QkvGrad<Memory>,
        dout: View<Memory>,
        saved: AttentionSaved<Memory>,
        heads: Heads,
        tokens: &Tokens,
    ) {
        match self.tensor_attention(heads) {
            Some(kernel) => self.attend_grad_sm80(grad, dout, saved, heads, (kernel, tokens)),
            None => self.attend_grad(grad, dout, saved, heads, attention::walk(tokens)),
        }
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
        let Gates { before, after, x } = gates;
        let [before, after, x, w] = [before, after, x, taps].each_ref().map(at);
        let [cols, count, above] = [out.cols, taps.rows, gates.x.rows - out.rows].map(size);
        let args = [at_mut(&out), before, after, x, w, Arg::Address(tokens.positions()), cols, count, above];
        self.rows("convolution.ptx", "convolution", (out.rows, out.cols), &args);
    }

    fn convolution_grad(
        &mut self,
        grad: GatesGrad<Memory>,
        dout: View<Memory>,
        gates: Gates<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let (dbefore, dx) = (at_mut(&grad.before), at_mut(&grad.x));
        self.convolution(grad.after, Gates { after: dout, ..gates }, taps, tokens);
        let Gates { before, after, x } = gates;
        let [d, before, after, x, w] = [dout, before, after, x, taps].each_ref().map(at);
        let [cols, count, total] = [dout.cols, taps.rows, dout.rows].map(size);
        let positions = Arg::Address(tokens.positions());
        let args = [dbefore, dx, d, before, after, x, w, positions, cols, count, total];
        self.rows("convolution.ptx", "convolution_grad", (dout.rows, dout.cols), &args);
    }

    fn convolution_silu(
        &mut self,
        out: ViewMut<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let [cols, count, above] = [out.cols, taps.rows, x.rows - out.rows].map(size);
        let args = [at_mut(&out), at(&x), at(&taps), Arg::Address(tokens.positions()), cols, count, above];
        self.rows("convolution_silu.ptx", "convolution_silu", (out.rows, out.cols), &args);
    }

    fn convolution_silu_grad(
        &mut self,
        dx: ViewMut<Memory>,
        dout: View<Memory>,
        x: View<Memory>,
        taps: View<Memory>,
        tokens: &Tokens,
    ) {
        let [cols, count, total] = [dout.cols, taps.rows, dout.rows].map(size);
        let positions = Arg::Address(tokens.positions());
        let args = [at_mut(&dx), at(&dout), at(&x), at(&taps), positions, cols, count, total];
        self.rows("convolution_silu.ptx", "convolution_silu_grad", (dout.rows, dout.cols), &args);
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
        let args = [at_mut(&out), at(&gate), at(&up), size(out.len())];
        let args = [&args[..], &gate_of(activation)].concat();
        self.each("gated.ptx", out.len(), &args);
    }

    fn gated_grad(
        &mut self,
        gate: ViewMut<Memory>,
        up: ViewMut<Memory>,
        dout: View<Memory>,
        activation: Activation,
    ) {
        let args = [at_mut(&gate), at_mut(&up), at(&dout), size(dout.len())];
        let args = [&args[..], &gate_of(activation)].concat();
        self.each("gated_grad.ptx", dout.len(), &args);
    }

    fn dropout(
        &mut self,
        out: ViewMut<Memory>,
        write: Write,
        x: View<Memory>,
        key: DropoutKey,
        tokens: &Tokens,
    ) {
        // The kernel mixes in the token's place in its row and the channel.
        let of_row = |&id| rng::hash(&[key.seed, key.step, id, key.module]);
        let bases = self.integers(&key.rows.iter().map(of_row).collect::<Vec<_>>());
        let args = [
            at_mut(&out),
            at(&x),
            Arg::Address(tokens.row_of()),
            Arg::Address(tokens.place_in_row()),
            Arg::Address(bases.at(0)),
            size(x.cols),
            Arg::U32(key.threshold()),
            Arg::F32(key.scale()),
            adds(write),
        ];
        self.rows("dropout.ptx", "dropout", (x.rows, x.cols), &args);
    }

    fn gather_rows(&mut self, out: ViewMut<Memory>, x: View<Memory>, rows: &Ids) {
        if rows.count > 0 && rows.largest as usize >= x.rows {
            return self.refuse(format!("row {} of a matrix of {}", rows.largest, x.rows));
        }
        let args = [at_mut(&out), at(&x), Arg::Address(rows.memory.at(0)), size(x.cols)];
        self.rows("gather_rows.ptx", "gather_rows", (out.rows, out.cols), &args);
    }

    fn gather_rows_grad(&mut self, mut dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        if rows.count > 0 && rows.largest as usize >= dx.rows {
            return self.refuse(format!("row {} of a matrix of {}", rows.largest, dx.rows));
        }
        self.fill(dx.again(), 0.0);
        let args = [at_mut(&dx), at(&dout), Arg::Address(rows.memory.at(0)), size(dx.cols)];
        self.rows("gather_rows.ptx", "gather_rows_grad", (dout.rows, dout.cols), &args);
    }

    fn scale_rows(&mut self, out: ViewMut<Memory>, x: View<Memory>, scales: View<Memory>) {
        let args = [at_mut(&out), at(&x), at(&scales), size(x.rows), size(x.cols)];
        let (file, entry) = ("scale_rows.ptx", "scale_rows");
        self.launch(Launch { file, entry, grid: [blocks(x.rows, 4), 1, 1], threads: 128, args: &args });
    }

    fn scale_rows_grad(
        &mut self,
        dx: ViewMut<Memory>,
        dscales: ViewMut<Memory>,
        x: View<Memory>,
        scales: View<Memory>,
    ) {
        let args = [at_mut(&dx), at_mut(&dscales), at(&x), at(&scales), size(x.rows), size(x.cols)];
        let (file, entry) = ("scale_rows.ptx", "scale_rows_grad");
        self.launch(Launch { file, entry, grid: [blocks(x.rows, 4), 1, 1], threads: 128, args: &args });
    }

    fn cross_entropy(
        &mut self,
        losses: ViewMut<Memory>,
        logits: ViewMut<Memory>,
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        if targets.count > 0 && targets.largest as usize >= logits.cols {
            return self.refuse(format!("target {} of {} classes", targets.largest, logits.cols));
        }
        let args = [
            at_mut(&losses),
            at_mut(&logits),
            Arg::Address(targets.memory.at(0)),
            class_weights.map_or(Arg::Address(0), |w| at(&w)),
            size(logits.cols),
        ];
        let grid = [blocks(logits.rows, 1), 1, 1];
        let (file, entry) = ("cross_entropy.ptx", "cross_entropy");
        self.launch(Launch { file, entry, grid, threads: THREADS as u32, args: &args });
    }
}

/// The factors of g and g^3 in the sigmoid of a gate g, factor of g and addend in the factor of that sigmoid, and limit and
/// addend of up.
pub(super) fn gate_of(activation: Activation) -> [Arg; 6] {
    // g + -0 is g, also where g is -0.
    let factors = match activation {
        Activation::SwiGlu => [1.0, 0.0, 1.0, -0.0, f32::INFINITY, -0.0],
        // 2 sqrt(2/pi), and that times 0.044715.
        Activation::GeGlu => [1.595_769_2, 0.071_354_814, 1.0, -0.0, f32::INFINITY, -0.0],
        Activation::Sigmoid => [1.0, 0.0, 0.0, 1.0, f32::INFINITY, -0.0],
        Activation::ClampedSwiGlu => [CLAMPED_SLOPE, 0.0, 1.0, -0.0, CLAMPED_LIMIT, 1.0],
    };
    factors.map(Arg::F32)
}
