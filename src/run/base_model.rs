//! Resolves and opens the model named on the command line: the demonstration, a path, or a Hub id. All cheap checks are
//! made here, before any weight is read.

use crate::config::cache;
use crate::config::demo;
use crate::config::refusal::{self, Refusal, nearest};
use crate::config::verb::{self, VERBS};
use crate::data::new_tokens::NewToken;
use crate::data::template::{CHATML, with_defaults};
use crate::data::tokenizer::Tokenizer;
use crate::format::hub::Progress;
use crate::format::{self, Method, ModelFiles};
use crate::model::config::Config;
use crate::model::implied::Implied;
use crate::model::quantised::{QuantiseError, Quantised, Recipe};
use crate::numeric::block::{Block, Encoding};
use crate::support::stderr::say;
use crate::support::waiting::HASHING;
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A base model with open files; weights are not read yet.
pub struct BaseModel {
    /// Path of the model.
    pub path: PathBuf,
    /// Contents of the files.
    pub files: ModelFiles,
    /// Its shape.
    pub config: Config,
    /// Tokens that its files do not have, with their ids.
    pub added: Vec<(u32, NewToken)>,
}

/// Resolves and opens a model.
pub fn open(name: &str) -> Result<BaseModel, Refusal> {
    at(locate(name)?)
}

fn at(path: PathBuf) -> Result<BaseModel, Refusal> {
    let files = format::open(&path)?;
    let config = config(&path, &files.config)?;
    check_ends(&path, &files, config.vocab)?;
    Ok(BaseModel { path, files, config, added: Vec::new() })
}

/// Refuses end tokens outside the vocabulary: `stop_ids` would skip them, and no answer would end.
fn check_ends(path: &Path, files: &ModelFiles, vocab: usize) -> Result<(), Refusal> {
    let none = Value::Null;
    for (name, json) in [
        ("config.json", &files.config),
        ("config.json", files.config.get("text_config").unwrap_or(&none)),
        ("generation_config.json", files.generation.as_ref().unwrap_or(&none)),
    ] {
        let ends = &json["eos_token_id"];
        let is_id = |v: &Value| v.as_u64().is_some_and(|id| id < vocab as u64);
        if !(ends.is_null() || is_id(ends) || ends.as_array().is_some_and(|list| list.iter().all(is_id))) {
            let place = if path.is_dir() { path.join(name) } else { path.to_path_buf() };
            return Err(Refusal::configuration(format!(
                "{}: `eos_token_id` is {ends}, not a token id (0 to {}) or a list of them: correct it",
                place.display(),
                vocab.saturating_sub(1)
            )));
        }
    }
    Ok(())
}

/// Like [`open`], quantised where `recipe` is given.
pub fn open_as(name: &str, recipe: Option<Recipe>) -> Result<BaseModel, Refusal> {
    quantised(open(name)?, recipe)
}

fn quantised(base: BaseModel, recipe: Option<Recipe>) -> Result<BaseModel, Refusal> {
    let Some(recipe) = recipe else { return Ok(base) };
    let BaseModel { path, files, config, added } = base;
    let at = |e: QuantiseError| Refusal::configuration(format!("{}: {e}", path.display()));
    let tensors = Arc::new(Quantised::new(files.tensors, recipe).map_err(at)?);
    let kind = format!("{}, quantised to {}", files.kind, recipe.name());
    Ok(BaseModel { path, files: ModelFiles { tensors, kind, ..files }, config, added })
}

/// Like [`open_as`] for callers that read no weights: for a Hub model that is not in the cache only shapes are fetched.
pub fn outline_as(name: &str, recipe: Option<Recipe>) -> Result<BaseModel, Refusal> {
    match (named(name)?, cache::folder()) {
        (Named::Hub(id, revision), Some(cache)) => {
            let path = format::hub::outline(id, revision, &cache.join("outlines"), &mut progress_lines())?;
            quantised(at(path)?, recipe)
        }
        (Named::Path(path), _) => match without_weights(&path)? {
            Some(base) => quantised(base, recipe),
            None => open_as(name, recipe),
        },
        _ => open_as(name, recipe),
    }
}

/// Opens a folder that has everything but the weights; their shapes follow from its config.json.
fn without_weights(path: &Path) -> Result<Option<BaseModel>, Refusal> {
    let Some((json, method)) = format::without_weights(path)? else { return Ok(None) };
    let config = config(path, &json)?;
    let mut weights = Implied::of(path, &config, &json);
    weights.experts = (method == Method::Mxfp4).then_some(Block::MXFP4);
    let dtype = Encoding::Plain(weights.dtype).name().to_lowercase();
    let kind = format!("{dtype}, estimated from config.json; weights are not here");
    let files = format::with_weights(path, json, Arc::new(weights), kind)?;
    let base = BaseModel { path: path.to_owned(), files, config, added: Vec::new() };
    quantised(base, (method == Method::Nf4).then_some(Recipe::Nf4)).map(Some)
}

fn config(path: &Path, json: &Value) -> Result<Config, Refusal> {
    Config::from_json(json).map_err(|e| Refusal::configuration(format!("{}: {e}", path.display())))
}

/// Meaning of a model's name.
pub enum Named<'a> {
    /// A file or folder that exists.
    Path(PathBuf),
    /// The demonstration model.
    Demo,
    /// A Hub id and a revision.
    Hub(&'a str, Option<&'a str>),
}

/// Resolves a name without opening or fetching anything.
pub fn named(name: &str) -> Result<Named<'_>, Refusal> {
    let (id, revision) = name.split_once('@').map_or((name, None), |(id, r)| (id, Some(r)));
    match name {
        // First: the repository has a folder of that name, and a run without arguments must work. `./demo` is a path.
        demo::NAME => Ok(Named::Demo),
        name if Path::new(name).exists() => Ok(Named::Path(name.into())),
        _ if format::looks_like_id(id) => Ok(Named::Hub(id, revision)),
        name if name.contains(['/', '.']) => Err(Refusal::failure(format!(
            "{name}: no such file or directory; a model is a Hugging Face directory, a .gguf file or a Hub id owner/name"
        ))),
        word => Err(not_a_model(word)),
    }
}

/// The refusal of a word that is neither path nor Hub id.
fn not_a_model(word: &str) -> Refusal {
    let names = || VERBS.iter().map(|v| v.name);
    let hint = match nearest(word, names()) {
        Some(verb) => format!("did you mean `finetune {verb}`?"),
        None => format!("a model is a directory, a .gguf file or a Hub id owner/name ({})", verb::list()),
    };
    Refusal::usage(format!("{word:?} is neither a verb nor a path: {hint}"))
}

fn locate(name: &str) -> Result<PathBuf, Refusal> {
    match named(name)? {
        Named::Path(path) => Ok(path),
        Named::Demo => demo::directory(),
        Named::Hub(id, revision) => Ok(format::hub::fetch(id, revision, &mut progress_lines())?),
    }
}

/// Prints a line for every quarter of every file.
pub fn progress_lines() -> impl FnMut(&Progress) {
    let mut said = (String::new(), 0);
    move |p| {
        let now = (p.file.clone(), p.done * 4 / p.total.max(1));
        if now != said {
            say!("{}: {:.1} of {:.1} MB", p.file, p.done as f64 / 1e6, p.total as f64 / 1e6);
            said = now;
        }
    }
}

impl BaseModel {
    /// Returns the tokenizer, with the model's chat template or the given one. Refuses a tokenizer with ids outside the
    /// embedding.
    pub fn tokenizer(&mut self, chat_template: Option<&str>) -> Result<Tokenizer, Refusal> {
        self.tokenizer_with(chat_template, &[])
    }

    /// Like [`BaseModel::tokenizer`], with values for variables of the chat template.
    pub fn tokenizer_with(
        &mut self,
        chat_template: Option<&str>,
        values: &[(String, Value)],
    ) -> Result<Tokenizer, Refusal> {
        if let Some(template) = chat_template {
            self.replace_template(template)?;
        }
        if !values.is_empty() {
            self.set_defaults(values)?;
        }
        let files = &self.files.tokenizer;
        let tokenizer = Tokenizer::new(
            &files.tokenizer_json,
            files.tokenizer_config.as_ref(),
            files.special_tokens_map.as_ref(),
            files.chat_template.as_deref(),
        )
        .map_err(|e| refusal::in_file(&self.path, e.into()))?;
        let fits = self.config.check_vocabulary(tokenizer.vocab_size());
        fits.map_err(|e| refusal::in_file(&self.path, e.into()))?;
        // A given template is written beside the adapter, so it must be valid. A model's own template is checked when
        // it is used.
        if let (Some(asked), Some(template)) = (chat_template, tokenizer.template()) {
            let wrong = |e| Refusal::configuration(format!("--chat-template {asked}: {e}"));
            template.check().map_err(wrong)?;
        }
        Ok(tokenizer)
    }

    fn replace_template(&mut self, template: &str) -> Result<(), Refusal> {
        let text = match template {
            "chatml" if !Path::new(template).exists() => CHATML.to_string(),
            file => std::fs::read_to_string(file).map_err(refusal::at(Path::new(file)))?,
        };
        let files = &mut self.files.tokenizer;
        files.chat_template = Some(text);
        if let Some(Value::Object(config)) = &mut files.tokenizer_config {
            config.shift_remove("chat_template");
        }
        Ok(())
    }

    /// Writes values of variables into the template, so that every reader of the adapter's template has them.
    fn set_defaults(&mut self, values: &[(String, Value)]) -> Result<(), Refusal> {
        let files = &mut self.files.tokenizer;
        let in_config = files.tokenizer_config.as_mut().and_then(|config| config.get_mut("chat_template"));
        let mut own = files.chat_template.take();
        match in_config {
            Some(Value::String(text)) => {
                own.get_or_insert_with(|| std::mem::take(text));
            }
            // One template for rows with tools, another for rows without.
            Some(Value::Array(named)) => {
                for entry in named {
                    let Some(text) = entry["template"].as_str().map(|text| with_defaults(text, values))
                    else {
                        continue;
                    };
                    if entry["name"] == "default" && own.is_none() {
                        files.chat_template = Some(text.clone());
                    }
                    entry["template"] = text.into();
                }
            }
            _ => {}
        }
        if let Some(text) = own {
            for (name, _) in values.iter().filter(|(name, _)| !text.contains(name.as_str())) {
                say!("warning: --template-args {name}: the chat template has no such variable");
            }
            files.chat_template = Some(with_defaults(&text, values));
            if let Some(Value::Object(config)) = &mut files.tokenizer_config {
                config.shift_remove("chat_template");
            }
        }
        match files.chat_template {
            Some(_) => Ok(()),
            None => Err(Refusal::configuration(
                "--template-args: the model has no chat template: give --chat-template FILE too",
            )),
        }
    }

    /// The tokenizer's files, for the folder of an adapter or a merged model.
    pub fn tokenizer_files(&self) -> Vec<(String, Vec<u8>)> {
        let t = &self.files.tokenizer;
        let mut files = vec![("tokenizer.json".to_string(), t.tokenizer_json.clone().into_bytes())];
        let mut json = |name: &str, value: &Option<Value>| {
            if let Some(v) = value {
                files.push((name.into(), format!("{v:#}\n").into_bytes()));
            }
        };
        json("tokenizer_config.json", &t.tokenizer_config);
        json("special_tokens_map.json", &t.special_tokens_map);
        if let Some(template) = &t.chat_template {
            files.push(("chat_template.jinja".into(), template.clone().into_bytes()));
        }
        files
    }

    /// Ids that end an answer: end tokens of the tokenizer, of the generation config and of the config.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut ids: Vec<u32> = tokenizer.eos_id().into_iter().collect();
        let config = &self.files.config;
        for value in
            [self.files.generation.as_ref(), Some(config), config.get("text_config")].into_iter().flatten()
        {
            match &value["eos_token_id"] {
                Value::Array(list) => ids.extend(list.iter().filter_map(Value::as_u64).map(|n| n as u32)),
                one => ids.extend(one.as_u64().map(|n| n as u32)),
            }
        }
        // Turns of common templates end with these tokens; a chat model whose config names only the end of a document
        // would otherwise continue with the user's turn.
        for token in ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"] {
            ids.extend(tokenizer.token_to_id(token).filter(|_| tokenizer.is_special(token)));
        }
        ids.sort();
        ids.dedup();
        ids
    }
}

/// Hashes a file's bytes on all threads. The file is read instead of mapped, because mapped pages would count as memory
/// of this process.
fn hash_file(hasher: &mut blake3::Hasher, path: &Path) -> std::io::Result<()> {
    const PART: usize = 16 << 20;
    let mut file = std::fs::File::open(path)?;
    let mut part = Vec::with_capacity(PART);
    loop {
        part.clear();
        file.by_ref().take(PART as u64).read_to_end(&mut part)?;
        if part.is_empty() {
            return Ok(());
        }
        hasher.update_rayon(&part);
        HASHING.add(part.len() as u64);
    }
}

/// blake3 of the weights' files and config.json; a resumed run must have the same value as the original run.
pub fn hash(model: &Path) -> Result<String, Refusal> {
    let mut files = match model.is_dir() {
        false => vec![model.to_path_buf()],
        true => {
            let entries = std::fs::read_dir(model).map_err(refusal::at(model))?;
            let weights =
                |p: &PathBuf| p.extension().is_some_and(|e| e == "safetensors") || p.ends_with("config.json");
            entries.flatten().map(|e| e.path()).filter(weights).collect()
        }
    };
    files.sort();
    HASHING.begin(files.iter().filter_map(|path| path.metadata().ok()).map(|about| about.len()).sum());
    let mut hasher = blake3::Hasher::new();
    for path in files {
        hash_file(&mut hasher, &path).map_err(refusal::at(&path))?;
    }
    Ok(hasher.finalize().to_hex()[..32].to_string())
}
