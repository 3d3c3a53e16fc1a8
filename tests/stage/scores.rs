//! Scores of tokens: their bits are those of the loss.

use super::{Case, Try, each_case, loss};
use finetune::model::generate::score;
use finetune::model::stage::{Microbatch, Output, Stage, Targets, TokenScore, Want};

fn scores(stage: &mut dyn Stage, batch: &Microbatch, top: usize) -> Vec<TokenScore> {
    match stage.forward(batch, None, Want::Scores(top)).unwrap() {
        Output::Scores(scores) => scores,
        other => panic!("scores were asked for, not {other:?}"),
    }
}

#[test]
fn scores_of_tokens_are_the_losses() {
    each_case(|case: &Case| {
        let batch = case.microbatch(0, 3);
        // Scores have no weight.
        if !matches!(batch.targets, Targets::Tokens(_)) {
            return;
        }
        let mut stage = Try::new(case).stage();
        stage.set_parameters(&case.adapter("adapter_final")).unwrap();
        let sums = loss(stage.forward(&batch, None, Want::Loss).unwrap());
        for top in [0, 1, 5] {
            let scores = scores(&mut *stage, &batch, top);
            assert_eq!(scores.len() as u64, sums.targets);
            assert!(scores.iter().all(|score| score.top.len() == top.min(case.config.vocab)));
            let sum: f64 = scores.iter().map(|score| -score.token).sum();
            assert_eq!(sum.to_bits(), sums.loss.to_bits());
        }
        let none = Targets::Tokens(vec![u32::MAX; batch.ids.len()]);
        assert_eq!(self::scores(&mut *stage, &Microbatch { targets: none, ..batch }, 3), []);
    });
}

/// The most probable tokens of a position are those of the logits there, and a target among them has its own score.
#[test]
fn most_probable_tokens_are_those_of_the_logits() {
    each_case(|case: &Case| {
        if case.config.labels.is_some() {
            return;
        }
        let mut stage = Try::new(case).stage();
        stage.set_parameters(&case.adapter("adapter_final")).unwrap();
        let ids: Vec<u32> = (0..9).map(|i| (i * 7 + 3) % case.config.vocab as u32).collect();
        let batch = |ids: &[u32], targets| {
            let (ids, bounds) = (ids.to_vec(), vec![0, ids.len() as u32]);
            Microbatch { step: 1, rows: vec![0], ids, bounds, targets: Targets::Tokens(targets) }
        };
        let none = vec![u32::MAX; 9];
        let Output::Logits(logits) = stage.forward(&batch(&ids, none), None, Want::Logits).unwrap() else {
            panic!("logits were asked for");
        };
        for target in [score(&logits, 0, 1).top[0].0, 2] {
            let mut targets = vec![u32::MAX; 9];
            targets[8] = target;
            let found = scores(&mut *stage, &batch(&ids, targets), 4).remove(0);
            let expected = score(&logits, target, 4);
            let of = |score: &TokenScore| score.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(of(&found), of(&expected));
            let pairs = found.top.iter().zip(&expected.top).map(|(a, b)| (a.1, b.1));
            for (a, b) in pairs.chain([(found.token, expected.token)]) {
                assert!((a - b).abs() < 1e-4, "{a} {b}");
            }
            if let Some((_, own)) = found.top.iter().find(|(id, _)| *id == target) {
                assert_eq!(own.to_bits(), found.token.to_bits());
            }
        }
    });
}
