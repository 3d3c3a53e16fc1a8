//! The memory of an NVIDIA GPU without its data: size classes of the pool, and what verbs take inside. In the bf16 class
//! the copies that are kept of products' inputs are counted as if all of them existed for the whole microbatch.

use super::frozen::{self, Direction};
use super::libcuda;
use super::memory::{Width, blocks};
use super::tensor::padded;
use super::{Cuda, Driver, Tier, pool, skinny};
use crate::backend::dry::{Device, Low, Matrix, Op, Way, Weight};
use crate::backend::{Heads, TokenRows};
use crate::numeric::block::Encoding;

/// What decides how much memory a device takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Footprint {
    bf16: bool,
    granularity: usize,
    slab: usize,
    /// Widths of the inputs of products whose copies are kept.
    kept: [usize; 5],
}

impl Footprint {
    /// A card that is not open, in f32.
    pub fn of_f32() -> Self {
        let (granularity, slab) = (libcuda::GRANULARITY, frozen::SLAB);
        Footprint { bf16: false, granularity, slab, kept: [0; 5] }
    }

    /// The same in bf16.
    pub fn of_bf16() -> Self {
        Footprint { bf16: true, ..Self::of_f32() }
    }

    /// Whether it is the bf16 class.
    pub fn is_bf16(self) -> bool {
        self.bf16
    }

    /// The same for a model with these heads, whose widest input of a product has `widest` columns.
    pub fn with_copies(self, heads: Heads, widest: usize) -> Self {
        let [q, kv] = [heads.query, heads.kv].map(|n| n * heads.size);
        let kept = if self.bf16 { [q, kv, kv, q, widest] } else { [0; 5] };
        Footprint { kept, ..self }
    }
}

impl<D: Driver> Cuda<D> {
    pub(super) fn footprint(&self) -> Footprint {
        let (bf16, granularity) = (self.tier == Tier::Sm80, self.driver.granularity());
        Footprint { bf16, granularity, slab: self.slab, kept: [0; 5] }
    }
}

/// The counted memory.
#[derive(Clone)]
pub struct DryCuda {
    is: Footprint,
    live: u64,
    since: u64,
}

impl DryCuda {
    /// Nothing is used.
    pub fn new(is: Footprint) -> Self {
        DryCuda { is, live: 0, since: 0 }
    }

    fn narrow(&mut self, x: Matrix) -> usize {
        self.take(x.rows * padded(x.cols) / 2)
    }

    /// A product with a frozen matrix.
    fn frozen(&mut self, x: Matrix, w: &Weight, way: Way) {
        let copy = (self.is.bf16 && way == Way::Backward).then(|| self.narrow(x));
        if let Encoding::Blocks(_) = w.encoding {
            let direction = if way == Way::Forward { Direction::Forward } else { Direction::Backward };
            let numbers = frozen::most_numbers((w.rows, w.cols), direction, self.is.slab);
            let size = self.take(if self.is.bf16 { numbers.div_ceil(2) } else { numbers });
            self.give(size);
        }
        copy.into_iter().for_each(|size| self.give(size));
    }

    /// Sums over rows in slices.
    fn columns(&mut self, (m, n): (usize, usize), rows: usize) {
        let numbers = skinny::partial_sums(rows, (m, n));
        let numbers = if numbers > 0 { numbers } else { skinny::partial_sums(rows, (n, m)) };
        let size = self.take(numbers);
        self.give(size);
    }

    fn adapted_grad(&mut self, dy: Matrix, w: &Weight, low: Low) {
        let dh = self.take(dy.rows * low.rank);
        self.columns((dy.cols, low.rank), dy.rows);
        self.columns((low.rank, low.x.cols), dy.rows);
        self.frozen(dy, w, Way::Backward);
        self.give(dh);
    }
}

impl Device for DryCuda {
    fn take(&mut self, words: usize) -> usize {
        let bytes = pool::class(4 * words, self.is.granularity);
        self.live += bytes as u64;
        self.since = self.since.max(self.live);
        bytes
    }

    fn give(&mut self, size: usize) {
        self.live -= size as u64;
    }

    fn peak(&mut self) -> u64 {
        std::mem::replace(&mut self.since, self.live)
    }

    fn live(&self) -> u64 {
        self.live
    }

    fn matrix_bytes(&self, encoding: Encoding, numbers: usize) -> usize {
        match self.is.bf16 {
            true => super::matrix_bytes_bf16(encoding, numbers),
            false => super::matrix_bytes(encoding, numbers),
        }
    }

    fn tokens(&mut self, rows: TokenRows) -> usize {
        let count = rows.ids.len();
        let walked = |w: &&Width| **w == Width::Baseline || self.is.bf16;
        let lists = Width::ALL.iter().filter(walked).map(|w| blocks(rows.bounds, w.tokens()).len());
        let copies = self.is.kept.map(|cols| count * padded(cols) / 2);
        4 * count + rows.bounds.len() + lists.sum::<usize>() + copies.iter().sum::<usize>()
    }

    fn ids(&self, count: usize) -> usize {
        count
    }

    fn copied(&self) -> Box<dyn Device> {
        Box::new(self.clone())
    }

    fn inside(&mut self, op: Op) -> bool {
        match op {
            Op::Frozen(_, x, w, way) => self.frozen(x, w, way),
            Op::Columns(out, rows) if self.is.bf16 => self.columns((out.rows, out.cols), rows),
            Op::AdaptedGrad(_, dy, w, low) if self.is.bf16 => self.adapted_grad(dy, w, low),
            Op::AttentionGrad(heads, _, [q, ..]) => {
                let copy = self.is.bf16.then(|| self.narrow(q));
                let delta = self.take(q.rows * heads.query);
                copy.into_iter().chain([delta]).for_each(|size| self.give(size));
            }
            Op::DeltaRule(beta) => {
                let factors = self.take(2 * beta.values());
                self.give(factors);
            }
            _ => return false,
        }
        true
    }
}
