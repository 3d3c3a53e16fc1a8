//! The `devices` group: what computes in this process. A build refuses by name what it has not.

use super::Settings;
use super::values::{choice, memory, whole};
use crate::cli::refusal::Refusal;

/// `devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOptions {
    /// None: what the process may use.
    pub threads: Option<usize>,
    /// Bytes.
    pub memory_limit: Option<u64>,
    /// What products are computed in.
    pub dtype: Precision,
    /// Which devices compute.
    pub gpus: Gpus,
}

/// `--gpus`, of a build that has the CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gpus {
    /// What this process has, where it computes at all.
    Auto,
    /// No GPU: the CPU, where this process has to compute.
    None,
    /// The CPU, whatever the role.
    Cpu,
    /// Devices by index; the same one twice is two devices.
    Indices(Vec<usize>),
}

/// Most devices of a process.
const MOST_DEVICES: usize = 64;

/// `--dtype`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// bf16 where the device is faster in it, else f32.
    Auto,
    /// Nothing is rounded.
    F32,
    /// Factors of frozen products are rounded to bf16.
    Bf16,
}

/// The `devices` group alone: other verbs have it too.
pub fn devices(s: &Settings) -> Result<DeviceOptions, Refusal> {
    let backend = choice(s, "gpu-backend", &["auto", "cpu"], "this build has no other backend: cpu or auto")?;
    let gpus = gpus(s, backend)?;
    let dtype = match choice(s, "dtype", &["auto", "f32", "bf16"], "there are auto, f32 and bf16")? {
        "f32" => Precision::F32,
        "bf16" => Precision::Bf16,
        _ => Precision::Auto,
    };
    Ok(DeviceOptions { threads: whole(s, "threads", 1)?, memory_limit: memory(s)?, dtype, gpus })
}

fn gpus(s: &Settings, backend: &str) -> Result<Gpus, Refusal> {
    let list = s.list("gpus");
    match list {
        [] => return Ok(Gpus::Auto),
        [one] if one == "auto" => return Ok(Gpus::Auto),
        [one] if one == "none" => return Ok(Gpus::None),
        [one] if one == "cpu" => return Ok(Gpus::Cpu),
        _ => {}
    }
    let index = |v: &String| match v.parse::<usize>() {
        Ok(i) if backend == "cpu" && i < MOST_DEVICES => Ok(i),
        Ok(0) => Ok(0),
        Ok(i) if backend == "cpu" => {
            Err(s.refuse("gpus", format!("{i} is more than {MOST_DEVICES} devices")))
        }
        Ok(i) => {
            let why = format!(
                "there is no device {i}: this build computes on the CPU, device 0; give --gpu-backend cpu for \
                 several CPU devices"
            );
            Err(s.refuse("gpus", why))
        }
        Err(_) => {
            let why = format!("{v:?}: this build computes on the CPU: none, cpu, auto, or indices as 0,1");
            Err(s.refuse("gpus", why))
        }
    };
    match list.len() > MOST_DEVICES {
        true => Err(s.refuse("gpus", format!("{} are more than {MOST_DEVICES} devices", list.len()))),
        false => list.iter().map(index).collect::<Result<_, _>>().map(Gpus::Indices),
    }
}
