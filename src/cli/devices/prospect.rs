//! What the chosen devices would make of a model, before any of it is read: whether it fits, by the very estimate
//! that decides it when a run opens them, and how fast they are likely to be where nobody has measured them.

use super::building::Whole;
use super::chain::nvidia_card;
use super::chain::{budget, threads};
use super::choose::{Chosen, Device};
use super::gpu;
use super::nvidia;
use super::{cpu, cpu::cores};
use crate::backend::Backend;
use crate::backend::wgpu::adapters::{self, Kind};
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Estimate, Home, Load};
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;

/// A device, as far as it can be known beforehand.
#[derive(Debug, Clone, PartialEq)]
pub struct Prospect {
    /// What the run will call it.
    pub name: String,
    /// Its numeric class; the error is why it cannot be opened.
    pub class: Result<String, String>,
    /// Which hardware it is, and how much of it.
    pub hardware: String,
    /// Bytes that it may use; None where nobody says how many.
    pub limit: Option<u64>,
    /// What blocks keep, and what that takes: the most frugal way, where not even that fits.
    pub takes: Option<(Keep, Estimate)>,
    /// Why it cannot take part.
    pub unfit: Option<ModelError>,
    /// Floating point operations a second that such a device is taken to do: a guess.
    pub guess: f64,
}

/// Every chosen device.
pub fn prospects(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<Vec<Prospect>, ModelError> {
    let whole = Whole { config, tensors, lora, class_weights: None, tokens };
    let one = |at: usize| -> Result<Prospect, ModelError> {
        let pick = &chosen.picks[at];
        let (name, hardware) = (pick.name.clone(), hardware(chosen, at));
        let limit = |bytes: u64| (bytes < u64::MAX / 2).then_some(bytes);
        if let Device::Gpu(index) = pick.device
            && let Some(found) = adapters::all().get(index)
        {
            let budget = budget(chosen, at, found, cpu::free_memory());
            let guess = guess(found.facts.kind) / pick.sharing as f64;
            let opened = gpu::device(found, None, None);
            let class = opened.as_ref().map(|d| d.class()).map_err(ToString::to_string);
            let (takes, unfit) = match &opened {
                Ok(device) => fits(Load { home: gpu::home(found.facts.kind), ..whole.load(device)? }, budget),
                Err(fault) => (None, Some(fault.clone().into())),
            };
            return Ok(Prospect { name, class, hardware, limit: limit(budget), takes, unfit, guess });
        }
        if let Device::Cuda(index) = pick.device
            && let Some(found) = nvidia::all().ok().and_then(|all| all.get(index))
        {
            let budget = nvidia_card(chosen, at, found).budget;
            let guess = guess(Kind::Discrete) / pick.sharing as f64;
            let opened = nvidia::device(found, chosen.options.dtype);
            let class = opened.as_ref().map(|d| d.class()).map_err(ToString::to_string);
            let (takes, unfit) = match &opened {
                Ok(device) => fits(Load { home: Home::Own, ..whole.load(device)? }, budget),
                Err(fault) => (None, Some(fault.clone().into())),
            };
            return Ok(Prospect { name, class, hardware, limit: limit(budget), takes, unfit, guess });
        }
        let threads = threads(chosen, at);
        let cpu = cpu::cpu(chosen.options.dtype, threads);
        let budget = chosen.options.memory_limit.unwrap_or_else(cpu::free_memory);
        let budget = budget / chosen.picks.len() as u64;
        let class = cpu.class();
        let guess = per_thread(&class) * threads as f64;
        let (takes, unfit) = fits(whole.load(&cpu)?, budget);
        Ok(Prospect { name, class: Ok(class), hardware, limit: limit(budget), takes, unfit, guess })
    };
    (0..chosen.picks.len()).map(one).collect()
}

fn fits(load: Load, limit: u64) -> (Option<(Keep, Estimate)>, Option<ModelError>) {
    match memory::choose(load, limit) {
        Ok(takes) => (Some(takes), None),
        Err(e) => (Some((Keep::Inputs, memory::estimate(load, Keep::Inputs))), Some(e)),
    }
}

/// Of device `at`.
pub fn hardware(chosen: &Chosen, at: usize) -> String {
    let pick = &chosen.picks[at];
    match pick.device {
        Device::Gpu(index) => {
            let name = adapters::all().get(index).map_or("an adapter", |found| &found.facts.name);
            if pick.sharing > 1 { format!("{name}, one of {} on it", pick.sharing) } else { name.into() }
        }
        Device::Cuda(index) => {
            let found = nvidia::all().ok().and_then(|all| all.get(index));
            let name = found.map_or("a card", |found| &found.facts.name);
            if pick.sharing > 1 { format!("{name}, one of {} on it", pick.sharing) } else { name.into() }
        }
        Device::Cpu => match threads(chosen, at) {
            1 => format!("{}, 1 thread", cpu::processor()),
            n => format!("{}, {n} threads", cpu::processor()),
        },
    }
}

/// Of one thread, in training, everything counted: what machines of that kind reach, rounded down.
fn per_thread(class: &str) -> f64 {
    match class {
        c if c.contains("bf16") => 40e9,
        c if c.contains("avx512") => 30e9,
        c if c.contains("avx2") => 15e9,
        _ => 4e9,
    }
}

/// Of a card that nothing is known of but its kind.
fn guess(kind: Kind) -> f64 {
    match kind {
        Kind::Discrete | Kind::Virtual => 3e12,
        Kind::Integrated | Kind::Unknown => 0.3e12,
        Kind::Software => 3e9 * cores() as f64,
    }
}
