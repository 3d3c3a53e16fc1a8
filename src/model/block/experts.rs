//! The feed-forward of a sparse layer: a router chooses experts for each token, and the frozen products of an expert are
//! computed for its tokens together. A token's outputs are added in the order of its choice, so that neither the order in
//! which experts are computed nor their numbers change a bit of the output. A weight is applied to the input of an
//! expert's last product: the function is the same, and the weight's gradient is a product of short rows.
//!
//! The rows of an expert's products are consecutive pairs of [`Routes`]. Memory is that of all pairs, whatever the choice.
//! Of a streamed layer each expert is read when a token chooses it first, so that a pass of few tokens reads few experts.

use super::Inner;
use crate::backend::{Activation, Backend, Fault, Fused, Shaped, View, ViewMut, Write, view, view_mut};
use crate::families::tensors::EXPERT_BIASES;
use crate::model::config::{self, Config};
use crate::model::layout::{expert_paths, router_path};
use crate::model::routes::Routes;
use crate::model::weights::{ModelError, Weights};
use crate::numeric::tensor::Tensors;
use std::cell::OnceCell;
use std::sync::Arc;

/// The frozen weights of a layer's experts and of its router.
pub struct Experts<B: Backend> {
    router: B::Weight,
    /// Gate, up and down of each; of a streamed layer those that a token has chosen.
    experts: Vec<OnceCell<[B::Weight; 3]>>,
    /// Where the experts of a streamed layer are read, and its number.
    later: Option<(Arc<dyn Tensors>, usize)>,
    biases: Option<Biases<B::Memory>>,
    config: config::Experts,
    hidden: usize,
}

/// The biases of a router and of its experts.
struct Biases<M> {
    /// [1, E]
    router: M,
    /// Of gate and up [E, F], and of down [E, C].
    experts: [M; 3],
}

impl<B: Fused> Experts<B> {
    /// Reads the weights of layer `layer`.
    pub fn load(
        backend: &mut B,
        weights: &Weights,
        (config, of): (&Config, &config::Experts),
        layer: usize,
    ) -> Result<Self, ModelError> {
        let path = weights.matrix_name(&router_path(config, layer));
        let router = weights.matrix(backend, &path, (of.count, config.hidden))?;
        let later = weights.again().map(|tensors| (tensors, layer));
        let sizes = (config.hidden, of.feed_forward);
        let experts = (0..of.count).map(|expert| match later {
            None => Ok(OnceCell::from(expert_of(backend, weights, (layer, expert), sizes)?)),
            Some(_) => Ok(OnceCell::new()),
        });
        let experts = experts.collect::<Result<_, ModelError>>()?;
        let biases = match config.family.biased_experts {
            true => Some(Biases::load(backend, weights, (config, of), layer)?),
            false => None,
        };
        Ok(Experts { router, experts, later, biases, config: of.clone(), hidden: config.hidden })
    }

    /// Frees the weights.
    pub fn unload(self, backend: &mut B) {
        let experts = self.experts.into_iter().filter_map(OnceCell::into_inner);
        let all = experts.flatten().chain([self.router]);
        all.for_each(|weight| backend.release(weight));
        if let Some(Biases { router, experts }) = self.biases {
            experts.into_iter().chain([router]).for_each(|m| backend.recycle(m));
        }
    }

    /// The numbers of the experts that are on the device.
    pub fn held(&self) -> Vec<usize> {
        (0..self.experts.len()).filter(|expert| self.experts[*expert].get().is_some()).collect()
    }

    /// Reads the chosen experts that are not on the device yet.
    pub fn read(&self, backend: &mut B, routes: &Routes) -> Result<(), ModelError> {
        let Some((tensors, layer)) = &self.later else { return Ok(()) };
        let weights = Weights::read_before(tensors)?;
        let sizes = (self.hidden, self.config.feed_forward);
        for (expert, _) in routes.of_experts().filter(|(expert, _)| self.experts[*expert].get().is_none()) {
            let read = expert_of(backend, &weights, (*layer, expert), sizes)?;
            self.experts[expert].get_or_init(|| read);
        }
        Ok(())
    }

    /// Gate, up and down of an expert that was read.
    fn expert(&self, expert: usize) -> &[B::Weight; 3] {
        self.experts[expert]
            .get()
            .unwrap_or_else(|| unreachable!("chosen experts are read before their products"))
    }

    /// Gate and up of the pairs, for the rows of x [T, C].
    pub fn inner(
        &self,
        backend: &mut B,
        x: View<B::Memory>,
        known: Option<Routes>,
    ) -> Result<Inner<B::Memory>, Fault> {
        let routes = match known {
            Some(routes) => routes,
            None => self.route(backend, x)?,
        };
        self.read(backend, &routes).map_err(|e| e.into_fault(backend))?;
        let (pairs, f) = (routes.pairs(), self.config.feed_forward);
        let rows = self.gathered(backend, x, &routes);
        let (mut inner, write) = match &self.biases {
            None => ([(); 2].map(|()| backend.memory(pairs * f)), Write::Set),
            Some(Biases { experts: [gate, up, _], .. }) => {
                let experts = backend.ids(&routes.experts());
                ([gate, up].map(|bias| self.biases_of_pairs(backend, (bias, f), &experts)), Write::Add)
            }
        };
        for (expert, some) in routes.of_experts() {
            let x = view(&rows, pairs, x.cols).rows(some.start, some.len());
            for (out, weight) in inner.iter_mut().zip(self.expert(expert)) {
                let out = view_mut(out, pairs, f).rows(some.start, some.len());
                backend.linear(out, write, x, weight);
            }
        }
        backend.recycle(rows);
        let [gate, up] = inner;
        Ok(Inner { gate, up, routes: Some(routes), shared: None })
    }

    /// Chooses the experts of the rows of x.
    fn route(&self, backend: &mut B, x: View<B::Memory>) -> Result<Routes, Fault> {
        let (t, count) = (x.rows, self.config.count);
        let mut logits = backend.memory(t * count);
        backend.linear(view_mut(&mut logits, t, count), Write::Set, x, &self.router);
        if let Some(biases) = &self.biases {
            backend.bias(view_mut(&mut logits, t, count), view(&biases.router, 1, count));
        }
        let mut values = vec![0.0; t * count];
        let read = backend.read(view(&logits, t, count), &mut values);
        backend.recycle(logits);
        read?;
        match backend.has_data() {
            true => Ok(Routes::of(&values, &self.config)),
            false => Ok(Routes::even(t, &self.config)),
        }
    }

    /// The row of x of each pair.
    fn gathered(&self, backend: &mut B, x: View<B::Memory>, routes: &Routes) -> B::Memory {
        let mut rows = backend.memory(routes.pairs() * x.cols);
        let ids = backend.ids(&routes.tokens);
        backend.gather_rows(view_mut(&mut rows, routes.pairs(), x.cols), x, &ids);
        rows
    }

    /// The bias [P, N] of each pair's expert, given those of all experts [E, N].
    fn biases_of_pairs(
        &self,
        backend: &mut B,
        (biases, n): (&B::Memory, usize),
        experts: &B::Ids,
    ) -> B::Memory {
        let pairs = experts.shape().0;
        let mut out = backend.memory(pairs * n);
        backend.gather_rows(view_mut(&mut out, pairs, n), view(biases, self.config.count, n), experts);
        out
    }

    /// out[T, C] (=|+=) the sum of the rows of each token's pairs.
    fn add_up(
        &self,
        backend: &mut B,
        (out, write): (ViewMut<B::Memory>, Write),
        rows: &B::Memory,
        routes: &Routes,
    ) {
        let x = view(rows, routes.pairs(), out.cols);
        let places: Vec<B::Ids> = routes.places.iter().map(|places| backend.ids(places)).collect();
        backend.sum_rows(out, write, x, &places);
    }

    /// The weights of the pairs [P, 1].
    fn weights(&self, backend: &mut B, routes: &Routes) -> B::Memory {
        let mut weights = backend.memory(routes.pairs());
        backend.upload(view_mut(&mut weights, routes.pairs(), 1), &routes.weights);
        weights
    }

    /// out[T, C] (=|+=) the experts' output, given the activations of the pairs.
    pub fn output(
        &self,
        backend: &mut B,
        out: (ViewMut<B::Memory>, Write),
        act: &B::Memory,
        routes: &Routes,
    ) {
        let (pairs, c, f) = (routes.pairs(), self.hidden, self.config.feed_forward);
        let weights = self.weights(backend, routes);
        let [mut scaled, mut rows] = [f, c].map(|cols| backend.memory(pairs * cols));
        let by = view(&weights, pairs, 1);
        backend.scale_rows(view_mut(&mut scaled, pairs, f), view(act, pairs, f), by);
        let mut write = Write::Set;
        if let Some(Biases { experts: [.., bias], .. }) = &self.biases {
            let experts = backend.ids(&routes.experts());
            let biases = self.biases_of_pairs(backend, (bias, c), &experts);
            backend.scale_rows(view_mut(&mut rows, pairs, c), view(&biases, pairs, c), by);
            backend.recycle(biases);
            write = Write::Add;
        }
        for (expert, some) in routes.of_experts() {
            let [.., down] = self.expert(expert);
            let x = view(&scaled, pairs, f).rows(some.start, some.len());
            backend.linear(view_mut(&mut rows, pairs, c).rows(some.start, some.len()), write, x, down);
        }
        self.add_up(backend, out, &rows, routes);
        [weights, scaled, rows].into_iter().for_each(|m| backend.recycle(m));
    }

    /// dx[T, C] = the gradient of the input, given that of the output. Gate and up of the pairs are overwritten.
    pub fn backward(
        &self,
        backend: &mut B,
        mut dx: ViewMut<B::Memory>,
        dout: View<B::Memory>,
        (act, [gate, up], activation): (&B::Memory, [&mut B::Memory; 2], Activation),
        routes: &Routes,
    ) -> Result<(), Fault> {
        let (pairs, c, f) = (routes.pairs(), self.hidden, self.config.feed_forward);
        let weights = self.weights(backend, routes);
        let [mut dact, mut dweights] = [pairs * f, pairs].map(|len| backend.memory(len));
        let mut rows = self.gathered(backend, dout, routes);
        for (expert, some) in routes.of_experts() {
            let [.., down] = self.expert(expert);
            let dy = view(&rows, pairs, c).rows(some.start, some.len());
            backend.linear_grad(
                view_mut(&mut dact, pairs, f).rows(some.start, some.len()),
                Write::Set,
                dy,
                down,
            );
        }
        let (d, dw) = (view_mut(&mut dact, pairs, f), view_mut(&mut dweights, pairs, 1));
        backend.scale_rows_grad(d, dw, view(act, pairs, f), view(&weights, pairs, 1));
        if let Some(Biases { experts: [.., bias], .. }) = &self.biases {
            // A weight multiplies the bias too.
            let experts = backend.ids(&routes.experts());
            let mut biases = self.biases_of_pairs(backend, (bias, c), &experts);
            let mut more = backend.memory(pairs);
            let (b, dw) = (view_mut(&mut biases, pairs, c), view_mut(&mut more, pairs, 1));
            backend.scale_rows_grad(b, dw, view(&rows, pairs, c), view(&weights, pairs, 1));
            backend.add(view_mut(&mut dweights, pairs, 1), view(&more, pairs, 1));
            [biases, more].into_iter().for_each(|m| backend.recycle(m));
        }
        let (dgate, dup) = (view_mut(gate, pairs, f), view_mut(up, pairs, f));
        backend.gated_grad(dgate, dup, view(&dact, pairs, f), activation);
        for (expert, some) in routes.of_experts() {
            let [of_gate, of_up, _] = self.expert(expert);
            for (dy, weight, write) in [(&*gate, of_gate, Write::Set), (&*up, of_up, Write::Add)] {
                let dy = view(dy, pairs, f).rows(some.start, some.len());
                let out = view_mut(&mut rows, pairs, c).rows(some.start, some.len());
                backend.linear_grad(out, write, dy, weight);
            }
        }
        self.add_up(backend, (dx.again(), Write::Set), &rows, routes);
        [rows, dact, weights].into_iter().for_each(|m| backend.recycle(m));
        self.router_backward(backend, dx, dweights, routes)
    }

    /// dx[T, C] += the gradient through the router.
    fn router_backward(
        &self,
        backend: &mut B,
        dx: ViewMut<B::Memory>,
        dweights: B::Memory,
        routes: &Routes,
    ) -> Result<(), Fault> {
        let (t, count) = (dx.rows, self.config.count);
        let mut values = vec![0.0; routes.pairs()];
        let read = backend.read(view(&dweights, routes.pairs(), 1), &mut values);
        backend.recycle(dweights);
        read?;
        let mut dlogits = backend.memory(t * count);
        backend.upload(view_mut(&mut dlogits, t, count), &routes.gradient(&values, &self.config));
        backend.linear_grad(dx, Write::Add, view(&dlogits, t, count), &self.router);
        backend.recycle(dlogits);
        Ok(())
    }
}

/// Reads gate, up and down of an expert of a layer, given the columns of the stream and of an expert.
fn expert_of<B: Backend>(
    backend: &mut B,
    weights: &Weights,
    (layer, expert): (usize, usize),
    (c, f): (usize, usize),
) -> Result<[B::Weight; 3], ModelError> {
    let mut read = Vec::with_capacity(3);
    for (path, shape) in expert_paths(layer, expert).into_iter().zip([(f, c), (f, c), (c, f)]) {
        match weights.matrix(backend, &weights.matrix_name(&path), shape) {
            Ok(weight) => read.push(weight),
            Err(e) => {
                read.into_iter().for_each(|weight| backend.release(weight));
                return Err(e);
            }
        }
    }
    read.try_into().map_err(|_| unreachable!("an expert has three matrices"))
}

impl<M> Biases<M> {
    fn load<B: Backend<Memory = M>>(
        backend: &mut B,
        weights: &Weights,
        (config, of): (&Config, &config::Experts),
        layer: usize,
    ) -> Result<Self, ModelError> {
        let mut read = |path: &str, shape: &[usize]| {
            weights.values(backend, &weights.name(&format!("{path}.bias")), shape)
        };
        let router = read(&router_path(config, layer), &[of.count])?;
        let [gate, up, down] = EXPERT_BIASES.map(|(_, path)| format!("layers.{layer}.{path}"));
        let mut of_experts = |path: &str, n| read(path, &[of.count, n]);
        let (gate, up) = (of_experts(&gate, of.feed_forward)?, of_experts(&up, of.feed_forward)?);
        Ok(Biases { experts: [gate, up, of_experts(&down, config.hidden)?], router })
    }
}
