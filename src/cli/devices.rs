//! The one file that names a concrete backend: what can compute here, how much memory it may use, and a whole
//! model on it.

use super::options::groups::{DeviceOptions, Gpus, Precision};
use super::refusal::Refusal;
use crate::backend::Backend;
use crate::backend::cpu::{Cpu, Peaks};
use crate::backend::timed::{Notes, Timed};
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Blueprint, Candidate, Equipment, Opener};
use crate::model::config::Config;
use crate::model::decoder::{Build, Decoder, Keep};
use crate::model::layout::Layout;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Load};
use crate::model::stage::{Cancel, Fault, Generate, Microbatch, Model, Output, Sampling, Stage, Want};
use crate::model::weights::{ModelError, Weights};
use crate::numeric::tensor::Tensors;
use std::sync::Arc;

/// A device, for lists.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Device {
    /// What --gpus would call it.
    pub name: String,
    /// The processor's own name.
    pub model: String,
    /// Its numeric class.
    pub class: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Bytes that are free.
    pub memory: u64,
    /// Instruction sets that matter here and that it has.
    pub features: Vec<&'static str>,
}

/// All devices of this machine.
pub fn list() -> Vec<Device> {
    vec![Device {
        name: "cpu".into(),
        model: processor(),
        class: cpu(Precision::Auto, 1).class(),
        cores: cores(),
        memory: free_memory(),
        features: features(),
    }]
}

/// Cores that this process may use: affinity and a cgroup's quota count.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What a model is built for.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Longest microbatch, in tokens; 0 where nothing is trained.
    pub tokens: usize,
}

/// Puts a whole model on the chosen device.
pub fn open(
    options: &DeviceOptions,
    model: (&Config, &dyn Tensors, &LoraSpec),
    class_weights: Option<Vec<f32>>,
    need: Need,
) -> Result<Box<dyn Model>, Refusal> {
    let (config, tensors, lora) = model;
    let threads = options.threads.unwrap_or_else(cores);
    let cpu = cpu(options.dtype, threads);
    let keep = match need.tokens {
        0 => Keep::Inputs,
        tokens => {
            let weights = Weights::new(tensors)?.packed(&cpu, config)?;
            let limit = options.memory_limit.unwrap_or_else(free_memory);
            memory::choose(Load { config, lora, tokens, weights }, limit)?.0
        }
    };
    let build = Build { keep, class_weights, ..Build::whole(config) };
    let decoder = Decoder::load(cpu, config, tensors, lora, build)?;
    Ok(Box::new(decoder))
}

/// A model whose verbs are timed.
pub struct Profiled {
    /// The model.
    pub model: Box<dyn Model>,
    /// What its verbs took.
    pub notes: Notes,
    /// What the device can do at most.
    pub peaks: Peaks,
    /// On how many threads.
    pub threads: usize,
}

/// As [`open`], and with a clock.
pub fn profile(
    options: &DeviceOptions,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<Profiled, Refusal> {
    let threads = options.threads.unwrap_or_else(cores);
    let cpu = cpu(options.dtype, threads);
    let (weights, peaks) = (Weights::new(tensors)?.packed(&cpu, config)?, cpu.peaks());
    let limit = options.memory_limit.unwrap_or_else(free_memory);
    let keep = memory::choose(Load { config, lora, tokens, weights }, limit)?.0;
    let (timed, notes) = Timed::new(cpu);
    let model = Decoder::load(timed, config, tensors, lora, Build { keep, ..Build::whole(config) })?;
    Ok(Profiled { model: Box::new(model), notes, peaks, threads })
}

/// What this process computes with when it takes part in a run of many devices.
pub fn equipment(options: &DeviceOptions, inject: Inject) -> Equipment {
    let indices = match &options.gpus {
        Gpus::Indices(indices) => indices.clone(),
        Gpus::Auto | Gpus::None | Gpus::Cpu => vec![0],
    };
    let devices = indices.len();
    let threads = options.threads.unwrap_or_else(cores);
    let candidate = |(at, index): (usize, &usize)| {
        // What does not divide evenly goes to the first ones.
        let threads = (threads / devices + usize::from(at < threads % devices)).max(1);
        let (limit, dtype) = (options.memory_limit, options.dtype);
        let cpu: Arc<dyn Opener> = Arc::new(Processor { dtype, threads, limit, devices });
        let mut chain = Vec::new();
        if let Some(name) = inject.pretend() {
            chain.push(Arc::new(Pretended { name: name.into(), cpu: cpu.clone() }) as Arc<dyn Opener>);
        }
        if inject.pretend() == Some("cuda") {
            chain.push(Arc::new(NotBuilt("wgpu")));
        }
        chain.push(cpu);
        // Who is named twice is two devices, which are told apart in everything that is said of them.
        let twin = 1 + indices[..at].iter().filter(|other| *other == index).count();
        let name = match &options.gpus {
            Gpus::Indices(_) if twin > 1 => format!("cpu {index} ({twin})"),
            Gpus::Indices(_) => format!("cpu {index}"),
            Gpus::Auto | Gpus::None | Gpus::Cpu => "cpu".into(),
        };
        Candidate { name, chain }
    };
    Equipment {
        candidates: indices.iter().enumerate().map(candidate).collect(),
        reference: Arc::new(Twin),
        inject,
    }
}

/// The CPU, or a part of it.
struct Processor {
    dtype: Precision,
    threads: usize,
    limit: Option<u64>,
    /// Among which the memory is divided.
    devices: usize,
}

impl Processor {
    /// A dtype that the run's user typed binds every device.
    fn cpu(&self, blueprint: &Blueprint) -> Result<Cpu, ModelError> {
        let dtype = match blueprint.shape.dtype.as_deref() {
            None => self.dtype,
            Some("f32") => Precision::F32,
            Some("bf16") => Precision::Bf16,
            Some(other) => {
                return Err(ModelError::Source(format!("the run computes in {other}, this device cannot")));
            }
        };
        Ok(cpu(dtype, self.threads))
    }

    fn limit(&self) -> u64 {
        self.limit.unwrap_or_else(free_memory) / self.devices as u64
    }
}

impl Opener for Processor {
    fn backend(&self) -> &str {
        "cpu"
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let cpu = self.cpu(blueprint)?;
        let keep = memory::choose(load(&cpu, blueprint)?, self.limit())?.0;
        built(cpu, blueprint, keep)
    }

    fn largest(&self, blueprint: &Blueprint) -> usize {
        let cpu = self.cpu(blueprint);
        let load = cpu.as_ref().ok().and_then(|cpu| load(cpu, blueprint).ok());
        load.map_or(0, |load| memory::largest(load, self.limit()))
    }
}

fn load<'a>(cpu: &Cpu, blueprint: &'a Blueprint) -> Result<Load<'a>, ModelError> {
    let weights = Weights::new(&*blueprint.tensors)?.packed(cpu, &blueprint.config)?;
    let (config, lora, tokens) = (&blueprint.config, &blueprint.shape.lora, blueprint.shape.tokens);
    Ok(Load { config, lora, tokens, weights })
}

fn built(cpu: Cpu, blueprint: &Blueprint, keep: Keep) -> Result<Box<dyn Model>, ModelError> {
    let Blueprint { config, tensors, shape } = blueprint;
    let build = Build { keep, class_weights: shape.class_weights.clone(), ..Build::whole(config) };
    Ok(Box::new(Decoder::load(cpu, config, &**tensors, &shape.lora, build)?))
}

/// The slow twin, which every device is compared with.
struct Twin;

impl Opener for Twin {
    fn backend(&self) -> &str {
        "cpu"
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        built(Cpu::twin(1), blueprint, Keep::Everything)
    }

    fn largest(&self, _: &Blueprint) -> usize {
        usize::MAX
    }
}

/// A backend that this build has not.
struct NotBuilt(&'static str);

impl Opener for NotBuilt {
    fn backend(&self) -> &str {
        self.0
    }

    fn open(&self, _: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        Err(ModelError::Source("this build has not got it".into()))
    }

    fn largest(&self, _: &Blueprint) -> usize {
        0
    }
}

/// A CPU under another backend's name, so that tests can see it fall back.
struct Pretended {
    name: String,
    cpu: Arc<dyn Opener>,
}

impl Opener for Pretended {
    fn backend(&self) -> &str {
        &self.name
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let model = self.cpu.open(blueprint)?;
        let class = model.class().replacen("cpu", &self.name, 1);
        Ok(Box::new(Renamed { model, class }))
    }

    fn largest(&self, blueprint: &Blueprint) -> usize {
        self.cpu.largest(blueprint)
    }
}

struct Renamed {
    model: Box<dyn Model>,
    class: String,
}

impl Stage for Renamed {
    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn class(&self) -> String {
        self.class.clone()
    }

    fn set_parameters(&mut self, flat: &[f32]) -> Result<(), Fault> {
        self.model.set_parameters(flat)
    }

    fn forward(&mut self, batch: &Microbatch, input: Option<&[f32]>, want: Want) -> Result<Output, Fault> {
        self.model.forward(batch, input, want)
    }

    fn backward(&mut self, grad: Option<&[f32]>, gradient: &mut [f32]) -> Result<Option<Vec<f32>>, Fault> {
        self.model.backward(grad, gradient)
    }

    fn heed(&mut self, cancel: Cancel) {
        self.model.heed(cancel);
    }
}

impl Generate for Renamed {
    fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        each: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Vec<u32>, Fault> {
        self.model.generate(prompt, sampling, each)
    }
}

/// The CPU in the precision that was asked for, or that is the faster one here.
fn cpu(dtype: Precision, threads: usize) -> Cpu {
    match dtype {
        Precision::Auto if Cpu::bf16_is_fast() => Cpu::bf16(threads),
        Precision::Auto | Precision::F32 => Cpu::new(threads),
        Precision::Bf16 => Cpu::bf16(threads),
    }
}

/// Free memory in bytes: the machine's, or what a cgroup leaves of it. Unknown counts as plenty.
pub fn free_memory() -> u64 {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
    });
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|max| max.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    machine.into_iter().chain(group).min().unwrap_or(u64::MAX)
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH.into(), |(_, n)| n.trim().into())
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    known.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}
