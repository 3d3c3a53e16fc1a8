//! The only map from tensor names to ranges of the flat parameter vector; gradient, optimizer, network, checkpoint and
//! export all use it. Order: trained rows or A and B of the embedding, A and B of each module in model order, then trained
//! rows or A and B of the head, or weight and bias of a classifier's head.

use super::config::Config;
use super::lora::LoraSpec;
use crate::families::tensors::{EXPERTS, Matrix};
use std::ops::Range;

/// The name of a classifier's head; all of its values are trained.
pub const SCORE: &str = "base_model.model.score.weight";
/// The end of the name of trained rows of the embedding.
pub const EMBEDDING_ROWS: &str = "embed_tokens.token_adapter.trainable_tokens_delta";
/// The name of trained rows of a head that is not the embedding.
pub const HEAD_ROWS: &str = "base_model.model.lm_head.token_adapter.trainable_tokens_delta";

/// The ends of the names of the embedding's adapter: A [R, V], B [C, R].
pub const EMBEDDING_A: &str = "embed_tokens.lora_embedding_A";
/// As [`EMBEDDING_A`].
pub const EMBEDDING_B: &str = "embed_tokens.lora_embedding_B";
/// The path of a head over tokens.
pub const HEAD_PATH: &str = "base_model.model.lm_head";

/// The name of the bias of a head that labels tokens. In files it is a vector.
pub const BIAS: &str = "base_model.model.score.bias";

/// Where values are whose updates differ from those of others, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places {
    /// Every B: it may have a learning rate of its own.
    pub of_b: Vec<Range<usize>>,
    /// The bias of a head, after every B: it has the rate of B, as in PEFT, and no weight decay, as in transformers.
    pub of_bias: Option<Range<usize>>,
}

/// One tensor of the flat vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name in a PEFT file, e.g. `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: String,
    /// Offset of the first element.
    pub offset: usize,
    /// R for A, outputs for B, labels for a classifier's head and its bias, tokens for trained rows.
    pub rows: usize,
    /// Inputs for A, R for B, 1 for a bias, else the hidden size.
    pub cols: usize,
}

impl Entry {
    /// Range in the flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }
}

/// Map from names to ranges, without gaps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    len: usize,
}

impl Layout {
    /// Appends a tensor and returns its index.
    pub fn push(&mut self, name: impl Into<String>, rows: usize, cols: usize) -> usize {
        self.entries.push(Entry { name: name.into(), offset: self.len, rows, cols });
        self.len += rows * cols;
        self.entries.len() - 1
    }

    /// Appends A and B of the projection `path` of `n` outputs and `k` inputs.
    pub(super) fn push_adapter(&mut self, path: &str, (n, k): (usize, usize), rank: usize) {
        self.push(format!("{path}.lora_A.weight"), rank, k);
        self.push(format!("{path}.lora_B.weight"), n, rank);
    }

    /// The tensors in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// blake3 of names and shapes in order: machines with equal hashes interpret a flat vector equally.
    pub fn hash(&self) -> [u8; 32] {
        let mut shapes = blake3::Hasher::new();
        for entry in &self.entries {
            shapes.update(format!("{} {} {}\n", entry.name, entry.rows, entry.cols).as_bytes());
        }
        *shapes.finalize().as_bytes()
    }

    /// The tensor that contains element `index`.
    pub fn at(&self, index: usize) -> Option<&Entry> {
        let i = self.entries.partition_point(|e| e.offset <= index);
        self.entries.get(i.checked_sub(1)?).filter(|e| e.range().contains(&index))
    }

    /// The name of the tensor at `index`, for messages.
    pub fn name_at(&self, index: usize) -> String {
        self.at(index).map_or_else(|| format!("value {index}"), |entry| entry.name.clone())
    }

    /// Where values are whose updates differ from those of others.
    pub fn places(&self) -> Places {
        let named = |end| self.entries.iter().filter(move |e| e.name.ends_with(end)).map(Entry::range);
        Places { of_b: named(".lora_B.weight").collect(), of_bias: named(BIAS).next() }
    }

    /// Weight and bias of a classifier's head: none, one or two tensors that follow each other.
    pub fn head(&self) -> impl Iterator<Item = &Entry> {
        [SCORE, BIAS].into_iter().filter_map(|name| self.find(name))
    }

    /// The tensor whose name ends so.
    pub fn ending(&self, end: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.name.ends_with(end))
    }

    /// The tensor with that name.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.name == name)
    }
}

/// The layout of the trained parameters of layers `layers`: in the first stage those of the embedding, A and B of each
/// target in model order, then in the last stage those of the head.
pub fn of(config: &Config, lora: &LoraSpec, layers: Range<usize>) -> Layout {
    let mut layout = Layout::default();
    if layers.start == 0 && !lora.rows.embedding.is_empty() {
        let name = format!("base_model.model.model.{}{EMBEDDING_ROWS}", config.path());
        layout.push(name, lora.rows.embedding.len(), config.hidden);
    }
    if let Some(numbers) = lora.ends.embedding.filter(|_| layers.start == 0) {
        let name = |end| format!("base_model.model.model.{}{end}", config.path());
        layout.push(name(EMBEDDING_A), numbers.rank, config.vocab);
        layout.push(name(EMBEDDING_B), config.hidden, numbers.rank);
    }
    for layer in layers.clone() {
        for matrix in adapted(config, layer) {
            if let Some(numbers) = lora.adapter(layer, matrix.module()) {
                let shape = config.shape_of(layer, &matrix);
                layout.push_adapter(&peft_path(config, layer, &matrix), shape, numbers.rank);
            }
        }
    }
    match &config.labels {
        _ if layers.end < config.layers => {}
        Some(labels) => {
            layout.push(SCORE, labels.len(), config.hidden);
            if config.tags {
                layout.push(BIAS, labels.len(), 1);
            }
        }
        None => {
            if !lora.rows.head.is_empty() {
                layout.push(HEAD_ROWS, lora.rows.head.len(), config.hidden);
            }
            if let Some(numbers) = lora.ends.head {
                layout.push_adapter(HEAD_PATH, (config.vocab, config.hidden), numbers.rank);
            }
        }
    }
    layout
}

/// Name and shape of a part of a classifier's head in a checkpoint.
pub fn head_tensor(entry: &Entry) -> (&str, Vec<usize>) {
    let name = entry.name.trim_start_matches("base_model.model.");
    (name, if entry.name == BIAS { vec![entry.rows] } else { vec![entry.rows, entry.cols] })
}

/// The matrices of a layer that can have an adapter.
pub fn adapted(config: &Config, layer: usize) -> impl Iterator<Item = Matrix> {
    config.matrices(layer).into_iter().filter(|matrix| config.family.adapts(matrix))
}

/// A matrix of a layer in the files.
pub struct LayerMatrix {
    /// Path below `model.`.
    pub path: String,
    /// Outputs and inputs.
    pub shape: (usize, usize),
    /// Outputs of each projection that it has.
    pub parts: Vec<usize>,
}

/// The matrices of a layer.
pub fn matrices(config: &Config, layer: usize) -> Vec<LayerMatrix> {
    let mut all = matrices_beside_experts(config, layer);
    let count = config.experts_of(layer).map_or(0, |of| of.count);
    all.extend(matrices_of_experts(config, layer, 0..count));
    all
}

/// The matrices of these experts of a layer.
pub fn matrices_of_experts(
    config: &Config,
    layer: usize,
    experts: impl IntoIterator<Item = usize>,
) -> impl Iterator<Item = LayerMatrix> {
    let (c, f) = (config.hidden, config.experts_of(layer).map_or(0, |of| of.feed_forward));
    let paths = experts.into_iter().flat_map(move |expert| expert_paths(layer, expert));
    let shapes = [(f, c), (f, c), (c, f)].into_iter().cycle();
    paths.zip(shapes).map(|(path, shape)| LayerMatrix { path, shape, parts: vec![shape.0] })
}

/// The matrices of a layer but those of its experts.
pub fn matrices_beside_experts(config: &Config, layer: usize) -> Vec<LayerMatrix> {
    let own = config.matrices(layer).into_iter().map(|matrix| LayerMatrix {
        path: path(layer, &matrix),
        shape: config.shape_of(layer, &matrix),
        parts: matrix.projections.iter().map(|i| config.shape(layer, *i).0).collect(),
    });
    let router = config.experts_of(layer).map(|of| LayerMatrix {
        path: router_path(config, layer),
        shape: (of.count, config.hidden),
        parts: vec![of.count],
    });
    own.chain(router).collect()
}

/// Path of a layer's router below `model.`.
pub fn router_path(config: &Config, layer: usize) -> String {
    format!("layers.{layer}.{}", config.family.router().1)
}

/// Paths of an expert's gate, up and down below `model.`.
pub fn expert_paths(layer: usize, expert: usize) -> [String; 3] {
    EXPERTS.map(|(_, module)| format!("layers.{layer}.mlp.experts.{expert}.{module}"))
}

/// PEFT's path of a matrix, without `.lora_A.weight`.
pub fn peft_path(config: &Config, layer: usize, matrix: &Matrix) -> String {
    format!("base_model.model.model.{}{}", config.path(), path(layer, matrix))
}

/// Path of a matrix below `model.`, such as `layers.3.self_attn.q_proj`.
pub fn path(layer: usize, matrix: &Matrix) -> String {
    format!("layers.{layer}.{}", matrix.names.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_contiguous_and_found_by_name() {
        let mut l = Layout::default();
        l.push("a", 2, 3);
        l.push("b", 3, 1);
        assert_eq!(l.len(), 9);
        assert_eq!(l.at(5).map(|e| e.name.as_str()), Some("a"));
        assert_eq!(l.at(6).map(|e| e.name.as_str()), Some("b"));
        assert_eq!(l.at(9), None);
        assert_eq!(l.find("b").map(Entry::range), Some(6..9));
    }

    /// A classifier's head learns at the rate of A (LoRA+), its bias at that of B.
    #[test]
    fn places_are_those_of_every_b_and_of_the_bias() {
        let mut l = Layout::default();
        l.push_adapter("x.q_proj", (5, 3), 2);
        l.push_adapter("x.v_proj", (1, 3), 2);
        l.push(SCORE, 2, 3);
        l.push(BIAS, 2, 1);
        assert_eq!(l.places(), Places { of_b: vec![6..16, 22..24], of_bias: Some(30..32) });
        assert_eq!(l.head().map(Entry::range).collect::<Vec<_>>(), [24..30, 30..32]);
    }
}
