//! NVIDIA's cards through their own driver. They are used where `--gpu-backend cuda` names the backend, and not yet by
//! `auto`: the kernels have run on an interpreter, never on a card. So a card is tested before it computes anything.

use crate::backend::cuda::{self, Absent, AttentionTrial, Flash, Libcuda, Trial};
use crate::backend::wgpu::adapters::{Facts, Kind};
use crate::backend::{Cuda, Fault};
use crate::config::groups::ComputeDtype;
use crate::support::stderr::say;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A card in its driver's description and in the common one.
#[derive(Debug)]
pub struct FoundNvidia {
    /// The driver's description.
    pub device: cuda::Device,
    /// The common description.
    pub facts: Facts,
}

/// A card that the driver counts but cannot describe.
#[derive(Debug)]
pub struct Broken {
    /// The driver's index.
    pub ordinal: usize,
    /// The driver's error.
    pub why: String,
}

/// Feature of a card with bf16.
const BF16: &str = "bf16";

/// Cards listed by the driver.
type Cards = (Vec<FoundNvidia>, Vec<Broken>);

/// Why the driver lists no cards.
struct Silent {
    why: Absent,
    line: String,
}

/// The driver's list, read once.
fn asked() -> Result<&'static Cards, &'static Silent> {
    static ASKED: OnceLock<Result<Cards, Silent>> = OnceLock::new();
    let silent = |why: Absent| Silent { line: why.to_string(), why };
    ASKED.get_or_init(|| cuda::devices().map(described).map_err(silent)).as_ref()
}

/// Why an installed driver lists no cards.
pub fn silent() -> Option<&'static str> {
    asked().err().filter(|silent| silent.why != Absent::Driver).map(|silent| silent.line.as_str())
}

/// All cards in the order of their PCI addresses, or the reason why there are none.
pub fn all() -> Result<&'static [FoundNvidia], &'static str> {
    let (found, broken) = asked().map_err(|silent| silent.line.as_str())?;
    match (&found[..], broken.first()) {
        ([], Some(broken)) => Err(&broken.why),
        _ => Ok(found),
    }
}

/// The unusable cards, which are listed with their errors.
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

/// Whether the tensor cores multiply bf16 numbers.
pub(super) fn has_bf16(facts: &Facts) -> bool {
    facts.features.iter().any(|feature| feature == BF16)
}

/// Type of products: the typed one, else bf16 where the card has it; on other cards a trial decides.
pub fn settled(found: &FoundNvidia, dtype: ComputeDtype) -> ComputeDtype {
    match dtype {
        ComputeDtype::Auto if has_bf16(&found.facts) => ComputeDtype::Bf16,
        as_it_is => as_it_is,
    }
}

/// Opens the card, with `memory` bytes for all of its data.
pub fn device(found: &FoundNvidia, dtype: ComputeDtype, memory: Option<u64>) -> Result<Cuda<Libcuda>, Fault> {
    let device = Cuda::open(found.device.ordinal)?.within(memory.unwrap_or(u64::MAX));
    match settled(found, dtype) {
        ComputeDtype::Bf16 => Ok(tiered(device.bf16()?, found.device.ordinal)),
        ComputeDtype::Auto => Ok(rounded(device, found.device.ordinal)),
        ComputeDtype::F32 => Ok(device),
    }
}

/// Chooses the f16 class where the card's trial prefers it and no f32 was typed. A card has one trial per process,
/// because its class must not change.
fn rounded(device: Cuda<Libcuda>, ordinal: usize) -> Cuda<Libcuda> {
    static TAKEN: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    match taken.get(&ordinal) {
        Some(true) => device.f16(),
        Some(false) => device,
        None => {
            let device = device.sm70(Trial::default());
            // A trial without enough memory decides nothing: the next opening repeats it.
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

/// Results of a card's trials: for its products, and for its attention.
type Verdicts = (Option<bool>, Option<Flash>);

/// Applies the results of the card's trials. A card has one trial per process, because its class must not change.
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
            // A trial without enough memory decides nothing: the next opening repeats it.
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
