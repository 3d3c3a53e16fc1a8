//! PEFT adapter directories in the format of peft 0.21: `adapter_config.json`, `adapter_model.safetensors` (f32, sorted
//! names without the adapter name), `README.md`, and for a classifier `label_map.json`. The last file is an addition of
//! this program: PEFT stores labels in the base's config, which an adapter directory does not have.

mod card;
mod config;

pub use card::{card, max_lora_rank};
pub use config::{AdapterConfig, EMBEDDING, TaskType};

use super::atomic;
use super::directory;
use super::error::FormatError;
use super::safetensors::{self, Spec};
use crate::families::wrapped::PATH;
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::Tensors;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Name of the weights file.
pub const WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the configuration file.
pub const CONFIG: &str = "adapter_config.json";
/// Name of the model card, see [`card()`].
pub const CARD: &str = "README.md";
/// Name of the label file of a classifier: `{"id2label": {"0": "..."}, "label2id": {"...": 0}}`,
/// with `"problem_type": "regression"` where the outputs are numbers.
pub const LABELS: &str = "label_map.json";

/// An adapter that was read.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// The adapter_config.json.
    pub config: AdapterConfig,
    /// All matrices, sorted by name.
    pub tensors: Vec<AdapterTensor>,
    /// Magnitudes of DoRA: paths of modules, and a value for each of their outputs.
    pub magnitudes: Vec<Magnitude>,
    /// Names and shapes of copies of the base's embedding and head, which PEFT adds where these have an adapter.
    pub copies: Vec<(String, (usize, usize))>,
    /// The class names of a classifier, if label_map.json exists.
    pub labels: Option<Vec<String>>,
    /// Whether label_map.json says that the outputs of the head are numbers.
    pub numbers: bool,
}

/// One matrix of an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterTensor {
    /// Name: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, `base_model.model.score.weight`.
    pub name: String,
    /// R for A, number of outputs for B, number of labels for the head, number of tokens for trained rows.
    pub rows: usize,
    /// Number of inputs for A, R for B, 1 for the bias of a head, else the hidden size.
    pub cols: usize,
    /// The [rows, cols] values, all finite.
    pub values: Vec<f32>,
}

/// The path of a module (`base_model.model.model.layers.0.self_attn.q_proj`), and the length of each row of its merged
/// weight.
pub type Magnitude = (String, Vec<f32>);

/// One matrix to be written.
#[derive(Debug, Clone, Copy)]
pub struct TensorRef<'a> {
    /// Name, as in [`AdapterTensor`].
    pub name: &'a str,
    /// First dimension.
    pub rows: usize,
    /// Second dimension.
    pub cols: usize,
    /// The [rows, cols] values.
    pub values: &'a [f32],
}

/// Files other than weights and configuration.
#[derive(Debug, Clone, Default)]
pub struct Extras {
    /// The class names of a classifier.
    pub labels: Option<Vec<String>>,
    /// Whether the outputs of the head are numbers, not classes.
    pub numbers: bool,
    /// Rows of the embedding, where tokens were added to the base for this adapter.
    pub enlarged: Option<usize>,
    /// Further files by name (README.md, tokenizer.json, chat_template.jinja ...).
    pub files: Vec<(String, Vec<u8>)>,
}

/// Reads the configuration of an adapter. Unknown keys are ignored; unsupported options that change the computation are
/// rejected by name.
pub fn config(dir: &Path) -> Result<AdapterConfig, FormatError> {
    let path = dir.join(CONFIG);
    let Some(config) = directory::json(&path)? else {
        std::fs::metadata(dir).map_err(|e| FormatError::io(dir, e))?;
        let way = "give the folder that holds adapter_config.json and adapter_model.safetensors";
        return Err(FormatError::unsupported(dir, "not a PEFT adapter (no adapter_config.json)", way));
    };
    AdapterConfig::from_json(&path, &config)
}

/// Reads an adapter.
pub fn read(dir: &Path) -> Result<Adapter, FormatError> {
    let mut config = self::config(dir)?;
    let weights = dir.join(WEIGHTS);
    if !weights.exists() && dir.join("adapter_model.bin").exists() {
        let way = "load it once with PEFT and save_pretrained(DIR, safe_serialization=True)";
        return Err(FormatError::unsupported(
            dir,
            "its weights are adapter_model.bin (pickle), which is not read",
            way,
        ));
    }
    let file = safetensors::open(&weights)?;
    let (mut tensors, mut magnitudes, mut copies) = (Vec::new(), Vec::new(), Vec::new());
    for stored in file.names() {
        let Some(tensor) = file.get(&stored) else { continue };
        match plain_name(&stored).rsplit_once(".lora_magnitude_vector") {
            Some((path, "" | ".weight")) if config.use_dora => {
                magnitudes.push((path.to_owned(), finite(&weights, &stored, &tensor)?));
            }
            _ if stored.ends_with(".base_layer.weight") => {
                let [rows, cols] = tensor.shape[..] else { continue };
                copies.push((stored, (rows, cols)));
            }
            _ => tensors.push(matrix(&weights, &stored, &tensor, &config)?),
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    if config.target_modules.is_empty() {
        let path = |t: &AdapterTensor| {
            let path = t.name.strip_prefix("base_model.model.")?;
            path.strip_suffix(".lora_A.weight").or(path.strip_suffix(".lora_embedding_A")).map(str::to_owned)
        };
        config.target_modules = tensors.iter().filter_map(path).collect();
    }
    let (labels, numbers) = labels(&dir.join(LABELS))?.unzip();
    Ok(Adapter { config, tensors, magnitudes, copies, labels, numbers: numbers.unwrap_or(false) })
}

/// The name without the adapter's, at today's place of a text model.
fn plain_name(stored: &str) -> String {
    let name = stored.replace(".modules_to_save.default.", ".").replace(".default.weight", ".weight");
    // transformers before 4.52 had the text model at another place.
    match name.strip_prefix("base_model.model.language_model.model.") {
        Some(rest) => format!("base_model.model.model.{PATH}{rest}"),
        None => name,
    }
}

/// Whether a tensor is the bias of a head.
fn is_bias(name: &str) -> bool {
    name.ends_with(".score.bias") || name.ends_with(".classifier.bias")
}

/// The values, all finite.
fn finite(
    path: &Path,
    stored: &str,
    tensor: &crate::numeric::tensor::Tensor,
) -> Result<Vec<f32>, FormatError> {
    let values = tensor.dtype.widen(&tensor.bytes);
    match values.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(FormatError::tensor(path, stored, format!("value {i} is {}", values[i]))),
        None => Ok(values),
    }
}

/// Writes an adapter into `dir`, each file atomically and the configuration last: a folder with a configuration is
/// complete.
pub fn write(
    dir: &Path,
    config: &AdapterConfig,
    tensors: &[TensorRef],
    extras: &Extras,
) -> Result<(), FormatError> {
    let path = dir.join(WEIGHTS);
    let mut data = Vec::with_capacity(tensors.len());
    for t in tensors {
        if t.values.len() != t.rows * t.cols {
            let what = format!("{} values for shape [{}, {}]", t.values.len(), t.rows, t.cols);
            return Err(FormatError::tensor(&path, t.name, what));
        }
        let bytes = Dtype::F32.bytes_of(t.values);
        let shape = if is_bias(t.name) { vec![t.rows] } else { vec![t.rows, t.cols] };
        data.push((Spec { name: t.name.into(), dtype: Dtype::F32, shape }, bytes));
    }
    let data: Vec<(Spec, &[u8])> = data.iter().map(|(spec, bytes)| (spec.clone(), &**bytes)).collect();
    safetensors::write(&path, &data)?;
    for (name, bytes) in &extras.files {
        atomic::write_file(&dir.join(name), bytes)?;
    }
    if let Some(labels) = &extras.labels {
        let problem = extras.numbers.then_some(REGRESSION);
        atomic::write_file(&dir.join(LABELS), label_map(labels, problem).as_bytes())?;
    }
    atomic::write_file(&dir.join(CONFIG), format!("{:#}\n", config.to_json()).as_bytes())
}

/// The text of label_map.json. `problem` is transformers' `problem_type`, where the outputs are not classes.
pub fn label_map(labels: &[String], problem: Option<&str>) -> String {
    let by_id: Map<String, Value> =
        labels.iter().enumerate().map(|(i, l)| (i.to_string(), json!(l))).collect();
    let by_label: Map<String, Value> =
        labels.iter().enumerate().map(|(i, l)| (l.clone(), json!(i))).collect();
    let mut map = json!({"id2label": by_id, "label2id": by_label});
    if let Some(problem) = problem {
        map["problem_type"] = json!(problem);
    }
    format!("{map:#}\n")
}

/// transformers' `problem_type` of a head whose outputs are numbers.
pub const REGRESSION: &str = "regression";

/// The names in label_map.json, and whether the outputs are numbers.
fn labels(path: &Path) -> Result<Option<(Vec<String>, bool)>, FormatError> {
    let Some(map) = directory::json(path)? else { return Ok(None) };
    let bad =
        || FormatError::malformed(path, "id2label must name the classes \"0\", \"1\", ... without a gap");
    let by_id = map["id2label"].as_object().ok_or_else(bad)?;
    let name =
        |i: usize| by_id.get(&i.to_string()).and_then(Value::as_str).map(str::to_owned).ok_or_else(bad);
    let names = (0..by_id.len()).map(name).collect::<Result<_, _>>()?;
    Ok(Some((names, map["problem_type"] == REGRESSION)))
}

/// Checks a tensor of the file and widens it to f32, with its plain name.
fn matrix(
    path: &Path,
    stored: &str,
    tensor: &crate::numeric::tensor::Tensor,
    config: &AdapterConfig,
) -> Result<AdapterTensor, FormatError> {
    let bad = |what: String| FormatError::tensor(path, stored, what);
    let name = plain_name(stored);
    let (rows, cols) = match tensor.shape[..] {
        [rows, cols] if !is_bias(&name) => (rows, cols),
        [rows] if is_bias(&name) => (rows, 1),
        _ => {
            let needed = if is_bias(&name) { "a vector" } else { "a matrix" };
            return Err(bad(format!("has shape {:?}, {needed} is needed", tensor.shape)));
        }
    };
    let r = config.r;
    let known = |rank: usize| rank == r || config.rank_pattern.iter().any(|(_, other)| *other == rank);
    let mut parts = name.rsplit('.');
    let fits = match (parts.next(), parts.next()) {
        (_, Some("lora_A")) | (Some("lora_embedding_A"), _) => known(rows),
        (_, Some("lora_B")) | (Some("lora_embedding_B"), _) => known(cols),
        (_, Some("score" | "classifier" | "token_adapter")) => true,
        _ => {
            let what =
                format!("tensor '{stored}' is no LoRA matrix, no classifier head and no row of a token");
            let way = "train an adapter of lora_A and lora_B only";
            return Err(FormatError::unsupported(path, what, way));
        }
    };
    if !fits {
        return Err(bad(format!("shape [{rows}, {cols}] has no rank of {CONFIG} ({r}, or of rank_pattern)")));
    }
    let values = finite(path, stored, tensor)?;
    Ok(AdapterTensor { name, rows, cols, values })
}
