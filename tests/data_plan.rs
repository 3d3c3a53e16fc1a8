//! Properties of the plan, the basis of F-DP-002 (every row exactly once an epoch), for any options.

use finetune::data::plan::{Plan, PlanOptions};
use proptest::prelude::*;

fn options() -> impl Strategy<Value = PlanOptions> {
    let numbers = (1usize..12, 1u64..4, proptest::option::of(1u64..40), proptest::option::of(1usize..300));
    (numbers, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(|(n, packing, shuffle, seed)| {
        PlanOptions {
            batch_size: n.0,
            epochs: n.1,
            max_steps: n.2,
            micro_batch_tokens: n.3,
            packing,
            shuffle,
            seed,
        }
    })
}

fn lengths() -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(1u32..200, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_epoch_has_each_row_once(lengths in lengths(), options in options()) {
        let plan = Plan::of_lengths(lengths.clone(), &options);
        let per_epoch = lengths.len().div_ceil(options.batch_size) as u64;
        prop_assert_eq!(plan.steps_per_epoch(), per_epoch);
        prop_assert_eq!(plan.total_steps(), options.max_steps.unwrap_or(options.epochs * per_epoch));
        for epoch in 0..3 {
            let mut rows = Vec::new();
            for s in 1..=per_epoch {
                let step = plan.step(epoch * per_epoch + s);
                prop_assert_eq!(step.epoch, epoch);
                let n = step.rows().count();
                // only an epoch's last step may be short
                prop_assert!(n == options.batch_size || s == per_epoch && n > 0);
                rows.extend(step.rows());
            }
            rows.sort_unstable();
            prop_assert_eq!(rows, (0..lengths.len()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn budgets_hold_and_packing_moves_no_row(lengths in lengths(), options in options()) {
        let packed = Plan::of_lengths(lengths.clone(), &PlanOptions { packing: true, ..options.clone() });
        let alone = Plan::of_lengths(lengths.clone(), &PlanOptions { packing: false, ..options.clone() });
        for s in 1..=20 {
            let (step, single) = (packed.step(s), alone.step(s));
            for m in &step.microbatches {
                let tokens: usize = m.iter().map(|&i| lengths[i] as usize).sum();
                prop_assert!(!m.is_empty() && (m.len() == 1 || tokens <= packed.micro_batch_tokens()));
            }
            prop_assert!(single.microbatches.iter().all(|m| m.len() == 1));
            let sorted = |mut rows: Vec<usize>| { rows.sort_unstable(); rows };
            prop_assert_eq!(sorted(step.rows().collect()), sorted(single.rows().collect()));
            // first-fit leaves no two microbatches that would fit into one
            for (i, a) in step.microbatches.iter().enumerate() {
                let tokens = |m: &[usize]| m.iter().map(|&i| lengths[i] as usize).sum::<usize>();
                for b in &step.microbatches[i + 1..] {
                    prop_assert!(tokens(a) + lengths[b[0]] as usize > packed.micro_batch_tokens());
                }
            }
        }
    }

    #[test]
    fn packing_is_first_fit(lengths in lengths(), budget in 1usize..300) {
        let mut naive: Vec<Vec<usize>> = Vec::new();
        let used = |bin: &[usize]| bin.iter().map(|&i| lengths[i] as usize).sum::<usize>();
        for (i, &n) in lengths.iter().enumerate() {
            match naive.iter_mut().find(|bin| used(bin) + n as usize <= budget) {
                Some(bin) => bin.push(i),
                None => naive.push(vec![i]),
            }
        }
        let options = PlanOptions { micro_batch_tokens: Some(budget), shuffle: false, ..plain(lengths.len()) };
        prop_assert_eq!(Plan::of_lengths(lengths.clone(), &options).step(1).microbatches, naive);
    }

    #[test]
    fn steps_do_not_depend_on_call_order(lengths in lengths(), options in options()) {
        let forward = Plan::of_lengths(lengths.clone(), &options);
        let backward = Plan::of_lengths(lengths, &options);
        let up: Vec<_> = (1..=30).map(|s| forward.step(s)).collect();
        let mut down: Vec<_> = (1..=30).rev().map(|s| backward.step(s)).collect();
        down.reverse();
        prop_assert_eq!(up, down);
    }

    #[test]
    fn rows_needed_gives_a_sufficient_prefix(lengths in lengths(), options in options()) {
        let options = PlanOptions { shuffle: false, ..options };
        if let Some(n) = options.rows_needed() {
            let whole = Plan::of_lengths(lengths.clone(), &options);
            let prefix = Plan::of_lengths(lengths[..n.min(lengths.len())].to_vec(), &options);
            prop_assert_eq!(whole.total_steps(), prefix.total_steps());
            for s in 1..=whole.total_steps() {
                prop_assert_eq!(whole.step(s), prefix.step(s));
            }
        }
    }
}

fn plain(batch_size: usize) -> PlanOptions {
    PlanOptions {
        batch_size,
        epochs: 1,
        max_steps: None,
        micro_batch_tokens: None,
        packing: true,
        shuffle: true,
        seed: 42,
    }
}

/// (rows, tokens in each, rows per step) -> tokens per microbatch.
#[test]
fn default_budget_follows_the_tokens_of_a_step() {
    for (rows, tokens, batch, expected) in [
        (100, 10, 8, 256),      // 80 / 16 = 5
        (1000, 512, 8, 256),    // 4,096 / 16 = 256
        (1000, 724, 8, 256),    // 362 is just below 256 * sqrt(2) = 362.04
        (1000, 725, 8, 512),    // 362.5 just above
        (1000, 1024, 16, 1024), // 16,384 / 16
        (1000, 2048, 64, 4096),
        (10, 2048, 64, 1024), // a step has 10 rows at most: 1,280
    ] {
        let plan = Plan::of_lengths(vec![tokens; rows], &plain(batch));
        assert_eq!(plan.micro_batch_tokens(), expected, "{rows} rows of {tokens}, {batch} a step");
    }
}

#[test]
fn epochs_and_seeds_give_different_orders() {
    let order = |seed, epoch: u64| -> Vec<usize> {
        let plan = Plan::of_lengths(vec![5; 64], &PlanOptions { seed, ..plain(64) });
        plan.step(epoch + 1).rows().collect()
    };
    assert_ne!(order(1, 0), order(1, 1));
    assert_ne!(order(1, 0), order(2, 0));
    assert_ne!(order(1, 0), (0..64).collect::<Vec<_>>());
    assert_eq!(order(1, 3), order(1, 3));
}

#[test]
fn a_step_of_many_long_rows_is_packed_at_once() {
    let n = 400_000;
    let options = PlanOptions { micro_batch_tokens: Some(100), ..plain(n) };
    let plan = Plan::of_lengths(vec![60; n], &options);
    let began = std::time::Instant::now();
    assert_eq!(plan.step(1).microbatches.len(), n);
    // Comparing each row with each microbatch would take 80 billion comparisons.
    assert!(began.elapsed().as_secs() < 8, "{:?}", began.elapsed());
}

#[test]
fn first_fit_matches_a_case_by_hand() {
    let options = PlanOptions { micro_batch_tokens: Some(10), shuffle: false, ..plain(8) };
    let plan = Plan::of_lengths(vec![6, 5, 4, 11, 5, 1, 10, 3], &options);
    assert_eq!(plan.step(1).microbatches, vec![vec![0, 2], vec![1, 4], vec![3], vec![5, 7], vec![6]]);
}

#[test]
fn a_mixture_draws_its_shares_in_each_epoch() {
    let options = PlanOptions { micro_batch_tokens: None, ..plain(7) };
    let lengths: Vec<u32> = (0..50).map(|i| if i < 40 { 10 } else { 7000 }).collect();
    let plan = |shuffle, seed| {
        let options = PlanOptions { shuffle, seed, ..options.clone() };
        Plan::of_lengths(lengths.clone(), &options).mixed(&[(0..40, 1.0), (40..50, 3.0)])
    };
    let epoch = |plan: &Plan, e: u64| -> Vec<usize> {
        (1..=8).flat_map(|s| plan.step(8 * e + s).rows().collect::<Vec<_>>()).collect()
    };
    let mixed = plan(true, 1);
    assert_eq!(mixed.steps_per_epoch(), 8);
    // 50 rows, of which a quarter is 12.5: the set with the first of two equal fractions gets the row that is left.
    for e in 0..4 {
        let rows = epoch(&mixed, e);
        let of_set = |set: std::ops::Range<usize>| rows.iter().filter(|row| set.contains(row)).count();
        assert_eq!((rows.len(), of_set(0..40), of_set(40..50)), (50, 13, 37));
        let times = |row: usize| rows.iter().filter(|r| **r == row).count();
        assert!((0..40).all(|row| times(row) <= 1), "{rows:?}");
        assert!((40..50).all(|row| [3, 4].contains(&times(row))), "{rows:?}");
    }
    let drawn = |plan: &Plan, e| {
        let mut rows = epoch(plan, e);
        rows.sort_unstable();
        rows
    };
    assert_ne!(drawn(&mixed, 0), drawn(&mixed, 1));
    assert_ne!(drawn(&mixed, 0), drawn(&plan(true, 2), 0));
    // A plan that begins in the middle of an epoch, as a resumed run, has the same steps.
    assert_eq!(plan(true, 1).step(12), mixed.step(12));
    assert_eq!(epoch(&plan(false, 1), 1), drawn(&mixed, 1));
    // The mean step of the mixture has more tokens than that of the rows once each.
    let once = Plan::of_lengths(lengths.clone(), &options);
    assert!(mixed.micro_batch_tokens() > once.micro_batch_tokens(), "{}", mixed.micro_batch_tokens());
    let first = PlanOptions { max_steps: Some(1), ..options };
    let rows = Plan::of_lengths(lengths, &first).mixed(&[(0..40, 1.0), (40..50, 3.0)]).rows();
    assert!(rows.windows(2).all(|pair| pair[0] < pair[1]) && rows.len() <= 7, "{rows:?}");
}
