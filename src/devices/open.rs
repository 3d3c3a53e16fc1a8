//! A whole model on the only device of a verb: the first chosen one.

use super::building::{How, Opened, Whole, note_streaming};
use super::chain::{self, hardware_of};
use super::choose::{Chosen, Picked};
use super::drivers::{self, Device, cpu};
use super::seat::Seat;
use crate::backend::cpu::Peaks;
use crate::backend::{Backend, Cpu, Notes};
use crate::config::groups::{CPU, ComputeDtype};
use crate::config::refusal::Refusal;
use crate::model::config::Config;
use crate::model::decoder::{Build, Decoder, Keep};
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Estimate, Fit, Home, Limit, Load, Offload, Part};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;
use crate::support::stderr::say;
use crate::support::waiting::{LOADING, during};

/// Requirements of a model to build.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Tokens of the longest microbatch; 0 without training.
    pub tokens: usize,
    /// Most microbatches of a step.
    pub microbatches: usize,
    /// Measured memory of the device, where available.
    pub measured: Option<Fit>,
    /// How the model is built on a CPU, where [`settle`] has chosen it.
    pub how: Option<How>,
}

impl Need {
    /// Requirements of generation.
    pub const SPEECH: Need = Need { tokens: 0, microbatches: 1, measured: None, how: None };
}

/// Builds a whole model on the chosen device.
pub fn open(
    chosen: &Chosen,
    model: (&Config, &dyn Tensors, &LoraSpec),
    class_weights: Option<Vec<f32>>,
    need: Need,
) -> Result<Box<dyn Model>, Refusal> {
    during("loading the model", &LOADING, || on_first(chosen, model, class_weights, need))
}

fn on_first(
    chosen: &Chosen,
    model: (&Config, &dyn Tensors, &LoraSpec),
    class_weights: Option<Vec<f32>>,
    need: Need,
) -> Result<Box<dyn Model>, Refusal> {
    let (config, tensors, lora) = model;
    let Need { tokens, microbatches, measured, how } = need;
    let (class_weights, offload) = (class_weights.as_deref(), chosen.options.offload);
    let whole = Whole { config, tensors, lora, class_weights, tokens, measured, offload };
    if let Some(range) = chosen.first_line() {
        // As a device alone.
        let seats = chain::seats(chosen, range, chain::free_memory(chosen)).exact();
        return seats.proved(&whole).map_err(|e| of_device(&seats.name(), e));
    }
    if let Some((pick, card)) = first_card(chosen) {
        // Generation on one device uses full precision unless a lower one was typed.
        let dtype = match chosen.options.dtype {
            ComputeDtype::Auto => ComputeDtype::F32,
            typed => typed,
        };
        let seat = Seat::alone(card, dtype, threads(chosen), (chosen.options.memory_limit, offload));
        match seat.proved(&whole) {
            Ok(model) => return Ok(model),
            Err(e) if may_fall_back(chosen, dtype) && !matches!(e, ModelError::Memory { .. }) => {
                say!("warning: {}: {e}; computes on the CPU", pick.name);
            }
            Err(e) => return Err(of_device(&pick.name, e)),
        }
    }
    let cpu = processor(chosen);
    let how = match (how, tokens) {
        (Some(how), _) => how,
        (None, 0) => {
            let load = Load { home: Home::Untrained, ..drivers::speaking(&whole).load(&cpu)? };
            let streamed = match limit(chosen).choose(load) {
                Ok((_, takes)) => takes.streamed,
                Err(ModelError::Memory { .. }) => load.most_streamed().streamed(),
                Err(e) => return Err(e.into()),
            };
            note_streaming(streamed, config.layers);
            How { keep: Keep::Inputs, streamed, group: 1 }
        }
        (None, _) => limit(chosen).choose(Load { microbatches, ..whole.load(&cpu)? })?.into(),
    };
    LOADING.begin(config.layers as u64);
    Ok(Box::new(cpu).build(&whole, whole.build(how))?)
}

/// Whether the CPU may compute in place of a card.
fn may_fall_back(chosen: &Chosen, dtype: ComputeDtype) -> bool {
    chosen.options.backend.is_none() && (dtype != ComputeDtype::Portable || Cpu::is_portable())
}

/// The first chosen device, if it is a card.
fn first_card(chosen: &Chosen) -> Option<(&Picked, &'static dyn Device)> {
    let card = chosen.picks.first().filter(|pick| pick.device.driver != CPU)?;
    Some((card, chain::found(card.device)))
}

fn of_device(name: &str, e: ModelError) -> Refusal {
    let refusal: Refusal = e.into();
    Refusal { line: format!("{name}: {}", refusal.line), ..refusal }
}

/// Chooses how the model is built on the CPU, by the memory that is free now.
pub fn settle(
    chosen: &Chosen,
    model: (&Config, &dyn Tensors, &LoraSpec),
    need: Need,
) -> Result<How, Refusal> {
    Ok(limit(chosen).choose(load(chosen, model, need)?)?.into())
}

/// Estimated memory of a model with the settled policy.
pub fn takes(
    chosen: &Chosen,
    model: (&Config, &dyn Tensors, &LoraSpec),
    need: Need,
) -> Result<Estimate, Refusal> {
    let How { keep, streamed, group } = need.how.unwrap_or(How::resident(Keep::Inputs));
    let load = load(chosen, model, need)?;
    let load = Load { offload: Offload::Layers(streamed), part: Part { group, ..load.part }, ..load };
    Ok(memory::estimate(load, keep)?)
}

/// Input of the memory estimate.
fn load<'a>(
    chosen: &Chosen,
    (config, tensors, lora): (&'a Config, &'a dyn Tensors, &'a LoraSpec),
    Need { tokens, microbatches, measured, .. }: Need,
) -> Result<Load<'a>, ModelError> {
    let offload = chosen.options.offload;
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured, offload };
    Ok(Load { microbatches, ..whole.load_on(cpu::target(chosen.options.dtype))? })
}

/// The numeric class of the CPU, as opened by [`open`].
pub fn cpu_class(chosen: &Chosen) -> String {
    Backend::class(&cpu::cpu(chosen.options.dtype, 1))
}

/// One layer on the CPU; the first one with the embedding, the last one with the head.
pub fn layer(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    layer: usize,
) -> Result<Box<dyn Model>, Refusal> {
    let cpu = processor(chosen);
    let layers = layer..layer + 1;
    let build = Build { layers, keep: Keep::Inputs, ..Build::whole(config) };
    Ok(Box::new(Decoder::load(cpu, config, tensors, lora, build)?))
}

/// Refuses a model that does not fit even with one [`layer`] at a time: a layer with embedding and head, for `tokens`
/// tokens.
pub fn fits_by_layers(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<(), Refusal> {
    let one = Config { layers: 1, ..config.clone() };
    let offload = Offload::Never;
    let whole = Whole { config: &one, tensors, lora, class_weights: None, tokens, measured: None, offload };
    let needed = memory::estimate(whole.load_on(cpu::target(chosen.options.dtype))?, Keep::Inputs)?.total();
    let limit = limit(chosen).bytes();
    if needed <= limit {
        return Ok(());
    }
    let way_out = "raise --memory-limit, or export where there is more".to_owned();
    Err(ModelError::Memory { needed, limit, way_out }.into())
}

/// The CPU backend with all threads of this process.
fn processor(chosen: &Chosen) -> Cpu {
    cpu::cpu(chosen.options.dtype, threads(chosen))
}

fn threads(chosen: &Chosen) -> usize {
    chain::threads_of(chosen)
}

fn limit(chosen: &Chosen) -> Limit {
    Limit::of(chosen.options.memory_limit, || chain::free_memory(chosen))
}

/// A model with timed verbs.
pub struct Profiled {
    /// The model.
    pub model: Box<dyn Model>,
    /// Times of the verbs.
    pub notes: Notes,
    /// Peak speeds, and the number of threads; `None` for a GPU, whose verbs are not timed.
    pub peaks: Option<(Peaks, usize)>,
    /// Name of the hardware.
    pub hardware: String,
}

/// Opens the first chosen device like a run, with timers. A GPU's verbs return before they have computed, so only whole
/// passes are timed.
pub fn profile(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    tokens: usize,
) -> Result<Profiled, Refusal> {
    let mut hardware = hardware_of(chosen, chosen.devices().next().unwrap_or(0..1));
    let offload = chosen.options.offload;
    let whole = Whole { config, tensors, lora, class_weights: None, tokens, measured: None, offload };
    let opened = match (chosen.first_line(), first_card(chosen)) {
        (Some(range), _) => {
            let seats = chain::seats(chosen, range, chain::free_memory(chosen));
            hardware = seats.measured_on(&whole, hardware);
            Some((seats.name(), seats.proved(&whole)))
        }
        (None, Some((pick, card))) => {
            let seat = chain::seat(chosen, 0, card, chain::free_memory(chosen));
            if let Ok(how) = seat.choose(&whole) {
                hardware = how.measured_on(hardware);
            }
            Some((pick.name.clone(), seat.proved(&whole)))
        }
        (None, None) => None,
    };
    if let Some((name, opened)) = opened {
        let model = opened.map_err(|e| of_device(&name, e))?;
        return Ok(Profiled { model, notes: Notes::default(), peaks: None, hardware });
    }
    let (cpu, threads) = (processor(chosen), threads(chosen));
    let peaks = cpu.peaks();
    let how: How = limit(chosen).choose(whole.load(&cpu)?)?.into();
    let (timed, notes) = cpu.timed();
    note_streaming(how.streamed, config.layers);
    let hardware = how.measured_on(hardware);
    let model = Decoder::load(timed, config, tensors, lora, whole.build(how))?;
    Ok(Profiled { model: Box::new(model), notes, peaks: Some((peaks, threads)), hardware })
}
