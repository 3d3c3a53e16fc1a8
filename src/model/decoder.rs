//! Layers a..b of a decoder on one backend, as a [`Stage`]. A stage of all layers and two stages of some run the
//! same verbs on the same values, so they give the same bits.

mod check;

use super::block::{Below, Block, Saved, Streams};
use super::config::Config;
use super::head::{Asked, Below as Beneath, Head, HeadGrad};
use super::layout::{self, Layout, SCORE};
use super::linear::{Adapter, Batch};
use super::lora::{self, LoraSpec, MODULES};
use super::stage::{Cancel, IGNORE, LossSums, Microbatch, Output, Stage, Targets, Want};
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, DropoutKey, Fault, Fused, TokenRows, View, view, view_mut};
use crate::numeric::tensor::Tensors;
use std::ops::Range;

/// What blocks keep between forward and backward. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The outputs of all products.
    Everything,
    /// Only the block's input; the rest is computed again.
    Inputs,
    /// The outputs of all products in that many blocks, the topmost, whose memory is free again before another
    /// block is computed again; only the inputs of the others.
    Top(usize),
}

impl Keep {
    /// Whether block i of `blocks` keeps the outputs of its products.
    fn outputs(self, i: usize, blocks: usize) -> bool {
        match self {
            Keep::Everything => true,
            Keep::Inputs => false,
            Keep::Top(count) => i + count >= blocks,
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
    /// Cosines and sines for that many positions.
    pub(super) rope: (B::Memory, usize),
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
    kept: Vec<Kept<B::Memory>>,
    /// Gradient of the last block's output, where this stage has the head.
    residual: Option<B::Memory>,
}

enum Kept<M> {
    Everything(Saved<M>),
    Input(M),
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
        let rope = (backend.memory(0), 0);
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
            rope,
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

    /// Makes the rotation table long enough; it grows by doubling, so that few batches pay for it.
    pub(super) fn reach(&mut self, positions: usize) {
        if self.rope.1 >= positions {
            return;
        }
        let positions = positions.next_power_of_two().max(256);
        let d = self.config.heads.size;
        let mut memory = self.backend.memory(positions * d);
        self.backend.upload(view_mut(&mut memory, positions, d), &self.config.rope.table(positions, d));
        let old = std::mem::replace(&mut self.rope, (memory, positions));
        self.backend.recycle(old.0);
    }

    fn release(&mut self) {
        let Some(tape) = self.tape.take() else { return };
        for kept in tape.kept {
            match kept {
                Kept::Everything(saved) => saved.recycle(&mut self.backend),
                Kept::Input(x) => self.backend.recycle(x),
            }
        }
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
        let rope = View { memory: &self.rope.0, offset: 0, rows: self.rope.1, cols: self.config.heads.size };
        let batch = Batch { rows: tape.t, tokens: &tape.tokens, params: &self.params, rope, dropout: key };
        for (i, block) in self.blocks.iter().enumerate() {
            if let Err(cancelled) = self.cancel.check() {
                return (x, Err(cancelled));
            }
            let (out, saved) = block.forward(&mut self.backend, x, &batch);
            match (want, self.keep.outputs(i, self.blocks.len())) {
                (Want::Gradient, true) => tape.kept.push(Kept::Everything(saved)),
                (Want::Gradient, false) => {
                    tape.kept.push(Kept::Input(saved.into_input(&mut self.backend)));
                }
                _ => saved.recycle(&mut self.backend),
            }
            x = out;
        }
        (x, self.cancel.check())
    }

    /// What the head makes of the last hidden states; with [`Want::Gradient`] their gradient goes on the tape.
    fn conclude(
        &mut self,
        x: &B::Memory,
        tape: &mut Tape<B>,
        batch: &Microbatch,
        want: Want,
    ) -> Result<Output, Fault> {
        let (t, c) = (tape.t, self.config.hidden);
        let hidden = view(x, t, c);
        let Some(head) = &self.head else {
            let mut values = vec![0.0; t * c];
            self.backend.read(hidden, &mut values)?;
            return Ok(Output::Hidden(values));
        };
        let below = Beneath { hidden, params: &self.params, embedding: self.embedding.as_ref() };
        let last: Vec<u32> = batch.bounds[1..].iter().map(|&end| end - 1).collect();
        if want == Want::Logits {
            return head.logits(&mut self.backend, below, &last).map(Output::Logits);
        }
        let (rows, targets) = match &batch.targets {
            Targets::Labels(labels) => (last, labels.clone()),
            Targets::Tokens(all) => {
                (0..).zip(all).filter(|(_, t)| **t != IGNORE).map(|(i, &t)| (i, t)).unzip()
            }
        };
        let mut residual = (want == Want::Gradient).then(|| self.backend.memory(t * c));
        if rows.is_empty() {
            if let Some(m) = residual.as_mut() {
                self.backend.fill(view_mut(m, t, c), 0.0);
                self.backend.fill(view_mut(&mut self.grads, 1, self.layout.len()), 0.0);
            }
            tape.residual = residual;
            let (loss, weight) = (0.0, 0.0);
            return Ok(Output::Loss(LossSums { loss, weight, targets: 0, predictions: Vec::new() }));
        }
        let grad = residual.as_mut().map(|hidden| HeadGrad { hidden, grads: &mut self.grads });
        let asked = Asked { rows: &rows, targets: &targets };
        let sums = head.loss(&mut self.backend, below, asked, grad);
        tape.residual = residual;
        sums.map(Output::Loss)
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

impl<B: Fused> Stage for Decoder<B> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn class(&self) -> String {
        self.backend.class()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        if flat.len() != self.layout.len() {
            return Err(self.fault(format!(
                "{} parameters for a layout of {}",
                flat.len(),
                self.layout.len()
            )));
        }
        self.backend.upload(view_mut(&mut self.params, 1, flat.len()), flat);
        Ok(())
    }

    fn heed(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }

    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        self.release();
        self.check(batch)?;
        let longest = batch.bounds.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        self.reach(longest as usize);
        let t = batch.ids.len();
        let tokens = self.backend.tokens(TokenRows { ids: &batch.ids, bounds: &batch.bounds, past: 0 });
        let x = self.enter(&tokens, t, input)?;
        let (step, rows, kept) = (batch.step, batch.rows.clone(), Vec::new());
        let below = if input.is_some() { Below::Wanted } else { Below::Nothing };
        let mut tape = Tape { tokens, step, rows, t, below, kept, residual: None };
        let (x, climbed) = self.climb(x, &mut tape, want);
        let output = climbed.and_then(|()| self.conclude(&x, &mut tape, batch, want));
        self.backend.recycle(x);
        self.tape = Some(tape);
        if want != Want::Gradient || output.is_err() {
            self.release();
        }
        output
    }

    fn backward(&mut self, grad: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        let Some(mut tape) = self.tape.take() else {
            return Err(self.fault("backward without a forward pass that asked for it"));
        };
        let (t, c) = (tape.t, self.config.hidden);
        let mut residual = match (tape.residual.take(), grad) {
            (Some(residual), None) => residual,
            (None, Some(values)) if values.len() == t * c => {
                let mut memory = self.backend.memory(t * c);
                self.backend.upload(view_mut(&mut memory, t, c), values);
                memory
            }
            _ => return Err(self.fault("a last stage has its own gradient, another is given one [T, C]")),
        };
        let key = dropout(&self.lora, (tape.step, &tape.rows));
        let rope = View { memory: &self.rope.0, offset: 0, rows: self.rope.1, cols: self.config.heads.size };
        let batch = Batch { rows: t, tokens: &tape.tokens, params: &self.params, rope, dropout: key };
        let mut cancelled = Ok(());
        while let Some(kept) = tape.kept.pop() {
            cancelled = self.cancel.check();
            let i = tape.kept.len();
            let block = &self.blocks[i];
            if cancelled.is_err() {
                tape.kept.push(kept);
                break;
            }
            let saved = match kept {
                Kept::Everything(saved) => saved,
                Kept::Input(x) => block.recompute(&mut self.backend, x, &batch),
            };
            let below = if i == 0 { tape.below } else { Below::Wanted };
            let streams = Streams { residual: &mut residual, grads: &mut self.grads };
            block.backward(&mut self.backend, streams, saved, below, &batch);
        }
        if let Err(cancelled) = cancelled {
            self.backend.recycle(residual);
            self.tape = Some(tape);
            self.release();
            return Err(cancelled);
        }
        self.backend.read(view(&self.grads, 1, gradient.len()), gradient)?;
        if tape.below == Below::Nothing {
            self.backend.recycle(residual);
            return Ok(None);
        }
        let mut values = vec![0.0; t * c];
        let read = self.backend.read(view(&residual, t, c), &mut values);
        self.backend.recycle(residual);
        read.map(|()| Some(values))
    }
}
