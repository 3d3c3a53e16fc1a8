//! Decoding with a key/value cache: the prompt in one pass, then token by token. The draw of the n-th new token depends
//! only on the seed and n, so a prompt gives the same text on every machine and at every time.

use super::block::Cache;
use super::decoder::Decoder;
use super::head::{Below, argmax};
use super::linear::Batch;
use super::stage::{Generate, Sampling};
use crate::backend::{Fault, Fused, TokenRows, view, view_mut};
use crate::numeric::rng::Stream;

/// Initial cache capacity in tokens after the prompt; the capacity doubles when it is full.
const ROOM: usize = 256;

impl<B: Fused> Generate for Decoder<B> {
    fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        each: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, Fault> {
        if prompt.is_empty() {
            return Err(self.fault("an empty prompt has nothing to continue"));
        }
        self.check_ids(prompt)?;
        // Positions beyond the model's limit are not used.
        let room = self.config.longest_row().saturating_sub(prompt.len());
        let most = sampling.max_new_tokens.min(room);
        let mut capacity = prompt.len() + most.min(ROOM);
        self.rotations.reach(&mut self.backend, capacity);
        let mut caches: Vec<_> =
            self.blocks.iter().map(|block| block.cache(&mut self.backend, capacity)).collect();
        let mut new = Vec::new();
        let mut result = Ok(());
        while new.len() < most {
            let ids = if new.is_empty() { prompt } else { &new[new.len() - 1..] };
            if prompt.len() + new.len() > capacity {
                capacity = (2 * capacity).min(prompt.len() + most);
                self.rotations.reach(&mut self.backend, capacity);
                for (block, cache) in self.blocks.iter().zip(&mut caches) {
                    block.grow(&mut self.backend, cache, capacity);
                }
            }
            match self.next_logits(ids, &mut caches) {
                Ok(logits) => new.push(choose(&logits, sampling, new.len() as u64)),
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
            let token = new[new.len() - 1];
            if !each(token) || sampling.stop.contains(&token) {
                break;
            }
        }
        for cache in caches {
            self.backend.recycle(cache.k);
            self.backend.recycle(cache.v);
        }
        result.map(|()| new)
    }
}

impl<B: Fused> Decoder<B> {
    /// Returns the logits after `ids`, which follow the cached tokens.
    fn next_logits(&mut self, ids: &[u32], caches: &mut [Cache<B::Memory>]) -> Result<Vec<f32>, Fault> {
        let (t, c) = (ids.len(), self.config.hidden);
        let (Some(table), Some(head)) = (&self.embedding, &self.head) else {
            return Err(self.fault("only a stage of all layers can generate"));
        };
        let past = caches.first().map_or(0, |cache| cache.len) as u32;
        let tokens = self.backend.tokens(TokenRows { ids, bounds: &[0, t as u32], past });
        let mut x = self.backend.memory(t * c);
        self.backend.embed(view_mut(&mut x, t, c), table, &tokens);
        let (params, rotations) = (&self.params, &self.rotations);
        let batch = Batch { rows: t, tokens: &tokens, params, rotations, dropout: None };
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.decode(&mut self.backend, x, cache, &batch);
        }
        let below = Below { hidden: view(&x, t, c), params: &self.params, embedding: Some(table) };
        let logits = head.logits(&mut self.backend, below, &[t as u32 - 1]);
        self.backend.recycle(x);
        logits
    }
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
