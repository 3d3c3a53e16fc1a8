//! The demonstration: a small model, rows and settings, embedded in the binary so that `finetune` without arguments
//! trains a model. All readers need files, so the contents are written once to the user's cache, under their hash.

use super::cache;
use super::refusal::Refusal;
use super::typed::Typed;
use super::yaml;
use crate::format::atomic;
use std::path::{Path, PathBuf};

/// The name of the demonstration in place of a model.
pub const NAME: &str = "demo";

macro_rules! demo_files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../demo/", $name)))),*]
    };
}

/// Path under `demo/`, contents.
const FILES: &[(&str, &[u8])] = demo_files![
    "demo.yaml",
    "train.jsonl",
    "eval.jsonl",
    "model/chat_template.jinja",
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
];

/// Folder of the demonstration's model.
pub fn directory() -> Result<PathBuf, Refusal> {
    Ok(root()?.join("model"))
}

/// Settings of the demonstration, with paths to the written files; the model keeps its name.
pub fn settings() -> Result<Vec<Typed>, Refusal> {
    let root = root()?;
    let file = root.join("demo.yaml");
    let text = std::fs::read_to_string(&file).map_err(crate::config::refusal::at(&file))?;
    let mut typed = yaml::parse(&text, Path::new("demo.yaml"))?;
    typed.retain(|t| t.key != "model");
    for t in typed.iter_mut().filter(|t| t.key == "data" || t.key == "eval_data") {
        t.values.iter_mut().for_each(|v| *v = root.join(&*v).display().to_string());
    }
    Ok(typed)
}

/// Writes the files if they are missing.
fn root() -> Result<PathBuf, Refusal> {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in FILES {
        hasher.update(name.as_bytes()).update(bytes);
    }
    let name = format!("demo-{}", &hasher.finalize().to_hex()[..16]);
    let places = [cache::folder(), Some(std::env::temp_dir().join("finetune"))];
    let mut refused = None;
    for place in places.into_iter().flatten() {
        let root = place.join(&name);
        match if whole(&root) { Ok(()) } else { lay(&root) } {
            Ok(()) => return Ok(root),
            Err(e) => refused = Some(e),
        }
    }
    Err(refused.unwrap_or_else(|| Refusal::failure("no folder for the demonstration's files: set HOME")))
}

fn whole(root: &Path) -> bool {
    let size = |name: &str| std::fs::metadata(root.join(name)).map(|m| m.len()).ok();
    FILES.iter().all(|(name, bytes)| size(name) == Some(bytes.len() as u64))
}

fn lay(root: &Path) -> Result<(), Refusal> {
    for dir in [root.to_path_buf(), root.join("model")] {
        std::fs::create_dir_all(&dir).map_err(crate::config::refusal::at(&dir))?;
    }
    for (name, bytes) in FILES {
        atomic::write_file(&root.join(name), bytes)?;
    }
    Ok(())
}
