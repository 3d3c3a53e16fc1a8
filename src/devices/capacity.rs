//! What a device can hold of a model as a seat of a line of workers: the coordinator splits the layers by it.

use super::building::Whole;
use super::room::{Room, packed};
use super::speed::Speed;
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

    /// What it can hold in a line of up to `most` seats at this speed.
    pub fn capacity(&self, most: usize, speed: Speed) -> Result<Capacity, ModelError> {
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
        let pace = Pace::of(last.costs()?, 1e9 * speed.gflops);
        let streams = self.load.offload.of(all);
        let largest = layers.iter().copied().max().unwrap_or(0);
        Ok(Capacity {
            seconds: (pace.layer, pace.head),
            limit: self.limit.bytes(),
            layers,
            needs: seats,
            streams: (streams.0 as u32, streams.1 as u32),
            reading: speed.reads(largest),
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
            let capacity = holder.capacity(most, Speed::ASSUMED).unwrap();
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
                            capacity.needs(above, &(start..end), 0),
                            counted,
                            "{layers}: {start}..{end}, {above}"
                        );
                    }
                }
            }
        }
    }

    /// The coordinator knows how many layers the device streams within any limit, and where it has no room.
    #[test]
    fn streamed_layers_are_those_that_the_device_chooses() {
        let json = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 6, "num_attention_heads": 2, "tie_word_embeddings": true,
        });
        let config = Config::from_json(&json).unwrap();
        let tensors = Implied::of(Path::new(""), &config, &json);
        let lora = LoraSpec {
            rank: 3,
            alpha: 6.0,
            targets: MODULES.map(str::to_owned).to_vec(),
            ..LoraSpec::none()
        };
        let (config, tensors, lora) = (&config, &tensors, &lora);
        let whole = Whole {
            config,
            tensors,
            lora,
            class_weights: None,
            tokens: 40,
            measured: None,
            offload: Offload::Never,
        };
        let mut counts = [0; 3];
        for offload in [Offload::Auto, Offload::Layers(2), Offload::Layers(9), Offload::Never] {
            for (above, layers) in [(0, 3..6), (1, 0..3), (1, 2..5), (2, 0..4), (0, 4..6), (1, 0..2)] {
                let load = Load { offload, ..whole.load(&Cpu::new(1)).unwrap() };
                let resident = Holder::new(load, Limit::Typed(1 << 40), &whole).unwrap();
                let all = resident.room(above).least(&layers).unwrap();
                for limit in (0..16).map(|part| all * (60 + 3 * part) / 100).chain([all, all - 1]) {
                    let holder = Holder::new(load, Limit::Typed(limit), &whole).unwrap();
                    let capacity = holder.capacity(3, Speed::ASSUMED).unwrap();
                    let streamed = capacity.streams(above, &layers);
                    let what = format!("{offload:?}, {above} above, {layers:?}, {limit} of {all}");
                    // Of three layers and more the estimate is a bound.
                    if layers.len() <= 2 {
                        let own = holder.choose(above, &layers).ok().map(|(_, takes)| takes.streamed);
                        assert_eq!(streamed, own, "{what}");
                    }
                    if let Some(streamed) = streamed {
                        assert!(capacity.needs(above, &layers, streamed) <= limit, "{what}");
                        let load = Load { offload: Offload::Layers(streamed), ..load };
                        let seat = Holder::new(load, Limit::Typed(limit), &whole).unwrap();
                        let (_, takes) = seat.choose(above, &layers).expect("a seat has room for its layers");
                        assert!((takes.streamed, takes.total() <= limit) == (streamed, true), "{what}");
                    }
                    counts[streamed.map_or(0, |streamed| 1 + usize::from(streamed > 0))] += 1;
                }
            }
        }
        assert!(counts.iter().all(|count| *count > 20), "refused, resident, streamed: {counts:?}");
    }
}
