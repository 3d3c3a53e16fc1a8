//! `--role coordinator`: reads the data, assigns the work, steps the optimizer. Everything except the computing devices
//! is the same code as for a single run ([`super::job`]). Order: all checks; then the folder is locked (an existing
//! folder is locked before everything else) and the run's epoch is incremented on disk; then the port opens.

use super::auto_micro_batch;
use super::folder::{self, Claim, RunFolder};
use super::job::{Job, Team};
use super::prepare;
use super::signals;
use super::stages;
use crate::cluster::coordinator::{
    Company, Coordinator, Gate, Lock, Longest, ModelFiles, Port, RunLockError, RunRecord, Setup, UseOfRelays,
    call,
};
use crate::cluster::inject::Inject;
use crate::cluster::link::{FAREWELL, ROOM, pair};
use crate::cluster::machine::{Config, Counted, Verify};
use crate::cluster::message::{Bye, Hello, Manifest, PROTOCOL};
use crate::cluster::worker::{self, Blueprint, Equipment, ModelSource, Outcome, Shape, Worker};
use crate::config::groups::{ComputeDtype, Expect, Gpus, Options, Relays, Role};
use crate::config::refusal::{Kind, Refusal};
use crate::config::table::TABLE;
use crate::config::{Origin, Settings};
use crate::devices::{self, Chosen};
use crate::net::{Party, Secured, Wishes, invitation, secure};
use crate::numeric::REVISION;
use crate::numeric::fixed::FRACTION_BITS;
use crate::support::stderr::say;
use crate::train::event::HERE;
use crate::train::island::Islands;
use crate::train::stop::Stop;
use std::collections::BTreeMap;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A worker that sends nothing for this long counts as disconnected.
const SILENCE: Duration = Duration::from_secs(10);
/// Time for devices of this process to end.
const MOMENT: Duration = Duration::from_millis(500);
/// Devices of this process end only with the run.
static NEVER: Stop = Stop::new();
/// Time limit for the last messages to workers where this process was asked to stop, or failed.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Trains with all workers that join.
pub fn run(settings: &mut Settings, options: &Options) -> Result<(), Refusal> {
    // A coordinator does not compute unless devices were named; run.yaml records this.
    let named = options.devices.gpus != Gpus::None && settings.is_given("gpus");
    if !named {
        settings.put("gpus", vec!["none".into()], Origin::Computed("a coordinator's default".into()));
    }
    let chosen = if named { Some(devices::choose(&options.devices)?) } else { None };
    chosen.iter().flat_map(|c| &c.notes).for_each(|note| say!("{note}"));
    let (mut place, lock, job) = begin(settings, options, chosen.as_ref())?;
    let wishes = Wishes {
        token_file: options.cluster.token_file.as_deref(),
        insecure: options.cluster.insecure,
        at: options.cluster.bind.as_ref(),
        listens: true,
    };
    let secured = secure(Party::Coordinator, &wishes)?;
    let files = ModelFiles::open(&job.prepared.base.path).map_err(Refusal::failure)?;
    let files = if options.cluster.stages.is_some() { files.in_parts() } else { files };
    let claim = Claim::locked(&mut place, lock)?;
    let record = RunRecord::raise(&place.dir, job.identity().values().clone())?;
    let mut hall = Hall::open(&job, (settings, options), record, files, chosen.as_ref())?;
    hall.coordinator.recall(job.classes());
    let port = open(&hall, options, &secured)?;
    hall.coordinator.counts_rejected(port.rejected());
    hall.port = Some(port);
    let outcome = job.train((settings, options), &place, claim, hall.team());
    hall.close(outcome)
}

/// Trains on several devices of this process, without a network.
pub fn run_here(settings: &mut Settings, options: &Options, chosen: &Chosen) -> Result<(), Refusal> {
    let (mut place, lock, job) = begin(settings, options, Some(chosen))?;
    let record = RunRecord::of_one_process();
    let mut hall = Hall::open(&job, (settings, options), record, ModelFiles::default(), Some(chosen))?;
    hall.coordinator.recall(job.classes());
    let claim = Claim::new(&mut place, lock)?;
    let outcome = job.train((settings, options), &place, claim, hall.team());
    hall.close(outcome)
}

fn begin(
    settings: &mut Settings,
    options: &Options,
    chosen: Option<&Chosen>,
) -> Result<(RunFolder, Option<Lock>, Job), Refusal> {
    let place = folder::place(&options.output, &options.model.model)?;
    let lock = place.hold()?;
    let mut prepared = prepare::prepare(settings, options)?;
    let plan =
        auto_micro_batch::plan(settings, options, (&mut prepared, chosen), auto_micro_batch::Look::Measure)?;
    let mut job = Job::new(prepared, plan, options)?;
    job.resume(&place)?;
    Ok((place, lock, job))
}

/// The runtime, the coordinator and its connections.
struct Hall {
    runtime: tokio::runtime::Runtime,
    coordinator: Coordinator<'static>,
    /// `None` if no other worker may join.
    port: Option<Port>,
    local: Option<JoinHandle<Outcome>>,
    hardware: Vec<(String, String)>,
}

impl Hall {
    fn open(
        job: &Job,
        (settings, options): (&Settings, &Options),
        record: RunRecord,
        files: ModelFiles,
        chosen: Option<&Chosen>,
    ) -> Result<Self, Refusal> {
        let equipment = match chosen {
            Some(local) => {
                Some(devices::equipment(local, Inject::from_environment().map_err(Refusal::usage)?))
            }
            None => None,
        };
        let here = equipment.as_ref().map_or(0, |e| e.candidates.len());
        // Before devices are opened, which changes free memory.
        let weights = (job.prepared.model(), job.longest(options));
        let hardware = chosen.map_or_else(Vec::new, |chosen| devices::named_hardware(chosen, weights));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(devices::cores().clamp(1, 4))
            .thread_name("net")
            .enable_all()
            .build()
            .map_err(|e| Refusal::failure(format!("threads for the network: {e}")))?;
        let manifest = manifest(job, settings, options, &record, &files);
        if options.cluster.role == Role::Coordinator {
            longest(job, options).fits(&manifest).map_err(Refusal::configuration)?;
        }
        let shape = Shape::of(&manifest);
        let company = if options.cluster.role == Role::Coordinator { Company::Open } else { Company::Closed };
        let lines = stages::plan(settings, options, (&job.prepared, &job.counts(options).0))?;
        let coordinator = Coordinator::new(Setup {
            layout: job.writer.layout.clone(),
            machine: machine(options, here)?,
            gate: Gate { manifest, options: spoken(settings) },
            files,
            runtime: runtime.handle().clone(),
            threads: devices::cores(),
            hint: job.hint(options),
            company,
            lines,
            relays: relays(options),
            stop: &signals::STOP,
        });
        let mut coordinator = coordinator.map_err(|e| Refusal::failure(format!("threads for sums: {e}")))?;
        coordinator.opens_here(HERE, here);
        let local = match equipment {
            Some(equipment) => {
                let blueprint = Blueprint::open(&job.prepared.base.path, shape);
                let blueprint = blueprint.map_err(Refusal::configuration)?;
                Some(work_here(&coordinator, (blueprint, company), equipment)?)
            }
            None => None,
        };
        Ok(Hall { runtime, coordinator, port: None, local, hardware })
    }

    /// Workers are unknown before they join; metrics.jsonl records their classes.
    fn team(&mut self) -> Team<'_> {
        let (classes, hardware) = (Vec::new(), self.hardware.clone());
        Team { compute: &mut self.coordinator, classes, hardware, takes: None }
    }

    /// Sends the outcome to all workers; the port stays open until workers that lost their connection have received it.
    fn close(self, outcome: Result<(), Refusal>) -> Result<(), Refusal> {
        let bye = bye(&outcome);
        let patience = if matches!(bye, Bye::Later { .. }) { LAST_WORDS } else { FAREWELL };
        self.coordinator.close(&bye, patience, self.port);
        self.runtime.shutdown_background();
        // A failure of devices of this process is the reason of the end and replaces the outcome.
        match (self.local.and_then(ended), outcome) {
            (Some(Outcome::Failed { reason }), Err(e)) if e.kind == Kind::Saved => {
                Err(Refusal::failure(reason))
            }
            (Some(Outcome::Refused { reason }), Err(e)) if e.kind == Kind::Saved => {
                Err(Refusal::configuration(reason))
            }
            (_, outcome) => outcome,
        }
    }
}

/// Returns the outcome of the devices of this process, waiting up to [`MOMENT`] for it.
fn ended(local: JoinHandle<Outcome>) -> Option<Outcome> {
    let began = Instant::now();
    while !local.is_finished() && began.elapsed() < MOMENT {
        std::thread::sleep(Duration::from_millis(5));
    }
    local.is_finished().then(|| local.join().ok()).flatten()
}

/// Runs the devices of this process as a worker that is connected over channels.
fn work_here(
    coordinator: &Coordinator,
    (blueprint, company): (Blueprint, Company),
    equipment: Equipment,
) -> Result<JoinHandle<Outcome>, Refusal> {
    // The identity is random like that of any worker, so that others cannot guess it.
    let identity = worker::identity().map_err(Refusal::failure)?;
    let (ours, theirs) = pair(ROOM);
    coordinator.reception().receive_here(ours);
    let hello = Hello {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        numerics: REVISION,
        identity,
        name: HERE.into(),
        model: None,
        options: vec![],
        before: None,
    };
    Ok(std::thread::spawn(move || {
        let say = |line: &str| say!("{line}");
        let outcome = Worker::new(equipment, ModelSource::Here(blueprint), &say).serve(theirs, hello, &NEVER);
        // Where these devices are alone, their failure ends the run and is reported there.
        if let Outcome::Failed { reason } | Outcome::Refused { reason } = &outcome
            && company == Company::Open
        {
            say!("warning: the devices of this process: {reason}");
        }
        outcome
    }))
}

/// Opens the port, reports its address, and connects to the workers that listen.
fn open(hall: &Hall, options: &Options, secured: &Secured) -> Result<Port, Refusal> {
    let (runtime, coordinator) = (hall.runtime.handle(), &hall.coordinator);
    let say = |line: &str| {
        if !options.output.quiet {
            say!("{line}");
        }
    };
    let warn = |line: String| say!("warning: {line}");
    secured.notes.iter().for_each(|note| say(note));
    let (reception, at) = (coordinator.reception(), (&secured.at, secured.security.clone()));
    let port = Port::open(runtime, at, reception)?;
    let at = match port.address() {
        at if at.ip().is_unspecified() => format!("port {} of all interfaces", at.port()),
        at => at.to_string(),
    };
    let whose = if port.address().ip().to_canonical().is_loopback() { "this" } else { "the next" };
    say(&format!("listens on {at}; on {whose} machine type:"));
    invitation(port.address(), &secured.at, &secured.security)
        .iter()
        .for_each(|line| say(&format!("  {line}")));
    if options.cluster.verify > 0.0 {
        say(&verification(options.cluster.verify));
    }
    for node in &options.cluster.nodes {
        call(runtime, node.clone(), secured.security.clone(), coordinator.reception(), warn);
    }
    Ok(port)
}

fn relays(options: &Options) -> UseOfRelays {
    match options.cluster.relays_with(options.optim.delay) {
        Relays::Never => UseOfRelays::Never,
        Relays::Auto => UseOfRelays::Auto,
        Relays::Always => UseOfRelays::Always,
    }
}

/// Configuration of the state machine, with `here` devices in this process.
fn machine(options: &Options, here: usize) -> Result<Config, Refusal> {
    let cluster = &options.cluster;
    let min = cluster.min_workers;
    let expect = cluster.expect_workers.map_or(min.max(here), Expect::count);
    let counts = match cluster.expect_workers {
        Some(Expect::Tasks(_)) => Counted::Tasks,
        Some(Expect::Devices(_)) | None => Counted::Devices,
    };
    let verify = match cluster.verify > 0.0 {
        // The key is of this process alone: a resumed run draws others, which changes no result.
        true => {
            let key = worker::random("--verify").map_err(Refusal::failure)?;
            Some(Verify::new(cluster.verify, key))
        }
        false => None,
    };
    let (join_timeout, delay) = (cluster.join_timeout, options.optim.delay);
    Ok(Config { expect, counts, min, join_timeout, verify, delay, ..Config::default() })
}

/// What `--verify` does in this run.
fn verification(share: f64) -> String {
    let (mean, nearly_all) = Verify::found_after(share);
    format!(
        "--verify: {} % of the microbatches are computed again by another worker; one that forges every result is \
         found after {mean} of its microbatches on average, with probability 99 % after {nearly_all}; a worker whose \
         class no other worker has gets no work",
        (share * 1e6).round() / 1e4
    )
}

fn manifest(
    job: &Job,
    settings: &Settings,
    options: &Options,
    record: &RunRecord,
    files: &ModelFiles,
) -> Manifest {
    let p = &job.prepared;
    let typed = settings.is_given("dtype") && options.devices.dtype != ComputeDtype::Auto;
    Manifest {
        run: record.run.clone(),
        epoch: record.epoch,
        name: String::new(),
        model: folder::stem(&options.model.model),
        model_hash: job.model_hash.clone(),
        files: files.list(),
        parts: files.parts(),
        labels: p.config.labels.clone(),
        tags: p.config.tags,
        class_weights: options.data.class_weights.clone(),
        quantize: options.model.quantize.map(|recipe| recipe.name().into()),
        vocabulary: p.config.vocab as u64,
        lora: p.spec.clone(),
        parameters: job.writer.layout.len() as u64,
        layout: job.writer.layout.hash(),
        tokens: job.need().tokens as u64,
        dtype: settings.text("dtype").ok().flatten().filter(|_| typed).map(str::to_string),
        fraction_bits: FRACTION_BITS,
        sum_bits: options.optim.sum_bits,
        moments: options.optim.islands.is_some(),
        delay: options.optim.delay,
        steps: job.schedule.total,
        silence_millis: SILENCE.as_millis() as u64,
        seats: None,
    }
}

/// The maximum sizes of leases.
fn longest(job: &Job, options: &Options) -> Longest {
    let p = &job.prepared;
    let rows = [Some(&p.train), p.eval.as_ref()].into_iter().flatten();
    let shortest = rows.flat_map(|c| (0..c.samples.len()).map(|i| c.samples.tokens(i))).min();
    // Rows with answers carry more than others.
    let compares = p.train.samples.iter().any(|row| row.second.is_some());
    let shortest = if compares { 1 } else { shortest.unwrap_or(1) };
    let steps = &job.counts(options).1.steps;
    let island = options.optim.islands.map_or(0, |islands| longest_island(steps, islands));
    Longest { tokens: job.need().tokens, island, shortest, vocabulary: p.config.vocab }
}

/// The most tokens of an island, of the tokens of the microbatches of all steps.
fn longest_island(steps: &[Vec<u32>], Islands { count, inner, .. }: Islands) -> usize {
    // A microbatch has about 16 bytes, or two tokens, besides its rows and tokens, and so has a step.
    let size = |step: &Vec<u32>, first: usize| -> usize {
        2 + step.iter().skip(first).step_by(count).map(|tokens| *tokens as usize + 2).sum::<usize>()
    };
    let of = |steps: &[Vec<u32>], island: usize| -> usize {
        steps.iter().enumerate().map(|(turn, step)| size(step, (island + turn) % count)).sum()
    };
    let exchanges = steps.chunks(usize::try_from(inner).unwrap_or(usize::MAX));
    exchanges.flat_map(|steps| (0..count).map(move |island| of(steps, island))).max().unwrap_or(0)
}

/// The options that a worker may also have been given, as in run.yaml, lists joined by commas.
fn spoken(settings: &Settings) -> BTreeMap<String, String> {
    let value = |key: &'static str| settings.get(key).map(|s| s.values.join(","));
    TABLE.iter().filter_map(|opt| Some((opt.key(), value(opt.name)?))).collect()
}

/// The last message to workers for an outcome of the run.
fn bye(outcome: &Result<(), Refusal>) -> Bye {
    match outcome {
        Ok(()) => Bye::Done,
        Err(e) if e.kind == Kind::NonFinite => Bye::Halted { reason: e.line.clone() },
        Err(e) => Bye::Later { reason: e.line.clone() },
    }
}

impl From<RunLockError> for Refusal {
    fn from(e: RunLockError) -> Self {
        match e {
            RunLockError::Format(e) => e.into(),
            RunLockError::Random => Refusal::failure(e),
            RunLockError::Locked(_)
            | RunLockError::NoLocks { .. }
            | RunLockError::Record { .. }
            | RunLockError::Other { .. } => Refusal::configuration(e),
        }
    }
}
