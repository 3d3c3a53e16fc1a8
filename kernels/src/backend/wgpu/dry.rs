//! The memory of a GPU without its data: size classes of the pool, and what verbs take inside. The parts of split sums
//! are left out: they take at most 4 MB, and only on cards that are fast with them.

use super::pool;
use super::portable;
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
    /// Whether it computes as the portable class does.
    portable: bool,
}

impl Footprint {
    /// A card that is not open: its kernels read blocks.
    pub fn of_card() -> Self {
        Footprint { binding: u64::MAX, widens: false, portable: false }
    }

    /// A software adapter that is not open.
    pub fn of_software() -> Self {
        Footprint { binding: u64::MAX, widens: true, portable: false }
    }

    /// The same in the portable class, whose kernels read blocks.
    pub fn portable(self) -> Self {
        Footprint { widens: false, portable: true, ..self }
    }
}

impl Wgpu {
    pub(super) fn footprint(&self) -> Footprint {
        let (widens, portable) = (self.variants.unpacks_slowly(), self.portable.is_some());
        Footprint { binding: self.binding_limit, widens, portable }
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

    /// What the portable class takes beside what others do; `None` if it takes the same.
    fn inside_portable(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Adapted(out, _, w, low) => self.passing_all([w.rows * low.rank, out.values(), 0]),
            Op::AdaptedGrad(dx, dy, _, low) => self.passing_all([dy.rows * low.rank, dx.values(), 0]),
            Op::AttentionGrad(heads, _, [q, ..]) => {
                let parts = if heads.query > heads.kv { q.values() } else { 0 };
                self.passing_all([2 * q.rows * heads.query, parts, parts]);
            }
            Op::HeadLoss(x, vocab, cols) => {
                self.passing_all(portable::head_room((x.rows, *cols), *vocab, self.is.binding))
            }
            _ => return None,
        }
        Some(())
    }

    /// Takes three buffers, and gives them back.
    fn passing_all(&mut self, words: [usize; 3]) {
        words.map(|words| self.take(words)).into_iter().for_each(|size| self.give(size));
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
        if self.is.portable && self.inside_portable(&op).is_some() {
            return true;
        }
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
