//! An adapter's own products. In f32 they are products like any other. In bf16 their factors are rounded as those of
//! frozen products are (A, B and the values between too; parameters, sums and gradients stay f32), and multiplied in
//! pairs: x aᵀ and dy b along the columns of activations, which are in pairs already, and the gradients of A and B
//! along tokens, for which a task transposes the pairs of 32 columns of a slice, in L2.
//!
//! Each output is the chain that the f32 tile computes of the same rounded numbers, slice by slice.

use super::super::device::Cpu;
use super::super::gemm::avx512_bf16;
use super::super::gemm::pair_tiles::{lay_out, rows_of_pair_tiles};
use super::super::gemm::product::product;
use super::super::gemm::product_tiles;
use super::super::operands::{self, COLS, Context, Factors, Left, Pairs, Side, Sizes, Strided, Target};
use super::super::runtime::bf16::round_here;
use super::super::runtime::memory::Memory;
use super::super::runtime::threads::Shared;
use super::bf16_activations::pair_two;
use crate::backend::{View, ViewMut, Write};

/// Most rows of a task of [`Cpu::thin`], and least tasks for each thread: a task lays its right factor out again.
const ROWS: usize = 132;
const TASKS: usize = 4;
/// Pairs of tokens of a task that only pairs.
const PAIRS: usize = 256;
/// Rows of a tile of gradients, which is transposed where B's is written.
const TILE_ROWS: usize = 16;

/// panel[k / 2][wide] of pairs along the rows of x [k, n]; zeros beyond its columns, and beside a last single row.
fn along_rows(cx: Context, panel: &mut [u32], x: &[f32], (n, wide): (usize, usize)) {
    let none = vec![0.0; n];
    cx.threads.chunks(panel, PAIRS * wide, |i, panel| {
        let x = x[2 * i * PAIRS * n..].chunks(2 * n);
        for (out, rows) in panel.chunks_exact_mut(wide).zip(x) {
            let (even, odd) = rows.split_at(n);
            pair_two(cx.isa, &mut out[..n], even, if odd.is_empty() { &none } else { odd });
            out[n..].fill(0);
        }
    });
}

impl Cpu {
    /// out[T, R] = scale * left right, of which `right` [K, R] is an adapter's matrix.
    pub(super) fn thin(&mut self, mut out: ViewMut<Memory>, left: Left, right: Strided, scale: f32) {
        let (t, rank, k) = (out.rows, out.cols, left.cols);
        assert!(
            left.rows == t && left.holds(t, k) && right.holds(k, rank),
            "factors are as large as the product"
        );
        let cx = self.context();
        let shared = Shared::new(out.values_mut());
        let target = Target::rows(&shared, rank, Write::Set);
        let most = t.div_ceil(TASKS * cx.threads.count()).next_multiple_of(operands::ROWS).min(ROWS);
        cx.threads.each(t.div_ceil(most.max(1)), |task| {
            let (row, rows) = (task * most, most.min(t - task * most));
            product_tiles::with_panel(|panel| {
                for (from, terms) in product_tiles::slices(k) {
                    for j in (0..rank).step_by(COLS) {
                        let cols = COLS.min(rank - j);
                        let write = if from > 0 { Write::Add } else { Write::Set };
                        let here = Target { write, ..target.from(row, j) };
                        here.pointer(rows, cols);
                        let right = right.from(from, j);
                        match left.from(row, from).side {
                            // SAFETY: factors and output were checked, and these rows are this task's.
                            Side::Floats(a) => unsafe {
                                product_tiles::lay_out(panel, right, (terms, cols), 1.0);
                                round_here(cx.isa, &mut panel[..terms * COLS]);
                                let share = (a, terms, panel.as_ptr(), COLS);
                                product_tiles::rows_of_tiles(here, (rows, cols), &[share], scale, None);
                            },
                            // SAFETY: as above; pairs are for processors that have the instruction.
                            Side::Pairs(a, row) => unsafe {
                                let panel: &mut [u32] = bytemuck::cast_slice_mut(panel);
                                lay_out(panel, right, (terms, cols));
                                let (k, b) = (terms.div_ceil(2), panel.as_ptr());
                                let pairs = Pairs { k, a: a.as_ptr(), row, col: 1, b };
                                rows_of_pair_tiles(here, (rows, cols), (pairs, None), scale, None);
                            },
                        }
                    }
                }
            });
        });
    }

    /// The gradient of A [R, K], dhᵀ x, or of B [N, R], scale * dyᵀ h: `thin` is dh or h [T, R], `wide` x or dy.
    pub(super) fn along_tokens(
        &mut self,
        mut out: ViewMut<Memory>,
        thin: View<Memory>,
        wide: Left,
        scale: f32,
        layout: Layout,
    ) {
        let (t, rank, n) = (thin.rows, thin.cols, wide.cols);
        let shape = if layout == Layout::Transposed { (n, rank) } else { (rank, n) };
        assert!(
            wide.rows == t && wide.holds(t, n) && shape == (out.rows, out.cols),
            "factors have one row a token"
        );
        match wide.side {
            Side::Floats(floats) => {
                let factor = self.factor(thin);
                let thin = factor.left(self.context()).numbers();
                let (m, columns) = (out.rows, out.cols);
                let (a, b) = if layout == Layout::Transposed {
                    (floats.transposed(), thin)
                } else {
                    (thin.transposed(), floats)
                };
                let sizes = Sizes { m, n: columns, k: t };
                product(
                    self.context(),
                    (out.values_mut(), columns),
                    Write::Set,
                    sizes,
                    Factors { a, b, scale },
                );
                self.done(factor);
            }
            Side::Pairs(words, stride) => {
                let across = rank.next_multiple_of(TILE_ROWS);
                let mut paired = self.recycling.take_pairs(paired_words(t, rank));
                along_rows(self.context(), paired.pairs_mut(), thin.values(), (rank, across));
                let sizes = AlongTokens { t, rank, n, across, scale, layout };
                pairs_along_tokens(self.context(), out.values_mut(), paired.pairs(), (words, stride), sizes);
                self.recycling.give(paired);
            }
        }
    }
}

/// Words of the thin factor [T, R] in pairs along tokens.
pub fn paired_words(t: usize, rank: usize) -> usize {
    t.div_ceil(2) * rank.next_multiple_of(TILE_ROWS)
}

/// Layout of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// [R, K], as A.
    Upright,
    /// [N, R], as B.
    Transposed,
}

/// What [`pairs_along_tokens`] multiplies.
struct AlongTokens {
    t: usize,
    rank: usize,
    n: usize,
    /// Words of a pair of tokens of the thin factor.
    across: usize,
    scale: f32,
    layout: Layout,
}

/// out = thinᵀ wide, of which `thin` is in pairs along tokens and `wide` along columns.
fn pairs_along_tokens(
    cx: Context,
    out: &mut [f32],
    thin: &[u32],
    (wide, stride): (&[u32], usize),
    s: AlongTokens,
) {
    let out = Shared::new(out);
    cx.threads.each(s.n.div_ceil(COLS), |task| {
        let col = task * COLS;
        let cols = COLS.min(s.n - col);
        for first in (0..s.rank).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(s.rank - first);
            let mut flat = [0.0f32; TILE_ROWS * COLS];
            let here = Shared::new(&mut flat);
            for (from, k) in product_tiles::slices(s.t) {
                let write = if from > 0 { Write::Add } else { Write::Set };
                let target = Target::rows(&here, COLS, write);
                target.pointer(rows, cols);
                let x = &wide[(from * stride + col / 2).min(wide.len())..];
                let a = &thin[from / 2 * s.across + first..];
                assert!((k - 1) * stride + cols.div_ceil(2) <= x.len(), "the wide factor is there");
                assert!((from + k).div_ceil(2) * s.across <= thin.len(), "the thin factor is there");
                product_tiles::with_panel(|panel| {
                    let panel: &mut [u32] = bytemuck::cast_slice_mut(&mut panel[..k.div_ceil(2) * COLS]);
                    // SAFETY: pairs are for processors that have the instruction; rows and words were checked, and
                    // `flat` is this task's.
                    unsafe {
                        avx512_bf16::turn_rows(panel.as_mut_ptr(), (x.as_ptr(), stride), k, cols.div_ceil(2));
                        let (k, b) = (k.div_ceil(2), panel.as_ptr());
                        let pairs = Pairs { k, a: a.as_ptr(), row: 1, col: s.across, b };
                        rows_of_pair_tiles(target, (rows, cols), (pairs, None), s.scale, None);
                    }
                });
            }
            // SAFETY: these columns of the wide factor are this task's.
            let part = |at: usize, len: usize| unsafe { out.slice(at, len) };
            if s.layout == Layout::Transposed {
                for j in 0..cols {
                    let to = part((col + j) * s.rank + first, rows);
                    to.iter_mut().enumerate().for_each(|(r, o)| *o = flat[r * COLS + j]);
                }
            } else {
                for (r, row) in flat.chunks_exact(COLS).enumerate().take(rows) {
                    part((first + r) * s.n + col, cols).copy_from_slice(&row[..cols]);
                }
            }
        }
    });
}
