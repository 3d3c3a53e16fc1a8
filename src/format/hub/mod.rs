//! Models by their Hub id, into the cache that Python's `huggingface_hub` uses too (HF_HUB_CACHE, HF_HOME).
//!
//! Rules: only the files that are needed; what is refused is refused before any weights travel; a download that
//! was cut goes on where it stopped; a snapshot that is whole serves when the Hub is out of reach.
//!
//! The requests are `hf-hub`'s. Its own downloads (1.0) begin anew after a cut, because they truncate the
//! partial file, and have no time limits; so its byte stream with a range is used, and everything is timed.

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

/// How far a download is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Name in the repository.
    pub file: String,
    /// Bytes that are here.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Where to fetch from and to.
#[derive(Debug, Clone)]
pub struct Hub {
    /// `https://huggingface.co`, or HF_ENDPOINT.
    pub endpoint: String,
    /// Folder with `models--owner--name` in it.
    pub cache: PathBuf,
    /// HF_TOKEN, else the token that `hf auth login` left.
    pub token: Option<String>,
    /// True: never ask the Hub (HF_HUB_OFFLINE).
    pub offline: bool,
    /// How long nothing may arrive before it is an error.
    pub patience: Duration,
}

/// What of a model is wanted.
#[derive(Debug, Clone, Copy)]
pub enum Parts<'a> {
    /// All that training needs.
    All,
    /// Everything but the numbers of its weights, in this folder; all of it, where it is in the cache anyway, or where
    /// shapes are among its numbers (bitsandbytes).
    Outline(&'a Path),
}

/// Fetches the model `id` (`owner/name`) at `revision` (a branch, a tag or a commit; the main branch without
/// one) and returns its folder, for [`super::open`]. Settings come from the environment.
pub fn fetch(
    id: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<PathBuf, FormatError> {
    Hub::from_environment().fetch(id, revision, progress)
}

/// The same without the numbers of its weights, which are holes in files in `cache`.
pub fn outline(
    id: &str,
    revision: Option<&str>,
    cache: &Path,
    progress: &mut dyn FnMut(&Progress),
) -> Result<PathBuf, FormatError> {
    Hub::from_environment().fetch_parts((id, revision), Parts::Outline(cache), progress)
}

impl Hub {
    /// As Python's `huggingface_hub` reads it.
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

    /// [`fetch`] with these settings.
    pub fn fetch(
        &self,
        id: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        self.fetch_parts((id, revision), Parts::All, progress)
    }

    /// [`fetch`] of some of it.
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
        // hf-hub starts threads of its own for its storage protocol; everything else runs on this one.
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

/// One fetch under way.
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

    /// A request with a time limit; what went wrong in the words of one who wants a model.
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
        // The Hub tells an anonymous visitor 401 for what does not exist, and says so in a header.
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

/// Repositories whose weights cannot be used, before anything is downloaded.
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

/// Commits and content hashes become file names.
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
