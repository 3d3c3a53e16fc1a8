//! `finetune help NAME` where NAME is an option, or a word of the explanations.

use crate::config::alias;
use crate::config::table::{Opt, TABLE};
use crate::config::verb;

/// The help of an option of a run or of a verb, by its name here or in other trainers.
pub fn option(name: &str) -> Option<String> {
    let key = name.trim_start_matches('-').replace('-', "_");
    if let Some(o) = TABLE.iter().find(|o| o.key() == key) {
        return Some(format!("{}\nin a YAML file: {key}", line(o)));
    }
    if let Some(ours) = alias::ours(&key) {
        return option(ours).map(|text| format!("{key} is {ours} here\n{text}"));
    }
    let mut found: Vec<(String, Vec<&str>)> = Vec::new();
    for verb in verb::VERBS {
        let Some(line) = verb.own.iter().find(|o| o.key() == key).map(line) else { continue };
        match found.iter_mut().find(|(before, _)| *before == line) {
            Some((_, verbs)) => verbs.push(verb.name),
            None => found.push((line, vec![verb.name])),
        }
    }
    let texts = found.iter().map(|(line, verbs)| format!("{line}\nan option of {}", verbs.join(", ")));
    (!found.is_empty()).then(|| texts.collect::<Vec<_>>().join("\n\n"))
}

fn line(o: &Opt) -> String {
    let default = if o.default.is_empty() { String::new() } else { format!(" [{}]", o.default) };
    format!("--{}: {}{default}", o.name, o.help)
}

/// The options, verbs and topics whose text has this word.
pub fn mentions(word: &str, topics: &[(&str, &str, &str)]) -> Option<String> {
    let has = |text: &str| {
        text.split(|c: char| !c.is_alphanumeric()).any(|w| !w.is_empty() && w.eq_ignore_ascii_case(word))
    };
    let topics = topics.iter().filter(|(name, about, text)| [*name, about, text].iter().any(|t| has(t)));
    let topics = topics.map(|(name, about, _)| format!("  finetune help {name:<10} {about}"));
    let verbs = verb::VERBS.iter().filter(|v| has(v.about));
    let verbs = verbs.map(|v| format!("  finetune help {:<10} {}", v.name, v.about));
    let options = TABLE.iter().filter(|o| has(o.name) || has(o.help));
    let options = options.map(|o| format!("  --{:<22} {}", o.name, o.help));
    let all: Vec<String> = topics.chain(verbs).chain(options).collect();
    (!all.is_empty()).then(|| format!("{word} is mentioned in:\n{}", all.join("\n")))
}
