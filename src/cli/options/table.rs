//! The one table of options. A flag, its YAML key, its environment variable, its line in `--help` and its place
//! in run.yaml are all made from the row here; a row's name is written nowhere else but in the group that
//! reads it.

/// Headings of `--help`, sections of run.yaml, and the structs in `groups`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// What is trained on.
    Model,
    /// Rows.
    Data,
    /// The adapter.
    Lora,
    /// Steps.
    Optim,
    /// What computes.
    Devices,
    /// Which processes take part.
    Cluster,
    /// What is written and shown.
    Output,
    /// Options of one verb alone; never in a YAML file.
    Verb,
}

impl Section {
    /// Every section of a configuration file, in order.
    pub const ALL: [Section; 7] = [
        Section::Model,
        Section::Data,
        Section::Lora,
        Section::Optim,
        Section::Devices,
        Section::Cluster,
        Section::Output,
    ];

    /// Its YAML name and heading.
    pub fn name(self) -> &'static str {
        match self {
            Section::Model => "model",
            Section::Data => "data",
            Section::Lora => "lora",
            Section::Optim => "optim",
            Section::Devices => "devices",
            Section::Cluster => "cluster",
            Section::Output => "output",
            Section::Verb => "options",
        }
    }
}

/// What follows a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// One value.
    One(&'static str),
    /// Repeatable; nothing is split.
    Many(&'static str),
    /// Repeatable, and split at commas.
    Commas(&'static str),
    /// Nothing: present is true. `--no-NAME` exists where the default is true.
    Switch,
    /// Nothing, or `=VALUE`.
    Optional(&'static str),
}

/// One option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opt {
    /// The long flag; with underscores, the YAML key.
    pub name: &'static str,
    /// Where it belongs.
    pub section: Section,
    /// What it takes.
    pub takes: Takes,
    /// As it would be typed; empty where nothing, or something that depends on the model or the rows, is meant.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
}

const fn opt(
    section: Section,
    name: &'static str,
    takes: Takes,
    default: &'static str,
    help: &'static str,
) -> Opt {
    Opt { name, section, takes, default, help }
}

use Section::{Cluster, Data, Devices, Lora, Model, Optim, Output};
use Takes::{Commas, Many, One, Optional, Switch};

/// Every option of a training run.
#[rustfmt::skip]
pub const TABLE: &[Opt] = &[
    opt(Model, "model", One("MODEL"), "demo", "Hugging Face directory, .gguf file or Hub id (owner/name[@revision]); also the first argument"),
    opt(Model, "chat-template", One("FILE|chatml"), "", "Jinja chat template to use instead of the model's own"),
    opt(Model, "quantize", One("none|nf4|nf4-double|q8_0"), "", "put the weights of an unquantised base into blocks while it is loaded"),
    opt(Model, "base-id", One("ID"), "", "what the adapter's config names as its base (default: the Hub id, where one is known)"),

    opt(Data, "task", One("sft|classify"), "sft", "what is learnt: the supervised tokens of rows, or their label"),
    opt(Data, "data", Many("PATH"), "", "rows: a file (.jsonl, .json, .csv, .parquet), a folder with train / valid / test, or - for stdin"),
    opt(Data, "data-fields", Commas("FORM=ROW"), "", "names that the rows use for the fields of their form, as prompt=question,completion=answer"),
    opt(Data, "eval-data", Many("PATH"), "", "rows that are never trained on"),
    opt(Data, "eval-split", One("N|P%"), "", "hold this many rows (or this part: 5%, 0.05) of --data back for eval"),
    opt(Data, "max-seq-len", One("TOKENS"), "", "longer rows are cut (default: the smaller of 2048 and the model's)"),
    opt(Data, "packing", Switch, "true", "lay a step's rows into microbatches together; they do not see each other"),
    opt(Data, "no-shuffle", Switch, "false", "keep the rows in the order of the files"),
    opt(Data, "num-classes", One("N"), "", "classes of a classifier (default: as many as the rows have)"),
    opt(Data, "class-weights", Commas("W"), "", "weight of each class in the loss"),
    opt(Data, "max-dropped", One("N|P%"), "", "refuse data with more rows than this that have nothing to learn"),

    opt(Lora, "rank", One("R"), "16", "rank of the adapter"),
    opt(Lora, "alpha", One("A"), "32", "its scale is alpha / rank"),
    opt(Lora, "target-modules", Commas("NAME"), "all-linear", "projections that carry it, by suffix (q_proj,v_proj)"),
    opt(Lora, "dropout", One("P"), "0", "probability of dropping an input of the adapter"),
    opt(Lora, "rslora", Switch, "false", "scale alpha / sqrt(rank) instead"),
    opt(Lora, "init-adapter", One("DIR"), "", "go on from this PEFT adapter"),

    opt(Optim, "epochs", One("N"), "1", "passes over the rows"),
    opt(Optim, "max-steps", One("N"), "", "number of steps; wins over --epochs"),
    opt(Optim, "batch-size", One("ROWS"), "8", "rows per optimizer step, over all workers"),
    opt(Optim, "micro-batch-tokens", One("TOKENS|auto"), "", "size of one unit of work (default: by rows and batch, never by devices; auto: the fastest by what devices were measured to need, kept by a resume)"),
    opt(Optim, "learning-rate", One("LR"), "2e-4", "peak learning rate of AdamW"),
    opt(Optim, "lr-scheduler", One("NAME"), "cosine", "constant, linear or cosine"),
    opt(Optim, "warmup-steps", One("N|P%"), "3%", "steps of rising learning rate, or a percentage of all"),
    opt(Optim, "weight-decay", One("W"), "0", "decoupled weight decay"),
    opt(Optim, "max-grad-norm", One("NORM"), "1.0", "clip the gradient to this L2 norm; 0 does not clip"),
    opt(Optim, "seed", One("N"), "42", "fixes shuffle, initial adapter and dropout"),

    opt(Devices, "gpus", Commas("auto|none|cpu|0,1|NAME"), "auto", "which devices compute: indices of `finetune devices` (one twice is two devices), part of a name, cpu; auto: every card, else the CPU"),
    opt(Devices, "gpu-backend", One("auto|cuda|wgpu|cpu"), "auto", "what drives them; one that is named and missing is an error (cuda: taken only by name so far; cpu: indices are parts of the CPU)"),
    opt(Devices, "dtype", One("auto|f32|bf16"), "auto", "what products are computed in; auto: bf16 or f16 where the device is faster in it"),
    opt(Devices, "threads", One("N"), "", "threads of this process (default: the cores that it may use); never changes a result"),
    opt(Devices, "memory-limit", One("SIZE"), "", "keep to this much memory of each device (2GB, 1500MiB; default: what it has free)"),

    opt(Cluster, "role", One("single|coordinator|worker"), "single", "train alone; hand out work; or compute for a coordinator"),
    opt(Cluster, "bind", One("HOST:PORT"), "", "listen there (default: port 9000 on all interfaces); a worker: be dialled by --nodes"),
    opt(Cluster, "coordinator", One("HOST:PORT|auto"), "", "what a worker dials; auto finds it in the local network, by its token's fingerprint"),
    opt(Cluster, "nodes", Commas("HOST:PORT"), "", "workers that listen (--bind) and are dialled by the coordinator"),
    opt(Cluster, "expect-workers", One("N"), "", "begin when so many devices are there, local ones counted"),
    opt(Cluster, "min-workers", One("N"), "1", "pause below so many devices"),
    opt(Cluster, "join-timeout", One("TIME"), "10m", "how long devices are waited for, and a coordinator is dialled (90s, 10m, 1h)"),
    opt(Cluster, "token-file", One("FILE"), "", "where the token is (default: FINETUNE_TOKEN, then what `finetune token` keeps for this user)"),
    opt(Cluster, "insecure", Switch, "false", "plain TCP without a token, on this machine only"),
    opt(Cluster, "model-cache", One("DIR"), "", "where a worker keeps base models, by content hash"),
    opt(Cluster, "stay", Switch, "false", "a worker waits for the next run instead of leaving"),

    opt(Output, "output", One("DIR"), "", "folder of the run (default: runs/<model>-<n>, the first free n)"),
    opt(Output, "overwrite", Switch, "false", "replace what another run left in that folder"),
    opt(Output, "resume", Optional("DIR"), "", "go on from the last checkpoint of --output, or of this run"),
    opt(Output, "eval-steps", One("N"), "", "eval every N steps (always at the end)"),
    opt(Output, "save-steps", One("N"), "100", "checkpoint every N steps, and at the end; 0: only at the end, or when stopped"),
    opt(Output, "save-total-limit", One("N"), "", "keep the newest N checkpoints"),
    opt(Output, "sample-prompt", Many("TEXT"), "", "answer this before and after training"),
    opt(Output, "log-json", One("FILE"), "", "metrics.jsonl at another path"),
    opt(Output, "tensorboard", One("DIR"), "", "also write TensorBoard's event files, into DIR/<name of the run's folder>"),
    opt(Output, "dashboard", Optional("ADDR"), "", "show the run as a page on 127.0.0.1:9080, or there"),
    opt(Output, "quiet", Switch, "false", "no progress; errors only"),
    opt(Output, "config", One("FILE.yaml"), "", "options from a file, keys with underscores; a run.yaml will do"),
];

/// The option of that name (dashes).
pub fn find(name: &str) -> Option<&'static Opt> {
    TABLE.iter().find(|o| o.name == name)
}

impl Opt {
    /// The YAML key.
    pub fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// The environment variable.
    pub fn variable(&self) -> String {
        format!("FINETUNE_{}", self.key().to_uppercase())
    }
}
