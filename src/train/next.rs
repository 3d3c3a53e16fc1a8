//! The end of a step: from its sums to the next parameters, in two passes over memory that is kept between steps.
//! What [`Sums::mean`], [`optim::norm`], [`optim::clip`] and [`AdamW::update`] say one after the other is done here
//! block by block, in the same order within a block and the same order of blocks: to the same bits. The mean lies
//! where the next parameters will: it is made once, and needs no memory of its own.
//!
//! Nothing of the present state is touched: the next one is made beside it, and taken over by [`Next::commit`].

use super::checkpoint::State;
use super::optim::{self, AdamW, BLOCK, Moved};
use super::sum::Sums;
use crate::numeric::fixed::CELL;
use rayon::prelude::*;

/// Values that are handed on at a time while the next are being made.
const STRETCH: usize = 8 * CELL;

/// Takes stretches of the next parameters in order, each with the position of its first value.
pub type Made<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Means of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Means {
    /// Loss over weight.
    pub loss: f64,
    /// L2 norm of the mean gradient, before clipping.
    pub grad_norm: f64,
}

/// The state after a step that is being made.
#[derive(Debug)]
pub struct Next {
    /// The next parameters, once [`Next::update`] has made them; before that the mean gradient.
    pub parameters: Vec<f32>,
    optimizer: AdamW,
}

impl Next {
    /// Memory for what follows on `state`.
    pub fn new(state: &State) -> Self {
        let len = state.parameters.len();
        let optimizer = AdamW::new(*state.optimizer.options(), len);
        Next { parameters: vec![0.0; len], optimizer }
    }

    /// First pass: the one division, and the norm of what it gives.
    pub fn mean(&mut self, sums: &Sums) -> Means {
        assert_eq!(sums.cells().iter().map(Vec::len).sum::<usize>(), self.parameters.len(), "one layout");
        let blocks = self.parameters.par_chunks_mut(BLOCK).enumerate().map(|(index, mean)| {
            let at = index * BLOCK;
            sums.mean_of(at / CELL, at % CELL, mean);
            optim::squares(mean)
        });
        let squares: Vec<f64> = blocks.collect();
        Means { loss: sums.mean_loss(), grad_norm: squares.iter().sum::<f64>().sqrt() }
    }

    /// Second pass, over what [`Next::mean`] has left: clips the mean gradient of that norm, and makes parameters and
    /// moments after an update at `rate`. The error is the position of the first parameter that is not finite, and
    /// what it is; `made` has seen nothing from the stretch that it lies in on. It is called on this thread, with one
    /// stretch while the next is being made.
    pub fn update(
        &mut self,
        state: &State,
        grad_norm: f64,
        rate: f64,
        made: Made,
    ) -> Result<(), (usize, f32)> {
        let clip = optim::coefficient(grad_norm, state.optimizer.options().max_grad_norm);
        self.optimizer.step = state.optimizer.step + 1;
        let scalars = &state.optimizer.scalars(self.optimizer.step, rate);
        let AdamW { exp_avg, exp_avg_sq, .. } = &mut self.optimizer;
        let moments = exp_avg.chunks_mut(STRETCH).zip(exp_avg_sq.chunks_mut(STRETCH));
        let stretches = self.parameters.chunks_mut(STRETCH).zip(moments).enumerate();
        let mut ready: Option<(usize, &[f32])> = None;
        for (from, (p, (m, v))) in stretches.map(|(index, all)| (index * STRETCH, all)) {
            let mut result = Ok(());
            rayon::in_place_scope(|scope| {
                scope.spawn(|_| result = stretch(scalars, clip, (&mut *p, m, v), old(state, from)));
                ready.take().into_iter().for_each(|(from, values)| made(from, values));
            });
            result.map_err(|(at, value)| (from + at, value))?;
            ready = Some((from, p));
        }
        ready.into_iter().for_each(|(from, values)| made(from, values));
        Ok(())
    }

    /// Takes the next state over; its memory becomes that of the one after.
    pub fn commit(&mut self, state: &mut State) {
        std::mem::swap(&mut state.parameters, &mut self.parameters);
        std::mem::swap(&mut state.optimizer, &mut self.optimizer);
        state.step += 1;
    }
}

/// What a stretch from there on is made from, and all behind it.
fn old(state: &State, from: usize) -> Moved<&[f32]> {
    let AdamW { exp_avg, exp_avg_sq, .. } = &state.optimizer;
    (&state.parameters[from..], &exp_avg[from..], &exp_avg_sq[from..])
}

/// Makes a stretch, whose parameters are the mean gradient before.
fn stretch(
    scalars: &optim::Scalars,
    clip: Option<f32>,
    (p, m, v): Moved<&mut [f32]>,
    old: Moved<&[f32]>,
) -> Result<(), (usize, f32)> {
    let moments = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
    let old = old.0.par_chunks(BLOCK).zip(old.1.par_chunks(BLOCK)).zip(old.2.par_chunks(BLOCK));
    let blocks = p.par_chunks_mut(BLOCK).zip(moments).zip(old).enumerate();
    let bad = blocks.filter_map(|(index, ((p, (m, v)), ((old_p, old_m), old_v)))| {
        let mut mean = [0.0; BLOCK];
        let g = &mut mean[..p.len()];
        g.copy_from_slice(p);
        if let Some(c) = clip {
            g.iter_mut().for_each(|g| *g *= c);
        }
        optim::block_from(scalars, (&mut *p, m, v), g, (old_p, old_m, old_v));
        let at = p.iter().position(|p| !p.is_finite())?;
        Some((index * BLOCK + at, p[at]))
    });
    bad.min_by_key(|(at, _)| *at).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::fixed;
    use crate::numeric::rng::Stream;
    use crate::train::optim::Options;

    fn draw(seed: u64, len: usize) -> Vec<f32> {
        let mut draws = Stream::new(&[seed]);
        (0..len).map(|_| (draws.unit() - 0.5) * 2f32.powi(draws.below(20) as i32 - 12)).collect()
    }

    /// On any number of threads the two passes give the bits of the four operations that they stand for.
    #[test]
    fn two_passes_are_mean_norm_clip_and_update_to_the_bit() {
        for len in
            [0usize, 1, BLOCK - 1, BLOCK, CELL, CELL + BLOCK + 3, 2 * CELL + 5, STRETCH + 1, 2 * STRETCH + 9]
        {
            for (max_grad_norm, weight_decay) in [(1.0, 0.0), (0.0, 0.1), (1e9, 0.01)] {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    pool.install(|| {
                        check(len, Options { max_grad_norm, weight_decay, ..Options::default() })
                    });
                }
            }
        }
    }

    fn check(len: usize, options: Options) {
        let mut slow = State::new(draw(1, len), options);
        let mut fast = slow.clone();
        let mut next = Next::new(&fast);
        for step in 1..4u64 {
            let mut sums = Sums::new(len);
            for i in 0..3 {
                sums.add_gradient(&draw(10 * step + i, len), fixed::cap(3)).unwrap();
            }
            let (loss, weight) = (77 << 40, (13 * i128::from(step)) << 40);
            sums.set_scalars(crate::train::sum::Scalars { loss, weight, targets: 3 });

            let mut mean = sums.mean();
            let norm = optim::norm(&mean.gradient);
            optim::clip(&mut mean.gradient, norm, options.max_grad_norm);
            slow.optimizer.update(&mut slow.parameters, &mean.gradient, 1e-3);
            slow.step += 1;

            let means = next.mean(&sums);
            assert_eq!(means, Means { loss: mean.loss, grad_norm: norm });
            let mut made: Vec<f32> = Vec::new();
            let mut see = |at: usize, stretch: &[f32]| {
                assert_eq!(at, made.len(), "in order");
                made.extend_from_slice(stretch);
            };
            next.update(&fast, means.grad_norm, 1e-3, &mut see).unwrap();
            assert!(made == next.parameters, "all of them are shown");
            next.commit(&mut fast);
            assert_eq!(bits(&slow), bits(&fast), "{len} values, {options:?}");
        }
    }

    fn bits(state: &State) -> (u64, u64, Vec<u32>) {
        let all = [&state.parameters, &state.optimizer.exp_avg, &state.optimizer.exp_avg_sq];
        (state.step, state.optimizer.step, all.into_iter().flatten().map(|v| v.to_bits()).collect())
    }

    #[test]
    fn the_first_parameter_that_is_not_finite_is_named_and_the_state_stays() {
        let mut state = State::new(draw(1, 3 * BLOCK), Options::default());
        (state.parameters[BLOCK + 7], state.parameters[2 * BLOCK]) = (f32::INFINITY, f32::NAN);
        let (mut next, before) = (Next::new(&state), state.clone());
        let mut sums = Sums::new(3 * BLOCK);
        sums.set_scalars(crate::train::sum::Scalars { weight: 1 << 40, ..Default::default() });
        let means = next.mean(&sums);
        let update = next.update(&state, means.grad_norm, 1e-3, &mut |_, _| panic!("nothing is shown"));
        assert_eq!(update, Err((BLOCK + 7, f32::INFINITY)));
        assert_eq!(bits(&state), bits(&before));
    }
}
