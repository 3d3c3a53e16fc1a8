//! The interface between a run and the model: layers a..b of a model on some backend. Without pipelining, one stage is
//! the whole model. Several forward passes may wait for their backward passes at the same time: each has a ticket.

use super::config::longest_text;
use super::layout::Layout;
pub use super::memory_fit::InUse;
use super::preference::{Answers, Ranking, Rewards};
pub use crate::backend::{Fault, Traffic};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// No target at this position.
pub const IGNORE: u32 = u32::MAX;

/// Targets of a microbatch.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Targets {
    /// Next-token targets `[T]`: the id of the *next* token of the same row where that token is supervised, else
    /// [`IGNORE`].
    Tokens(Vec<u32>),
    /// The same, where the losses of a row's targets are multiplied by the weight of the row.
    Weighted {
        /// As in `Tokens`.
        targets: Vec<u32>,
        /// One per row, finite.
        weights: Vec<f32>,
    },
    /// One class per row.
    Labels(Vec<u32>),
    /// The answer of each row as a whole.
    Answers(Answers),
    /// The numbers that the outputs of a head approach [rows, outputs], each finite.
    Numbers(Vec<f32>),
    /// Pairs of rows whose outputs are rewards.
    Ranked(Ranking),
    /// The class of each token `[T]`, else [`IGNORE`].
    Classes(Vec<u32>),
}

/// The unit of work: whole rows, packed. Rows do not attend to each other.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Microbatch {
    /// Optimizer step, from 1 (keys dropout).
    pub step: u64,
    /// Id of each row: its position in the data as read (keys dropout, identifies rows in faults).
    pub rows: Vec<u64>,
    /// Token ids `[T]`.
    pub ids: Vec<u32>,
    /// First position of each row, then T; one more element than rows.
    pub bounds: Vec<u32>,
    /// Targets of the prediction.
    pub targets: Targets,
}

/// Names a forward pass until its backward pass. The caller chooses it, for example the number
/// of a microbatch; the upper half of all numbers is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Names a text that is being generated. The caller chooses it; `u64::MAX` is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Session(pub u64);

/// The part of a model that a stage computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its layers.
    pub layers: Range<usize>,
    /// Its range of the model's flat parameter vector.
    pub values: Range<usize>,
    /// Whether it embeds token ids.
    pub first: bool,
    /// Whether it computes losses and logits.
    pub last: bool,
}

/// Requested result of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Loss and the values that the backward pass of this ticket needs; dropout is on.
    Gradient(Ticket),
    /// Loss (and class predictions); dropout is off.
    Loss,
    /// Loss and the most probable token in the place of each supervised target; dropout is off.
    Predictions,
    /// The logits of the last token of every row, or of every token that has a class; dropout is off.
    Logits,
    /// The score of every supervised target, with this number of most probable tokens; dropout is off.
    Scores(usize),
}

impl Want {
    /// The ticket of a pass that keeps values for its backward pass.
    pub fn ticket(self) -> Option<Ticket> {
        match self {
            Want::Gradient(ticket) => Some(ticket),
            Want::Loss | Want::Predictions | Want::Logits | Want::Scores(_) => None,
        }
    }
}

/// Result of a forward pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Hidden states [T, C] for the next stage.
    Hidden(Vec<f32>),
    /// Sums over this microbatch; nothing is divided here.
    Loss(LossSums),
    /// [rows, V], [rows, labels] for a classifier, or [tokens with a class, labels].
    Logits(Vec<f32>),
    /// One for each supervised target, in order.
    Scores(Vec<TokenScore>),
}

impl Output {
    /// Returns the sums of a forward pass that computed them.
    pub fn loss(self) -> Result<LossSums, Fault> {
        match self {
            Output::Loss(sums) => Ok(sums),
            _ => Err(Fault::Device { device: "stage".into(), reason: "the last stage gave no loss".into() }),
        }
    }
}

/// The natural logarithms of the probabilities of a token and of the most probable tokens in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    /// Of the token.
    pub token: f64,
    /// The most probable tokens, the lowest id first among equals.
    pub top: Vec<(u32, f64)>,
}

/// Sums of a microbatch, in f64 over the f32 losses of its positions, in order.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LossSums {
    /// Sum of losses, class weights applied.
    pub loss: f64,
    /// The divisor of the loss: supervised targets (each 1, whatever the weight of its row), rows, the sum of their
    /// class weights, pairs, or numbers.
    pub weight: f64,
    /// Supervised targets (for a classifier of rows: rows).
    pub targets: u64,
    /// For classifiers the arg-max class of each row, or of each token with a class (the lowest index among equals); with [`Want::Predictions`] that
    /// token in the place of each supervised target; else empty.
    pub predictions: Vec<u32>,
    /// The log-probability of each row's answer, where only these are asked; for numbers, the outputs; else empty.
    pub rows: Vec<f64>,
    /// Rewards of answers, where a loss compares them.
    pub rewards: Rewards,
}

/// Cancellation of a stage's work; the stage checks the flag between blocks.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Cancels work until [`Cancel::lower`].
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Allows work again.
    pub fn lower(&self) {
        self.0.store(false, Ordering::Release);
    }

    /// Returns [`Fault::Cancelled`] while raised.
    pub fn check(&self) -> Result<(), Fault> {
        if self.0.load(Ordering::Acquire) { Err(Fault::Cancelled) } else { Ok(()) }
    }
}

/// The ticket of a pass that begins and ends within one call.
pub(super) const WHOLE: Ticket = Ticket(u64::MAX);

/// Gives the next microbatch, or `None` where there is none at present.
pub type Next<'a> = &'a mut dyn FnMut() -> Option<Microbatch>;

/// Receives index, sums of losses and gradient of a microbatch.
pub type Each<'a> = &'a mut dyn FnMut(usize, &LossSums, &[f32]);

/// Layers of a model with their adapters, on some device.
pub trait Stage {
    /// Layout of this stage's part of the flat parameter vector.
    fn layout(&self) -> &Layout;

    /// Numeric class of the computation (`cpu-avx512-f32`).
    fn class(&self) -> String;

    /// Sets the stage's own parameters: `flat.len() == layout().len()`.
    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault>;

    /// Its part of the model.
    fn span(&self) -> Span;

    /// Runs the microbatch. A first stage has no input; a later one takes the hidden states [T, C] of the previous
    /// stage. With [`Want::Gradient`] the activations are kept for one [`Stage::backward`] with the same ticket; values
    /// that an earlier pass left under this ticket are freed.
    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault>;

    /// Runs backward of the forward pass with this ticket, for the *sum* of losses: `grad` [T, C] is the gradient of
    /// this stage's output, `None` for a last stage. Overwrites `gradient` (the stage's layout). Returns the gradient of
    /// the stage's input, `None` for a first stage.
    fn backward(
        &mut self,
        ticket: Ticket,
        grad: Option<&[f32]>,
        gradient: &mut [f32],
    ) -> Result<Option<Vec<f32>>, Fault>;

    /// Frees the values of a forward pass that gets no backward pass.
    fn forget(&mut self, ticket: Ticket);

    /// Runs forward and backward of a whole model. Returns the sums of its loss and overwrites `gradient` with their
    /// gradient. The numbers equal those of the two separate passes; the device is waited for once.
    fn gradient(&mut self, batch: &Microbatch, gradient: &mut [f32]) -> Result<LossSums, Fault> {
        match self.forward(batch, None, Want::Gradient(WHOLE))? {
            Output::Loss(sums) => self.backward(WHOLE, None, gradient).map(|_| sums),
            _ => Err(Fault::Device {
                device: self.class(),
                reason: "a gradient of the loss is asked of a whole model".into(),
            }),
        }
    }

    /// Runs forward and backward of a whole model for each microbatch of `next`, which is asked again whenever another
    /// one can begin; returns once none is given and none is in work. `each` borrows the sums and the gradient of the
    /// microbatch with this index, in the order in which they were given, and in place where the device computes in
    /// host memory. After an error, `each` is not called again.
    fn gradients(&mut self, next: Next, each: Each) -> Result<(), Fault> {
        let (mut gradient, mut index) = (vec![0.0; self.layout().len()], 0);
        while let Some(batch) = next() {
            let sums = self.gradient(&batch, &mut gradient)?;
            each(index, &sums, &gradient);
            index += 1;
        }
        Ok(())
    }

    /// Most microbatches that [`Stage::gradients`] has in work at the same time.
    fn together(&self) -> usize {
        1
    }

    /// Continues the text of a session by `ids`, whose keys and values are kept until [`Stage::end`]. A first stage has
    /// no input; a later one takes the hidden states [T, C] of `ids`. A last stage returns the logits of the last id.
    fn extend(&mut self, session: Session, ids: &[u32], input: Option<&[f32]>) -> Result<Output, Fault> {
        self.extend_all(&[(session, ids)], input)
    }

    /// Continues several texts, each by its ids, with the bits of one after the other on a CPU. The input and the
    /// hidden states are those of all ids, the logits [texts, V] those of the last id of each text. After a fault all
    /// of these sessions must be ended.
    fn extend_all(&mut self, texts: &[(Session, &[u32])], input: Option<&[f32]>) -> Result<Output, Fault>;

    /// Frees the values of a session.
    fn end(&mut self, session: Session);

    /// Largest number of tokens of a row or text.
    fn longest_row(&self) -> usize;

    /// Largest number of tokens of a text that [`Stage::extend`] begins with `prompt` tokens.
    fn longest_text(&self, prompt: usize) -> usize {
        longest_text(self.longest_row(), self.short_rows(), prompt)
    }

    /// Longest row with LongRoPE's factors of short rows; `None` if all rows have the same factors.
    fn short_rows(&self) -> Option<usize> {
        None
    }

    /// Bytes moved to and from the device since it was opened.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    /// Peak memory in use since the previous call; `None` without measurement.
    fn in_use(&mut self) -> Option<InUse> {
        None
    }

    /// Sets the flag that makes forward and backward return [`Fault::Cancelled`] at the next block boundary. A stage
    /// that cannot be interrupted ignores it.
    fn heed(&mut self, _cancel: Cancel) {}
}

/// Parameters of the choice of the next token.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Sampling {
    /// Most new tokens.
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus: the smallest set of most probable tokens with at least this mass.
    pub top_p: f32,
    /// Seed of the draws.
    pub seed: u64,
    /// Generation ends after one of these tokens, which is part of the result.
    pub stop: Vec<u32>,
}

/// A stage that can be moved to the thread of its device.
pub trait Model: Stage + Send {}
impl<T: Stage + Send> Model for T {}
