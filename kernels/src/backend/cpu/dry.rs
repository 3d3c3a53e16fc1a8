//! The memory of the CPU without its data: the pool with numbers of lines only, and what ops take inside, in the order
//! in which `ops` takes it.

use super::attention::block::Pass;
use super::attention::block_pairs::PairedKeys;
use super::device::Cpu;
use super::gemm::added::RANK;
use super::gemm::{gemv, product_tiles};
use super::operands::{Precision, Products};
use super::ops::{adapter, head};
use super::runtime::memory::{self, Recycling};
use crate::backend::Heads;
use crate::backend::dry::{Device, Low, Matrix, Op, Way};
use crate::numeric::block::Encoding;

/// What decides how much memory the CPU takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Footprint {
    precision: Precision,
    products: Products,
    threads: usize,
}

impl Default for Footprint {
    /// In f32, on one thread.
    fn default() -> Self {
        Footprint { precision: Precision::F32, products: Products::Tiles, threads: 1 }
    }
}

impl Cpu {
    pub(super) fn footprint(&self) -> Footprint {
        let (precision, products) = (self.precision, self.products);
        Footprint { precision, products, threads: self.threads.count() }
    }
}

impl Footprint {
    /// The same on this number of threads.
    pub fn on_threads(self, threads: usize) -> Self {
        Footprint { threads: threads.max(1), ..self }
    }
}

/// The counted memory.
#[derive(Clone)]
pub struct DryCpu {
    is: Footprint,
    recycling: Recycling<usize>,
}

/// What products read instead of a left factor, and whether it is in pairs.
struct Factor {
    made: Option<usize>,
    pairs: bool,
}

impl DryCpu {
    /// Nothing is used.
    pub fn new(is: Footprint) -> Self {
        DryCpu { is, recycling: Recycling::default() }
    }

    fn rounds(&self) -> bool {
        self.is.precision != Precision::F32 && self.is.products == Products::Tiles
    }

    /// Takes one buffer and gives it back.
    fn passing(&mut self, words: usize) {
        let room = self.take(words);
        self.give(room);
    }

    fn factor(&mut self, x: Matrix) -> Factor {
        let pairs = self.is.precision == Precision::Bf16Dot && x.rows > gemv::ROWS;
        let made = match self.is.precision {
            Precision::F32 => None,
            _ if x.short => (!pairs).then(|| self.take(x.values())),
            _ => Some(self.take(x.rows * if pairs { x.cols.div_ceil(2) } else { x.cols })),
        };
        Factor { made, pairs }
    }

    /// The left factor of an adapter's part [T, R].
    fn low(&mut self, rows: usize, rank: usize, scale: f32) -> Factor {
        let h = Matrix { rows, cols: rank, short: false };
        if !self.rounds() || rank > RANK {
            return Factor { made: None, pairs: false };
        }
        if scale == 1.0 {
            return self.factor(h);
        }
        let scaled = self.take(h.values());
        let factor = self.factor(h);
        self.give(scaled);
        factor
    }

    fn done(&mut self, factor: Factor) {
        factor.made.into_iter().for_each(|m| self.give(m));
    }

    /// The whole f32 sum of a product that tiles cannot write in 16 bits.
    fn through(&mut self, out: Matrix, left: &Factor, terms: usize, rank: usize) {
        let whole = left.pairs && product_tiles::slices(terms).count() == 1 && rank <= RANK;
        if out.short && !whole {
            self.passing(out.values());
        }
    }

    /// The gradient of A or B: the product of `thin` [T, R] with rows of tokens.
    fn along_tokens(&mut self, (t, rank): (usize, usize), wide: &Factor) {
        if wide.pairs {
            return self.passing(adapter::paired_words(t, rank));
        }
        let factor = self.factor(Matrix { rows: t, cols: rank, short: false });
        self.done(factor);
    }

    /// The gradients of A and B; returns dh.
    fn adapter_grad(&mut self, dy: &Factor, t: usize, low: Low) -> usize {
        let dh = self.take(t * low.rank);
        self.along_tokens((t, low.rank), dy);
        let x = self.factor(low.x);
        self.along_tokens((t, low.rank), &x);
        self.done(x);
        dh
    }

    fn adapted(&mut self, out: Matrix, x: Matrix, terms: usize, low: Low) {
        let factor = self.factor(x);
        if low.masked && self.rounds() {
            let seen = self.factor(low.x);
            self.done(seen);
        }
        let h = self.low(x.rows, low.rank, low.scale);
        self.through(out, &factor, terms, low.rank);
        self.done(h);
        self.done(factor);
    }

    fn adapted_grad(&mut self, dx: Matrix, dy: Matrix, terms: usize, low: Low) {
        let factor = self.factor(dy);
        let dh = match self.rounds() {
            true => self.adapter_grad(&factor, dy.rows, low),
            false => self.take(dy.rows * low.rank),
        };
        let left = self.low(dy.rows, low.rank, 1.0);
        self.through(dx, &factor, terms, low.rank);
        [left, factor].into_iter().for_each(|f| self.done(f));
        self.give(dh);
    }

    fn attention_grad(&mut self, heads: Heads, keys: usize, saved: [Matrix; 4]) {
        let wide = saved.map(|x| x.short.then(|| self.take(x.values())));
        let room = self.take(PairedKeys::room_of(self.is.precision, keys, heads, Pass::Backward));
        let each = if heads.query == heads.kv { None } else { Some(saved[0].values()) };
        let parts = [each, each].map(|len| len.map(|len| self.take(len)));
        self.give(room);
        wide.into_iter().flatten().chain(parts.into_iter().flatten()).for_each(|m| self.give(m));
    }
}

impl Device for DryCpu {
    fn take(&mut self, words: usize) -> usize {
        self.recycling.take_room(words)
    }

    fn give(&mut self, size: usize) {
        self.recycling.give_room(size);
    }

    fn peak(&mut self) -> u64 {
        self.recycling.peak()
    }

    fn live(&self) -> u64 {
        self.recycling.live()
    }

    fn bytes(&self, size: usize) -> u64 {
        memory::bytes(size)
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        self.is.precision.matrix_bytes(encoding, numbers)
    }

    fn shortens(&self, cols: usize) -> bool {
        self.rounds() && cols.is_multiple_of(2)
    }

    fn copied(&self) -> Box<dyn Device> {
        Box::new(self.clone())
    }

    fn inside(&mut self, op: Op) -> bool {
        let plain = self.is.products == Products::Plain;
        match op {
            Op::Copy(x) | Op::Dropout(x) if x.short => self.passing(x.values()),
            Op::Copy(_) | Op::Dropout(_) | Op::DeltaRule(_) | Op::Sum | Op::Columns(..) => {}
            Op::Frozen(out, x, w, way) => {
                let factor = self.factor(x);
                let terms = if way == Way::Forward { w.cols } else { w.rows };
                self.through(out, &factor, terms, 0);
                self.done(factor);
            }
            Op::Down(x) if self.rounds() => {
                let factor = self.factor(x);
                self.done(factor);
            }
            Op::Down(_) => {}
            Op::Attention(heads, keys) => {
                self.passing(PairedKeys::room_of(self.is.precision, keys, heads, Pass::Forward));
            }
            Op::AttentionGrad(heads, keys, saved) => self.attention_grad(heads, keys, saved),
            _ if plain => return false,
            Op::Adapted(out, x, w, low) => self.adapted(out, x, w.cols, low),
            Op::AdapterGrad(dy, low) if self.rounds() => {
                let factor = self.factor(dy);
                let dh = self.adapter_grad(&factor, dy.rows, low);
                self.done(factor);
                self.give(dh);
            }
            Op::AdapterGrad(..) => return false,
            Op::AdaptedGrad(dx, dy, w, low) => self.adapted_grad(dx, dy, w.rows, low),
            Op::HeadLoss(x, vocab, cols) => {
                let factor = self.factor(x);
                self.passing(head::room(self.is.threads, (x.rows, x.cols), vocab, cols));
                self.done(factor);
            }
        }
        true
    }
}
