//! The adapters on which tests of wgpu run: two software drivers, lavapipe and SwiftShader, or the one adapter that
//! FINETUNE_TEST_ADAPTER names by a part of its name, in either case. A missing one is printed as skipped. A missing
//! software driver is a failure if FINETUNE_NEED_VULKAN is set (tests/run.sh sets it).
#![allow(dead_code)] // Each test file uses a part.

use finetune::backend::wgpu::{Adapter, Options, adapters};
use finetune::backend::{Fault, Wgpu};

const VARIABLE: &str = "FINETUNE_TEST_ADAPTER";
const SOFTWARE: [&str; 2] = ["llvmpipe", "SwiftShader"];

/// An adapter, and its index in `finetune devices`, which `--gpus` takes.
pub struct Tested {
    pub index: usize,
    pub adapter: Adapter,
}

impl Tested {
    pub fn open(&self, options: Options) -> Result<Wgpu, Fault> {
        Wgpu::open(&self.adapter, options)
    }

    /// Options of the command line that choose it.
    pub fn options(&self) -> String {
        format!("--gpu-backend wgpu --gpus {}", self.index)
    }
}

/// Every adapter that tests run on.
pub fn all() -> Vec<Tested> {
    found(&SOFTWARE)
}

/// The adapter of tests that need one only: lavapipe, unless another is named.
pub fn one() -> Option<Tested> {
    found(&SOFTWARE[..1]).pop()
}

fn found(software: &[&str]) -> Vec<Tested> {
    let named = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty());
    let mut installed: Vec<Option<Adapter>> = adapters().into_iter().map(Some).collect();
    let names: Vec<String> = installed.iter().flatten().map(|a| a.name().to_string()).collect();
    let (chosen, missing) = choose(&names, named.as_deref(), software);
    for name in missing {
        let need = named.is_none() && std::env::var_os("FINETUNE_NEED_VULKAN").is_some();
        assert!(!need, "no Vulkan driver {name}");
        println!("skipped: no wgpu adapter {name}");
    }
    let take = |index: usize| installed[index].take().map(|adapter| Tested { index, adapter });
    chosen.into_iter().filter_map(take).collect()
}

/// Indices of the adapters to test among those with these names, and the names of the missing ones. Of several adapters
/// with a name the first one is tested.
pub fn choose<'a>(
    installed: &[String],
    named: Option<&'a str>,
    software: &[&'a str],
) -> (Vec<usize>, Vec<&'a str>) {
    let asked = named.map_or(software.to_vec(), |name| vec![name]);
    let (mut chosen, mut missing) = (Vec::new(), Vec::new());
    for name in asked {
        let part = name.to_lowercase();
        match installed.iter().position(|full| full.to_lowercase().contains(&part)) {
            Some(index) => chosen.push(index),
            None => missing.push(name),
        }
    }
    (chosen, missing)
}
