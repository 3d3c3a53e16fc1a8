//! bf16 copies of the inputs of products on tensor cores. Several products read the same input: q, k and v share one
//! normed stream, gate and up share another, and the gradient of attention reads the inputs of attention. A copy
//! belongs to one memory at one moment. Every view for writing increments the memory's stamp ([`super::at_mut`]), so an
//! outdated copy is never found. Gradients of outputs are read once and not kept.

use super::memory::Memory;
use super::tensor::padded;
use super::{Cuda, Driver};
use crate::backend::{View, ViewMut};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Copies that are kept: of q, k, v, attention's output, and of one stream.
const KEPT: usize = 5;

/// The version of a memory's contents: a count of its views for writing. While a reference to the stamp exists, no
/// other memory's stamp takes its address, even after the memory is freed.
#[derive(Debug, Default)]
pub(super) struct Stamp(Arc<AtomicU64>);

impl Stamp {
    /// Marks the contents as changed.
    pub fn move_on(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A copy and its origin.
#[derive(Debug)]
struct Copy {
    /// The stamp of the copied memory, which alone owns it: copies of two parts of one memory do not keep each other
    /// alive.
    stamp: Weak<AtomicU64>,
    moment: u64,
    /// First element, rows, columns.
    place: (usize, usize, usize),
    memory: Arc<Memory>,
}

impl Copy {
    /// Whether the copy is still valid: the original exists and was not written since.
    fn fresh(&self) -> bool {
        self.stamp.upgrade().is_some_and(|stamp| self.moment == stamp.load(Ordering::Relaxed))
    }

    fn is_of(&self, x: &View<Memory>) -> bool {
        std::ptr::eq(self.stamp.as_ptr(), Arc::as_ptr(&x.memory.stamp().0))
            && self.place == (x.offset, x.rows, x.cols)
    }
}

/// The copies of a device, ordered by use: the most recent is last.
#[derive(Debug, Default)]
pub(super) struct Copies(VecDeque<Copy>);

impl Copies {
    fn find(&mut self, x: &View<Memory>) -> Option<Arc<Memory>> {
        self.0.retain(Copy::fresh);
        let found = self.0.iter().position(|copy| copy.is_of(x))?;
        let copy = self.0.remove(found)?;
        let memory = copy.memory.clone();
        self.0.push_back(copy);
        Some(memory)
    }

    /// Makes room for one more.
    fn make_room(&mut self) {
        self.0.retain(Copy::fresh);
        while self.0.len() >= KEPT {
            self.0.pop_front();
        }
    }

    /// Keeps `memory` as the copy of x's present contents.
    fn keep(&mut self, x: &View<Memory>, memory: Arc<Memory>) {
        let Stamp(held) = x.memory.stamp();
        let (moment, place) = (held.load(Ordering::Relaxed), (x.offset, x.rows, x.cols));
        let stamp = Arc::downgrade(held);
        self.0.push_back(Copy { stamp, moment, place, memory });
    }

    /// Drops all copies, so that every microbatch starts in the same state.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl<D: Driver> Cuda<D> {
    /// x as bf16 in rows of [`padded`] numbers. Returns the existing copy if x was not written since.
    pub(super) fn narrowed(&mut self, x: View<Memory>) -> Arc<Memory> {
        if self.spelled {
            return Arc::new(self.narrow(x));
        }
        if let Some(found) = self.copies.find(&x) {
            return found;
        }
        self.copies.make_room();
        let memory = Arc::new(self.narrow(x));
        self.copies.keep(&x, memory.clone());
        memory
    }

    /// Memory for a copy that a kernel makes in passing, and the distance between its rows.
    pub(super) fn room_for_copy(&mut self, (rows, cols): (usize, usize)) -> (Memory, usize) {
        self.copies.make_room();
        let stride = padded(cols);
        (self.take(2 * rows * stride), stride)
    }

    /// Registers the copy that a kernel made of `out`. No view for writing `out` was handed out since.
    pub(super) fn copied(&mut self, out: &ViewMut<Memory>, copy: Memory) {
        let ViewMut { memory, offset, rows, cols } = out;
        let out = View { memory: &**memory, offset: *offset, rows: *rows, cols: *cols };
        self.copies.keep(&out, Arc::new(copy));
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::Pool;
    use super::*;

    #[test]
    fn copies_are_freed_with_their_memory() {
        let (pool, mut copies) = (Pool::default(), Copies::default());
        let memory = pool.nothing();
        for offset in [0, 4] {
            let part = View { memory: &memory, offset, rows: 1, cols: 4 };
            copies.keep(&part, Arc::new(pool.nothing()));
        }
        copies.make_room();
        assert_eq!(copies.0.len(), 2, "both are of memory that is there");
        drop(memory);
        copies.make_room();
        assert_eq!(copies.0.len(), 0, "and go with it");
    }
}
