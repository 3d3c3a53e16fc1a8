//! The end of a step, in place: computes the next parameters and moments from the sums. Nothing is written before all
//! next parameters are known to be finite: the largest parameter, moment and gradient show that, or, where they do not,
//! the update is computed once without storing. Memory costs more than arithmetic here: the mean gradient is never stored
//! as a whole, and no value is stored twice.
//!
//! The operations [`Sums::mean`], [`optim::norm`], [`optim::clip`] and [`optim::AdamW::update`] are done block by
//! block, in the same order within a block and over the blocks, so the bits are the same as those of the separate
//! operations. With `--update-bits` changes are rounded as well, which needs whole blocks.

use super::checkpoint::State;
use super::optim::{self, AdamW, BLOCK, Scalars};
use super::sum::Sums;
use crate::model::layout::Places;
use crate::numeric::coarse;
use crate::numeric::fixed::CELL;
use rayon::prelude::*;
use std::ops::Range;

/// Number of values per stretch; one stretch is passed on while the next one is computed.
pub const STRETCH: usize = 8 * CELL;

/// A stretch of the next parameters.
#[derive(Debug, Clone, Copy)]
pub struct Stretch<'a> {
    /// Index of the first value.
    pub from: usize,
    /// The next parameters.
    pub values: &'a [f32],
    /// Where changes are rounded (`--update-bits`): what was added to each parameter in f32; else empty.
    pub changes: &'a [f32],
}

/// Receives stretches of the next parameters in order.
pub type Made<'a> = &'a mut dyn FnMut(Stretch);

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

    /// Whether the largest values show that all next parameters are finite; no value of the gradient exceeds `gradient`.
    fn surely_finite(&self, state: &State, gradient: f64) -> bool {
        let AdamW { exp_avg, exp_avg_sq, residual, .. } = &state.optimizer;
        let parameter = optim::largest(&state.parameters) + optim::largest(residual);
        let moment = optim::largest(exp_avg) + gradient;
        let scalars = self.others.iter().map(|(_, scalars)| *scalars).chain([&self.scalars]);
        optim::finite_from_zero(exp_avg_sq)
            && scalars.into_iter().all(|s| optim::in_range(s, parameter, moment))
    }

    /// The first next parameter that is not finite, with its index.
    fn not_finite(&self, state: &State) -> Option<(usize, f32)> {
        let moments =
            state.optimizer.exp_avg.par_chunks(BLOCK).zip(state.optimizer.exp_avg_sq.par_chunks(BLOCK));
        let blocks = state.parameters.par_chunks(BLOCK).zip(moments).enumerate();
        blocks.find_map_first(|(index, (p, (m, v)))| {
            let (at, mut block, mut whole) = (index * BLOCK, [0.0; BLOCK], [0.0; BLOCK]);
            let gradient = self.gradient(at, p.len(), &mut block);
            let p = match state.optimizer.residual.get(at..at + p.len()) {
                Some(residual) => with_residual(p, residual, &mut whole),
                None => p,
            };
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
        p.par_chunks_mut(BLOCK).zip(moments).enumerate().for_each(|(index, (p, moments))| {
            self.store_block(from + index * BLOCK, p, moments);
        });
    }

    fn store_block(&self, at: usize, p: &mut [f32], (m, v): (&mut [f32], &mut [f32])) {
        let mut block = [0.0; BLOCK];
        let gradient = self.gradient(at, p.len(), &mut block);
        for (part, scalars) in self.parts(at..at + p.len()) {
            let own = part.start - at..part.end - at;
            let moments = (&mut m[own.clone()], &mut v[own.clone()]);
            optim::block(scalars, &mut p[own.clone()], &gradient[own], moments);
        }
    }

    /// The same with rounded changes. The optimizer updates the parameters with what rounding has left of earlier changes
    /// (error feedback, Seide et al. 2014); the parameters change by the rounded difference, and the rest is left.
    fn store_rounded(
        &self,
        from: usize,
        bits: u32,
        (p, m, v): (&mut [f32], &mut [f32], &mut [f32]),
        (residual, changes): (&mut [f32], &mut [f32]),
    ) {
        let moments = m.par_chunks_mut(BLOCK).zip(v.par_chunks_mut(BLOCK));
        let rounding = residual.par_chunks_mut(BLOCK).zip(changes.par_chunks_mut(BLOCK));
        let blocks = p.par_chunks_mut(BLOCK).zip(moments).zip(rounding).enumerate();
        blocks.for_each(|(index, ((p, moments), (residual, changes)))| {
            let mut whole = [0.0; BLOCK];
            let whole = &mut whole[..p.len()];
            with_residual(p, residual, whole);
            self.store_block(from + index * BLOCK, whole, moments);
            changes.iter_mut().zip(&*whole).zip(&*p).for_each(|((change, whole), p)| *change = whole - p);
            coarse::nearest(changes, bits);
            for (((p, residual), change), whole) in p.iter_mut().zip(residual).zip(&*changes).zip(&*whole) {
                *p += change;
                *residual = whole - *p;
            }
        });
    }
}

/// The parameters with what rounding has left of their changes.
fn with_residual<'a>(p: &[f32], residual: &[f32], whole: &'a mut [f32]) -> &'a [f32] {
    let whole = &mut whole[..p.len()];
    whole.iter_mut().zip(p).zip(residual).for_each(|((whole, p), residual)| *whole = p + residual);
    whole
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
    if !update.surely_finite(state, grad_norm)
        && let Some(bad) = update.not_finite(state)
    {
        return Err(bad);
    }
    state.step += 1;
    state.optimizer.step += 1;
    let bits = state.optimizer.options().update_bits;
    let AdamW { exp_avg, exp_avg_sq, residual, .. } = &mut state.optimizer;
    let moments = exp_avg.chunks_mut(STRETCH).zip(exp_avg_sq.chunks_mut(STRETCH));
    let stretches = state.parameters.chunks_mut(STRETCH).zip(moments).enumerate();
    // Without rounding there is no residual.
    let mut residuals = residual.chunks_mut(STRETCH);
    let (mut ready, mut spare) = (None::<(usize, &[f32], Vec<f32>)>, Vec::new());
    for (from, (p, (m, v))) in stretches.map(|(index, all)| (index * STRETCH, all)) {
        let (residual, mut changes) = (residuals.next(), std::mem::take(&mut spare));
        rayon::in_place_scope(|scope| {
            let (update, p, changes) = (&update, &mut *p, &mut changes);
            scope.spawn(move |_| match residual {
                None => update.store(from, (p, m, v)),
                Some(residual) => {
                    changes.resize(p.len(), 0.0);
                    update.store_rounded(from, bits, (p, m, v), (residual, changes));
                }
            });
            if let Some((from, values, changes)) = ready.take() {
                made(Stretch { from, values, changes: &changes });
                spare = changes;
            }
        });
        ready = Some((from, p, changes));
    }
    if let Some((from, values, changes)) = ready {
        made(Stretch { from, values, changes: &changes });
    }
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
            let mut see = |stretch: Stretch| {
                assert_eq!((stretch.from, stretch.changes), (made.len(), &[][..]), "in order");
                made.extend_from_slice(stretch.values);
            };
            let scalars = fast.optimizer.scalars(step, 1e-3, options.weight_decay);
            let usual = Update { sums: &sums, clip: None, scalars, others: Vec::new() };
            assert!(usual.surely_finite(&fast, means.grad_norm), "a usual state needs no second pass");
            update(&mut fast, &sums, (means.grad_norm, 1e-3), &Places::default(), &mut see).unwrap();
            assert!(made == fast.parameters, "all of them are shown");
            assert_eq!(bits(&slow), bits(&fast), "{len} values, {options:?}");
        }
    }

    /// Takes 20 steps with the same gradients, and returns the state and the largest change of a step.
    fn steps(start: &State, options: Options) -> (State, f32) {
        let len = start.parameters.len();
        let mut state = State::new(start.parameters.clone(), options);
        let mut largest = 0f32;
        for step in 1..=20 {
            let mut sums = Sums::new(len);
            sums.add_gradient(&draw(step, len), fixed::cap(3)).unwrap();
            sums.set_scalars(crate::train::sum::Scalars { weight: 3 << 40, ..Default::default() });
            let before = state.parameters.clone();
            let mut all = (Vec::new(), Vec::new());
            let see = &mut |stretch: Stretch| {
                assert_eq!(stretch.from, all.0.len(), "in order");
                all.0.extend_from_slice(stretch.values);
                all.1.extend_from_slice(stretch.changes);
            };
            update(&mut state, &sums, (1.0, 1e-3), &Places::default(), see).unwrap();
            assert!(all.0 == state.parameters, "all of them are shown");
            for ((now, before), change) in state.parameters.iter().zip(&before).zip(&all.1) {
                assert_eq!(
                    now.to_bits(),
                    (before + change).to_bits(),
                    "who adds the change has the parameters"
                );
                largest = largest.max(change.abs());
            }
        }
        (state, largest)
    }

    #[test]
    fn rounded_changes_stay_near_the_exact_ones() {
        for len in [1, 63, BLOCK + 65, STRETCH + 2 * CELL + 77] {
            let options = Options { weight_decay: 0.01, ..Options::default() };
            let start = State::new(draw(1, len), options);
            let (exact, _) = steps(&start, options);
            let (rounded, largest) = steps(&start, Options { update_bits: 6, ..options });
            assert!(exact.optimizer.residual.is_empty());
            assert_ne!(rounded.parameters, exact.parameters);
            let pairs = rounded.parameters.iter().zip(&exact.parameters).zip(&rounded.optimizer.residual);
            for ((rounded, exact), residual) in pairs {
                // Half a unit of the largest change is left; the moments do not depend on the parameters here.
                assert!(residual.abs() <= largest / 32.0, "{residual} of {largest}");
                assert!(
                    (rounded + residual - exact).abs() <= 2e-6 * exact.abs().max(0.1),
                    "{rounded} {exact}"
                );
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            let (again, _) = pool.install(|| steps(&start, Options { update_bits: 6, ..options }));
            assert!(again == rounded, "on three threads");
        }
    }

    #[test]
    fn a_rounded_step_that_is_not_finite_changes_nothing() {
        let len = BLOCK + 9;
        let mut state = State::new(draw(1, len), Options { update_bits: 4, ..Options::default() });
        state.parameters[BLOCK + 2] = f32::MAX;
        state.optimizer.residual[BLOCK + 2] = f32::MAX;
        let before = state.clone();
        let mut sums = Sums::new(len);
        sums.set_scalars(crate::train::sum::Scalars { weight: 1 << 40, ..Default::default() });
        let bad =
            update(&mut state, &sums, (1.0, 1e-3), &Places::default(), &mut |_| panic!("nothing is shown"));
        assert_eq!(bad, Err((BLOCK + 2, f32::INFINITY)));
        assert!(state == before);
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
            update(&mut state, &sums, (grad_norm, rate), &Places::default(), &mut |_| {}).unwrap();
            bits(&state).2
        };
        let mut state = State::new(draw(1, len), Options { ratio_of_b: 16.0, ..options });
        update(&mut state, &sums, (grad_norm, 1e-3), &places, &mut |_| {}).unwrap();
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
        let mut rounded = State::new(draw(1, len), Options { ratio_of_b: 16.0, update_bits: 6, ..options });
        update(&mut rounded, &sums, (grad_norm, 1e-3), &places, &mut |_| {}).unwrap();
        let with_rest = rounded.parameters.iter().zip(&rounded.optimizer.residual).map(|(p, rest)| p + rest);
        for (i, (found, exact)) in with_rest.zip(&state.parameters).enumerate() {
            assert!((found - exact).abs() <= 2e-7 * exact.abs().max(1e-3), "value {i}: {found} {exact}");
        }
        state.parameters[BLOCK + 1] = f32::NAN;
        let updated = update(&mut state, &sums, (grad_norm, 1e-3), &places, &mut |_| {});
        assert_eq!(updated.unwrap_err().0, BLOCK + 1);
    }

    fn bits(state: &State) -> (u64, u64, Vec<u32>) {
        let all = [&state.parameters, &state.optimizer.exp_avg, &state.optimizer.exp_avg_sq];
        (state.step, state.optimizer.step, all.into_iter().flatten().map(|v| v.to_bits()).collect())
    }

    /// States at and beyond the range of f32: no step is said to be finite that is not.
    #[test]
    fn steps_that_are_surely_finite_are_finite() {
        let (len, mut draws, mut seen) = (BLOCK + 3, Stream::new(&[9]), [0; 2]);
        for case in 0..400u64 {
            let options = Options {
                beta1: [0.9, 0.0][draws.below(2) as usize],
                beta2: [0.999, 0.0][draws.below(2) as usize],
                update_bits: [0, 8][draws.below(2) as usize],
                weight_decay: [0.0, 0.1, 1e3][draws.below(3) as usize],
                eps: [1e-8, 1e-30, 10.0, 0.0][draws.below(4) as usize],
                max_grad_norm: [0.0, 1.0][draws.below(2) as usize],
                ..Options::default()
            };
            let mut state = State::new(draw(case, len), options);
            let fields = &mut state.optimizer;
            (fields.exp_avg, fields.exp_avg_sq) = (draw(case + 1, len), draw(case + 2, len));
            fields.exp_avg_sq.iter_mut().for_each(|v| *v = v.abs());
            let fields =
                [&mut state.parameters, &mut fields.exp_avg, &mut fields.exp_avg_sq, &mut fields.residual];
            // Without rounding there is no residual.
            for values in fields.into_iter().filter(|values| !values.is_empty()) {
                let odd = [1.0, 1e30, f32::MAX, -f32::MAX, f32::INFINITY, f32::NAN, -1.0, 0.0];
                values[draws.below(len as u32) as usize] = odd[draws.below(8) as usize];
            }
            let mut sums = Sums::new(len);
            sums.add_gradient(&draw(case + 3, len), fixed::cap(3)).unwrap();
            sums.set_scalars(crate::train::sum::Scalars { weight: 3 << 40, ..Default::default() });
            let norm = Means::of(&sums).grad_norm;
            let rate = [1e-3, 1e9, 0.0][draws.below(3) as usize];
            let others = Vec::new();
            let clip = optim::coefficient(norm, options.max_grad_norm);
            let scalars = state.optimizer.scalars(1, rate, options.weight_decay);
            let update = Update { sums: &sums, clip, scalars, others };
            let (sure, bad) = (update.surely_finite(&state, norm), update.not_finite(&state));
            seen[usize::from(sure)] += 1;
            assert!(!sure || bad.is_none(), "case {case}: {bad:?}");
        }
        assert!(seen.iter().all(|count| *count > 20), "{seen:?}");
    }

    #[test]
    fn non_finite_parameter_is_named_and_changes_nothing() {
        let mut state = State::new(draw(1, 3 * BLOCK), Options::default());
        (state.parameters[BLOCK + 7], state.parameters[2 * BLOCK]) = (f32::INFINITY, f32::NAN);
        let before = state.clone();
        let mut sums = Sums::new(3 * BLOCK);
        sums.set_scalars(crate::train::sum::Scalars { weight: 1 << 40, ..Default::default() });
        let shown = &mut |_: Stretch| panic!("nothing is shown");
        let rates = (Means::of(&sums).grad_norm, 1e-3);
        let updated = update(&mut state, &sums, rates, &Places::default(), shown);
        assert_eq!(updated, Err((BLOCK + 7, f32::INFINITY)));
        assert_eq!(bits(&state), bits(&before));
    }
}
