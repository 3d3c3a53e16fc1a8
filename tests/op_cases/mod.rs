//! The registry of op cases: for each [`Op`] of kernels/src/backend/op_names.rs its sizes, inputs, formula in f64 and
//! bounds. An op without an arm in [`cases`] does not compile; one without a case fails `every_op_has_cases` by name.
//!
//! Every backend runs the same cases ([`check`]): correctness against the formula and, for a gradient, against central
//! differences of the formula of the forward op; the table that `check` prints says which backend runs which op.
//! `benches/ops.rs` measures speed with the cases of [`Set::Model`].

// Each program uses a part: tests check, a benchmark measures.
#![allow(dead_code, unused_imports)]

mod adapters;
mod attention;
mod check;
mod convolution;
mod delta_rule;
mod elementwise;
mod frozen;
mod loss;
mod matrix;
mod products;
mod rows;

pub use check::{Lend, Rig, check, close};
pub use frozen::{Matrix, Stored, frozen, random_blocks, weight, widened};
pub use matrix::{GUARD, Guarded, Mat, Out};
pub use rows::bounds;

use finetune::backend::{Backend, Fused, Op, TokenRows, View, Write};

/// A backend that cases run on.
pub trait Device: Fused + 'static {}
impl<B: Fused + 'static> Device for B {}

/// Cases, each made when it is its turn.
pub type Cases<B> = Box<dyn Iterator<Item = Case<B>>>;

/// Which sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// Odd sizes, around the borders of tiles, and empty ones.
    Odd,
    /// The shapes of SmolLM2-135M with 4 rows of 256 tokens, for speed.
    Model,
}

impl Set {
    fn of<S: Copy>(self, odd: &[S], model: &[S]) -> Vec<S> {
        if self == Set::Odd { odd.to_vec() } else { model.to_vec() }
    }
}

/// The cases of an op.
pub fn cases<B: Device>(op: Op, set: Set) -> Cases<B> {
    match op {
        Op::memory | Op::short | Op::prepare | Op::ids | Op::tokens | Op::weight => none(),
        Op::weight_of_blocks => products::linear_of_blocks(set),
        Op::settle => elementwise::settle(set),
        Op::upload => elementwise::upload(set),
        Op::read => elementwise::read(set),
        Op::read_all => elementwise::read_all(set),
        Op::fill => elementwise::fill(set),
        Op::copy => elementwise::copy(set),
        Op::add => elementwise::add(set),
        Op::bias => elementwise::bias(set),
        Op::gated => elementwise::gated(set, |b: &mut B, out, (gate, up), act| b.gated(out, gate, up, act)),
        Op::gated_for_linear => {
            elementwise::gated(set, |b: &mut B, out, (gate, up), act| b.gated_for_linear(out, gate, up, act))
        }
        Op::gated_grad => elementwise::gated_grad(set),
        Op::dropout => elementwise::dropout(set),
        Op::embed => rows::embed(set),
        Op::rmsnorm => {
            rows::rmsnorm(set, |b: &mut B, out, inv, x, gain| b.rmsnorm(out, inv, x, gain, rows::EPS))
        }
        Op::rmsnorm_for_linear => rows::rmsnorm(set, |b: &mut B, out, inv, x, gain| {
            b.rmsnorm_for_linear(out, inv, x, gain, rows::EPS)
        }),
        Op::rmsnorm_grad => rows::rmsnorm_grad(set),
        Op::rope => rows::rope(set, 1.0, |b: &mut B, x, table, tokens| b.rope(x, table, tokens)),
        Op::rope_for_attention => {
            rows::rope(set, 1.0, |b: &mut B, x, table, tokens| b.rope_for_attention(x, table, tokens))
        }
        Op::rope_grad => rows::rope(set, -1.0, |b: &mut B, x, table, tokens| b.rope_grad(x, table, tokens)),
        Op::gather_rows => rows::gather_rows(set),
        Op::gather_rows_grad => rows::gather_rows_grad(set),
        Op::scale_rows => rows::scale_rows(set),
        Op::scale_rows_grad => rows::scale_rows_grad(set),
        Op::sum_rows => rows::sum_rows(set),
        Op::linear => products::linear(set),
        Op::linear_grad => products::linear_grad(set),
        Op::matmul => products::matmul(set),
        Op::attention => attention::attention(set),
        Op::attention_grad => attention::attention_grad(set),
        Op::attention_cached => attention::attention_cached(set),
        Op::convolution => convolution::convolution(set),
        Op::convolution_grad => convolution::convolution_grad(set),
        Op::convolution_silu => delta_rule::convolution_silu(set),
        Op::convolution_silu_grad => delta_rule::convolution_silu_grad(set),
        Op::delta_rule => delta_rule::delta_rule(set),
        Op::delta_rule_grad => delta_rule::delta_rule_grad(set),
        Op::cross_entropy => loss::cross_entropy(set),
        Op::lm_head_loss => loss::lm_head_loss(set),
        Op::lora_down => adapters::lora_down(set),
        Op::lora => adapters::lora(set),
        Op::lora_grad => adapters::lora_grad(set),
        Op::lora_linear => adapters::lora_linear(set),
        Op::lora_linear_grad => adapters::lora_linear_grad(set),
    }
}

/// The relative bound of a class that rounds factors to bf16, as in contracts/F-CUDA-001.yaml.
pub const ROUNDED: f64 = 1.5e-2;

/// Ops that the cases of all other ops use.
pub const USED_BY_ALL: [Op; 6] = [Op::memory, Op::short, Op::prepare, Op::ids, Op::tokens, Op::weight];

fn none<B: Device>() -> Cases<B> {
    Box::new(std::iter::empty())
}

fn each<S: 'static, B: Device>(sizes: Vec<S>, case: impl Fn(S) -> Case<B> + 'static) -> Cases<B> {
    Box::new(sizes.into_iter().map(case))
}

/// All pairs.
fn cross<A: Copy, C: Copy>(a: Vec<A>, b: &[C]) -> Vec<(A, C)> {
    a.into_iter().flat_map(|a| b.iter().map(move |b| (a, *b))).collect()
}

/// Tokens of rows with those bounds.
pub fn tokens<B: Backend>(b: &mut B, bounds: &[u32]) -> B::Tokens {
    let ids: Vec<u32> = (0..*bounds.last().unwrap()).map(|i| i * 7 % 11).collect();
    b.tokens(TokenRows { ids: &ids, bounds, past: 0, short: u32::MAX })
}

/// An output that is overwritten or added to.
fn held(write: Write, rows: usize, cols: usize) -> Out {
    match write {
        Write::Set => Out::Poison(rows, cols),
        Write::Add => Out::Holds(Mat::random(rows, cols, 99)),
    }
}

/// What an op is given on the device.
pub struct Given<'a, B: Backend> {
    pub i: &'a [View<'a, B::Memory>],
    pub w: &'a [B::Weight],
    pub tokens: &'a Option<B::Tokens>,
    pub ids: &'a Option<B::Ids>,
}

impl<B: Backend> Given<'_, B> {
    pub fn tokens(&self) -> &B::Tokens {
        self.tokens.as_ref().unwrap()
    }
    pub fn ids(&self) -> &B::Ids {
        self.ids.as_ref().unwrap()
    }
}

/// What a formula is given: inputs, frozen matrices, and what the outputs held.
pub struct Known<'a> {
    pub i: &'a [Mat],
    pub w: &'a [Mat],
    pub old: &'a [Mat],
}

/// The integers of rows of tokens.
pub struct Tokens {
    pub bounds: Vec<u32>,
    pub ids: Vec<u32>,
    pub past: u32,
}

pub type Verb<B> = Box<dyn Fn(&mut B, &Given<B>, &mut [Guarded<B>])>;
type Formula = Box<dyn Fn(&[Mat]) -> Mat>;

/// An output is the gradient of sum(dy * formula(x)) in `x[which]`.
pub struct Gradient {
    pub out: usize,
    /// The first element in the output.
    pub from: usize,
    pub x: Vec<Mat>,
    pub which: usize,
    pub dy: Mat,
    pub formula: Formula,
    pub bound: f64,
}

/// Outputs in f64.
pub type Outputs = Box<dyn Fn(&Known) -> Vec<Mat>>;

/// What a class of 16 bits rounds.
pub enum Rounds {
    Nothing,
    /// Inputs and frozen matrices: the result is the formula's of rounded ones.
    Factors,
    /// Results within the op too: [`ROUNDED`] is the bound.
    Parts,
    /// A factor of each term: the bound is 2^-8 of the sum of the terms' magnitudes, which this gives for each output;
    /// an empty one stands for an output that is not rounded.
    Terms(Outputs),
}

/// An op at one size.
pub struct Case<B: Backend> {
    pub name: String,
    pub inputs: Vec<Mat>,
    pub outs: Vec<Out>,
    pub frozen: Vec<Matrix>,
    pub tokens: Option<Tokens>,
    pub ids: Option<Vec<u32>>,
    pub verb: Verb<B>,
    /// Every output in f64.
    pub want: Outputs,
    /// For each output, the largest error relative to its largest value; 0 means the same number.
    pub bounds: Vec<f64>,
    pub gradients: Vec<Gradient>,
    /// Outputs with equal bits.
    pub same: Vec<(usize, usize)>,
    /// What a class of 16 bits rounds.
    pub rounds: Rounds,
    /// The bounds hold for every backend, whatever its own bound.
    pub strict: bool,
    /// About the number of multiplications, by which a slow backend leaves a case out.
    pub cost: usize,
}

/// Frozen matrices and integers on a device.
pub type Prepared<B> =
    (Vec<<B as Backend>::Weight>, Option<<B as Backend>::Tokens>, Option<<B as Backend>::Ids>);

impl<B: Device> Case<B> {
    pub fn new(name: String, inputs: impl Into<Vec<Mat>>, outs: impl Into<Vec<Out>>) -> Self {
        let (inputs, outs): (Vec<Mat>, Vec<Out>) = (inputs.into(), outs.into());
        let numbers = inputs.iter().map(|m| m.v.len()).sum::<usize>()
            + outs.iter().map(|o| o.start().1.len()).sum::<usize>();
        Case {
            name,
            inputs,
            outs,
            frozen: Vec::new(),
            tokens: None,
            ids: None,
            verb: Box::new(|_, _, _| unreachable!("a case has an op")),
            want: Box::new(|_| unreachable!("a case has a formula")),
            bounds: Vec::new(),
            gradients: Vec::new(),
            same: Vec::new(),
            rounds: Rounds::Nothing,
            strict: false,
            cost: 8 * numbers,
        }
    }

    fn frozen(mut self, matrix: Matrix) -> Self {
        self.frozen.push(matrix);
        self
    }

    fn tokens(mut self, bounds: &[u32], past: u32) -> Self {
        let ids = (0..*bounds.last().unwrap()).map(|i| i * 7 % 11).collect();
        self.tokens = Some(Tokens { bounds: bounds.to_vec(), ids, past });
        self
    }

    pub fn ids(mut self, ids: &[u32]) -> Self {
        self.ids = Some(ids.to_vec());
        self
    }

    pub fn verb(mut self, verb: impl Fn(&mut B, &Given<B>, &mut [Guarded<B>]) + 'static) -> Self {
        self.verb = Box::new(verb);
        self
    }

    fn want(mut self, bounds: &[f64], formula: impl Fn(&Known) -> Vec<Mat> + 'static) -> Self {
        self.bounds = bounds.to_vec();
        self.want = Box::new(formula);
        self
    }

    fn gradient(mut self, gradient: Gradient) -> Self {
        self.gradients.push(gradient);
        self
    }

    fn same(mut self, a: usize, b: usize) -> Self {
        self.same.push((a, b));
        self
    }

    /// Sums of that many products, in which a class of 16 bits also rounds results within the op.
    fn product(mut self, cost: usize) -> Self {
        (self.rounds, self.cost) = (Rounds::Parts, cost.max(self.cost / 8));
        self
    }

    fn rounds(mut self, rounds: Rounds) -> Self {
        self.rounds = rounds;
        self
    }

    fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// The frozen matrices and integers on a device.
    pub fn prepare(&self, b: &mut B) -> Prepared<B> {
        let weights = self.frozen.iter().map(|w| w.on(b)).collect();
        let tokens = self.tokens.as_ref();
        let tokens = tokens
            .map(|t| b.tokens(TokenRows { ids: &t.ids, bounds: &t.bounds, past: t.past, short: u32::MAX }));
        (weights, tokens, self.ids.as_ref().map(|ids| b.ids(ids)))
    }
}
