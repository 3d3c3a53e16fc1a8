//! `finetune eval`: computes scores of a model, with its adapter or alone, on rows. The same code evaluates during a
//! run, and here uses the options and microbatches of the adapter's run, so that the same rows give the same loss.

use super::invocation::Invocation;
use super::speaker::{self, model_name, recipe_of, task_of, template_of};
use crate::config::Settings;
use crate::config::groups::{self, class_weights, field_names, whole};
use crate::config::refusal::Refusal;
use crate::data::plan::{Plan, PlanOptions};
use crate::data::samples::Samples;
use crate::data::{self, Corpus, LabelMap, Task};
use crate::devices::{self, Need};
use crate::model::config::Config;
use crate::model::decoder::base_parameters;
use crate::model::layout;
use crate::model::lora::LoraSpec;
use crate::model::preference::Objective;
use crate::model::stage::Model;
use crate::numeric::tensor::Tensors;
use crate::report::confusion;
use crate::run::adapter::{self, Loaded};
use crate::run::base_model;
use crate::run::folder::{RUN_FILE, run_of};
use crate::run::prepare::{MAX_SEQ_LEN, check_weights};
use crate::run::row_sets::eval_sets;
use crate::run::run_file;
use crate::support::waiting::{READING, during};
use crate::train::event::{Eval, Rewards};
use crate::train::stop::Stop;
use crate::train::{self, Batches, Compute, Known, Local, eval};
use serde_json::json;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// Options that determine the result: the default is the value of the adapter's run.
const AS_TRAINED: [&str; 15] = [
    "data-fields",
    "drop-duplicates",
    "learn",
    "max-seq-len",
    "long-rows",
    "class-weights",
    "dtype",
    "task",
    "loss",
    "beta",
    "label-smoothing",
    "simpo-gamma",
    "nll-weight",
    "center-rewards-coefficient",
    "reference-adapter",
];

/// Tokens of a microbatch, where no run gives a value.
const TOKENS: usize = 2048;

/// Computes scores of the rows of --data.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let paths: Vec<PathBuf> = inv.settings.list("data").iter().map(PathBuf::from).collect();
    if paths.is_empty() {
        return Err(Refusal::usage("no rows to evaluate on: give --data FILE, a folder, or - for stdin"));
    }
    let dir = inv.settings.text("adapter")?.map(PathBuf::from);
    let tokens = dir.as_deref().map_or(Ok(TOKENS), |dir| as_trained(&mut inv.settings, dir))?;
    let s = &inv.settings;
    let chosen = devices::choose(&groups::devices(s)?)?;
    let mut base = base_model::open_as(&model_name(s, dir.as_deref())?, recipe_of(s, dir.as_deref())?)?;
    base.add_tokens_of(dir.as_deref())?;
    base.add_tokens_of(s.text("reference-adapter")?.map(Path::new))?;
    let template = template_of(s, dir.as_deref())?;
    let tokenizer = base.tokenizer_with(template.as_deref(), &groups::template_args(s)?)?;
    let Loaded { config, spec, flat, .. } = adapter::load_or_base(dir.as_deref(), &base)?;
    let weights = class_weights(s)?;
    check_weights(s, weights.as_deref(), &config)?;
    let (task, objective) = groups::task(s)?;
    let task = task_of(&config, task);
    if task.has_head() && config.labels.is_none() {
        return Err(s.refuse("task", "the model has no head: give --adapter DIR of a run with this task"));
    }
    let centre = (task == Task::Reward).then(|| groups::centre_of_rewards(s)).transpose()?;
    let read = data::Options {
        task,
        learn: groups::learn(s, task)?,
        long: groups::long_rows(s, task)?,
        fields: field_names(s)?,
        max_seq_len: whole(s, "max-seq-len", 2)?.unwrap_or(MAX_SEQ_LEN).min(config.max_positions),
        labels: config.labels.clone().filter(|_| task.has_classes()).map(|names| LabelMap { names }),
        max_rows: whole(s, "max-rows", 1)?.map(|n| n as u64),
        unique: s.switch("drop-duplicates")?,
        threads: whole(s, "threads", 1)?.unwrap_or(0),
        ..data::Options::default()
    };
    let sets = eval_sets(&paths)?;
    let rows = during("reading the rows", &READING, || data::load_sets(&sets, &read, &tokenizer))?;
    let (width, outputs) = (rows.samples.width(), config.labels.as_ref().map_or(0, Vec::len));
    if task == Task::Regress && width != outputs {
        let path = paths[0].display();
        let why = format!(
            "`label` has {width} numbers in {path}, the head gives {outputs}: give rows with {outputs}"
        );
        return Err(Refusal::configuration(why));
    }
    let mut model = devices::open(&chosen, (&config, &base.files.tensors, &spec), weights, Need::SPEECH)?;
    let compared = match objective.filter(|_| config.labels.is_none()) {
        Some(objective) => {
            let reference = reference(s, (&config, &*base.files.tensors, &spec))?;
            Some(Compared { objective, reference })
        }
        None => None,
    };
    let predicts = groups::token_accuracy(s, task)?;
    let scores = scores(&mut *model, (&flat, compared, centre), (&rows, tokens, predicts))?;
    say(inv, &scores, &rows)
}

/// Sets missing options from the adapter's run. Returns the tokens of its microbatches.
fn as_trained(s: &mut Settings, adapter: &Path) -> Result<usize, Refusal> {
    speaker::as_trained(s, adapter, &AS_TRAINED)?;
    let file = run_of(adapter).join(RUN_FILE);
    let tokens = run_file::fact(&file, "micro_batch_tokens").and_then(|tokens| tokens.parse().ok());
    Ok(tokens.unwrap_or(TOKENS))
}

/// A loss that compares answers, and the parameters of the reference.
struct Compared {
    objective: Objective,
    reference: Vec<f32>,
}

/// The parameters of the reference, in the layout of the adapter.
fn reference(
    s: &Settings,
    (config, tensors, spec): (&Config, &dyn Tensors, &LoraSpec),
) -> Result<Vec<f32>, Refusal> {
    match s.text("reference-adapter")?.map(PathBuf::from) {
        Some(dir) => adapter::read_reference(&dir, config, spec),
        None => Ok(base_parameters(&layout::of(config, spec, 0..config.layers), spec, tensors)?),
    }
}

fn scores(
    model: &mut dyn Model,
    (flat, compared, centre): (&[f32], Option<Compared>, Option<f64>),
    (rows, tokens, predicts): (&Corpus, usize, bool),
) -> Result<Eval, Refusal> {
    // Only the evaluation microbatches of the plan are used; no step is computed.
    let plan = Plan::new(
        &Samples::default(),
        &PlanOptions {
            batch_size: 1,
            epochs: 1,
            max_steps: None,
            micro_batch_tokens: Some(tokens),
            packing: true,
            shuffle: false,
            seed: 0,
        },
    );
    let (stop, known) = (Stop::new(), RefCell::new(Known::default()));
    let (none, mut local) = (Samples::default(), Local::new(model, &stop));
    let tags = rows.labels.as_ref().filter(|_| rows.samples.have_classes());
    let mut work = Batches::new(&none, &plan, Some(&rows.samples));
    work = work.tagging(tags.map_or(&[], |labels| &labels.names));
    if predicts {
        work = work.predicting();
    }
    if let Some(centre) = centre {
        work = work.ranking(centre);
    }
    if let Some(Compared { objective, reference }) = &compared {
        work = work.comparing(*objective, &known);
        train::refer(&mut local, &work, (0, reference), &mut |_| ())?;
    }
    local.set_parameters(0, flat)?;
    let scores = eval::evaluate(&mut local, &work, 0, &mut |_| ())?;
    scores.ok_or_else(|| Refusal::failure("the model gave no scores"))
}

fn say(inv: &mut Invocation, e: &Eval, rows: &Corpus) -> Result<(), Refusal> {
    let c = &rows.counts;
    let labels = rows.labels.as_ref().map_or(&[][..], |l| &l.names);
    if inv.json {
        let line = json!({
            "loss": e.eval_loss, "perplexity": e.perplexity, "token_accuracy": e.token_accuracy, "rows": c.rows, "dropped": c.dropped,
            "truncated": c.truncated, "split": c.split.0, "too_long": c.too_long, "tokens": c.tokens, "supervised": c.supervised, "accuracy": e.accuracy,
            "macro_f1": e.macro_f1, "f1": e.f1, "pearson": e.pearson, "spearman": e.spearman, "confusion": e.confusion, "rewards_chosen": e.rewards.rewards_chosen,
            "rewards_rejected": e.rewards.rewards_rejected, "margin": e.rewards.margin, "min_reward": e.rewards.min_reward, "max_reward": e.rewards.max_reward, "labels": rows.labels.as_ref().map(|l| &l.names),
        });
        return inv.say(&line.to_string());
    }
    let mut line = format!("rows        {} read, {} tokens, {} supervised", c.rows, c.tokens, c.supervised);
    if c.dropped > 0 {
        line += &format!("; {} without anything to train on left out", c.dropped);
    }
    line += &c.lengths();
    inv.say(&line)?;
    inv.say(&format!("loss        {:.4}", e.eval_loss))?;
    if let Some(perplexity) = e.perplexity {
        inv.say(&format!("perplexity  {perplexity:.3}"))?;
    }
    if let Some(accuracy) = e.token_accuracy {
        inv.say(&format!("tokens      {accuracy:.4} right"))?;
    }
    if let (Some(accuracy), Some(f1)) = (e.accuracy, e.macro_f1) {
        inv.say(&format!("accuracy    {accuracy:.4}"))?;
        inv.say(&format!("macro F1    {f1:.4}"))?;
    }
    e.f1.map_or(Ok(()), |f1| inv.say(&format!("entity F1   {f1:.4}")))?;
    for (name, value) in [("pearson", e.pearson), ("spearman", e.spearman)] {
        value.map_or(Ok(()), |value| inv.say(&format!("{name:<10}  {value:.4}")))?;
    }
    let Rewards { rewards_chosen, rewards_rejected, margin, min_reward, max_reward } = e.rewards;
    let numbers = [
        ("chosen", rewards_chosen),
        ("rejected", rewards_rejected),
        ("margin", margin),
        ("lowest", min_reward),
        ("highest", max_reward),
    ];
    for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        inv.say(&format!("{name:<10}  {value:.4}"))?;
    }
    if let (Some(accuracy), Some(_)) = (e.accuracy, margin) {
        inv.say(&format!("accuracy    {accuracy:.4}"))?;
    }
    let matrix = e.confusion.as_ref().map(|m| confusion::lines(labels, m)).unwrap_or_default();
    matrix.iter().try_for_each(|line| inv.say(line))
}
