//! What a device can hold of a model as a seat of a line of workers: the coordinator splits the layers by it.

use super::building::Whole;
use super::room::{Room, packed};
use crate::cluster::message::{Capacity, Needs};
use crate::cluster::worker::depth;
use crate::model::decoder::Keep;
use crate::model::memory::{Estimate, Limit, Load};
use crate::model::split::Pace;
use crate::model::weights::{ModelError, PackedLayers};
use std::ops::Range;

/// A device that may be a seat of a line of workers.
pub struct Holder<'a> {
    load: Load<'a>,
    packed: PackedLayers,
    limit: Limit,
}

impl<'a> Holder<'a> {
    /// The device of `load`.
    pub(super) fn new(load: Load<'a>, limit: Limit, whole: &Whole) -> Result<Self, ModelError> {
        Ok(Holder { packed: packed(&load, whole)?, load, limit })
    }

    /// Bytes that it may use; `None` where unknown.
    pub fn limit(&self) -> Option<u64> {
        self.limit.known()
    }

    /// The policy for these layers with `above` seats above them, and its estimate.
    pub fn choose(&self, above: usize, layers: &Range<usize>) -> Result<(Keep, Estimate), ModelError> {
        self.room(above).choose(layers)
    }

    fn room(&self, above: usize) -> Room<'a> {
        Room::new((self.load, self.packed.clone()), self.limit, (depth(above), depth(above)))
    }

    /// What it can hold in a line of up to `most` seats, if it does `speed` operations per second.
    pub fn capacity(&self, most: usize, speed: f64) -> Result<Capacity, ModelError> {
        let all = self.load.config.layers;
        let layers: Vec<u64> = (0..all).map(|at| self.packed.layer(at)).collect();
        let besides = |room: &mut Room, range: Range<usize>| -> Result<u64, ModelError> {
            Ok(room.least(&range)?.saturating_sub(layers[range].iter().sum()))
        };
        let needs = |room: &mut Room, one: Range<usize>, two: Range<usize>| -> Result<Needs, ModelError> {
            let one = besides(room, one)?;
            let two = if two.len() < all { besides(room, two)? } else { one };
            Ok(Needs { one, more: two.saturating_sub(one) })
        };
        let mut last = self.room(0);
        let whole = Needs { one: besides(&mut last, 0..all)?, more: 0 };
        let mut seats = vec![(whole, needs(&mut last, all - 1..all, all.saturating_sub(2)..all)?)];
        for above in 1..most.min(all) {
            let mut room = self.room(above);
            let first = needs(&mut room, 0..1, 0..2)?;
            // Between the first and the last seat of a model of three layers there is one of one layer.
            let between = if all > 2 { needs(&mut room, 1..2, 1..all.min(3))? } else { first };
            seats.push((first, between));
        }
        let pace = Pace::of(last.costs()?, speed);
        Ok(Capacity { seconds: (pace.layer, pace.head), limit: self.limit.bytes(), layers, needs: seats })
    }
}
