//! The groups of options for the floors below: one struct per section, with types instead of strings where possible.
//! Invalid values (rank 0, a non-finite alpha) are refused here, with their source.

use super::cluster::cluster;
pub use super::cluster::{ClusterOptions, Coordinator, Expect, Relays, Role, Stages};
use super::delay::delay_fits;
use super::demo;
pub use super::devices::{BACKENDS, CPU, ComputeDtype, DeviceOptions, Gpus, Part, Wanted, devices};
use super::dialects::{KTO, REWARDS};
use super::islands::{islands, islands_fit};
use super::output::output;
pub use super::output::{OutputOptions, Resume, token_accuracy};
use super::preference::objective;
use super::refusal::Refusal;
use super::settings::Settings;
pub use super::values::{
    Amount, Every, class_weights, field_names, filled, new_tokens, real, size, template_args, weighted,
    whole, within,
};
use super::values::{amount, choice, eval_sets, layers, pairs};
use crate::data::new_tokens::NewToken;
use crate::data::{Learn, LongRows, Task};
use crate::model::preference::{Loss, Objective};
use crate::model::quantised::Recipe;
use crate::model::targets::Choice;
use crate::train::island::Islands;
use serde_json::Value;
use std::path::PathBuf;

/// `model`
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOptions {
    /// Directory, file, Hub id, or `demo`.
    pub model: String,
    /// A file, or `chatml`.
    pub chat_template: Option<String>,
    /// Values for variables of the chat template.
    pub template_args: Vec<(String, Value)>,
    /// Quantisation of the base's weights.
    pub quantize: Option<Recipe>,
    /// Name of the base in the adapter's config.
    pub base_id: Option<String>,
}

/// Amount of data held back for evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Split {
    /// Number of rows.
    Rows(usize),
    /// Share, in (0, 1).
    Part(f64),
}

/// `data`
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// Task of the training.
    pub task: Task,
    /// Paths, and data sets of the Hub; `-` is stdin.
    pub data: Vec<PathBuf>,
    /// Weight of each entry of `data`; empty: none has one.
    pub weights: Vec<f64>,
    /// (field of the form, name in the rows)
    pub fields: Vec<(String, String)>,
    /// Supervised part of a row.
    pub learn: Learn,
    /// Rows for evaluation, with the names of their sets; those without a name have an empty one and are first.
    pub eval_data: Vec<(String, Vec<PathBuf>)>,
    /// Part of the data for evaluation, in place of `eval_data`.
    pub eval_split: Option<Split>,
    /// Rows that are read of each entry of `data` and `eval_data`; `None`: all.
    pub max_rows: Option<usize>,
    /// Whether rows that equal an earlier one are left out.
    pub unique: bool,
    /// Maximum tokens of a row; `None`: by the model.
    pub max_seq_len: Option<usize>,
    /// What is done with longer rows.
    pub long: LongRows,
    /// Whether microbatches hold several rows.
    pub packing: bool,
    /// Whether each epoch has its own permutation.
    pub shuffle: bool,
    /// Number of classes, where they are not counted in the data.
    pub num_classes: Option<usize>,
    /// One weight per class.
    pub class_weights: Option<Vec<f32>>,
    /// Weight of the squared sum of both rewards of a pair.
    pub centre: f64,
    /// The loss that compares answers.
    pub objective: Option<Objective>,
    /// The adapter of the reference.
    pub reference: Option<PathBuf>,
    /// Accepted number of rows without supervised tokens; `None`: any number.
    pub max_dropped: Option<Amount>,
}

/// `lora`
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// At least 1.
    pub rank: usize,
    /// Finite, above 0.
    pub alpha: f32,
    /// The projections that get an adapter.
    pub choice: Choice,
    /// Texts of tokens whose rows are trained.
    pub tokens: Vec<String>,
    /// Tokens that the tokenizer gets, whose rows are trained.
    pub new_tokens: Vec<NewToken>,
    /// In [0, 1).
    pub dropout: f32,
    /// Whether the scale is alpha / sqrt(rank).
    pub rslora: bool,
    /// A PEFT folder to start from.
    pub init_adapter: Option<PathBuf>,
}

/// `optim`
#[derive(Debug, Clone, PartialEq)]
pub struct OptimOptions {
    /// At least 1.
    pub epochs: u64,
    /// Maximum steps; overrides epochs.
    pub max_steps: Option<u64>,
    /// Rows per step.
    pub batch_size: usize,
    /// Tokens per microbatch; `None`: by the plan's rule, or measured.
    pub micro_batch_tokens: Option<usize>,
    /// Whether the tokens per microbatch are chosen by measured speeds.
    pub micro_batch_auto: bool,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Lowest learning rate after the warm-up.
    pub min_lr: f64,
    /// Steps in which the rate of `wsd` falls.
    pub decay_steps: Amount,
    /// Decay rates of AdamW's moments.
    pub betas: [f64; 2],
    /// Added to the root of AdamW's second moment; above 0.
    pub epsilon: f64,
    /// `constant`, `linear`, `cosine`, `wsd`.
    pub scheduler: String,
    /// Steps of the warmup.
    pub warmup: Amount,
    /// Learning rate of every B over that of A.
    pub ratio_of_b: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Limit of the gradient's norm; 0: no clipping.
    pub max_grad_norm: f64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Bits to which a microbatch's gradient is rounded before it is added; 0: it is not.
    pub sum_bits: u32,
    /// Bits to which the change of a parameter is rounded; 0: it is not.
    pub update_bits: u32,
    /// Islands, with the steps between exchanges of their results.
    pub islands: Option<Islands>,
    /// Number of steps by which gradients are delayed, 0 or 1.
    pub delay: u64,
}

/// All groups of a training run.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// `model`
    pub model: ModelOptions,
    /// `data`
    pub data: DataOptions,
    /// `lora`
    pub lora: LoraOptions,
    /// `optim`
    pub optim: OptimOptions,
    /// `devices`
    pub devices: DeviceOptions,
    /// `cluster`
    pub cluster: ClusterOptions,
    /// `output`
    pub output: OutputOptions,
}

impl Options {
    /// Reads every group.
    pub fn of(s: &Settings) -> Result<Self, Refusal> {
        let data = data(s)?;
        let task = data.task;
        let sets: Vec<String> = data.eval_data.iter().map(|(name, _)| name.clone()).collect();
        let options = Options {
            model: model(s)?,
            data,
            lora: lora(s)?,
            optim: optim(s)?,
            devices: devices(s)?,
            cluster: cluster(s)?,
            output: output(s, task, &sets)?,
        };
        let OptimOptions { islands, sum_bits, update_bits, delay, .. } = &options.optim;
        islands_fit(s, islands.as_ref(), *sum_bits.max(update_bits), &options.cluster)?;
        delay_fits(s, *delay, islands.as_ref(), &options.cluster)?;
        Ok(options)
    }
}

fn model(s: &Settings) -> Result<ModelOptions, Refusal> {
    Ok(ModelOptions {
        model: s.text("model")?.unwrap_or(demo::NAME).to_string(),
        chat_template: s.text("chat-template")?.map(Into::into),
        template_args: template_args(s)?,
        quantize: recipe(s)?,
        base_id: s.text("base-id")?.map(Into::into),
    })
}

/// The value of --quantize.
pub fn recipe(s: &Settings) -> Result<Option<Recipe>, Refusal> {
    let named = s.text("quantize")?.filter(|name| *name != "none").map(Recipe::named).transpose();
    named.map_err(|e| s.refuse("quantize", e))
}

/// The task, and the loss that compares answers.
pub fn task(s: &Settings) -> Result<(Task, Option<Objective>), Refusal> {
    match s.text("task")? {
        Some("kto") => return Err(s.refuse("task", KTO)),
        Some("grpo" | "ppo") => return Err(s.refuse("task", REWARDS)),
        _ => {}
    }
    let heads = [
        ("classify", Task::Classify),
        ("token-classification", Task::Tag),
        ("token_classification", Task::Tag),
        ("ner", Task::Tag),
        ("regression", Task::Regress),
        ("reward", Task::Reward),
        ("rm", Task::Reward),
    ];
    let others = ["sft", "instruct", "dpo", "ipo", "orpo", "cpo", "simpo"];
    let tasks: Vec<&str> = others.into_iter().chain(heads.map(|(name, _)| name)).collect();
    let rule =
        "expected sft, classify, token-classification, regression, reward, dpo, ipo, orpo, cpo or simpo";
    let named = choice(s, "task", &tasks, rule)?;
    let objective = objective(s, named)?;
    let head = heads.into_iter().find(|(name, _)| *name == named);
    let task = match (head, &objective) {
        (Some((_, task)), _) => task,
        (_, Some(Objective { loss: Loss::ApoZeroUnpaired, .. })) => Task::Unpaired,
        (_, Some(_)) => Task::Pairs,
        _ => Task::Sft,
    };
    Ok((task, objective))
}

fn data(s: &Settings) -> Result<DataOptions, Refusal> {
    let (task, objective) = task(s)?;
    let class_weights = class_weights(s)?;
    let of_classes = [("num-classes", s.is_given("num-classes")), ("class-weights", class_weights.is_some())];
    for (name, given) in of_classes {
        if given && !task.has_classes() {
            return Err(s.refuse(name, "goes with --task classify or token-classification"));
        }
    }
    let centre = "center-rewards-coefficient";
    if task != Task::Reward && s.is_given(centre) {
        return Err(s.refuse(centre, "goes with --task reward"));
    }
    let (data, weights) = sets(s)?;
    Ok(DataOptions {
        task,
        data,
        weights,
        fields: field_names(s)?,
        learn: learn(s, task)?,
        eval_data: eval_sets(s)?,
        eval_split: eval_split(s)?,
        max_rows: whole(s, "max-rows", 1)?,
        unique: s.switch("drop-duplicates")?,
        max_seq_len: whole(s, "max-seq-len", 2)?,
        long: long_rows(s, task)?,
        packing: s.switch("packing")?,
        shuffle: s.switch("shuffle")?,
        num_classes: whole(s, "num-classes", 2)?,
        class_weights,
        centre: centre_of_rewards(s)?,
        objective,
        reference: s.text("reference-adapter")?.map(PathBuf::from),
        max_dropped: amount(s, "max-dropped")?,
    })
}

/// The value of --center-rewards-coefficient.
pub fn centre_of_rewards(s: &Settings) -> Result<f64, Refusal> {
    let allowed = |c: f64| (0.0..=1.0).contains(&c);
    Ok(real(s, "center-rewards-coefficient", allowed, "must be from 0 to 1")?.unwrap_or(0.0))
}

/// The entries of --data, and their weights if they have any.
fn sets(s: &Settings) -> Result<(Vec<PathBuf>, Vec<f64>), Refusal> {
    let all: Vec<(&str, Option<f64>)> = s.list("data").iter().map(|text| weighted(text)).collect();
    let weights: Vec<f64> = all.iter().filter_map(|(_, weight)| *weight).collect();
    if let Some(wrong) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
        return Err(s.refuse("data", format!("{wrong} is not a weight: it must be above 0")));
    }
    if !weights.is_empty() && weights.len() < all.len() {
        let (without, _) = all.iter().find(|(_, weight)| weight.is_none()).copied().unwrap_or_default();
        return Err(s.refuse("data", format!("{without} has no weight, others have one: as {without}=0.5")));
    }
    Ok((all.iter().map(|(path, _)| PathBuf::from(path)).collect(), weights))
}

/// The value of --learn.
pub fn learn(s: &Settings, task: Task) -> Result<Learn, Refusal> {
    let names = Learn::ALL.map(|(name, _)| name);
    let name = choice(s, "learn", &names, "expected answers, last, marked or all")?;
    let learn = Learn::ALL.into_iter().find(|(known, _)| *known == name);
    match learn.map_or(Learn::Answers, |(_, learn)| learn) {
        learn if learn != Learn::Answers && task != Task::Sft => {
            Err(s.refuse("learn", "goes with --task sft"))
        }
        learn => Ok(learn),
    }
}

/// The value of --long-rows.
pub fn long_rows(s: &Settings, task: Task) -> Result<LongRows, Refusal> {
    let names = LongRows::ALL.map(|(name, _)| name);
    let name = choice(s, "long-rows", &names, "expected cut, split, drop or refuse")?;
    match LongRows::ALL.into_iter().find(|(known, _)| *known == name) {
        Some((_, LongRows::Split)) if task != Task::Sft => {
            Err(s.refuse("long-rows", "split goes with --task sft: use cut, drop or refuse"))
        }
        found => Ok(found.map_or(LongRows::Cut, |(_, long)| long)),
    }
}

fn eval_split(s: &Settings) -> Result<Option<Split>, Refusal> {
    let name = "eval-split";
    let v = match s.text(name)?.and_then(|t| t.strip_suffix('%')) {
        Some(_) => match amount(s, name)? {
            Some(Amount::Percent(p)) if p < 100.0 => p / 100.0,
            _ => return Err(s.refuse(name, "all rows held back leave none to train on")),
        },
        None => match s.parse::<f64>(name, "a number of rows, a fraction or a percentage")? {
            Some(v) => v,
            None => return Ok(None),
        },
    };
    match v {
        0.0 => Ok(None),
        v if v > 0.0 && v < 1.0 => Ok(Some(Split::Part(v))),
        v if v >= 1.0 && v.fract() == 0.0 && v < 1e15 => Ok(Some(Split::Rows(v as usize))),
        v => Err(s.refuse(name, format!("{v} is neither a number of rows nor a fraction below 1"))),
    }
}

fn lora(s: &Settings) -> Result<LoraOptions, Refusal> {
    let rank = filled(s, "rank", whole(s, "rank", 1)?)?;
    let alpha = real(s, "alpha", |v| v.is_finite() && v > 0.0, "must be finite and above 0")?;
    let dropout = real(s, "dropout", |v| (0.0..1.0).contains(&v), "must be at least 0 and below 1")?;
    Ok(LoraOptions {
        rank,
        alpha: filled(s, "alpha", alpha)? as f32,
        choice: modules(s)?,
        tokens: s.list("train-tokens").to_vec(),
        new_tokens: new_tokens(s)?,
        dropout: filled(s, "dropout", dropout)? as f32,
        rslora: s.switch("rslora")?,
        init_adapter: s.text("init-adapter")?.map(PathBuf::from),
    })
}

fn modules(s: &Settings) -> Result<Choice, Refusal> {
    let names = |name| s.list(name).to_vec();
    let rank = |n: &usize| (1..=1 << 16).contains(n);
    Ok(Choice {
        targets: names("target-modules"),
        layers: layers(s)?,
        exclude: names("exclude-modules"),
        ranks: pairs(s, "rank-pattern", rank, "a whole number from 1 to 65536")?,
        alphas: pairs(s, "alpha-pattern", |a: &f32| a.is_finite() && *a > 0.0, "finite and above 0")?,
    })
}

fn optim(s: &Settings) -> Result<OptimOptions, Refusal> {
    let schedulers = ["constant", "linear", "cosine", "wsd", "constant_with_warmup", "warmup_stable_decay"];
    let scheduler = choice(s, "lr-scheduler", &schedulers, "expected constant, linear, cosine or wsd")?;
    let finite = |v: f64| v.is_finite() && v >= 0.0;
    let beta =
        |name| filled(s, name, real(s, name, |b| (0.0..1.0).contains(&b), "must be at least 0 and below 1")?);
    let betas = [beta("adam-beta1")?, beta("adam-beta2")?];
    let positive = |e: f64| e.is_finite() && e as f32 > 0.0;
    let epsilon = real(s, "adam-epsilon", positive, "must be finite and above 0, in f32 too")?;
    let ratio = real(s, "loraplus-lr-ratio", |r| r.is_finite() && r > 0.0, "must be finite and above 0")?;
    let real = |name| filled(s, name, real(s, name, finite, "must be finite and at least 0")?);
    let seed = s.parse("seed", "a whole number of at most 64 bits")?;
    let (learning_rate, min_lr) = (real("learning-rate")?, real("min-lr")?);
    let stable = ["wsd", "warmup_stable_decay"].contains(&scheduler);
    if min_lr > 0.0 && !(stable || scheduler == "cosine") {
        return Err(s.refuse("min-lr", "goes with --lr-scheduler cosine or wsd"));
    }
    if min_lr > learning_rate {
        return Err(s.refuse("min-lr", format!("is above the learning rate of {learning_rate}")));
    }
    if s.is_given("decay-steps") && !stable {
        return Err(s.refuse("decay-steps", "goes with --lr-scheduler wsd"));
    }
    let auto = s.text("micro-batch-tokens")? == Some("auto");
    let micro = if auto { None } else { whole(s, "micro-batch-tokens", 1)? };
    Ok(OptimOptions {
        epochs: filled(s, "epochs", whole(s, "epochs", 1)?)? as u64,
        max_steps: whole(s, "max-steps", 1)?.map(|n| n as u64),
        batch_size: filled(s, "batch-size", whole(s, "batch-size", 1)?)?,
        micro_batch_tokens: micro,
        micro_batch_auto: auto,
        learning_rate,
        min_lr,
        decay_steps: amount(s, "decay-steps")?.unwrap_or(Amount::Percent(10.0)),
        betas,
        epsilon: filled(s, "adam-epsilon", epsilon)?,
        scheduler: scheduler.trim_end_matches("_with_warmup").to_string(),
        warmup: filled(s, "warmup-steps", amount(s, "warmup-steps")?)?,
        ratio_of_b: filled(s, "loraplus-lr-ratio", ratio)?,
        weight_decay: real("weight-decay")?,
        max_grad_norm: real("max-grad-norm")?,
        seed: filled(s, "seed", seed)?,
        sum_bits: bits(s, "sum-bits")?,
        update_bits: bits(s, "update-bits")?,
        islands: islands(s)?,
        delay: filled(s, "delay", whole(s, "delay", 0)?)? as u64,
    })
}

/// Bits to which something is rounded; 0: it is not.
fn bits(s: &Settings, name: &str) -> Result<u32, Refusal> {
    match filled(s, name, whole(s, name, 0)?)? {
        bits @ (0 | 2..=16) => Ok(bits as u32),
        _ => Err(s.refuse(name, "expected 2 to 16, or 0: nothing is rounded")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Origin, Typed, table::TABLE};

    /// Checks one flag: the exit code and a part of the line; 0 means accepted.
    fn check(name: &str, value: &str, code: u8, part: &str) {
        let typed = Typed { key: name.replace('-', "_"), values: vec![value.into()], source: Origin::Flag };
        let options: Vec<_> = TABLE.iter().collect();
        let got = Settings::resolve(&options, vec![vec![typed]]).and_then(|s| Options::of(&s));
        let (c, line) = got.map_or_else(|e| (e.code(), e.line), |_| (0, String::new()));
        assert_eq!(c, code, "--{name} {value}: {line}");
        assert!(line.contains(part), "--{name} {value}: {line}");
    }

    #[test]
    fn rounding_takes_2_to_16_bits() {
        for name in ["sum-bits", "update-bits"] {
            check(name, "8", 0, "");
            check(name, "0", 0, "");
            check(name, "1", 78, "expected 2 to 16");
            check(name, "17", 78, "expected 2 to 16");
            check(name, "few", 2, "not a whole number");
        }
    }

    #[test]
    fn steps_are_delayed_by_at_most_one() {
        check("delay", "1", 0, "");
        check("delay", "2", 78, "expected 0 or 1");
    }

    #[test]
    fn option_values_are_validated() {
        check("rank", "0", 78, "at least 1");
        check("rank", "abc", 2, "not a whole number");
        check("rank", "-1", 78, "at least 1");
        check("alpha", "inf", 78, "finite");
        check("alpha", "nan", 78, "finite");
        check("dropout", "1", 78, "below 1");
        check("learning-rate", "2e-4", 0, "");
        check("learning-rate", "1e60", 78, "finite");
        check("loraplus-lr-ratio", "16", 0, "");
        check("loraplus-lr-ratio", "0", 78, "above 0");
        check("warmup-steps", "5%", 0, "");
        check("warmup-steps", "101%", 2, "percentage");
        check("memory-limit", "2GB", 0, "");
        check("memory-limit", "2 parsecs", 2, "not a size");
        check("eval-split", "0.1", 0, "");
        check("eval-split", "5%", 0, "");
        check("eval-split", "5 %", 2, "percentage");
        check("eval-split", "1.5", 78, "fraction below 1");
        check("quantize", "none", 0, "");
        check("output", "", 78, "is empty");
        check("threads", "512", 0, "");
        check("threads", "513", 78, "at most 512");
        check("batch-size", "99999999999999999999", 78, "at most 9223372036854775807");
        check("class-weights", "0", 78, "all are 0");
        check("dashboard", "8080", 0, "");
        check("dashboard", "::1", 0, "");
        check("dashboard", "a/b", 2, "not a host");
        check("gpus", "0,1", 0, "");
        check("gpus", "0,auto", 78, "cannot be combined");
        check("gpu-backend", "metal", 78, "auto, cuda, wgpu or cpu");
        check("role", "worker", 78, "needs --coordinator");
        check("micro-batch-tokens", "auto", 0, "");
        check("micro-batch-tokens", "some", 2, "not a whole number");
        check("num-classes", "3", 78, "--task classify");
        check("task", "translate", 78, "expected sft, classify, token-classification");
        check("center-rewards-coefficient", "0.1", 78, "--task reward");
        check("resume", "runs/a", 0, "");
        check("data-fields", "a", 2, "FIELD=COLUMN");
        check("seed", "18446744073709551615", 0, "");
        check("eval-steps", "epoch", 0, "");
        check("eval-steps", "epoch/4", 0, "");
        check("save-steps", "25%", 0, "");
        check("save-steps", "0", 0, "");
        check("eval-steps", "epoch/0", 2, "epoch/4");
        check("eval-steps", "epochs", 2, "or epoch");
        check("eval-steps", "0%", 2, "percentage");
        check("eval-steps", "-1", 2, "a number of steps");
        check("keep-best", "true", 78, "--eval-steps");
        check("early-stopping", "2", 78, "--eval-steps");
        check("early-stopping", "0", 0, "");
        check("best-metric", "eval_loss", 0, "");
        check("best-metric", "accuracy", 78, "--task classify");
        check("sample-rows", "0", 0, "");
        check("sample-rows", "10", 0, "");
        check("sample-rows", "-1", 78, "at least 0");
        check("sample-rows", "ten", 2, "a whole number");
        check("best-metric", "bleu", 78, "loss, accuracy, macro_f1, f1");
    }

    #[test]
    fn choices_about_rows_are_validated() {
        check("learn", "last", 0, "");
        check("learn", "turns", 78, "answers, last, marked or all");
        check("long-rows", "split", 0, "");
        check("long-rows", "keep", 78, "cut, split, drop or refuse");
        check("template-args", "enable_thinking=false", 0, "");
        check("template-args", "{\"a\": [1, null], \"b\": \"x\"}", 0, "");
        check("template-args", "enable_thinking", 2, "NAME=VALUE");
        check("template-args", "{\"a\": }", 2, "NAME=VALUE");
        check("template-args", "messages=1", 78, "set by finetune");
        check("template-args", "a b=1", 78, "not a name");
        check("best-metric", "code_loss", 78, "no set of --eval-data has the name code");
        check("eval-data", "code=c.jsonl", 0, "");
        check("token-accuracy", "true", 0, "");
    }

    #[test]
    fn weights_and_numbers_of_rows_are_validated() {
        check("data", "a.jsonl=0.5", 0, "");
        check("data", "a.jsonl=0", 78, "above 0");
        check("data", "a.jsonl=nan", 78, "above 0");
        check("max-rows", "100", 0, "");
        check("max-rows", "0", 78, "at least 1");
    }

    #[test]
    fn an_empty_list_is_no_number() {
        for name in ["rank", "alpha", "warmup-steps", "seed", "min-workers", "join-timeout", "sample-rows"] {
            let source = Origin::File { path: "c.yaml".into(), line: 3 };
            let typed = Typed { key: name.replace('-', "_"), values: vec![], source };
            let options: Vec<_> = TABLE.iter().collect();
            let refused = Options::of(&Settings::resolve(&options, vec![vec![typed]]).unwrap()).unwrap_err();
            assert_eq!(refused.code(), 78);
            let key = name.replace('-', "_");
            assert_eq!(refused.line, format!("c.yaml:3: {key}: expected a value, not an empty list"));
        }
    }

    #[test]
    fn tasks_and_schedules_are_validated() {
        check("min-lr", "1e-5", 0, "");
        check("min-lr", "1", 78, "above the learning rate");
        check("decay-steps", "5", 78, "--lr-scheduler wsd");
        check("lr-scheduler", "warmup_stable_decay", 0, "");
        check("adam-beta2", "0.95", 0, "");
        check("adam-beta2", "1", 78, "below 1");
        check("adam-epsilon", "1e-6", 0, "");
        check("adam-epsilon", "0", 78, "above 0");
        check("adam-epsilon", "1e-50", 78, "in f32 too");
        check("task", "dpo", 0, "");
        check("task", "kto", 78, "KL estimate");
        check("task", "grpo", 78, "rewards");
        check("beta", "0.5", 78, "--task dpo");
        check("reference-adapter", "ref", 78, "--task dpo");
    }

    #[test]
    fn defaults_match_the_table() {
        let options: Vec<_> = TABLE.iter().collect();
        let o = Options::of(&Settings::resolve(&options, vec![]).unwrap()).unwrap();
        assert_eq!((o.lora.rank, o.lora.alpha, o.optim.batch_size, o.optim.epochs), (16, 32.0, 8, 1));
        assert_eq!(o.optim.warmup.of(1000), 30);
        assert_eq!((o.output.eval_steps, o.output.save_steps), (Every::Never, Every::Steps(100)));
        assert!(o.data.packing && o.data.shuffle);
    }
}
