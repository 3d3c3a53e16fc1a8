//! Forecast for a model on the chosen devices, before any of it is read: whether it fits, by the same estimate that a
//! run uses when it opens devices, and a guess of the speed of devices without measurements.

use super::building::{How, Whole};
use super::capacity::Holder;
use super::chain::{found, free_memory, hardware, hardware_of, seat, seats};
use super::choose::{Chosen, choose};
use super::drivers::{self, DRIVERS, Driver, cpu};
use super::line::{Place, measured_on};
use super::speed::Speed;
use crate::backend::facts::Kind;
use crate::config::groups::{CPU, DeviceOptions, Gpus};
use crate::config::refusal::Refusal;
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Estimate, Fit, Home, Limit, Load, Offload};
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;
use std::ops::Range;

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
    /// What each device of a line holds; empty for a device alone.
    pub places: Vec<Place>,
    /// Guess of the floating point operations per second.
    pub guess: f64,
}

/// Measured memory for a model by class and hardware, where available.
type Seen<'a> = &'a dyn Fn(&str, &str) -> Option<Fit>;

/// Sizes of a run's microbatches.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Tokens of the longest one.
    pub tokens: usize,
    /// Most microbatches of a step.
    pub microbatches: usize,
}

/// Forecasts for all chosen devices; `measured` gives the run's knowledge about memory, and `home` is where a
/// CPU's values are: in a team or alone.
pub fn prospects(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    Sizes { tokens, microbatches }: Sizes,
    (measured, home): (Seen<'_>, Home),
) -> Result<Vec<Prospect>, ModelError> {
    let one = |at: usize| -> Result<Prospect, ModelError> {
        let pick = &chosen.picks[at];
        let (name, hardware) = (pick.name.clone(), hardware(chosen, at));
        let device = found(pick.device);
        let share = seat(chosen, at, device, free_memory(chosen)).share;
        let class = device.class(share.dtype);
        let (takes, unfit) = match &class {
            Ok(class) => {
                let measured = measured(class, &hardware);
                let offload = chosen.options.offload;
                let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured, offload };
                let load = device.load(&whole, share.dtype)?;
                let at_home = device.facts().kind == Kind::Cpu;
                // Only a run on the CPU alone computes several microbatches together.
                let microbatches = if home == Home::Host { microbatches } else { 1 };
                fits(if at_home { Load { home, microbatches, ..load } } else { load }, share.limit)?
            }
            Err(fault) => (None, Some(fault.clone().into())),
        };
        let class = class.map_err(|fault| fault.to_string());
        let guess = match (device.facts().kind, &class) {
            (Kind::Cpu, Ok(class)) => per_thread(class) * share.threads as f64,
            (kind, _) => guess(kind) / pick.sharing as f64,
        };
        let limit = share.limit.known();
        let how: Option<How> = takes.map(How::from);
        let hardware = how.map_or(hardware.clone(), |how| how.measured_on(hardware));
        Ok(Prospect { name, class, hardware, limit, takes, unfit, places: Vec::new(), guess })
    };
    let all = chosen.devices().map(|picks| match picks.len() {
        1 => one(picks.start),
        _ => line(
            chosen,
            picks,
            &Whole {
                config,
                tensors,
                lora,
                class_weights: None,
                tokens,
                measured: None,
                offload: Offload::Never,
            },
        ),
    });
    all.collect()
}

/// Names of the devices of a team, with the hardware under which their measurements are stored. No card is opened.
pub fn named_hardware(
    chosen: &Chosen,
    ((config, tensors, lora), tokens): ((&Config, &dyn Tensors, &LoraSpec), usize),
) -> Vec<(String, String)> {
    let machine = free_memory(chosen);
    let offload = chosen.options.offload;
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured: None, offload };
    let named = |picks: Range<usize>| {
        let hardware = hardware_of(chosen, picks.clone());
        if picks.len() > 1 {
            let seats = seats(chosen, picks, machine);
            return (seats.name(), seats.measured_on(&whole, hardware));
        }
        let (at, pick) = (picks.start, &chosen.picks[picks.start]);
        let hardware = match seat(chosen, at, found(pick.device), machine).choose(&whole) {
            Ok(how) => how.measured_on(hardware),
            Err(_) => hardware,
        };
        (pick.name.clone(), hardware)
    };
    chosen.devices().map(named).collect()
}

/// Forecast for devices that hold a model together.
fn line(chosen: &Chosen, picks: Range<usize>, whole: &Whole) -> Result<Prospect, ModelError> {
    let seats = seats(chosen, picks.clone(), free_memory(chosen));
    let name = seats.name();
    let (places, class, unfit) = match seats.places(whole) {
        Ok(places) => {
            let class = seats.class(&places);
            (places, class.map_err(|fault| fault.to_string()), None)
        }
        Err(e) => (Vec::new(), Ok("line".into()), Some(e)),
    };
    let hardware = measured_on(&places, hardware_of(chosen, picks));
    let guess = if places.is_empty() { 0.0 } else { seats.rate(whole, &places)? };
    Ok(Prospect { name, class, hardware, limit: None, takes: None, unfit, places, guess })
}

/// Forecast for an absent card with `bytes` of memory, used by the run alone: through the best driver, unless another
/// one was typed.
pub fn assumed(
    bytes: u64,
    options: &DeviceOptions,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<Prospect, ModelError> {
    let offload = options.offload;
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured: None, offload };
    let (load, limit, hardware) = absent_card(bytes, options, &whole)?;
    let (_, class) = absent_driver(options).assumed(options.dtype);
    let (takes, unfit) = fits(load, limit)?;
    Ok(Prospect {
        name: "assumed".into(),
        class: Ok(class.into()),
        hardware,
        limit: limit.known(),
        takes,
        unfit,
        places: Vec::new(),
        guess: 0.0,
    })
}

/// The device that a worker is expected to have, and what it is: a card of `assumed` bytes, else one like the first of
/// this machine, with its measured speed.
pub fn expected_seat<'a>(
    assumed: Option<u64>,
    options: &DeviceOptions,
    (config, tensors, lora): (&'a Config, &'a dyn Tensors, &'a LoraSpec),
    tokens: usize,
) -> Result<(String, Holder<'a>, Option<Speed>), Refusal> {
    let offload = options.offload;
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured: None, offload };
    if let Some(bytes) = assumed {
        let (load, limit, hardware) = absent_card(bytes, options, &whole)?;
        return Ok((hardware, Holder::new(load, limit, &whole)?, None));
    }
    let gpus = if options.gpus == Gpus::None { Gpus::Auto } else { options.gpus.clone() };
    let chosen = choose(&DeviceOptions { gpus, ..options.clone() })?;
    let seat = seat(&chosen, 0, found(chosen.picks[0].device), free_memory(&chosen));
    let name = format!("a device like {} here", chosen.picks[0].name);
    Ok((name, seat.holder(&whole)?, Some(seat.measured()?)))
}

/// The driver of an absent card: the best one, unless another one was typed.
fn absent_driver(options: &DeviceOptions) -> &'static dyn Driver {
    match options.backend {
        None | Some(CPU) => DRIVERS[0],
        Some(name) => drivers::named(name),
    }
}

/// The memory of a model on an absent card, its limit, and its description.
pub(super) fn absent_card<'a>(
    bytes: u64,
    options: &DeviceOptions,
    whole: &Whole<'a>,
) -> Result<(Load<'a>, Limit, String), ModelError> {
    let driver = absent_driver(options);
    let (dtype, _) = driver.assumed(options.dtype);
    let budget = options.memory_limit.unwrap_or_else(|| drivers::usable(bytes));
    let hardware = format!("a card of {} that is not here", memory::size(bytes));
    Ok((driver.load(whole, dtype, Home::Own)?, Limit::Typed(budget), hardware))
}

/// The policy with its estimate, and why they do not fit.
type Fits = (Option<(Keep, Estimate)>, Option<ModelError>);

fn fits(load: Load, limit: Limit) -> Result<Fits, ModelError> {
    Ok(match limit.choose(load) {
        Ok(takes) => (Some(takes), None),
        Err(e) => (Some(memory::least(Load { measured: None, ..load }.most_streamed())?), Some(e)),
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
        Kind::Software | Kind::Cpu => 3e9 * cpu::cores() as f64,
    }
}
