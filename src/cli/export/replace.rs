//! Checks of the files that an export may replace: only those of an earlier export.

use super::gguf::MARK;
use super::{mlx, ollama};
use crate::config::refusal::{Refusal, at};
use crate::format::gguf::{Gguf, Value};
use crate::format::{peft, safetensors};
use std::path::Path;

/// Refuses a folder that is not empty, unless `overwrite` is given.
pub fn free(out: &Path, overwrite: Option<()>) -> Result<(), Refusal> {
    let held = match std::fs::read_dir(out) {
        Ok(mut entries) => entries.next().map(|_| "is not empty"),
        Err(_) => out.is_file().then_some("already exists"),
    };
    match held.filter(|_| overwrite.is_none()) {
        Some(why) => Err(Refusal::configuration(format!(
            "{}: {why}: choose another --output, or replace it with --overwrite",
            out.display()
        ))),
        None => Ok(()),
    }
}

/// The file names of exports, besides shards.
const WRITTEN: [&str; 16] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    peft::CONFIG,
    peft::WEIGHTS,
    mlx::WEIGHTS,
    peft::LABELS,
    "README.md",
    "Modelfile",
    "adapter.gguf",
    "model.gguf",
];

/// Refuses to replace the source of the export, a folder that contains the source, and files of other origin: the
/// folder is replaced as a whole.
pub fn replaceable(out: &Path, sources: &[(&Path, &str)]) -> Result<(), Refusal> {
    let Ok(place) = out.canonicalize() else { return Ok(()) };
    let refuse = |why: String| {
        Err(Refusal::configuration(format!("{}: {why}: choose another --output", out.display())))
    };
    for (source, what) in sources {
        let source = source.canonicalize().map_err(at(source))?;
        if source == place {
            return refuse(format!("{what} folder itself, which --overwrite does not replace"));
        }
        if source.starts_with(&place) {
            return refuse(format!("holds {}, which {what} folder", source.display()));
        }
    }
    if !place.is_dir() {
        return refuse("is no folder".into());
    }
    let mut ours = 0;
    for entry in std::fs::read_dir(&place).map_err(at(out))? {
        let entry = entry.map_err(at(out))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if !(shard || WRITTEN.contains(&name.as_str())) || entry.path().is_dir() {
            return refuse(format!(
                "holds {name}, which no export wrote, so --overwrite does not replace it"
            ));
        }
        match written_here(&entry.path(), &name) {
            Some(false) => {
                return refuse(format!(
                    "holds {name}, which no export wrote, so --overwrite does not replace it"
                ));
            }
            written => ours += usize::from(written.is_some()),
        }
    }
    let empty = std::fs::read_dir(&place).map_err(at(out))?.next().is_none();
    if ours == 0 && !empty {
        return refuse("holds no export, so --overwrite does not replace it".into());
    }
    Ok(())
}

/// Whether a file has the mark of an export; `None` for types of files without such a mark.
fn written_here(path: &Path, name: &str) -> Option<bool> {
    match name {
        "Modelfile" => {
            Some(std::fs::read_to_string(path).is_ok_and(|text| text.starts_with(ollama::FIRST_LINE)))
        }
        name if name.ends_with(".safetensors") => {
            Some(safetensors::open(path).is_ok_and(|file| file.metadata().contains_key(safetensors::MARK)))
        }
        _ => None,
    }
}

/// Like [`replaceable`] for an export of one file: only an adapter or an output of `merged-gguf` is replaced, never the
/// base.
pub fn replaceable_file(out: &Path, base: &Path) -> Result<(), Refusal> {
    let refuse =
        |why: &str| Err(Refusal::configuration(format!("{}: {why}: choose another --output", out.display())));
    let Ok(place) = out.canonicalize() else { return Ok(()) };
    if place.is_dir() {
        return refuse("is a folder, and this export is one file");
    }
    if base.canonicalize().is_ok_and(|base| base == place) {
        return refuse("is the base itself, which --overwrite does not replace");
    }
    match Gguf::open(&place) {
        Ok(file) if file.get(MARK).is_some() => Ok(()),
        Ok(file) if file.get("general.type").and_then(Value::as_str) == Some("adapter") => Ok(()),
        Ok(_) => refuse("is a model that no export wrote, so --overwrite does not replace it"),
        Err(_) => refuse("is no GGUF file, so --overwrite does not replace it"),
    }
}
