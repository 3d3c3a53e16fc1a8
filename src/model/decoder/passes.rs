//! Forward and backward of a [`Decoder`]. All work is recorded before a result is read: a whole model waits for its
//! device once per microbatch ([`Stage::gradient`]), and the separate passes of a pipeline give the same bits.

use super::{Decoder, Tape, dropout};
use crate::backend::{Backend, Fault, Fused, TokenRows, Traffic, view, view_mut};
use crate::model::block::{Below, Streams};
use crate::model::head::{Asked, Below as Beneath, HeadGrad, Pending};
use crate::model::layout::Layout;
use crate::model::linear::Batch;
use crate::model::stage::{Cancel, IGNORE, InUse, LossSums, Microbatch, Output, Stage, Take, Targets, Want};

/// Result of a forward pass.
pub(super) enum Top<M> {
    /// A complete output.
    Output(Output),
    /// Losses that are still on the device.
    Losses(Pending<M>),
}

impl<M> Top<M> {
    /// Frees what is on the device.
    pub(super) fn recycle<B: Backend<Memory = M>>(self, backend: &mut B) {
        if let Top::Losses(pending) = self {
            pending.recycle(backend);
        }
    }
}

impl<B: Fused> Decoder<B> {
    /// Runs the forward pass; with [`Want::Gradient`] the tape then holds what [`Self::descend`] needs.
    pub(super) fn ascend(
        &mut self,
        batch: &Microbatch,
        input: Option<&[f32]>,
        want: Want,
    ) -> Result<Top<B::Memory>, Fault> {
        self.release();
        self.check(batch)?;
        let longest = batch.bounds.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        self.rotations.reach(&mut self.backend, longest as usize);
        let t = batch.ids.len();
        let tokens = self.backend.tokens(TokenRows { ids: &batch.ids, bounds: &batch.bounds, past: 0 });
        let x = self.enter(&tokens, t, input)?;
        let (step, rows, kept) = (batch.step, batch.rows.clone(), Vec::new());
        let below = if input.is_some() { Below::Wanted } else { Below::Nothing };
        let mut tape = Tape { tokens, step, rows, t, below, kept, residual: None };
        let (x, climbed) = self.climb(x, &mut tape, want);
        let top = climbed.and_then(|()| self.conclude(&x, &mut tape, batch, want));
        self.backend.recycle(x);
        self.tape = Some(tape);
        if want != Want::Gradient || top.is_err() {
            self.release();
        }
        top
    }

    /// Runs the head on the last hidden states; with [`Want::Gradient`] their gradient is put on the tape.
    fn conclude(
        &mut self,
        x: &B::Memory,
        tape: &mut Tape<B>,
        batch: &Microbatch,
        want: Want,
    ) -> Result<Top<B::Memory>, Fault> {
        let (t, c) = (tape.t, self.config.hidden);
        let hidden = view(x, t, c);
        let Some(head) = &self.head else {
            let mut values = vec![0.0; t * c];
            self.backend.read(hidden, &mut values)?;
            return Ok(Top::Output(Output::Hidden(values)));
        };
        let below = Beneath { hidden, params: &self.params, embedding: self.embedding.as_ref() };
        let last: Vec<u32> = batch.bounds[1..].iter().map(|&end| end - 1).collect();
        if want == Want::Logits {
            let logits = head.logits(&mut self.backend, below, &last)?;
            return Ok(Top::Output(Output::Logits(logits)));
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
            let sums = LossSums { loss, weight, targets: 0, predictions: Vec::new() };
            return Ok(Top::Output(Output::Loss(sums)));
        }
        let grad = residual.as_mut().map(|hidden| HeadGrad { hidden, grads: &mut self.grads });
        let asked = Asked { rows: &rows, targets: &targets };
        let pending = head.loss(&mut self.backend, below, asked, grad);
        tape.residual = residual;
        Ok(Top::Losses(pending))
    }

    /// Runs the backward pass and returns the gradient of the stage's input; the flat gradient is complete.
    pub(super) fn descend(&mut self, grad: Option<&[f32]>) -> Result<(B::Memory, Below), Fault> {
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
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: t, tokens: &tape.tokens, params, rotations, dropout: key };
        // The head is complete.
        self.backend.border();
        while let Some(kept) = tape.kept.pop() {
            let i = tape.kept.len();
            let block = &self.blocks[i];
            if let Err(cancelled) = self.cancel.check() {
                tape.kept.push(kept);
                self.backend.recycle(residual);
                self.tape = Some(tape);
                self.release();
                return Err(cancelled);
            }
            let (hold, saved) = kept;
            let saved = block.restore(&mut self.backend, saved, hold, &batch);
            let below = if i == 0 { tape.below } else { Below::Wanted };
            let streams = Streams { residual: &mut residual, grads: &mut self.grads };
            block.backward(&mut self.backend, streams, saved, below, &batch);
            self.backend.border();
        }
        Ok((residual, tape.below))
    }

    /// Runs forward and backward of a whole model and leaves the gradient on the device.
    fn both_passes(&mut self, batch: &Microbatch) -> Result<Top<B::Memory>, Fault> {
        let top = self.ascend(batch, None, Want::Gradient)?;
        match self.descend(None) {
            Ok((residual, _)) => {
                self.backend.recycle(residual);
                Ok(top)
            }
            Err(fault) => {
                top.recycle(&mut self.backend);
                Err(fault)
            }
        }
    }

    /// Reads the sums of the loss and, where requested, the gradient, in one wait.
    fn sums(&mut self, top: Top<B::Memory>, gradient: Option<&mut [f32]>) -> Result<LossSums, Fault> {
        let flat = gradient.map(|out| (view(&self.grads, 1, out.len()), out));
        match top {
            Top::Losses(pending) => pending.read(&mut self.backend, flat),
            Top::Output(Output::Loss(sums)) => {
                flat.map_or(Ok(()), |flat| self.backend.read_all(&mut [flat])).map(|()| sums)
            }
            Top::Output(_) => Err(self.fault("a gradient of the loss is asked of a whole model")),
        }
    }
}

impl<B: Fused> Stage for Decoder<B> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn class(&self) -> String {
        self.backend.class()
    }

    fn traffic(&self) -> Traffic {
        self.backend.traffic()
    }

    fn in_use(&mut self) -> Option<InUse> {
        let blocks = self.keep.blocks(self.blocks.len());
        self.backend.peak().map(|bytes| InUse { bytes, blocks })
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
        match self.ascend(batch, input, want)? {
            Top::Output(output) => Ok(output),
            Top::Losses(pending) => {
                let sums = pending.read(&mut self.backend, None);
                if sums.is_err() {
                    self.release();
                }
                sums.map(Output::Loss)
            }
        }
    }

    fn backward(&mut self, grad: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        let t = self.tape.as_ref().map_or(0, |tape| tape.t);
        let (residual, below) = self.descend(grad)?;
        let mut input = (below == Below::Wanted).then(|| vec![0.0; t * self.config.hidden]);
        let mut parts = vec![(view(&self.grads, 1, gradient.len()), gradient)];
        if let Some(values) = input.as_mut() {
            parts.push((view(&residual, 1, values.len()), values));
        }
        let read = self.backend.read_all(&mut parts);
        self.backend.recycle(residual);
        read.map(|()| input)
    }

    fn gradient(&mut self, batch: &Microbatch, gradient: &mut [f32]) -> Result<LossSums, Fault> {
        let top = self.both_passes(batch)?;
        self.sums(top, Some(gradient))
    }

    fn lend_gradient(&mut self, batch: &Microbatch, take: Take) -> Result<LossSums, Fault> {
        let top = self.both_passes(batch)?;
        let lent = self.backend.lend(&self.grads).is_some();
        let mut copy = vec![0.0; if lent { 0 } else { self.layout.len() }];
        let sums = self.sums(top, (!lent).then_some(&mut copy[..]))?;
        take(&sums, self.backend.lend(&self.grads).unwrap_or(&copy));
        Ok(sums)
    }
}
