//! Conversion between adapter files and the flat layout: writing after training and into checkpoints, reading for
//! generate, predict, export and --init-adapter. Shapes in files are checked against the base.

use super::base_model::{self, BaseModel};
use super::folder::{RUN_FILE, run_of};
use super::run_file;
use crate::config::refusal::{Kind, Refusal, in_file};
use crate::format::peft::{self, Adapter, AdapterConfig, Extras, Magnitude, TaskType, TensorRef};
use crate::format::{FormatError, atomic};
use crate::model::config::Config;
use crate::model::decoder::initial_parameters;
use crate::model::layout::{self, Layout};
use crate::model::lora::{self, EMBEDDING, HEAD, LoraError, LoraSpec, Named, TRAIN_TOKENS, TrainedRows};
use crate::model::targets::Choice;
use crate::support::stderr::say;
use crate::train::checkpoint;
use std::path::Path;

/// An adapter that fits a base.
pub struct Loaded {
    /// The base's shape; a classifier's where the adapter has a head.
    pub config: Config,
    /// Rank, scale, targets.
    pub spec: LoraSpec,
    /// Values in the flat layout.
    pub flat: Vec<f32>,
    /// Magnitudes of DoRA, which only a merged model has.
    pub magnitudes: Vec<Magnitude>,
}

/// Reads the adapter in `dir`, and refuses one of DoRA.
pub fn read(dir: &Path) -> Result<Adapter, Refusal> {
    let adapter = read_any(dir)?;
    if adapter.config.use_dora {
        let why =
            "the adapter uses DoRA, which is read for merging only: finetune merge writes a whole model";
        return Err(in_file(dir, Refusal::configuration(why)));
    }
    Ok(adapter)
}

fn read_any(dir: &Path) -> Result<Adapter, Refusal> {
    finished(dir)?;
    Ok(peft::read(dir)?)
}

/// The name of the base in the adapter's configuration.
pub fn base_of(dir: &Path) -> Result<Option<String>, Refusal> {
    finished(dir)?;
    Ok(peft::config(dir)?.base_model_name_or_path)
}

/// A stopped run has no adapter yet; the error names its newest checkpoint.
fn finished(dir: &Path) -> Result<(), Refusal> {
    if dir.join(peft::CONFIG).exists() || checkpoint::find(dir).is_err() {
        return Ok(());
    }
    let way = match checkpoint::newest_adapter(dir) {
        Some(newest) => format!("its newest checkpoint has one: {}", newest.display()),
        None => format!("go on with finetune --resume={}", dir.display()),
    };
    let what = "the run is not complete and has no adapter yet";
    Err(Refusal::configuration(format!("{}: {what}: {way}", dir.display())))
}

/// Reads the adapter in `dir` and checks it against a base.
pub fn load(dir: &Path, base: &BaseModel) -> Result<Loaded, Refusal> {
    check(dir, base, read(dir)?)
}

/// The same for an adapter that is merged, which may be one of DoRA.
pub fn load_to_merge(dir: &Path, base: &BaseModel) -> Result<Loaded, Refusal> {
    check(dir, base, read_any(dir)?)
}

fn check(dir: &Path, base: &BaseModel, adapter: Adapter) -> Result<Loaded, Refusal> {
    let here = |r: Refusal| in_file(dir, r);
    if let (Some(own), Some(other)) = (&base.files.base_id, &adapter.config.base_model_name_or_path)
        && own != other
    {
        say!("warning: {}: was trained on {other}, the model is {own}", dir.display());
    }
    let config = match adapter.config.task {
        TaskType::CausalLm => base.config.clone(),
        task @ (TaskType::SeqCls | TaskType::TokenCls) => {
            let head = adapter.tensors.iter().find(|t| t.name == layout::SCORE);
            let numbered = || (0..head.map_or(0, |t| t.rows)).map(|i| format!("LABEL_{i}")).collect();
            let labels = adapter.labels.clone().or(base.config.labels.clone()).unwrap_or_else(numbered);
            let (base, rows) = (base.config.clone(), task == TaskType::SeqCls);
            // As in transformers, a single output is a number.
            let numbers = rows && (adapter.numbers || base.numbers || labels.len() == 1);
            let headed = if rows { base.into_classifier(labels) } else { base.into_tagger(labels) };
            Config { numbers, ..headed.map_err(|e| here(e.into()))? }
        }
    };
    let spec = spec_of(&adapter.config, &config).map_err(|e| here(e.into()))?;
    let shape = (config.vocab, config.hidden);
    if let Some((name, found)) = adapter.copies.iter().find(|(_, found)| *found != shape) {
        let why = format!(
            "the adapter has a copy of {name} of shape {found:?}, this model's is {shape:?}: the vocabulary was enlarged \
             for it, so it goes with the enlarged base only"
        );
        return Err(here(Refusal::configuration(why)));
    }
    let layout = layout::of(&config, &spec, 0..config.layers);
    let flat = flat(&layout, &adapter.tensors).map_err(here)?;
    if adapter.config.use_dora {
        has_magnitudes(&layout, &adapter.magnitudes).map_err(|why| here(Refusal::configuration(why)))?;
    }
    Ok(Loaded { config, spec, flat, magnitudes: adapter.magnitudes })
}

/// What a file of PEFT says of an adapter on this model.
pub fn spec_of(from: &AdapterConfig, config: &Config) -> Result<LoraSpec, LoraError> {
    let choice = Choice {
        targets: from.target_modules.clone(),
        ranks: from.rank_pattern.clone(),
        alphas: from.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), *alpha as f32)).collect(),
        ..Choice::default()
    };
    let (rank, alpha, rslora) = (from.r, from.lora_alpha as f32, from.use_rslora);
    let rows = rows_of(from, config)?;
    let spec = choice.resolve(config, LoraSpec { rank, alpha, rslora, rows, ..LoraSpec::none() })?;
    spec.check_on(config)?;
    Ok(spec)
}

/// The rows of tokens that an adapter on this model has.
fn rows_of(from: &AdapterConfig, config: &Config) -> Result<TrainedRows, LoraError> {
    let no = |why: String| LoraError::Choice { option: TRAIN_TOKENS, why };
    let mut rows = TrainedRows::default();
    for (name, tokens) in &from.token_rows {
        let of = match name.rsplit('.').next() {
            Some(EMBEDDING) => &mut rows.embedding,
            Some(HEAD) => &mut rows.head,
            _ => {
                return Err(no(format!(
                    "trained rows of {name} are not supported, only of {EMBEDDING} and {HEAD}"
                )));
            }
        };
        if !of.is_empty() {
            return Err(no(format!("trained rows of {name} are there twice")));
        }
        of.clone_from(tokens);
    }
    // PEFT trains them once where both are the same matrix.
    if config.tied && rows.head == rows.embedding {
        rows.head.clear();
    }
    Ok(rows)
}

/// Returns the adapter in `dir`; without `dir` the base alone, whose only values are those of a classifier's head.
pub fn load_or_base(dir: Option<&Path>, base: &BaseModel) -> Result<Loaded, Refusal> {
    if let Some(dir) = dir {
        return load(dir, base);
    }
    let (config, spec) = (base.config.clone(), LoraSpec::none());
    let layout = layout::of(&config, &spec, 0..config.layers);
    let flat = initial_parameters(&layout, &spec, &*base.files.tensors)?;
    Ok(Loaded { config, spec, flat, magnitudes: Vec::new() })
}

/// Checks that each module with an adapter has a magnitude for each output, and no other module has any.
fn has_magnitudes(layout: &Layout, magnitudes: &[Magnitude]) -> Result<(), String> {
    let of_b = layout.entries().iter().filter_map(|e| Some((e.name.strip_suffix(".lora_B.weight")?, e.rows)));
    let modules: Vec<(&str, usize)> = of_b.collect();
    let values =
        |path: &str| magnitudes.iter().find(|(module, _)| module == path).map_or(0, |(_, m)| m.len());
    if let Some((path, rows)) = modules.iter().find(|(path, rows)| values(path) != *rows) {
        return Err(format!(
            "{path} has {} magnitudes (lora_magnitude_vector), {rows} are needed",
            values(path)
        ));
    }
    match magnitudes.iter().find(|(module, _)| !modules.iter().any(|(path, _)| path == module)) {
        Some((module, _)) => Err(format!("{module} has magnitudes, but no adapter in this model")),
        None => Ok(()),
    }
}

/// Returns a warning where run.yaml of the adapter has another model hash than the base. This is no error: a GGUF of
/// the trained model is a different file and a valid base.
pub fn trained_on_another(dir: &Path, base: &BaseModel) -> Result<Option<String>, Refusal> {
    let Some(trained) = run_file::fact(&run_of(dir).join(RUN_FILE), "model_hash") else { return Ok(None) };
    if base_model::hash(&base.path)? == trained {
        return Ok(None);
    }
    Ok(Some(format!(
        "{}: was trained on other files than {}: right for another form of the same model, wrong for any other",
        dir.display(),
        base.path.display()
    )))
}

fn flat(layout: &Layout, tensors: &[peft::AdapterTensor]) -> Result<Vec<f32>, Refusal> {
    let named: Vec<Named> = tensors
        .iter()
        .map(|t| Named { name: &t.name, rows: t.rows, cols: t.cols, values: &t.values })
        .collect();
    Ok(lora::from_adapter(layout, &named)?)
}

/// Reads the values of the reference of preferences, which has the configuration of the adapter.
pub fn read_reference(dir: &Path, config: &Config, spec: &LoraSpec) -> Result<Vec<f32>, Refusal> {
    let found = read(dir)?;
    let of = spec_of(&found.config, config).map_err(|e| in_file(dir, e.into()))?;
    if of != (LoraSpec { dropout: of.dropout, seed: of.seed, ..spec.clone() }) {
        let (own, other) = of.difference(spec);
        let why = format!("it has {own}, this run {other}: train with its settings");
        return Err(in_file(dir, Refusal::configuration(why)));
    }
    let layout = layout::of(config, spec, 0..config.layers);
    flat(&layout, &found.tensors).map_err(|r| in_file(dir, r))
}

/// Reads only the values of an adapter with a known layout.
pub fn read_flat(dir: &Path, layout: &Layout) -> Result<Vec<f32>, Refusal> {
    flat(layout, &read(dir)?.tensors).map_err(|r| in_file(dir, r))
}

/// Everything in an adapter's folder besides its values.
pub struct Writer {
    /// adapter_config.json.
    pub config: AdapterConfig,
    /// Labels, tokenizer.
    pub extras: Extras,
    /// Kind of the base, for the model card.
    kind: String,
    /// Names and shapes.
    pub layout: Layout,
}

impl Writer {
    /// A writer for an adapter of `spec` on this base.
    pub fn new(base: &BaseModel, config: &Config, spec: &LoraSpec, base_id: Option<&str>) -> Self {
        let Choice { targets, layers, ranks, alphas, .. } = Choice::of(spec, config);
        let adapter = AdapterConfig {
            task: match (&config.labels, config.tags) {
                (None, _) => TaskType::CausalLm,
                (Some(_), false) => TaskType::SeqCls,
                (Some(_), true) => TaskType::TokenCls,
            },
            base_model_name_or_path: base_id.map(Into::into).or_else(|| base.files.base_id.clone()),
            revision: base.files.revision.clone().filter(|_| base_id.is_none()),
            r: spec.rank,
            lora_alpha: f64::from(spec.alpha),
            lora_dropout: f64::from(spec.dropout),
            target_modules: targets,
            layers,
            rank_pattern: ranks,
            alpha_pattern: alphas.into_iter().map(|(name, alpha)| (name, f64::from(alpha))).collect(),
            token_rows: [(EMBEDDING, &spec.rows.embedding), (HEAD, &spec.rows.head)]
                .into_iter()
                .filter(|(_, tokens)| !tokens.is_empty())
                .map(|(name, tokens)| (name.to_owned(), tokens.clone()))
                .collect(),
            path: config.path(),
            use_rslora: spec.rslora,
            use_dora: false,
        };
        let (labels, numbers) = (config.labels.clone(), config.numbers);
        let enlarged = (!base.added.is_empty()).then_some(config.vocab);
        let extras = Extras { labels, numbers, enlarged, files: base.tokenizer_files() };
        let (kind, layout) = (base.files.kind.clone(), layout::of(config, spec, 0..config.layers));
        Writer { config: adapter, extras, kind, layout }
    }

    /// Writes an adapter with these values and a model card with the run's numbers.
    pub fn write(&self, dir: &Path, flat: &[f32], training: &[(&str, String)]) -> Result<(), FormatError> {
        let card = peft::card(&self.config, &self.kind, &self.extras, training);
        atomic::write_file(&dir.join(peft::CARD), card.as_bytes())?;
        let tensor = |e: &layout::Entry| (e.name.clone(), e.rows, e.cols, e.range());
        let tensors: Vec<_> = self.layout.entries().iter().map(tensor).collect();
        let refs: Vec<TensorRef> = tensors
            .iter()
            .map(|(name, rows, cols, range)| TensorRef {
                name,
                rows: *rows,
                cols: *cols,
                values: &flat[range.clone()],
            })
            .collect();
        peft::write(dir, &self.config, &refs, &self.extras)
    }
}

/// Refuses an adapter whose values on disk differ from those in memory in any bit.
pub fn same_values(memory: &[f32], disk: &[f32], dir: &Path) -> Result<(), Refusal> {
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match memory.len() != disk.len() || memory.iter().zip(disk).any(differs) {
        false => Ok(()),
        true => Err(Refusal::failure(format!(
            "{}: the adapter as written has other values than the one in memory; keep the checkpoint and report this",
            dir.display()
        ))),
    }
}

/// Refuses unless the logits from the values in memory and from those on disk have equal bits.
pub fn same_logits(memory: &[f32], disk: &[f32], dir: &Path) -> Result<(), Refusal> {
    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    match bits(memory) == bits(disk) {
        true => Ok(()),
        false => Err(Refusal::of(
            Kind::Failure,
            format!(
                "{}: the adapter as written gives other logits than the one in memory; keep the checkpoint and report this",
                dir.display()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_export_is_refused() {
        let good = [1.0f32, -0.0, f32::MIN_POSITIVE];
        let at = Path::new("out");
        assert_eq!(same_values(&good, &good, at), Ok(()));
        // Differences: the last bit of a value, the sign of a zero, and a missing value.
        for (i, bit) in [(0, 0), (1, 31), (2, 0)] {
            let mut bad = good;
            bad[i] = f32::from_bits(bad[i].to_bits() ^ 1 << bit);
            let refused = same_values(&good, &bad, at).unwrap_err();
            assert!(refused.line.starts_with("out: the adapter as written has other values"), "{refused}");
        }
        assert!(same_values(&good, &good[..2], at).is_err());
    }
}
