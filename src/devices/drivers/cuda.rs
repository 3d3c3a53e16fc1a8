//! NVIDIA's cards through their own driver. They are used where `--gpu-backend cuda` names the backend, and not yet by
//! `auto`: the kernels have run on an interpreter, never on a card. So a card is tested before it computes anything.

use super::verdicts::{self, Verdicts};
use super::{Device, Driver, Share, speaking, usable};
use crate::backend::cuda::Driver as _;
use crate::backend::cuda::{self, Absent, AttentionTrial, Flash, Libcuda, Trial};
use crate::backend::facts::{BF16, Facts, Kind};
use crate::backend::{Backend, Cuda, Fault, Target};
use crate::config::groups::ComputeDtype;
use crate::devices::building::{Opened, Whole};
use crate::model::memory::{Home, Load};
use crate::model::weights::ModelError;
use crate::support::stderr::say;
use std::collections::BTreeMap;
use std::sync::OnceLock;

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

impl Card {
    /// Under which the verdicts of its trials are kept.
    fn key(&self) -> String {
        verdicts::key(&self.device, &self.facts.driver)
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
        let (device, kernels) = classed(device, self.settled(share.dtype))?;
        let (mut known, key) = (verdicts::known(), self.key());
        let mut verdicts = known.of(&key);
        let (device, all) = applied(device, kernels, verdicts);
        if all {
            return Ok(Box::new(device));
        }
        let device = tried(device, kernels, (&mut verdicts, ordinal));
        known.keep(&key, verdicts);
        Ok(Box::new(device))
    }

    /// No kernel is launched: the verdicts of earlier trials count, and the class says where one is missing.
    fn class(&self, dtype: ComputeDtype) -> Result<String, Fault> {
        let (device, kernels) = classed(Cuda::open(self.device.ordinal)?, self.settled(dtype))?;
        let (device, all) = applied(device, kernels, verdicts::known().of(&self.key()));
        Ok(format!("{}{}", device.class(), if all { "" } else { "-untried" }))
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

/// Kernels that need a trial, on cards that can run them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Untried {
    No,
    F16,
    Wgmma,
}

/// The device in its class, and the kernels that need a trial there.
fn classed(mut device: Cuda<Libcuda>, dtype: ComputeDtype) -> Result<(Cuda<Libcuda>, Untried), Fault> {
    Ok(match dtype {
        ComputeDtype::Bf16 if device.driver().sm90a().is_some() => (device.bf16()?, Untried::Wgmma),
        ComputeDtype::Bf16 => (device.bf16()?, Untried::No),
        ComputeDtype::Auto if device.driver().capability().0 == 7 => (device, Untried::F16),
        ComputeDtype::Auto | ComputeDtype::F32 => (device, Untried::No),
    })
}

/// Applies what earlier trials decided; false if one is missing.
fn applied(device: Cuda<Libcuda>, kernels: Untried, verdicts: Verdicts) -> (Cuda<Libcuda>, bool) {
    match kernels {
        Untried::No => (device, true),
        Untried::F16 if verdicts.f16 == Some(true) => (device.f16(), true),
        Untried::F16 => (device, verdicts.f16.is_some()),
        Untried::Wgmma => {
            let device = if verdicts.wgmma == Some(true) { device.untried() } else { device };
            let all = verdicts.wgmma.is_some() && verdicts.attention.is_some();
            (device.attending(verdicts.flash()), all)
        }
    }
}

/// Runs the trials that are missing, and adds what they decide. One without enough memory decides nothing: the next
/// opening repeats it.
fn tried(
    device: Cuda<Libcuda>,
    kernels: Untried,
    (verdicts, ordinal): (&mut Verdicts, usize),
) -> Cuda<Libcuda> {
    let report = |what: &str, why: Option<&str>| {
        if let Some(why) = why {
            say!("cuda {ordinal}: {what}: {why}");
        }
    };
    if kernels == Untried::F16 {
        let device = device.sm70(Trial::default());
        verdicts.f16 = (!device.undecided()).then(|| device.below().is_none());
        report("products stay in f32", device.below());
        return device;
    }
    let device = match verdicts.wgmma {
        Some(_) => device,
        None => {
            let device = device.attending(Flash::default()).sm90a(Trial::default());
            verdicts.wgmma = (!device.undecided()).then(|| device.below().is_none());
            report("products stay with mma", device.below());
            device
        }
    };
    if verdicts.attention.is_some() {
        return device.attending(verdicts.flash());
    }
    let device = device.attention_sm90a(AttentionTrial::default());
    let Flash { forward, backward } = device.flash();
    verdicts.attention = (!device.undecided()).then_some([forward, backward]);
    report("attention stays with mma", device.attention_below());
    device
}

#[cfg(test)]
mod tests;
