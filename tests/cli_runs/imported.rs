//! Configurations as the documentation of Axolotl, LLaMA-Factory and TRL shows them, imported and trained to the end.

use crate::cli_fixture::{Bench, pairs, rows, stderr};
use serde_json::{Value, json};

/// A file of `n` rows.
fn lines(n: usize, row: impl Fn(usize) -> Value) -> String {
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

/// A turn of a conversation as ShareGPT has it.
fn turn(from: &str, value: String) -> Value {
    json!({ "from": from, "value": value })
}

/// A conversation as ShareGPT has it.
fn talk(i: usize) -> Value {
    json!({"conversations": [turn("human", format!("show {i}")), turn("gpt", format!("git show {i}"))]})
}

/// Imports `theirs.yaml`, trains with the result, and checks that these lines are in it.
fn trained(bench: &Bench, theirs: &str, lines: &[&str]) -> String {
    bench.file("theirs.yaml", theirs);
    let out = bench.run("import theirs.yaml -o ours.yaml");
    assert!(out.status.success(), "{}", stderr(&out));
    let ours = String::from_utf8(bench.read("ours.yaml")).unwrap();
    for line in lines {
        assert!(ours.lines().any(|own| own.split("  # ").next() == Some(line)), "{line} is not in\n{ours}");
    }
    bench.ok("--config ours.yaml --gpus cpu --max-steps 3 -q");
    assert!(bench.path("out/adapter_model.safetensors").exists(), "{ours}");
    stderr(&out)
}

const AXOLOTL: &str = r#"
base_model: ./base
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
hub_model_id: me/preferred
special_tokens:
  pad_token: <|im_end|>
load_in_8bit: false
load_in_4bit: true
strict: false
chat_template: jinja
chat_template_jinja: "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
rl: dpo
datasets:
  - path: prefs.jsonl
    type: chat_template.default
    field_messages: talk
    field_chosen: good
    field_rejected: bad
    message_property_mappings:
      role: role
      content: content
exact_deduplication: true
dataset_prepared_path:
val_set_size: 0.2
output_dir: ./out
sequence_len: 128
sample_packing: false
pad_to_sequence_len: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
peft_layers_to_transform: [1, 2]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch
adam_epsilon: 1e-6
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
deepspeed: zero2.json
"#;

#[test]
fn axolotl_configuration_trains_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    let turn = |role: &str, text: &str| json!({ "role": role, "content": text });
    let row = |i: usize| {
        json!({
            "talk": [turn("user", &format!("add {i} and 1"))], "good": turn("assistant", &format!("{}", i + 1)),
            "bad": turn("assistant", "no"),
        })
    };
    bench.file("prefs.jsonl", &(0..24).chain(0..2).map(|i| row(i).to_string() + "\n").collect::<String>());
    let said = trained(
        &bench,
        AXOLOTL,
        &[
            "task: dpo",
            "quantize: nf4",
            "chat_template: ours.jinja",
            "drop_duplicates: true",
            "data_fields: [\"chosen=good\", \"messages=talk\", \"rejected=bad\"]",
            "min_lr: 2e-5",
            "adam_epsilon: 1e-6",
        ],
    );
    assert_eq!(said, "", "nothing is lost");
    assert!(String::from_utf8(bench.read("ours.jinja")).unwrap().contains("<|im_start|>{{ m.role }}\n"));
    let run = String::from_utf8(bench.read("out/run.yaml")).unwrap();
    assert!(run.contains("drop_duplicates: true") && run.contains("adam_epsilon: 0.000001"), "{run}");
}

const LLAMA_FACTORY: &str = "
### model
model_name_or_path: ./base
trust_remote_code: true
### method
stage: pt
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: texts,more
mix_strategy: interleave_under
interleave_probs: 0.7,0.3
cutoff_len: 32
max_samples: 1000
preprocessing_num_workers: 16
### output
output_dir: out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
";

#[test]
fn llama_factory_configuration_trains_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    bench.file("data/texts.jsonl", &lines(40, |i| json!({"body": format!("git log -{i}")})));
    bench.file("data/more.jsonl", &lines(9, |i| json!({"body": format!("git show {i}")})));
    bench.file(
        "data/dataset_info.json",
        r#"{"texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
            "more": {"file_name": "more.jsonl", "columns": {"prompt": "body"}}}"#,
    );
    let said = trained(
        &bench,
        LLAMA_FACTORY,
        &[
            "task: sft",
            "long_rows: split",
            "data_fields: [\"text=body\"]",
            "data: [\"data/texts.jsonl=0.7\", \"data/more.jsonl=0.3\"]",
            "min_lr: 1e-5",
        ],
    );
    assert_eq!(said, "", "nothing is lost");
}

/// Settings that configurations of Axolotl share.
const AXOLOTL_REST: &str = "
strict: false
dataset_prepared_path: last_run_prepared
output_dir: ./out
wandb_project:
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 2
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|im_end|>
";

#[test]
fn axolotl_instructions_train_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    let row = |i: usize| json!({"instruction": "Write the command", "input": format!("log {i}"), "output": format!("git log -{i}")});
    bench.file("alpaca.jsonl", &lines(24, row));
    let theirs = "
base_model: ./base
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: alpaca.jsonl
    type: alpaca
val_set_size: 0.1
adapter: lora
lora_model_dir:
sequence_len: 128
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_fan_in_fan_out:
lora_target_modules:
  - gate_proj
  - down_proj
  - q_proj
  - v_proj
train_on_inputs: false
group_by_length: false
";
    let said = trained(
        &bench,
        &format!("{theirs}{AXOLOTL_REST}"),
        &["packing: true", "dropout: 0.05", "eval_split: 0.1"],
    );
    assert_eq!(said, "", "nothing is lost");
}

#[test]
fn axolotl_conversations_train_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    bench.file("talks.jsonl", &lines(24, talk));
    let theirs = "
base_model: ./base
ddp_find_unused_parameters: true
load_in_8bit: true
chat_template: tokenizer_default
eot_tokens:
  - <|im_end|>
datasets:
  - path: talks.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    roles_to_train: [assistant]
val_set_size: 0.0
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 128
sample_packing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
";
    let said = trained(
        &bench,
        &format!("{theirs}{AXOLOTL_REST}"),
        &["quantize: q8_0", "packing: true", "target_modules: all-linear"],
    );
    assert_eq!(said, "", "nothing is lost");
}

/// Settings that the examples of LLaMA-Factory share.
const LLAMA_FACTORY_REST: &str = "
model_name_or_path: ./base
trust_remote_code: true
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 128
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
";

/// Two data sets of unlike forms, with evaluation.
#[test]
fn llama_factory_chats_train_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    let row =
        |i: usize| json!({"instruction": "Who are you?", "input": "", "output": format!("Number {i}.")});
    let rows = (0..12).map(row).collect::<Vec<_>>();
    bench.file("data/identity.json", &json!(rows).to_string());
    bench.file("data/talks.json", &json!((0..12).map(talk).collect::<Vec<_>>()).to_string());
    bench.file(
        "data/dataset_info.json",
        r#"{"identity": {"file_name": "identity.json"}, "talks": {"file_name": "talks.json", "formatting": "sharegpt"}}"#,
    );
    let theirs = "
stage: sft
dataset: identity,talks
template: qwen3_nothink
learning_rate: 1.0e-4
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 2
";
    let said = trained(
        &bench,
        &format!("{LLAMA_FACTORY_REST}{theirs}"),
        &["data: [data/identity.json, data/talks.json]", "eval_split: 0.1", "eval_steps: 2"],
    );
    assert!(said.contains("template"), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("not carried over")).count(), 1, "{said}");
}

/// One file of pairs, learnt as preferences and by a reward model.
#[test]
fn llama_factory_pairs_train_to_the_end() {
    let row = |i: usize| {
        json!({"conversations": [turn("human", format!("show {i}"))],
            "chosen": turn("gpt", format!("git show {i}")), "rejected": turn("gpt", "no".into())})
    };
    for (theirs, lines) in [
        (
            "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid\nlearning_rate: 5.0e-6",
            &["task: dpo", "beta: 0.1"][..],
        ),
        (
            "stage: dpo\npref_beta: 0.5\npref_loss: simpo\nlearning_rate: 5.0e-6",
            &["task: simpo", "beta: 0.5"],
        ),
        ("stage: rm\nlearning_rate: 1.0e-4", &["task: reward"]),
    ] {
        let bench = Bench::new();
        bench.model("base");
        bench.file("data/pairs.json", &json!((0..12).map(row).collect::<Vec<_>>()).to_string());
        bench.file(
            "data/dataset_info.json",
            r#"{"pairs": {"file_name": "pairs.json", "ranking": true, "formatting": "sharegpt", "columns":
                {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}}}"#,
        );
        let said = trained(&bench, &format!("{LLAMA_FACTORY_REST}dataset: pairs\n{theirs}\n"), lines);
        assert_eq!(said, "", "nothing is lost");
    }
}

#[test]
fn trl_configuration_trains_to_the_end() {
    let bench = Bench::new();
    bench.model("base");
    bench.file("pairs.jsonl", &pairs(30));
    bench.file("rows.jsonl", &rows(30));
    let common = "
model_name_or_path: ./base
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 0.0001
lr_scheduler_type: cosine
max_length: 128
max_steps: -1
output_dir: out
report_to: none
push_to_hub: false
env:
  CUDA_VISIBLE_DEVICES: 0
";
    let said = trained(
        &bench,
        &format!(
            "{common}dataset_name: ./pairs.jsonl\nloss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.5]\nbeta: 0.2\n"
        ),
        &["task: dpo", "loss: sigmoid", "nll_weight: 0.5", "beta: 0.2", "batch_size: 4"],
    );
    assert_eq!(said, "", "nothing is lost");
    std::fs::remove_dir_all(bench.path("out")).unwrap();
    let said = trained(
        &bench,
        &format!(
            "{common}dataset_name: ./rows.jsonl\npacking: true\nassistant_only_loss: true\nadam_epsilon: 1e-7\n"
        ),
        &["learn: answers", "adam_epsilon: 1e-7", "packing: true"],
    );
    assert_eq!(said, "", "nothing is lost");
    std::fs::remove_dir_all(bench.path("out")).unwrap();
    let said = trained(
        &bench,
        &format!(
            "{common}dataset_name: ./pairs.jsonl\ncenter_rewards_coefficient: 0.01\nlora_task_type: SEQ_CLS\n\
             load_in_4bit: true\nbnb_4bit_quant_type: nf4\nuse_rslora: true\n"
        ),
        &["task: reward", "quantize: nf4", "rslora: true"],
    );
    assert_eq!(said, "", "nothing is lost");
}

/// A run with the option trains on each row once, to the bytes of a file without duplicates, and `eval` leaves them out too.
#[test]
fn duplicates_are_left_out_where_it_is_asked_for() {
    let bench = Bench::new();
    let twice = format!("{}{}", rows(20), rows(12));
    bench.file("twice.jsonl", &twice);
    bench.file("once.jsonl", &rows(20));
    let run = "demo --rank 2 --batch-size 4 --eval-data once.jsonl --gpus cpu";
    bench.ok(&format!("{run} --data once.jsonl -q -o once"));
    let out = bench.run(&format!("{run} --data twice.jsonl --drop-duplicates -o twice"));
    assert!(
        stderr(&out).contains("32 read") && stderr(&out).contains("12 equal to an earlier one left out"),
        "{}",
        stderr(&out)
    );
    bench.same_adapter("once", "twice");
    let loss = |args: &str| {
        let said = bench.ok(&format!("eval --gpus cpu --json {args}"));
        serde_json::from_str::<serde_json::Value>(&said).unwrap()["loss"].clone()
    };
    assert_eq!(loss("--adapter twice --data twice.jsonl"), loss("--adapter once --data once.jsonl"));
    assert_ne!(loss("--adapter once --data twice.jsonl"), loss("--adapter once --data once.jsonl"));
    // Rows that differ in what is trained on are no duplicates.
    let marked = |train: bool| {
        let turn = |role: &str, train: bool| json!({ "role": role, "content": "1", "train": train });
        json!({ "messages": [turn("user", false), turn("assistant", true), turn("user", train), turn("assistant", true)] })
    };
    bench.file("marked.jsonl", &format!("{}\n{}\n{}\n", marked(true), marked(false), marked(true)));
    let said = bench.ok("inspect marked.jsonl --model demo --drop-duplicates --json");
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["rows"], &said["duplicates"]), (&json!(3), &json!(0)), "{said}");
    assert_eq!(said["rows_shown"].as_array().unwrap().len(), 2);
}
