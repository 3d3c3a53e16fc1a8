//! The coordinator's total against a plain sum: every grouping at the limits of the range, members that die or send
//! false sums at any point, pieces in any interleaving.

use bytes::Bytes;
use finetune::cluster::message::{Packed, ToCoordinator};
use finetune::cluster::reduce::{Claim, Holds, Reducer, Refusal, Report};
use finetune::cluster::sum_chunk::{self, SumChunkError};
use finetune::numeric::fixed::{self, CELL};
use finetune::numeric::rng::Stream;
use finetune::train::sum::{RewardSums, Scalars, Sums};
use std::sync::mpsc::{Receiver, channel};

const LEN: usize = 2 * CELL + 777;

struct Bench {
    reducer: Reducer,
    reports: Receiver<Report>,
}

fn bench(len: usize) -> Bench {
    let (send, reports) = channel();
    let reducer = Reducer::new(len, (3, Holds::Two), move |report| drop(send.send(report))).unwrap();
    Bench { reducer, reports }
}

impl Bench {
    fn send(&self, member: u64, piece: ToCoordinator) -> Result<(), Refusal> {
        let ToCoordinator::SumPiece { sum, offset, len, packed } = piece else { panic!("a piece") };
        self.reducer.piece(member, sum, (offset, len), packed)
    }

    fn claim(&self, member: u64, sum: u64, leases: usize) {
        let scalars = Scalars {
            loss: 7 * leases as i128,
            weight: leases as i128,
            targets: leases as u64,
            rewards: RewardSums {
                sums: [leases as i128, -3],
                counts: [leases as u64, 1],
                pairs: 1,
                right: 0,
                range: None,
            },
        };
        self.reducer.finish(member, Claim { sum, leases, scalars });
    }

    fn all(&self, member: u64, sums: &Sums, leases: usize) -> Result<(), Refusal> {
        sum_chunk::of_sum(1, sums).try_for_each(|p| self.send(member, p))?;
        self.claim(member, 1, leases);
        self.reports.recv().unwrap().result
    }

    fn total(&self) -> Sums {
        let mut total = Sums::new(0);
        self.reducer.total(&mut total);
        total
    }
}

fn gradient(seed: u64, len: usize) -> Vec<f32> {
    let mut draws = Stream::new(&[seed]);
    (0..len).map(|_| (draws.unit() - 0.5) * 2f32.powi(draws.below(24) as i32 - 20)).collect()
}

/// Running sum of some microbatches.
fn running(gradients: &[Vec<f32>], of: usize) -> Sums {
    let mut sums = Sums::new(gradients[0].len());
    gradients.iter().for_each(|g| sums.add_gradient(g, fixed::cap(of)).unwrap());
    sums
}

/// All ways to write `m` as a sum of parts, the largest first.
fn groupings(m: usize, most: usize) -> Vec<Vec<usize>> {
    if m == 0 {
        return vec![vec![]];
    }
    let first = (1..=m.min(most)).rev();
    first.flat_map(|k| groupings(m - k, k).into_iter().map(move |rest| [vec![k], rest].concat())).collect()
}

#[test]
fn sums_accept_values_up_to_the_cap_only() {
    let len = 130;
    for m in [1usize, 2, 3, 5, 8] {
        let cap = fixed::cap(m);
        let sign = |i: usize| if i.is_multiple_of(3) { -1 } else { 1 };
        let filled = |k: usize, over: i64| {
            let mut sums = Sums::new(len);
            let each = sums.cells_mut()[0].iter_mut().enumerate();
            each.for_each(|(i, v)| *v = sign(i) * (cap * k as i64));
            if let Some(v) = sums.cells_mut()[0][65].checked_add(sign(65) * over) {
                sums.cells_mut()[0][65] = v;
            }
            sums
        };
        for grouping in groupings(m, m) {
            let bench = bench(len);
            bench.reducer.begin(m);
            for (member, &k) in (0..).zip(&grouping) {
                assert_eq!(bench.all(member, &filled(k, 0), k), Ok(()), "{m} as {grouping:?}");
                assert!(bench.reducer.take(member, 1));
            }
            assert_eq!(bench.total().cells(), filled(m, 0).cells(), "{m} as {grouping:?}");
        }
        for k in (1..=m).filter(|k| cap * (*k as i64) < i64::MAX) {
            let bench = bench(len);
            bench.reducer.begin(m);
            let result = bench.all(1, &filled(k, 1), k);
            assert!(matches!(result, Err(Refusal::Piece(SumChunkError::Packing(_)))), "{m}, {k}: {result:?}");
        }
    }
}

/// A member: the microbatches in its sum, the messages that it still has to send (in reverse order), and whether all of
/// them are correct.
struct Script {
    leases: usize,
    pieces: Vec<ToCoordinator>,
    honest: bool,
}

/// A member for `gradients`: some send f32, some send every piece twice, three in eight send a false sum.
fn script(draws: &mut Stream, gradients: &[Vec<f32>], of: usize) -> Script {
    let leases = gradients.len();
    let mut pieces: Vec<_> = match leases == 1 && draws.below(2) == 0 {
        true => sum_chunk::of_gradient(1, &gradients[0]).collect(),
        false => sum_chunk::of_sum(1, &running(gradients, of)).collect(),
    };
    let fault = draws.below(8);
    match fault {
        0 => pieces.truncate(draws.below(3) as usize),
        1 => pieces.insert(1 + draws.below(2) as usize, pieces[1].clone()),
        2 => spoil(&mut pieces[2]),
        _ => {}
    }
    if draws.below(4) == 0 {
        pieces = [pieces.clone(), pieces].concat();
    }
    pieces.reverse();
    Script { leases, pieces, honest: fault > 2 }
}

/// Sends all messages, members interleaved at random, takes the sums that are reported complete, and takes back the
/// others.
fn play(bench: &Bench, draws: &mut Stream, scripts: Vec<Script>) -> Vec<u64> {
    let mut queues: Vec<_> = (0u64..).zip(scripts).collect();
    let mut due = 0;
    while !queues.is_empty() {
        let i = draws.below(queues.len() as u32) as usize;
        let (member, script) = &mut queues[i];
        match script.pieces.pop().map(|piece| bench.send(*member, piece)) {
            Some(Ok(())) => continue,
            Some(Err(_)) => bench.reducer.take_back(*member),
            None => {
                bench.claim(*member, 1, script.leases);
                due += 1;
            }
        }
        queues.remove(i);
    }
    let mut taken = Vec::new();
    for report in bench.reports.iter().take(due) {
        match report.result {
            Ok(()) => {
                assert!(bench.reducer.take(report.member, report.sum));
                taken.push(report.member);
            }
            Err(_) => bench.reducer.take_back(report.member),
        }
    }
    taken.sort_unstable();
    taken
}

#[test]
fn any_interleaving_gives_the_plain_sum() {
    let gradients: Vec<Vec<f32>> = (0..12).map(|i| gradient(i, LEN)).collect();
    let of = gradients.len() + 8;
    for seed in 0..60u64 {
        let mut draws = Stream::new(&[seed, 1]);
        let bench = bench(LEN);
        bench.reducer.begin(of);
        let (mut want, mut leases) = (Sums::new(LEN), 0);
        let (mut scripts, mut at) = (Vec::new(), 0);
        while at < gradients.len() {
            let k = (1 + draws.below(3) as usize).min(gradients.len() - at);
            let part = &gradients[at..at + k];
            let script = script(&mut draws, part, of);
            if script.honest {
                part.iter().for_each(|g| want.add_gradient(g, fixed::cap(of)).unwrap());
                leases += k;
            }
            scripts.push(script);
            at += k;
        }
        let honest: Vec<u64> =
            (0..).zip(&scripts).filter(|(_, s)| s.honest).map(|(member, _)| member).collect();
        assert_eq!(play(&bench, &mut draws, scripts), honest, "seed {seed}");
        let total = bench.total();
        assert!(total.cells() == want.cells(), "seed {seed}");
        let Scalars { loss, weight, targets, rewards } = total.scalars();
        let said = (loss, weight, targets);
        let sums = rewards.sums[0];
        assert_eq!((sums, rewards.counts[0]), (leases as i128, leases as u64), "seed {seed}");
        assert_eq!(said, (7 * leases as i128, leases as i128, leases as u64), "seed {seed}");
    }
}

/// Removes the last byte.
fn spoil(piece: &mut ToCoordinator) {
    let ToCoordinator::SumPiece { packed, .. } = piece else { return };
    let (Packed::Fixed(bytes) | Packed::Single(bytes)) = packed;
    *bytes = bytes.slice(..bytes.len() - 1);
}

#[test]
fn partial_sum_of_a_dead_member_is_discarded() {
    let (a, b) = (running(&[gradient(1, LEN)], 4), running(&[gradient(2, LEN)], 4));
    let bench = bench(LEN);
    for round in 0..3 {
        bench.reducer.begin(4);
        sum_chunk::of_sum(1, &a).take(2).for_each(|p| bench.send(1, p).unwrap());
        bench.reducer.take_back(1);
        assert_eq!(bench.all(2, &b, 1), Ok(()));
        assert!(bench.reducer.take(2, 1) && !bench.reducer.take(2, 1), "a sum counts once");
        assert_eq!(bench.all(1, &a, 1), Ok(()));
        bench.reducer.take_back(1); // complete, but not taken
        assert!(!bench.reducer.take(1, 1));
        sum_chunk::of_sum(9, &a).take(1).for_each(|p| bench.send(3, p).unwrap()); // never finished
        let total = bench.total();
        assert!(total.cells() == b.cells(), "round {round}");
        assert_eq!(total.targets, 1);
    }
}

#[test]
fn malformed_pieces_of_sums_are_refused() {
    let good = running(&[gradient(1, LEN), gradient(2, LEN)], 8);
    let pieces: Vec<_> = sum_chunk::of_sum(1, &good).collect();
    let single: Vec<_> = sum_chunk::of_gradient(1, &gradient(1, LEN)).collect();
    let fixed = |sum, offset, len, bytes: Vec<u8>| {
        let packed = Packed::Fixed(Bytes::from(bytes));
        ToCoordinator::SumPiece { sum, offset, len, packed }
    };
    let float = |v: f32| {
        let bytes: Vec<u8> = std::iter::repeat_n(v.to_le_bytes(), CELL).flatten().collect();
        ToCoordinator::SumPiece { sum: 1, offset: 0, len: CELL as u32, packed: Packed::Single(bytes.into()) }
    };
    let huge = fixed::cap(8) as f64 / 2f64.powi(39);
    let p = |i: usize| pieces[i].clone();
    let cases: Vec<(&str, Vec<ToCoordinator>, usize, &str)> = vec![
        ("a piece is missing", vec![p(0), p(1)], 2, "ends after 2 of 3 pieces"),
        ("nothing came", vec![], 2, "ends after 0 of 3 pieces"),
        ("a piece is skipped", vec![p(0), p(2)], 2, "were due"),
        ("it begins in the middle", vec![p(1)], 2, "were due"),
        ("a piece comes twice", vec![p(0), p(1), p(1)], 2, "were due"),
        ("one too many", vec![p(0), p(1), p(2), fixed(1, LEN as u64, 0, vec![])], 2, "were due"),
        ("a piece of another size", vec![fixed(1, 0, 5, vec![0])], 2, "were due"),
        ("beyond everything", vec![p(0), fixed(1, u64::MAX, u32::MAX, vec![])], 2, "were due"),
        ("no packing", vec![p(0), fixed(1, CELL as u64, CELL as u32, vec![255; 99]), p(2)], 2, "packed sum"),
        ("of no microbatch", pieces.clone(), 0, "of 0 microbatches"),
        ("of more than there are", pieces.clone(), 9, "of 9 microbatches"),
        ("f32 of two microbatches", single, 2, "of 2 microbatches"),
        ("NaN", vec![float(f32::NAN)], 1, "NaN"),
        ("infinite", vec![float(f32::NEG_INFINITY)], 1, "inf"),
        ("above the cap", vec![float(huge as f32)], 1, "which no sum can"),
    ];
    for (name, pieces, leases, want) in cases {
        let bench = bench(LEN);
        bench.reducer.begin(8);
        let sent = pieces.into_iter().try_for_each(|p| bench.send(1, p));
        let result = sent.and_then(|()| {
            bench.claim(1, 1, leases);
            bench.reports.recv().unwrap().result
        });
        let line = result.expect_err(name).to_string();
        assert!(line.contains(want), "{name}: {line}");
        assert!(!bench.reducer.take(1, 1), "{name}");
        bench.reducer.take_back(1);
        assert!(bench.total() == Sums::new(LEN), "{name}: something stayed in the total");
    }
    let bench = bench(LEN);
    bench.reducer.begin(8);
    let mut many = (1..4).map(|sum| sum_chunk::of_sum(sum, &good).next().unwrap());
    assert!(many.by_ref().take(2).all(|p| bench.send(1, p).is_ok()));
    assert!(bench.send(1, many.next().unwrap()).is_err(), "sums without end");
    let loss = i128::from(i64::MAX) * 2 + 1;
    sum_chunk::of_sum(1, &good).for_each(|p| bench.send(2, p).unwrap());
    bench.reducer.finish(
        2,
        Claim { sum: 1, leases: 2, scalars: Scalars { loss, weight: 2, targets: 2, ..Scalars::default() } },
    );
    assert!(matches!(bench.reports.recv().unwrap().result, Err(Refusal::Scalars { .. })));
}
