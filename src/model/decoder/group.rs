//! Several microbatches layer by layer: each streamed layer is read once in each direction for all of them. Every
//! microbatch is computed by itself, so the bits do not depend on the group.

use super::passes::Top;
use super::{Decoder, Tape};
use crate::backend::{Fault, Fused};
use crate::model::stage::{LossSums, Microbatch, WHOLE, Want};
use std::ops::Range;

/// A microbatch between its passes.
pub(super) struct Member<B: Fused> {
    tape: Tape<B>,
    /// Hidden states on the way up, their gradient on the way down.
    stream: Option<B::Memory>,
    grads: B::Memory,
    top: Option<Top<B::Memory>>,
}

impl<B: Fused> Decoder<B> {
    /// Runs forward and backward of a whole model for each microbatch. `done` receives sums and gradient of each.
    pub(super) fn group(
        &mut self,
        batches: &[Microbatch],
        done: &mut dyn FnMut(&LossSums, &[f32]),
    ) -> Result<(), Fault> {
        let mut members = Vec::with_capacity(batches.len());
        let mut end = self.both_ways(batches, self.shelf.streamed(), &mut members);
        for mut member in members {
            if end.is_ok()
                && let Some(top) = member.top.take()
            {
                end = self.with_grads_of(&mut member, |stage, _| stage.hand_over(top, done));
            }
            self.leave(member);
        }
        end
    }

    /// Runs both passes, layer by layer through the lowest `away` blocks. Afterwards each of `members` has its losses
    /// and its gradient.
    pub(super) fn both_ways(
        &mut self,
        batches: &[Microbatch],
        away: usize,
        members: &mut Vec<Member<B>>,
    ) -> Result<(), Fault> {
        let all = self.shelf.len();
        for batch in batches {
            let (tape, stream) = self.begin(batch, None)?;
            let grads = self.backend.memory(self.placement.layout.len());
            members.push(Member { tape, stream: Some(stream), grads, top: None });
        }
        for layer in 0..away {
            members.iter_mut().try_for_each(|member| self.rise(member, layer..layer + 1))?;
        }
        for (member, batch) in members.iter_mut().zip(batches) {
            self.rise(member, away..all)?;
            self.turn(member, batch)?;
            self.with_grads_of(member, |stage, member| stage.fall(member, away))?;
        }
        for layer in (0..away).rev() {
            for member in members.iter_mut() {
                self.with_grads_of(member, |stage, member| stage.fall(member, layer))?;
            }
        }
        Ok(())
    }

    /// Frees what a member holds.
    pub(super) fn leave(&mut self, member: Member<B>) {
        self.release(member.tape);
        member.top.into_iter().for_each(|top| top.recycle(&mut self.backend));
        member.stream.into_iter().chain([member.grads]).for_each(|memory| self.backend.recycle(memory));
    }

    /// Runs `work` with the gradient of `member` as that of the stage.
    fn with_grads_of<T>(
        &mut self,
        member: &mut Member<B>,
        work: impl FnOnce(&mut Self, &mut Member<B>) -> T,
    ) -> T {
        std::mem::swap(&mut self.grads, &mut member.grads);
        let done = work(self, member);
        std::mem::swap(&mut self.grads, &mut member.grads);
        done
    }

    /// Runs the forward pass of these blocks.
    fn rise(&mut self, member: &mut Member<B>, blocks: Range<usize>) -> Result<(), Fault> {
        let x = member.stream.take().ok_or_else(|| self.fault(EMPTY))?;
        member.stream = Some(self.climb(x, &mut member.tape, Want::Gradient(WHOLE), blocks)?);
        Ok(())
    }

    /// Runs the head, and begins the way down.
    fn turn(&mut self, member: &mut Member<B>, batch: &Microbatch) -> Result<(), Fault> {
        let x = member.stream.take().ok_or_else(|| self.fault(EMPTY))?;
        let top = self.conclude(&x, &mut member.tape, batch, Want::Gradient(WHOLE));
        self.backend.recycle(x);
        member.top = Some(top?);
        member.stream = member.tape.residual.take();
        self.with_grads_of(member, |stage, member| stage.leave_head(&mut member.tape));
        Ok(())
    }

    /// Runs the backward pass until `lowest` blocks are left. The gradient of the stage is that of the member.
    fn fall(&mut self, member: &mut Member<B>, lowest: usize) -> Result<(), Fault> {
        let Some(residual) = &mut member.stream else { return Err(self.fault(EMPTY)) };
        self.sink(residual, &mut member.tape, lowest)
    }
}

/// A fault of this file.
const EMPTY: &str = "a microbatch of a group has no hidden states";
