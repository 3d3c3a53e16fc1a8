//! The end of a step, in place: computes the next parameters and moments from the sums. Nothing is written before all
//! next parameters are known to be finite: the update is computed once without storing, and then a second time. Memory
//! costs more than arithmetic here: the mean gradient is never stored as a whole, and no value is stored twice.
//!
//! The operations [`Sums::mean`], [`optim::norm`], [`optim::clip`] and [`optim::AdamW::update`] are done block by
//! block, in the same order within a block and over the blocks, so the bits are the same as those of the separate
//! operations.

use super::checkpoint::State;
use super::optim::{self, BLOCK, Scalars};
use super::sum::Sums;
use crate::model::layout::Places;
use crate::numeric::fixed::CELL;
use rayon::prelude::*;
use std::ops::Range;

/// Number of values per stretch; one stretch is passed on while the next one is computed.
const STRETCH: usize = 8 * CELL;

/// Receives stretches of the next parameters in order, each with the index of its first value.
pub type Made<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// Mean loss and gradient norm of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Means {
    /// Loss sum over weight.
    pub loss: f64,
    /// L2 norm of the mean gradient, before clipping.
    pub grad_norm: f64,
}

impl Means {
    /// The means of `sums`.
    pub fn of(sums: &Sums) -> Self {
        let blocks = (0..sums.len().div_ceil(BLOCK)).into_par_iter().map(|index| {
            let at = index * BLOCK;
            let mut mean = [0.0; BLOCK];
            let mean = &mut mean[..BLOCK.min(sums.len() - at)];
            sums.mean_of(at / CELL, at % CELL, mean);
            optim::squares(mean)
        });
        let squares: Vec<f64> = blocks.collect();
        Means { loss: sums.mean_loss(), grad_norm: squares.iter().sum::<f64>().sqrt() }
    }
}

/// Computes an update from sums.
struct Update<'a> {
    sums: &'a Sums,
    clip: Option<f32>,
    scalars: Scalars,
    /// Places with other scalars than these, ascending.
    others: Vec<(&'a Range<usize>, &'a Scalars)>,
}

impl Update<'_> {
    /// The clipped mean gradient of `len` values from index `at`.
    fn gradient<'b>(&self, at: usize, len: usize, block: &'b mut [f32; BLOCK]) -> &'b [f32] {
        let gradient = &mut block[..len];
        self.sums.mean_of(at / CELL, at % CELL, gradient);
        if let Some(c) = self.clip {
            gradient.iter_mut().for_each(|g| *g *= c);
        }
        gradient
    }

    /// Parts of the range with one learning rate each.
    fn parts(&self, range: Range<usize>) -> Vec<(Range<usize>, &Scalars)> {
        let (mut parts, mut at) = (Vec::new(), range.start);
        let first = self.others.partition_point(|(place, _)| place.end <= at);
        for (place, scalars) in self.others[first..].iter().take_while(|(place, _)| place.start < range.end) {
            parts.push((at..place.start.max(at), &self.scalars));
            at = place.end.min(range.end);
            parts.push((place.start.max(range.start)..at, *scalars));
        }
        parts.push((at..range.end, &self.scalars));
        parts.retain(|(part, _)| !part.is_empty());
        parts
    }

    /// The first next parameter that is not finite, with its index.
    fn not_finite(&self, state: &State) -> Option<(usize, f32)> {
        let moments =
            state.optimizer.exp_avg.par_chunks(BLOCK).zip(state.optimizer.exp_avg_sq.par_chunks(BLOCK));
        let blocks = state.parameters.par_chunks(BLOCK).zip(moments).enumerate();
        blocks.find_map_first(|(index, (p, (m, v)))| {
            let (at, mut block) = (index * BLOCK, [0.0; BLOCK]);
            let gradient = self.gradient(at, p.len(), &mut block);
            self.parts(at..at + p.len()).into_iter().find_map(|(part, scalars)| {
                let own = part.start - at..part.end - at;
                let values = (&p[own.clone()], &m[own.clone()], &v[own.clone()]);
                optim::not_finite(scalars, &gradient[own], values).map(|(i, value)| (part.start + i, value))
            })
        })
    }

    /// Updates a stretch that begins at index `from`.
    fn store(&self, from: usize, (p, m, v): (&mut [f32], &mut [f32], &mut [f32])) {
        let moments = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
        p.par_chunks_mut(BLOCK).zip(moments).enumerate().for_each(|(index, (p, (m, v)))| {
            let (at, mut block) = (from + index * BLOCK, [0.0; BLOCK]);
            let gradient = self.gradient(at, p.len(), &mut block);
            for (part, scalars) in self.parts(at..at + p.len()) {
                let own = part.start - at..part.end - at;
                let moments = (&mut m[own.clone()], &mut v[own.clone()]);
                optim::block(scalars, &mut p[own.clone()], &gradient[own], moments);
            }
        });
    }
}

/// Takes a step at learning rate `rate`: clips the mean gradient of `sums`, whose norm is `grad_norm`, and updates
/// parameters and moments.
///
/// The error is index and value of the first next parameter that is not finite; `state` is then unchanged and `made` was
/// not called. `made` runs on the calling thread, with one stretch while the next one is computed.
pub fn update(
    state: &mut State,
    sums: &Sums,
    (grad_norm, rate): (f64, f64),
    places: &Places,
    made: Made,
) -> Result<(), (usize, f32)> {
    assert_eq!(sums.len(), state.parameters.len(), "one layout");
    let clip = optim::coefficient(grad_norm, state.optimizer.options().max_grad_norm);
    let optim::Options { ratio_of_b: ratio, weight_decay, .. } = *state.optimizer.options();
    let of = |rate, decay| state.optimizer.scalars(state.optimizer.step + 1, rate, decay);
    let (of_b, of_bias) = (of(rate * ratio, weight_decay), of(rate * ratio, 0.0));
    let with_b = places.of_b.iter().filter(|_| ratio != 1.0).map(|place| (place, &of_b));
    let others = with_b.chain(places.of_bias.iter().map(|place| (place, &of_bias))).collect();
    let update = Update { sums, clip, scalars: of(rate, weight_decay), others };
    if let Some(bad) = update.not_finite(state) {
        return Err(bad);
    }
    state.step += 1;
    state.optimizer.step += 1;
    let (exp_avg, exp_avg_sq) = (&mut state.optimizer.exp_avg, &mut state.optimizer.exp_avg_sq);
    let moments = exp_avg.chunks_mut(STRETCH).zip(exp_avg_sq.chunks_mut(STRETCH));
    let stretches = state.parameters.chunks_mut(STRETCH).zip(moments).enumerate();
    let mut ready: Option<(usize, &[f32])> = None;
    for (from, (p, (m, v))) in stretches.map(|(index, all)| (index * STRETCH, all)) {
        rayon::in_place_scope(|scope| {
            scope.spawn(|_| update.store(from, (&mut *p, m, v)));
            ready.take().into_iter().for_each(|(from, values)| made(from, values));
        });
        ready = Some((from, p));
    }
    ready.into_iter().for_each(|(from, values)| made(from, values));
    Ok(())
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

    /// On any number of threads the combined passes give the bits of the four separate operations.
    #[test]
    fn step_in_place_has_the_bits_of_separate_operations() {
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
        for step in 1..4u64 {
            let mut sums = Sums::new(len);
            for i in 0..3 {
                sums.add_gradient(&draw(10 * step + i, len), fixed::cap(3)).unwrap();
            }
            let (loss, weight) = (77 << 40, (13 * i128::from(step)) << 40);
            sums.set_scalars(crate::train::sum::Scalars { loss, weight, targets: 3, ..Default::default() });

            let mut mean = sums.mean();
            let norm = optim::norm(&mean.gradient);
            optim::clip(&mut mean.gradient, norm, options.max_grad_norm);
            slow.optimizer.update(&mut slow.parameters, &mean.gradient, 1e-3);
            slow.step += 1;

            let means = Means::of(&sums);
            assert_eq!(means, Means { loss: mean.loss, grad_norm: norm });
            let mut made: Vec<f32> = Vec::new();
            let mut see = |at: usize, stretch: &[f32]| {
                assert_eq!(at, made.len(), "in order");
                made.extend_from_slice(stretch);
            };
            update(&mut fast, &sums, (means.grad_norm, 1e-3), &Places::default(), &mut see).unwrap();
            assert!(made == fast.parameters, "all of them are shown");
            assert_eq!(bits(&slow), bits(&fast), "{len} values, {options:?}");
        }
    }

    /// Every value has the bits of a step in which all values have its learning rate and weight decay.
    #[test]
    fn b_and_bias_learn_at_their_own_rates() {
        let len = STRETCH + 2 * CELL + 77;
        let of_b = vec![
            0..5,
            BLOCK - 3..BLOCK + 4,
            2 * BLOCK..5 * BLOCK + 1,
            STRETCH - 1..STRETCH + 9,
            len - 9..len - 7,
        ];
        let places = Places { of_b, of_bias: Some(len - 2..len) };
        let options = Options { weight_decay: 0.1, ..Options::default() };
        let start = State::new(draw(1, len), options);
        let mut sums = Sums::new(len);
        sums.add_gradient(&draw(2, len), fixed::cap(3)).unwrap();
        sums.set_scalars(crate::train::sum::Scalars { weight: 3 << 40, ..Default::default() });
        let grad_norm = Means::of(&sums).grad_norm;
        let at = |rate: f64, weight_decay: f64| {
            let mut state = State::new(start.parameters.clone(), Options { weight_decay, ..options });
            update(&mut state, &sums, (grad_norm, rate), &Places::default(), &mut |_, _| {}).unwrap();
            bits(&state).2
        };
        let mut state = State::new(draw(1, len), Options { ratio_of_b: 16.0, ..options });
        update(&mut state, &sums, (grad_norm, 1e-3), &places, &mut |_, _| {}).unwrap();
        let (slow, fast, kept) = (at(1e-3, 0.1), at(16e-3, 0.1), at(16e-3, 0.0));
        for (i, found) in bits(&state).2.into_iter().enumerate() {
            let among = |all: &[Range<usize>]| all.iter().any(|place| place.contains(&(i % len)));
            let want = match (among(&places.of_b), among(places.of_bias.as_slice())) {
                (true, _) => &fast,
                (_, true) => &kept,
                _ => &slow,
            };
            assert_eq!(found, want[i], "value {i}");
        }
        state.parameters[BLOCK + 1] = f32::NAN;
        let updated = update(&mut state, &sums, (grad_norm, 1e-3), &places, &mut |_, _| {});
        assert_eq!(updated.unwrap_err().0, BLOCK + 1);
    }

    fn bits(state: &State) -> (u64, u64, Vec<u32>) {
        let all = [&state.parameters, &state.optimizer.exp_avg, &state.optimizer.exp_avg_sq];
        (state.step, state.optimizer.step, all.into_iter().flatten().map(|v| v.to_bits()).collect())
    }

    #[test]
    fn non_finite_parameter_is_named_and_changes_nothing() {
        let mut state = State::new(draw(1, 3 * BLOCK), Options::default());
        (state.parameters[BLOCK + 7], state.parameters[2 * BLOCK]) = (f32::INFINITY, f32::NAN);
        let before = state.clone();
        let mut sums = Sums::new(3 * BLOCK);
        sums.set_scalars(crate::train::sum::Scalars { weight: 1 << 40, ..Default::default() });
        let shown = &mut |_, _: &[f32]| panic!("nothing is shown");
        let rates = (Means::of(&sums).grad_norm, 1e-3);
        let updated = update(&mut state, &sums, rates, &Places::default(), shown);
        assert_eq!(updated, Err((BLOCK + 7, f32::INFINITY)));
        assert_eq!(bits(&state), bits(&before));
    }
}
