//! Signals to the real program on the demonstration: SIGUSR1 saves and continues, SIGINT stops after the step, SIGTERM
//! and SIGHUP stop at once; the resumed run gives the bytes of an uninterrupted one. A closed output changes nothing.
#![cfg(unix)]

use finetune::report::read;
use finetune::train::event::Event;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const STEPS: &str = "200";

fn command(out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    command.args(["--max-steps", STEPS, "--batch-size", "8", "--eval-steps", "0", "--threads", "1"]);
    command.arg("-o").arg(out).args(more).stderr(Stdio::piped());
    command.current_dir(out.parent().unwrap());
    command
}

fn events(out: &Path) -> Vec<Event> {
    read(&out.join("metrics.jsonl")).unwrap()
}

/// Waits until the run has logged an event for which `seen` is true.
fn wait(child: &mut Child, out: &Path, seen: impl Fn(&Event) -> bool) {
    let began = Instant::now();
    while !events(out).iter().any(&seen) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended early");
        assert!(began.elapsed() < Duration::from_secs(120), "nothing was seen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

fn step(event: &Event) -> Option<u64> {
    if let Event::Step(step) = event { Some(step.step) } else { None }
}

fn saved(event: &Event) -> Option<u64> {
    if let Event::Checkpoint(checkpoint) = event { Some(checkpoint.step) } else { None }
}

/// Interrupts a run after its second step, resumes it, and returns its adapter.
fn check(dir: &Path, name: &str) -> Vec<u8> {
    let out = dir.join(name);
    let mut child = command(&out, &[]).spawn().unwrap();
    wait(&mut child, &out, |e| step(e) == Some(2));
    signal(&child, "USR1");
    wait(&mut child, &out, |e| matches!(e, Event::Checkpoint(_)));
    let first = events(&out).iter().find_map(saved).unwrap();
    wait(&mut child, &out, |e| step(e) > Some(first));
    let sent = Instant::now();
    signal(&child, name);
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(sent.elapsed() < Duration::from_secs(20), "{name}: {:?}", sent.elapsed());
    assert_eq!(ended.status.code(), Some(75), "{name}: {said}");
    assert!(said.lines().last().unwrap_or_default().contains("--resume"), "{name}: {said}");

    let steps = events(&out).iter().filter_map(step).max().unwrap();
    let saved: Vec<u64> = events(&out).iter().filter_map(saved).collect();
    assert!(saved.len() >= 2 && saved[0] < steps, "{name}: it went on after SIGUSR1: {saved:?}, {steps}");
    assert_eq!(saved.last(), Some(&steps), "{name}: the last finished step is saved");

    let resumed = command(&out, &["--resume"]).output().unwrap();
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let all: Vec<u64> = events(&out).iter().filter_map(step).collect();
    assert_eq!(all, (1..=STEPS.parse().unwrap()).collect::<Vec<u64>>(), "{name}: every step once");
    adapter(&out)
}

fn adapter(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("adapter_model.safetensors")).unwrap()
}

#[test]
fn an_interrupted_run_is_resumed_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    // A folder named `demo`, as the repository has one, does not replace the built-in demonstration.
    std::fs::create_dir(dir.path().join("demo")).unwrap();
    let whole: PathBuf = dir.path().join("whole");
    let ended = command(&whole, &[]).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    for name in ["INT", "TERM"] {
        assert!(check(dir.path(), name) == adapter(&whole), "SIG{name}: other bytes");
    }
}

/// `2>&1 | tee log` and Ctrl-C, which ends tee first; a dropped ssh connection, which closes the terminal.
#[test]
fn run_is_saved_after_its_output_closes() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["INT", "HUP"] {
        let out = dir.path().join(name);
        let mut child = from_a_shell(&out, "default");
        wait(&mut child, &out, |e| step(e) == Some(2));
        drop(child.stderr.take());
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(75), "SIG{name}");
        let steps = events(&out).iter().filter_map(step).max();
        assert_eq!(events(&out).iter().filter_map(saved).max(), steps, "SIG{name}");
        assert!(out.join("report.html").exists(), "SIG{name}");
    }
}

/// `nohup` starts a program so.
#[test]
fn hangup_ignored_at_the_start_stays_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut child = from_a_shell(&out, "ignore");
    wait(&mut child, &out, |e| step(e) == Some(2));
    signal(&child, "HUP");
    let whole = child.wait_with_output().unwrap();
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
}

/// The run with this disposition of SIGHUP, however the tests themselves were started.
fn from_a_shell(out: &Path, hang_up: &str) -> Child {
    let run = command(out, &[]);
    let mut env = Command::new("env");
    env.arg(format!("--{hang_up}-signal=HUP")).arg(run.get_program()).args(run.get_args());
    env.current_dir(out.parent().unwrap()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A request for a checkpoint before there is anything to save: SLURM's `--signal=USR1` may arrive while rows are read.
#[cfg(target_os = "linux")]
#[test]
fn sigusr1_before_the_first_step_ends_no_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut child =
        command(&out, &["demo", "--data", "-", "--epochs", "1"]).stdin(Stdio::piped()).spawn().unwrap();
    let ignored = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim);
        u64::from_str_radix(mask.unwrap_or("0"), 16).unwrap() >> (10 - 1) & 1 == 1
    };
    let began = Instant::now();
    while !ignored() {
        assert!(began.elapsed() < Duration::from_secs(60), "SIGUSR1 has the system's own answer");
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&child, "USR1");
    let rows = "{\"prompt\": \"a\", \"completion\": \"b\"}\n".repeat(8);
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), rows.as_bytes()).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

/// `ulimit -f`: a file that may not grow further gives an error with its name, and no partly written file stays.
#[test]
fn file_size_limit_is_an_error_like_a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let whole = command(&dir.path().join("whole"), &[]).output().unwrap();
    assert!(whole.status.success(), "the demonstration's files are laid out without a limit");
    let out = dir.path().join("out");
    let run = command(&out, &["--save-steps", "1"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 100; exec \"$@\"", "sh"]).arg(run.get_program()).args(run.get_args());
    let ended = shell.current_dir(dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("checkpoint-1: ") && last.contains("File too large"), "{said}");
    let left = std::fs::read_dir(&out).unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
    let left: Vec<String> =
        left.filter(|name| name.contains("checkpoint") || name.ends_with(".tmp")).collect();
    assert!(left.is_empty(), "{left:?}");
}
