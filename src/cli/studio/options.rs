//! From the fields of the page to the arguments of a command line. Only options whose files and folders can be confined
//! to the root are taken, and each is one argument `--NAME=VALUE`: no shell reads them.

use super::root::{Root, wrong};
use crate::cli::listening::Failure;
use crate::config::alias;
use crate::config::demo;
use crate::config::table::{Opt, Section, TABLE, Takes, find};
use crate::config::values::{named_path, weighted};
use crate::data::files::holds_rows;
use crate::format::is_id;
use crate::run::folder::{RUNS, stem};
use serde_json::{Map, Value};
use std::path::Path;

/// Sections whose options the page takes, except for those that name files.
const SECTIONS: [Section; 5] =
    [Section::Model, Section::Data, Section::Lora, Section::Optim, Section::Devices];
/// Further options.
const MORE: [&str; 15] = [
    "output",
    "eval-steps",
    "save-steps",
    "save-total-limit",
    "keep-best",
    "best-metric",
    "early-stopping",
    "token-accuracy",
    "sample-prompt",
    "sample-rows",
    "role",
    "bind",
    "expect-workers",
    "min-workers",
    "stages",
];

/// The fields of the page: options of a run by name.
pub struct Fields(Vec<(&'static Opt, Vec<String>)>);

/// The options that the page takes.
pub fn all() -> impl Iterator<Item = &'static Opt> {
    TABLE.iter().filter(|o| SECTIONS.contains(&o.section) || MORE.contains(&o.name))
}

impl Fields {
    /// Reads and checks the fields; options without a value are left out.
    pub fn read(fields: &Map<String, Value>, root: &Root) -> Result<Self, Failure> {
        let mut out: Vec<(&Opt, Vec<String>)> = Vec::new();
        for (key, value) in fields {
            let key = key.trim().replace('-', "_");
            let name = alias::ours(&key).unwrap_or(&key).replace('_', "-");
            let unknown = || {
                let way = "name an option of `finetune help options`";
                let why =
                    if find(&name).is_some() { "is not for the page: use the command line" } else { way };
                wrong(format!("{key}: {why}"))
            };
            let option = all().find(|o| o.name == name).ok_or_else(unknown)?;
            let values = match value {
                Value::Array(all) => all.iter().map(text).collect::<Result<Vec<_>, _>>(),
                one => text(one).map(|one| vec![one]),
            };
            let values: Vec<String> = values.map_err(|why| wrong(format!("{key}: {why}")))?;
            let values: Vec<String> = values.into_iter().filter(|v| !v.is_empty()).collect();
            if values.is_empty() {
                continue;
            }
            if out.iter().any(|(known, _)| known.name == option.name) {
                return Err(wrong(format!("{key}: is given twice")));
            }
            let values = values.iter().map(|v| confined(option.name, v, root)).collect::<Result<_, _>>()?;
            out.push((option, values));
        }
        Ok(Fields(out))
    }

    /// The first value of an option.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (_, values) = self.0.iter().find(|(option, _)| option.name == name)?;
        values.first().map(String::as_str)
    }

    /// The folder of the run; where none is named, the first free one that is not in `taken`.
    pub fn output(&mut self, root: &Root, taken: &[String]) -> Result<String, Failure> {
        if let Some(dir) = self.get("output") {
            return Ok(dir.to_string());
        }
        let stem = stem(self.get("model").unwrap_or(demo::NAME));
        let names = (1..).map(|n| format!("{RUNS}/{stem}-{n}"));
        let free = |name: &String| !root.0.join(name).exists() && !taken.contains(name);
        let name = names.into_iter().find(free).unwrap_or_default();
        // `runs` may be a link that leads elsewhere.
        root.fresh(&name)?;
        self.0.extend(find("output").map(|option| (option, vec![name.clone()])));
        Ok(name)
    }

    /// The arguments, in the order of the table; only those in `known` if that is given.
    pub fn arguments(&self, known: Option<&[&str]>) -> Vec<String> {
        let mut out = Vec::new();
        for option in all().filter(|o| known.is_none_or(|known| known.contains(&o.name))) {
            let Some((_, values)) = self.0.iter().find(|(own, _)| own.name == option.name) else { continue };
            match (option.takes, values[0].as_str()) {
                (Takes::Switch, "true") => out.push(format!("--{}", option.name)),
                (Takes::Switch, "false") if option.is_on() => out.push(format!("--no-{}", option.name)),
                (Takes::Switch, "false") => {}
                _ => out.extend(values.iter().map(|value| format!("--{}={value}", option.name))),
            }
        }
        out
    }
}

fn text(value: &Value) -> Result<String, &'static str> {
    match value {
        Value::String(text) if text.contains('\0') => Err("has a character that no argument may have"),
        Value::String(text) => Ok(text.trim().to_string()),
        Value::Number(_) | Value::Bool(_) => Ok(value.to_string()),
        Value::Null => Ok(String::new()),
        _ => Err("is no text, number or list of them"),
    }
}

/// The value with its path below the root.
fn confined(name: &str, value: &str, root: &Root) -> Result<String, Failure> {
    let inside = |text: &str| root.inside(text).map(|path| path.display().to_string());
    match name {
        "model" if value == demo::NAME => Ok(value.into()),
        "model" => input("model", value, root),
        "data" | "eval-data" if root.inside(value).is_ok() => inside(value),
        "data" => match weighted(value) {
            (path, Some(_)) => {
                let weight = &value[path.len()..];
                input(name, path, root).map(|path| path + weight)
            }
            _ => input(name, value, root),
        },
        "eval-data" => {
            let (_, path) = named_path(value);
            let prefix = &value[..value.len() - path.len()];
            input(name, path, root).map(|path| format!("{prefix}{path}"))
        }
        "chat-template" if value == "chatml" => Ok(value.into()),
        "chat-template" | "init-adapter" | "reference-adapter" => inside(value),
        "output" => root.fresh(value).map(|path| path.display().to_string()),
        "role" if !["single", "coordinator"].contains(&value) => {
            Err(wrong("role: the page starts runs as single or coordinator"))
        }
        _ => Ok(value.into()),
    }
}

/// A model or rows: a path below the root, or a name on the Hub.
fn input(name: &str, value: &str, root: &Root) -> Result<String, Failure> {
    let head = value.split(['@', ':']).next().unwrap_or(value);
    let named = is_id(head)
        && !value.contains("..")
        && !(name != "model" && head == value && holds_rows(Path::new(value)));
    match root.inside(value) {
        Err(_) if named && !root.0.join(value).exists() => Ok(value.into()),
        found => found.map(|path| path.display().to_string()),
    }
}

/// A command line as a shell reads it, to be copied.
pub fn line(arguments: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:@%+".contains(c);
    let quoted = |text: &String| match text.chars().all(plain) && !text.is_empty() {
        true => text.clone(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    };
    let words: Vec<String> = arguments.iter().map(quoted).collect();
    format!("finetune {}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(fields: Value) -> Result<Vec<String>, String> {
        let dir = tempfile::tempdir().unwrap();
        // One level down, so that `..` holds nothing of others.
        let root = Root(dir.path().canonicalize().unwrap().join("root"));
        std::fs::create_dir(&root.0).unwrap();
        for name in ["rows.jsonl", "a=b.jsonl"] {
            std::fs::write(root.0.join(name), "").unwrap();
        }
        let fields = Fields::read(fields.as_object().unwrap(), &root);
        let place = root.0.display().to_string();
        fields
            .map(|fields| fields.arguments(None))
            .map_err(|e| e.body()["error"]["message"].as_str().unwrap().replace(&place, "ROOT"))
    }

    #[test]
    fn fields_become_arguments() {
        let fields = json!({
            "data": ["rows.jsonl=0.5", "a=b.jsonl", "owner/set:train@main"], "model": "demo", "lora_r": 4,
            "packing": false, "rslora": "true", "eval-data": "code=rows.jsonl", "sample_prompt": ["-x; $(y)"],
            "epochs": "", "output": "runs/x", "keep_best": false,
        });
        let expected = [
            "--model=demo",
            "--data=rows.jsonl=0.5",
            "--data=a=b.jsonl",
            "--data=owner/set:train@main",
            "--eval-data=code=rows.jsonl",
            "--no-packing",
            "--rank=4",
            "--rslora",
            "--output=runs/x",
            "--sample-prompt=-x; $(y)",
        ];
        assert_eq!(read(fields).unwrap(), expected);
        assert_eq!(line(&["--a=b c".into(), "it's".into(), "d".into()]), r"finetune '--a=b c' 'it'\''s' d");
    }

    /// An option that is new must be confined, if it names a file.
    #[test]
    fn every_option_that_names_a_file_is_confined() {
        let names_file = |o: &&Opt| match o.takes {
            Takes::One(value) | Takes::Many(value) | Takes::Commas(value) | Takes::Optional(value) => {
                ["FILE", "DIR", "PATH", "FOLDER"].iter().any(|word| value.contains(word))
            }
            Takes::Switch => false,
        };
        let mut names: Vec<&str> = all().filter(names_file).map(|o| o.name).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["chat-template", "data", "eval-data", "init-adapter", "output", "reference-adapter"]
        );
    }

    #[test]
    fn fields_that_leave_the_root_or_are_unknown_are_refused() {
        for (fields, part) in [
            (json!({ "data": "../rows.jsonl" }), "../rows.jsonl: no such file"),
            (json!({ "data": "/etc/passwd" }), "is outside ROOT"),
            (json!({ "data": "/etc/passwd=0.5" }), "is outside ROOT"),
            (json!({ "eval_data": "x=/etc/passwd" }), "is outside ROOT"),
            (json!({ "data": "sets/rows.jsonl" }), "no such file"),
            (json!({ "data": "-" }), "no such file"),
            (json!({ "model": "/" }), "is outside ROOT"),
            (json!({ "init_adapter": "/tmp" }), "is outside ROOT"),
            (json!({ "chat-template": "/etc/passwd" }), "is outside ROOT"),
            (json!({ "output": "../x" }), "names no place"),
            (json!({ "log_json": "x" }), "log_json: is not for the page"),
            (json!({ "token_file": "rows.jsonl" }), "is not for the page"),
            (json!({ "role": "worker" }), "single or coordinator"),
            (json!({ "rnk": "4" }), "rnk: name an option"),
            (json!({ "rank": "4", "lora_r": "8" }), "given twice"),
            (json!({ "rank": {} }), "rank: is no text"),
            (json!({ "rank": "4\u{0}" }), "no argument may have"),
        ] {
            let line = read(fields.clone()).unwrap_err();
            assert!(line.contains(part) && line.lines().count() == 1, "{fields}: {line}");
        }
    }
}
