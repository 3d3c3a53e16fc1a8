//! NVIDIA's cards through their own driver. They are taken where `--gpu-backend cuda` names the backend, and not yet by
//! `auto`: the kernels have run on an interpreter, never on a card. So a card proves itself before it computes anything.

use crate::backend::cuda::{self, Absent, AttentionTrial, Flash, Libcuda, Trial};
use crate::backend::wgpu::adapters::{Facts, Kind};
use crate::backend::{Cuda, Fault};
use crate::config::groups::ComputeDtype;
use crate::support::stderr::say;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A card as its driver describes it, and as cards of any driver are described.
#[derive(Debug)]
pub struct FoundNvidia {
    /// The driver's.
    pub device: cuda::Device,
    /// Everybody's.
    pub facts: Facts,
}

/// A card that the driver counts and cannot describe.
#[derive(Debug)]
pub struct Broken {
    /// The driver's number.
    pub ordinal: usize,
    /// What the driver said.
    pub why: String,
}

/// A card that has it says so among its features.
const BF16: &str = "bf16";

/// What the driver lists.
type Cards = (Vec<FoundNvidia>, Vec<Broken>);

/// Why the driver lists nothing.
struct Silent {
    why: Absent,
    line: String,
}

/// What the driver said, asked once.
fn asked() -> Result<&'static Cards, &'static Silent> {
    static ASKED: OnceLock<Result<Cards, Silent>> = OnceLock::new();
    let silent = |why: Absent| Silent { line: why.to_string(), why };
    ASKED.get_or_init(|| cuda::devices().map(described).map_err(silent)).as_ref()
}

/// Why a driver that is there lists nothing.
pub fn silent() -> Option<&'static str> {
    asked().err().filter(|silent| silent.why != Absent::Driver).map(|silent| silent.line.as_str())
}

/// All of them, by where they are plugged in; or the one line that says why there are none.
pub fn all() -> Result<&'static [FoundNvidia], &'static str> {
    let (found, broken) = asked().map_err(|silent| silent.line.as_str())?;
    match (&found[..], broken.first()) {
        ([], Some(broken)) => Err(&broken.why),
        _ => Ok(found),
    }
}

/// Those that cannot be used, which nobody should look for in vain.
pub fn broken() -> &'static [Broken] {
    asked().map_or(&[], |(_, broken)| broken)
}

fn described(found: cuda::Found) -> Cards {
    let driver = format!("NVIDIA {}", cuda::build(found.driver));
    let one = |device: cuda::Device| {
        let (major, minor) = device.capability;
        let mut features = vec![format!("compute {major}.{minor}")];
        features.extend((major >= 8).then(|| BF16.to_string()));
        let facts = Facts {
            name: device.name.clone(),
            kind: if device.integrated { Kind::Integrated } else { Kind::Discrete },
            api: "cuda".into(),
            driver: driver.clone(),
            pci: device.pci.clone(),
            card: device.pci.trim_start_matches("0000:").into(),
            features,
            limits: BTreeMap::new(),
        };
        FoundNvidia { device, facts }
    };
    let mut all: Vec<FoundNvidia> = found.devices.into_iter().map(one).collect();
    all.sort_by(|a, b| a.device.pci.cmp(&b.device.pci));
    let broken = found.broken.into_iter().map(|(ordinal, why)| Broken { ordinal, why: why.to_string() });
    (all, broken.collect())
}

/// Whether its tensor cores multiply bf16 numbers.
pub(super) fn has_bf16(facts: &Facts) -> bool {
    facts.features.iter().any(|feature| feature == BF16)
}

/// What it computes in: where nobody says, what it is fastest in, which a trial decides where it has no bf16.
pub fn settled(found: &FoundNvidia, dtype: ComputeDtype) -> ComputeDtype {
    match dtype {
        ComputeDtype::Auto if has_bf16(&found.facts) => ComputeDtype::Bf16,
        as_it_is => as_it_is,
    }
}

/// Opens it, with `memory` bytes for all that it holds.
pub fn device(found: &FoundNvidia, dtype: ComputeDtype, memory: Option<u64>) -> Result<Cuda<Libcuda>, Fault> {
    let device = Cuda::open(found.device.ordinal)?.within(memory.unwrap_or(u64::MAX));
    match settled(found, dtype) {
        ComputeDtype::Bf16 => Ok(tiered(device.bf16()?, found.device.ordinal)),
        ComputeDtype::Auto => Ok(rounded(device, found.device.ordinal)),
        ComputeDtype::F32 => Ok(device),
    }
}

/// In the f16 class, where the card's trial chose it: nobody typed that factors keep all of f32. A card is tried once in
/// a process: its class must stay what it is.
fn rounded(device: Cuda<Libcuda>, ordinal: usize) -> Cuda<Libcuda> {
    static TAKEN: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    match taken.get(&ordinal) {
        Some(true) => device.f16(),
        Some(false) => device,
        None => {
            let device = device.sm70(Trial::default());
            // For want of memory nothing was decided: the next opening asks again.
            if !device.undecided() {
                taken.insert(ordinal, device.below().is_none());
            }
            if let Some(why) = device.below() {
                say!("cuda {ordinal}: products stay in f32: {why}");
            }
            device
        }
    }
}

/// What was decided of a card: of its products, and of its attention.
type Verdicts = (Option<bool>, Option<Flash>);

/// With what the card's trials chose. A card is tried once in a process: its class must stay what it is.
fn tiered(device: Cuda<Libcuda>, ordinal: usize) -> Cuda<Libcuda> {
    static TAKEN: Mutex<BTreeMap<usize, Verdicts>> = Mutex::new(BTreeMap::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (products, attention) = taken.entry(ordinal).or_default();
    let told = |what: &str, why: Option<&str>| {
        if let Some(why) = why {
            say!("cuda {ordinal}: {what} with mma: {why}");
        }
    };
    let device = match *products {
        Some(true) => device.untried(),
        Some(false) => device,
        None => {
            let device = device.sm90a(Trial::default());
            // For want of memory nothing was decided: the next opening asks again.
            *products = (!device.undecided()).then(|| device.below().is_none());
            told("products stay", device.below());
            device
        }
    };
    match *attention {
        Some(flash) => device.attending(flash),
        None => {
            let device = device.attention_sm90a(AttentionTrial::default());
            *attention = (!device.undecided()).then(|| device.flash());
            told("attention stays", device.attention_below());
            device
        }
    }
}
