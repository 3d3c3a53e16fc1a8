//! Fused verbs. On tensor cores the epilogue of a projection's product adds the adapter's part, so that the output is
//! written once and not read again. Kernels that produce inputs of tensor cores also write the bf16 copy in the same
//! pass. The composition remains, and the f32 class computes with it.

use super::frozen::{Added, Direction};
use super::verbs::gate_of;
use super::{Arg, Cuda, Driver, Launch, Memory, Tier, Tokens, Weight, at, at_mut, blocks, size};
use crate::backend::fused::{lora_grad_of_factors, lora_linear_grad_in_verbs, lora_linear_in_verbs};
use crate::backend::{
    Activation, Backend, Checked, Fused, Heads, LoraGrad, LoraPart, Product, Transpose, View, ViewMut, Write,
    view,
};

impl<D: Driver> Checked<Cuda<D>> {
    /// The same device with its fused verbs as compositions of verbs: the slow reference for tests.
    pub fn spelled(mut self) -> Self {
        self.spelled = true;
        self
    }
}

impl<D: Driver> Cuda<D> {
    fn fuses(&self) -> bool {
        self.tier == Tier::Sm80 && !self.spelled
    }
}

impl<D: Driver> Fused for Cuda<D> {
    fn lora_linear(
        &mut self,
        (y, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        if !self.fuses() {
            return lora_linear_in_verbs(self, (y, write), x, w, lora);
        }
        let LoraPart { mut h, x: masked, ab: (a, b), scale } = lora;
        let transpose = Transpose::Right;
        self.matmul(h.again(), Write::Set, Product { a: masked, b: a, transpose, scale: 1.0 });
        let left = View { memory: &*h.memory, offset: h.offset, rows: h.rows, cols: h.cols };
        let added = Added { left: at(&left), right: at(&b), rank: left.cols, between: b.cols, by: scale };
        self.frozen((y, write), x, (w, Direction::Forward), Some(added));
    }

    fn rmsnorm_for_linear(
        &mut self,
        out: ViewMut<Memory>,
        inv_rms: ViewMut<Memory>,
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        if !self.fuses() || inv_rms.cols != 1 {
            return self.rmsnorm(out, inv_rms, x, gain, eps);
        }
        let (copy, stride) = self.room_for_copy((x.rows, x.cols));
        let args = [
            at_mut(&out),
            Arg::Address(copy.at(0)),
            at_mut(&inv_rms),
            at(&x),
            at(&gain),
            size(x.rows),
            size(x.cols),
            size(stride),
            Arg::F32(1.0 / x.cols as f32),
            Arg::F32(eps),
        ];
        let (file, entry) = ("rmsnorm_sm80.ptx", "rmsnorm_sm80");
        self.launch(Launch { file, entry, grid: [blocks(x.rows, 4), 1, 1], threads: 128, args: &args });
        self.copied(&out, copy);
    }

    fn gated_for_linear(
        &mut self,
        out: ViewMut<Memory>,
        gate: View<Memory>,
        up: View<Memory>,
        activation: Activation,
    ) {
        if !self.fuses() {
            return self.gated(out, gate, up, activation);
        }
        let (rows, cols) = (out.rows, out.cols);
        let (copy, stride) = self.room_for_copy((rows, cols));
        let at_copy = Arg::Address(copy.at(0));
        let sizes = [size(cols), size(stride)];
        let args = [&[at_mut(&out), at_copy, at(&gate), at(&up)][..], &sizes, &gate_of(activation)].concat();
        self.rows("gated_sm80.ptx", "gated_sm80", (rows, cols), &args);
        self.copied(&out, copy);
    }

    fn rope_for_attention(&mut self, x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens) {
        // A head is as wide as the table.
        let heads = Heads::new(1, 1, table.cols);
        if !self.fuses() || self.tensor_attention(heads).is_none() {
            return self.rope(x, table, tokens);
        }
        if !self.turns(&table, tokens) {
            return;
        }
        let (rows, cols) = (x.rows, x.cols);
        let (copy, stride) = self.room_for_copy((rows, cols));
        let args = [
            at_mut(&x),
            Arg::Address(copy.at(0)),
            at(&table),
            Arg::Address(tokens.positions()),
            size(cols),
            size(table.cols),
            size(stride),
            Arg::F32(1.0),
        ];
        self.rows("rope_sm80.ptx", "rope_sm80", (rows, cols / 2), &args);
        self.copied(&x, copy);
    }

    fn lora_linear_grad(
        &mut self,
        (dx, write): (ViewMut<Memory>, Write),
        w: &Weight,
        args: LoraGrad<Memory>,
    ) {
        if !self.fuses() {
            return lora_linear_grad_in_verbs(self, (dx, write), w, args);
        }
        let (dy, a, rank) = (args.dy, args.ab.0, args.h.cols);
        let dh = lora_grad_of_factors(self, args);
        let left = view(&dh, dy.rows, rank);
        let added = Added { left: at(&left), right: at(&a), rank, between: a.cols, by: 1.0 };
        self.frozen((dx, write), dy, (w, Direction::Backward), Some(added));
    }
}
