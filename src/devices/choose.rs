//! Choice of devices from the options and the available hardware: a pure function, so that every error is testable
//! without the hardware. A software adapter is used only where it was named, because the CPU backend is faster; `auto`
//! falls back and reports this, a missing backend that was given by name is an error.

use super::nvidia;
use crate::backend::wgpu::adapters::{self, Facts, Kind};
use crate::config::groups::{ComputeDtype, DeviceOptions, Driver, Gpus, Wanted};
use crate::config::refusal::Refusal;

/// A chosen device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picked {
    /// Name of the device in all messages.
    pub name: String,
    /// Identity of the device.
    pub device: DeviceId,
    /// Number of devices of this process on the same adapter, including this one; they share its memory.
    pub sharing: usize,
}

/// Identity of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceId {
    /// This processor.
    Cpu,
    /// An adapter, by its index.
    Gpu(usize),
    /// A card of NVIDIA's own driver, by its index.
    Cuda(usize),
}

/// The chosen devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// At least one.
    pub picks: Vec<Picked>,
    /// Notes for a user who did not choose.
    pub notes: Vec<String>,
    /// The options as typed.
    pub options: DeviceOptions,
}

impl Chosen {
    /// Whether a single CPU is the only device.
    pub fn is_one_cpu(&self) -> bool {
        matches!(&self.picks[..], [Picked { device: DeviceId::Cpu, .. }])
    }
}

/// Chooses among the devices of this machine. If only the CPU was named, no driver is loaded.
pub fn choose(options: &DeviceOptions) -> Result<Chosen, Refusal> {
    if options.backend == Driver::Cuda && !matches!(options.gpus, Gpus::None | Gpus::Cpu) {
        let facts: Vec<&Facts> = nvidia::all().unwrap_or_default().iter().map(|found| &found.facts).collect();
        return among(options, &facts, &|| nvidia::all().err().unwrap_or("none is left").to_string());
    }
    let cpu = options.backend == Driver::Cpu || matches!(options.gpus, Gpus::None | Gpus::Cpu);
    let found = if cpu { &[] } else { adapters::all() };
    let facts: Vec<&Facts> = found.iter().map(|found| &found.facts).collect();
    among(options, &facts, &|| adapters::why_none().to_string())
}

/// Chooses among `facts`; `why` gives the reason why there are none, or no real ones.
fn among(options: &DeviceOptions, facts: &[&Facts], why: &dyn Fn() -> String) -> Result<Chosen, Refusal> {
    let mut notes = Vec::new();
    let devices = match (&options.gpus, options.backend) {
        (Gpus::None | Gpus::Cpu, _) | (Gpus::Auto, Driver::Cpu) => vec![(DeviceId::Cpu, "cpu".to_string())],
        (Gpus::Named(wanted), Driver::Cpu) => wanted.iter().map(part_of_the_cpu).collect(),
        (Gpus::Auto, backend) => match (cards(facts), backend) {
            (cards, _) if !cards.is_empty() => cards.into_iter().map(|i| named(facts, i)).collect(),
            (_, Driver::Wgpu | Driver::Cuda) => {
                return Err(refuse(format!("--gpu-backend {}: {}", backend.name(), no_card(facts, why))));
            }
            _ => {
                notes.push("note: computes on the CPU: no GPU found (finetune devices says why)".into());
                vec![(DeviceId::Cpu, "cpu".into())]
            }
        },
        (Gpus::Named(wanted), _) => {
            let found: Result<Vec<_>, _> = wanted.iter().map(|w| find(w, facts, why)).collect();
            found.map_err(refuse)?
        }
    };
    if options.dtype == ComputeDtype::Bf16
        && let Some((_, name)) = devices.iter().find(|(device, _)| !has_bf16(*device, facts))
    {
        let why =
            format!("--dtype bf16: {name} has no bf16 arithmetic: leave --dtype out, or use --gpus cpu");
        return Err(refuse(why));
    }
    notes.extend(slow(&devices, facts));
    Ok(Chosen { picks: twins(devices), notes, options: options.clone() })
}

fn has_bf16(device: DeviceId, facts: &[&Facts]) -> bool {
    match device {
        DeviceId::Cpu => true,
        DeviceId::Gpu(_) => false,
        DeviceId::Cuda(index) => facts.get(index).is_some_and(|facts| nvidia::has_bf16(facts)),
    }
}

fn refuse(line: String) -> Refusal {
    Refusal::configuration(line)
}

/// Every physical card once, under its first driver; without software adapters.
fn cards(facts: &[&Facts]) -> Vec<usize> {
    let first = |i: &usize| facts.iter().position(|f| f.card == facts[*i].card) == Some(*i);
    (0..facts.len()).filter(|i| facts[*i].kind != Kind::Software).filter(first).collect()
}

fn part_of_the_cpu(wanted: &Wanted) -> (DeviceId, String) {
    match wanted {
        Wanted::Index(index) => (DeviceId::Cpu, format!("cpu {index}")),
        Wanted::Cpu | Wanted::Part(_) => (DeviceId::Cpu, "cpu".into()),
    }
}

fn named(facts: &[&Facts], index: usize) -> (DeviceId, String) {
    // Without additions of drivers: `llvmpipe (LLVM 15.0.6, 256 bits)`.
    let name = facts[index].name.split(" (").next().unwrap_or_default();
    match facts[index].api.as_str() {
        "cuda" => (DeviceId::Cuda(index), format!("cuda {index} {name}")),
        _ => (DeviceId::Gpu(index), format!("wgpu {index} {name}")),
    }
}

/// Why there is no card, with a solution.
fn no_card(facts: &[&Facts], why: &dyn Fn() -> String) -> String {
    match facts {
        [] => format!("no GPU: {}", why()),
        [software, ..] => format!(
            "no GPU but {}, a software driver, which is slower than the CPU backend and used only if --gpus names \
             it: {}",
            software.name,
            why()
        ),
    }
}

fn find(wanted: &Wanted, facts: &[&Facts], why: &dyn Fn() -> String) -> Result<(DeviceId, String), String> {
    let list = || {
        let names = (0..facts.len()).map(|i| format!("device {i} {}", facts[i].name));
        names.collect::<Vec<_>>().join(", ")
    };
    match wanted {
        Wanted::Cpu => Ok((DeviceId::Cpu, "cpu".into())),
        Wanted::Index(index) if *index < facts.len() => Ok(named(facts, *index)),
        _ if facts.is_empty() => Err(format!("--gpus: no GPU: {} (the CPU is --gpus cpu)", why())),
        Wanted::Index(index) => Err(format!("--gpus: there is no device {index}; what there is: {}", list())),
        Wanted::Part(part) => {
            let has = |text: &str| text.to_lowercase().contains(&part.to_lowercase());
            let mut matching: Vec<usize> =
                (0..facts.len()).filter(|i| has(&facts[*i].name) || has(&facts[*i].driver)).collect();
            // A card with two drivers counts once.
            if matching.iter().all(|i| facts[*i].card == facts[matching[0]].card) {
                matching.truncate(1);
            }
            match matching[..] {
                [] => Err(format!("--gpus: no device has {part:?} in its name; what there is: {}", list())),
                [one] => Ok(named(facts, one)),
                _ => {
                    let names = matching.iter().map(|i| format!("{i} {}", facts[*i].name));
                    let names = names.collect::<Vec<_>>().join(" and ");
                    Err(format!("--gpus: {part:?} matches {names}: give the index"))
                }
            }
        }
    }
}

/// Numbers the names of a device that was given twice, because it counts as two devices.
fn twins(devices: Vec<(DeviceId, String)>) -> Vec<Picked> {
    let picked = |(at, (device, name)): (usize, &(DeviceId, String))| {
        let sharing = devices.iter().filter(|(other, _)| other == device).count();
        let twin = 1 + devices[..at].iter().filter(|(_, other)| other == name).count();
        let name = if twin > 1 { format!("{name} ({twin})") } else { name.clone() };
        Picked { name, device: *device, sharing }
    };
    devices.iter().enumerate().map(picked).collect()
}

/// A note for a user who names a software adapter.
fn slow(devices: &[(DeviceId, String)], facts: &[&Facts]) -> Option<String> {
    let software = devices.iter().find_map(|(device, _)| match device {
        DeviceId::Gpu(i) if facts[*i].kind == Kind::Software => Some(&facts[*i].name),
        _ => None,
    })?;
    Some(format!("note: {software} is a software driver: --gpus cpu is faster"))
}

#[cfg(test)]
mod tests;
