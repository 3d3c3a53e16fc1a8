//! The one file that names a concrete backend: what can compute here, how much memory it may use, and a whole
//! model on it.

use super::options::groups::{DeviceOptions, Precision};
use super::refusal::Refusal;
use crate::backend::Backend;
use crate::backend::cpu::Cpu;
use crate::model::config::Config;
use crate::model::decoder::{Build, Decoder, Keep};
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Load};
use crate::model::stage::Model;
use crate::model::weights::Weights;
use crate::numeric::tensor::Tensors;

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
            let weight_bytes = cpu.weight_bytes(Weights::new(tensors)?.dtype()?);
            let limit = options.memory_limit.unwrap_or_else(free_memory);
            memory::choose(Load { config, lora, tokens, weight_bytes }, limit)?.0
        }
    };
    let build = Build { keep, class_weights, ..Build::whole(config) };
    let decoder = Decoder::load(cpu, config, tensors, lora, build)?;
    Ok(Box::new(decoder))
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
