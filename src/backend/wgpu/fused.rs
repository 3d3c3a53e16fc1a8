//! Fused operations. The loss over the vocabulary processes as many rows at a time as fit the logits of one binding.

use super::{Memory, Weight, Wgpu};
use crate::backend::fused::lm_head_loss_in_chunks;
use crate::backend::*;

impl Fused for Wgpu {
    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Memory>,
        dx: Option<ViewMut<Memory>>,
        args: LmHeadLoss<Memory, Weight>,
    ) {
        let bound = (self.binding_limit / 4) as usize / args.vocab.max(1);
        let chunk = args.chunk.min(bound.max(1));
        lm_head_loss_in_chunks(self, losses, dx, LmHeadLoss { chunk, ..args });
    }
}
