//! run.yaml: the resolved configuration of a run, every value with its origin, and the facts of the run under `run:`.
//! The file is valid for --config: the same reader reads it and skips the facts.

use crate::config::demo;
use crate::config::groups::weighted;
use crate::config::table::{Section, TABLE, Takes};
use crate::config::values::named_path;
use crate::config::{Origin, Settings, yaml};
use crate::format::{FormatError, atomic};
use crate::train::event::{Event, Step};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The run.yaml of a run that has begun.
pub struct RunFile<'a> {
    path: PathBuf,
    settings: &'a Settings,
    facts: Vec<(&'static str, String)>,
    classes: BTreeSet<String>,
}

impl<'a> RunFile<'a> {
    /// Writes the file. Numeric classes that are unknown now are added after their first computation.
    pub fn write(
        path: PathBuf,
        settings: &'a Settings,
        facts: Vec<(&'static str, String)>,
        classes: Vec<String>,
    ) -> Result<Self, FormatError> {
        let file = RunFile { path, settings, facts, classes: classes.into_iter().collect() };
        atomic::write_file(&file.path, file.text().as_bytes())?;
        Ok(file)
    }

    /// Adds numeric classes from a step's event.
    pub fn see(&mut self, event: &Event) {
        let Event::Step(Step { shared: Some(shared), .. }) = event else { return };
        let known = self.classes.len();
        self.classes.extend(shared.classes.keys().cloned());
        if self.classes.len() > known {
            // The run continues where its description cannot be written.
            let _ = atomic::write_file(&self.path, self.text().as_bytes());
        }
    }

    fn text(&self) -> String {
        let classes = self.classes.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let mut facts = self.facts.clone();
        facts.push(("numeric_class", classes));
        text(self.settings, &facts)
    }
}

/// The fact that says what prompts are: `chat`, turns of the chat template; or `plain`.
pub const PROMPTS: &str = "prompts";
/// Prompts are turns of the chat template.
pub const CHAT: &str = "chat";

/// Options that do not describe the run itself.
const LEFT_OUT: [&str; 3] = ["config", "resume", "overwrite"];

/// Options with files that are read: recorded as absolute paths where they exist, so that the run can be resumed from
/// any folder. Other values stay: a Hub id, `chatml`, standard input.
const READ: [&str; 7] =
    ["model", "chat-template", "data", "eval-data", "init-adapter", "reference-adapter", "token-file"];
/// Options with files and folders that are written: recorded as absolute paths.
const WRITTEN: [&str; 3] = ["log-json", "tensorboard", "model-cache"];

/// The recorded form of a value.
fn recorded(name: &str, value: &str) -> String {
    if name == "data"
        && let (path, Some(weight)) = weighted(value)
    {
        return format!("{}={weight}", recorded(name, path));
    }
    if let ("eval-data", (set, path)) = (name, named_path(value))
        && !set.is_empty()
    {
        return format!("{set}={}", recorded("data", path));
    }
    let reserved = name == "model" && value == demo::NAME || value == "-";
    let written = WRITTEN.contains(&name);
    let is_path = !reserved && (written || READ.contains(&name) && Path::new(value).exists());
    match std::path::absolute(value) {
        Ok(path) if is_path => path.display().to_string(),
        _ => value.to_string(),
    }
}

/// The text of the file.
pub fn text(settings: &Settings, facts: &[(&str, String)]) -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut text =
        format!("# finetune {version}: the resolved configuration of this run; `--config` reads it back.\n");
    for section in Section::ALL {
        text += &format!("{}:\n", section.name());
        for opt in TABLE.iter().filter(|o| o.section == section && !LEFT_OUT.contains(&o.name)) {
            let Some(setting) = settings.get(opt.name) else { continue };
            let list = matches!(opt.takes, Takes::Many(_) | Takes::Commas(_));
            let value = |v: &String| match opt.takes {
                // `1e3` is a prompt, not a number.
                Takes::Many("TEXT") => json(v),
                _ => quoted(&recorded(opt.name, v)),
            };
            let values: Vec<String> = setting.values.iter().map(value).collect();
            let value = match values.as_slice() {
                // A flag without its optional value.
                [] if setting.source == Origin::Flag && matches!(opt.takes, Takes::Optional(_)) => {
                    "true".into()
                }
                [] => "null".to_string(),
                [one] if !list => one.clone(),
                many => format!("[{}]", many.join(", ")),
            };
            text += &format!("  {}: {value}  # {}\n", opt.key(), setting.source);
        }
    }
    text += &format!("{}:  # facts, not options\n", yaml::FACTS);
    for (key, value) in facts {
        text += &format!("  {key}: {}\n", quoted(value));
    }
    text
}

/// A fact in the run.yaml at `path`, where present: written by [`text`], one per line.
pub fn fact(path: &Path, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let (_, facts) = text.split_once(&format!("\n{}:", yaml::FACTS))?;
    let value = facts.lines().find_map(|line| line.trim_start().strip_prefix(key)?.strip_prefix(": "))?;
    Some(serde_json::from_str(value).unwrap_or_else(|_| value.to_owned()))
}

/// A scalar that YAML reads back as the same text.
fn quoted(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_./+-%".contains(c);
    let safe = value.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/' || c == '_');
    let word = ["null", "yes", "no", "on", "off", "y", "n"].contains(&value.to_lowercase().as_str());
    match safe && !word && value.chars().all(plain) {
        true => value.to_string(),
        false => json(value),
    }
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Typed;

    #[test]
    fn run_file_round_trips() {
        let flag = |key: &str, values: &[&str]| Typed {
            key: key.into(),
            values: values.iter().map(|v| v.to_string()).collect(),
            source: Origin::Flag,
        };
        let typed = vec![
            flag("model", &["owner/name@main"]),
            flag("data", &["a b.jsonl", "-", "c:\\d # e.jsonl"]),
            flag("sample_prompt", &["Say \"hi\"\nto: me", "no", "1e3", "True"]),
            flag("learning_rate", &["2e-4"]),
            flag("data_fields", &["prompt=q", "completion=a"]),
            flag("rslora", &["true"]),
            flag("dashboard", &[]),
        ];
        let options: Vec<_> = TABLE.iter().collect();
        let first = Settings::resolve(&options, vec![typed]).unwrap();
        let text = text(&first, &[("steps", "12".into()), ("note", "a: b".into())]);
        assert!(text.contains("  rank: 16  # default\n"), "{text}");
        assert!(text.contains("  rslora: true  # flag\n"), "{text}");
        assert!(text.contains("  dashboard: true  # flag\n"), "{text}");
        let again = yaml::parse(&text, Path::new("run.yaml")).unwrap();
        let again = Settings::resolve(&options, vec![again]).unwrap();
        for o in TABLE.iter().filter(|o| o.name != "dashboard") {
            let number = |v: &String| v.parse::<f64>().map_or(v.clone(), |n| n.to_string());
            let list = |s: &Settings| s.list(o.name).iter().map(number).collect::<Vec<_>>();
            assert_eq!(list(&first), list(&again), "{}\n{text}", o.name);
        }
    }
    #[test]
    fn local_files_are_recorded_by_absolute_path() {
        let here = std::env::current_dir().unwrap().display().to_string();
        for (name, value, expected) in [
            ("data", "Cargo.toml", format!("{here}/Cargo.toml")),
            ("eval-data", "code=Cargo.toml", format!("code={here}/Cargo.toml")),
            ("data", "-", "-".into()),
            ("data", "Cargo.toml=0.5", format!("{here}/Cargo.toml=0.5")),
            ("data", "owner/name:train=2", "owner/name:train=2".into()),
            ("data", "no/such/file", "no/such/file".into()),
            ("model", "demo", "demo".into()),
            ("model", "demo/model", format!("{here}/demo/model")),
            ("model", "owner/name", "owner/name".into()),
            ("chat-template", "chatml", "chatml".into()),
            ("log-json", "logs/log.jsonl", format!("{here}/logs/log.jsonl")),
            ("tensorboard", "/tb", "/tb".into()),
            ("output", "out", "out".into()),
        ] {
            assert_eq!(recorded(name, value), expected, "{name} {value}");
        }
    }
}
