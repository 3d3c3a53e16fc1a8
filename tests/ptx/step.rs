//! Time and memory of a training step on a card, for benches/first_contact.sh: models with the shapes of Qwen3-4B and
//! SmolLM2-135M, whose weights repeat one row of numbers, LoRA of rank 16 on all projections, 4 packed rows of 2048
//! tokens, blocks recomputed. The time is not asserted; without a card the test only runs a small step.

use crate::device::{device_at, device_bf16, switched};
use crate::profile;
use finetune::backend::cuda::{AttentionTrial, Driver, Trial};
use finetune::backend::{Backend, Cuda, Heads};
use finetune::families;
use finetune::model::config::{AttentionSpec, Config, Rope, RopeScaling};
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::memory::{self, Load};
use finetune::model::stage::{IGNORE, Microbatch, Stage, Targets};
use finetune::numeric::dtype::Dtype;
use finetune::numeric::rng::Stream;
use finetune::numeric::tensor::{Tensor, Tensors};
use std::time::Instant;

/// Weights for time measurements: every tensor starts with the same numbers.
pub struct Same {
    config: Config,
    bytes: Vec<u8>,
}

impl Same {
    pub fn new(config: Config) -> Self {
        let mut s = Stream::new(&[1, 2, 3]);
        let some: Vec<f32> = (0..1 << 16).map(|_| (s.unit() - 0.5) * 0.04).collect();
        let longest =
            config.vocab.max(config.feed_forward) * config.hidden.max(config.heads.query * config.heads.size);
        let bytes = Dtype::Bf16.narrow(&some).into_iter().cycle().take(2 * longest).collect();
        Same { config, bytes }
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let c = &self.config;
        if name.ends_with("embed_tokens.weight") {
            return Some(vec![c.vocab, c.hidden]);
        }
        if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") {
            return Some(vec![c.heads.size]);
        }
        if name.ends_with("norm.weight") {
            return Some(vec![c.hidden]);
        }
        let module = MODULES.iter().find(|m| name.ends_with(&format!("{m}.weight")))?;
        c.projection(0, module).map(|(n, k)| vec![n, k])
    }
}

impl Tensors for Same {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        Ok(self.shape(name).map(|shape| {
            let len = 2 * shape.iter().product::<usize>();
            Tensor { shape, dtype: Dtype::Bf16, bytes: self.bytes[..len].into() }
        }))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

pub fn qwen(layers: usize, vocab: usize, (hidden, feed_forward): (usize, usize), heads: Heads) -> Config {
    Config {
        wrapper: None,
        family: &families::QWEN3,
        vocab,
        hidden,
        feed_forward,
        experts: None,
        convolutions: None,
        delta_rules: None,
        layers,
        heads,
        max_positions: 4096,
        eps: 1e-6,
        rope: Rope { theta: 1e6, scaling: RopeScaling::Default },
        local_rope: None,
        tied: true,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        windows: vec![None; layers],
        rotated: vec![true; layers],
        rotary: heads.size,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits_scale: 1.0,
        score_scale: AttentionSpec::usual_scale(heads),
        soft_cap: None,
        labels: None,
        tags: false,
        tag_dropout: 0.0,
        numbers: false,
    }
}

pub fn packed(vocab: usize, rows: u32, length: u32) -> Microbatch {
    let t = rows * length;
    let ids: Vec<u32> = (0..t).map(|i| i.wrapping_mul(2_654_435_761) % vocab as u32).collect();
    let bounds = (0..=rows).map(|r| r * length).collect();
    let targets = (0..t).map(|i| if (i + 1) % length == 0 { IGNORE } else { ids[i as usize + 1] }).collect();
    Microbatch {
        step: 1,
        rows: (0..u64::from(rows)).collect(),
        ids,
        bounds,
        targets: Targets::Tokens(targets),
    }
}

/// The peak of an H100 (SXM) or H200 in bf16 by its data sheet, without sparsity.
const PEAK: f64 = 989e12;

/// Free bytes of the named card.
fn free() -> Option<u64> {
    finetune::backend::cuda::free(std::env::var("FINETUNE_PTX_DEVICE").ok()?.parse().ok()?)
}

fn smollm2() -> Config {
    let heads = Heads::new(9, 3, 64);
    Config { family: &families::LLAMA, eps: 1e-5, ..qwen(30, 49_152, (576, 1536), heads) }
}

/// Seconds of the third microbatch, which is one graph if graphs are available; its number of kernels and of
/// submissions.
fn time(device: Cuda<Box<dyn Driver>>, config: &Config, batch: &Microbatch) -> (f64, [u64; 2], bool) {
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 16, alpha: 32.0, targets, seed: 1, ..LoraSpec::none() };
    let keep = if switched("keep-everything") { Keep::Everything } else { Keep::Inputs };
    let build = Build { keep, ..Build::whole(config) };
    let (same, class, before) = (Same::new(config.clone()), device.class(), free());
    let mut stage = Decoder::load(device, config, &same, &lora, build).unwrap();
    let parameters: Vec<f32> = (0..stage.layout().len()).map(|i| (i % 17) as f32 * 1e-3).collect();
    stage.set_parameters(&parameters).unwrap();
    let mut gradient = vec![0.0; parameters.len()];
    (0..2).for_each(|_| drop(stage.gradient(batch, &mut gradient).unwrap()));
    profile::reset();
    let (began, sent) = (Instant::now(), stage.traffic());
    stage.gradient(batch, &mut gradient).unwrap();
    let (seconds, tokens) = (began.elapsed().as_secs_f64(), batch.ids.len() as f64);
    if switched("profile") {
        profile::print();
    }
    let rows = batch.rows.len();
    let row = memory::flops(Load::of(config, &lora, batch.ids.len() / rows, 0), Keep::Everything).unwrap();
    let rate = row * rows as f64 / seconds;
    let (peak, used) = (PEAK / 1e12, rate / PEAK);
    println!(
        "timing {class} step: {:.0} tokens/s, {:.1} TFLOP/s of the model's, {used:.3} of {peak} (an H100's or H200's)",
        tokens / seconds,
        rate / 1e12
    );
    // Including weights, spare memory, graphs and compiled kernels.
    if let (Some(before), Some(after)) = (before, free()) {
        println!(
            "timing {class} step: {:.2} GB of the card taken",
            before.saturating_sub(after) as f64 / 1e9
        );
    }
    let taken = stage.traffic().since(&sent);
    (seconds, [taken.dispatches, taken.submissions], gradient.iter().all(|g| g.is_finite()))
}

#[test]
fn a_small_step_goes_through() {
    let config = qwen(2, 50, (32, 48), Heads::new(2, 1, 16));
    let Some(device) = device_bf16() else { return };
    let (_, [launched, _], finite) = time(device, &config, &packed(50, 2, 9));
    assert!(finite && launched > 50, "{launched} launches");
}

#[test]
fn step() {
    if std::env::var_os("FINETUNE_PTX_DEVICE").is_none() {
        println!("skipped: no card is named (FINETUNE_PTX_DEVICE)");
        return;
    }
    let qwen3 = qwen(36, 151_936, (2560, 9728), Heads::new(32, 8, 128));
    for (name, config) in [("qwen3-4b", qwen3), ("smollm2-135m", smollm2())] {
        match device_at((8, 0), 0).bf16() {
            Ok(device) => {
                let device = match switched("no-wgmma") {
                    true => device,
                    false => device.sm90a(Trial::default()).attention_sm90a(AttentionTrial::default()),
                };
                let (seconds, [launched, sent], finite) =
                    time(device, &config, &packed(config.vocab, 4, 2048));
                println!(
                    "timing {name}: {seconds:.3} s, {launched} kernels, sent {sent} times, finite: {finite}"
                );
            }
            Err(why) => println!("skipped: {why}"),
        }
    }
}
