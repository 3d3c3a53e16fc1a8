//! adapter_config.json. Few keys are written, because older PEFT versions warn about unknown keys. All unknown keys are
//! ignored when reading, except that a key that changes the result of the adapter must be supported.

use crate::format::error::FormatError;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Task of the adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskType {
    /// `CAUSAL_LM`.
    CausalLm,
    /// `SEQ_CLS`: with a head `base_model.model.score.weight` that is trained in full.
    SeqCls,
    /// `TOKEN_CLS`: the same, with a bias `base_model.model.score.bias`.
    TokenCls,
}

/// The variable fields of the file; all other fields have a fixed value.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// `task_type`.
    pub task: TaskType,
    /// A Hub id, or None; never an absolute path.
    pub base_model_name_or_path: Option<String>,
    /// The commit of the base.
    pub revision: Option<String>,
    /// Rank, at least 1.
    pub r: usize,
    /// Alpha: finite as f32 and above 0.
    pub lora_alpha: f64,
    /// Dropout probability, in [0, 1).
    pub lora_dropout: f64,
    /// Suffixes of module names (`q_proj`) or of their paths, or `all-linear`. Where a file chooses modules in another
    /// way, they are empty after reading it: [`super::read`] takes the paths of the tensors.
    pub target_modules: Vec<String>,
    /// `layers_to_transform` as written; empty: all layers.
    pub layers: Vec<usize>,
    /// `rank_pattern`.
    pub rank_pattern: Vec<(String, usize)>,
    /// `alpha_pattern`: finite as f32 and above 0.
    pub alpha_pattern: Vec<(String, f64)>,
    /// `trainable_token_indices`: names of modules, and tokens whose rows are trained, in the order of the rows.
    pub token_rows: Vec<(String, Vec<u32>)>,
    /// Place of the text model below `model.` (`language_model.`), where other parts of the base have modules of the
    /// same names. A pattern then names the modules.
    pub path: &'static str,
    /// If true, the scale is alpha / sqrt(r), otherwise alpha / r.
    pub use_rslora: bool,
    /// Whether merged rows are scaled to trained magnitudes (DoRA, Liu et al. 2024, arXiv:2402.09353).
    pub use_dora: bool,
}

impl AdapterConfig {
    /// The contents of the file, with sorted keys.
    pub fn to_json(&self) -> Value {
        let (task, saved) = match self.task {
            TaskType::CausalLm => ("CAUSAL_LM", Value::Null),
            TaskType::SeqCls => ("SEQ_CLS", json!(["classifier", "score"])),
            TaskType::TokenCls => ("TOKEN_CLS", json!(["classifier", "score"])),
        };
        let target_modules = match self.path {
            // Paths name modules of the text model alone.
            path if path.is_empty() || self.target_modules.iter().any(|name| name.contains('.')) => {
                json!(self.target_modules)
            }
            path => {
                let (path, names) = (path.replace('.', r"\."), self.target_modules.join("|"));
                json!(format!(r"model\.{path}layers\.\d+\.(self_attn|mlp)\.({names})"))
            }
        };
        let mut all = json!({
            "alpha_pattern": Map::from_iter(self.alpha_pattern.iter().map(|(k, a)| (k.clone(), number(*a)))),
            "base_model_name_or_path": self.base_model_name_or_path,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": number(self.lora_alpha),
            "lora_dropout": self.lora_dropout,
            "modules_to_save": saved,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": Map::from_iter(self.rank_pattern.iter().map(|(k, r)| (k.clone(), json!(r)))),
            "revision": self.revision,
            "target_modules": target_modules,
            "task_type": task,
            "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
        });
        match &self.token_rows[..] {
            [] => {}
            // As a list, PEFT takes them for the embedding.
            [(name, tokens)] if name == EMBEDDING => all["trainable_token_indices"] = json!(tokens),
            several => {
                let each = several.iter().map(|(name, tokens)| (name.clone(), json!(tokens)));
                all["trainable_token_indices"] = Value::Object(each.collect());
            }
        }
        if !self.layers.is_empty() {
            all["layers_to_transform"] = json!(self.layers);
        }
        // The order of patterns has a meaning: the first that matches counts.
        let patterns = ["alpha_pattern", "rank_pattern"].map(|key| (key, all[key].take()));
        all.sort_all_objects();
        patterns.into_iter().for_each(|(key, pattern)| all[key] = pattern);
        all
    }

    /// Parses the contents of the file; `path` is for errors.
    pub fn from_json(path: &Path, v: &Value) -> Result<Self, FormatError> {
        refuse(path, v)?;
        let bad = |key: &str| FormatError::malformed(path, format!("{key}: {} is not usable", v[key]));
        let r = rank(&v["r"]).ok_or_else(|| bad("r"))?;
        let lora_alpha = alpha(&v["lora_alpha"]);
        let lora_alpha = lora_alpha.ok_or_else(|| {
            let what =
                format!("lora_alpha: {} is not usable: it must be finite and above 0", v["lora_alpha"]);
            FormatError::malformed(path, what)
        })?;
        let lora_dropout = if v["lora_dropout"].is_null() { Some(0.0) } else { v["lora_dropout"].as_f64() };
        let lora_dropout =
            lora_dropout.filter(|p| (0.0..1.0).contains(p)).ok_or_else(|| bad("lora_dropout"))?;
        let rank_pattern = pattern(&v["rank_pattern"], rank).ok_or_else(|| bad("rank_pattern"))?;
        let alpha_pattern = pattern(&v["alpha_pattern"], alpha).ok_or_else(|| bad("alpha_pattern"))?;
        let task = match v["task_type"].as_str() {
            None | Some("CAUSAL_LM") => TaskType::CausalLm,
            Some("SEQ_CLS") => TaskType::SeqCls,
            Some("TOKEN_CLS") => TaskType::TokenCls,
            Some(other) => {
                let way = "adapters for CAUSAL_LM, SEQ_CLS and TOKEN_CLS are read";
                return Err(FormatError::unsupported(path, format!("task_type {other}"), way));
            }
        };
        let target_modules = targets(path, v)?;
        let token_rows =
            token_rows(&v["trainable_token_indices"]).ok_or_else(|| bad("trainable_token_indices"))?;
        let text = |key: &str| v[key].as_str().filter(|s| !s.is_empty()).map(str::to_owned);
        Ok(AdapterConfig {
            task,
            base_model_name_or_path: text("base_model_name_or_path"),
            revision: text("revision"),
            r,
            lora_alpha,
            lora_dropout,
            target_modules,
            layers: Vec::new(),
            rank_pattern,
            alpha_pattern,
            token_rows,
            path: "",
            use_rslora: v["use_rslora"] == true,
            use_dora: v["use_dora"] == true,
        })
    }
}

/// Whether a value enables an option: false for null, false, and empty lists and objects.
fn is_set(v: &Value) -> bool {
    match v {
        Value::Null | Value::Bool(false) => false,
        Value::Array(a) => !a.is_empty(),
        Value::Object(o) => !o.is_empty(),
        _ => true,
    }
}

/// PEFT options that change the computation and are not supported.
const NOT_BUILT: [&str; 9] = [
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
];

fn refuse(path: &Path, v: &Value) -> Result<(), FormatError> {
    let no = |what: String| {
        Err(FormatError::unsupported(path, what, "only plain LoRA and rsLoRA adapters are supported"))
    };
    match v["peft_type"].as_str() {
        Some("LORA") => {}
        other => return no(format!("peft_type {}", other.unwrap_or("is missing"))),
    }
    if let Some(key) = NOT_BUILT.iter().find(|key| is_set(&v[**key])) {
        return no(format!("{key}: {}", v[*key]));
    }
    begins_on_the_base(path, &v["init_lora_weights"])?;
    if let Some(bias) = v["bias"].as_str().filter(|&b| b != "none") {
        return no(format!("bias: {bias}"));
    }
    if let Some(modules) = v["modules_to_save"].as_array() {
        let other = modules.iter().find(|m| !matches!(m.as_str(), Some("score" | "classifier")));
        if let Some(other) = other {
            return no(format!("modules_to_save: {other}"));
        }
    }
    Ok(())
}

/// Initializations that leave the base unchanged. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract the initial adapter
/// from the base, so such an adapter belongs to the changed base; with the original base, the initial part would be
/// added twice.
const BEGINNINGS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

fn begins_on_the_base(path: &Path, init: &Value) -> Result<(), FormatError> {
    let known = |name: &str| BEGINNINGS.contains(&name.to_lowercase().as_str());
    if matches!(init, Value::Null | Value::Bool(_)) || init.as_str().is_some_and(known) {
        return Ok(());
    }
    let what = format!("init_lora_weights: {init} belongs to a base that was changed");
    let way = "save it with PEFT's path_initial_model_for_weight_conversion, or merge it with PEFT";
    Err(FormatError::unsupported(path, what, way))
}

/// A whole number is written as an integer, as PEFT does.
fn number(alpha: f64) -> Value {
    let whole = alpha.fract() == 0.0 && alpha.abs() < 1e15;
    if whole { json!(alpha as i64) } else { json!(alpha) }
}

/// The module whose rows `trainable_token_indices` means, where it is a list.
pub const EMBEDDING: &str = "embed_tokens";

/// Modules and tokens of `trainable_token_indices`.
fn token_rows(v: &Value) -> Option<Vec<(String, Vec<u32>)>> {
    let tokens = |v: &Value| -> Option<Vec<u32>> {
        v.as_array()?.iter().map(|id| id.as_u64().and_then(|id| id.try_into().ok())).collect()
    };
    let all = match v {
        Value::Null => Vec::new(),
        Value::Object(of) => {
            of.iter().map(|(name, v)| Some((name.clone(), tokens(v)?))).collect::<Option<_>>()?
        }
        list => vec![(EMBEDDING.to_owned(), tokens(list)?)],
    };
    Some(all.into_iter().filter(|(_, tokens): &(_, Vec<u32>)| !tokens.is_empty()).collect())
}

fn rank(v: &Value) -> Option<usize> {
    v.as_u64().filter(|r| (1..=1 << 20).contains(r)).map(|r| r as usize)
}

fn alpha(v: &Value) -> Option<f64> {
    v.as_f64().filter(|a| *a as f32 > 0.0 && (*a as f32).is_finite())
}

/// Most entries of a pattern: each module of 500 layers.
const MOST_PATTERNS: usize = 4096;

/// The pairs of `rank_pattern` or `alpha_pattern`.
fn pattern<T>(v: &Value, value: impl Fn(&Value) -> Option<T>) -> Option<Vec<(String, T)>> {
    match v {
        Value::Null => Some(Vec::new()),
        v => v
            .as_object()
            .filter(|all| all.len() <= MOST_PATTERNS)?
            .iter()
            .map(|(key, v)| Some((key.clone(), value(v)?)))
            .collect(),
    }
}

/// Suffixes of modules; none where modules are chosen by paths, by a regular expression, by layers or by exclusion.
fn targets(path: &Path, v: &Value) -> Result<Vec<String>, FormatError> {
    let bad = || Err(FormatError::malformed(path, "target_modules must name modules"));
    let names = match &v["target_modules"] {
        Value::Array(all) => {
            let mut names: Vec<&str> = all.iter().filter_map(Value::as_str).collect();
            if names.is_empty() || names.len() < all.len() {
                return bad();
            }
            names.sort_unstable();
            names.dedup();
            names
        }
        Value::String(word) => vec![&**word],
        _ => return bad(),
    };
    let plain = |name: &&str| name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    let chosen = ["layers_to_transform", "exclude_modules"].iter().any(|key| is_set(&v[*key]));
    match !chosen && names.iter().all(plain) {
        true => Ok(names.into_iter().map(str::to_owned).collect()),
        false => Ok(Vec::new()),
    }
}
