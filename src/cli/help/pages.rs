//! Completions and man pages. Their source is a larger command than the one that parses: its subcommands are the verbs,
//! and it lists the possible words of options with a fixed set.

use crate::cli::invocation::Invocation;
use crate::config::flags;
use crate::config::refusal::{self, Refusal};
use crate::config::table::{Opt, Takes};
use crate::config::verb::{VERBS, Verb};
use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, ValueHint};
use clap_complete::Shell;
use std::path::Path;

/// `finetune completions SHELL`
pub fn completions(inv: &mut Invocation) -> Result<(), Refusal> {
    let names = || Shell::value_variants_names().join(", ");
    let Some(name) = inv.positional.first() else {
        return Err(Refusal::usage(format!("for which shell? finetune completions SHELL ({})", names())));
    };
    let shell: Shell = name
        .parse()
        .map_err(|_| Refusal::usage(format!("{name:?} is no shell that is known: {}", names())))?;
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut tree(), "finetune", &mut text);
    inv.say(String::from_utf8_lossy(&text).trim_end())
}

/// `finetune man [DIR]`: the page of `finetune`, or a folder of all pages.
pub fn man(inv: &mut Invocation) -> Result<(), Refusal> {
    let Some(dir) = inv.positional.first().cloned() else {
        return inv.say(page(root())?.trim_end());
    };
    let dir = Path::new(&dir);
    std::fs::create_dir_all(dir).map_err(refusal::at(dir))?;
    let verbs =
        VERBS.iter().map(|v| (format!("finetune-{}.1", v.name), one(v, format!("finetune-{}", v.name))));
    for (name, command) in verbs.chain([("finetune.1".to_string(), root())]) {
        let path = dir.join(name);
        std::fs::write(&path, page(command)?).map_err(refusal::at(&path))?;
    }
    inv.say(&dir.display().to_string())
}

fn page(command: Command) -> Result<String, Refusal> {
    let mut text = Vec::new();
    let broken = |e| Refusal::failure(format!("man page: {e}"));
    clap_mangen::Man::new(command).render(&mut text).map_err(broken)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The default verb, which is `finetune` itself.
fn root() -> Command {
    one(&VERBS[0], "finetune".into())
}

/// The command `finetune` with all verbs.
fn tree() -> Command {
    VERBS.iter().fold(root(), |tree, v| tree.subcommand(one(v, v.name.into())))
}

fn one(verb: &Verb, name: String) -> Command {
    let accepts = verb.accepts();
    let words = |id: &str| accepts.options.iter().find(|o| o.name == id).and_then(|o| words(o));
    let command = flags::command(&accepts).name(name).disable_help_subcommand(true);
    let positional = match verb.positional {
        "SHELL" => Shell::value_variants_names(),
        "TOPIC" => VERBS.iter().map(|v| v.name).chain(super::TOPICS.iter().map(|(n, ..)| *n)).collect(),
        _ => Vec::new(),
    };
    let known = |arg: Arg| match words(arg.get_id().as_str()) {
        Some(values) => arg.value_parser(PossibleValuesParser::new(values)),
        None if arg.is_positional() && !positional.is_empty() => {
            arg.value_parser(PossibleValuesParser::new(positional.clone()))
        }
        None if is_path(&arg) => arg.value_hint(ValueHint::AnyPath),
        None => arg,
    };
    command.mut_args(known)
}

fn is_path(arg: &Arg) -> bool {
    let shown = arg.get_value_names().unwrap_or_default();
    shown.iter().any(|name| ["PATH", "DIR", "FILE", "MODEL"].iter().any(|word| name.contains(word)))
}

/// The words of an option with a fixed set: `sft|classify`. Placeholders are in capitals, examples are numbers.
fn words(o: &Opt) -> Option<Vec<&'static str>> {
    let (Takes::One(shown) | Takes::Commas(shown)) = o.takes else { return None };
    let closed = shown.contains('|') && !shown.contains(|c: char| c.is_ascii_uppercase() || c == ',');
    closed.then(|| shown.split('|').collect())
}

/// The shells with completions.
trait Names {
    fn value_variants_names() -> Vec<&'static str>;
}

impl Names for Shell {
    fn value_variants_names() -> Vec<&'static str> {
        vec!["bash", "zsh", "fish", "elvish", "powershell"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_and_option_is_in_the_completions_of_every_shell() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut tree(), "finetune", &mut text);
            let text = String::from_utf8(text).unwrap();
            for v in VERBS {
                assert!(text.contains(v.name), "{shell}: {}", v.name);
                for o in v.accepts().options {
                    assert!(text.contains(o.name), "{shell}: {} --{}", v.name, o.name);
                }
            }
        }
    }

    #[test]
    fn every_verb_has_a_man_page_with_its_options() {
        for v in VERBS {
            let text = page(one(v, format!("finetune-{}", v.name))).unwrap();
            assert!(text.contains(".TH") && text.contains(".SH NAME"), "{}", v.name);
            for o in v.accepts().options {
                // roff writes a literal hyphen as \\-.
                assert!(text.contains(&o.name.replace('-', "\\-")), "{}: --{}", v.name, o.name);
            }
        }
    }

    #[test]
    fn closed_lists_are_completed() {
        let takes = |name: &str| words(super::super::TABLE.iter().find(|o| o.name == name).unwrap());
        assert_eq!(takes("quantize"), Some(vec!["none", "nf4", "nf4-double", "q8_0"]));
        assert_eq!(takes("role"), Some(vec!["single", "coordinator", "worker", "auto"]));
        assert_eq!(takes("gpus"), None);
        assert_eq!(takes("coordinator"), None);
    }
}
