//! Models and data sets by id, from a test server: the requests, the contents of the cache, and the messages to the user.

#[path = "hub/data_sets.rs"]
mod data_sets;
#[path = "hub/push.rs"]
mod push;

use finetune::format::hub::{Hub, Parts};
use ring::digest;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OLD_COMMIT: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// The server's files and behaviour.
#[derive(Clone, Default)]
struct Site {
    files: HashMap<&'static str, Vec<u8>>,
    /// Each entry ends one response for the weights after this many bytes.
    cuts: Arc<Mutex<Vec<usize>>>,
    /// Resolving is refused without `Bearer secret`.
    gated: bool,
    /// Range requests are ignored.
    no_ranges: bool,
    /// After the response for the weights, the connection stays open.
    stalls: bool,
    /// Small files are on another path of this server, and weights on the server of this address, as at the Hub.
    storage: Option<String>,
    /// The listing has another hash of this file.
    wrong_hash: &'static str,
    /// The repository is one of a data set.
    data: bool,
    /// Every request is refused, as a storage refuses a signature that has expired.
    forbids: bool,
    /// `METHOD path [range]`, in order.
    log: Arc<Mutex<Vec<String>>>,
    /// Paths of the requests with a token.
    trusted: Arc<Mutex<Vec<String>>>,
}

impl Site {
    fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let site = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let site = site.clone();
                std::thread::spawn(move || site.answer(stream.unwrap()));
            }
        });
        address
    }

    /// One request per connection.
    fn answer(&self, stream: impl Read + Write) {
        let mut reader = BufReader::new(stream);
        let (first, headers) = head(&mut reader);
        let words: Vec<&str> = first.split_whitespace().collect();
        let [method, path, _] = words[..] else { return };
        let length = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let range = headers.get("range").cloned();
        self.log.lock().unwrap().push(format!("{method} {path} {}", range.clone().unwrap_or_default()));
        if headers.contains_key("authorization") {
            self.trusted.lock().unwrap().push(path.to_owned());
        }
        let trusted = headers.get("authorization").is_some_and(|a| a == "Bearer secret");
        let reply = self.reply(path, &body, (range, trusted));
        let stream = reader.get_mut();
        let _ = stream.write_all(&reply).and_then(|()| stream.flush());
        if self.stalls && path.contains("model.safetensors") {
            std::thread::sleep(Duration::from_secs(60));
        }
    }

    fn reply(&self, path: &str, body: &[u8], (range, trusted): (Option<String>, bool)) -> Vec<u8> {
        let json = |text: String| message("200 OK", "content-type: application/json\r\n", text.as_bytes());
        let refused = |status, code: &str| message(status, &format!("x-error-code: {code}\r\n"), b"");
        let commit = |revision: &str| match revision {
            "main" => Some(COMMIT),
            "v1" => Some(OLD_COMMIT),
            COMMIT => Some(COMMIT),
            OLD_COMMIT => Some(OLD_COMMIT),
            _ => None,
        };
        let of_data = path.starts_with("/datasets/") || path.starts_with("/api/datasets/");
        if of_data != self.data {
            return refused("401 Unauthorized", "RepoNotFound");
        }
        let path = path.replacen("/api/datasets/", "/api/models/", 1).replacen("/datasets/", "/", 1);
        let path = path.as_str();
        if let Some(revision) = path.strip_prefix("/api/models/owner/tiny/revision/") {
            return match commit(revision) {
                Some(sha) => json(self.info(sha)),
                None => refused("404 Not Found", "RevisionNotFound"),
            };
        }
        if self.forbids {
            return message("403 Forbidden", "", b"");
        }
        if path == "/api/models/owner/tiny" {
            return json(self.info(COMMIT));
        }
        if path.starts_with("/api/models/owner/tiny/paths-info/") {
            return json(self.paths_info(body));
        }
        if let Some(stored) = path.strip_prefix("/stored/") {
            return self.content(stored.split('?').next().unwrap(), range.as_deref());
        }
        let Some(rest) = path.strip_prefix("/owner/tiny/resolve/") else {
            return refused("401 Unauthorized", "RepoNotFound");
        };
        if self.gated && !trusted {
            return refused("401 Unauthorized", "GatedRepo");
        }
        let (revision, name) = rest.split_once('/').unwrap();
        assert!(commit(revision).is_some(), "resolved by commit");
        match &self.storage {
            None => self.content(name, range.as_deref()),
            Some(storage) if name.ends_with(".safetensors") => {
                let hash = "x-xet-hash: 00ff\r\nlink: <https://xet.invalid>; rel=\"xet-auth\"\r\n";
                let at = format!("{hash}location: {storage}/stored/{name}?Expires=1&Signature=a/b\r\n");
                message("302 Found", &at, b"Found. Redirecting")
            }
            Some(_) => {
                message("307 Temporary Redirect", &format!("location: /stored/{name}\r\n"), b"Redirecting")
            }
        }
    }

    fn content(&self, name: &str, range: Option<&str>) -> Vec<u8> {
        let content = &self.files[name];
        let start = match range.and_then(|r| r.strip_prefix("bytes=")) {
            Some(range) if !self.no_ranges => range.split_once('-').unwrap().0.parse().unwrap(),
            _ => 0,
        };
        let status = if start > 0 { "206 Partial Content" } else { "200 OK" };
        let mut reply = message(status, "etag: \"x\"\r\n", &content[start..]);
        if name == "model.safetensors"
            && let Some(cut) = self.cuts.lock().unwrap().pop()
        {
            reply.truncate(reply.len() - (content.len() - start).saturating_sub(cut));
        }
        reply
    }

    fn info(&self, sha: &str) -> String {
        let names: Vec<_> = self.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        serde_json::json!({"id": "owner/tiny", "_id": "1", "sha": sha, "siblings": names}).to_string()
    }

    fn paths_info(&self, body: &[u8]) -> String {
        let asked: serde_json::Value = serde_json::from_slice(body).unwrap();
        let entry = |name: &serde_json::Value| {
            let name = name.as_str()?;
            let content = self.files.get(name)?;
            let listed = |hash: String| if self.wrong_hash == name { "0".repeat(hash.len()) } else { hash };
            let oid = listed(git_object(content));
            let mut entry =
                serde_json::json!({"type": "file", "path": name, "oid": oid, "size": content.len()});
            if name.ends_with(".safetensors") {
                let hash = listed(sha256(content));
                entry["lfs"] = serde_json::json!({"oid": hash, "size": content.len(), "pointerSize": 130});
            }
            Some(entry)
        };
        serde_json::json!(asked["paths"].as_array().unwrap().iter().filter_map(entry).collect::<Vec<_>>())
            .to_string()
    }
}

/// The first line of a request, and its headers.
fn head(reader: &mut impl BufRead) -> (String, HashMap<String, String>) {
    let (mut first, mut headers) = (String::new(), HashMap::new());
    reader.read_line(&mut first).unwrap_or(0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap_or(0);
        match line.trim().split_once(':') {
            Some((key, value)) => headers.insert(key.to_lowercase(), value.trim().to_owned()),
            None => return (first, headers),
        };
    }
}

fn sha256(content: &[u8]) -> String {
    hex(&Sha256::digest(content))
}

/// The name that git gives to a file's content.
fn git_object(content: &[u8]) -> String {
    let object = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
    hex(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &object).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn message(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head =
        format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn site() -> Site {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf/tiny.safetensors");
    let files = HashMap::from([
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("README.md", b"not wanted".to_vec()),
        ("pytorch_model.bin", b"not wanted".to_vec()),
        ("model.safetensors", std::fs::read(golden).unwrap()),
    ]);
    Site { files, ..Site::default() }
}

fn hub(endpoint: &str, cache: &Path) -> Hub {
    Hub {
        endpoint: endpoint.into(),
        cache: cache.into(),
        token: Some("wrong".into()),
        offline: false,
        patience: Duration::from_secs(5),
    }
}

fn get(hub: &Hub, revision: Option<&str>) -> Result<PathBuf, finetune::format::FormatError> {
    hub.fetch("owner/tiny", revision, &mut |_| {})
}

#[test]
fn a_model_arrives_in_the_cache_and_opens() {
    let (site, cache) = (site(), tempfile::tempdir().unwrap());
    let endpoint = site.serve();
    let hub = hub(&endpoint, cache.path());
    let mut most = 0;
    let folder = hub.fetch("owner/tiny", None, &mut |p| most = most.max(p.done)).unwrap();
    assert_eq!(folder, cache.path().join("models--owner--tiny/snapshots").join(COMMIT));
    assert_eq!(most, site.files["model.safetensors"].len() as u64);
    let main = std::fs::read_to_string(cache.path().join("models--owner--tiny/refs/main")).unwrap();
    assert_eq!(main, COMMIT);
    let model = finetune::format::open(&folder).unwrap();
    assert_eq!((model.base_id.as_deref(), model.revision.as_deref()), (Some("owner/tiny"), Some(COMMIT)));
    assert_eq!(model.tensors.names().len(), 20);
    let asked = site.log().join("\n");
    assert!(!asked.contains("README") && !asked.contains("pytorch"), "{asked}");

    // A second fetch: one request whether main moved, and no file is sent.
    let before = site.log().len();
    assert_eq!(get(&hub, None).unwrap(), folder);
    assert_eq!(site.log()[before..].len(), 1, "{:?}", &site.log()[before..]);
    // A pinned commit in the cache needs no server.
    let gone = Hub { endpoint: "http://127.0.0.1:9".into(), ..hub.clone() };
    assert_eq!(get(&gone, Some(COMMIT)).unwrap(), folder);
    // Without a server, the cached files are used.
    assert_eq!(get(&gone, None).unwrap(), folder);
    assert_eq!(get(&Hub { offline: true, ..gone }, None).unwrap(), folder);
}

/// A plan needs the shapes of the weights only: it fetches their headers, and the opened model has names and shapes.
#[test]
fn outline_has_shapes_of_the_weights_without_their_bytes() {
    for no_ranges in [false, true] {
        let (site, cache, apart) =
            (Site { no_ranges, ..site() }, tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let hub = hub(&site.serve(), cache.path());
        let outline =
            || hub.fetch_parts(("owner/tiny", None), Parts::Outline(apart.path()), &mut |_| {}).unwrap();
        let folder = outline();
        assert!(folder.starts_with(apart.path()));
        let (mut opened, real) = (finetune::format::open(&folder).unwrap(), &site.files["model.safetensors"]);
        assert_eq!(shapes(&folder).len(), 20);
        assert_eq!(
            (opened.base_id.take().as_deref(), opened.revision.as_deref()),
            (Some("owner/tiny"), Some(COMMIT))
        );
        let file = std::fs::read(folder.join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(*real.first_chunk().unwrap()) as usize;
        assert_eq!((file.len(), &file[..header]), (real.len(), &real[..header]));
        assert!(file[header..].iter().all(|byte| *byte == 0), "and nothing else of it");
        let before = site.log().len();
        assert_eq!(outline(), folder);
        let again = site.log()[before..].join("\n");
        assert!(!again.contains("/resolve/"), "what is here is not asked for again: {again}");
        // The outline is not a model of the cache, and a whole model replaces it.
        let offline = Hub { offline: true, ..hub.clone() };
        assert!(get(&offline, None).is_err());
        let whole = get(&hub, None).unwrap();
        assert_eq!(std::fs::read(whole.join("model.safetensors")).unwrap(), *real);
        assert_eq!(shapes(&whole), shapes(&folder));
        assert_eq!(outline(), whole);
    }
}

/// Name and shape of every tensor.
fn shapes(folder: &Path) -> Vec<(String, Vec<usize>)> {
    let tensors = finetune::format::open(folder).unwrap().tensors;
    let shape = |name: String| {
        let about = tensors.about(&name).unwrap().unwrap();
        (name, about.shape)
    };
    tensors.names().into_iter().map(shape).collect()
}

/// bitsandbytes stores shapes in the data: a plan fetches such a model whole.
#[test]
fn a_model_of_bitsandbytes_has_no_outline() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quantised/nf4/model");
    let read = |name: &str| std::fs::read(golden.join(name)).unwrap();
    let names = ["config.json", "tokenizer.json", "model.safetensors"];
    let site = Site { files: names.map(|name| (name, read(name))).into(), ..Site::default() };
    let (cache, apart) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let hub = hub(&site.serve(), cache.path());
    let folder = hub.fetch_parts(("owner/tiny", None), Parts::Outline(apart.path()), &mut |_| {}).unwrap();
    assert_eq!(shapes(&folder), shapes(&golden));
    assert!(folder.starts_with(cache.path()));
}

#[test]
fn concurrent_outline_requests_succeed() {
    let (site, cache, apart) = (site(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let hub = hub(&site.serve(), cache.path());
    let ask = || hub.fetch_parts(("owner/tiny", None), Parts::Outline(apart.path()), &mut |_| {});
    let folder = ask().unwrap();
    for _ in 0..5 {
        std::fs::remove_file(folder.join("model.safetensors")).unwrap();
        let ready = std::sync::Barrier::new(8);
        let answers = std::thread::scope(|scope| {
            let one = || {
                ready.wait();
                ask().map(|folder| shapes(&folder).len())
            };
            let all: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(answers.iter().all(|answer| matches!(answer, Ok(20))), "{answers:?}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3, "configuration, tokenizer, weights");
    }
}

#[test]
fn interrupted_download_resumes_now_and_in_the_next_run() {
    let (site, cache) = (site(), tempfile::tempdir().unwrap());
    let size = site.files["model.safetensors"].len();
    // Popped from the end: in the first run 5000 bytes arrive, then nothing three times.
    *site.cuts.lock().unwrap() = vec![0, 0, 0, 5000];
    let hub = hub(&site.serve(), cache.path());
    let error = get(&hub, None).unwrap_err();
    assert!(!error.is_configuration());
    assert!(error.to_string().contains("the download goes on where it stopped"), "{error}");
    // The second run receives 7000 more bytes, is interrupted, and finishes.
    *site.cuts.lock().unwrap() = vec![7000];
    let before = site.log().len();
    let folder = get(&hub, None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), site.files["model.safetensors"]);
    let gets: Vec<String> =
        site.log()[before..].iter().filter(|l| l.starts_with("GET /owner")).cloned().collect();
    assert_eq!(gets.len(), 2, "{gets:?}");
    assert!(gets[0].ends_with(&format!("bytes=5000-{}", size - 1)), "{gets:?}");
    assert!(gets[1].ends_with(&format!("bytes=12000-{}", size - 1)), "{gets:?}");
    let left = std::fs::read_dir(cache.path().join("models--owner--tiny/blobs")).unwrap();
    assert!(left.flatten().all(|e| !e.file_name().to_string_lossy().ends_with(".incomplete")));
}

#[test]
fn a_server_without_ranges_still_gives_the_right_bytes() {
    let (site, cache) = (Site { no_ranges: true, ..site() }, tempfile::tempdir().unwrap());
    *site.cuts.lock().unwrap() = vec![5000];
    let folder = get(&hub(&site.serve(), cache.path()), None).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), site.files["model.safetensors"]);
}

#[test]
fn revisions_are_kept_apart() {
    let (site, cache) = (site(), tempfile::tempdir().unwrap());
    let hub = hub(&site.serve(), cache.path());
    let old = get(&hub, Some("v1")).unwrap();
    assert!(old.ends_with(OLD_COMMIT));
    assert_ne!(get(&hub, None).unwrap(), old);
    let error = get(&hub, Some("v9")).unwrap_err();
    assert!(error.is_configuration());
    assert!(error.to_string().contains("no revision 'v9'"), "{error}");
}

/// Checks the message to the user: one line, and the kind of failure.
fn check(site: &Site, id: &str, configuration: bool, said: &[&str]) {
    let cache = tempfile::tempdir().unwrap();
    let error = hub(&site.serve(), cache.path()).fetch(id, None, &mut |_| {}).unwrap_err();
    let text = error.to_string();
    assert_eq!((text.lines().count(), error.is_configuration()), (1, configuration), "{text}");
    said.iter().for_each(|s| assert!(text.contains(s), "{text:?} lacks {s:?}"));
    let asked = site.log();
    assert!(!asked.iter().any(|l| l.starts_with("GET") && l.contains("model.safetensors")), "{asked:?}");
}

#[test]
fn refusals_are_named_before_weights_are_fetched() {
    let gated = Site { gated: true, ..site() };
    let said = ["accept the licence at https://huggingface.co/owner/tiny", "set HF_TOKEN"];
    check(&gated, "owner/tiny", true, &said);
    check(&site(), "owner/missing", true, &["no such model on the Hub"]);
    check(&site(), "just-a-word", true, &["owner/name"]);
    let mut pickle = site();
    pickle.files.remove("model.safetensors");
    check(&pickle, "owner/tiny", true, &["pytorch_model.bin"]);
    let mut bare = site();
    bare.files.remove("tokenizer.json");
    check(&bare, "owner/tiny", true, &["no tokenizer.json"]);
    let mut gptq = site();
    gptq.files.insert("config.json", br#"{"quantization_config": {"quant_method": "gptq"}}"#.to_vec());
    check(&gptq, "owner/tiny", true, &["gptq"]);
}

#[test]
fn a_token_opens_a_gated_model() {
    let (site, cache) = (Site { gated: true, ..site() }, tempfile::tempdir().unwrap());
    let hub = Hub { token: Some("secret".into()), ..hub(&site.serve(), cache.path()) };
    get(&hub, None).unwrap();
}

#[test]
fn unreachable_hub_fails_soon() {
    for endpoint in ["http://127.0.0.1:9", "https://no-such-host.invalid", "nonsense://x"] {
        let cache = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let error = get(&hub(endpoint, cache.path()), None).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot reach") && text.contains("HF_ENDPOINT"), "{text}");
        assert_eq!((text.lines().count(), error.is_configuration()), (1, false), "{text}");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
}

#[test]
fn silent_hub_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().flatten().collect::<Vec<_>>());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub { patience: Duration::from_secs(1), ..hub(&endpoint, cache.path()) };
    let error = get(&hub, None).unwrap_err().to_string();
    assert!(error.contains("sent nothing for 1 seconds"), "{error}");
}

/// The server stops in the middle of the weights and keeps the connection open.
#[test]
fn stalled_download_times_out_and_keeps_its_bytes() {
    let (site, cache) = (Site { stalls: true, ..site() }, tempfile::tempdir().unwrap());
    *site.cuts.lock().unwrap() = vec![0, 0, 0, 5000];
    let hub = Hub { patience: Duration::from_secs(1), ..hub(&site.serve(), cache.path()) };
    let began = Instant::now();
    let error = get(&hub, None).unwrap_err().to_string();
    assert!(error.contains("sent nothing for 1 seconds"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let hash = sha256(&site.files["model.safetensors"]);
    let partial = cache.path().join(format!("models--owner--tiny/blobs/{hash}.incomplete"));
    assert_eq!(std::fs::read(partial).unwrap(), site.files["model.safetensors"][..5000]);
}

/// As at the Hub: small files are behind a redirect within it, weights in a storage of another host or port.
#[test]
fn redirect_to_a_storage_keeps_ranges_and_drops_the_token() {
    for host in ["127.0.0.1", "localhost"] {
        let (storage, cache) = (site(), tempfile::tempdir().unwrap());
        *storage.cuts.lock().unwrap() = vec![5000];
        let at = storage.serve().replace("127.0.0.1", host);
        let site = Site { gated: true, storage: Some(at), ..site() };
        let hub = Hub { token: Some("secret".into()), ..hub(&site.serve(), cache.path()) };
        let folder = get(&hub, None).unwrap();
        assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), site.files["model.safetensors"]);
        let weights = "GET /stored/model.safetensors?Expires=1&Signature=a/b ";
        let size = site.files["model.safetensors"].len();
        assert_eq!(storage.log(), [weights.to_owned(), format!("{weights}bytes=5000-{}", size - 1)]);
        assert_eq!(*storage.trusted.lock().unwrap(), Vec::<String>::new());
        let trusted = site.trusted.lock().unwrap().clone();
        assert_eq!(trusted.len(), site.log().len());
        assert!(trusted.contains(&"/stored/config.json".to_owned()), "{trusted:?}");
    }
}

#[test]
fn files_with_another_hash_are_refused_and_deleted() {
    // Before the weights there are the configuration and the tokenizer.
    for (wrong_hash, whole) in [("config.json", 0..2), ("model.safetensors", 2..3)] {
        let (site, cache) = (Site { wrong_hash, ..site() }, tempfile::tempdir().unwrap());
        let error = get(&hub(&site.serve(), cache.path()), None).unwrap_err().to_string();
        assert!(error.contains(&format!("the content of '{wrong_hash}' does not have its hash")), "{error}");
        let blobs = std::fs::read_dir(cache.path().join("models--owner--tiny/blobs")).unwrap();
        assert!(whole.contains(&blobs.count()), "{wrong_hash}");
    }
}

#[test]
fn refusal_of_a_storage_is_not_the_refusal_of_the_hub() {
    let (storage, cache) = (Site { forbids: true, ..site() }.serve(), tempfile::tempdir().unwrap());
    let site = Site { storage: Some(storage.clone()), ..site() };
    let error = get(&hub(&site.serve(), cache.path()), None).unwrap_err().to_string();
    assert!(error.contains(&format!("{storage} answers 403")) && !error.contains("licence"), "{error}");
}

#[test]
fn malformed_token_is_refused_without_a_request() {
    let (site, cache) = (site(), tempfile::tempdir().unwrap());
    let hub = Hub { token: Some("one\ntwo".into()), ..hub(&site.serve(), cache.path()) };
    let error = get(&hub, None).unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN") && site.log().is_empty(), "{error}");
}

/// A proxy that leads every connection to `site`, with TLS where the port is 443; returns its address and its log.
fn proxy(site: &Site) -> (String, Arc<Mutex<Vec<String>>>) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/hub");
    let certificate = CertificateDer::from_pem_file(golden.join("certificate.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(golden.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (site, log) = (site.clone(), Arc::new(Mutex::new(Vec::new())));
    let shared = log.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (site, config, log) = (site.clone(), config.clone(), shared.clone());
            std::thread::spawn(move || {
                let (first, _) = head(&mut BufReader::new(&stream));
                log.lock().unwrap().push(first.trim().to_owned());
                let _ = (&stream).write_all(b"HTTP/1.1 200 Connection established\r\n\r\n");
                match first.contains(":443 ") {
                    true => {
                        let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
                        site.answer(&mut tls);
                        tls.conn.send_close_notify();
                        let _ = tls.flush();
                    }
                    false => site.answer(&stream),
                }
            });
        }
    });
    (address, log)
}

/// The program, with the variables of a user: proxies, certificates, caches.
#[test]
fn program_uses_proxy_and_certificates_of_the_environment() {
    let site = site();
    let (proxy, log) = proxy(&site);
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/hub/certificate.pem");
    let own = own.to_str().unwrap();
    let run = |variables: &[(&str, &str)]| {
        let cache = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_HUB_CACHE"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command.args(["inspect", "owner/tiny"]).env("HF_HOME", cache.path());
        let out = command.envs(variables.iter().copied()).output().unwrap();
        let weights = cache.path().join("hub/models--owner--tiny/snapshots").join(COMMIT);
        (weights.join("model.safetensors").is_file(), String::from_utf8(out.stderr).unwrap())
    };
    let (http, https) = (("HF_ENDPOINT", "http://hub.invalid"), ("HF_ENDPOINT", "https://hub.invalid"));
    let (arrived, said) = run(&[http, ("HTTP_PROXY", &proxy)]);
    assert!(arrived, "{said}");
    assert!(log.lock().unwrap().iter().all(|line| line == "CONNECT hub.invalid:80 HTTP/1.1"), "{log:?}");
    log.lock().unwrap().clear();
    let (arrived, said) = run(&[https, ("https_proxy", &proxy), ("SSL_CERT_FILE", own)]);
    assert!(arrived, "{said}");
    assert!(log.lock().unwrap().iter().all(|line| line == "CONNECT hub.invalid:443 HTTP/1.1"), "{log:?}");
    assert!(log.lock().unwrap().len() >= 5, "{log:?}");
    // A certificate that no authority of the system signed.
    let (arrived, said) = run(&[https, ("HTTPS_PROXY", &proxy)]);
    assert!(
        !arrived && said.contains("cannot reach https://hub.invalid: ") && said.contains("certificate"),
        "{said}"
    );
    log.lock().unwrap().clear();
    for direct in
        [&[http, ("HTTPS_PROXY", &proxy)][..], &[http, ("HTTP_PROXY", &proxy), ("NO_PROXY", ".invalid")]]
    {
        let (arrived, said) = run(direct);
        assert!(!arrived && said.contains("cannot reach http://hub.invalid: "), "{said}");
    }
    assert!(log.lock().unwrap().is_empty(), "{log:?}");
}
