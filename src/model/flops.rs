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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn windows_take_operations_away() {
        let config = |window: usize| {
            let json = json!({
                "architectures": ["MistralForCausalLM"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8,
                "num_hidden_layers": 2, "num_attention_heads": 2, "sliding_window": window,
            });
            Config::from_json(&json).unwrap()
        };
        let of = |window, row| training(&config(window), &LoraSpec::none(), row);
        assert_eq!(of(128, 128.0), of(4096, 128.0));
        // Of 128 tokens each sees 64 on average, with a window of 32 it sees 28: in 2 layers of 8 channels.
        assert_eq!(of(128, 128.0) - of(32, 128.0), 12.0 * 2.0 * 8.0 * (64.0 - 28.0));
    }
}
