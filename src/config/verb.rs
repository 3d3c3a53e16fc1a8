//! The table of verbs: name, purpose and options of each. `cli::dispatch` runs them.

use super::flags::{Accepts, Positional};
use super::table::{Opt, Section, TABLE, Takes};

/// One verb.
pub struct Verb {
    /// Name of the verb; the first row is the default.
    pub name: &'static str,
    /// One sentence.
    pub about: &'static str,
    /// Placeholder of its positional arguments; empty for none.
    pub positional: &'static str,
    /// Maximum number of positional arguments.
    pub most: usize,
    /// Options of this verb only.
    pub own: &'static [Opt],
    /// Rows of [`TABLE`] that the verb also has; `None` means all of them.
    pub shared: Option<&'static [&'static str]>,
}

const fn own(name: &'static str, takes: Takes, default: &'static str, help: &'static str) -> Opt {
    Opt { name, section: Section::Verb, takes, default, help }
}

const JSON: Opt = own("json", Takes::Switch, "false", "print the result as JSON");
const ADAPTER: Opt =
    own("adapter", Takes::One("DIR"), "", "folder of a run, of a checkpoint or of a PEFT adapter");
const SPEAKING: &[&str] = &[
    "model",
    "quantize",
    "chat-template",
    "template-args",
    "gpus",
    "gpu-backend",
    "dtype",
    "threads",
    "memory-limit",
    "offload",
];

const SYSTEM: Opt =
    own("system", Takes::One("TEXT"), "", "system turn before the conversation (with the chat template)");
const LONGEST: Opt = own("max-new-tokens", Takes::One("N"), "256", "longest answer, in tokens");
const TEMPERATURE: Opt = own("temperature", Takes::One("T"), "0", "0: always the most probable token");
const TOP_P: Opt =
    own("top-p", Takes::One("P"), "1", "sample among the most probable tokens whose probabilities sum to P");
const SEED: Opt = own("seed", Takes::One("N"), "42", "seed of sampling");

const GENERATE: &[Opt] = &[
    ADAPTER,
    own(
        "prompt",
        Takes::Many("TEXT"),
        "",
        "text to continue; repeatable (default: stdin; with the chat template on a terminal, a conversation)",
    ),
    own(
        "chat",
        Takes::Switch,
        "false",
        "the prompt is a user's turn of the chat template (default: if the adapter's run.yaml says that it was trained so)",
    ),
    own("raw", Takes::Switch, "false", "continue the prompt as it is, without the chat template"),
    SYSTEM,
    LONGEST,
    TEMPERATURE,
    TOP_P,
    SEED,
    JSON,
];

const ADAPTERS: Opt = own(
    "adapter",
    Takes::Many("NAME=DIR"),
    "",
    "folder of a run, of a checkpoint or of a PEFT adapter, with a name for it (default: the folder's); repeatable",
);

const CHAT: &[Opt] = &[ADAPTERS, SYSTEM, LONGEST, TEMPERATURE, TOP_P, SEED];

const SERVE: &[Opt] = &[
    ADAPTERS,
    own(
        "api-key-file",
        Takes::One("FILE"),
        "",
        "file of the key that clients send (default: FINETUNE_API_KEY, then none on this machine, else one made from the token)",
    ),
    own(
        "context",
        Takes::One("TOKENS"),
        "",
        "most tokens of a prompt and its answer (default: the smaller of 8192 and the model's)",
    ),
    own("max-sessions", Takes::One("N"), "8", "texts that are generated at the same time"),
    own("max-waiting", Takes::One("N"), "64", "texts that wait for their turn; further requests are refused"),
    own("request-timeout", Takes::One("TIME"), "10m", "how long a request may take; its answer ends there"),
];

/// Options of a model that answers clients.
const SERVING: &[&str] = &[
    "model",
    "quantize",
    "chat-template",
    "template-args",
    "gpus",
    "gpu-backend",
    "dtype",
    "threads",
    "memory-limit",
    "offload",
    "bind",
    "token-file",
];

const STUDIO: &[Opt] = &[own(
    "root",
    Takes::One("DIR"),
    "",
    "folder with models, rows and runs; the page sees nothing outside it (default: the current folder)",
)];

const TOKEN: &[Opt] = &[
    own(
        "set",
        Takes::Switch,
        "false",
        "store the token of another machine, pasted (not shown) or from stdin",
    ),
    JSON,
];

const PREDICT: &[Opt] = &[
    ADAPTER,
    own(
        "text",
        Takes::Many("TEXT"),
        "",
        "text to label or score; repeatable (default: stdin, one text a line)",
    ),
    JSON,
];

const EVAL: &[Opt] = &[ADAPTER, JSON];

const EXPORT: &[Opt] = &[
    own(
        "to",
        Takes::One("FORM"),
        "merged",
        "peft, mlx, gguf-lora: the adapter; merged, merged-gguf: one model; ollama: a Modelfile",
    ),
    own("save-dtype", Takes::One("base|f32"), "base", "type in which --to merged stores weights"),
    // Not named --save-dtype: a GGUF has types that are not dtypes, and llama.cpp's converters use this name.
    own(
        "outtype",
        Takes::One("TYPE"),
        "base",
        "type in which a GGUF stores weights: base, f32, f16, bf16, q8_0, or llama.cpp's q2_k to q6_k, such as q4_k_m",
    ),
    JSON,
];

const BENCH: &[Opt] = &[
    own("rows", Takes::One("N"), "4", "rows of the measured microbatch"),
    own("length", Takes::One("TOKENS"), "256", "tokens of each row"),
    own("repeats", Takes::One("N"), "3", "passes; the fastest counts"),
    JSON,
];

const HARDWARE: &[Opt] = &[
    own("check", Takes::Switch, "false", "test that every device computes correctly, and measure it"),
    JSON,
];
const SELFTEST: &[Opt] = &[
    own("report", Takes::Optional("FILE"), "", "write a report about a card that fails, for maintainers"),
    JSON,
];
const REPORT: &[Opt] = &[
    own("output", Takes::One("PATH"), "", "folder for the report of one run, file for that of several"),
    JSON,
];

const PLAN: &[Opt] = &[
    own(
        "link",
        Takes::One("SPEED"),
        "",
        "speed of the network to remote devices: 1gbit, 100mbit, 50MB (per second) [1gbit]",
    ),
    own(
        "assume-gpu",
        Takes::One("SIZE"),
        "",
        "estimate for a card with this much memory (8GB), which this machine need not have",
    ),
    JSON,
];

const IMPORT: &[Opt] = &[
    own(
        "from",
        Takes::One("axolotl|llama-factory|trl"),
        "",
        "trainer that the file belongs to (default: recognised by its keys)",
    ),
    own("output", Takes::One("FILE"), "", "file to write (default: stdout)"),
];

const PUSH: &[Opt] = &[
    own("private", Takes::Switch, "false", "make a new repository private; a public one is refused"),
    own(
        "revision",
        Takes::One("BRANCH"),
        "",
        "branch to commit to; created if it is missing (default: main)",
    ),
    own(
        "message",
        Takes::One("TEXT"),
        "",
        "first line of the commit (default: 'Upload adapter with finetune')",
    ),
    JSON,
];

const MERGE: &[Opt] = &[EXPORT[1], JSON];

const fn reworded(section: Section, name: &'static str, takes: Takes, help: &'static str) -> Opt {
    let default = if matches!(takes, Takes::Switch) { "false" } else { "" };
    Opt { name, section, takes, default, help }
}

const EXPORTS: &[&str] = &["export", "merge"];

/// Rows that replace those of [`TABLE`] for some verbs, where the option means something else than in training.
static REWORDED: [(&[&str], Opt); 9] = [
    (
        EXPORTS,
        reworded(
            Section::Model,
            "model",
            Takes::One("MODEL"),
            "another copy of the base (default: that of the run)",
        ),
    ),
    (
        EXPORTS,
        reworded(
            Section::Output,
            "output",
            Takes::One("PATH"),
            "folder or file to write (default: OUT-FORM, as out-merged)",
        ),
    ),
    (EXPORTS, reworded(Section::Output, "overwrite", Takes::Switch, "replace an earlier export")),
    (
        &["serve"],
        reworded(
            Section::Cluster,
            "bind",
            Takes::One("HOST:PORT"),
            "address to listen on (default: port 8000 of this machine alone); clients of other machines need a key",
        ),
    ),
    (
        &["studio"],
        reworded(
            Section::Cluster,
            "bind",
            Takes::One("HOST:PORT"),
            "address to listen on (default: port 9090 of this machine alone)",
        ),
    ),
    (
        &["inspect"],
        reworded(
            Section::Model,
            "model",
            Takes::One("MODEL"),
            "model whose tokenizer and template the rows get",
        ),
    ),
    (&["inspect"], reworded(Section::Data, "max-rows", Takes::One("N"), "read the first N rows only")),
    (&["eval"], reworded(Section::Data, "max-rows", Takes::One("N"), "read the first N rows of each --data")),
    (
        &["doctor"],
        reworded(
            Section::Output,
            "output",
            Takes::One("DIR"),
            "folder of a run, whose free space is checked too",
        ),
    ),
];

/// Every verb.
#[rustfmt::skip]
pub const VERBS: &[Verb] = &[
    Verb { name: "train", about: "train a LoRA adapter (the default verb)", positional: "MODEL", most: 1, own: &[], shared: None },
    Verb { name: "plan", about: "print steps, memory and time of a training command, without running it", positional: "MODEL", most: 1, own: PLAN, shared: None },
    Verb { name: "generate", about: "continue prompts with a model and its adapter", positional: "MODEL", most: 1, own: GENERATE, shared: Some(SPEAKING) },
    Verb { name: "chat", about: "converse with a model and its adapters on a terminal", positional: "MODEL", most: 1, own: CHAT, shared: Some(SPEAKING) },
    Verb { name: "serve", about: "answer programs that speak OpenAI's interface, with a model and its adapters", positional: "MODEL", most: 1, own: SERVE, shared: Some(SERVING) },
    Verb { name: "studio", about: "a page that starts, shows, stops and compares runs, and talks to their models", positional: "", most: 0, own: STUDIO, shared: Some(&["bind", "token-file"]) },
    Verb { name: "predict", about: "label or score texts or rows with a classifier, a regression or a reward model", positional: "MODEL", most: 1, own: PREDICT, shared: Some(&["model", "quantize", "chat-template", "template-args", "task", "data", "data-fields", "max-seq-len", "gpus", "gpu-backend", "dtype", "threads", "memory-limit", "offload"]) },
    Verb { name: "eval", about: "score a model and its adapter on rows: loss, perplexity, accuracy, rewards", positional: "MODEL", most: 1, own: EVAL, shared: Some(&["model", "quantize", "chat-template", "template-args", "task", "loss", "beta", "label-smoothing", "simpo-gamma", "nll-weight", "center-rewards-coefficient", "reference-adapter", "data", "max-rows", "drop-duplicates", "data-fields", "learn", "max-seq-len", "long-rows", "token-accuracy", "class-weights", "gpus", "gpu-backend", "dtype", "threads", "memory-limit", "offload"]) },
    Verb { name: "export", about: "write a run's adapter in another format", positional: "OUT", most: 1, own: EXPORT, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]) },
    Verb { name: "merge", about: "short for export --to merged", positional: "OUT", most: 1, own: MERGE, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]) },
    Verb { name: "push", about: "upload an adapter, a merged model or a .gguf file to the Hugging Face Hub", positional: "OUT OWNER/NAME", most: 2, own: PUSH, shared: Some(&[]) },
    Verb { name: "inspect", about: "describe a model, an adapter or a file of rows", positional: "PATH", most: 1, own: &[own("rows", Takes::One("N"), "3", "number of rows to show"), JSON], shared: Some(&["model", "chat-template", "template-args", "add-tokens", "add-special-tokens", "task", "loss", "max-rows", "drop-duplicates", "data-fields", "learn", "max-seq-len", "long-rows", "num-classes", "max-dropped", "threads"]) },
    Verb { name: "token", about: "print the token that the machines of a run share; create it if there is none", positional: "", most: 0, own: TOKEN, shared: Some(&["token-file"]) },
    Verb { name: "devices", about: "list the devices of this machine", positional: "", most: 0, own: HARDWARE, shared: Some(&["threads"]) },
    Verb { name: "selftest", about: "short for devices --check", positional: "", most: 0, own: SELFTEST, shared: Some(&["threads"]) },
    Verb { name: "env", about: "print versions, drivers and devices of this machine, for a report of an error", positional: "", most: 0, own: &[JSON], shared: Some(&["threads"]) },
    Verb { name: "bench", about: "measure how fast this machine computes a model, operation by operation", positional: "MODEL", most: 1, own: BENCH, shared: Some(&["model", "quantize", "rank", "gpus", "gpu-backend", "dtype", "threads", "memory-limit", "offload"]) },
    Verb { name: "report", about: "write the report of a run again, or compare several runs", positional: "OUT", most: 64, own: REPORT, shared: Some(&[]) },
    Verb { name: "contracts", about: "list the guarantees of this program, with their tests", positional: "", most: 0, own: &[JSON], shared: Some(&[]) },
    Verb { name: "doctor", about: "list what this machine lacks, and how to fix it", positional: "FILE", most: 1, own: &[JSON], shared: Some(&["coordinator", "token-file", "model-cache", "output"]) },
    Verb { name: "import", about: "convert a YAML file of Axolotl, LLaMA-Factory or TRL", positional: "FILE", most: 1, own: IMPORT, shared: Some(&[]) },
    Verb { name: "help", about: "explain a topic (data, devices, cluster ...), a verb or an option", positional: "TOPIC", most: 1, own: &[], shared: Some(&[]) },
    Verb { name: "completions", about: "print completions for bash, zsh, fish, elvish or powershell", positional: "SHELL", most: 1, own: &[], shared: Some(&[]) },
    Verb { name: "man", about: "print the man page, or write all pages into a folder", positional: "DIR", most: 1, own: &[], shared: Some(&[]) },
];

impl Verb {
    /// The arguments of its command line.
    pub fn accepts(&self) -> Accepts<'static> {
        let shared = TABLE.iter().filter(|o| self.shared.is_none_or(|s| s.contains(&o.name)));
        let shared = shared.map(|o| {
            let own = REWORDED.iter().find(|(verbs, row)| verbs.contains(&self.name) && row.name == o.name);
            own.map_or(o, |(_, row)| row)
        });
        let own: &'static [Opt] = self.own;
        let first = std::ptr::eq(self, &VERBS[0]) || self.name == VERBS[0].name;
        Accepts {
            name: if first { "finetune".into() } else { format!("finetune {}", self.name) },
            about: if first { "Fine-tune a language model with LoRA" } else { self.about },
            positional: self.argument(),
            options: own.iter().chain(shared).collect(),
            epilogue: if first { epilogue() } else { String::new() },
        }
    }

    /// Its positional arguments.
    fn argument(&self) -> Option<Positional> {
        let help = match (self.name, self.positional) {
            (_, "") => return None,
            ("export" | "merge", _) => "folder of a run, of a checkpoint or of a PEFT adapter",
            ("push", _) => "folder of a run or of an export, or a .gguf file; the repository",
            ("report", _) => "folders of runs",
            ("inspect", _) => "model, adapter or file of rows",
            ("doctor", _) => "YAML file of requirements (default: those of finetune itself)",
            ("import", _) => "YAML file of Axolotl, LLaMA-Factory or TRL",
            ("help", _) => "topic, verb or option",
            ("completions", _) => "bash, zsh, fish, elvish or powershell",
            ("man", _) => "folder for all pages (default: one page to stdout)",
            ("train" | "plan", _) => {
                "Hugging Face directory, .gguf file, Hub id or `demo`; a .yaml file is --config"
            }
            _ => "Hugging Face directory, .gguf file or Hub id; `demo` is the demonstration",
        };
        Some(Positional { name: self.positional, most: self.most, help })
    }
}

fn epilogue() -> String {
    let keys =
        "A YAML key is a flag with underscores. Precedence: flag, YAML, environment (FINETUNE_KEY), default.";
    format!(
        "verbs:\n{}\n{keys}\n`finetune help options` lists every option, `finetune help` the topics.",
        lines()
    )
}

/// One line for every verb.
pub fn lines() -> String {
    VERBS.iter().map(|v| format!("  {:<12} {}\n", v.name, v.about)).collect()
}

/// The names of the verbs, for a sentence.
pub fn list() -> String {
    format!("verbs: {}", VERBS.iter().map(|v| v.name).collect::<Vec<_>>().join(", "))
}
