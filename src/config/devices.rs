//! The `devices` group: which devices compute in this process. Availability is checked by `devices::choose`; values
//! that are invalid on every machine are refused here.

use super::refusal::Refusal;
use super::settings::Settings;
use super::values::{choice, memory, whole};
use crate::model::memory::Offload;
use std::ops::Range;

/// `devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// `None`: all threads that the process may use.
    pub threads: Option<usize>,
    /// Bytes per adapter.
    pub memory_limit: Option<u64>,
    /// Type of products.
    pub dtype: ComputeDtype,
    /// Layers whose weights are read again in each pass.
    pub offload: Offload,
    /// Devices that compute.
    pub gpus: Gpus,
    /// Backend of the devices: one of [`BACKENDS`], or an error. `None`: the best available one; a device that fails
    /// falls back.
    pub backend: Option<&'static str>,
}

/// `--gpus`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gpus {
    /// All devices of this process, if it computes.
    Auto,
    /// A part of them, where several processes share the machine.
    Share(Part),
    /// No GPU: the CPU, if this process must compute.
    None,
    /// The CPU, in every role.
    Cpu,
    /// These devices; a device named twice counts as two.
    Named(Vec<Wanted>),
}

/// One of several equal parts, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Which one.
    pub at: usize,
    /// Of how many.
    pub of: usize,
}

impl Part {
    /// What this part gets of `count` things. Where there are fewer than parts, several parts get the same one.
    pub fn range(self, count: usize) -> Range<usize> {
        let start = self.at * count / self.of;
        start..((self.at + 1) * count / self.of).max((start + 1).min(count))
    }

    /// The number of parts that get thing `index` of `count`.
    pub fn sharing(self, count: usize, index: usize) -> usize {
        (0..self.of).filter(|&at| Part { at, ..self }.range(count).contains(&index)).count()
    }
}

/// A named device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// By its index in the list of its backend.
    Index(usize),
    /// By a part of its name.
    Part(String),
    /// The CPU, together with others.
    Cpu,
    /// Devices that hold the layers of one model together: one device of the run.
    Line(Vec<Wanted>),
}

impl DeviceOptions {
    /// The number of processes that share this machine's cores and memory, as far as is known.
    pub fn processes(&self) -> usize {
        match self.gpus {
            Gpus::Share(part) => part.of,
            Gpus::Auto | Gpus::None | Gpus::Cpu | Gpus::Named(_) => 1,
        }
    }
}

impl Wanted {
    /// Whether it needs no driver of cards.
    pub fn is_cpu(&self) -> bool {
        match self {
            Wanted::Cpu => true,
            Wanted::Line(seats) => seats.iter().all(Wanted::is_cpu),
            Wanted::Index(_) | Wanted::Part(_) => false,
        }
    }

    /// The devices themselves.
    pub fn seats(&self) -> &[Wanted] {
        match self {
            Wanted::Line(seats) => seats,
            one => std::slice::from_ref(one),
        }
    }
}

/// Backends of `--gpu-backend`, best first.
pub const BACKENDS: [&str; 3] = ["cuda", "wgpu", CPU];
/// The backend that needs no card: several devices are parts of it.
pub const CPU: &str = "cpu";

/// Maximum threads of a process, above the number of cores of any machine.
const MOST_THREADS: usize = 512;

/// Maximum devices of a process.
const MOST_DEVICES: usize = 64;

/// `--dtype`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeDtype {
    /// bf16, or f16 on a card without bf16, where the device is faster with it; else f32.
    Auto,
    /// No rounding.
    F32,
    /// Factors of products are rounded to bf16.
    Bf16,
    /// No rounding, and the same bits on every device.
    Portable,
}

/// Reads the `devices` group only, which other verbs have too.
pub fn devices(s: &Settings) -> Result<DeviceOptions, Refusal> {
    let backend = backend(s)?;
    let gpus = gpus(s, backend)?;
    let dtype = match choice(
        s,
        "dtype",
        &["auto", "f32", "bf16", "portable"],
        "expected auto, f32, bf16 or portable",
    )? {
        "f32" => ComputeDtype::F32,
        "bf16" => ComputeDtype::Bf16,
        "portable" => ComputeDtype::Portable,
        _ => ComputeDtype::Auto,
    };
    let threads = whole(s, "threads", 1)?;
    if let Some(n) = threads.filter(|n| *n > MOST_THREADS) {
        return Err(s.refuse("threads", format!("must be at most {MOST_THREADS}, is {n}")));
    }
    let memory_limit = memory(s, "memory-limit")?;
    Ok(DeviceOptions { threads, memory_limit, dtype, offload: offload(s)?, gpus, backend })
}

fn offload(s: &Settings) -> Result<Offload, Refusal> {
    match s.text("offload")? {
        Some("never") => Ok(Offload::Never),
        None | Some("auto") => Ok(Offload::Auto),
        Some(n) => match n.parse() {
            Ok(layers) => Ok(Offload::Layers(layers)),
            Err(_) => Err(s.malformed("offload", "expected auto, never or a number of layers".into())),
        },
    }
}

fn backend(s: &Settings) -> Result<Option<&'static str>, Refusal> {
    let known = ["auto", "cuda", "wgpu", CPU];
    let typed = choice(s, "gpu-backend", &known, "expected auto, cuda, wgpu or cpu")?;
    Ok(BACKENDS.into_iter().find(|name| *name == typed))
}

fn gpus(s: &Settings, backend: Option<&str>) -> Result<Gpus, Refusal> {
    let refuse = |why: String| Err(s.refuse("gpus", why));
    let list = s.list("gpus");
    let devices = list.iter().map(|v| v.split('+').count()).sum::<usize>();
    if devices > MOST_DEVICES {
        return refuse(format!("{devices} are more than {MOST_DEVICES} devices"));
    }
    if let (true, Some(word)) = (list.len() > 1, list.iter().find(|v| matches!(v.as_str(), "auto" | "none")))
    {
        return refuse(format!("{word} cannot be combined with other devices"));
    }
    let wanted = match list {
        [] => return Ok(Gpus::Auto),
        [one] if one == "auto" => return Ok(Gpus::Auto),
        [one] if one == "none" => return Ok(Gpus::None),
        [one] if one.contains('/') => return part(one).map(Gpus::Share).or_else(refuse),
        [one] if one == "cpu" && backend.is_none_or(|name| name == CPU) => return Ok(Gpus::Cpu),
        list => match list.iter().map(|v| wanted(v)).collect::<Result<Vec<_>, _>>() {
            Ok(wanted) => wanted,
            Err(why) => return refuse(why),
        },
    };
    for wanted in wanted.iter().flat_map(Wanted::seats) {
        match (backend, wanted) {
            (Some(name), Wanted::Cpu) if name != CPU => {
                return refuse(format!("cpu is no device of --gpu-backend {name}: leave --gpu-backend out"));
            }
            (Some(CPU), Wanted::Part(part)) => {
                return refuse(format!(
                    "{part:?}: devices of --gpu-backend cpu have indices below {MOST_DEVICES}, as 0,1"
                ));
            }
            _ => {}
        }
    }
    Ok(Gpus::Named(wanted))
}

/// A part of the devices, counted from 1 as in `1/2`.
fn part(text: &str) -> Result<Part, String> {
    let (nth, of) = text.split_once('/').unwrap_or((text, ""));
    match (nth.trim().parse::<usize>(), of.trim().parse::<usize>()) {
        (Ok(nth), Ok(of)) if (1..=of).contains(&nth) && of <= MOST_DEVICES => Ok(Part { at: nth - 1, of }),
        _ => Err(format!("{text:?} is no part: the first of two is 1/2, the second 2/2")),
    }
}

/// A device, or several with `+` between them.
fn wanted(text: &str) -> Result<Wanted, String> {
    let one = |text: &str| match text.parse() {
        // A card's name may be a number, such as 4090.
        Ok(index) if index < MOST_DEVICES => Wanted::Index(index),
        Ok(_) => Wanted::Part(text.into()),
        Err(_) if text == "cpu" => Wanted::Cpu,
        Err(_) => Wanted::Part(text.into()),
    };
    if !text.contains('+') {
        return Ok(one(text));
    }
    let seats: Vec<&str> = text.split('+').map(str::trim).collect();
    match seats.iter().find(|seat| matches!(**seat, "" | "auto" | "none")) {
        Some(seat) => Err(format!("{text}: {seat:?} is no device: a model is divided as in 0+1 or cpu+cpu")),
        None => Ok(Wanted::Line(seats.into_iter().map(one).collect())),
    }
}
