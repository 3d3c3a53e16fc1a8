//! Backends under test. The CPU runs on 1, 2, 3 and 7 threads, which give the same bits; wgpu runs twice on every adapter
//! of tests/tested_adapters, with the bound of contracts/F-WGPU-001.yaml.

use crate::op_cases::{Device, Lend, ROUNDED, Rig};
use crate::tested_adapters::{self, Tested};
use finetune::backend::cuda::{Libcuda, devices};
use finetune::backend::wgpu::{Checks, Options};
use finetune::backend::{Backend, Cpu, Cuda, Wgpu};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

fn rig<B: Device>(name: &str, variants: Vec<Lend<B>>, least: f64) -> Rig<B> {
    Rig { name: name.into(), variants, least, rounded: None, most: usize::MAX }
}

/// The f32 and the bf16 class, each by its kernels and by the loops that they replace.
pub fn cpu() -> Vec<Rig<Cpu>> {
    let lend = |open: fn(usize) -> Cpu, threads| -> Lend<Cpu> {
        Box::new(move |give| give(&mut open(threads).poisoning()))
    };
    let on = |open| [1, 2, 3, 7].map(|threads| lend(open, threads)).into();
    let reference = |n| Cpu::bf16_reference(n).unwrap_or_else(|| Cpu::bf16(n));
    let mut bf16: Vec<_> = on(Cpu::bf16);
    bf16.push(lend(reference, 2));
    vec![
        rig(&Cpu::new(1).class(), on(Cpu::new), 0.0),
        rig(&Cpu::reference(1).class(), vec![lend(Cpu::reference, 1)], 0.0),
        Rig { rounded: Some(ROUNDED), ..rig(&Cpu::bf16(1).class(), bf16, 0.0) },
        Rig {
            rounded: Some(ROUNDED),
            ..rig("bf16, plain loops", vec![lend(|n| Cpu::bf16(n).spelled(), 1)], 0.0)
        },
    ]
}

/// A backend behind a lock, twice.
fn twice<B: Device + Send>(name: String, backend: &Arc<Mutex<B>>, least: f64) -> Rig<B> {
    let lend = || -> Lend<B> {
        let backend = backend.clone();
        Box::new(move |give| give(&mut backend.lock().unwrap_or_else(PoisonError::into_inner)))
    };
    rig(&name, vec![lend(), lend()], least)
}

/// The plain kernels, and the default selection of each adapter.
pub fn wgpu() -> Vec<Rig<Wgpu>> {
    static OPEN: OnceLock<Vec<(String, Arc<Mutex<Wgpu>>)>> = OnceLock::new();
    let open = |(tested, variants): (&Tested, Option<Vec<_>>)| {
        let options = Options { poison: true, checks: Checks::Everywhere, variants, ..Options::default() };
        let wgpu = tested.open(options).unwrap_or_else(|fault| panic!("{fault}"));
        (wgpu.class(), Arc::new(Mutex::new(wgpu)))
    };
    let both = |all: &[Tested]| -> Vec<_> {
        all.iter().flat_map(|a| [(a, Some(Vec::new())), (a, None)]).map(open).collect()
    };
    let bound = relative(include_str!("../../contracts/F-WGPU-001.yaml"));
    let opened = OPEN.get_or_init(|| both(&tested_adapters::all()));
    opened.iter().map(|(name, device)| twice(name.clone(), device, bound)).collect()
}

/// The first card of the NVIDIA driver, in f32.
pub fn cuda() -> Result<Vec<Rig<Cuda<Libcuda>>>, String> {
    let found = devices().map_err(|why| why.to_string())?;
    if found.devices.is_empty() {
        return Err("no card".into());
    }
    let cuda = Cuda::open(0).map_err(|fault| fault.to_string())?;
    let bound = relative(include_str!("../../contracts/F-CUDA-001.yaml"));
    Ok(vec![twice(cuda.class(), &Arc::new(Mutex::new(cuda)), bound)])
}

fn relative(contract: &str) -> f64 {
    let contract: serde_json::Value = serde_yaml::from_str(contract).unwrap();
    contract["tolerance"]["relative"].as_f64().unwrap()
}
