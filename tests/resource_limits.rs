//! Runs with few resources: few open files, a small or full disk, a folder that may not be written, no home, output
//! that is not read. Each run succeeds or ends with code 1 and one line, leaves no partly written file, and resumes
//! with --resume to the bytes of an unlimited run. (Memory: tests/memory.rs; `ulimit -f`: tests/train_signals.rs.)
#![cfg(target_os = "linux")]

mod cli_fixture;

use cli_fixture::{ADAPTER, Bench, stderr};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const RUN: &str = "demo --data rows.jsonl --max-steps 6 --save-steps 2 --rank 4 --threads 1";

/// Runs into `out`, in a shell that executes `before` first.
fn limited(b: &Bench, before: &str, out: &str) -> Output {
    let inner = b.command(&format!("{RUN} -o {out}"));
    let mut shell = Command::new("sh");
    shell.args(["-c", before, "sh"]).arg(inner.get_program()).args(inner.get_args());
    shell.current_dir(b.dir.path()).stdin(std::process::Stdio::null());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.output().unwrap()
}

/// Files below `dir` that only an unfinished write leaves.
fn half_written(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path());
    let mut found = Vec::new();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.contains(".tmp") {
            found.push(path);
        } else if path.is_dir() {
            found.extend(half_written(&path));
        }
    }
    found
}

/// Checks the end of the run: either code 0 and the bytes of `whole`, or code 1, one line that contains `says`, and the
/// same bytes after `relieve` has restored the resource.
#[track_caller]
fn check(b: &Bench, (before, out): (&str, &str), says: &str, relieve: impl FnOnce()) {
    let ended = limited(b, before, out);
    let said = stderr(&ended);
    let errors = said.lines().filter(|line| line.starts_with("error: ")).count();
    let folder = b.path(out);
    // Removing a folder needs a file descriptor too: then the resumed run removes it.
    if !before.starts_with("ulimit -n") {
        assert_eq!(half_written(&folder), [] as [PathBuf; 0], "{before}\n{said}");
    }
    match ended.status.code() {
        Some(0) => assert_eq!(errors, 0, "{before}\n{said}"),
        Some(1) => {
            let last = said.lines().last().unwrap_or_default();
            assert!(errors == 1 && last.starts_with("error: ") && last.contains(says), "{before}\n{said}");
            relieve();
            // Without a folder there is nothing to resume.
            let again = if folder.exists() { " --resume" } else { "" };
            b.ok(&format!("{RUN} -q -o {out}{again}"));
        }
        code => panic!("{before}: {code:?}\n{said}"),
    }
    assert!(
        b.read(&format!("{out}/{ADAPTER}")) == b.read(&format!("whole/{ADAPTER}")),
        "{before}: other bytes"
    );
}

fn bench() -> Bench {
    let b = Bench::new();
    b.ok(&format!("{RUN} -q -o whole"));
    b
}

#[test]
fn few_open_files_end_a_run_with_one_line() {
    let b = bench();
    for most in [4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24] {
        check(&b, (&format!("ulimit -n {most}; exec \"$@\""), &format!("files-{most}")), "", || ());
    }
}

#[test]
fn closed_or_full_output_ends_no_run() {
    let b = bench();
    for (index, before) in [
        "exec \"$@\" >&-",
        "exec \"$@\" 2>&-",
        "exec \"$@\" >&- 2>&-",
        "exec \"$@\" <&- >&- 2>&-",
        "exec \"$@\" >/dev/full",
        "exec \"$@\" 2>/dev/full",
        "\"$@\" 2>&1 | head -c 10 >/dev/null",
    ]
    .into_iter()
    .enumerate()
    {
        check(&b, (before, &format!("closed-{index}")), "", || ());
    }
}

#[test]
fn run_without_a_home_succeeds_or_names_what_is_missing() {
    let b = bench();
    let homes = [
        "unset HOME XDG_CACHE_HOME",
        "export HOME= XDG_CACHE_HOME=",
        "export HOME=/dev/null XDG_CACHE_HOME=/dev/null",
    ];
    for (index, home) in homes.into_iter().enumerate() {
        check(&b, (&format!("{home}; exec \"$@\""), &format!("home-{index}")), "", || ());
    }
}

/// A file system in memory, gone when dropped.
struct Small(PathBuf);

impl Small {
    /// `None` if mounting is not permitted.
    fn mount(dir: PathBuf, kilobytes: u32) -> Option<Self> {
        std::fs::create_dir_all(&dir).unwrap();
        let mounted =
            Small::does("mount", &["-t", "tmpfs", "-o", &format!("size={kilobytes}k"), "tmpfs"], &dir);
        if !mounted {
            // Not by a macro: the harness captures macro output of tests that pass.
            let _ = writeln!(std::io::stderr(), "SKIPPED: not allowed to mount a tmpfs (run as root)");
        }
        mounted.then_some(Small(dir))
    }

    fn does(program: &str, args: &[&str], dir: &Path) -> bool {
        Command::new(program).args(args).arg(dir).output().is_ok_and(|out| out.status.success())
    }

    fn remount(&self, option: &str) {
        assert!(Small::does("mount", &["-o", &format!("remount,{option}")], &self.0), "{option}");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        Small::does("umount", &[], &self.0);
    }
}

/// Disk sizes that fill up in the first checkpoint, in a later one, or in the last files.
#[test]
fn run_ended_by_a_full_disk_can_be_resumed() {
    let b = bench();
    for kilobytes in [8, 100, 400, 700, 1000, 1300, 1700, 2200] {
        let name = format!("small-{kilobytes}");
        let Some(small) = Small::mount(b.path(&name), kilobytes) else { return };
        let out = format!("{name}/out");
        check(&b, ("exec \"$@\"", &out), "disk", || small.remount("size=64m"));
    }
}

#[test]
fn unwritable_folder_is_named() {
    let b = bench();
    let Some(fixed) = Small::mount(b.path("fixed"), 1000) else { return };
    fixed.remount("ro");
    check(&b, ("exec \"$@\"", "fixed/out"), "fixed", || fixed.remount("rw,size=64m"));
}
