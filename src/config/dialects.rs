//! Meaning of other trainers' keys, as data. A key is looked up in its trainer's table, then in `SHARED`, which holds
//! the keys that all of them have from transformers; spellings that `--config` accepts (`config::alias`) are in
//! neither. An empty value has no meaning for any key.

/// The trainer of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// axolotl
    Axolotl,
    /// LLaMA-Factory
    LlamaFactory,
    /// TRL's command line
    Trl,
}

/// Conversion of a key.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// Our key, with the same value.
    Key(&'static str),
    /// By value (in lower case): the first match; otherwise the last part.
    When(&'static [(&'static str, Becomes)], Becomes),
    /// A number of times per epoch for our key.
    PerEpoch(&'static str),
    /// Not supported here.
    Lost(&'static str),
    /// Done without this key or by another command, which the sentence names.
    Elsewhere(&'static str),
    /// Dropped without loss, for this reason: the key changes neither the training nor the output.
    Needless(&'static str),
}

/// Conversion of a value.
#[derive(Debug, Clone, Copy)]
pub enum Becomes {
    /// This key with this value.
    Set(&'static str, &'static str),
    /// This key with this value, the nearest one; the sentence describes the difference.
    Near(&'static str, &'static str, &'static str),
    /// Nothing: the behaviour is the same without it.
    Same,
    /// Not supported; a sentence gives the reason.
    Lost(&'static str),
}

use Becomes::{Lost as No, Near, Same, Set};
use Rule::{Elsewhere, Key, Lost, Needless, PerEpoch, When};

/// (key, rule)
type Table = &'static [(&'static str, Rule)];

const FULL: &str = "only adapters are trained, never all weights";
/// Why KTO is not built.
pub const KTO: &str = "KTO is not supported: its KL estimate couples the rows of a batch; unpaired rows: --task dpo --loss apo_zero_unpaired";
/// Why nothing is trained on rewards.
pub const REWARDS: &str = "training on the rewards of another model is not supported; rows with preferences are (dpo, orpo, cpo, simpo, reward)";
/// The way from another trainer's setting to a task.
const LOSS: Rule = When(
    &[
        ("sigmoid", Set("loss", "sigmoid")),
        ("hinge", Set("loss", "hinge")),
        ("ipo", Set("loss", "ipo")),
        ("robust", Set("loss", "robust")),
        ("apo_zero", Set("loss", "apo_zero")),
        ("apo_down", Set("loss", "apo_down")),
        ("apo_zero_unpaired", Set("loss", "apo_zero_unpaired")),
        ("orpo", Set("task", "orpo")),
        ("simpo", Set("task", "simpo")),
        ("nll", Same),
    ],
    No(KTO),
);
const TEMPLATE: &str = "the model's own chat template is used; another one: chat_template: FILE";
const TOKENS: &str =
    "the model's own special tokens are not replaced; add_tokens and add_special_tokens add new ones";
/// Modules that are trained in full.
#[rustfmt::skip]
const MODULES: Rule = When(&[("score", Same), ("classifier", Same), ("score,classifier", Same), ("classifier,score", Same)], No("only a head is trained in full (task: classify, token-classification, regression, reward)"));

const COSINE: &str = "the cosine falls once, to min_lr";
#[rustfmt::skip]
const SCHEDULE: Rule = When(&[("cosine", Set("lr_scheduler", "cosine")), ("linear", Set("lr_scheduler", "linear")), ("constant", Set("lr_scheduler", "constant")), ("constant_with_warmup", Set("lr_scheduler", "constant")), ("warmup_stable_decay", Set("lr_scheduler", "wsd")), ("cosine_with_restarts", Near("lr_scheduler", "cosine", COSINE)), ("cosine_with_min_lr", Set("lr_scheduler", "cosine")), ("cosine_warmup_with_min_lr", Near("lr_scheduler", "cosine", COSINE)), ("one_cycle", Near("lr_scheduler", "cosine", COSINE))], No("expected one of constant, linear, cosine, wsd"));

const EIGHT_BITS: Becomes = No("computed with AdamW in f32, moments too");
#[rustfmt::skip]
const OPTIMIZER: Rule = When(&[("adamw", Same), ("adamw_torch", Same), ("adamw_torch_fused", Same), ("adamw_torch_xla", Same), ("adamw_hf", Same), ("adamw_apex_fused", Same), ("paged_adamw", Same), ("paged_adamw_32bit", Same), ("adamw_8bit", EIGHT_BITS), ("adamw_bnb_8bit", EIGHT_BITS), ("paged_adamw_8bit", EIGHT_BITS), ("adamw_torch_8bit", EIGHT_BITS), ("adamw_torch_4bit", EIGHT_BITS), ("adamw_torch_fp8", EIGHT_BITS)], No("computed with AdamW, the only optimizer"));

#[rustfmt::skip]
const EVALS: Rule = When(&[("epoch", Set("eval_steps", "epoch")), ("no", Set("eval_steps", "0")), ("false", Set("eval_steps", "0")), ("steps", Same)], No("expected one of no, steps, epoch"));
#[rustfmt::skip]
const METRIC: Rule = When(&[("loss", Same), ("eval_loss", Same), ("accuracy", Set("best_metric", "accuracy")), ("eval_accuracy", Set("best_metric", "accuracy")), ("macro_f1", Set("best_metric", "macro_f1")), ("eval_macro_f1", Set("best_metric", "macro_f1")), ("f1", Set("best_metric", "f1")), ("eval_f1", Set("best_metric", "f1"))], No("the best eval is that of the lowest loss; a classifier's also by accuracy or macro_f1, that of words by f1"));

const SPEED: Rule = Needless("it is about speed: no value depends on it");
const CACHE: Rule = Needless("every run tokenises its rows, in seconds");
const EXACT: Rule = Needless("attention is exact, whichever kernel computes it");
const KERNELS: Rule = Needless("another kernel of the same product");
const PROCESSES: Rule = Needless("it is about processes of torch, of which there are none");
const PADDING: Rule = Needless("padding is never computed");
const SHOWN: Rule = Needless("it is about what the other trainer shows while it runs");
const UPLOADED: Rule = Elsewhere("`finetune push OUT owner/name` uploads the result, once");
const MANY: Rule = Elsewhere(
    "several cards and machines share the rows, and layers that do not fit are streamed: --gpus, --role, --offload",
);
const WANDB: Rule = Lost("nothing is sent to Weights & Biases; metrics.jsonl has every number");
const MLFLOW: Rule = Lost("nothing is sent to MLflow; metrics.jsonl has every number");
const WATCHDOG: Rule = Lost("a loss that is not finite ends the run with exit code 3; a high one does not");
const STREAMING: Rule =
    When(&[("false", Same)], No("all rows are read before the first step, 4 bytes a token"));
const DTYPE: Rule = When(
    &[("auto", Same), ("false", Same)],
    No("weights keep the dtype of their files; products are computed in what dtype says"),
);
const ANSWERS: Rule = When(
    &[("0", Same), ("false", Same)],
    No("no texts are generated for a metric; sample_prompt: TEXT shows answers"),
);

/// Keys from transformers' TrainingArguments.
#[rustfmt::skip]
pub const SHARED: Table = &[
    ("load_in_4bit", When(&[("true", Set("quantize", "nf4"))], Same)),
    ("load_in_8bit", When(&[("true", Set("quantize", "q8_0"))], Same)),
    ("lr_scheduler_type", SCHEDULE), ("lr_scheduler", SCHEDULE),
    ("optim", OPTIMIZER), ("optimizer", OPTIMIZER),
    ("optim_args", Lost("AdamW's numbers are adam_beta1, adam_beta2 and adam_epsilon")),
    ("fp16", When(&[("true", No("products are computed in what dtype says; sums and parameters are f32"))], Same)),
    ("lora_target_linear", When(&[("true", Set("target_modules", "all-linear"))], Same)),
    ("overwrite_output_dir", Key("overwrite")),
    ("resume_from_checkpoint", When(&[("true", Set("resume", "true")), ("false", Same)], No("`--resume=OUT` goes on with a run of finetune's own; checkpoints of others are not read"))),
    ("eval_strategy", EVALS), ("evaluation_strategy", EVALS),
    ("save_strategy", When(&[("epoch", Set("save_steps", "epoch")), ("no", Set("save_steps", "0")), ("false", Set("save_steps", "0")), ("best", Set("keep_best", "true")), ("steps", Same)], No("expected one of no, steps, epoch, best"))),
    ("evals_per_epoch", PerEpoch("eval_steps")), ("saves_per_epoch", PerEpoch("save_steps")),
    ("load_best_model_at_end", Key("keep_best")), ("metric_for_best_model", METRIC),
    ("greater_is_better", Needless("it follows from best_metric")),
    ("early_stopping_patience", Key("early_stopping")), ("early_stopping_steps", Key("early_stopping")),
    ("early_stopping_threshold", When(&[("0", Same), ("0.0", Same)], No("any improvement counts"))),
    ("eval_on_start", When(&[("true", Same)], No("the model is scored before the first step, too"))),
    ("eval_delay", When(&[("0", Same), ("0.0", Same)], No("the first eval is not delayed"))),
    ("push_to_hub", UPLOADED), ("hub_model_id", UPLOADED), ("hub_strategy", UPLOADED),
    ("deepspeed", MANY), ("fsdp", MANY), ("fsdp_config", MANY),
    ("trust_remote_code", Needless("no code of a model is ever run: a class that is not known here is refused")),
    ("run_name", Lost("the name of a run is its folder: output")),
    ("save_safetensors", When(&[("true", Same)], No("adapters are always safetensors"))),
    ("save_only_model", When(&[("false", Same)], No("checkpoints hold the optimizer too, so that a run can go on"))),
    ("tf32", When(&[("false", Same)], No("products are computed in what dtype says"))),
    ("do_train", When(&[("true", Same)], No("a run trains; `finetune plan` and `inspect` do not"))),
    ("do_eval", When(&[("true", Same)], No("rows to evaluate on are scored wherever there are any"))),
    ("use_cpu", When(&[("true", Set("gpus", "cpu"))], Same)), ("no_cuda", When(&[("true", Set("gpus", "cpu"))], Same)),
    ("debug", When(&[("false", Same)], No("nothing more is printed for it; `finetune inspect` shows which tokens of a row are trained on"))),
    ("strict", When(&[("false", Same)], No("weights that are missing are always an error"))),
    ("gradient_checkpointing_kwargs", Needless("what is computed twice has the same bits")),
    ("dataloader_num_workers", SPEED), ("dataloader_pin_memory", SPEED), ("dataloader_prefetch_factor", SPEED),
    ("per_device_eval_batch_size", Needless("the eval loss is an exact sum, however rows are batched")),
    ("eval_batch_size", Needless("the eval loss is an exact sum, however rows are batched")),
    ("logging_strategy", Needless("every step is logged")), ("logging_first_step", Needless("every step is logged")),
    ("disable_tqdm", SHOWN), ("log_level", SHOWN),
    ("ddp_timeout", PROCESSES), ("ddp_find_unused_parameters", PROCESSES), ("local_rank", PROCESSES),
    ("torch_compile", KERNELS), ("use_liger_kernel", KERNELS), ("attn_implementation", EXACT),
    ("remove_unused_columns", Needless("columns that are no field of a row's form are not read")),
];

#[rustfmt::skip]
const AXOLOTL: Table = &[
    ("adapter", When(&[("lora", Same), ("qlora", Set("quantize", "nf4"))], No(FULL))),
    ("lora_model_dir", Key("init_adapter")),
    ("peft_use_rslora", Key("rslora")),
    ("peft_use_dora", When(&[("false", Same)], No("DoRA is not supported; plain LoRA is trained"))),
    ("lora_modules_to_save", MODULES),
    ("lora_fan_in_fan_out", When(&[("false", Same)], No("weights are read as [out, in], as Llama, Mistral and Qwen store them"))),
    ("shuffle_merged_datasets", Key("shuffle")),
    ("eot_tokens", Needless("an answer is learnt with the token with which the template ends it")),
    ("chat_template", When(&[("tokenizer_default", Same), ("chatml", Set("chat_template", "chatml")), ("jinja", Same)], No(TEMPLATE))),
    ("default_system_message", Lost("put it into the rows")),
    ("tokens", Key("add_tokens")), ("added_tokens_overrides", Lost(TOKENS)),
    ("rl", When(&[("dpo", Set("task", "dpo")), ("ipo", Set("task", "ipo")), ("orpo", Set("task", "orpo")), ("simpo", Set("task", "simpo")), ("kto", No(KTO))], No(REWARDS))), ("reward_model", When(&[("true", Set("task", "reward"))], Same)),
    ("rl_beta", Key("beta")), ("dpo_label_smoothing", Key("label_smoothing")), ("orpo_alpha", Key("beta")), ("cpo_alpha", Key("nll_weight")),
    ("num_labels", Key("num_classes")),
    ("gradient_clipping", Key("max_grad_norm")),
    ("loraplus_lr_ratio", Key("loraplus_lr_ratio")),
    ("dataset_exact_deduplication", Key("drop_duplicates")), ("exact_deduplication", Key("drop_duplicates")),
    ("excess_length_strategy", When(&[("truncate", Set("long_rows", "cut")), ("drop", Set("long_rows", "drop")), ("raise", Set("long_rows", "refuse"))], No("expected one of drop, truncate, raise"))),
    ("train_on_inputs", When(&[("true", Set("learn", "all"))], Same)),
    ("unfrozen_parameters", Lost(FULL)),
    ("plugins", Lost("plugins are code of Axolotl's, and some of them change the loss: none of it is run")),
    ("loss_watchdog_threshold", WATCHDOG), ("loss_watchdog_patience", WATCHDOG),
    ("s2_attention", When(&[("false", Same)], No("shifted sparse attention is not supported: every row is attended to in full"))),
    ("model_type", When(&[("automodelforcausallm", Same), ("llamaforcausallm", Same), ("mistralforcausallm", Same), ("qwen2forcausallm", Same), ("qwen3forcausallm", Same), ("qwen3moeforcausallm", Same), ("qwen3_5forcausallm", Same), ("qwen3_5moeforcausallm", Same), ("gemma3forcausallm", Same), ("smollm3forcausallm", Same), ("graniteforcausallm", Same), ("granitemoehybridforcausallm", Same), ("olmo2forcausallm", Same), ("olmo3forcausallm", Same), ("ministral3forcausallm", Same), ("glm4forcausallm", Same), ("phi3forcausallm", Same), ("lfm2forcausallm", Same), ("gptossforcausallm", Same), ("gemma3forconditionalgeneration", Same), ("mistral3forconditionalgeneration", Same), ("qwen3vlforconditionalgeneration", Same), ("qwen3_5forconditionalgeneration", Same), ("qwen3_5moeforconditionalgeneration", Same), ("automodelforimagetexttotext", Same), ("automodelforsequenceclassification", Set("task", "classify")), ("automodelfortokenclassification", Set("task", "token-classification"))], No("the architecture is that of the model's config.json"))),
    ("tokenizer_type", When(&[("autotokenizer", Same), ("pretrainedtokenizerfast", Same), ("llamatokenizer", Same), ("llamatokenizerfast", Same)], No("the tokenizer is the model's tokenizer.json"))),
    ("is_llama_derived_model", Needless("the model's config.json says what it is")),
    ("is_mistral_derived_model", Needless("the model's config.json says what it is")),
    ("is_qwen_derived_model", Needless("the model's config.json says what it is")),
    ("eval_table_size", ANSWERS), ("eval_max_new_tokens", ANSWERS),
    ("wandb_mode", When(&[("disabled", Same)], No("nothing is sent to Weights & Biases; metrics.jsonl has every number"))),
    ("wandb_project", WANDB), ("wandb_entity", WANDB), ("wandb_watch", WANDB), ("wandb_name", WANDB), ("wandb_log_model", WANDB),
    ("wandb_run_id", WANDB), ("use_wandb", When(&[("false", Same)], No("nothing is sent to Weights & Biases; metrics.jsonl has every number"))),
    ("mlflow_experiment_name", MLFLOW), ("mlflow_tracking_uri", MLFLOW), ("mlflow_run_name", MLFLOW),
    ("use_tensorboard", When(&[("false", Same)], No("name a folder for its files: tensorboard: DIR"))),
    ("gpu_memory_limit", Key("memory_limit")),
    ("lora_on_cpu", Needless("it is about where weights are merged, not about their values")),
    ("bfloat16", DTYPE), ("float16", DTYPE),
    ("dataset_prepared_path", CACHE), ("dataset_processes", SPEED), ("pad_to_sequence_len", PADDING),
    ("eval_sample_packing", Needless("packed rows do not see each other")),
    ("flash_attention", EXACT), ("xformers_attention", EXACT), ("sdp_attention", EXACT), ("flex_attention", EXACT),
    ("lora_mlp_kernel", KERNELS), ("lora_qkv_kernel", KERNELS), ("lora_o_kernel", KERNELS),
];

#[rustfmt::skip]
const LLAMA_FACTORY: Table = &[
    ("stage", When(&[("sft", Same), ("pt", Set("task", "sft")), ("dpo", Set("task", "dpo")), ("rm", Set("task", "reward")), ("kto", No(KTO))], No(REWARDS))),
    ("finetuning_type", When(&[("lora", Same)], No(FULL))),
    ("lora_target", When(&[("all", Set("target_modules", "all-linear"))], Set("target_modules", ""))),
    ("quantization_bit", When(&[("4", Set("quantize", "nf4")), ("8", Set("quantize", "q8_0"))], No("only nf4 (4 bits) and q8_0 (8 bits) are supported"))),
    ("quantization_method", When(&[("bnb", Same), ("bitsandbytes", Same)], No("only nf4 (4 bits) and q8_0 (8 bits) are supported"))),
    ("adapter_name_or_path", Key("init_adapter")),
    ("additional_target", MODULES),
    ("template", When(&[("chatml", Set("chat_template", "chatml"))], No(TEMPLATE))),
    ("eval_on_each_dataset", When(&[("false", Same)], No("name the sets: eval_data: {code: code.jsonl, chat: chat.jsonl}"))),
    ("compute_accuracy", When(&[("true", Set("token_accuracy", "true"))], Same)),
    ("enable_thinking", When(&[("true", Set("template_args", "enable_thinking=true")), ("false", Set("template_args", "enable_thinking=false"))], No("expected true or false"))),
    ("val_size", Key("eval_split")),
    ("train_on_prompt", When(&[("true", Set("learn", "all"))], Same)),
    ("mask_history", When(&[("true", Set("learn", "last"))], Same)),
    ("neat_packing", Key("packing")),
    ("loraplus_lr_ratio", Key("loraplus_lr_ratio")),
    ("rope_scaling", Lost("positions are the model's own")),
    ("resize_vocab", Needless("added tokens get rows")), ("new_special_tokens", Key("add_special_tokens")),
    ("streaming", STREAMING), ("buffer_size", Lost("all rows are shuffled, not those of a buffer")),
    ("tokenized_path", Lost("every run tokenises its rows: name their files under data")),
    ("predict_with_generate", ANSWERS),
    ("upcast_layernorm", Needless("norms are computed in f32")),
    ("pref_loss", LOSS), ("pref_beta", Key("beta")), ("pref_ftx", Key("nll_weight")), ("ref_model_adapters", Key("reference_adapter")), ("ref_model", Lost("the reference is the base, with the adapter of reference_adapter")), ("dpo_label_smoothing", Key("label_smoothing")), ("reward_model", Lost(REWARDS)),
    ("preprocessing_num_workers", SPEED), ("overwrite_cache", CACHE),
    ("plot_loss", Needless("loss.svg and report.html are always written")),
    ("flash_attn", EXACT), ("enable_liger_kernel", KERNELS), ("use_unsloth", KERNELS),
    ("dataset_dir", Needless("files of the rows are looked up in it")),
    ("include_num_input_tokens_seen", Needless("metrics.jsonl counts the tokens of every step")),
    // Converted together with quantization_bit.
    ("double_quantization", Needless("it decides between nf4 and nf4-double")),
];

#[rustfmt::skip]
const TRL: Table = &[
    ("use_peft", When(&[("true", Same)], No(FULL))),
    ("lora_modules_to_save", MODULES),
    ("lora_task_type", When(&[("causal_lm", Same), ("seq_cls", Set("task", "classify")), ("token_cls", Set("task", "token-classification"))], No("expected one of CAUSAL_LM, SEQ_CLS, TOKEN_CLS"))),
    ("bnb_4bit_quant_type", When(&[("nf4", Same)], No("4 bits are nf4 here"))),
    ("assistant_only_loss", When(&[("true", Set("learn", "answers"))], Same)),
    ("completion_only_loss", When(&[("false", Set("learn", "all"))], Same)),
    ("truncation_mode", When(&[("keep_start", Same)], No("longer rows lose their end; long_rows: split keeps it"))),
    ("dataset_streaming", STREAMING), ("dataset_kwargs", Lost("rows are what their fields say")),
    ("eos_token", Lost(TOKENS)), ("pad_token", Lost("padding is never computed, and the tokenizer stays the model's own")),
    ("chat_template_path", Key("chat_template")),
    ("packing_strategy", When(&[("bfd", Same), ("bfd_split", Set("long_rows", "split")), ("bfd-requeue", Set("long_rows", "split"))], No("rows are packed whole, and do not see each other"))),
    ("torch_dtype", DTYPE), ("dtype", DTYPE),
    ("shuffle_dataset", Needless("it shuffles the rows once more before the first epoch; they are drawn again in every epoch")), ("test_split_size", Key("eval_split")),
    ("precompute_ref_log_probs", Needless("the reference scores the answers once, before the first step")), ("precompute_ref_batch_size", SPEED),
    ("disable_dropout", When(&[("true", Set("dropout", "0"))], Same)),
    ("sync_ref_model", When(&[("false", Same)], No("the reference stays what it is"))),
    ("use_weighting", When(&[("false", Same)], No("answers are not weighted by their probabilities"))),
    ("cpo_alpha", Key("nll_weight")),
    ("num_labels", Key("num_classes")),
    // Converted together with load_in_4bit.
    ("use_bnb_nested_quant", Needless("it decides between nf4 and nf4-double")),
    ("bnb_4bit_quant_storage", Needless("it decides how torch stores blocks in memory, not their values")),
    ("dataset_num_proc", SPEED), ("eval_packing", Needless("packed rows do not see each other")),
    ("padding_free", PADDING), ("pad_to_multiple_of", PADDING),
    ("activation_offloading", Needless("it is about where activations wait, not about their values")),
    ("ignore_bias_buffers", PROCESSES),
];

/// Defaults of a trainer that differ from ours: (our key, value).
#[rustfmt::skip]
const DEFAULTS: &[(Dialect, &[(&str, &str)])] = &[
    (Dialect::Axolotl, &[("long_rows", "drop")]),
    (Dialect::LlamaFactory, &[("rank", "8"), ("learning_rate", "5e-5"), ("lr_scheduler", "linear"), ("warmup_steps", "0"), ("epochs", "3"), ("save_steps", "500")]),
    (Dialect::Trl, &[("alpha", "32"), ("dropout", "0.05"), ("learning_rate", "2e-5"), ("lr_scheduler", "linear"), ("warmup_steps", "0"), ("epochs", "3"), ("save_steps", "500")]),
];

impl Dialect {
    /// All dialects, by their name for `--from`.
    pub const ALL: [(&'static str, Dialect); 3] =
        [("axolotl", Dialect::Axolotl), ("llama-factory", Dialect::LlamaFactory), ("trl", Dialect::Trl)];

    /// The trainer's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Axolotl => "Axolotl",
            Dialect::LlamaFactory => "LLaMA-Factory",
            Dialect::Trl => "TRL",
        }
    }

    /// Keys that only this trainer has.
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

    /// The dialect with the most characteristic keys; `None` where there are none.
    pub fn guess<'a>(keys: impl Iterator<Item = &'a str> + Clone) -> Option<Self> {
        let count = |d: Dialect| keys.clone().filter(|key| d.marks().contains(key)).count();
        // The first among equals: all trainers have `model_name_or_path`.
        let counted = Self::ALL.iter().rev().map(|(_, d)| (count(*d), *d));
        counted.max_by_key(|(n, _)| *n).filter(|(n, _)| *n > 0).map(|(_, d)| d)
    }

    /// The rule of `key`.
    pub fn rule(self, key: &str) -> Option<Rule> {
        let own = match self {
            Dialect::Axolotl => AXOLOTL,
            Dialect::LlamaFactory => LLAMA_FACTORY,
            Dialect::Trl => TRL,
        };
        own.iter().chain(SHARED).find(|(name, _)| *name == key).map(|(_, rule)| *rule)
    }

    /// The trainer's own defaults.
    pub fn defaults(self) -> &'static [(&'static str, &'static str)] {
        DEFAULTS.iter().find(|(d, _)| *d == self).map_or(&[], |(_, all)| all)
    }

    /// Every table, for a test.
    #[cfg(test)]
    pub fn tables() -> [Table; 4] {
        [SHARED, AXOLOTL, LLAMA_FACTORY, TRL]
    }
}

/// Keys that `finetune import` converts together with others, and what they are here.
#[rustfmt::skip]
pub const TOGETHER: &[(&str, &str)] = &[
    ("model_revision", "write it behind the model: owner/name@revision"),
    ("revision_of_model", "write it behind the model: owner/name@revision"),
    ("lr_scheduler_kwargs", "settings of schedules are warmup_steps, min_lr and decay_steps"),
    ("cosine_min_lr_ratio", "write the rate itself: min_lr"),
    ("data_seed", "one seed fixes everything: seed"),
    ("env", "set variables in the shell"),
    ("chat_template_jinja", "write it to a file and name that: chat_template: FILE"),
    ("special_tokens", TOKENS),
    ("mix_strategy", "give each set a weight: data: [a.jsonl=0.7, b.jsonl=0.3]"),
    ("interleave_probs", "give each set a weight: data: [a.jsonl=0.7, b.jsonl=0.3]"),
    ("loss_type", "this is loss here, with a task: dpo, orpo, cpo or simpo"),
    ("loss_weights", "the weight of the chosen answers' own loss is nll_weight"),
];

/// Keys of rows, which `finetune import` converts without the tables.
pub const ROW_KEYS: &[&str] = &[
    "datasets",
    "test_datasets",
    "dataset",
    "eval_dataset",
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_text_field",
    "data_files",
];

/// The tables' explanation of an unknown key, for a user who wrote it into a configuration of finetune.
pub fn explanation(key: &str, value: &str) -> Option<String> {
    if let Some((_, why)) = TOGETHER.iter().find(|(known, _)| *known == key) {
        return Some((*why).into());
    }
    if ROW_KEYS.contains(&key) {
        return Some("name the rows under data and eval_data; `finetune import FILE` looks for them".into());
    }
    let rule = Dialect::ALL.iter().find_map(|(_, dialect)| dialect.rule(key))?;
    let leave = |why: &str| format!("{why}; leave it out");
    Some(match rule {
        Rule::Key(ours) | Rule::PerEpoch(ours) => format!("this is {ours} here"),
        Rule::Lost(why) | Rule::Needless(why) | Rule::Elsewhere(why) => leave(why),
        Rule::When(cases, otherwise) => {
            let word = value.to_lowercase();
            match cases.iter().find(|(v, _)| *v == word).map_or(otherwise, |(_, b)| *b) {
                Becomes::Set(ours, "") => format!("this is {ours} here"),
                Becomes::Set(ours, v) => format!("this is `{ours}: {v}` here"),
                Becomes::Near(ours, v, why) => format!("{why}; nearest is `{ours}: {v}`"),
                Becomes::Same => leave("it is so anyway"),
                Becomes::Lost(why) => leave(why),
            }
        }
    })
}
