//! The loss over a vocabulary in the CPU's parts and blocks (kernels/src/backend/cpu/ops/head.rs): a block of 256 logits at a time,
//! with a running maximum and sum; the gradient of a part is scaled when the maximum rises; parts are put together in order.

use super::super::device::Call;
use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::Kernel;
use super::super::memory::Place;
use super::super::rows::{ELEMENT, kernel};
use super::super::{Memory, Weight, Wgpu, encodings};
use crate::backend::{Backend, LmHeadLoss, View, ViewMut, Write, view, view_mut};
use crate::numeric::slices::{BLOCK, part_of_vocabulary};

kernel!(BLOCK_OF_LOGITS, "portable_head_block", ["portable", "portable_rows"], [Written, Written, Read]);
kernel!(JOIN, "portable_head_join", ["portable"], [Written, Written, Read]);
kernel!(ADD, "portable_head_add", ["portable"], [Written, Read, Read]);
kernel!(SHRINK, "shrink_rows", [], [Written, Read]);
kernel!(SUBTRACT, "head_subtract", ["packed"], [Written, Read, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&BLOCK_OF_LOGITS, &JOIN, &ADD, &SHRINK, &SUBTRACT];

/// Rows of logits at a time.
const ROWS: usize = 1024;
/// Rows of statistics of a part: largest, sum, the target's logit, factor.
const STATS: usize = 4;

/// Some rows, and where their results go.
struct Rows<'a> {
    x: View<'a, Memory>,
    w: &'a Weight,
    vocab: usize,
    targets: Place,
    stats: &'a mut Memory,
    weighted: Option<&'a mut Memory>,
}

/// Rows whose sums, this many for each, fit one binding.
fn rows_at_a_time(binding: u64, sums: usize) -> usize {
    ROWS.min((binding / 4) as usize / sums.max(1)).max(1)
}

/// Numbers that the loss of n rows takes: logits, statistics, and the sums of the parts if there is a gradient of c columns.
pub(in super::super) fn room((n, c): (usize, usize), vocab: usize, binding: u64) -> [usize; 3] {
    let parts = vocab.div_ceil(part_of_vocabulary(vocab));
    let rows = n.min(rows_at_a_time(binding, c * parts));
    [rows * BLOCK, parts * STATS * rows, parts * rows * c]
}

impl Wgpu {
    pub(in super::super) fn portable_head_loss(
        &mut self,
        (mut losses, mut dx): (ViewMut<Memory>, Option<ViewMut<Memory>>),
        args: LmHeadLoss<Memory, Weight>,
    ) {
        let LmHeadLoss { x, head: w, vocab, targets, .. } = args;
        let (n, c) = (targets.len(), x.cols);
        let each = part_of_vocabulary(vocab);
        let parts = vocab.div_ceil(each);
        let most = rows_at_a_time(self.binding_limit, c * parts);
        for from in (0..n).step_by(most) {
            let rows = most.min(n - from);
            let ids = self.ids(&targets[from..from + rows]);
            let mut stats = self.memory(parts * STATS * rows);
            let mut weighted = dx.as_ref().map(|_| self.memory(parts * rows * c));
            let targets = Place { slot: self.integers(&ids.integers), base: 0 };
            let mut these = Rows {
                x: x.rows(from, rows),
                w,
                vocab,
                targets: targets.clone(),
                stats: &mut stats,
                weighted: weighted.as_mut(),
            };
            for part in 0..parts {
                self.part_of_head(&mut these, part);
            }
            let (l, s) =
                (self.at_mut(&losses.again().rows(from, rows)), self.at(view(&stats, parts * STATS, rows)));
            let params = [l.base, s.base, 0, rows as u32, parts as u32, each as u32];
            self.elements((&JOIN, &[self.multiply_add()]), (rows, 256), &params, &[&l, &s, &targets]);
            if let (Some(dx), Some(weighted)) = (dx.as_mut(), weighted) {
                self.put_together(dx.again().rows(from, rows), (&weighted, &stats), parts);
                self.subtract_targets(dx.again().rows(from, rows), w, &targets);
                self.recycle(weighted);
            }
            self.recycle(stats);
        }
    }

    /// The statistics of a part of the vocabulary, and its sums of rows of the matrix.
    fn part_of_head(&mut self, rows: &mut Rows, part: usize) {
        let (n, c, each) = (rows.x.rows, rows.x.cols, part_of_vocabulary(rows.vocab));
        let columns = part * each..((part + 1) * each).min(rows.vocab);
        let mut logits = self.memory(n * BLOCK);
        let stats = self.at(view(rows.stats, (part + 1) * STATS, n).rows(part * STATS, STATS));
        for from in columns.clone().step_by(BLOCK) {
            let block = from..(from + BLOCK).min(columns.end);
            let place = self.at_mut(&view_mut(&mut logits, n, BLOCK));
            self.some_outputs((&place, block.len()), rows.x, (rows.w, block.clone()));
            let begins = u32::from(from == columns.start);
            let sizes = [n, block.len(), block.len(), from].map(|x| x as u32);
            let params = [&[place.base, stats.base, rows.targets.base][..], &sizes, &[begins]].concat();
            self.gpu.dispatch(Call {
                kernel: &BLOCK_OF_LOGITS,
                constants: &[self.multiply_add()],
                params: &params,
                slots: &[place.slot.clone(), stats.slot.clone(), rows.targets.slot.clone()],
                groups: n.div_ceil(4) as u64,
                work: self.cost() * ELEMENT * (n * BLOCK) as f64,
            });
            let Some(weighted) = rows.weighted.as_deref_mut() else { continue };
            let offset = part * n * c;
            if begins == 0 {
                let to = self.place(&weighted.storage, offset, n * c);
                let params = [to.base, stats.base + 3 * n as u32, (n * c) as u32, c as u32];
                self.each(&SHRINK, n * c, &params, &[&to, &stats]);
            }
            let out = ViewMut { memory: weighted, offset, rows: n, cols: c };
            let write = if begins == 1 { Write::Set } else { Write::Add };
            let e = view(&logits, n, block.len());
            self.portable_frozen_grad((out, write), e, (rows.w, block), None);
        }
        self.recycle(logits);
    }

    /// dx = the sum over the parts, in order, each by its factor.
    fn put_together(&mut self, dx: ViewMut<Memory>, (weighted, stats): (&Memory, &Memory), parts: usize) {
        let (n, c) = (dx.rows, dx.cols);
        let o = self.at_mut(&dx);
        for part in 0..parts {
            let x = self.place(&weighted.storage, part * n * c, n * c);
            let by = self.place(&stats.storage, (part * STATS + 3) * n, n);
            let params = [o.base, x.base, by.base, (n * c) as u32, c as u32, u32::from(part > 0)];
            self.elements((&ADD, &[self.multiply_add()]), (n * c, 256), &params, &[&o, &x, &by]);
        }
    }

    /// dx -= the targets' rows.
    fn subtract_targets(&mut self, dx: ViewMut<Memory>, w: &Weight, targets: &Place) {
        let (o, n) = (self.at_mut(&dx), dx.len());
        let constants = [("ENCODING", encodings::number(w.encoding)), ("VECTOR", 0)];
        for part in &w.parts {
            let b = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
            let sizes = [n, dx.cols, part.from, part.rows].map(|x| x as u32);
            let params = [&[o.base, targets.base][..], &sizes].concat();
            self.elements((&SUBTRACT, &constants), (n, 256), &params, &[&o, &b, targets]);
        }
    }
}
