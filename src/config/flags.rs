//! Flags from the table of options, parsed by clap. Values are not interpreted here: a flag becomes (key, values) like
//! a line of YAML, so that aliases and errors are handled equally.

use super::alias;
use super::refusal::{Refusal, nearest};
use super::table::{Opt, Section, Takes};
use super::typed::{Origin, Typed};
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command};

/// Result of clap's parsing.
pub enum Parsed {
    /// Positional arguments, then flags in no particular order.
    Typed(Vec<String>, Vec<Typed>),
    /// Text to print for `--help` or `--version`.
    Text(StyledStr),
}

/// Arguments of a command.
pub struct Accepts<'a> {
    /// Name of the command: `finetune`, `finetune generate`.
    pub name: String,
    /// One sentence.
    pub about: &'static str,
    /// Positional arguments, if there are any.
    pub positional: Option<Positional>,
    /// Rows of the table and the verb's own options.
    pub options: Vec<&'a Opt>,
    /// Text below the options in `--help`.
    pub epilogue: String,
}

/// Positional arguments of a command.
#[derive(Debug, Clone, Copy)]
pub struct Positional {
    /// Placeholder in the usage line.
    pub name: &'static str,
    /// Maximum number of arguments.
    pub most: usize,
    /// One sentence.
    pub help: &'static str,
}

const FOREIGN_HEADING: &str = "other trainers' names";

/// Options of a training run in `finetune --help`; `finetune help options` shows all.
#[rustfmt::skip]
const COMMON: [&str; 24] = [
    "quantize", "task", "data", "eval-data", "eval-split", "max-seq-len", "rank", "alpha", "epochs", "max-steps",
    "batch-size", "learning-rate", "gpus", "role", "coordinator", "expect-workers", "output", "resume",
    "eval-steps", "sample-prompt", "dashboard", "quiet", "config", "",
];

/// The same command with a help text that fits a screen.
fn short(c: Command) -> Command {
    let trains = c.get_arguments().any(|a| a.get_id() == "learning-rate");
    // The verb's own options stay, and of the others the common ones.
    let common = |a: &Arg| a.get_help_heading() == Some("options") || COMMON.contains(&a.get_id().as_str());
    if trains { c.mut_args(|a| if common(&a) { a } else { a.hide(true) }) } else { c }
}

/// The clap command.
pub fn command(accepts: &Accepts) -> Command {
    let mut c = Command::new(accepts.name.clone())
        .about(accepts.about)
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(accepts.epilogue.clone())
        .args_override_self(false)
        // On a narrow terminal only one word would fit beside the names.
        .next_line_help(terminal_size::terminal_size().is_some_and(|(width, _)| width.0 < 70));
    if let Some(Positional { name, most, help }) = accepts.positional {
        let dots = if most > 1 && !name.contains(' ') { "..." } else { "" };
        c = c.override_usage(format!("{} [{name}]{dots} [OPTIONS]", accepts.name));
        c = c.arg(Arg::new("").value_name(name).num_args(0..=most).help(help).help_heading("arguments"));
    }
    for o in &accepts.options {
        c = c.arg(arg(o));
        if o.is_on() {
            let no = format!("no-{}", o.name);
            let help = format!("turn --{} off", o.name);
            let arg = switch(Arg::new(no.clone()).long(no));
            c = c.arg(arg.help(help).help_heading(o.section.name()));
        }
    }
    // Other trainers' names only for verbs that configure training: elsewhere such a name is an error.
    let trains = accepts.options.iter().any(|o| o.section == Section::Optim);
    let has = |key| accepts.options.iter().any(|o| Some(o.key().as_str()) == alias::ours(key));
    for key in alias::all().filter(|key| trains || alias::OF_EVERY_VERB.contains(key) && has(key)) {
        let long = key.replace('_', "-");
        let arg = Arg::new(key).long(long).action(ArgAction::Append).hide(true).allow_negative_numbers(true);
        let arg = match alias::is_switch(key) {
            true => arg.num_args(0..=1).default_missing_value("true"),
            false => arg.num_args(1),
        };
        c = c.arg(arg.help_heading(FOREIGN_HEADING));
    }
    c
}

fn arg(o: &Opt) -> Arg {
    let mut help = o.help.to_string();
    if !o.default.is_empty() && o.takes != Takes::Switch {
        help = format!("{help} [{}]", o.default);
    }
    let a = Arg::new(o.name).long(o.name).help(help).help_heading(o.section.name());
    let a = match o.takes {
        Takes::One(v) => a.value_name(v).action(ArgAction::Set),
        Takes::Many(v) => a.value_name(v).action(ArgAction::Append),
        Takes::Commas(v) => a.value_name(v).action(ArgAction::Append).value_delimiter(','),
        Takes::Switch => switch(a),
        Takes::Optional(v) => a.value_name(v).num_args(0..=1).require_equals(true).action(ArgAction::Set),
    };
    // A negative number is a value, not a flag.
    let a = if o.takes == Takes::Switch { a } else { a.allow_negative_numbers(true) };
    match o.name {
        "config" => a.short('c'),
        "data" => a.short('d'),
        "model" => a.short('m'),
        "output" => a.short('o'),
        "quiet" => a.short('q'),
        _ => a,
    }
}

fn switch(a: Arg) -> Arg {
    let value = a.num_args(0..=1).require_equals(true).default_missing_value("true");
    value.action(ArgAction::Set).hide_possible_values(true).value_name("true|false")
}

/// Parses the arguments after the command's name.
pub fn parse(accepts: &Accepts, args: &[String]) -> Result<Parsed, Refusal> {
    let args: Vec<String> = args.iter().map(|a| dashed(a)).collect();
    no_loose_truth(accepts, &args)?;
    let argv = std::iter::once(accepts.name.clone()).chain(args);
    let matches = match short(command(accepts)).try_get_matches_from(argv) {
        Ok(m) => m,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Ok(Parsed::Text(e.render()));
        }
        Err(e) => return Err(one_line(accepts, &e)),
    };
    let mut typed = Vec::new();
    for id in matches.ids() {
        let id = id.as_str();
        if id.is_empty() || matches.value_source(id) != Some(clap::parser::ValueSource::CommandLine) {
            continue;
        }
        let own = accepts.options.iter().any(|o| o.takes == Takes::Switch && o.name == id);
        let switch = own || alias::is_switch(id) || alias::negated(&id.replace('-', "_")).is_some();
        let values: Vec<String> = matches.get_many(id).map(|v| v.cloned().collect()).unwrap_or_default();
        if let Some(other) = values.iter().find(|v| switch && !is_truth(v)) {
            // The value may be the MODEL that followed a bare switch.
            let flag = id.replace('_', "-");
            let why =
                format!("--{flag}: {other:?} is neither true nor false (an argument goes before --{flag})");
            return Err(Refusal::usage(why));
        }
        typed.push(Typed { key: id.replace('-', "_"), values, source: Origin::Flag });
    }
    let positional = match accepts.positional {
        None => Vec::new(),
        Some(_) => matches.get_many::<String>("").map(|v| v.cloned().collect()).unwrap_or_default(),
    };
    Ok(Parsed::Typed(positional, typed))
}

fn is_truth(value: &str) -> bool {
    ["true", "false", "yes", "no", "on", "off", "1", "0"].contains(&value.to_lowercase().as_str())
}

/// `--packing false` would train a model named `false`: the error gives the right form.
fn no_loose_truth(accepts: &Accepts, args: &[String]) -> Result<(), Refusal> {
    let switch = |arg: &String| {
        let named = accepts.options.iter().find(|o| arg.strip_prefix("--") == Some(o.name))?;
        (named.takes == Takes::Switch).then_some(named.name)
    };
    let loose = args.windows(2).find_map(|w| switch(&w[0]).filter(|_| is_truth(&w[1])).map(|n| (n, &w[1])));
    match loose {
        Some((name, value)) => Err(Refusal::usage(format!("--{name} {value}: write --{name}={value}"))),
        None => Ok(()),
    }
}

/// Converts `--lora_r` to `--lora-r`, so that YAML keys work as flags.
fn dashed(arg: &str) -> String {
    match arg.strip_prefix("--") {
        Some(rest) if !rest.is_empty() => {
            let (name, value) = rest.split_once('=').map_or((rest, None), |(n, v)| (n, Some(v)));
            let value = value.map(|v| format!("={v}")).unwrap_or_default();
            format!("--{}{value}", name.replace('_', "-"))
        }
        _ => arg.to_string(),
    }
}

fn one_line(accepts: &Accepts, e: &clap::Error) -> Refusal {
    let text = |kind| match e.get(kind) {
        Some(ContextValue::String(s)) => s.clone(),
        Some(ContextValue::Strings(s)) => s.join(" "),
        _ => String::new(),
    };
    let arg = text(ContextKind::InvalidArg);
    let help = format!("see `{} --help`", accepts.name);
    let line = match e.kind() {
        ErrorKind::UnknownArgument if arg.starts_with('-') => {
            let typed = arg.trim_start_matches('-');
            let known = accepts.options.iter().map(|o| o.name);
            match nearest(typed, known) {
                Some(n) => format!("unknown option {arg}: did you mean --{n}? ({help})"),
                None => format!("unknown option {arg} ({help})"),
            }
        }
        ErrorKind::UnknownArgument => format!("unexpected argument {arg:?} ({help})"),
        ErrorKind::TooManyValues => {
            format!("unexpected argument {:?} ({help})", text(ContextKind::InvalidValue))
        }
        ErrorKind::ArgumentConflict => format!("{arg} is given twice"),
        ErrorKind::InvalidValue | ErrorKind::TooFewValues | ErrorKind::NoEquals => {
            format!("{arg} needs a value ({help})")
        }
        _ => {
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default();
            format!("{} ({help})", first.trim_start_matches("error: "))
        }
    };
    Refusal::usage(line)
}

#[cfg(test)]
mod tests {
    use super::super::{Settings, table::TABLE};
    use super::*;

    /// Checks the value of `name` after parsing `args`, or the error.
    fn check(args: &[&str], name: &str, expected: &str) {
        let options = || TABLE.iter().collect::<Vec<_>>();
        let accepts = Accepts {
            name: "finetune".into(),
            about: "",
            positional: Some(Positional { name: "MODEL", most: 1, help: "" }),
            options: options(),
            epilogue: String::new(),
        };
        let args: Vec<String> = args.iter().map(|a| a.to_string()).collect();
        let got = match parse(&accepts, &args) {
            Ok(Parsed::Typed(_, typed)) => {
                Settings::resolve(&options(), vec![typed]).map(|s| s.list(name).join("|"))
            }
            Ok(Parsed::Text(_)) => Ok("help".into()),
            Err(e) => Err(e),
        };
        let got = got.unwrap_or_else(|e| format!("{}: {}", e.code(), e.line));
        assert_eq!(got, expected, "{args:?}");
    }

    #[test]
    fn bare_foreign_flag_is_true_or_an_error() {
        check(&["--sample-packing"], "packing", "true");
        check(&["--sample-packing", "false"], "packing", "false");
        check(&["--use_rslora", "--lora_r", "4"], "rslora", "true");
        check(&["--use-rslora=no"], "rslora", "no");
        check(&["--completion-only-loss"], "rank", "16");
        check(&["--train-on-inputs=false", "--bf16"], "rank", "16");
        check(&["--lora-alpha", "8"], "alpha", "8");
        for name in ["lora-alpha", "lr", "optim", "warmup-ratio", "micro-batch-size"] {
            let line =
                format!("2: --{name} <{0}> needs a value (see `finetune --help`)", name.replace('-', "_"));
            check(&[&format!("--{name}"), "--rank", "8"], "alpha", &line);
        }
        check(&["--packing=false"], "packing", "false");
        check(&["--packing", "--rslora=on"], "packing", "true");
        check(&["--no-packing"], "packing", "false");
        check(&["--no-shuffle=false"], "shuffle", "true");
        check(&["--no-shuffle"], "shuffle", "false");
        check(&["--packing", "false"], "packing", "2: --packing false: write --packing=false");
        let line = "2: --rslora: \"m\" is neither true nor false (an argument goes before --rslora)";
        check(&["--rslora=m"], "rslora", line);
        let line = "2: --bf16: \"m\" is neither true nor false (an argument goes before --bf16)";
        check(&["--bf16", "m"], "rank", line);
    }

    #[test]
    fn short_and_other_names_are_flags() {
        check(&["-c", "a.yaml"], "config", "a.yaml");
        check(&["-m", "owner/name"], "model", "owner/name");
        check(&["-d", "a.jsonl", "-d", "b.jsonl"], "data", "a.jsonl|b.jsonl");
        check(&["--force"], "overwrite", "true");
        check(&["--device", "cpu"], "gpus", "cpu");
        check(&["--compute-dtype", "f32"], "dtype", "f32");
        check(&["--expect-devices", "2"], "expect-workers", "2");
        check(&["--min_devices", "2"], "min-workers", "2");
    }

    #[test]
    fn only_aliases_of_every_verb_are_known_to_all() {
        let known = |verb: &str, flag: &str| {
            let accepts = super::super::verb::VERBS.iter().find(|v| v.name == verb).unwrap().accepts();
            command(&accepts).get_arguments().any(|a| a.get_long() == Some(flag))
        };
        for (verb, flag, expected) in [
            ("generate", "device", true),
            ("generate", "compute-dtype", true),
            ("generate", "force", false),
            ("merge", "force", true),
            ("generate", "max-length", false),
            ("train", "max-length", true),
            ("report", "device", false),
        ] {
            assert_eq!(known(verb, flag), expected, "{verb} --{flag}");
        }
    }

    #[test]
    fn bare_aliases_match_switch_options() {
        let all: Vec<&str> = alias::all().collect();
        assert!(all.iter().any(|k| alias::is_switch(k)));
        for (theirs, ours) in alias::ALIASES {
            let switch = TABLE.iter().any(|o| o.key() == *ours && o.takes == Takes::Switch);
            assert_eq!(alias::is_switch(theirs), switch, "{theirs}");
        }
    }
}
