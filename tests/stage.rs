//! Guarantees of a stage, on every architecture of the golden cases: two stages equal one, recomputation equals
//! keeping, packing changes rounding only, threads change nothing, gradients match differences of the loss (with
//! dropout and class weights too), and cached decoding equals whole passes.

#[path = "parity/case.rs"]
mod case;
#[path = "stage/decoding.rs"]
mod decoding;
#[path = "stage/experts.rs"]
mod experts;
#[path = "stage/in_flight.rs"]
mod in_flight;
#[path = "stage/line.rs"]
mod line;
#[path = "stage/processors.rs"]
mod processors;
#[path = "stage/scores.rs"]
mod scores;
#[path = "stage/streamed.rs"]
mod streamed;

use case::Case;
use finetune::backend::{Backend, Cpu, view_mut};
use finetune::model::config::Config;
use finetune::model::decoder::{Build, Keep};
use finetune::model::layout;
use finetune::model::lora::LoraSpec;
use finetune::model::stage::{
    Cancel, Fault, IGNORE, LossSums, Microbatch, Model, Output, Stage, Targets, Ticket, Want,
};
use stages::Loads;

/// Loss and gradient of one microbatch, and how they are computed.
struct Try<'a> {
    case: &'a Case,
    config: Config,
    lora: LoraSpec,
    build: Build,
    threads: usize,
    make: fn(usize) -> Cpu,
}

impl<'a> Try<'a> {
    fn new(case: &'a Case) -> Self {
        let (config, build) = (case.config.clone(), Build::whole(&case.config));
        Try { case, config, lora: case.lora.clone(), build, threads: 2, make: Cpu::new }
    }

    fn dropout(mut self, p: f32) -> Self {
        self.lora.dropout = p;
        self.config.tag_dropout = p;
        self
    }

    fn stage(&self) -> Box<dyn Model> {
        let (cpu, build) = ((self.make)(self.threads).poisoning(), self.build.clone());
        cpu.stage((&self.config, &*self.case.tensors, &self.lora), build).unwrap()
    }

    fn run(&self, parameters: &[f32], batch: &Microbatch) -> (LossSums, Vec<f32>) {
        gradient(&mut *self.stage(), parameters, batch)
    }
}

fn gradient(stage: &mut dyn Stage, parameters: &[f32], batch: &Microbatch) -> (LossSums, Vec<f32>) {
    stage.set_parameters(parameters).unwrap();
    let mut gradient = vec![f32::NAN; parameters.len()];
    let sums = loss(stage.forward(batch, None, Want::Gradient(Ticket(0))).unwrap());
    assert_eq!(stage.backward(Ticket(0), None, &mut gradient).unwrap(), None);
    assert!(gradient.iter().all(|g| g.is_finite()), "every value of the gradient is written");
    (sums, gradient)
}

fn loss(output: Output) -> LossSums {
    match output {
        Output::Loss(sums) => sums,
        other => panic!("a loss was asked for, not {other:?}"),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn each_case(check: impl Fn(&Case)) {
    for dir in case::golden() {
        println!("{:?}", dir.file_name());
        check(&Case::open(&dir));
        // Whole matrices, and matrices of several projections.
        if ["qwen3", "phi3", "glm4"].iter().any(|name| dir.ends_with(name)) {
            check(&Case::open(&dir).tagger());
        }
    }
}

#[test]
fn lent_gradient_equals_the_copied_one() {
    let mut cpu = Cpu::new(1);
    let mut memory = cpu.memory(3);
    cpu.upload(view_mut(&mut memory, 1, 3), &[1.0, 2.0, 3.0]);
    assert_eq!(cpu.lend(&memory), Some(&[1.0, 2.0, 3.0][..]), "without a copy");
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_final"), case.microbatch(0, 2));
        let mut stage = Try::new(case).stage();
        stage.set_parameters(&parameters).unwrap();
        let mut copied = vec![f32::NAN; parameters.len()];
        let sums = stage.gradient(&batch, &mut copied).unwrap();
        let mut lent = Vec::new();
        let each = &mut |_, sums: &LossSums, gradient: &[f32]| lent.push((sums.clone(), bits(gradient)));
        let mut both = [batch.clone(), batch].into_iter();
        stage.gradients(&mut || both.next(), each).unwrap();
        assert!(lent == vec![(sums, bits(&copied)); 2]);
    });
}

#[test]
fn recomputing_and_threads_do_not_change_a_bit() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 5));
        let f32s: fn(usize) -> Cpu = Cpu::new;
        for (p, make) in [(0.0, f32s), (0.3, f32s), (0.0, Cpu::bf16), (0.3, Cpu::bf16)] {
            let (sums, kept) = Try { make, ..Try::new(case).dropout(p) }.run(&parameters, &batch);
            let parts = [[1, 0, 0], [1, 1, 0], [0, 9, 0], [0, 1, 9], [0, 0, 1], [0, 0, 9]].map(Keep::Parts);
            let whole = [(Keep::Inputs, 2), (Keep::Everything, 1), (Keep::Inputs, 3)];
            for (keep, threads) in whole.into_iter().chain(parts.map(|keep| (keep, 2))) {
                let build = Build { keep, ..Build::whole(&case.config) };
                let (again, gradient) =
                    Try { build, threads, make, ..Try::new(case).dropout(p) }.run(&parameters, &batch);
                assert_eq!(sums, again);
                assert_eq!(bits(&kept), bits(&gradient), "{keep:?}, {threads} threads, dropout {p}");
            }
        }
    });
}

/// On a whole model, the two bf16 kernels agree to the bit, and both are near f32.
#[test]
fn bf16_is_near_f32_on_either_kernel() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_final"), case.microbatch(0, 5));
        for p in [0.0, 0.3] {
            let run = |make| Try { make, ..Try::new(case).dropout(p) }.run(&parameters, &batch);
            let (exact, rounded) = (run(Cpu::new), run(Cpu::bf16));
            // In torch, rounding the inputs of frozen products changes the gradient of golden qwen35 by more than its size.
            let chaotic = case.config.delta_rules.is_some();
            let bound = if chaotic { 0.05 } else { 0.01 };
            let near = |a: f64, b: f64| (a - b).abs() <= bound * b.abs();
            assert!(near(rounded.0.loss, exact.0.loss), "{} for {}", rounded.0.loss, exact.0.loss);
            let size = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let off = size(&mut rounded.1.iter().zip(&exact.1).map(|(a, b)| a - b));
            let of = size(&mut exact.1.iter().copied());
            let most = if chaotic { 0.5 } else { 0.05 };
            assert!(off <= most * of, "gradient: {off} of {of}, dropout {p}");
            if Cpu::bf16_reference(1).is_some() {
                let reference = run(|threads| Cpu::bf16_reference(threads).unwrap());
                assert_eq!(
                    (reference.0, bits(&reference.1)),
                    (rounded.0, bits(&rounded.1)),
                    "the other kernel, dropout {p}"
                );
            }
        }
    });
}

#[test]
fn a_cancelled_pass_leaves_nothing_behind() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 5));
        for keep in [Keep::Everything, Keep::Inputs] {
            let build = Build { keep, ..Build::whole(&case.config) };
            let mut stage = Try { build, ..Try::new(case).dropout(0.3) }.stage();
            let before = gradient(&mut *stage, &parameters, &batch);
            let cancel = Cancel::default();
            stage.heed(cancel.clone());
            cancel.raise();
            assert_eq!(stage.forward(&batch, None, Want::Gradient(Ticket(0))), Err(Fault::Cancelled));
            assert_eq!(stage.forward(&batch, None, Want::Loss), Err(Fault::Cancelled));
            cancel.lower();
            stage.forward(&batch, None, Want::Gradient(Ticket(0))).unwrap();
            cancel.raise();
            assert_eq!(
                stage.backward(Ticket(0), None, &mut vec![0.0; parameters.len()]),
                Err(Fault::Cancelled)
            );
            cancel.lower();
            assert!(
                stage.backward(Ticket(0), None, &mut vec![0.0; parameters.len()]).is_err(),
                "its pass is gone"
            );
            let after = gradient(&mut *stage, &parameters, &batch);
            assert_eq!((before.0, bits(&before.1)), (after.0, bits(&after.1)));
        }
    });
}

/// Whether a row is trained that embedding and head share.
fn trains_a_tied_row(case: &Case) -> bool {
    case.lora.rows.shared(&case.config)
}

/// Whether a stage may begin at layer `k` above another one. Where the embedding is trained it must not begin at layer 0: of two
/// stages that do, both would embed.
fn divides(case: &Case, k: usize) -> bool {
    let embeds = !case.lora.rows.embedding.is_empty() || case.lora.ends.embedding.is_some();
    !embeds || !trains_a_tied_row(case) && k > 0
}

fn refuses_two_stages(case: &Case) {
    let (cpu, build) = (Cpu::new(1), Build { layers: 1..case.config.layers, ..Build::whole(&case.config) });
    let refused = cpu.stage((&case.config, &*case.tensors, &case.lora), build).err().unwrap();
    assert!(refused.to_string().contains("need both on one device"), "{refused}");
}

#[test]
fn two_stages_equal_one_for_every_split() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(3, 4));
        let layers = case.config.layers;
        if trains_a_tied_row(case) {
            return refuses_two_stages(case);
        }
        let cuts = (0..layers).filter(|k| divides(case, *k));
        for (k, keep) in cuts.flat_map(|k| [(k, Keep::Everything), (k, Keep::Inputs)]) {
            let whole = Try::new(case).dropout(0.2);
            let (sums, gradient) = whole.run(&parameters, &batch);
            let part = |layers| Try {
                build: Build { layers, keep, ..Build::whole(&case.config) },
                ..Try::new(case).dropout(0.2)
            };
            let (mut low, mut high) = (part(0..k).stage(), part(k..layers).stage());
            let at = low.layout().len();
            assert_eq!(at + high.layout().len(), parameters.len());
            low.set_parameters(&parameters[..at]).unwrap();
            high.set_parameters(&parameters[at..]).unwrap();
            let (mut g_low, mut g_high) = (vec![f32::NAN; at], vec![f32::NAN; parameters.len() - at]);
            let Output::Hidden(hidden) = low.forward(&batch, None, Want::Gradient(Ticket(0))).unwrap() else {
                panic!("a first stage gives hidden states");
            };
            assert_eq!(
                loss(high.forward(&batch, Some(&hidden), Want::Gradient(Ticket(0))).unwrap()),
                sums,
                "split at {k}"
            );
            let down = high.backward(Ticket(0), None, &mut g_high).unwrap().unwrap();
            assert_eq!(low.backward(Ticket(0), Some(&down), &mut g_low).unwrap(), None);
            assert_eq!(bits(&[g_low, g_high].concat()), bits(&gradient), "split at {k}, {keep:?}");
        }
    });
}

#[test]
fn packed_rows_do_not_attend_to_each_other() {
    each_case(|case| {
        let parameters = case.adapter("adapter_init");
        let mut stage = Try::new(case).dropout(0.25).stage();
        let (packed, together) = gradient(&mut *stage, &parameters, &case.microbatch(2, 7));
        let (mut loss, mut weight, mut predictions) = (0.0, 0.0, Vec::new());
        let mut sum = vec![0f64; parameters.len()];
        for row in 2..9 {
            let (sums, part) = gradient(&mut *stage, &parameters, &case.microbatch(row, 1));
            (loss, weight) = (loss + sums.loss, weight + sums.weight);
            predictions.extend(sums.predictions);
            sum.iter_mut().zip(part).for_each(|(s, g)| *s += f64::from(g));
        }
        assert!((packed.loss - loss).abs() <= 1e-6 * loss, "{} packed, {loss} alone", packed.loss);
        assert_eq!((packed.weight, &packed.predictions), (weight, &predictions));
        let norm = sum.iter().map(|g| g * g).sum::<f64>().sqrt();
        let off: f64 = together.iter().zip(&sum).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
        assert!(off.sqrt() <= 1e-5 * norm, "gradients differ by {:e} of their norm", off.sqrt() / norm);
    });
}

/// Central differences along the gradient of each tensor. The loss is f32 per position and f64 in sum, so a step that
/// changes it by about a hundredth resolves four digits.
#[test]
fn gradients_match_central_differences_of_the_loss() {
    each_case(|case| {
        for p in [0.0, 0.4] {
            let parameters = case.adapter("adapter_init");
            let batch = case.microbatch(1, 6);
            let class_weights = case.config.labels.as_ref().map(|_| vec![0.5, 2.0, 1.25]);
            let build = Build { class_weights, ..Build::whole(&case.config) };
            let mut stage = Try { build, ..Try::new(case).dropout(p) }.stage();
            let (sums, exact) = gradient(&mut *stage, &parameters, &batch);
            let exact = &exact[..];
            if let Targets::Labels(labels) = &batch.targets {
                let weight: f64 = labels.iter().map(|&l| [0.5, 2.0, 1.25][l as usize]).sum();
                assert_eq!(sums.weight, weight);
            }
            if let Targets::Classes(classes) = &batch.targets {
                let classes = classes.iter().filter(|class| **class != IGNORE);
                assert_eq!(sums.weight, classes.map(|&c| [0.5, 2.0, 1.25][c as usize]).sum::<f64>());
            }
            let mut at = |shift: &dyn Fn(usize) -> f32| {
                let moved: Vec<f32> = parameters.iter().enumerate().map(|(i, x)| x + shift(i)).collect();
                stage.set_parameters(&moved).unwrap();
                loss(stage.forward(&batch, None, Want::Gradient(Ticket(0))).unwrap()).loss
            };
            for entry in case.layout.entries() {
                let own = &exact[entry.range()];
                let norm = own.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                assert!(norm > 0.0, "{} has no gradient", entry.name);
                let h = 0.01 / norm.max(1.0);
                let shift = |sign: f64| {
                    move |i: usize| match entry.range().contains(&i) {
                        true => (sign * h * f64::from(exact[i]) / norm) as f32,
                        false => 0.0,
                    }
                };
                let (up, down) = (shift(1.0), shift(-1.0));
                let slope = (at(&up) - at(&down)) / (2.0 * h);
                let bound = 2e-3 * norm + 1e-6 * sums.loss / h;
                assert!(
                    (slope - norm).abs() <= bound,
                    "{} p {p}: slope {slope}, gradient {norm}",
                    entry.name
                );
            }
        }
    });
}

/// Unneeded gradients are not computed, and the computed ones do not change.
#[test]
fn any_subset_of_modules_has_the_gradient_of_all() {
    each_case(|case| {
        let modules = case.config.family.modules();
        if case.lora.targets.len() < modules.len() {
            return;
        }
        let batch = case.microbatch(0, 4);
        for subset in 1..1u32 << modules.len() {
            let all = || modules.iter().enumerate();
            let some = || all().filter(|(i, _)| subset >> i & 1 == 1).map(|(_, module)| *module);
            let chosen = |name: &str| some().any(|module| name.contains(module)) || name.contains("score");
            let targets = some().map(str::to_owned).collect();
            if subset.count_ones() > 2 && subset % 17 != 0 {
                continue;
            }
            // With B = 0 the other modules add nothing to the output, nor to the gradient.
            let mut all = case.adapter("adapter_init");
            let mut few = Vec::new();
            for entry in case.layout.entries() {
                match chosen(&entry.name) {
                    true => few.extend_from_slice(&all[entry.range()]),
                    false => all[entry.range()].fill(0.0),
                }
            }
            let (sums, wide) = Try::new(case).run(&all, &batch);
            let lora = LoraSpec { targets, ..case.lora.clone() };
            let narrow_layout = layout::of(&case.config, &lora, 0..case.config.layers);
            let (again, narrow) = Try { lora, ..Try::new(case) }.run(&few, &batch);
            assert_eq!(sums, again);
            for entry in narrow_layout.entries() {
                let same = case.layout.find(&entry.name).unwrap();
                assert_eq!(narrow[entry.range()], wide[same.range()], "{} of subset {subset:b}", entry.name);
            }
        }
    });
}

#[test]
fn dropout_is_keyed_by_step_and_row_and_off_in_evaluation() {
    each_case(|case| {
        let (parameters, batch) = (case.adapter("adapter_init"), case.microbatch(0, 4));
        let mut stage = Try::new(case).dropout(0.5).stage();
        let (sums, first) = gradient(&mut *stage, &parameters, &batch);
        assert_eq!(gradient(&mut *stage, &parameters, &batch), (sums.clone(), first.clone()));
        let other_step = Microbatch { step: 2, ..batch.clone() };
        assert_ne!(gradient(&mut *stage, &parameters, &other_step).0.loss, sums.loss);
        let other_rows = Microbatch { rows: vec![9, 8, 7, 6], ..batch.clone() };
        assert_ne!(gradient(&mut *stage, &parameters, &other_rows).0.loss, sums.loss);
        let evaluated = loss(stage.forward(&batch, None, Want::Loss).unwrap());
        assert_eq!(evaluated, Try::new(case).run(&parameters, &batch).0);
        assert!(
            stage.backward(Ticket(0), None, &mut vec![0.0; parameters.len()]).is_err(),
            "nothing was kept"
        );
    });
}

#[test]
fn non_finite_logits_are_a_fault() {
    each_case(|case| {
        let mut stage = Try::new(case).stage();
        let mut parameters = case.adapter("adapter_final");
        parameters.iter_mut().for_each(|p| *p = 1e30);
        stage.set_parameters(&parameters).unwrap();
        let logits = stage.forward(&case.microbatch(0, 2), None, Want::Logits);
        assert!(matches!(logits, Err(Fault::NonFinite { .. })), "{logits:?}");
    });
}

#[test]
fn bad_microbatches_are_faults() {
    let case = Case::open(&case::golden()[0]);
    let mut stage = Try::new(&case).stage();
    let good = case.microbatch(0, 2);
    let t = good.ids.len();
    let bad = [
        Microbatch { ids: vec![case.config.vocab as u32; t], ..good.clone() },
        Microbatch { bounds: vec![0, 0, t as u32], ..good.clone() },
        Microbatch { bounds: vec![0, t as u32], ..good.clone() },
        Microbatch { targets: Targets::Labels(vec![0, 1]), ..good.clone() },
        Microbatch { targets: Targets::Tokens(vec![1]), ..good.clone() },
    ];
    for batch in bad {
        assert!(stage.forward(&batch, None, Want::Loss).is_err(), "{batch:?}");
    }
    assert!(stage.forward(&good, Some(&[0.0]), Want::Loss).is_err());
    assert!(stage.set_parameters(&[0.0]).is_err());
    for case in case::golden().iter().map(|dir| Case::open(dir)) {
        let Some(classes) = case.config.labels.as_ref().map(Vec::len) else { continue };
        let good = case.microbatch(0, 2);
        let [tokens, none] = [Targets::Tokens(vec![1; good.ids.len()]), Targets::Labels(vec![0, u32::MAX])];
        for targets in [tokens, none, Targets::Labels(vec![0, classes as u32])] {
            let bad = Microbatch { targets, ..good.clone() };
            let fault = Try::new(&case).stage().forward(&bad, None, Want::Loss);
            assert!(matches!(fault, Err(Fault::Device { .. })), "{bad:?}");
        }
    }
    let tagger = Case::open(&case::golden().into_iter().find(|dir| dir.ends_with("qwen3")).unwrap()).tagger();
    let all = tagger.microbatch(0, 2);
    let n = all.ids.len();
    let rows = [Targets::Labels(vec![0, 1]), Targets::Tokens(vec![0; n]), Targets::Numbers(vec![0.0; 6])];
    for targets in rows.into_iter().chain([Targets::Classes(vec![3; n]), Targets::Classes(vec![0; n - 1])]) {
        let bad = Microbatch { targets, ..all.clone() };
        let fault = Try::new(&tagger).stage().forward(&bad, None, Want::Loss);
        assert!(matches!(fault, Err(Fault::Device { .. })), "{bad:?}");
    }
    let nothing = Microbatch { targets: Targets::Tokens(vec![u32::MAX; t]), ..good };
    let (sums, gradient) = gradient(&mut *stage, &case.adapter("adapter_init"), &nothing);
    assert_eq!((sums.loss, sums.targets), (0.0, 0));
    assert!(gradient.iter().all(|&g| g == 0.0), "nothing asked, nothing learnt");
}
