//! Products. An output is split into windows of whole tiles if one dispatch would take too long or a matrix does not
//! fit a binding. The sum over k is never split for time, so the split changes no bit. The sum is split only if the
//! data along k exceeds a binding.

use super::device::Call;
use super::encodings;
use super::kernel::Access::{Read, Write as Written};
use super::kernel::{Constant, Kernel};
use super::memory::Place;
use super::rows::kernel;
use super::variants::{Asked, Chosen, Role, Variant};
use super::weight::Part;
use super::{Memory, Weight, Wgpu};
use crate::backend::{Backend, Product, Transpose, View, ViewMut, Write, view, view_mut};
use crate::numeric::block::Encoding;
use crate::numeric::slices::slices;

kernel!(LINEAR, "linear", ["packed", "product"], [Written, Read, Read]);
kernel!(LINEAR_GRAD, "linear_grad", ["packed", "product"], [Written, Read, Read]);
kernel!(MATMUL, "matmul", ["product"], [Written, Read, Read]);
kernel!(FOLD, "fold", [], [Written, Read]);

/// The plain kernels.
pub(super) const KERNELS: &[&Kernel] = &[&LINEAR, &LINEAR_GRAD, &MATMUL, &FOLD];

/// Rows and columns of the output per workgroup.
const TILE: usize = 64;

/// Numbers of a matrix in blocks that are widened at a time.
const SLAB: usize = 4 << 20;
/// Minimum number of rows for which widening pays.
const MANY: usize = 16;

/// Numbers of a matrix that are widened at a time for a product of that many rows; `None` where it does not pay.
pub(super) fn slab_numbers(
    encoding: Encoding,
    (n, k): (usize, usize),
    rows: usize,
    binding: u64,
) -> Option<usize> {
    let pays = matches!(encoding, Encoding::Blocks(_)) && rows >= MANY && n * k > 0;
    let fit = SLAB.min((binding / 4) as usize) / k.max(1);
    pays.then(|| k * fit.clamp(1, n))
}

/// The parts of a matrix that are multiplied at a time: part, its first row, number of rows.
fn slabs<'a>(w: &'a Weight, slab: Option<&Memory>) -> Vec<(&'a Part, usize, usize)> {
    let most = slab.map_or(usize::MAX, |slab| slab.len / w.cols.max(1)).max(1);
    let of = |part: &'a Part| {
        let step = most.min(part.rows).max(1);
        (0..part.rows).step_by(step).map(move |first| (part, first, step.min(part.rows - first)))
    };
    w.parts.iter().flat_map(of).collect()
}

/// One factor: a binding, and the strides along the output and along the sum.
#[derive(Clone)]
pub(super) struct Factor {
    pub place: Place,
    /// Along the output's rows or columns.
    pub out: usize,
    /// Along k.
    pub k: usize,
}

/// The arguments of a product kernel.
struct Window {
    kernel: &'static Kernel,
    constants: [Constant; 2],
    out: Place,
    stride: usize,
    sizes: (usize, usize, usize),
    scale: f32,
    write: Write,
}

impl Wgpu {
    /// The windows of an m x n output, each number of which takes `work`: rows and columns from..from+count.
    pub(super) fn windows(&self, (m, n): (usize, usize), work: f64) -> Vec<((usize, usize), (usize, usize))> {
        let most = (self.gpu.pace.most() / work) as usize;
        let tiles = (most / (TILE * TILE)).max(1);
        let across = n.div_ceil(TILE).min(tiles);
        let down = (tiles / across.max(1)).max(1);
        let (rows, cols) = (down * TILE, across.max(1) * TILE);
        let mut all = Vec::new();
        for i in (0..m).step_by(rows) {
            for j in (0..n).step_by(cols) {
                all.push(((i, rows.min(m - i)), (j, cols.min(n - j))));
            }
        }
        all
    }

    /// Computes all windows of one product. The three kernels share the parameters.
    fn product(&mut self, window: &Window, left: &Factor, right: &Factor) {
        let (m, n, k) = window.sizes;
        let matmul = std::ptr::eq(window.kernel, &MATMUL);
        let add = u32::from(window.write == Write::Add);
        for ((i, rows), (j, cols)) in self.windows((m, n), 2.0 * k.max(1) as f64) {
            let out = window.out.base + (i * window.stride + j) as u32;
            let a = left.place.base + (i * left.out) as u32;
            let b = right.place.base + (j * right.out) as u32;
            if self.fast((rows, cols), (out, a, b), window, (left, right)) {
                continue;
            }
            let mut params = vec![out, window.stride as u32, a];
            if matmul {
                params.extend([left.out, left.k].map(|x| x as u32));
                params.extend([b, right.k as u32, right.out as u32]);
            } else {
                params.extend([left.out as u32, b, right.out.max(right.k) as u32]);
            }
            params.extend([rows as u32, cols as u32, k as u32, window.scale.to_bits(), add]);
            self.gpu.dispatch(Call {
                kernel: window.kernel,
                constants: &window.constants,
                params: &params,
                slots: &[window.out.slot.clone(), left.place.slot.clone(), right.place.slot.clone()],
                groups: (rows.div_ceil(TILE) * cols.div_ceil(TILE)) as u64,
                work: 2.0 * (rows * cols) as f64 * k as f64,
            });
        }
    }

    /// Computes one window by a variant, if one fits. Returns whether it did.
    fn fast(
        &mut self,
        (rows, cols): (usize, usize),
        (out, a, b): (u32, u32, u32),
        window: &Window,
        (left, right): (&Factor, &Factor),
    ) -> bool {
        let role = match window.kernel.name {
            "linear" => Role::Frozen,
            "linear_grad" => Role::FrozenGrad,
            _ => Role::Own,
        };
        let asked = Asked {
            left_across: left.out == 1 && left.k != 1,
            right_across: right.out == 1 && right.k != 1,
            encoding: if role == Role::Own { 0 } else { window.constants[0].1 },
            // Sizes of the whole product: the split depends on measurements, but the bits of a kernel must not.
            sizes: window.sizes,
            b_at: right.place.base as usize,
            b_stride: right.out.max(right.k),
            role,
        };
        let Some((variant, mut chosen)) = self.variants.product(&asked) else { return false };
        let scale = window.scale * self.variants.spoil(variant, window.sizes.2);
        let (parts, terms) = self.cut(&asked, (variant, &mut chosen)).unwrap_or((1, window.sizes.2));
        let partial = (parts > 1).then(|| self.memory(parts * rows * cols));
        let place = partial.as_ref().map(|m| self.at(view(m, parts * rows, cols)));
        let (slot, at) = place.as_ref().map_or((&window.out.slot, out), |place| (&place.slot, place.base));
        let mut params = vec![at, window.stride as u32, a];
        params.extend([left.out, left.k].map(|x| x as u32));
        params.extend([b, right.k as u32, right.out as u32, rows as u32, cols as u32, window.sizes.2 as u32]);
        params.extend([scale.to_bits(), u32::from(window.write == Write::Add), chosen.lift.to_bits()]);
        params.extend([parts as u32, terms as u32]);
        self.gpu.dispatch(Call {
            kernel: chosen.kernel,
            constants: &chosen.constants,
            params: &params,
            slots: &[slot.clone(), left.place.slot.clone(), right.place.slot.clone()],
            groups: (parts * rows.div_ceil(chosen.tile.0) * cols.div_ceil(chosen.tile.1)) as u64,
            work: 2.0 * (rows * cols) as f64 * window.sizes.2 as f64,
        });
        if let (Some(memory), Some(place)) = (partial, place) {
            self.fold(window, (out, rows, cols), (&place, parts, scale));
            self.recycle(memory);
        }
        true
    }

    /// The number of parts and the terms per part, if the product's sums are split and one binding holds all parts.
    fn cut(&self, asked: &Asked, (variant, chosen): (Variant, &mut Chosen)) -> Option<(usize, usize)> {
        let (m, n, _) = asked.sizes;
        let (parts, terms) = self.variants.parts(asked, (variant, chosen))?;
        if 4 * (parts * m * n) as u64 > self.binding_limit {
            return None;
        }
        chosen.constants.iter_mut().filter(|(name, _)| *name == "SPLIT").for_each(|(_, value)| *value = 1);
        Some((parts, terms))
    }

    /// Adds up the parts of a window's sums, in order.
    fn fold(
        &mut self,
        window: &Window,
        (out, rows, cols): (u32, usize, usize),
        (parts, count, scale): (&Place, usize, f32),
    ) {
        let scale = scale * self.variants.spoil(Variant::Split, window.sizes.2);
        let params = [out, window.stride as u32, parts.base, cols as u32, (rows * cols) as u32, count as u32];
        let params = [&params[..], &[scale.to_bits(), u32::from(window.write == Write::Add)]].concat();
        self.each(&FOLD, rows * cols, &params, &[&window.out, parts]);
    }

    /// out[T, G*D] = the sum of its parts, one matrix for each query head of a group, in order.
    pub(super) fn fold_heads(&mut self, out: &ViewMut<Memory>, parts: Memory) {
        let (n, cols) = (out.len(), out.cols as u32);
        let count = parts.len / n.max(1);
        let (o, x) = (self.at_mut(out), self.at(view(&parts, count, n)));
        let params = [o.base, cols, x.base, cols, n as u32, count as u32, 1f32.to_bits(), 0];
        self.each(&FOLD, n, &params, &[&o, &x]);
        self.recycle(parts);
    }

    /// scale * x
    pub(super) fn scaled(&mut self, x: View<Memory>, scale: f32) -> Memory {
        let (n, mut out) = (x.len(), self.memory(x.len()));
        let (o, from) = (self.at_mut(&view_mut(&mut out, x.rows, x.cols)), self.at(x));
        let params = [o.base, x.cols as u32, from.base, x.cols as u32, n as u32, 1, scale.to_bits(), 0];
        self.each(&FOLD, n, &params, &[&o, &from]);
        out
    }

    pub(super) fn frozen(&mut self, mut y: ViewMut<Memory>, write: Write, x: View<Memory>, w: &Weight) {
        if self.portable.is_some() {
            return self.portable_frozen((y, write), x, w, None);
        }
        let (stride, slab) = (y.cols, self.slab(w, y.rows));
        for (from, rows) in self.pieces(y.rows, y.cols.max(x.cols), 0.0) {
            let view = y.again().rows(from, rows);
            let (out, left) = (self.at_mut(&view), self.at(x.rows(from, rows)));
            for (part, first, count) in slabs(w, slab.as_ref()) {
                let (right, encoding) = self.readable(w, (part, first, count), slab.as_ref());
                let window = Window {
                    kernel: &LINEAR,
                    constants: [("ENCODING", encoding), ("VECTOR", 0)],
                    out: out.clone().on(part.from + first),
                    stride,
                    sizes: (rows, count, w.cols),
                    scale: 1.0,
                    write,
                };
                let left = Factor { place: left.clone(), out: x.cols, k: 1 };
                self.product(&window, &left, &Factor { place: right, out: w.cols, k: 1 });
            }
        }
        slab.into_iter().for_each(|slab| self.recycle(slab));
    }

    pub(super) fn frozen_grad(
        &mut self,
        mut dx: ViewMut<Memory>,
        write: Write,
        dy: View<Memory>,
        w: &Weight,
    ) {
        if self.portable.is_some() {
            return self.portable_frozen_grad((dx, write), dy, (w, 0..w.rows), None);
        }
        let (stride, slab) = (dx.cols, self.slab(w, dx.rows));
        for (from, rows) in self.pieces(dx.rows, dx.cols.max(dy.cols), 0.0) {
            let view = dx.again().rows(from, rows);
            let (out, left) = (self.at_mut(&view), self.at(dy.rows(from, rows)));
            for (part, first, count) in slabs(w, slab.as_ref()) {
                let (right, encoding) = self.readable(w, (part, first, count), slab.as_ref());
                let window = Window {
                    kernel: &LINEAR_GRAD,
                    constants: [("ENCODING", encoding), ("VECTOR", 0)],
                    out: out.clone(),
                    stride,
                    sizes: (rows, w.cols, count),
                    scale: 1.0,
                    write: if part.from + first == 0 { write } else { Write::Add },
                };
                let place = left.clone().on(part.from + first);
                let left = Factor { place, out: dy.cols, k: 1 };
                self.product(&window, &left, &Factor { place: right, out: 1, k: w.cols });
            }
        }
        slab.into_iter().for_each(|slab| self.recycle(slab));
    }

    /// Memory for widened rows of a matrix in blocks, if widening before the product pays.
    fn slab(&mut self, w: &Weight, rows: usize) -> Option<Memory> {
        if !self.variants.unpacks_slowly() {
            return None;
        }
        let numbers = slab_numbers(w.encoding, (w.rows, w.cols), rows, self.binding_limit)?;
        Some(self.memory(numbers))
    }

    /// These rows of a part in a form that a kernel reads, and their encoding.
    fn readable(
        &mut self,
        w: &Weight,
        (part, first, count): (&Part, usize, usize),
        slab: Option<&Memory>,
    ) -> (Place, u32) {
        let Some(slab) = slab else {
            let place = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
            return (place, encodings::number(w.encoding));
        };
        let out = self.at(view(slab, count, w.cols));
        let blocks = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
        self.widen_rows([&out, &blocks], w.encoding, (first * w.cols, count * w.cols));
        (out, 0)
    }

    pub(super) fn trained(&mut self, mut out: ViewMut<Memory>, write: Write, of: Product<Memory>) {
        let Product { a, b, transpose, scale } = of;
        let (stride, n) = (out.cols, out.cols);
        let constants = [
            ("LEFT_ACROSS", u32::from(transpose == Transpose::Left)),
            ("RIGHT_ACROSS", u32::from(transpose != Transpose::Right)),
        ];
        let window = |out: Place, sizes, write| Window {
            kernel: &MATMUL,
            constants,
            out,
            stride,
            sizes,
            scale,
            write,
        };
        let k = if transpose == Transpose::Left { a.rows } else { a.cols };
        // The dimension of the sum is split only along the rows of an operand, if it is those rows.
        let sums = match transpose {
            _ if k == 0 => vec![(0, 0)],
            _ if self.portable.is_some() => slices(k).collect(),
            Transpose::Right => vec![(0, k)],
            Transpose::Neither => self.pieces(k, b.cols, 0.0),
            Transpose::Left => self.pieces(k, a.cols.max(b.cols), 0.0),
        };
        let across =
            if transpose == Transpose::Right { self.pieces(b.rows, b.cols, 0.0) } else { vec![(0, n)] };
        let widest = if transpose == Transpose::Left { n } else { n.max(a.cols) };
        for (i, rows) in self.pieces(out.rows, widest, 0.0) {
            let o = self.at_mut(&out.again().rows(i, rows));
            for (k0, k) in sums.iter().copied() {
                let write = if k0 == 0 { write } else { Write::Add };
                let left = match transpose {
                    Transpose::Left => Factor { place: self.at(a.rows(k0, k)).on(i), out: 1, k: a.cols },
                    _ => Factor { place: self.at(a.rows(i, rows)).on(k0), out: a.cols, k: 1 },
                };
                for (j, cols) in across.iter().copied() {
                    let right = match transpose {
                        Transpose::Right => {
                            Factor { place: self.at(b.rows(j, cols)).on(k0), out: b.cols, k: 1 }
                        }
                        _ => Factor { place: self.at(b.rows(k0, k)), out: 1, k: b.cols },
                    };
                    let (place, sizes) = (o.clone().on(j), (rows, cols, k));
                    if self.portable.is_some() {
                        self.slice((place, stride), (sizes, scale), (write, left.clone(), right));
                    } else {
                        self.product(&window(place, sizes, write), &left, &right);
                    }
                }
            }
        }
    }
}
