//! The pods of recipes/kubernetes without Kubernetes. Each is a host with the name that its engine gives it, an address
//! that changes with every start, the image's files, and the program as its first process. The manifest gives arguments,
//! variables and grace period.

use crate::cli_fixture::Bench;
use crate::cluster::{RUN, bench};
use crate::image::{Root, possible};
use crate::manifests::object;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The headless Service of every manifest, whose name is also that of its object.
const SERVICE: &str = "ft";
const PATIENCE: Duration = Duration::from_secs(300);
/// Within this time a worker hands its work back, and a coordinator saves (docs/guide.md).
const PROMISE: Duration = Duration::from_secs(20);

fn network(words: &str) {
    let out = Command::new("bash").args(["-ec", words]).output().unwrap();
    assert!(out.status.success(), "{words}: {}", String::from_utf8_lossy(&out.stderr));
}

struct Pod {
    /// `unshare`, whose only child is the first process of the pod.
    outer: Child,
    log: String,
}

impl Pod {
    fn signal(&mut self, signal: Signal) {
        if !matches!(self.outer.try_wait(), Ok(None)) {
            return; // another process may have its number now
        }
        let id = self.outer.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        // None: it has ended.
        let first = children.trim().parse().ok().and_then(Pid::from_raw);
        first.into_iter().for_each(|first| {
            let _ = kill_process(first, signal);
        });
    }

    /// As a kubelet does: SIGTERM, and SIGKILL at the end of the grace period.
    fn stop(&mut self, grace: Duration) -> (ExitStatus, Duration) {
        let began = Instant::now();
        self.signal(Signal::TERM);
        while began.elapsed() < grace {
            if let Some(status) = self.outer.try_wait().unwrap() {
                return (status, began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal(Signal::KILL);
        (self.outer.wait().unwrap(), began.elapsed())
    }
}

/// A pod of a manifest.
struct Template {
    host: String,
    /// Its index in its Indexed Job.
    index: usize,
    spec: Value,
}

/// The pods of one Job of a manifest: `NAME-0` and so on.
fn templates(name: &str, job: &Value, count: &Value) -> Vec<Template> {
    assert_eq!(job["completionMode"], "Indexed");
    let spec = &job["template"]["spec"];
    let pod = |index| Template { host: format!("{name}-{index}"), index, spec: spec.clone() };
    (0..count.as_u64().unwrap() as usize).map(pod).collect()
}

fn job_yaml() -> Vec<Template> {
    let job = object("job.yaml", "Job");
    let service = object("job.yaml", "Service");
    assert!(
        service["metadata"]["name"] == SERVICE && job["spec"]["template"]["spec"]["subdomain"] == SERVICE
    );
    templates(job["metadata"]["name"].as_str().unwrap(), &job["spec"], &job["spec"]["completions"])
}

/// JobSet names pods after the set, the replicated Job, its number and the pod's index.
fn jobset_yaml() -> Vec<Template> {
    let set = object("jobset.yaml", "JobSet");
    assert_eq!(set["metadata"]["name"], SERVICE);
    let jobs = set["spec"]["replicatedJobs"].as_array().unwrap();
    let pods = |job: &Value| {
        let spec = &job["template"]["spec"];
        templates(&format!("{SERVICE}-{}-0", job["name"].as_str().unwrap()), spec, &spec["completions"])
    };
    jobs.iter().flat_map(pods).collect()
}

/// The Trainer makes a JobSet, with the arguments of the TrainJob and variables of its policy `torch`.
fn trainer_yaml() -> Vec<Template> {
    let (runtime, job) =
        (object("trainer.yaml", "ClusterTrainingRuntime"), object("trainer.yaml", "TrainJob"));
    assert_eq!(runtime["metadata"]["name"], job["spec"]["runtimeRef"]["name"]);
    assert!(runtime["spec"]["mlPolicy"]["torch"].is_object() && job["metadata"]["name"] == SERVICE);
    let trainer = &job["spec"]["trainer"];
    let mut spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"].clone();
    let container = &mut spec["template"]["spec"]["containers"][0];
    container["args"] = trainer["args"].clone();
    let first = format!("{SERVICE}-node-0-0.{SERVICE}");
    for (name, value) in [
        ("PET_NNODES", trainer["numNodes"].to_string()),
        ("PET_MASTER_ADDR", first),
        ("PET_MASTER_PORT", "29500".into()),
    ] {
        container["env"].as_array_mut().unwrap().push(json!({ "name": name, "value": value }));
    }
    templates(&format!("{SERVICE}-node-0"), &spec, &trainer["numNodes"])
}

struct Job {
    bench: Bench,
    root: Root,
    templates: Vec<Template>,
    token: String,
    prefix: String,
    pods: Vec<Option<Pod>>,
    addresses: Vec<usize>,
    started: usize,
}

impl Job {
    /// A job without pods; `None` where they cannot be started.
    fn new(templates: Vec<Template>) -> Option<Self> {
        if !possible() {
            return None;
        }
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let bench = bench();
        let program = bench.command("").get_program().to_owned();
        let root = Root::new(bench.path("root"), program.as_ref());
        root.own(&bench.path("data"));
        std::fs::copy(bench.path("many.jsonl"), bench.path("data/many.jsonl")).unwrap();
        bench.ok("token --token-file token");
        for pod in &templates {
            assert_eq!(pod.spec["securityContext"]["fsGroup"], root.image.group);
        }
        let job = Job {
            token: std::fs::read_to_string(bench.path("token")).unwrap(),
            bench,
            root,
            prefix: format!("ftk{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed)),
            pods: templates.iter().map(|_| None).collect(),
            addresses: vec![0; templates.len()],
            templates,
            started: 0,
        };
        let switch = format!("{}-0", job.prefix);
        network(&format!(
            "ip netns add {switch}; ip -n {switch} link add br0 type bridge; ip -n {switch} link set br0 up"
        ));
        Some(job)
    }

    /// Addresses of all pods that have one. The file changes in place, as answers of a name server do.
    fn names(&self) {
        let line = |(pod, address): (&Template, &usize)| match address {
            0 => String::new(),
            _ => format!("10.78.0.{address} {}.{SERVICE} {}\n", pod.host, pod.host),
        };
        let names: String = self.templates.iter().zip(&self.addresses).map(line).collect();
        self.bench.file("hosts", &format!("127.0.0.1 localhost\n{names}"));
    }

    /// Starts a pod, or its replacement. Variables without a value are taken away.
    fn start(&mut self, nth: usize, variables: &[(&str, Option<&str>)]) {
        self.started += 1;
        let (number, switch) = (self.started, format!("{}-0", self.prefix));
        self.addresses[nth] = number + 1;
        self.names();
        let own = format!("{}-{number}", self.prefix);
        network(&format!(
            "ip netns add {own}; ip link add v{number} netns {switch} type veth peer name eth0 netns {own}
            ip -n {switch} link set v{number} master br0 up; ip -n {own} addr add 10.78.0.{}/24 dev eth0
            ip -n {own} link set eth0 up",
            number + 1
        ));
        let mut command = self.container(&self.templates[nth], &own);
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let log = format!("pod-{nth}-{number}.log");
        let file = std::fs::File::create(self.bench.path(&log)).unwrap();
        command.stdout(file.try_clone().unwrap()).stderr(file).stdin(std::process::Stdio::null());
        self.pods[nth] = Some(Pod { outer: command.spawn().unwrap(), log });
    }

    /// What the manifest says of a pod, and what its engine adds.
    fn container(&self, pod: &Template, network: &str) -> Command {
        let container = &pod.spec["containers"][0];
        let work = container["workingDir"].as_str().unwrap_or(&self.root.image.work);
        let mut command = self.root.container(network, &self.bench.path("data"), work);
        command.env("HOSTNAME", &pod.host).env("JOB_COMPLETION_INDEX", pod.index.to_string());
        for variable in container["env"].as_array().unwrap() {
            let secret = &variable["valueFrom"]["secretKeyRef"]["name"];
            let value = variable["value"].as_str().unwrap_or_else(|| {
                assert_eq!(secret, "finetune-token");
                self.token.trim()
            });
            command.env(variable["name"].as_str().unwrap(), value);
        }
        if let Some(words) = container["args"].as_array() {
            let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
            assert_eq!(words[..3], ["owner/model", "--data", "rows.jsonl"]);
            command.args(RUN.split(' ')).args(&words[3..]);
        }
        command
    }

    fn pod(&mut self, index: usize) -> &mut Pod {
        self.pods[index].as_mut().unwrap()
    }

    /// Every pod ends well, and the adapter has the bytes of one process.
    #[track_caller]
    fn completes(&mut self) {
        for nth in 0..self.pods.len() {
            let status = self.pod(nth).outer.wait().unwrap();
            assert!(status.success(), "pod {nth}: {status}\n{}", self.said(nth));
        }
        self.bench.same_adapter("alone", "data/runs/ft");
    }

    fn grace(&self) -> Duration {
        Duration::from_secs(self.templates[0].spec["terminationGracePeriodSeconds"].as_u64().unwrap())
    }

    fn said(&self, index: usize) -> String {
        let log = &self.pods[index].as_ref().unwrap().log;
        String::from_utf8_lossy(&self.bench.read(log)).into_owned()
    }

    #[track_caller]
    fn wait(&self, moment: &str, is_there: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_there() {
            let all = || (0..self.pods.len()).filter(|i| self.pods[*i].is_some()).map(|i| self.said(i));
            assert!(began.elapsed() < PATIENCE, "{moment}\n{}", all().collect::<Vec<_>>().join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the run has finished that many steps.
    #[track_caller]
    fn step(&self, steps: usize) {
        let log = self.bench.path("data/runs/ft/metrics.jsonl");
        let done = || std::fs::read_to_string(&log).unwrap_or_default().matches("\"event\":\"step\"").count();
        self.wait(&format!("step {steps}"), || done() >= steps);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for mut pod in self.pods.drain(..).flatten() {
            // Its first process may not be there yet.
            while matches!(pod.outer.try_wait(), Ok(None)) {
                pod.signal(Signal::KILL);
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        for number in 0..=self.started {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}-{number}", self.prefix)]).output();
        }
    }
}

const SLOW: [(&str, Option<&str>); 1] = [("FINETUNE_INJECT", Some("slow=20"))];

/// Every index is lost once, each in another way, and comes back under its name with another address.
#[test]
fn replaced_pods_of_an_indexed_job_change_no_byte() {
    let Some(mut job) = Job::new(job_yaml()) else { return };
    job.bench.ok(&format!("{RUN} --gpus cpu -q -o alone"));
    [3, 2, 1, 0].into_iter().for_each(|index| job.start(index, &SLOW));
    job.step(1);
    assert!(job.said(0).contains("Indexed Job ft, task 0"), "{}", job.said(0));
    assert!(job.said(3).contains("works for ft-0.ft:9000"), "{}", job.said(3));

    job.pod(1).signal(Signal::KILL);
    job.pod(1).outer.wait().unwrap();
    job.start(1, &SLOW);
    job.step(2);

    // Code 0 would complete the index, and it would have no pod for the rest of the run.
    let grace = job.grace();
    let (status, took) = job.pod(2).stop(grace);
    assert!(status.code() == Some(75) && took < PROMISE, "{status} after {took:?}\n{}", job.said(2));
    job.start(2, &SLOW);
    job.step(3);

    // A pod that hangs is killed at the end of its grace.
    job.pod(3).signal(Signal::STOP);
    let (_, took) = job.pod(3).stop(Duration::from_secs(1));
    assert!(took >= Duration::from_secs(1), "{}", job.said(3));
    job.start(3, &SLOW);
    job.step(4);

    job.pod(0).signal(Signal::KILL);
    job.pod(0).outer.wait().unwrap();
    job.start(0, &SLOW);
    job.step(6);
    let (status, took) = job.pod(0).stop(grace);
    assert!(status.code() == Some(75) && took < PROMISE, "{status} after {took:?}\n{}", job.said(0));
    job.start(0, &[]);
    job.completes();
}

#[test]
fn pods_of_jobset_and_trainer_give_the_bytes_of_one_process() {
    for (manifest, worker) in [(jobset_yaml(), "ft-workers-0-2"), (trainer_yaml(), "ft-node-0-3")] {
        let Some(mut job) = Job::new(manifest) else { return };
        job.bench.ok(&format!("{RUN} --gpus cpu -q -o alone"));
        assert_eq!(job.pods.len(), 4);
        [3, 2, 1, 0].into_iter().for_each(|nth| job.start(nth, &SLOW));
        job.step(1);
        // A worker that is drained; code 0 would be the end of its index.
        let grace = job.grace();
        let (status, took) = job.pod(3).stop(grace);
        assert!(status.code() == Some(75) && took < PROMISE, "{status} after {took:?}\n{}", job.said(3));
        job.start(3, &SLOW);
        job.completes();
        assert!(job.said(0).contains(&format!("joined   {worker}")), "{}", job.said(0));
    }
}

/// The system discards SIGTERM for the first process of a pod unless the program handles it.
#[test]
fn pod_that_is_stopped_before_the_run_ends_at_once() {
    let Some(mut job) = Job::new(job_yaml()) else { return };
    let grace = job.grace();
    // The Secret has not come: it waits for a token.
    job.start(1, &[("FINETUNE_TOKEN", None)]);
    job.wait("a role", || job.said(1).contains("works for ft-0.ft:9000"));
    let (status, took) = job.pod(1).stop(grace);
    assert!(status.code() == Some(143) && took < PROMISE / 4, "{status} after {took:?}\n{}", job.said(1));
    // The other pods have not come.
    job.start(0, &[]);
    job.wait("an open port", || job.said(0).contains("listens on"));
    let (status, took) = job.pod(0).stop(grace);
    assert!(status.code() == Some(75) && took < PROMISE / 4, "{status} after {took:?}\n{}", job.said(0));
}
