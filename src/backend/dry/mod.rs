//! A backend without data, for dry runs: the real forward and backward passes, of which only the memory remains. A
//! buffer is the size that the device's pool gives it, a frozen matrix its shape, and an op takes inside what the
//! device takes inside. Arithmetic and bytes moved are those of the table of ops, as for every other backend.

mod device;
mod ops;

use super::shapes::shaped;
use super::{Checked, Target, View, ViewMut};
use crate::numeric::block::Encoding;
pub use device::{Device, Low, Matrix, Op, Way};
use std::cell::RefCell;
use std::rc::Rc;

/// A device without data.
pub struct Dry {
    target: Target,
    device: Box<dyn Device>,
    /// Sizes of integers that were dropped.
    dropped: Dropped,
}

type Dropped = Rc<RefCell<Vec<usize>>>;

impl Checked<Dry> {
    /// Memory in which nothing is used.
    pub fn new(target: Target) -> Self {
        Checked::around(Dry { target, device: target.open(), dropped: Dropped::default() })
    }
}

impl Dry {
    /// Bytes in use.
    pub fn live(&self) -> u64 {
        self.device.live()
    }

    /// Bytes of a buffer.
    pub fn bytes(&self, memory: &Memory) -> u64 {
        self.device.bytes(memory.size)
    }

    fn take(&mut self, words: usize) -> Memory {
        let dropped = std::mem::take(&mut *self.dropped.borrow_mut());
        dropped.into_iter().for_each(|size| self.device.give(size));
        Memory { size: self.device.take(words), short: false }
    }

    /// Integers, which are given back when they are dropped.
    fn integers(&mut self, words: usize) -> Option<Integers> {
        (words > 0).then(|| Integers { size: self.take(words).size, home: self.dropped.clone() })
    }
}

/// A buffer.
#[derive(Debug)]
pub struct Memory {
    /// As the device counts it.
    size: usize,
    short: bool,
}

/// A frozen matrix [N, K].
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// N.
    pub rows: usize,
    /// K.
    pub cols: usize,
    /// As a file has it.
    pub encoding: Encoding,
}

/// Integers on the device.
#[derive(Debug)]
struct Integers {
    size: usize,
    home: Dropped,
}

impl Drop for Integers {
    fn drop(&mut self) {
        self.home.borrow_mut().push(self.size);
    }
}

/// Tokens of a microbatch.
#[derive(Debug)]
pub struct Tokens {
    count: usize,
    rows: usize,
    /// Keys, of each row an even number.
    keys: usize,
    _integers: Option<Integers>,
}

/// Plain integers.
#[derive(Debug)]
pub struct Ids {
    count: usize,
    _integers: Option<Integers>,
}

shaped! {
    Weight: |w| (w.rows, w.cols);
    Tokens: |tokens| (tokens.count, tokens.rows);
    Ids: |ids| (ids.count, 1);
}

fn read(x: &View<Memory>) -> Matrix {
    Matrix { rows: x.rows, cols: x.cols, short: x.memory.short }
}

fn written(x: &ViewMut<Memory>) -> Matrix {
    Matrix { rows: x.rows, cols: x.cols, short: x.memory.short }
}
