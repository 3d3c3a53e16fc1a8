//! The real binary in a temporary folder, on the demonstration's model: whole, or damaged in one place.
#![allow(dead_code)] // Each test file uses a part.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

pub const ADAPTER: &str = "adapter_model.safetensors";

pub struct Bench {
    pub dir: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let bench = Bench { dir: tempfile::tempdir().unwrap() };
        bench.file("rows.jsonl", &rows(24));
        bench.file("eval.jsonl", &rows(3));
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        self.bytes(name, text.as_bytes())
    }

    pub fn bytes(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Asserts that the adapters of two folders have the same bytes.
    #[track_caller]
    pub fn same_adapter(&self, one: &str, other: &str) {
        let read = |dir: &str| self.read(&format!("{dir}/{ADAPTER}"));
        assert!(read(one) == read(other), "{one} and {other} hold different adapters");
    }

    /// Asserts that these arguments with `-o no` end with this code and a last line with this part, and leave no folder.
    #[track_caller]
    pub fn refuses(&self, args: &str, code: i32, part: &str) {
        let out = self.run(&format!("{args} -o no"));
        let said = stderr(&out);
        let last = said.lines().last().unwrap_or_default();
        assert!(out.status.code() == Some(code) && last.contains(part), "{args}: {said}");
        assert!(!self.path("no").exists(), "{args}");
    }

    /// Every event of a kind in the log of a run.
    pub fn events(&self, run: &str, kind: &str) -> Vec<Value> {
        let log = String::from_utf8(self.read(&format!("{run}/metrics.jsonl"))).unwrap();
        let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter(|event| event["event"] == kind).collect()
    }

    /// Asserts that `eval` of a run gives the loss and these numbers of its last evaluation, which was on `data`.
    #[track_caller]
    pub fn same_eval(&self, run: &str, data: &str, keys: &[&str]) {
        let last = self.events(run, "eval").pop().unwrap();
        let said = self.ok(&format!("eval --adapter {run} --data {data} --gpus cpu --json"));
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["loss"], last["eval_loss"], "{run}");
        for key in keys {
            let (said, last) = (&said[key], &last[key]);
            assert!(last.is_f64() && said == last, "{run}: {key} {said} {last}");
        }
        assert!(last["perplexity"].is_null(), "{run}");
    }

    /// A copy of the demonstration's model under `name`.
    pub fn model(&self, name: &str) -> PathBuf {
        let to = self.path(name);
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(demo().join("model")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        to
    }

    /// A copy with one changed JSON file.
    pub fn model_with(&self, name: &str, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.model(name).join(file);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    }

    /// A copy with changed weights: the header, and the bytes after it.
    pub fn model_weights(&self, name: &str, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
        let path = self.model(name).join("model.safetensors");
        let file = std::fs::read(&path).unwrap();
        let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&file[8..8 + n]).unwrap();
        let mut data = file[8 + n..].to_vec();
        change(&mut header, &mut data);
        let header = header.to_string();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.extend(data);
        std::fs::write(path, out).unwrap();
    }

    /// The binary, in the bench's folder, without settings from the environment.
    pub fn command(&self, args: &str) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_finetune"));
        c.current_dir(self.dir.path()).args(split(args)).stdin(Stdio::null());
        for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("FINETUNE_")) {
            c.env_remove(name);
        }
        c.env("XDG_CACHE_HOME", cache()).env("HF_HOME", self.path("hf")).env("NO_COLOR", "1");
        c
    }

    pub fn run(&self, args: &str) -> Output {
        self.command(args).output().unwrap()
    }

    pub fn start(&self, args: &str) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Runs, expects success, and returns stdout.
    #[track_caller]
    pub fn ok(&self, args: &str) -> String {
        let out = self.run(args);
        assert!(out.status.success(), "finetune {args}\n{}", stderr(&out));
        String::from_utf8(out.stdout).unwrap()
    }
}

/// One cache for all tests of this build, so that the demonstration is written once.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache")
}

pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")
}

pub fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Words; 'single quotes' keep spaces together.
fn split(args: &str) -> Vec<String> {
    let (mut out, mut word, mut quoted, mut any) = (Vec::new(), String::new(), false, false);
    for c in args.chars() {
        match c {
            '\'' => (quoted, any) = (!quoted, true),
            ' ' if !quoted => {
                if any || !word.is_empty() {
                    out.push(std::mem::take(&mut word));
                }
                any = false;
            }
            c => word.push(c),
        }
    }
    if any || !word.is_empty() {
        out.push(word);
    }
    out
}

/// Rows of the form prompt / completion, of different lengths.
pub fn rows(n: usize) -> String {
    let words = ["branch", "remote", "stash", "tag", "commit"];
    let row = |i: usize| {
        let prompt = format!("Show the {} {}", words[i % 5], "again ".repeat(i % 7));
        json!({ "prompt": prompt, "completion": format!("git {} --list {i}", words[i % 5]) })
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

/// Rows of a classifier with two classes.
pub fn classes(n: usize) -> String {
    let row = |i: usize| match i % 2 {
        0 => json!({ "text": format!("git push --force {i}"), "label": "unsafe" }),
        _ => json!({ "text": format!("git status {i}"), "label": "safe" }),
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

/// Rows of words with labels in the format IOB2, of different lengths.
pub fn words(n: usize) -> String {
    let row = |i: usize| {
        let named = [("git", "B-TOOL"), ("push", "B-VERB"), ("hard", "I-VERB"), ("now", "O")];
        let row: Vec<_> = (0..2 + i % 6).map(|at| named[(at * (1 + i % 3) + i) % 4]).collect();
        let (tokens, tags): (Vec<_>, Vec<_>) = row.into_iter().unzip();
        json!({ "tokens": tokens, "ner_tags": tags })
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

/// Rows with numbers, of different lengths.
pub fn numbers(n: usize) -> String {
    let row = |i: usize| {
        let text = format!("git push {}{}", "again ".repeat(i % 5), ["--force", "now"][i % 2]);
        json!({ "text": text, "label": (i % 2) as f64 - 0.25 * (i % 5) as f64 })
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}

/// Rows of preferences, of different lengths.
pub fn pairs(n: usize) -> String {
    let row = |i: usize| {
        let prompt = format!("Show the branch {}", "again ".repeat(i % 5));
        json!({ "prompt": prompt, "chosen": format!("git branch --list {i}"), "rejected": "git log ".repeat(1 + i % 3) })
    };
    (0..n).map(|i| row(i).to_string() + "\n").collect()
}
