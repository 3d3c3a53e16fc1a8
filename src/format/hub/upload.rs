//! Uploads files as one commit, by the requests of Python's `huggingface_hub` without Xet: the repository and the branch
//! are created if they are missing; the Hub says which files are large; contents of large files that it does not have go
//! to its storage, whole or in parts; then one commit names all files. Nothing is visible before the commit, so that an
//! upload that fails changes no file of the repository.

use super::client::{Client, Failure, JSON, parsed};
use super::download::{FRUITLESS_ATTEMPTS, MOST_IN_GIT};
use super::{Hub, Progress, encoded, error, hash, is_plain, odd, one_line};
use crate::format::directory;
use crate::format::error::FormatError;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::header::{ACCEPT, CONTENT_TYPE, HeaderName};

/// The Hub's own address, which its answers name even behind another endpoint.
const HUB: &str = "https://huggingface.co";
/// The branch of every repository.
const MAIN: &str = "main";
/// Number of bytes of a file by which the Hub decides whether it is text.
const SAMPLE: u64 = 512;
/// Name of the file whose head the Hub checks.
const CARD: &str = "README.md";
const LINES: &[(HeaderName, &str)] = &[(CONTENT_TYPE, "application/x-ndjson")];
const LFS: &[(HeaderName, &str)] =
    &[(CONTENT_TYPE, "application/vnd.git-lfs+json"), (ACCEPT, "application/vnd.git-lfs+json")];

/// What to upload, and where to.
#[derive(Debug, Clone)]
pub struct Push<'a> {
    /// The files; each gets its own name in the repository.
    pub files: &'a [PathBuf],
    /// The branch (default: main); a missing one is created.
    pub branch: Option<&'a str>,
    /// The first line of the commit.
    pub message: &'a str,
    /// Whether a new repository is private. An existing public one is refused.
    pub private: bool,
}

/// What an upload did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The commit; `None` if the branch had all files already.
    pub commit: Option<String>,
    /// Names of the files that the commit adds or changes.
    pub files: Vec<String>,
    /// Names of the files that the repository's .gitignore excludes.
    pub ignored: Vec<String>,
    /// Names of the committed files whose contents the storage had already.
    pub stored: Vec<String>,
}

/// A file of this machine.
struct Local {
    name: String,
    path: PathBuf,
    size: u64,
    beginning: Vec<u8>,
}

/// How the Hub wants a file.
#[derive(PartialEq, Eq)]
enum Mode {
    /// Its content is in the storage, under its SHA-256, which is here.
    Large(String),
    /// Its content is in the commit.
    Small,
}

impl Hub {
    /// Uploads files into the model repository `id` (`owner/name`), which is created if it does not exist.
    pub fn push(
        &self,
        id: &str,
        what: &Push,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Pushed, FormatError> {
        if !directory::is_id(id) {
            return Err(error(
                id,
                "not a Hub id",
                "write it as owner/name, with your own name as owner",
                true,
            ));
        }
        if self.offline {
            return Err(error(id, "HF_HUB_OFFLINE forbids to send anything to the Hub", "unset it", true));
        }
        if self.token.is_none() {
            let way = format!(
                "make one with the right to write at {HUB}/settings/tokens, and set HF_TOKEN or run `hf auth login`"
            );
            return Err(error(id, "an upload needs a token of the Hub, and there is none", &way, true));
        }
        let upload = Upload { id, branch: what.branch.unwrap_or(MAIN), client: self.client(id)? };
        upload.push(what, progress)
    }
}

/// The upload into one branch of a repository.
struct Upload<'a> {
    id: &'a str,
    branch: &'a str,
    client: Client,
}

impl Upload<'_> {
    fn push(&self, what: &Push, progress: &mut dyn FnMut(&Progress)) -> Result<Pushed, FormatError> {
        let files = what.files.iter().map(|path| local(path)).collect::<Result<Vec<_>, _>>()?;
        self.check_card(&files)?;
        self.make_repository(what)?;
        self.make_branch()?;
        let (mut wanted, mut ignored) = (Vec::new(), Vec::new());
        let answers = self.asked(&files)?;
        for (file, answer) in files.into_iter().zip(answers) {
            if answer["shouldIgnore"] == true {
                ignored.push(file.name);
            } else if let Some(mode) = self.mode(&file, &answer)? {
                wanted.push((file, mode));
            }
        }
        if wanted.is_empty() {
            return Ok(Pushed { commit: None, files: Vec::new(), ignored, stored: Vec::new() });
        }
        let stored = self.store(&wanted, progress)?;
        let commit = self.commit(&wanted, what.message)?;
        Ok(Pushed {
            commit: Some(commit),
            files: wanted.into_iter().map(|(file, _)| file.name).collect(),
            ignored,
            stored,
        })
    }

    /// Lets the Hub check the head of the card, which it would refuse only in the commit.
    fn check_card(&self, files: &[Local]) -> Result<(), FormatError> {
        let Some(card) = files.iter().find(|file| file.name == CARD && file.size <= MOST_IN_GIT) else {
            return Ok(());
        };
        let text = std::fs::read(&card.path).map_err(|e| FormatError::io(&card.path, e))?;
        let asked = json!({"content": String::from_utf8_lossy(&text), "repoType": "model"});
        match self.client.post("/api/validate-yaml", JSON, asked.to_string().as_bytes()) {
            Ok(_) => Ok(()),
            Err(Failure::Refused(400, _, what)) => {
                let way = "correct the lines between --- and ---; nothing was committed";
                Err(error(self.id, &format!("{CARD}: {}", one_line(&what)), way, true))
            }
            Err(failure) => Err(self.explain(failure)),
        }
    }

    /// Creates the repository unless it exists.
    fn make_repository(&self, what: &Push) -> Result<(), FormatError> {
        let path = format!("/api/models/{}", self.id);
        let found = match self.client.get_json(&path) {
            Ok(info) => info,
            // Which of them says that there is none depends on the token.
            Err(Failure::Refused(401 | 403 | 404, ..)) => {
                let (owner, name) = self.id.split_once('/').unwrap_or_default();
                let mut asked = json!({"type": "model", "name": name, "organization": owner});
                if what.private {
                    asked["visibility"] = json!("private");
                }
                match self.client.post("/api/repos/create", JSON, asked.to_string().as_bytes()) {
                    Ok(_) => return Ok(()),
                    // Another process has created it.
                    Err(Failure::Refused(409, ..)) => {
                        self.client.get_json(&path).map_err(|failure| self.explain(failure))?
                    }
                    Err(failure) => return Err(self.explain(failure)),
                }
            }
            Err(failure) => return Err(self.explain(failure)),
        };
        if what.private && found["private"] == false {
            let way = "choose another name, or make it private on its page first";
            return Err(error(self.id, "--private: the repository exists and is public", way, true));
        }
        Ok(())
    }

    /// Creates the branch unless it exists.
    fn make_branch(&self) -> Result<(), FormatError> {
        if self.branch == MAIN {
            return Ok(());
        }
        let (id, branch) = (self.id, encoded(self.branch));
        match self.client.get_json(&format!("/api/models/{id}/revision/{branch}")) {
            Ok(_) => return Ok(()),
            Err(Failure::Refused(404, ..)) => {}
            Err(failure) => return Err(self.explain(failure)),
        }
        match self.client.post(&format!("/api/models/{id}/branch/{branch}"), JSON, b"{}") {
            Ok(_) | Err(Failure::Refused(409, ..)) => Ok(()),
            Err(failure) => Err(self.explain(failure)),
        }
    }

    /// The Hub's answer for each file: `uploadMode`, `shouldIgnore`, and the `oid` of the content that it has.
    fn asked(&self, files: &[Local]) -> Result<Vec<Value>, FormatError> {
        let about = |file: &Local| json!({"path": file.name, "sample": STANDARD.encode(&file.beginning), "size": file.size});
        let asked = json!({"files": files.iter().map(about).collect::<Vec<_>>()});
        let path = format!("/api/models/{}/preupload/{}", self.id, encoded(self.branch));
        let answer = self.again(|| self.client.post_json(&path, JSON, &asked))?;
        let all = answer["files"].as_array().map(Vec::as_slice).unwrap_or_default();
        let of = |file: &Local| {
            let found = all.iter().find(|answer| answer["path"] == *file.name).cloned();
            found.ok_or_else(|| odd(self.id, &format!("it does not say how to send '{}'", file.name)))
        };
        files.iter().map(of).collect()
    }

    /// How the Hub wants a file; `None` if the branch has the same content.
    fn mode(&self, file: &Local, answer: &Value) -> Result<Option<Mode>, FormatError> {
        let fail = |e| FormatError::io(&file.path, e);
        let (mode, hash) = match answer["uploadMode"].as_str() {
            // The storage takes no empty file.
            Some("lfs") if file.size > 0 => {
                let hash = hash::sha256(&file.path).map_err(fail)?;
                (Mode::Large(hash.clone()), hash)
            }
            Some("lfs" | "regular") if file.size <= MOST_IN_GIT => {
                (Mode::Small, hash::git_object(&file.path, file.size).map_err(fail)?)
            }
            _ => {
                let what = format!("it wants '{}' ({} bytes) in an unknown way", file.name, file.size);
                return Err(odd(self.id, &what));
            }
        };
        Ok(Some(mode).filter(|_| answer["oid"] != *hash))
    }

    /// Sends the contents of large files that the storage does not have, and returns the names of the others.
    fn store(
        &self,
        files: &[(Local, Mode)],
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Vec<String>, FormatError> {
        let (mut large, mut stored) = (BTreeMap::new(), Vec::new());
        for (file, mode) in files {
            if let Mode::Large(hash) = mode {
                large.insert(hash.as_str(), file);
            }
        }
        if large.is_empty() {
            return Ok(stored);
        }
        let objects: Vec<_> =
            large.iter().map(|(hash, file)| json!({"oid": hash, "size": file.size})).collect();
        let asked = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": objects,
            "hash_algo": "sha256",
            "ref": {"name": self.branch},
        });
        let path = format!("/{}.git/info/lfs/objects/batch", self.id);
        let answer = self.again(|| self.client.post_json(&path, LFS, &asked))?;
        for object in answer["objects"].as_array().into_iter().flatten() {
            let Some(file) = object["oid"].as_str().and_then(|hash| large.remove(hash)) else { continue };
            if let Some(error) = object.get("error") {
                let why = error["message"].as_str().unwrap_or("it gives no reason");
                return Err(
                    self.explain(Failure::Broken(format!("the storage refuses {}: {why}", file.name)))
                );
            }
            match object.get("actions") {
                None | Some(Value::Null) => stored.push(file.name.clone()),
                Some(actions) => self.send(file, (&object["oid"], actions), progress)?,
            }
        }
        match large.values().next() {
            Some(file) => Err(odd(self.id, &format!("it does not say where to send '{}'", file.name))),
            None => Ok(stored),
        }
    }

    /// Sends the content of a large file, whole or in parts, and lets the Hub check it.
    fn send(
        &self,
        file: &Local,
        (oid, actions): (&Value, &Value),
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), FormatError> {
        let content = File::open(&file.path).map_err(|e| FormatError::io(&file.path, e))?;
        let (target, header) = (self.target(&actions["upload"], file)?, &actions["upload"]["header"]);
        let mut put = |url: &str, range: Range<u64>| self.put(url, (file, &content, range), progress);
        if header["chunk_size"].is_null() {
            put(&target, 0..file.size)?;
        } else {
            let mut parts = Vec::new();
            for (number, (url, range)) in (1..).zip(self.parts(header, file)?) {
                let tag = put(url, range)?;
                let tag =
                    tag.ok_or_else(|| odd(self.id, &format!("a part of '{}' has no ETag", file.name)))?;
                parts.push(json!({"partNumber": number, "etag": tag}));
            }
            self.ask(&target, LFS, &json!({"oid": oid, "parts": parts}))?;
        }
        if !actions["verify"].is_null() {
            let target = self.target(&actions["verify"], file)?;
            self.ask(&target, JSON, &json!({"oid": oid, "size": file.size}))?;
        }
        Ok(())
    }

    /// The address of an action.
    fn target(&self, action: &Value, file: &Local) -> Result<String, FormatError> {
        let href = action["href"].as_str().filter(|href| href.starts_with("http"));
        let href =
            href.ok_or_else(|| odd(self.id, &format!("it does not say where to send '{}'", file.name)))?;
        Ok(match href.strip_prefix(HUB) {
            Some(rest) if rest.starts_with('/') => format!("{}{rest}", self.client.hub()),
            _ => href.to_owned(),
        })
    }

    /// Address and bytes of each part, in order.
    fn parts<'a>(&self, header: &'a Value, file: &Local) -> Result<Vec<(&'a str, Range<u64>)>, FormatError> {
        let odd =
            || odd(self.id, &format!("it divides '{}' into parts that are not those of the file", file.name));
        let chunk = &header["chunk_size"];
        let chunk = chunk.as_u64().or_else(|| chunk.as_str()?.parse().ok()).filter(|chunk| *chunk > 0);
        let chunk = chunk.ok_or_else(odd)?;
        let numbered = |(key, url): (&String, &'a Value)| Some((key.parse::<u64>().ok()?, url.as_str()?));
        let urls: BTreeMap<u64, &str> =
            header.as_object().into_iter().flatten().filter_map(numbered).collect();
        if !urls.keys().copied().eq(1..=file.size.div_ceil(chunk)) {
            return Err(odd());
        }
        let range = |n: u64| (n - 1) * chunk..(n * chunk).min(file.size);
        Ok(urls.into_iter().map(|(n, url)| (url, range(n))).collect())
    }

    /// Stores a range of a file at an address.
    fn put(
        &self,
        url: &str,
        (file, content, range): (&Local, &File, Range<u64>),
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Option<String>, FormatError> {
        let mut sent = |n: u64| {
            progress(&Progress { file: file.name.clone(), done: range.start + n, total: file.size });
        };
        self.again(|| self.client.put(url, (content, range.clone()), &mut sent))
    }

    /// The answer to a request that may be repeated: it is sent again if that may help.
    fn again<T>(&self, mut request: impl FnMut() -> Result<T, Failure>) -> Result<T, FormatError> {
        let mut attempt = 1;
        loop {
            match request() {
                Ok(answer) => return Ok(answer),
                Err(failure) if failure.passes() && attempt < FRUITLESS_ATTEMPTS => {
                    std::thread::sleep(Duration::from_millis(500 << attempt));
                    attempt += 1;
                }
                Err(failure) => return Err(self.explain(failure)),
            }
        }
    }

    /// Commits the files and returns the commit.
    fn commit(&self, files: &[(Local, Mode)], message: &str) -> Result<String, FormatError> {
        let mut body = json!({"key": "header", "value": {"summary": message, "description": ""}}).to_string();
        for (file, mode) in files {
            body.push('\n');
            let line = match mode {
                Mode::Large(hash) => json!({
                    "key": "lfsFile",
                    "value": {"path": file.name, "algo": "sha256", "oid": hash, "size": file.size},
                }),
                Mode::Small => {
                    let content = std::fs::read(&file.path).map_err(|e| FormatError::io(&file.path, e))?;
                    json!({
                        "key": "file",
                        "value": {"content": STANDARD.encode(content), "path": file.name, "encoding": "base64"},
                    })
                }
            };
            body += &line.to_string();
        }
        body.push('\n');
        let path = format!("/api/models/{}/commit/{}", self.id, encoded(self.branch));
        // Sent once: an answer that is lost does not tell whether the commit was made.
        let answer = self.client.post(&path, LINES, body.as_bytes()).and_then(|answer| parsed(&answer));
        let answer = answer.map_err(|failure| match failure {
            Failure::Refused(status, ..) if status < 500 => self.explain(failure),
            // A gateway answers 502 or 504 also when the Hub has made the commit.
            _ => {
                let what = format!("the Hub did not confirm the commit: {}", said(&failure));
                error(self.id, &what, "run again: if it was made, nothing is committed twice", false)
            }
        })?;
        let commit = answer["commitOid"].as_str().filter(|commit| is_plain(commit)).map(str::to_owned);
        commit.ok_or_else(|| odd(self.id, "it does not name the commit"))
    }

    fn ask(&self, url: &str, headers: &[(HeaderName, &str)], body: &Value) -> Result<Vec<u8>, FormatError> {
        self.again(|| self.client.post(url, headers, body.to_string().as_bytes()))
    }

    /// The message to the user about a failure before the commit.
    fn explain(&self, failure: Failure) -> FormatError {
        let id = self.id;
        let what = said(&failure);
        let again = "nothing was committed; run again: what the Hub has stored is not sent twice";
        let token = format!("get a token with the right to write at {HUB}/settings/tokens, and set HF_TOKEN");
        let (way, permanent) = match failure {
            Failure::Refused(401, ..) => (token, true),
            Failure::Refused(403, ..) => (format!("name a repository of your own, or {token}"), true),
            Failure::Refused(404, ..) => ("check owner and name, and the rights of the token".into(), true),
            Failure::Refused(400 | 402 | 413 | 422, ..) => ("nothing was committed".into(), true),
            _ => (again.into(), false),
        };
        error(id, &what, &way, permanent)
    }
}

/// What happened, in one line.
fn said(failure: &Failure) -> String {
    one_line(&match failure {
        Failure::Unreachable(host, why) => format!("the connection to {host} failed: {why}"),
        Failure::Stalled => "no answer in time".into(),
        Failure::Refused(_, _, what) | Failure::Elsewhere(_, what) | Failure::Broken(what) => what.clone(),
    })
}

/// A file of this machine, with its beginning.
fn local(path: &Path) -> Result<Local, FormatError> {
    let fail = |e| FormatError::io(path, e);
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| FormatError::malformed(path, "its name is not text"))?.to_owned();
    let file = File::open(path).map_err(fail)?;
    let size = file.metadata().map_err(fail)?.len();
    let mut beginning = Vec::new();
    file.take(SAMPLE).read_to_end(&mut beginning).map_err(fail)?;
    Ok(Local { name, path: path.to_owned(), size, beginning })
}
