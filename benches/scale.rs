//! The coordinator with 10, 100 and 1,000 workers: its processor time per microbatch, and its memory per worker. The
//! state machine, the reducer and the optimizer step are the real ones. The workers, their devices and their links are
//! replaced: a worker answers at once, in virtual time, and every sum is one of four prepared sums, which all workers
//! share. So the connections' own work and memory, and the bytes of sums that wait in them, are not in the result.
//!
//! A step has the same number of microbatches per worker at every size. A microbatch then causes the same messages, and
//! the same part of a sum, at every size. With a constant number per step, the sums per microbatch would grow with the
//! workers, and so would the cost of the reduction. The cost of a step itself (AdamW, hash) is stated apart: more workers
//! share it.
//!
//! Each size runs in a process of its own, so that peaks of memory are comparable.
//!
//! `cargo bench --bench scale -- [--parameters 10000] [--each 8] [--microbatches 40000] [--threads N]`

mod arguments;

use arguments::option;
use bytes::Bytes;
use finetune::cluster::machine::{Action, Config, Event, Kind, Machine, MemberId, Round};
use finetune::cluster::message::{Device, Hash, LeaseId, Packed, ToCoordinator, ToWorker};
use finetune::cluster::reduce::{Claim, Holds, Reducer, Report};
use finetune::cluster::sum_chunk;
use finetune::model::layout::Places;
use finetune::model::stage::Traffic;
use finetune::numeric::fixed;
use finetune::numeric::rng::Stream;
use finetune::train::checkpoint::State;
use finetune::train::optim::Options;
use finetune::train::optimizer_step::{self, Means};
use finetune::train::sum::{RewardSums, Scalars, Sums};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Workers of the runs; ratios are to the first.
const SIZES: [usize; 3] = [10, 100, 1000];

/// Leases that a worker's device queues besides the one in work, as a real worker asks for.
const ROOM: u16 = 8;

/// Processor seconds of all threads of this process that still run.
fn processor() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap_or_else(|e| panic!("{e}"));
    let of = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    let nanoseconds = tasks.filter_map(of).sum::<f64>();
    assert!(nanoseconds > 0.0, "the system does not count processor time (/proc/self/task/*/schedstat)");
    nanoseconds / 1e9
}

/// Peak resident memory of this process in bytes.
fn peak() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_else(|e| panic!("{e}"));
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or_else(|| panic!("no peak"));
    let kib = line.trim().trim_end_matches(" kB").parse::<f64>();
    kib.unwrap_or_else(|e| panic!("{line}: {e}")) * 1024.0
}

/// Leases of a worker, as its one device works through them.
#[derive(Default)]
struct Worker {
    queue: VecDeque<LeaseId>,
    /// When the first lease of the queue began, in microseconds.
    began: u64,
    granted: Vec<LeaseId>,
    sums: u64,
}

/// The canned sums and what adds them.
struct Reduction {
    reducer: Reducer,
    reports: Receiver<Report>,
    canned: Vec<Vec<ToCoordinator>>,
    total: Sums,
    state: State,
    /// Processor seconds of optimizer steps.
    steps: f64,
}

impl Reduction {
    fn new(len: usize, threads: usize) -> Self {
        let (send, reports) = channel();
        let reducer = Reducer::new(len, (threads, Holds::Two), move |r| drop(send.send(r)));
        let gradient = |seed: u64| -> Vec<f32> {
            let mut draws = Stream::new(&[seed]);
            (0..len).map(|_| (draws.unit() - 0.5) * 1e-2).collect()
        };
        let canned = |seed: u64| {
            let mut sums = Sums::new(len);
            for i in 0..4 {
                let added = sums.add_gradient(&gradient(seed * 100 + i), fixed::cap(1 << 14));
                added.unwrap_or_else(|e| panic!("{e}"));
            }
            sum_chunk::of_sum(1, &sums).collect()
        };
        Reduction {
            reducer: reducer.unwrap_or_else(|e| panic!("{e}")),
            reports,
            canned: (0..4).map(canned).collect(),
            total: Sums::new(len),
            state: State::new(gradient(7), Options::default()),
            steps: 0.0,
        }
    }

    /// The optimizer step of the finished round, and the hash of its parameters.
    fn step(&mut self) -> Hash {
        let before = processor();
        self.reducer.total(&mut self.total);
        let norm = Means::of(&self.total).grad_norm;
        let places = Places::default();
        let updated =
            optimizer_step::update(&mut self.state, &self.total, (norm, 1e-6), &places, &mut |_| ());
        updated.unwrap_or_else(|e| panic!("{e:?}"));
        let bytes: Bytes = sum_chunk::little_endian(&self.state.parameters);
        let hash = blake3::Hasher::new().update(&bytes).finalize().into();
        self.steps += processor() - before;
        hash
    }

    /// Bytes of a sum on the wire.
    fn wire(&self) -> usize {
        let of = |piece: &ToCoordinator| match piece {
            ToCoordinator::SumPiece { packed: Packed::Fixed(b) | Packed::Single(b), .. } => b.len(),
            _ => 0,
        };
        self.canned[0].iter().map(of).sum()
    }
}

/// A run in virtual time: the machine and the workers.
struct Run {
    machine: Machine,
    /// Microseconds.
    now: u64,
    workers: Vec<Worker>,
    /// Ends of computations: time, worker and lease.
    ends: BinaryHeap<Reverse<(u64, usize, LeaseId)>>,
    /// Messages that have arrived.
    inbox: VecDeque<(usize, ToCoordinator)>,
    /// Sums that the reducer has not reported yet.
    pending: BTreeMap<(u64, u64), ToCoordinator>,
    reduction: Option<Reduction>,
    tokens: Vec<u64>,
    first: LeaseId,
    /// Items by lease of the round.
    items: Vec<usize>,
    step: u64,
    hash: Hash,
    done: bool,
    /// Leases that were given to a second device.
    repeats: u64,
}

impl Run {
    fn new(workers: usize, each: usize, reduction: Option<Reduction>) -> Self {
        let config = Config { expect: workers, ..Config::default() };
        let mut draws = Stream::new(&[17]);
        let mut run = Run {
            machine: Machine::new(config),
            now: 0,
            workers: (0..workers).map(|_| Worker::default()).collect(),
            ends: BinaryHeap::new(),
            inbox: VecDeque::new(),
            pending: BTreeMap::new(),
            reduction,
            tokens: (0..workers * each).map(|_| 512 + u64::from(draws.below(1024))).collect(),
            first: 1,
            items: Vec::new(),
            step: 0,
            hash: [7; 32],
            done: false,
            repeats: 0,
        };
        run.tick(Event::Parameters { after: 0, hash: run.hash });
        for index in 0..workers {
            let member = MemberId(index as u64);
            run.tick(Event::Joined { member, name: format!("worker {index}"), here: false });
            let devices = vec![Device { name: "cpu 0".into(), class: "a".into() }];
            run.said(index, ToCoordinator::Ready { devices, refused: vec![] });
        }
        run
    }

    fn tick(&mut self, event: Event) {
        for action in self.machine.tick(event, Duration::from_micros(self.now)) {
            self.act(action);
        }
    }

    fn said(&mut self, index: usize, message: ToCoordinator) {
        self.tick(Event::Said { member: MemberId(index as u64), message: &message });
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::SendParameters { member } => {
                let ask = ToCoordinator::Ask { device: 0, room: ROOM, together: 1 };
                self.inbox.push_back((member.0 as usize, ask));
            }
            Action::Lease { device, lease, item, .. } => {
                if self.items.is_empty() {
                    self.first = lease;
                }
                self.items.push(item);
                let index = device.member.0 as usize;
                self.workers[index].queue.push_back(lease);
                if self.workers[index].queue.len() == 1 {
                    self.start(index);
                }
            }
            Action::Say { member, message } => self.hears(member.0 as usize, message),
            Action::TakeSum { member, sum } => {
                self.pending.remove(&(member.0, sum));
                if let Some(reduction) = &self.reduction {
                    assert!(reduction.reducer.take(member.0, sum), "sum {sum} of {member:?} is added");
                }
            }
            Action::RoundDone(tally) => {
                self.done = true;
                self.repeats += tally.repeats;
            }
            Action::Note(_) => {}
            other => panic!("{other:?} does not happen to workers that work well"),
        }
    }

    /// A message to a worker.
    fn hears(&mut self, index: usize, message: ToWorker) {
        let worker = &mut self.workers[index];
        match message {
            ToWorker::Grant { lease } => worker.granted.push(lease),
            ToWorker::Cancel { lease } => {
                let Some(place) = worker.queue.iter().position(|l| *l == lease) else { return };
                worker.queue.remove(place);
                let micros = if place == 0 { self.now - worker.began } else { 0 };
                self.inbox.push_back((index, ToCoordinator::Stopped { lease, micros }));
                if place == 0 {
                    self.start(index);
                }
            }
            ToWorker::Flush { step, .. } => self.send_sum(index, step),
            ToWorker::Deny { .. } | ToWorker::SumTaken { .. } => {}
            other => panic!("{other:?} does not come to workers that work well"),
        }
    }

    /// The device starts the first lease of its queue. Workers differ in speed by up to a tenth, and so does a worker
    /// from one microbatch to the next.
    fn start(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.began = self.now;
        let Some(&lease) = worker.queue.front() else { return };
        let tokens = self.tokens[self.items[(lease - self.first) as usize]];
        let noise = (index as u64 * 7919 + lease * 104_729) % 100;
        let micros = tokens * (950 + index as u64 * 37 % 100 + noise) / 1000;
        self.ends.push(Reverse((self.now + micros, index, lease)));
    }

    /// A computation has ended, unless it was cancelled.
    fn ended(&mut self, index: usize, lease: LeaseId) {
        let worker = &mut self.workers[index];
        if worker.queue.front() != Some(&lease) {
            return;
        }
        worker.queue.pop_front();
        let micros = self.now - worker.began;
        let announce = ToCoordinator::Announce { lease, parameters: self.hash, micros, memory: 0 };
        self.inbox.push_back((index, announce));
        self.start(index);
    }

    fn send_sum(&mut self, index: usize, step: u64) {
        let worker = &mut self.workers[index];
        let leases = std::mem::take(&mut worker.granted);
        worker.sums += 1;
        let number = worker.sums;
        let pieces = self.reduction.iter().flat_map(|r| &r.canned[index % r.canned.len()]).cloned();
        let number_of = |mut piece: ToCoordinator| {
            if let ToCoordinator::SumPiece { sum, .. } = &mut piece {
                *sum = number;
            }
            (index, piece)
        };
        self.inbox.extend(pieces.map(number_of));
        let weight = (leases.len() as i128) << fixed::FRACTION_BITS;
        let end = ToCoordinator::Sum {
            sum: number,
            step,
            loss: 1,
            weight,
            targets: leases.len() as u64,
            leases,
            rewards: RewardSums::default(),
            parameters: self.hash,
            traffic: Traffic::default(),
            relays: None,
        };
        self.inbox.push_back((index, end));
    }

    /// What the coordinator's driver does with a message.
    fn hear(&mut self, index: usize, message: ToCoordinator) {
        let member = MemberId(index as u64);
        match (&message, &self.reduction) {
            (&ToCoordinator::SumPiece { sum, offset, len, ref packed }, Some(reduction)) => {
                assert!(self.machine.wants_sum(member, sum), "sum {sum} of {member:?} is wanted");
                let packed = packed.clone();
                let added = reduction.reducer.piece(member.0, sum, (offset, len), packed);
                added.unwrap_or_else(|e| panic!("{e}"));
                self.said(index, message);
            }
            (ToCoordinator::Sum { sum, leases, loss, weight, targets, .. }, Some(reduction)) => {
                let (loss, weight, targets) = (*loss, *weight, *targets);
                let scalars = Scalars { loss, weight, targets, ..Scalars::default() };
                reduction.reducer.finish(member.0, Claim { sum: *sum, leases: leases.len(), scalars });
                self.pending.insert((member.0, *sum), message);
            }
            _ => self.said(index, message),
        }
    }

    /// A report of the reducer, if one is there; where the workers have nothing to say, it is waited for.
    fn reported(&mut self) -> bool {
        let Some(reduction) = self.reduction.as_ref().filter(|_| !self.pending.is_empty()) else {
            return false;
        };
        let report = match self.inbox.is_empty() {
            true => reduction.reports.recv().ok(),
            false => reduction.reports.try_recv().ok(),
        };
        let Some(Report { member, sum, result }) = report else { return false };
        result.unwrap_or_else(|e| panic!("{e}"));
        let end = self.pending.get(&(member, sum)).cloned();
        self.said(member as usize, end.unwrap_or_else(|| panic!("sum {sum} of {member} has ended")));
        true
    }

    /// One step, with its optimizer step where there is one.
    fn step(&mut self) {
        if let Some(reduction) = &self.reduction {
            reduction.reducer.begin(self.tokens.len());
        }
        self.items.clear();
        self.done = false;
        self.tick(Event::Begin(Round::of(Kind::Train, self.tokens.clone())));
        while !self.done {
            let wake = self.machine.wake().map(|at| at.as_micros() as u64);
            if self.reported() {
                continue;
            }
            if let Some((index, message)) = self.inbox.pop_front() {
                self.hear(index, message);
                continue;
            }
            let next = self.ends.peek().map(|Reverse((at, ..))| *at);
            if wake.is_some_and(|wake| next.is_none_or(|next| wake < next)) {
                self.now = self.now.max(wake.unwrap_or_default());
                self.tick(Event::Time);
            } else if let Some(Reverse((at, index, lease))) = self.ends.pop() {
                self.now = at;
                self.ended(index, lease);
            } else {
                panic!("step {}: no one has anything to do", self.step);
            }
        }
        // Cancelled work that no message is about any more.
        self.workers.iter_mut().for_each(|w| w.queue.clear());
        self.step += 1;
        self.hash = match &mut self.reduction {
            Some(reduction) => reduction.step(),
            None => [self.step as u8; 32],
        };
        self.tick(Event::Parameters { after: self.step, hash: self.hash });
    }
}

/// Results of one size.
struct Cost {
    /// Processor microseconds per microbatch, without optimizer steps.
    each: f64,
    /// Processor milliseconds per optimizer step.
    step: f64,
    seconds: f64,
    /// Seconds of virtual time: the same schedule takes the same time.
    virtually: f64,
    repeats: u64,
    peak: f64,
    wire: usize,
}

impl Cost {
    /// Two steps in which workers join and are measured; then as many steps as have these microbatches.
    fn of(workers: usize, each: usize, reduction: Option<Reduction>) -> Cost {
        let mut run = Run::new(workers, each, reduction);
        (0..2).for_each(|_| run.step());
        let steps = option("--microbatches", 40_000).div_ceil(run.tokens.len()).max(2);
        run.reduction.iter_mut().for_each(|r| r.steps = 0.0);
        run.repeats = 0;
        let from = run.now;
        let (began, before) = (Instant::now(), processor());
        (0..steps).for_each(|_| run.step());
        let (used, seconds) = (processor() - before, began.elapsed().as_secs_f64());
        let of_steps = run.reduction.as_ref().map_or(0.0, |r| r.steps);
        let microbatches = (steps * run.tokens.len()) as f64;
        Cost {
            each: 1e6 * (used - of_steps) / microbatches,
            step: 1e3 * of_steps / steps as f64,
            seconds,
            virtually: (run.now - from) as f64 / 1e6,
            repeats: run.repeats,
            peak: peak(),
            wire: run.reduction.as_ref().map_or(0, Reduction::wire),
        }
    }
}

/// The part of a process that runs one size: a line of results for the first process.
fn one(workers: usize) {
    let (len, each) = (option("--parameters", 10_000), option("--each", 8));
    let threads = option("--threads", std::thread::available_parallelism().map_or(1, usize::from));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
    pool.unwrap_or_else(|e| panic!("{e}"));
    let reduction = (len > 0).then(|| Reduction::new(len, threads));
    let Cost { each, step, seconds, virtually, repeats, peak, wire } = Cost::of(workers, each, reduction);
    println!("{each} {step} {seconds} {virtually} {repeats} {peak} {wire}");
}

fn run(workers: usize, len: usize) -> Vec<f64> {
    let program = std::env::current_exe().unwrap_or_else(|e| panic!("{e}"));
    let mut command = Command::new(program);
    // The first value of an option counts.
    command.args(["--workers", &workers.to_string(), "--parameters", &len.to_string()]);
    command.args(std::env::args().skip(1));
    let out = command.output().unwrap_or_else(|e| panic!("{e}"));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    text.split_whitespace().map(|v| v.parse().unwrap_or_else(|e| panic!("{v}: {e}"))).collect()
}

fn main() {
    let workers = option("--workers", 0);
    if workers > 0 {
        return one(workers);
    }
    let each = option("--each", 8);
    for len in [0, option("--parameters", 10_000)] {
        match len {
            0 => println!("the machine alone, {each} microbatches per worker and step"),
            len => println!("machine, reducer and optimizer step, {len} trained values"),
        }
        println!(
            "workers   us per microbatch   of {}   ms per step   seconds   virtually   repeats   peak MB   MB a worker",
            SIZES[0]
        );
        let mut first = Vec::new();
        for workers in SIZES {
            let now = run(workers, len);
            if first.is_empty() {
                first = now.clone();
            }
            let more = (now[5] - first[5]) / (workers - SIZES[0]).max(1) as f64;
            println!(
                "{workers:>7} {:>19.2} {:>6.2} {:>13.2} {:>9.1} {:>11.6} {:>9} {:>9.1} {:>13.4}",
                now[0],
                now[0] / first[0],
                now[1],
                now[2],
                now[3],
                now[4],
                now[5] / 1e6,
                more / 1e6
            );
        }
        if first[6] > 0.0 {
            println!("a sum has {:.2} MB on the wire, kept until it is taken", first[6] / 1e6);
        }
    }
}
