//! Layers a..b of a decoder on one backend, as a [`super::stage::Stage`]. A stage of all layers and several stages of
//! some layers run the same verbs on the same values, so they give the same bits.

mod check;
mod dry_run;
mod group;
mod passes;
mod shelf;
mod text;

use super::block::{Below, Hold, Saved};
use super::config::Config;
use super::embedding_change::{Embedded, EmbeddingChange, take_from_base};
use super::head::Head;
use super::head_change::HeadChange;
use super::layout::{
    self, EMBEDDING_A, EMBEDDING_ROWS, Entry, HEAD_PATH, HEAD_ROWS, Layout, SCORE, head_tensor,
};
use super::linear::{Adapter, Batch};
use super::lora::{self, LoraError, LoraSpec, TRAIN_TOKENS};
use super::placement::{self, Placement};
use super::rotation::Rotations;
use super::stage::{Cancel, Session, Span, Ticket, Want};
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, DropoutKey, Fault, Fused, view_mut};
use crate::families::tensors::COUNT;
use crate::numeric::tensor::Tensors;
use shelf::{Layer, Shelf};
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::Range;
use text::Text;

pub use dry_run::{Cost, DryRuns, dry_run};

/// Values that blocks keep between forward and backward. All policies give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The outputs of all products.
    Everything,
    /// Only the block's input; the rest is computed again.
    Inputs,
    /// Numbers of blocks from the top, whose memory is free again before another block is computed again: blocks that
    /// keep the outputs of all products, then all except gate and up, then only their input and attention's output. All
    /// other blocks keep only their inputs.
    Parts([usize; 3]),
}

impl Keep {
    /// Total of the kept values over `layers` blocks: 3 for each block that keeps all, 2 for all except gate and up, 1
    /// for input and attention's output.
    pub fn blocks(self, layers: usize) -> u32 {
        let [all, narrow, attended, _] = self.counts(layers);
        (3 * all + 2 * narrow + attended) as u32
    }

    /// Numbers of blocks that keep everything, all except gate and up, input and attention's output, the input.
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

    /// The values that block i of `blocks` keeps.
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

/// Parameters of a stage.
#[derive(Debug, Clone, PartialEq)]
pub struct Build {
    /// Layers of the stage; 0..config.layers is the whole model.
    pub layers: Range<usize>,
    /// Values that blocks keep.
    pub keep: Keep,
    /// Number of streamed layers, the lowest of the stage: each pass reads their weights again from the tensors, which
    /// must be [`Tensors::shared`]. All numbers give the same bits.
    pub streamed: usize,
    /// Most microbatches that go through the layers together, where layers are streamed. All numbers give the same bits.
    pub group: usize,
    /// One weight per class, for classifiers.
    pub class_weights: Option<Vec<f32>>,
}

impl Build {
    /// The whole model with everything kept.
    pub fn whole(config: &Config) -> Self {
        let layers = 0..config.layers;
        Build { layers, keep: Keep::Everything, streamed: 0, group: 1, class_weights: None }
    }
}

/// Layers of a model on a backend.
pub struct Decoder<B: Backend> {
    backend: B,
    config: Config,
    lora: LoraSpec,
    span: Span,
    layout: Layout,
    placement: Placement,
    keep: Keep,
    group: usize,
    /// Present in the first stage, and in the last one of a tied model.
    embedding: Option<B::Weight>,
    /// What is trained of the embedding, in the first stage.
    change: Option<EmbeddingChange<B>>,
    head: Option<Head<B>>,
    shelf: Shelf<B>,
    /// Number of blocks below the lowest trained value.
    bare: usize,
    params: B::Memory,
    grads: B::Memory,
    /// Cosines and sines of the positions used so far.
    rotations: Rotations<B::Memory>,
    /// Forward passes that wait for their backward passes.
    tapes: BTreeMap<Ticket, Tape<B>>,
    /// Keys and values of the texts that are being generated.
    sessions: BTreeMap<Session, Text<B::Memory>>,
    /// Checked between blocks.
    cancel: Cancel,
}

/// A forward pass that is waiting for its backward pass.
struct Tape<B: Backend> {
    tokens: B::Tokens,
    step: u64,
    rows: Vec<u64>,
    t: usize,
    /// Ids of the tokens, where something of the embedding is trained.
    ids: Vec<u32>,
    /// Whether a previous stage needs the gradient of its output.
    below: Below,
    /// Number of blocks at the bottom without a backward pass: no adapter and no stage below needs it.
    bare: usize,
    /// What each other block needs, lowest first.
    kept: Vec<(Hold, Saved<B::Memory>)>,
    /// Gradient of the last block's output, in the stage with the head.
    residual: Option<B::Memory>,
    /// Gradient of the head's trained values.
    own: Option<B::Memory>,
}

/// The parameters with which a model computes what its base does: trained rows are those of the base, the rest is 0.
pub fn base_parameters(
    layout: &Layout,
    lora: &LoraSpec,
    tensors: &dyn Tensors,
) -> Result<Vec<f32>, ModelError> {
    let mut flat = vec![0.0; layout.len()];
    take_from_base(&mut flat, layout, lora, &Weights::new(tensors)?)?;
    Ok(flat)
}

/// Initial values of a new adapter: [`lora::init`], except for trained rows, and for a classifier's head that the base
/// already has.
pub fn initial_parameters(
    layout: &Layout,
    lora: &LoraSpec,
    tensors: &dyn Tensors,
) -> Result<Vec<f32>, ModelError> {
    let mut flat = lora::init(layout, lora);
    take_from_base(&mut flat, layout, lora, &Weights::new(tensors)?)?;
    for entry in layout.head() {
        let (name, shape) = head_tensor(entry);
        if let Some(stored) = Weights::new(tensors)?.optional(name, &shape)? {
            flat[entry.range()].copy_from_slice(&stored.dtype.widen(&stored.bytes));
        }
    }
    Ok(flat)
}

impl<B: Fused> Decoder<B> {
    /// Reads and packs the weights of the stage's layers. Parameters start as [`base_parameters`].
    pub fn load(
        mut backend: B,
        config: &Config,
        tensors: &dyn Tensors,
        lora: &LoraSpec,
        build: Build,
    ) -> Result<Self, ModelError> {
        lora.check()?;
        lora.check_on(config)?;
        backend.prepare(config.heads)?;
        let weights = Weights::new(tensors)?;
        let layers = build.layers;
        let layout = layout::of(config, lora, layers.clone());
        let (first, last) = (layers.start == 0, layers.end == config.layers);
        let end = layout::of(config, lora, 0..layers.end).len();
        let span = Span { layers: layers.clone(), values: end - layout.len()..end, first, last };
        let (name, shape) = (weights.name("embed_tokens.weight"), (config.vocab, config.hidden));
        let tied = last && config.tied && config.labels.is_none();
        let embedding = (first || tied).then(|| weights.matrix(&mut backend, &name, shape)).transpose()?;
        let placement = Placement::of(config, lora, layers.clone());
        let on_device = &placement.layout;
        let (layers, bare) = adapted_layers((config, lora), on_device, layers);
        let shelf = Shelf::load(&mut backend, (&weights, tensors), config, layers, build.streamed)?;
        let change = EmbeddingChange::of(&mut backend, config, lora, on_device);
        let of_head = (config, lora, on_device, build.class_weights);
        let head = last.then(|| head(&mut backend, &weights, of_head)).transpose()?;
        let [mut params, grads] = [on_device.len(); 2].map(|len| backend.memory(len));
        let out = view_mut(&mut params, 1, on_device.len());
        match backend.has_data() && !lora.rows.is_empty() {
            true => backend.upload(out, &placement.place(&base_parameters(&layout, lora, tensors)?)),
            false => backend.fill(out, 0.0),
        }
        let rotations = Rotations::new(&mut backend, config);
        let (config, lora, keep) = (config.clone(), lora.clone(), build.keep);
        let group = if shelf.streamed() > 0 { build.group.max(1) } else { 1 };
        let (tapes, sessions, cancel) = (BTreeMap::new(), BTreeMap::new(), Cancel::default());
        Ok(Decoder {
            backend,
            config,
            lora,
            span,
            layout,
            placement,
            keep,
            group,
            embedding,
            change,
            head,
            shelf,
            bare,
            params,
            grads,
            rotations,
            tapes,
            sessions,
            cancel,
        })
    }

    /// Configuration of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn fault(&self, reason: impl Into<String>) -> Fault {
        Fault::Device { device: self.backend.class(), reason: reason.into() }
    }

    fn release(&mut self, tape: Tape<B>) {
        tape.kept.into_iter().for_each(|(_, saved)| saved.recycle(&mut self.backend));
        tape.residual.into_iter().chain(tape.own).for_each(|m| self.backend.recycle(m));
    }

    /// Returns the stage's input on the device [T, C].
    fn enter(&mut self, tokens: &B::Tokens, ids: &[u32], input: Option<&[f32]>) -> Result<B::Memory, Fault> {
        let (t, c) = (ids.len(), self.config.hidden);
        let mut x = self.backend.memory(t * c);
        match (input, &self.embedding) {
            (Some(values), _) if values.len() == t * c => self.backend.upload(view_mut(&mut x, t, c), values),
            (None, Some(table)) if self.span.first => {
                let out = view_mut(&mut x, t, c);
                match &self.change {
                    Some(change) => {
                        let of = Embedded { table, tokens, ids, params: &self.params };
                        change.embed(&mut self.backend, out, of);
                    }
                    None => self.backend.embed(out, table, tokens, self.config.stream_scale()),
                }
            }
            _ => {
                self.backend.recycle(x);
                return Err(self.fault("a first stage takes ids, a later one the hidden states before it"));
            }
        }
        Ok(x)
    }

    /// Runs these blocks and records on the tape what backward needs. Returns the output of the last block.
    fn climb(
        &mut self,
        mut x: B::Memory,
        tape: &mut Tape<B>,
        want: Want,
        some: Range<usize>,
    ) -> Result<B::Memory, Fault> {
        let share = self.lora.dropout;
        let key = dropout((&self.lora, share), (tape.step, &tape.rows)).filter(|_| want.ticket().is_some());
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: tape.t, tokens: &tape.tokens, params, rotations, dropout: key };
        let blocks = self.shelf.len();
        for i in some {
            let block = match self.cancel.check().and_then(|()| self.shelf.block(&mut self.backend, i)) {
                Ok(block) => block,
                Err(fault) => {
                    self.backend.recycle(x);
                    return Err(fault);
                }
            };
            let (out, mut saved) = block.forward(&mut self.backend, x, &batch)?;
            if want.ticket().is_some() && i >= tape.bare {
                let hold = self.keep.of(i, blocks);
                saved.shed(&mut self.backend, hold);
                tape.kept.push((hold, saved));
            } else {
                saved.recycle(&mut self.backend);
            }
            x = out;
            self.backend.border();
        }
        match self.cancel.check() {
            Ok(()) => Ok(x),
            Err(fault) => {
                self.backend.recycle(x);
                Err(fault)
            }
        }
    }
}

/// The head of a last stage with this layout on the device.
fn head<B: Fused>(
    backend: &mut B,
    weights: &Weights,
    (config, lora, on_device, class_weights): (&Config, &LoraSpec, &Layout, Option<Vec<f32>>),
) -> Result<Head<B>, ModelError> {
    if on_device.find(SCORE).is_some() {
        return Head::classes(backend, weights, config, on_device, class_weights);
    }
    let (tokens, rows) = match config.tied {
        true => (&lora.rows.embedding, on_device.ending(EMBEDDING_ROWS)),
        false => (&lora.rows.head, on_device.find(HEAD_ROWS)),
    };
    if rows.is_none() && !tokens.is_empty() {
        let why =
            "the head of this model is its embedding: trained rows need both on one device, not in a line";
        return Err(LoraError::Choice { option: TRAIN_TOKENS, why: why.into() }.into());
    }
    let name = if config.tied { weights.name("embed_tokens.weight") } else { "lm_head.weight".into() };
    let adapter = on_device.find(&format!("{HEAD_PATH}.lora_A.weight")).zip(lora.ends.head);
    let change = match (rows, adapter) {
        (Some(rows), _) => Some(HeadChange::of_rows(backend, weights, config, &name, (tokens, rows.offset))?),
        (None, Some((a, numbers))) => {
            Some(HeadChange::of_adapter(config, (numbers.rank, lora.scale_of(numbers)), a.offset))
        }
        (None, None) => None,
    };
    Head::vocabulary(backend, weights, config, change)
}

/// The key of this pass's masks; `None` where nothing is dropped.
fn dropout<'a>((lora, share): (&LoraSpec, f32), (step, rows): (u64, &'a [u64])) -> Option<DropoutKey<'a>> {
    (share > 0.0).then_some(DropoutKey { seed: lora.seed, step, rows, module: 0, p: share })
}

/// The layers with their adapters, and the number of layers below the lowest trained value.
fn adapted_layers(
    (config, lora): (&Config, &LoraSpec),
    on_device: &Layout,
    layers: Range<usize>,
) -> (Vec<Layer>, usize) {
    let of_a = |entry: &&Entry| entry.name.ends_with(".lora_A.weight");
    let mut entries = on_device.entries().iter().filter(of_a).peekable();
    let layers = layers.map(|layer| (layer, adapters(&mut entries, (config, lora), layer)));
    let layers: Vec<Layer> = layers.collect();
    let bare = match on_device.ending(EMBEDDING_ROWS).or(on_device.ending(EMBEDDING_A)) {
        Some(_) => 0,
        None => layers.iter().take_while(|(_, adapters)| adapters.iter().all(Option::is_none)).count(),
    };
    (layers, bare)
}

/// Takes a layer's adapters from `entries`, which gives every A in the order of the device. Projections of one matrix
/// share the index of its module, so that their inputs have one mask.
fn adapters<'a>(
    entries: &mut Peekable<impl Iterator<Item = &'a Entry>>,
    (config, lora): (&Config, &LoraSpec),
    layer: usize,
) -> [Option<Adapter>; COUNT] {
    let mut all = [None; COUNT];
    let matrices = layout::adapted(config, layer).filter(|matrix| lora.has(matrix.module()));
    for (module, matrix) in ((layer * lora.targets.len()) as u64..).zip(matrices) {
        let Some(numbers) = lora.adapter(layer, matrix.module()) else { continue };
        let (rank, scale) = (numbers.rank, lora.scale_of(numbers));
        for &i in matrix.projections {
            let name = format!("{}.lora_A.weight", placement::path(layer, i));
            let a = entries.next_if(|entry| entry.name == name);
            all[i] = a.map(|a| Adapter { a: a.offset, b: a.range().end, rank, scale, module });
        }
    }
    all
}
