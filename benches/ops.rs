//! Time, GFLOP/s and GB/s of ops at SmolLM2-135M's shapes, 4 rows of 256 tokens: the cases of tests/op_cases with
//! `Set::Model`. Arithmetic and bytes are the minimum that the op's row in kernels/src/backend/ops.rs says.
//!
//! `cargo bench --bench ops -- [threads] [f32|bf16|twin] [part of a name]`: `twin` selects the reference bf16 kernel.
//! Best of many short runs, which reduces the effect of a busy machine.

#[path = "../tests/op_cases/mod.rs"]
mod op_cases;

use finetune::backend::{Cpu, Op, Taken, View};
use op_cases::{Case, GUARD, Given, Guarded, Set, cases};

const REPEATS: usize = 31;

/// What the op takes in each of several runs; nothing else that a case calls is counted.
fn measure(cpu: Cpu, op: Op, case: &Case<Cpu>) -> Vec<Taken> {
    let (mut cpu, notes) = cpu.timed();
    let (w, tokens, ids) = case.prepare(&mut cpu);
    let inputs: Vec<Guarded<Cpu>> =
        case.inputs.iter().map(|m| Guarded::new(&mut cpu, (m.rows, m.cols), &m.f32s(), GUARD)).collect();
    let mut outs: Vec<Guarded<Cpu>> = Vec::new();
    for out in &case.outs {
        // Numbers that are not finite would take other branches.
        let old = out.old();
        outs.push(Guarded::new(&mut cpu, (old.rows, old.cols), &old.f32s(), GUARD));
    }
    let i: Vec<View<_>> = inputs.iter().map(Guarded::view).collect();
    notes.take();
    let given = Given { i: &i, w: &w, tokens: &tokens, ids: &ids };
    let mut run = |_| {
        (case.verb)(&mut cpu, &given, &mut outs);
        notes.take().remove(op.name())
    };
    (0..REPEATS).filter_map(&mut run).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let threads = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(2);
    let open = || match arguments.get(1).map(String::as_str) {
        Some("bf16") => Cpu::bf16(threads),
        Some("twin") => Cpu::bf16_reference(threads).unwrap_or_else(|| panic!("one bf16 kernel only")),
        _ => Cpu::new(threads),
    };
    let only = arguments.get(2).map_or("", String::as_str);
    println!("{}, {threads} threads", finetune::backend::Backend::class(&open()));
    println!("{:<58} {:>9} {:>9} {:>9} {:>8}", "op", "best ms", "median", "GFLOP/s", "GB/s");
    // The part of a name may be an op, so that others are not made.
    let named = Op::ALL.iter().any(|op| op.name().contains(only));
    for op in Op::ALL.iter().filter(|op| !named || op.name().contains(only)) {
        for case in cases::<Cpu>(*op, Set::Model) {
            let name = format!("{op:?} {}", case.name);
            if !name.contains(only) {
                continue;
            }
            let mut taken = measure(open(), *op, &case);
            taken.sort_by(|a, b| (a.seconds / a.calls as f64).total_cmp(&(b.seconds / b.calls as f64)));
            let Some(best) = taken.first() else { continue };
            let each = |taken: &Taken| taken.seconds / taken.calls as f64 * 1e3;
            let (gflops, gbytes) = (best.flops / best.seconds / 1e9, best.bytes / best.seconds / 1e9);
            let median = each(&taken[taken.len() / 2]);
            println!("{name:<58} {:>9.3} {median:>9.3} {gflops:>9.1} {gbytes:>8.1}", each(best));
        }
    }
}
