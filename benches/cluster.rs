//! Cost of a step for the coordinator, besides computing: adding the sums of 1, 4, 16 and 64 synthetic workers
//! (prepared sums, encoded as on the wire), mean, norm, clipping, AdamW, hash and encoding of the parameters, at the
//! size of SmolLM2-135M's LoRA r 16. Bytes on the wire are compared with 4 per parameter in each direction, and the
//! reduction with the machine's own memory copy, measured in the same run with the same threads.
//!
//! `cargo bench --bench cluster -- [--parameters 4884480] [--threads N] [--repeat 5]`

mod arguments;

use arguments::option;
use bytes::Bytes;
use finetune::cluster::link;
use finetune::cluster::message::{Changed, Packed, ToCoordinator, ToWorker};
use finetune::cluster::reduce::{Claim, Holds, Reducer};
use finetune::cluster::sum_chunk;
use finetune::model::layout::Places;
use finetune::numeric::difference;
use finetune::numeric::fixed::{self, CELL};
use finetune::numeric::rng::Stream;
use finetune::train::checkpoint::State;
use finetune::train::optim::Options;
use finetune::train::optimizer_step::{self, Means};
use finetune::train::sum::{Scalars, Sums};
use rayon::prelude::*;
use std::sync::mpsc::channel;
use std::time::Instant;

/// Microbatches in each worker's sum.
const LEASES: usize = 4;

/// Median seconds of `repeat` calls, after one warm-up call.
fn seconds(repeat: usize, mut call: impl FnMut()) -> f64 {
    call();
    let mut times: Vec<f64> = (0..repeat)
        .map(|_| {
            let began = Instant::now();
            call();
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A gradient of Gaussian values around 1e-2, the magnitude of SmolLM2's.
fn gradient(seed: u64, len: usize) -> Vec<f32> {
    let mut draws = Stream::new(&[seed]);
    let mut one = || ((0..12).map(|_| draws.unit()).sum::<f32>() - 6.0) * 1e-2;
    (0..len).map(|_| one()).collect()
}

/// A worker's sum as frames.
fn frames(seed: u64, len: usize) -> Vec<Bytes> {
    let mut sums = Sums::new(len);
    for i in 0..LEASES as u64 {
        sums.add_gradient(&gradient(seed * 100 + i, len), fixed::cap(1024)).unwrap_or_else(|e| panic!("{e}"));
    }
    let encode = |p| link::encode(&p).unwrap_or_else(|e| panic!("{e}")).whole();
    sum_chunk::of_sum(1, &sums).map(encode).collect()
}

fn copy_speed(len: usize, repeat: usize) -> f64 {
    let (from, mut to) = (vec![1i64; len], vec![0i64; len]);
    let time = seconds(repeat, || {
        let chunks = to.par_chunks_mut(fixed::CELL).zip(from.par_chunks(fixed::CELL));
        chunks.for_each(|(to, from)| to.copy_from_slice(from));
    });
    len as f64 * 8e-9 / time
}

type Piece = ((u64, u32), Packed);

fn decode(frame: &Bytes) -> Piece {
    match link::decode(frame) {
        Ok(ToCoordinator::SumPiece { offset, len, packed, .. }) => ((offset, len), packed),
        other => panic!("{other:?} is no piece"),
    }
}

/// Seconds until the sums of that many workers are added and taken. Their pieces arrive in turn, as over as many
/// connections.
fn reduce(workers: u64, canned: &[Vec<Piece>], (len, threads, repeat): (usize, usize, usize)) -> f64 {
    let (send, reports) = channel();
    let reducer = Reducer::new(len, (threads, Holds::Two), move |r| drop(send.send(r)))
        .unwrap_or_else(|e| panic!("{e}"));
    let mut total = Sums::new(len);
    seconds(repeat, || {
        reducer.begin(1024);
        for (member, piece) in turns(workers, canned) {
            let (place, packed) = piece.clone();
            reducer.piece(member, 1, place, packed).unwrap_or_else(|e| panic!("{e}"));
        }
        for member in 0..workers {
            let scalars = Scalars { loss: 1, weight: 1, targets: 1, ..Scalars::default() };
            reducer.finish(member, Claim { sum: 1, leases: LEASES, scalars });
        }
        for report in reports.iter().take(workers as usize) {
            assert!(report.result.is_ok() && reducer.take(report.member, report.sum));
        }
        reducer.total(&mut total);
    })
}

/// Each operation between the total and the encoded parameters, with its seconds.
fn rest(len: usize, repeat: usize) -> Vec<(&'static str, f64)> {
    let mut sums = Sums::new(len);
    sums.add_gradient(&gradient(1, len), fixed::cap(8)).unwrap_or_else(|e| panic!("{e}"));
    sums.set_scalars(Scalars { weight: 1000 << fixed::FRACTION_BITS, ..Scalars::default() });
    let mut state = State::new(gradient(2, len), Options::default());
    let mut norm = 0.0;
    let mean = seconds(repeat, || norm = Means::of(&sums).grad_norm);
    let update = seconds(repeat, || {
        let updated =
            optimizer_step::update(&mut state, &sums, (norm, 1e-6), &Places::default(), &mut |_| ());
        updated.unwrap_or_else(|e| panic!("{e:?}"));
    });
    let mut bytes = Bytes::new();
    let encode = seconds(repeat, || {
        bytes = sum_chunk::little_endian(&state.parameters);
    });
    let hash = seconds(repeat, || assert!(blake3::Hasher::new().update(&bytes).finalize() != [0; 32]));
    // Parameters of which each changes by up to a hundredth, cell by cell.
    let mut draws = Stream::new(&[3]);
    let before: Vec<f32> = state.parameters.iter().map(|v| v * (1.0 + 0.02 * (draws.unit() - 0.5))).collect();
    let old = sum_chunk::little_endian(&before);
    let cells = || (0..bytes.len()).step_by(4 * CELL).map(|at| at..(at + 4 * CELL).min(bytes.len()));
    let mut packed: Vec<Vec<u8>> = vec![Vec::new(); cells().count()];
    let differences = seconds(repeat, || {
        for (at, packed) in cells().zip(&mut packed) {
            packed.clear();
            difference::pack(&bytes[at.clone()], &old[at], packed);
        }
    });
    let mut values = Vec::with_capacity(len);
    let unpacked = seconds(repeat, || {
        values.clear();
        for (old, packed) in before.chunks(CELL).zip(&packed) {
            difference::unpack(packed, old, &mut values).unwrap_or_else(|e| panic!("{e}"));
        }
    });
    assert!(values == state.parameters, "what is unpacked is what was packed");
    let size = packed.iter().map(Vec::len).sum::<usize>() as f64 / len as f64;
    println!(
        "packed differences: {size:.2} bytes a value; a worker unpacks them in {:.2} ms",
        1e3 * unpacked
    );
    let packed: Vec<Bytes> = packed.into_iter().map(Bytes::from).collect();
    let frames = seconds(repeat, || {
        for (packed, at) in packed.iter().zip(cells()) {
            let (offset, len) = (at.start as u64 / 4, at.len() as u32 / 4);
            let changed = Changed::Bits(packed.clone());
            let piece = ToWorker::ParametersChange { step: 1, offset, len, values: Bytes::new(), changed };
            assert!(link::encode(&piece).is_ok());
        }
    });
    vec![
        ("mean and norm", mean),
        ("clip and AdamW", update),
        ("to bytes", encode),
        ("hash", hash),
        ("differences", differences),
        ("to frames", frames),
    ]
}

fn main() {
    let len = option("--parameters", 4_884_480);
    let threads = option("--threads", std::thread::available_parallelism().map_or(1, usize::from));
    let repeat = option("--repeat", 5);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    pool.unwrap_or_else(|e| panic!("{e}"));
    let copy = copy_speed(len, repeat);
    println!("{len} parameters, {threads} threads, memory copy {copy:.1} GB/s (of what is copied)");
    let rest = rest(len, repeat);
    let steps: f64 = rest.iter().map(|(_, s)| s).sum();
    for (name, seconds) in &rest {
        println!("{name:<14} {:7.2} ms", seconds * 1e3);
    }
    println!("{:<14} {:7.2} ms for one step without reducing", "together", steps * 1e3);
    let canned: Vec<Vec<Bytes>> = (0..4).map(|seed| frames(seed, len)).collect();
    let sent: usize = canned[0].iter().map(|f| f.len() + 4).sum();
    let single: usize = sum_chunk::of_gradient(1, &gradient(1, len)).map(|p| size(&p)).sum();
    let four = 4.0 * len as f64;
    println!(
        "bytes a worker sends: {:.3} per parameter as a sum of {LEASES}, {:.3} as one microbatch",
        4.0 * sent as f64 / four,
        4.0 * single as f64 / four
    );
    let pieces: Vec<Vec<Piece>> = canned.iter().map(|frames| frames.iter().map(decode).collect()).collect();
    let decoding = seconds(repeat, || canned[0].iter().for_each(|frame| drop(decode(frame))));
    println!("decoding {:.2} ms a worker, on its connection's thread", decoding * 1e3);
    println!("workers   reduce ms   GB/s of i64   of copy   GB/s received   step ms");
    for workers in [1u64, 4, 16, 64] {
        let time = reduce(workers, &pieces, (len, threads, repeat));
        let (i64s, received) = (workers as f64 * len as f64 * 8e-9, workers as f64 * sent as f64 * 1e-9);
        println!(
            "{workers:>7} {:>11.1} {:>13.2} {:>8.0}% {:>15.2} {:>9.1}",
            time * 1e3,
            i64s / time,
            100.0 * i64s / time / copy,
            received / time,
            (time + steps) * 1e3
        );
    }
}

/// Bytes of a frame.
fn size(piece: &ToCoordinator) -> usize {
    let ToCoordinator::SumPiece { packed: Packed::Single(bytes) | Packed::Fixed(bytes), .. } = piece else {
        return 0;
    };
    bytes.len() + 20
}

/// Every member's pieces: the first of each, then the second of each, and so on.
fn turns(workers: u64, canned: &[Vec<Piece>]) -> impl Iterator<Item = (u64, &Piece)> {
    let pieces = canned.iter().map(Vec::len).max().unwrap_or(0);
    (0..pieces).flat_map(move |i| (0..workers).map(move |m| (m, &canned[m as usize % canned.len()][i])))
}
