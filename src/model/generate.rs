//! Decoding with a key/value cache: the prompt in one pass, then token by token. The draw of the n-th new token depends
//! only on the seed and n, so a prompt gives the same text on every machine and at every time.

use super::head::largest;
use super::pending::argmax;
use super::stage::{Fault, Output, Sampling, Session, Stage, TokenScore};
use crate::numeric::rng::Stream;

/// Session of a text that [`generate`] begins and ends.
const ALONE: Session = Session(u64::MAX);

/// Continues `prompt` by a whole model; `each` receives every new token at once and returns false to stop.
pub fn generate(
    model: &mut dyn Stage,
    prompt: &[u32],
    sampling: &Sampling,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<Vec<u32>, Fault> {
    let fault =
        |model: &dyn Stage, reason: &str| Fault::Device { device: model.class(), reason: reason.into() };
    if prompt.is_empty() {
        return Err(fault(model, "an empty prompt has nothing to continue"));
    }
    // Positions beyond the model's limit are not used.
    let most = sampling.max_new_tokens.min(model.longest_text(prompt.len()).saturating_sub(prompt.len()));
    let mut new: Vec<u32> = Vec::new();
    let mut result = Ok(());
    while new.len() < most {
        let ids = if new.is_empty() { prompt } else { &new[new.len() - 1..] };
        let token = match model.extend(ALONE, ids, None) {
            Ok(Output::Logits(logits)) => choose(&logits, sampling, new.len() as u64),
            Ok(_) => {
                result = Err(fault(model, "only a stage of all layers can generate alone"));
                break;
            }
            Err(fault) => {
                result = Err(fault);
                break;
            }
        };
        new.push(token);
        if !each(token) || sampling.stop.contains(&token) {
            break;
        }
    }
    model.end(ALONE);
    result.map(|()| new)
}

/// Returns the next token: the lowest id among the most probable at temperature 0, else a draw from the nucleus.
pub fn choose(logits: &[f32], sampling: &Sampling, index: u64) -> u32 {
    let best = argmax(logits);
    if sampling.temperature <= 0.0 {
        return best as u32;
    }
    let (top, temperature) = (f64::from(logits[best]), f64::from(sampling.temperature));
    let mut mass: Vec<(f64, u32)> =
        (0..).zip(logits).map(|(id, &l)| (libm::exp((f64::from(l) - top) / temperature), id)).collect();
    // The sort is stable: equal masses stay in the order of their ids.
    mass.sort_by(|a, b| b.0.total_cmp(&a.0));
    let total: f64 = mass.iter().map(|m| m.0).sum();
    let wanted = f64::from(sampling.top_p).clamp(0.0, 1.0) * total;
    let mut nucleus = 0.0;
    let kept = mass.iter().position(|m| {
        nucleus += m.0;
        nucleus >= wanted
    });
    let kept = &mass[..=kept.unwrap_or(mass.len() - 1)];
    let nucleus: f64 = kept.iter().map(|m| m.0).sum();
    let mut draw = f64::from(Stream::new(&[sampling.seed, index]).unit()) * nucleus;
    for (m, id) in kept {
        draw -= m;
        if draw < 0.0 {
            return *id;
        }
    }
    kept[kept.len() - 1].1
}

/// Returns the score of a token, with the `top` most probable ones. Sums are in f64.
pub fn score(logits: &[f32], token: u32, top: usize) -> TokenScore {
    let most = f64::from(logits[argmax(logits)]);
    let sum: f64 = logits.iter().map(|&l| libm::exp(f64::from(l) - most)).sum();
    let of = |id: u32| f64::from(logits[id as usize]) - most - libm::log(sum);
    TokenScore { token: of(token), top: largest(logits, top).into_iter().map(|id| (id, of(id))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_p: f32) -> Sampling {
        Sampling { max_new_tokens: 1, temperature, top_p, seed: 3, stop: Vec::new() }
    }

    #[test]
    fn draws_follow_the_distribution_inside_the_nucleus() {
        let logits = [1.0f32, 3.0, 2.0, 3.0, -1.0];
        assert_eq!(choose(&logits, &sampling(0.0, 1.0), 0), 1, "greedy takes the lowest of equals");
        assert!((0..99).all(|i| choose(&logits, &sampling(1.0, 0.0), i) == 1), "an empty nucleus is greedy");
        let n = 20_000;
        for (temperature, top_p, members) in [(1.0f32, 1.0, 5), (2.0, 1.0, 5), (1.0, 0.8, 3), (0.5, 0.6, 2)] {
            let mut counts = [0f64; 5];
            (0..n).for_each(|i| counts[choose(&logits, &sampling(temperature, top_p), i) as usize] += 1.0);
            let mut by_mass = [1usize, 3, 2, 0, 4];
            by_mass[members..].iter().for_each(|&id| assert_eq!(counts[id], 0.0));
            let kept = &mut by_mass[..members];
            let mass = |id: usize| f64::from(logits[id] / temperature).exp();
            let total: f64 = kept.iter().map(|&id| mass(id)).sum();
            for &mut id in kept {
                let p = mass(id) / total;
                let bound = 5.0 * (n as f64 * p * (1.0 - p)).sqrt() + 1.0;
                assert!(
                    (counts[id] - n as f64 * p).abs() < bound,
                    "id {id}: {} of {}",
                    counts[id],
                    n as f64 * p
                );
            }
        }
    }
}
