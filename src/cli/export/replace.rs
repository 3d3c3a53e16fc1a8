//! What an export may replace: an earlier export, and nothing else.

use super::super::refusal::{Refusal, at};
use crate::format::gguf::Gguf;
use crate::format::peft;
use std::path::Path;

/// Refuses a folder that holds something, unless that was allowed.
pub fn free(out: &Path, overwrite: Option<()>) -> Result<(), Refusal> {
    let held = std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_some()) || out.is_file();
    match held && overwrite.is_none() {
        true => Err(Refusal::configuration(format!(
            "{}: is not empty: choose another --output, or replace it with --overwrite",
            out.display()
        ))),
        false => Ok(()),
    }
}

/// The names that an export gives its files, besides shards.
const WRITTEN: [&str; 15] = [
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
    peft::LABELS,
    "README.md",
    "Modelfile",
    "adapter.gguf",
    "model.gguf",
];

/// Refuses to replace what the export is made from, what holds it, and whatever no export wrote: the folder
/// goes as a whole, with everything in it.
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
    let mut exports = 0;
    for entry in std::fs::read_dir(&place).map_err(at(out))? {
        let entry = entry.map_err(at(out))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if !(shard || WRITTEN.contains(&name.as_str())) || entry.path().is_dir() {
            return refuse(format!(
                "holds {name}, which no export wrote, so --overwrite does not replace it"
            ));
        }
        exports += usize::from(["config.json", peft::CONFIG, "Modelfile"].contains(&name.as_str()));
    }
    let empty = std::fs::read_dir(&place).map_err(at(out))?.next().is_none();
    if exports == 0 && !empty {
        return refuse("holds no export, so --overwrite does not replace it".into());
    }
    Ok(())
}

/// The same for an export that is one file: only another GGUF goes, and never the base.
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
        Ok(_) => Ok(()),
        Err(_) => refuse("is no GGUF file, so --overwrite does not replace it"),
    }
}
