//! Real processes with a separate home folder, which are killed at the end of the test.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The token of every process without one of its own.
pub const TOKEN: &str = "5f3c9a1e7d2b4c6f8091a2b3c4d5e6f70918273645546372819000aabbccddee";

/// A short deterministic run.
pub const RUN: &str = "--max-steps 4 --batch-size 4 --eval-steps 100 -o";

/// A working folder, which is the home folder too.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Place(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// Starts `finetune` with these arguments (and `NAME=value` before them for its environment).
    pub fn start(&self, name: &str, line: &str) -> Process {
        let log = self.path(&format!("{name}.log"));
        let file = std::fs::File::create(&log).unwrap();
        let out = || Stdio::from(file.try_clone().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        for (key, _) in
            std::env::vars().filter(|(key, _)| key.starts_with("FINETUNE_") || key.starts_with("XDG_"))
        {
            command.env_remove(key);
        }
        command.env("HOME", self.0.path()).env("FINETUNE_TOKEN", TOKEN).current_dir(self.0.path());
        for word in line.split_whitespace() {
            match word.split_once('=') {
                Some((key, value)) if key.chars().all(|c| c.is_ascii_uppercase() || c == '_') => {
                    command.env(key, value);
                }
                _ => drop(command.arg(word)),
            }
        }
        let child = command.stdin(Stdio::null()).stdout(out()).stderr(out()).spawn().unwrap();
        Process { child, log, name: name.into() }
    }

    /// A coordinator on a free port, and its address.
    pub fn coordinator(&self, line: &str) -> (Process, String) {
        let process = self.start("coordinator", &format!("--role coordinator --bind 127.0.0.1:0 {line}"));
        let address = process.listens();
        (process, address)
    }

    /// The adapter in a run's folder.
    pub fn adapter(&self, out: &str) -> Vec<u8> {
        std::fs::read(self.path(out).join("adapter_model.safetensors")).unwrap()
    }
}

pub struct Process {
    child: Child,
    log: std::path::PathBuf,
    name: String,
}

impl Process {
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the process has printed `part`.
    pub fn says(&self, part: &str) {
        let began = Instant::now();
        while !self.said().contains(part) {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "{} never says {part:?}:\n{}",
                self.name,
                self.said()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The address on which the process listens.
    pub fn listens(&self) -> String {
        self.says("listens on 127");
        let said = self.said();
        let after = said.split("listens on ").nth(1).unwrap();
        after.split([';', ' ', '\n']).next().unwrap().to_string()
    }

    /// The peak memory of the process in bytes, or `None` once it has ended.
    pub fn most(&mut self) -> Option<u64> {
        if self.child.try_wait().unwrap().is_some() {
            return None;
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10)
    }

    /// Waits for the end: exit code and last line.
    pub fn ends(&mut self) -> (i32, String) {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let last = self.said().lines().last().unwrap_or_default().to_string();
                return (status.code().unwrap_or(-1), last);
            }
            assert!(
                began.elapsed() < Duration::from_secs(120),
                "{} does not end:\n{}",
                self.name,
                self.said()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[cfg(unix)]
    pub fn terminate(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
