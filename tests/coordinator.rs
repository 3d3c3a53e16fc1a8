//! The coordinator's driver with workers whose model is one line of arithmetic, over channels: the same bits as one
//! model in this process, even if workers join late, die or send wrong results.

mod train_fake;

use finetune::cluster::coordinator::{
    Company, Coordinator, Gate, Hint, ModelFiles, Setup as Parts, UseOfRelays,
};
use finetune::cluster::link::{MemberLink, WorkerLink, pair};
use finetune::cluster::machine::Config;
use finetune::cluster::message::{
    Bye, Device, Hello, LeaseId, Manifest, PROTOCOL, ToCoordinator, ToWorker, Trouble, Work,
};
use finetune::cluster::sum_chunk;
use finetune::model::lora::LoraSpec;
use finetune::model::stage::{LossSums, Microbatch, Output, Stage, Ticket, Traffic, Want};
use finetune::numeric::{REVISION, difference, fixed};
use finetune::train::event::{Event, What};
use finetune::train::stop::Stop;
use finetune::train::sum::Sums;
use std::collections::BTreeMap;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Runtime;
use train_fake::{Fake, Outcome, Setup};

const STEPS: u64 = 9;

/// The fault of a worker, if any.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Honest,
    /// Computes slowly, so that the other workers get a share whatever the thread scheduling.
    Slow,
    /// Joins after this many microseconds.
    Late(u64),
    /// Disconnects instead of its n-th answer to a lease.
    Vanishes(usize),
    /// Disconnects between the pieces of its n-th sum and the end of that sum.
    Torn(usize),
    /// Holds other parameters from its n-th lease on.
    Damaged(usize),
    /// Finds a NaN in this row; every worker that computes the row finds it.
    BadRow(u64),
    /// Finds a NaN in its n-th lease; no other worker finds it.
    BadDevice(usize),
}

struct Toy {
    link: WorkerLink,
    fake: Fake<'static>,
    manner: Manner,
    bytes: Vec<u8>,
    hash: [u8; 32],
    leases: usize,
    sums: u64,
    sum: Sums,
    in_sum: Vec<LeaseId>,
    waiting: BTreeMap<LeaseId, (LossSums, Vec<f32>, u32)>,
}

fn manifest() -> Manifest {
    let layout = Fake::new().layout().clone();
    Manifest {
        run: "run".into(),
        epoch: 1,
        name: String::new(),
        model: "fake".into(),
        model_hash: "fake".into(),
        files: vec![],
        parts: vec![],
        labels: None,
        tags: false,
        class_weights: None,
        quantize: None,
        vocabulary: 96,
        lora: LoraSpec { rank: 3, alpha: 6.0, targets: vec![], ..LoraSpec::none() },
        parameters: layout.len() as u64,
        layout: layout.hash(),
        tokens: 64,
        dtype: None,
        fraction_bits: fixed::FRACTION_BITS,
        sum_bits: 0,
        moments: false,
        delay: 0,
        steps: 9,
        silence_millis: 0,
        seats: None,
    }
}

fn hello(identity: u8) -> Hello {
    Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        numerics: REVISION,
        identity: [identity; 16],
        name: format!("w{identity}"),
        model: None,
        options: vec![],
        before: None,
    }
}

fn values(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

impl Toy {
    fn start(link: WorkerLink, identity: u8, manner: Manner) -> JoinHandle<Option<Bye>> {
        let fake = Fake::new();
        let sum = Sums::new(fake.layout().len());
        let toy = Toy {
            link,
            fake,
            manner,
            bytes: vec![],
            hash: [0; 32],
            leases: 0,
            sums: 0,
            sum,
            in_sum: vec![],
            waiting: BTreeMap::new(),
        };
        std::thread::spawn(move || toy.live(identity))
    }

    fn say(&self, message: ToCoordinator) {
        let _ = self.link.to.blocking_send(message);
    }

    /// The last message that the worker received; `None` if the connection ended without one.
    fn live(mut self, identity: u8) -> Option<Bye> {
        if let Manner::Late(micros) = self.manner {
            std::thread::sleep(Duration::from_micros(micros));
        }
        self.say(ToCoordinator::Hello(hello(identity)));
        while let Some(message) = self.link.from.blocking_recv() {
            match message {
                ToWorker::Welcome(_) => {
                    let devices = vec![Device { name: "cpu 0".into(), class: "fake-f32".into() }];
                    self.say(ToCoordinator::Ready { devices, refused: vec![] });
                }
                ToWorker::ParametersPiece { offset, bytes, .. } => {
                    self.bytes.truncate(4 * offset as usize);
                    self.bytes.extend_from_slice(&bytes);
                }
                ToWorker::ParametersChange { offset, len, changed, .. } => {
                    let at = 4 * offset as usize..4 * (offset as usize + len as usize);
                    let (old, mut new) = (values(&self.bytes[at.clone()]), Vec::new());
                    difference::unpack(changed.bytes(), &old, &mut new).unwrap();
                    self.bytes.splice(at, new.iter().flat_map(|v| v.to_le_bytes()));
                }
                ToWorker::Parameters { hash, .. } => self.take(hash),
                ToWorker::Lease(lease) => {
                    self.leases += 1;
                    if self.manner == Manner::Slow {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    if self.manner == Manner::Vanishes(self.leases) {
                        return None;
                    }
                    if matches!(self.manner, Manner::Damaged(n) if self.leases >= n) {
                        self.hash = [1; 32];
                    }
                    self.work(lease.lease, lease.work, lease.of);
                }
                ToWorker::Grant { lease } => self.add(lease),
                ToWorker::Deny { lease } => drop(self.waiting.remove(&lease)),
                ToWorker::Flush { step, .. } if !self.in_sum.is_empty() => {
                    self.sums += 1;
                    for piece in sum_chunk::of_sum(self.sums, &self.sum) {
                        self.say(piece);
                    }
                    if self.manner == Manner::Torn(self.sums as usize) {
                        return None;
                    }
                    self.end_sum(step);
                }
                ToWorker::Bye(bye) => return Some(bye),
                _ => {}
            }
        }
        None
    }

    fn take(&mut self, hash: [u8; 32]) {
        assert_eq!(*blake3::hash(&self.bytes).as_bytes(), hash, "parameters arrive whole");
        let flat = values(&self.bytes);
        self.fake.set_parameters(&flat).unwrap();
        self.hash = hash;
        self.sum.reset(flat.len());
        self.in_sum.clear();
        self.say(ToCoordinator::Ask { device: 0, room: 1, together: 1 });
    }

    fn compute(&mut self, batch: &Microbatch, want: Want) -> (LossSums, Vec<f32>) {
        let Output::Loss(loss) = self.fake.forward(batch, None, want).unwrap() else { panic!() };
        let mut gradient = vec![0.0; self.fake.layout().len()];
        self.fake.backward(Ticket(0), None, &mut gradient).unwrap();
        (loss, gradient)
    }

    fn work(&mut self, lease: LeaseId, work: Work, of: u32) {
        let parameters = self.hash;
        match work {
            Work::Train(batch) | Work::Recheck(batch) | Work::Verify(batch) => {
                let bad = match self.manner {
                    Manner::BadRow(row) => batch.rows.contains(&row),
                    Manner::BadDevice(n) => self.leases >= n,
                    _ => false,
                };
                if bad {
                    let tensor = "q.lora_B.weight".into();
                    let fault = Trouble::Value { tensor, value: f64::NAN };
                    return self.say(ToCoordinator::Fault { lease, fault });
                }
                let (loss, gradient) = self.compute(&batch, Want::Gradient(Ticket(0)));
                self.waiting.insert(lease, (loss, gradient, of));
                self.say(ToCoordinator::Announce { lease, parameters, micros: 10, memory: 0 });
            }
            Work::Eval(batch) | Work::Predict(batch) => {
                let (sums, _) = self.compute(&batch, Want::Loss);
                self.say(ToCoordinator::Score { lease, sums, parameters, micros: 10 });
            }
            Work::Prompt { ids, .. } => self.say(ToCoordinator::Answer { lease, ids, parameters }),
            _ => panic!("no test here has islands"),
        }
    }

    fn add(&mut self, lease: LeaseId) {
        let Some((loss, gradient, of)) = self.waiting.remove(&lease) else { return };
        self.sum.add_gradient(&gradient, fixed::cap(of as usize)).unwrap();
        self.sum.add_loss(&loss).unwrap();
        self.in_sum.push(lease);
    }

    fn end_sum(&mut self, step: u64) {
        let (scalars, leases) = (self.sum.scalars(), std::mem::take(&mut self.in_sum));
        self.say(ToCoordinator::Sum {
            sum: self.sums,
            step,
            leases,
            loss: scalars.loss,
            weight: scalars.weight,
            targets: scalars.targets,
            rewards: scalars.rewards,
            parameters: self.hash,
            traffic: Traffic { submissions: 1, ..Traffic::default() },
            relays: None,
        });
        self.sum.reset(self.fake.layout().len());
    }
}

fn coordinator<'a>(config: Config, runtime: &Runtime, stop: &'a Stop) -> Coordinator<'a> {
    let setup = Parts {
        layout: Fake::new().layout().clone(),
        machine: config,
        gate: Gate { manifest: manifest(), options: BTreeMap::new() },
        files: ModelFiles::default(),
        runtime: runtime.handle().clone(),
        threads: 2,
        hint: Hint { batch_size: 8, micro_batch_tokens: 256, islands: false },
        company: Company::Open,
        lines: None,
        relays: UseOfRelays::Auto,
        stop,
    };
    Coordinator::new(setup).unwrap()
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Runs these workers: the outcome of the run, and the last message that each worker received.
fn run(manners: &[Manner], config: Config) -> (Outcome, Vec<Option<Bye>>) {
    let (runtime, stop) = (runtime(), Stop::new());
    let mut coordinator = coordinator(config, &runtime, &stop);
    let toys: Vec<_> = (0..)
        .zip(manners)
        .map(|(i, &manner)| {
            let (ours, theirs): (MemberLink, WorkerLink) = pair(8);
            coordinator.reception().receive_here(ours);
            Toy::start(theirs, i, manner)
        })
        .collect();
    let out = tempfile::tempdir().unwrap();
    let outcome = Setup::new(STEPS, &stop, out.path()).run_by(&mut coordinator);
    coordinator.close(&Bye::Done, Duration::from_secs(5), None);
    let heard = toys.into_iter().map(|toy| toy.join().unwrap()).collect();
    (outcome, heard)
}

fn config(expect: usize) -> Config {
    Config { expect, reask: Duration::from_millis(300), ..Config::default() }
}

fn alone() -> Outcome {
    let out = tempfile::tempdir().unwrap();
    Setup::new(STEPS, &Stop::new(), out.path()).run(&mut Fake::new())
}

/// Compares bits and losses with one model; the events about workers.
fn check(manners: &[Manner], expect: usize) -> (Vec<What>, Vec<Option<Bye>>) {
    let (outcome, heard) = run(manners, config(expect));
    let reference = alone();
    assert_eq!(outcome.bits(), reference.bits());
    assert_eq!(outcome.losses(), reference.losses());
    let evals = |o: &Outcome| {
        let loss =
            |e: &Event| if let Event::Eval(e) = e { Some((e.step, e.eval_loss.to_bits())) } else { None };
        o.events.iter().filter_map(loss).collect::<Vec<_>>()
    };
    assert_eq!(evals(&outcome), evals(&reference));
    let what = |e: &Event| if let Event::Device(change) = e { Some(change.what) } else { None };
    (outcome.events.iter().filter_map(what).collect(), heard)
}

#[test]
fn any_number_of_workers_gives_the_same_bits() {
    for n in [1, 2, 3, 7] {
        let (changes, heard) = check(&vec![Manner::Honest; n], n);
        assert_eq!(changes.iter().filter(|&&c| c == What::Joined).count(), n);
        assert!(heard.iter().all(|bye| *bye == Some(Bye::Done)), "{heard:?}");
    }
}

#[test]
fn dead_or_late_workers_change_no_bit() {
    // Thread scheduling decides the shares: some of these workers survive to the end.
    let mut lost = 0;
    for n in [1, 2, 5, 17] {
        lost += usize::from(check(&[Manner::Vanishes(n), Manner::Honest], 2).0.contains(&What::Lost));
        let torn = [Manner::Honest, Manner::Torn(n.min(4)), Manner::Honest];
        lost += usize::from(check(&torn, 3).0.contains(&What::Lost));
    }
    assert!(lost >= 1, "no worker died: nothing was tried");
    for micros in [500, 5000] {
        check(&[Manner::Honest, Manner::Late(micros)], 1);
    }
}

#[test]
fn worker_with_other_parameters_is_expelled() {
    for n in [1, 4] {
        let (changes, heard) = check(&[Manner::Damaged(n), Manner::Slow], 2);
        assert!(changes.contains(&What::Expelled), "{changes:?}");
        assert!(matches!(&heard[0], Some(Bye::Out { again: false, .. })), "{heard:?}");
    }
}

#[test]
fn bad_value_halts_and_names_its_rows_and_cause() {
    let cases: [(&[Manner], &str); 3] = [
        (&[Manner::BadRow(19); 2], "the learning rate or the rows"),
        (&[Manner::BadDevice(1), Manner::Slow], "but not on worker w1, cpu 0"),
        (&[Manner::BadRow(19)], "and again when computed once more"),
    ];
    for (manners, finding) in cases {
        let (outcome, _) = run(manners, config(manners.len()));
        let error = outcome.end.unwrap_err();
        assert_eq!(error.exit_code(), 3, "{error}");
        let text = error.to_string();
        for part in ["q.lora_B.weight", "worker w", "cpu 0", "rows", finding] {
            assert!(text.contains(part), "{text} should say {part}");
        }
    }
}

#[test]
fn too_few_devices_end_the_run_with_75() {
    let join_timeout = Duration::from_secs(2);
    let (outcome, _) = run(&[Manner::Honest], Config { expect: 2, join_timeout, ..Config::default() });
    let error = outcome.end.unwrap_err();
    assert_eq!(error.exit_code(), 75);
    assert!(error.to_string().contains("1 of 2 devices"), "{error}");
    // After the start only the minimum counts, and the trained steps are saved.
    let (outcome, _) = run(&[Manner::Vanishes(20)], Config { join_timeout, ..Config::default() });
    assert!(outcome.kinds().contains("checkpoint"), "{}", outcome.kinds());
    assert_eq!(outcome.end.unwrap_err().exit_code(), 75);
}

#[test]
fn reconnecting_worker_still_receives_the_end() {
    let (runtime, stop) = (runtime(), Stop::new());
    let coordinator = coordinator(config(1), &runtime, &stop);
    let reception = coordinator.reception();
    let dial = || -> WorkerLink {
        let (ours, theirs) = pair(8);
        reception.receive(ours, "somewhere".into());
        theirs
    };
    let mut lost = dial();
    lost.to.blocking_send(ToCoordinator::Hello(hello(1))).unwrap();
    assert!(matches!(lost.from.blocking_recv(), Some(ToWorker::Welcome(_))));
    lost.end.cut("the cable");
    drop(lost);
    std::thread::sleep(Duration::from_millis(200));
    std::thread::scope(|scope| {
        let back = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            Toy::start(dial(), 1, Manner::Honest).join().unwrap()
        });
        coordinator.close(&Bye::Done, Duration::from_secs(5), None);
        assert_eq!(back.join().unwrap(), Some(Bye::Done));
    });
}
