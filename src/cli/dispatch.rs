//! Maps a command line to its verb. The first word is a verb, or the MODEL of the default verb, which trains.

use super::invocation::{Invocation, written};
use super::{
    bench, chat, contracts, devices, doctor, eval, export, generate, help, import, inspect, plan, predict,
    push, report, serve, studio, token, train,
};
use crate::config::flags::{self, Parsed};
use crate::config::groups;
use crate::config::refusal::Refusal;
use crate::config::verb::{VERBS, Verb};
use crate::config::{Origin, Settings, Typed, engine, variables, yaml};
use crate::run::folder::{RUN_FILE, RUNS, run_of};
use crate::support::stderr::say;
use std::io::Write;
use std::path::{Component, Path};

/// Function of a verb.
type Act = fn(&mut Invocation) -> Result<(), Refusal>;

/// The functions of all [`VERBS`], in the same order.
const ACTS: &[(&str, Act)] = &[
    ("train", train::run),
    ("plan", plan::run),
    ("generate", generate::run),
    ("chat", chat::run),
    ("serve", serve::run),
    ("studio", studio::run),
    ("predict", predict::run),
    ("eval", eval::run),
    ("export", export::run),
    ("merge", export::run),
    ("push", push::run),
    ("inspect", inspect::run),
    ("token", token::run),
    ("devices", devices::run),
    ("selftest", devices::selftest),
    ("env", devices::env),
    ("bench", bench::run),
    ("report", report::run),
    ("contracts", contracts::run),
    ("doctor", doctor::run),
    ("import", import::run),
    ("help", help::run),
    ("completions", help::completions),
    ("man", help::man),
];

/// Words that users try as verbs, and the messages with the right command.
const NO_VERBS: [(&str, &str); 5] = [
    ("sft", "it is `finetune MODEL --data ROWS`, without a verb (`finetune help start`)"),
    ("dpo", "it is a task of training: finetune MODEL --data ROWS --task dpo"),
    ("dashboard", "add --dashboard to a training command (`finetune help watch`)"),
    ("worker", "it is `finetune --role worker --coordinator HOST:9000` (`finetune help cluster`)"),
    (
        "coordinator",
        "it is `finetune --role coordinator`, with the options of a run (`finetune help cluster`)",
    ),
];

/// Finds the verb and runs it.
pub fn dispatch(args: &[String]) -> Result<(), Refusal> {
    // A process of this program that tries kernels of a card.
    if let Some(verdict) = crate::devices::trial(args) {
        return written(writeln!(std::io::stdout(), "{verdict}"));
    }
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
    let (positional, layers) = layers(verb, positional, typed)?;
    let settings = Settings::resolve(&accepts.options, layers)?;
    let json = settings.switch("json")?;
    if let Some(threads) = groups::whole(&settings, "threads", 1)? {
        // Threads for work outside the backend. This fails only where a pool already exists, which is not the case
        // here.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(threads.min(1024)).build_global();
    }
    act(verb)(&mut Invocation { positional, settings, json, out: Box::new(std::io::stdout()) })
}

/// The function of a verb.
fn act(verb: &Verb) -> Act {
    let row = ACTS.iter().find(|(name, _)| *name == verb.name);
    row.map_or(help::run, |(_, act)| *act)
}

fn anstream_wanted() -> bool {
    use std::io::IsTerminal;
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Moves positional arguments that are options too (MODEL, or a file of options) to the options, and returns the layers
/// in order of priority.
fn layers(
    verb: &Verb,
    mut positional: Vec<String>,
    mut flags: Vec<Typed>,
) -> Result<(Vec<String>, Vec<Vec<Typed>>), Refusal> {
    // Without the option --config a verb reads no file, whatever the environment contains.
    let has_config = verb.accepts().options.iter().any(|o| o.name == "config");
    if verb.positional == "MODEL" && !positional.is_empty() {
        let key = if has_config && is_file_of_options(&positional[0]) { "config" } else { "model" };
        flags.push(Typed { key: key.into(), values: positional.split_off(0), source: Origin::Flag });
    }
    if let Some(line) = crate::devices::refused_limit().or_else(crate::devices::refused_wait) {
        return Err(Refusal::configuration(line));
    }
    // Verbs without options, such as help, check no variables.
    if verb.shared.is_none_or(|options| !options.is_empty()) {
        variables::check(std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()))?;
    }
    let environment = variables::environment(|v| std::env::var(v).ok());
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
    if [VERBS[0].name, "plan"].contains(&verb.name) {
        let found = engine::expand(&mut layers, &|name| std::env::var(name).ok(), crate::devices::cores())?;
        found.iter().for_each(|line| say!("{line}"));
        let more = train::more_layers(&layers)?;
        layers.extend(more);
    }
    Ok((positional, layers))
}

/// Joins the value of `--resume DIR` and `--dashboard :9080` with `=`: otherwise a word after a blank is an argument.
/// The word is joined where it can only be the value.
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

/// Whether a word is a run's folder or one of its checkpoints, or a path below `runs`, and so no model.
fn is_run(word: &str) -> bool {
    Path::new(word).is_dir() && run_of(Path::new(word)).join(RUN_FILE).exists() || is_default_folder(word)
}

/// Whether a word names a run by its default folder, which need not exist: `runs/demo-1` is no Hub id.
fn is_default_folder(word: &str) -> bool {
    let mut parts = Path::new(word).components().filter(|part| *part != Component::CurDir);
    parts.next() == Some(Component::Normal(RUNS.as_ref())) && parts.next().is_some()
}

/// Whether the argument in the place of MODEL is a YAML file, which may be missing.
fn is_file_of_options(word: &str) -> bool {
    let path = Path::new(word);
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    (ending == "yaml" || ending == "yml") && !path.is_dir()
}

/// Whether a word is HOST:PORT, :PORT or PORT, and not an existing file.
fn is_address(word: &str) -> bool {
    let port = word.rsplit_once(':').map_or(word, |(_, port)| port);
    port.parse::<u16>().is_ok() && !Path::new(word).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yaml_in_the_place_of_the_model_is_a_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("model.yaml");
        std::fs::create_dir(&folder).unwrap();
        for (word, expected) in [
            ("run.yaml", true),
            ("a/b.YML", true),
            ("owner/name", false),
            ("yaml", false),
            ("model.gguf", false),
            (folder.to_str().unwrap(), false),
        ] {
            assert_eq!(is_file_of_options(word), expected, "{word}");
        }
    }

    #[test]
    fn a_word_after_resume_is_a_run_or_the_model() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("out");
        std::fs::create_dir_all(run.join("checkpoint-3")).unwrap();
        std::fs::write(run.join(RUN_FILE), "").unwrap();
        let run = run.to_str().unwrap();
        let checkpoint = format!("{run}/checkpoint-3");
        for (word, joins) in [
            (run, true),
            (checkpoint.as_str(), true),
            ("runs/demo-7", true),
            ("./runs/demo-7", true),
            ("runs", false),
            ("owner/name", false),
            ("demo", false),
            (dir.path().to_str().unwrap(), false),
        ] {
            let joined = join_values(&["--resume".into(), word.into()]);
            assert_eq!(joined.len() == 1, joins, "{joined:?}");
        }
    }

    #[test]
    fn every_verb_has_its_act() {
        assert!(VERBS.iter().map(|v| v.name).eq(ACTS.iter().map(|(name, _)| *name)));
    }
}
