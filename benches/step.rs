//! Training tokens per second of SmolLM2-135M's shape (random bf16 weights, random ids): LoRA r 16 on the seven
//! projections, 4 x 256 tokens, every token supervised, forward, backward, exact sums, AdamW. Prints one JSON line in
//! the format of the peer, benches/peft_step.py; benches/step.sh runs both in turn.
//!
//! `cargo bench --bench step -- [--threads 2] [--steps 5] [--rows 4] [--length 256] [--micro 1024] [--dtype f32|bf16]
//! [--keep auto|everything|inputs|N|N,N,N] [--blocks Q4_K] [--hidden 576] [--feed-forward 1536] [--layers 30]
//! [--heads 9] [--kv-heads 3] [--vocab 49152] [--experts 0 --chosen 8] [--model llama|gemma3-270m] [--adapter NAME]`. With
//! --model gemma3-270m sizes are those of that model, whatever the other options say. With --adapter the adapter of wgpu whose
//! name contains NAME computes, and the line has the traffic of the last step. With --experts the model is a Qwen3-MoE with experts of
//! the inner size --feed-forward, and adapters on attention. With --hidden alone, heads have 64 numbers, and there are a third as
//! many key heads, or the next lower number that divides them. With --blocks all matrices are random blocks of that
//! type (K types need sizes in 256s). cpu_s is the median processor time of a step over all threads.

use finetune::backend::wgpu::{Options as Opening, Precision, adapters};
use finetune::backend::{Backend, Cpu, Fused, Target, Wgpu};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Decoder, Keep, initial_parameters};
use finetune::model::layout;
use finetune::model::lora::LoraSpec;
use finetune::model::memory::{self, Limit, Load};
use finetune::model::stage::{IGNORE, Microbatch, Output, Stage, Targets, Ticket, Want};
use finetune::numeric::block::{Block, Blocks};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::fixed;
use finetune::numeric::rng::Stream;
use finetune::numeric::tensor::{Tensor, Tensors};
use finetune::train::optim::{AdamW, Options};
use finetune::train::sum::Sums;
use serde_json::json;
use std::time::Instant;

/// Generated weights: uniform, of a size that keeps activations of size one.
struct Random(Config, Option<Block>);

/// Random bits, with scales that give weights of that size.
fn random_blocks(block: Block, (rows, cols): (usize, usize), size: f32) -> Blocks {
    let scales: &[(usize, f32)] = match block {
        Block::Q8_0 => &[(0, 1.0 / 127.0)],
        Block::Q4_0 => &[(0, 0.12)],
        Block::Q5_0 => &[(0, 0.06)],
        Block::Q4_1 => &[(0, 0.12), (2, -1.0)],
        Block::Q5_1 => &[(0, 0.06), (2, -1.0)],
        Block::Q2_K => &[(80, 0.1), (82, 0.15)],
        Block::Q3_K => &[(108, 0.02)],
        Block::Q4_K => &[(0, 0.004), (2, 0.03)],
        Block::Q5_K => &[(0, 0.002), (2, 0.03)],
        Block::Q6_K => &[(208, 0.0004)],
        Block::NF4 | Block::MXFP4 => &[],
    };
    let mut draws = Stream::new(&[rows as u64, cols as u64]);
    let mut bytes: Vec<u8> = (0..block.size_of(rows * cols)).map(|_| draws.bits() as u8).collect();
    for one in bytes.chunks_exact_mut(block.bytes()) {
        for &(at, scale) in scales {
            one[at..at + 2].copy_from_slice(&half::f16::from_f32(scale * size).to_le_bytes());
        }
        if block == Block::NF4 {
            one[..4].copy_from_slice(&size.to_le_bytes());
        }
        if block == Block::MXFP4 {
            one[0] = (size.log2().floor() + 125.0) as u8;
        }
    }
    Blocks::new((rows, cols), block, bytes.into()).unwrap_or_else(|| panic!("{cols} are not whole blocks"))
}

impl Random {
    /// The shape of a matrix of a layer.
    fn matrix(&self, name: &str) -> Option<(usize, usize)> {
        let path = name.strip_prefix("model.").unwrap_or(name).strip_suffix(".weight")?;
        let layer = path.strip_prefix("layers.")?.split('.').next()?.parse().ok()?;
        let found = layout::matrices(&self.0, layer).into_iter().find(|matrix| matrix.path == path);
        found.map(|matrix| matrix.shape)
    }
}

impl Tensors for Random {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let c = &self.0;
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        let shape = match module {
            "embed_tokens" => vec![c.vocab, c.hidden],
            "norm" => vec![c.hidden],
            _ if module.ends_with("layernorm") => vec![c.hidden],
            "q_norm" | "k_norm" => vec![c.heads.size],
            "lm_head" => return Ok(None),
            _ => match self.matrix(name) {
                Some((n, k)) => vec![n, k],
                None => return Ok(None),
            },
        };
        let mut draws = Stream::new(&[name.len() as u64, name.bytes().map(u64::from).sum()]);
        let size = 1.0 / (shape[shape.len() - 1] as f32).sqrt();
        let one = |d: &mut Stream| if shape.len() == 1 { 1.0 } else { size * (2.0 * d.unit() - 1.0) };
        let count = shape.iter().product::<usize>();
        let bytes = (0..count).flat_map(|_| half::bf16::from_f32(one(&mut draws)).to_le_bytes()).collect();
        Ok(Some(Tensor { shape, dtype: Dtype::Bf16, bytes: std::borrow::Cow::Owned(bytes) }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        let Some(block) = self.1 else { return Ok(None) };
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        let embedding = (module == "embed_tokens").then_some((self.0.vocab, self.0.hidden));
        let shape = embedding.or_else(|| self.matrix(name));
        Ok(shape.map(|shape| random_blocks(block, shape, 1.0 / (shape.1 as f32).sqrt())))
    }

    fn names(&self) -> Vec<String> {
        vec!["model.embed_tokens.weight".into()]
    }
}

fn batches(vocab: u32, (count, length): (usize, usize), micro: usize) -> Vec<Microbatch> {
    let mut draws = Stream::new(&[7]);
    let all: Vec<Vec<u32>> = (0..count).map(|_| (0..length).map(|_| draws.below(vocab)).collect()).collect();
    let per = (micro / length).max(1);
    let numbered: Vec<(u64, &Vec<u32>)> = (0..).zip(&all).collect();
    let batch = |rows: &[(u64, &Vec<u32>)]| Microbatch {
        step: 1,
        rows: rows.iter().map(|r| r.0).collect(),
        ids: rows.iter().flat_map(|r| r.1.iter().copied()).collect(),
        bounds: (0..=rows.len()).map(|i| (i * length) as u32).collect(),
        targets: Targets::Tokens(
            rows.iter().flat_map(|r| r.1[1..].iter().copied().chain([IGNORE])).collect(),
        ),
    };
    numbered.chunks(per).map(batch).collect()
}

fn peak_rss_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.split_whitespace().next().and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

/// Processor seconds of all threads of this process.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    tasks.filter_map(of).sum::<f64>() / 1e9
}

struct Arguments(Vec<String>);

impl Arguments {
    fn get(&self, name: &str, default: &str) -> String {
        let at = self.0.iter().position(|a| a == name);
        at.and_then(|i| self.0.get(i + 1)).cloned().unwrap_or_else(|| default.into())
    }
    fn number(&self, name: &str, default: &str) -> usize {
        let value = self.get(name, default);
        value.parse().unwrap_or_else(|_| panic!("{name} takes a number, not `{value}`"))
    }
}

/// The values that blocks keep: the choice of a run with free memory and without a limit, or the named policy.
fn keep(said: &str, (config, lora): (&Config, &LoraSpec), tokens: usize, device: Target) -> Keep {
    let number =
        |text: &str| text.parse().unwrap_or_else(|_| panic!("--keep auto, everything, inputs, N or N,N,N"));
    let counts: Vec<&str> = said.split(',').collect();
    match (said, &counts[..]) {
        ("auto", _) => {
            let load = Load { device, ..Load::of(config, lora, tokens, 0) };
            Limit::Free(u64::MAX).choose(load).unwrap_or_else(|e| panic!("{e}")).0
        }
        ("everything", _) => Keep::Everything,
        ("inputs", _) => Keep::Inputs,
        (_, &[all, narrow, attended]) => Keep::Parts([number(all), number(narrow), number(attended)]),
        (blocks, _) => Keep::Parts([number(blocks), 0, 0]),
    }
}

/// The model that the arguments describe.
fn model(arguments: &Arguments) -> Config {
    if arguments.get("--model", "llama") == "gemma3-270m" {
        return gemma3_270m();
    }
    let hidden = arguments.number("--hidden", "576");
    let heads = arguments.number("--heads", &(hidden / 64).max(1).to_string());
    // A third of the heads, or the next lower number that divides them.
    let shared = (1..=(heads / 3).max(1)).rev().find(|kv| heads.is_multiple_of(*kv)).unwrap_or(1);
    let size = if arguments.get("--heads", "").is_empty() { 64 } else { hidden / heads };
    let experts = arguments.number("--experts", "0");
    let class = if experts > 0 { "Qwen3MoeForCausalLM" } else { "LlamaForCausalLM" };
    Config::from_json(&json!({
        "architectures": [class], "num_experts": experts, "num_experts_per_tok": arguments.number("--chosen", "8"),
        "moe_intermediate_size": arguments.number("--feed-forward", "1536"), "norm_topk_prob": true,
        "hidden_act": "silu", "vocab_size": arguments.number("--vocab", "49152"),
        "hidden_size": hidden, "intermediate_size": arguments.number("--feed-forward", "1536"),
        "num_hidden_layers": arguments.number("--layers", "30"), "num_attention_heads": heads,
        "num_key_value_heads": arguments.number("--kv-heads", &shared.to_string()), "head_dim": size, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "tie_word_embeddings": true, "max_position_embeddings": 8192
    }))
    .unwrap_or_else(|e| panic!("{e}"))
}

fn gemma3_270m() -> Config {
    Config::from_json(&json!({
        "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262_144,
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": true,
        "max_position_embeddings": 32_768
    }))
    .unwrap_or_else(|e| panic!("{e}"))
}

/// Rank 16 on every module that can have an adapter.
fn adapter(config: &Config) -> LoraSpec {
    LoraSpec {
        rank: 16,
        alpha: 32.0,
        targets: config.family.modules().into_iter().map(String::from).collect(),
        seed: 1,
        ..LoraSpec::none()
    }
}

fn main() {
    let arguments = Arguments(std::env::args().collect());
    let threads = arguments.number("--threads", "2");
    let name = arguments.get("--adapter", "").to_lowercase();
    if name.is_empty() {
        let bf16 = arguments.get("--dtype", "f32") == "bf16";
        return measure(if bf16 { Cpu::bf16(threads) } else { Cpu::new(threads) }, &arguments);
    }
    let found = adapters().into_iter().find(|adapter| adapter.name().to_lowercase().contains(&name));
    let Some(adapter) = found else {
        println!("skipped: no adapter has {name} in its name");
        return;
    };
    let reduced = !adapter.is_software() && arguments.get("--dtype", "f16") != "f32";
    let precision = if reduced { Precision::F16 } else { Precision::F32 };
    let options = Opening { precision, ..Opening::default() };
    measure(Wgpu::open(&adapter, options).unwrap_or_else(|fault| panic!("{fault}")), &arguments);
}

/// Prints the line of a device.
fn measure<B: Fused>(device: B, arguments: &Arguments) {
    let (threads, steps) = (arguments.number("--threads", "2"), arguments.number("--steps", "5"));
    let micro = arguments.number("--micro", "1024");
    let shape = (arguments.number("--rows", "4"), arguments.number("--length", "256"));
    let blocks = arguments.get("--blocks", "none");
    let block =
        (blocks != "none").then(|| Block::named(&blocks).unwrap_or_else(|| panic!("no type {blocks}")));
    let config = model(arguments);
    let lora = adapter(&config);
    let tensors = Random(config.clone(), block);
    let layout = layout::of(&config, &lora, 0..config.layers);
    let flat = initial_parameters(&layout, &lora, &tensors).unwrap_or_else(|e| panic!("{e}"));
    let kept = keep(&arguments.get("--keep", "auto"), (&config, &lora), micro, device.target());
    let build = Build { keep: kept, ..Build::whole(&config) };
    let stage = Decoder::load(device, &config, &tensors, &lora, build).unwrap_or_else(|e| panic!("{e}"));
    let batches = batches(config.vocab as u32, shape, micro);
    let class = stage.class();
    let mut trainer = Trainer {
        stage,
        optim: AdamW::new(Options::default(), flat.len()),
        gradient: vec![0.0; flat.len()],
        sums: Sums::new(flat.len()),
        flat,
    };
    let mut before = trainer.stage.traffic();
    let mut step = |step| {
        before = trainer.stage.traffic();
        trainer.step(step, &batches)
    };
    let (mut times, mut spent): (Vec<f64>, Vec<f64>) = (0..steps + 2).map(&mut step).skip(2).unzip();
    let traffic = trainer.stage.traffic().since(&before);
    times.sort_by(f64::total_cmp);
    spent.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let flops = memory::flops(Load::of(&config, &lora, shape.1, 0), Keep::Everything).unwrap();
    let line = json!({
        "trainer": "finetune", "class": class, "blocks": blocks, "threads": threads, "rows": shape.0, "tokens": shape.1,
        "micro_batch_tokens": micro, "median_s": median, "best_s": times[0],
        "cpu_s": spent[spent.len() / 2], "tok_s": (shape.0 * shape.1) as f64 / median, "rss_mb": peak_rss_mb(),
        "kept": format!("{kept:?}"), "traffic": traffic, "flops_token": flops / shape.1 as f64
    });
    println!("{line}");
}

struct Trainer<B: Backend> {
    stage: Decoder<B>,
    flat: Vec<f32>,
    gradient: Vec<f32>,
    sums: Sums,
    optim: AdamW,
}

impl<B: Fused> Trainer<B> {
    /// One optimizer step; returns its seconds by the clock and of the processor.
    fn step(&mut self, step: usize, batches: &[Microbatch]) -> (f64, f64) {
        let (started, cpu) = (Instant::now(), cpu_seconds());
        self.sums.reset(self.flat.len());
        self.stage.set_parameters(&self.flat).unwrap_or_else(|e| panic!("{e}"));
        let (mut loss, mut targets, mut forward) = (0.0, 0, 0.0);
        for batch in batches {
            let begun = Instant::now();
            let output =
                self.stage.forward(batch, None, Want::Gradient(Ticket(0))).unwrap_or_else(|e| panic!("{e}"));
            forward += begun.elapsed().as_secs_f64();
            let Output::Loss(l) = output else { panic!("a loss was asked for") };
            loss += l.loss;
            targets += l.targets;
            self.stage.backward(Ticket(0), None, &mut self.gradient).unwrap_or_else(|e| panic!("{e}"));
            let cap = fixed::cap(batches.len());
            self.sums.add_gradient(&self.gradient, cap).unwrap_or_else(|e| panic!("{e:?}"));
            self.sums.add_loss(&l).unwrap_or_else(|e| panic!("{e:?}"));
        }
        let mean = self.sums.mean();
        self.optim.update(&mut self.flat, &mean.gradient, 2e-4);
        let seconds = started.elapsed().as_secs_f64();
        let (loss, spent) = (loss / targets as f64, cpu_seconds() - cpu);
        eprintln!(
            "step {step}: loss {loss:.4}, {seconds:.3} s ({spent:.3} s computing), of which forward {forward:.3}"
        );
        (seconds, spent)
    }
}
