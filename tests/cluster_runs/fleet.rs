//! A coordinator and workers as separate processes, on this machine over TCP with TLS, and their results.

use crate::cli_fixture::{ADAPTER, Bench, classes, pairs, rows, stderr};
use crate::hosts::{Hosts, Path};
use finetune::train::event::{Event, What};
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const TOKEN: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
/// Upper bound on the time of any run here, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// Eight microbatches a step; dropout is on, so that a dependence on the computing worker would change the result.
pub const RUN: &str = "demo --data many.jsonl --batch-size 24 --micro-batch-tokens 64 --rank 4 --dropout 0.1";

/// The number of fleets created in this process.
static FLEETS: AtomicU32 = AtomicU32::new(0);

/// A folder, a port, and processes that are killed when the test ends, even by a panic.
pub struct Fleet {
    pub bench: Bench,
    address: String,
    children: Vec<(String, Child)>,
    /// With one host per process: the coordinator has the first, the workers follow in order.
    hosts: Option<Hosts>,
}

impl Fleet {
    pub fn new() -> Self {
        let bench = Bench::new();
        bench.file("many.jsonl", &rows(240));
        // A separate loopback address: the port is free until the coordinator binds it, whatever other tests do.
        let number = FLEETS.fetch_add(1, Ordering::Relaxed);
        let free = TcpListener::bind(format!("127.77.{}.{}:0", number / 250, 1 + number % 250)).unwrap();
        let address = free.local_addr().unwrap().to_string();
        Fleet { bench, address, children: Vec::new(), hosts: None }
    }

    /// On hosts of a network; `None` if the machine does not permit network namespaces.
    pub fn on_hosts(count: usize, path: Path) -> Option<Self> {
        Fleet::on_unlike_hosts(&vec![path; count])
    }

    /// On hosts with these links.
    pub fn on_unlike_hosts(paths: &[Path]) -> Option<Self> {
        let hosts = Hosts::with(paths)?;
        let mut fleet = Fleet::new();
        (fleet.address, fleet.hosts) = (format!("{}:9000", Hosts::address(1)), Some(hosts));
        Some(fleet)
    }

    /// The address on which the coordinator listens.
    pub fn at(&self) -> &str {
        &self.address
    }

    /// Waits until the coordinator listens.
    #[track_caller]
    pub fn wait_until_listening(&self) {
        let began = Instant::now();
        while !self.said("coordinator").contains("listens on") {
            assert!(began.elapsed() < PATIENCE, "{}", self.all());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Bytes of memory that a process holds.
    pub fn resident(&mut self, name: &str) -> u64 {
        let status = format!("/proc/{}/status", self.child(name).id());
        let status = std::fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    pub fn hosts(&self) -> &Hosts {
        self.hosts.as_ref().expect("a fleet on hosts")
    }

    /// With the rows of classifiers and preferences too.
    pub fn of_all_tasks() -> Self {
        let fleet = Fleet::new();
        fleet.bench.file("classes.jsonl", &classes(96));
        fleet.bench.file("pairs.jsonl", &pairs(96));
        fleet
    }

    /// Several devices and a line in one process, and workers, give the bytes of one device; a run without the option
    /// that is tested (`plain`) does not. Workers: more options of the coordinator, and a name for each worker.
    pub fn all_ways_are_equal(plain: &str, option: &str, workers: &[(&str, &[&str])]) {
        let (here, run) = (Fleet::of_all_tasks(), format!("{plain} {option}"));
        let alone = here.alone(&run);
        assert!(alone != here.alone(&format!("{plain} --overwrite")), "{option} changes no byte");
        for (out, gpus) in [("devices", "cpu,cpu,cpu"), ("line", "cpu+cpu")] {
            here.bench.ok(&format!("{run} --gpus {gpus} --threads 2 -q -o {out}"));
            assert!(here.adapter(out) == alone, "{gpus}");
        }
        for (more, names) in workers {
            let mut fleet = Fleet::of_all_tasks();
            fleet.coordinator(&format!("{run} {more}"));
            names.iter().for_each(|name| fleet.worker(name, "--threads 1"));
            fleet.all_end(&[&["coordinator"], *names].concat(), 0);
            assert!(fleet.adapter("out") == alone, "{more}\n{}", fleet.all());
        }
    }

    /// The adapter of one undisturbed process.
    pub fn alone(&self, run: &str) -> Vec<u8> {
        self.bench.ok(&format!("{run} --threads 1 -q -o alone"));
        self.adapter("alone")
    }

    pub fn adapter(&self, out: &str) -> Vec<u8> {
        self.bench.read(&format!("{out}/{ADAPTER}"))
    }

    pub fn coordinator(&mut self, args: &str) {
        let args = format!("{args} --role coordinator --bind {} -o out", self.address);
        self.start("coordinator", &args, "");
    }

    pub fn worker(&mut self, name: &str, args: &str) {
        self.faulty(name, args, "");
    }

    /// A worker with injected faults.
    pub fn faulty(&mut self, name: &str, args: &str, inject: &str) {
        let address = &self.address;
        let how = format!("--role worker --coordinator {address} --model-cache models --join-timeout 60s");
        self.start(name, &format!("{how} {args}"), inject);
    }

    /// A worker that searches for the coordinator at `at` only, and gives up after `patience`.
    pub fn seeker(&mut self, name: &str, at: &str, patience: &str) {
        let how = format!("--role worker --coordinator {at} --model-cache models --join-timeout {patience}");
        self.start(name, &format!("{how} --threads 1"), "");
    }

    fn start(&mut self, name: &str, args: &str, inject: &str) {
        let mut command = self.on_its_host(self.bench.command(args));
        command.env("FINETUNE_TOKEN", TOKEN).stdout(Stdio::null()).stderr(self.log(name));
        if !inject.is_empty() {
            command.env("FINETUNE_INJECT", inject);
        }
        self.children.push((name.into(), command.spawn().unwrap()));
    }

    fn on_its_host(&self, inner: Command) -> Command {
        let Some(hosts) = &self.hosts else { return inner };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &hosts.namespace(1 + self.children.len())]);
        command.arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::null());
        if let Some(dir) = inner.get_current_dir() {
            command.current_dir(dir);
        }
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// The file for the output of a process; a second process of the same name appends to it.
    fn log(&self, name: &str) -> std::fs::File {
        let path = self.bench.path(&format!("{name}.log"));
        std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap()
    }

    pub fn said(&self, name: &str) -> String {
        std::fs::read_to_string(self.bench.path(&format!("{name}.log"))).unwrap_or_default()
    }

    fn child(&mut self, name: &str) -> &mut Child {
        let found = self.children.iter_mut().rev().find(|(n, _)| n == name);
        &mut found.unwrap_or_else(|| panic!("there is no {name}")).1
    }

    /// Sends a signal at once: a separate `kill` process may be too late.
    pub fn signal(&mut self, name: &str, signal: Signal) {
        let id = Pid::from_child(self.child(name));
        kill_process(id, signal).unwrap();
    }

    /// Kills a process without a chance to send anything.
    pub fn kill(&mut self, name: &str) {
        self.signal(name, Signal::KILL);
        self.child(name).wait().unwrap();
    }

    /// Runs with three workers, of which one is killed after step 2, and kills the coordinator after step `last`; then
    /// resumes, with two workers, to the bytes of one process. Each of `others`, in the place of `options`, is refused
    /// with its text when it resumes.
    pub fn survives(&mut self, (run, options): (&str, &str), last: usize, others: &[(&str, &str)]) {
        let run = format!("{run} {options}");
        let alone = self.alone(&run);
        self.coordinator(&format!("{run} --expect-workers 3"));
        for name in ["a", "b", "c"] {
            self.faulty(name, "--threads 1", "slow=8");
        }
        self.wait_for_step(2);
        std::thread::sleep(Duration::from_millis(40));
        self.kill("b");
        self.wait_for_step(last);
        self.kill("coordinator");
        let resume = format!("{run} --role coordinator --bind {} -o out --resume -q", self.at());
        for (other, what) in others {
            let out = self.bench.run(&resume.replace(options, other));
            assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
            assert!(stderr(&out).contains(what), "{}", stderr(&out));
        }
        self.coordinator(&format!("{run} --resume --expect-workers 2"));
        self.all_end(&["coordinator", "a", "c"], 0);
        assert!(self.adapter("out") == alone, "{}", self.all());
    }

    /// The id of a process.
    pub fn id(&mut self, name: &str) -> u32 {
        self.child(name).id()
    }

    /// Whether a process still runs.
    pub fn is_running(&mut self, name: &str) -> bool {
        self.ended(name).is_none()
    }

    /// The exit code of a process that ended, `None` inside if a signal killed it; `None` while it runs.
    pub fn ended(&mut self, name: &str) -> Option<Option<i32>> {
        self.child(name).try_wait().unwrap().map(|status| status.code())
    }

    /// A process that is neither coordinator nor worker.
    pub fn process(&mut self, name: &str, args: &str) {
        self.start(name, args, "");
    }

    /// Steps in the coordinator's metrics.jsonl.
    pub fn steps(&self) -> usize {
        let text = std::fs::read_to_string(self.bench.path("out/metrics.jsonl")).unwrap_or_default();
        text.matches("\"event\":\"step\"").count()
    }

    /// Asserts that the run continued without one of these: it was lost, or others repeated its work after `step`, and
    /// it had no part in the last step.
    #[track_caller]
    pub fn assert_excluded(&self, names: &[&str], step: usize) {
        let events = finetune::report::read(&self.bench.path("out/metrics.jsonl")).unwrap();
        // A worker is called by its host and its process.
        let ids = names.iter().map(|name| self.children.iter().rfind(|(n, _)| n == name).unwrap().1.id());
        let ends: Vec<String> = ids.map(|id| format!("-{id}")).collect();
        let lost = |event: &Event| {
            let Event::Device(change) = event else { return false };
            change.what == What::Lost && ends.iter().any(|end| change.worker.ends_with(end))
        };
        let later = |event: &Event| match event {
            Event::Step(taken) if taken.step > step as u64 => taken.shared.clone(),
            _ => None,
        };
        let steps: Vec<_> = events.iter().filter_map(later).collect();
        let parts = |end: &String| {
            let devices = steps.last().map_or(&[][..], |last| &last.devices);
            devices
                .iter()
                .filter(|part| part.worker.ends_with(end))
                .map(|part| part.microbatches)
                .sum::<u64>()
        };
        let covered = steps.iter().any(|s| s.repeats > 0) && ends.iter().any(|end| parts(end) == 0);
        let missed = events.iter().any(lost) || covered;
        assert!(missed, "no event shows the loss of {names:?} after step {step}\n{}", self.all());
    }

    /// Waits until a process has said `text`.
    pub fn wait_for(&mut self, name: &str, text: &str) {
        let began = Instant::now();
        while !self.said(name).contains(text) {
            assert!(began.elapsed() < PATIENCE && self.is_running(name), "{name}: {text}\n{}", self.all());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[track_caller]
    pub fn wait_for_step(&mut self, step: usize) {
        let began = Instant::now();
        while self.steps() < step {
            let ended = self.child("coordinator").try_wait().unwrap();
            assert!(ended.is_none(), "the coordinator ended ({ended:?}) before step {step}\n{}", self.all());
            assert!(began.elapsed() < PATIENCE, "no step {step}\n{}", self.all());
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    /// Waits for the end of a process: its exit code.
    #[track_caller]
    pub fn end(&mut self, name: &str) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child(name).try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < PATIENCE, "{name} does not end\n{}", self.all());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all of these have ended, and asserts that each ends with that code. The first one that ends with another
    /// code fails the test at once, even if others still run.
    #[track_caller]
    pub fn all_end(&mut self, names: &[&str], code: i32) {
        let began = Instant::now();
        loop {
            let ends: Vec<_> = names.iter().map(|name| self.child(name).try_wait().unwrap()).collect();
            let good = ends.iter().flatten().all(|status| status.code() == Some(code));
            assert!(good, "{names:?} end with {ends:?}, not {code}\n{}", self.all());
            if ends.iter().all(Option::is_some) {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{names:?} do not all end: {ends:?}\n{}", self.all());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The output of all processes, for the message of a failure.
    pub fn all(&self) -> String {
        let mut names: Vec<&str> = self.children.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names.iter().map(|name| format!("--- {name}\n{}", self.said(name))).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (_, child) in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
