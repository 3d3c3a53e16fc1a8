//! Verbs of norms, gathered and scaled rows and the loss: a workgroup per row, or per group of a row.

use super::device::Call;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::Kernel;
use super::memory::Place;
use super::rows::{ELEMENT, kernel};
use super::variants::Variant;
use super::{Ids, Memory, Wgpu};
use crate::backend::{Norm, View, ViewMut, Write};

kernel!(RMSNORM, "rmsnorm", ["rows"], [Written, Written, Read, Read]);
kernel!(RMSNORM_GRAD, "rmsnorm_grad", ["rows"], [Written, Read, Read, Read, Read]);
kernel!(RMSNORM_FAST, "rmsnorm", ["rows_subgroup"], [Written, Written, Read, Read]);
kernel!(RMSNORM_GRAD_FAST, "rmsnorm_grad", ["rows_subgroup"], [Written, Read, Read, Read, Read]);
kernel!(CROSS_ENTROPY_FAST, "cross_entropy", ["rows_subgroup"], [Written, Written, Read, Read]);
kernel!(GATHER_ROWS, "gather_rows", [], [Written, Read, Read]);
kernel!(GATHER_ROWS_GRAD, "gather_rows_grad", [], [Written, Read, Read]);
kernel!(SCALE_ROWS, "scale_rows", [], [Written, Read, Read]);
kernel!(SCALE_ROWS_GRAD, "scale_rows_grad", ["rows"], [Written, Written, Read, Read]);
kernel!(SCALE_ROWS_GRAD_FAST, "scale_rows_grad", ["rows_subgroup"], [Written, Written, Read, Read]);
kernel!(CROSS_ENTROPY, "cross_entropy", ["rows"], [Written, Written, Read, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[
    &RMSNORM,
    &RMSNORM_GRAD,
    &GATHER_ROWS,
    &GATHER_ROWS_GRAD,
    &SCALE_ROWS,
    &SCALE_ROWS_GRAD,
    &CROSS_ENTROPY,
    &RMSNORM_FAST,
    &RMSNORM_GRAD_FAST,
    &SCALE_ROWS_GRAD_FAST,
    &CROSS_ENTROPY_FAST,
];

impl Wgpu {
    /// One workgroup per group of `size` columns.
    fn groups(
        &mut self,
        kernel: &'static Kernel,
        (count, size): (usize, usize),
        params: &[u32],
        at: &[&Place],
    ) {
        let slots: Vec<_> = at.iter().map(|p| p.slot.clone()).collect();
        if let Some((kernel, constants, each)) = self.portable_kernel(kernel) {
            let work = 4.0 * ELEMENT * (count * size) as f64;
            let groups = count.div_ceil(each) as u64;
            let call = Call { kernel, constants: &constants, params, slots: &slots, groups, work };
            return self.gpu.dispatch(call);
        }
        let work = (count * size.next_multiple_of(256)) as f64 * ELEMENT;
        let groups = count as u64;
        let fast = match kernel.name {
            "rmsnorm" => &RMSNORM_FAST,
            "rmsnorm_grad" => &RMSNORM_GRAD_FAST,
            "scale_rows_grad" => &SCALE_ROWS_GRAD_FAST,
            "cross_entropy" => &CROSS_ENTROPY_FAST,
            _ => kernel,
        };
        // Pipelines are found by name and constants, and both kernels have one name. A lane of a single subgroup never
        // waits for another.
        let fold = self.variants.subgroups;
        let width = if fold && self.variants.lanes > 0 { self.variants.lanes } else { 256 };
        let constants = [("SUBGROUPS", u32::from(fold)), ("WIDTH", width)];
        let kernel = if self.variants.subgroups { fast } else { kernel };
        self.gpu.dispatch(Call { kernel, constants: &constants, params, slots: &slots, groups, work });
    }

    pub(super) fn norm(
        &mut self,
        (mut out, mut inv): (ViewMut<Memory>, ViewMut<Memory>),
        x: View<Memory>,
        gain: View<Memory>,
        eps: f32,
    ) {
        let (size, per_row, g) = (gain.cols, inv.cols, self.at(gain));
        for (from, rows) in self.pieces(x.rows, x.cols, ELEMENT * x.cols as f64) {
            let [o, i] = [&mut out, &mut inv].map(|m| self.at_mut(&m.again().rows(from, rows)));
            let (xs, count) = (self.at(x.rows(from, rows)), rows * per_row);
            // A spoiled result differs by enough to be detected.
            let spoil = self.variants.spoil(Variant::Subgroups, usize::MAX) - 1.0;
            let (eps, nan) = ((eps + 10.0 * spoil).to_bits(), f32::NAN.to_bits());
            let params = [o.base, i.base, xs.base, g.base, count as u32, size as u32, eps, nan];
            self.groups(&RMSNORM, (count, size), &params, &[&o, &i, &xs, &g]);
        }
    }

    pub(super) fn norm_grad(
        &mut self,
        (mut dx, write): (ViewMut<Memory>, Write),
        dy: View<Memory>,
        x: View<Memory>,
        norm: Norm<Memory>,
    ) {
        let (size, per_row, g) = (norm.gain.cols, norm.inv_rms.cols, self.at(norm.gain));
        let add = u32::from(write == Write::Add);
        for (from, rows) in self.pieces(x.rows, x.cols, ELEMENT * x.cols as f64) {
            let o = self.at_mut(&dx.again().rows(from, rows));
            let [d, xs, i] = [dy, x, norm.inv_rms].map(|v| self.at(v.rows(from, rows)));
            let count = rows * per_row;
            let params = [o.base, d.base, xs.base, g.base, i.base, count as u32, size as u32, add];
            self.groups(&RMSNORM_GRAD, (count, size), &params, &[&o, &d, &xs, &g, &i]);
        }
    }

    pub(super) fn gather(&mut self, mut out: ViewMut<Memory>, x: View<Memory>, rows: &Ids) {
        let ids = Place { slot: self.integers(&rows.integers), base: 0 };
        let xs = self.at(x);
        for (from, count) in self.pieces(out.rows, out.cols, ELEMENT * out.cols as f64) {
            let part = out.again().rows(from, count);
            let (o, n) = (self.at_mut(&part), part.len());
            let params = [o.base, xs.base, n as u32, part.cols as u32, from as u32];
            self.each(&GATHER_ROWS, n, &params, &[&o, &xs, &ids]);
        }
    }

    pub(super) fn scatter(&mut self, mut dx: ViewMut<Memory>, dout: View<Memory>, rows: &Ids) {
        self.fill_view(dx.again(), 0.0);
        let ids = Place { slot: self.integers(&rows.integers), base: 0 };
        let (o, d, n) = (self.at_mut(&dx), self.at(dout), dout.len());
        self.each(&GATHER_ROWS_GRAD, n, &[o.base, d.base, n as u32, dx.cols as u32], &[&o, &d, &ids]);
    }

    pub(super) fn scale_by_row(&mut self, mut out: ViewMut<Memory>, x: View<Memory>, scales: View<Memory>) {
        for (from, rows) in self.pieces(x.rows, x.cols, ELEMENT * x.cols as f64) {
            let part = out.again().rows(from, rows);
            let (o, n) = (self.at_mut(&part), part.len());
            let [xs, s] = [x, scales].map(|v| self.at(v.rows(from, rows)));
            let params = [o.base, xs.base, s.base, n as u32, part.cols as u32];
            self.each(&SCALE_ROWS, n, &params, &[&o, &xs, &s]);
        }
    }

    pub(super) fn scale_by_row_grad(
        &mut self,
        (mut dx, mut dscales): (ViewMut<Memory>, ViewMut<Memory>),
        x: View<Memory>,
        scales: View<Memory>,
    ) {
        for (from, rows) in self.pieces(x.rows, x.cols, ELEMENT * x.cols as f64) {
            let [d, ds] = [&mut dx, &mut dscales].map(|m| self.at_mut(&m.again().rows(from, rows)));
            let [xs, s] = [x, scales].map(|v| self.at(v.rows(from, rows)));
            let params = [d.base, ds.base, xs.base, s.base, rows as u32, x.cols as u32];
            self.groups(&SCALE_ROWS_GRAD, (rows, x.cols), &params, &[&d, &ds, &xs, &s]);
        }
    }

    pub(super) fn loss_rows(
        &mut self,
        (mut losses, mut logits): (ViewMut<Memory>, ViewMut<Memory>),
        targets: &Ids,
        class_weights: Option<View<Memory>>,
    ) {
        let (vocab, ids) = (logits.cols, Place { slot: self.integers(&targets.integers), base: 0 });
        let weighted = u32::from(class_weights.is_some());
        // The binding must exist; it is not read if all weights are one.
        let weights = class_weights.map_or(ids.clone(), |w| self.at(w));
        for (from, rows) in self.pieces(logits.rows, vocab, 3.0 * ELEMENT * vocab as f64) {
            let [l, x] = [&mut losses, &mut logits].map(|m| self.at_mut(&m.again().rows(from, rows)));
            let params = [l.base, x.base, from as u32, weights.base, rows as u32, vocab as u32, weighted];
            self.groups(&CROSS_ENTROPY, (rows, 3 * vocab), &params, &[&l, &x, &ids, &weights]);
        }
    }
}
