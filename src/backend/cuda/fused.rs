//! Fused verbs: on tensor cores an adapter's part is added in the epilogue of its projection's product, so that the
//! output is written once and not read again. Beside it stays the composition, which the f32 class computes with.

use super::frozen::{Added, Direction};
use super::{Cuda, Driver, Memory, Tier, Weight, at};
use crate::backend::fused::{lora_grad_of_factors, lora_linear_grad_in_verbs, lora_linear_in_verbs};
use crate::backend::shapes::{check_product, same_shape};
use crate::backend::{Backend, Fused, LoraGrad, LoraPart, Product, Transpose, View, ViewMut, Write, view};

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
        (y, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        lora: LoraPart<Memory>,
    ) {
        if !self.fuses() {
            return lora_linear_in_verbs(self, (y, write), x, w, lora);
        }
        let LoraPart { mut h, x: masked, ab: (a, b), scale } = lora;
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
        (dx, write): (ViewMut<Memory>, Write),
        w: &Weight,
        args: LoraGrad<Memory>,
    ) {
        if !self.fuses() {
            return lora_linear_grad_in_verbs(self, (dx, write), w, args);
        }
        let (dy, a, rank) = (args.dy, args.ab.0, args.h.cols);
        same_shape((dx.rows, dx.cols), (dy.rows, w.cols));
        assert_eq!(dy.cols, w.rows, "dy has as many columns as the weight has rows");
        let dh = lora_grad_of_factors(self, args);
        let left = view(&dh, dy.rows, rank);
        let product = Product { a: left, b: a, transpose: Transpose::Neither, scale: 1.0 };
        check_product(&product, (dx.rows, dx.cols));
        let added = Added { left: at(&left), right: at(&a), rank, between: a.cols, by: 1.0 };
        self.frozen((dx, write), dy, (w, Direction::Backward), Some(added));
    }
}
