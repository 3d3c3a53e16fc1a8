//! The memory of a GPU without its data: size classes of the pool, and what verbs take inside. The parts of split sums
//! are left out: they take at most 4 MB, and only on cards that are fast with them.

use super::pool;
use super::products;
use super::{Wgpu, weight};
use crate::backend::TokenRows;
use crate::backend::dry::{Device, Op};
use crate::numeric::block::Encoding;

/// What decides how much memory a device takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Footprint {
    /// Most bytes of one binding.
    binding: u64,
    /// Whether blocks are widened before products.
    widens: bool,
}

impl Footprint {
    /// A card that is not open: its kernels read blocks.
    pub fn of_card() -> Self {
        Footprint { binding: u64::MAX, widens: false }
    }

    /// A software adapter that is not open.
    pub fn of_software() -> Self {
        Footprint { binding: u64::MAX, widens: true }
    }
}

impl Wgpu {
    pub(super) fn footprint(&self) -> Footprint {
        Footprint { binding: self.binding_limit, widens: self.variants.unpacks_slowly() }
    }
}

/// The counted memory.
#[derive(Clone)]
pub struct DryWgpu {
    is: Footprint,
    live: u64,
    since: u64,
    /// Tokens of the microbatch.
    tokens: usize,
    /// Their hashes for dropout: the number of tokens, and the buffer.
    masks: Option<(usize, usize)>,
}

impl DryWgpu {
    /// Nothing is used.
    pub fn new(is: Footprint) -> Self {
        DryWgpu { is, live: 0, since: 0, tokens: 0, masks: None }
    }

    fn passing(&mut self, words: usize) {
        let size = self.take(words);
        self.give(size);
    }
}

impl Device for DryWgpu {
    fn take(&mut self, words: usize) -> usize {
        let bytes = if words == 0 { 0 } else { pool::class(4 * words as u64, u64::MAX) };
        self.live += bytes;
        self.since = self.since.max(self.live);
        bytes as usize
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
        weight::matrix_bytes(encoding, numbers)
    }

    fn tokens(&mut self, rows: TokenRows) -> usize {
        self.tokens = rows.ids.len();
        4 * self.tokens + rows.bounds.len()
    }

    fn ids(&self, count: usize) -> usize {
        count
    }

    fn chunk(&self, vocab: usize) -> usize {
        ((self.is.binding / 4) as usize / vocab.max(1)).max(1)
    }

    fn copied(&self) -> Box<dyn Device> {
        Box::new(self.clone())
    }

    fn inside(&mut self, op: Op) -> bool {
        match op {
            Op::Frozen(out, _, w, _) if self.is.widens => {
                let shape = (w.rows, w.cols);
                let slab = products::slab_numbers(w.encoding, shape, out.rows, self.is.binding);
                slab.into_iter().for_each(|numbers| self.passing(numbers));
                true
            }
            Op::AttentionGrad(heads, _, [q, ..]) => {
                self.passing(2 * q.rows * heads.query);
                true
            }
            Op::DeltaRule(beta) => {
                self.passing(2 * beta.values());
                true
            }
            Op::Dropout(_) => {
                if self.masks.is_none_or(|(tokens, _)| tokens != self.tokens) {
                    self.masks.take().into_iter().for_each(|(_, size)| self.give(size));
                    self.masks = Some((self.tokens, self.take(self.tokens)));
                }
                true
            }
            _ => false,
        }
    }
}
