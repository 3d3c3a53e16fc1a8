//! Any GPU through Vulkan, Metal or DX12, as wgpu lists it.

use super::{Device, Driver, Share, speaking, usable};
use crate::backend::facts::{Facts, Kind};
use crate::backend::wgpu::adapters::{self, Found};
use crate::backend::wgpu::{Footprint, Options, Precision};
use crate::backend::{Fault, Target, Wgpu};
use crate::config::groups::ComputeDtype;
use crate::devices::building::{Opened, Whole};
use crate::devices::compiled;
use crate::model::memory::{Home, Load};
use crate::model::weights::ModelError;
use std::sync::OnceLock;

/// The driver.
pub struct Graphics;

/// An adapter.
struct Card {
    found: &'static Found,
    #[cfg(feature = "faults")]
    breaker: std::sync::Mutex<Option<crate::backend::wgpu::Breaker>>,
}

impl Driver for Graphics {
    fn name(&self) -> &'static str {
        "wgpu"
    }

    fn devices(&self) -> &'static [Box<dyn Device>] {
        static ALL: OnceLock<Vec<Box<dyn Device>>> = OnceLock::new();
        let card = |found| Card {
            found,
            #[cfg(feature = "faults")]
            breaker: Default::default(),
        };
        ALL.get_or_init(|| adapters::all().iter().map(|found| Box::new(card(found)) as _).collect())
    }

    fn absence(&self) -> String {
        adapters::why_none().to_string()
    }

    fn load<'a>(&self, whole: &Whole<'a>, dtype: ComputeDtype, home: Home) -> Result<Load<'a>, ModelError> {
        let footprint = if home == Home::Shared { Footprint::of_software() } else { Footprint::of_card() };
        let portable = dtype == ComputeDtype::Portable;
        if portable && whole.config.delta_rules.is_some() {
            let why = "--dtype portable: its kernels of the gated delta rule are not written: use f32, or --gpus cpu";
            return Err(ModelError::Source(why.into()));
        }
        let footprint = if portable { footprint.portable() } else { footprint };
        Ok(Load { home, ..speaking(whole).load_on(Target::Wgpu(footprint))? })
    }
}

impl Device for Card {
    fn driver(&self) -> &'static dyn Driver {
        &Graphics
    }

    fn facts(&self) -> &Facts {
        &self.found.facts
    }

    fn memory(&self) -> (Option<u64>, Option<u64>) {
        self.found.memory().map(|memory| (memory.total, usable(memory.free))).unzip()
    }

    /// Without a typed dtype a card may round the factors of frozen products to f16; this does not help a driver that
    /// computes on the CPU. bf16 is not available.
    fn open(&self, share: Share) -> Result<Box<dyn Opened>, Fault> {
        let exact = share.dtype != ComputeDtype::Auto || self.found.facts.kind == Kind::Software;
        let precision = if exact { Precision::F32 } else { Precision::F16 };
        let (cache, memory) = (compiled::of(&self.found.adapter), Some(share.limit.bytes()));
        let portable = share.dtype == ComputeDtype::Portable;
        let options = Options { precision, portable, cache, memory, ..Options::default() };
        let device = Wgpu::open(&self.found.adapter, options)?;
        #[cfg(feature = "faults")]
        self.breaker.lock().unwrap_or_else(|e| e.into_inner()).replace(device.breaker());
        Ok(Box::new(device))
    }

    #[cfg(feature = "faults")]
    fn lose(&self) {
        self.breaker.lock().unwrap_or_else(|e| e.into_inner()).iter().for_each(|breaker| breaker.strike());
    }
}
