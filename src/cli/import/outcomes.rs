//! The settings of which the first tables of `import` said that they cannot be had (docs/journal/2026-11-rows.md), each
//! with a usual value, and those of which that is still true.

use super::convert;
use std::path::Path;

const SHARED: &[&str] = &[
    "lr_scheduler_type: polynomial",
    "lr_scheduler_kwargs: {min_lr: 1e-6}\nlr_scheduler_type: cosine",
    "resume_from_checkpoint: true",
    "eval_strategy: epoch",
    "evaluation_strategy: epoch",
    "save_strategy: epoch",
    "adam_beta1: 0.8",
    "adam_beta2: 0.95",
    "adam_epsilon: 1e-6",
    "load_best_model_at_end: true\neval_strategy: epoch",
    "metric_for_best_model: accuracy\nlora_task_type: SEQ_CLS\neval_strategy: epoch",
    "early_stopping_patience: 3\neval_strategy: epoch",
    "push_to_hub: true",
    "hub_model_id: a/b",
    "deepspeed: zero2.json",
    "fsdp: full_shard",
    "fsdp_config: {a: b}",
    "model_revision: v1",
    "trust_remote_code: true",
    "data_seed: 7",
];

const AXOLOTL: &[&str] = &[
    "adapter: llama-adapter",
    "peft_use_dora: true",
    "lora_modules_to_save: [embed_tokens]",
    "chat_template: llama3",
    "chat_template_jinja: a.jinja",
    "default_system_message: Be brief.",
    "evals_per_epoch: 2",
    "saves_per_epoch: 2",
    "special_tokens: {eos_token: x}",
    "tokens: [x]",
    "added_tokens_overrides: {1: x}",
    "rl: dpo",
    "reward_model: true",
    "cosine_min_lr_ratio: 0.1",
    "loraplus_lr_ratio: 4",
    "revision_of_model: v1",
    "dataset_exact_deduplication: true",
    "excess_length_strategy: drop",
    "unfrozen_parameters: [lm_head]",
];

const LLAMA_FACTORY: &[&str] = &[
    "stage: dpo",
    "finetuning_type: full",
    "quantization_bit: 8",
    "quantization_method: hqq",
    "additional_target: lm_head",
    "template: llama3",
    "max_samples: 9",
    "train_on_prompt: true",
    "mask_history: true",
    "loraplus_lr_ratio: 4",
    "rope_scaling: linear",
    "resize_vocab: true",
    "new_special_tokens: x",
    "mix_strategy: interleave_under\ndataset: a.jsonl,b.jsonl\ninterleave_probs: 0.5,0.5",
    "pref_loss: sigmoid\nstage: dpo",
    "pref_beta: 0.2\nstage: dpo",
    "reward_model: x",
];

const TRL: &[&str] = &[
    "use_peft: false",
    "lora_modules_to_save: [lm_head]",
    "lora_task_type: TOKEN_CLS",
    "bnb_4bit_quant_type: fp4",
    "assistant_only_loss: true",
    "dataset_config: main\ndataset_name: a/b",
    "dataset_kwargs: {a: true}",
    "env: {A: 1}",
    "eos_token: x",
    "loss_type: hinge",
];

/// What is still not had.
const LEFT: [&str; 20] = [
    "lr_scheduler_type",
    "adapter",
    "peft_use_dora",
    "lora_modules_to_save",
    "chat_template",
    "default_system_message",
    "special_tokens",
    "added_tokens_overrides",
    "unfrozen_parameters",
    "finetuning_type",
    "quantization_method",
    "additional_target",
    "template",
    "rope_scaling",
    "reward_model",
    "use_peft",
    "lora_modules_to_save",
    "bnb_4bit_quant_type",
    "dataset_kwargs",
    "eos_token",
];

#[test]
fn fewer_than_25_of_66_settings_cannot_be_had() {
    let tables = [("trl", SHARED), ("axolotl", AXOLOTL), ("llama-factory", LLAMA_FACTORY), ("trl", TRL)];
    assert_eq!(tables.iter().map(|(_, all)| all.len()).sum::<usize>(), 66);
    let mut left = Vec::new();
    for (dialect, settings) in tables {
        for setting in settings {
            let key = setting.split(':').next().unwrap_or_default();
            let base = format!("learning_rate: 1e-4\nlora_target_modules: all-linear\n{setting}\n");
            let named = if dialect == "axolotl" { "base_model: o/n\n" } else { "model_name_or_path: o/n\n" };
            let text = format!("{named}{base}");
            let (found, import) = convert(&text, Path::new("c.yaml"), Some(dialect)).unwrap();
            let result = import.render(Path::new("c.yaml"), found);
            super::check(&result, Path::new("c.yaml")).unwrap_or_else(|e| panic!("{setting}: {e}\n{result}"));
            if import.lost.iter().any(|(lost, ..)| lost.split(':').next() == Some(key)) {
                left.push(key);
            }
        }
    }
    assert_eq!(left, LEFT);
}
