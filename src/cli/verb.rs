//! The table of verbs, and how a command line finds its row. The first word decides: a verb, or the MODEL of
//! the default verb, which trains.

use super::options::flags::{self, Accepts, Parsed, Positional};
use super::options::groups;
use super::options::table::{Opt, Section, TABLE, Takes};
use super::options::{Settings, Source, Typed, variables, yaml};
use super::output::{RUN_FILE, run_of};
use super::refusal::{Refusal, nearest};
use super::{
    bench, contracts, doctor, eval, export, generate, hardware, help, import, inspect, plan, predict, report,
    token, train,
};
use crate::support::stderr::printable;
use std::io::Write;
use std::path::Path;

/// One verb.
pub struct Verb {
    /// What is typed; the first row is the default.
    pub name: &'static str,
    /// One sentence.
    pub about: &'static str,
    /// Placeholder of its positional arguments; empty for none.
    pub positional: &'static str,
    /// Most positional arguments.
    pub most: usize,
    /// Options of its own.
    pub own: &'static [Opt],
    /// Rows of [`TABLE`] that it takes too; None is all of them.
    pub shared: Option<&'static [&'static str]>,
    /// Does it.
    pub run: fn(&mut Invocation) -> Result<(), Refusal>,
}

/// A verb with what was typed behind it.
pub struct Invocation {
    /// Arguments that are no options.
    pub positional: Vec<String>,
    /// Options.
    pub settings: Settings,
    /// The result is wanted as JSON.
    pub json: bool,
    /// Where a verb's result goes.
    pub out: Box<dyn Write>,
}

impl Invocation {
    /// One line of the verb's result; JSON has its own way with control characters.
    pub fn say(&mut self, line: &str) -> Result<(), Refusal> {
        if self.json { self.say_as_it_is(line) } else { self.say_as_it_is(&printable(line)) }
    }

    /// A line with colours of our own.
    pub fn say_as_it_is(&mut self, line: &str) -> Result<(), Refusal> {
        written(writeln!(self.out, "{line}"))
    }
}

fn written(outcome: std::io::Result<()>) -> Result<(), Refusal> {
    outcome.map_err(|e| match e.kind() {
        // Its reader has seen enough (`| head`): the code is what a shell shows for SIGPIPE.
        std::io::ErrorKind::BrokenPipe => std::process::exit(141),
        _ => Refusal::failure(format!("stdout: {e}")),
    })
}

const fn own(name: &'static str, takes: Takes, default: &'static str, help: &'static str) -> Opt {
    Opt { name, section: Section::Verb, takes, default, help }
}

const JSON: Opt = own("json", Takes::Switch, "false", "print the result as JSON");
const ADAPTER: Opt =
    own("adapter", Takes::One("DIR"), "", "folder of a run, of a checkpoint or of a PEFT adapter");
const DEVICES: [&str; 5] = ["gpus", "gpu-backend", "dtype", "threads", "memory-limit"];
const SPEAKING: &[&str] =
    &["model", "quantize", "chat-template", DEVICES[0], DEVICES[1], DEVICES[2], DEVICES[3], DEVICES[4]];

const GENERATE: &[Opt] = &[
    ADAPTER,
    own(
        "prompt",
        Takes::Many("TEXT"),
        "",
        "text to continue; repeatable (default: stdin; with --chat on a terminal, a conversation)",
    ),
    own("chat", Takes::Switch, "false", "use the chat template: the prompt is a user's turn"),
    own("system", Takes::One("TEXT"), "", "system turn before the conversation (with --chat)"),
    own("max-new-tokens", Takes::One("N"), "256", "longest answer, in tokens"),
    own("temperature", Takes::One("T"), "0", "0: always the most probable token"),
    own("top-p", Takes::One("P"), "1", "sample among the most probable tokens whose probabilities sum to P"),
    own("seed", Takes::One("N"), "42", "seed of sampling"),
    JSON,
];

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
    own("text", Takes::Many("TEXT"), "", "text to classify; repeatable (default: stdin, one text a line)"),
    JSON,
];

const EVAL: &[Opt] = &[ADAPTER, JSON];

const EXPORT: &[Opt] = &[
    own(
        "to",
        Takes::One("FORM"),
        "merged",
        "peft, gguf-lora: the adapter; merged, merged-gguf: one model; ollama: a Modelfile",
    ),
    own("save-dtype", Takes::One("base|f32"), "base", "type in which --to merged stores weights"),
    // Not --save-dtype: a GGUF has kinds that are no dtypes, and llama.cpp's converters call it so.
    own("outtype", Takes::One("base|f32|f16|bf16|q8_0"), "base", "type in which a GGUF stores weights"),
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
        "network to remote devices: 1gbit, 100mbit, 50MB (a second) [1gbit]",
    ),
    own(
        "assume-gpu",
        Takes::One("SIZE"),
        "",
        "whether the run fits on a card of that much memory which is not here (8GB)",
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

const MERGE: &[Opt] = &[EXPORT[1], JSON];

/// Every verb.
#[rustfmt::skip]
pub const VERBS: &[Verb] = &[
    Verb { name: "train", about: "train a LoRA adapter (the default verb)", positional: "MODEL", most: 1, own: &[], shared: None, run: train::run },
    Verb { name: "plan", about: "say what a training command would do, its memory and time, without doing it", positional: "MODEL", most: 1, own: PLAN, shared: None, run: plan::run },
    Verb { name: "generate", about: "continue prompts with a model and its adapter", positional: "MODEL", most: 1, own: GENERATE, shared: Some(SPEAKING), run: generate::run },
    Verb { name: "predict", about: "label texts or rows with a classifier", positional: "MODEL", most: 1, own: PREDICT, shared: Some(&["model", "quantize", "data", "data-fields", "max-seq-len", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: predict::run },
    Verb { name: "eval", about: "score a model and its adapter on rows: loss, perplexity, or a classifier's accuracy", positional: "MODEL", most: 1, own: EVAL, shared: Some(&["model", "quantize", "chat-template", "data", "data-fields", "max-seq-len", "class-weights", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: eval::run },
    Verb { name: "export", about: "write a run's adapter in another format", positional: "OUT", most: 1, own: EXPORT, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: export::run },
    Verb { name: "merge", about: "short for export --to merged", positional: "OUT", most: 1, own: MERGE, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: export::run },
    Verb { name: "inspect", about: "describe a model, an adapter or a file of rows", positional: "PATH", most: 1, own: &[own("rows", Takes::One("N"), "3", "number of rows to show"), JSON], shared: Some(&["model", "chat-template", "task", "data-fields", "max-seq-len", "num-classes", "max-dropped", "threads"]), run: inspect::run },
    Verb { name: "token", about: "print the secret that the machines of a run share; make it if there is none", positional: "", most: 0, own: TOKEN, shared: Some(&["token-file"]), run: token::run },
    Verb { name: "devices", about: "list the devices of this machine", positional: "", most: 0, own: HARDWARE, shared: Some(&["threads"]), run: hardware::run },
    Verb { name: "selftest", about: "short for devices --check", positional: "", most: 0, own: SELFTEST, shared: Some(&["threads"]), run: hardware::selftest },
    Verb { name: "bench", about: "measure how fast this machine computes a model, operation by operation", positional: "MODEL", most: 1, own: BENCH, shared: Some(&["model", "quantize", "rank", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: bench::run },
    Verb { name: "report", about: "write the page and pictures of a run again, or compare several runs", positional: "OUT", most: 64, own: REPORT, shared: Some(&[]), run: report::run },
    Verb { name: "contracts", about: "list what this program guarantees, and the tests of it", positional: "", most: 0, own: &[JSON], shared: Some(&[]), run: contracts::run },
    Verb { name: "doctor", about: "say what this machine lacks, and how to fix it", positional: "FILE", most: 1, own: &[JSON], shared: Some(&["coordinator", "token-file", "model-cache", "output"]), run: doctor::run },
    Verb { name: "import", about: "convert a YAML file of Axolotl, LLaMA-Factory or TRL", positional: "FILE", most: 1, own: IMPORT, shared: Some(&[]), run: import::run },
    Verb { name: "help", about: "explain a topic (data, devices, cluster ...), a verb or an option", positional: "TOPIC", most: 1, own: &[], shared: Some(&[]), run: help::run },
    Verb { name: "completions", about: "print completions for bash, zsh, fish, elvish or powershell", positional: "SHELL", most: 1, own: &[], shared: Some(&[]), run: help::completions },
    Verb { name: "man", about: "print the man page, or write all pages into a folder", positional: "DIR", most: 1, own: &[], shared: Some(&[]), run: help::man },
];

/// Words that people try, and what they mean.
const NO_VERBS: [(&str, &str); 5] = [
    (
        "chat",
        "it is `finetune generate MODEL --adapter OUT --chat`, on a terminal (`finetune help generate`)",
    ),
    (
        "serve",
        "`finetune export OUT --to ollama` makes files for Ollama, `--to merged` a directory for vLLM; both serve",
    ),
    ("dashboard", "add --dashboard to a training command (`finetune help watch`)"),
    ("worker", "it is `finetune --role worker --coordinator HOST:9000` (`finetune help cluster`)"),
    (
        "coordinator",
        "it is `finetune --role coordinator`, with the options of a run (`finetune help cluster`)",
    ),
];

/// Finds the verb and runs it.
pub fn dispatch(args: &[String]) -> Result<(), Refusal> {
    let named = args.first().and_then(|a| VERBS.iter().find(|v| v.name == a));
    if let Some(word) = args.first().filter(|word| !Path::new(word).exists())
        && let Some((_, way)) = NO_VERBS.iter().find(|(name, _)| name == word)
    {
        return Err(Refusal::usage(format!("there is no `finetune {word}`: {way}")));
    }
    let (verb, rest) = match named {
        Some(verb) => (verb, &args[1..]),
        None => (&VERBS[0], args),
    };
    let accepts = verb.accepts();
    let (positional, typed) = match flags::parse(&accepts, &join_values(rest))? {
        Parsed::Typed(positional, typed) => (positional, typed),
        Parsed::Text(text) => {
            let mut out = std::io::stdout().lock();
            let coloured = anstream_wanted();
            let text = if coloured { text.ansi().to_string() } else { text.to_string() };
            return written(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
        }
    };
    let (positional, layers) = verb.layers(positional, typed)?;
    let settings = Settings::resolve(&accepts.options, layers)?;
    let json = settings.switch("json")?;
    if let Some(threads) = groups::whole(&settings, "threads", 1)? {
        // What the floors below do beside the backend. It fails only where a pool exists: never yet.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.min(1024)).build_global();
    }
    (verb.run)(&mut Invocation { positional, settings, json, out: Box::new(std::io::stdout()) })
}

fn anstream_wanted() -> bool {
    use std::io::IsTerminal;
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

impl Verb {
    /// What its command line accepts.
    pub fn accepts(&self) -> Accepts<'static> {
        let shared = TABLE.iter().filter(|o| self.shared.is_none_or(|s| s.contains(&o.name)));
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
            ("report", _) => "folders of runs",
            ("inspect", _) => "model, adapter or file of rows",
            ("doctor", _) => "YAML file of requirements (default: those of finetune itself)",
            ("import", _) => "YAML file of Axolotl, LLaMA-Factory or TRL",
            ("help", _) => "topic, verb or option",
            ("completions", _) => "bash, zsh, fish, elvish or powershell",
            ("man", _) => "folder for all pages (default: one page to stdout)",
            _ => "Hugging Face directory, .gguf file or Hub id; `demo` is the demonstration",
        };
        Some(Positional { name: self.positional, most: self.most, help })
    }

    /// Positional arguments that are options too (MODEL), and the layers in their order.
    fn layers(
        &self,
        mut positional: Vec<String>,
        mut flags: Vec<Typed>,
    ) -> Result<(Vec<String>, Vec<Vec<Typed>>), Refusal> {
        if self.positional == "MODEL" && !positional.is_empty() {
            flags.push(Typed { key: "model".into(), values: positional.split_off(0), source: Source::Flag });
        }
        if let Some(line) = super::devices::refused_limit() {
            return Err(Refusal::configuration(line));
        }
        // Help is there for who cannot find the name, too.
        if self.shared.is_none_or(|options| !options.is_empty()) {
            variables::check(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))?;
        }
        let environment = variables::environment(|v| std::env::var(v).ok());
        // A verb without --config has no file either, whatever the environment says.
        let has_config = self.accepts().options.iter().any(|o| o.name == "config");
        let spoken = flags.iter().chain(&environment).find(|t| t.key == "config" && has_config);
        let config = spoken.map(|t| t.values.concat());
        let file = match config {
            Some(path) if !Path::new(&path).exists() => {
                let way = "--config takes a YAML file of options, as a run's run.yaml";
                return Err(Refusal::failure(format!("{path}: no such file or directory: {way}")));
            }
            Some(path) => yaml::read(Path::new(&path))?,
            None => Vec::new(),
        };
        let mut layers = vec![flags, file, environment];
        if [VERBS[0].name, "plan"].contains(&self.name) {
            let more = train::more_layers(&layers)?;
            layers.extend(more);
        }
        Ok((positional, layers))
    }
}

/// `--resume DIR` and `--dashboard :9080`: their value follows `=`, so that a word after a blank is an argument. A word
/// that can be nothing else than the value is taken for it.
fn join_values(args: &[String]) -> Vec<String> {
    let is_value = |flag: &str, word: &str| match flag {
        "--resume" => is_run(word),
        "--dashboard" => is_address(word),
        _ => false,
    };
    let mut joined: Vec<String> = Vec::new();
    for arg in args {
        match joined.last_mut() {
            Some(flag) if is_value(flag, arg) => {
                flag.push('=');
                flag.push_str(arg);
            }
            _ => joined.push(arg.clone()),
        }
    }
    joined
}

/// A run's folder or one of its checkpoints, which is no model.
fn is_run(word: &str) -> bool {
    Path::new(word).is_dir() && run_of(Path::new(word)).join(RUN_FILE).exists()
}

/// HOST:PORT, :PORT or PORT, and no file of that name.
fn is_address(word: &str) -> bool {
    let port = word.rsplit_once(':').map_or(word, |(_, port)| port);
    port.parse::<u16>().is_ok() && !Path::new(word).exists()
}

fn epilogue() -> String {
    let keys =
        "A YAML key is a flag with underscores; flag over YAML over environment (FINETUNE_KEY) over default.";
    format!(
        "verbs:\n{}\n{keys}\nfinetune help options lists every option, finetune help the topics.",
        lines()
    )
}

/// A line for every verb.
pub fn lines() -> String {
    VERBS.iter().map(|v| format!("  {:<12} {}\n", v.name, v.about)).collect()
}

/// The verbs, for a sentence.
fn list() -> String {
    format!("verbs: {}", VERBS.iter().map(|v| v.name).collect::<Vec<_>>().join(", "))
}

/// A word that was meant as a model but is neither path nor Hub id.
pub fn not_a_model(word: &str) -> Refusal {
    let names = || VERBS.iter().map(|v| v.name);
    let hint = match nearest(word, names()) {
        Some(verb) => format!("did you mean `finetune {verb}`?"),
        None => format!("a model is a directory, a .gguf file or a Hub id owner/name ({})", list()),
    };
    Refusal::usage(format!("{word:?} is neither a verb nor a path: {hint}"))
}
