//! Backends under test. The CPU runs on 1, 2, 3 and 7 threads, which give the same bits; wgpu runs twice on every
//! installed software adapter, with the bound of contracts/F-WGPU-001.yaml. A missing driver is printed as skipped, and
//! is a failure if FINETUNE_NEED_VULKAN is set (tests/run.sh sets it).

use finetune::backend::wgpu::{Adapter, Options, adapters};
use finetune::backend::{Backend, Cpu, Fused, Wgpu};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Lends a backend.
pub type Lend<B> = Box<dyn Fn(&mut dyn FnMut(&mut B))>;

/// One device, in variants that give the same bits.
pub struct Rig<B> {
    pub name: String,
    pub variants: Vec<Lend<B>>,
    /// The tightest bound that is checked.
    pub least: f64,
}

/// A backend with its devices.
pub trait Rigged: Fused + 'static {
    fn rigs() -> Vec<Rig<Self>>;
}

/// Checks every device of a backend.
pub fn each<B: Rigged>(check: impl Fn(&Rig<B>)) {
    B::rigs().iter().for_each(check);
}

impl Rigged for Cpu {
    fn rigs() -> Vec<Rig<Cpu>> {
        let on = |threads| -> Lend<Cpu> { Box::new(move |give| give(&mut Cpu::new(threads).poisoning())) };
        vec![Rig { name: "cpu".into(), variants: [1, 2, 3, 7].map(on).into(), least: 0.0 }]
    }
}

impl Rigged for Wgpu {
    fn rigs() -> Vec<Rig<Wgpu>> {
        static OPEN: OnceLock<Vec<(String, Arc<Mutex<Wgpu>>)>> = OnceLock::new();
        let open = |(adapter, variants): (&Adapter, Option<Vec<_>>)| {
            let options = Options { poison: true, variants, ..Options::default() };
            let wgpu = Wgpu::open(adapter, options).unwrap_or_else(|fault| panic!("{fault}"));
            (wgpu.class(), Arc::new(Mutex::new(wgpu)))
        };
        // The plain kernels, and the default selection of the adapter.
        let both = |all: &[Adapter]| -> Vec<_> {
            all.iter().flat_map(|a| [(a, Some(Vec::new())), (a, None)]).map(open).collect()
        };
        let opened = OPEN.get_or_init(|| both(&software()));
        let lend = |device: &Arc<Mutex<Wgpu>>| -> Lend<Wgpu> {
            let device = device.clone();
            Box::new(move |give| give(&mut device.lock().unwrap_or_else(PoisonError::into_inner)))
        };
        let rig = |(name, device): &(String, Arc<Mutex<Wgpu>>)| Rig {
            name: name.clone(),
            variants: vec![lend(device), lend(device)],
            least: relative_bound(),
        };
        opened.iter().map(rig).collect()
    }
}

/// The installed software adapters.
pub fn software() -> Vec<Adapter> {
    let all: Vec<Adapter> = adapters().into_iter().filter(Adapter::is_software).collect();
    for driver in ["llvmpipe", "SwiftShader"] {
        if !all.iter().any(|a| a.name().contains(driver)) {
            assert!(std::env::var_os("FINETUNE_NEED_VULKAN").is_none(), "no Vulkan driver {driver}");
            eprintln!("skipped: no Vulkan driver {driver}");
        }
    }
    all
}

fn relative_bound() -> f64 {
    let text = include_str!("../../contracts/F-WGPU-001.yaml");
    let contract: serde_json::Value = serde_yaml::from_str(text).unwrap();
    contract["tolerance"]["relative"].as_f64().unwrap()
}
