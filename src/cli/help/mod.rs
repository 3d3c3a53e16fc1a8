//! `finetune help [TOPIC]`, shell completions and man pages: all from the tables of verbs and options, so that they
//! list the same flags. (No other verb describes the others.) The explanation of a topic is a file of `topics/`,
//! embedded in the binary.

mod pages;
mod search;

use crate::cli::invocation::Invocation;
use crate::config::flags;
use crate::config::refusal::{Refusal, nearest};
use crate::config::table::{Section, TABLE};
use crate::config::verb;
use crate::families;
pub use pages::{completions, man};

macro_rules! topics {
    ($($name:literal: $about:literal),* $(,)?) => {
        &[$(($name, $about, include_str!(concat!("topics/", $name, ".txt")))),*]
    };
}

/// Name, one line, text; in the order of a first reading.
const TOPICS: &[(&str, &str, &str)] = topics![
    "start": "from nothing to an adapter, command by command",
    "data": "forms of rows, and which part of them is trained on",
    "model": "what can be trained, quantised bases, types of numbers",
    "training": "steps, batches, learning rate; what a run prints",
    "devices": "cards and CPUs, and why a card is not found",
    "cluster": "one run on several machines",
    "watch": "terminal, page, metrics, reports",
    "output": "what a run writes; stop and resume",
    "config": "YAML, environment, names of other trainers",
    "exit-codes": "for scripts and schedulers",
];

/// Prints the topic.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let topic = inv.positional.first().cloned();
    let text = match topic.as_deref() {
        None => overview(),
        Some("options" | "all") => return all_options(inv),
        Some(name) => match TOPICS.iter().find(|(n, ..)| *n == name) {
            Some((name, about, text)) => format!("{name}: {about}\n\n{}{}", complete(text), table(name)),
            None => return verb_or_option(inv, name),
        },
    };
    inv.say(&text)
}

/// Inserts the model families into the text of a topic, in lines of at most 95 characters.
fn complete(text: &str) -> String {
    let (mut list, mut column) = (String::new(), 0);
    for part in families::releases("and").split_inclusive(", ") {
        if column + part.len() > 95 {
            list.truncate(list.trim_end().len());
            list.push('\n');
            column = 0;
        }
        list += part;
        column += part.len();
    }
    text.trim_end().replace("{families}", &list)
}

fn overview() -> String {
    let mut text = String::from("finetune help TOPIC\n\n");
    for (name, about, _) in TOPICS {
        text += &format!("  {name:<12} {about}\n");
    }
    text += "  options      every option, in groups\n";
    text += "  OPTION       one option, as in `finetune help rank`\n";
    text + "  VERB         the options of a verb\n\nverbs:\n" + verb::lines().trim_end()
}

/// The options of a topic.
fn table(topic: &str) -> String {
    let section = match topic {
        "data" => Section::Data,
        "model" => Section::Model,
        "training" => Section::Optim,
        "devices" => Section::Devices,
        "cluster" => Section::Cluster,
        "output" => Section::Output,
        _ => return String::new(),
    };
    let options = TABLE.iter().filter(|o| o.section == section).collect();
    let accepts =
        flags::Accepts { name: String::new(), about: "", positional: None, options, epilogue: String::new() };
    let shown = flags::command(&accepts).disable_help_flag(true).disable_version_flag(true);
    format!("\n\n{}", shown.help_template("{all-args}").render_help().to_string().trim_end())
}

fn all_options(inv: &mut Invocation) -> Result<(), Refusal> {
    let text = flags::command(&verb::VERBS[0].accepts()).render_help().to_string();
    inv.say(text.trim_end())
}

fn verb_or_option(inv: &mut Invocation, name: &str) -> Result<(), Refusal> {
    if let Some(verb) = verb::VERBS.iter().find(|v| v.name == name) {
        let text = flags::command(&verb.accepts()).render_help().to_string();
        return inv.say(text.trim_end());
    }
    if let Some(text) = search::option(name).or_else(|| search::mentions(name, TOPICS)) {
        return inv.say(&text);
    }
    let known = TOPICS.iter().map(|(n, ..)| *n).chain(verb::VERBS.iter().map(|v| v.name));
    let hint = match nearest(name, known) {
        Some(n) => format!("did you mean `finetune help {n}`?"),
        None => "`finetune help` lists topics and verbs, `finetune help options` the options".into(),
    };
    Err(Refusal::usage(format!("no help on {name:?}: {hint}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_topic_are_wrapped() {
        for (topic, ..) in TOPICS {
            let text = table(topic);
            assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
            assert!(!text.contains("other trainers"), "{text}");
        }
        assert!(table("data").contains("--data-fields"));
    }

    #[test]
    fn topics_are_short_and_name_existing_options() {
        for (name, about, text) in TOPICS {
            let text = complete(text);
            assert!(text.lines().count() <= 45 && about.len() < 80, "{name}");
            assert!(text.lines().all(|l| l.chars().count() <= 100), "{name}: a line is too long");
            for word in text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')) {
                let Some(flag) = word.strip_prefix("--").filter(|f| f.len() > 1) else { continue };
                let own = verb::VERBS.iter().flat_map(|v| v.own).chain(TABLE).any(|o| o.name == flag);
                assert!(
                    own || ["help", "no-packing", "version"].contains(&flag),
                    "{name}: --{flag} is no option"
                );
            }
        }
    }
}
