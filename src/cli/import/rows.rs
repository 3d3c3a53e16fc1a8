//! Where the rows of another trainer's configuration are. Files carry over; what has to be fetched from the Hub does
//! not, and the entry of LLaMA-Factory's `dataset_info.json` is looked up where that file is.

use super::{Dialect, Import, is_empty, scalar, word};
use serde_json::{Map, Value};
use std::path::Path;

/// Keys that are dealt with here.
pub const KEYS: &[&str] =
    &["datasets", "test_datasets", "dataset", "eval_dataset", "dataset_name", "dataset_text_field"];

const HUB: &str = "rows come from files: save them as .jsonl or .parquet and name the file under data";

/// Takes all of them.
pub fn take(import: &mut Import, dialect: Dialect, keys: &Map<String, Value>, path: &Path) {
    for (key, ours) in [("datasets", "data"), ("test_datasets", "eval_data")] {
        if let Some(Value::Array(sets)) = keys.get(key) {
            axolotl(import, (key, ours), sets);
        }
    }
    for (key, ours) in [("dataset", "data"), ("eval_dataset", "eval_data")] {
        if let Some(value) = keys.get(key).filter(|v| !is_empty(v)) {
            let folder = keys.get("dataset_dir").map_or("data".into(), scalar);
            let info = path.parent().unwrap_or(Path::new(".")).join(&folder).join("dataset_info.json");
            llama_factory(import, (key, ours), (value, &folder), &info);
        }
    }
    if let Some(name) = keys.get("dataset_name").filter(|v| !is_empty(v)) {
        one(import, ("dataset_name", "data"), name);
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

fn is_file(name: &str) -> bool {
    let known = [".jsonl", ".json", ".csv", ".parquet", ".ndjson"];
    known.iter().any(|end| name.ends_with(end)) || name.starts_with(['.', '/'])
}

fn one(import: &mut Import, (key, ours): (&str, &str), name: &Value) {
    let text = scalar(name);
    match is_file(&text) {
        true => import.set(ours, word(&text), key),
        false => import.lose(key, name, HUB),
    }
}

/// A list of sets, each with a path, a type, and names of fields.
fn axolotl(import: &mut Import, (key, ours): (&str, &str), sets: &[Value]) {
    let (mut files, mut fields) = (Vec::new(), Vec::new());
    for set in sets {
        let text = |name: &str| set.get(name).filter(|v| !is_empty(v)).map(scalar);
        let path = text("path").unwrap_or_default();
        let named = text("data_files").map(|f| f.split(',').map(String::from).collect::<Vec<_>>());
        match named {
            Some(named) => files.extend(named),
            None if is_file(&path) => files.push(path),
            None => import.lose(&format!("{key}: path"), &Value::from(path), HUB),
        }
        let kind = match set.get("type") {
            Some(custom @ Value::Object(_)) => {
                import.lose(
                    &format!("{key}: type"),
                    custom,
                    "the chat template makes the prompt, or the Alpaca prompt",
                );
                "alpaca".into()
            }
            _ => text("type").unwrap_or_default(),
        };
        let inner = |name: &str| set.get("type").and_then(|t| t.get(name)).map(scalar).or_else(|| text(name));
        for (theirs, form) in [
            ("field_messages", if kind == "sharegpt" { "conversations" } else { "messages" }),
            ("field_instruction", "instruction"),
            ("field_input", "input"),
            ("field_output", "output"),
            ("field_system", "system"),
            ("field", "text"),
        ] {
            if let Some(name) = inner(theirs).filter(|name| name != form) {
                fields.push(format!("{form}={name}"));
            }
        }
        for lost in
            ["roles_to_train", "train_on_eos", "message_field_training", "split", "shards", "conversation"]
        {
            let usual = [("roles_to_train", "assistant"), ("train_on_eos", "turn"), ("split", "train")];
            if let Some(value) = text(lost).filter(|v| !usual.contains(&(lost, v))) {
                import.lose(
                    &format!("{key}: {lost}"),
                    &Value::from(value),
                    "assistant turns and their ends are trained on",
                );
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

/// Names, each an entry of dataset_info.json, which says the file and what its columns are called.
fn llama_factory(
    import: &mut Import,
    (key, ours): (&str, &str),
    (names, folder): (&Value, &str),
    info: &Path,
) {
    let known: Option<Value> = std::fs::read_to_string(info).ok().and_then(|t| serde_json::from_str(&t).ok());
    let (mut files, mut fields) = (Vec::new(), Vec::new());
    for name in scalar(names).split(',').map(str::trim).filter(|n| !n.is_empty()) {
        let entry = known.as_ref().and_then(|all| all.get(name));
        match entry.and_then(|e| e.get("file_name")).and_then(Value::as_str) {
            Some(file) => {
                let path = info.parent().unwrap_or(Path::new(folder)).join(file);
                files.push(word(&path.display().to_string()));
                let columns = entry.and_then(|e| e.get("columns")).and_then(Value::as_object);
                for (theirs, column) in columns.into_iter().flatten() {
                    let form = match theirs.as_str() {
                        "prompt" => "instruction",
                        "query" => "input",
                        "response" => "output",
                        same => same,
                    };
                    let column = scalar(column);
                    if column != form {
                        fields.push(word(&format!("{form}={column}")));
                    }
                }
            }
            None if is_file(name) => files.push(word(name)),
            None => {
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
