//! The top of a model: the last norm, then either the vocabulary or a classifier's trained head. Only the requested
//! rows are gathered and computed, and the logits of all rows never exist at once.

use super::config::Config;
use super::head_change::{Gradients, HeadChange};
use super::layout::{BIAS, Layout, SCORE};
use super::pending::{Pending, argmax};
use super::stage::{LossSums, Targets, TokenScore};
use super::weights::{ModelError, Weights};
use crate::backend::{
    Backend, DropoutKey, Fault, Fused, LmHeadLoss, Norm, Product, Shaped, Target, Transpose, View, ViewMut,
    Write, view, view_mut,
};

/// Approximate number of logits that exist at once (64 MiB).
const LOGITS: usize = 1 << 24;

/// Rows whose logits exist at once: few for a large vocabulary, but enough for fast products.
fn chunk(outputs: usize) -> usize {
    rows_of(LOGITS, outputs)
}

/// The same for losses. A card with tensor cores has several times as many, so that a product over the vocabulary
/// has work for all its processors.
fn chunk_of_losses(target: Target, outputs: usize) -> usize {
    match target {
        Target::Cuda(card) if card.is_bf16() => rows_of(4 * LOGITS, outputs),
        _ => chunk(outputs),
    }
}

fn rows_of(logits: usize, outputs: usize) -> usize {
    (logits / outputs.max(1) / 16 * 16).max(256)
}

/// The last norm and the output layer.
pub struct Head<B: Backend> {
    gain: B::Memory,
    eps: f32,
    hidden: usize,
    /// V, or the number of classes.
    pub outputs: usize,
    top: Top<B>,
}

enum Top<B: Backend> {
    /// Logits over the vocabulary: the frozen matrix, `None` where the embedding is the head, and its change.
    Vocabulary(Option<B::Weight>, Option<HeadChange<B>>),
    /// Trained logits over classes.
    Classes(Classes<B>),
}

struct Classes<B: Backend> {
    /// Offset of `score.weight` in the flat vector.
    score: usize,
    /// Offset of its bias, which follows.
    bias: Option<usize>,
    /// Class weights.
    weights: Option<(Vec<f32>, B::Memory)>,
}

/// Targets of a model with a head, its first class everywhere, for measurements; `None` for a language model.
pub fn targets(config: &Config, (rows, tokens): (usize, usize)) -> Option<Targets> {
    config.labels.as_ref().map(|_| match config.tags {
        true => Targets::Classes(vec![0; tokens]),
        false => Targets::Labels(vec![0; rows]),
    })
}

/// Inputs of a head besides its own weights.
pub struct Below<'a, B: Backend> {
    /// Hidden states after the last block [T, C].
    pub hidden: View<'a, B::Memory>,
    /// Flat parameters on the device.
    pub params: &'a B::Memory,
    /// The embedding, where the head shares it.
    pub embedding: Option<&'a B::Weight>,
    /// The mask of the input of the head's adapter, or of a head that labels tokens, and the tokens of all T rows; `None`
    /// where nothing is dropped.
    pub dropout: Option<(DropoutKey<'a>, &'a B::Tokens)>,
}

/// The factors of the product that gives a classifier's logits.
struct Factors<'a, M> {
    /// Normed rows [n, C].
    x: View<'a, M>,
    /// `score.weight` [labels, C].
    score: View<'a, M>,
}

/// Returns the weights of losses, and the sums that they give.
pub type Weigh<'a> = &'a dyn Fn(&[f32]) -> (Vec<f32>, LossSums);

/// Destination of a head's gradients.
pub struct HeadGrad<'a, M> {
    /// Gradient of the hidden states [T, C] (=).
    pub hidden: &'a mut M,
    /// Gradient of the head's trained values (=): [labels or trained rows, C], then a bias of as many values as labels,
    /// where it has one.
    pub own: Option<&'a mut M>,
}

/// Rows `[n]` of the hidden states and their targets.
pub struct Asked<'a> {
    /// Row numbers, ascending.
    pub rows: &'a [u32],
    /// Target token or class of each row.
    pub targets: &'a [u32],
}

impl<B: Fused> Head<B> {
    /// A head over the vocabulary, tied or not, with what is trained of it.
    pub fn vocabulary(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        change: Option<HeadChange<B>>,
    ) -> Result<Self, ModelError> {
        let (v, c) = (config.vocab, config.hidden);
        let own = if config.tied { None } else { Some(weights.matrix(backend, "lm_head.weight", (v, c))?) };
        Self::new(backend, weights, config, (v, Top::Vocabulary(own, change)))
    }

    /// A head over classes, whose values are where `layout` says.
    pub fn classes(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        layout: &Layout,
        class_weights: Option<Vec<f32>>,
    ) -> Result<Self, ModelError> {
        let offset = |name| layout.find(name).map(|entry| entry.offset);
        let (score, bias) = (offset(SCORE).unwrap_or(0), offset(BIAS));
        let n = config.labels.as_ref().map_or(0, Vec::len);
        let class_weights = class_weights.map(|w| {
            let mut memory = backend.memory(n);
            backend.upload(view_mut(&mut memory, 1, n), &w);
            (w, memory)
        });
        let classes = Classes { score, bias, weights: class_weights };
        Self::new(backend, weights, config, (n, Top::Classes(classes)))
    }

    fn new(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        (outputs, top): (usize, Top<B>),
    ) -> Result<Self, ModelError> {
        let name = weights.name(&format!("{}.weight", config.family.last_norm));
        let gain = weights.scaled_gain(
            backend,
            &name,
            config.hidden,
            (config.family.gain_offset, config.logits_scale.recip()),
        )?;
        Ok(Head { gain, eps: config.stream_eps(), hidden: config.hidden, outputs, top })
    }

    /// Offset and number of the head's trained values.
    pub fn trained(&self) -> Option<(usize, usize)> {
        match &self.top {
            Top::Vocabulary(_, change) => change.as_ref().map(|change| (change.offset, change.len())),
            Top::Classes(classes) => {
                let each = self.hidden + usize::from(classes.bias.is_some());
                Some((classes.score, self.outputs * each))
            }
        }
    }

    /// Returns the logits [n, outputs] of `rows`; a fault where one is not finite, because a choice among such logits
    /// is meaningless.
    pub fn logits(&self, backend: &mut B, below: Below<B>, rows: &[u32]) -> Result<Vec<f32>, Fault> {
        let n = rows.len();
        let top = self.normed_rows(backend, &below, rows);
        let mut logits = backend.memory(n * self.outputs);
        let mut out = view_mut(&mut logits, n, self.outputs);
        let x = view(&top.normed, n, self.hidden);
        match &self.top {
            Top::Vocabulary(own, change) => {
                if let Some(head) = own.as_ref().or(below.embedding) {
                    backend.linear(out.again(), Write::Set, x, head);
                }
                if let Some(change) = change {
                    change.add_to(backend, out, x, below.params);
                }
            }
            Top::Classes(classes) => drop(self.multiply(backend, out, (below.params, classes), x)),
        }
        let mut values = vec![0.0; n * self.outputs];
        let read = backend.read(view(&logits, n, self.outputs), &mut values);
        backend.recycle(logits);
        top.recycle(backend);
        read?;
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(i) => Err(Fault::NonFinite {
                device: backend.class(),
                what: format!("the logit {}", i % self.outputs),
                value: values[i].to_string(),
            }),
        }
    }

    /// Returns the score of every target: the negative loss, and by the difference of logits that of the most probable
    /// tokens. The logits of a chunk of rows exist at once.
    pub fn scores(
        &self,
        backend: &mut B,
        below: Below<B>,
        asked: Asked,
        top: usize,
    ) -> Result<Vec<TokenScore>, Fault> {
        if asked.rows.is_empty() {
            return Ok(Vec::new());
        }
        let Below { hidden, params, embedding, dropout } = below;
        let again = || Below { hidden, params, embedding, dropout };
        let pending = self.loss(backend, again(), Asked { ..asked }, None);
        let losses = pending.losses(backend)?;
        let mut scores: Vec<TokenScore> =
            losses.iter().map(|&loss| TokenScore { token: -f64::from(loss), top: Vec::new() }).collect();
        if top == 0 {
            return Ok(scores);
        }
        let (step, v) = (chunk(self.outputs), self.outputs);
        let parts = asked.rows.chunks(step).zip(asked.targets.chunks(step));
        for ((rows, targets), scores) in parts.zip(scores.chunks_mut(step)) {
            let logits = self.logits(backend, again(), rows)?;
            for ((logits, &target), score) in logits.chunks_exact(v).zip(targets).zip(scores) {
                let own = f64::from(logits[target as usize]);
                let of = |id: u32| score.token + (f64::from(logits[id as usize]) - own);
                score.top = largest(logits, top).into_iter().map(|id| (id, of(id))).collect();
            }
        }
        Ok(scores)
    }

    /// Returns the sums of losses with the most probable token in the place of each target. The logits of a chunk of
    /// rows exist at once. Without a finite loss there are no predictions.
    pub fn predicted(&self, backend: &mut B, below: Below<B>, asked: Asked) -> Result<LossSums, Fault> {
        let Below { hidden, params, embedding, dropout } = below;
        let again = || Below { hidden, params, embedding, dropout };
        let pending = self.loss(backend, again(), Asked { ..asked }, None);
        let mut sums = pending.read(backend, None)?;
        if sums.loss.is_finite() {
            for rows in asked.rows.chunks(chunk(self.outputs)) {
                let logits = self.logits(backend, again(), rows)?;
                sums.predictions.extend(logits.chunks_exact(self.outputs).map(|row| argmax(row) as u32));
            }
        }
        Ok(sums)
    }

    /// Computes sums of losses, and their gradients where a destination is given.
    pub fn loss(
        &self,
        backend: &mut B,
        below: Below<B>,
        asked: Asked,
        grad: Option<HeadGrad<B::Memory>>,
    ) -> Pending<B::Memory> {
        let (own, hidden) = grad.map_or((None, None), |g| (g.own, Some(g.hidden)));
        let wanted = Wanted { hidden: hidden.is_some(), own, weights: None };
        let (top, dnormed, pending) = self.losses(backend, &below, &asked, wanted);
        if let (Some(dnormed), Some(hidden)) = (dnormed, hidden) {
            self.spread(backend, &top, dnormed, view_mut(hidden, below.hidden.rows, self.hidden));
        }
        top.recycle(backend);
        pending
    }

    /// Computes losses and, where a destination is given, their gradients. The weights of the losses are known once all
    /// losses are: `weigh` returns the weight of each, and the sums.
    pub fn weighted_loss(
        &self,
        backend: &mut B,
        below: Below<B>,
        asked: Asked,
        (grad, weigh): (Option<HeadGrad<B::Memory>>, Weigh),
    ) -> Result<LossSums, Fault> {
        let n = asked.rows.len();
        let (own, hidden) = grad.map_or((None, None), |g| (g.own, Some(g.hidden)));
        let changed = matches!(&self.top, Top::Vocabulary(_, Some(_)));
        let wanted = Wanted { hidden: hidden.is_some() && !changed, own: None, weights: None };
        let (mut top, dnormed, pending) = self.losses(backend, &below, &asked, wanted);
        let mut losses = vec![0.0; n];
        let read = backend.read(view(&pending.losses, n, 1), &mut losses);
        pending.recycle(backend);
        let (weights, sums) = weigh(&losses);
        match (dnormed, hidden) {
            (Some(dnormed), Some(hidden)) => {
                let weighted = self.weighted(backend, &mut top, dnormed, &weights);
                self.spread(backend, &top, weighted, view_mut(hidden, below.hidden.rows, self.hidden));
            }
            // The gradients of a changed head need the weights before they are summed.
            (None, Some(hidden)) => {
                let mut by = backend.memory(n);
                backend.upload(view_mut(&mut by, n, 1), &weights);
                let wanted = Wanted { hidden: true, own, weights: Some(view(&by, n, 1)) };
                let (again, dnormed, pending) = self.losses(backend, &below, &asked, wanted);
                pending.recycle(backend);
                let out = view_mut(hidden, below.hidden.rows, self.hidden);
                dnormed.into_iter().zip([out]).for_each(|(d, out)| self.spread(backend, &again, d, out));
                again.recycle(backend);
                backend.recycle(by);
            }
            _ => {}
        }
        top.recycle(backend);
        read.map(|()| sums)
    }

    /// Computes the outputs of the rows and, where a destination is given, the gradients of a loss of them: `weigh`
    /// returns its derivative in each output [n, outputs], and the sums.
    pub fn output_loss(
        &self,
        backend: &mut B,
        below: Below<B>,
        rows: &[u32],
        (grad, weigh): (Option<HeadGrad<B::Memory>>, Weigh),
    ) -> Result<LossSums, Fault> {
        let Top::Classes(classes) = &self.top else {
            return Err(Fault::Device {
                device: backend.class(),
                reason: "a loss of outputs needs a head".into(),
            });
        };
        let (n, c, outputs) = (rows.len(), self.hidden, self.outputs);
        let top = self.normed_rows(backend, &below, rows);
        let mut logits = backend.memory(n * outputs);
        let (out, x) = (view_mut(&mut logits, n, outputs), view(&top.normed, n, c));
        let factors = self.multiply(backend, out, (below.params, classes), x);
        let mut values = vec![0.0; n * outputs];
        let read = backend.read(view(&logits, n, outputs), &mut values);
        let (slopes, sums) = weigh(&values);
        if let Some(HeadGrad { hidden, own }) = grad {
            backend.upload(view_mut(&mut logits, n, outputs), &slopes);
            let mut dnormed = backend.memory(n * c);
            let gradients = (Some(view_mut(&mut dnormed, n, c)), own);
            self.class_gradients(backend, gradients, factors, view(&logits, n, outputs));
            self.spread(backend, &top, dnormed, view_mut(hidden, below.hidden.rows, c));
        }
        backend.recycle(logits);
        top.recycle(backend);
        read.map(|()| sums)
    }

    /// Multiplies each row of `x` by its weight. The gradient of a norm with gain 1 whose input is 0 does exactly that
    /// with its `inv_rms`; the input takes the place of the normed rows.
    fn weighted(&self, backend: &mut B, top: &mut NormedRows<B>, x: B::Memory, weights: &[f32]) -> B::Memory {
        let (n, c) = (weights.len(), self.hidden);
        let [mut out, mut gain, mut by] = [n * c, c, n].map(|len| backend.memory(len));
        backend.fill(view_mut(&mut top.normed, n, c), 0.0);
        backend.fill(view_mut(&mut gain, 1, c), 1.0);
        backend.upload(view_mut(&mut by, n, 1), weights);
        let norm = Norm { gain: view(&gain, 1, c), inv_rms: view(&by, n, 1) };
        let zeros = view(&top.normed, n, c);
        backend.rmsnorm_grad(view_mut(&mut out, n, c), Write::Set, view(&x, n, c), zeros, norm);
        [x, gain, by].into_iter().for_each(|memory| backend.recycle(memory));
        out
    }

    /// Computes the losses of the asked rows and the wanted gradients.
    fn losses(
        &self,
        backend: &mut B,
        below: &Below<B>,
        asked: &Asked,
        wanted: Wanted<B::Memory>,
    ) -> (NormedRows<B>, Option<B::Memory>, Pending<B::Memory>) {
        let (n, c) = (asked.rows.len(), self.hidden);
        let Wanted { hidden, own: score, weights } = wanted;
        let top = self.normed_rows(backend, below, asked.rows);
        let mut losses = backend.memory(n);
        let mut dnormed = hidden.then(|| backend.memory(n * c));
        let out = (view_mut(&mut losses, n, 1), dnormed.as_mut().map(|m| view_mut(m, n, c)));
        let x = view(&top.normed, n, c);
        let logits = match &self.top {
            Top::Vocabulary(own, change) => {
                if let Some(head) = own.as_ref().or(below.embedding) {
                    let chunk = chunk_of_losses(backend.target(), self.outputs);
                    let args = LmHeadLoss { x, head, vocab: self.outputs, targets: asked.targets, chunk };
                    match change {
                        Some(change) => {
                            let grads = out.1.map(|dx| Gradients { dx, seen: None, own: score, weights });
                            changed_loss(backend, (out.0, grads), args, (change, below, &top.ids));
                        }
                        None => backend.lm_head_loss(out.0, out.1, args),
                    }
                }
                None
            }
            Top::Classes(classes) => {
                let places = (&top.ids, below.hidden.rows);
                let mask = |backend: &mut B, x| below.dropout.map(|mask| masked(backend, x, places, mask));
                let seen = mask(backend, x);
                let mut logits = backend.memory(n * self.outputs);
                let into = view_mut(&mut logits, n, self.outputs);
                let x = seen.as_ref().map_or(x, |seen| view(seen, n, c));
                let factors = self.multiply(backend, into, (below.params, classes), x);
                let logits = self.class_loss(backend, out, (logits, factors, asked.targets), score);
                seen.into_iter().for_each(|seen| backend.recycle(seen));
                if let Some(through) = dnormed.as_ref().and_then(|d| mask(backend, view(d, n, c))) {
                    dnormed.replace(through).into_iter().for_each(|d| backend.recycle(d));
                }
                Some(logits)
            }
        };
        let weight = self.weight(asked.targets);
        (top, dnormed, Pending { losses, logits, rows: n, outputs: self.outputs, weight })
    }

    /// The gradient of the hidden states (=) from that of the normed rows.
    fn spread(&self, backend: &mut B, top: &NormedRows<B>, dnormed: B::Memory, dhidden: ViewMut<B::Memory>) {
        let (n, c) = (top.ids.shape().0, self.hidden);
        let mut drows = backend.memory(n * c);
        let norm = Norm { gain: view(&self.gain, 1, c), inv_rms: view(&top.inv_rms, n, 1) };
        let dx = view_mut(&mut drows, n, c);
        backend.rmsnorm_grad(dx, Write::Set, view(&dnormed, n, c), view(&top.rows, n, c), norm);
        backend.gather_rows_grad(dhidden, view(&drows, n, c), &top.ids);
        [drows, dnormed].into_iter().for_each(|memory| backend.recycle(memory));
    }

    /// The divisor of a sum of losses.
    fn weight(&self, targets: &[u32]) -> f64 {
        match &self.top {
            Top::Classes(Classes { weights: Some((weights, _)), .. }) => {
                targets.iter().map(|&t| f64::from(weights[t as usize])).sum()
            }
            _ => targets.len() as f64,
        }
    }

    /// Computes the logits of normed rows (=), and returns the factors of the product.
    fn multiply<'a>(
        &self,
        backend: &mut B,
        mut logits: ViewMut<B::Memory>,
        (params, classes): (&'a B::Memory, &Classes<B>),
        x: View<'a, B::Memory>,
    ) -> Factors<'a, B::Memory> {
        let at = |offset, rows, cols| View { memory: params, offset, rows, cols };
        let score = at(classes.score, self.outputs, self.hidden);
        let product = Product { a: x, b: score, transpose: Transpose::Right, scale: 1.0 };
        backend.matmul(logits.again(), Write::Set, product);
        if let Some(offset) = classes.bias {
            backend.bias(logits, at(offset, 1, self.outputs));
        }
        Factors { x, score }
    }

    /// Computes losses and dx (both =) of a classifier from its logits, and the gradient of its head. Returns the logits.
    fn class_loss(
        &self,
        backend: &mut B,
        (losses, dx): (ViewMut<B::Memory>, Option<ViewMut<B::Memory>>),
        (mut logits, factors, targets): (B::Memory, Factors<B::Memory>, &[u32]),
        dscore: Option<&mut B::Memory>,
    ) -> B::Memory {
        let n = targets.len();
        let mut kept = backend.memory(n * self.outputs);
        backend.copy(view_mut(&mut kept, n, self.outputs), view(&logits, n, self.outputs));
        let Top::Classes(classes) = &self.top else { return kept };
        let ids = backend.ids(targets);
        let class_weights = classes.weights.as_ref().map(|(_, w)| view(w, 1, self.outputs));
        backend.cross_entropy(losses, view_mut(&mut logits, n, self.outputs), &ids, class_weights);
        self.class_gradients(backend, (dx, dscore), factors, view(&logits, n, self.outputs));
        backend.recycle(logits);
        kept
    }

    /// Computes dx and the gradient of the head (both =), where both are asked for.
    fn class_gradients(
        &self,
        backend: &mut B,
        (dx, dscore): (Option<ViewMut<B::Memory>>, Option<&mut B::Memory>),
        Factors { x, score }: Factors<B::Memory>,
        dlogits: View<B::Memory>,
    ) {
        if let (Some(dx), Some(dscore)) = (dx, dscore) {
            let of = |b, transpose| Product { a: dlogits, b, transpose, scale: 1.0 };
            backend.matmul(dx, Write::Set, of(score, Transpose::Neither));
            let (n, outputs) = (dlogits.rows, self.outputs);
            backend.matmul(view_mut(dscore, outputs, self.hidden), Write::Set, of(x, Transpose::Left));
            if let Top::Classes(Classes { bias: Some(_), .. }) = &self.top {
                let mut ones = backend.memory(n);
                backend.fill(view_mut(&mut ones, n, 1), 1.0);
                let (offset, cols) = (outputs * self.hidden, 1);
                let dbias = ViewMut { memory: dscore, offset, rows: outputs, cols };
                backend.matmul(dbias, Write::Set, of(view(&ones, n, 1), Transpose::Left));
                backend.recycle(ones);
            }
        }
    }

    fn normed_rows(&self, backend: &mut B, below: &Below<B>, rows: &[u32]) -> NormedRows<B> {
        let (n, c) = (rows.len(), self.hidden);
        let ids = backend.ids(rows);
        let mut top = NormedRows {
            ids,
            rows: backend.memory(n * c),
            normed: backend.memory(n * c),
            inv_rms: backend.memory(n),
        };
        backend.gather_rows(view_mut(&mut top.rows, n, c), below.hidden, &top.ids);
        let (out, inv_rms) = (view_mut(&mut top.normed, n, c), view_mut(&mut top.inv_rms, n, 1));
        backend.rmsnorm(out, inv_rms, view(&top.rows, n, c), view(&self.gain, 1, c), self.eps);
        top
    }
}

/// The losses of a changed head, and their gradients where these are given a place. The rows of x have these numbers.
fn changed_loss<B: Fused>(
    backend: &mut B,
    (losses, grads): (ViewMut<B::Memory>, Option<Gradients<B::Memory>>),
    args: LmHeadLoss<B::Memory, B::Weight>,
    (change, below, numbers): (&HeadChange<B>, &Below<B>, &B::Ids),
) {
    let x = args.x;
    let Some(dropout) = below.dropout else {
        return change.loss(backend, (losses, grads), args, (x, below.params));
    };
    let places = (numbers, below.hidden.rows);
    let seen = masked(backend, x, places, dropout);
    let by = view(&seen, x.rows, x.cols);
    match grads {
        None => change.loss(backend, (losses, None), args, (by, below.params)),
        Some(Gradients { mut dx, own, weights, .. }) => {
            let mut dseen = backend.memory(x.len());
            let out = Some(view_mut(&mut dseen, x.rows, x.cols));
            let grads = Gradients { dx: dx.again(), seen: out, own, weights };
            change.loss(backend, (losses, Some(grads)), args, (by, below.params));
            let through = masked(backend, view(&dseen, x.rows, x.cols), places, dropout);
            backend.add(dx, view(&through, x.rows, x.cols));
            [dseen, through].into_iter().for_each(|memory| backend.recycle(memory));
        }
    }
    backend.recycle(seen);
}

/// x with the mask of its rows, which are those with these numbers of `t`. It is its own gradient.
fn masked<B: Backend>(
    backend: &mut B,
    x: View<B::Memory>,
    (numbers, t): (&B::Ids, usize),
    (key, tokens): (DropoutKey, &B::Tokens),
) -> B::Memory {
    let [mut all, mut dropped] = [t * x.cols; 2].map(|len| backend.memory(len));
    let mut out = backend.memory(x.len());
    backend.gather_rows_grad(view_mut(&mut all, t, x.cols), x, numbers);
    let into = view_mut(&mut dropped, t, x.cols);
    backend.dropout(into, Write::Set, view(&all, t, x.cols), key, tokens);
    backend.gather_rows(view_mut(&mut out, x.rows, x.cols), view(&dropped, t, x.cols), numbers);
    [all, dropped].into_iter().for_each(|memory| backend.recycle(memory));
    out
}

/// The gradients that are computed with losses.
struct Wanted<'a, M> {
    /// That of the normed rows.
    hidden: bool,
    /// Destination of that of the head's trained values.
    own: Option<&'a mut M>,
    /// Factors of the losses [n, 1] in the gradients, for a changed head.
    weights: Option<View<'a, M>>,
}

struct NormedRows<B: Backend> {
    ids: B::Ids,
    rows: B::Memory,
    normed: B::Memory,
    inv_rms: B::Memory,
}

impl<B: Backend> NormedRows<B> {
    fn recycle(self, backend: &mut B) {
        [self.rows, self.normed, self.inv_rms].into_iter().for_each(|m| backend.recycle(m));
    }
}

/// Indices of the largest values, at most `most`, in descending order, the lowest first among equals.
pub fn largest(values: &[f32], most: usize) -> Vec<u32> {
    let mut found: Vec<u32> = Vec::with_capacity(most + 1);
    for (i, v) in values.iter().enumerate() {
        let at = found.partition_point(|&other| values[other as usize] >= *v);
        if at < most {
            found.insert(at, i as u32);
            found.truncate(most);
        }
    }
    found
}
