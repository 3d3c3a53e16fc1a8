//! Which experts compute which tokens. The router's logits come from the device; the choice, its weights and their gradient
//! are computed on the host, in f64 and in an order that the numbering of the experts does not change. Of equal logits the
//! expert with the lowest number is chosen first.

use super::config::Experts;
use std::ops::Range;

/// Pairs of a token and an expert that computes it, by expert, then by token: P = T times the chosen experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    /// Where the pairs of each expert begin, then P.
    bounds: Vec<usize>,
    /// The token of each pair.
    pub tokens: Vec<u32>,
    /// The weight of each pair.
    pub weights: Vec<f32>,
    /// For each choice, best first, the pair of each token.
    pub places: Vec<Vec<u32>>,
    /// The chosen experts of each token, best first.
    chosen: Vec<u32>,
    /// Probabilities of all experts [T, E], where the weights are not divided by their sum.
    probabilities: Vec<f64>,
}

impl Routes {
    /// Chooses for logits [T, E].
    pub fn of(logits: &[f32], experts: &Experts) -> Self {
        let (count, k) = (experts.count, experts.chosen);
        let mut chosen = Vec::with_capacity(logits.len() / count * k);
        let (mut weights, mut probabilities) = (Vec::new(), Vec::new());
        for logits in logits.chunks_exact(count) {
            // -0 equals 0.
            let key = |expert: u32| logits[expert as usize] + 0.0;
            let better = |&a: &u32, &b: &u32| key(b).total_cmp(&key(a)).then(a.cmp(&b));
            let mut order: Vec<u32> = (0..count as u32).collect();
            if experts.normalised && k < count {
                order.select_nth_unstable_by(k, better);
                order.truncate(k);
            }
            order.sort_unstable_by(better);
            // A logit that is no number stays visible, also that of an expert that is not chosen.
            let is_bad = logits.iter().any(|logit| logit.is_nan());
            let most = if is_bad { f64::NAN } else { f64::from(logits[order[0] as usize]) };
            let power = |&expert: &u32| libm::exp(f64::from(logits[expert as usize]) - most);
            // Of the chosen ones, or of all; best first.
            let powers: Vec<f64> = order.iter().map(power).collect();
            let sum: f64 = powers.iter().sum();
            weights.extend(powers[..k].iter().map(|power| (power / sum) as f32));
            if !experts.normalised {
                let first = probabilities.len();
                probabilities.resize(first + count, 0.0);
                for (&expert, power) in order.iter().zip(&powers) {
                    probabilities[first + expert as usize] = power / sum;
                }
            }
            chosen.extend_from_slice(&order[..k]);
        }
        Routes::placed(chosen, &weights, probabilities, experts)
    }

    /// An even choice for `t` tokens, for a device without data.
    pub fn even(t: usize, experts: &Experts) -> Self {
        let chosen: Vec<u32> = (0..t * experts.chosen).map(|pair| (pair % experts.count) as u32).collect();
        let weights = vec![1.0 / experts.chosen as f32; chosen.len()];
        let all = if experts.normalised { 0 } else { t * experts.count };
        Routes::placed(chosen, &weights, vec![1.0 / experts.count as f64; all], experts)
    }

    fn placed(chosen: Vec<u32>, of_choice: &[f32], probabilities: Vec<f64>, experts: &Experts) -> Self {
        let k = experts.chosen;
        let mut bounds = vec![0; experts.count + 1];
        chosen.iter().for_each(|&expert| bounds[expert as usize + 1] += 1);
        (0..experts.count).for_each(|expert| bounds[expert + 1] += bounds[expert]);
        let mut next = bounds.clone();
        let (mut tokens, mut weights) = (vec![0; chosen.len()], vec![0.0; chosen.len()]);
        let mut places = vec![vec![0; chosen.len() / k]; k];
        for (i, &expert) in chosen.iter().enumerate() {
            let pair = next[expert as usize];
            next[expert as usize] += 1;
            (tokens[pair], weights[pair]) = ((i / k) as u32, of_choice[i]);
            places[i % k][i / k] = pair as u32;
        }
        Routes { bounds, tokens, weights, places, chosen, probabilities }
    }

    /// P.
    pub fn pairs(&self) -> usize {
        self.tokens.len()
    }

    /// The expert of each pair.
    pub fn experts(&self) -> Vec<u32> {
        self.of_experts().flat_map(|(expert, pairs)| pairs.map(move |_| expert as u32)).collect()
    }

    /// The experts that have pairs, ascending, each with its pairs.
    pub fn of_experts(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let all = self.bounds.windows(2).map(|w| w[0]..w[1]).enumerate();
        all.filter(|(_, pairs)| !pairs.is_empty())
    }

    /// The gradient of the logits [T, E], given that of the weights of the pairs.
    pub fn gradient(&self, dweights: &[f32], experts: &Experts) -> Vec<f32> {
        let (count, k) = (experts.count, experts.chosen);
        let mut dlogits = vec![0.0; self.chosen.len() / k * count];
        for (t, (out, chosen)) in dlogits.chunks_exact_mut(count).zip(self.chosen.chunks_exact(k)).enumerate()
        {
            let pair = |choice: &Vec<u32>| choice[t] as usize;
            let of_pair = |pair: usize| (f64::from(self.weights[pair]), f64::from(dweights[pair]));
            let along: f64 = self.places.iter().map(pair).map(of_pair).map(|(w, dw)| w * dw).sum();
            if let Some(all) = self.probabilities.get(t * count..(t + 1) * count) {
                out.iter_mut().zip(all).for_each(|(out, p)| *out = (-p * along) as f32);
            }
            for (&expert, (w, dw)) in chosen.iter().zip(self.places.iter().map(pair).map(of_pair)) {
                out[expert as usize] = (w * (dw - along)) as f32;
            }
        }
        dlogits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::rng::Stream;

    /// With weights that are divided by their sum.
    fn experts(count: usize, chosen: usize) -> Experts {
        Experts { count, chosen, feed_forward: 1, normalised: true, sparse: vec![true] }
    }

    fn plain(count: usize, chosen: usize) -> Experts {
        Experts { normalised: false, ..experts(count, chosen) }
    }

    fn draws(key: u64, len: usize) -> Vec<f32> {
        let mut stream = Stream::new(&[5, key]);
        (0..len).map(|_| 4.0 * stream.unit() - 2.0).collect()
    }

    /// The weight of each expert for each token [T, E]; 0 where it is not chosen.
    fn dense(routes: &Routes, t: usize, count: usize) -> Vec<f32> {
        let mut out = vec![0.0; t * count];
        for (expert, pairs) in routes.of_experts() {
            for pair in pairs {
                out[routes.tokens[pair] as usize * count + expert] = routes.weights[pair];
            }
        }
        out
    }

    #[test]
    fn weights_are_the_softmax_of_the_best_experts() {
        let cases =
            [(experts(3, 2), [0.0, 0.731_058_6, 0.268_941_4]), (plain(3, 2), [0.0, 0.665_241, 0.244_728_5])];
        for (of, want) in cases {
            let routes = Routes::of(&[1.0, 3.0, 2.0], &of);
            let got = dense(&routes, 1, 3);
            assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-6), "{got:?}");
            assert_eq!((routes.pairs(), &routes.tokens[..]), (2, &[0, 0][..]));
            assert_eq!(routes.places, [[0], [1]], "the best one first");
        }
        let ties = Routes::of(&[7.0, 9.0, 9.0, 7.0, 9.0], &experts(5, 2));
        assert_eq!(dense(&ties, 1, 5), [0.0, 0.5, 0.5, 0.0, 0.0], "the lowest numbers");
    }

    #[test]
    fn a_bad_logit_makes_all_weights_of_its_token_bad() {
        for bad in [f32::NAN, -f32::NAN] {
            for of in [experts(3, 1), plain(3, 1)] {
                let routes = Routes::of(&[1.0, bad, 2.0, 1.0, 0.0, 2.0], &of);
                let of_token = |token| routes.tokens.iter().position(|t| *t == token).unwrap();
                assert!(routes.weights[of_token(0)].is_nan() && routes.weights[of_token(1)].is_finite());
            }
        }
    }

    #[test]
    fn the_numbering_of_experts_changes_no_bit_of_weights() {
        let (t, count) = (40, 11);
        let logits = draws(1, t * count);
        for experts in [experts(count, 3), plain(count, 3), experts(count, count)] {
            let routes = Routes::of(&logits, &experts);
            let moved = |i: usize| i / count * count + i % count * 7 % count;
            let mut other = vec![0.0; t * count];
            (0..t * count).for_each(|i| other[moved(i)] = logits[i]);
            let (want, got) = (dense(&routes, t, count), dense(&Routes::of(&other, &experts), t, count));
            assert!((0..t * count).all(|i| got[moved(i)].to_bits() == want[i].to_bits()));
        }
    }

    #[test]
    fn gradients_of_logits_are_central_differences() {
        for experts in [experts(6, 2), plain(6, 2), experts(6, 6), plain(6, 1)] {
            let (t, count) = (5, experts.count);
            let dy = draws(3, t * count);
            // Further apart than the differences.
            let logits: Vec<f32> =
                (0..t * count).map(|i| 0.3 * (i % count * 5 % count + i / count) as f32).collect();
            let routes = Routes::of(&logits, &experts);
            let dweights: Vec<f32> = routes
                .of_experts()
                .flat_map(|(expert, pairs)| pairs.map(move |pair| (expert, pair)))
                .map(|(expert, pair)| dy[routes.tokens[pair] as usize * count + expert])
                .collect();
            let got = routes.gradient(&dweights, &experts);
            let loss = |logits: &[f32]| -> f64 {
                let weights = dense(&Routes::of(logits, &experts), t, count);
                weights.iter().zip(&dy).map(|(w, dy)| f64::from(*w) * f64::from(*dy)).sum()
            };
            let moved = |i: usize, by: f32| {
                let mut logits = logits.clone();
                logits[i] += by;
                loss(&logits)
            };
            let h = 1.0 / 256.0;
            for (i, got) in got.into_iter().enumerate() {
                let slope = (moved(i, h) - moved(i, -h)) / f64::from(2.0 * h);
                assert!((slope - f64::from(got)).abs() < 1e-4, "{i}: {slope} {got}");
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_no_panic() {
        let experts = experts(3, 2);
        let routes = Routes::of(&[f32::NAN, 1.0, 2.0, f32::INFINITY, 0.0, f32::NEG_INFINITY], &experts);
        assert_eq!(routes.pairs(), 4);
        assert!(routes.weights.iter().any(|w| w.is_nan()), "a bad value stays visible");
        assert_eq!(Routes::of(&[], &experts).pairs(), 0);
    }
}
