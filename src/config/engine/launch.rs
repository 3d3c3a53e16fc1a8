//! The variables of each engine.

use crate::net::DEFAULT_PORT;

/// Ports of jobs that share a machine: this many from the default port on.
const PORTS: u64 = 1000;

/// The variables of this process.
pub struct Variables<'a>(pub &'a dyn Fn(&str) -> Option<String>);

/// A process among those that an engine started together.
#[derive(Debug, Default)]
pub struct Task {
    /// The job in words.
    pub job: String,
    /// Rank 0 coordinates.
    pub rank: usize,
    /// Number of tasks; `None`: the engine does not say.
    pub count: Option<usize>,
    /// Machine of rank 0.
    pub host: Option<String>,
    /// Port of rank 0.
    pub port: u16,
    /// Whether all tasks are on one machine.
    pub one_node: bool,
    /// Rank and number of the tasks on this machine.
    pub local: (usize, usize),
    /// Cores of this task.
    pub cpus: Option<usize>,
    /// Cards of all tasks on this machine.
    pub cards: Option<usize>,
}

type Read<T> = Result<T, String>;

impl Variables<'_> {
    /// A value that is not empty.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|text| !text.trim().is_empty())
    }

    fn number(&self, name: &str) -> Read<Option<usize>> {
        let number = |text: String| text.trim().parse().map_err(|_| format!("{name}={text} is not a number"));
        self.text(name).map(number).transpose()
    }

    fn needed(&self, name: &str) -> Read<usize> {
        self.number(name)?.ok_or_else(|| format!("{name} is not set"))
    }

    /// The first of these variables that is set.
    fn either(&self, names: [&'static str; 2]) -> &'static str {
        if self.text(names[0]).is_some() { names[0] } else { names[1] }
    }
}

/// The task that this process is, `None` if no engine has started it. An error is one line.
pub fn task(env: &Variables) -> Read<Option<Task>> {
    let has = |name| env.text(name).is_some();
    let task = match () {
        () if has("TORCHELASTIC_RUN_ID") && has("RANK") => torch(env),
        () if has("OMPI_COMM_WORLD_RANK") => open_mpi(env),
        // Slurm sets PMI_RANK too; hydra sets this one.
        () if has("PMI_RANK") && has("MPI_LOCALRANKID") => hydra(env),
        () if has("SLURM_PROCID") => slurm(env),
        () if has("JOB_COMPLETION_INDEX") => indexed_job(env),
        () if has("RANK") && has("WORLD_SIZE") => torch(env),
        () if has("PET_NODE_RANK") => trainer(env),
        () if has("PMI_RANK") => hydra(env),
        () if has("SKYPILOT_NODE_RANK") => skypilot(env),
        () => return Ok(None),
    }?;
    match task.count {
        Some(count) if task.rank >= count => {
            Err(format!("{}: task {} of {count}: ranks begin at 0", task.job, task.rank))
        }
        _ if task.local.0 >= task.local.1 => {
            let (rank, of) = task.local;
            Err(format!("{}: task {rank} of {of} on this machine: ranks begin at 0", task.job))
        }
        _ => Ok(Some(task)),
    }
}

fn slurm(env: &Variables) -> Read<Task> {
    let job = env.needed("SLURM_JOB_ID")?;
    let name = format!("Slurm job {job}");
    let Some(step) = env.number("SLURM_STEP_ID")? else {
        // A batch script has the variables of rank 0.
        return match env.number("SLURM_NTASKS")?.unwrap_or(1) {
            1 => Ok(Task { job: name, count: Some(1), local: (0, 1), ..Task::default() }),
            tasks => Err(format!(
                "{name} has {tasks} tasks, and srun has not started this one: put srun before it"
            )),
        };
    };
    let count = env.needed(env.either(["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]))?;
    let list = env.either(["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]);
    let nodes = env.text(list).ok_or_else(|| format!("{list} is not set"))?;
    let host = first_host(&nodes).ok_or_else(|| format!("{list}={nodes} is no list of nodes"))?;
    let per_node = env.text(env.either(["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]));
    let node = env.number("SLURM_NODEID")?.unwrap_or(0);
    let here = per_node.and_then(|counts| nth_count(&counts, node)).unwrap_or(1);
    let cpus = match env.number("SLURM_CPUS_PER_TASK")? {
        Some(cpus) => Some(cpus),
        None => env.number("SLURM_CPUS_ON_NODE")?.map(|cpus| cpus / here.max(1)),
    };
    Ok(Task {
        job: format!("{name} on {nodes}"),
        rank: env.needed("SLURM_PROCID")?,
        count: Some(count),
        host: Some(host),
        // Jobs of an array have numbers that follow each other.
        port: port(job * 7 + step),
        one_node: env.number("SLURM_STEP_NUM_NODES")? == Some(1),
        local: (env.number("SLURM_LOCALID")?.unwrap_or(0), here),
        cpus,
        cards: env.number("SLURM_GPUS_ON_NODE")?,
    }
    .here())
}

/// A pod of an Indexed Job, of a JobSet or of a Trainer. The coordinator's name is that of the pod with index 0, in the
/// Service with the Job's name.
fn indexed_job(env: &Variables) -> Read<Task> {
    let rank = env.needed("JOB_COMPLETION_INDEX")?;
    let pod = env.text("HOSTNAME").unwrap_or_default();
    let job = pod.strip_suffix(&format!("-{rank}"));
    Ok(Task {
        job: job.map_or("Indexed Job".into(), |job| format!("Indexed Job {job}")),
        rank,
        count: env.number("PET_NNODES")?,
        host: env.text("PET_MASTER_ADDR").or(job.map(|job| format!("{job}-0.{job}"))),
        port: DEFAULT_PORT,
        local: (0, 1),
        ..Task::default()
    })
}

/// torchrun, and programs with its variables. Its own port is taken, so ours is the next one.
fn torch(env: &Variables) -> Read<Task> {
    let count = env.needed("WORLD_SIZE")?;
    let here = env.number("LOCAL_WORLD_SIZE")?.unwrap_or(1);
    Ok(Task {
        job: env.text("TORCHELASTIC_RUN_ID").map_or("torchrun".into(), |id| format!("torchrun {id}")),
        rank: env.needed("RANK")?,
        count: Some(count),
        host: env.text("MASTER_ADDR"),
        port: next(env, "MASTER_PORT")?,
        one_node: here == count,
        local: (env.number("LOCAL_RANK")?.unwrap_or(0), here),
        ..Task::default()
    }
    .here())
}

/// Variables that Kubeflow's Trainer sets for torchrun, where torchrun itself is not used: one task per machine.
fn trainer(env: &Variables) -> Read<Task> {
    Ok(Task {
        job: "PyTorch job".into(),
        rank: env.needed("PET_NODE_RANK")?,
        count: Some(env.needed("PET_NNODES")?),
        host: env.text("PET_MASTER_ADDR"),
        port: next(env, "PET_MASTER_PORT")?,
        local: (0, 1),
        ..Task::default()
    })
}

fn open_mpi(env: &Variables) -> Read<Task> {
    mpi(
        "mpirun",
        env,
        ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"].map(|part| format!("OMPI_COMM_WORLD_{part}")),
    )
}

fn hydra(env: &Variables) -> Read<Task> {
    mpi("mpiexec", env, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"].map(String::from))
}

/// Rank, count and local ones; the machine of rank 0 is known only if it is this one.
fn mpi(job: &str, env: &Variables, [rank, size, local, here]: [String; 4]) -> Read<Task> {
    let count = env.needed(&size)?;
    let here = env.number(&here)?.unwrap_or(1);
    Ok(Task {
        job: job.into(),
        rank: env.needed(&rank)?,
        count: Some(count),
        port: DEFAULT_PORT,
        one_node: here == count,
        local: (env.number(&local)?.unwrap_or(0), here),
        ..Task::default()
    }
    .here())
}

fn skypilot(env: &Variables) -> Read<Task> {
    let addresses = env.text("SKYPILOT_NODE_IPS").unwrap_or_default();
    let job = env.text("SKYPILOT_TASK_ID").unwrap_or("task".into());
    Ok(Task {
        job: format!("SkyPilot {job}"),
        rank: env.needed("SKYPILOT_NODE_RANK")?,
        count: Some(env.needed("SKYPILOT_NUM_NODES")?),
        host: addresses.lines().next().map(|line| line.trim().to_string()),
        port: DEFAULT_PORT,
        local: (0, 1),
        ..Task::default()
    })
}

impl Task {
    /// Tasks of one machine use its loopback interface, whose name always resolves.
    fn here(self) -> Self {
        let host = if self.one_node { Some("127.0.0.1".into()) } else { self.host };
        Task { host, ..self }
    }
}

/// The port of a job.
fn port(job: usize) -> u16 {
    DEFAULT_PORT + (job as u64 % PORTS) as u16
}

/// The port after that in a variable, or the default one.
fn next(env: &Variables, name: &str) -> Read<u16> {
    let port = env.number(name)?.and_then(|port| u16::try_from(port + 1).ok());
    Ok(port.unwrap_or(DEFAULT_PORT))
}

/// The first host of a list of Slurm: `n[01-03,7]-ib,login` begins with `n01-ib`.
pub fn first_host(list: &str) -> Option<String> {
    let (mut host, mut rest) = (String::new(), list.trim());
    loop {
        let end = rest.find(['[', ',', ']']).unwrap_or(rest.len());
        host += &rest[..end];
        match rest[end..].chars().next() {
            Some('[') => {
                let (numbers, after) = rest[end + 1..].split_once(']')?;
                let first = numbers.split(['-', ',']).next()?;
                host += Some(first).filter(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))?;
                rest = after;
            }
            Some(']') => return None,
            _ => return Some(host).filter(|host| !host.is_empty()),
        }
    }
}

/// The count of node `at` in a list as `2(x3),1`.
pub fn nth_count(counts: &str, mut at: usize) -> Option<usize> {
    for part in counts.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        if at < times {
            return count.trim().parse().ok();
        }
        at -= times;
    }
    None
}
