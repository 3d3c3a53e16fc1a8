//! NVIDIA's cards through their own driver. A card is tested before it computes anything: of real cards an H200 has run the
//! kernels, those of capability 7.x only an interpreter.

mod trials;
mod verdicts;

use super::{Device, Driver, Share, speaking, usable};
use crate::backend::cuda::Driver as _;
use crate::backend::cuda::{self, Absent, Flash, Libcuda};
use crate::backend::facts::{BF16, Facts, Kind};
use crate::backend::{Backend, Cuda, Fault, Target};
use crate::config::groups::ComputeDtype;
use crate::devices::building::{Opened, Whole};
use crate::model::memory::{Home, Load};
use crate::model::weights::ModelError;
use crate::support::stderr::say;
use std::collections::BTreeMap;
use std::sync::OnceLock;
pub use trials::answer as trial;
use verdicts::{Tier, Verdict, Verdicts};

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
            ComputeDtype::Auto | ComputeDtype::F32 | ComputeDtype::Portable => cuda::Footprint::of_f32(),
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
    /// Key of the verdicts of its trials.
    fn key(&self) -> String {
        verdicts::key(&self.device, &self.facts.driver)
    }

    /// The device in its class, and the tiers that need a trial there.
    fn classed(&self, share: Share) -> Result<(Cuda<Libcuda>, &'static [Tier]), Fault> {
        let mut device = Cuda::open(self.device.ordinal)?.within(share.limit.bytes());
        Ok(match self.settled(share.dtype) {
            ComputeDtype::Bf16 if device.driver().sm90a().is_some() => {
                (device.bf16()?, &[Tier::Products, Tier::Attention])
            }
            ComputeDtype::Bf16 => (device.bf16()?, &[]),
            ComputeDtype::Auto if device.driver().capability().0 == 7 => (device, &[Tier::F16]),
            // The choice of devices refuses the portable class.
            ComputeDtype::Auto | ComputeDtype::F32 | ComputeDtype::Portable => (device, &[]),
        })
    }

    /// Runs a trial, and keeps what it decided. One that decided nothing is repeated by the next process, because the
    /// class of a card must not change in this one.
    fn tried(&self, tier: Tier) -> Verdict {
        let ordinal = self.device.ordinal;
        let (verdict, undecided) = match trials::in_a_child(ordinal, tier) {
            Ok(verdict) => (verdicts::keep(&self.key(), tier, verdict), ""),
            Err(why) => (Verdict::no(why), " (undecided)"),
        };
        if let Some(why) = &verdict.why {
            say!("cuda {ordinal}: {}: {why}{undecided}", tier.without());
        }
        verdict
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

    fn is_portable(&self) -> bool {
        false
    }

    fn open(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        let (mut device, tiers) = self.classed(share)?;
        let mut known = verdicts::known();
        let verdicts = known.of(&self.key());
        let missing: Vec<_> = tiers.iter().filter(|tier| !verdicts.contains_key(tier)).collect();
        if !missing.is_empty() {
            // A card may admit one process at a time.
            drop(device);
            for tier in missing {
                verdicts.insert(*tier, self.tried(*tier));
            }
            device = self.classed(share)?.0;
        }
        Ok(Box::new(applied(device, tiers, verdicts)))
    }

    fn open_untried(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        let (device, tiers) = self.classed(share)?;
        Ok(Box::new(applied(device, tiers, verdicts::known().of(&self.key()))))
    }

    /// Says where the verdict of a trial is missing.
    fn class(&self, dtype: ComputeDtype) -> Result<String, Fault> {
        let (device, tiers) = self.classed(Share::of_class(dtype))?;
        let mut known = verdicts::known();
        let verdicts = known.of(&self.key());
        let all = tiers.iter().all(|tier| verdicts.contains_key(tier));
        let device = applied(device, tiers, verdicts);
        Ok(format!("{}{}", Backend::class(&device), if all { "" } else { "-untried" }))
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

/// The device with those of its tiers that the verdicts allow.
fn applied(device: Cuda<Libcuda>, tiers: &[Tier], verdicts: &Verdicts) -> Cuda<Libcuda> {
    let flash = |verdict: &Verdict| Flash { forward: verdict.forward, backward: verdict.backward };
    let allowed =
        |tier: Tier| verdicts.get(&tier).filter(|_| tiers.contains(&tier)).map(flash).unwrap_or_default();
    let device = if allowed(Tier::F16).forward { device.f16() } else { device };
    let device = if allowed(Tier::Products).forward { device.untried() } else { device };
    device.attending(allowed(Tier::Attention))
}

#[cfg(test)]
mod tests;
