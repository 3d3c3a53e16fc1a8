//! Number of operations of training, from shapes alone; speeds measured with one model are scaled by this number for
//! another. A multiplication and an addition count as two. The base is frozen, so its products are computed twice
//! (forward, and for the gradient of their input); the adapter's products three times.

use super::config::Config;
use super::layout;
use super::lora::{LoraSpec, MODULES};

/// Floating point operations per token of a training microbatch with rows of `row` tokens.
pub fn training(config: &Config, lora: &LoraSpec, row: f64) -> f64 {
    let modules = MODULES.iter().filter_map(|module| config.projection(module));
    let frozen: f64 = modules.map(|(n, k)| (n * k) as f64).sum::<f64>() * config.layers as f64;
    let outputs = config.labels.as_ref().map_or(config.vocab, |_| 0);
    let head = (outputs * config.hidden) as f64;
    let trained = layout::of(config, lora, 0..config.layers).len() as f64;
    // Scores and their weighted sum over the previous tokens: half of the row on average, or what is in the window.
    let seen = |window: &Option<usize>| window.map_or(row, |w| row.min(w as f64));
    let keys: f64 = config.windows.iter().map(seen).map(|w| w * (1.0 - w / (2.0 * row.max(1.0)))).sum();
    let attention = (config.heads.query * config.heads.size) as f64 * keys;
    4.0 * (frozen + head) + 6.0 * trained + 3.0 * 4.0 * attention
}
