//! Settings that depend on several keys: the path of TensorBoard's files, the type of 4-bit weights, the kept adapter, and
//! those of `together`.

use super::{Dialect, Import, is_empty, scalar, together};
use serde_json::{Map, Value};

/// Keys that this module converts.
pub const KEYS: &[&str] = &["report_to", "logging_dir"];

/// Converts all of these keys.
pub fn take(import: &mut Import, dialect: Dialect, keys: &Map<String, Value>) {
    let said = |key: &str| keys.get(key).filter(|v| !is_empty(v)).map(scalar);
    reports(import, said("report_to"), said("logging_dir"));
    together::take(import, dialect, keys);
    // Both trainers use other names for double quantisation, and LLaMA-Factory enables it by default.
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
    let best = match (import.value_of("best_metric"), import.value_of("task")) {
        (None | Some(_), Some("token-classification")) | (None, _) => None,
        (Some("f1"), Some("classify")) => Some("f1 is of words; a classifier's are accuracy and macro_f1"),
        (Some(_), Some("classify")) => None,
        (Some(_), _) => Some("it is a classifier's (task: classify); the lowest loss is the best here"),
    };
    best.into_iter().for_each(|why| import.take_back("best_metric", why));
    if dialect == Dialect::Trl && import.value_of("learn").is_none() {
        let remark = "learn: without assistant_only_loss TRL trains on all tokens of `messages`; here on the assistant's \
                      turns, unless it is all";
        import.remarks.push(remark.into());
    }
    if dialect == Dialect::Trl && import.value_of("max_seq_len").is_none() {
        let remark = "max_seq_len: TRL cuts rows at 1024 tokens unless set otherwise; here they are cut at 2048, or at \
                      the model's positions where those are fewer";
        import.remarks.push(remark.into());
    }
}

/// Of all reporters only TensorBoard is supported.
fn reports(import: &mut Import, report_to: Option<String>, folder: Option<String>) {
    let names: Vec<String> =
        report_to.iter().flat_map(|all| all.split(',')).map(|name| name.trim().to_lowercase()).collect();
    let board = names.iter().any(|n| n == "tensorboard" || n == "all");
    for name in names.iter().filter(|n| !["tensorboard", "all", "none", ""].contains(&n.as_str())) {
        import.lose(
            "report_to",
            &Value::from(name.as_str()),
            "nothing is sent there; metrics.jsonl has every number",
        );
    }
    match folder {
        // transformers reports to every installed service by default.
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

#[cfg(test)]
mod tests {
    use super::super::convert;
    use super::super::tests::check;
    use super::*;
    use crate::config::dialects::explanation;
    use std::path::Path;

    /// Keys that must not be dropped without a message, and common keys of TRL.
    #[test]
    fn keys_of_trl_are_carried_over_or_reported() {
        check(
            "
model_name_or_path: m
dataset_name: csv
data_files: {train: [a.csv, b.csv], test: c.csv}
lora_target_modules: all-linear
report_to: [tensorboard, wandb]
logging_dir: tb
optim: paged_adamw_8bit
eval_strategy: epoch
save_strategy: epoch
save_steps: 50
load_best_model_at_end: true
metric_for_best_model: eval_loss
greater_is_better: false
early_stopping_patience: 3
early_stopping_threshold: 0.0
dataset_test_split: test
pad_token: <pad>
use_bnb_nested_quant: true
load_in_4bit: true
use_cpu: true
",
            Dialect::Trl,
            &[
                "data: [a.csv, b.csv]",
                "eval_data: [c.csv]",
                "tensorboard: tb",
                "eval_steps: epoch",
                "save_steps: epoch",
                "keep_best: true",
                "early_stopping: 3",
                "quantize: nf4-double",
                "gpus: cpu",
            ],
            &["optim", "save_steps", "pad_token", "report_to"],
        );
    }

    #[test]
    fn keys_of_axolotl_are_carried_over_or_reported() {
        check(
            "
base_model: m
wandb_project: p
wandb_entity: e
wandb_mode: online
plugins: [x]
optimizer: paged_adamw_8bit
loss_watchdog_threshold: 5.0
loss_watchdog_patience: 3
s2_attention: true
saves_per_epoch: 1
evals_per_epoch: 2
early_stopping_patience: 2
shuffle_merged_datasets: false
flash_attention: true
wandb_watch:
",
            Dialect::Axolotl,
            &[
                "save_steps: epoch",
                "eval_steps: epoch/2",
                "early_stopping: 2",
                "keep_best: true",
                "shuffle: false",
            ],
            &[
                "wandb_project",
                "wandb_entity",
                "wandb_mode",
                "plugins",
                "optimizer",
                "loss_watchdog_threshold",
                "loss_watchdog_patience",
                "s2_attention",
            ],
        );
    }

    #[test]
    fn keys_without_effect_are_reported() {
        // Without evaluations there is no best adapter; accuracy exists for classifiers only; a folder without a
        // reporter is for TensorBoard.
        check(
            "stage: sft\nload_best_model_at_end: true\nmetric_for_best_model: accuracy\nlogging_dir: tb\nsave_strategy: best\n",
            Dialect::LlamaFactory,
            &["tensorboard: tb", "save_steps: 500"],
            &["save_strategy", "metric_for_best_model"],
        );
    }

    /// The default length is chosen by finetune, which knows the model.
    #[test]
    fn default_length_of_trl_gives_a_remark() {
        let path = Path::new("c.yaml");
        for (length, lines, remarks) in [("", 0, 1), ("max_length: 512\n", 1, 0)] {
            let text = format!("model_name_or_path: m\ndataset_name: a.csv\n{length}");
            let result = convert(&text, path, None).unwrap().1.render(path, Dialect::Trl);
            let count = |start: &str| result.lines().filter(|l| l.starts_with(start)).count();
            assert_eq!(
                (count("max_seq_len: 512"), count("# max_seq_len: TRL")),
                (lines, remarks),
                "{result}"
            );
            assert_eq!(count("max_seq_len"), lines, "{result}");
        }
    }

    /// Every key of the tables has an explanation for users who write it into a configuration of finetune.
    #[test]
    fn every_known_key_is_explained() {
        for (key, value, part) in [
            ("hub_model_id", "a/b", "`finetune push OUT owner/name` uploads the result, once; leave it out"),
            ("model_revision", "v1", "owner/name@revision"),
            ("plugins", "x", "none of it is run; leave it out"),
            ("wandb_project", "p", "metrics.jsonl"),
            ("neat_packing", "true", "this is packing here"),
            ("use_cpu", "true", "this is `gpus: cpu` here"),
            ("data_seed", "1", "one seed fixes everything"),
            ("dataset_name", "a/b", "finetune import FILE"),
        ] {
            let why = explanation(key, value).unwrap();
            assert!(why.contains(part), "{key}: {why}");
        }
        assert_eq!(explanation("mystery", "1"), None);
    }
}
