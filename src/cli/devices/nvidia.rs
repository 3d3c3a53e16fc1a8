//! NVIDIA's cards through their own driver. They are taken where `--gpu-backend cuda` names the backend, and not yet by
//! `auto`: the kernels have run on an interpreter, never on a card. So a card proves itself before it computes anything.

use super::building::{self, Whole};
use super::cpu;
use crate::backend::Fault;
use crate::backend::cuda::{self, Cuda, Libcuda, matrix_bytes};
use crate::backend::wgpu::adapters::{Facts, Kind};
use crate::cli::options::groups::Precision;
use crate::cluster::inject::Inject;
use crate::cluster::worker::{Blueprint, Opener, Reference};
use crate::model::memory::{self, Home, Load};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// What of a card's memory is left to its driver and to others, in parts of a hundred.
const LEFT_ALONE: u64 = 5;
/// Tokens of a prompt that a device must have room for at least.
const SPEAKING: usize = 256;

/// A card as its driver describes it, and as cards of any driver are described.
#[derive(Debug)]
pub struct Found {
    /// The driver's.
    pub device: cuda::Device,
    /// Everybody's.
    pub facts: Facts,
}

/// All of them, by where they are plugged in; or the one line that says why there are none. Asked once.
pub fn all() -> Result<&'static [Found], &'static str> {
    static ALL: OnceLock<Result<Vec<Found>, String>> = OnceLock::new();
    match ALL.get_or_init(|| cuda::devices().map(described).map_err(|e| e.to_string())) {
        Ok(found) => Ok(found),
        Err(why) => Err(why),
    }
}

fn described(found: cuda::Found) -> Vec<Found> {
    let driver = format!("NVIDIA {}", cuda::build(found.driver));
    let one = |device: cuda::Device| {
        let (major, minor) = device.capability;
        let mut features = vec![format!("compute {major}.{minor}")];
        features.extend((major >= 8).then(|| "bf16".to_string()));
        let facts = Facts {
            name: device.name.clone(),
            kind: Kind::Discrete,
            api: "cuda".into(),
            driver: driver.clone(),
            pci: device.pci.clone(),
            card: device.pci.trim_start_matches("0000:").into(),
            features,
            limits: BTreeMap::new(),
        };
        Found { device, facts }
    };
    let mut all: Vec<Found> = found.devices.into_iter().map(one).collect();
    all.sort_by(|a, b| a.device.pci.cmp(&b.device.pci));
    all
}

/// Opens it.
pub fn device(found: &Found, dtype: Precision) -> Result<Cuda<Libcuda>, Fault> {
    let device = Cuda::open(found.device.ordinal)?;
    if dtype == Precision::Bf16 { device.bf16() } else { Ok(device) }
}

/// Bytes that are free on it, less what is left alone; 0 where the driver does not tell.
pub fn free(found: &Found) -> u64 {
    let free = cuda::free(found.device.ordinal).unwrap_or(0);
    free - free / 100 * LEFT_ALONE
}

/// A card that libcuda drives.
pub struct Card {
    /// What is opened.
    pub found: &'static Found,
    /// Bytes that this device may use.
    pub budget: u64,
    /// What products are computed in where the run does not say.
    pub dtype: Precision,
}

impl Card {
    fn load<'a>(&self, whole: &Whole<'a>, dtype: Precision) -> Result<Load<'a>, ModelError> {
        let tokens = if whole.tokens == 0 { SPEAKING } else { whole.tokens };
        let packing = |encoding, numbers| match dtype {
            Precision::Bf16 => 2 * numbers,
            Precision::Auto | Precision::F32 => matrix_bytes(encoding, numbers),
        };
        Ok(Load { home: Home::Own, ..Whole { tokens, ..*whole }.load_as(&packing)? })
    }

    /// A whole model on it; whether it fits is asked before anything is uploaded.
    pub fn whole(&self, whole: &Whole, dtype: Precision) -> Result<Box<dyn Model>, ModelError> {
        if let Some(reason) = self.found.device.unusable() {
            return Err(Fault::Device { device: self.found.facts.name.clone(), reason }.into());
        }
        let keep = memory::choose(self.load(whole, dtype)?, self.budget)?.0;
        building::built(device(self.found, dtype)?, whole, keep)
    }

    /// The same once it has proved that it counts right.
    pub fn proved(&self, whole: &Whole, dtype: Precision) -> Result<Box<dyn Model>, ModelError> {
        let deviation = Reference::new(&cpu::Twin)?.measure(self, &Inject::default())?;
        deviation.verdict().map_err(ModelError::Source)?;
        self.whole(whole, dtype)
    }
}

impl Opener for Card {
    fn backend(&self) -> &str {
        "cuda"
    }

    /// A dtype that the run's user typed binds every device.
    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let dtype = match blueprint.shape.dtype.as_deref() {
            Some("f32") => Precision::F32,
            Some("bf16") => Precision::Bf16,
            _ => self.dtype,
        };
        self.whole(&Whole::of(blueprint), dtype)
    }

    fn largest(&self, blueprint: &Blueprint) -> usize {
        let load = self.load(&Whole::of(blueprint), self.dtype);
        load.map_or(0, |load| memory::largest(load, self.budget))
    }
}
