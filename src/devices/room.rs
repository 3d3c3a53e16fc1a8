//! The memory of a device that holds a part of a model.

use super::building::Whole;
use super::speed::Speed;
use crate::model::decoder::Keep;
use crate::model::memory::{self, Estimate, Limit, Load, Part};
use crate::model::weights::{ModelError, PackedLayers, Weights};
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of the weights by layer, as the device of `load` packs them.
pub fn packed(load: &Load, whole: &Whole) -> Result<PackedLayers, ModelError> {
    let packing = |encoding, numbers| load.device.matrix_bytes(encoding, numbers);
    Weights::new(whole.tensors)?.packed_layers(&packing, whole.config)
}

/// The memory of a device of a line.
pub struct Room<'a> {
    pub load: Load<'a>,
    packed: PackedLayers,
    pub limit: Limit,
    depth: usize,
    waiting: usize,
    /// Bytes besides the weights, by the number of layers, and whether they are the first and the last ones.
    known: BTreeMap<(usize, bool, bool), u64>,
}

impl<'a> Room<'a> {
    /// The memory of a device, in which `depth` passes wait for their backward pass and `waiting` gradients for those of
    /// other devices.
    pub fn new(
        (load, packed): (Load<'a>, PackedLayers),
        limit: Limit,
        (depth, waiting): (usize, usize),
    ) -> Self {
        Room { load, packed, limit, depth, waiting, known: BTreeMap::new() }
    }

    /// The policy for these layers, and its estimate.
    pub fn choose(&self, layers: &Range<usize>) -> Result<(Keep, Estimate), ModelError> {
        self.limit.choose(self.load_of(layers))
    }

    pub fn load_of(&self, layers: &Range<usize>) -> Load<'a> {
        let Room { depth, waiting, .. } = *self;
        let part = Part { from: layers.start, to: layers.end, depth, group: 1, waiting };
        self.load.of_part(part, (self.packed.of(layers.clone()), self.bounds(layers)))
    }

    /// Bytes with the most frugal policy and without streamed layers. All layers have the same shape: what three layers and more take besides the
    /// weights follows from one and two.
    pub fn least(&mut self, layers: &Range<usize>) -> Result<u64, ModelError> {
        let (first, last) = (layers.start == 0, layers.end == self.load.config.layers);
        let mut besides = |count: usize| -> Result<u64, ModelError> {
            if let Some(bytes) = self.known.get(&(count, first, last)) {
                return Ok(*bytes);
            }
            let start = if last { layers.end - count } else { layers.start };
            let takes = memory::least(self.load_of(&(start..start + count)))?.1;
            let bytes = takes.total() - takes.weights;
            self.known.insert((count, first, last), bytes);
            Ok(bytes)
        };
        let besides = match layers.len() {
            count @ 0..=2 => besides(count)?,
            count if first && last => besides(count)?,
            count => {
                let (one, two) = (besides(1)?, besides(2)?);
                one + (two.saturating_sub(one)) * (count as u64 - 1)
            }
        };
        Ok(besides + self.packed.of(layers.clone()))
    }

    /// The fewest of these layers that it streams; `None` if it has no room for them. When it opens them it streams at most
    /// as many, because what three layers and more take is a bound here.
    pub fn streams(&mut self, layers: &Range<usize>) -> Result<Option<usize>, ModelError> {
        let missing = self.least(layers)?.saturating_sub(self.limit.bytes());
        Ok(memory::needed(self.bounds(layers), missing, self.load.offload.of(layers.len())))
    }

    /// Bytes with the most frugal policy, with as many streamed layers as may be.
    pub fn frugal(&mut self, layers: &Range<usize>) -> Result<u64, ModelError> {
        let (_, most) = self.load.offload.of(layers.len());
        Ok(self.least(layers)?.saturating_sub(memory::freed(self.bounds(layers), most)))
    }

    /// Seconds in which a device of this speed reads `streamed` of these layers for a microbatch.
    pub fn reads(&self, speed: Speed, layers: &Range<usize>, streamed: usize) -> f64 {
        streamed as f64 * speed.reads(self.bounds(layers).1)
    }

    /// Bytes of the smallest and of the largest of these layers.
    fn bounds(&self, layers: &Range<usize>) -> (u64, u64) {
        let sizes = layers.clone().map(|at| self.packed.layer(at));
        sizes.clone().min().zip(sizes.max()).unwrap_or_default()
    }

    /// Arithmetic of a layer, and of the head.
    pub fn costs(&self) -> Result<(f64, f64), ModelError> {
        let layers = self.load.config.layers;
        let flops = |layers: Range<usize>| memory::flops(self.load_of(&layers), Keep::Everything);
        let layer = flops(0..1)?;
        Ok((layer, if layers > 1 { (flops(layers - 1..layers)? - layer).max(0.0) } else { 0.0 }))
    }
}
