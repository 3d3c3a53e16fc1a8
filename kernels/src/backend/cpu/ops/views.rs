//! What a view shows, as values or as pairs of bf16 numbers.

use super::super::runtime::memory::Memory;
use crate::backend::{View, ViewMut};

impl<'a> View<'a, Memory> {
    /// Its values.
    pub(super) fn values(&self) -> &'a [f32] {
        &self.memory.values()[self.offset..][..self.len()]
    }

    /// Its pairs.
    pub(super) fn pairs(&self) -> &'a [u32] {
        assert!(self.cols.is_multiple_of(2) && self.offset.is_multiple_of(2), "rows of pairs");
        &self.memory.pairs()[self.offset / 2..][..self.len() / 2]
    }
}

impl ViewMut<'_, Memory> {
    /// Its values, to write.
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        let len = self.len();
        &mut self.memory.values_mut()[self.offset..][..len]
    }

    /// Its pairs, to write.
    pub(super) fn pairs_mut(&mut self) -> &mut [u32] {
        assert!(self.cols.is_multiple_of(2) && self.offset.is_multiple_of(2), "rows of pairs");
        let part = self.offset / 2..(self.offset + self.len()) / 2;
        &mut self.memory.pairs_mut()[part]
    }
}
