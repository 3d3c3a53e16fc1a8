//! What the CPU does faster than its spelling in verbs: a projection and its adapter in one pass over the
//! output, while the tile is in registers. [`Cpu::twin`] runs the spelling.

use super::head::{Question, room as head_room};
use super::left::Left;
use super::product::{Products, Strided};
use super::weight::LowRank;
use super::{Cpu, Memory, Weight};
use crate::backend::fused::lm_head_loss_in_chunks;
use crate::backend::*;

impl Fused for Cpu {
    fn lora_linear(
        &mut self,
        y: (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        let ((mut y, write), LoraPart { mut h, x: seen, ab: (a, b), scale }) = (y, lora);
        if self.products == Products::Crate {
            self.linear(y.again(), write, x, w);
            return self.lora(y, h, seen, (a, b), scale);
        }
        assert_eq!((x.cols, y.cols, y.rows), (w.cols(), w.rows(), x.rows), "y is x wᵀ");
        assert_eq!((b.rows, b.cols, h.rows), (w.rows(), h.cols, x.rows), "h bᵀ is shaped like y");
        let (rank, to_h) = (h.cols, Product { a: seen, b: a, transpose: Transpose::Right, scale: 1.0 });
        self.matmul(h.again(), Write::Set, to_h);
        let low = LowRank {
            left: h.values_mut(),
            right: Strided::rows(b.values(), rank).transposed(),
            rank,
            scale,
        };
        let narrowed = self.narrow(x.values(), x.cols);
        let left = Left::of(self.context(), x.values(), x.cols, narrowed.as_ref());
        w.forward(self.context(), (y.values_mut(), write), left, Some(low));
        narrowed.into_iter().for_each(|m| self.recycle(m));
    }

    fn lora_linear_grad(&mut self, dx: (ViewMut<Memory>, Write), w: &Weight, args: LoraGrad<Memory>) {
        let (mut dx, write) = dx;
        if self.products == Products::Crate {
            self.linear_grad(dx.again(), write, args.dy, w);
            return self.lora_grad(Some((dx, Write::Add)), args);
        }
        let LoraGrad { dab, dy, x, h, ab: (a, b), scale } = args;
        assert_eq!((dx.rows, dx.cols, dy.cols), (dy.rows, w.cols(), w.rows()), "dx is dy w");
        assert_eq!((a.rows, a.cols), (h.cols, w.cols()), "dh a is shaped like dx");
        let (rows, rank) = (dy.rows, h.cols);
        let mut dh = self.memory(rows * rank);
        let to_dh = Product { a: dy, b, transpose: Transpose::Neither, scale };
        self.matmul(view_mut(&mut dh, rows, rank), Write::Set, to_dh);
        let (memory, offset) = (dab.memory, dab.offset);
        let db = ViewMut { memory: &mut *memory, offset: offset + a.len(), rows: b.rows, cols: b.cols };
        self.matmul(db, Write::Set, Product { a: dy, b: h, transpose: Transpose::Left, scale });
        let left = view(&dh, rows, rank);
        let da = ViewMut { memory, offset, rows: a.rows, cols: a.cols };
        self.matmul(da, Write::Set, Product { a: left, b: x, transpose: Transpose::Left, scale: 1.0 });
        let right = Strided::rows(a.values(), a.cols);
        let low = LowRank { left: left.values(), right, rank, scale: 1.0 };
        let narrowed = self.narrow(dy.values(), dy.cols);
        let dy = Left::of(self.context(), dy.values(), dy.cols, narrowed.as_ref());
        w.backward(self.context(), (dx.values_mut(), write), dy, Some(low));
        [dh].into_iter().chain(narrowed).for_each(|m| self.recycle(m));
    }

    fn lm_head_loss(&mut self, losses: ViewMut<Memory>, dx: Option<ViewMut<Memory>>, args: LmHeadLoss<Self>) {
        if self.products == Products::Crate {
            return lm_head_loss_in_chunks(self, losses, dx, args);
        }
        let (mut losses, mut dx) = (losses, dx);
        let LmHeadLoss { x, head, vocab, targets, .. } = args;
        assert_eq!(
            (x.rows, x.cols, vocab),
            (targets.len(), head.cols(), head.rows()),
            "one target per row of x"
        );
        assert_eq!((losses.rows, losses.cols), (targets.len(), 1), "one loss per row");
        let narrowed = self.narrow(x.values(), x.cols);
        let left = Left::of(self.context(), x.values(), x.cols, narrowed.as_ref());
        let q = Question { x: left, cols: x.cols, vocab, targets };
        let cols = dx.as_ref().map_or(0, |dx| dx.cols);
        let mut room = self.memory(head_room(self.context(), q, cols));
        let out = (losses.values_mut(), dx.as_mut().map(|dx| dx.values_mut()));
        head.head_loss(self.context(), out, q, room.values_mut());
        [room].into_iter().chain(narrowed).for_each(|m| self.recycle(m));
    }
}
