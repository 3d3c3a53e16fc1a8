//! A dry run: the real forward and backward passes of a stage on a backend without data. Its result is what a
//! microbatch takes on a device, for every family, task, policy for kept values and range of layers, without a formula
//! of its own.

use super::{Build, Decoder, Keep};
use crate::backend::{Backend, Dry, Fault, Notes, Target};
use crate::model::config::Config;
use crate::model::lora::LoraSpec;
use crate::model::rotation::Rotations;
use crate::model::stage::{Microbatch, WHOLE, Want};
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;

/// What a microbatch takes: forward and backward, without frozen matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Bytes in use between microbatches: parameters, their gradient, norms and biases.
    pub at_rest: u64,
    /// Bytes that blocks keep between forward and backward.
    pub kept: u64,
    /// The most bytes in use at once: what [`Backend::peak`] measures.
    pub peak: u64,
    /// Multiplications and additions.
    pub flops: f64,
    /// Bytes that ops read and write at least, without copies to and from the host.
    pub bytes: f64,
}

/// Runs a stage on `batch` on a device like `target`. Of the tensors, only encodings are read.
pub fn dry_run(
    target: Target,
    model: (&Config, &dyn Tensors, &LoraSpec),
    build: Build,
    batch: &Microbatch,
) -> Result<Cost, ModelError> {
    let keep = build.keep;
    Ok(DryRuns::new(target, model, build)?.run(keep, batch)?)
}

/// Dry runs of one stage, which is built once. Each begins like a first microbatch.
pub struct DryRuns {
    stage: Decoder<Dry>,
    notes: Notes,
}

impl DryRuns {
    /// Dry runs of a stage.
    pub fn new(
        target: Target,
        model: (&Config, &dyn Tensors, &LoraSpec),
        build: Build,
    ) -> Result<Self, ModelError> {
        Self::of(Dry::new(target).timed(), model, build)
    }

    /// The same without arithmetic and bytes moved, in less time.
    pub fn of_memory(
        target: Target,
        model: (&Config, &dyn Tensors, &LoraSpec),
        build: Build,
    ) -> Result<Self, ModelError> {
        Self::of((Dry::new(target), Notes::default()), model, build)
    }

    fn of(
        (backend, notes): (Dry, Notes),
        (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
        build: Build,
    ) -> Result<Self, ModelError> {
        let mut stage = Decoder::load(backend, config, tensors, lora, build)?;
        stage.backend.begin();
        Ok(DryRuns { stage, notes })
    }

    /// Number of trained parameters.
    pub fn trained(&self) -> usize {
        self.stage.layout.len()
    }

    /// Number of values that a device holds of them: more where projections share an A.
    pub fn placed(&self) -> usize {
        self.stage.placement.layout.len()
    }

    /// Cost of one microbatch.
    pub fn run(&mut self, keep: Keep, batch: &Microbatch) -> Result<Cost, Fault> {
        self.restart(keep);
        self.notes.take();
        let mut cost = self.stage.rehearse(batch)?;
        let taken = self.notes.take();
        for (_, taken) in taken.iter().filter(|(op, _)| !["read", "upload"].contains(*op)) {
            cost.flops += taken.flops;
            cost.bytes += taken.bytes;
        }
        Ok(cost)
    }

    /// The most bytes in use at once of a whole model, by microbatches that go through its lowest `streamed` layers
    /// together.
    pub fn group(&mut self, keep: Keep, batches: &[Microbatch], streamed: usize) -> Result<u64, Fault> {
        self.restart(keep);
        let stage = &mut self.stage;
        stage.backend.peak();
        let mut members = Vec::new();
        let end = stage.both_ways(batches, streamed.min(stage.shelf.len()), &mut members);
        members.into_iter().for_each(|member| stage.leave(member));
        end.map(|()| stage.backend.peak().unwrap_or_default())
    }

    fn restart(&mut self, keep: Keep) {
        let stage = &mut self.stage;
        stage.keep = keep;
        stage.backend.rewind();
        stage.rotations = Rotations::new(&mut stage.backend, &stage.config);
    }
}

impl Decoder<Dry> {
    /// Counts the memory of one microbatch.
    fn rehearse(&mut self, batch: &Microbatch) -> Result<Cost, Fault> {
        let at_rest = self.backend.live();
        self.backend.peak();
        let (first, last) = (self.span.first, self.span.last);
        let hidden = vec![0.0; if first && last { 0 } else { batch.ids.len() * self.config.hidden }];
        let top = self.ascend(batch, (!first).then_some(&hidden[..]), Want::Gradient(WHOLE))?;
        let full = self.backend.live();
        let (residual, _) = self.descend(WHOLE, (!last).then_some(&hidden[..]))?;
        // Of a last stage, both numbers have the gradient of the residual stream; of another one, only `after`.
        let after = self.backend.live() - if last { 0 } else { self.backend.bytes(&residual) };
        self.backend.recycle(residual);
        top.recycle(&mut self.backend);
        let peak = self.backend.peak().unwrap_or_default();
        Ok(Cost { at_rest, kept: full - after, peak, ..Cost::default() })
    }
}
