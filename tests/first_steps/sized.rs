//! Recipes planned at the sizes of their models. The weights are a sparse file as large as the real one, with a correct
//! header: a plan that read the weights would find zeros, and take a long time.

use crate::cli_fixture::{Bench, stderr};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// A model's dimensions, from its config.json on the Hub.
struct Size {
    family: (&'static str, &'static str),
    layers: usize,
    hidden: usize,
    feed_forward: usize,
    /// Number of query heads and key-value heads, and the size of a head.
    heads: (usize, usize, usize),
    vocabulary: usize,
    positions: usize,
}

impl Size {
    /// Name, outputs and inputs of each product of a layer.
    fn products(&self) -> [(&'static str, usize, usize); 7] {
        let (c, f, (q, kv, d)) = (self.hidden, self.feed_forward, self.heads);
        [
            ("self_attn.q_proj", q * d, c),
            ("self_attn.k_proj", kv * d, c),
            ("self_attn.v_proj", kv * d, c),
            ("self_attn.o_proj", c, q * d),
            ("mlp.gate_proj", f, c),
            ("mlp.up_proj", f, c),
            ("mlp.down_proj", c, f),
        ]
    }

    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let c = self.hidden;
        let mut all = vec![
            ("model.embed_tokens.weight".to_string(), vec![self.vocabulary, c]),
            ("model.norm.weight".into(), vec![c]),
        ];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            all.extend(self.products().map(|(part, out, of)| (name(part), vec![out, of])));
            all.extend(["input_layernorm", "post_attention_layernorm"].map(|part| (name(part), vec![c])));
            if self.family.1 == "qwen3" {
                let norms = ["self_attn.q_norm", "self_attn.k_norm"];
                all.extend(norms.map(|part| (name(part), vec![self.heads.2])));
            }
        }
        all
    }

    /// Writes the demonstration's model with these dimensions.
    fn write(&self, bench: &Bench) {
        let Size { family, layers, hidden, feed_forward, heads, vocabulary, positions } = self;
        bench.model_with("base", "config.json", |config| {
            for (key, value) in [
                ("architectures", json!([family.0])),
                ("model_type", json!(family.1)),
                ("num_hidden_layers", json!(layers)),
                ("hidden_size", json!(hidden)),
                ("intermediate_size", json!(feed_forward)),
                ("num_attention_heads", json!(heads.0)),
                ("num_key_value_heads", json!(heads.1)),
                ("head_dim", json!(heads.2)),
                ("vocab_size", json!(vocabulary)),
                ("max_position_embeddings", json!(positions)),
            ] {
                config[key] = value;
            }
        });
        let (mut header, mut at) = (Map::new(), 0);
        for (name, shape) in self.tensors() {
            let end = at + 2 * shape.iter().product::<usize>();
            header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
            at = end;
        }
        let header = Value::from(header).to_string();
        let mut file = std::fs::File::create(bench.path("base/model.safetensors")).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len((8 + header.len() + at) as u64).unwrap();
    }
}

#[test]
fn recipes_are_planned_at_the_sizes_of_their_models() {
    let qwen = ("Qwen3ForCausalLM", "qwen3");
    let llama = ("LlamaForCausalLM", "llama");
    for (recipe, family, layers, hidden, feed_forward, heads, (vocabulary, positions)) in [
        ("llama-3.2-1b", llama, 16, 2048, 8192, (32, 8, 64), (128_256, 131_072)),
        ("qwen3-0.6b", qwen, 28, 1024, 3072, (16, 8, 128), (151_936, 40_960)),
        ("qwen3-4b", qwen, 36, 2560, 9728, (32, 8, 128), (151_936, 40_960)),
    ] {
        let size = Size { family, layers, hidden, feed_forward, heads, vocabulary, positions };
        let bench = Bench::new();
        size.write(&bench);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (base, out) = (bench.path("base"), bench.path("out"));
        let args = format!(
            "plan {} --config recipes/{recipe}.yaml -o {} --memory-limit 64GB --gpus cpu --json",
            base.display(),
            out.display()
        );
        let output = bench.command(&args).current_dir(root).output().unwrap();
        assert!(output.status.success(), "{recipe}: {}", stderr(&output));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rank = plan["adapter"]["rank"].as_u64().unwrap() as usize;
        let lora: usize = size.products().iter().map(|(_, out, of)| layers * rank * (out + of)).sum();
        assert_eq!(plan["adapter"]["trained_values"].as_u64(), Some(lora as u64), "{recipe}");
        let weights = plan["devices"][0]["memory_bytes"]["weights"].as_u64().unwrap() as f64;
        // Embeddings keep 16 bits; 4-bit blocks of 64 weights have a scale.
        let (table, products) = (
            (vocabulary * hidden) as f64,
            (layers * size.products().iter().map(|(_, out, of)| out * of).sum::<usize>()) as f64,
        );
        let bits = if plan["model"]["weights"].as_str().unwrap().contains("nf4") { 4.5 } else { 16.0 };
        let want = 2.0 * table + bits / 8.0 * products;
        assert!((weights / want - 1.0).abs() < 0.02, "{recipe}: {weights} bytes of weights, not {want}");
    }
}
