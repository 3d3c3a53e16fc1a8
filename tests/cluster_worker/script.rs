//! A scripted coordinator, and what a worker needs to connect to it: the demonstration's model on CPU devices.

use finetune::backend::{Backend, Cpu};
use finetune::cluster::inject::Inject;
use finetune::cluster::link::{MemberLink, WorkerLink, pair};
use finetune::cluster::message::{
    Bye, Device, Hash, Hello, Lease, LeaseId, Manifest, ModelFile, PIECE, PROTOCOL, Packed, ToCoordinator,
    ToWorker, Work,
};
use finetune::cluster::worker::{
    Begin, Blueprint, Candidate, Equipment, ModelSource, Opener, Outcome, Shape, Worker, hash,
};
use finetune::model::decoder::Build;
use finetune::model::lora::{self, LoraSpec};
use finetune::model::memory::{self, Load};
use finetune::model::stage::{Microbatch, Model, Output, Targets, Ticket, Want};
use finetune::model::weights::{ModelError, Weights};
use finetune::numeric::REVISION;
use finetune::numeric::fixed::{self, CELL, FRACTION_BITS};
use finetune::numeric::pack;
use finetune::numeric::rng::Stream;
use finetune::train::stop::Stop;
use finetune::train::sum::{Scalars, Sums};
use stages::Loads;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

pub const MICROBATCHES: u32 = 8;

/// Leases that a device requests beside the one in computation.
pub const ROOM: u16 = 8;

/// The demonstration's model.
pub fn model_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("demo/model")
}

pub fn shape() -> Shape {
    let targets = ["q_proj", "down_proj"].map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, dropout: 0.1, targets, seed: 7, ..LoraSpec::none() };
    Shape::plain(lora, 64)
}

pub fn blueprint() -> Blueprint {
    Blueprint::open(&model_dir(), shape()).unwrap()
}

/// The CPU with this many threads and this much memory.
pub struct OnCpu {
    pub name: &'static str,
    pub threads: usize,
    pub limit: u64,
}

impl Opener for OnCpu {
    fn backend(&self) -> &str {
        self.name
    }

    fn open(&self, blueprint: &Blueprint) -> Result<Box<dyn Model>, ModelError> {
        let cpu = Cpu::new(self.threads);
        memory::choose(load(&cpu, blueprint)?, self.limit)?;
        let Blueprint { config, tensors, shape } = blueprint;
        cpu.stage((config, &**tensors, &shape.lora), Build::whole(config))
    }
}

pub fn load<'a>(cpu: &Cpu, blueprint: &'a Blueprint) -> Result<Load<'a>, ModelError> {
    let weights = Weights::new(&*blueprint.tensors)?
        .packed(&|encoding, numbers| cpu.matrix_bytes(encoding, numbers), &blueprint.config)?;
    let weights = weights.total;
    let (config, lora, tokens) = (&blueprint.config, &blueprint.shape.lora, blueprint.shape.tokens);
    Ok(Load::of(config, lora, tokens, weights))
}

/// This many devices, each with a chain of two backends.
pub fn equipment(devices: usize, inject: &str) -> Equipment {
    limited(devices, inject, u64::MAX)
}

pub fn limited(devices: usize, inject: &str, limit: u64) -> Equipment {
    let opener = |name, threads| Arc::new(OnCpu { name, threads, limit }) as Arc<dyn Opener>;
    let chain = |threads| vec![opener("first", threads), opener("second", threads)];
    let candidate = |i| Candidate { name: format!("cpu {i}"), chain: chain(1 + i), begin: Begin::Anywhere };
    let inject: Inject = inject.parse().unwrap();
    let reference = Arc::new(OnCpu { name: "reference", threads: 1, limit: u64::MAX });
    Equipment { candidates: (0..devices).map(candidate).collect(), reference, inject }
}

pub fn files() -> Vec<(ModelFile, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(model_dir()).unwrap().flatten().map(|e| e.path()).collect();
    files.sort();
    let one = |path: PathBuf| {
        let bytes = std::fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (ModelFile { name, size: bytes.len() as u64, hash: *blake3::hash(&bytes).as_bytes() }, bytes)
    };
    files.into_iter().map(one).collect()
}

pub fn manifest() -> Manifest {
    let (shape, layout) = (shape(), blueprint().layout());
    Manifest {
        run: "run".into(),
        epoch: 1,
        name: "worker".into(),
        model: "demo".into(),
        model_hash: "0123456789abcdef".into(),
        files: files().into_iter().map(|(file, _)| file).collect(),
        parts: vec![],
        labels: shape.labels,
        tags: shape.tags,
        class_weights: shape.class_weights,
        quantize: None,
        vocabulary: blueprint().config.vocab as u64,
        lora: shape.lora,
        parameters: layout.len() as u64,
        layout: layout.hash(),
        tokens: shape.tokens as u64,
        dtype: shape.dtype,
        fraction_bits: FRACTION_BITS,
        sum_bits: 0,
        moments: false,
        delay: 0,
        steps: 9,
        silence_millis: 0,
        seats: None,
    }
}

pub fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        numerics: REVISION,
        identity: [1; 16],
        name: "w".into(),
        model: None,
        options: Vec::new(),
        before: None,
    }
}

/// Microbatch `i` of step 1.
pub fn microbatch(i: u32) -> Microbatch {
    let mut stream = Stream::new(&[99, i.into()]);
    let mut tokens = || (0..40).map(|_| stream.below(500)).collect::<Vec<u32>>();
    let (ids, targets) = (tokens(), Targets::Tokens(tokens()));
    Microbatch {
        step: 1,
        rows: vec![(2 * i).into(), (2 * i + 1).into()],
        ids,
        bounds: vec![0, 15, 40],
        targets,
    }
}

pub fn parameters() -> Vec<f32> {
    let blueprint = blueprint();
    let mut flat = lora::init(&blueprint.layout(), &blueprint.shape.lora);
    let mut stream = Stream::new(&[5]);
    flat.iter_mut().for_each(|v| *v += 0.02 * (stream.unit() - 0.5));
    flat
}

/// The sum of these microbatches, computed here.
pub fn expected(which: &[u32]) -> Sums {
    let blueprint = blueprint();
    let mut model = OnCpu { name: "here", threads: 1, limit: u64::MAX }.open(&blueprint).unwrap();
    model.set_parameters(&parameters()).unwrap();
    let mut sums = Sums::new(blueprint.layout().len());
    for &i in which {
        let Output::Loss(loss) = model.forward(&microbatch(i), None, Want::Gradient(Ticket(0))).unwrap()
        else {
            panic!()
        };
        let mut gradient = vec![0.0; blueprint.layout().len()];
        model.backward(Ticket(0), None, &mut gradient).unwrap();
        sums.add_loss(&loss).unwrap();
        sums.add_gradient(&gradient, fixed::cap(MICROBATCHES as usize)).unwrap();
    }
    sums
}

/// The coordinator's end.
pub struct Script {
    pub link: MemberLink,
    pub devices: Vec<Device>,
    pub refused: Vec<String>,
    /// Announced leases: on a busy machine a worker repeats an announcement that was not answered in time.
    heard: BTreeSet<LeaseId>,
}

impl Script {
    pub fn say(&self, message: ToWorker) {
        self.link.to.blocking_send(message).unwrap();
    }

    /// The worker's next message; requests for files are answered here.
    pub fn hear(&mut self) -> ToCoordinator {
        loop {
            match self.link.from.blocking_recv().expect("the worker is there") {
                ToCoordinator::Fetch { file, offset, len } => {
                    let bytes = &files()[file as usize].1;
                    for at in (offset..offset + len).step_by(PIECE) {
                        let end = (at + PIECE as u64).min(offset + len);
                        let bytes = bytes[at as usize..end as usize].to_vec().into();
                        self.say(ToWorker::Piece { file, offset: at, bytes });
                    }
                }
                // A device's measurements differ from machine to machine.
                ToCoordinator::Measured { .. } => {}
                ToCoordinator::Announce { lease, .. } if !self.heard.insert(lease) => {}
                other => return other,
            }
        }
    }

    /// Exchanges hello, welcome and ready.
    pub fn welcome(&mut self, manifest: Manifest) {
        assert!(matches!(self.hear(), ToCoordinator::Hello(_)));
        self.say(ToWorker::Welcome(Box::new(manifest)));
        match self.hear() {
            ToCoordinator::Ready { devices, refused } => (self.devices, self.refused) = (devices, refused),
            other => panic!("{other:?}"),
        }
    }

    /// Sends the initial parameters, which every device answers by a request for work.
    pub fn parameters(&mut self) -> Hash {
        let hash = self.say_parameters();
        for device in 0..self.devices.len() as u16 {
            assert_eq!(self.hear(), ToCoordinator::Ask { device, room: ROOM, together: 1 });
        }
        hash
    }

    pub fn say_parameters(&self) -> Hash {
        let flat = parameters();
        for (i, piece) in flat.chunks(PIECE / 4).enumerate() {
            let bytes = piece.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into();
            self.say(ToWorker::ParametersPiece { step: 0, offset: (i * PIECE / 4) as u64, bytes });
        }
        self.say(ToWorker::Parameters { step: 0, hash: hash(&flat) });
        hash(&flat)
    }

    pub fn lease(&mut self, lease: LeaseId, device: u16, work: Work) {
        self.heard.remove(&lease);
        self.say(ToWorker::Lease(Box::new(Lease { lease, device, after: 0, of: MICROBATCHES, work })));
    }

    /// Leases microbatches `which` under their own numbers, distributed over the devices.
    pub fn train(&mut self, which: &[u32]) {
        for (n, &i) in which.iter().enumerate() {
            self.lease(i.into(), (n % self.devices.len()) as u16, Work::Train(microbatch(i)));
        }
    }

    /// Waits until `count` leases are announced, in any order.
    pub fn announced(&mut self, count: usize, hash: Hash) -> Vec<LeaseId> {
        let one = |message| match message {
            ToCoordinator::Announce { lease, parameters, .. } => {
                assert_eq!(parameters, hash);
                lease
            }
            other => panic!("{other:?}"),
        };
        (0..count).map(|_| one(self.hear())).collect()
    }

    /// Receives a whole sum: its number, its leases, and its values.
    pub fn sum(&mut self) -> (u64, Vec<LeaseId>, Sums) {
        let mut sums = Sums::new(blueprint().layout().len());
        loop {
            match self.hear() {
                ToCoordinator::SumPiece { offset, packed, .. } => {
                    let cell = &mut sums.cells_mut()[offset as usize / CELL];
                    match packed {
                        Packed::Fixed(bytes) => pack::add(&bytes, cell, i64::MAX).unwrap(),
                        Packed::Single(bytes) => {
                            let values = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
                            fixed::add(cell, &values.collect::<Vec<_>>(), i64::MAX).unwrap();
                        }
                    }
                }
                ToCoordinator::Sum { sum, leases, loss, weight, targets, rewards, step, .. } => {
                    assert_eq!(step, 1);
                    sums.set_scalars(Scalars { loss, weight, targets, rewards });
                    return (sum, leases, sums);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Connects a worker with that equipment to a script; returns the outcome of the worker.
pub fn with(equipment: Equipment, script: impl FnOnce(&mut Script)) -> Outcome {
    from(equipment, ModelSource::Here(blueprint()), &Stop::new(), script)
}

/// The same with a model from anywhere, and a stop flag.
pub fn from(
    equipment: Equipment,
    source: ModelSource,
    stop: &Stop,
    script: impl FnOnce(&mut Script),
) -> Outcome {
    let (worker, member): (WorkerLink, MemberLink) = pair(64);
    std::thread::scope(|scope| {
        let served = scope.spawn(|| Worker::new(equipment, source, &|_| ()).serve(worker, hello(), stop));
        let mut script_side =
            Script { link: member, devices: Vec::new(), refused: Vec::new(), heard: BTreeSet::new() };
        script(&mut script_side);
        drop(script_side);
        served.join().unwrap()
    })
}

/// Connects one worker twice, to one script after the other; returns both outcomes.
pub fn twice(
    equipment: Equipment,
    first: impl FnOnce(&mut Script),
    second: impl FnOnce(&mut Script),
) -> (Outcome, Outcome) {
    let (again, next) = std::sync::mpsc::channel::<WorkerLink>();
    let meet = || {
        let (worker, link): (WorkerLink, MemberLink) = pair(64);
        again.send(worker).unwrap();
        Script { link, devices: Vec::new(), refused: Vec::new(), heard: BTreeSet::new() }
    };
    std::thread::scope(|scope| {
        let served = scope.spawn(move || {
            let mut worker = Worker::new(equipment, ModelSource::Here(blueprint()), &|_| ());
            let stop = Stop::new();
            let mut serve = || worker.serve(next.recv().unwrap(), hello(), &stop);
            (serve(), serve())
        });
        first(&mut meet());
        second(&mut meet());
        served.join().unwrap()
    })
}

/// Ends the run.
pub fn done(script: &Script) {
    script.say(ToWorker::Bye(Bye::Done));
}
