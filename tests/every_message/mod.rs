//! Every kind of message between coordinator and worker, and its variants with numbers at the limits of their types. A
//! new kind of message does not compile until it is added here.
#![allow(dead_code)] // Each test uses a part.

use bytes::Bytes;
use finetune::cluster::codec::Bulky;
use finetune::cluster::link::{decode, encode};
use finetune::cluster::message::{
    Bye, Capacity, Changed, Device, Hello, Lease, Manifest, ModelFile, Needs, PROTOCOL, Packed, RelayPlan,
    SeatPlan, ToCoordinator, ToWorker, Trials, Trouble, Work,
};
use finetune::model::lora::{Ends, Exception, LoraSpec, Numbers, TrainedRows};
use finetune::model::preference::{Aim, Answers, Lesson, Loss, Objective, Ranking};
use finetune::model::stage::{LossSums, Microbatch, Sampling, Targets, Traffic};
use finetune::model::wire::Wire;
use finetune::numeric::REVISION;
use finetune::train::event::Link;
use finetune::train::island::{InnerStep, Island};
use finetune::train::optim::Options;
use finetune::train::sum::RewardSums;
use serde::{Serialize, de::DeserializeOwned};

/// A lease that was never given.
const LEASE: u64 = 77_777;

/// Kinds of [`ToCoordinator`]. The match makes a new kind a compile error here.
fn kinds_from_worker(message: &ToCoordinator) -> usize {
    use ToCoordinator::*;
    match message {
        Hello(_)
        | Fetch { .. }
        | Ready { .. }
        | Ask { .. }
        | Announce { .. }
        | SumPiece { .. }
        | Sum { .. }
        | Score { .. }
        | Answer { .. }
        | Stopped { .. }
        | Fault { .. }
        | Fallback { .. }
        | Pong { .. }
        | Leave { .. }
        | Measured { .. }
        | Seated { .. }
        | Linked
        | Capacity(_)
        | Verified { .. }
        | Passes { .. }
        | TotalPiece { .. }
        | Unlinked { .. } => 22,
    }
}

/// Kinds of [`ToWorker`].
fn kinds_from_coordinator(message: &ToWorker) -> usize {
    use ToWorker::*;
    match message {
        Welcome(_)
        | Piece { .. }
        | ParametersPiece { .. }
        | Parameters { .. }
        | Lease(_)
        | Grant { .. }
        | Deny { .. }
        | Cancel { .. }
        | Flush { .. }
        | SumTaken { .. }
        | Ping { .. }
        | Bye(_)
        | Below { .. }
        | Sit(_)
        | Deliver { .. }
        | ParametersChange { .. }
        | Listen
        | Relay(_)
        | Combine { .. }
        | Spread { .. } => 20,
    }
}

pub fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL,
        version: "0".into(),
        numerics: REVISION,
        identity: [9; 16],
        name: "enemy".into(),
        model: Some("ff".into()),
        options: vec![("rank".into(), "4".into())],
        before: Some(("run".into(), 1)),
    }
}

fn device(name: &str) -> Device {
    Device { name: name.into(), class: "enemy".into() }
}

/// Messages of a relay.
fn from_relay() -> Vec<ToCoordinator> {
    vec![
        ToCoordinator::Sum {
            sum: u64::MAX,
            step: 1,
            leases: vec![LEASE],
            loss: 3,
            weight: 3,
            targets: 2,
            rewards: RewardSums::default(),
            parameters: [1; 32],
            traffic: Traffic::default(),
            relays: Some(1),
        },
        ToCoordinator::TotalPiece {
            total: 1,
            offset: 0,
            len: 9,
            packed: Packed::Fixed(vec![255; 70].into()),
        },
        ToCoordinator::Unlinked { set: 0, reason: "\u{1b}[2J\nerror: x".into() },
    ]
}

/// At least one message of every kind that a worker sends.
pub fn from_worker() -> Vec<ToCoordinator> {
    let sums =
        LossSums { loss: 1.0, weight: 1.0, targets: 1, predictions: vec![1, 2], ..LossSums::default() };
    let fixed = Packed::Fixed(vec![255; 70].into());
    let link = Link { bandwidth: f64::NAN, round_trip: -1.0 };
    let mut all = vec![
        ToCoordinator::Hello(hello()),
        ToCoordinator::Fetch { file: 1, offset: 3, len: 5 },
        ToCoordinator::Ready { devices: vec![device("cpu 0")], refused: vec!["no".into()] },
        ToCoordinator::Ask { device: 3, room: 2, together: 1 },
        ToCoordinator::Announce { lease: LEASE, parameters: [1; 32], micros: 1, memory: 1 },
        ToCoordinator::SumPiece { sum: 1, offset: 64, len: 9, packed: fixed },
        ToCoordinator::SumPiece { sum: 1, offset: 0, len: 4, packed: Packed::Single(vec![0xff; 16].into()) },
        ToCoordinator::Sum {
            sum: 1,
            step: 1,
            leases: vec![LEASE, LEASE + 1],
            loss: 3,
            weight: 3,
            targets: 2,
            rewards: RewardSums { sums: [-1, 1], counts: [1, 2], pairs: 1, right: 1, range: Some([-1, 1]) },
            parameters: [1; 32],
            traffic: Traffic::default(),
            relays: None,
        },
        ToCoordinator::Score { lease: LEASE, sums, parameters: [1; 32], micros: 1 },
        ToCoordinator::Answer { lease: LEASE, ids: vec![1, 2], parameters: [1; 32] },
        ToCoordinator::Stopped { lease: LEASE, micros: 1 },
        ToCoordinator::Fault {
            lease: LEASE,
            fault: Trouble::Device { reason: "\u{1b}[2J\nerror: x".into() },
        },
        ToCoordinator::Fault {
            lease: LEASE,
            fault: Trouble::Value { tensor: "t\n".into(), value: f64::NAN },
        },
        ToCoordinator::Fallback { device: 3, now: device("\u{1b}[2J"), reason: "r\nr".into() },
        ToCoordinator::Pong { number: 3 },
        ToCoordinator::Leave { reason: "\u{1b}]0;x\u{7}\nerror: fake".into() },
        ToCoordinator::Measured { devices: vec![Trials::default()], link: Some(link) },
        ToCoordinator::Seated { port: 1 },
        ToCoordinator::Linked,
        ToCoordinator::Capacity(Capacity {
            seconds: (f64::NAN, -1.0),
            limit: u64::MAX,
            layers: vec![u64::MAX; 3],
            needs: vec![(Needs { one: u64::MAX, more: 1 }, Needs { one: 0, more: u64::MAX })],
            streams: (u32::MAX, 1),
            reading: f64::INFINITY,
            link: Some(link),
        }),
        ToCoordinator::Verified { lease: LEASE, digest: [2; 32], parameters: [1; 32], micros: 1, memory: 1 },
        ToCoordinator::Passes { lease: LEASE, forward: u64::MAX, between: u64::MAX, backward: 1 },
    ];
    all.extend(from_relay());
    assert!(all.len() >= kinds_from_worker(&all[0]));
    all
}

pub fn manifest() -> Manifest {
    Manifest {
        run: "run".into(),
        epoch: 1,
        name: "worker".into(),
        model: "demo".into(),
        model_hash: "0123456789abcdef".into(),
        files: vec![ModelFile { name: "config.json".into(), size: 3, hash: [3; 32] }],
        parts: vec![],
        labels: Some(vec!["a".into(), "b".into()]),
        tags: true,
        class_weights: Some(vec![1.0, f32::NAN]),
        quantize: None,
        vocabulary: 96,
        lora: LoraSpec {
            rank: 4,
            alpha: 8.0,
            rslora: false,
            dropout: 0.1,
            targets: vec!["q_proj".into()],
            exceptions: vec![
                Exception { layer: 1, module: "q_proj".into(), adapter: None },
                Exception {
                    layer: 2,
                    module: "q_proj".into(),
                    adapter: Some(Numbers { rank: 2, alpha: 3.0 }),
                },
            ],
            ends: Ends { embedding: None, head: Some(Numbers { rank: 3, alpha: 1.0 }) },
            rows: TrainedRows { embedding: vec![7, 3], head: vec![] },
            seed: 7,
        },
        parameters: 10,
        layout: [1; 32],
        tokens: 64,
        dtype: None,
        fraction_bits: finetune::numeric::fixed::FRACTION_BITS,
        sum_bits: 8,
        moments: false,
        delay: 1,
        steps: 4,
        silence_millis: 5000,
        seats: None,
    }
}

pub fn microbatch() -> Microbatch {
    Microbatch {
        step: 1,
        rows: vec![2, 3],
        ids: vec![5; 8],
        bounds: vec![0, 3, 8],
        targets: Targets::Tokens(vec![5; 8]),
    }
}

fn island() -> Island {
    let step = InnerStep { rate: f64::NAN, batches: vec![microbatch(), microbatch()] };
    Island {
        options: Options::default(),
        after: 3,
        steps: vec![step, InnerStep { rate: 1e300, batches: vec![] }],
    }
}

fn leased(work: Work) -> ToWorker {
    ToWorker::Lease(Box::new(Lease { lease: LEASE, device: 0, after: 0, of: 2, work }))
}

fn change(changed: fn(Bytes) -> Changed) -> ToWorker {
    let (values, changed) = (vec![].into(), changed(vec![1; 9].into()));
    ToWorker::ParametersChange { step: 1, offset: 1, len: 2, values, changed }
}

fn seated() -> ToWorker {
    ToWorker::Sit(Some(SeatPlan {
        key: [7; 16],
        place: 9,
        of: 2,
        layers: (7, 3),
        streamed: u32::MAX,
        values: (u64::MAX, 1),
        depth: u16::MAX,
        wire: Wire::Bf16,
    }))
}

/// Messages to relays.
fn to_relay() -> Vec<ToWorker> {
    vec![
        ToWorker::Flush { step: 1, relays: Some(u64::MAX) },
        ToWorker::Listen,
        ToWorker::Relay(None),
        ToWorker::Relay(Some(Box::new(RelayPlan {
            set: 1,
            key: [7; 16],
            place: 9,
            addresses: vec![("\u{1b}[2J".into(), 1)],
            ranges: vec![(u64::MAX, 1), (3, 2)],
        }))),
        ToWorker::Combine { total: 1, of: 0, sums: vec![(9, u64::MAX)] },
        ToWorker::Spread { step: 0, offset: u64::MAX, len: 9, packed: vec![0xff; 13].into() },
    ]
}

/// At least one message of every kind that a coordinator sends.
pub fn from_coordinator() -> Vec<ToWorker> {
    let sampling = Sampling { max_new_tokens: 5, temperature: f32::NAN, top_p: -1.0, seed: 1, stop: vec![1] };
    let reason = || "\u{1b}[2J\nerror: fake".to_string();
    let labelled = Microbatch { targets: Targets::Labels(vec![0, 9]), ..microbatch() };
    let headed = |targets| Microbatch { targets, ..microbatch() };
    let answering = |aim| {
        let targets = Targets::Answers(Answers { begins: vec![1, 4], aim });
        Microbatch { targets, ..microbatch() }
    };
    let objective = Objective { loss: Loss::Sigmoid, beta: 0.1, smoothing: 0.0, gamma: f64::NAN, nll: -1.0 };
    let pairs = Aim::Learn(Lesson { objective, reference: vec![-1.0, f64::MAX], nll: 0.5, wanted: vec![] });
    let mut all = vec![
        ToWorker::Welcome(Box::new(manifest())),
        ToWorker::Piece { file: 0, offset: 0, bytes: vec![1; 9].into() },
        ToWorker::ParametersPiece { step: 0, offset: 0, bytes: vec![0xff; 12].into() },
        ToWorker::Parameters { step: 0, hash: [1; 32] },
        change(Changed::Added),
        change(Changed::Bits),
        leased(Work::Train(microbatch())),
        leased(Work::Train(labelled)),
        leased(Work::Train(answering(pairs))),
        leased(Work::Train(headed(Targets::Numbers(vec![0.5, f32::NAN])))),
        leased(Work::Eval(headed(Targets::Ranked(Ranking { margins: vec![f32::INFINITY], centre: -1.0 })))),
        leased(Work::Train(headed(Targets::Classes(vec![0, u32::MAX, 9])))),
        leased(Work::Eval(answering(Aim::Score))),
        leased(Work::Recheck(microbatch())),
        leased(Work::Eval(microbatch())),
        leased(Work::Verify(microbatch())),
        leased(Work::Predict(microbatch())),
        leased(Work::Island(island())),
        leased(Work::RecheckIsland(island())),
        leased(Work::VerifyIsland(Island { steps: vec![], ..island() })),
        leased(Work::Prompt { ids: vec![1, 2], sampling }),
        ToWorker::Grant { lease: LEASE },
        ToWorker::Deny { lease: LEASE },
        ToWorker::Cancel { lease: LEASE },
        ToWorker::Flush { step: 1, relays: None },
        ToWorker::SumTaken { sum: 1 },
        ToWorker::Ping { number: 1 },
        ToWorker::Bye(Bye::Done),
        ToWorker::Bye(Bye::Later { reason: reason() }),
        ToWorker::Bye(Bye::Halted { reason: reason() }),
        ToWorker::Bye(Bye::Refused { reason: reason() }),
        ToWorker::Bye(Bye::Out { reason: reason(), again: true }),
        ToWorker::Below { host: "\u{1b}[2J".into(), port: 1 },
        ToWorker::Sit(None),
        seated(),
        ToWorker::Deliver { lease: LEASE },
    ];
    all.extend(to_relay());
    assert!(all.len() >= kinds_from_coordinator(&all[0]));
    all
}

/// The largest u16, u32, u64 and 0 as postcard writes them.
pub const EDGES: [&[u8]; 4] = [
    &[0xff, 0xff, 0x03],
    &[0xff, 0xff, 0xff, 0xff, 0x0f],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
    &[0],
];

/// The same message with one number at a limit, at every position, as far as the result is still a message.
pub fn at_the_edges<M: Serialize + DeserializeOwned + Bulky>(message: &M) -> Vec<Bytes> {
    let whole = encode(message).unwrap().whole();
    let mut out: Vec<Bytes> = Vec::new();
    for at in 1..whole.len().min(200) {
        for edge in EDGES {
            let bytes: Bytes = [&whole[..at], edge, &whole[at + 1..]].concat().into();
            if bytes != whole && decode::<M>(&bytes).is_ok() {
                out.push(bytes);
            }
        }
    }
    out
}
