//! Conversion of other trainers' files. The keys are theirs, the examples are our own.

use super::*;
use crate::config::dialects::explanation;

/// Checks that the `key: value` lines `want` are in the result and the keys `lost` are lost.
pub(super) fn check(text: &str, dialect: Dialect, want: &[&str], lost: &[&str]) {
    let path = Path::new("theirs.yaml");
    let (found, import) = convert(text, path, None).unwrap_or_else(|e| panic!("{text}\n{e}"));
    assert_eq!(found, dialect, "{text}");
    let result = import.render(path, found);
    super::check(&result, path).unwrap_or_else(|e| panic!("{e}\n{result}"));
    let lines: Vec<&str> = result.lines().filter_map(|l| l.split("  # ").next()).collect();
    for line in want {
        assert!(lines.contains(line), "{line} is not in\n{result}");
    }
    let names: Vec<&str> = import.lost.iter().map(|(key, ..)| key.as_str()).collect();
    assert_eq!(names, lost, "{result}");
}

const AXOLOTL: &str = "
base_model: owner/base-1b
load_in_4bit: true
adapter: qlora
datasets:
  - path: rows/a.jsonl
    type: chat_template
    field_messages: turns
  - path: someone/set
    name: main
    split: train
    type: alpaca
  - path: other/set
    split: train_sft
    revision: v2
  - path: a/b
    data_files: c.jsonl
  - path: squad
dataset_prepared_path: prepared
val_set_size: 0.05
output_dir: ./outputs/one
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 4
weight_decay: 0.0
wandb_project:
special_tokens:
  pad_token: <pad>
flash_attention: true
";

#[test]
fn axolotl_configuration_is_converted() {
    check(
        AXOLOTL,
        Dialect::Axolotl,
        &[
            "model: owner/base-1b",
            "quantize: nf4",
            "data: [rows/a.jsonl, \"someone/set:main\", \"other/set:train_sft@v2\", \"a/b:c.jsonl\"]",
            "data_fields: [\"messages=turns\"]",
            "eval_split: 0.05",
            "output: ./outputs/one",
            "max_seq_len: 4096",
            "packing: true",
            "rank: 32",
            "alpha: 16",
            "dropout: 0.05",
            "target_modules: all-linear",
            "batch_size: 8",
            "epochs: 4",
            "lr_scheduler: cosine",
            "warmup_steps: 10%",
            "eval_steps: epoch/4",
        ],
        &["optimizer", "datasets: path"],
    );
    check("base_model: m\nadapter:\nrl: grpo\n", Dialect::Axolotl, &["model: m"], &["rl"]);
    check(
        "base_model: m\nlr_scheduler: one_cycle\nchat_template: llama3\nmystery: 3\nnum_epochs: 1.5\n",
        Dialect::Axolotl,
        &["epochs: 1", "lr_scheduler: cosine"],
        &["lr_scheduler", "chat_template", "mystery", "num_epochs"],
    );
    check(
        "base_model: m\nsequence_len: 64\nmax_steps: 20\nwarmup_steps: 10\n",
        Dialect::Axolotl,
        &["max_steps: 20", "warmup_steps: 10"],
        &[],
    );
}

#[test]
fn axolotls_class_names_of_every_family_are_known() {
    let of_family = crate::families::ALL.iter().map(|family| format!("{}ForCausalLM", family.name));
    let with_tower = crate::families::wrapped::ALL.iter().map(|wrapper| wrapper.class.to_owned());
    for class in of_family.chain(with_tower) {
        let said = explanation("model_type", &class).unwrap_or_default();
        assert_eq!(said, explanation("model_type", "AutoModelForCausalLM").unwrap_or_default(), "{class}");
    }
}

#[test]
fn llama_factory_configuration_is_converted() {
    check(
        "
model_name_or_path: owner/base-4b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4
dataset: identity,own.jsonl
template: qwen3
cutoff_len: 2048
preprocessing_num_workers: 16
output_dir: saves/one
overwrite_output_dir: true
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
eval_strategy: steps
",
        Dialect::LlamaFactory,
        &[
            "model: owner/base-4b",
            "quantize: nf4-double",
            "data: [own.jsonl]",
            "max_seq_len: 2048",
            "overwrite: true",
            "batch_size: 8",
            "epochs: 3",
            "learning_rate: 0.0001",
            "rank: 8",
            "alpha: 16",
            "target_modules: all-linear",
            "eval_split: 0.1",
            "eval_steps: 10",
        ],
        &["template", "dataset"],
    );
}

#[test]
fn llama_factory_defaults_are_written_out() {
    check(
        "model_name_or_path: m\nstage: dpo\nmax_samples: 1000\nfinetuning_type: full\nlora_target: q_proj,v_proj\n",
        Dialect::LlamaFactory,
        &[
            "rank: 8",
            "alpha: 16",
            "max_rows: 1000",
            "learning_rate: 5e-5",
            "lr_scheduler: linear",
            "target_modules: \"q_proj,v_proj\"",
            "task: dpo",
        ],
        &["finetuning_type"],
    );
}

#[test]
fn trl_configuration_is_converted() {
    check(
        "
model_name_or_path: owner/base-0.5b
dataset_name: someone/set
dataset_config: main
dataset_test_split: validation
eval_strategy: epoch
use_peft: true
lora_r: 64
lora_target_modules: [q_proj, v_proj]
load_in_4bit: true
max_length: 512
packing: true
gradient_accumulation_steps: 2
learning_rate: 0.0001
max_steps: -1
report_to: none
dtype: bfloat16
eos_token: <end>
",
        Dialect::Trl,
        &[
            "model: owner/base-0.5b",
            "quantize: nf4",
            "data: \"someone/set:main\"",
            "eval_data: \"someone/set:main/validation\"",
            "rank: 64",
            "alpha: 32",
            "dropout: 0.05",
            "max_seq_len: 512",
            "target_modules: [q_proj, v_proj]",
            // transformers' default is 8 rows per device.
            "batch_size: 16",
            "learning_rate: 0.0001",
            "lr_scheduler: linear",
        ],
        &["dtype", "eos_token"],
    );
    check(
        "model_name_or_path: m\ndataset_name: o/n\ndataset_train_split: \"train[:10%]\"\nlora_target_modules: q_proj\n",
        Dialect::Trl,
        &[],
        &["dataset_name"],
    );
    check(
        "model_name_or_path: m\ndataset_name: ./rows.parquet\ndataset_text_field: body\nlora_task_type: SEQ_CLS\n",
        Dialect::Trl,
        &["data: ./rows.parquet", "data_fields: \"text=body\"", "task: classify"],
        &["lora_target_modules"],
    );
}

#[test]
fn names_that_a_configuration_accepts_are_converted() {
    check(
        "base_model: m\nglobal_batch_size: 32\ncompute_dtype: f32\nbf16: true\noverwrite_output_dir: true\n",
        Dialect::Axolotl,
        &["batch_size: 32", "dtype: f32", "overwrite: true"],
        &[],
    );
}

/// What is learnt, long rows and arguments of the template, by the names of all three.
#[test]
fn what_is_learnt_is_carried_over() {
    check(
        "base_model: m\nsequence_len: 64\ndatasets:\n  - path: a.jsonl\n    type: chat_template\n    roles_to_train: []\n    \
         message_field_training: train\nexcess_length_strategy: raise\nchat_template_kwargs:\n  enable_thinking: false\n",
        Dialect::Axolotl,
        &["learn: marked", "long_rows: refuse", "template_args: {\"enable_thinking\":false}"],
        &[],
    );
    check(
        "base_model: m\nsequence_len: 64\ntrain_on_inputs: true\n",
        Dialect::Axolotl,
        &["learn: all", "long_rows: drop"],
        &[],
    );
    check(
        "base_model: m\nsequence_len: 64\ndatasets:\n  - path: a.jsonl\n    roles_to_train: [user]\n",
        Dialect::Axolotl,
        &[],
        &["datasets: roles_to_train"],
    );
    let llama_factory = "stage: sft\nfinetuning_type: lora\ncutoff_len: 64\n";
    check(
        &format!("{llama_factory}mask_history: true\nenable_thinking: false\ncompute_accuracy: true\n"),
        Dialect::LlamaFactory,
        &["learn: last", "template_args: \"enable_thinking=false\"", "token_accuracy: true"],
        &[],
    );
    let reward = llama_factory.replace("stage: sft", "stage: rm");
    check(&reward, Dialect::LlamaFactory, &["task: reward"], &[]);
    check("base_model: m\nsequence_len: 64\nreward_model: true\n", Dialect::Axolotl, &["task: reward"], &[]);
    check(&format!("{llama_factory}train_on_prompt: true\n"), Dialect::LlamaFactory, &["learn: all"], &[]);
    check(
        "dataset_name: a.jsonl\nuse_peft: true\nlora_target_modules: all-linear\nassistant_only_loss: true\npacking_strategy: bfd_split\n\
         truncation_mode: keep_end\n",
        Dialect::Trl,
        &["learn: answers", "long_rows: split"],
        &["truncation_mode"],
    );
    check(
        "dataset_name: a.jsonl\nuse_peft: true\nlora_target_modules: all-linear\ncompletion_only_loss: false\n",
        Dialect::Trl,
        &["learn: all"],
        &[],
    );
}

#[test]
fn an_entry_of_dataset_info_is_looked_up() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    let info = r#"{"mine": {"file_name": "mine.json", "columns": {"prompt": "q", "response": "a", "query": "input"}}}"#;
    std::fs::write(dir.path().join("data/dataset_info.json"), info).unwrap();
    let text = "model_name_or_path: m\nstage: sft\ndataset: mine\nlora_target: all\n";
    let (_, import) = convert(text, &dir.path().join("c.yaml"), None).unwrap();
    let line =
        |key: &str| import.lines.iter().find(|l| l.key == key).map(|l| l.value.clone()).unwrap_or_default();
    assert!(line("data").ends_with("data/mine.json]"), "{}", line("data"));
    assert_eq!(line("data_fields"), "[\"instruction=q\", \"output=a\"]");
}

#[test]
fn revisions_and_splits_of_data_sets_are_carried_over() {
    check(
        "base_model: m\nsequence_len: 64\ndatasets:\n  - path: o/n\n    data_files: a.jsonl, b.jsonl\n    revision: v1\n\
         test_datasets:\n  - path: o/n\n    split: train\n",
        Dialect::Axolotl,
        &["data: [\"o/n:a.jsonl@v1\", \"o/n:b.jsonl@v1\"]", "eval_data: [\"o/n:train\"]"],
        &[],
    );
}

#[test]
fn an_entry_with_a_hub_id_names_a_data_set() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("data")).unwrap();
    let info = r#"{"theirs": {"hf_hub_url": "o/n", "subset": "main", "split": "test", "columns": {"prompt": "q"}},
                   "none": {"hf_hub_url": "squad", "split": "test"}}"#;
    std::fs::write(dir.path().join("data/dataset_info.json"), info).unwrap();
    let text = "model_name_or_path: m\nstage: sft\ndataset: theirs,none\n";
    let (found, import) = convert(text, &dir.path().join("c.yaml"), None).unwrap();
    let result = import.render(Path::new("c.yaml"), found);
    assert!(result.contains("\ndata: [\"o/n:main/test\"]"), "{result}");
    assert!(result.contains("\ndata_fields: [\"instruction=q\"]"), "{result}");
    assert_eq!(
        import.lost.iter().map(|(key, value, _)| format!("{key} {value}")).collect::<Vec<_>>(),
        ["dataset none"]
    );
}

/// Rows of {from, value} under any name, LLaMA-Factory's default without tags; and rows of {role, content}.
#[test]
fn conversation_turns_decide_the_data_field() {
    let dir = tempfile::tempdir().unwrap();
    for (entry, field, lost) in [
        (r#""formatting": "sharegpt", "columns": {"messages": "conversations"}"#, "", vec![]),
        (
            r#""formatting": "sharegpt", "columns": {"messages": "messages"}"#,
            "[\"conversations=messages\"]",
            vec![],
        ),
        (
            r#""formatting": "sharegpt", "columns": {"messages": "talk", "images": "image_paths"},
               "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "oracle"},
               "num_samples": 9, "ranking": false"#,
            "[\"messages=talk\"]",
            vec!["dataset: mine: assistant_tag", "dataset: mine: images", "dataset: mine: num_samples"],
        ),
    ] {
        let info = format!(r#"{{"mine": {{"file_name": "mine.json", {entry}}}}}"#);
        std::fs::create_dir_all(dir.path().join("data")).unwrap();
        std::fs::write(dir.path().join("data/dataset_info.json"), info).unwrap();
        let text = "model_name_or_path: m\nstage: sft\ndataset: mine\n";
        let (_, import) = convert(text, &dir.path().join("c.yaml"), None).unwrap();
        let found = import.lines.iter().find(|l| l.key == "data_fields").map_or("", |l| l.value.as_str());
        assert_eq!(found, field, "{entry}");
        assert_eq!(import.lost.iter().map(|(key, ..)| key.as_str()).collect::<Vec<_>>(), lost, "{entry}");
    }
    let axolotl = "
base_model: m
datasets:
  - path: a.jsonl
    ds_type: json
    type: chat_template
    field_messages: talk
    message_property_mappings: {role: from, content: value}
    split: test
";
    check(axolotl, Dialect::Axolotl, &["data_fields: [\"conversations=talk\"]"], &["datasets: split"]);
    check(
        "base_model: m\ndatasets:\n  - path: a.jsonl\n    type: chat_template\n    field_messages: conversations\n    \
         message_field_role: who\n    tags: {x: 1}\n",
        Dialect::Axolotl,
        &["data_fields: [\"messages=conversations\"]"],
        &["datasets: message_property_mappings", "datasets: tags"],
    );
}

#[test]
fn multi_line_key_stays_in_its_comment() {
    let path = Path::new("c.yaml");
    let (found, import) = convert("base_model: m\n\"x\\nepochs\": 7\n", path, None).unwrap();
    let result = import.render(path, found);
    assert!(result.contains("\n# x\\nepochs: 7: not known here\n"), "{result}");
}

#[test]
fn unrecognised_configuration_is_refused() {
    let refused = |text: &str, from| convert(text, Path::new("c.yaml"), from).map(|_| ()).unwrap_err().line;
    assert!(refused("a: 1\n", None).contains("say whose it is with --from"));
    assert!(refused("a: 1\n", Some("unsloth")).contains("axolotl, llama-factory, trl"));
    assert!(refused("- a\n", None).contains("a mapping of keys was expected"));
    assert!(refused("a: [\n", None).contains("c.yaml"));
    let bad = convert("base_model: m\nlearning_rate: fast\n", Path::new("c.yaml"), None).unwrap();
    let line = super::check(&bad.1.render(Path::new("c.yaml"), bad.0), Path::new("c.yaml")).unwrap_err().line;
    assert!(line.contains("learning_rate"), "{line}");
}

#[test]
fn tables_name_existing_options_and_unique_keys() {
    for table in Dialect::tables() {
        let mut seen = std::collections::BTreeSet::new();
        for (key, rule) in table {
            assert!(seen.insert(key), "{key} stands twice in a table");
            let ours = match rule {
                Rule::Key(ours) | Rule::PerEpoch(ours) => vec![*ours],
                Rule::When(cases, otherwise) => {
                    let all = cases.iter().map(|(_, b)| b).chain([otherwise]);
                    let ours = |b: &Becomes| match b {
                        Becomes::Set(ours, _) | Becomes::Near(ours, ..) => Some(*ours),
                        _ => None,
                    };
                    all.filter_map(ours).collect()
                }
                _ => vec![],
            };
            for ours in ours {
                assert!(table::find(&ours.replace('_', "-")).is_some(), "{key}: {ours} is no option");
            }
        }
    }
}
