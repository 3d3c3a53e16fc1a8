//! Products: a sum is cut into the CPU's slices, which are added up in ascending order; each is one chain. What an adapter
//! adds continues the last chain. A slice that is in several bindings is one chain over all of them.

use super::super::device::Call;
use super::super::encodings;
use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::{Constant, Kernel};
use super::super::memory::Place;
use super::super::products::Factor;
use super::super::rows::kernel;
use super::super::{Memory, Weight, Wgpu};
use super::MultiplyAdd;
use crate::backend::{Backend, View, ViewMut, Write, view, view_mut};
use crate::numeric::slices::slices;
use std::ops::Range;

kernel!(
    PRODUCT,
    "product_tiled" as "portable_product",
    ["portable", "portable_params", "packed"],
    [Written, Read, Read]
);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&PRODUCT];

/// Sizes of a tile: rows and columns of a workgroup, and of a lane.
fn tile(fma: MultiplyAdd, (m, n): (usize, usize)) -> [u32; 4] {
    if fma == MultiplyAdd::Composed {
        return [16, 16, 4, 4];
    }
    let (bm, tm) = if m <= 16 { (16, 4) } else { (64, 8) };
    [bm, if n <= 16 { 16 } else { 64 }, tm, 4]
}

/// The constants of a product; `across`: whether a factor's neighbours in memory are neighbours along the output.
fn constants(fma: MultiplyAdd, sizes: (usize, usize), encoding: u32, across: [u32; 2]) -> [Constant; 14] {
    let [bm, bn, tm, tn] = tile(fma, sizes);
    let ([left, right], looped) = (across, u32::from(fma == MultiplyAdd::Composed));
    [
        ("ENCODING", encoding),
        ("VECTOR", 0),
        ("LEFT_ACROSS", left),
        ("RIGHT_ACROSS", right),
        ("HALF", 0),
        ("SPLIT", 0),
        ("PORTABLE", 1),
        ("LOOPED", looped),
        ("BM", bm),
        ("BN", bn),
        ("BK", 16),
        ("TM", tm),
        ("TN", tn),
        fma.constant(),
    ]
}

/// What a chain does with the output that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Set,
    Add,
    Continue,
}

impl From<Write> for Mode {
    fn from(write: Write) -> Self {
        if write == Write::Add { Mode::Add } else { Mode::Set }
    }
}

/// A part of a chain.
struct Link {
    left: Factor,
    right: Factor,
    encoding: u32,
    k: usize,
}

/// Where a product goes.
struct Target {
    place: Place,
    stride: usize,
    sizes: (usize, usize),
    scale: f32,
}

/// The factors of what an adapter adds to a frozen product: left [T, R] and right [R, N], or its transpose.
#[derive(Clone, Copy)]
pub(in super::super) struct Low<'a> {
    pub left: View<'a, Memory>,
    pub right: View<'a, Memory>,
    pub transposed: bool,
}

impl Low<'_> {
    fn link(self, device: &Wgpu, rows: Range<usize>, col: usize) -> Link {
        let rank = self.left.cols;
        let left = Factor { place: device.at(self.left.rows(rows.start, rows.len())), out: rank, k: 1 };
        let place = device.at(self.right);
        let right = match self.transposed {
            true => Factor { place: place.on(col * rank), out: rank, k: 1 },
            false => Factor { place: place.on(col), out: 1, k: self.right.cols },
        };
        Link { left, right, encoding: 0, k: rank }
    }
}

impl Wgpu {
    /// One link of a chain, in windows.
    fn link(&mut self, to: &Target, mode: Mode, link: &Link) {
        let fma = self.portable.unwrap_or(MultiplyAdd::Fused);
        let (m, n) = to.sizes;
        let [bm, bn, ..] = tile(fma, (m, n));
        let across = [&link.left, &link.right].map(|f| u32::from(f.out == 1 && f.k != 1));
        let constants = constants(fma, (m, n), link.encoding, across);
        let cost = 2.0 * self.cost() * link.k.max(1) as f64;
        for ((i, rows), (j, cols)) in self.windows((m, n), cost) {
            let out = to.place.base + (i * to.stride + j) as u32;
            let a = link.left.place.base + (i * link.left.out) as u32;
            let b = link.right.place.base + (j * link.right.out) as u32;
            let sizes =
                [to.stride, link.left.out, link.left.k, link.right.k, link.right.out, rows, cols, link.k];
            let [stride, a_row, a_k, b_k, b_col, m, n, k] = sizes.map(|x| x as u32);
            let factors = [out, stride, a, a_row, a_k, b, b_k, b_col];
            let params = [m, n, k, to.scale.to_bits(), mode as u32, 1f32.to_bits()];
            let params = [&factors[..], &params].concat();
            self.gpu.dispatch(Call {
                kernel: &PRODUCT,
                constants: &constants,
                params: &params,
                slots: &[to.place.slot.clone(), link.left.place.slot.clone(), link.right.place.slot.clone()],
                groups: (rows.div_ceil(bm as usize) * cols.div_ceil(bn as usize)) as u64,
                work: cost * (rows * cols) as f64,
            });
        }
    }

    /// The links of one chain, into `to`.
    fn chain(&mut self, to: &Target, mode: Mode, links: &[Link]) {
        for (i, link) in links.iter().enumerate() {
            self.link(to, if i == 0 { mode } else { Mode::Continue }, link);
        }
    }

    /// Runs `make` with the output, or, where a chain of several links is added to it, with a memory that is added then.
    fn whole(
        &mut self,
        (out, write): (ViewMut<Memory>, Write),
        links: usize,
        make: impl FnOnce(&mut Self, ViewMut<Memory>, Mode),
    ) {
        if write == Write::Set || links < 2 {
            return make(self, out, write.into());
        }
        let (rows, cols) = (out.rows, out.cols);
        let mut apart = self.memory(rows * cols);
        make(self, view_mut(&mut apart, rows, cols), Mode::Set);
        self.add_view(out, view(&apart, rows, cols));
        self.recycle(apart);
    }

    /// y (=|+=) x wᵀ, and what is added.
    pub(in super::super) fn portable_frozen(
        &mut self,
        (mut y, write): (ViewMut<Memory>, Write),
        x: View<Memory>,
        w: &Weight,
        low: Option<Low>,
    ) {
        let last = slices(w.cols).count() - 1;
        for (i, (from, k)) in slices(w.cols).enumerate() {
            let write = if i == 0 { write } else { Write::Add };
            let low = low.filter(|_| i == last);
            self.whole((y.again(), write), 1 + usize::from(low.is_some()), |device, mut out, mode| {
                let (stride, cols) = (out.cols, out.cols.max(x.cols));
                for (row, rows) in device.pieces(out.rows, cols, 0.0) {
                    let place = device.at_mut(&out.again().rows(row, rows));
                    let left = Factor { place: device.at(x.rows(row, rows)).on(from), out: x.cols, k: 1 };
                    for part in &w.parts {
                        let right = device.place(&part.storage, 0, part.storage.bytes as usize / 4).on(from);
                        let right = Factor { place: right, out: w.cols, k: 1 };
                        let encoding = encodings::number(w.encoding);
                        let first = Link { left: left.clone(), right, encoding, k };
                        let rest = low.map(|low| low.link(device, row..row + rows, part.from));
                        let to = Target {
                            place: place.clone().on(part.from),
                            stride,
                            sizes: (rows, part.rows),
                            scale: 1.0,
                        };
                        let links: Vec<Link> = [first].into_iter().chain(rest).collect();
                        device.chain(&to, mode, &links);
                    }
                }
            });
        }
    }

    /// dx (=|+=) dy w over these rows of w, and what is added.
    pub(in super::super) fn portable_frozen_grad(
        &mut self,
        (mut dx, write): (ViewMut<Memory>, Write),
        dy: View<Memory>,
        (w, of): (&Weight, Range<usize>),
        low: Option<Low>,
    ) {
        let last = slices(of.len()).count() - 1;
        for (i, (from, n)) in slices(of.len()).enumerate() {
            let write = if i == 0 { write } else { Write::Add };
            let low = low.filter(|_| i == last);
            let terms = of.start + from..of.start + from + n;
            let parts: Vec<_> = w
                .parts
                .iter()
                .map(|part| (part, terms.start.max(part.from)..terms.end.min(part.from + part.rows)))
                .filter(|(_, rows)| !rows.is_empty())
                .collect();
            let links = parts.len() + usize::from(low.is_some());
            self.whole((dx.again(), write), links, |device, mut out, mode| {
                let (stride, cols) = (out.cols, out.cols.max(dy.cols));
                for (row, rows) in device.pieces(out.rows, cols, 0.0) {
                    let place = device.at_mut(&out.again().rows(row, rows));
                    let left = device.at(dy.rows(row, rows));
                    let frozen = parts.iter().map(|(part, of_part)| {
                        let right = device.place(&part.storage, 0, part.storage.bytes as usize / 4);
                        let right = right.on((of_part.start - part.from) * w.cols);
                        Link {
                            left: Factor {
                                place: left.clone().on(of_part.start - of.start),
                                out: dy.cols,
                                k: 1,
                            },
                            right: Factor { place: right, out: 1, k: w.cols },
                            encoding: encodings::number(w.encoding),
                            k: of_part.len(),
                        }
                    });
                    let rest = low.map(|low| low.link(device, row..row + rows, 0));
                    let all: Vec<Link> = frozen.chain(rest).collect();
                    device.chain(&Target { place, stride, sizes: (rows, stride), scale: 1.0 }, mode, &all);
                }
            });
        }
    }

    /// Some rows of w as outputs: out[n, rows] = x wᵀ, rows of `stride` in one binding.
    pub(super) fn some_outputs(
        &mut self,
        (out, stride): (&Place, usize),
        x: View<Memory>,
        (w, of): (&Weight, Range<usize>),
    ) {
        let left = Factor { place: self.at(x), out: x.cols, k: 1 };
        for part in &w.parts {
            let rows = of.start.max(part.from)..of.end.min(part.from + part.rows);
            let right = self.place(&part.storage, 0, part.storage.bytes as usize / 4);
            for (i, (from, k)) in slices(w.cols).enumerate().filter(|_| !rows.is_empty()) {
                let place = right.clone().on((rows.start - part.from) * w.cols + from);
                let link = Link {
                    left: Factor { place: left.place.clone().on(from), ..left.clone() },
                    right: Factor { place, out: w.cols, k: 1 },
                    encoding: encodings::number(w.encoding),
                    k,
                };
                let sizes = (x.rows, rows.len());
                let to = Target { place: out.clone().on(rows.start - of.start), stride, sizes, scale: 1.0 };
                self.link(&to, if i == 0 { Mode::Set } else { Mode::Add }, &link);
            }
        }
    }

    /// A slice of a product of two f32 matrices.
    pub(in super::super) fn slice(
        &mut self,
        (place, stride): (Place, usize),
        (sizes, scale): ((usize, usize, usize), f32),
        (write, left, right): (Write, Factor, Factor),
    ) {
        let (m, n, k) = sizes;
        let to = Target { place, stride, sizes: (m, n), scale };
        self.link(&to, write.into(), &Link { left, right, encoding: 0, k });
    }
}

/// Every set of constants of the product.
pub(super) fn sets() -> Vec<Vec<Constant>> {
    let mut sets = Vec::new();
    for (encoding, across) in encodings::all().into_iter().flat_map(|e| (0..4).map(move |a| (e, a))) {
        for (fma, m, n) in [
            (MultiplyAdd::Composed, 64, 64),
            (MultiplyAdd::Fused, 16, 16),
            (MultiplyAdd::Fused, 16, 64),
            (MultiplyAdd::Fused, 64, 16),
            (MultiplyAdd::Fused, 64, 64),
        ] {
            sets.push(constants(fma, (m, n), encoding, [across & 1, across >> 1]).to_vec());
        }
    }
    sets
}
