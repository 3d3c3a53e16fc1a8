//! What several keys say together: where TensorBoard's files go, how 4 bits are stored, and which adapter is kept.

use super::{Dialect, Import, is_empty, scalar};
use serde_json::{Map, Value};

/// Keys that are dealt with here.
pub const KEYS: &[&str] = &["report_to", "logging_dir"];

/// Takes all of them.
pub fn take(import: &mut Import, dialect: Dialect, keys: &Map<String, Value>) {
    let said = |key: &str| keys.get(key).filter(|v| !is_empty(v)).map(scalar);
    reports(import, said("report_to"), said("logging_dir"));
    // Both trainers call the same thing by another name, and LLaMA-Factory does it unless it is told not to.
    let double = match dialect {
        Dialect::LlamaFactory => said("double_quantization").is_none_or(|v| v != "false"),
        Dialect::Trl => said("use_bnb_nested_quant").is_some_and(|v| v == "true"),
        Dialect::Axolotl => false,
    };
    if let Some(line) = import.lines.iter_mut().find(|l| l.key == "quantize" && l.value == "nf4" && double) {
        line.value = "nf4-double".into();
    }
    if said("eval_strategy").or(said("evaluation_strategy")).is_some_and(|v| v == "steps") {
        let steps = said("logging_steps").unwrap_or("500".into());
        import.set_default(
            "eval_steps",
            steps,
            "eval_strategy: steps, of logging_steps where none are named",
        );
    }
    if dialect == Dialect::Axolotl && import.value_of("early_stopping").is_some_and(|n| n != "0") {
        import.set_default("keep_best", "true", "early_stopping_patience: Axolotl keeps the best with it");
    }
    if import.value_of("eval_steps").is_none_or(|steps| steps == "0") {
        let why = "it needs evaluations during the run: eval_steps, as eval_steps: epoch";
        if import.value_of("keep_best") == Some("true") {
            import.take_back("keep_best", why);
        }
        if import.value_of("early_stopping").is_some_and(|n| n != "0") {
            import.take_back("early_stopping", why);
        }
    }
    if import.value_of("best_metric").is_some() && import.value_of("task") != Some("classify") {
        import.take_back(
            "best_metric",
            "it is a classifier's (task: classify); the lowest loss is the best here",
        );
    }
    if dialect == Dialect::Trl && import.value_of("max_seq_len").is_none() {
        let remark = "max_seq_len: TRL cuts rows at 1024 tokens unless told otherwise; here they are cut at 2048, or at \
                      the model's positions where those are fewer";
        import.remarks.push(remark.into());
    }
}

/// TensorBoard is the one of them that is here.
fn reports(import: &mut Import, report_to: Option<String>, folder: Option<String>) {
    let names: Vec<String> = report_to.iter().flat_map(|all| all.split(',')).map(str::to_lowercase).collect();
    let board = names.iter().any(|n| n == "tensorboard" || n == "all");
    for name in names.iter().filter(|n| !["tensorboard", "all", "none", ""].contains(&n.as_str())) {
        import.lose(
            "report_to",
            &Value::from(name.as_str()),
            "nothing is sent there; metrics.jsonl has every number",
        );
    }
    match folder {
        // transformers reports to all that it finds where nobody says otherwise.
        Some(folder) if board || names.is_empty() => {
            import.set("tensorboard", super::word(&folder), "logging_dir")
        }
        Some(folder) => {
            import.lose(
                "logging_dir",
                &Value::from(folder),
                "report_to names no TensorBoard, whose folder it is",
            );
        }
        None if board => {
            import.lose(
                "report_to",
                &Value::from("tensorboard"),
                "name a folder for its files: tensorboard: DIR",
            );
        }
        None => {}
    }
}
