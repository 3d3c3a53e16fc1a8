//! Downloads models by Hub id into the cache of Python's `huggingface_hub` (HF_HUB_CACHE, HF_HOME).
//!
//! Rules: only necessary files are downloaded; unsupported models are rejected before any weights are downloaded; an
//! interrupted download continues where it stopped; a complete snapshot is used if the Hub is unreachable.
//!
//! Requests use `hf-hub`. Its own downloads (1.0) start from the beginning after an interruption, because they truncate
//! the partial file, and have no timeout; therefore its byte stream with a range is used, and every request has a
//! timeout.

mod cache;
mod download;
mod outline;
mod reach;

use super::directory;
use super::error::FormatError;
use cache::Repository;
use hf_hub::repository::RepoTypeModel;
use hf_hub::{HFClient, HFError, HFRepository};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Progress of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Name of the file in the repository.
    pub file: String,
    /// Bytes present.
    pub done: u64,
    /// Size of the file in bytes.
    pub total: u64,
}

/// Source and destination of downloads.
#[derive(Debug, Clone)]
pub struct Hub {
    /// The URL of the Hub: `https://huggingface.co`, or HF_ENDPOINT.
    pub endpoint: String,
    /// The folder that contains `models--owner--name`.
    pub cache: PathBuf,
    /// HF_TOKEN, else the token of `hf auth login`.
    pub token: Option<String>,
    /// True: send no requests to the Hub (HF_HUB_OFFLINE).
    pub offline: bool,
    /// Time limit without any received data.
    pub patience: Duration,
}

/// The parts of a model to download.
#[derive(Debug, Clone, Copy)]
pub enum Parts<'a> {
    /// All files for training.
    All,
    /// Everything except the values of the weights, in this folder; the whole model if it is in the cache anyway, or if
    /// its quantisation stores shapes in tensors (bitsandbytes).
    Outline(&'a Path),
}

/// Downloads the model `id` (`owner/name`) at `revision` (a branch, a tag or a commit; default: the main branch) and
/// returns its folder, for [`super::open`]. The settings come from the environment.
pub fn fetch(
    id: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<PathBuf, FormatError> {
    Hub::from_environment().fetch(id, revision, progress)
}

/// Same as [`fetch`], without the values of the weights, which are holes in sparse files in `cache`.
pub fn outline(
    id: &str,
    revision: Option<&str>,
    cache: &Path,
    progress: &mut dyn FnMut(&Progress),
) -> Result<PathBuf, FormatError> {
    Hub::from_environment().fetch_parts((id, revision), Parts::Outline(cache), progress)
}

impl Hub {
    /// The settings from the environment, as in Python's `huggingface_hub`.
    pub fn from_environment() -> Self {
        let var = |key: &str| std::env::var(key).ok().filter(|v| !v.is_empty());
        Hub {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            cache: hf_hub::resolve_cache_dir(),
            token: None,
            offline: var("HF_HUB_OFFLINE")
                .is_some_and(|v| matches!(v.to_lowercase().as_str(), "1" | "true" | "yes" | "on")),
            patience: Duration::from_secs(30),
        }
    }

    /// Same as [`fetch`], with these settings.
    pub fn fetch(
        &self,
        id: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        self.fetch_parts((id, revision), Parts::All, progress)
    }

    /// Same as [`Hub::fetch`], for some parts of the model.
    pub fn fetch_parts(
        &self,
        (id, revision): (&str, Option<&str>),
        parts: Parts,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        if !directory::looks_like_id(id) {
            return Err(error(id, "not a Hub id", "write it as owner/name", true));
        }
        let here = Repository::new(&self.cache, id);
        let whole = here.whole_snapshot(revision.unwrap_or("main"));
        let pinned = revision.is_some_and(|r| r.len() == 40 && r.bytes().all(|b| b.is_ascii_hexdigit()));
        match &whole {
            Some(folder) if pinned || self.offline => return Ok(folder.clone()),
            _ => {}
        }
        if self.offline {
            let what = "not in the cache, and HF_HUB_OFFLINE forbids to ask the Hub";
            return Err(error(id, what, "unset it, or give a directory or .gguf", false));
        }
        match self.fetch_online((id, revision), parts, &here, progress) {
            Err(FormatError::Hub { permanent: false, .. }) if whole.is_some() => {
                whole.ok_or_else(|| unreachable(id))
            }
            other => other,
        }
    }

    fn fetch_online(
        &self,
        (id, revision): (&str, Option<&str>),
        parts: Parts,
        here: &Repository,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        reach::check(&self.endpoint).map_err(|why| {
            let way = "check the network, set HF_ENDPOINT to a mirror, or give a directory or .gguf on this machine";
            error(id, &format!("cannot reach {}: {why}", self.endpoint), way, false)
        })?;
        let broken =
            |e: &dyn std::fmt::Display| error(id, &one_line(e), "check HF_ENDPOINT and HF_TOKEN", false);
        // hf-hub starts its own threads for its storage protocol; everything else runs on the current thread.
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| broken(&e))?;
        let mut builder = HFClient::builder()
            .endpoint(&self.endpoint)
            .cache_dir(&self.cache)
            .retry_max_attempts(1)
            .user_agent(concat!("finetune/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(|e| broken(&e))?;
        let (owner, name) = hf_hub::split_id(id);
        let session = Session { id, here, repo: client.model(owner, name), patience: self.patience };
        runtime.block_on(session.fetch(revision, parts, progress))
    }
}

/// A download in progress.
struct Session<'a> {
    id: &'a str,
    here: &'a Repository,
    repo: HFRepository<RepoTypeModel>,
    patience: Duration,
}

impl Session<'_> {
    async fn fetch(
        &self,
        revision: Option<&str>,
        parts: Parts<'_>,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        let info = self.timed(self.repo.info().maybe_revision(revision).send()).await?;
        let commit = info.sha.clone().filter(|sha| is_plain(sha));
        let commit = commit.ok_or_else(|| self.odd("it did not name the commit"))?;
        let names: Vec<String> = info.siblings.unwrap_or_default().into_iter().map(|s| s.rfilename).collect();
        refuse(self.id, &names)?;
        let small = cache::SMALL_FILES.iter().filter(|f| names.iter().any(|n| n == *f));
        let small: Vec<String> = small.map(|f| (*f).to_owned()).collect();
        self.files(&commit, &small, progress).await?;
        let folder = self.here.snapshot(&commit);
        let config = directory::check_config(&folder)?;
        let weights = if names.iter().any(|n| n == cache::SINGLE) {
            vec![cache::SINGLE.to_owned()]
        } else {
            self.files(&commit, &[cache::INDEX.to_owned()], progress).await?;
            cache::shards(&folder)?
        };
        if let Parts::Outline(cache) = parts
            && config["quantization_config"].is_null()
            && !weights.iter().all(|name| folder.join(name).is_file())
        {
            return self.outline(&commit, &weights, (cache, progress)).await;
        }
        self.files(&commit, &weights, progress).await?;
        self.here.remember(revision.unwrap_or("main"), &commit)?;
        Ok(folder)
    }

    /// Sends a request with a timeout; converts errors to messages for the user.
    async fn timed<T>(&self, request: impl Future<Output = Result<T, HFError>>) -> Result<T, FormatError> {
        match tokio::time::timeout(self.patience, request).await {
            Ok(answer) => answer.map_err(|e| self.explain(&e)),
            Err(_) => Err(self.stalled()),
        }
    }

    fn stalled(&self) -> FormatError {
        let what = format!("the Hub sent nothing for {} seconds", self.patience.as_secs());
        error(self.id, &what, "run again: the download goes on where it stopped", false)
    }

    fn odd(&self, what: &str) -> FormatError {
        error(self.id, &format!("the Hub's answer is not usable: {what}"), "check HF_ENDPOINT", false)
    }

    fn explain(&self, e: &HFError) -> FormatError {
        let id = self.id;
        let licence = format!("accept the licence at https://huggingface.co/{id}, set HF_TOKEN");
        // The Hub answers anonymous requests for missing repositories with 401 and the reason in a header.
        let no_repository = |code: &Option<String>| code.as_deref() == Some("RepoNotFound");
        match e {
            HFError::AuthRequired { context } if no_repository(&context.error_code) => {
                let way = "check the spelling; if it is private, set HF_TOKEN";
                error(id, "no such model on the Hub", way, true)
            }
            HFError::AuthRequired { .. } => {
                error(id, "the Hub wants to know who you are (401)", &licence, true)
            }
            HFError::Forbidden { .. } => {
                error(id, "your token may not read this model (403)", &licence, true)
            }
            HFError::RepoNotFound { .. } => error(id, "no such model on the Hub", "check the spelling", true),
            HFError::RevisionNotFound { context: Some(context), .. }
                if no_repository(&context.error_code) =>
            {
                error(id, "no such model on the Hub", "check the spelling", true)
            }
            HFError::RevisionNotFound { revision, .. } => {
                let what = format!("it has no revision '{revision}'");
                error(id, &what, "name a branch, a tag or a commit of it", true)
            }
            HFError::Io(cause) => {
                FormatError::io(self.here.root(), std::io::Error::new(cause.kind(), cause.to_string()))
            }
            other => error(id, &one_line(other), "run again: the download goes on where it stopped", false),
        }
    }
}

/// Rejects repositories with unusable weights before the download.
fn refuse(id: &str, names: &[String]) -> Result<(), FormatError> {
    let has = |name: &str| names.iter().any(|n| n == name);
    let no = |what: &str, way: &str| Err(error(id, what, way, true));
    if !has(cache::SINGLE) && !has(cache::INDEX) {
        if has("adapter_config.json") {
            return no("a PEFT adapter, not a model", "give its base as MODEL and this with --adapter");
        }
        if names.iter().any(|n| n.ends_with(".gguf")) {
            return no("a repository of .gguf files", "download one of them and give its path");
        }
        if names.iter().any(|n| n.starts_with("pytorch_model")) {
            let way = "choose a repository with safetensors, or convert it once with transformers";
            return no("its weights are pytorch_model.bin (pickle), which is not read", way);
        }
        return no("it has no model.safetensors", "choose a repository with safetensors");
    }
    if !has("tokenizer.json") {
        let way = "choose a repository with tokenizer.json, or make one with transformers' save_pretrained";
        return no("it has no tokenizer.json", way);
    }
    if !has("config.json") {
        return no("it has no config.json", "choose a repository of a transformers model");
    }
    Ok(())
}

/// Whether a commit or a content hash is safe as a file name.
fn is_plain(name: &str) -> bool {
    (1..=128).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

fn one_line(e: &dyn std::fmt::Display) -> String {
    e.to_string().split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

fn unreachable(id: &str) -> FormatError {
    error(id, "cannot reach the Hub", "check the network", false)
}

fn error(id: &str, what: &str, way_out: &str, permanent: bool) -> FormatError {
    FormatError::Hub { id: id.into(), what: what.into(), way_out: way_out.into(), permanent }
}
