//! A cluster of a test, and the run that all of them compute.

use crate::cli_fixture::{ADAPTER, Bench, rows};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Eight microbatches a step; dropout is on, so that a dependence on the computing task would change the result.
pub const RUN: &str = "demo --data many.jsonl --batch-size 24 --micro-batch-tokens 64 --rank 4 --dropout 0.1 --max-steps 8 --save-steps 2";

/// Upper bound on the time of any job here, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// What the shell runs as `finetune`: it leaves its process id, and takes its faults from a file.
const WRAPPER: &str = "#!/bin/bash\n\
    cd \"$BENCH\"\n\
    echo $$ > \"pids/$SLURM_JOB_ID.$SLURM_PROCID\"\n\
    faults=$(cat faults)\n\
    [ -z \"$faults\" ] || export FINETUNE_INJECT=$faults\n\
    exec \"$FINETUNE\" \"$@\"\n";

/// A folder with the run's rows, in which every command of a launcher runs.
pub fn bench() -> Bench {
    let bench = Bench::new();
    bench.file("many.jsonl", &rows(240));
    bench
}

/// A command of a launcher in the bench's folder, with a home of its own for the token.
pub fn launcher(bench: &Bench, words: &str) -> Command {
    let finetune = bench.command("");
    let mut command = Command::new("bash");
    command.current_dir(bench.path("")).args(["-c", words]);
    for (name, value) in finetune.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let path = format!("{}:{}", bench.path("bin").display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).env("HOME", bench.path("home")).env_remove("XDG_CONFIG_HOME");
    command.env("FINETUNE", finetune.get_program()).env("BENCH", bench.path(""));
    command
}

pub fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

pub struct Cluster {
    pub bench: Bench,
}

impl Cluster {
    /// Starts one with that many nodes; `None` without Slurm.
    pub fn start(nodes: usize) -> Option<Self> {
        let missing = ["slurmctld", "slurmd"].iter().any(|name| !Path::new("/usr/sbin").join(name).exists());
        if missing || !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("FINETUNE_NEED_SLURM").is_none(), "Slurm must be installed here");
            println!("skipped: needs root and Slurm (apt-get install slurm-wlm)");
            return None;
        }
        let cluster = Cluster { bench: bench() };
        for folder in ["pids", "home"] {
            std::fs::create_dir_all(cluster.bench.path(folder)).unwrap();
        }
        let wrapper = cluster.bench.file("bin/finetune", WRAPPER);
        std::fs::set_permissions(wrapper, std::fs::Permissions::from_mode(0o755)).unwrap();
        cluster.faults("");
        let out = cluster.script(&format!("{nodes} {}", ports(nodes + 1)));
        assert!(out.status.success(), "{}", said(&out));
        Some(cluster)
    }

    fn script(&self, words: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engines/cluster.sh");
        let words = format!("exec bash {} {} {words}", script.display(), self.bench.path("slurm").display());
        launcher(&self.bench, &words).output().unwrap()
    }

    fn command(&self, words: &str) -> Output {
        launcher(&self.bench, words).env("SLURM_CONF", self.bench.path("slurm/slurm.conf")).output().unwrap()
    }

    /// The faults of every `finetune` that starts from now on.
    pub fn faults(&self, faults: &str) {
        self.bench.file("faults", faults);
    }

    /// The run of one process.
    pub fn alone(&self) {
        self.bench.ok(&format!("{RUN} --gpus cpu -q -o alone"));
    }

    /// Runs to a good end and returns what was said.
    #[track_caller]
    pub fn srun(&self, words: &str, faults: &str) -> String {
        self.faults(faults);
        let out = self.command(&format!("timeout 240 srun {words}"));
        assert!(out.status.success(), "srun {words}: {:?}\n{}", out.status, said(&out));
        said(&out)
    }

    /// Submits a batch job and returns its number.
    #[track_caller]
    pub fn batch(&self, options: &str, rest: &str) -> u32 {
        let out = self.command(&format!("sbatch --parsable {options} {rest}"));
        let text = said(&out);
        text.trim().parse().unwrap_or_else(|_| panic!("sbatch {options} {rest}: {text}"))
    }

    /// Submits the recipe.
    #[track_caller]
    pub fn job(&self, options: &str, words: &str, faults: &str) -> u32 {
        self.faults(faults);
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/slurm/job.sbatch");
        self.batch(&format!("--cpus-per-task=1 {options}"), &format!("{} {words}", recipe.display()))
    }

    #[track_caller]
    pub fn scontrol(&self, words: &str) -> String {
        let out = self.command(&format!("scontrol {words}"));
        assert!(out.status.success(), "scontrol {words}: {}", said(&out));
        said(&out)
    }

    /// What the tasks of a job said.
    pub fn said(&self, job: u32) -> String {
        let entries = std::fs::read_dir(self.bench.path("")).unwrap().flatten();
        let own = |name: &String| name.starts_with(&format!("slurm-{job}")) && name.ends_with(".out");
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(own).collect();
        names.sort();
        names.iter().map(|name| String::from_utf8_lossy(&self.bench.read(name)).into_owned()).collect()
    }

    /// Waits for a moment of a job.
    #[track_caller]
    pub fn wait(&self, job: u32, moment: &str, is_there: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_there() {
            let state = || self.scontrol(&format!("show job {job}"));
            assert!(began.elapsed() < PATIENCE, "{moment}: {}\n{}", state(), self.said(job));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until a job has finished that many steps.
    #[track_caller]
    pub fn step(&self, job: u32, steps: usize) {
        let log = self.bench.path(&format!("runs/slurm-{job}/metrics.jsonl"));
        let done = || std::fs::read_to_string(&log).unwrap_or_default().matches("\"event\":\"step\"").count();
        self.wait(job, &format!("step {steps}"), || done() >= steps);
    }

    /// How often task 0 of a job has begun.
    pub fn starts(&self, job: u32) -> usize {
        self.said(job).matches("task 0 of").count()
    }

    /// The states and exit codes of a job, or of each of an array's, at its end.
    #[track_caller]
    pub fn end(&self, job: u32) -> String {
        let fields = |name: &str| -> Vec<String> {
            let text = self.scontrol(&format!("show job {job}"));
            let words = text.split_whitespace().filter_map(|word| word.strip_prefix(name)).map(String::from);
            words.collect()
        };
        let over = ["COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"];
        let ended = || fields("JobState=").iter().all(|state| over.contains(&state.as_str()));
        self.wait(job, "the end", ended);
        let pairs = fields("JobState=").into_iter().zip(fields("ExitCode="));
        pairs.map(|(state, code)| format!("{state} {code}")).collect::<Vec<_>>().join(" ")
    }

    fn pid(&self, job: u32, task: usize) -> i32 {
        let text = String::from_utf8(self.bench.read(&format!("pids/{job}.{task}"))).unwrap();
        text.trim().parse().unwrap()
    }

    /// Kills a task of a job.
    pub fn kill(&self, job: u32, task: usize) {
        kill(self.pid(job, task));
    }

    /// Kills the node of a task: its daemon, and every process of the task.
    pub fn kill_node(&self, job: u32, task: usize) {
        let file = format!("slurm/pid/slurmd.n{}", task + 1);
        kill(String::from_utf8(self.bench.read(&file)).unwrap().trim().parse().unwrap());
        // Its number may become another process's.
        std::fs::remove_file(self.bench.path(&file)).unwrap();
        let mut pid = self.pid(job, task);
        let mut all = vec![pid];
        while !text(pid, "comm").starts_with("slurmstepd") {
            let status = text(pid, "status");
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
            pid = parent.trim().parse().unwrap();
            assert!(pid > 1, "task {task} of job {job} is no child of Slurm");
            all.push(pid);
        }
        all.into_iter().rev().for_each(kill);
    }

    pub fn same_as_alone(&self, job: u32) {
        self.bench.same_adapter("alone", &format!("runs/slurm-{job}"));
    }

    /// The folders of runs.
    pub fn runs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.bench.path("runs")).unwrap().flatten();
        entries.map(|entry| format!("runs/{}", entry.file_name().to_string_lossy())).collect()
    }

    pub fn adapter(&self, run: &str) -> Vec<u8> {
        self.bench.read(&format!("{run}/{ADAPTER}"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.command("scancel --full --signal=KILL --user=root; scancel --user=root");
        self.script("stop");
    }
}

fn text(pid: i32, file: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    // A task that has just ended is gone too.
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// The first of that many free ports that follow each other, below those that the system gives out.
fn ports(count: usize) -> u16 {
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let start = 12_000 + (std::process::id() % 400) as u16 * 40;
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    loop {
        let nth = NEXT.fetch_add(8, std::sync::atomic::Ordering::Relaxed);
        let first = start + nth % 2000;
        if (first..first + count as u16).all(free) {
            return first;
        }
    }
}
