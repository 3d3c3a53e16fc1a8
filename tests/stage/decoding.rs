//! Decoding with a cache.

use super::{Case, Try, bits, case, each_case};
use finetune::backend::Cpu;
use finetune::model::generate::generate;
use finetune::model::pending::argmax;
use finetune::model::stage::{Microbatch, Output, Sampling, Session, Targets, Want};
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
            let new = generate(&mut *stage, &prompt, &sampling, &mut |_| true).unwrap();
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
                generate(&mut *stage, &prompt, &Sampling { stop, ..sampling.clone() }, &mut |_| true)
                    .unwrap();
            assert_eq!(stopped[..], new[..=new.iter().position(|t| *t == new[3]).unwrap()]);
            let mut left = 5;
            let cut = generate(&mut *stage, &prompt, &sampling, &mut |_| {
                left -= 1;
                left > 0
            });
            assert_eq!(cut.unwrap(), new[..5]);
        }
    });
}

/// Texts of different lengths that grow together, with one that begins in between, in f32 and bf16.
#[test]
fn texts_that_grow_together_have_the_bits_of_each_alone() {
    each_case(|case| {
        if case.config.labels.is_some() {
            return;
        }
        let f32s: fn(usize) -> Cpu = Cpu::new;
        for make in [f32s, Cpu::bf16] {
            let mut stage = Try { make, ..Try::new(case) }.stage();
            stage.set_parameters(&case.adapter("adapter_final")).unwrap();
            let mut draws = Stream::new(&[2]);
            let texts: Vec<Vec<u32>> = [3, 1, 17, 2, 5, 8, 4, 6, 3]
                .map(|n| (0..n + 6).map(|_| draws.below(case.config.vocab as u32)).collect())
                .into();
            let logits = |output| match output {
                Output::Logits(logits) => bits(&logits),
                other => panic!("logits were asked for, not {other:?}"),
            };
            // The logits after each of the last six tokens and after the tokens before them.
            let mut alone = Vec::new();
            for text in &texts {
                let (prompt, rest) = text.split_at(text.len() - 6);
                let ids = std::iter::once(prompt).chain(rest.chunks(1));
                alone.push(
                    ids.map(|ids| logits(stage.extend(Session(0), ids, None).unwrap())).collect::<Vec<_>>(),
                );
                stage.end(Session(0));
            }
            for n in 0..=7usize {
                // The last text begins a token later than the others.
                let now: Vec<(usize, usize)> = (0..texts.len())
                    .filter_map(|i| Some((i, n.checked_sub(usize::from(i == texts.len() - 1))?)))
                    .filter(|(_, n)| *n <= 6)
                    .collect();
                let ids = |(i, n): (usize, usize)| {
                    let end = texts[i].len() - 6 + n;
                    &texts[i][if n == 0 { 0 } else { end - 1 }..end]
                };
                let asked: Vec<(Session, &[u32])> =
                    now.iter().map(|&(i, n)| (Session(i as u64), ids((i, n)))).collect();
                let made = logits(stage.extend_all(&asked, None).unwrap());
                let expected: Vec<u32> = now.iter().flat_map(|&(i, n)| alone[i][n].clone()).collect();
                assert!(made == expected, "token {n}");
            }
            (0..texts.len()).for_each(|i| stage.end(Session(i as u64)));
        }
    });
}

/// Kept keys of a short row have other angles than those of a row beyond the length before scaling, which is 14 here.
#[test]
fn text_of_a_short_prompt_ends_at_the_length_before_scaling() {
    let dir = case::golden().into_iter().find(|dir| dir.ends_with("phi3longer")).unwrap();
    let mut stage = Try::new(&Case::open(&dir)).stage();
    let sampling = Sampling { max_new_tokens: 40, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
    for (prompt, new) in [(3, 11), (14, 0), (15, 40)] {
        let prompt: Vec<u32> = (0..prompt).map(|i| i * 7 + 2).collect();
        assert_eq!(generate(&mut *stage, &prompt, &sampling, &mut |_| true).unwrap().len(), new);
    }
    stage.extend(Session(0), &[5; 14], None).unwrap();
    let said = stage.extend(Session(0), &[5], None).unwrap_err().to_string();
    assert!(said.contains("1 tokens after 14 of at most 14"), "{said}");
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
    let mut ids = [vec![3, 1], generate(&mut *stage, &[3, 1], &sampling, &mut say).unwrap()].concat();
    assert_eq!(ids.len(), 602);
    let token = ids.pop();
    let (bounds, targets) = (vec![0, 601], Targets::Tokens(vec![u32::MAX; 601]));
    let batch = Microbatch { step: 1, rows: vec![0], ids, bounds, targets };
    let Output::Logits(logits) = stage.forward(&batch, None, Want::Logits).unwrap() else {
        panic!("logits were asked for");
    };
    assert_eq!(Some(argmax(&logits) as u32), token);
}
