//! The cache on disk, in the layout of `huggingface_hub`: `blobs/HASH`, `snapshots/COMMIT/NAME` as links to blobs,
//! `refs/REVISION` with a commit. A reference is written last, so a named snapshot was complete.

use super::Kind;
use crate::format::atomic;
use crate::format::error::FormatError;
use std::fs;
use std::path::{Path, PathBuf};

/// The weights in a single file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The list of shards.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// All other files, each used if it exists.
pub(super) const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// The folder of one model or data set in the cache.
pub(super) struct Repository {
    root: PathBuf,
    lock: PathBuf,
}

impl Repository {
    pub fn new(cache: &Path, kind: Kind, id: &str) -> Self {
        let name = format!("{}--{}", kind.plural(), id.replace('/', "--"));
        Repository { root: cache.join(&name), lock: cache.join(".locks").join(&name) }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub fn blob(&self, hash: &str) -> PathBuf {
        self.root.join("blobs").join(hash)
    }

    /// The commit that `revision` refers to: itself, if nothing is known about it.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if revision.split('/').any(|part| part == "..") || revision.starts_with('/') {
            return None;
        }
        let named = fs::read_to_string(self.root.join("refs").join(revision)).ok();
        Some(named.as_deref().unwrap_or(revision).trim().to_owned())
    }

    /// The file with the names of the files of `commit`.
    pub fn names(&self, commit: &str) -> PathBuf {
        self.root.join(".names").join(commit)
    }

    /// The folder of `revision`, if it contains all files of a model.
    pub fn whole_snapshot(&self, revision: &str) -> Option<PathBuf> {
        let folder = self.snapshot(&self.commit(revision)?);
        let has = |name: &str| folder.join(name).is_file();
        let weights = has(SINGLE) || shards(&folder).is_ok_and(|all| all.iter().all(|shard| has(shard)));
        (has("config.json") && has("tokenizer.json") && weights).then_some(folder)
    }

    /// Writes `refs/REVISION`: the revision then refers to this commit.
    pub fn remember(&self, revision: &str, commit: &str) -> Result<(), FormatError> {
        if revision == commit || revision.split('/').any(|part| part == "..") || revision.starts_with('/') {
            return Ok(());
        }
        atomic::write_file(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    /// Creates the link `snapshots/COMMIT/NAME` -> `../../blobs/HASH`, with one more `..` for each folder of the name.
    pub fn link(&self, commit: &str, name: &str, hash: &str) -> Result<(), FormatError> {
        let pointer = self.snapshot(commit).join(name);
        let fail = |e| FormatError::io(&pointer, e);
        if let Some(folder) = pointer.parent() {
            fs::create_dir_all(folder).map_err(fail)?;
        }
        if fs::symlink_metadata(&pointer).is_ok() {
            fs::remove_file(&pointer).map_err(fail)?;
        }
        #[cfg(unix)]
        let above = "../".repeat(name.matches('/').count());
        #[cfg(unix)]
        let made = std::os::unix::fs::symlink(format!("{above}../../blobs/{hash}"), &pointer);
        #[cfg(not(unix))]
        let made = fs::copy(self.blob(hash), &pointer).map(drop);
        made.map_err(fail)
    }

    /// The lock during the write of a blob, shared with all programs that use this layout.
    pub fn lock(&self, hash: &str) -> Result<fs::File, FormatError> {
        let path = self.lock.join(format!("{hash}.lock"));
        let fail = |e| FormatError::io(&path, e);
        fs::create_dir_all(&self.lock).map_err(fail)?;
        let file = fs::File::create(&path).map_err(fail)?;
        file.lock().map_err(fail)?;
        Ok(file)
    }
}

/// The shard names in the index of `folder`.
pub(super) fn shards(folder: &Path) -> Result<Vec<String>, FormatError> {
    let path = folder.join(INDEX);
    let text = fs::read(&path).map_err(|e| FormatError::io(&path, e))?;
    crate::format::safetensors::shard_names(&path, &text)
}
