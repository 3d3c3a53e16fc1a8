//! Hostile peers of a line: on the port on which a seat waits for the one above, and as a seat that computes nothing.

use crate::fleet::{Fleet, RUN, TOKEN};
use crate::hostile::hello;
use bytes::Bytes;
use finetune::cluster::carry::Carry;
use finetune::cluster::link::{End, connected, encode};
use finetune::cluster::message::{
    Bye, Capacity, Device, FRAME_LIMIT, Needs, Packed, SeatPlan, ToCoordinator, ToWorker,
};
use finetune::net::{Connection, DIAL_TIMEOUT, Endpoint, Party, Security, Token, dial};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const PATIENCE: Duration = Duration::from_secs(120);

fn security(party: Party) -> Security {
    Security::with_token(party, &Token::parse(TOKEN).unwrap()).unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// The port on which a worker listens, once it does.
fn port_of(fleet: &mut Fleet, name: &str) -> u16 {
    let (id, began) = (fleet.id(name), Instant::now());
    loop {
        assert!(began.elapsed() < PATIENCE, "{name} does not listen\n{}", fleet.all());
        std::thread::sleep(Duration::from_millis(20));
        let entries = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().flatten();
        let sockets: Vec<String> = entries
            .filter_map(|entry| std::fs::read_link(entry.path()).ok()?.to_str().map(String::from))
            .collect();
        for table in ["tcp", "tcp6"] {
            let table = std::fs::read_to_string(format!("/proc/{id}/net/{table}")).unwrap_or_default();
            for line in table.lines().skip(1) {
                let parts: Vec<&str> = line.split_whitespace().collect();
                let ours = parts.get(9).is_some_and(|inode| sockets.contains(&format!("socket:[{inode}]")));
                if ours && parts[3] == "0A" {
                    let port = parts[1].rsplit(':').next().unwrap();
                    return u16::from_str_radix(port, 16).unwrap();
                }
            }
        }
    }
}

#[test]
fn strangers_on_the_port_of_a_seat_change_no_byte() {
    let run = format!("{RUN} --max-steps 4");
    let (mut fleet, runtime) = (Fleet::new(), runtime());
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2+2"));
    fleet.worker("first", "--threads 1");
    fleet.wait_for("first", "waits for its place");
    let coordinator = fleet.at().to_string();
    // The neighbour of the first seat connects after the strangers, then it leaves.
    let mut silent = None;
    let attack = || silent = Some(strangers(port_of(&mut fleet, "first"), &runtime));
    drop(Enemy::sits(&coordinator, attack));
    fleet.worker("second", "--threads 1");
    fleet.all_end(&["coordinator", "first", "second"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

/// Strangers on the port on which a seat waits for the one above. Returns the connection of a silent one.
fn strangers(port: u16, runtime: &Runtime) -> Connection {
    let at = Endpoint::loopback(port);
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let refused = runtime.block_on(dial(&at, &security(Party::Worker), DIAL_TIMEOUT)).unwrap_err();
    assert!(refused.to_string().contains("is a seat of a line"), "{refused}");
    // With the token, but without the key of the line; with a frame that is no message; silent.
    let seat = || runtime.block_on(dial(&at, &security(Party::Seat), DIAL_TIMEOUT)).unwrap();
    let hello = encode(&Carry::Hello { key: [7; 16], place: 1 }).unwrap().whole();
    for frame in [hello, Bytes::from_static(&[0xff; 40])] {
        let (_, mut writer) = seat().split(FRAME_LIMIT);
        runtime.block_on(writer.send(&frame[..])).unwrap();
    }
    seat()
}

/// A capacity that every split fits.
fn capacity() -> Capacity {
    let needs = Needs { one: 0, more: 0 };
    Capacity {
        seconds: (1.0, 1.0),
        limit: u64::MAX,
        layers: vec![0; 4],
        needs: vec![(needs, needs); 2],
        streams: (0, 0),
        reading: 0.0,
        link: None,
    }
}

/// A worker that takes a seat, and is connected with the seat above or below.
struct Enemy {
    runtime: Runtime,
    to: tokio::sync::mpsc::Sender<ToCoordinator>,
    from: tokio::sync::mpsc::Receiver<ToWorker>,
    peer: tokio::sync::mpsc::Sender<Carry>,
    below: tokio::sync::mpsc::Receiver<Carry>,
    _ends: [End; 2],
}

impl Enemy {
    /// Sits down at the last seat, above an honest one. `before` is called before it connects with that one.
    fn sits(at: &str, before: impl FnOnce()) -> Self {
        let runtime = runtime();
        let (handle, at) = (runtime.handle().clone(), at.parse::<Endpoint>().unwrap());
        let (mut link, key, place) = runtime.block_on(async {
            let connection = dial(&at, &security(Party::Worker), DIAL_TIMEOUT).await.unwrap();
            let mut link = connected::<ToCoordinator>(&handle, connection, PATIENCE);
            link.to.send(ToCoordinator::Hello(hello())).await.unwrap();
            let Some(ToWorker::Welcome(manifest)) = link.from.recv().await else { panic!("no welcome") };
            assert_eq!(manifest.seats, Some(2));
            link.to.send(ToCoordinator::Capacity(capacity())).await.unwrap();
            let Some(ToWorker::Sit(Some(plan))) = link.from.recv().await else { panic!("no seat") };
            let SeatPlan { key, place, .. } = plan;
            assert_eq!(place, 1);
            (link, key, place)
        });
        before();
        let (link, peer) = runtime.block_on(async {
            let devices = vec![Device { name: "cpu".into(), class: "enemy".into() }];
            link.to.send(ToCoordinator::Ready { devices, refused: vec![] }).await.unwrap();
            link.to.send(ToCoordinator::Seated { port: 0 }).await.unwrap();
            let Some(ToWorker::Below { port, .. }) = link.from.recv().await else { panic!("no neighbour") };
            let below = Endpoint::loopback(port);
            let connection = dial(&below, &security(Party::Seat), DIAL_TIMEOUT).await.unwrap();
            let mut peer = connected::<Carry>(&handle, connection, PATIENCE);
            peer.to.send(Carry::Hello { key, place }).await.unwrap();
            assert_eq!(peer.from.recv().await, Some(Carry::Hello { key, place: 0 }));
            link.to.send(ToCoordinator::Linked).await.unwrap();
            (link, peer)
        });
        let _ends = [link.end.clone(), peer.end.clone()];
        Enemy { runtime, to: link.to, from: link.from, peer: peer.to, below: peer.from, _ends }
    }

    /// Waits for a lease, and says that it takes them.
    fn lease(&mut self) -> u64 {
        loop {
            match self.from.blocking_recv().expect("a lease") {
                ToWorker::Parameters { .. } => {
                    self.to.blocking_send(ToCoordinator::Ask { device: 0, room: 8, together: 1 }).unwrap();
                }
                ToWorker::Lease(lease) => return lease.lease,
                _ => {}
            }
        }
    }

    /// Waits for hidden states: the seat below waits for their gradient.
    fn hidden(&mut self) {
        let message = self.below.blocking_recv();
        assert!(matches!(message, Some(Carry::Values { .. })), "{message:?}");
    }

    /// Whether it is sent away for good.
    fn sent_away_for_good(mut self) -> bool {
        self.runtime.block_on(async {
            while let Some(message) = self.from.recv().await {
                if let ToWorker::Bye(bye) = message {
                    return matches!(bye, Bye::Out { again: false, .. });
                }
            }
            panic!("it is not sent away")
        })
    }
}

/// Each report makes the others wait a while longer for more workers.
#[test]
fn a_worker_that_reports_twice_is_sent_away() {
    let run = format!("{RUN} --max-steps 2");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2"));
    fleet.wait_until_listening();
    let runtime = runtime();
    let (handle, at) = (runtime.handle().clone(), fleet.at().parse::<Endpoint>().unwrap());
    runtime.block_on(async {
        let connection = dial(&at, &security(Party::Worker), DIAL_TIMEOUT).await.unwrap();
        let mut link = connected::<ToCoordinator>(&handle, connection, PATIENCE);
        link.to.send(ToCoordinator::Hello(hello())).await.unwrap();
        assert!(matches!(link.from.recv().await, Some(ToWorker::Welcome(_))));
        for _ in 0..2 {
            link.to.send(ToCoordinator::Capacity(capacity())).await.unwrap();
        }
        let sent_away = async { while link.from.recv().await.is_some() {} };
        tokio::time::timeout(PATIENCE, sent_away).await.expect("the connection ends");
    });
    fleet.worker("a", "--threads 1");
    fleet.worker("b", "--threads 1");
    fleet.all_end(&["coordinator", "a", "b"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
}

#[test]
fn hostile_seats_change_no_byte() {
    let run = format!("{RUN} --max-steps 4");
    let mut fleet = Fleet::new();
    let alone = fleet.alone(&run);
    fleet.coordinator(&format!("{run} --stages 2+2"));
    fleet.worker("first", "--threads 1");
    fleet.wait_for("first", "waits for its place");
    let piece = |offset| ToCoordinator::SumPiece {
        sum: 1,
        offset,
        len: 5,
        packed: Packed::Single(vec![0; 20].into()),
    };
    let values = |lease, rest, len| Carry::Values { lease, rest, bytes: vec![0; len].into() };
    type Attack = Box<dyn Fn(&mut Enemy, u64)>;
    let says = |message: ToCoordinator| -> Attack {
        Box::new(move |enemy, _| enemy.to.blocking_send(message.clone()).unwrap())
    };
    let attacks: Vec<(bool, Attack)> = vec![
        (true, says(piece(64))),
        (true, says(ToCoordinator::Linked)),
        (true, says(ToCoordinator::Ready { devices: vec![], refused: vec![] })),
        (false, says(ToCoordinator::Leave { reason: "\u{1b}[2J\nerror: fake".into() })),
        // A gradient of another size, of no end, and hidden states from above.
        (
            false,
            Box::new(move |enemy, lease| {
                enemy.hidden();
                enemy.peer.blocking_send(values(lease, 0, 8)).unwrap();
            }),
        ),
        (false, Box::new(move |enemy, lease| enemy.peer.blocking_send(values(lease, 1 << 60, 8)).unwrap())),
        // A token of a microbatch.
        (
            false,
            Box::new(|enemy, lease| {
                enemy.hidden();
                enemy.peer.blocking_send(Carry::Token { lease, id: 1 }).unwrap();
            }),
        ),
        (
            false,
            Box::new(|enemy, _| enemy.peer.blocking_send(Carry::Hello { key: [0; 16], place: 1 }).unwrap()),
        ),
    ];
    for (at, (guilty, attack)) in attacks.into_iter().enumerate() {
        let mut enemy = Enemy::sits(fleet.at(), || ());
        let lease = enemy.lease();
        attack(&mut enemy, lease);
        assert_eq!(enemy.sent_away_for_good(), guilty, "attack {at}\n{}", fleet.all());
    }
    fleet.worker("second", "--threads 1");
    fleet.all_end(&["coordinator", "first", "second"], 0);
    assert!(fleet.adapter("out") == alone, "{}", fleet.all());
    assert!(!fleet.said("coordinator").contains("\u{1b}[2J"), "{}", fleet.all());
}
