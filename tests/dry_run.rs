//! A dry run against the device: the peak of memory that is counted without data, and the one that the backend
//! measures, for every golden model, task, policy for kept values, dropout and range of layers.

#[path = "parity/case.rs"]
mod case;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;

use case::Case;
use finetune::backend::wgpu::Options;
use finetune::backend::{Backend, Cpu, Wgpu};
use finetune::format;
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Cost, DryRuns, Keep, dry_run};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::stage::{IGNORE, Microbatch, Output, Targets, Ticket, Want};
use finetune::numeric::tensor::Tensors;
use stages::Loads;

/// Largest difference from the memory in use, as a share of it. A dry run takes an even choice of experts, on which the
/// copies for the products of a single expert depend.
fn bound(config: &Config) -> f64 {
    if config.experts.is_some() { 0.05 } else { 0.02 }
}

/// A model, and the microbatch that is computed.
struct Job<'a> {
    name: String,
    config: &'a Config,
    tensors: &'a dyn Tensors,
    lora: LoraSpec,
    batch: Microbatch,
}

impl Job<'_> {
    fn dry(&self, device: &impl Backend, build: Build) -> Cost {
        let widest = self.config.feed_forward.max(self.config.hidden);
        let target = device.target().of_model(self.config.heads, widest);
        dry_run(target, (self.config, self.tensors, &self.lora), build, &self.batch).unwrap()
    }

    /// Bytes in use at once in the first microbatch of a stage.
    fn real<B: Loads>(&self, device: B, build: Build) -> u64 {
        let (first, last) = (build.layers.start == 0, build.layers.end == self.config.layers);
        let hidden = vec![0.5; self.batch.ids.len() * self.config.hidden];
        let mut stage = device.stage((self.config, self.tensors, &self.lora), build).unwrap();
        let mut gradient = vec![0.0; stage.layout().len()];
        stage.in_use();
        let output =
            stage.forward(&self.batch, (!first).then_some(&hidden[..]), Want::Gradient(Ticket(0))).unwrap();
        assert_eq!(matches!(output, Output::Loss(_)), last, "{}", self.name);
        stage.backward(Ticket(0), (!last).then_some(&hidden[..]), &mut gradient).unwrap();
        stage.in_use().unwrap().bytes
    }

    /// Both within the bound. Returns their ratio.
    fn compare<B: Loads>(&self, open: &dyn Fn() -> B, build: Build) -> f64 {
        let device = open();
        let dry = self.dry(&device, build.clone()).peak;
        let real = self.real(device, build.clone());
        let ratio = dry as f64 / real as f64;
        let what = format!("{} {:?} {:?} {}", self.name, build.keep, build.layers, self.lora.dropout);
        assert!((ratio - 1.0).abs() <= bound(self.config), "{what}: {dry} bytes counted, {real} in use");
        ratio
    }

    /// Every kind of policy, and stages of some layers.
    fn compare_all<B: Loads>(&self, device: &str, open: &dyn Fn() -> B) {
        let layers = self.config.layers;
        let parts = [[layers - 1, 1, 0], [1, 1, 0], [0, layers, 0], [0, 1, 1], [0, 0, layers], [0, 0, 1]];
        let whole = Build::whole(self.config);
        let keeps = [Keep::Everything, Keep::Inputs].into_iter().chain(parts.map(Keep::Parts));
        let builds = keeps.map(|keep| Build { keep, ..whole.clone() });
        // A row that embedding and head share needs both in one stage.
        let shared = self.lora.rows.shared(self.config);
        let ranges = [0..1, layers - 1..layers, 1..layers - 1].into_iter();
        let ranges = ranges.filter(|r| !(r.is_empty() || shared && r.end == layers));
        let stages = ranges.map(|layers| Build { layers, ..whole.clone() });
        let ratios: Vec<f64> = builds.chain(stages).map(|build| self.compare(open, build)).collect();
        let (least, most) = ratios.iter().fold((f64::MAX, f64::MIN), |(l, m), r| (l.min(*r), m.max(*r)));
        println!("{device} {}: counted / in use is {least:.4} to {most:.4}", self.name);
    }
}

/// The memory of three microbatches that go through streamed layers together, for every golden model.
#[test]
fn dry_peak_of_a_group_equals_the_cpu() {
    for dir in case::golden() {
        let case = Case::open(&dir);
        let (config, tensors) = (&case.config, &*case.tensors);
        let batches: Vec<Microbatch> = (0..3).map(|i| case.microbatch(i, 3)).collect();
        for keep in [Keep::Everything, Keep::Inputs, Keep::Parts([0, 1, 1])] {
            for streamed in 1..=config.layers {
                let target =
                    Cpu::new(2).target().of_model(config.heads, config.feed_forward.max(config.hidden));
                let mut runs =
                    DryRuns::of_memory(target, (config, tensors, &case.lora), Build::whole(config)).unwrap();
                let dry = runs.group(keep, &batches, streamed).unwrap();
                let build = Build { keep, streamed, group: 3, ..Build::whole(config) };
                let mut stage = Cpu::new(2).stage((config, &case.tensors, &case.lora), build).unwrap();
                stage.in_use();
                let mut all = batches.iter().cloned();
                stage.gradients(&mut || all.next(), &mut |_, _, _| ()).unwrap();
                let real = stage.in_use().unwrap().bytes;
                let ratio = dry as f64 / real as f64;
                let what = format!("{dir:?} {keep:?}, {streamed} streamed");
                assert!((ratio - 1.0).abs() <= bound(config), "{what}: {dry} bytes counted, {real} in use");
            }
        }
    }
}

/// A masked adapter reads its own input.
const DROPOUTS: [f32; 2] = [0.0, 0.1];

/// Every golden model with its adapter, each with this many of the dropouts.
fn check<B: Loads>(device: &str, dropouts: usize, open: &(dyn Fn() -> B + Sync)) {
    case::each_golden(|i, dir| {
        let case = Case::open(dir);
        for &dropout in DROPOUTS.iter().cycle().skip(i).take(dropouts) {
            let name = format!("{} {dropout}", dir.file_name().unwrap().to_string_lossy());
            let (config, tensors, batch) = (&case.config, &*case.tensors, case.microbatch(0, 3));
            let lora = LoraSpec { dropout, ..case.lora.clone() };
            Job { name, config, tensors, lora, batch }.compare_all(device, open);
        }
    });
}

/// A real model in blocks, with rows of 128 tokens.
fn check_smollm2<B: Loads>(device: &str, open: &dyn Fn() -> B, lengths: &[usize], keeps: &[Keep]) {
    let Some(path) = std::env::var_os("FINETUNE_SMOLLM2_GGUF") else {
        return println!("skipped: FINETUNE_SMOLLM2_GGUF");
    };
    let files = format::open(std::path::Path::new(&path)).unwrap();
    let config = Config::from_json(&files.config).unwrap();
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 16, alpha: 32.0, targets, ..LoraSpec::none() };
    for &tokens in lengths {
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7919 % config.vocab as u32).collect();
        let bounds: Vec<u32> = (0..tokens).step_by(128).chain([tokens]).map(|at| at as u32).collect();
        let next = |row: &[u32]| row[1..].iter().copied().chain([IGNORE]).collect::<Vec<_>>();
        let targets = Targets::Tokens(ids.chunks(128).flat_map(next).collect());
        let batch = Microbatch { step: 1, rows: (1..bounds.len() as u64).collect(), ids, bounds, targets };
        let (name, tensors) = (format!("SmolLM2 of {tokens} tokens"), &*files.tensors);
        let job = Job { name, config: &config, tensors, lora: lora.clone(), batch };
        for &keep in keeps {
            let ratio = job.compare(open, Build { keep, ..Build::whole(&config) });
            println!("{device} {} {keep:?}: counted / in use is {ratio:.4}", job.name);
        }
    }
}

#[test]
fn dry_peak_equals_the_cpu_in_f32() {
    check("f32", 2, &|| Cpu::new(2));
    check("plain f32", 2, &|| Cpu::reference(2));
}

#[test]
fn dry_peak_equals_the_cpu_in_bf16() {
    check("bf16", 2, &|| Cpu::bf16(2));
    if Cpu::bf16_reference(2).is_some() {
        check("the other bf16", 2, &|| Cpu::bf16_reference(2).unwrap());
    }
}

#[test]
fn dry_peak_of_smollm2_equals_the_cpu() {
    let keeps = [Keep::Everything, Keep::Parts([0, 12, 18]), Keep::Inputs];
    check_smollm2("f32", &|| Cpu::new(2), &[64, 300], &keeps);
    check_smollm2("bf16", &|| Cpu::bf16(2), &[64, 300], &keeps);
}

/// Arithmetic and bytes of the ops that the CPU really computes; copies to and from the host are not in a dry run.
#[test]
fn dry_run_counts_the_work_of_real_ops() {
    for dir in case::golden() {
        let case = Case::open(&dir);
        let (config, tensors, batch) = (&case.config, &*case.tensors, case.microbatch(0, 3));
        for keep in [Keep::Everything, Keep::Parts([1, 0, 1]), Keep::Inputs] {
            let build = Build { keep, ..Build::whole(config) };
            let (name, lora) = (dir.display().to_string(), case.lora.clone());
            let job = Job { name, config, tensors, lora, batch: batch.clone() };
            let dry = job.dry(&Cpu::new(1), build.clone());
            let (cpu, notes) = Cpu::new(1).timed();
            assert!(cpu.has_data());
            let mut stage = cpu.stage((config, tensors, &job.lora), build).unwrap();
            notes.take();
            stage.gradient(&batch, &mut vec![0.0; stage.layout().len()]).unwrap();
            let taken = notes.take();
            let ops = taken.iter().filter(|(op, _)| !["read", "upload"].contains(op));
            let real = ops.fold((0.0, 0.0), |sum, (_, t)| (sum.0 + t.flops, sum.1 + t.bytes));
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
            assert!(near(dry.flops, real.0), "{}: {dry:?}, {real:?}", job.name);
            // Bytes of experts depend on which of them are chosen.
            let even = config.experts.is_some();
            assert!(even || near(dry.bytes, real.1), "{}: {dry:?}, {real:?}", job.name);
        }
    }
}

/// Runs `check` on one adapter: lavapipe, unless another is named.
fn on_wgpu(check: &dyn Fn(&str, &(dyn Fn() -> Wgpu + Sync))) {
    if let Some(tested) = tested_adapters::one() {
        check(tested.adapter.name(), &|| tested.open(Options::default()).unwrap());
    }
}

/// One of the dropouts for each model: a device is opened for every comparison.
#[test]
fn dry_peak_equals_lavapipe() {
    on_wgpu(&|name, open| check(name, 1, open));
}

#[test]
fn dry_peak_of_smollm2_equals_lavapipe() {
    on_wgpu(&|name, open| check_smollm2(name, open, &[32], &[Keep::Parts([0, 12, 18])]));
}
