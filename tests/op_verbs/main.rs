//! Every op of the CPU, of wgpu on each adapter of tests/tested_adapters, and of a CUDA card where there is one, on the cases of
//! tests/op_cases: against an f64 formula, each gradient also against central differences of that formula, at odd sizes,
//! with equal bits on 1, 2, 3 and 7 threads. The other files test what a case does not describe.

mod bf16;
mod blocks;
mod edges;
mod fused;
#[path = "../op_cases/mod.rs"]
mod op_cases;
mod portable;
mod rig;
mod short;
#[path = "../tested_adapters/mod.rs"]
mod tested_adapters;

use finetune::backend::{Backend, Cpu, Op};
use op_cases::{Set, USED_BY_ALL, cases, check};

#[test]
fn every_op_case_holds_on_cpu() {
    check(&rig::cpu());
}

#[test]
fn every_op_case_holds_on_wgpu() {
    check(&rig::wgpu());
}

#[test]
fn every_op_case_holds_on_cuda() {
    match rig::cuda() {
        Ok(rigs) => check(&rigs),
        Err(why) => println!("skipped: no cuda: {why}"),
    }
}

#[test]
fn every_op_has_cases() {
    for op in Op::ALL.iter().filter(|op| !USED_BY_ALL.contains(op)) {
        for set in [Set::Odd, Set::Model] {
            assert!(cases::<Cpu>(*op, set).next().is_some(), "{op:?} has no case of {set:?}");
        }
        let gradient = format!("{op:?}").ends_with("_grad");
        let checked = || cases::<Cpu>(*op, Set::Odd).any(|case| !case.gradients.is_empty());
        assert!(!gradient || checked(), "{op:?} is compared with no central differences");
    }
}

#[test]
fn every_case_calls_its_op() {
    for op in Op::ALL.iter().filter(|op| !USED_BY_ALL.contains(op) && op.name() != "weight") {
        let mut all = cases::<Cpu>(*op, Set::Odd);
        let case = all.nth(1).unwrap();
        // bf16, whose `settle` is timed; where it is not, there is nothing to settle.
        let (mut cpu, notes) = Cpu::bf16(1).timed();
        case.run(&mut cpu, &case.name).unwrap();
        let idle = *op == Op::settle && cpu.short_bytes() == 4;
        assert!(idle || notes.take().contains_key(op.name()), "a case of {op:?} does not call it");
    }
}
