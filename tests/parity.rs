//! Training matches transformers + PEFT + torch.optim.AdamW: every loss, every gradient norm, the final adapter. The
//! reference takes rows one at a time; here they are packed into microbatches.
//!
//! More cases: `FINETUNE_CASES=folder cargo test --test parity` runs every case in a folder.

#[path = "parity/case.rs"]
mod case;
#[path = "parity/train.rs"]
mod train;

use case::Case;
use finetune::backend::wgpu::{Adapter, Options as Opening, adapters};
use finetune::backend::{Cpu, Fused, Wgpu};
use finetune::model::decoder::{Build, Decoder, Keep};
use std::path::Path;
use train::{Bounds, CPU, WGPU};

fn check<B: Fused>(dir: &Path, keep: Keep, backend: B, bounds: &Bounds) -> (f64, f64, f32) {
    let case = Case::open(dir);
    let build = Build { keep, ..Build::whole(&case.config) };
    let mut stage = Decoder::load(backend, &case.config, &case.tensors, &case.lora, build).unwrap();
    train::train(&case, &mut stage, bounds)
}

#[test]
fn golden_cases_train_as_in_peft() {
    for dir in case::golden() {
        for keep in [Keep::Everything, Keep::Inputs] {
            println!("{:?} {keep:?}: {:?}", dir.file_name(), check(&dir, keep, Cpu::new(2), &CPU));
        }
    }
}

/// Every architecture on every installed software driver. A missing driver is printed, and is a failure if
/// FINETUNE_NEED_VULKAN is set (tests/run.sh sets it).
#[test]
fn golden_cases_train_as_in_peft_on_wgpu() {
    let found = adapters();
    for driver in ["llvmpipe", "SwiftShader"] {
        let Some(adapter) = found.iter().find(|a: &&Adapter| a.name().contains(driver)) else {
            assert!(std::env::var_os("FINETUNE_NEED_VULKAN").is_none(), "no Vulkan driver {driver}");
            println!("skipped: no wgpu adapter (Vulkan driver {driver})");
            continue;
        };
        for (i, dir) in case::golden().iter().enumerate() {
            // Poisoned memory: a read before the first write shows in the result.
            let options = Opening { poison: true, ..Opening::default() };
            let wgpu = Wgpu::open(adapter, options).unwrap();
            let keep = if i % 2 == 0 { Keep::Everything } else { Keep::Inputs };
            println!("{driver} {:?} {keep:?}: {:?}", dir.file_name(), check(dir, keep, wgpu, &WGPU));
        }
    }
}

#[test]
fn full_cases_train_as_in_peft() {
    let Ok(folder) = std::env::var("FINETUNE_CASES") else {
        println!("skipped: FINETUNE_CASES names no folder of full cases");
        return;
    };
    for dir in case::cases(Path::new(&folder)) {
        println!("{}: {:?}", dir.display(), check(&dir, Keep::Everything, Cpu::new(2), &CPU));
    }
}
