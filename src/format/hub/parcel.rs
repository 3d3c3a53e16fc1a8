//! Which files of a folder an upload takes: those of an adapter or of a merged model, by name. State of a training, rows
//! and logs are never among them. The weights are opened, so that a damaged file is not uploaded.

use super::cache::{INDEX, SINGLE, SMALL_FILES, shards};
use crate::format::directory;
use crate::format::error::FormatError;
use crate::format::gguf::Gguf;
use crate::format::{peft, safetensors};
use std::path::{Path, PathBuf};

/// Files that are uploaded if they exist, besides [`SMALL_FILES`].
const MORE: [&str; 8] = [
    peft::CARD,
    peft::LABELS,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
];

/// The weights of an adapter for mlx-lm.
const MLX: &str = "adapters.safetensors";

/// Files to upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parcel {
    /// What they are together: adapter, model, GGUF.
    pub what: &'static str,
    /// Their paths.
    pub files: Vec<PathBuf>,
}

impl Parcel {
    /// The files of `from`: the folder of an adapter or of a merged model, or a .gguf file.
    pub fn of(from: &Path) -> Result<Self, FormatError> {
        let is_gguf = |path: &Path| path.extension().is_some_and(|end| end == "gguf");
        let way = "give the folder of a run or of an export (peft, merged), or a .gguf file";
        if std::fs::metadata(from).map_err(|e| FormatError::io(from, e))?.is_file() {
            if !is_gguf(from) {
                return Err(FormatError::unsupported(from, "a single file that is no .gguf", way));
            }
            Gguf::open(from)?.refuse_part()?;
            return Ok(Parcel { what: "GGUF", files: vec![from.to_owned()] });
        }
        let has = |name: &str| from.join(name).is_file();
        let (what, mut names) = if has(peft::CONFIG) && has(peft::WEIGHTS) {
            directory::json(&from.join(peft::CONFIG))?;
            safetensors::open(&from.join(peft::WEIGHTS))?;
            ("adapter", vec![peft::WEIGHTS.to_owned(), peft::CONFIG.to_owned()])
        } else if has("config.json") && (has(SINGLE) || has(INDEX)) {
            safetensors::Sharded::open_with_bytes(from)?;
            let weights = match has(SINGLE) {
                true => vec![SINGLE.to_owned()],
                false => [shards(from)?, vec![INDEX.to_owned()]].concat(),
            };
            ("model", weights)
        } else if has(MLX) {
            let way = "push the folder of `finetune export --to peft`";
            return Err(FormatError::unsupported(from, "an adapter for mlx-lm, which is not uploaded", way));
        } else {
            let entries = std::fs::read_dir(from).map_err(|e| FormatError::io(from, e))?.flatten();
            let gguf = entries.map(|entry| entry.path()).find(|path| is_gguf(path));
            return Err(match gguf {
                Some(gguf) => {
                    let way = format!("name the file: {}", gguf.display());
                    FormatError::unsupported(from, "a folder of .gguf files", way)
                }
                None => FormatError::unsupported(from, "holds neither an adapter nor a merged model", way),
            });
        };
        names.extend(SMALL_FILES.into_iter().chain(MORE).filter(|name| has(name)).map(str::to_owned));
        Ok(Parcel { what, files: names.into_iter().map(|name| from.join(name)).collect() })
    }
}
