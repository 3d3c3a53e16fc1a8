//! The CPU as a device: its usable memory, and the slow reference implementation that every device is compared with.

use super::{Device, Driver, Share};
use crate::backend::facts::{Facts, Kind};
use crate::backend::{Backend, Cpu, Fault, Target};
use crate::cluster::worker::{Blueprint, Opener};
use crate::config::groups::{CPU, ComputeDtype};
use crate::devices::building::{How, Opened, Whole};
use crate::devices::cgroup;
use crate::model::decoder::Keep;
use crate::model::memory::{Home, Load};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};

/// The CPU: its own driver, with one device.
pub struct Processor;

impl Driver for Processor {
    fn name(&self) -> &'static str {
        CPU
    }

    fn devices(&self) -> &'static [Box<dyn Device>] {
        static ALL: OnceLock<[Box<dyn Device>; 1]> = OnceLock::new();
        ALL.get_or_init(|| [Box::new(Processor)])
    }

    fn load<'a>(&self, whole: &Whole<'a>, dtype: ComputeDtype, home: Home) -> Result<Load<'a>, ModelError> {
        Ok(Load { home, ..whole.load_on(target(dtype))? })
    }
}

impl Device for Processor {
    fn driver(&self) -> &'static dyn Driver {
        &Processor
    }

    fn facts(&self) -> &Facts {
        static FACTS: LazyLock<Facts> = LazyLock::new(|| {
            let features = features().into_iter().map(String::from).collect();
            Facts { name: processor(), kind: Kind::Cpu, features, ..Facts::default() }
        });
        &FACTS
    }

    fn memory(&self) -> (Option<u64>, Option<u64>) {
        (None, Some(free_memory()))
    }

    fn is_portable(&self) -> bool {
        Cpu::is_portable()
    }

    fn open(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        Ok(Box::new(cpu(share.dtype, share.threads)))
    }
}

/// The slow reference implementation that every device is compared with.
pub struct ReferenceCpu;

impl Opener for ReferenceCpu {
    fn backend(&self) -> &str {
        "cpu"
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let whole = Whole::of(blueprint);
        Box::new(Cpu::reference(1)).build(&whole, whole.build(How::resident(Keep::Everything)))
    }
}

/// The CPU with all threads of this process, for estimates of memory.
pub fn target(dtype: ComputeDtype) -> Target {
    cpu(dtype, 1).target().on_threads(cores())
}

/// The CPU in the given precision, or in the faster one on this machine.
pub fn cpu(dtype: ComputeDtype, threads: usize) -> Cpu {
    match dtype {
        ComputeDtype::Auto if Cpu::bf16_is_fast() => Cpu::bf16(threads),
        ComputeDtype::Auto | ComputeDtype::F32 => Cpu::new(threads),
        ComputeDtype::Bf16 => Cpu::bf16(threads),
        ComputeDtype::Portable => Cpu::portable(threads).unwrap_or_else(|| Cpu::new(threads)),
    }
}

/// Number of cores for this process, limited by affinity and a cgroup's quota.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Free memory in bytes: of the machine, limited by the cgroups of the process and by its own limits. Unknown values count as
/// unlimited.
pub fn free_memory() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
    });
    machine.into_iter().chain(cgroup::free(Path::new("/"))).chain(allowed()).min().unwrap_or(u64::MAX)
}

/// Remaining bytes of address space and data under the limits of the process (`ulimit -v`, `ulimit -d`).
#[cfg(target_os = "linux")]
fn allowed() -> Vec<u64> {
    use rustix::process::{Resource, getrlimit};
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let used = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    let left = |resource, name| {
        let limit = getrlimit(resource).current?;
        Some(limit.saturating_sub(used(name)?))
    };
    [left(Resource::As, "VmSize:"), left(Resource::Data, "VmData:")].into_iter().flatten().collect()
}

/// Other systems do not report the used amount.
#[cfg(not(target_os = "linux"))]
fn allowed() -> Vec<u64> {
    Vec::new()
}

/// Name of the processor.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH.into(), |(_, n)| n.trim().into())
}

/// Relevant instruction sets of the processor.
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

/// Relevant instruction sets of the processor.
#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}
