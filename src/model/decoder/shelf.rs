//! The blocks of a stage. Resident blocks stay on the device; the lowest ones may be streamed: each pass reads their
//! weights from the model's files again, into one slot. The bits are those of resident blocks, because the same weights
//! are packed in the same way.

use crate::backend::{Backend, Fault, Fused};
use crate::families::tensors::COUNT;
use crate::model::block::Block;
use crate::model::config::Config;
use crate::model::layout::{matrices, matrices_beside_experts, matrices_of_experts};
use crate::model::linear::Adapter;
use crate::model::weights::{ModelError, Weights};
use crate::numeric::tensor::{Tensors, Use};
use crate::support::waiting::LOADING;
use std::sync::Arc;

/// The blocks of a stage, lowest first.
pub(super) struct Shelf<B: Backend> {
    /// Present if there are streamed blocks.
    stream: Option<Stream<B>>,
    resident: Vec<Block<B>>,
}

/// The lowest blocks, of which at most one is on the device.
struct Stream<B: Backend> {
    source: Arc<dyn Tensors>,
    config: Config,
    /// Layer number and adapters of each block.
    layers: Vec<Layer>,
    slot: Option<(usize, Block<B>)>,
}

/// What a block is built from, besides the weights.
pub(super) type Layer = (usize, [Option<Adapter>; COUNT]);

impl<B: Fused> Shelf<B> {
    /// Loads the blocks of `layers`; the first `streamed` of them are read and checked, and leave the device again.
    pub fn load(
        backend: &mut B,
        (weights, tensors): (&Weights, &dyn Tensors),
        config: &Config,
        layers: Vec<Layer>,
        streamed: usize,
    ) -> Result<Self, ModelError> {
        let streamed = streamed.min(layers.len());
        let mut resident = Vec::with_capacity(layers.len() - streamed);
        for (i, (layer, adapters)) in layers.iter().enumerate() {
            LOADING.add(u64::from(backend.has_data()));
            let block = Block::load(backend, weights, config, *layer, *adapters)?;
            if i < streamed {
                block.unload(backend);
                weights.advise(&matrices(config, *layer), Use::Later);
            } else {
                resident.push(block);
            }
        }
        let stream = match (streamed, tensors.shared()) {
            (0, _) => None,
            (_, Some(source)) => {
                let layers = layers[..streamed].to_vec();
                Some(Stream { source, config: config.clone(), layers, slot: None })
            }
            (_, None) => return Err(ModelError::Source("these weights cannot be read again".into())),
        };
        Ok(Shelf { stream, resident })
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.streamed() + self.resident.len()
    }

    /// Number of streamed blocks.
    pub fn streamed(&self) -> usize {
        self.stream.as_ref().map_or(0, |stream| stream.layers.len())
    }

    /// Block i, on the device.
    pub fn block(&mut self, backend: &mut B, i: usize) -> Result<&Block<B>, Fault> {
        let Some(stream) = &mut self.stream else { return Ok(&self.resident[i]) };
        match i.checked_sub(stream.layers.len()) {
            Some(above) => Ok(&self.resident[above]),
            None => stream.block(backend, i),
        }
    }
}

impl<B: Fused> Stream<B> {
    fn block(&mut self, backend: &mut B, i: usize) -> Result<&Block<B>, Fault> {
        let Stream { source, config, layers, slot } = self;
        if slot.as_ref().is_none_or(|(held, _)| *held != i) {
            let weights = Weights::read_before(source).map_err(|e| e.into_fault(backend))?;
            let before = slot.take().map(|(held, block)| {
                let (layer, experts) = (layers[held].0, block.experts());
                block.unload(backend);
                let most = 2 * experts.len() >= config.experts_of(layer).map_or(0, |of| of.count);
                let mut read = matrices_beside_experts(config, layer);
                // In joined files the first expert stands for all of them.
                let first = experts.first().is_some_and(|first| *first > 0).then_some(0);
                read.extend(matrices_of_experts(config, layer, first.into_iter().chain(experts)));
                weights.advise(&read, Use::Later);
                (held, most)
            });
            let (layer, adapters) = layers[i];
            let block = Block::load(backend, &weights, config, layer, adapters);
            *slot = Some((i, block.map_err(|e| e.into_fault(backend))?));
            // A pass goes on in the direction in which it came, and reads as much of each layer.
            let next = if before.is_some_and(|(held, _)| held > i) { i.checked_sub(1) } else { Some(i + 1) };
            if let Some((layer, _)) = next.and_then(|next| layers.get(next)) {
                let most = before.is_some_and(|(_, most)| most);
                let read =
                    if most { matrices(config, *layer) } else { matrices_beside_experts(config, *layer) };
                weights.advise(&read, Use::Soon);
            }
        }
        match slot {
            Some((_, block)) => Ok(block),
            None => Err(ModelError::Source("a streamed block is not there".into()).into_fault(backend)),
        }
    }
}
