//! Memory, frozen weights and integers of a device, and how a view of them becomes a binding. A buffer that fits is
//! bound whole, so that it needs few bind groups. For a larger buffer, the window that the view needs is bound.

use super::Wgpu;
use super::pipelines::Slot;
use super::pool::{Leased, Storage};
use crate::backend::{View, ViewMut};
use std::sync::atomic::{AtomicU64, Ordering};

/// f32 values on the device, in one buffer.
#[derive(Debug)]
pub struct Memory {
    pub(super) storage: Storage,
    pub(super) len: usize,
}

impl Memory {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Ids, positions and row starts of a microbatch on the device: three times T integers, in this order.
#[derive(Debug)]
pub struct Tokens {
    pub(super) integers: Leased,
    /// The first tokens of the rows, then T.
    pub(super) bounds: Vec<u32>,
    /// A unique number, which identifies data that was derived from these tokens.
    pub(super) number: u64,
}

impl Tokens {
    pub(super) fn len(&self) -> usize {
        self.bounds.last().map_or(0, |&t| t as usize)
    }

    pub(super) fn next_number() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}

/// Plain integers on the device.
#[derive(Debug)]
pub struct Ids {
    pub(super) integers: Leased,
    pub(super) len: usize,
}

/// The location of a view: a binding, and the view's first element in it.
#[derive(Debug, Clone)]
pub struct Place {
    /// The binding.
    pub slot: Slot,
    /// First element of the view in the binding.
    pub base: u32,
}

impl Place {
    /// The place `by` elements later.
    pub(super) fn on(self, by: usize) -> Place {
        Place { base: self.base + by as u32, ..self }
    }
}

impl Wgpu {
    /// Binds `len` elements from `offset` on.
    pub(super) fn place(&self, storage: &Storage, offset: usize, len: usize) -> Place {
        let limit = self.binding_limit;
        let whole = storage.bytes <= limit;
        let (first, end) = (offset as u64 * 4, (offset + len) as u64 * 4);
        let align = u64::from(self.gpu.limits.min_storage_buffer_offset_alignment);
        let from = if whole { 0 } else { first / align * align };
        let size = if whole { storage.bytes } else { end.max(from + 4) - from };
        if size > limit {
            let reason =
                format!("a matrix of {size} bytes, and a binding holds {limit}: smaller microbatches fit");
            self.gpu.faults.raise(&reason);
        }
        let slot = Slot { buffer: storage.buffer.clone(), id: storage.id, offset: from, size };
        Place { slot, base: ((first - from) / 4) as u32 }
    }

    /// Binds a view.
    pub(super) fn at(&self, x: View<Memory>) -> Place {
        self.place(&x.memory.storage, x.offset, x.len())
    }

    /// Binds a view for writing.
    pub(super) fn at_mut(&self, x: &ViewMut<Memory>) -> Place {
        self.place(&x.memory.storage, x.offset, x.len())
    }

    /// Binds integers.
    pub(super) fn integers(&self, leased: &Leased) -> Slot {
        self.place(&leased.storage, 0, (leased.bytes / 4) as usize).slot
    }

    /// Splits `rows` into pieces (first row, rows). A piece can be bound if a row has at most `cols` values, and takes
    /// no longer than a dispatch may if a row costs `work`.
    pub(super) fn pieces(&self, rows: usize, cols: usize, work: f64) -> Vec<(usize, usize)> {
        let align = u64::from(self.gpu.limits.min_storage_buffer_offset_alignment);
        let bound = (self.binding_limit.saturating_sub(align) / 4) as usize / cols.max(1);
        let paced = (self.gpu.pace.most() / work.max(1.0)) as usize;
        // At least a tile of the kernels that are blocked over rows: where pieces begin must not change a bit.
        let step = bound.min(paced.max(1).next_multiple_of(64)).max(1);
        (0..rows).step_by(step).map(|from| (from, step.min(rows - from))).collect()
    }
}
