//! Uploads: the requests, what a repository holds afterwards, and the messages to the user.

mod depot;

use depot::{Branch, Depot, Repository};
use finetune::format::hub::{Hub, Push};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// A folder with a run, and the Hub that it is uploaded to.
struct Bench {
    dir: tempfile::TempDir,
    endpoint: String,
    token: Option<&'static str>,
}

/// What the program printed: exit code, stdout, stderr.
type Said = (i32, String, String);

impl Bench {
    fn new(depot: &mut Depot) -> Self {
        Bench { dir: tempfile::tempdir().unwrap(), endpoint: depot.serve(), token: Some("secret") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str, content: &[u8]) {
        std::fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        std::fs::write(self.path(name), content).unwrap();
    }

    /// An adapter without card and tokenizer.
    fn adapter(&self, name: &str) {
        for file in [CONFIG, WEIGHTS] {
            self.file(&format!("{name}/{file}"), &golden(&format!("export/llama/{file}")));
        }
    }

    fn run(&self, args: &[&str]) -> Said {
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_HUB_CACHE"] {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", self.path("home"))
            .current_dir(self.dir.path());
        command.envs(self.token.map(|token| ("HF_TOKEN", token)));
        let out = command.args(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (out.status.code().unwrap_or(-1), text(out.stdout), text(out.stderr))
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> (String, String) {
        let (code, said, notes) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {notes}");
        (said, notes)
    }

    /// The last line on stderr is the only one about the error.
    #[track_caller]
    fn refused(&self, args: &[&str], code: i32, parts: &[&str]) {
        let (got, said, notes) = self.run(args);
        let errors: Vec<&str> = notes.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(got == code && said.is_empty() && errors.len() == 1, "{args:?}: {got} {said} {notes}");
        assert_eq!(notes.lines().last(), Some(errors[0]));
        for part in parts {
            assert!(errors[0].contains(part), "{args:?}: {part:?} is not in {notes}");
        }
    }
}

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).unwrap()
}

/// The repository `owner/there` with an empty branch main.
fn there(private: bool) -> Depot {
    let depot = Depot::default();
    let first = Branch { commit: "1".repeat(40), files: BTreeMap::new() };
    let made = Repository { private, branches: BTreeMap::from([("main".to_owned(), first)]) };
    depot.content().repositories.insert("owner/there".to_owned(), made);
    depot
}

#[test]
fn a_run_is_uploaded_without_its_state_and_rows() {
    let mut depot = Depot::default();
    let b = Bench::new(&mut depot);
    b.ok(&["demo", "--max-steps", "2", "--batch-size", "4", "--rank", "2", "--save-steps", "1", "-o", "out"]);
    for name in ["optimizer.safetensors", "rows.jsonl", "model.safetensors.bak", ".env", "notes/README.md"] {
        b.file(&format!("out/{name}"), b"private");
    }
    let (said, notes) = b.ok(&["push", "out", "owner/mine", "--private"]);
    let commit = depot.content().repositories["owner/mine"].branches["main"].commit.clone();
    assert_eq!(said, format!("adapter  {}/owner/mine/commit/{commit}\n", b.endpoint));
    assert!(notes.contains(&format!("{WEIGHTS}: 0.")), "{notes}");
    assert!(depot.content().repositories["owner/mine"].private);
    let files = depot.files("owner/mine", "main");
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    let expected =
        ["README.md", CONFIG, WEIGHTS, "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names, expected);
    for (name, content) in &files {
        assert_eq!(*content, std::fs::read(b.path("out").join(name)).unwrap(), "{name}");
    }
    let card = String::from_utf8(files["README.md"].clone()).unwrap();
    assert!(
        card.starts_with("---\n") && card.contains("library_name: peft") && card.contains("- lora\n"),
        "{card}"
    );

    let oid = crate::sha256(&files[WEIGHTS]);
    let expected = [
        "POST /api/validate-yaml",
        "GET /api/models/owner/mine",
        "POST /api/repos/create",
        "POST /api/models/owner/mine/preupload/main",
        "POST /owner/mine.git/info/lfs/objects/batch",
        &format!("PUT /stored/{oid}"),
        "POST /owner/mine.git/info/lfs/objects/verify",
        "POST /api/models/owner/mine/commit/main",
        "header: Upload adapter with finetune",
    ];
    assert_eq!(depot.log(), expected);
    let trusted = depot.content().trusted.clone();
    assert!(!trusted.iter().any(|path| path.contains("stored")) && trusted.len() == 7, "{trusted:?}");
}

#[test]
fn what_the_hub_has_is_not_sent_again() {
    let mut depot = Depot::default();
    let b = Bench::new(&mut depot);
    b.adapter("out");
    b.file("out/README.md", b"");
    b.ok(&["push", "out", "owner/mine"]);
    let before = depot.log().len();
    let (said, _) = b.ok(&["push", "out", "owner/mine"]);
    assert!(said.ends_with("/owner/mine has these files already\n"), "{said}");
    // One file changed: it alone is committed.
    b.file("out/README.md", b"---\nlicense: mit\n---\n");
    let (said, _) = b.ok(&["push", "out", "owner/mine", "--message", "Name the licence", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["files"], serde_json::json!(["README.md"]));
    assert_eq!(said["commit"], depot.content().repositories["owner/mine"].branches["main"].commit);
    assert_eq!(depot.files("owner/mine", "main")["README.md"], b"---\nlicense: mit\n---\n");
    assert_eq!(depot.files("owner/mine", "main").len(), 3);
    let log = depot.log()[before..].join("\n");
    assert!(log.ends_with("header: Name the licence") && !log.contains("lfs"), "{log}");

    // Another repository: the storage has the weights.
    let (_, notes) = b.ok(&["push", "out", "owner/other"]);
    let note = format!("note: {WEIGHTS} is not sent: the Hub's storage has its content already");
    assert!(notes.contains(&note), "{notes}");
    assert_eq!(depot.files("owner/other", "main").len(), 3);
    assert!(!depot.content().repositories["owner/other"].private);
    let (said, _) = b.ok(&["push", "out", "owner/third", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["stored"], serde_json::json!([WEIGHTS]));
    assert_eq!(depot.log().iter().filter(|line| line.starts_with("PUT")).count(), 1);
}

#[test]
fn large_files_are_sent_in_parts() {
    let mut depot = Depot { chunk: Some(1000), ..there(false) };
    let b = Bench::new(&mut depot);
    b.adapter("a");
    b.ok(&["push", "a", "owner/there"]);
    let weights = golden(&format!("export/llama/{WEIGHTS}"));
    assert_eq!(depot.files("owner/there", "main")[WEIGHTS], weights);
    let parts = depot.log().iter().filter(|line| line.starts_with("PUT /part/")).count();
    assert!(parts == weights.len().div_ceil(1000) && parts > 2, "{parts}");
}

#[test]
fn broken_connection_is_tried_again_and_commits_nothing() {
    for chunk in [None, Some(5000)] {
        let mut depot = Depot { chunk, ..there(false) };
        let b = Bench::new(&mut depot);
        b.adapter("a");
        *depot.cuts.lock().unwrap() = vec![700, 0, 900];
        b.refused(
            &["push", "a", "owner/there"],
            1,
            &["owner/there: the connection to ", "nothing was committed; run again"],
        );
        assert_eq!((depot.commits(), depot.files("owner/there", "main").len()), (0, 0));
        assert_eq!(depot.log().iter().filter(|line| line.starts_with("cut")).count(), 3);
        *depot.cuts.lock().unwrap() = vec![700];
        b.ok(&["push", "a", "owner/there"]);
        assert_eq!(depot.files("owner/there", "main").len(), 2);
    }
}

#[test]
fn completion_of_parts_is_tried_again() {
    let mut depot = Depot { chunk: Some(1000), fault: "first completion", ..there(false) };
    let b = Bench::new(&mut depot);
    b.adapter("a");
    b.ok(&["push", "a", "owner/there"]);
    assert_eq!(depot.files("owner/there", "main")[WEIGHTS], golden(&format!("export/llama/{WEIGHTS}")));
    let count = |what: &str| depot.log().iter().filter(|line| line.contains(what)).count();
    assert_eq!((count("/complete/"), count("/commit/")), (2, 1));
}

/// A gateway may answer for the Hub although the commit was made.
#[test]
fn commit_answered_by_504_is_not_repeated() {
    let mut depot = Depot { fault: "late commit", ..there(false) };
    let b = Bench::new(&mut depot);
    b.adapter("a");
    let parts =
        ["504", "did not confirm the commit", "run again: if it was made, nothing is committed twice"];
    b.refused(&["push", "a", "owner/there"], 1, &parts);
    assert_eq!((depot.commits(), depot.files("owner/there", "main").len()), (1, 2));
    let (said, _) = b.ok(&["push", "a", "owner/there"]);
    assert!(said.ends_with("/owner/there has these files already\n"), "{said}");
    assert_eq!(depot.commits(), 1);
}

/// The answer comes after the time limit for received data.
#[test]
fn slow_answer_to_a_commit_is_awaited() {
    let mut depot = Depot { fault: "slow commit", ..there(false) };
    let b = Bench::new(&mut depot);
    b.adapter("a");
    let hub = crate::hub(&b.endpoint, &b.path("cache"));
    let hub = Hub { token: Some("secret".into()), patience: Duration::from_secs(2), ..hub };
    let files = [CONFIG, WEIGHTS].map(|name| b.path("a").join(name));
    let push = Push { files: &files, branch: None, message: "slow", private: false };
    let pushed = hub.push("owner/there", &push, &mut |_| {}).unwrap();
    assert_eq!(
        pushed.commit,
        Some(depot.content().repositories["owner/there"].branches["main"].commit.clone())
    );
}

#[test]
fn branch_is_created_and_main_stays() {
    let mut depot = there(false);
    let b = Bench::new(&mut depot);
    b.adapter("a");
    for message in ["first", "second"] {
        b.file("a/README.md", message.as_bytes());
        b.ok(&["push", "a", "owner/there", "--revision", "try/1", "--message", message]);
    }
    assert_eq!(depot.files("owner/there", "main").len(), 0);
    assert_eq!(depot.files("owner/there", "try/1")["README.md"], b"second");
    let log = depot.log();
    assert_eq!(log.iter().filter(|line| line.contains("/branch/")).count(), 1, "{log:?}");
    assert!(log.contains(&"POST /api/models/owner/there/commit/try%2F1".to_owned()), "{log:?}");
}

#[test]
fn merged_models_and_gguf_files_are_uploaded() {
    let mut depot = there(false);
    let b = Bench::new(&mut depot);
    let weights = golden("gguf/tiny.safetensors");
    b.file("merged/config.json", b"{}");
    b.file("merged/model-00001-of-00001.safetensors", &weights);
    let n = u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&weights[8..8 + n]).unwrap();
    let names = header.as_object().unwrap().keys().filter(|name| *name != "__metadata__");
    let map: BTreeMap<_, _> = names.map(|name| (name, "model-00001-of-00001.safetensors")).collect();
    let index = serde_json::json!({"weight_map": map}).to_string();
    b.file("merged/model.safetensors.index.json", index.as_bytes());
    b.file("merged/training_args.bin", b"");
    b.file("merged/tokenizer.json", b"");
    let (said, _) = b.ok(&["push", "merged", "owner/there"]);
    assert!(said.starts_with("model  "), "{said}");
    let files = depot.files("owner/there", "main");
    assert_eq!(files.len(), 4);
    assert_eq!(files["model-00001-of-00001.safetensors"], weights);
    assert_eq!(files["tokenizer.json"], b"");
    b.file("x/tiny.gguf", &golden("export/llama/lora.gguf"));
    let (said, _) = b.ok(&["push", "x/tiny.gguf", "owner/there"]);
    assert!(said.starts_with("GGUF  "), "{said}");
    assert_eq!(depot.files("owner/there", "main").len(), 5);
}

#[test]
fn files_in_gitignore_are_left_out_with_a_note() {
    let mut depot = Depot { ignored: CONFIG, ..there(false) };
    let b = Bench::new(&mut depot);
    b.adapter("a");
    let (_, notes) = b.ok(&["push", "a", "owner/there"]);
    assert!(notes.contains(&format!("note: {CONFIG} is not uploaded")), "{notes}");
    assert_eq!(depot.files("owner/there", "main").keys().collect::<Vec<_>>(), [WEIGHTS]);
    let (said, _) = b.ok(&["push", "a", "owner/there", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["ignored"], serde_json::json!([CONFIG]));
    assert_eq!(said["stored"], serde_json::json!([]));
}

/// A GGUF without tensors that says that it is one of `count` files.
fn split_gguf(count: u16) -> Vec<u8> {
    let key = b"split.count";
    let (version, tensors, entries, type_u16) = (3u32, 0u64, 1u64, 2u32);
    let mut file = b"GGUF".to_vec();
    file.extend(version.to_le_bytes());
    file.extend([tensors, entries, key.len() as u64].map(u64::to_le_bytes).concat());
    file.extend(key);
    file.extend(type_u16.to_le_bytes());
    file.extend(count.to_le_bytes());
    file
}

/// Nothing is sent: the Hub is not asked.
#[test]
fn what_cannot_be_uploaded_is_refused_by_name() {
    let mut depot = there(false);
    let mut b = Bench::new(&mut depot);
    b.adapter("a");
    b.adapter("run/checkpoint-2");
    b.file("run/checkpoint-2/run_state.json", b"{}");
    b.file("run/run.yaml", b"");
    b.file("empty/rows.jsonl", b"{}");
    b.file("mine/model.gguf", b"");
    b.file("damaged/adapter_config.json", b"{}");
    b.file("damaged/adapter_model.safetensors", b"12345678");
    b.file("bad.gguf", b"12345678");
    b.file("mlx/adapter_config.json", b"{}");
    b.file("mlx/adapters.safetensors", b"");
    b.file("part.gguf", &split_gguf(3));
    for (args, code, parts) in [
        (&["a"][..], 2, &["finetune push OUT owner/name"][..]),
        (&[], 2, &["finetune push OUT owner/name"]),
        (&["nowhere", "owner/there"], 1, &["nowhere: no such file or directory"]),
        (&["run", "owner/there"], 78, &["run: the run has no adapter yet"]),
        (
            &["run/checkpoint-2", "owner/there"],
            78,
            &["run/checkpoint-2: is a checkpoint: push run, or", "--to peft"],
        ),
        (&["empty", "owner/there"], 78, &["empty: holds neither an adapter nor a merged model"]),
        (&["empty/rows.jsonl", "owner/there"], 78, &["empty/rows.jsonl: a single file that is no .gguf"]),
        (&["mine", "owner/there"], 78, &["mine: a folder of .gguf files; name the file: mine/model.gguf"]),
        (&["damaged", "owner/there"], 1, &["damaged/adapter_model.safetensors"]),
        (&["bad.gguf", "owner/there"], 1, &["bad.gguf"]),
        (
            &["part.gguf", "owner/there"],
            78,
            &["part.gguf: one part of a split GGUF; join its parts", "--merge"],
        ),
        (
            &["mlx", "owner/there"],
            78,
            &["mlx: an adapter for mlx-lm, which is not uploaded; push", "--to peft"],
        ),
        (&["a", "name"], 78, &["name: not a Hub id; write it as owner/name"]),
        (&["a", "https://huggingface.co/owner/there"], 78, &["not a Hub id"]),
        (&["a", "owner/there", "--message", " "], 78, &["--message: is empty"]),
        (&["a", "owner/there", "--revision", ""], 78, &["--revision"]),
    ] {
        b.refused(&[&["push"], args].concat(), code, parts);
    }
    b.token = None;
    let parts = ["owner/there: an upload needs a token", "huggingface.co/settings/tokens", "HF_TOKEN"];
    b.refused(&["push", "a", "owner/there"], 78, &parts);
    assert_eq!(depot.log(), Vec::<String>::new());
}

#[test]
fn refusals_of_the_hub_are_explained() {
    let check = |depot: Depot, token: &'static str, args: &[&str], code: i32, parts: &[&str]| {
        let mut depot = depot;
        let b = Bench { token: Some(token), ..Bench::new(&mut depot) };
        b.adapter("a");
        b.file("card/README.md", b"---\nbase_model: ./base\n---\n");
        b.adapter("card");
        b.refused(&[&["push"], args].concat(), code, parts);
        let made: Vec<String> = depot.content().repositories.keys().cloned().collect();
        assert_eq!((depot.files("owner/there", "main").len(), made), (0, vec!["owner/there".to_owned()]));
    };
    let (a, fault) = (["a", "owner/there"], |fault| Depot { fault, ..there(false) });
    check(there(false), "wrong", &a, 78, &["401", "Invalid credentials", "settings/tokens"]);
    check(there(false), "reader", &a, 78, &["403", "this token may only read", "right to write"]);
    check(
        there(false),
        "secret",
        &["a", "stranger/mine"],
        78,
        &["403", "namespace \"stranger\"", "of your own"],
    );
    check(
        there(false),
        "secret",
        &["a", "owner/there", "--private"],
        78,
        &["--private: the repository exists and is public"],
    );
    check(there(false), "secret", &["card", "owner/new"], 78, &["README.md: ", "\"./base\" is not valid"]);
    check(fault("busy"), "secret", &a, 1, &["412", "A commit has happened since", "run again"]);
    check(fault("quota"), "secret", &a, 1, &[WEIGHTS, "the storage of owner is full"]);
    check(fault("storage expired"), "secret", &a, 1, &["answers 403", "nothing was committed"]);
    check(fault("storage ill"), "secret", &a, 1, &["answers 503", "run again"]);
    check(fault("lost commit"), "secret", &a, 1, &["did not confirm the commit", "run again"]);
    check(fault("odd commit"), "secret", &a, 1, &["it does not name the commit"]);
    check(fault("unknown mode"), "secret", &a, 1, &["not usable", WEIGHTS]);
    check(fault("file forgotten"), "secret", &a, 1, &["it does not say how to send 'adapter_config.json'"]);
    check(fault("object forgotten"), "secret", &a, 1, &["it does not say where to send"]);
    let parts = |fault| Depot { fault, chunk: Some(1000), ..there(false) };
    check(parts("part forgotten"), "secret", &a, 1, &["into parts that are not those of the file"]);
    check(parts("no tag"), "secret", &a, 1, &["has no ETag"]);
}

#[test]
fn unreachable_hub_is_one_line() {
    let b = Bench { endpoint: "http://127.0.0.1:9".into(), ..Bench::new(&mut there(false)) };
    b.adapter("a");
    let parts = ["owner/there: the connection to http://127.0.0.1:9 failed: ", "nothing was committed"];
    b.refused(&["push", "a", "owner/there"], 1, &parts);
}

/// Python's own client at the same server, so that the server is known to speak the protocol. Without the client the test
/// prints `skipped`; tests/run.sh installs it and sets FINETUNE_NEED_HUB_CLIENT, which makes that a failure.
#[test]
fn pythons_client_pushes_to_the_same_server() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/hub-client/bin/python");
    if !python.exists() {
        assert!(std::env::var_os("FINETUNE_NEED_HUB_CLIENT").is_none(), "the client must be installed here");
        eprintln!("skipped: no huggingface_hub");
        return;
    }
    for chunk in [None, Some(1000)] {
        let mut depot = Depot { chunk, ..Depot::default() };
        let b = Bench::new(&mut depot);
        b.adapter("a");
        b.file("a/README.md", b"---\nlibrary_name: peft\n---\n");
        let script = "import sys, huggingface_hub as hub\n\
                      hub.create_repo('owner/theirs', private=True, exist_ok=True)\n\
                      hub.create_branch('owner/theirs', branch='try/1', exist_ok=True)\n\
                      for branch in [None, 'try/1']:\n\
                      \x20   print(hub.upload_folder(repo_id='owner/theirs', folder_path='a', revision=branch).oid)\n";
        let run = |hub: &str| {
            let mut command = Command::new(&python);
            command.current_dir(b.dir.path()).env("HF_ENDPOINT", hub).env("HF_HOME", b.path("home"));
            command.env("HF_TOKEN", "secret").env("HF_HUB_DISABLE_XET", "1").env("NO_PROXY", "*");
            let out = command.args(["-c", script]).output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        };
        run(&b.endpoint);
        b.ok(&["push", "a", "owner/ours"]);
        assert_eq!(depot.files("owner/theirs", "main"), depot.files("owner/ours", "main"));
        assert_eq!(depot.files("owner/theirs", "try/1"), depot.files("owner/ours", "main"));
        assert_eq!(depot.files("owner/ours", "main").len(), 3);
        assert!(depot.content().repositories["owner/theirs"].private);
        // Each finds that the other has uploaded everything.
        let commits = depot.commits();
        let (said, _) = b.ok(&["push", "a", "owner/theirs", "--private"]);
        assert!(said.contains("has these files already"), "{said}");
        run(&b.endpoint);
        assert_eq!(depot.commits(), commits);
    }
}
