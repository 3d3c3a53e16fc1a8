//! Results on other processors: this test runs itself again with fewer instructions (`FINETUNE_CPU`).

use super::{Try, bits, each_case};
use finetune::backend::{Backend, Cpu};
use finetune::numeric::rng;
use std::process::Command;

const NAME: &str = "processors::vector_length_changes_no_bit_with_fma";
/// Set if the test is to print its results.
const TELL: &str = "TELL_WHAT_IS_COMPUTED";
const MARK: &str = "computed:";

/// For every golden case, in f32 and bf16: the class, and a hash of the bits of loss and gradient.
fn computed() -> Vec<String> {
    let lines = std::cell::RefCell::new(Vec::new());
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_final"), case.microbatch(0, 5));
        for (make, p) in
            [(Cpu::new as fn(usize) -> Cpu, 0.0), (Cpu::new, 0.3), (Cpu::bf16, 0.0), (Cpu::bf16, 0.3)]
        {
            let (sums, gradient) = Try { make, ..Try::new(case).dropout(p) }.run(&parameters, &batch);
            let words = bits(&gradient).into_iter().map(u64::from).chain([sums.loss.to_bits()]);
            let hash = rng::hash(&words.collect::<Vec<_>>());
            lines.borrow_mut().push(format!("{} {hash:x}", make(1).class()));
        }
    });
    lines.into_inner()
}

/// The results of this program with at most those instructions.
fn computed_with(limit: &str) -> Vec<String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .envs([("FINETUNE_CPU", limit), (TELL, "1")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_once(MARK)).map(|(_, line)| line.to_string()).collect()
}

#[test]
fn vector_length_changes_no_bit_with_fma() {
    if std::env::var_os(TELL).is_some() {
        return computed().iter().for_each(|line| println!("{MARK}{line}"));
    }
    let best = computed();
    if !best[0].contains("avx512") {
        return println!("skipped: no AVX-512 to compare with AVX2");
    }
    assert_eq!(computed_with("avx512"), best, "the best that there is");
    let fewer = computed_with("avx2");
    let as_avx2: Vec<_> = best.iter().map(|line| line.replace("avx512", "avx2")).collect();
    assert_eq!(fewer, as_avx2);
    // Without fused multiply-adds the class and the bits differ, which shows that the comparison can fail.
    let none = computed_with("generic");
    assert_eq!(none.len(), best.len());
    let hash = |line: &String| line.split_once(' ').map(|(_, hash)| hash.to_string());
    let f32s = none.iter().zip(&best).filter(|(none, _)| none.contains("f32"));
    assert!(f32s.clone().count() > 0 && f32s.clone().all(|(a, b)| hash(a) != hash(b)), "{none:?} {best:?}");
}
