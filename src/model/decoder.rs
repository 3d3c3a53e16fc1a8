//! Layers a..b of a decoder on one backend, as a [`super::stage::Stage`]. A stage of all layers and two stages of some run the
//! same verbs on the same values, so they give the same bits.

mod check;
mod passes;

use super::block::{Below, Block, Hold, Saved};
use super::config::Config;
use super::head::Head;
use super::layout::{self, Layout, SCORE};
use super::linear::{Adapter, Batch};
use super::lora::{self, LoraSpec, MODULES};
use super::rotation::Rotations;
use super::stage::{Cancel, Want};
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, DropoutKey, Fault, Fused, view_mut};
use crate::numeric::tensor::Tensors;
use std::ops::Range;

/// What blocks keep between forward and backward. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The outputs of all products.
    Everything,
    /// Only the block's input; the rest is computed again.
    Inputs,
    /// From the top, whose memory is free again before another block is computed again: so many blocks keep the outputs of all products, so many all but gate and up, so many only
    /// their input and attention's output; the others only their inputs.
    Parts([usize; 3]),
}

impl Keep {
    /// How much that is, of so many blocks: 3 for each that keeps all, 2 for all but gate and up, 1 for input and
    /// attention's output.
    pub fn blocks(self, layers: usize) -> u32 {
        let [all, narrow, attended, _] = self.counts(layers);
        (3 * all + 2 * narrow + attended) as u32
    }

    /// How many of so many blocks keep everything, all but gate and up, input and attention's output, the input.
    pub fn counts(self, blocks: usize) -> [usize; 4] {
        let asked = match self {
            Keep::Everything => [blocks, 0, 0],
            Keep::Inputs => [0; 3],
            Keep::Parts(counts) => counts,
        };
        let mut left = blocks;
        let [a, b, c] = asked.map(|count| {
            let count = count.min(left);
            left -= count;
            count
        });
        [a, b, c, left]
    }

    /// What block i of `blocks` holds.
    fn of(self, i: usize, blocks: usize) -> Hold {
        let [all, narrow, attended, _] = self.counts(blocks);
        match blocks - 1 - i {
            above if above < all => Hold::Everything,
            above if above < all + narrow => Hold::NarrowOnes,
            above if above < all + narrow + attended => Hold::Attended,
            _ => Hold::Input,
        }
    }
}

/// How a stage is built.
#[derive(Debug, Clone, PartialEq)]
pub struct Build {
    /// Which layers; 0..config.layers is the whole model.
    pub layers: Range<usize>,
    /// What blocks keep.
    pub keep: Keep,
    /// One weight per class, for classifiers.
    pub class_weights: Option<Vec<f32>>,
}

impl Build {
    /// The whole model, everything kept.
    pub fn whole(config: &Config) -> Self {
        Build { layers: 0..config.layers, keep: Keep::Everything, class_weights: None }
    }
}

/// Layers of a model on a backend.
pub struct Decoder<B: Backend> {
    pub(super) backend: B,
    pub(super) config: Config,
    lora: LoraSpec,
    layers: Range<usize>,
    layout: Layout,
    keep: Keep,
    /// Where this is the first stage, or the last one of a tied model.
    pub(super) embedding: Option<B::Weight>,
    pub(super) head: Option<Head<B>>,
    pub(super) blocks: Vec<Block<B>>,
    pub(super) params: B::Memory,
    grads: B::Memory,
    /// Cosines and sines of the positions so far.
    pub(super) rotations: Rotations<B::Memory>,
    tape: Option<Tape<B>>,
    /// Looked at between blocks.
    cancel: Cancel,
}

/// A forward pass that waits for its backward pass.
struct Tape<B: Backend> {
    tokens: B::Tokens,
    step: u64,
    rows: Vec<u64>,
    t: usize,
    /// Whether a stage before this one wants the gradient of what it gave.
    below: Below,
    kept: Vec<(Hold, Saved<B::Memory>)>,
    /// Gradient of the last block's output, where this stage has the head.
    residual: Option<B::Memory>,
}

/// Where a new adapter starts: [`lora::init`], but for a classifier's head that the base already has.
pub fn initial_parameters(
    layout: &Layout,
    lora: &LoraSpec,
    tensors: &dyn Tensors,
) -> Result<Vec<f32>, ModelError> {
    let mut flat = lora::init(layout, lora);
    if let Some(entry) = layout.find(SCORE) {
        let shape = [entry.rows, entry.cols];
        if let Some(score) = Weights::new(tensors)?.optional("score.weight", &shape)? {
            flat[entry.range()].copy_from_slice(&score.dtype.widen(&score.bytes));
        }
    }
    Ok(flat)
}

impl<B: Fused> Decoder<B> {
    /// Reads and packs the weights of the stage's layers. Parameters start at zero: the bare base model.
    pub fn load(
        mut backend: B,
        config: &Config,
        tensors: &dyn Tensors,
        lora: &LoraSpec,
        build: Build,
    ) -> Result<Self, ModelError> {
        lora.check()?;
        backend.prepare(config.heads)?;
        let weights = Weights::new(tensors)?;
        let layers = build.layers;
        let layout = layout::of(config, lora, layers.clone());
        let last = layers.end == config.layers;
        let embedding = if layers.start == 0 || (last && config.tied && config.labels.is_none()) {
            let shape = (config.vocab, config.hidden);
            Some(weights.matrix(&mut backend, &weights.name("embed_tokens.weight"), shape)?)
        } else {
            None
        };
        let mut blocks = Vec::with_capacity(layers.len());
        for layer in layers.clone() {
            let adapters = adapters(&layout, lora, layer);
            blocks.push(Block::load(&mut backend, &weights, config, layer, adapters)?);
        }
        let head = match (last, layout.find(SCORE)) {
            (false, _) => None,
            (true, None) => Some(Head::vocabulary(&mut backend, &weights, config)?),
            (true, Some(e)) => {
                Some(Head::classes(&mut backend, &weights, config, e.offset, build.class_weights)?)
            }
        };
        let (mut params, grads) = (backend.memory(layout.len()), backend.memory(layout.len()));
        backend.fill(view_mut(&mut params, 1, layout.len()), 0.0);
        let rotations = Rotations::new(&mut backend, config);
        let (config, lora, keep) = (config.clone(), lora.clone(), build.keep);
        let (tape, cancel) = (None, Cancel::default());
        Ok(Decoder {
            backend,
            config,
            lora,
            layers,
            layout,
            keep,
            embedding,
            head,
            blocks,
            params,
            grads,
            rotations,
            tape,
            cancel,
        })
    }

    /// What the stage computes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn fault(&self, reason: impl Into<String>) -> Fault {
        Fault::Device { device: self.backend.class(), reason: reason.into() }
    }

    fn release(&mut self) {
        let Some(tape) = self.tape.take() else { return };
        tape.kept.into_iter().for_each(|(_, saved)| saved.recycle(&mut self.backend));
        tape.residual.into_iter().for_each(|m| self.backend.recycle(m));
    }

    /// The stage's input on the device [T, C].
    fn enter(&mut self, tokens: &B::Tokens, t: usize, input: Option<&[f32]>) -> Result<B::Memory, Fault> {
        let c = self.config.hidden;
        let mut x = self.backend.memory(t * c);
        match (input, &self.embedding) {
            (Some(values), _) if values.len() == t * c => self.backend.upload(view_mut(&mut x, t, c), values),
            (None, Some(table)) if self.layers.start == 0 => {
                self.backend.embed(view_mut(&mut x, t, c), table, tokens);
            }
            _ => return Err(self.fault("a first stage takes ids, a later one the hidden states before it")),
        }
        Ok(x)
    }

    /// All blocks; what backward needs goes on the tape. A cancelled pass leaves `x` where it stands.
    fn climb(&mut self, mut x: B::Memory, tape: &mut Tape<B>, want: Want) -> (B::Memory, Result<(), Fault>) {
        let key = dropout(&self.lora, (tape.step, &tape.rows)).filter(|_| want == Want::Gradient);
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: tape.t, tokens: &tape.tokens, params, rotations, dropout: key };
        for (i, block) in self.blocks.iter().enumerate() {
            if let Err(cancelled) = self.cancel.check() {
                return (x, Err(cancelled));
            }
            let (out, mut saved) = block.forward(&mut self.backend, x, &batch);
            if want == Want::Gradient {
                let hold = self.keep.of(i, self.blocks.len());
                saved.shed(&mut self.backend, hold);
                tape.kept.push((hold, saved));
            } else {
                saved.recycle(&mut self.backend);
            }
            x = out;
            self.backend.border();
        }
        (x, self.cancel.check())
    }
}

/// The key of this pass's masks, None where nothing is dropped.
fn dropout<'a>(lora: &LoraSpec, (step, rows): (u64, &'a [u64])) -> Option<DropoutKey<'a>> {
    (lora.dropout > 0.0).then_some(DropoutKey { seed: lora.seed, step, rows, module: 0, p: lora.dropout })
}

fn adapters(layout: &Layout, lora: &LoraSpec, layer: usize) -> [Option<Adapter>; 7] {
    let mut module = (layer * lora.targets.len()) as u64;
    MODULES.map(|name| {
        let path = layout::module_path(layer, name);
        let a = layout.find(&format!("base_model.model.model.{path}.lora_A.weight"))?;
        let adapter = Adapter { a: a.offset, b: a.range().end, rank: lora.rank, scale: lora.scale(), module };
        module += 1;
        Some(adapter)
    })
}
