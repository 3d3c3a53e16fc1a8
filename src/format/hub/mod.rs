//! Downloads models and data sets by Hub id into the cache of Python's `huggingface_hub` (HF_HUB_CACHE, HF_HOME), and
//! uploads files (`upload.rs`).
//!
//! Rules: only necessary files are downloaded; unsupported models are rejected before any weights are downloaded; an
//! interrupted download continues where it stopped; a complete snapshot is used if the Hub is unreachable.
//!
//! Three requests are used for downloads: the files of a revision, their sizes and hashes, and the content of a file from
//! a byte on. Each has a time limit without received data.

mod cache;
mod client;
mod data_set;
mod download;
mod environment;
mod hash;
mod outline;
mod parcel;
mod upload;

pub use data_set::DataSet;
pub use parcel::Parcel;
pub use upload::{Push, Pushed};

use super::directory;
use super::error::FormatError;
use cache::Repository;
use client::{Client, Failure};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The Hub's code of a repository that does not exist, or that is private.
const NO_REPOSITORY: &str = "RepoNotFound";

/// The kind of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Data,
}

impl Kind {
    fn noun(self) -> &'static str {
        match self {
            Kind::Model => "model",
            Kind::Data => "data set",
        }
    }

    /// The word of the Hub's interface and of folders in the cache.
    fn plural(self) -> &'static str {
        match self {
            Kind::Model => "models",
            Kind::Data => "datasets",
        }
    }

    /// The beginning of the path of a repository's page.
    fn page(self) -> &'static str {
        match self {
            Kind::Model => "",
            Kind::Data => "datasets/",
        }
    }

    /// What may be given in place of an id.
    fn here(self) -> &'static str {
        match self {
            Kind::Model => "a directory or .gguf",
            Kind::Data => "a file of rows",
        }
    }
}

/// Progress of a download or of an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Name of the file in the repository; of an outline, followed by ", its header".
    pub file: String,
    /// Bytes present, or sent.
    pub done: u64,
    /// Size of the file in bytes.
    pub total: u64,
}

/// Source and destination of downloads.
#[derive(Debug, Clone)]
pub struct Hub {
    /// The URL of the Hub: `https://huggingface.co`, or HF_ENDPOINT.
    pub endpoint: String,
    /// The folder that contains `models--owner--name` and `datasets--owner--name`.
    pub cache: PathBuf,
    /// HF_TOKEN, else the token of `hf auth login`. It is sent to the Hub only.
    pub token: Option<String>,
    /// True: send no requests to the Hub (HF_HUB_OFFLINE).
    pub offline: bool,
    /// Time limit without any received data; four times as long for the answer to sent bytes.
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
        let var: environment::Variables = &environment::variable;
        Hub {
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            cache: environment::cache(var),
            token: environment::token(var),
            offline: environment::is_on("HF_HUB_OFFLINE", var),
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
        let whole = Repository::new(&self.cache, Kind::Model, id).whole_snapshot(revision.unwrap_or("main"));
        match &whole {
            Some(folder) if is_pinned(revision) || self.offline => return Ok(folder.clone()),
            _ => {}
        }
        match self.session(Kind::Model, id)?.fetch(revision, parts, progress) {
            Err(FormatError::Hub { permanent: false, .. }) if whole.is_some() => {
                whole.ok_or_else(|| unreachable(id))
            }
            other => other,
        }
    }

    /// Access to a repository on the Hub.
    fn session(&self, kind: Kind, id: &str) -> Result<Session, FormatError> {
        if self.offline {
            let what = "not in the cache, and HF_HUB_OFFLINE forbids to ask the Hub";
            return Err(error(id, what, &format!("unset it, or give {}", kind.here()), false));
        }
        let here = Repository::new(&self.cache, kind, id);
        Ok(Session { id: id.to_owned(), kind, here, client: self.client(id)?, patience: self.patience })
    }

    /// The connection for requests about the repository `id`.
    fn client(&self, id: &str) -> Result<Client, FormatError> {
        if self.token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            let what = "the token of HF_TOKEN or of `hf auth login` holds a space, a line end or another odd character";
            return Err(error(id, what, "give the token alone", true));
        }
        Ok(Client::new(&self.endpoint, self.token.clone(), self.patience))
    }
}

/// Whether a revision is a commit, which never changes.
fn is_pinned(revision: Option<&str>) -> bool {
    revision.is_some_and(|r| r.len() == 40 && r.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Access to a repository on the Hub, and to its folder in the cache.
struct Session {
    id: String,
    kind: Kind,
    here: Repository,
    client: Client,
    patience: Duration,
}

impl Session {
    /// The commit of a revision, and the names of its files.
    fn listing(&self, revision: Option<&str>) -> Result<(String, Vec<String>), FormatError> {
        let (id, noun) = (&self.id, self.kind.noun());
        let at = revision.map(|name| format!("/revision/{}", encoded(name))).unwrap_or_default();
        let info = self.client.get_json(&format!("/api/{}/{id}{at}", self.kind.plural()));
        let info = info.map_err(|failure| match (failure, revision) {
            (Failure::Refused(404, code, _), Some(name)) if code.as_deref() != Some(NO_REPOSITORY) => {
                let what = format!("it has no revision '{name}'");
                error(id, &what, "name a branch, a tag or a commit of it", true)
            }
            (Failure::Refused(404, ..), _) => {
                error(id, &format!("no such {noun} on the Hub"), "check the spelling", true)
            }
            (failure, _) => self.explain(failure),
        })?;
        let commit = info["sha"].as_str().filter(|sha| is_plain(sha)).map(str::to_owned);
        let commit = commit.ok_or_else(|| odd(&self.id, "it did not name the commit"))?;
        let files = info["siblings"].as_array().into_iter().flatten();
        let names = files.filter_map(|file| file["rfilename"].as_str().map(str::to_owned));
        Ok((commit, names.collect()))
    }

    fn fetch(
        &self,
        revision: Option<&str>,
        parts: Parts<'_>,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<PathBuf, FormatError> {
        let (commit, names) = self.listing(revision)?;
        refuse(&self.id, &names)?;
        let small = cache::SMALL_FILES.iter().filter(|f| names.iter().any(|n| n == *f));
        let small: Vec<String> = small.map(|f| (*f).to_owned()).collect();
        self.files(&commit, &small, progress)?;
        let folder = self.here.snapshot(&commit);
        let config = directory::check_config(&folder)?;
        let weights = if names.iter().any(|n| n == cache::SINGLE) {
            vec![cache::SINGLE.to_owned()]
        } else {
            self.files(&commit, &[cache::INDEX.to_owned()], progress)?;
            cache::shards(&folder)?
        };
        if let Parts::Outline(cache) = parts
            && config["quantization_config"].is_null()
            && !weights.iter().all(|name| folder.join(name).is_file())
        {
            return self.outline(&commit, &weights, (cache, progress));
        }
        self.files(&commit, &weights, progress)?;
        self.here.remember(revision.unwrap_or("main"), &commit)?;
        Ok(folder)
    }

    /// The path of the content of a file on the Hub.
    fn content_path(&self, commit: &str, name: &str) -> String {
        let name: Vec<String> = name.split('/').map(encoded).collect();
        format!("/{}{}/resolve/{commit}/{}", self.kind.page(), self.id, name.join("/"))
    }

    /// The message to the user.
    fn explain(&self, failure: Failure) -> FormatError {
        let (id, noun) = (&self.id, self.kind.noun());
        let again = "run again: the download goes on where it stopped";
        let page = self.kind.page();
        let licence = format!("accept the licence at https://huggingface.co/{page}{id}, set HF_TOKEN");
        match failure {
            Failure::Unreachable(host, why) => {
                let here = self.kind.here();
                let way =
                    format!("check the network, set HF_ENDPOINT to a mirror, or give {here} on this machine");
                error(id, &format!("cannot reach {host}: {}", one_line(&why)), &way, false)
            }
            Failure::Stalled => {
                let what = format!("the Hub sent nothing for {} seconds", self.patience.as_secs());
                error(id, &what, again, false)
            }
            // The Hub answers anonymous requests for missing repositories with 401 and the reason in a header.
            Failure::Refused(401, Some(code), _) if code == NO_REPOSITORY => {
                let way = "check the spelling; if it is private, set HF_TOKEN";
                error(id, &format!("no such {noun} on the Hub"), way, true)
            }
            Failure::Refused(401, ..) => error(id, "the Hub wants to know who you are (401)", &licence, true),
            Failure::Refused(403, ..) => {
                error(id, &format!("your token may not read this {noun} (403)"), &licence, true)
            }
            Failure::Refused(_, _, what) | Failure::Elsewhere(_, what) | Failure::Broken(what) => {
                error(id, &one_line(&what), again, false)
            }
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

/// `name` as one segment of an URL.
fn encoded(name: &str) -> String {
    const KEPT: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(name, &KEPT).to_string()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}

fn unreachable(id: &str) -> FormatError {
    error(id, "cannot reach the Hub", "check the network", false)
}

/// An answer that does not follow the Hub's protocol.
fn odd(id: &str, what: &str) -> FormatError {
    error(id, &format!("the Hub's answer is not usable: {what}"), "check HF_ENDPOINT", false)
}

fn error(id: &str, what: &str, way_out: &str, permanent: bool) -> FormatError {
    FormatError::Hub { id: id.into(), what: what.into(), way_out: way_out.into(), permanent }
}
