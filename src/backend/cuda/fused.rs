//! Fused verbs: on tensor cores an adapter's part is added in the epilogue of its projection's product, so that the
//! output is written once and not read again. Beside it stays the composition, which the f32 class computes with.

use super::frozen::{Added, Direction};
use super::{Cuda, Driver, Memory, Tier, Weight, at};
use crate::backend::shapes::{check_product, same_shape};
use crate::backend::{
    Backend, Fused, LoraGrad, LoraPart, Product, Transpose, View, ViewMut, Write, view, view_mut,
};

impl<D: Driver> Cuda<D> {
    /// The same device, with what it has fused spelled in verbs: the slow twin that tests compare with.
    pub fn spelled(mut self) -> Self {
        self.spelled = true;
        self
    }

    fn fuses(&self) -> bool {
        self.tier == Tier::Sm80 && !self.spelled
    }
}

impl<D: Driver> Fused for Cuda<D> {
    fn lora_linear(
        &mut self,
        (mut y, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        let LoraPart { mut h, x: masked, ab: (a, b), scale } = lora;
        if !self.fuses() {
            self.linear(y.again(), write, x, w);
            return self.lora(y, h, masked, (a, b), scale);
        }
        same_shape((y.rows, y.cols), (x.rows, w.rows));
        assert_eq!(x.cols, w.cols, "x has as many columns as the weight");
        let transpose = Transpose::Right;
        self.matmul(h.again(), Write::Set, Product { a: masked, b: a, transpose, scale: 1.0 });
        let left = View { memory: &*h.memory, offset: h.offset, rows: h.rows, cols: h.cols };
        check_product(&Product { a: left, b, transpose, scale }, (y.rows, y.cols));
        let added = Added { left: at(&left), right: at(&b), rank: left.cols, between: b.cols, by: scale };
        self.frozen((y, write), x, (w, Direction::Forward), Some(added));
    }

    fn lora_linear_grad(
        &mut self,
        (mut dx, write): (ViewMut<Memory>, Write),
        w: &Weight,
        args: LoraGrad<Memory>,
    ) {
        if !self.fuses() {
            self.linear_grad(dx.again(), write, args.dy, w);
            return self.lora_grad(Some((dx, Write::Add)), args);
        }
        let LoraGrad { mut dab, dy, x, h, ab: (a, b), scale } = args;
        same_shape((dx.rows, dx.cols), (dy.rows, w.cols));
        assert_eq!(dy.cols, w.rows, "dy has as many columns as the weight has rows");
        let (rows, rank) = (dy.rows, h.cols);
        let mut dh = self.memory(rows * rank);
        let out = view_mut(&mut dh, rows, rank);
        self.matmul(out, Write::Set, Product { a: dy, b, transpose: Transpose::Neither, scale });
        let dh = view(&dh, rows, rank);
        let offset = dab.offset;
        let mut part = |(from, rows, cols), left, right, scale| {
            let again = dab.again();
            let out = ViewMut { memory: again.memory, offset: offset + from, rows, cols };
            self.matmul(out, Write::Set, Product { a: left, b: right, transpose: Transpose::Left, scale });
        };
        part((a.len(), b.rows, b.cols), dy, h, scale);
        part((0, a.rows, a.cols), dh, x, 1.0);
        let product = Product { a: dh, b: a, transpose: Transpose::Neither, scale: 1.0 };
        check_product(&product, (dx.rows, dx.cols));
        let added = Added { left: at(&dh), right: at(&a), rank, between: a.cols, by: 1.0 };
        self.frozen((dx, write), dy, (w, Direction::Backward), Some(added));
    }
}
