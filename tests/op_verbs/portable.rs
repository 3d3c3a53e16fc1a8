//! The portable class: every op case has the CPU's bits on lavapipe, or on the adapter that is named, and every third one on
//! SwiftShader (tests/tested_adapters).

use crate::op_cases::{Case, Set, USED_BY_ALL, cases, close};
use crate::tested_adapters;
use finetune::backend::wgpu::{MultiplyAdd, Options};
use finetune::backend::{Backend, Cpu, Op, PORTABLE, Wgpu};

/// Ops that the class does not have.
const LACKING: [Op; 2] = [Op::delta_rule, Op::delta_rule_grad];

/// Ops with cases that the class has.
fn ops() -> impl Iterator<Item = &'static Op> {
    Op::ALL.iter().filter(|op| !USED_BY_ALL.contains(op) && !LACKING.contains(op))
}

/// Numbers below this may differ: GPUs may replace those below 2^-126 by 0, and what is made of them.
const SMALL: f32 = 1e-30;

fn differ((a, b): (&f32, &f32)) -> bool {
    let both_small = a.abs() < SMALL && b.abs() < SMALL;
    a.to_bits() != b.to_bits() && !both_small
}

/// The first output that differs.
fn difference(cpu: &[Vec<f32>], got: &[Vec<f32>]) -> Option<String> {
    assert_eq!(cpu.len(), got.len());
    let differs = |(i, (a, b)): (usize, (&Vec<f32>, &Vec<f32>))| {
        let at = a.iter().zip(b).position(differ)?;
        let count = a.iter().zip(b).filter(|pair| differ(*pair)).count();
        Some(format!(
            "output {i}: {count} of {} differ, at {at} {:e}, on the CPU {:e}",
            a.len(),
            b[at],
            a[at]
        ))
    };
    cpu.iter().zip(got).enumerate().find_map(differs)
}

/// The kernels that a card runs, on a driver whose `fma` rounds twice, are near the CPU: every third case.
#[test]
fn portable_kernels_of_cards_are_near_the_cpu() {
    let Some(tested) = tested_adapters::one() else { return };
    let multiply_add = Some(MultiplyAdd::Fused);
    let options = Options { portable: true, multiply_add, poison: true, ..Options::default() };
    let (mut cpu, mut card) = (Cpu::new(2).poisoning(), tested.open(options).unwrap());
    for op in ops() {
        for (on_cpu, on_card) in cases::<Cpu>(*op, Set::Odd).zip(cases::<Wgpu>(*op, Set::Odd)).step_by(3) {
            let want = on_cpu.run(&mut cpu, &on_cpu.name).unwrap();
            for (got, want) in on_card.run(&mut card, &on_card.name).unwrap().iter().zip(&want) {
                let want: Vec<f64> = want.iter().map(|x| f64::from(*x)).collect();
                close(&format!("{op:?} {}", on_card.name), got, &want, 1e-4);
            }
        }
    }
}

fn check(cpu: &mut Cpu, card: &mut Wgpu, (on_cpu, on_card): (Case<Cpu>, Case<Wgpu>)) -> Option<String> {
    let name = on_cpu.name.clone();
    let want = on_cpu.run(cpu, &name).unwrap();
    match on_card.run(card, &name) {
        Ok(got) => difference(&want, &got).map(|what| format!("{name}: {what}")),
        Err(fault) => Some(format!("{name}: {fault}")),
    }
}

#[test]
fn every_portable_op_case_has_the_bits_of_the_cpu() {
    let Some(cpu) = Cpu::portable(2) else {
        return println!("skipped: this processor rounds multiply-adds twice");
    };
    let mut cpu = cpu.poisoning();
    for (number, tested) in tested_adapters::all().into_iter().enumerate() {
        let options = Options { portable: true, poison: true, ..Options::default() };
        let mut card = tested.open(options).unwrap();
        assert_eq!((card.class(), cpu.class()), (PORTABLE.to_string(), PORTABLE.to_string()));
        let (mut failed, mut ran) = (Vec::new(), 0);
        for op in ops() {
            let began = std::time::Instant::now();
            let pairs = cases::<Cpu>(*op, Set::Odd).zip(cases::<Wgpu>(*op, Set::Odd));
            for pair in pairs.step_by(if number == 0 { 1 } else { 3 }) {
                ran += 1;
                failed.extend(check(&mut cpu, &mut card, pair).map(|what| format!("{op:?} {what}")));
            }
            println!("{op:?} {:.1} s", began.elapsed().as_secs_f64());
        }
        println!("{ran} cases on {}", tested.adapter.name());
        assert!(failed.is_empty(), "{}:\n{}", tested.adapter.name(), failed.join("\n"));
    }
}
