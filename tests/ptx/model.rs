//! A whole model on the interpreter, from its weights to the gradient that is read back. Unlike tests of single ops
//! this shows that ops fit together, that no op reads memory that another one left unwritten, and that training ends
//! where the CPU's does.

use crate::case::{Case, golden};
use crate::device::{device, device_at, device_with_at};
use crate::files;
use crate::step::{Same, packed, qwen};
use crate::train;
use finetune::backend::cuda::{Driver, Flash};
use finetune::backend::{Backend, Cpu, Cuda, Fused, Heads};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::stage::{LossSums, Microbatch, Stage};
use finetune::numeric::rng::Stream;
use finetune::train::optim::{self, AdamW, Options};

/// The case of that name, with dropout, unlike PEFT's numbers.
fn open(name: &str, dropout: f32) -> Case {
    let mut case = Case::open(golden().iter().find(|dir| dir.ends_with(name)).unwrap());
    case.lora.dropout = dropout;
    case
}

fn load<B: Fused>(backend: B, case: &Case, keep: Keep) -> Decoder<B> {
    let classes = case.config.labels.as_ref().map(Vec::len);
    let class_weights = classes.map(|n| (0..n).map(|i| 0.5 + i as f32).collect());
    let build = Build { keep, class_weights, ..Build::whole(&case.config) };
    Decoder::load(backend, &case.config, &*case.tensors, &case.lora, build).unwrap()
}

/// Loss and gradient of the case's first rows, with a trained adapter.
fn gradient(stage: &mut dyn Stage, case: &Case) -> (LossSums, Vec<f32>) {
    stage.set_parameters(&case.adapter("adapter_final")).unwrap();
    let mut gradient = vec![f32::NAN; stage.layout().len()];
    let sums = stage.gradient(&case.microbatch(0, 3), &mut gradient).unwrap();
    (sums, gradient)
}

/// The norm of the difference of two vectors, relative to the second.
fn off(got: &[f32], want: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    apart / norm(&mut want.iter().map(|w| f64::from(*w)))
}

/// Written so that NaN fails.
fn near(name: &str, got: &(LossSums, Vec<f32>), want: &(LossSums, Vec<f32>), (loss, grad): (f64, f64)) {
    let (l, g) = ((got.0.loss / want.0.loss - 1.0).abs(), off(&got.1, &want.1));
    println!("{name}: loss off by {l:e}, gradient by {g:e}");
    assert!(l <= loss, "{name}: loss {} for {}", got.0.loss, want.0.loss);
    assert!(g <= grad, "{name}: a gradient off by {g:e} of its length");
    assert_eq!((got.0.targets, got.0.weight), (want.0.targets, want.0.weight), "{name}");
}

/// Streamed layers take the memory of those before them; two microbatches go through each of them together.
#[test]
fn streamed_layers_have_the_bits_of_resident_ones() {
    let f32 = || Some(device(0));
    for (name, open_device) in [("qwen3", &f32 as &dyn Fn() -> _), ("llamacls", &|| bf16(0))] {
        let case = open(name, 0.3);
        let batches = [case.microbatch(0, 2), case.microbatch(1, 3), case.microbatch(2, 1)];
        let load = |device, (streamed, group)| {
            let build = Build { keep: Keep::Inputs, streamed, group, ..Build::whole(&case.config) };
            Decoder::load(device, &case.config, &case.tensors, &case.lora, build).unwrap()
        };
        let all = |stage: &mut Decoder<Cuda<Box<dyn Driver>>>| {
            stage.set_parameters(&case.adapter("adapter_final")).unwrap();
            let (mut got, mut next) = (Vec::new(), batches.iter().cloned());
            let each = &mut |_, sums: &LossSums, flat: &[f32]| got.push((sums.clone(), flat.to_vec()));
            stage.gradients(&mut || next.next(), each).unwrap();
            got
        };
        let (Some(one), Some(two)) = (open_device(), open_device()) else { continue };
        let expected = all(&mut load(one, (0, 1)));
        let mut stage = load(two, (case.config.layers, 2));
        assert!(all(&mut stage) == expected, "{name}");
        let made = stage.traffic().made;
        assert!(all(&mut stage) == expected, "{name}, again");
        assert_eq!(stage.traffic().made, made, "{name}: memory is made in the steady state");
    }
}

/// On tensor cores, if the device has them.
fn bf16(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((8, 0), order).bf16().ok();
    if device.is_none() {
        println!("skipped: no tensor cores for bf16");
    }
    device
}

#[test]
fn a_whole_model_has_the_gradient_of_the_cpu() {
    // Biases; norms of heads; a classifier with class weights; windows; GeGLU and scaled embeddings; experts, and one of all tokens;
    // convolutions; delta rules; trained rows of tokens; adapters on embedding and head; sinks, and experts in MXFP4.
    for name in [
        "llama",
        "qwen2",
        "qwen3",
        "llamacls",
        "mistralwin",
        "gemma3",
        "gemma3cls",
        "granite",
        "granite4",
        "granite4nope",
        "glm4",
        "phi3",
        "phi3longer",
        "qwen3moe",
        "qwen3moeone",
        "lfm2",
        "lfm2taps",
        "qwen35",
        "qwen35one",
        "qwen35moe",
        "tokens",
        "tokensboth",
        "tokensweighted",
        "ends",
        "endscls",
        "gptossmx",
    ] {
        let case = open(name, 0.3);
        let want = gradient(&mut load(Cpu::new(1), &case, Keep::Everything), &case);
        let mut stage = load(device(0), &case, Keep::Everything);
        let got = gradient(&mut stage, &case);
        near(name, &got, &want, (1e-4, 1e-4));

        let made = stage.traffic().made;
        assert!(gradient(&mut stage, &case) == got, "{name}: the same microbatch gives the same bits");
        assert_eq!(stage.traffic().made, made, "{name}: memory is made in the steady state");
        let other = gradient(&mut load(device(7), &case, Keep::Inputs), &case);
        assert!(other == got, "{name}: bits depend on the order of warps, or on what blocks keep");
    }
}

#[test]
fn a_whole_model_on_tensor_cores_is_near() {
    // Heads of 10 use attention in f32, and dropout uses adapters in f32 in the backward pass. Heads of 8 (six query
    // heads, two key heads) without dropout use every kernel for tensor cores, within a window in olmo3.
    for (name, dropout) in [
        ("qwen3", 0.3),
        ("llama", 0.3),
        ("llama", 0.0),
        ("olmo3", 0.0),
        ("gemma3", 0.0),
        ("glm4", 0.3),
        ("qwen3moe", 0.0),
        ("lfm2", 0.0),
        ("gptoss", 0.0),
    ] {
        let case = open(name, dropout);
        let want = gradient(&mut load(Cpu::new(1), &case, Keep::Everything), &case);
        let (Some(device), Some(other)) = (bf16(0), bf16(7)) else { return };
        let got = gradient(&mut load(device, &case, Keep::Everything), &case);
        near(&format!("{name} in bf16, dropout {dropout}"), &got, &want, (1e-2, 5e-2));
        let other = gradient(&mut load(other, &case, Keep::Inputs), &case);
        assert!(other == got, "{name}: bits depend on the order of warps, or on what blocks keep");
    }
}

/// In the f16 class, if the device has it.
fn f16(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = Some(device_at((7, 5), order).f16()).filter(|d| d.class().contains("-f16"));
    if device.is_none() {
        println!("skipped: no f16 class");
    }
    device
}

/// Products with frozen matrices on f16 tensor cores, everything else in the baseline's f32.
#[test]
fn a_whole_model_in_f16_is_near() {
    for name in ["qwen2", "llamacls"] {
        let case = open(name, 0.3);
        let want = gradient(&mut load(Cpu::new(1), &case, Keep::Everything), &case);
        let (Some(device), Some(other)) = (f16(0), f16(7)) else { return };
        let mut stage = load(device, &case, Keep::Everything);
        let got = gradient(&mut stage, &case);
        near(&format!("{name} in f16"), &got, &want, (1e-3, 5e-3));
        let made = stage.traffic().made;
        assert!(gradient(&mut stage, &case) == got, "{name}: the same microbatch gives the same bits");
        assert_eq!(stage.traffic().made, made, "{name}: memory is made in the steady state");
        let exact = gradient(&mut load(device_at((7, 5), 0), &case, Keep::Everything), &case);
        assert!(exact != got, "{name}: nothing is rounded");
        let other = gradient(&mut load(other, &case, Keep::Inputs), &case);
        assert!(other == got, "{name}: bits depend on the order of warps, or on what blocks keep");
    }
}

/// Loss and gradient of a microbatch, with an adapter of rank 4 on all projections.
fn of<B: Fused>(backend: B, config: &Config, same: &Same, batch: &Microbatch) -> (LossSums, Vec<f32>) {
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, targets, seed: 1, ..LoraSpec::none() };
    let build = Build { keep: Keep::Inputs, ..Build::whole(config) };
    let mut stage = Decoder::load(backend, config, same, &lora, build).unwrap();
    let mut numbers = Stream::new(&[4]);
    let parameters: Vec<f32> = (0..stage.layout().len()).map(|_| 0.1 * (numbers.unit() - 0.5)).collect();
    stage.set_parameters(&parameters).unwrap();
    let mut gradient = vec![f32::NAN; parameters.len()];
    let sums = stage.gradient(batch, &mut gradient).unwrap();
    (sums, gradient)
}

/// Attention of Gemma's heads on tensor cores, in a layer with a window and in one without.
#[test]
fn a_whole_model_with_heads_of_256_is_near() {
    let config = Config { windows: vec![Some(9), None], ..qwen(2, 60, (32, 48), Heads::new(2, 1, 256)) };
    let (same, batch) = (Same::new(config.clone()), packed(config.vocab, 2, 23));
    let (Some(device), Some(other)) = (bf16(0), bf16(7)) else { return };
    let want = of(Cpu::new(1), &config, &same, &batch);
    let got = of(device, &config, &same, &batch);
    near("heads of 256", &got, &want, (1e-2, 5e-2));
    assert!(of(other, &config, &same, &batch) == got, "bits depend on the order of warps");
    let whole = Config { windows: vec![None; 2], ..config };
    let without = of(Cpu::new(1), &whole, &same, &batch);
    assert!(off(&without.1, &want.1) > 0.2, "the window has an effect");
}

/// A change of a file: the old text and the new text.
type Change = (&'static str, &'static str, &'static str);

/// The bf16 class of a card of capability 9.0, with or without attention by wgmma: loss and gradient are near the
/// CPU's, and within `below` of mma's; each of the changes must be detected.
fn by_wgmma(heads: Heads, flash: Flash, below: (f64, f64), changes: &[Change]) {
    let config = qwen(1, 260, (256, 264), heads);
    let (same, batch) = (Same::new(config.clone()), packed(config.vocab, 2, 66));
    let on = |order| {
        let device = device_at((9, 0), order).bf16().ok()?.untried().attending(flash);
        Some(device).filter(|d| d.class().contains("wgmma"))
    };
    let (Some(device), Some(other), Some(mma)) = (on(0), on(7), bf16(0)) else {
        return println!("skipped: no sm_90a");
    };
    let name = device.class();
    let want = of(Cpu::new(1), &config, &same, &batch);
    let got = of(device, &config, &same, &batch);
    near(&name, &got, &want, (1e-2, 5e-2));
    let mma = of(mma, &config, &same, &batch);
    near(&format!("{name}, for mma"), &got, &mma, below);
    for &(file, from, to) in changes {
        let text = files::read(file).text.replace(from, to);
        let changed = device_with_at((9, 0), (file, &text), 0).bf16().unwrap().untried().attending(flash);
        let changed = of(changed, &config, &same, &batch);
        assert!(off(&changed.1, &got.1) > 1e-3, "{file}: what is computed by wgmma is seen");
    }
    assert!(of(other, &config, &same, &batch) == got, "bits depend on the order of warps");
}

/// Large products by wgmma, whose sums equal those of mma up to rounding in f32, and the rest unchanged. The injected
/// fault omits most of the adapters' rank, which has no effect if mma computes.
#[test]
fn a_whole_model_by_wgmma_is_near() {
    let change = ("lora_linear_sm90a.ptx", "min.u32 %chunk, %rest, 16", "min.u32 %chunk, %rest, 1");
    by_wgmma(Heads::new(4, 4, 64), Flash::default(), (1e-4, 1e-3), &[change]);
}

/// Attention by wgmma too, whose probabilities are rounded under the maxima of other tiles.
#[test]
fn a_whole_model_with_attention_by_wgmma_is_near() {
    let changes = [
        ("attention_sm90a.ptx", "add.f32 %l1, %l1, %sum", "mov.f32 %l1, %l1"),
        ("attention_grad_sm90a.ptx", "0fBFB8AA3B", "0fBF317218"),
    ];
    let flash = Flash { forward: true, backward: true };
    by_wgmma(Heads::new(2, 1, 128), flash, (1e-3, 1e-2), &changes);
}

#[test]
fn training_gives_what_peft_gives() {
    // Four steps each.
    for name in ["llama", "qwen3", "llamacls", "mistralwin", "gemma3", "phi3"] {
        let case = open(name, 0.0);
        let build = Build::whole(&case.config);
        let mut stage = Decoder::load(device(0), &case.config, &case.tensors, &case.lora, build).unwrap();
        println!("{name}: {:?}", train::train(&case, &mut stage, &train::CPU));
    }
}

/// The mean loss of each of 30 steps with two rows each.
fn thirty<B: Backend + Fused>(backend: B, case: &Case) -> Vec<f64> {
    let mut stage = load(backend, case, Keep::Everything);
    let mut parameters = case.adapter("adapter_init");
    let mut adamw = AdamW::new(Options::default(), parameters.len());
    let mut gradient = vec![0.0; parameters.len()];
    let mut step = |step: usize| {
        stage.set_parameters(&parameters).unwrap();
        let batch = case.microbatch(2 * step % 16, 2);
        let sums = stage.gradient(&batch, &mut gradient).unwrap();
        gradient.iter_mut().for_each(|g| *g = (f64::from(*g) / sums.weight) as f32);
        let norm = optim::norm(&gradient);
        optim::clip(&mut gradient, norm, 1.0);
        adamw.update(&mut parameters, &gradient, 5e-3);
        sums.loss / sums.weight
    };
    (0..30).map(&mut step).collect()
}

#[test]
fn thirty_steps_end_within_a_hundredth_of_the_cpu() {
    let case = open("llama", 0.1);
    let want = thirty(Cpu::new(1), &case);
    let runs = [("f32", Some(device(0))), ("f16", f16(0)), ("bf16", bf16(0))];
    for (name, device) in runs {
        let Some(device) = device else { continue };
        let got = thirty(device, &case);
        for (step, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!((g / w - 1.0).abs() <= 1e-2, "{name}, step {}: loss {g} for {w}", step + 1);
        }
        println!("{name}: {:.4} to {:.4}, the CPU's {:.4}", got[0], got[29], want[29]);
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&want[22..]) < 0.9 * mean(&want[..8]), "nothing is learnt: {want:?}");
}
