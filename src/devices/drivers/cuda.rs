//! NVIDIA's cards through their own driver. They are used where `--gpu-backend cuda` names the backend, and not yet by
//! `auto`: the kernels have run on an interpreter, never on a card. So a card is tested before it computes anything.

use super::{Device, Driver, Share, speaking, usable};
use crate::backend::cuda::{self, Absent, AttentionTrial, Flash, Libcuda, Trial};
use crate::backend::facts::{BF16, Facts, Kind};
use crate::backend::{Cuda, Fault, Target};
use crate::config::groups::ComputeDtype;
use crate::devices::building::{Opened, Whole};
use crate::model::memory::{Home, Load};
use crate::model::weights::ModelError;
use crate::support::stderr::say;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The driver.
pub struct Nvidia;

/// A card in its driver's description and in the common one.
struct Card {
    device: cuda::Device,
    facts: Facts,
}

impl Driver for Nvidia {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn is_automatic(&self) -> bool {
        false
    }

    fn devices(&self) -> &'static [Box<dyn Device>] {
        asked().as_ref().map_or(&[], |(found, _)| found)
    }

    fn broken(&self) -> &'static [(Facts, String)] {
        asked().as_ref().map_or(&[], |(_, broken)| broken)
    }

    fn absence(&self) -> String {
        match asked() {
            Err(silent) => silent.line.clone(),
            Ok((_, broken)) => broken.first().map_or("none is left", |(_, why)| why).into(),
        }
    }

    fn load<'a>(&self, whole: &Whole<'a>, dtype: ComputeDtype, home: Home) -> Result<Load<'a>, ModelError> {
        let footprint = match dtype {
            ComputeDtype::Bf16 => cuda::Footprint::of_bf16(),
            ComputeDtype::Auto | ComputeDtype::F32 => cuda::Footprint::of_f32(),
        };
        Ok(Load { home, ..speaking(whole).load_on(Target::Cuda(footprint))? })
    }

    fn assumed(&self, dtype: ComputeDtype) -> (ComputeDtype, &'static str) {
        match dtype {
            ComputeDtype::F32 => (dtype, "cuda, f32"),
            _ => (ComputeDtype::Bf16, "cuda, bf16"),
        }
    }
}

impl Device for Card {
    fn driver(&self) -> &'static dyn Driver {
        &Nvidia
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self) -> (Option<u64>, Option<u64>) {
        (Some(self.device.memory), cuda::free(self.device.ordinal).map(usable))
    }

    fn refusal(&self) -> Option<Fault> {
        let reason = self.device.unusable()?;
        Some(Fault::Device { device: self.facts.name.clone(), reason })
    }

    /// The typed type, else bf16 where the card has it; on other cards a trial decides.
    fn settled(&self, dtype: ComputeDtype) -> ComputeDtype {
        match dtype {
            ComputeDtype::Auto if self.facts.has_bf16() => ComputeDtype::Bf16,
            as_it_is => as_it_is,
        }
    }

    fn open(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        let ordinal = self.device.ordinal;
        let device = Cuda::open(ordinal)?.within(share.limit.bytes());
        Ok(Box::new(match self.settled(share.dtype) {
            ComputeDtype::Bf16 => tiered(device.bf16()?, ordinal),
            ComputeDtype::Auto => rounded(device, ordinal),
            ComputeDtype::F32 => device,
        }))
    }
}

/// Devices listed by the driver.
type Cards = (Vec<Box<dyn Device>>, Vec<(Facts, String)>);

/// Why the driver lists no cards.
struct Silent {
    why: Absent,
    line: String,
}

/// The driver's list, read once.
fn asked() -> &'static Result<Cards, Silent> {
    static ASKED: OnceLock<Result<Cards, Silent>> = OnceLock::new();
    let silent = |why: Absent| Silent { line: why.to_string(), why };
    ASKED.get_or_init(|| cuda::devices().map(described).map_err(silent))
}

/// Why an installed driver lists no cards.
pub fn silent() -> Option<&'static str> {
    asked().as_ref().err().filter(|silent| silent.why != Absent::Driver).map(|silent| silent.line.as_str())
}

fn described(found: cuda::Found) -> Cards {
    let driver = format!("NVIDIA {}", cuda::build(found.driver));
    let card = |device: cuda::Device| {
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
        Card { device, facts }
    };
    let mut cards: Vec<Card> = found.devices.into_iter().map(card).collect();
    cards.sort_by(|a, b| a.device.pci.cmp(&b.device.pci));
    let broken = |(ordinal, why): (usize, Absent)| {
        let name = format!("device {ordinal} of NVIDIA's driver, which cannot describe it");
        let facts = Facts { name, kind: Kind::Discrete, api: "cuda".into(), ..Facts::default() };
        (facts, why.to_string())
    };
    let cards = cards.into_iter().map(|card| Box::new(card) as _).collect();
    (cards, found.broken.into_iter().map(broken).collect())
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
    let report = |what: &str, why: Option<&str>| {
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
            report("products stay", device.below());
            device
        }
    };
    match *attention {
        Some(flash) => device.attending(flash),
        None => {
            let device = device.attention_sm90a(AttentionTrial::default());
            *attention = (!device.undecided()).then(|| device.flash());
            report("attention stays", device.attention_below());
            device
        }
    }
}

#[cfg(test)]
mod tests;
