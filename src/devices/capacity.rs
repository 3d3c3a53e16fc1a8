//! What a device can hold of a model as a seat of a line of workers: the coordinator splits the layers by it.

use super::building::Whole;
use super::room::{Room, packed};
use crate::cluster::message::{Capacity, Needs};
use crate::model::decoder::Keep;
use crate::model::memory::{Estimate, Limit, Load};
use crate::model::split::{Pace, depth};
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
        Ok(Capacity {
            seconds: (pace.layer, pace.head),
            limit: self.limit.bytes(),
            layers,
            needs: seats,
            link: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Cpu;
    use crate::model::config::Config;
    use crate::model::implied::Implied;
    use crate::model::lora::{LoraSpec, MODULES};
    use crate::model::memory::Offload;
    use serde_json::json;
    use std::path::Path;

    /// The coordinator's formula gives the bytes that the device itself counts, for every place and range.
    #[test]
    fn needs_are_those_that_the_device_counts() {
        for layers in 1..=5 {
            let json = json!({
                "architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": layers, "num_attention_heads": 2, "tie_word_embeddings": layers % 2 == 0,
            });
            let config = Config::from_json(&json).unwrap();
            let tensors = Implied::of(Path::new(""), &config, &json);
            let targets = MODULES.map(str::to_owned).to_vec();
            let lora = LoraSpec { rank: 3, alpha: 6.0, targets, ..LoraSpec::none() };
            let (config, tensors, lora) = (&config, &tensors, &lora);
            let (class_weights, measured, offload) = (None, None, Offload::Never);
            let whole = Whole { config, tensors, lora, class_weights, tokens: 40, measured, offload };
            let holder =
                Holder::new(whole.load(&Cpu::new(1)).unwrap(), Limit::Typed(1 << 40), &whole).unwrap();
            let most = 4;
            let capacity = holder.capacity(most, 1.0).unwrap();
            assert!(capacity.is_possible(layers, most));
            for above in 0..most.min(layers) {
                for start in 0..layers {
                    for end in start + 1..=layers {
                        // Seats above have at least a layer each; the last seat has none above it.
                        if (above == 0) != (end == layers) || end + above > layers {
                            continue;
                        }
                        let counted = holder.room(above).least(&(start..end)).unwrap();
                        assert_eq!(
                            capacity.needs(above, &(start..end)),
                            counted,
                            "{layers}: {start}..{end}, {above}"
                        );
                    }
                }
            }
        }
    }
}
