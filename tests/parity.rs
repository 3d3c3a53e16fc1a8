//! Training matches transformers + PEFT + torch.optim.AdamW: every loss, every gradient norm, the final adapter. The
//! reference takes rows one at a time; here they are packed into microbatches.
//!
//! More cases: `FINETUNE_CASES=folder cargo test --test parity` runs every case in a folder.

#[path = "parity/case.rs"]
mod case;
#[path = "tested_adapters/mod.rs"]
mod tested_adapters;
#[path = "parity/train.rs"]
mod train;

use case::Case;
use finetune::backend::Cpu;
use finetune::backend::wgpu::Options as Opening;
use finetune::model::decoder::{Build, Keep};
use stages::Loads;
use std::path::Path;
use train::{Bounds, CPU, WGPU};

fn check<B: Loads>(dir: &Path, keep: Keep, backend: B, bounds: &Bounds) -> (f64, f64, f32) {
    trained(dir, keep, backend, bounds).0
}

fn trained<B: Loads>(dir: &Path, keep: Keep, backend: B, bounds: &Bounds) -> ((f64, f64, f32), Vec<f32>) {
    let case = Case::open(dir);
    let build = Build { keep, ..Build::whole(&case.config) };
    let mut stage = backend.stage((&case.config, &case.tensors, &case.lora), build).unwrap();
    train::trained(&case, &mut *stage, bounds)
}

#[test]
fn golden_cases_train_as_in_peft() {
    for dir in case::golden() {
        for keep in [Keep::Everything, Keep::Inputs] {
            println!("{:?} {keep:?}: {:?}", dir.file_name(), check(&dir, keep, Cpu::new(2), &CPU));
        }
    }
}

/// Every architecture on every adapter of tests/tested_adapters.
#[test]
fn golden_cases_train_as_in_peft_on_wgpu() {
    for tested in tested_adapters::all() {
        case::each_golden(|i, dir| {
            // Poisoned memory: a read before the first write shows in the result.
            let options = Opening { poison: true, ..Opening::default() };
            let wgpu = tested.open(options).unwrap();
            let keep = if i % 2 == 0 { Keep::Everything } else { Keep::Inputs };
            let name = tested.adapter.name();
            println!("{name} {:?} {keep:?}: {:?}", dir.file_name(), check(dir, keep, wgpu, &WGPU));
        });
    }
}

/// One adapter on the CPU and on lavapipe, or the adapter that is named, to the bit: every fourth case, and every sixteenth on
/// SwiftShader. Those with a gated delta rule are left out.
#[test]
fn portable_golden_cases_have_one_adapter_on_cpu_and_gpus() {
    if !Cpu::is_portable() {
        return println!("skipped: this processor rounds multiply-adds twice");
    }
    let bits = |(_, adapter): (_, Vec<f32>)| adapter.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (number, tested) in tested_adapters::all().into_iter().enumerate() {
        case::each_golden(|i, dir| {
            if !(i + number).is_multiple_of(if number == 0 { 4 } else { 16 }) {
                return;
            }
            if Case::open(dir).config.delta_rules.is_some() {
                return println!("{:?}: no portable kernels", dir.file_name());
            }
            let keep = if i.is_multiple_of(8) { Keep::Everything } else { Keep::Inputs };
            let cpu = bits(trained(dir, keep, Cpu::portable(2).unwrap(), &CPU));
            let options = Opening { poison: true, portable: true, ..Opening::default() };
            let card = bits(trained(dir, keep, tested.open(options).unwrap(), &CPU));
            assert!(
                cpu == card,
                "{}: {:?} has other bits than on the CPU",
                tested.adapter.name(),
                dir.file_name()
            );
            println!("{} {:?}", tested.adapter.name(), dir.file_name());
        });
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
