//! The table of verbs, and how a command line finds its row. The first word decides: a verb, or the MODEL of
//! the default verb, which trains.

use super::options::flags::{self, Accepts, Parsed};
use super::options::groups;
use super::options::table::{Opt, Section, TABLE, Takes};
use super::options::{Settings, Source, Typed, environment, yaml};
use super::output::{RUN_FILE, run_of};
use super::refusal::{Refusal, nearest};
use super::{
    bench, contracts, doctor, export, generate, hardware, help, import, inspect, plan, predict, report,
    token, train,
};
use crate::numeric::say::printable;
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
    own("adapter", Takes::One("DIR"), "", "PEFT adapter to put on the model (a run's folder)");
const DEVICES: [&str; 5] = ["gpus", "gpu-backend", "dtype", "threads", "memory-limit"];
const SPEAKING: &[&str] =
    &["model", "quantize", "chat-template", DEVICES[0], DEVICES[1], DEVICES[2], DEVICES[3], DEVICES[4]];

const GENERATE: &[Opt] = &[
    ADAPTER,
    own("prompt", Takes::Many("TEXT"), "", "what to continue; repeatable; stdin where it is not given"),
    own("chat", Takes::Switch, "false", "the prompt is a user's turn of the chat template"),
    own("system", Takes::One("TEXT"), "", "a system turn before it (with --chat)"),
    own("max-new-tokens", Takes::One("N"), "256", "stop after that many"),
    own("temperature", Takes::One("T"), "0", "0 takes the most probable token"),
    own("top-p", Takes::One("P"), "1", "draw among the most probable tokens of this mass"),
    own("seed", Takes::One("N"), "42", "of the draws"),
    JSON,
];

const TOKEN: &[Opt] = &[
    own(
        "set",
        Takes::Switch,
        "false",
        "take the token of another machine: pasted and not shown, or from stdin",
    ),
    JSON,
];

const PREDICT: &[Opt] = &[
    ADAPTER,
    own(
        "text",
        Takes::Many("TEXT"),
        "",
        "a text to classify; repeatable; stdin, one per line, where nothing is given",
    ),
    JSON,
];

const EXPORT: &[Opt] = &[
    own(
        "to",
        Takes::One("FORM"),
        "merged",
        "peft, gguf-lora: the adapter; merged, merged-gguf: one model; ollama: a Modelfile",
    ),
    own("save-dtype", Takes::One("base|f32"), "base", "dtype of merged weights"),
    // Not --save-dtype: a GGUF has kinds that are no dtypes, and llama.cpp's converters call it so.
    own("outtype", Takes::One("base|f32|f16|bf16|q8_0"), "base", "how a GGUF stores its numbers"),
    JSON,
];

const BENCH: &[Opt] = &[
    own("rows", Takes::One("N"), "4", "rows of the microbatch that is trained on"),
    own("length", Takes::One("TOKENS"), "256", "tokens of each"),
    own("repeats", Takes::One("N"), "3", "passes, of which the fastest counts"),
    JSON,
];

const HARDWARE: &[Opt] = &[
    own("check", Takes::Switch, "false", "let every device prove that it counts right, and measure it"),
    JSON,
];
const SELFTEST: &[Opt] = &[
    own("report", Takes::Optional("FILE"), "", "write what a maintainer needs to know of a card that fails"),
    JSON,
];
const REPORT: &[Opt] =
    &[own("output", Takes::One("PATH"), "", "write there (of one run a folder, of several a file)"), JSON];

const PLAN: &[Opt] = &[
    own(
        "link",
        Takes::One("SPEED"),
        "",
        "network to devices elsewhere, as 1gbit, 100mbit, 50MB (a second) [1gbit]",
    ),
    JSON,
];

const IMPORT: &[Opt] = &[
    own("from", Takes::One("axolotl|llama-factory|trl"), "", "whose file it is (default: by its keys)"),
    own("output", Takes::One("FILE"), "", "write it there instead of to stdout"),
];

const MERGE: &[Opt] = &[EXPORT[1], JSON];

/// Every verb.
#[rustfmt::skip]
pub const VERBS: &[Verb] = &[
    Verb { name: "train", about: "train a LoRA adapter (the default verb)", positional: "MODEL", most: 1, own: &[], shared: None, run: train::run },
    Verb { name: "plan", about: "say what a training command line will do, take and need, without doing it", positional: "MODEL", most: 1, own: PLAN, shared: None, run: plan::run },
    Verb { name: "generate", about: "continue prompts with a model and its adapter", positional: "MODEL", most: 1, own: GENERATE, shared: Some(SPEAKING), run: generate::run },
    Verb { name: "predict", about: "label texts or rows with a classifier", positional: "MODEL", most: 1, own: PREDICT, shared: Some(&["model", "quantize", "data", "data-fields", "max-seq-len", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: predict::run },
    Verb { name: "export", about: "write a run's adapter in another form", positional: "OUT", most: 1, own: EXPORT, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: export::run },
    Verb { name: "merge", about: "short for export --to merged", positional: "OUT", most: 1, own: MERGE, shared: Some(&["model", "output", "overwrite", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: export::run },
    Verb { name: "inspect", about: "say what a model, an adapter or a file of rows is", positional: "PATH", most: 1, own: &[own("rows", Takes::One("N"), "3", "how many rows to show"), JSON], shared: Some(&["model", "chat-template", "task", "data-fields", "max-seq-len", "num-classes", "max-dropped", "threads"]), run: inspect::run },
    Verb { name: "token", about: "print the secret that the machines of a run share; made where there is none", positional: "", most: 0, own: TOKEN, shared: Some(&["token-file"]), run: token::run },
    Verb { name: "devices", about: "list what can compute here", positional: "", most: 0, own: HARDWARE, shared: Some(&["threads"]), run: hardware::run },
    Verb { name: "selftest", about: "short for devices --check", positional: "", most: 0, own: SELFTEST, shared: Some(&["threads"]), run: hardware::selftest },
    Verb { name: "bench", about: "measure what this machine makes of a model, verb by verb", positional: "MODEL", most: 1, own: BENCH, shared: Some(&["model", "quantize", "rank", "gpus", "gpu-backend", "dtype", "threads", "memory-limit"]), run: bench::run },
    Verb { name: "report", about: "make the page and pictures of a run again, or compare several", positional: "OUT", most: 64, own: REPORT, shared: Some(&[]), run: report::run },
    Verb { name: "contracts", about: "list what this program promises, and what enforces it", positional: "", most: 0, own: &[JSON], shared: Some(&[]), run: contracts::run },
    Verb { name: "doctor", about: "say what this machine lacks to take part, and what mends it", positional: "FILE", most: 1, own: &[JSON], shared: Some(&["coordinator", "token-file", "model-cache", "output"]), run: doctor::run },
    Verb { name: "import", about: "turn a YAML of Axolotl, LLaMA-Factory or TRL into ours", positional: "FILE", most: 1, own: IMPORT, shared: Some(&[]), run: import::run },
    Verb { name: "help", about: "explain a topic: data, devices, cluster ...", positional: "TOPIC", most: 1, own: &[], shared: Some(&[]), run: help::run },
    Verb { name: "completions", about: "completions for bash, zsh, fish, elvish or powershell", positional: "SHELL", most: 1, own: &[], shared: Some(&[]), run: help::completions },
    Verb { name: "man", about: "the man page, or all of them into a folder", positional: "DIR", most: 1, own: &[], shared: Some(&[]), run: help::man },
];

/// Words that people try, and what they mean.
const NO_VERBS: [(&str, &str); 3] = [
    ("dashboard", "the page is a training command's: add --dashboard to it (`finetune help watch`)"),
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
    let (positional, typed) = match flags::parse(&accepts, rest)? {
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
            positional: self.positional,
            options: own.iter().chain(shared).collect(),
            epilogue: if first { epilogue() } else { String::new() },
        }
    }

    /// Positional arguments that are options too (MODEL), and the layers in their order.
    fn layers(
        &self,
        mut positional: Vec<String>,
        mut flags: Vec<Typed>,
    ) -> Result<(Vec<String>, Vec<Vec<Typed>>), Refusal> {
        take_loose(&mut positional, &mut flags);
        if let Some(extra) = positional.get(self.most) {
            let usage = format!("finetune {} {}", self.name, self.positional);
            return Err(Refusal::usage(format!("unexpected argument {extra:?} (usage: {})", usage.trim())));
        }
        if self.positional == "MODEL" && !positional.is_empty() {
            flags.push(Typed { key: "model".into(), values: positional.split_off(0), source: Source::Flag });
        }
        if let Some(line) = super::devices::refused_limit() {
            return Err(Refusal::configuration(line));
        }
        let environment = environment(|v| std::env::var(v).ok());
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

/// `--resume DIR` and `--dashboard :9080`: their value stands behind `=`, so that a word behind a blank is an argument.
/// Where that can be nothing else than the value, it is taken for it.
fn take_loose(positional: &mut Vec<String>, flags: &mut [Typed]) {
    let fits: [(&str, fn(&str) -> bool); 2] = [("resume", is_run), ("dashboard", is_address)];
    for (key, fits) in fits {
        let flag = flags.iter_mut().find(|t| t.key == key && t.values.is_empty());
        if let (Some(flag), Some(at)) = (flag, positional.iter().position(|word| fits(word))) {
            flag.values.push(positional.remove(at));
        }
    }
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
