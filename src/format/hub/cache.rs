//! The cache on disk, as `huggingface_hub` lays it out: `blobs/HASH`, `snapshots/COMMIT/NAME` linking to blobs,
//! `refs/REVISION` holding a commit. A reference is written last, so what it names was whole.

use crate::format::atomic;
use crate::format::error::FormatError;
use std::fs;
use std::path::{Path, PathBuf};

/// Weights in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The list of shards.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// All else that is wanted, where it is there.
pub(super) const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// One model's folder in the cache.
pub(super) struct Repository {
    root: PathBuf,
    lock: PathBuf,
}

impl Repository {
    pub fn new(cache: &Path, id: &str) -> Self {
        let name = format!("models--{}", id.replace('/', "--"));
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

    /// The folder of `revision`, if everything that a model needs is there.
    pub fn whole_snapshot(&self, revision: &str) -> Option<PathBuf> {
        if revision.split('/').any(|part| part == "..") || revision.starts_with('/') {
            return None;
        }
        let named = fs::read_to_string(self.root.join("refs").join(revision)).ok();
        let folder = self.snapshot(named.as_deref().unwrap_or(revision).trim());
        let has = |name: &str| folder.join(name).is_file();
        let weights = has(SINGLE) || shards(&folder).is_ok_and(|all| all.iter().all(|shard| has(shard)));
        (has("config.json") && has("tokenizer.json") && weights).then_some(folder)
    }

    /// `refs/REVISION`: from now on the snapshot counts as what that revision is.
    pub fn remember(&self, revision: &str, commit: &str) -> Result<(), FormatError> {
        if revision == commit || revision.split('/').any(|part| part == "..") || revision.starts_with('/') {
            return Ok(());
        }
        atomic::write_file(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    /// `snapshots/COMMIT/NAME` -> `../../blobs/HASH`.
    pub fn link(&self, commit: &str, name: &str, hash: &str) -> Result<(), FormatError> {
        let folder = self.snapshot(commit);
        let pointer = folder.join(name);
        let fail = |e| FormatError::io(&pointer, e);
        fs::create_dir_all(&folder).map_err(fail)?;
        if fs::symlink_metadata(&pointer).is_ok() {
            fs::remove_file(&pointer).map_err(fail)?;
        }
        #[cfg(unix)]
        let made = std::os::unix::fs::symlink(Path::new("../../blobs").join(hash), &pointer);
        #[cfg(not(unix))]
        let made = fs::copy(self.blob(hash), &pointer).map(drop);
        made.map_err(fail)
    }

    /// Held while one blob is written, by this or any other program that knows the layout.
    pub fn lock(&self, hash: &str) -> Result<fs::File, FormatError> {
        let path = self.lock.join(format!("{hash}.lock"));
        let fail = |e| FormatError::io(&path, e);
        fs::create_dir_all(&self.lock).map_err(fail)?;
        let file = fs::File::create(&path).map_err(fail)?;
        file.lock().map_err(fail)?;
        Ok(file)
    }
}

/// The shards that the index in `folder` names.
pub(super) fn shards(folder: &Path) -> Result<Vec<String>, FormatError> {
    let path = folder.join(INDEX);
    let text = fs::read(&path).map_err(|e| FormatError::io(&path, e))?;
    crate::format::safetensors::shard_names(&path, &text)
}
