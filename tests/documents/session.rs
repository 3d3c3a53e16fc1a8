//! One folder in which the commands of a document run, with the files that they name.

use crate::cli_fixture::{classes, demo, rows};
use crate::markdown::{self, Command};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// The longest time that one command may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// What is run instead of a part of a command. {port} is a free port.
const INSTEAD: &[(&str, &str)] = &[
    // Built by the test; the first steps show every kind of line.
    ("cargo run --release", "finetune --max-steps 12"),
    ("--role coordinator", "--role coordinator --bind :{port}"),
    ("first:9000", "127.0.0.1:{port}"),
];

pub struct Session {
    dir: tempfile::TempDir,
    port: u16,
    /// Commands of a shared run, which wait for one another.
    running: Vec<(Command, Child, PathBuf)>,
    logs: usize,
}

impl Session {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("rows.jsonl", &rows(24));
        write("test.jsonl", &rows(3));
        write("classes.jsonl", &classes(60));
        write("chat.jsonl", &chat());
        write("theirs.yml", THEIRS);
        fs::copy(demo().join("train.jsonl"), dir.path().join("train.jsonl")).unwrap();
        copy(&demo(), &dir.path().join("demo"));
        copy(&demo().join("model"), &dir.path().join("MODEL"));
        fs::create_dir(dir.path().join("bin")).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_finetune"), dir.path().join("bin/finetune")).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Self { dir, port, running: Vec::new(), logs: 0 }
    }

    /// Runs the command, or begins it if it takes part in a shared run. Returns what differs from the document.
    pub fn run(&mut self, command: Command) -> Vec<String> {
        if command.text.starts_with("finetune --role") {
            let (child, log) = self.start(&command);
            self.running.push((command, child, log));
            return Vec::new();
        }
        let mut found = if command.machine.is_empty() { self.finish() } else { Vec::new() };
        if let Some(name) = command.text.strip_prefix("cat ") {
            // A file that the document shows.
            fs::write(self.dir.path().join(name), command.shown.join("\n") + "\n").unwrap();
        }
        let (child, log) = self.start(&command);
        found.extend(self.end(&command, child, &log));
        found
    }

    /// Waits for the commands of a shared run.
    pub fn finish(&mut self) -> Vec<String> {
        let running = std::mem::take(&mut self.running);
        running.into_iter().filter_map(|(command, child, log)| self.end(&command, child, &log)).collect()
    }

    fn home(&self, machine: &str) -> PathBuf {
        self.dir.path().join(format!("home{machine}"))
    }

    fn start(&mut self, command: &Command) -> (Child, PathBuf) {
        let home = self.home(&command.machine);
        fs::create_dir_all(home.join(".local/share/bash-completion/completions")).unwrap();
        let mut text = command.text.clone();
        for (part, instead) in INSTEAD {
            text = text.replace(part, &instead.replace("{port}", &self.port.to_string()));
        }
        self.logs += 1;
        let log = self.dir.path().join(format!("{}.log", self.logs));
        let out = File::create(&log).unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = std::process::Command::new("bash");
        for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("FINETUNE_") || n.starts_with("HF_"))
        {
            shell.env_remove(name);
        }
        shell.arg("-c").arg(text).current_dir(self.dir.path());
        shell.env("PATH", format!("{}:{path}", self.dir.path().join("bin").display()));
        shell.env("HOME", &home).env("NO_COLOR", "1").env("COLUMNS", "100");
        shell.env("XDG_CACHE_HOME", home.join(".cache")).env("XDG_CONFIG_HOME", home.join(".config"));
        // The documents show a machine without a card; a software driver would also take seconds to be tested.
        shell.env("VK_DRIVER_FILES", self.dir.path().join("none.json"));
        shell.stdin(self.input(command)).stdout(out.try_clone().unwrap()).stderr(out);
        (shell.spawn().unwrap(), log)
    }

    /// `finetune token --set` reads the token of the first machine, once that has one.
    fn input(&self, command: &Command) -> Stdio {
        if !command.text.contains("token --set") {
            return Stdio::null();
        }
        let token = self.home("first").join(".config/finetune/token");
        let until = Instant::now() + PATIENCE;
        while !token.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        File::open(token).unwrap().into()
    }

    /// Waits for the command; what differs from the document.
    fn end(&self, command: &Command, mut child: Child, log: &Path) -> Option<String> {
        let until = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if Instant::now() > until => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    break None;
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let real =
            fs::read_to_string(log).unwrap().replace(&*self.home(&command.machine).to_string_lossy(), "~");
        let real = real.replace(&*self.dir.path().to_string_lossy(), "~");
        let refused = command.shown.last().is_some_and(|line| line.starts_with("error: "));
        let problem = match status {
            None => Err("it does not end".into()),
            // What is missing, and so the exit code, depends on the machine.
            Some(_) if command.text.starts_with("finetune doctor") => {
                markdown::compare(&checks(&command.shown), &checks(real.lines()).join("\n"))
            }
            Some(status) if status.success() == refused => Err(format!("it ended with {status}")),
            Some(_) if command.shown.is_empty() => Ok(()),
            // The text that a model generates depends on the processor.
            Some(_) if command.text.starts_with("finetune generate") => Ok(()),
            Some(_) => markdown::compare(&command.shown, &real),
        };
        problem.err().map(|problem| {
            format!("line {}: {}\n{problem}\nthe real output:\n{real}", command.line, command.text)
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for (_, child, _) in &mut self.running {
            // Already ended, or of no use any more.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Names of the checks in the output of `finetune doctor`; all of them where none is shown.
fn checks<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> Vec<String> {
    let found: Vec<String> = lines
        .into_iter()
        .filter_map(|line| {
            let mut words = line.as_ref().split_whitespace();
            match words.next()? {
                "..." => Some("...".into()),
                "ok" | "warning" | "failed" | "skipped" => words.next().map(String::from),
                _ => None,
            }
        })
        .collect();
    if found.is_empty() { vec!["...".into()] } else { found }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// Conversations, three of which have no assistant.
fn chat() -> String {
    let row = |i: usize| {
        let answer = if [5, 11, 17].contains(&i) { "user" } else { "assistant" };
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"Show tag {i}\"}}, \
             {{\"role\": \"{answer}\", \"content\": \"git tag --list {i}\"}}]}}\n"
        )
    };
    (0..24).map(row).collect()
}

/// A configuration of another trainer.
const THEIRS: &str = "\
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
datasets:
  - path: rows.jsonl
    type: alpaca
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
num_epochs: 2
learning_rate: 0.0002
lr_scheduler: cosine
warmup_ratio: 0.1
micro_batch_size: 2
gradient_accumulation_steps: 4
special_tokens:
  eos_token: \"<end>\"
";
