//! `finetune inspect PATH`: describes a model, an adapter, a run or a file of rows. With rows and --model, it shows the
//! supervised part of each row, in colour on a terminal (NO_COLOR is respected), else in brackets.

mod rows;

use super::invocation::Invocation;
use crate::config::groups::{field_names, learn, long_rows, whole};
use crate::config::refusal::Refusal;
use crate::config::{Settings, yaml};
use crate::data::files::{self, Flow};
use crate::data::form::{self, Form};
use crate::data::splits::Purpose;
use crate::data::{self, LabelMap};
use crate::format::peft;
use crate::run::base_model::{self, BaseModel};
use crate::run::folder::{RUN_FILE, run_of};
use crate::run::row_sets::{files_of, on_hub};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Describes the path.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let Some(path) = inv.positional.first().map(PathBuf::from) else {
        return Err(Refusal::usage("nothing to inspect: give the PATH of a model, an adapter or rows"));
    };
    if path.join(peft::CONFIG).exists() {
        return adapter(inv, &path);
    }
    let name = path.display().to_string();
    let gguf = path.extension().is_some_and(|e| e == "gguf");
    // `owner/name` is a model, unless another one reads it.
    let is_name = !path.exists() && is_model_name(&name) && !inv.settings.is_given("model");
    if gguf || path.join("config.json").exists() || is_name {
        return model(inv, &name);
    }
    let hub = on_hub(&name).is_some();
    if !path.exists() && name != "-" && !hub {
        let way = "give a model's directory or .gguf file, a run's folder, a file of rows, or owner/name:SPLIT of the Hub";
        return Err(Refusal::failure(format!("{name}: no such file or directory: {way}")));
    }
    let paths = if path.is_dir() { folder(&path)? } else { files_of(&path, Purpose::Train)? };
    if inv.settings.is_given("model") { rows::run(inv, &paths) } else { forms(inv, &paths) }
}

fn is_model_name(name: &str) -> bool {
    name == crate::config::demo::NAME || crate::format::looks_like_id(name.split('@').next().unwrap_or(name))
}

fn folder(path: &Path) -> Result<Vec<PathBuf>, Refusal> {
    let f = files::folder(path)?;
    Ok(f.train.into_iter().chain(f.eval).chain(f.test).collect())
}

fn print(inv: &mut Invocation, facts: &[(&str, Value)]) -> Result<(), Refusal> {
    if inv.json {
        let all: serde_json::Map<String, Value> =
            facts.iter().map(|(k, v)| (k.to_string(), v.clone())).collect();
        return inv.say(&Value::from(all).to_string());
    }
    let width = facts.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
    for (key, value) in facts {
        let value = match value {
            Value::String(s) => s.clone(),
            Value::Array(a) => a
                .iter()
                .map(|v| v.as_str().map_or(v.to_string(), String::from))
                .collect::<Vec<_>>()
                .join(", "),
            Value::Null => "-".into(),
            v => v.to_string(),
        };
        inv.say(&format!("{key:<width$}  {value}"))?;
    }
    Ok(())
}

fn model(inv: &mut Invocation, name: &str) -> Result<(), Refusal> {
    let mut base = base_model::open(name)?;
    let (parameters, stored) = parameters(&base)?;
    let tokenizer = base.tokenizer(inv.settings.text("chat-template")?)?;
    let c = &base.config;
    let stop: Vec<String> = base
        .stop_ids(&tokenizer)
        .iter()
        .map(|id| tokenizer.decode(&[*id], data::tokenizer::Skip::Nothing).unwrap_or_default())
        .collect();
    let facts = [
        ("model", json!(base.path.display().to_string())),
        ("architecture", json!(c.architecture())),
        ("weights", json!(base.files.kind)),
        ("stored", json!(stored)),
        ("parameters", json!(parameters)),
        ("layers", json!(c.layers)),
        ("hidden", json!(c.hidden)),
        ("feed_forward", json!(c.feed_forward)),
        (
            "experts",
            c.experts.as_ref().map_or(Value::Null, |of| {
                json!(format!("{} of {} for each token, inner size {}", of.chosen, of.count, of.feed_forward))
            }),
        ),
        ("heads", json!(format!("{} query, {} key/value, size {}", c.heads.query, c.heads.kv, c.heads.size))),
        ("vocabulary", json!(c.vocab)),
        ("positions", json!(c.max_positions)),
        ("tied_head", json!(c.tied)),
        ("labels", c.labels.as_ref().map_or(Value::Null, |l| json!(l))),
        ("tokenizer", json!(format!("{} tokens", tokenizer.vocab_size()))),
        ("chat_template", json!(if tokenizer.template().is_some() { "yes" } else { "no" })),
        ("ends_with", json!(stop)),
        ("base_id", json!(base.files.base_id)),
        ("revision", json!(base.files.revision)),
    ];
    print(inv, &facts)
}

/// Count of numbers in all tensors, and bytes by type; weights are not read.
fn parameters(base: &BaseModel) -> Result<(u64, Vec<String>), Refusal> {
    let (mut n, mut bytes) = (0, BTreeMap::new());
    for name in base.files.tensors.names() {
        let Some(about) = base.files.tensors.about(&name).map_err(Refusal::failure)? else { continue };
        let numbers: usize = about.shape.iter().product();
        n += numbers as u64;
        *bytes.entry(about.encoding).or_insert(0) += about.encoding.size_of(numbers);
    }
    let mut largest: Vec<_> = bytes.into_iter().collect();
    largest.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    let said = largest.iter().map(|(e, bytes)| format!("{} {:.1} MB", e.name(), *bytes as f64 / 1e6));
    Ok((n, said.collect()))
}

fn adapter(inv: &mut Invocation, dir: &Path) -> Result<(), Refusal> {
    let a = peft::read(dir)?;
    let c = &a.config;
    let values: usize = a.tensors.iter().map(|t| t.values.len()).sum();
    let layers = a
        .tensors
        .iter()
        .filter_map(|t| t.name.split(".layers.").nth(1)?.split('.').next()?.parse::<u64>().ok());
    let norm = |suffix: &str| {
        let of = a.tensors.iter().filter(|t| t.name.contains(suffix)).flat_map(|t| &t.values);
        of.map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt()
    };
    let about = c.to_json();
    let scale = c.lora_alpha / if c.use_rslora { (c.r as f64).sqrt() } else { c.r as f64 };
    let mut facts = vec![
        ("adapter", json!(dir.display().to_string())),
        ("task", about["task_type"].clone()),
        ("base", json!(c.base_model_name_or_path)),
        ("rank", json!(c.r)),
        ("alpha", json!(c.lora_alpha)),
        ("scale", json!(scale)),
        ("rslora", json!(c.use_rslora)),
        ("dora", json!(c.use_dora)),
        ("rank_pattern", about["rank_pattern"].clone()),
        ("alpha_pattern", about["alpha_pattern"].clone()),
        ("dropout", json!(c.lora_dropout)),
        ("target_modules", json!(c.target_modules)),
        ("layers", json!(layers.max().map(|l| l + 1))),
        ("tensors", json!(a.tensors.len())),
        ("values", json!(values)),
        ("norm_of_a", json!(norm("lora_A"))),
        ("norm_of_b", json!(norm("lora_B"))),
        ("labels", a.labels.as_ref().map_or(Value::Null, |l| json!(l))),
    ];
    let run = run_of(dir).join(RUN_FILE);
    if let Ok(typed) = yaml::read(&run) {
        let model = typed.iter().find(|t| t.key == "model").map(|t| t.values.concat());
        facts.push(("trained_on", json!(model)));
        facts.push(("run", json!(run.display().to_string())));
    }
    print(inv, &facts)
}

/// Describes rows without a model: their forms and fields.
fn forms(inv: &mut Invocation, paths: &[PathBuf]) -> Result<(), Refusal> {
    let mut options = options(&inv.settings, None)?;
    let (mut rows, mut by_form, mut fields) = (0u64, BTreeMap::new(), BTreeMap::new());
    let mut first_bad = None;
    let given = inv.settings.is_given("task");
    let most = options.max_rows.unwrap_or(u64::MAX);
    for path in paths {
        if rows == most {
            break;
        }
        files::read(path, &mut |row| {
            rows += 1;
            let value = row.raw.parse();
            if let Ok(Value::Object(map)) = &value {
                map.keys().for_each(|k| *fields.entry(k.clone()).or_insert(0u64) += 1);
                if !given && rows == 1 {
                    let has = |names: &[&str]| names.iter().all(|name| map.contains_key(*name));
                    options.task = match () {
                        () if has(&["chosen", "rejected"]) => data::Task::Pairs,
                        () if has(&["prompt", "completion", "label"]) => data::Task::Unpaired,
                        () if has(&["tokens"])
                            && ["tags", "ner_tags", "labels"].iter().any(|t| has(&[t])) =>
                        {
                            data::Task::Tag
                        }
                        () if map.get("label").is_some_and(is_numbers) => data::Task::Regress,
                        () if has(&["label"]) => data::Task::Classify,
                        () => options.task,
                    };
                }
            }
            let name = match value.and_then(|v| form::of(&v, &options)) {
                Ok(form) => form_name(&form),
                Err(reason) => {
                    first_bad.get_or_insert(format!("{}: {reason}", row.place));
                    "unusable"
                }
            };
            *by_form.entry(name).or_insert(0u64) += 1;
            Ok(if rows == most { Flow::Stop } else { Flow::Continue })
        })?;
    }
    let list = |m: Vec<(String, u64)>| m.iter().map(|(k, n)| format!("{k} {n}")).collect::<Vec<_>>();
    let mut facts = vec![
        ("rows", json!(rows)),
        ("forms", json!(list(by_form.into_iter().map(|(k, n)| (k.to_string(), n)).collect()))),
        ("fields", json!(list(fields.into_iter().collect()))),
    ];
    facts.extend(delimiters(paths));
    if let Some(bad) = first_bad {
        facts.push(("first_unusable", json!(bad)));
    }
    print(inv, &facts)?;
    if inv.json {
        return Ok(());
    }
    inv.say("with --model MODEL: tokens, lengths, and what of each row is supervised")
}

/// The detected delimiter of tables; `None` where there are no tables.
fn delimiters(paths: &[PathBuf]) -> Option<(&'static str, Value)> {
    let mut found: Vec<&str> = paths.iter().filter_map(|path| files::delimiter(path)).collect();
    found.dedup();
    (!found.is_empty()).then(|| ("delimiter", json!(found)))
}

fn form_name(form: &Form) -> &'static str {
    match form {
        Form::Text(_) => "text",
        Form::Pair { .. } => "prompt/completion",
        Form::Alpaca(_) => "instruction/output",
        Form::Chat(_) => "messages",
        Form::Answers { wanted: None, .. } => "chosen/rejected",
        Form::Answers { .. } => "completion/label",
        Form::Class { .. } => "classification",
        Form::Words { .. } => "tokens/tags",
        Form::Numbers { .. } => "regression",
    }
}

/// Whether a label is no class.
fn is_numbers(label: &Value) -> bool {
    label.is_array() || label.is_f64()
}

fn options(s: &Settings, base: Option<&BaseModel>) -> Result<data::Options, Refusal> {
    let task = match (s.text("task")?, s.text("loss")?) {
        (Some("classify"), _) => data::Task::Classify,
        (Some("regression"), _) => data::Task::Regress,
        (Some("token-classification" | "token_classification" | "ner"), _) => data::Task::Tag,
        (Some("reward" | "rm"), _) => data::Task::Reward,
        (_, Some("apo_zero_unpaired")) => data::Task::Unpaired,
        (Some("dpo" | "ipo" | "orpo" | "cpo" | "simpo"), _) => data::Task::Pairs,
        _ => data::Task::Sft,
    };
    let longest = base.map_or(usize::MAX, |b| b.config.max_positions);
    Ok(data::Options {
        task,
        learn: learn(s, task)?,
        long: long_rows(s, task)?,
        fields: field_names(s)?,
        max_seq_len: whole(s, "max-seq-len", 2)?.unwrap_or(2048.min(longest)),
        num_classes: whole(s, "num-classes", 2)?,
        labels: base
            .and_then(|b| b.config.labels.clone())
            .filter(|_| task.has_classes())
            .map(|names| LabelMap { names }),
        max_rows: whole(s, "max-rows", 1)?.map(|n| n as u64),
        unique: s.switch("drop-duplicates")?,
        threads: whole(s, "threads", 1)?.unwrap_or(0),
        ..data::Options::default()
    })
}
