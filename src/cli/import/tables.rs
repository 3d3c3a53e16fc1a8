//! What keys of other trainers mean here, as data. A key is looked up in its trainer's table, then in [`SHARED`],
//! which holds what all of them have from transformers; spellings that `--config` understands anyway
//! (`options::alias`) stand in neither. A value that is empty says nothing, whatever its key.

/// Whose file it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// axolotl
    Axolotl,
    /// LLaMA-Factory
    LlamaFactory,
    /// TRL's command line
    Trl,
}

/// What becomes of a key.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// Our key, with the same value.
    Key(&'static str),
    /// By its value (in lower case): the first that fits; else the last part.
    When(&'static [(&'static str, Becomes)], Becomes),
    /// Cannot be had here.
    Lost(&'static str),
    /// Nothing is lost without it: it is about speed, memory or logging of the other trainer.
    Needless,
}

/// What a value becomes.
#[derive(Debug, Clone, Copy)]
pub enum Becomes {
    /// This key with this value.
    Set(&'static str, &'static str),
    /// This key with this value, which is nearest; what is lost is a sentence.
    Near(&'static str, &'static str, &'static str),
    /// Nothing: it is so anyway.
    Same,
    /// A sentence.
    Lost(&'static str),
}

use Becomes::{Lost as No, Near, Same, Set};
use Rule::{Key, Lost, Needless, When};

/// (key, rule)
type Table = &'static [(&'static str, Rule)];

const FULL: &str = "only adapters are trained, never all weights";
const PREFERENCES: &str = "preference tuning is not built; only supervised rows and classifiers are";
const TEMPLATE: &str = "the model's own chat template is used; another one: chat_template: FILE";
const EPOCHS: &str = "a number of steps is wanted here: eval_steps, save_steps";
const TOKENS: &str = "tokens and their meaning are the model's own";
const MODULES: &str = "only a classifier's head is trained in full (task: classify)";

const COSINE: &str = "the cosine ends at 0, once";
#[rustfmt::skip]
const SCHEDULE: Rule = When(&[("cosine", Set("lr_scheduler", "cosine")), ("linear", Set("lr_scheduler", "linear")), ("constant", Set("lr_scheduler", "constant")), ("constant_with_warmup", Set("lr_scheduler", "constant")), ("cosine_with_restarts", Near("lr_scheduler", "cosine", COSINE)), ("cosine_with_min_lr", Near("lr_scheduler", "cosine", COSINE)), ("cosine_warmup_with_min_lr", Near("lr_scheduler", "cosine", COSINE)), ("one_cycle", Near("lr_scheduler", "cosine", COSINE))], No("there are constant, linear and cosine"));

/// What comes from transformers' TrainingArguments.
#[rustfmt::skip]
pub const SHARED: Table = &[
    ("load_in_4bit", When(&[("true", Set("quantize", "nf4"))], Same)),
    ("load_in_8bit", When(&[("true", Set("quantize", "q8_0"))], Same)),
    ("lr_scheduler_type", SCHEDULE),
    ("lr_scheduler", SCHEDULE),
    ("lr_scheduler_kwargs", Lost("schedules have no settings but their warm-up")),
    ("lora_target_linear", When(&[("true", Set("target_modules", "all-linear"))], Same)),
    ("overwrite_output_dir", Key("overwrite")),
    ("resume_from_checkpoint", Lost("`--resume=OUT` goes on with a run of finetune's own; checkpoints of others are not read")),
    ("eval_strategy", When(&[("no", Same), ("steps", Same)], No("the model is scored every eval_steps and at the end"))),
    ("evaluation_strategy", When(&[("no", Same), ("steps", Same)], No("the model is scored every eval_steps and at the end"))),
    ("save_strategy", When(&[("steps", Same)], No("checkpoints are written every save_steps and at the end"))),
    ("adam_beta1", When(&[("0.9", Same)], No("AdamW's betas are 0.9 and 0.999"))),
    ("adam_beta2", When(&[("0.999", Same)], No("AdamW's betas are 0.9 and 0.999"))),
    ("adam_epsilon", When(&[("1e-8", Same), ("1e-08", Same), ("0.00000001", Same)], No("AdamW's epsilon is 1e-8"))),
    ("load_best_model_at_end", When(&[("false", Same)], No("the last state is the adapter; checkpoints stay beside it"))),
    ("metric_for_best_model", Lost("the last state is the adapter; checkpoints stay beside it")),
    ("early_stopping_patience", Lost("a run takes all its steps; stop it with ctrl-C, it saves")),
    ("push_to_hub", When(&[("false", Same)], No("nothing is uploaded"))),
    ("hub_model_id", Lost("nothing is uploaded")),
    ("deepspeed", Lost("several cards and machines share the rows: --gpus, --role")),
    ("fsdp", Lost("several cards and machines share the rows: --gpus, --role")),
    ("fsdp_config", Lost("several cards and machines share the rows: --gpus, --role")),
    ("model_revision", Lost("write it behind the model: owner/name@revision")),
    ("trust_remote_code", When(&[("false", Same)], No("no code of a model is ever run"))),
    ("gradient_checkpointing_kwargs", Needless), ("dataloader_num_workers", Needless), ("dataloader_pin_memory", Needless),
    ("per_device_eval_batch_size", Needless), ("eval_batch_size", Needless), ("logging_dir", Needless), ("logging_strategy", Needless),
    ("logging_first_step", Needless), ("run_name", Needless), ("disable_tqdm", Needless), ("save_safetensors", Needless),
    ("ddp_timeout", Needless), ("ddp_find_unused_parameters", Needless), ("local_rank", Needless), ("tf32", Needless),
    ("torch_compile", Needless), ("remove_unused_columns", Needless), ("use_liger_kernel", Needless), ("do_train", Needless),
    ("do_eval", Needless), ("use_cpu", Needless), ("save_only_model", Needless), ("attn_implementation", Needless),
    ("data_seed", Lost("one seed fixes everything: seed")), ("debug", Needless), ("strict", Needless),
];

#[rustfmt::skip]
const AXOLOTL: Table = &[
    ("adapter", When(&[("lora", Same), ("qlora", Set("quantize", "nf4"))], No(FULL))),
    ("lora_model_dir", Key("init_adapter")),
    ("peft_use_rslora", Key("rslora")),
    ("peft_use_dora", When(&[("false", Same)], No("DoRA is not built; plain LoRA is trained"))),
    ("lora_modules_to_save", Lost(MODULES)),
    ("lora_fan_in_fan_out", Needless),
    ("shuffle_merged_datasets", When(&[("false", Set("no_shuffle", "true"))], Same)),
    ("chat_template", When(&[("tokenizer_default", Same), ("chatml", Set("chat_template", "chatml"))], No(TEMPLATE))),
    ("chat_template_jinja", Lost("write it to a file and name that: chat_template: FILE")),
    ("default_system_message", Lost("put it into the rows")),
    ("evals_per_epoch", Lost(EPOCHS)), ("saves_per_epoch", Lost(EPOCHS)),
    ("special_tokens", Lost(TOKENS)), ("tokens", Lost(TOKENS)), ("added_tokens_overrides", Lost(TOKENS)),
    ("rl", Lost(PREFERENCES)), ("reward_model", When(&[("false", Same)], No(PREFERENCES))),
    ("num_labels", Key("num_classes")),
    ("gradient_clipping", Key("max_grad_norm")),
    ("cosine_min_lr_ratio", Lost("the cosine ends at 0")),
    ("loraplus_lr_ratio", Lost("both matrices learn at one rate")),
    ("revision_of_model", Lost("write it behind the model: owner/name@revision")),
    ("dataset_exact_deduplication", When(&[("false", Same)], No("`finetune inspect` counts duplicates; they are trained on"))),
    ("excess_length_strategy", When(&[("truncate", Same)], No("longer rows are cut, and counted"))),
    ("unfrozen_parameters", Lost(FULL)),
    ("dataset_prepared_path", Needless), ("dataset_processes", Needless), ("pad_to_sequence_len", Needless), ("eval_sample_packing", Needless),
    ("eval_table_size", Needless), ("eval_max_new_tokens", Needless), ("flash_attention", Needless), ("xformers_attention", Needless),
    ("sdp_attention", Needless), ("s2_attention", Needless), ("flex_attention", Needless), ("model_type", Needless), ("tokenizer_type", Needless),
    ("is_llama_derived_model", Needless), ("wandb_project", Needless), ("wandb_entity", Needless), ("wandb_watch", Needless), ("wandb_name", Needless),
    ("wandb_log_model", Needless), ("wandb_run_id", Needless), ("mlflow_experiment_name", Needless), ("lora_mlp_kernel", Needless), ("lora_qkv_kernel", Needless),
    ("lora_o_kernel", Needless), ("plugins", Needless), ("loss_watchdog_threshold", Needless), ("loss_watchdog_patience", Needless),
    ("gpu_memory_limit", Key("memory_limit")), ("lora_on_cpu", Needless), ("bfloat16", Needless), ("float16", Needless),
];

#[rustfmt::skip]
const LLAMA_FACTORY: Table = &[
    ("stage", When(&[("sft", Same)], No(PREFERENCES))),
    ("finetuning_type", When(&[("lora", Same)], No(FULL))),
    ("lora_target", When(&[("all", Set("target_modules", "all-linear"))], Set("target_modules", ""))),
    ("quantization_bit", When(&[("4", Set("quantize", "nf4")), ("8", Set("quantize", "q8_0"))], No("there are nf4 and q8_0"))),
    ("quantization_method", When(&[("bnb", Same), ("bitsandbytes", Same)], No("there are nf4 and q8_0"))),
    ("adapter_name_or_path", Key("init_adapter")),
    ("additional_target", Lost(MODULES)),
    ("template", Lost(TEMPLATE)),
    ("max_samples", Lost("take fewer rows into the file; max_steps bounds the run")),
    ("val_size", Key("eval_split")),
    ("train_on_prompt", When(&[("false", Same)], No("prompts are never trained on; rows of the form `text` train on everything"))),
    ("mask_history", When(&[("false", Same)], No("every assistant turn is trained on"))),
    ("neat_packing", Key("packing")),
    ("loraplus_lr_ratio", Lost("both matrices learn at one rate")),
    ("use_unsloth", Needless), ("rope_scaling", Lost("positions are the model's own")),
    ("resize_vocab", When(&[("false", Same)], No(TOKENS))), ("new_special_tokens", Lost(TOKENS)),
    ("streaming", Needless), ("buffer_size", Needless), ("mix_strategy", When(&[("concat", Same)], No("rows of all files are shuffled together"))),
    ("preprocessing_num_workers", Needless), ("overwrite_cache", Needless), ("tokenized_path", Needless), ("plot_loss", Needless),
    ("flash_attn", Needless), ("enable_liger_kernel", Needless), ("dataset_dir", Needless), ("upcast_layernorm", Needless),
    ("include_num_input_tokens_seen", Needless), ("double_quantization", Needless), ("predict_with_generate", Needless),
    ("pref_loss", Lost(PREFERENCES)), ("pref_beta", Lost(PREFERENCES)), ("reward_model", Lost(PREFERENCES)),
];

#[rustfmt::skip]
const TRL: Table = &[
    ("use_peft", When(&[("true", Same)], No(FULL))),
    ("lora_modules_to_save", Lost(MODULES)),
    ("lora_task_type", When(&[("causal_lm", Same), ("seq_cls", Set("task", "classify"))], No("there are CAUSAL_LM and SEQ_CLS"))),
    ("bnb_4bit_quant_type", When(&[("nf4", Same)], No("4 bits are nf4 here"))),
    ("assistant_only_loss", When(&[("true", Same)], No("only assistant turns are trained on, always"))),
    ("dataset_config", Lost("rows come from files")), ("dataset_train_split", Needless), ("dataset_test_split", Needless),
    ("dataset_streaming", Needless), ("dataset_num_proc", Needless), ("dataset_kwargs", Lost("rows are what their fields say")),
    ("env", Lost("set variables in the shell")),
    ("eos_token", Lost(TOKENS)), ("pad_token", Needless), ("chat_template_path", Key("chat_template")),
    ("eval_packing", Needless), ("packing_strategy", Needless), ("padding_free", Needless), ("pad_to_multiple_of", Needless),
    ("torch_dtype", Needless), ("dtype", Needless), ("use_bnb_nested_quant", Needless), ("bnb_4bit_quant_storage", Needless),
    ("loss_type", When(&[("nll", Same)], No("the loss is the mean over supervised tokens"))),
    ("num_labels", Key("num_classes")), ("activation_offloading", Needless), ("ignore_bias_buffers", Needless),
];

/// What a trainer means where its file says nothing and ours would mean something else: (our key, value).
#[rustfmt::skip]
const DEFAULTS: &[(Dialect, &[(&str, &str)])] = &[
    (Dialect::Axolotl, &[]),
    (Dialect::LlamaFactory, &[("rank", "8"), ("learning_rate", "5e-5"), ("lr_scheduler", "linear"), ("warmup_steps", "0"), ("epochs", "3"), ("save_steps", "500")]),
    (Dialect::Trl, &[("dropout", "0.05"), ("learning_rate", "2e-5"), ("lr_scheduler", "linear"), ("warmup_steps", "0"), ("epochs", "3"), ("save_steps", "500"), ("max_seq_len", "1024")]),
];

impl Dialect {
    /// Every one, by the name that `--from` takes.
    pub const ALL: [(&'static str, Dialect); 3] =
        [("axolotl", Dialect::Axolotl), ("llama-factory", Dialect::LlamaFactory), ("trl", Dialect::Trl)];

    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Axolotl => "Axolotl",
            Dialect::LlamaFactory => "LLaMA-Factory",
            Dialect::Trl => "TRL",
        }
    }

    /// What its users write and nobody else's do.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Dialect::Axolotl => {
                &["base_model", "sequence_len", "micro_batch_size", "datasets", "sample_packing"]
            }
            Dialect::LlamaFactory => {
                &["stage", "finetuning_type", "cutoff_len", "template", "dataset", "lora_rank"]
            }
            Dialect::Trl => &["dataset_name", "use_peft", "max_length", "lora_r", "model_name_or_path"],
        }
    }

    /// Whose keys these are: the one with most of its own marks; None where there are none.
    pub fn guess<'a>(keys: impl Iterator<Item = &'a str> + Clone) -> Option<Self> {
        let count = |d: Dialect| keys.clone().filter(|key| d.marks().contains(key)).count();
        // Of equals the first: all of them know `model_name_or_path`.
        let counted = Self::ALL.iter().rev().map(|(_, d)| (count(*d), *d));
        counted.max_by_key(|(n, _)| *n).filter(|(n, _)| *n > 0).map(|(_, d)| d)
    }

    /// What `key` means.
    pub fn rule(self, key: &str) -> Option<Rule> {
        let own = match self {
            Dialect::Axolotl => AXOLOTL,
            Dialect::LlamaFactory => LLAMA_FACTORY,
            Dialect::Trl => TRL,
        };
        own.iter().chain(SHARED).find(|(name, _)| *name == key).map(|(_, rule)| *rule)
    }

    /// Its own defaults.
    pub fn defaults(self) -> &'static [(&'static str, &'static str)] {
        DEFAULTS.iter().find(|(d, _)| *d == self).map_or(&[], |(_, all)| all)
    }

    /// Every table, for a test.
    #[cfg(test)]
    pub fn tables() -> [Table; 4] {
        [SHARED, AXOLOTL, LLAMA_FACTORY, TRL]
    }
}
