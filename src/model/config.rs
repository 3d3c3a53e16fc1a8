//! The description of a model, read from Hugging Face's config.json in either dialect (transformers 4: `rope_theta`,
//! `rope_scaling`, `torch_dtype`; transformers 5: `rope_parameters`, `dtype`).
//!
//! A configuration whose results would differ from the reference is refused by name before any weight is read: unknown
//! keys that only inform are ignored, unknown values of keys that change results are errors.

mod attention;
mod convolutions;
mod delta;
mod experts;
mod hybrid;
mod read;
mod rope;
mod traits;
mod window;
mod wrapped;

use super::rows::Rows;
pub use crate::backend::{DeltaHeads, Heads};
use crate::families::tensors::{Matrix, OUTPUT_GATE};
use crate::families::wrapped::{PATH, Wrapper};
use crate::families::{self, Bias, Classifier, EmbeddingScale, Family, FeedForward, HeadNorms, Mixer};
pub use attention::AttentionSpec;
pub use convolutions::Convolutions;
pub use delta::DeltaRules;
pub use experts::Experts;
use read::Fields;
pub use rope::{Rope, RopeScaling, longest_text};
use serde_json::Value;

/// A decoder's shape and variants.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Structure of the blocks, and the name of the family.
    pub family: &'static Family,
    /// The class of the whole checkpoint, where the model is its text model.
    pub wrapper: Option<&'static Wrapper>,
    /// V, rows of the embedding.
    pub vocab: usize,
    /// C.
    pub hidden: usize,
    /// F.
    pub feed_forward: usize,
    /// The experts of sparse layers.
    pub experts: Option<Experts>,
    /// Convolutions in the place of attention.
    pub convolutions: Option<Convolutions>,
    /// Gated delta rules in the place of attention.
    pub delta_rules: Option<DeltaRules>,
    /// Decoder blocks.
    pub layers: usize,
    /// H, G and D.
    pub heads: Heads,
    /// Longest sequence that is computed: the one that the model is made for. Longer rows are refused.
    pub max_positions: usize,
    /// Added under the root of every norm.
    pub eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Rotary embedding of sliding layers, where it differs.
    pub local_rope: Option<Rope>,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub o_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// Tokens that a token sees (itself included) in each layer; `None` for the whole row.
    pub windows: Vec<Option<usize>>,
    /// Whether q and k of each layer are rotated.
    pub rotated: Vec<bool>,
    /// Number of values of a head that are rotated, the first ones.
    pub rotary: usize,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    /// Factor of each half's output.
    pub residual_scale: f32,
    /// Divisor of the logits.
    pub logits_scale: f32,
    /// Factor of the scores.
    pub score_scale: f32,
    /// The soft cap of the scores.
    pub soft_cap: Option<f32>,
    /// Class names by index, where the model is a sequence classifier.
    pub labels: Option<Vec<String>>,
    /// Whether the outputs of its head are numbers, not classes: a regression or a reward.
    pub numbers: bool,
    /// Whether its head labels each token, not each row, and has a bias.
    pub tags: bool,
    /// Dropout of the input of a head that labels tokens, in training; 1 if config.json has an impossible value.
    pub tag_dropout: f32,
}

/// Why a model cannot be used: a configuration error (exit code 78).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A key is missing or holds something unusable.
    #[error("config.json: `{key}` {problem}")]
    Key {
        /// Name of the key.
        key: String,
        /// What is wrong with the value.
        problem: String,
    },
    /// An unsupported feature that changes the results.
    #[error("{what} is not supported: {way_out}")]
    Unsupported {
        /// The feature that the model requires.
        what: String,
        /// The alternative for the user.
        way_out: String,
    },
    /// Token ids without a row in the embedding.
    #[error(
        "the tokenizer has {tokenizer} ids but the model's embedding only {embedding} rows: \
         use the tokenizer that belongs to this model (added tokens need a resized embedding)"
    )]
    Vocabulary {
        /// Highest id plus one.
        tokenizer: usize,
        /// V.
        embedding: usize,
    },
    /// A classifier whose base has a different number of labels.
    #[error(
        "the model has a head with {model} outputs (labels), {asked} were asked for: \
         leave --num-classes out, or start from a base without a head"
    )]
    Labels {
        /// Labels of the base.
        model: usize,
        /// Requested labels.
        asked: usize,
    },
}

fn key(key: &str, problem: impl Into<String>) -> ConfigError {
    ConfigError::Key { key: key.to_owned(), problem: problem.into() }
}

fn unsupported(what: impl Into<String>, way_out: impl Into<String>) -> ConfigError {
    ConfigError::Unsupported { what: what.into(), way_out: way_out.into() }
}

fn supported() -> String {
    let releases = families::releases("or");
    format!("choose a {releases} model (LlamaForCausalLM, ...ForSequenceClassification and so on)")
}

impl Config {
    /// Reads a parsed config.json. Errors name the key and the solution.
    pub fn from_json(json: &Value) -> Result<Config, ConfigError> {
        match wrapped::text_model(json)? {
            Some((wrapper, text)) => {
                Ok(Config { wrapper: Some(wrapper), ..Config::of_families(&text, &[wrapper.family])? })
            }
            None => Config::of_families(json, families::ALL),
        }
    }

    /// Like [`Config::from_json`], with the families in `known`.
    pub fn of_families(json: &Value, known: &[&'static Family]) -> Result<Config, ConfigError> {
        let fields = Fields::new(json)?;
        let (family, head) = architecture(&fields, known)?;
        let tags = head == Some(HeadOf::Tokens);
        tags.then(|| fields.biased_tags()).transpose()?;
        refuse(&fields, family)?;
        let layers = fields.size("num_hidden_layers", 1..=4096)?;
        let hidden = fields.size("hidden_size", 1..=1 << 20)?;
        let heads = heads(&fields, hidden)?;
        let (rope, local_rope) = rope::read(&fields, family)?;
        let (score_scale, soft_cap) = attention::read(&fields, family, heads)?;
        let labels = head.map(|_| labels(&fields)).transpose()?;
        let one = head == Some(HeadOf::Rows) && labels.as_ref().is_some_and(|labels| labels.len() == 1);
        let config = Config {
            family,
            wrapper: None,
            vocab: fields.size("vocab_size", 1..=1 << 24)?,
            hidden,
            feed_forward: match family.feed_forward {
                FeedForward::Key(name) => fields.size(name, 1..=1 << 22)?,
                FeedForward::Adjusted => convolutions::adjusted(&fields)?,
            },
            experts: family.experts.then(|| experts::read(&fields, family, layers)).transpose()?,
            convolutions: family.convolutions.then(|| convolutions::read(&fields, layers)).transpose()?,
            delta_rules: family.delta_rule.then(|| delta::read(&fields, layers)).transpose()?,
            layers,
            heads,
            max_positions: positions(&fields)?,
            eps: eps(&fields, family)?,
            rope,
            local_rope,
            tied: tied(&fields, family)?,
            qkv_bias: biased(&fields, family.biases.qkv)?,
            o_bias: biased(&fields, family.biases.o)?,
            mlp_bias: biased(&fields, family.biases.mlp)?,
            windows: window::read(&fields, family, layers)?,
            rotated: rope::rotated(&fields, family, layers)?,
            rotary: rope::rotary(&fields, family, heads.size)?,
            embedding_scale: match family.embedding_scale {
                EmbeddingScale::One => 1.0,
                EmbeddingScale::RootOfHidden => (hidden as f64).sqrt() as f32,
                EmbeddingScale::Key(name) => factor(&fields, Some(name))?,
            },
            residual_scale: factor(&fields, family.residual_scale)?,
            logits_scale: factor(&fields, family.logits_scale)?,
            score_scale,
            soft_cap,
            // As in transformers, a single output is a number.
            numbers: one || head == Some(HeadOf::Rows) && fields.text("problem_type")? == Some("regression"),
            labels,
            tags,
            tag_dropout: if tags { fields.tag_dropout()? } else { fields.tag_dropout().unwrap_or(1.0) },
        };
        config.rope.scaling.check(config.rotary / 2)?;
        (0..layers).try_for_each(|layer| config.attention(layer).supported().map(drop))?;
        Ok(config)
    }

    /// Value of `architectures` for this model, such as `LlamaForCausalLM`.
    pub fn architecture(&self) -> String {
        if let Some(wrapper) = self.wrapper {
            return wrapper.class.to_owned();
        }
        match (&self.labels, self.family.classifier) {
            (None, _) => format!("{}ForCausalLM", self.family.name),
            (Some(_), _) if self.tags => format!("{}ForTokenClassification", self.family.name),
            (Some(_), Classifier::Named(name)) => format!("{name}ForSequenceClassification"),
            (Some(_), _) => format!("{}ForSequenceClassification", self.family.name),
        }
    }

    /// Returns the same base as a sequence classifier over `labels`. A base that is already a classifier keeps its own
    /// names; the number of labels must be equal.
    pub fn into_classifier(self, labels: Vec<String>) -> Result<Config, ConfigError> {
        if self.family.classifier == Classifier::Missing || self.wrapper.is_some() {
            return Err(unsupported(format!("a classifier on {}", self.architecture()), NO_CLASS));
        }
        if self.tags {
            let what = format!("a classifier of rows on {}", self.architecture());
            return Err(unsupported(what, "its head labels tokens: give --task token-classification"));
        }
        self.with_labels(labels)
    }

    /// The same for a head that labels each token.
    pub fn into_tagger(self, labels: Vec<String>) -> Result<Config, ConfigError> {
        if !self.family.labels_tokens || self.wrapper.is_some() {
            return Err(unsupported(format!("token classification on {}", self.architecture()), NO_CLASS));
        }
        if self.labels.is_some() && !self.tags {
            let what = format!("token classification on {}", self.architecture());
            return Err(unsupported(what, "its head is for whole rows: give the base without it"));
        }
        let impossible = key("classifier_dropout", "or `hidden_dropout` is no share of 0 to 1");
        Some(self.tag_dropout).filter(|share| *share < 1.0).ok_or(impossible)?;
        Ok(Config { tags: true, ..self.with_labels(labels)? })
    }

    fn with_labels(mut self, labels: Vec<String>) -> Result<Config, ConfigError> {
        match &self.labels {
            Some(own) if own.len() != labels.len() => {
                Err(ConfigError::Labels { model: own.len(), asked: labels.len() })
            }
            Some(_) => Ok(self),
            None if labels.is_empty() => {
                Err(key("id2label", "is empty: a classifier needs at least one class"))
            }
            None => {
                self.labels = Some(labels);
                Ok(self)
            }
        }
    }

    /// Returns the same base with a head of `outputs` numbers, named as in transformers. A base that has a head already
    /// must have as many.
    pub fn into_regression(self, outputs: usize) -> Result<Config, ConfigError> {
        let labels = (0..outputs).map(|i| format!("LABEL_{i}")).collect();
        Ok(Config { numbers: true, ..self.into_classifier(labels)? })
    }

    /// Place of the text model below `model.` in the whole checkpoint: empty where the checkpoint is a text model.
    pub fn path(&self) -> &'static str {
        self.wrapper.map_or("", |_| PATH)
    }

    /// Refuses a tokenizer (highest id plus one) that is larger than the embedding.
    pub fn check_vocabulary(&self, tokenizer: usize) -> Result<(), ConfigError> {
        if tokenizer > self.vocab {
            return Err(ConfigError::Vocabulary { tokenizer, embedding: self.vocab });
        }
        Ok(())
    }

    /// The shortest window of any layer.
    pub fn window(&self) -> Option<usize> {
        self.windows.iter().flatten().min().copied()
    }

    /// The experts of a layer; `None` where it has one feed-forward.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.sparse.get(layer) == Some(&true))
    }

    /// The attention of a layer.
    pub fn attention(&self, layer: usize) -> AttentionSpec {
        let window = self.windows.get(layer).copied().flatten();
        AttentionSpec { heads: self.heads, window, scale: self.score_scale, soft_cap: self.soft_cap }
    }

    /// The rotary embedding of a layer.
    pub fn rope_of(&self, layer: usize) -> Rope {
        let local = self.attention(layer).window.and(self.local_rope.as_ref());
        let rope = local.unwrap_or(&self.rope).clone();
        match self.rotated.get(layer) {
            Some(false) => Rope { scaling: RopeScaling::Off, ..rope },
            _ => rope,
        }
    }

    /// Sizes of the gains of q's and k's norms in a layer of attention.
    pub fn head_norms(&self, layer: usize) -> Option<[usize; 2]> {
        if self.mixer(layer) != Mixer::Attention {
            return None;
        }
        let Heads { query, kv, size, .. } = self.heads;
        match self.family.head_norms {
            HeadNorms::None => None,
            HeadNorms::Each => Some([size; 2]),
            HeadNorms::Whole => Some([query * size, kv * size]),
        }
    }

    /// What a layer has between the norms of its first half.
    pub fn mixer(&self, layer: usize) -> Mixer {
        let has = |layers: Option<&Vec<bool>>| layers.is_some_and(|of| of.get(layer) == Some(&true));
        match has(self.convolutions.as_ref().map(|of| &of.layers)) {
            true => Mixer::Convolution,
            false if has(self.delta_rules.as_ref().map(|of| &of.layers)) => Mixer::DeltaRule,
            false => Mixer::Attention,
        }
    }

    /// Taps of the convolution of a layer between two gates.
    pub fn taps(&self, layer: usize) -> Option<usize> {
        let convolutions = self.convolutions.as_ref()?;
        (self.mixer(layer) == Mixer::Convolution).then_some(convolutions.taps)
    }

    /// Heads of the delta rule of a layer that has one.
    pub fn delta_heads(&self, layer: usize) -> Option<DeltaHeads> {
        let delta_rules = self.delta_rules.as_ref()?;
        (self.mixer(layer) == Mixer::DeltaRule).then_some(delta_rules.heads)
    }

    /// The matrices of a layer, in model order; of a sparse layer beside those of its experts.
    pub fn matrices(&self, layer: usize) -> Vec<Matrix> {
        let sparse = self.experts_of(layer).is_some() && !self.family.shared_expert;
        let all = self.family.matrices(self.mixer(layer)).into_iter();
        all.filter(|matrix| !sparse || matrix.is_of_attention()).collect()
    }

    /// The matrix of a layer with this last part of its name.
    pub fn matrix(&self, layer: usize, module: &str) -> Option<Matrix> {
        self.matrices(layer).into_iter().find(|matrix| matrix.module() == module)
    }

    /// The rows of projection `i` of a layer in its matrix in the files, in the order in which a block computes them:
    /// backends rotate pairs that are half a head apart, so the rotated rows of q and k are moved there.
    pub fn rows(&self, layer: usize, i: usize) -> Rows {
        let size = |i: usize| self.shape(layer, i).0;
        let matrix = self.matrices(layer).into_iter().find(|matrix| matrix.projections.contains(&i));
        let before = matrix.iter().flat_map(|matrix| matrix.projections).take_while(|before| **before != i);
        let mut first: usize = before.copied().map(size).sum();
        let (d, attends) = (self.heads.size, self.mixer(layer) == Mixer::Attention);
        let order = self.head_order().filter(|_| i < 2 && attends);
        // A gate's rows are between those of the heads of q.
        let between = attends && self.family.gated_attention && [0, OUTPUT_GATE].contains(&i);
        let step = if between { 2 * d } else { d };
        if between {
            first = if i == OUTPUT_GATE { d } else { 0 };
        } else if order.is_none() {
            return Rows::Range(first..first + size(i));
        }
        let order = order.unwrap_or_else(|| (0..d).collect());
        let heads = (0..size(i) / d).map(|head| first + head * step);
        Rows::Each(heads.flat_map(|head| order.iter().map(move |row| head + row)).collect())
    }

    /// The place in the files of each row of a head of q and k; `None` where a block computes them in that order.
    pub fn head_order(&self) -> Option<Vec<usize>> {
        rope::order(self.heads.size, self.rotary, self.family)
    }

    /// The residual stream is kept divided by the factor of the halves' outputs: this is the factor of the embedding
    /// on that stream. Norms of the stream do not see its scale, but for [`Config::stream_eps`].
    pub fn stream_scale(&self) -> f32 {
        self.embedding_scale / self.residual_scale
    }

    /// Added under the root of the norms of the residual stream.
    pub fn stream_eps(&self) -> f32 {
        self.eps / (self.residual_scale * self.residual_scale)
    }

    /// Outputs and inputs [N, K] of projection `i` of a layer.
    pub fn shape(&self, layer: usize, i: usize) -> (usize, usize) {
        let (c, f) = (self.hidden, self.feed_forward);
        let Heads { query, kv, size, .. } = self.heads;
        let ([q, k, v], out, each) = match self.delta_heads(layer) {
            Some(of) => {
                let (keys, values) = (of.keys * of.key_size, of.values * of.value_size);
                ([keys, keys, values], values, of.values)
            }
            None if self.mixer(layer) == Mixer::Convolution => ([c; 3], c, 0),
            None => ([query, kv, kv].map(|heads| heads * size), query * size, 0),
        };
        [(q, c), (k, c), (v, c), (c, out), (f, c), (f, c), (c, f), (out, c), (each, c), (each, c)][i]
    }

    /// Outputs and inputs of a matrix of a layer.
    pub fn shape_of(&self, layer: usize, matrix: &Matrix) -> (usize, usize) {
        let outputs = matrix.projections.iter().map(|i| self.shape(layer, *i).0).sum();
        (outputs, self.shape(layer, matrix.projections[0]).1)
    }

    /// The same of the matrix with this last part of its name; `None` where the layer has none.
    pub fn projection(&self, layer: usize, module: &str) -> Option<(usize, usize)> {
        Some(self.shape_of(layer, &self.matrix(layer, module)?))
    }
}

const NO_CLASS: &str = "there is no class for it here; use a text model of a family with one";

/// What a head labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadOf {
    Rows,
    Tokens,
}

type Architecture = (&'static Family, Option<HeadOf>);

fn architecture(fields: &Fields, known: &[&'static Family]) -> Result<Architecture, ConfigError> {
    let named = fields.strings("architectures")?;
    let model_type = fields.text("model_type")?;
    for name in &named {
        for &family in known {
            if let Some("ForCausalLM" | "Model") = name.strip_prefix(family.name) {
                return Ok((family, None));
            }
            if family.labels_tokens && name.strip_prefix(family.name) == Some("ForTokenClassification") {
                return Ok((family, Some(HeadOf::Tokens)));
            }
            let classifier = match family.classifier {
                Classifier::OfName => family.name,
                Classifier::Named(name) => name,
                Classifier::Missing => continue,
            };
            if name.strip_prefix(classifier) == Some("ForSequenceClassification") {
                return Ok((family, Some(HeadOf::Rows)));
            }
        }
    }
    if named.is_empty() {
        let of_type = known.iter().find(|f| Some(f.model_type) == model_type);
        if let Some(&family) = of_type {
            return Ok((family, None));
        }
    }
    let name = named.first().copied().or(model_type);
    let Some(name) = name else {
        return Err(key("architectures", format!("is missing: {}", supported())));
    };
    if is_expert_mixture(name) {
        return Err(unsupported(format!("mixture of experts ({name})"), supported()));
    }
    let shown = traits::shown(fields).map_or(String::new(), |shown| format!("{shown}; "));
    Err(unsupported(format!("architecture {name}"), format!("{shown}{}", supported())))
}

fn is_expert_mixture(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("moe") || name.contains("mixtral")
}

fn biased(fields: &Fields, bias: Bias) -> Result<bool, ConfigError> {
    match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Key(key) => Ok(fields.flag(key)?.unwrap_or(false)),
        Bias::KeyOrTrue(key) => Ok(fields.flag(key)?.unwrap_or(true)),
    }
}

/// Refuses features that only keys other than the architecture's name show.
fn refuse(fields: &Fields, family: &Family) -> Result<(), ConfigError> {
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if !family.experts && fields.optional_size(key, 0..=1 << 20)?.is_some_and(|n| n > 1) {
            return Err(unsupported(format!("mixture of experts (`{key}`)"), supported()));
        }
    }
    hybrid::refuse(fields, family)?;
    if let Some(quantised) = fields.object("quantization_config") {
        let method = quantised.get("quant_method").and_then(Value::as_str).unwrap_or("quantised");
        return Err(unsupported(
            format!("a base quantised with {method}"),
            "use the unquantised model, or a .gguf file of it",
        ));
    }
    match fields.text(family.activation_key)? {
        Some(other) if !family.activation_names().contains(&other) => {
            let computed = family.activation_names()[0];
            return Err(unsupported(
                format!("{} `{other}`", family.activation_key),
                format!("only {computed} is computed for this family; use another base"),
            ));
        }
        _ => {}
    }
    if let Some(key) = family.refused.iter().find(|key| fields.is_set(key)) {
        return Err(unsupported(format!("`{key}`"), "use another base"));
    }
    Ok(())
}

/// A factor in config.json, 1 where the family or the file has none.
fn factor(fields: &Fields, name: Option<&str>) -> Result<f32, ConfigError> {
    let Some(name) = name else { return Ok(1.0) };
    match fields.number(name)? {
        Some(x) if x <= 0.0 || !(x as f32).is_normal() => {
            Err(key(name, format!("is {x}, not a positive number of 32 bits")))
        }
        x => Ok(x.unwrap_or(1.0) as f32),
    }
}

fn eps(fields: &Fields, family: &Family) -> Result<f32, ConfigError> {
    match fields.number(family.eps_key)? {
        None => Ok(family.eps),
        Some(eps) if (0.0..1.0).contains(&eps) => Ok(eps as f32),
        Some(eps) => Err(key(family.eps_key, format!("is {eps}, not in [0, 1)"))),
    }
}

fn tied(fields: &Fields, family: &Family) -> Result<bool, ConfigError> {
    for key in family.tied_keys {
        if let Some(tied) = fields.flag(key)? {
            return Ok(tied);
        }
    }
    Ok(family.tied)
}

fn positions(fields: &Fields) -> Result<usize, ConfigError> {
    Ok(fields.optional_size("max_position_embeddings", 1..=1 << 31)?.unwrap_or(2048))
}

fn heads(fields: &Fields, hidden: usize) -> Result<Heads, ConfigError> {
    let query = fields.size("num_attention_heads", 1..=1 << 16)?;
    let kv = fields.optional_size("num_key_value_heads", 1..=1 << 16)?.unwrap_or(query);
    if !query.is_multiple_of(kv) {
        return Err(key(
            "num_key_value_heads",
            format!("is {kv}, which does not divide {query} query heads"),
        ));
    }
    let size = match fields.optional_size("head_dim", 1..=4096)? {
        Some(size) => size,
        None if hidden.is_multiple_of(query) => hidden / query,
        None => return Err(key("hidden_size", format!("is {hidden}, which {query} heads do not divide"))),
    };
    if !size.is_multiple_of(2) {
        return Err(key("head_dim", format!("is {size}; rotary embedding needs an even head size")));
    }
    Ok(Heads::new(query, kv, size))
}

/// Class names by index: `id2label`, else `num_labels` generated names, else transformers' default of two.
fn labels(fields: &Fields) -> Result<Vec<String>, ConfigError> {
    let Some(map) = fields.object("id2label") else {
        let count = fields.optional_size("num_labels", 1..=1 << 20)?.unwrap_or(2);
        return Ok((0..count).map(|i| format!("LABEL_{i}")).collect());
    };
    let name = |i: usize| match map.get(&i.to_string()) {
        Some(Value::String(name)) => Ok(name.clone()),
        Some(other) => Ok(other.to_string()),
        None => Err(key("id2label", format!("has {} entries but none for class {i}", map.len()))),
    };
    match map.len() {
        0 => Err(key("id2label", "is empty: a classifier needs at least one class")),
        n => (0..n).map(name).collect(),
    }
}

#[cfg(test)]
mod tests;
