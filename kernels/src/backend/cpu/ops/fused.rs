//! What the CPU does faster than its spelling in verbs: a projection and its adapter in one pass over the
//! output, while the tile is in registers. `Cpu::reference` runs the spelling.

use super::super::device::{Cpu, Ids};
use super::super::gemm::added::{Added, RANK};
use super::super::operands::{Left, Products, Strided};
use super::super::runtime::math;
use super::super::runtime::memory::Memory;
use super::super::weights::weight::Weight;
use super::adapter::Layout;
use super::head::{self, Question};
use super::linear::{Factor, Way};
use crate::backend::fused::{lm_head_loss_in_chunks, lora_grad_of_factors};
use crate::backend::*;

impl Cpu {
    /// The left factor of what an adapter adds, h or dh [T, R], as the frozen product beside it wants it, and what is
    /// left to multiply the right one with.
    fn low<'a>(&mut self, h: View<'a, Memory>, scale: f32) -> (Factor<'a>, f32) {
        match self.rounds() && h.cols <= RANK {
            true => (self.factor_of(h, scale), 1.0),
            false => (Factor::plain(h), scale),
        }
    }

    /// [`lora_grad_of_factors`] with factors that are rounded; `dy` is the gradient of the output as products read it.
    fn rounded_grad(&mut self, args: LoraGrad<Memory>, dy: Left) -> Memory {
        let LoraGrad { dab, x, h, ab: (a, b), scale, .. } = args;
        let (rows, rank) = (h.rows, h.cols);
        let mut dh = self.recycling.take(rows * rank);
        self.thin(view_mut(&mut dh, rows, rank), dy, Strided::rows(b.values(), b.cols), scale);
        let (memory, offset) = (dab.memory, dab.offset);
        let db = ViewMut { memory: &mut *memory, offset: offset + a.len(), rows: b.rows, cols: b.cols };
        self.along_tokens(db, h, dy, scale, Layout::Transposed);
        let x = self.factor(x);
        let da = ViewMut { memory, offset, rows: a.rows, cols: a.cols };
        self.along_tokens(da, view(&dh, rows, rank), x.left(self.context()), 1.0, Layout::Upright);
        self.done(x);
        dh
    }
}

impl Fused for Cpu {
    fn lora_down(&mut self, h: ViewMut<Memory>, x: View<Memory>, a: View<Memory>) {
        if !self.rounds() {
            return self.matmul(
                h,
                Write::Set,
                Product { a: x, b: a, transpose: Transpose::Right, scale: 1.0 },
            );
        }
        let x = self.factor(x);
        let left = x.left(self.context());
        self.thin(h, left, Strided::rows(a.values(), a.cols).transposed(), 1.0);
        self.done(x);
    }

    fn lora_linear(
        &mut self,
        y: (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        let ((mut y, write), LoraPart { mut h, x: seen, ab: (a, b), scale }) = (y, lora);
        if self.products == Products::Plain {
            self.linear(y.again(), write, x, w);
            return self.lora(y, h, seen, (a, b), scale);
        }
        let masked = !(std::ptr::eq(seen.memory, x.memory) && seen.offset == x.offset);
        let factor = self.factor(x);
        if masked || !self.rounds() {
            self.lora_down(h.again(), seen, a);
        } else {
            let right = Strided::rows(a.values(), a.cols).transposed();
            self.thin(h.again(), factor.left(self.context()), right, 1.0);
        }
        let right = Strided::rows(b.values(), b.cols).transposed();
        let (rounded, rank) = (self.rounds(), h.cols);
        let h = View { memory: &*h.memory, offset: h.offset, rows: h.rows, cols: h.cols };
        let (low, scale) = self.low(h, scale);
        let cx = self.context();
        let added = Added { left: low.left(cx), right, rank, scale, rounded };
        let left = factor.left(cx);
        self.frozen((y, write), (w, Way::Forward), left, Some(added));
        self.done(low);
        self.done(factor);
    }

    fn lora_grad(&mut self, dx: Option<(ViewMut<Memory>, Write)>, args: LoraGrad<Memory>) {
        let (a, rows, rank) = (args.ab.0, args.dy.rows, args.h.cols);
        let dh = if self.rounds() {
            let dy = self.factor(args.dy);
            let dh = self.rounded_grad(args, dy.left(self.context()));
            self.done(dy);
            dh
        } else {
            lora_grad_of_factors(self, args)
        };
        if let Some((dx, write)) = dx {
            let left = view(&dh, rows, rank);
            self.matmul(dx, write, Product { a: left, b: a, transpose: Transpose::Neither, scale: 1.0 });
        }
        self.recycle(dh);
    }

    fn lora_linear_grad(&mut self, dx: (ViewMut<Memory>, Write), w: &Weight, args: LoraGrad<Memory>) {
        let (mut dx, write) = dx;
        if self.products == Products::Plain {
            self.linear_grad(dx.again(), write, args.dy, w);
            return self.lora_grad(Some((dx, Write::Add)), args);
        }
        let (a, dy, rows, rank) = (args.ab.0, args.dy, args.dy.rows, args.h.cols);
        let factor = self.factor(dy);
        let rounded = self.rounds();
        let dh = match rounded {
            true => self.rounded_grad(args, factor.left(self.context())),
            false => lora_grad_of_factors(self, args),
        };
        let (low, scale) = self.low(view(&dh, rows, rank), 1.0);
        let cx = self.context();
        let right = Strided::rows(a.values(), a.cols);
        let added = Added { left: low.left(cx), right, rank, scale, rounded };
        let left = factor.left(cx);
        self.frozen((dx, write), (w, Way::Backward), left, Some(added));
        self.done(low);
        self.done(factor);
        self.recycle(dh);
    }

    fn sum_rows(&mut self, mut out: ViewMut<Memory>, write: Write, x: View<Memory>, rows: &[Ids]) {
        let (cols, isa, x) = (x.cols, self.isa, x.values());
        self.threads.chunks(out.values_mut(), cols, |t, out| {
            if write == Write::Set {
                out.fill(0.0);
            }
            rows.iter().for_each(|rows| math::add_row(isa, out, &x[rows.0[t] as usize * cols..][..cols]));
        });
    }

    fn lm_head_loss(
        &mut self,
        losses: ViewMut<Memory>,
        dx: Option<ViewMut<Memory>>,
        args: LmHeadLoss<Memory, Weight>,
    ) {
        if self.products == Products::Plain {
            return lm_head_loss_in_chunks(self, losses, dx, args);
        }
        let (mut losses, mut dx) = (losses, dx);
        let LmHeadLoss { x, head: w, vocab, targets, .. } = args;
        let factor = self.factor(x);
        let q = Question { x: factor.left(self.context()), cols: x.cols, vocab, targets };
        let cols = dx.as_ref().map_or(0, |dx| dx.cols);
        let room = head::room(self.threads.count(), (x.rows, x.cols), vocab, cols);
        let mut room = self.recycling.take(room);
        let out = (losses.values_mut(), dx.as_mut().map(|dx| dx.values_mut()));
        head::loss(self.context(), w.tiled(), out, q, room.values_mut());
        self.recycle(room);
        self.done(factor);
    }
}
