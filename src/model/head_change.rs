//! What training changes of a head over a vocabulary, whose matrix stays frozen: rows of some tokens, or a LoRA adapter.
//! Both add a product of two factors to the logits: logits[n, V] = x headᵀ + scale * (x aᵀ) bᵀ with a [m, C], b [V, m].

use super::config::Config;
use super::weights::{ModelError, Weights};
use crate::backend::{Backend, Fused, LmHeadLoss, Product, Transpose, View, ViewMut, Write, view, view_mut};

/// The change of a head.
pub struct HeadChange<B: Backend> {
    /// First trained value in the vector on the device.
    pub offset: usize,
    /// V, C, and m: the number of rows, or the rank.
    shape: (usize, usize, usize),
    scale: f32,
    /// Of trained rows, which are in the vector; of an adapter the vector has a, then b.
    rows: Option<FrozenRows<B>>,
}

/// Factors for trained rows: a is their difference from the frozen ones, b puts the difference in its place.
struct FrozenRows<B: Backend> {
    /// The frozen rows, multiplied by -1 [m, C].
    negative: B::Memory,
    /// [V, m]: 1 where a row of the vocabulary is that of the trained row, else 0.
    places: B::Memory,
}

/// Destination of the gradients of a loss.
pub struct Gradients<'a, M> {
    /// Of the hidden states [n, C] (=).
    pub dx: ViewMut<'a, M>,
    /// Of what the adapter sees of them, if that is apart from dx (=).
    pub seen: Option<ViewMut<'a, M>>,
    /// Of the trained values (=).
    pub own: Option<&'a mut M>,
    /// Factors of the losses [n, 1]; `None`: 1.
    pub weights: Option<View<'a, M>>,
}

/// What the gradients of some rows of logits are computed from.
struct Chunk<'a, B: Backend> {
    head: &'a B::Weight,
    /// a and b.
    factors: (View<'a, B::Memory>, View<'a, B::Memory>),
    /// What the adapter sees.
    x: View<'a, B::Memory>,
    /// x aᵀ.
    h: View<'a, B::Memory>,
    dlogits: View<'a, B::Memory>,
    /// Whether these rows are the first ones.
    write: Write,
}

impl<B: Fused> HeadChange<B> {
    /// Trained rows of `tokens` of the matrix `name`, at `offset` of the vector on the device.
    pub fn of_rows(
        backend: &mut B,
        weights: &Weights,
        config: &Config,
        name: &str,
        (tokens, offset): (&[u32], usize),
    ) -> Result<Self, ModelError> {
        let (v, c, m) = (config.vocab, config.hidden, tokens.len());
        let [mut negative, mut places] = [m * c, v * m].map(|len| backend.memory(len));
        if backend.has_data() {
            let rows = weights.some_rows(name, c, tokens)?;
            let values: Vec<f32> = rows.iter().map(|x| -x).collect();
            backend.upload(view_mut(&mut negative, m, c), &values);
            let mut of_token = vec![0.0; v * m];
            tokens.iter().enumerate().for_each(|(row, token)| of_token[*token as usize * m + row] = 1.0);
            backend.upload(view_mut(&mut places, v, m), &of_token);
        }
        Ok(HeadChange { offset, shape: (v, c, m), scale: 1.0, rows: Some(FrozenRows { negative, places }) })
    }

    /// An adapter whose a is at `offset` of the vector on the device, and its b directly after it.
    pub fn of_adapter(config: &Config, (rank, scale): (usize, f32), offset: usize) -> Self {
        HeadChange { offset, shape: (config.vocab, config.hidden, rank), scale, rows: None }
    }

    /// Number of trained values.
    pub fn len(&self) -> usize {
        let (v, c, m) = self.shape;
        m * c + if self.rows.is_some() { 0 } else { v * m }
    }

    /// The factor a, where it is not among the trained values.
    fn difference(&self, backend: &mut B, params: &B::Memory) -> Option<B::Memory> {
        let (_, c, m) = self.shape;
        let frozen = self.rows.as_ref()?;
        let mut a = backend.memory(m * c);
        let trained = View { memory: params, offset: self.offset, rows: m, cols: c };
        backend.copy(view_mut(&mut a, m, c), trained);
        backend.add(view_mut(&mut a, m, c), view(&frozen.negative, m, c));
        Some(a)
    }

    /// a and b.
    fn factors<'a>(
        &'a self,
        difference: Option<&'a B::Memory>,
        params: &'a B::Memory,
    ) -> (View<'a, B::Memory>, View<'a, B::Memory>) {
        let ((v, c, m), offset) = (self.shape, self.offset);
        let trained = || View { memory: params, offset, rows: m, cols: c };
        let b = || View { memory: params, offset: offset + m * c, rows: v, cols: m };
        let a = difference.map_or_else(trained, |a| view(a, m, c));
        (a, self.rows.as_ref().map_or_else(b, |rows| view(&rows.places, v, m)))
    }

    /// logits[n, V] += the change of the logits of x [n, C].
    pub fn add_to(
        &self,
        backend: &mut B,
        logits: ViewMut<B::Memory>,
        x: View<B::Memory>,
        params: &B::Memory,
    ) {
        let (n, m) = (x.rows, self.shape.2);
        let difference = self.difference(backend, params);
        let mut h = backend.memory(n * m);
        let factors = self.factors(difference.as_ref(), params);
        backend.lora(logits, view_mut(&mut h, n, m), x, factors, self.scale);
        [h].into_iter().chain(difference).for_each(|memory| backend.recycle(memory));
    }

    /// [`Fused::lm_head_loss`] of the changed head, where the change is of `seen`, which is x or x with a mask. The losses have
    /// no weights.
    pub fn loss(
        &self,
        backend: &mut B,
        (mut losses, mut grads): (ViewMut<B::Memory>, Option<Gradients<B::Memory>>),
        args: LmHeadLoss<B::Memory, B::Weight>,
        (seen, params): (View<B::Memory>, &B::Memory),
    ) {
        let ((v, _, m), n) = (self.shape, args.targets.len());
        let most = args.chunk.min(n);
        let difference = self.difference(backend, params);
        let factors = self.factors(difference.as_ref(), params);
        let [mut logits, mut h] = [most * v, most * m].map(|len| backend.memory(len));
        let by = grads.as_ref().and_then(|grads| grads.weights);
        let mut weighted = by.map(|_| backend.memory(most * v));
        for from in (0..n).step_by(args.chunk) {
            let rows = args.chunk.min(n - from);
            let targets = backend.ids(&args.targets[from..from + rows]);
            let (x, seen) = (args.x.rows(from, rows), seen.rows(from, rows));
            backend.linear(view_mut(&mut logits, rows, v), Write::Set, x, args.head);
            let out = view_mut(&mut logits, rows, v);
            backend.lora(out, view_mut(&mut h, rows, m), seen, factors, self.scale);
            let out = view_mut(&mut logits, rows, v);
            backend.cross_entropy(losses.again().rows(from, rows), out, &targets, None);
            let Some(grads) = grads.as_mut() else { continue };
            let mut dlogits = view(&logits, rows, v);
            if let (Some(weighted), Some(by)) = (weighted.as_mut(), by) {
                backend.scale_rows(view_mut(weighted, rows, v), dlogits, by.rows(from, rows));
                dlogits = view(&*weighted, rows, v);
            }
            let write = if from == 0 { Write::Set } else { Write::Add };
            let chunk = Chunk { head: args.head, factors, x: seen, h: view(&h, rows, m), dlogits, write };
            let out = Gradients {
                dx: grads.dx.again().rows(from, rows),
                seen: grads.seen.as_mut().map(|out| out.again().rows(from, rows)),
                own: grads.own.as_deref_mut(),
                weights: None,
            };
            self.chunk_gradients(backend, out, chunk);
        }
        let all = [logits, h].into_iter().chain(weighted).chain(difference);
        all.for_each(|memory| backend.recycle(memory));
    }

    fn chunk_gradients(&self, backend: &mut B, out: Gradients<B::Memory>, chunk: Chunk<B>) {
        let ((v, c, m), scale) = (self.shape, self.scale);
        let Gradients { mut dx, seen, own, .. } = out;
        let Chunk { head, factors: (a, b), x, h, dlogits, write } = chunk;
        let n = x.rows;
        let mut dh = backend.memory(n * m);
        let of = |a, b, transpose, scale| Product { a, b, transpose, scale };
        let product = of(dlogits, b, Transpose::Neither, scale);
        backend.matmul(view_mut(&mut dh, n, m), Write::Set, product);
        backend.linear_grad(dx.again(), Write::Set, dlogits, head);
        let through = of(view(&dh, n, m), a, Transpose::Neither, 1.0);
        match seen {
            Some(seen) => backend.matmul(seen, Write::Set, through),
            None => backend.matmul(dx, Write::Add, through),
        }
        if let Some(own) = own {
            let da = of(view(&dh, n, m), x, Transpose::Left, 1.0);
            backend.matmul(view_mut(own, m, c), write, da);
            if self.rows.is_none() {
                let db = of(dlogits, h, Transpose::Left, scale);
                backend.matmul(ViewMut { memory: own, offset: m * c, rows: v, cols: m }, write, db);
            }
        }
        backend.recycle(dh);
    }
}
