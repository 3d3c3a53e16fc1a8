//! The trained parameters: the modules with an adapter, its rank and scale, and the initial values. The initial value
//! depends only on the seed and the tensor's name, so that a stage of some layers draws the same values as the whole
//! model.

use super::config::Config;
use super::layout::{EMBEDDING_B, EMBEDDING_ROWS, HEAD_ROWS, Layout, SCORE};
use crate::families::wrapped::PATH;
use crate::numeric::rng::Stream;

/// The seven projections of a decoder block, in model order. What can have an adapter is in
/// [`Family::modules`](crate::families::Family::modules).
pub const MODULES: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// A LoRA configuration with targets resolved against a model.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LoraSpec {
    /// R, at least 1.
    pub rank: usize,
    /// Scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
    pub alpha: f32,
    /// rsLoRA.
    pub rslora: bool,
    /// Probability of dropping an input of A, in [0, 1).
    pub dropout: f32,
    /// Suffixes from the family's modules, in model order, without repeats. An empty list is the base model without adapter.
    pub targets: Vec<String>,
    /// Projections of `targets` that differ from the rest, by layer and then in the order of `targets`.
    pub exceptions: Vec<Exception>,
    /// Adapters of embedding and head.
    pub ends: Ends,
    /// Rows of embedding and head that are trained whole.
    pub rows: TrainedRows,
    /// Keys dropout masks and the initial A.
    pub seed: u64,
}

/// Adapters of what is in no layer.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Ends {
    /// That of the embedding.
    pub embedding: Option<Numbers>,
    /// That of a head over tokens. Where the head is the embedding, only the head has it.
    pub head: Option<Numbers>,
}

impl Ends {
    /// The adapters with the names of their modules.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, Numbers)> {
        let both = [(EMBEDDING, self.embedding), (HEAD, self.head)];
        both.into_iter().filter_map(|(name, numbers)| Some((name, numbers?)))
    }

    /// Whether neither has an adapter.
    pub fn is_empty(&self) -> bool {
        self.named().next().is_none()
    }
}

/// PEFT's name of the embedding.
pub const EMBEDDING: &str = "embed_tokens";
/// PEFT's name of a head over tokens.
pub const HEAD: &str = "lm_head";

/// Tokens whose rows are trained whole (PEFT's `trainable_token_indices`), each list without repeats and in the order of
/// the adapter's file.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TrainedRows {
    /// Rows of the embedding, and of the head where it is the embedding.
    pub embedding: Vec<u32>,
    /// Rows of a head that is not the embedding.
    pub head: Vec<u32>,
}

impl TrainedRows {
    /// Whether no row is trained.
    pub fn is_empty(&self) -> bool {
        self.embedding.is_empty() && self.head.is_empty()
    }

    /// Tokens of the embedding, then those of the head: `embed_tokens 5 7, lm_head 5 7`
    pub fn in_short(&self) -> Option<String> {
        let part = |(name, tokens): (&str, &Vec<u32>)| {
            let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
            (!ids.is_empty()).then(|| format!("{name} {}", ids.join(" ")))
        };
        let parts = [(EMBEDDING, &self.embedding), (HEAD, &self.head)];
        let parts: Vec<String> = parts.into_iter().filter_map(part).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// Whether a row is trained that embedding and head share.
    pub fn shared(&self, config: &Config) -> bool {
        config.tied && config.labels.is_none() && !self.embedding.is_empty()
    }

    /// Refuses tokens that the model does not have, repeated ones, and rows of a head that it does not have.
    pub fn check(&self, config: &Config) -> Result<(), LoraError> {
        let no = |why: String| Err(LoraError::Choice { option: TRAIN_TOKENS, why });
        for tokens in [&self.embedding, &self.head] {
            let mut sorted = tokens.clone();
            sorted.sort_unstable();
            if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return no(format!("the row of token {} is trained twice", pair[0]));
            }
            if let Some(beyond) = sorted.last().filter(|token| **token as usize >= config.vocab) {
                return no(format!("token {beyond} has no row: the embedding has {} rows", config.vocab));
            }
        }
        match self.head.is_empty() {
            false if config.labels.is_some() => no("a classifier has no head over tokens".into()),
            false if config.tied => no("the head of this model is its embedding".into()),
            _ => Ok(()),
        }
    }
}

/// The option that names trained rows.
pub const TRAIN_TOKENS: &str = "train-tokens";
/// The option that names modules with an adapter.
pub const TARGETS: &str = "target-modules";

/// A projection with another adapter than the rest, or without one.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Exception {
    /// Its layer.
    pub layer: usize,
    /// Its suffix.
    pub module: String,
    /// Its adapter; `None`: it stays frozen.
    pub adapter: Option<Numbers>,
}

/// Rank and alpha of one adapter.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Numbers {
    /// R, at least 1.
    pub rank: usize,
    /// As in [`LoraSpec`].
    pub alpha: f32,
}

/// Error of a LoRA configuration or an adapter (exit code 78).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LoraError {
    /// The module does not exist.
    #[error("target module `{name}` does not exist in this model: it has {known} (or all-linear)")]
    Target {
        /// Requested name.
        name: String,
        /// Existing modules.
        known: String,
    },
    /// The module is a part of the experts.
    #[error(
        "target module `{name}` is a part of the feed-forward, which stays frozen in a mixture of experts (transformers has \
         all experts of a layer in one tensor, which PEFT's target_modules do not reach): choose from {known}"
    )]
    Experts {
        /// Requested name.
        name: String,
        /// Modules that can be trained.
        known: String,
    },
    /// Nothing to train.
    #[error("no target modules: name some of {known}, or all-linear")]
    NoTargets {
        /// Existing modules.
        known: String,
    },
    /// A choice of modules, layers or patterns that this model does not have.
    #[error("{why}")]
    Choice {
        /// Name of the option.
        option: &'static str,
        /// What is wrong.
        why: String,
    },
    /// A number outside its range.
    #[error("LoRA {what} is {value}: {needs}")]
    Value {
        /// rank, alpha or dropout.
        what: &'static str,
        /// As given.
        value: String,
        /// Valid range.
        needs: &'static str,
    },
    /// The adapter lacks a tensor that this configuration trains.
    #[error(
        "the adapter has no tensor {name}: it has other target modules, layers or tokens than those asked for"
    )]
    Missing {
        /// PEFT name.
        name: String,
    },
    /// The adapter has a tensor that this configuration does not have.
    #[error(
        "the adapter's tensor {name} has no place in this model: it was trained on another base, or with other target modules or layers; name its base with --model"
    )]
    Extra {
        /// PEFT name.
        name: String,
    },
    /// A tensor of a different shape.
    #[error("the adapter's tensor {name} is {found:?}, this model with this rank needs {expected:?}")]
    Shape {
        /// PEFT name.
        name: String,
        /// Required shape.
        expected: (usize, usize),
        /// Shape in the file.
        found: (usize, usize),
    },
    /// A value that is NaN or infinite.
    #[error("the adapter's tensor {name} holds a value that is not finite")]
    NonFinite {
        /// PEFT name.
        name: String,
    },
}

impl std::fmt::Display for LoraSpec {
    /// `rank 16, alpha 32 (scale 2)`
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let scale = (self.scale() * 1000.0).round() / 1000.0;
        let kind = if self.rslora { ", rsLoRA" } else { "" };
        write!(f, "rank {}, alpha {} (scale {scale}{kind})", self.rank, self.alpha)
    }
}

impl LoraSpec {
    /// No adapter: the base model alone.
    pub fn none() -> Self {
        let (targets, exceptions) = (Vec::new(), Vec::new());
        let (ends, rows) = (Ends::default(), TrainedRows::default());
        LoraSpec {
            rank: 1,
            alpha: 1.0,
            rslora: false,
            dropout: 0.0,
            targets,
            exceptions,
            ends,
            rows,
            seed: 0,
        }
    }

    /// Whether this module has an adapter in any layer.
    pub fn has(&self, module: &str) -> bool {
        self.targets.iter().any(|target| target == module)
    }

    /// The adapter of a projection.
    pub fn adapter(&self, layer: usize, module: &str) -> Option<Numbers> {
        let common = self.has(module).then_some(Numbers { rank: self.rank, alpha: self.alpha })?;
        let other = self.exceptions.iter().find(|e| e.layer == layer && e.module == module);
        other.map_or(Some(common), |e| e.adapter)
    }

    /// Factor of the product of B and A.
    pub fn scale(&self) -> f32 {
        self.scale_of(Numbers { rank: self.rank, alpha: self.alpha })
    }

    /// The factor of an adapter with these numbers.
    pub fn scale_of(&self, numbers: Numbers) -> f32 {
        let r = numbers.rank as f32;
        numbers.alpha / if self.rslora { r.sqrt() } else { r }
    }

    /// All adapters that differ from the common one.
    fn others(&self) -> impl Iterator<Item = Numbers> {
        let usual = Numbers { rank: self.rank, alpha: self.alpha };
        let ends = self.ends.named().map(|(_, numbers)| numbers).filter(move |numbers| *numbers != usual);
        self.exceptions.iter().filter_map(|e| e.adapter).chain(ends)
    }

    /// The names of all modules with an adapter.
    pub fn modules(&self) -> Vec<&str> {
        self.targets.iter().map(String::as_str).chain(self.ends.named().map(|(name, _)| name)).collect()
    }

    /// The largest rank.
    pub fn largest_rank(&self) -> usize {
        self.others().map(|numbers| numbers.rank).max().unwrap_or(0).max(self.rank)
    }

    /// The same with another common rank.
    pub fn with_rank(&self, rank: usize) -> Self {
        let mut other = LoraSpec { rank, ..self.clone() };
        let of_rank = |numbers: &&mut Numbers| numbers.rank == self.rank;
        let ends = [&mut other.ends.embedding, &mut other.ends.head].into_iter().filter_map(Option::as_mut);
        let adapters = other.exceptions.iter_mut().filter_map(|e| e.adapter.as_mut()).chain(ends);
        adapters.filter(of_rank).for_each(|numbers| numbers.rank = rank);
        other
    }

    /// Whether an adapter has another alpha than the others.
    pub fn has_other_alpha(&self) -> bool {
        self.others().any(|numbers| numbers.alpha != self.alpha)
    }

    /// Whether all adapters have one rank and one scale.
    pub fn is_uniform(&self) -> bool {
        self.others().next().is_none()
    }

    /// Numbers and modules: `rank 16, alpha 32 (scale 2) on q_proj v_proj; 2 with other numbers, 3 without an adapter,
    /// rows of tokens embed_tokens 5`
    pub fn with_modules(&self) -> String {
        let frozen = self.exceptions.iter().filter(|e| e.adapter.is_none()).count();
        let others = match self.others().count() {
            0 => Vec::new(),
            others => vec![format!("{others} with other numbers")],
        };
        let frozen = (frozen > 0).then(|| format!("{frozen} without an adapter"));
        let rows = self.rows.in_short().map(|tokens| format!("rows of tokens {tokens}"));
        let rest = others.into_iter().chain(frozen).chain(rows).collect::<Vec<_>>().join(", ");
        let rest = if rest.is_empty() { rest } else { format!("; {rest}") };
        format!("{self} on {}{rest}", self.modules().join(" "))
    }

    /// The same with a hash of all that is not common, by which two choices are compared.
    pub fn exceptions_in_short(&self) -> Option<String> {
        let each = |e: &Exception| format!("{}.{} {:?}\n", e.layer, e.module, e.adapter);
        let usual = Numbers { rank: self.rank, alpha: self.alpha };
        let ends = self.ends.named().filter(|(_, numbers)| *numbers != usual);
        let ends = ends.map(|(name, numbers)| format!("{name} {numbers:?}\n"));
        let rows = self.rows.in_short();
        let all: String = self.exceptions.iter().map(each).chain(ends).chain(rows).collect();
        let hash = blake3::hash(all.as_bytes()).to_hex();
        (!all.is_empty()).then(|| format!("{} [{hash:.8}]", self.with_modules()))
    }

    /// What distinguishes the adapters of two configurations: the first projection that does, where nothing common does.
    pub fn difference(&self, other: &LoraSpec) -> (String, String) {
        let modules = self.targets.iter().chain(&other.targets);
        let layers = self.exceptions.iter().chain(&other.exceptions).map(|e| e.layer);
        let layers = 0..layers.max().map_or(0, |last| last + 1);
        let mut all = layers.flat_map(|layer| modules.clone().map(move |module| (layer, module)));
        let common = (self.to_string(), &self.targets) == (other.to_string(), &other.targets);
        match all.find(|(layer, module)| self.adapter(*layer, module) != other.adapter(*layer, module)) {
            Some((layer, module)) if common => {
                let tell = |spec: &LoraSpec| match spec.adapter(layer, module) {
                    None => format!("no adapter for {module} of layer {layer}"),
                    Some(Numbers { rank, alpha }) => {
                        format!("rank {rank}, alpha {alpha} for {module} of layer {layer}")
                    }
                };
                (tell(self), tell(other))
            }
            _ => (self.with_modules(), other.with_modules()),
        }
    }

    /// Refuses what the model does not have to train, and what cannot be trained together.
    pub fn check_on(&self, config: &Config) -> Result<(), LoraError> {
        self.rows.check(config)?;
        let no = |option, why: &str| Err(LoraError::Choice { option, why: why.into() });
        let (Ends { embedding, head }, rows) = (&self.ends, &self.rows);
        if head.is_some() && config.labels.is_some() {
            return no(TARGETS, "a classifier has no head over tokens (lm_head)");
        }
        let both = embedding.is_some() && !rows.embedding.is_empty()
            || head.is_some() && (!rows.head.is_empty() || rows.shared(config));
        match both {
            true => no(
                TRAIN_TOKENS,
                "a matrix has trained rows or an adapter, not both: leave out embed_tokens and lm_head",
            ),
            false => Ok(()),
        }
    }

    /// Refuses rank 0, a non-finite alpha, and a dropout outside [0, 1).
    pub fn check(&self) -> Result<(), LoraError> {
        let bad = |what, value: String, needs| Err(LoraError::Value { what, value, needs });
        for Numbers { rank, alpha } in self.others().chain([Numbers { rank: self.rank, alpha: self.alpha }]) {
            if rank == 0 || rank > 1 << 16 {
                return bad("rank", rank.to_string(), "use a whole number from 1 to 65536");
            }
            if !alpha.is_finite() {
                let needs = "use a finite number, usually rank or twice the rank";
                return bad("alpha", alpha.to_string(), needs);
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return bad("dropout", self.dropout.to_string(), "use a probability from 0 to below 1");
        }
        Ok(())
    }
}

/// Initial values: A ~ U(-1/sqrt(in), 1/sqrt(in)), B = 0; of the embedding A = 0, B ~ N(0, 1); and a classifier's head ~ the same U as A (a head in the base
/// overrides it, as the base's rows do trained rows, see [`super::decoder::initial_parameters`]).
pub fn init(layout: &Layout, lora: &LoraSpec) -> Vec<f32> {
    let mut flat = vec![0.0; layout.len()];
    for entry in layout.entries() {
        if entry.name.ends_with(".lora_A.weight") || entry.name == SCORE {
            let bound = 1.0 / (entry.cols as f32).sqrt();
            // A text model begins alike, alone and beside a tower.
            let name = entry.name.replacen(PATH, "", 1);
            let mut draws = Stream::new(&[lora.seed, name_key(&name)]);
            flat[entry.range()].iter_mut().for_each(|x| *x = (2.0 * draws.unit() - 1.0) * bound);
        }
        if entry.name.ends_with(EMBEDDING_B) {
            let mut draws = Stream::new(&[lora.seed, name_key(EMBEDDING_B)]);
            flat[entry.range()].iter_mut().for_each(|x| *x = normal(&mut draws));
        }
    }
    flat
}

/// A draw of N(0, 1) (Box & Muller 1958).
fn normal(draws: &mut Stream) -> f32 {
    let (radius, turn) = (1.0 - f64::from(draws.unit()), f64::from(draws.unit()));
    (libm::sqrt(-2.0 * libm::log(radius)) * libm::cos(std::f64::consts::TAU * turn)) as f32
}

/// FNV-1a of a tensor's name, a part of the key of its draws.
fn name_key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// A tensor of an adapter as read from its file.
#[derive(Debug, Clone, Copy)]
pub struct Named<'a> {
    /// PEFT name.
    pub name: &'a str,
    /// As in [`super::layout::Entry`].
    pub rows: usize,
    /// As in [`super::layout::Entry`].
    pub cols: usize,
    /// rows * cols.
    pub values: &'a [f32],
}

/// Returns an adapter's tensors as one flat vector. Each tensor of the layout must be present exactly once.
/// Extra tensors are refused, except a copy of the embedding's rows under the head's name, which PEFT writes if a model
/// was enlarged.
pub fn from_adapter(layout: &Layout, tensors: &[Named]) -> Result<Vec<f32>, LoraError> {
    let name = |t: &Named| t.name.to_owned();
    let of_embedding = tensors.iter().find(|t| t.name.ends_with(EMBEDDING_ROWS)).map(|t| t.values);
    let again = |t: &Named| t.name == HEAD_ROWS && Some(t.values) == of_embedding;
    if let Some(t) = tensors.iter().find(|t| layout.find(t.name).is_none() && !again(t)) {
        return Err(LoraError::Extra { name: name(t) });
    }
    let mut parts = Vec::with_capacity(tensors.len());
    for entry in layout.entries() {
        let Some(t) = tensors.iter().find(|t| t.name == entry.name) else {
            return Err(LoraError::Missing { name: entry.name.clone() });
        };
        let (expected, found) = ((entry.rows, entry.cols), (t.rows, t.cols));
        if expected != found || t.values.len() != entry.rows * entry.cols {
            return Err(LoraError::Shape { name: name(t), expected, found });
        }
        if !t.values.iter().all(|x| x.is_finite()) {
            return Err(LoraError::NonFinite { name: name(t) });
        }
        parts.push((entry.range(), t.values));
    }
    // Not before the shapes are known to be those of the file.
    let mut flat = vec![0.0; layout.len()];
    parts.into_iter().for_each(|(range, values)| flat[range].copy_from_slice(values));
    Ok(flat)
}
