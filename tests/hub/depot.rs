//! A Hub that takes uploads, kept in memory: what the requests of an upload do, and the ways in which they fail. Python's
//! own client uploads to it in `pythons_client_pushes_to_the_same_server`.

use crate::{git_object, head, message, sha256};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::io::{BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A file of a branch.
#[derive(Clone, PartialEq)]
pub enum Stored {
    Small(Vec<u8>),
    /// The name of its content in the storage.
    Large(String),
}

/// The commit of a branch, and its files.
#[derive(Clone, Default)]
pub struct Branch {
    pub commit: String,
    pub files: BTreeMap<String, Stored>,
}

#[derive(Clone, Default)]
pub struct Repository {
    pub private: bool,
    pub branches: BTreeMap<String, Branch>,
}

#[derive(Default)]
pub struct Content {
    pub repositories: BTreeMap<String, Repository>,
    pub storage: BTreeMap<String, Vec<u8>>,
    pub parts: BTreeMap<String, Vec<u8>>,
    /// `METHOD path`, in order; of a commit also its first line.
    pub log: Vec<String>,
    /// Paths of the requests with a token.
    pub trusted: Vec<String>,
}

/// The server's behaviour.
#[derive(Clone, Default)]
pub struct Depot {
    pub content: Arc<Mutex<Content>>,
    /// Large files are sent in parts of this size.
    pub chunk: Option<usize>,
    /// Each entry ends one connection to the storage after this many bytes of the content.
    pub cuts: Arc<Mutex<Vec<usize>>>,
    /// The repository's .gitignore has this name.
    pub ignored: &'static str,
    /// What is wrong with the answers.
    pub fault: &'static str,
    /// Addresses of the Hub and of its storage.
    pub addresses: [String; 2],
}

/// An answer to the client.
type Reply = Vec<u8>;

fn ok(answer: &Value) -> Reply {
    message("200 OK", "content-type: application/json\r\n", answer.to_string().as_bytes())
}

fn refused(status: &str, code: &str, why: &str) -> Reply {
    let code = if code.is_empty() { String::new() } else { format!("x-error-code: {code}\r\n") };
    message(status, &code, json!({"error": why}).to_string().as_bytes())
}

impl Depot {
    pub fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap()
    }

    pub fn log(&self) -> Vec<String> {
        self.content().log.clone()
    }

    /// The files of a branch; none if there is no such branch.
    pub fn files(&self, id: &str, branch: &str) -> BTreeMap<String, Vec<u8>> {
        let content = self.content();
        let Some(branch) = content.repositories.get(id).and_then(|r| r.branches.get(branch)) else {
            return BTreeMap::new();
        };
        let bytes = |stored: &Stored| match stored {
            Stored::Small(bytes) => bytes.clone(),
            Stored::Large(oid) => content.storage[oid].clone(),
        };
        branch.files.iter().map(|(name, stored)| (name.clone(), bytes(stored))).collect()
    }

    /// Number of commits of all repositories, without their first ones.
    pub fn commits(&self) -> usize {
        self.log().iter().filter(|line| line.contains("/commit/")).count()
    }

    /// Serves Hub and storage at two addresses, and returns the Hub's.
    pub fn serve(&mut self) -> String {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        self.addresses = [0, 1].map(|i| format!("http://{}", listeners[i].local_addr().unwrap()));
        for listener in listeners {
            let depot = self.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let depot = depot.clone();
                    std::thread::spawn(move || depot.answer(stream));
                }
            });
        }
        self.addresses[0].clone()
    }

    /// One request per connection.
    fn answer(&self, stream: impl Read + Write) {
        let mut reader = BufReader::new(stream);
        let (first, headers) = head(&mut reader);
        let words: Vec<&str> = first.split_whitespace().collect();
        let [method, path, _] = words[..] else { return };
        let size = headers.get("content-length").and_then(|n| n.parse::<usize>().ok());
        if method == "PUT" {
            let Some(size) = size else {
                return drop(reader.get_mut().write_all(&message("411 Length Required", "", b"")));
            };
            if let Some(cut) = self.cuts.lock().unwrap().pop() {
                let mut taken = vec![0; cut.min(size)];
                reader.read_exact(&mut taken).unwrap();
                self.content().log.push(format!("cut {path}"));
                return;
            }
        }
        let mut body = vec![0; size.unwrap_or(0)];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let path = path.split('?').next().unwrap();
        self.content().log.push(format!("{method} {path}"));
        if headers.contains_key("authorization") {
            self.content().trusted.push(path.to_owned());
        }
        let reply = match method {
            "PUT" => self.put(path, &headers, body),
            _ => self.of_hub((method, path), &headers, &body),
        };
        let _ = reader.get_mut().write_all(&reply).and_then(|()| reader.get_mut().flush());
    }

    /// The storage. An address is signed, so that it refuses a second proof of who asks.
    fn put(&self, path: &str, headers: &HashMap<String, String>, body: Vec<u8>) -> Reply {
        if headers.contains_key("authorization") {
            return message("400 Bad Request", "", b"<Error>Only one auth mechanism allowed</Error>");
        }
        match self.fault {
            "storage expired" => return message("403 Forbidden", "", b"<Error/>"),
            "storage ill" => return message("503 Slow Down", "", b"<Error/>"),
            _ => {}
        }
        let tag = format!("\"{}\"", &sha256(&body)[..8]);
        if let Some(oid) = path.strip_prefix("/stored/") {
            if sha256(&body) != oid {
                return message("400 Bad Request", "", b"<Error>BadDigest</Error>");
            }
            self.content().storage.insert(oid.to_owned(), body);
        } else {
            self.content().parts.insert(path.to_owned(), body);
        }
        let header = if self.fault == "no tag" { String::new() } else { format!("etag: {tag}\r\n") };
        message("200 OK", &header, b"")
    }

    fn of_hub(&self, (method, path): (&str, &str), headers: &HashMap<String, String>, body: &[u8]) -> Reply {
        if let Some(oid) = path.strip_prefix("/complete/") {
            let is_first = self.log().iter().filter(|line| line.contains("/complete/")).count() == 1;
            if self.fault == "first completion" && is_first {
                return refused("503 Service Unavailable", "", "the storage is busy");
            }
            return self.complete(oid, body);
        }
        match headers.get("authorization").map(String::as_str) {
            Some("Bearer secret") => {}
            Some("Bearer reader") if method == "GET" || path == "/api/validate-yaml" => {}
            Some("Bearer reader") => return refused("403 Forbidden", "", "this token may only read"),
            _ => {
                let why = "x-error-message: Invalid credentials in Authorization header\r\n";
                return message("401 Unauthorized", why, b"");
            }
        }
        let kind = headers.get("content-type").map_or("", String::as_str);
        if path == "/api/repos/create" {
            return self.create(&serde_json::from_slice(body).unwrap());
        }
        if path == "/api/validate-yaml" {
            let asked: Value = serde_json::from_slice(body).unwrap();
            let is_bad = asked["content"].as_str().unwrap().contains("base_model: ./");
            let errors = json!([{"message": "\"base_model\" with value \"./base\" is not valid."}]);
            return match is_bad {
                true => message(
                    "400 Bad Request",
                    "",
                    json!({"errors": errors, "warnings": []}).to_string().as_bytes(),
                ),
                false => ok(&json!({"errors": [], "warnings": []})),
            };
        }
        assert!(!path.contains("/commit/") || kind == "application/x-ndjson");
        if let Some((id, action)) = path[1..].split_once(".git/info/lfs/objects/") {
            assert!(kind.starts_with("application/") && self.content().repositories.contains_key(id));
            let asked: Value = serde_json::from_slice(body).unwrap();
            return match action {
                "batch" => self.batch(id, &asked, headers),
                _ => self.verify(&asked),
            };
        }
        match path.strip_prefix("/api/models/") {
            Some(rest) => self.of_repository(method, rest, body),
            None => refused("404 Not Found", "", "no such page"),
        }
    }

    fn of_repository(&self, method: &str, path: &str, body: &[u8]) -> Reply {
        let parts: Vec<&str> = path.split('/').collect();
        let id = parts[..2].join("/");
        let Some(found) = self.content().repositories.get(&id).cloned() else {
            return refused("404 Not Found", "RepoNotFound", "Repository not found");
        };
        let branch = parts.get(3).map_or("main".to_owned(), |name| name.replace("%2F", "/"));
        match (method, parts.get(2).copied()) {
            ("POST", Some("branch")) if found.branches.contains_key(&branch) => {
                refused("409 Conflict", "", "Reference already exists")
            }
            ("POST", Some("branch")) => {
                let main = found.branches["main"].clone();
                let mut content = self.content();
                content.repositories.get_mut(&id).unwrap().branches.insert(branch, main);
                ok(&json!({}))
            }
            _ if !found.branches.contains_key(&branch) => {
                refused("404 Not Found", "RevisionNotFound", "Invalid rev id")
            }
            ("GET", _) => {
                let sha = &found.branches[&branch].commit;
                ok(&json!({"id": id, "_id": "1", "private": found.private, "sha": sha, "siblings": []}))
            }
            ("POST", Some("preupload")) => {
                self.preupload(&found.branches[&branch], &serde_json::from_slice(body).unwrap())
            }
            ("POST", Some("commit")) => self.commit(&id, &branch, body),
            _ => refused("404 Not Found", "", "no such page"),
        }
    }

    fn create(&self, asked: &Value) -> Reply {
        assert!(asked["type"].is_null() || asked["type"] == "model");
        let (owner, name) = (asked["organization"].as_str().unwrap(), asked["name"].as_str().unwrap());
        let id = format!("{owner}/{name}");
        let url = format!("{}/{id}", self.addresses[0]);
        if self.content().repositories.contains_key(&id) {
            let answer = json!({"error": "You already created this model repo", "url": url});
            return message("409 Conflict", "", answer.to_string().as_bytes());
        }
        if owner != "owner" {
            let why = format!("You don't have the rights to create a model under the namespace \"{owner}\"");
            return refused("403 Forbidden", "", &why);
        }
        let private = asked["visibility"] == "private";
        let first = Branch { commit: "0".repeat(40), files: BTreeMap::new() };
        let made = Repository { private, branches: BTreeMap::from([("main".to_owned(), first)]) };
        self.content().repositories.insert(id.clone(), made);
        ok(&json!({"url": url, "name": id, "id": "1"}))
    }

    fn preupload(&self, branch: &Branch, asked: &Value) -> Reply {
        let about = |file: &Value| {
            let (name, size) = (file["path"].as_str().unwrap(), file["size"].as_u64().unwrap());
            let sample = STANDARD.decode(file["sample"].as_str().unwrap()).unwrap();
            assert_eq!(sample.len() as u64, size.min(512), "{name}");
            let is_large = name.ends_with(".safetensors") || name.ends_with(".gguf");
            let mode = if is_large { "lfs" } else { "regular" };
            let oid = branch.files.get(name).map(|stored| match stored {
                Stored::Small(bytes) => git_object(bytes),
                Stored::Large(oid) => oid.clone(),
            });
            let mode = if self.fault == "unknown mode" { "xet" } else { mode };
            json!({"path": name, "uploadMode": mode, "shouldIgnore": name == self.ignored, "oid": oid})
        };
        let mut files: Vec<Value> = asked["files"].as_array().unwrap().iter().map(about).collect();
        if self.fault == "file forgotten" {
            files.pop();
        }
        ok(&json!({"files": files}))
    }

    fn batch(&self, id: &str, asked: &Value, headers: &HashMap<String, String>) -> Reply {
        assert_eq!(headers["accept"], "application/vnd.git-lfs+json");
        assert_eq!((&asked["operation"], &asked["hash_algo"]), (&json!("upload"), &json!("sha256")));
        let [hub, storage] = &self.addresses;
        let object = |object: &Value| {
            let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
            let mut answer = json!({"oid": oid, "size": size});
            if self.fault == "quota" {
                answer["error"] = json!({"code": 413, "message": "the storage of owner is full"});
            } else if !self.content().storage.contains_key(oid) {
                let upload = match self.chunk {
                    None => json!({"href": format!("{storage}/stored/{oid}?X-Amz-Signature=a")}),
                    Some(chunk) => {
                        let mut header = json!({"chunk_size": chunk.to_string()});
                        let missing = usize::from(self.fault == "part forgotten");
                        for n in 1..=size.div_ceil(chunk) - missing {
                            header[format!("{n:05}")] =
                                json!(format!("{storage}/part/{oid}/{n}?partNumber={n}"));
                        }
                        json!({"href": format!("{hub}/complete/{oid}?uploadId=1"), "header": header})
                    }
                };
                // As behind a mirror: the Hub's own address, for which the client puts HF_ENDPOINT.
                let verify = format!("https://huggingface.co/{id}.git/info/lfs/objects/verify");
                answer["actions"] = json!({"upload": upload, "verify": {"href": verify}});
            }
            answer
        };
        let mut objects: Vec<Value> = asked["objects"].as_array().unwrap().iter().map(object).collect();
        if self.fault == "object forgotten" {
            objects.clear();
        }
        ok(&json!({"transfer": "basic", "objects": objects}))
    }

    /// Puts the parts of a content together.
    fn complete(&self, oid: &str, body: &[u8]) -> Reply {
        let asked: Value = serde_json::from_slice(body).unwrap();
        let mut content = self.content();
        let mut whole = Vec::new();
        for (n, part) in (1..).zip(asked["parts"].as_array().unwrap()) {
            let bytes = content.parts.remove(&format!("/part/{oid}/{n}")).unwrap();
            let tag = format!("\"{}\"", &sha256(&bytes)[..8]);
            assert_eq!(*part, json!({"partNumber": n, "etag": tag}));
            whole.extend(bytes);
        }
        if asked["oid"] != *oid || sha256(&whole) != oid {
            return refused("400 Bad Request", "", "the parts are not the file");
        }
        content.storage.insert(oid.to_owned(), whole);
        ok(&json!({"success": true}))
    }

    fn verify(&self, asked: &Value) -> Reply {
        let content = self.content();
        match content.storage.get(asked["oid"].as_str().unwrap()) {
            Some(bytes) if asked["size"] == bytes.len() => ok(&json!({"message": "ok"})),
            _ => refused("404 Not Found", "", "Object not found"),
        }
    }

    fn commit(&self, id: &str, branch: &str, body: &[u8]) -> Reply {
        match self.fault {
            "busy" => {
                return refused("412 Precondition Failed", "", "A commit has happened since. Please refresh");
            }
            "odd commit" => return ok(&json!({"commitOid": "../.."})),
            "lost commit" => return Vec::new(),
            "slow commit" => std::thread::sleep(Duration::from_secs(4)),
            _ => {}
        }
        let lines: Vec<Value> = body
            .split(|b| *b == b'\n')
            .filter(|l| !l.is_empty())
            .map(|l| serde_json::from_slice(l).unwrap())
            .collect();
        let mut content = self.content();
        let mut files = Vec::new();
        for line in &lines[1..] {
            let value = &line["value"];
            let stored = match line["key"].as_str() {
                Some("file") => {
                    assert_eq!(value["encoding"], "base64");
                    Stored::Small(STANDARD.decode(value["content"].as_str().unwrap()).unwrap())
                }
                Some("lfsFile") => {
                    let oid = value["oid"].as_str().unwrap();
                    let there = content.storage.get(oid).is_some_and(|bytes| value["size"] == bytes.len());
                    if !there || value["algo"] != "sha256" {
                        return refused("400 Bad Request", "", "a large file is not in the storage");
                    }
                    Stored::Large(oid.to_owned())
                }
                other => panic!("{other:?}"),
            };
            files.push((value["path"].as_str().unwrap().to_owned(), stored));
        }
        let head = &lines[0]["value"];
        content.log.push(format!(
            "{}: {}",
            lines[0]["key"].as_str().unwrap(),
            head["summary"].as_str().unwrap()
        ));
        let commit = git_object(body);
        let at = content.repositories.get_mut(id).unwrap().branches.get_mut(branch).unwrap();
        at.commit.clone_from(&commit);
        at.files.extend(files);
        if self.fault == "late commit" {
            return message("504 Gateway Timeout", "", b"<html>");
        }
        let url = format!("{}/{id}/commit/{commit}", self.addresses[0]);
        ok(&json!({"success": true, "commitOid": commit, "commitUrl": url, "hookOutput": ""}))
    }
}
