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
    /// The memory to which [`Dry::rewind`] returns.
    begin: Option<Box<dyn Device>>,
    /// Sizes of integers that were dropped.
    dropped: Dropped,
}

type Dropped = Rc<RefCell<Vec<usize>>>;

impl Checked<Dry> {
    /// Memory in which nothing is used.
    pub fn new(target: Target) -> Self {
        let (device, dropped) = (target.open(), Dropped::default());
        Checked::around(Dry { target, device, begin: None, dropped })
    }
}

impl Dry {
    /// Bytes in use.
    pub fn live(&self) -> u64 {
        self.device.live()
    }

    /// Remembers what is in use now.
    pub fn begin(&mut self) {
        self.begin = Some(self.device.copied());
    }

    /// Returns to what was in use at [`Dry::begin`]. Buffers that were taken since are gone.
    pub fn rewind(&mut self) {
        if let Some(begin) = &self.begin {
            self.device = begin.copied();
            self.dropped.borrow_mut().clear();
        }
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
