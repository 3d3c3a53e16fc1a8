//! A hostile peer with the token. It sends every message that no honest worker sends to a real coordinator, over TLS:
//! the coordinator expels it, prints its address and keeps its memory bounded, and the run ends with the bytes of one
//! process.

use crate::fleet::{Fleet, RUN, TOKEN};
use finetune::cluster::link::{decode, encode};
use finetune::cluster::message::{
    Bye, Device, FRAME_LIMIT, Hash, Hello, Lease, LeaseId, Manifest, PROTOCOL, Packed, ToCoordinator,
    ToWorker,
};
use finetune::cluster::sum_chunk;
use finetune::cluster::worker::identity;
use finetune::model::stage::{LossSums, Traffic};
use finetune::net::{DIAL_TIMEOUT, Endpoint, FrameReader, FrameWriter, Party, Security, Token, dial};
use finetune::numeric::REVISION;
use finetune::train::sum::{RewardSums, Sums};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// Upper bound on the time of any step here.
const PATIENCE: Duration = Duration::from_secs(60);
/// A peer that is not read from for this long is considered blocked.
const STUCK: Duration = Duration::from_secs(1);

pub struct Enemy {
    runtime: Runtime,
    reader: FrameReader,
    writer: FrameWriter,
    manifest: Option<Manifest>,
    /// Hash of the newest parameters, and the step that they follow.
    parameters: (u64, Hash),
}

impl Enemy {
    pub fn new(at: &str) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let security = Security::with_token(Party::Worker, &Token::parse(TOKEN).unwrap()).unwrap();
        let at: Endpoint = at.parse().unwrap();
        let connection = runtime.block_on(dial(&at, &security, DIAL_TIMEOUT)).unwrap();
        let (reader, writer) = connection.split(FRAME_LIMIT);
        Enemy { runtime, reader, writer, manifest: None, parameters: (0, [0; 32]) }
    }

    /// Returns false if the frame is not accepted in time.
    pub fn send(&mut self, frame: Vec<u8>) -> bool {
        let sent = self.runtime.block_on(async { timeout(STUCK, self.writer.send(&frame[..])).await });
        sent.is_ok_and(|sent| sent.is_ok())
    }

    fn say(&mut self, message: &ToCoordinator) -> bool {
        self.send(encode(message).unwrap().whole().to_vec())
    }

    /// The next message; `None` at the end of the connection.
    fn hear(&mut self) -> Option<ToWorker> {
        let next = self.runtime.block_on(async { timeout(PATIENCE, self.reader.next()).await });
        let frame = next.expect("nothing is said").ok()?;
        Some(decode(&frame).unwrap())
    }

    fn manifest(&self) -> &Manifest {
        self.manifest.as_ref().expect("it was welcomed")
    }

    pub fn greets(&mut self) {
        self.say(&ToCoordinator::Hello(hello()));
        match self.hear() {
            Some(ToWorker::Welcome(manifest)) => self.manifest = Some(*manifest),
            other => panic!("{other:?}"),
        }
    }

    /// Proceeds to the first lease.
    pub fn leased(&mut self) -> Lease {
        self.greets();
        let device = Device { name: "cpu 0".into(), class: "enemy".into() };
        self.say(&ToCoordinator::Ready { devices: vec![device], refused: vec![] });
        self.next_lease()
    }

    fn next_lease(&mut self) -> Lease {
        loop {
            match self.hear().expect("a lease") {
                ToWorker::Parameters { step, hash } => {
                    self.parameters = (step, hash);
                    self.say(&ToCoordinator::Ask { device: 0, room: 4, together: 1 });
                }
                ToWorker::Lease(lease) => return *lease,
                _ => {}
            }
        }
    }

    fn announce(&mut self, lease: LeaseId) {
        let parameters = self.parameters.1;
        self.say(&ToCoordinator::Announce { lease, parameters, micros: 1, memory: 0 });
    }

    /// Proceeds to a granted lease, which may enter a sum.
    fn granted(&mut self) -> LeaseId {
        let lease = self.leased().lease;
        self.announce(lease);
        while !matches!(self.hear(), Some(ToWorker::Grant { lease: granted }) if granted == lease) {}
        lease
    }

    /// Sends all pieces of a sum of zeros.
    fn pieces(&mut self, sum: u64) {
        let zeros = Sums::new(self.manifest().parameters as usize);
        for piece in sum_chunk::of_sum(sum, &zeros) {
            self.say(&piece);
        }
    }

    fn sum(&mut self, sum: u64, leases: &[LeaseId], parameters: Hash) {
        let message = ToCoordinator::Sum {
            sum,
            step: self.parameters.0 + 1,
            leases: leases.to_vec(),
            loss: 0,
            weight: 0,
            targets: 0,
            rewards: RewardSums::default(),
            parameters,
            traffic: Traffic::default(),
            relays: None,
        };
        self.say(&message);
    }

    /// The last message: the reason for the expulsion, or nothing.
    pub fn last_word(&mut self) -> String {
        while let Some(message) = self.hear() {
            if let ToWorker::Bye(Bye::Out { reason, again: false }) = message {
                return reason;
            }
        }
        String::new()
    }
}

/// The action, and a part of the reply.
type Case = (fn(&mut Enemy), &'static str);

const CASES: [Case; 16] = [
    (
        |e| {
            e.send(vec![0xff; 100]);
        },
        "",
    ),
    (
        |e| {
            e.greets();
            e.send(vec![0xff; 1 << 20]);
        },
        "",
    ),
    (
        |e| {
            e.greets();
            e.announce(1);
        },
        "before it was ready",
    ),
    (
        |e| {
            e.greets();
            e.say(&ToCoordinator::Fetch { file: 0, offset: u64::MAX, len: 1 });
        },
        "",
    ),
    (
        |e| {
            e.leased();
            e.say(&ToCoordinator::Ready { devices: vec![], refused: vec![] });
        },
        "ready twice",
    ),
    (
        |e| {
            e.leased();
            e.say(&ToCoordinator::Ask { device: 9, room: 1, together: 1 });
        },
        "a device that it does not have",
    ),
    (
        |e| {
            e.leased();
            e.announce(u64::MAX);
        },
        "never given",
    ),
    (
        |e| {
            let lease = e.leased().lease;
            e.parameters.1[0] ^= 1;
            e.announce(lease);
        },
        "other parameters",
    ),
    (
        |e| {
            let (lease, parameters) = (e.leased().lease, e.parameters.1);
            let sums = LossSums { loss: 1.0, weight: 1.0, targets: 1, ..LossSums::default() };
            e.say(&ToCoordinator::Score { lease, sums, parameters, micros: 1 });
        },
        "another kind",
    ),
    (
        |e| {
            e.granted();
            e.say(&piece_of(1, 64, 9));
        },
        "where",
    ),
    (
        |e| {
            let lease = e.granted();
            let len = sum_chunk::cell_len(e.manifest().parameters as usize, 0) as u32;
            e.say(&piece_of(1, 0, len));
            e.sum(1, &[lease], e.parameters.1);
        },
        "a packed sum has 70 bytes",
    ),
    (
        |e| {
            e.granted();
            e.pieces(1);
            e.sum(1, &[], e.parameters.1);
        },
        "it is of 0 microbatches",
    ),
    (
        |e| {
            let lease = e.granted();
            e.sum(1, &[lease], e.parameters.1);
        },
        "pieces",
    ),
    (
        |e| {
            let lease = e.granted();
            e.pieces(1);
            e.sum(1, &[lease, lease + 1], e.parameters.1);
        },
        "not granted",
    ),
    (
        |e| {
            let lease = e.granted();
            e.pieces(1);
            e.sum(1, &[lease], [7; 32]);
        },
        "other parameters",
    ),
    (
        |e| {
            let lease = e.granted();
            e.say(&ToCoordinator::Stopped { lease, micros: u64::MAX });
        },
        "handed back what it was granted",
    ),
];

/// A piece whose content does not match its header.
fn piece_of(sum: u64, offset: u64, len: u32) -> ToCoordinator {
    ToCoordinator::SumPiece { sum, offset, len, packed: Packed::Fixed(vec![255; 70].into()) }
}

/// Sends the same message repeatedly without reading replies, until it is no longer accepted.
fn flood(enemy: &mut Enemy, kind: usize, times: usize) {
    if enemy.manifest.is_none() {
        match kind {
            2 => {
                enemy.granted();
            }
            _ => enemy.greets(),
        }
    }
    let files = (0u32..).zip(&enemy.manifest().files);
    let (file, len) = files.max_by_key(|(_, f)| f.size).map(|(i, f)| (i, f.size)).unwrap();
    let unasked = Packed::Fixed(vec![1; 1 << 20].into());
    let again = sum_chunk::of_sum(1, &Sums::new(enemy.manifest().parameters as usize)).next().unwrap();
    let message = match kind {
        0 => ToCoordinator::Fetch { file, offset: 0, len },
        1 => ToCoordinator::SumPiece { sum: 1, offset: 0, len: 9, packed: unasked },
        _ => again,
    };
    let _ = (0..times).all(|_| enemy.say(&message));
}

#[test]
fn hostile_peer_with_the_token_changes_no_byte() {
    let run = format!("{RUN} --max-steps 6");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    // The first peer is the run's only device, so it gets all leases.
    fleet.coordinator(&format!("{run} --expect-workers 1"));
    fleet.wait_until_listening();
    for (index, (act, heard)) in CASES.into_iter().enumerate() {
        let mut enemy = Enemy::new(fleet.at());
        act(&mut enemy);
        let word = enemy.last_word();
        assert!(word.contains(heard), "case {index}: {word:?}\n{}", fleet.all());
    }
    // A flooding peer is blocked and costs no memory: it requests files without reading them, sends sums without a
    // request, and begins one sum again and again.
    let mut floods: Vec<Enemy> = (0..3).map(|_| Enemy::new(fleet.at())).collect();
    for (index, enemy) in floods.iter_mut().enumerate() {
        let before = fleet.resident("coordinator");
        flood(enemy, index, 300);
        let grown = fleet.resident("coordinator").saturating_sub(before) >> 20;
        // Keeping what such a peer sends or requests would take 300 MB and more.
        assert!(grown < 250, "flood {index}: {grown} MB more\n{}", fleet.all());
    }
    // An honest worker is not affected.
    fleet.worker("honest", "--threads 1");
    floods.iter_mut().enumerate().for_each(|(index, enemy)| flood(enemy, index, 20));
    // The peer holds a lease, and its disconnect is noticed.
    floods.truncate(2);
    fleet.all_end(&["coordinator", "honest"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    let said = fleet.said("coordinator");
    for part in [
        "(it was at 127.0.0.1:",
        "removed: it spoke of work before it was ready",
        "said something that is no message",
        "rejected: 0 connections, 1 worker (token, version, model or options differ); removed: 13 workers",
    ] {
        assert!(said.contains(part), "{part:?}\n{said}");
    }
}

/// The first message of a worker with the token.
pub fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        numerics: REVISION,
        identity: identity().unwrap(),
        name: "enemy".into(),
        model: None,
        options: vec![],
        before: None,
    }
}
