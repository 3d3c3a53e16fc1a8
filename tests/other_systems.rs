//! The program for Windows under wine, and the one for ARM under qemu: what it prints, that it trains to the bytes of
//! this system's program, and that it works for a coordinator of this system. `packaging/cross.sh` builds both.
#![cfg(unix)]

mod cli_fixture;

use cli_fixture::{Bench, stderr};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

/// A program of another system, and what starts it here.
struct Foreign {
    program: String,
    starter: Vec<String>,
}

impl Foreign {
    /// None, with a line that says so, where the program was not built or its starter is missing.
    fn new(variable: &str, starter: &[&str]) -> Option<Self> {
        let Ok(program) = std::env::var(variable) else {
            eprintln!(
                "skipped: no {} or no program for it (tests/run.sh --install other_systems builds it)",
                starter[0]
            );
            return None;
        };
        Some(Foreign { program, starter: starter.iter().map(|s| s.to_string()).collect() })
    }

    fn command(&self, bench: &Bench, args: &str) -> Command {
        let ours = bench.command(args);
        let mut command = Command::new(&self.starter[0]);
        command.args(&self.starter[1..]).arg(&self.program).args(ours.get_args());
        command.current_dir(bench.dir.path()).stdin(Stdio::null());
        for (name, value) in ours.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        // Of wine: a folder of its own, and no messages.
        let prefix = concat!(env!("CARGO_TARGET_TMPDIR"), "/wine");
        command.env("WINEPREFIX", prefix).env("WINEDEBUG", "-all").env("USER", "finetune");
        command.env("XDG_CACHE_HOME", bench.path("cache")).env("XDG_CONFIG_HOME", bench.path("config"));
        command
    }

    #[track_caller]
    fn ok(&self, bench: &Bench, args: &str) -> Output {
        let out = self.command(bench, args).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{} {args}\n{said}\n{}", self.program, stderr(&out));
        out
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace("\r\n", "\n")
}

/// Help, a look at the machine, a whole run with evaluation and samples, and an answer of its adapter. In f32, which is
/// one class on all processors; NEON has no fast bf16.
fn has_the_bytes_of_this_system(foreign: &Foreign) {
    let bench = Bench::new();
    assert_eq!(text(&foreign.ok(&bench, "help").stdout), text(bench.ok("help").as_bytes()));
    let doctor = text(&foreign.ok(&bench, "doctor").stdout);
    assert!(doctor.contains("of memory free"), "{doctor}");
    let demonstration = "--gpus cpu --dtype f32 --max-steps 12 --sample-rows 2";
    bench.ok(&format!("{demonstration} -o here"));
    let said = stderr(&foreign.ok(&bench, &format!("{demonstration} -o there")));
    assert!(said.contains("adapter  there"), "{said}");
    bench.same_adapter("here", "there");
    for file in ["metrics.jsonl", "run.yaml", "report.html", "adapter_config.json"] {
        assert!(bench.path(&format!("there/{file}")).exists(), "{file}\n{said}");
    }
    let generate = "generate demo --adapter here --prompt 'Undo the last commit' --gpus cpu --dtype f32 --max-new-tokens 12";
    assert_eq!(text(&foreign.ok(&bench, generate).stdout), bench.ok(generate));
}

/// Lines of a process, until one contains `part`.
fn hear(child: &mut Child, part: &str) -> (String, BufReader<impl Read + use<>>) {
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains(part) {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "{part:?} never came");
    }
    (line, lines)
}

/// One worker, for a coordinator of this system that has no device: the adapter has the bytes of a run without it.
fn works_for_this_system(foreign: &Foreign) {
    let bench = Bench::new();
    let run =
        "demo --data rows.jsonl --batch-size 8 --micro-batch-tokens 64 --max-steps 4 --rank 4 --dtype f32";
    bench.ok(&format!("{run} --gpus cpu -o alone"));
    let team = "--role coordinator --gpus none --insecure --bind 127.0.0.1:0 --expect-workers 1 -o team";
    let mut coordinator = bench.start(&format!("{run} {team}"));
    let (line, mut rest) = hear(&mut coordinator, "listens on 127.0.0.1:");
    let port: String =
        line.chars().skip_while(|c| *c != ':').skip(1).take_while(char::is_ascii_digit).collect();
    let worker = format!("--role worker --insecure --gpus cpu --dtype f32 --coordinator 127.0.0.1:{port}");
    let worker = foreign.command(&bench, &worker).output().unwrap();
    let mut said = String::new();
    if !worker.status.success() {
        coordinator.kill().unwrap();
    }
    rest.read_to_string(&mut said).unwrap();
    assert!(coordinator.wait().unwrap().success(), "{said}\n{}", stderr(&worker));
    assert!(stderr(&worker).contains("run complete"), "{}", stderr(&worker));
    bench.same_adapter("alone", "team");
}

fn windows() -> Option<Foreign> {
    Foreign::new("FINETUNE_WINDOWS_BINARY", &["wine"])
}

fn aarch64() -> Option<Foreign> {
    Foreign::new("FINETUNE_AARCH64_BINARY", &["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"])
}

#[test]
fn windows_has_the_bytes_of_this_system() {
    windows().iter().for_each(has_the_bytes_of_this_system);
}

#[test]
fn windows_works_for_this_system() {
    windows().iter().for_each(works_for_this_system);
}

#[test]
fn aarch64_has_the_bytes_of_this_system() {
    aarch64().iter().for_each(has_the_bytes_of_this_system);
}

#[test]
fn aarch64_works_for_this_system() {
    aarch64().iter().for_each(works_for_this_system);
}
