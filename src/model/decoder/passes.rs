//! Forward and backward of a [`Decoder`]. All work is recorded before a result is read: a whole model waits for its
//! device once per microbatch ([`Stage::gradient`]), and the separate passes of a pipeline give the same bits.

use super::{Decoder, Tape, dropout};
use crate::backend::{Backend, DropoutKey, Fault, Fused, TokenRows, Traffic, ViewMut, Write, view, view_mut};
use crate::model::block::{Below, Streams};
use crate::model::config::Config;
use crate::model::head::{Asked, Below as Beneath, Head, HeadGrad};
use crate::model::layout::Layout;
use crate::model::linear::Batch;
use crate::model::lora::LoraSpec;
use crate::model::outputs::squared_errors;
use crate::model::pending::Pending;
use crate::model::stage::{
    Cancel, Each, IGNORE, InUse, LossSums, Microbatch, Next, Output, Session, Span, Stage, Targets, Ticket,
    WHOLE, Want,
};

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
    /// Runs the forward pass; with [`Want::Gradient`] a tape then holds what [`Self::descend`] needs.
    pub(super) fn ascend(
        &mut self,
        batch: &Microbatch,
        input: Option<&[f32]>,
        want: Want,
    ) -> Result<Top<B::Memory>, Fault> {
        want.ticket().into_iter().for_each(|ticket| self.forget(ticket));
        let (mut tape, x) = self.begin(batch, input)?;
        let blocks = 0..self.shelf.len();
        let top = self.climb(x, &mut tape, want, blocks).and_then(|x| {
            let top = self.conclude(&x, &mut tape, batch, want);
            self.backend.recycle(x);
            top
        });
        match want.ticket().filter(|_| top.is_ok()) {
            Some(ticket) => drop(self.tapes.insert(ticket, tape)),
            None => self.release(tape),
        }
        top
    }

    /// The tape of a pass, and its first hidden states.
    pub(super) fn begin(
        &mut self,
        batch: &Microbatch,
        input: Option<&[f32]>,
    ) -> Result<(Tape<B>, B::Memory), Fault> {
        self.check(batch)?;
        let longest = batch.bounds.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        self.rotations.reach(&mut self.backend, longest as usize);
        let t = batch.ids.len();
        let short = self.rotations.short();
        let tokens =
            self.backend.tokens(TokenRows { ids: &batch.ids, bounds: &batch.bounds, past: 0, short });
        let x = self.enter(&tokens, &batch.ids, input)?;
        let (step, rows, kept) = (batch.step, batch.rows.clone(), Vec::new());
        let ids = if self.change.is_some() { batch.ids.clone() } else { Vec::new() };
        let below = if input.is_some() { Below::Wanted } else { Below::Nothing };
        let bare = if below == Below::Nothing { self.bare } else { 0 };
        Ok((Tape { tokens, step, rows, t, ids, below, bare, kept, residual: None, own: None }, x))
    }

    /// Runs the head on the last hidden states; with [`Want::Gradient`] their gradient is put on the tape.
    pub(super) fn conclude(
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
        let mask = head_mask((&self.lora, &self.config), (tape.step, &tape.rows), want);
        let (embedding, dropout) = (self.embedding.as_ref(), mask.map(|key| (key, &tape.tokens)));
        let below = Beneath { hidden, params: &self.params, embedding, dropout };
        let last: Vec<u32> = batch.bounds[1..].iter().map(|&end| end - 1).collect();
        let (rows, targets) = asked(batch, last, want);
        if want == Want::Logits {
            let logits = head.logits(&mut self.backend, below, &rows)?;
            return Ok(Top::Output(Output::Logits(logits)));
        }
        if let Want::Scores(top) = want {
            let asked = Asked { rows: &rows, targets: &targets };
            return head
                .scores(&mut self.backend, below, asked, top)
                .map(|all| Top::Output(Output::Scores(all)));
        }
        let trained = head.trained().map(|(_, count)| count);
        if want.ticket().is_some() {
            tape.residual = Some(self.backend.memory(t * c));
            tape.own = trained.map(|n| self.backend.memory(n));
        }
        if rows.is_empty() {
            tape.residual.iter_mut().for_each(|m| self.backend.fill(view_mut(m, t, c), 0.0));
            let own = tape.own.iter_mut().zip(trained);
            own.for_each(|(m, n)| self.backend.fill(view_mut(m, 1, n), 0.0));
            let (loss, weight) = (0.0, 0.0);
            let sums = LossSums { loss, weight, ..LossSums::default() };
            return Ok(Top::Output(Output::Loss(sums)));
        }
        let asked = Asked { rows: &rows, targets: &targets };
        if let Some(weigh) = of_outputs(&batch.targets) {
            let grad = tape.residual.as_mut().map(|hidden| HeadGrad { hidden, own: tape.own.as_mut() });
            let sums = head.output_loss(&mut self.backend, below, &rows, (grad, &*weigh))?;
            return Ok(Top::Output(Output::Loss(sums)));
        }
        if let Some(weigh) = of_losses(batch, &rows) {
            let grad = tape.residual.as_mut().map(|hidden| HeadGrad { hidden, own: tape.own.as_mut() });
            let sums = head.weighted_loss(&mut self.backend, below, asked, (grad, &*weigh))?;
            return Ok(Top::Output(Output::Loss(sums)));
        }
        if want == Want::Predictions && self.config.labels.is_none() {
            let sums = head.predicted(&mut self.backend, below, asked)?;
            return Ok(Top::Output(Output::Loss(sums)));
        }
        let grad = tape.residual.as_mut().map(|hidden| HeadGrad { hidden, own: tape.own.as_mut() });
        Ok(Top::Losses(head.loss(&mut self.backend, below, asked, grad)))
    }

    /// Runs the backward pass and returns the gradient of the stage's input; the flat gradient is complete.
    pub(super) fn descend(
        &mut self,
        ticket: Ticket,
        grad: Option<&[f32]>,
    ) -> Result<(B::Memory, Below), Fault> {
        let Some(mut tape) = self.tapes.remove(&ticket) else {
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
            (own, _) => {
                tape.residual = own;
                self.release(tape);
                return Err(self.fault("a last stage has its own gradient, another is given one [T, C]"));
            }
        };
        self.leave_head(&mut tape);
        match self.sink(&mut residual, &mut tape, 0) {
            Ok(()) => Ok((residual, tape.below)),
            Err(fault) => {
                self.backend.recycle(residual);
                self.release(tape);
                Err(fault)
            }
        }
    }

    /// Puts the gradient of the head's trained values in its place of the flat gradient.
    pub(super) fn leave_head(&mut self, tape: &mut Tape<B>) {
        if let (Some(own), Some((offset, len))) =
            (tape.own.take(), self.head.as_ref().and_then(Head::trained))
        {
            let out = ViewMut { memory: &mut self.grads, offset, rows: 1, cols: len };
            self.backend.copy(out, view(&own, 1, len));
            self.backend.recycle(own);
        }
        // The head is complete.
        self.backend.border();
    }

    /// Runs the backward pass of blocks, from the top of the tape until `lowest` blocks are left, and that of the
    /// embedding once none is left.
    pub(super) fn sink(
        &mut self,
        residual: &mut B::Memory,
        tape: &mut Tape<B>,
        lowest: usize,
    ) -> Result<(), Fault> {
        let key = dropout((&self.lora, self.lora.dropout), (tape.step, &tape.rows));
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: tape.t, tokens: &tape.tokens, params, rotations, dropout: key };
        while tape.bare + tape.kept.len() > lowest && !tape.kept.is_empty() {
            let i = tape.bare + tape.kept.len() - 1;
            let block = self.cancel.check().and_then(|()| self.shelf.block(&mut self.backend, i))?;
            let Some((_, saved)) = tape.kept.last() else { return Ok(()) };
            block.read_experts(&mut self.backend, saved)?;
            let Some((hold, saved)) = tape.kept.pop() else { return Ok(()) };
            let saved = block.restore(&mut self.backend, saved, hold, &batch)?;
            let lowest_one = i == tape.bare && self.change.is_none();
            let below = if lowest_one { tape.below } else { Below::Wanted };
            let streams = Streams { residual: &mut *residual, grads: &mut self.grads };
            block.backward(&mut self.backend, streams, saved, below, &batch)?;
            self.backend.border();
        }
        if let Some(change) = self.change.as_ref().filter(|_| lowest == 0) {
            // A head that is the embedding has left its part there.
            let shared = self.head.as_ref().and_then(Head::trained).filter(|(at, _)| *at == change.offset());
            let write = if shared.is_some() { Write::Add } else { Write::Set };
            let dx = view(&*residual, tape.t, self.config.hidden);
            let of = (&tape.ids[..], &self.params);
            change.gradient(&mut self.backend, (&mut self.grads, write), dx, of);
        }
        Ok(())
    }

    /// Runs forward and backward of a whole model and leaves the gradient on the device.
    fn both_passes(&mut self, batch: &Microbatch) -> Result<Top<B::Memory>, Fault> {
        let top = self.ascend(batch, None, Want::Gradient(WHOLE))?;
        match self.descend(WHOLE, None) {
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

    /// Gives away the sums of the loss and the gradient, in place where the device computes in host memory.
    pub(super) fn hand_over(
        &mut self,
        top: Top<B::Memory>,
        done: &mut dyn FnMut(&LossSums, &[f32]),
    ) -> Result<(), Fault> {
        let lent = self.placement.is_plain() && self.backend.lend(&self.grads).is_some();
        let mut copy = vec![0.0; if lent { 0 } else { self.layout.len() }];
        let sums = self.sums(top, (!lent).then_some(&mut copy[..]))?;
        let own = if lent { self.backend.lend(&self.grads) } else { None };
        done(&sums, own.unwrap_or(&copy));
        Ok(())
    }

    /// Reads the sums of the loss and, where requested, the gradient, in one wait.
    fn sums(&mut self, top: Top<B::Memory>, gradient: Option<&mut [f32]>) -> Result<LossSums, Fault> {
        match gradient {
            Some(gradient) if !self.placement.is_plain() => {
                let mut device = vec![0.0; self.placement.layout.len()];
                let sums = self.sums_and(top, Some(&mut device))?;
                self.placement.collect(&device, gradient);
                Ok(sums)
            }
            plain => self.sums_and(top, plain),
        }
    }

    /// The same with the gradient of the device.
    fn sums_and(&mut self, top: Top<B::Memory>, gradient: Option<&mut [f32]>) -> Result<LossSums, Fault> {
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

/// The mask of the input of a head's adapter, or of a head that labels tokens. Its module follows those of all layers.
fn head_mask<'a>(
    (lora, config): (&LoraSpec, &Config),
    pass: (u64, &'a [u64]),
    want: Want,
) -> Option<DropoutKey<'a>> {
    let share = match (config.tags, lora.ends.head) {
        (true, _) => config.tag_dropout,
        (false, Some(_)) => lora.dropout,
        (false, None) => 0.0,
    };
    let module = (config.layers * lora.targets.len()) as u64;
    let key = dropout((lora, share), pass)?;
    want.ticket().is_some().then_some(DropoutKey { module, ..key })
}

/// The positions that are asked, and the targets of losses there. `last` are the last ones of the rows.
fn asked(batch: &Microbatch, last: Vec<u32>, want: Want) -> (Vec<u32>, Vec<u32>) {
    match &batch.targets {
        targets if want == Want::Logits && !matches!(targets, Targets::Classes(_)) => (last, Vec::new()),
        Targets::Labels(labels) => (last, labels.clone()),
        Targets::Numbers(_) | Targets::Ranked(_) => (last, Vec::new()),
        Targets::Answers(answers) => answers.asked(batch),
        Targets::Tokens(all) | Targets::Weighted { targets: all, .. } | Targets::Classes(all) => {
            (0..).zip(all).filter(|(_, t)| **t != IGNORE).map(|(i, &t)| (i, t)).unzip()
        }
    }
}

/// Weights or derivatives that follow from losses or outputs, and the sums.
type Weighing<'a> = Box<dyn Fn(&[f32]) -> (Vec<f32>, LossSums) + 'a>;

/// The weights of losses at these positions, where they are not all 1.
fn of_losses<'a>(batch: &'a Microbatch, at: &'a [u32]) -> Option<Weighing<'a>> {
    match &batch.targets {
        Targets::Answers(answers) => Some(Box::new(|losses| answers.weigh(batch, losses))),
        Targets::Weighted { weights, .. } => {
            Some(Box::new(|losses| by_rows((at, losses), &batch.bounds, weights)))
        }
        _ => None,
    }
}

/// The loss of a head's outputs, where it is not that of classes.
fn of_outputs(targets: &Targets) -> Option<Weighing<'_>> {
    match targets {
        Targets::Numbers(numbers) => Some(Box::new(|outputs| squared_errors(numbers, outputs))),
        Targets::Ranked(ranking) => Some(Box::new(|outputs| ranking.weigh(outputs))),
        _ => None,
    }
}

/// The weight of each target, that of its row, and the sums. The targets are at the positions `at`, ascending.
fn by_rows((at, losses): (&[u32], &[f32]), bounds: &[u32], weights: &[f32]) -> (Vec<f32>, LossSums) {
    let row = |position: &u32| bounds.partition_point(|bound| bound <= position) - 1;
    let each: Vec<f32> = at.iter().map(|position| weights[row(position)]).collect();
    let loss = each.iter().zip(losses).map(|(weight, loss)| f64::from(*weight) * f64::from(*loss)).sum();
    let targets = losses.len() as u64;
    (each, LossSums { loss, weight: targets as f64, targets, ..LossSums::default() })
}

impl<B: Fused> Stage for Decoder<B> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn span(&self) -> Span {
        self.span.clone()
    }

    fn longest_row(&self) -> usize {
        self.config.max_positions
    }

    fn short_rows(&self) -> Option<usize> {
        self.config.rope.short_rows()
    }

    fn class(&self) -> String {
        self.backend.class()
    }

    fn traffic(&self) -> Traffic {
        self.backend.traffic()
    }

    fn in_use(&mut self) -> Option<InUse> {
        let blocks = self.keep.blocks(self.shelf.len());
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
        let values = self.placement.place(flat);
        self.backend.upload(view_mut(&mut self.params, 1, values.len()), &values);
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
                if let (Err(_), Some(ticket)) = (&sums, want.ticket()) {
                    self.forget(ticket);
                }
                sums.map(Output::Loss)
            }
        }
    }

    fn backward(
        &mut self,
        ticket: Ticket,
        grad: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault> {
        let t = self.tapes.get(&ticket).map_or(0, |tape| tape.t);
        let (residual, below) = self.descend(ticket, grad)?;
        let mut input = (below == Below::Wanted).then(|| vec![0.0; t * self.config.hidden]);
        let plain = self.placement.is_plain();
        let mut device = vec![0.0; if plain { 0 } else { self.placement.layout.len() }];
        let values = if plain { &mut *gradient } else { &mut device[..] };
        let mut parts = vec![(view(&self.grads, 1, values.len()), values)];
        if let Some(values) = input.as_mut() {
            parts.push((view(&residual, 1, values.len()), values));
        }
        let read = self.backend.read_all(&mut parts);
        self.backend.recycle(residual);
        read?;
        if !plain {
            self.placement.collect(&device, gradient);
        }
        Ok(input)
    }

    fn gradient(&mut self, batch: &Microbatch, gradient: &mut [f32]) -> Result<LossSums, Fault> {
        let top = self.both_passes(batch)?;
        self.sums(top, Some(gradient))
    }

    fn gradients(&mut self, next: Next, each: Each) -> Result<(), Fault> {
        let mut index = 0;
        loop {
            let group: Vec<Microbatch> = std::iter::from_fn(&mut *next).take(self.group).collect();
            let mut done = |sums: &LossSums, gradient: &[f32]| {
                each(index, sums, gradient);
                index += 1;
            };
            match &group[..] {
                [] => return Ok(()),
                [batch] => {
                    let top = self.both_passes(batch)?;
                    self.hand_over(top, &mut done)?;
                }
                several => self.group(several, &mut done)?,
            }
        }
    }

    fn together(&self) -> usize {
        self.group
    }

    fn forget(&mut self, ticket: Ticket) {
        self.tapes.remove(&ticket).into_iter().for_each(|tape| self.release(tape));
    }

    fn extend_all(&mut self, texts: &[(Session, &[u32])], input: Option<&[f32]>) -> Result<Output, Fault> {
        self.next_output(texts, input)
    }

    fn end(&mut self, session: Session) {
        self.sessions.remove(&session).into_iter().for_each(|text| text.recycle(&mut self.backend));
    }
}
