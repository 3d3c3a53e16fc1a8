//! bf16 copies of what products on tensor cores read, kept while somebody may read the same again: q, k and v read one
//! normed stream, gate and up another, and the gradient of attention reads what attention read. A copy is that of one
//! memory at one moment: whoever gets a view to write moves the memory's stamp on ([`super::at_mut`], which all
//! that is written passes), and a copy of an earlier moment is not found any more. Gradients of outputs are read once
//! and not kept.

use super::memory::Memory;
use super::tensor::padded;
use super::{Cuda, Driver};
use crate::backend::{View, ViewMut};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Copies that are kept: of q, k, v, attention's output, and of one stream.
const KEPT: usize = 5;

/// Bytes for each row of copies of matrices with those columns.
pub fn copies_bytes(cols: &[usize]) -> usize {
    cols.iter().map(|&cols| 2 * padded(cols)).sum()
}

/// What memory holds, told by how often somebody was about to write it. While somebody compares with it, no other memory's
/// lies in its place, also when the memory is gone.
#[derive(Debug, Default)]
pub(super) struct Stamp(Arc<AtomicU64>);

impl Stamp {
    /// Somebody is about to write.
    pub fn move_on(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A copy, and of what.
#[derive(Debug)]
struct Copy {
    /// Of the memory, which alone keeps it: copies of two parts of it do not keep each other.
    stamp: Weak<AtomicU64>,
    moment: u64,
    /// First element, rows, columns.
    place: (usize, usize, usize),
    memory: Arc<Memory>,
}

impl Copy {
    /// Whether somebody could still ask for it: what it was made of is there, and nobody wrote it.
    fn fresh(&self) -> bool {
        self.stamp.upgrade().is_some_and(|stamp| self.moment == stamp.load(Ordering::Relaxed))
    }

    fn is_of(&self, x: &View<Memory>) -> bool {
        std::ptr::eq(self.stamp.as_ptr(), Arc::as_ptr(&x.memory.stamp().0))
            && self.place == (x.offset, x.rows, x.cols)
    }
}

/// The copies of a device; the one that was read last is the last one.
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

    /// Made of what x holds now.
    fn keep(&mut self, x: &View<Memory>, memory: Arc<Memory>) {
        let Stamp(held) = x.memory.stamp();
        let (moment, place) = (held.load(Ordering::Relaxed), (x.offset, x.rows, x.cols));
        let stamp = Arc::downgrade(held);
        self.0.push_back(Copy { stamp, moment, place, memory });
    }

    /// Forgets all: the next microbatch begins as this one did.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl<D: Driver> Cuda<D> {
    /// x as bf16, rows [`padded`]; where it was made before and nobody wrote x since, the same copy.
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

    /// Room for a copy that a kernel makes on its way, and from row to row of it.
    pub(super) fn room_for_copy(&mut self, (rows, cols): (usize, usize)) -> (Memory, usize) {
        self.copies.make_room();
        let stride = padded(cols);
        (self.take(2 * rows * stride), stride)
    }

    /// A kernel has made it of what was written there: no view to write it was given since.
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
