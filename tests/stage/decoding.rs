//! Decoding with a cache.

use super::{Case, Try, case, each_case};
use finetune::model::generate::generate;
use finetune::model::head::argmax;
use finetune::model::stage::{Microbatch, Output, Sampling, Stage, Targets, Want};
use finetune::numeric::rng::Stream;

#[test]
fn cached_decoding_equals_full_passes() {
    each_case(|case| {
        if case.config.labels.is_some() {
            return;
        }
        let mut stage = Try::new(case).stage();
        stage.set_parameters(&case.adapter("adapter_final")).unwrap();
        let mut draws = Stream::new(&[1]);
        for length in [1, 2, 17] {
            let prompt: Vec<u32> = (0..length).map(|_| draws.below(case.config.vocab as u32)).collect();
            let sampling =
                Sampling { max_new_tokens: 12, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
            let new = generate(&mut stage, &prompt, &sampling, &mut |_| true).unwrap();
            assert_eq!(new.len(), 12);
            let mut ids = prompt.clone();
            for &token in &new {
                let bounds = vec![0, ids.len() as u32];
                let targets = Targets::Tokens(vec![u32::MAX; ids.len()]);
                let batch = Microbatch { step: 1, rows: vec![0], ids: ids.clone(), bounds, targets };
                let Output::Logits(logits) = stage.forward(&batch, None, Want::Logits).unwrap() else {
                    panic!("logits were asked for");
                };
                assert_eq!(argmax(&logits) as u32, token);
                ids.push(token);
            }
            let stop = vec![new[3]];
            let stopped =
                generate(&mut stage, &prompt, &Sampling { stop, ..sampling.clone() }, &mut |_| true).unwrap();
            assert_eq!(stopped[..], new[..=new.iter().position(|t| *t == new[3]).unwrap()]);
            let mut left = 5;
            let cut = generate(&mut stage, &prompt, &sampling, &mut |_| {
                left -= 1;
                left > 0
            });
            assert_eq!(cut.unwrap(), new[..5]);
        }
    });
}

/// The maximum length takes no memory until it is reached, and the cached values stay when the cache grows.
#[test]
fn cache_grows_with_the_generated_tokens() {
    let mut case = Case::open(&case::golden()[0]);
    case.config.max_positions = 1 << 40;
    let mut stage = Try::new(&case).stage();
    stage.set_parameters(&case.adapter("adapter_final")).unwrap();
    let mut left = 600;
    let sampling = Sampling { max_new_tokens: 1 << 39, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
    let mut say = |_| {
        left -= 1;
        left > 0
    };
    let mut ids = [vec![3, 1], generate(&mut stage, &[3, 1], &sampling, &mut say).unwrap()].concat();
    assert_eq!(ids.len(), 602);
    let token = ids.pop();
    let (bounds, targets) = (vec![0, 601], Targets::Tokens(vec![u32::MAX; 601]));
    let batch = Microbatch { step: 1, rows: vec![0], ids, bounds, targets };
    let Output::Logits(logits) = stage.forward(&batch, None, Want::Logits).unwrap() else {
        panic!("logits were asked for");
    };
    assert_eq!(Some(argmax(&logits) as u32), token);
}
