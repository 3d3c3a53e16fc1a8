//! Lines: stages on threads have the bits of one stage, end with the fault of the stage that has one, and can be used
//! after it.

use super::case::{self, Case};
use super::{Try, bits, divides, each_case, refuses_two_stages, trains_a_tied_row};
use finetune::backend::Cpu;
use finetune::model::decoder::{Build, Keep};
use finetune::model::generate::generate;
use finetune::model::layout;
use finetune::model::line::Line;
use finetune::model::stage::{
    Cancel, Fault, LossSums, Microbatch, Model, Output, Sampling, Stage, Targets, Ticket, Want,
};

/// A line of stages that begin at these layers.
fn line(case: &Case, starts: &[usize], (keep, make): (Keep, fn(usize) -> Cpu)) -> Line {
    let ends = starts[1..].iter().copied().chain([case.config.layers]);
    let part = |(start, end): (usize, usize)| -> Box<dyn Model> {
        let build = Build { layers: start..end, keep, ..Build::whole(&case.config) };
        Try { build, make, threads: 1, ..Try::new(case).dropout(0.2) }.stage()
    };
    let stages = starts.iter().copied().zip(ends).map(part).collect();
    let lora = Try::new(case).dropout(0.2).lora;
    Line::new(stages, layout::of(&case.config, &lora, 0..case.config.layers)).unwrap()
}

/// Sums and bits of all microbatches.
fn all(stage: &mut dyn Stage, batches: &[Microbatch]) -> Result<Vec<(LossSums, Vec<u32>)>, Fault> {
    let mut got = Vec::new();
    let each = &mut |index, sums: &LossSums, gradient: &[f32]| {
        assert_eq!(index, got.len(), "in order");
        got.push((sums.clone(), bits(gradient)));
    };
    let mut batches = batches.iter().cloned();
    stage.gradients(&mut || batches.next(), each)?;
    Ok(got)
}

fn batches(case: &Case) -> Vec<Microbatch> {
    (0..7).map(|i| case.microbatch(i, 1 + i % 3)).collect()
}

/// First layers of the seats.
fn splits(case: &Case) -> Vec<Vec<usize>> {
    let layers = case.config.layers;
    let fits = |starts: &Vec<usize>| starts[1..].iter().all(|start| divides(case, *start));
    let two = (0..=layers).map(|k| vec![0, k]);
    let three = (0..layers).map(|k| vec![0, k, k + 1]);
    [vec![0]]
        .into_iter()
        .chain(two)
        .chain(three)
        .filter(|starts| starts.last() < Some(&layers))
        .filter(fits)
        .collect()
}

#[test]
fn a_line_has_the_bits_of_one_stage() {
    each_case(|case| {
        let (parameters, batches) = (case.adapter("adapter_init"), batches(case));
        let f32s: fn(usize) -> Cpu = Cpu::new;
        for (keep, make) in [(Keep::Everything, f32s), (Keep::Inputs, f32s), (Keep::Inputs, Cpu::bf16)] {
            let build = Build { keep, ..Build::whole(&case.config) };
            let mut whole = Try { build, make, ..Try::new(case).dropout(0.2) }.stage();
            whole.set_parameters(&parameters).unwrap();
            let alone = all(&mut *whole, &batches).unwrap();
            for starts in splits(case) {
                let mut line = line(case, &starts, (keep, make));
                line.set_parameters(&parameters).unwrap();
                assert_eq!((line.class(), line.span()), (whole.class(), whole.span()));
                assert!(all(&mut line, &batches).unwrap() == alone, "{starts:?}, {keep:?}");
                if case.config.labels.is_none() {
                    let score = |stage: &mut dyn Stage| stage.forward(&batches[2], None, Want::Scores(2));
                    assert_eq!(
                        score(&mut line).unwrap(),
                        score(&mut *whole).unwrap(),
                        "{starts:?}, {keep:?}"
                    );
                }
                // One pass at a time.
                let mut gradient = vec![f32::NAN; parameters.len()];
                let sums = line.gradient(&batches[3], &mut gradient).unwrap();
                assert!((sums, bits(&gradient)) == alone[3], "{starts:?}, {keep:?}");
            }
        }
    });
}

#[test]
fn a_fault_in_a_line_ends_the_round_and_leaves_nothing() {
    each_case(|case| {
        if trains_a_tied_row(case) {
            return refuses_two_stages(case);
        }
        let (parameters, good) = (case.adapter("adapter_init"), batches(case));
        let mut line = line(case, &[0, case.config.layers - 1], (Keep::Everything, Cpu::new));
        line.set_parameters(&parameters).unwrap();
        let alone = all(&mut line, &good).unwrap();
        for at in 0..good.len() {
            // The first stage reads ids, the last one targets.
            for (what, of) in [("token id", 0), ("target", 1)] {
                let mut bad = good.clone();
                match (&mut bad[at].targets, of) {
                    (_, 0) => bad[at].ids[0] = u32::MAX - 1,
                    (Targets::Tokens(all) | Targets::Weighted { targets: all, .. }, _) => {
                        all[0] = u32::MAX - 1
                    }
                    (Targets::Labels(all) | Targets::Classes(all), _) => all[0] = u32::MAX - 1,
                    (Targets::Answers(answers), _) => answers.begins.clear(),
                    (Targets::Numbers(all), _) => all.clear(),
                    (Targets::Ranked(ranking), _) => ranking.margins.clear(),
                }
                let (mut given, mut bad) = (0, bad.into_iter());
                let each = &mut |_, _: &LossSums, _: &[f32]| given += 1;
                let end = line.gradients(&mut || bad.next(), each).unwrap_err();
                assert!(matches!(&end, Fault::Device { reason, .. } if reason.contains(what)), "{end:?}");
                assert!(given <= at, "nothing after the fault");
                assert!(all(&mut line, &good).unwrap() == alone, "{what} of {at}");
            }
        }
    });
}

#[test]
fn a_cancelled_line_stops_and_goes_on_later() {
    each_case(|case| {
        if trains_a_tied_row(case) {
            return refuses_two_stages(case);
        }
        let (parameters, batches) = (case.adapter("adapter_init"), batches(case));
        let mut line = line(case, &[0, case.config.layers - 1], (Keep::Inputs, Cpu::new));
        line.set_parameters(&parameters).unwrap();
        let cancel = Cancel::default();
        line.heed(cancel.clone());
        let alone = all(&mut line, &batches).unwrap();
        cancel.raise();
        assert_eq!(all(&mut line, &batches), Err(Fault::Cancelled));
        let want = Want::Gradient(Ticket(1));
        assert_eq!(line.forward(&batches[0], None, want), Err(Fault::Cancelled));
        cancel.lower();
        assert!(all(&mut line, &batches).unwrap() == alone);
    });
}

#[test]
fn a_line_generates_and_scores_as_one_stage() {
    for case in case::golden().iter().map(|dir| Case::open(dir)) {
        let parameters = case.adapter("adapter_final");
        let (batch, mut whole) = (case.microbatch(0, 3), Try::new(&case).stage());
        whole.set_parameters(&parameters).unwrap();
        let sampling = Sampling { max_new_tokens: 9, temperature: 0.7, top_p: 0.9, seed: 5, stop: vec![] };
        for starts in splits(&case) {
            let mut line = line(&case, &starts, (Keep::Inputs, Cpu::new));
            line.set_parameters(&parameters).unwrap();
            let losses =
                |stage: &mut dyn Stage| stage.forward(&batch, None, Want::Loss).and_then(Output::loss);
            assert_eq!(losses(&mut line), losses(&mut *whole));
            if case.config.labels.is_none() {
                let text = |stage: &mut dyn Stage| generate(stage, &[3, 1, 4], &sampling, &mut |_| true);
                assert_eq!(text(&mut line), text(&mut *whole));
            }
        }
    }
}

/// The length before scaling is 14 here (LongRoPE).
#[test]
fn a_line_ends_texts_where_one_stage_does() {
    let dir = case::golden().into_iter().find(|dir| dir.ends_with("phi3longer")).unwrap();
    let case = Case::open(&dir);
    let mut line = line(&case, &[0, 1], (Keep::Inputs, Cpu::new));
    line.set_parameters(&case.adapter("adapter_final")).unwrap();
    let sampling = Sampling { max_new_tokens: 40, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
    for (prompt, new) in [(3, 11), (14, 0), (15, 40)] {
        let prompt: Vec<u32> = (0..prompt).map(|i| i * 7 + 2).collect();
        assert_eq!(generate(&mut line, &prompt, &sampling, &mut |_| true).unwrap().len(), new);
    }
}

#[test]
fn stages_that_make_no_model_are_refused() {
    let case = Case::open(&case::golden()[0]);
    let part = |layers: std::ops::Range<usize>| -> Box<dyn Model> {
        let build = Build { layers, ..Build::whole(&case.config) };
        Try { build, ..Try::new(&case) }.stage()
    };
    let (end, layout) = (case.config.layers, || layout::of(&case.config, &case.lora, 0..case.config.layers));
    for stages in [vec![], vec![part(0..end - 1)], vec![part(1..end)], vec![part(0..end), part(0..end)]] {
        assert!(Line::new(stages, layout()).is_err());
    }
}
