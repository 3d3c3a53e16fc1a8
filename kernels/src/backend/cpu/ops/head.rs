//! The loss of a head over a vocabulary in one pass that never stores the logits: a task is a block of rows and
//! a part of the vocabulary, walked in blocks of columns whose logits stay in L2, with a running maximum and
//! sum as in attention (Milakov & Gimelshein 2018, arXiv:1805.02867). Parts are put together in order.
//!
//! Cuts of the vocabulary depend on V alone, so threads change no bit; cuts of the rows change none anyway.

use super::super::gemm::left_operand::pair_rows;
use super::super::gemm::product_tiles;
use super::super::gemm::tiled::Tiled;
use super::super::operands::{self, Context, Left, Precision, Side, Strided};
use super::super::runtime::bf16::round_here;
use super::super::runtime::isa::kernel;
use super::super::runtime::math;
use super::super::runtime::memory::Memory;
use super::loss;
use crate::backend::Write;
use crate::numeric::slices::{BLOCK, part_of_vocabulary as part};
use std::cell::RefCell;
use std::ops::Range;

/// Distance between rows of logits: not a power of two, so that rows do not share cache sets.
const STRIDE: usize = BLOCK + 16;
/// Most rows of a task.
const ROWS: usize = 264;
/// Values of the left factor that L2 has room for.
const LEFT: usize = 160_000;

thread_local! {
    static LOGITS: RefCell<Memory> = RefCell::new(Memory::zeros(ROWS * (STRIDE + BLOCK / 2)));
}

/// What is asked.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// Hidden states [n, C].
    pub x: Left<'a>,
    /// C
    pub cols: usize,
    /// V
    pub vocab: usize,
    /// [n]
    pub targets: &'a [u32],
}

impl<'a> Question<'a> {
    fn rows(self, rows: Range<usize>) -> Self {
        let x = Left { rows: rows.len(), ..self.x.from(rows.start, 0) };
        Question { x, targets: &self.targets[rows], ..self }
    }
}

/// A part's answer for n rows: largest logit, sum of e^(logit - largest) and the target's logit of each row,
/// then, where a gradient is asked for, the sums of e^(logit - largest) w [n, C].
struct Answer<'a> {
    largest: &'a mut [f32],
    sum: &'a mut [f32],
    chosen: &'a mut [f32],
    weighted: Option<&'a mut [f32]>,
}

impl Answer<'_> {
    fn of(values: &mut [f32], n: usize) -> Answer<'_> {
        let (largest, rest) = values.split_at_mut(n);
        let (sum, rest) = rest.split_at_mut(n);
        let (chosen, rest) = rest.split_at_mut(n);
        Answer { largest, sum, chosen, weighted: if rest.is_empty() { None } else { Some(rest) } }
    }
}

kernel! {
    fn exp<L>(x: f32) -> f32 { math::exp::<L>(x) }
}

kernel! {
    /// out = [out +] x * by
    fn add_scaled<L>(out: &mut [f32], write: Write, x: &[f32], by: f32) {
        if write == Write::Set {
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = x * by);
        } else {
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = L::fma(x, by, *o));
        }
    }
}

kernel! {
    fn subtract<L>(out: &mut [f32], x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o -= x);
    }
}

/// losses[n] and, where asked for, dx[n, C]; both are overwritten. `room` holds what [`room`] says.
pub fn loss<W: Tiled + ?Sized>(
    cx: Context,
    panels: &W,
    out: (&mut [f32], Option<&mut [f32]>),
    q: Question,
    room: &mut [f32],
) {
    let (losses, mut dx) = out;
    let (n, c) = (q.targets.len(), q.cols);
    assert!(q.targets.iter().all(|&t| (t as usize) < q.vocab), "targets are tokens");
    let rows = rows_of_task(n, c);
    let each = part(q.vocab);
    let parts = q.vocab.div_ceil(each);
    let wave = wave(cx.threads.count());
    for from in (0..n).step_by((rows * wave).max(1)) {
        let now = (rows * wave).min(n - from);
        let wide = rows * (3 + if dx.is_some() { c } else { 0 });
        let room = &mut room[..now.div_ceil(rows) * parts * wide];
        cx.threads.chunks(room, wide, |task, values| {
            let (block, part) = (task / parts * rows, task % parts * each);
            let these = from + block..from + (block + rows).min(now);
            let count = these.len();
            let columns = part..(part + each).min(q.vocab);
            let values = &mut values[..count * wide / rows];
            answer(cx, panels, Answer::of(values, count), q.rows(these), columns);
        });
        let room = &*room;
        let all = q.rows(from..from + now);
        let task = |i: usize, loss: &mut [f32], dx: Option<&mut [f32]>| {
            let (block, row) = (i / rows, i % rows);
            let count = rows.min(now - block * rows);
            let values = &room[block * parts * wide..][..parts * wide];
            let answers = values.chunks_exact(wide).map(|v| &v[..count * wide / rows]);
            put_together(cx, panels, (loss, dx), answers, (row, count, all.targets[i] as usize, each));
        };
        let losses = &mut losses[from..from + now];
        match dx.as_deref_mut() {
            Some(dx) => {
                let dx = &mut dx[from * c..(from + now) * c];
                cx.threads.chunks2((losses, dx), (1, c), |i, loss, dx| task(i, loss, Some(dx)));
            }
            None => cx.threads.chunks(losses, 1, |i, loss| task(i, loss, None)),
        }
    }
}

/// Values that [`loss`] of x [n, C] wants room for; `gradient_cols` is C, or 0 where only the loss is asked for.
pub fn room(threads: usize, (n, c): (usize, usize), vocab: usize, gradient_cols: usize) -> usize {
    let rows = rows_of_task(n, c);
    let parts = vocab.div_ceil(part(vocab));
    n.div_ceil(rows.max(1)).min(wave(threads)) * parts * rows * (3 + gradient_cols)
}

/// Blocks of rows at a time: enough tasks for all threads.
fn wave(threads: usize) -> usize {
    (threads / 4).max(2)
}

fn rows_of_task(n: usize, c: usize) -> usize {
    let most = (LEFT / c.max(1)).clamp(4 * operands::ROWS, ROWS);
    n.div_ceil(n.div_ceil(most).max(1)).next_multiple_of(operands::ROWS).min(ROWS)
}

/// One block of rows against one part of the vocabulary.
fn answer<W: Tiled + ?Sized>(cx: Context, panels: &W, out: Answer, q: Question, columns: Range<usize>) {
    let Answer { largest, sum, chosen, mut weighted } = out;
    let n = q.targets.len();
    largest.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    chosen.fill(0.0);
    LOGITS.with_borrow_mut(|logits| {
        let (logits, words) = logits.values_mut().split_at_mut(ROWS * STRIDE);
        product_tiles::with_panel(|wide| {
            for from in columns.clone().step_by(BLOCK) {
                let block = from..(from + BLOCK).min(columns.end);
                panels.some_forward((&mut *logits, STRIDE), q.x, block.clone(), wide);
                for i in 0..n {
                    let row = &mut logits[i * STRIDE..][..block.len()];
                    let target = q.targets[i] as usize;
                    if block.contains(&target) {
                        chosen[i] = row[target - from];
                    }
                    let most = loss::largest(cx.isa, row).max(largest[i]);
                    let shrink = exp(cx.isa, largest[i] - most);
                    sum[i] = sum[i] * shrink + loss::exponentials(cx.isa, row, most);
                    largest[i] = most;
                    if let Some(w) = weighted.as_deref_mut().filter(|_| from > columns.start && shrink != 1.0)
                    {
                        math::scale_row(cx.isa, &mut w[i * q.cols..][..q.cols], shrink);
                    }
                }
                if let Some(w) = weighted.as_deref_mut() {
                    let write = if from > columns.start { Write::Add } else { Write::Set };
                    let e = Left {
                        rows: n,
                        cols: block.len(),
                        side: narrow(cx, &mut *logits, words, (n, block.len())),
                    };
                    panels.some_backward((w, write), e, block, wide);
                }
            }
        });
    });
}

/// Rows of a block as the left factor of the gradient's product.
fn narrow<'a>(
    cx: Context,
    logits: &'a mut [f32],
    words: &'a mut [f32],
    (rows, cols): (usize, usize),
) -> Side<'a> {
    let each = logits.chunks_mut(STRIDE).take(rows);
    match cx.precision {
        Precision::F32 => {}
        Precision::Bf16Widened => each.for_each(|row| round_here(cx.isa, &mut row[..cols])),
        Precision::Bf16Dot => {
            let wide = cols.div_ceil(2);
            let words: &mut [u32] = bytemuck::cast_slice_mut(&mut words[..rows * wide]);
            for (words, row) in words.chunks_exact_mut(wide).zip(each) {
                pair_rows(words, &row[..cols], cols);
            }
            return Side::Pairs(words, wide);
        }
    }
    Side::Floats(Strided::rows(logits, STRIDE))
}

/// Loss and gradient of one row: number, rows of the block, target, columns of a part.
fn put_together<'a, W: Tiled + ?Sized>(
    cx: Context,
    panels: &W,
    (loss, dx): (&mut [f32], Option<&mut [f32]>),
    answers: impl Iterator<Item = &'a [f32]> + Clone,
    (row, count, target, part): (usize, usize, usize, usize),
) {
    let most = answers.clone().map(|a| a[row]).fold(f32::NEG_INFINITY, f32::max);
    let factor = |a: &[f32]| exp(cx.isa, a[row] - most);
    let sum = answers.clone().fold(0.0, |s, a| s + factor(a) * a[count + row]);
    let chosen = answers.clone().nth(target / part).map_or(f32::NAN, |a| a[2 * count + row]);
    loss[0] = libm::logf(sum) - (chosen - most);
    let Some(dx) = dx else { return };
    for (i, a) in answers.enumerate() {
        let weighted = &a[3 * count + row * dx.len()..][..dx.len()];
        let write = if i == 0 { Write::Set } else { Write::Add };
        add_scaled(cx.isa, dx, write, weighted, factor(a) / sum);
    }
    let mut row = vec![0.0; dx.len()];
    panels.row(&mut row, target);
    subtract(cx.isa, dx, &row);
}
