//! Forecast for a model on the chosen devices, before any of it is read: whether it fits, by the same estimate that a
//! run uses when it opens devices, and a guess of the speed of devices without measurements.

use super::building::Whole;
use super::card::{Through, usable};
use super::chain::{budget, found, hardware, threads};
use super::choose::Chosen;
use super::{cpu, cpu::cores};
use crate::backend::Backend;
use crate::backend::wgpu::adapters::Kind;
use crate::config::groups::{ComputeDtype, DeviceOptions, Driver};
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Estimate, Fit, Home, Limit, Load};
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;

/// Known properties of a device before a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Prospect {
    /// Name of the device in the run.
    pub name: String,
    /// Numeric class; the error gives the reason why the device cannot be opened.
    pub class: Result<String, String>,
    /// Kind and amount of the hardware.
    pub hardware: String,
    /// Bytes that the device may use; `None` where unknown.
    pub limit: Option<u64>,
    /// Policy for kept values, and its estimate: the most frugal one where nothing fits.
    pub takes: Option<(Keep, Estimate)>,
    /// Why the device cannot take part.
    pub unfit: Option<ModelError>,
    /// Guess of the floating point operations per second.
    pub guess: f64,
}

/// Measured memory for a model by class and hardware, where available.
type Seen<'a> = &'a dyn Fn(&str, &str) -> Option<Fit>;

/// Forecasts for all chosen devices; `measured` gives the run's knowledge about memory, and `home` is where a
/// CPU's values are: in a team or alone.
pub fn prospects(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
    (measured, home): (Seen<'_>, Home),
) -> Result<Vec<Prospect>, ModelError> {
    let one = |at: usize| -> Result<Prospect, ModelError> {
        let pick = &chosen.picks[at];
        let (name, hardware) = (pick.name.clone(), hardware(chosen, at));
        let whole = |class: &str| {
            let measured = measured(class, &hardware);
            Whole { config, tensors, lora, class_weights: None, tokens, measured }
        };
        let limit = |bytes: u64| (bytes < u64::MAX / 2).then_some(bytes);
        if let Some(found) = found(pick.device) {
            let budget = budget(chosen, at, found, cpu::free_memory());
            let guess = guess(found.facts().kind) / pick.sharing as f64;
            let class = found.class(chosen.options.dtype);
            let (takes, unfit) = match &class {
                Ok(class) => {
                    let load = found.load(&whole(class), chosen.options.dtype)?;
                    fits(load, Limit::Typed(budget))?
                }
                Err(fault) => (None, Some(fault.clone().into())),
            };
            let class = class.map_err(|fault| fault.to_string());
            return Ok(Prospect { name, class, hardware, limit: limit(budget), takes, unfit, guess });
        }
        let threads = threads(chosen, at);
        let cpu = cpu::cpu(chosen.options.dtype, threads);
        let budget =
            Limit::of(chosen.options.memory_limit, cpu::free_memory).among(chosen.picks.len() as u64);
        let class = cpu.class();
        let guess = per_thread(&class) * threads as f64;
        let load = Load { home, ..whole(&class).load(&cpu)? };
        let (takes, unfit) = fits(load, budget)?;
        let limit = limit(budget.bytes());
        Ok(Prospect { name, class: Ok(class), hardware, limit, takes, unfit, guess })
    };
    (0..chosen.picks.len()).map(one).collect()
}

/// Forecast for an absent card with `bytes` of memory, used by the run alone: through NVIDIA's own driver, in bf16
/// unless another type was typed, or through wgpu where that was typed.
pub fn assumed(
    bytes: u64,
    options: &DeviceOptions,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<Prospect, ModelError> {
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured: None };
    let (through, class) = match (options.backend, options.dtype) {
        (Driver::Wgpu, _) => (Through::Wgpu, "wgpu"),
        (_, ComputeDtype::F32) => (Through::Cuda(ComputeDtype::F32), "cuda, f32"),
        _ => (Through::Cuda(ComputeDtype::Bf16), "cuda, bf16"),
    };
    let budget = options.memory_limit.unwrap_or_else(|| usable(bytes));
    let (takes, unfit) = fits(through.load(&whole, Home::Own)?, Limit::Typed(budget))?;
    Ok(Prospect {
        name: "assumed".into(),
        class: Ok(class.into()),
        hardware: format!("a card of {} that is not here", memory::size(bytes)),
        limit: Some(budget),
        takes,
        unfit,
        guess: 0.0,
    })
}

fn fits(load: Load, limit: Limit) -> Result<(Option<(Keep, Estimate)>, Option<ModelError>), ModelError> {
    Ok(match limit.choose(load) {
        Ok(takes) => (Some(takes), None),
        Err(e) => (Some(memory::least(Load { measured: None, ..load })?), Some(e)),
    })
}

/// Operations per second of one thread in training, all included: a lower bound of measurements on such machines.
fn per_thread(class: &str) -> f64 {
    match class {
        "cpu-avx512-bf16" => 40e9,
        c if c.contains("avx512") || c.contains("avx2") => 30e9,
        _ => 4e9,
    }
}

/// Operations per second of a card of which only the kind is known.
fn guess(kind: Kind) -> f64 {
    match kind {
        Kind::Discrete | Kind::Virtual => 3e12,
        Kind::Integrated | Kind::Unknown => 0.3e12,
        Kind::Software => 3e9 * cores() as f64,
    }
}
