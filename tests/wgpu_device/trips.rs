//! Round trips (F-WGPU-002).

use crate::case::Case;
use crate::devices;
use finetune::backend::wgpu::Options;
use finetune::backend::{Backend, Frozen, Traffic, Wgpu, Write, view, view_mut};
use finetune::model::decoder::{Build, Keep};
use finetune::model::stage::{Output, Ticket, Want};
use finetune::numeric::dtype::Dtype;
use stages::Loads;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

fn tolerance(key: &str) -> f64 {
    let text = include_str!("../../contracts/F-WGPU-002.yaml");
    let contract: serde_json::Value = serde_yaml::from_str(text).unwrap();
    contract["tolerance"][key].as_f64().unwrap()
}

#[test]
fn microbatch_takes_at_most_two_submissions_and_one_read() {
    // A language model and a classifier, whose predictions are read back too.
    for name in ["llama", "llamacls"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parity").join(name);
        let case = Case::open(&dir);
        for gpu in devices(Options::default()) {
            let class = gpu.class();
            let build = Build::whole(&case.config);
            let mut stage = gpu.stage((&case.config, &case.tensors, &case.lora), build).unwrap();
            let parameters = case.adapter("adapter_init");
            let batch = case.microbatch(0, 3);
            let mut gradient = vec![f32::NAN; parameters.len()];
            let mut last = None;
            for round in 0..10 {
                stage.set_parameters(&parameters).unwrap();
                let before = stage.traffic();
                let sums = stage.gradient(&batch, &mut gradient).unwrap();
                let taken = stage.traffic().since(&before);
                assert_eq!(taken.read_backs as f64, tolerance("read_backs"), "{class} {name}");
                if round > 0 {
                    assert!(
                        taken.submissions as f64 <= tolerance("submissions"),
                        "{class} {name}: {taken:?}"
                    );
                    assert_eq!(taken.made, 0, "{class} {name}: something is made in the steady state");
                }
                // Ids, positions and bounds; rows, targets; class weights are uploaded before.
                let integers = 4 * batch.ids.len() + 2 * batch.ids.len();
                let most = 4 * (integers + parameters.len());
                assert!(taken.uploaded as usize <= most, "{class} {name}: {} of {most}", taken.uploaded);
                let losses = sums.targets as usize * (1 + case.config.labels.as_ref().map_or(0, Vec::len));
                assert_eq!(taken.read as usize, 4 * (parameters.len() + losses), "{class} {name}");
                let result = (sums, gradient.clone());
                assert!(last.replace(result.clone()).is_none_or(|l| l == result), "{class}: the same bits");
            }
            let Output::Loss(sums) = stage.forward(&batch, None, Want::Gradient(Ticket(0))).unwrap() else {
                panic!("a whole model gives a loss");
            };
            stage.backward(Ticket(0), None, &mut gradient).unwrap();
            assert_eq!(last, Some((sums, gradient)), "{class} {name}: two passes give the bits of one");
        }
    }
}

/// The gradient of a small model, its traffic, and how many of its submissions ended inside a block.
fn at_pace(gpu: Wgpu, case: &Case) -> (Vec<f32>, Traffic, u64) {
    let inside = gpu.cut_inside();
    let build = Build { keep: Keep::Inputs, ..Build::whole(&case.config) };
    let mut stage = gpu.stage((&case.config, &case.tensors, &case.lora), build).unwrap();
    let parameters = case.adapter("adapter_init");
    stage.set_parameters(&parameters).unwrap();
    let (batch, mut gradient) = (case.microbatch(0, 3), vec![f32::NAN; parameters.len()]);
    // The estimate of a whole pass is known after the first pass.
    stage.gradient(&batch, &mut gradient).unwrap();
    let before = (stage.traffic(), inside.load(Relaxed));
    stage.gradient(&batch, &mut gradient).unwrap();
    (gradient, stage.traffic().since(&before.0), inside.load(Relaxed) - before.1)
}

#[test]
fn submissions_end_between_blocks_if_blocks_are_short() {
    let case = Case::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parity/llama"));
    let (mut whole, mut clean, mut cut) = (None, 0, 0);
    // From a device that takes no time to one on which a block takes many submissions.
    for power in [36.0, 26.0, 25.25, 25.0, 24.75, 24.5, 23.0] {
        let options = Options { rate: Some(2f64.powf(power)), steady: true, ..Options::default() };
        // One driver is enough: work is split before any driver sees it.
        for gpu in devices(options).into_iter().take(1) {
            let (gradient, taken, inside) = at_pace(gpu, &case);
            println!("{power}: {} submissions, {inside} of them ended inside a block", taken.submissions);
            assert!(whole.get_or_insert(gradient.clone()) == &gradient, "a cut changes no bit");
            assert_eq!(taken.read_backs, 1);
            clean += u64::from(taken.submissions > 1 && inside == 0);
            cut += u64::from(inside > 0);
        }
    }
    let none = whole.is_none() && std::env::var_os("FINETUNE_NEED_VULKAN").is_none();
    assert!(none || (clean > 0 && cut > 0), "{clean} {cut}");
}

/// With a known rate, no submission is estimated at more than the contract allows, whatever the clock measures.
#[test]
fn no_submission_exceeds_its_time_limit() {
    let (t, n, rate) = (64, 512, 1e8);
    for mut gpu in devices(Options { rate: Some(rate), steady: true, ..Options::default() }) {
        let w =
            gpu.weight(Frozen { rows: n, cols: n, dtype: Dtype::Bf16, bytes: &vec![0; n * n * 2] }).unwrap();
        let [mut x, mut y] = [t * n, t * n].map(|len| gpu.memory(len));
        gpu.fill(view_mut(&mut x, t, n), 1.0);
        for round in 0..3 {
            let before = gpu.traffic();
            gpu.heaviest();
            for _ in 0..4 {
                gpu.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, n), &w);
                gpu.linear_grad(view_mut(&mut x, t, n), Write::Set, view(&y, t, n), &w);
                gpu.border();
            }
            gpu.read(view(&x, 1, 8), &mut [0.0; 8]).unwrap();
            let (taken, most) = (gpu.traffic().since(&before), gpu.heaviest() / rate);
            let all = 8.0 * 2.0 * (t * n * n) as f64 / rate;
            assert!(most > 0.0 && most <= tolerance("submission_seconds"), "{round}: {most} s");
            assert!(taken.submissions as f64 >= all / tolerance("submission_seconds"), "{round}: {taken:?}");
            assert_eq!(taken.read_backs, 1);
        }
    }
}

/// With measurements during the computation. The time depends on the driver and on the load of its processor: the clock
/// is printed, and not checked.
#[test]
fn long_work_is_split_and_read_once() {
    let (t, n) = (256, 1024);
    for mut gpu in devices(Options::default()) {
        let bytes = vec![0u8; n * n * 2];
        let w = gpu.weight(Frozen { rows: n, cols: n, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
        let [mut x, mut y] = [t * n, t * n].map(|len| gpu.memory(len));
        gpu.fill(view_mut(&mut x, t, n), 1.0);
        let mut round = |gpu: &mut Wgpu, verbs: usize| {
            for _ in 0..verbs {
                gpu.linear(view_mut(&mut y, t, n), Write::Set, view(&x, t, n), &w);
                gpu.linear(view_mut(&mut x, t, n), Write::Set, view(&y, t, n), &w);
            }
            gpu.read(view(&y, 1, 8), &mut [0.0; 8]).unwrap();
        };
        // Until the rate is known.
        (0..3).for_each(|_| round(&mut gpu, 1));
        gpu.heaviest();
        // 2.1 GFLOP, doubled until it takes this driver more than one submission.
        let cut = (1..16).any(|power| {
            let before = gpu.traffic();
            round(&mut gpu, 1 << power);
            let (taken, heaviest) = (gpu.traffic().since(&before), gpu.heaviest());
            println!("{}: {} times two products: {taken:?}, {heaviest:e} at most", gpu.class(), 1 << power);
            assert_eq!(taken.read_backs, 1);
            assert!(heaviest > 0.0, "nothing was sent");
            taken.submissions >= 2
        });
        assert!(cut, "{}: 70,000 GFLOP in one submission", gpu.class());
        assert!(gpu.traffic().longest_submission > 0.0, "{}: nothing was measured", gpu.class());
    }
}
