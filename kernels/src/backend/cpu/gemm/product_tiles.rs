//! Products in tiles (`tile.rs`). Every output is one chain of multiply-adds per slice of the inner
//! dimension, whatever the sizes and wherever the cuts between tasks fall: those may follow the shapes, and
//! what is convenient, freely.
//!
//! The right factor is laid out as a panel [k][32] first, unless it has its columns side by side and is used
//! a few times only. Both loops run over L2: a panel and a block of rows of the left factor.

use super::super::operands::{COLS, Context, Factors, Part, Place, ROWS, Sizes, Strided, Target};
use super::super::runtime::memory::Memory;
use super::super::runtime::threads::Shared;
use super::tile::{self, Ahead};
use super::transpose::transpose;
use crate::backend::Write;
pub use crate::numeric::slices::{SLICE, slices};
use std::cell::RefCell;

/// Most rows of the left factor in a task: 22 tiles, 0.8 MB of a slice, which stays in L2.
const BLOCK: usize = 264;
/// Most panels of a task: the slices of its left factor are read once for all of them.
const GROUP: usize = 24;
/// Tasks for each thread, if the panels are enough: of one size, and few, because each reads its rows again.
const TASKS: usize = 4;
/// The same for narrow outputs, which have few panels to share out.
const NARROW: usize = 96;
/// Up to this number of rows a right factor is read in place.
const IN_PLACE: usize = 96;

thread_local! {
    static PANEL: RefCell<Memory> = RefCell::new(Memory::zeros(2 * SLICE * COLS));
}

/// Runs `work` with this thread's room for two panels.
pub fn with_panel<R>(work: impl FnOnce(&mut [f32]) -> R) -> R {
    PANEL.with_borrow_mut(|p| work(p.values_mut()))
}

/// A share of an output: rows and panels.
#[derive(Debug, Clone)]
pub struct Area {
    /// First row.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// Which panels of 32 columns.
    pub panels: std::ops::Range<usize>,
}

/// Cuts an output of m rows and that many panels into areas and works on all of them. Where the cuts fall
/// changes no bit, so they may follow the number of threads.
pub fn areas(cx: Context, m: usize, panels: usize, work: impl Fn(Area) + Sync) {
    let rows = m.div_ceil(m.div_ceil(BLOCK).max(1)).next_multiple_of(ROWS);
    let blocks = m.div_ceil(rows.max(1));
    let least = (TASKS * cx.threads.count()).div_ceil(blocks.max(1)).max(panels.div_ceil(GROUP));
    let group = panels.div_ceil(least.max(1)).max(1);
    let groups = panels.div_ceil(group);
    cx.threads.each(groups * blocks, |task| {
        let (block, first) = (task / groups, task % groups * group);
        let row = block * rows;
        work(Area { row, rows: rows.min(m - row), panels: first..(first + group).min(panels) });
    });
}

/// See [`super::product::product`].
pub fn product(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    let Sizes { m, n, k } = sizes;
    if m == 0 || n == 0 {
        return;
    }
    f.check(sizes);
    if n <= 16 && m > n && f.a.row == 1 && f.b.col == 1 {
        return across(cx, target, sizes, f);
    }
    let block = if n <= 2 * COLS { NARROW } else { BLOCK };
    let panels = n.div_ceil(COLS);
    cx.threads.each(panels * m.div_ceil(block), |task| {
        let (i, j) = (task / panels * block, task % panels * COLS);
        let part = Sizes { m: block.min(m - i), n: COLS.min(n - j), k };
        let factors = Factors { a: f.a.from(i, 0), b: f.b.from(0, j), scale: f.scale };
        // SAFETY: sizes were checked; tiles are disjoint, and each belongs to one task.
        unsafe { tile(target.from(i, j), part, factors) };
    });
}

/// A tall, narrow product aᵀ b, b up to 16 wide: its transpose bᵀ a has full vectors.
fn across(cx: Context, target: Target, sizes: Sizes, f: Factors) {
    let Sizes { m, n, k } = sizes;
    cx.threads.each(m.div_ceil(COLS), |task| {
        let i = task * COLS;
        let rows = COLS.min(m - i);
        let mut flat = [0.0f32; 16 * COLS];
        let transposed = Sizes { m: n, n: rows, k };
        let (a, b) = (f.b.transposed(), f.a.from(i, 0).transposed());
        let at = target.from(i, 0).pointer(rows, n);
        // SAFETY: sizes were checked; `flat` is ours, and so are these rows of the output.
        unsafe {
            let row = |r: usize| std::slice::from_raw_parts_mut(at.add(r * target.stride), n);
            for r in (0..rows).filter(|_| target.write == Write::Add) {
                row(r).iter().enumerate().for_each(|(j, x)| flat[j * COLS + r] = *x);
            }
            let here = Shared::new(&mut flat);
            let here = Target::rows(&here, COLS, target.write);
            tile(here, transposed, Factors { a, b, scale: f.scale });
            for r in 0..rows {
                row(r).iter_mut().enumerate().for_each(|(j, x)| *x = flat[j * COLS + r]);
            }
        }
    });
}

/// See [`super::product::tile`], which has checked the sizes.
///
/// # Safety
/// As there.
pub unsafe fn tile(target: Target, sizes: Sizes, f: Factors) {
    let Sizes { m, n, k } = sizes;
    target.pointer(m, n);
    for (from, slice) in slices(k) {
        let write = if from > 0 { Write::Add } else { target.write };
        let a = f.a.from(0, from);
        for j in (0..n).step_by(COLS) {
            let cols = COLS.min(n - j);
            let here = Target { write, ..target.from(0, j) };
            let b = f.b.from(from, j);
            // SAFETY: the caller's promise.
            unsafe {
                if b.col == 1 && m <= IN_PLACE && (cols.is_multiple_of(16) || tile::reads_columns_alone()) {
                    rows_of_tiles(here, (m, cols), &[(a, slice, b.data.as_ptr(), b.row)], f.scale, None);
                } else {
                    with_panel(|panel| {
                        lay_out(panel, b, (slice, cols), 1.0);
                        rows_of_tiles(here, (m, cols), &[(a, slice, panel.as_ptr(), COLS)], f.scale, None);
                    });
                }
            }
        }
    }
}

/// A product's share of one column of tiles: left factor, terms, right factor, distance between its rows.
pub type Share<'a> = (Strided<'a>, usize, *const f32, usize);

/// All tiles of one panel: m rows, the sum of at most two shares. Meanwhile `ahead` comes nearer.
///
/// # Safety
/// As [`tile`]; the right factors have as many rows as terms, of as many values as the output has columns, and what
/// [`tile::reads_columns_alone`] says.
pub unsafe fn rows_of_tiles(
    target: Target,
    (m, cols): (usize, usize),
    shares: &[Share],
    scale: f32,
    ahead: Option<Ahead>,
) {
    let of = m.div_ceil(ROWS);
    for i in (0..m).step_by(ROWS) {
        let rows = ROWS.min(m - i);
        if let Some(ahead) = ahead {
            ahead.fetch(i / ROWS, of);
        }
        let place = place(target, i, (rows, cols), scale);
        // SAFETY: the caller's promise.
        unsafe {
            match shares {
                [one] => tile::tile(&[part(one, i)], place),
                [one, two] => tile::tile(&[part(one, i), part(two, i)], place),
                _ => unreachable!("one share or two"),
            }
        }
    }
}

/// A share from row i on.
pub fn part(&(a, k, b, stride): &Share, i: usize) -> Part {
    let a = a.from(i, 0);
    Part { k, a: a.data.as_ptr(), row: a.row, col: a.col, b, stride }
}

/// The place of a tile whose first row is i.
pub fn place(target: Target, i: usize, (rows, cols): (usize, usize), scale: f32) -> Place {
    let at = target.out.pointer(target.at + i * target.stride);
    let (stride, add) = (target.stride, target.write == Write::Add);
    Place { at, stride, rows, cols, scale, add, short: target.short }
}

/// panel[k][32] = scale * b, zeros beyond its columns.
pub fn lay_out(panel: &mut [f32], b: Strided, (k, cols): (usize, usize), scale: f32) {
    let panel = &mut panel[..k * COLS];
    assert!(b.holds(k, cols), "the factor is as large as the product says");
    if b.row == 1 && b.col > 1 {
        for i in (0..COLS).step_by(16) {
            let rows = 16.min(cols.saturating_sub(i));
            for j in (0..k).step_by(16) {
                let from = b.from(j, i.min(cols.saturating_sub(1)));
                let out = &mut panel[j * COLS + i..];
                transpose(out, (from.data, b.col), (rows, 16.min(k - j)), scale);
            }
        }
        return;
    }
    for (i, row) in panel.chunks_exact_mut(COLS).enumerate() {
        let from = b.from(i, 0);
        for (j, out) in row.iter_mut().enumerate() {
            *out = if j < cols { scale * from.data[j * from.col] } else { 0.0 };
        }
    }
}
