//! The table of options. A flag, its YAML key, its environment variable, its line in `--help` and its place in run.yaml
//! are generated from its row here; the only other place with the option's name is the group that reads it.

/// Headings of `--help`, sections of run.yaml, and the structs in `groups`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// The base model.
    Model,
    /// Rows.
    Data,
    /// The adapter.
    Lora,
    /// The training steps.
    Optim,
    /// The computing devices.
    Devices,
    /// The processes of a run.
    Cluster,
    /// Files and displays.
    Output,
    /// Options of a single verb; not valid in a YAML file.
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

/// Value of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// One value.
    One(&'static str),
    /// Repeatable; values are not split.
    Many(&'static str),
    /// Repeatable, and split at commas.
    Commas(&'static str),
    /// No value: the flag means true. `--no-NAME` exists where the default is true.
    Switch,
    /// No value, or `=VALUE`.
    Optional(&'static str),
}

/// One option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opt {
    /// Name of the flag; with underscores, the YAML key.
    pub name: &'static str,
    /// Section of the option.
    pub section: Section,
    /// Form of the value.
    pub takes: Takes,
    /// Default as it would be typed; empty where there is none or it depends on the model or the rows.
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
    opt(Model, "template-args", Many("NAME=VALUE"), "", "values for variables of the chat template: enable_thinking=false, or all as one JSON object; kept in the adapter's template"),
    opt(Model, "quantize", One("none|nf4|nf4-double|q8_0"), "", "quantise the weights of an unquantised base while it is loaded"),
    opt(Model, "base-id", One("ID"), "", "name of the base in the adapter's config (default: the Hub id, if known)"),

    opt(Data, "task", One("NAME"), "sft", "sft, classify, ner, regression, reward, dpo, orpo, cpo, simpo"),
    opt(Data, "data", Many("PATH[=WEIGHT]"), "", "rows: a file (.jsonl, .json, .csv, .tsv, .parquet), a folder with train / valid / test, owner/name[:SPLIT][@REVISION] of the Hub, or - for stdin; WEIGHT: its share of every epoch"),
    opt(Data, "data-fields", Commas("FIELD=COLUMN"), "", "fields of the rows: prompt=question,completion=answer reads `question` as the prompt"),
    opt(Data, "learn", One("answers|last|marked|all"), "answers", "what is trained on; answers: all answers; last: the last answer of a conversation; marked: only messages with `train: true`; all: prompts too"),
    opt(Data, "max-rows", One("N"), "", "read the first N rows of each --data and of each --eval-data, before --eval-split takes its part"),
    opt(Data, "drop-duplicates", Switch, "false", "leave out rows that equal an earlier row, in the rows to train on and in those to evaluate on"),
    opt(Data, "eval-data", Many("PATH"), "", "rows to evaluate on; NAME=PATH for each of several sets"),
    opt(Data, "eval-split", One("N|P%"), "", "rows of --data to evaluate on instead: a number, 5% or 0.05"),
    opt(Data, "max-seq-len", One("TOKENS"), "", "longer rows are cut (default: the smaller of 2048 and the model's)"),
    opt(Data, "long-rows", One("cut|split|drop|refuse"), "cut", "what happens to rows longer than --max-seq-len; cut: their end is cut off; split: they become several rows; drop: they are left out; refuse: an error"),
    opt(Data, "packing", Switch, "true", "put several rows into a microbatch; they do not attend to each other"),
    opt(Data, "shuffle", Switch, "true", "permute the rows in every epoch; --no-shuffle keeps the order of the files"),
    opt(Data, "num-classes", One("N"), "", "classes of a classifier (default: as many as the rows have)"),
    opt(Data, "class-weights", Commas("W"), "", "weight of each class in the loss"),
    opt(Data, "loss", One("NAME"), "", "loss of dpo (sigmoid, hinge, ipo, robust, apo_zero, apo_down, apo_zero_unpaired) or of cpo (sigmoid, hinge, ipo); default: sigmoid"),
    opt(Data, "beta", One("B"), "", "factor of the rewards of preferences; with orpo, weight of the odds ratio (default: 0.1)"),
    opt(Data, "label-smoothing", One("E"), "", "probability that chosen and rejected are exchanged, below 0.5 (--loss robust, cpo, simpo)"),
    opt(Data, "simpo-gamma", One("G"), "", "margin of simpo (default: 0.5)"),
    opt(Data, "nll-weight", One("W"), "", "weight of the chosen answers' mean loss, added to that of preferences (default: 1 for cpo, else 0; orpo has its own)"),
    opt(Data, "reference-adapter", One("DIR"), "", "adapter of dpo's reference model (default: none, the base model alone)"),
    opt(Data, "center-rewards-coefficient", One("C"), "", "weight of the squared sum of both rewards of a pair, with --task reward (default: 0)"),
    opt(Data, "max-dropped", One("N|P%"), "", "refuse data in which more rows than this have nothing to train on"),

    opt(Lora, "rank", One("R"), "16", "rank of the adapter"),
    opt(Lora, "alpha", One("A"), "", "numerator of the scale, alpha / rank (default: twice the rank; 32 with --rslora)"),
    opt(Lora, "target-modules", Commas("NAME"), "all-linear", "projections that get an adapter, by suffix (q_proj,v_proj), or a regular expression of their whole paths"),
    opt(Lora, "target-layers", Commas("N|A-B"), "", "numbers of the layers that get an adapter: 8-15,20; the first layer is 0 (default: all)"),
    opt(Lora, "exclude-modules", Commas("NAME"), "", "projections that get none, as in --target-modules (layers.0.self_attn.q_proj)"),
    opt(Lora, "rank-pattern", Many("NAME=R"), "", "another rank for some projections: a suffix, or a regular expression of the end of their paths"),
    opt(Lora, "alpha-pattern", Many("NAME=A"), "", "another alpha for some projections; without it they keep --alpha, at any rank"),
    opt(Lora, "train-tokens", Commas("TOKEN"), "", "tokens of the tokenizer whose rows of embedding and head are trained too: added or reserved ones, by their text"),
    opt(Lora, "add-tokens", Commas("TOKEN"), "", "add these tokens to the tokenizer and train their rows of embedding and head"),
    opt(Lora, "add-special-tokens", Commas("TOKEN"), "", "the same, as special tokens, which are not shown in answers"),
    opt(Lora, "dropout", One("P"), "0", "probability of dropping an input of the adapter"),
    opt(Lora, "rslora", Switch, "false", "divide alpha by sqrt(rank) instead of rank"),
    opt(Lora, "init-adapter", One("DIR"), "", "start from this PEFT adapter"),

    opt(Optim, "epochs", One("N"), "1", "passes over the rows"),
    opt(Optim, "max-steps", One("N"), "", "number of steps; overrides --epochs"),
    opt(Optim, "batch-size", One("ROWS"), "8", "rows per optimizer step, over all devices and microbatches"),
    opt(Optim, "micro-batch-tokens", One("TOKENS|auto"), "", "tokens of a microbatch (default: from the rows and the batch size; auto: the fastest size for the measured devices)"),
    opt(Optim, "learning-rate", One("LR"), "2e-4", "peak learning rate of AdamW"),
    opt(Optim, "lr-scheduler", One("NAME"), "cosine", "constant, linear, cosine, or wsd: constant until the last steps"),
    opt(Optim, "warmup-steps", One("N|P%"), "3%", "steps in which the learning rate rises, or a percentage of all steps"),
    opt(Optim, "min-lr", One("LR"), "0", "learning rate at the end of cosine and wsd"),
    opt(Optim, "decay-steps", One("N|P%"), "", "last steps, in which the learning rate of wsd falls (default: 10%)"),
    opt(Optim, "adam-beta1", One("B"), "0.9", "decay rate of AdamW's first moment"),
    opt(Optim, "adam-beta2", One("B"), "0.999", "decay rate of AdamW's second moment"),
    opt(Optim, "adam-epsilon", One("E"), "1e-8", "added to the root of AdamW's second moment"),
    opt(Optim, "loraplus-lr-ratio", One("R"), "1", "learning rate of every B over that of A (LoRA+)"),
    opt(Optim, "weight-decay", One("W"), "0", "decoupled weight decay"),
    opt(Optim, "max-grad-norm", One("NORM"), "1.0", "clip the gradient to this L2 norm; 0: no clipping"),
    opt(Optim, "seed", One("N"), "42", "seed of shuffle, initial adapter and dropout"),
    opt(Optim, "update-bits", One("N"), "0", "bits per value, 2 to 16, to which each step's change of the parameters is rounded: fewer bytes to workers; the rounding error is added to the next change; 0: changes are exact"),
    opt(Optim, "islands", One("N"), "0", "parts of each step that train apart: their parameters are averaged every --inner-steps steps, for workers far from each other; 0: every step is one of all microbatches"),
    opt(Optim, "inner-steps", One("N"), "16", "steps that islands take between two exchanges of parameters"),
    opt(Optim, "outer-learning-rate", One("LR"), "1", "factor of the mean change of islands at an exchange"),
    opt(Optim, "outer-momentum", One("M"), "0", "Nesterov momentum of the changes at exchanges of islands; 0: the plain mean"),
    opt(Optim, "delay", One("0|1"), "0", "1: step s is computed with the parameters after step s - 2, so that sums and parameters travel meanwhile, for slow networks"),
    opt(Optim, "sum-bits", One("N"), "0", "bits per value, 2 to 16, to which each microbatch's gradient is rounded at random before it is added: fewer bytes on slow networks; 0: exact sums"),

    opt(Devices, "gpus", Commas("auto|cpu|0,1|0+1|1/2|NAME"), "auto", "cpu, indices of `finetune devices` (0,0: device 0 twice; 0+1: one model in both), part of a name; 1/2: half of cards, cores and memory; auto: all cards, else the CPU"),
    opt(Devices, "gpu-backend", One("auto|cuda|wgpu|cpu"), "auto", "interface to the devices, an error if it is missing; auto: cuda if NVIDIA's cards of 8.0 or later are the only discrete ones, else wgpu; with cpu, the indices of --gpus are parts of the CPU"),
    opt(Devices, "dtype", One("auto|f32|bf16|portable"), "auto", "type in which products are computed; auto: bf16 or f16 if the device is faster in it; portable: f32 with the same bits on CPUs and GPUs"),
    opt(Devices, "threads", One("N"), "", "threads of this process (default: the cores that it may use); changes no result"),
    opt(Devices, "memory-limit", One("SIZE"), "", "memory that each device may use (2GB, 1500MiB; default: its free memory)"),
    opt(Devices, "offload", One("auto|never|N"), "auto", "layers that are read from the model's files in each pass instead of being kept in memory (auto: as few as make the model fit); changes no result"),

    opt(Cluster, "role", One("single|coordinator|worker|auto"), "single", "train alone; coordinate; compute for a coordinator; auto: from cluster variables"),
    opt(Cluster, "bind", One("HOST:PORT"), "", "address to listen on (default: port 9000 of all interfaces); a worker then waits for a coordinator with --nodes"),
    opt(Cluster, "coordinator", One("HOST:PORT|auto"), "", "coordinator to connect to; auto: found in the local network by the token's fingerprint"),
    opt(Cluster, "nodes", Commas("HOST:PORT"), "", "workers that listen (--bind), to which the coordinator connects"),
    opt(Cluster, "expect-workers", One("N|N tasks"), "", "devices to wait for, local ones included, or processes (4 tasks); also --expect-devices"),
    opt(Cluster, "min-workers", One("N"), "1", "pause below this many devices; also --min-devices"),
    opt(Cluster, "join-timeout", One("TIME"), "10m", "how long to wait for devices, or for the coordinator (90s, 10m, 1h)"),
    opt(Cluster, "stages", One("auto|N|20+12"), "", "divide the model's layers among workers; auto: as few workers as have the memory; N: N workers; 20+12: 20 layers and 12; without numbers of layers, speed, memory and network of each worker decide"),
    opt(Cluster, "wire", One("f32|bf16"), "f32", "type of the numbers between workers with --stages; bf16 halves their bytes, and the result then depends on where the layers are divided"),
    opt(Cluster, "verify", One("P"), "0", "share of the microbatches that another worker computes again before they count (2% or 0.02); finds wrong and lying workers"),
    opt(Cluster, "relays", One("auto|always|never"), "auto", "workers add parts of the sums for each other and pass on parts of the parameters, so that the coordinator's network carries less; auto: from three workers on, where steps get shorter. No bit depends on it"),
    opt(Cluster, "token-file", One("FILE"), "", "file of the token (default: FINETUNE_TOKEN, then the file of `finetune token`)"),
    opt(Cluster, "insecure", Switch, "false", "plain TCP without a token, on this machine only"),
    opt(Cluster, "model-cache", One("DIR"), "", "folder in which a worker keeps base models, by content hash"),
    opt(Cluster, "stay", Switch, "false", "let a worker wait for the next run instead of ending"),

    opt(Output, "output", One("DIR"), "", "folder of the run (default: runs/<model>-<n>, the first free n)"),
    opt(Output, "overwrite", Switch, "false", "replace the run that is in that folder"),
    opt(Output, "resume", Optional("DIR"), "", "continue from the newest checkpoint of --output, or of run DIR"),
    opt(Output, "eval-steps", One("N|epoch|P%"), "", "evaluate every N steps, epoch, epoch/4 or P%, and at the end"),
    opt(Output, "save-steps", One("N|epoch|P%"), "100", "save a checkpoint every N steps, each epoch or every P% of all steps, and at the end; 0: only at the end, or when stopped"),
    opt(Output, "save-total-limit", One("N"), "", "keep the newest N checkpoints, and the best one (--keep-best)"),
    opt(Output, "keep-best", Switch, "false", "keep the adapter of the best evaluation as the result"),
    opt(Output, "best-metric", One("[NAME_]loss|accuracy|macro_f1|f1"), "loss", "metric that decides which evaluation is the best; of the first set of --eval-data, or of the named one (code_loss)"),
    opt(Output, "early-stopping", One("N"), "", "end the run after N evaluations in a row without an improvement; 0: never"),
    opt(Output, "token-accuracy", Switch, "false", "count in each evaluation how many supervised tokens are the most probable ones; the output layer is computed twice"),
    opt(Output, "sample-prompt", Many("TEXT"), "", "prompt to answer before and after training; repeatable"),
    opt(Output, "sample-rows", One("N"), "0", "answer the first N rows of the evaluation before and after training, and count exact matches"),
    opt(Output, "log-json", One("FILE"), "", "another path for metrics.jsonl; - prints the events on standard output too"),
    opt(Output, "tensorboard", One("DIR"), "", "folder for TensorBoard's event files; each run gets its own in it"),
    opt(Output, "dashboard", Optional("ADDR"), "", "show the run as a page on 127.0.0.1:9080, or on this address"),
    opt(Output, "quiet", Switch, "false", "print errors only"),
    opt(Output, "config", One("FILE.yaml"), "", "read options from a file or a run.yaml; `finetune FILE.yaml` too"),
];

/// The option with that name (with dashes).
pub fn find(name: &str) -> Option<&'static Opt> {
    TABLE.iter().find(|o| o.name == name)
}

impl Opt {
    /// The YAML key.
    pub fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Whether this is a switch that defaults to true; `--no-NAME` turns it off.
    pub fn is_on(&self) -> bool {
        self.takes == Takes::Switch && self.default == "true"
    }

    /// The environment variable.
    pub fn variable(&self) -> String {
        variable(&self.key())
    }
}

/// The environment variable of a YAML key.
pub fn variable(key: &str) -> String {
    format!("FINETUNE_{}", key.to_uppercase())
}
