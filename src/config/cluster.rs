//! The `cluster` group. Valid combinations of options depend on the role; an invalid combination is refused where it
//! was typed as a flag. A file or the environment may contain options of another role, so that one file is valid for
//! every machine of a run.

use super::refusal::Refusal;
use super::settings::Settings;
use super::typed::Origin;
use super::values::{choice, duration, filled, whole};
use crate::model::wire::Wire;
use crate::net::Endpoint;
use std::path::PathBuf;
use std::time::Duration;

/// Role of this process in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A run in this process.
    Single,
    /// Reads the data, assigns work, steps the optimizer.
    Coordinator,
    /// Computes for a coordinator.
    Worker,
}

/// What has to be there before the first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// This many devices.
    Devices(usize),
    /// This many processes, each with at least one device. Engines count processes.
    Tasks(usize),
}

impl Expect {
    /// The number.
    pub fn count(self) -> usize {
        match self {
            Expect::Devices(n) | Expect::Tasks(n) => n,
        }
    }
}

/// Address of a worker's coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Coordinator {
    /// At this address.
    At(Endpoint),
    /// In the local network, found by the fingerprint of the shared token.
    Auto,
}

/// How workers hold the model together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stages {
    /// As few workers as have room for the model.
    Auto,
    /// That many workers.
    Count(usize),
    /// As many workers as numbers, each with that many layers.
    Layers(Vec<usize>),
}

/// Most workers that hold a model together.
const MOST_STAGES: usize = 64;

impl std::fmt::Display for Stages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stages::Auto => f.write_str("auto"),
            Stages::Count(count) => write!(f, "{count}"),
            Stages::Layers(counts) => {
                f.write_str(&counts.iter().map(usize::to_string).collect::<Vec<_>>().join("+"))
            }
        }
    }
}

impl std::str::FromStr for Stages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Stages::Auto);
        }
        let numbers: Result<Vec<usize>, _> = text.split('+').map(|n| n.trim().parse()).collect();
        match numbers.as_deref() {
            Ok([count]) if (1..=MOST_STAGES).contains(count) => Ok(Stages::Count(*count)),
            Ok([_, _, ..]) if numbers.iter().flatten().all(|n| *n > 0) => {
                let layers = numbers.unwrap_or_default();
                match layers.len() {
                    0..=MOST_STAGES => Ok(Stages::Layers(layers)),
                    _ => Err(format!("at most {MOST_STAGES} workers hold a model together")),
                }
            }
            _ => Err(format!(
                "expected auto, a number of workers (1 to {MOST_STAGES}), or layers of each, as 20+12"
            )),
        }
    }
}

/// `--relays`: whether workers add parts of the sums for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relays {
    /// Where measured networks and waits say that steps are shorter with them.
    Auto,
    /// From two workers on.
    Always,
    /// Every sum goes to the coordinator.
    Never,
}

/// `cluster`
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterOptions {
    /// Role of this process.
    pub role: Role,
    /// Listening address: a coordinator always listens (`None`: the default port on all interfaces), a worker only
    /// where a coordinator connects to it.
    pub bind: Option<Endpoint>,
    /// The coordinator that a worker connects to; always `Some` for a worker without `bind`.
    pub coordinator: Option<Coordinator>,
    /// Workers that a coordinator connects to.
    pub nodes: Vec<Endpoint>,
    /// What a coordinator waits for before the first step, local and remote.
    pub expect_workers: Option<Expect>,
    /// The run pauses below this number of devices.
    pub min_workers: usize,
    /// Time limit for devices to join, and for connecting to a coordinator.
    pub join_timeout: Duration,
    /// How workers hold the model together; `None` where each holds all of it.
    pub stages: Option<Stages>,
    /// How hidden states go between workers that hold the model together.
    pub wire: Wire,
    /// Share of the microbatches that another worker computes again, 0 to 1.
    pub verify: f64,
    /// Whether workers add parts of the sums for each other.
    pub relays: Relays,
    /// Path of the token.
    pub token_file: Option<PathBuf>,
    /// Plain TCP on this machine, without a token.
    pub insecure: bool,
    /// Folder of base models by content hash.
    pub model_cache: Option<PathBuf>,
    /// Whether a worker waits for the next run.
    pub stay: bool,
    /// Whether an engine started this process (`--role auto`): its command line is that of all tasks.
    pub engine: bool,
}

impl ClusterOptions {
    /// Whether workers may be relays in a run with this delay. Checked work, lines and delayed steps have none.
    pub fn relays_with(&self, delay: u64) -> Relays {
        match self.verify > 0.0 || self.stages.is_some() || delay > 0 {
            true => Relays::Never,
            false => self.relays,
        }
    }
}

/// Options of a single role.
const OF_ONE_ROLE: &[(&str, Role)] = &[
    ("coordinator", Role::Worker),
    ("model-cache", Role::Worker),
    ("stay", Role::Worker),
    ("nodes", Role::Coordinator),
    ("expect-workers", Role::Coordinator),
    ("min-workers", Role::Coordinator),
    ("stages", Role::Coordinator),
    ("wire", Role::Coordinator),
    ("verify", Role::Coordinator),
    ("relays", Role::Coordinator),
];

/// Options that show a run; a worker knows only its own work.
const NOT_OF_WORKERS: [&str; 3] = ["dashboard", "tensorboard", "log-json"];

/// Options that a run in one process does not have.
const OF_TWO_ROLES: [&str; 4] = ["bind", "join-timeout", "token-file", "insecure"];

/// Reads the `cluster` group and checks its options against the role.
pub fn cluster(s: &Settings) -> Result<ClusterOptions, Refusal> {
    let role = match choice(
        s,
        "role",
        &["single", "coordinator", "worker"],
        "expected single, coordinator, worker or auto",
    )? {
        "coordinator" => Role::Coordinator,
        "worker" => Role::Worker,
        _ => Role::Single,
    };
    let endpoint = |name: &str| match s.text(name)? {
        Some(text) => text.parse::<Endpoint>().map(Some).map_err(|e| s.malformed(name, e.to_string())),
        None => Ok(None),
    };
    let coordinator = match s.text("coordinator")? {
        Some("auto") => Some(Coordinator::Auto),
        _ => endpoint("coordinator")?.map(Coordinator::At),
    };
    let node = |v: &String| v.parse::<Endpoint>().map_err(|e| s.malformed("nodes", e.to_string()));
    let options = ClusterOptions {
        role,
        bind: endpoint("bind")?,
        coordinator,
        nodes: s.list("nodes").iter().map(node).collect::<Result<_, _>>()?,
        expect_workers: expect(s)?,
        min_workers: filled(s, "min-workers", whole(s, "min-workers", 1)?)?,
        join_timeout: filled(s, "join-timeout", duration(s, "join-timeout")?)?,
        stages: stages(s)?,
        wire: wire(s)?,
        verify: share(s, "verify")?,
        relays: relays(s)?,
        token_file: s.text("token-file")?.map(PathBuf::from),
        insecure: s.switch("insecure")?,
        model_cache: s.text("model-cache")?.map(PathBuf::from),
        stay: s.switch("stay")?,
        engine: s.get("role").is_some_and(|role| matches!(role.source, Origin::Computed(_))),
    };
    if !options.engine {
        fits_the_role(s, role)?;
    }
    goes_together(s, &options)?;
    Ok(options)
}

fn expect(s: &Settings) -> Result<Option<Expect>, Refusal> {
    let name = "expect-workers";
    let Some(count) = s.text(name)?.and_then(|text| text.trim().strip_suffix("tasks")) else {
        return Ok(whole(s, name, 1)?.map(Expect::Devices));
    };
    match count.trim().parse() {
        Ok(count) if count > 0 => Ok(Some(Expect::Tasks(count))),
        _ => Err(s.malformed(name, "expected a number of devices, or of processes, as 4 tasks".into())),
    }
}

/// One stage is the whole model.
fn stages(s: &Settings) -> Result<Option<Stages>, Refusal> {
    let Some(text) = s.text("stages")? else { return Ok(None) };
    let stages = text.parse::<Stages>().map_err(|e| s.malformed("stages", e))?;
    Ok(Some(stages).filter(|stages| *stages != Stages::Count(1)))
}

fn wire(s: &Settings) -> Result<Wire, Refusal> {
    Ok(match choice(s, "wire", &["f32", "bf16"], "expected f32 or bf16")? {
        "bf16" => Wire::Bf16,
        _ => Wire::F32,
    })
}

fn relays(s: &Settings) -> Result<Relays, Refusal> {
    let words = ["auto", "always", "never"];
    Ok(match choice(s, "relays", &words, "expected auto, always or never")? {
        "always" => Relays::Always,
        "never" => Relays::Never,
        _ => Relays::Auto,
    })
}

/// A share: 2% or 0.02.
fn share(s: &Settings, name: &str) -> Result<f64, Refusal> {
    let text = filled(s, name, s.text(name)?)?.trim();
    let (number, of) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    match number.trim().parse::<f64>() {
        Ok(n) if (0.0..=of).contains(&n) => Ok(n / of),
        _ => Err(s.malformed(name, "expected a share: 0 to 100%, or 0 to 1".into())),
    }
}

fn typed(s: &Settings, name: &str) -> bool {
    s.get(name).is_some_and(|v| v.source == Origin::Flag)
}

fn fits_the_role(s: &Settings, role: Role) -> Result<(), Refusal> {
    for (name, owner) in OF_ONE_ROLE {
        if typed(s, name) && *owner != role {
            let owner = if *owner == Role::Worker { "worker" } else { "coordinator" };
            return Err(s.refuse(name, format!("only for --role {owner}")));
        }
    }
    if let (Role::Worker, Some(name)) = (role, NOT_OF_WORKERS.iter().find(|name| typed(s, name))) {
        return Err(s.refuse(name, "a worker has no run to show; give it to the coordinator"));
    }
    match OF_TWO_ROLES.iter().find(|name| typed(s, name)) {
        Some(name) if role == Role::Single => {
            Err(s.refuse(name, "only for --role coordinator and --role worker; a single run has no network"))
        }
        _ => Ok(()),
    }
}

/// Every microbatch goes through a line, or the result would depend on who computes it.
fn wire_fits(s: &Settings, o: &ClusterOptions) -> Result<(), Refusal> {
    let computes = s.is_given("gpus") && s.list("gpus") != ["none"];
    let why = match o.stages {
        None => "only between workers that hold the model together: give --stages too, or leave it out",
        Some(Stages::Auto) => {
            "--stages auto may give a worker the whole model, which rounds nothing: give the number of workers, as --stages 2"
        }
        Some(_) if computes => {
            "the coordinator's own devices (--gpus) hold the whole model and round nothing: leave one out"
        }
        Some(_) => return Ok(()),
    };
    Err(s.refuse("wire", why))
}

/// Where relays are not used, they cannot be demanded.
fn relays_fit(s: &Settings, o: &ClusterOptions) -> Result<(), Refusal> {
    let why = match o.relays {
        Relays::Auto | Relays::Never => return Ok(()),
        Relays::Always if o.role == Role::Single => {
            "one process computes everything here: only --role coordinator has workers"
        }
        Relays::Always if o.verify > 0.0 => {
            "a relay could change a total after its parts were checked (--verify): leave one of both out"
        }
        Relays::Always if o.stages.is_some() => {
            "workers that hold the model together (--stages) send their own parts: leave one of both out"
        }
        Relays::Always => return Ok(()),
    };
    Err(s.refuse("relays", why))
}

fn goes_together(s: &Settings, o: &ClusterOptions) -> Result<(), Refusal> {
    if o.role == Role::Worker && o.coordinator.is_none() && o.bind.is_none() {
        let way = "a worker needs --coordinator HOST:PORT (or auto), or --bind :9001 to be dialled";
        return Err(Refusal::configuration(format!("--role worker: {way}")));
    }
    if o.role == Role::Worker && o.coordinator.is_some() && typed(s, "bind") {
        return Err(
            s.refuse("bind", "a worker either dials (--coordinator) or is dialled (--bind), not both")
        );
    }
    if o.verify > 0.0 && o.role == Role::Single {
        let why =
            "one process computes everything here: only --role coordinator has workers that check each other";
        return Err(s.refuse("verify", why));
    }
    if o.verify > 0.0 && o.stages.is_some() {
        return Err(s.refuse(
            "verify",
            "workers that hold the model together (--stages) are not checked; leave one out",
        ));
    }
    relays_fit(s, o)?;
    if o.wire == Wire::Bf16 && o.role == Role::Coordinator {
        wire_fits(s, o)?;
    }
    let far = |e: &Endpoint| !e.is_loopback();
    let plain = "is not this machine, and --insecure (plain TCP) stays on it; leave --insecure out";
    match (&o.bind, &o.coordinator) {
        _ if !o.insecure || o.role == Role::Single => {}
        (Some(e), _) if far(e) => return Err(s.refuse("bind", format!("{e} {plain}"))),
        (_, Some(Coordinator::At(e))) if far(e) => {
            return Err(s.refuse("coordinator", format!("{e} {plain}")));
        }
        (_, Some(Coordinator::Auto)) => {
            return Err(s.refuse("coordinator", "auto finds a token's fingerprint; --insecure has none"));
        }
        _ if o.nodes.iter().any(far) => return Err(s.refuse("nodes", format!("one {plain}"))),
        _ => {}
    }
    if let Some(n) = o.coordinator_port_zero() {
        return Err(s.refuse(n, "port 0 cannot be dialled"));
    }
    match o.expect_workers {
        Some(Expect::Devices(expected)) if expected < o.min_workers => Err(
            s.refuse("expect-workers", format!("{expected} are fewer than --min-workers {}", o.min_workers))
        ),
        _ => Ok(()),
    }
}

impl ClusterOptions {
    fn coordinator_port_zero(&self) -> Option<&'static str> {
        match &self.coordinator {
            Some(Coordinator::At(e)) if e.port == 0 => Some("coordinator"),
            _ => self.nodes.iter().any(|e| e.port == 0).then_some("nodes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Typed, table::TABLE};

    fn of(words: &str, source: Origin) -> Result<ClusterOptions, Refusal> {
        let typed = words.split_whitespace().map(|w| {
            let (key, value) = w.split_once('=').unwrap();
            Typed { key: key.replace('-', "_"), values: vec![value.into()], source: source.clone() }
        });
        let options: Vec<_> = TABLE.iter().collect();
        cluster(&Settings::resolve(&options, vec![typed.collect()])?)
    }

    /// Checks the exit code of these flags and a part of the line; 0 means accepted.
    fn check(words: &str, code: u8, part: &str) {
        let (c, line) = of(words, Origin::Flag).map_or_else(|e| (e.code(), e.line), |_| (0, String::new()));
        assert_eq!(c, code, "{words}: {line}");
        assert!(line.contains(part), "{words}: {line}");
    }

    #[test]
    fn bf16_goes_between_workers_of_a_line_only() {
        check("role=coordinator stages=2 wire=bf16", 0, "");
        check("role=coordinator stages=2 gpus=cpu wire=f32", 0, "");
        check("role=coordinator stages=2 wire=f16", 78, "expected f32 or bf16");
        check("role=coordinator wire=bf16", 78, "--wire: only between workers that hold the model together");
        check("role=coordinator stages=1 wire=bf16", 78, "--wire: only between workers");
        check("role=coordinator stages=auto wire=bf16", 78, "--wire: --stages auto may give a worker");
        check("role=coordinator stages=2 gpus=cpu wire=bf16", 78, "--wire: the coordinator's own devices");
        check("wire=bf16", 78, "--wire: only for --role coordinator");
        check("role=worker coordinator=h wire=bf16", 78, "--wire: only for --role coordinator");
    }

    #[test]
    fn role_options_are_checked_together() {
        check("role=coordinator expect-workers=3", 0, "");
        check("role=coordinator nodes=a:9001,b bind=:0", 0, "");
        check("role=coordinator insecure=true bind=127.0.0.1:0 nodes=localhost:1", 0, "");
        check("role=worker coordinator=host:9000 stay=true model-cache=c join-timeout=90s", 0, "");
        check("role=worker coordinator=auto", 0, "");
        check("role=worker bind=:9001", 0, "");
        for (expected, tasks) in [("4 tasks", 4), ("1tasks", 1)] {
            let o =
                of(&format!("role=coordinator expect-workers={}", expected.replace(' ', "")), Origin::Flag);
            assert_eq!(o.unwrap().expect_workers, Some(Expect::Tasks(tasks)));
        }
        check("role=coordinator expect-workers=0tasks", 2, "as 4 tasks");
        check("role=coordinator expect-workers=tasks", 2, "as 4 tasks");
        check("role=boss", 78, "expected single, coordinator, worker or auto");
        check("role=worker", 78, "needs --coordinator HOST:PORT");
        check("role=worker coordinator=h bind=:1", 78, "not both");
        check("role=worker coordinator=h nodes=a", 78, "--nodes: only for --role coordinator");
        check("role=worker coordinator=http://x", 2, "not a host");
        check("role=worker coordinator=h:0", 78, "port 0");
        check("role=worker coordinator=h insecure=true", 78, "h:9000 is not this machine");
        check("role=worker coordinator=auto insecure=true", 78, "--insecure has none");
        check("role=coordinator insecure=true bind=:9000", 78, "not this machine");
        check("role=coordinator insecure=true nodes=a", 78, "not this machine");
        check("role=coordinator nodes=a:b", 2, "not a port");
        check("role=coordinator stay=true", 78, "--stay: only for --role worker");
        check("role=worker coordinator=h dashboard=true", 78, "give it to the coordinator");
        check("role=coordinator stages=2", 0, "");
        check("role=coordinator stages=20+12", 0, "");
        check("role=coordinator stages=auto", 0, "");
        for wrong in ["0", "two", "3+0", "20+", "65", "1,2"] {
            check(&format!("role=coordinator stages={wrong}"), 2, "expected auto, a number of workers");
        }
        check("role=coordinator verify=2%", 0, "");
        for (text, share) in
            [("0", 0.0), ("0%", 0.0), ("2%", 0.02), ("0.02", 0.02), ("1", 1.0), ("100%", 1.0)]
        {
            assert_eq!(of(&format!("role=coordinator verify={text}"), Origin::Flag).unwrap().verify, share);
        }
        for wrong in ["2", "-1", "101%", "x", "%", "nan"] {
            check(&format!("role=coordinator verify={wrong}"), 2, "expected a share: 0 to 100%, or 0 to 1");
        }
        check("role=coordinator verify=2% stages=2", 78, "--verify: workers that hold the model together");
        check("role=coordinator verify=0 stages=2", 0, "");
        check("role=worker coordinator=h verify=2%", 78, "--verify: only for --role coordinator");
        check("verify=2%", 78, "--verify: only for --role coordinator");
        let line = of("verify=2%", Origin::File { path: "f".into(), line: 1 }).unwrap_err().line;
        assert!(line.contains("one process computes everything here"), "{line}");
        check("role=worker coordinator=h stages=2", 78, "--stages: only for --role coordinator");
        check("role=coordinator expect-workers=0", 78, "at least 1");
        check("role=coordinator expect-workers=2 min-workers=3", 78, "fewer than --min-workers 3");
        check("role=coordinator join-timeout=soon", 2, "not a duration");
        check("expect-workers=3", 78, "only for --role coordinator");
        check("coordinator=h:9000", 78, "only for --role worker");
        check("insecure=true", 78, "a single run has no network");
    }

    #[test]
    fn one_file_may_configure_every_role() {
        let file = Origin::Variable("X".into());
        for role in ["single", "coordinator", "worker"] {
            let words = "coordinator=h:9000 expect-devices=3 min-devices=2 nodes=w:1 stay=true bind=:9000 join-timeout=1h";
            let o = of(&format!("role={role} {words}"), file.clone()).unwrap();
            assert_eq!(o.join_timeout, Duration::from_secs(3600));
            assert_eq!((o.expect_workers, o.min_workers), (Some(Expect::Devices(3)), 2));
            assert_eq!(o.coordinator, Some(Coordinator::At("h:9000".parse().unwrap())));
        }
    }
}
