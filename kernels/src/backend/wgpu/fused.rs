//! Fused operations. The loss over the vocabulary processes as many rows at a time as fit the logits of one binding.

use super::portable::Low;
use super::{Memory, Weight, Wgpu};
use crate::backend::fused::{
    lm_head_loss_in_chunks, lora_grad_of_factors, lora_linear_grad_in_verbs, lora_linear_in_verbs,
};
use crate::backend::*;
use crate::numeric::slices::RANK;

impl Fused for Wgpu {
    fn lora_linear(
        &mut self,
        y: (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        mut lora: LoraPart<Memory>,
    ) {
        if self.portable.is_none() || lora.h.cols > RANK {
            return lora_linear_in_verbs(self, y, x, w, lora);
        }
        let (a, b) = lora.ab;
        self.lora_down(lora.h.again(), lora.x, a);
        let scaled = self.scaled(b, lora.scale);
        let h = View { memory: &*lora.h.memory, offset: lora.h.offset, rows: lora.h.rows, cols: lora.h.cols };
        let low = Low { left: h, right: view(&scaled, b.rows, b.cols), transposed: true };
        self.portable_frozen(y, x, w, Some(low));
        self.recycle(scaled);
    }

    fn lora_linear_grad(&mut self, dx: (ViewMut<Memory>, Write), w: &Weight, args: LoraGrad<Memory>) {
        let (a, dy, rank) = (args.ab.0, args.dy, args.h.cols);
        if self.portable.is_none() || rank > RANK {
            return lora_linear_grad_in_verbs(self, dx, w, args);
        }
        let dh = lora_grad_of_factors(self, args);
        let low = Low { left: view(&dh, dy.rows, rank), right: a, transposed: false };
        self.portable_frozen_grad(dx, dy, (w, 0..w.rows), Some(low));
        self.recycle(dh);
    }

    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Memory>,
        dx: Option<ViewMut<Memory>>,
        args: LmHeadLoss<Memory, Weight>,
    ) {
        if self.portable.is_some() {
            return self.portable_head_loss((losses, dx), args);
        }
        let bound = (self.binding_limit / 4) as usize / args.vocab.max(1);
        let chunk = args.chunk.min(bound.max(1));
        lm_head_loss_in_chunks(self, losses, dx, LmHeadLoss { chunk, ..args });
    }
}
