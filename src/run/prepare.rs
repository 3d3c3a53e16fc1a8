//! From options to all inputs of a run, cheapest checks first: model files, tokenizer, rows, plan, adapter. Nothing is
//! written here.

use super::adapter;
use super::base_model::{self, BaseModel};
use super::folder;
use super::row_sets::{Evals, Set, sets};
use super::row_warnings;
use super::trained_rows;
use crate::config::groups::{Options, Split, within};
use crate::config::refusal::{Refusal, in_file};
use crate::config::{Origin, Settings};
use crate::data::files;
use crate::data::plan::{Plan, PlanOptions, shares};
use crate::data::tokenizer::Tokenizer;
use crate::data::{self, Corpus, LabelMap, Task};
use crate::forecast::profile::ModelShape;
use crate::format::peft::{self, AdapterConfig, TaskType};
use crate::model::config::{Config, ConfigError};
use crate::model::lora::{LoraError, LoraSpec, TRAIN_TOKENS};
use crate::model::quantised::Recipe;
use crate::model::targets::Choice;
use crate::model::weights::ModelError;
use crate::numeric::tensor::Tensors;
use crate::support::stderr::say;
use crate::support::waiting::{HASHING, READING, during};
use crate::train::best::Metric;
use crate::train::entities::mark_entities;
use std::path::Path;
use std::thread::JoinHandle;

/// Default of --max-seq-len, in tokens.
pub const MAX_SEQ_LEN: usize = 2048;

/// A model and rows that fit it.
pub struct Prepared {
    /// The base model's files.
    pub base: BaseModel,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its shape; a classifier's for a task with a head.
    pub config: Config,
    /// The adapter.
    pub spec: LoraSpec,
    /// Largest number of tokens of a row (--long-rows decides about longer ones).
    pub max_seq_len: usize,
    /// Rows.
    pub train: Corpus,
    /// Rows for evaluation.
    pub eval: Option<Corpus>,
    /// Names of the sets of `eval` and their numbers of rows, the deciding set first; empty for rows without a name.
    pub eval_sets: Vec<(String, usize)>,
    /// Whether most rows are turns of the chat template; prompts then are too.
    pub chat: bool,
    /// Lines about choices, for the beginning of the run's output.
    pub remarks: Vec<String>,
    hash: Option<Hashing>,
}

impl Prepared {
    /// The model's shape, weights and adapter.
    pub fn model(&self) -> (&Config, &dyn Tensors, &LoraSpec) {
        (&self.config, &self.base.files.tensors, &self.spec)
    }

    /// The model's properties that determine its speed.
    pub fn shape(&self, options: &Options) -> Result<ModelShape, ModelError> {
        ModelShape::of(&folder::stem(&options.model.model), (&self.config, &self.spec), &self.base.files.kind)
    }

    /// The model's hash, which a thread computed while rows were read.
    pub fn model_hash(&mut self) -> Result<String, Refusal> {
        let hash = self.hash.take();
        during("hashing the model", &HASHING, || match hash.map(JoinHandle::join) {
            Some(Ok(hash)) => hash,
            _ => base_model::hash(&self.base.path),
        })
    }
}

/// Opens, reads and checks all inputs.
pub fn prepare(settings: &mut Settings, options: &Options) -> Result<Prepared, Refusal> {
    read(settings, options, base_model::open_as, |path| {
        let path = path.to_path_buf();
        Some(std::thread::spawn(move || base_model::hash(&path)))
    })
}

/// Like [`prepare`] for a plan: weights are neither hashed nor fetched.
pub fn prepare_dry(settings: &mut Settings, options: &Options) -> Result<Prepared, Refusal> {
    read(settings, options, base_model::outline_as, |_| None)
}

/// Refuses options without rows, also where the rows were typed in the place of the model.
fn has_rows(options: &Options) -> Result<(), Refusal> {
    let named = &options.model.model;
    if files::holds_rows(Path::new(named)) && Path::new(named).is_file() {
        let line = format!("{named} holds rows, not a model: finetune MODEL --data {named}");
        return Err(Refusal::usage(line));
    }
    if options.data.data.is_empty() {
        return Err(Refusal::usage(format!(
            "no rows to train {named} on: give --data FILE (.jsonl, .json, .csv, .tsv, .parquet), a folder, a data set of the Hub, or - for stdin"
        )));
    }
    Ok(())
}

type Hashing = JoinHandle<Result<String, Refusal>>;

fn read(
    settings: &mut Settings,
    options: &Options,
    open: fn(&str, Option<Recipe>) -> Result<BaseModel, Refusal>,
    hash: impl FnOnce(&Path) -> Option<Hashing>,
) -> Result<Prepared, Refusal> {
    base_model::named(&options.model.model)?;
    has_rows(options)?;
    let mut base = open(&options.model.model, options.model.quantize)?;
    let hash = hash(&base.path);
    let model = &options.model;
    base.add_tokens_of(options.lora.init_adapter.as_deref())?;
    base.add_tokens(&options.lora.new_tokens)?;
    base.add_tokens_of(options.data.reference.as_deref())?;
    let tokenizer = base.tokenizer_with(model.chat_template.as_deref(), &model.template_args)?;
    check_base(settings, options, &base.config)?;
    let spec = spec(settings, options, (&base.config, &tokenizer))?;
    let max_seq_len = max_seq_len(settings, options, &base.config)?;
    let (train_sets, eval_sets) = sets(options)?;
    let read = read_options(options, &base.config, max_seq_len);
    let mut train = during("reading the rows", &READING, || data::load_sets(&train_sets, &read, &tokenizer))?;
    within(settings, &train.counts)?;
    check_classes(&train)?;
    let chat = 2 * train.counts.chat > train.counts.rows;
    if !options.output.quiet {
        let stop = base.stop_ids(&tokenizer);
        row_warnings::of_a_run(&train, &tokenizer, (&stop, max_seq_len))
            .iter()
            .for_each(|w| say!("warning: {w}"));
    }
    let (mut eval, mut named_sets) = (None, Vec::new());
    if let Some(fraction) = held_back(settings, options, (train.samples.len(), &eval_sets))? {
        let (kept, held) = train.split(fraction, options.optim.seed)?;
        (train, eval) = (kept, Some(held));
    } else if !eval_sets.is_empty() {
        let read = data::Options { labels: train.labels.clone(), limit: None, max_dropped: None, ..read };
        (eval, named_sets) = evaluation(settings, &eval_sets, &read, &tokenizer)?;
    }
    check_width(settings, options, (&train, eval.as_ref()))?;
    check_sets(settings, options, &train)?;
    has_eval(settings, options, eval.as_ref())?;
    let config = with_head(base.config.clone(), &train, options.data.task)?;
    check_weights(settings, options.data.class_weights.as_deref(), &config)?;
    check_metric(settings, options, &config)?;
    Ok(Prepared {
        base,
        tokenizer,
        config,
        spec,
        max_seq_len,
        train,
        eval,
        eval_sets: named_sets,
        chat,
        remarks: vec![],
        hash,
    })
}

/// The model with the head of the task.
fn with_head(config: Config, train: &Corpus, task: Task) -> Result<Config, ConfigError> {
    match (&train.labels, task) {
        (Some(labels), Task::Tag) => config.into_tagger(labels.names.clone()),
        (Some(labels), _) => config.into_classifier(labels.names.clone()),
        (None, Task::Regress) => config.into_regression(train.samples.width()),
        (None, Task::Reward) => config.into_regression(1),
        (None, _) => Ok(config),
    }
}

/// Refuses a classifier as the base of another task.
fn check_base(settings: &Settings, options: &Options, config: &Config) -> Result<(), Refusal> {
    let task = options.data.task;
    match &config.labels {
        Some(_) if task.has_head() && config.tags != (task == Task::Tag) => {
            let name = &options.model.model;
            let (labels, way) = match config.tags {
                true => ("each token", "give --task token-classification"),
                false => ("whole rows", "give the base without it"),
            };
            Err(settings.refuse("task", format!("the head of {name} is for {labels}: {way}")))
        }
        Some(_) if task == Task::Classify && config.numbers => {
            let name = &options.model.model;
            let why = format!("the head of {name} gives numbers, not classes: give --task regression");
            Err(settings.refuse("task", why))
        }
        Some(labels) if !task.has_head() => {
            let (name, n) = (&options.model.model, labels.len());
            let way = if config.tags { "token-classification" } else { "classify" };
            let why = format!("{name} is a classifier ({n} labels), which writes no text: give --task {way}");
            Err(settings.refuse("task", why))
        }
        _ => Ok(()),
    }
}

/// Refuses a metric of entities where labels mark none.
fn check_metric(settings: &Settings, options: &Options, config: &Config) -> Result<(), Refusal> {
    let labels = config.labels.as_deref().unwrap_or_default();
    if options.output.choice.metric == Metric::F1 && !mark_entities(labels) {
        let why =
            "f1 is that of entities, which these labels do not mark (B-, I-, O): give accuracy or macro_f1";
        return Err(settings.refuse("best-metric", why));
    }
    Ok(())
}

/// Refuses labels of another number of values in the rows to evaluate on.
fn check_width(
    settings: &Settings,
    options: &Options,
    (train, eval): (&Corpus, Option<&Corpus>),
) -> Result<(), Refusal> {
    let trained = train.samples.width();
    match eval.map(|eval| eval.samples.width()) {
        Some(width) if options.data.task == Task::Regress && width != trained => {
            let why = format!("`label` has {width} numbers there, and {trained} in the rows to train on");
            Err(settings.refuse("eval-data", why))
        }
        _ => Ok(()),
    }
}

/// Refuses what needs rows of an evaluation where there are none.
fn has_eval(settings: &Settings, options: &Options, eval: Option<&Corpus>) -> Result<(), Refusal> {
    let choice = &options.output.choice;
    let name = match (choice.keep, choice.patience) {
        _ if eval.is_some_and(|e| !e.samples.is_empty()) => return Ok(()),
        (true, _) => "keep-best",
        (_, Some(_)) => "early-stopping",
        _ if options.output.sample_rows > 0 => "sample-rows",
        _ => return Ok(()),
    };
    Err(settings.refuse(name, "needs rows to evaluate on: --eval-split 5% or --eval-data FILE"))
}

/// The options of the plan.
pub fn plan_options(options: &Options) -> PlanOptions {
    PlanOptions {
        batch_size: options.optim.batch_size,
        epochs: options.optim.epochs,
        max_steps: options.optim.max_steps,
        micro_batch_tokens: options.optim.micro_batch_tokens,
        packing: options.data.packing,
        shuffle: options.data.shuffle,
        seed: options.optim.seed,
    }
}

/// The plan of the rows to train on, as a mixture if they have weights.
pub fn plan(train: &Corpus, options: &Options, of: &PlanOptions) -> Plan {
    let plan = Plan::new(&train.samples, of);
    match options.data.weights.is_empty() {
        true => plan,
        false => plan
            .mixed(&train.sets().into_iter().zip(options.data.weights.iter().copied()).collect::<Vec<_>>()),
    }
}

/// Refuses a set with a weight of which no row is left, or would ever be drawn.
fn check_sets(settings: &Settings, options: &Options, train: &Corpus) -> Result<(), Refusal> {
    let data = &options.data;
    let counts = shares(train.samples.len(), &data.weights);
    match train.sets().iter().zip(counts).position(|(rows, count)| rows.is_empty() || count == 0) {
        Some(set) => {
            let named = data.data.get(set).map(|path| path.display().to_string()).unwrap_or_default();
            let why = "it is empty, or its share of an epoch is less than one row";
            Err(settings.refuse("data", format!("{named} has a weight, and no row to train on: {why}")))
        }
        None => Ok(()),
    }
}

/// The rows of all sets, and the names of the sets with their numbers of rows.
type Evaluation = (Option<Corpus>, Vec<(String, usize)>);

/// Reads the rows to evaluate on.
fn evaluation(
    settings: &Settings,
    sets: &Evals,
    read: &data::Options,
    tokenizer: &Tokenizer,
) -> Result<Evaluation, Refusal> {
    let files: Vec<Set> = sets.iter().flat_map(|(_, files)| files.clone()).collect();
    let corpus =
        during("reading the rows to evaluate on", &READING, || data::load_sets(&files, read, tokenizer))?;
    let mut rows = corpus.sets().into_iter().map(|rows| rows.len());
    let mut count = |files: &[Set]| rows.by_ref().take(files.len()).sum::<usize>();
    let mut named: Vec<_> = sets.iter().map(|(name, files)| (name.clone(), count(files))).collect();
    if let Some((name, _)) = named.iter().find(|(_, rows)| *rows == 0) {
        return Err(settings.refuse("eval-data", format!("the set {name:?} has no row to evaluate on")));
    }
    // A single set needs no name.
    named.retain(|(name, _)| sets.len() > 1 || !name.is_empty());
    Ok((Some(corpus), named))
}

/// The share of `n` rows that --eval-split holds back, where there are no other rows to evaluate on.
fn held_back(
    settings: &Settings,
    options: &Options,
    (n, sets): (usize, &Evals),
) -> Result<Option<f64>, Refusal> {
    if let Some((_, paths)) = sets.first() {
        if options.data.eval_split.is_some() && !options.output.quiet {
            let named =
                paths.iter().flatten().next().map(|path| path.display().to_string()).unwrap_or_default();
            say!("note: --eval-split is not used: the rows for evaluation come from {named} (eval_data)");
        }
        return Ok(None);
    }
    match options.data.eval_split {
        Some(Split::Rows(held)) if held >= n => {
            let why = format!("{held} of {n} rows held back leave none to train on");
            Err(settings.refuse("eval-split", why))
        }
        Some(Split::Rows(held)) => Ok(Some(held as f64 / n as f64)),
        Some(Split::Part(p)) => Ok(Some(p)),
        None => Ok(None),
    }
}

fn max_seq_len(settings: &mut Settings, options: &Options, config: &Config) -> Result<usize, Refusal> {
    let longest = config.max_positions;
    Ok(match options.data.max_seq_len {
        Some(n) if n > config.max_positions => {
            let why = format!("{n} is longer than the model's {} positions", config.max_positions);
            return Err(settings.refuse("max-seq-len", why));
        }
        Some(n) => n,
        None => {
            let n = MAX_SEQ_LEN.min(longest);
            let source =
                Origin::Computed(format!("default: the smaller of {MAX_SEQ_LEN} and the model's {longest}"));
            settings.put("max-seq-len", vec![n.to_string()], source);
            n
        }
    })
}

fn read_options(options: &Options, config: &Config, max_seq_len: usize) -> data::Options {
    let data = &options.data;
    data::Options {
        task: data.task,
        learn: data.learn,
        fields: data.fields.clone(),
        max_seq_len,
        long: data.long,
        num_classes: data.num_classes,
        labels: config.labels.clone().filter(|_| data.task.has_classes()).map(|names| LabelMap { names }),
        max_dropped: None,
        limit: plan_options(options)
            .rows_needed()
            .filter(|_| data.eval_split.is_none() && data.weights.is_empty() && !data.unique),
        max_rows: data.max_rows.map(|n| n as u64),
        unique: data.unique,
        threads: options.devices.threads.unwrap_or(0),
    }
}

/// Refuses --class-weights without exactly one weight per class.
pub fn check_weights(settings: &Settings, weights: Option<&[f32]>, config: &Config) -> Result<(), Refusal> {
    match (weights, &config.labels) {
        (Some(w), Some(l)) if w.len() != l.len() => {
            let why = format!("{} weights for {} classes ({})", w.len(), l.len(), l.join(", "));
            Err(settings.refuse("class-weights", why))
        }
        _ => Ok(()),
    }
}

/// Refuses a single class: its loss is 0 from the first step on.
fn check_classes(train: &Corpus) -> Result<(), Refusal> {
    match &train.labels {
        Some(labels) if labels.names.len() < 2 => Err(Refusal::configuration(format!(
            "a classifier needs at least two classes: every row is labelled {}; add rows of another, or say --num-classes",
            labels.names.join(", ")
        ))),
        _ => Ok(()),
    }
}

/// The adapter's configuration. Values from --init-adapter apply unless the user gave others.
fn spec(
    settings: &mut Settings,
    options: &Options,
    (config, tokenizer): (&Config, &Tokenizer),
) -> Result<LoraSpec, Refusal> {
    let lora = &options.lora;
    let (rank, alpha, rslora, dropout, seed) =
        (lora.rank, lora.alpha, lora.rslora, lora.dropout, options.optim.seed);
    let rows = trained_rows::of(settings, options, (config, tokenizer))?;
    let common = LoraSpec { rank, alpha, rslora, dropout, seed, rows, ..LoraSpec::none() };
    let mut asked = (common, lora.choice.clone());
    let own = match &lora.init_adapter {
        Some(dir) => {
            let from = adapter::read(dir)?.config;
            check_task(settings, options, &from)?;
            let own = adapter::spec_of(&from, config).map_err(|e| in_file(dir, e.into()))?;
            take_over(settings, (dir, &own, config), &mut asked);
            Some((dir, own))
        }
        None => None,
    };
    let (common, choice) = asked;
    let refuse = |e| match e {
        LoraError::Choice { option, .. } => settings.refuse(option, e),
        e => settings.refuse("target-modules", e),
    };
    let spec = choice.resolve(config, common).map_err(refuse)?;
    // Patterns of an initial adapter have none if fewer modules are typed than it has.
    let mut given = choice;
    if !settings.is_given("rank-pattern") {
        given.ranks.clear();
    }
    if !settings.is_given("alpha-pattern") {
        given.alphas.clear();
    }
    given.without_effect(&spec, config).map_err(refuse)?;
    spec.check()?;
    spec.check_on(config).map_err(refuse)?;
    if options.data.task.has_head() && spec.ends.head.is_some() {
        return Err(settings.refuse("target-modules", "a task with a head of its own has no lm_head"));
    }
    trained_rows::has_both(settings, options, (config, &spec.rows))?;
    if let Some((dir, _)) = own.as_ref().filter(|(_, own)| !own.rows.is_empty() && own.rows != spec.rows) {
        let why = format!("{} has rows of other tokens: leave it out, or --init-adapter", dir.display());
        return Err(settings.refuse(trained_rows::option(settings).unwrap_or(TRAIN_TOKENS), why));
    }
    for (dir, differs) in own.iter().filter(|_| !options.output.quiet).flat_map(|(dir, own)| {
        scale_notes(own, &spec, config.layers).into_iter().map(move |note| (dir, note))
    }) {
        say!(
            "note: --init-adapter {}: {differs}: it begins with another scale than it was trained with",
            dir.display()
        );
    }
    Ok(spec)
}

/// Takes what an initial adapter has, where the user gave nothing else.
fn take_over(
    settings: &mut Settings,
    (dir, own, config): (&Path, &LoraSpec, &Config),
    (common, choice): &mut (LoraSpec, Choice),
) {
    let of_file = Choice::of(own, config);
    let origin = Origin::Computed(dir.join(peft::CONFIG).display().to_string());
    let mut take = |name, value: Vec<String>| match settings.is_given(name) {
        true => false,
        false => {
            settings.put(name, value, origin.clone());
            true
        }
    };
    if take("rank", vec![own.rank.to_string()]) {
        common.rank = own.rank;
    }
    if take("alpha", vec![own.alpha.to_string()]) {
        common.alpha = own.alpha;
    }
    if take("rslora", vec![own.rslora.to_string()]) {
        common.rslora = own.rslora;
    }
    if take("rank-pattern", typed(&of_file.ranks)) {
        choice.ranks = of_file.ranks;
    }
    if take("alpha-pattern", typed(&of_file.alphas)) {
        choice.alphas = of_file.alphas;
    }
    if trained_rows::option(settings).is_none() {
        common.rows = own.rows.clone();
    }
    // These decide together.
    let modules = ["target-modules", "target-layers", "exclude-modules"];
    if !modules.iter().any(|name| settings.is_given(name)) {
        settings.put(modules[0], of_file.targets.clone(), origin.clone());
        settings.put(modules[1], of_file.layers.iter().map(usize::to_string).collect(), origin);
        (choice.targets, choice.layers) = (of_file.targets, of_file.layers);
    }
}

/// Pairs as they are typed.
fn typed<T: std::fmt::Display>(pairs: &[(String, T)]) -> Vec<String> {
    pairs.iter().map(|(name, value)| format!("{name}={value}")).collect()
}

/// Refuses an initial adapter of another task.
fn check_task(settings: &Settings, options: &Options, from: &AdapterConfig) -> Result<(), Refusal> {
    match (from.task, options.data.task) {
        (TaskType::TokenCls, task) if task != Task::Tag => {
            let why = "labels tokens (task_type TOKEN_CLS): give --task token-classification";
            Err(settings.refuse("init-adapter", why))
        }
        (TaskType::SeqCls, task) if !task.has_head() => Err(settings
            .refuse("init-adapter", "is a classifier's adapter (task_type SEQ_CLS): give --task classify")),
        (TaskType::SeqCls, Task::Tag) => {
            let why = "is an adapter whose head is for whole rows (task_type SEQ_CLS): give one of TOKEN_CLS";
            Err(settings.refuse("init-adapter", why))
        }
        (TaskType::CausalLm, task) if task.has_head() => {
            let why = "is an adapter that writes text (task_type CAUSAL_LM), with which a task with a head cannot begin";
            Err(settings.refuse("init-adapter", why))
        }
        _ => Ok(()),
    }
}

/// Notes about an initial adapter's scale that options replace.
fn scale_notes(from: &LoraSpec, spec: &LoraSpec, layers: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if from.alpha != spec.alpha {
        notes.push(format!("alpha was {}, is {}", from.alpha, spec.alpha));
    }
    if from.rslora != spec.rslora {
        notes.push(format!("rslora was {}, is {}", from.rslora, spec.rslora));
    }
    let all = (0..layers).flat_map(|layer| from.targets.iter().map(move |module| (layer, module)));
    let mut scales = all.filter_map(|(layer, module)| {
        let [was, is] = [from, spec].map(|of| Some(of.scale_of(of.adapter(layer, module)?)));
        Some((layer, module, was?, is?))
    });
    if notes.is_empty()
        && let Some((layer, module, was, is)) = scales.find(|(_, _, was, is)| was != is)
    {
        notes.push(format!("the scale of {module} in layer {layer} was {was}, is {is}"));
    }
    notes
}
