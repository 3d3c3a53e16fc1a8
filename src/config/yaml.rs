//! A configuration file as (key, values, line). Keys are at the top level or under their section's heading; a mapping
//! under any other key, or a key under another section's heading, is an error with its line.

use super::alias;
use super::refusal::{self, Refusal, nearest};
use super::table;
use super::typed::{Origin, Typed};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_yaml::Spanned;
use std::fmt;
use std::path::Path;

/// A node with its line.
struct Node {
    line: u64,
    value: Value,
}

enum Value {
    Nothing,
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(Spanned<String>, Node)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let s = Spanned::<Value>::deserialize(d)?;
        Ok(Node { line: s.referenced.line(), value: s.value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value, a list or a mapping")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Scalar(v.to_string()))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Scalar(v.to_string()))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Scalar(v.to_string()))
    }
    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Scalar(v.to_string()))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Scalar(v.to_string()))
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Nothing)
    }
    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Nothing)
    }
    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        d.deserialize_any(ValueVisitor)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut a: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = a.next_element()? {
            list.push(node);
        }
        Ok(Value::List(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut a: A) -> Result<Value, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = a.next_entry()? {
            map.push(entry);
        }
        Ok(Value::Map(map))
    }
}

/// The section of run.yaml with the facts of a run, for users; no code reads it as configuration.
pub const FACTS: &str = "run";

/// Maximum number of values and lists in a file; contents of an alias count at every use.
const MOST_NODES: usize = 10_000;

/// Reads a file.
pub fn read(path: &Path) -> Result<Vec<Typed>, Refusal> {
    let text = std::fs::read_to_string(path).map_err(refusal::at(path))?;
    parse(&text, path)
}

/// Parses `text` of the file `path`.
pub fn parse(text: &str, path: &Path) -> Result<Vec<Typed>, Refusal> {
    if text.lines().all(|l| l.trim().is_empty() || l.trim_start().starts_with('#')) {
        return Ok(Vec::new());
    }
    let options =
        serde_yaml::options! { with_snippet: false, budget: serde_yaml::budget! { max_nodes: MOST_NODES } };
    let root: Node = serde_yaml::from_str_with_options(text, options).map_err(|e| {
        let line = e.location().map(|l| format!(":{}", l.line())).unwrap_or_default();
        Refusal::configuration(format!("{}{line}: not YAML: {}", path.display(), e.without_snippet()))
    })?;
    let Value::Map(entries) = root.value else {
        return Err(refuse(path, root.line, "a configuration is a mapping of `key: value` lines".into()));
    };
    let mut typed = Vec::new();
    for (key, node) in entries {
        if key.value == FACTS && matches!(node.value, Value::Map(_)) {
            continue;
        }
        match node.value {
            Value::Map(inner) if !holds_pairs(&key.value) => section(&mut typed, path, &key, inner)?,
            _ => typed.extend(scalar(path, &key, node)?),
        }
    }
    Ok(typed)
}

fn section(
    typed: &mut Vec<Typed>,
    path: &Path,
    heading: &Spanned<String>,
    inner: Vec<(Spanned<String>, Node)>,
) -> Result<(), Refusal> {
    let names = || table::Section::ALL.iter().map(|s| s.name());
    let line = heading.referenced.line();
    if !names().any(|n| n == heading.value) {
        let hint = nearest(&heading.value, names()).map_or(String::new(), |n| format!("; did you mean {n}?"));
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(refuse(
            path,
            line,
            format!("unknown section {}{hint} (expected one of {known})", heading.value),
        ));
    }
    for (key, node) in inner {
        if let Some(opt) = table::find(&key.value.replace('_', "-"))
            && opt.section.name() != heading.value
        {
            let line = key.referenced.line();
            let why = format!("{} belongs under {}, not {}", key.value, opt.section.name(), heading.value);
            return Err(refuse(path, line, why));
        }
        typed.extend(scalar(path, &key, node)?);
    }
    Ok(())
}

fn scalar(path: &Path, key: &Spanned<String>, node: Node) -> Result<Option<Typed>, Refusal> {
    let line = key.referenced.line();
    let one = |node: Node| match node.value {
        Value::Scalar(s) => Ok(s),
        _ => Err(refuse(path, node.line, format!("{}: expected a value here", key.value))),
    };
    let values = match node.value {
        Value::Nothing => return Ok(None),
        Value::Scalar(s) => vec![s],
        Value::List(list) => list.into_iter().map(one).collect::<Result<_, _>>()?,
        Value::Map(pairs) if holds_pairs(&key.value) => {
            let paths = key.value.replace('-', "_") == "eval_data";
            // A list of paths is a path each.
            let pairs = pairs.into_iter().flat_map(|(name, node)| match node.value {
                Value::List(list) if paths => list.into_iter().map(|one| (name.clone(), one)).collect(),
                _ => vec![(name, node)],
            });
            let pair = |(name, node): (Spanned<String>, Node)| {
                let line = node.line;
                let value = json(&node).ok_or_else(|| {
                    refuse(path, line, format!("{}: {}: expected a value here", key.value, name.value))
                })?;
                Ok(format!("{}={value}", name.value))
            };
            pairs.map(pair).collect::<Result<_, Refusal>>()?
        }
        Value::Map(_) => return Err(refuse(path, line, format!("{}: expected a value here", key.value))),
    };
    let source = Origin::File { path: path.to_path_buf(), line };
    Ok(Some(Typed { key: key.value.replace('-', "_"), values, source }))
}

/// Whether a mapping under this key is a list of NAME=VALUE.
fn holds_pairs(key: &str) -> bool {
    let key = key.replace('-', "_");
    let key = alias::ours(&key).unwrap_or(&key);
    let takes_pairs = |opt: &table::Opt| {
        ["template-args", "eval-data", "rank-pattern", "alpha-pattern"].contains(&opt.name)
    };
    table::find(&key.replace('_', "-")).is_some_and(takes_pairs)
}

/// A value or a list of values, as it is written in a NAME=VALUE.
fn json(node: &Node) -> Option<String> {
    match &node.value {
        Value::Nothing => Some("null".into()),
        Value::Scalar(text) => Some(text.clone()),
        Value::List(items) => {
            let items = items.iter().map(|item| match &item.value {
                Value::Scalar(text) => {
                    let value = serde_json::from_str::<serde_json::Value>(text);
                    Some(value.unwrap_or_else(|_| text.as_str().into()).to_string())
                }
                _ => json(item),
            });
            Some(format!("[{}]", items.collect::<Option<Vec<_>>>()?.join(", ")))
        }
        Value::Map(_) => None,
    }
}

fn refuse(path: &Path, line: u64, why: String) -> Refusal {
    Refusal::configuration(format!("{}:{line}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected: `key=v1|v2@line` joined with spaces, or the error.
    fn check(text: &str, expected: &str) {
        let got = match parse(text, Path::new("c.yaml")) {
            Ok(t) => t
                .iter()
                .map(|t| {
                    let Origin::File { line, .. } = &t.source else { panic!("{t:?}") };
                    format!("{}={}@{line}", t.key, t.values.join("|"))
                })
                .collect::<Vec<_>>()
                .join(" "),
            Err(e) => {
                assert_eq!(e.code(), 78, "{e}");
                e.line
            }
        };
        assert!(got.contains(expected), "{text:?}\n  gave {got}\n  want {expected}");
    }

    #[test]
    fn yaml_files_give_settings_with_line_numbers() {
        check("rank: 8\nlearning_rate: 2e-4\n", "rank=8@1 learning_rate=0.0002@2");
        check("# c\n\npacking: false\ndata: [a.jsonl, b.jsonl]\n", "packing=false@3 data=a.jsonl|b.jsonl@4");
        check(
            "lora:\n  rank: 8\n  target_modules:\n    - q_proj\n    - v_proj\n",
            "rank=8@2 target_modules=q_proj|v_proj@3",
        );
        check("seed: 18446744073709551615\nmax_steps:\n", "seed=18446744073709551615@1");
        check("run:\n  anything: 1\nrank: 4\n", "rank=4@3");
        check("model: owner/name\ndata:\n  data: \"x # y\"\n", "model=owner/name@1 data=x # y@3");
        check(
            "model:\n  template_args: {a: false, b: [x, 1], c: low}\n",
            "template_args=a=false|b=[\"x\", 1]|c=low@2",
        );
        check(
            "eval_data: {code: c.jsonl, chat: [a.jsonl, b.jsonl]}\n",
            "eval_data=code=c.jsonl|chat=a.jsonl|chat=b.jsonl@1",
        );
        check("chat_template_kwargs: {a: null}\n", "chat_template_kwargs=a=null@1");
        check("eval-data: {chat: [a.jsonl, b.jsonl]}\n", "eval_data=chat=a.jsonl|chat=b.jsonl@1");
        check("chat-template-kwargs: {a: 1}\n", "chat_template_kwargs=a=1@1");
        check("\n# nothing\n", "");
    }

    #[test]
    fn invalid_yaml_is_refused_with_its_line() {
        check("rank: 8\nlora: {rank: [1, {a: 2}]}\n", "c.yaml:2: rank: expected a value");
        check("lora:\n  epochs: 3\n", "c.yaml:2: epochs belongs under optim");
        check("loar:\n  rank: 3\n", "c.yaml:1: unknown section loar; did you mean lora?");
        check("- a\n- b\n", "c.yaml:1: a configuration is a mapping");
        check("rank: 8\n  bad: [\n", "c.yaml:");
        check("rank: 8\nrank: 9\n", "c.yaml:2");
        // Lists of lists by aliases, each ten times larger than the previous one.
        let tens =
            |i: usize| format!("a{}: &a{} [{}]\n", i + 1, i + 1, vec![format!("*a{i}"); 10].join(", "));
        let bomb = (0..8).map(tens).fold("a0: &a0 [x, x]\n".to_string(), |all, line| all + &line);
        check(&bomb, "not YAML: budget breached: Nodes { nodes: 10001 }");
    }
}
