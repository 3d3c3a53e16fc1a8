//! The demonstration: a small model, rows and settings, carried inside the binary so that `finetune` alone does
//! something real. Everything below reads files, so they are laid out once in the user's cache, under the hash
//! of their contents.

use super::options::{Typed, yaml};
use super::refusal::Refusal;
use crate::format::atomic;
use std::path::{Path, PathBuf};

/// How it is called where a model is named.
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

/// The demonstration's model.
pub fn directory() -> Result<PathBuf, Refusal> {
    Ok(root()?.join("model"))
}

/// Its settings, with paths to where the files lie; the model keeps its name.
pub fn settings() -> Result<Vec<Typed>, Refusal> {
    let root = root()?;
    let file = root.join("demo.yaml");
    let text = std::fs::read_to_string(&file).map_err(super::refusal::at(&file))?;
    let mut typed = yaml::parse(&text, Path::new("demo.yaml"))?;
    typed.retain(|t| t.key != "model");
    for t in typed.iter_mut().filter(|t| t.key == "data" || t.key == "eval_data") {
        t.values.iter_mut().for_each(|v| *v = root.join(&*v).display().to_string());
    }
    Ok(typed)
}

/// Lays the files out where that has not been done.
fn root() -> Result<PathBuf, Refusal> {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in FILES {
        hasher.update(name.as_bytes()).update(bytes);
    }
    let name = format!("demo-{}", &hasher.finalize().to_hex()[..16]);
    let places = [cache(), Some(std::env::temp_dir().join("finetune"))];
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
        std::fs::create_dir_all(&dir).map_err(super::refusal::at(&dir))?;
    }
    for (name, bytes) in FILES {
        atomic::write_file(&root.join(name), bytes)?;
    }
    Ok(())
}

/// The user's folder for what can be made or fetched again, where each system has it; XDG_CACHE_HOME moves it anywhere.
pub fn cache() -> Option<PathBuf> {
    cache_by(std::env::consts::OS, |name| std::env::var_os(name).map(PathBuf::from))
}

fn cache_by(system: &str, read: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // A relative one means nothing (so the specification of these folders says).
    let folder = |name: &str| read(name).filter(|path| path.is_absolute());
    let of_system = || match system {
        "windows" => folder("LOCALAPPDATA"),
        "macos" => folder("HOME").map(|home| home.join("Library/Caches")),
        _ => folder("HOME").map(|home| home.join(".cache")),
    };
    folder("XDG_CACHE_HOME").or_else(of_system).map(|caches| caches.join("finetune"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folder_follows_the_operating_system() {
        let of = |system: &str, set: &[(&str, &str)]| {
            cache_by(system, |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        assert_eq!(of("linux", &[("HOME", "/h")]), Some("/h/.cache/finetune".into()));
        assert_eq!(of("macos", &[("HOME", "/h")]), Some("/h/Library/Caches/finetune".into()));
        assert_eq!(of("windows", &[("HOME", "/h"), ("LOCALAPPDATA", "/l")]), Some("/l/finetune".into()));
        for system in ["linux", "macos", "windows"] {
            let both = [("HOME", "/h"), ("LOCALAPPDATA", "/l"), ("XDG_CACHE_HOME", "/x")];
            assert_eq!(of(system, &both), Some("/x/finetune".into()));
            assert_eq!(of(system, &[("XDG_CACHE_HOME", "x")]), None);
        }
    }
}
