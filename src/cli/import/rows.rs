//! Paths of the rows in another trainer's configuration: files, and data sets of the Hub. An entry of LLaMA-Factory's
//! `dataset_info.json` is read where that file exists.

use super::{Dialect, Import, is_empty, scalar, turns, word};
use crate::data::files::holds_rows;
use crate::data::form::is_field;
use crate::format::looks_like_id;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

const HUB: &str = "neither a file of rows nor a data set of the Hub (owner/name): name one under data";

/// Converts all keys about rows.
pub fn take(import: &mut Import, dialect: Dialect, keys: &Map<String, Value>, path: &Path) {
    for (key, ours) in [("datasets", "data"), ("test_datasets", "eval_data")] {
        if let Some(Value::Array(sets)) = keys.get(key) {
            axolotl(import, (key, ours), sets);
        }
    }
    for (key, ours) in [("dataset", "data"), ("eval_dataset", "eval_data")] {
        if let Some(value) = keys.get(key).filter(|v| !is_empty(v)) {
            let folder = keys.get("dataset_dir").map_or("data".into(), scalar);
            let of_texts = keys.get("stage").is_some_and(|stage| stage == "pt");
            llama_factory(import, (key, ours), (value, of_texts), &info(path, &folder));
        }
    }
    let files = keys.get("data_files").filter(|v| !is_empty(v));
    if let Some(value) = files {
        data_files(import, value);
    }
    // With files the name is their format.
    if let Some(name) = keys.get("dataset_name").filter(|v| !is_empty(v) && files.is_none()) {
        trl(import, keys, &scalar(name));
    }
    if let Some(Value::String(field)) = keys.get("dataset_text_field")
        && field != "text"
    {
        import.set("data_fields", word(&format!("text={field}")), "dataset_text_field");
    }
    if dialect == Dialect::Trl && !keys.contains_key("lora_target_modules") {
        let why = "TRL leaves it to PEFT, mostly q_proj and v_proj; all-linear is meant here unless you say otherwise";
        import.lost.push(("lora_target_modules".into(), "nothing".into(), why.into()));
    }
}

/// LLaMA-Factory is started in the parent of its data folder; its own examples are elsewhere.
fn info(path: &Path, folder: &str) -> PathBuf {
    let beside = path.parent().unwrap_or(Path::new(".")).join(folder).join("dataset_info.json");
    let here = Path::new(folder).join("dataset_info.json");
    if !beside.is_file() && here.is_file() { here } else { beside }
}

/// Converts a file, a list of files, or either by split.
fn data_files(import: &mut Import, value: &Value) {
    let list = |files: &Value| {
        let all: Vec<String> = scalar(files).split(',').map(|f| word(f.trim())).collect();
        format!("[{}]", all.join(", "))
    };
    let Some(splits) = value.as_object() else { return import.set("data", list(value), "data_files") };
    for (split, files) in splits {
        match split.as_str() {
            "train" => import.set("data", list(files), "data_files: train"),
            "test" | "validation" | "eval" => {
                import.set("eval_data", list(files), format!("data_files: {split}"))
            }
            _ => import.lose(&format!("data_files: {split}"), files, "only data and eval_data exist"),
        }
    }
}

fn is_file(name: &str) -> bool {
    holds_rows(Path::new(name)) || name.starts_with(['.', '/'])
}

/// Our name of a data set of the Hub; `None` for other names and for a part of a split.
fn on_hub(
    (id, ours): (&str, &str),
    config: Option<String>,
    split: Option<String>,
    revision: Option<String>,
) -> Option<String> {
    let config = config.filter(|c| c != "default");
    // Without a split --data takes `train`, and --eval-data others.
    let part = match (config, split.filter(|s| s != "train" || ours != "data")) {
        (_, Some(split)) if split.contains(['[', '+']) => return None,
        (None, None) => String::new(),
        (Some(one), None) | (None, Some(one)) => format!(":{one}"),
        (Some(config), Some(split)) => format!(":{config}/{split}"),
    };
    let revision = revision.map(|r| format!("@{r}")).unwrap_or_default();
    looks_like_id(id).then(|| format!("{id}{part}{revision}"))
}

/// Converts TRL's data set. Its rows for evaluation are used if there are evaluations.
fn trl(import: &mut Import, keys: &Map<String, Value>, name: &str) {
    let text = |key: &str| keys.get(key).filter(|v| !is_empty(v)).map(scalar);
    if is_file(name) {
        return import.set("data", word(name), "dataset_name");
    }
    match on_hub((name, "data"), text("dataset_config"), text("dataset_train_split"), None) {
        Some(set) => import.set("data", word(&set), "dataset_name"),
        None => return import.lose("dataset_name", &Value::from(name), HUB),
    }
    let evaluates = text("eval_strategy").is_some_and(|v| v != "no" && v != "false");
    let split = text("dataset_test_split").or_else(|| Some("test".into()));
    if let Some(set) = on_hub((name, "eval_data"), text("dataset_config"), split, None).filter(|_| evaluates)
    {
        import.set("eval_data", word(&set), "dataset_test_split");
    }
}

/// The files of a data set of Axolotl's, or its name on the Hub.
fn files_of(
    import: &mut Import,
    (key, ours): (&str, &str),
    (path, named): (&str, Option<Vec<String>>),
    text: &dyn Fn(&str) -> Option<String>,
) -> Vec<String> {
    match named {
        Some(named) if looks_like_id(path) => {
            let revision = text("revision").map(|r| format!("@{r}")).unwrap_or_default();
            named.iter().map(|file| format!("{path}:{}{revision}", file.trim())).collect()
        }
        Some(named) => named,
        None if is_file(path) => vec![path.to_owned()],
        None => {
            let set = on_hub((path, ours), text("name"), text("split"), text("revision"));
            if set.is_none() {
                import.lose(&format!("{key}: path"), &Value::from(path), HUB);
            }
            set.into_iter().collect()
        }
    }
}

/// Converts a list of data sets, each with a path, a type, and names of fields.
fn axolotl(import: &mut Import, (key, ours): (&str, &str), sets: &[Value]) {
    let (mut files, mut fields) = (Vec::new(), Vec::new());
    for set in sets {
        let text = |name: &str| set.get(name).filter(|v| !is_empty(v)).map(scalar);
        let path = text("path").unwrap_or_default();
        let named = text("data_files").map(|f| f.split(',').map(String::from).collect::<Vec<_>>());
        let hub = looks_like_id(&path);
        files.extend(files_of(import, (key, ours), (&path, named), &text));
        custom_prompt(import, key, set);
        let Some(map) = set.as_object() else { continue };
        only_marked(import, key, map);
        let turns = turns::axolotl(import, key, map);
        let messages = text("field_messages").unwrap_or_else(|| match text("type") {
            Some(kind) if kind.starts_with("sharegpt") => "conversations".into(),
            _ => "messages".into(),
        });
        if messages != turns {
            fields.push(format!("{turns}={messages}"));
        }
        let inner = |name: &str| set.get("type").and_then(|t| t.get(name)).map(scalar).or_else(|| text(name));
        for (theirs, form) in FIELDS {
            if let Some(name) = inner(theirs).filter(|name| name != form) {
                fields.push(format!("{form}={name}"));
            }
        }
        for (lost, value) in map.iter().filter(|(name, value)| !is_known(name) && !is_empty(value)) {
            match (lost.as_str(), scalar(value).as_str()) {
                ("roles_to_train", "assistant") | ("train_on_eos", "turn") | ("split", "train") => {}
                ("split", _) if hub => {}
                ("message_field_training", "train" | "training" | "weight") => {}
                ("ds_type", kind) if files.iter().all(|f| f.trim_end_matches('l').ends_with(kind)) => {}
                ("roles_to_train" | "train_on_eos" | "message_field_training", _) => {
                    import.lose(
                        &format!("{key}: {lost}"),
                        value,
                        "the assistant's turns and their ends are trained on; in rows, `train: true` marks others",
                    );
                }
                _ => import.lose(
                    &format!("{key}: {lost}"),
                    value,
                    "rows are what their file and their fields say",
                ),
            }
        }
    }
    let list =
        |names: &[String]| format!("[{}]", names.iter().map(|f| word(f)).collect::<Vec<_>>().join(", "));
    if !files.is_empty() {
        import.set(ours, list(&files), key);
    }
    fields.sort();
    fields.dedup();
    if !fields.is_empty() && ours == "data" {
        import.set("data_fields", list(&fields), format!("{key}: field names"));
    }
}

/// Without a role to train, marked messages alone are trained on.
fn only_marked(import: &mut Import, key: &str, set: &Map<String, Value>) {
    if set.get("roles_to_train").and_then(Value::as_array).is_some_and(Vec::is_empty) {
        import.set("learn", "marked", format!("{key}: roles_to_train: []"));
    }
}

/// Fields of a data set, and our fields.
const FIELDS: &[(&str, &str)] = &[
    ("field_instruction", "instruction"),
    ("field_input", "input"),
    ("field_output", "output"),
    ("field_system", "system"),
    ("field", "text"),
    ("field_chosen", "chosen"),
    ("field_rejected", "rejected"),
];

/// Whether a key of a data set is converted or has no effect.
fn is_known(name: &str) -> bool {
    let carried = ["path", "data_files", "type", "name", "trust_remote_code", "revision", "field_messages"];
    let turns = ["message_property_mappings", "message_field_role", "message_field_content"];
    carried.contains(&name) || turns.contains(&name) || FIELDS.iter().any(|(theirs, _)| *theirs == name)
}

fn custom_prompt(import: &mut Import, key: &str, set: &Value) {
    if let Some(custom @ Value::Object(_)) = set.get("type") {
        let why = "the chat template makes the prompt, or the Alpaca prompt";
        import.lose(&format!("{key}: type"), custom, why);
    }
}

/// Converts names, each an entry of dataset_info.json with the file and the names of its columns.
fn llama_factory(
    import: &mut Import,
    (key, ours): (&str, &str),
    (names, of_texts): (&Value, bool),
    info: &Path,
) {
    let known: Option<Value> = std::fs::read_to_string(info).ok().and_then(|t| serde_json::from_str(&t).ok());
    let (mut files, mut fields) = (Vec::new(), Vec::new());
    for name in scalar(names).split(',').map(str::trim).filter(|n| !n.is_empty()) {
        let entry = known.as_ref().and_then(|all| all.get(name));
        let file = entry.and_then(|e| e.get("file_name")).and_then(Value::as_str);
        let hub = entry.and_then(|entry| of_entry(entry, ours));
        match (entry, file, hub) {
            (Some(entry), Some(file), _) => {
                let path = info.parent().unwrap_or(Path::new(".")).join(file);
                files.push(word(&path.display().to_string()));
                fields.extend(columns(import, name, (entry, of_texts)));
            }
            (Some(entry), None, Some(set)) => {
                files.push(word(&set));
                fields.extend(columns(import, name, (entry, of_texts)));
            }
            _ if is_file(name) => files.push(word(name)),
            _ => {
                let why = "an entry of dataset_info.json: name the file that it stands for under data";
                import.lose(key, &Value::from(name), why);
            }
        }
    }
    if !files.is_empty() {
        import.set(ours, format!("[{}]", files.join(", ")), key);
    }
    fields.sort();
    fields.dedup();
    if !fields.is_empty() && ours == "data" {
        import.set("data_fields", format!("[{}]", fields.join(", ")), format!("{key}: columns"));
    }
}

/// The data set of the Hub that an entry names.
fn of_entry(entry: &Value, ours: &str) -> Option<String> {
    let text = |key: &str| entry.get(key).filter(|v| !is_empty(v)).map(scalar);
    let split = text("split").or_else(|| Some("train".into()));
    on_hub((&text("hf_hub_url")?, ours), text("subset"), split, None)
}

/// FORM=ROW of an entry; columns without an equivalent are lost. `of_texts`: the prompt is all that is learnt.
fn columns(import: &mut Import, name: &str, (entry, of_texts): (&Value, bool)) -> Vec<String> {
    let mut fields = Vec::new();
    let columns = entry.get("columns").and_then(Value::as_object);
    let turns = turns::llama_factory(import, name, entry);
    for (theirs, column) in columns.into_iter().flatten() {
        let form = match theirs.as_str() {
            "prompt" if of_texts => "text",
            "prompt" => "instruction",
            "query" => "input",
            "response" => "output",
            "messages" => turns,
            same => same,
        };
        let column = scalar(column);
        if !is_field(form) {
            import.lose(&format!("dataset: {name}: {theirs}"), &Value::from(column), "rows are text alone");
        } else if column != form {
            fields.push(word(&format!("{form}={column}")));
        }
    }
    for (lost, value) in entry.as_object().into_iter().flatten() {
        let usual = ["file_name", "columns", "tags", "hf_hub_url", "ms_hub_url", "formatting", "ranking"];
        let of_hub = ["subset", "split"].contains(&lost.as_str()) && of_entry(entry, "data").is_some();
        let said =
            !of_hub && !usual.contains(&lost.as_str()) && !is_empty(value) && *value != Value::Bool(false);
        if said {
            let why = "rows are what their file and their fields say";
            import.lose(&format!("dataset: {name}: {lost}"), value, why);
        }
    }
    fields
}
