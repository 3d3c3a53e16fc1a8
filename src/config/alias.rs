//! Option names of other trainers. A name is another spelling of one of our options, or is computed into one (the
//! result is printed), or requests behaviour that is always on (explained once), or requests something unsupported:
//! that is an error, because ignoring it would change the training.

use super::refusal::Refusal;
use super::table::{self, Opt};
use super::typed::{Typed, place};

/// Other spellings: (theirs, ours), both with underscores.
pub const ALIASES: &[(&str, &str)] = &[
    ("model_name_or_path", "model"),
    ("base_model", "model"),
    ("max_length", "max_seq_len"),
    ("max_seq_length", "max_seq_len"),
    ("sequence_len", "max_seq_len"),
    ("cutoff_len", "max_seq_len"),
    ("num_train_epochs", "epochs"),
    ("num_epochs", "epochs"),
    ("lr", "learning_rate"),
    ("lr_scheduler_type", "lr_scheduler"),
    ("lora_r", "rank"),
    ("lora_rank", "rank"),
    ("lora_alpha", "alpha"),
    ("lora_dropout", "dropout"),
    ("lora_target_modules", "target_modules"),
    ("lora_target", "target_modules"),
    ("layers_to_transform", "target_layers"),
    ("peft_layers_to_transform", "target_layers"),
    ("use_rslora", "rslora"),
    ("output_dir", "output"),
    ("sample_packing", "packing"),
    ("train_batch_size", "batch_size"),
    ("global_batch_size", "batch_size"),
    ("effective_batch_size", "batch_size"),
    ("val_set_size", "eval_split"),
    ("max_samples", "max_rows"),
    // An option of finetune: the number counts devices.
    ("expect_devices", "expect_workers"),
    ("min_devices", "min_workers"),
    ("data_files", "data"),
    ("load_best_model_at_end", "keep_best"),
    ("metric_for_best_model", "best_metric"),
    ("early_stopping_patience", "early_stopping"),
    ("early_stopping_steps", "early_stopping"),
    ("chat_template_kwargs", "template_args"),
    ("chat_template_args", "template_args"),
    ("template_arg", "template_args"),
    ("device", "gpus"),
    ("compute_dtype", "dtype"),
    ("force", "overwrite"),
];

/// Aliases that verbs other than training take too, where they have the option.
pub const OF_EVERY_VERB: [&str; 3] = ["device", "compute_dtype", "force"];

/// Computed: rows per step are the product of these.
pub const BATCH_FACTORS: &[&str] =
    &["per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps", PROCESSES];

/// A factor only together with another one: alone it does not determine the rows per step.
pub const PROCESSES: &str = "num_processes";

/// Names that mean true without a value.
const SWITCHES: &[&str] = &[
    "use_rslora",
    "sample_packing",
    "force",
    "load_best_model_at_end",
    "greater_is_better",
    "train_on_inputs",
    "train_on_prompt",
    "completion_only_loss",
    "assistant_only_loss",
    "mask_history",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    FOUR_BITS,
    DOUBLE,
    "load_in_8bit",
    "use_dora",
    "group_by_length",
];

/// Computed: a fraction becomes a percentage of `warmup_steps`.
pub const WARMUP_RATIO: &str = "warmup_ratio";

/// Computed: a number of times per epoch, as in Axolotl.
pub const PER_EPOCH: &[(&str, &str)] =
    &[("evals_per_epoch", "eval_steps"), ("saves_per_epoch", "save_steps")];

/// Computed: a strategy decides whether the number of steps beside it is used.
const STRATEGIES: &[(&str, &str)] = &[
    ("eval_strategy", "eval_steps"),
    ("evaluation_strategy", "eval_steps"),
    ("save_strategy", "save_steps"),
];

/// Computed: switches of what is trained on, with the value that means one of `learn`.
const LEARNT: &[(&str, [&str; 2], &str)] = &[
    ("train_on_inputs", ["true", "yes"], "all"),
    ("train_on_prompt", ["true", "yes"], "all"),
    ("completion_only_loss", ["false", "no"], "all"),
    ("assistant_only_loss", ["true", "yes"], "answers"),
    ("mask_history", ["true", "yes"], "last"),
];

/// Computed: if TensorBoard is in `report_to`, `logging_dir` is its folder.
const REPORT_TO: &str = "report_to";
const LOGGING_DIR: &str = "logging_dir";

/// Computed: transformers' name for `quantize: nf4`, and together with the second key for `nf4-double`.
const FOUR_BITS: &str = "load_in_4bit";
const DOUBLE: &str = "bnb_4bit_use_double_quant";

/// Meaning of a value of a foreign key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Accepted, with an explanation.
    Explained(&'static str),
    /// Accepted, with a warning: the requested behaviour has no effect here.
    Warned(&'static str),
    /// Refused as unsupported, with the alternative.
    NotBuilt(&'static str),
}

use Meaning::{Explained, NotBuilt, Warned};

const ANSWERS: &str = "answers are trained on; learn: all trains on prompts too";

/// Keys that are accepted for some values: (key, accepted values, meaning for those, meaning otherwise). An empty list
/// matches everything, a star matches the rest of a word; values are compared in lower case.
#[rustfmt::skip]
const FOREIGN: &[(&str, &[&str], Meaning, Meaning)] = &[
    ("train_on_inputs", &["false", "no"], Explained(ANSWERS), NotBuilt("expected true or false")),
    ("train_on_prompt", &["false", "no"], Explained(ANSWERS), NotBuilt("expected true or false")),
    ("completion_only_loss", &["true", "yes"], Explained(ANSWERS), NotBuilt("expected true or false")),
    ("assistant_only_loss", &["false", "no"], Explained("the assistant's turns are trained on; learn: all trains on all of `messages`"), NotBuilt("expected true or false")),
    ("mask_history", &["false", "no"], Explained("all answers of a conversation are trained on"), NotBuilt("expected true or false")),
    ("gradient_checkpointing", &[], Explained("recomputation is chosen by the available memory (--memory-limit)"), NotBuilt("")),
    ("bf16", &[], Explained("--dtype auto takes bf16 on devices that are faster in it, --dtype bf16 requires it; an adapter's parameters are f32 in any case"), NotBuilt("")),
    ("fp16", &["false", "no", "auto"], Explained("--dtype says what products are computed in"), NotBuilt("--dtype has no f16: leave it out, --dtype auto takes f16 on cards that are faster in it")),
    ("optim", &["adamw*", "paged_adamw*"], Explained("AdamW in f32"), NotBuilt("AdamW is the only optimizer")),
    ("optimizer", &["adamw*", "paged_adamw*"], Explained("AdamW in f32"), NotBuilt("AdamW is the only optimizer")),
    ("logging_steps", &[], Explained("metrics.jsonl has a line for every step"), NotBuilt("")),
    (REPORT_TO, &["none", "[]", ""], Explained("metrics.jsonl is always written"), Warned("nothing is sent there; metrics.jsonl has every number")),
    (LOGGING_DIR, &[], Explained("metrics.jsonl is in the output folder; `tensorboard: DIR` writes TensorBoard's files"), NotBuilt("")),
    ("eval_strategy", &["steps"], Explained("eval_steps says how often"), NotBuilt("expected one of no, steps, epoch")),
    ("evaluation_strategy", &["steps"], Explained("eval_steps says how often"), NotBuilt("expected one of no, steps, epoch")),
    ("save_strategy", &["steps"], Explained("save_steps says how often"), NotBuilt("expected one of no, steps, epoch, best")),
    ("greater_is_better", &[], Explained("it follows from best_metric"), NotBuilt("")),
    ("early_stopping_threshold", &["0"], Explained("any improvement counts"), NotBuilt("any improvement counts; leave it out")),
    ("adapter", &["lora"], Explained("LoRA is trained"), NotBuilt("LoRA is the only kind of adapter")),
    (FOUR_BITS, &["false", "no"], Explained("weights stay as they are"), NotBuilt("quantize is given as well: leave one out")),
    (DOUBLE, &["false", "no"], Explained("magnitudes stay f32"), NotBuilt("goes with load_in_4bit; here both are `quantize: nf4-double`")),
    ("bnb_4bit_quant_type", &["nf4"], Explained("4 bits are NF4"), NotBuilt("only nf4 is supported")),
    ("bnb_4bit_compute_dtype", &[], Explained("--dtype says what products are computed in"), NotBuilt("")),
    ("load_in_8bit", &["false", "no"], Explained("weights stay as they are"), NotBuilt("use `quantize: q8_0` instead")),
    ("neftune_noise_alpha", &["0", "null"], Explained("no noise"), NotBuilt("noise on embeddings is not supported; leave it out")),
    ("use_dora", &["false", "no"], Explained("plain LoRA"), NotBuilt("DoRA is not supported; leave it out for plain LoRA")),
    ("bias", &["none"], Explained("biases stay frozen"), NotBuilt("biases stay frozen; only `none` is supported")),
    ("lora_bias", &["none", "false"], Explained("biases stay frozen"), NotBuilt("biases stay frozen; only `none` is supported")),
    ("modules_to_save", &["[]", ""], Explained("a classifier's head is trained in full, nothing else"), NotBuilt("only a classifier's head is trained in full (--task classify)")),
    ("label_smoothing_factor", &["0"], Explained("no smoothing"), NotBuilt("label smoothing is not supported; leave it out")),
    ("group_by_length", &["false", "no"], Explained("rows are shuffled; packing fills the microbatches"), NotBuilt("rows are never ordered by length; packing fills the microbatches")),
];

/// Our key for another spelling.
pub fn ours(key: &str) -> Option<&'static str> {
    ALIASES.iter().find(|(theirs, _)| *theirs == key).map(|(_, ours)| *ours)
}

/// Meaning of `key: value`; `None` where the key is not a foreign one.
pub fn foreign(key: &str, value: &str) -> Option<Meaning> {
    let (_, fits, then, otherwise) = FOREIGN.iter().find(|f| f.0 == key)?;
    let value = value.to_lowercase();
    let value = value.trim_end_matches(".0");
    let fit = |f: &&str| f.strip_suffix('*').map_or(*f == value, |start| value.starts_with(start));
    Some(if fits.is_empty() || fits.iter().any(fit) { *then } else { *otherwise })
}

/// Our key for a number of times per epoch.
pub fn per_epoch(key: &str) -> Option<&'static str> {
    PER_EPOCH.iter().find(|(theirs, _)| *theirs == key).map(|(_, ours)| *ours)
}

/// The option `shuffle` for `no_shuffle`: every switch that defaults to true has such a name.
pub fn negated(key: &str) -> Option<&'static Opt> {
    let name = key.strip_prefix("no_")?.replace('_', "-");
    table::find(&name).filter(|o| o.is_on())
}

/// Whether the name without a value means true; other names need a value.
pub fn is_switch(key: &str) -> bool {
    SWITCHES.contains(&key)
}

/// All supported foreign keys.
pub fn all<'a>() -> impl Iterator<Item = &'a str> {
    let foreign = FOREIGN.iter().map(|f| f.0);
    let aliases = ALIASES.iter().chain(PER_EPOCH).map(|a| a.0).chain(BATCH_FACTORS.iter().copied());
    aliases.chain([WARMUP_RATIO]).chain(foreign).map(|k: &'static str| -> &'a str { k })
}

/// transformers writes both warmup_steps and warmup_ratio: steps are used if above 0, else the ratio.
pub(super) fn one_warmup(mut layer: Vec<Typed>, notes: &mut Vec<String>) -> Vec<Typed> {
    let steps = layer.iter().position(|t| t.key == "warmup_steps");
    if let Some(ratio) = layer.iter().position(|t| t.key == WARMUP_RATIO)
        && let Some(steps) = steps
    {
        let zero = layer[steps].values.concat().parse() == Ok(0.0);
        let dropped = layer.remove(if zero { steps } else { ratio });
        if !zero {
            notes.push(format!("{} ({}): warmup_steps counts instead", dropped.key, dropped.source));
        }
    }
    layer
}

/// Converts load_in_4bit and the keys that refine it, where it is true.
pub(super) fn four_bits(mut layer: Vec<Typed>, notes: &mut Vec<String>) -> Vec<Typed> {
    let asked = |key: &str| {
        let is =
            |t: &Typed| t.key == key && matches!(t.values.concat().to_lowercase().as_str(), "true" | "yes");
        layer.iter().position(is)
    };
    let (Some(four), false) = (asked(FOUR_BITS), layer.iter().any(|t| t.key == "quantize")) else {
        return layer;
    };
    let double = asked(DOUBLE);
    let name = if double.is_some() { "nf4-double" } else { "nf4" };
    notes.push(format!("{FOUR_BITS} ({}): quantize {name}", layer[four].source));
    layer[four] =
        Typed { key: "quantize".into(), values: vec![name.into()], source: layer[four].source.clone() };
    double.into_iter().for_each(|at| drop(layer.remove(at)));
    layer
}

/// `train_on_inputs: true` means `learn: all`.
pub(super) fn learnt(mut layer: Vec<Typed>, notes: &mut Vec<String>) -> Vec<Typed> {
    for t in &mut layer {
        let value = t.values.concat().to_lowercase();
        let found = LEARNT.iter().find(|(key, values, _)| t.key == *key && values.contains(&value.as_str()));
        if let Some((theirs, _, learn)) = found {
            notes.push(format!("learn {learn} = {theirs} {value} ({})", t.source));
            (t.key, t.values) = ("learn".into(), vec![learn.to_string()]);
        }
    }
    layer
}

/// `eval_strategy: epoch` means `eval_steps: epoch`, and `no` means 0: the number beside it is used for `steps` only.
pub(super) fn strategies(mut layer: Vec<Typed>, notes: &mut Vec<String>) -> Vec<Typed> {
    let best = layer.iter().any(|t| t.key == "keep_best" || ours(&t.key) == Some("keep_best"));
    for (theirs, ours) in STRATEGIES {
        let Some(at) = layer.iter().position(|t| t.key == *theirs) else { continue };
        let value = layer[at].values.concat().to_lowercase();
        let steps = match value.as_str() {
            "epoch" => "epoch",
            "no" | "false" => "0",
            "best" if *ours == "save_steps" => "0",
            _ => continue,
        };
        let source = layer[at].source.clone();
        notes.push(format!("{ours} {steps} = {theirs} {value} ({source})"));
        layer.retain(|t| {
            let beside = t.key == *ours;
            if beside {
                notes.push(format!("{ours} {} ({}): {theirs} counts instead", t.values.concat(), t.source));
            }
            !beside && t.key != *theirs
        });
        let mut add = |key: &str, value: &str| {
            let (key, values) = (key.to_string(), vec![value.to_string()]);
            layer.push(Typed { key, values, source: source.clone() });
        };
        add(ours, steps);
        if value == "best" && !best {
            add("keep_best", "true");
        }
    }
    layer
}

/// `report_to: tensorboard` with a logging_dir means `tensorboard: DIR`; without a logging_dir a note names the option.
pub(super) fn tensorboard(mut layer: Vec<Typed>, notes: &mut Vec<String>) -> Vec<Typed> {
    let Some(at) = layer.iter().position(|t| t.key == REPORT_TO) else { return layer };
    let named = |v: &String| ["tensorboard", "all"].contains(&v.to_lowercase().as_str());
    if !layer[at].values.iter().any(named) {
        return layer;
    }
    let source = layer[at].source.clone();
    layer[at].values.retain(|v| v.to_lowercase() != "tensorboard");
    if layer[at].values.is_empty() {
        layer.remove(at);
    }
    if layer.iter().any(|t| t.key == "tensorboard") {
        return layer;
    }
    match layer.iter_mut().find(|t| t.key == LOGGING_DIR) {
        Some(dir) => {
            dir.key = "tensorboard".into();
            notes.push(format!("tensorboard {} = {LOGGING_DIR} ({})", dir.values.concat(), dir.source));
        }
        None => notes.push(format!(
            "warning: {REPORT_TO} tensorboard ({source}): name a folder for it: tensorboard: DIR (--tensorboard DIR)"
        )),
    }
    layer
}

/// Converts a number of times per epoch.
pub(super) fn times(mut t: Typed, ours: &str) -> Result<Typed, Refusal> {
    let times: u64 = t.values.concat().parse().map_err(|_| place(&t, "expected a whole number"))?;
    let steps = match times {
        0 => "0".to_string(),
        1 => "epoch".into(),
        n => format!("epoch/{n}"),
    };
    (t.key, t.values) = (ours.into(), vec![steps]);
    Ok(t)
}

/// `no_shuffle: true` means `shuffle: false`.
pub(super) fn inverted(mut t: Typed, opt: &Opt) -> Typed {
    for value in &mut t.values {
        let other = match value.to_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => "false",
            "false" | "no" | "off" | "0" => "true",
            _ => continue, // refused where switches are read
        };
        *value = other.into();
    }
    t.key = opt.key();
    t
}

/// Converts a fraction of all steps to a percentage in warmup_steps.
pub(super) fn warmup(t: Typed, notes: &mut Vec<String>) -> Result<Typed, Refusal> {
    let ratio: f64 = t.values.concat().parse().map_err(|_| place(&t, "expected a fraction"))?;
    if !(0.0..=1.0).contains(&ratio) {
        return Err(place(&t, "expected a fraction of 0 to 1"));
    }
    // Rounded to a billionth, so that 0.07 is shown as 7% and not as 7.000000000000001%.
    let percent = (ratio * 1e11).round() / 1e9;
    notes.push(format!("warmup_steps {percent}% = warmup_ratio {ratio}"));
    Ok(Typed { key: "warmup_steps".into(), values: vec![format!("{percent}%")], source: t.source })
}
