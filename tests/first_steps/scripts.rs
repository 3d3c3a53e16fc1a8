//! Scripts with stand-ins, which come first in PATH and record their calls: tests/run.sh installs nothing without a
//! request, and recipes/slurm/job.sbatch requeues the job only if a resume can succeed.

use crate::cli_fixture::Bench;
use std::path::Path;
use std::process::{Command, Stdio};

/// `bash {script}` in the repository, with `stand_ins` (name, body in sh) in PATH; they append their calls to `$CALLS`.
fn bash(bench: &Bench, script: &str, stand_ins: &[(&str, &str)]) -> Command {
    for (name, body) in stand_ins {
        let text = format!("#!/bin/sh\necho \"{name} $*\" >> \"$CALLS\"\n{body}\n");
        let path = bench.file(&format!("bin/{name}"), &text);
        Command::new("chmod").arg("+x").arg(path).status().unwrap();
    }
    let path = format!("{}:{}", bench.path("bin").display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).env("PATH", path);
    bash.env("CALLS", bench.file("calls", "")).stdin(Stdio::null());
    bash
}

fn calls(bench: &Bench) -> String {
    String::from_utf8(bench.read("calls")).unwrap()
}

/// Runs tests/run.sh without Vulkan drivers and without the model: its exit code, its stderr, and the recorded calls.
fn run(args: &[&str], ci: &str) -> (i32, String, String) {
    let bench = Bench::new();
    let installers = ["apt-get", "pip", "pip3", "python3"].map(|name| (name, "exit 1"));
    let stand_ins: Vec<_> = installers.into_iter().chain([("cargo", "")]).collect();
    let out = bash(&bench, "tests/run.sh", &stand_ins)
        .args(args)
        .env("CI", ci)
        .env("XDG_CACHE_HOME", bench.path("cache"))
        .env("FINETUNE_SMOLLM2_GGUF", bench.path("none.gguf"))
        .env_remove("VK_DRIVER_FILES")
        .output()
        .unwrap();
    (out.status.code().unwrap(), String::from_utf8(out.stderr).unwrap(), calls(&bench))
}

#[test]
fn run_sh_installs_only_on_request() {
    // Arguments, CI, listed lines, absent lines, whether anything is installed.
    for (args, ci, listed, absent, installs) in [
        (&[][..], "", &["  vulkan ", "  smollm2 ", "nothing is installed"][..], "could not", false),
        (&["--no-install"], "true", &["  vulkan ", "nothing is installed"], "could not", false),
        (&["tidy"], "true", &[], "missing here", false),
        (&["some::filter"], "true", &[], "missing here", false),
        (&["wgpu_variants"], "", &["  vulkan "], "smollm2", false),
        (&["--install", "wgpu_variants"], "", &["vulkan could not be installed"], "smollm2", true),
        (&["parity_smollm2"], "true", &["FINETUNE_SMOLLM2_GGUF names no file"], "vulkan", false),
    ] {
        let (_, said, calls) = run(args, ci);
        let said = format!("{args:?} CI={ci}\n{said}\n{calls}");
        assert!(listed.iter().all(|part| said.contains(part)) && !said.contains(absent), "{said}");
        let others = calls.lines().filter(|line| !line.starts_with("cargo ")).count();
        // Without root, apt-get is not tried.
        let tried = others > 0 || said.contains("needs apt-get and root");
        assert_eq!(tried, installs, "{said}");
    }
}

#[test]
fn run_sh_accepts_the_name_of_a_test() {
    let (code, _, calls) = run(&["--no-install", "tidy", "unsafe"], "");
    let want = "cargo test --release --locked --workspace --no-fail-fast --test tidy unsafe\n";
    assert_eq!((code, calls.as_str()), (0, want));
    let (code, _, calls) = run(&["--no-install"], "");
    // The build, the tests that run beside the others, and the others; two lines for each class with fewer instructions than
    // this processor's.
    let own = std::process::Command::new(env!("CARGO_BIN_EXE_finetune")).arg("devices").output().unwrap();
    let own = String::from_utf8(own.stdout).unwrap();
    let fewer = ["avx2", "generic"].iter().filter(|cpu| !own.contains(&format!("class cpu-{cpu}-"))).count();
    assert_eq!(
        (code, calls.lines().count(), calls.matches("--test op_verbs").count()),
        (0, 3 + 2 * fewer, 1 + fewer),
        "{calls}"
    );
    // No target is left out, and none runs twice.
    let whole = calls.lines().filter(|line| !line.contains("--skip")).collect::<Vec<_>>().join(" ");
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").exists() {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            assert_eq!(whole.split(' ').filter(|word| *word == name).count(), 1, "{name}: {whole}");
        }
    }
}

#[test]
fn slurm_job_is_requeued_on_exit_75_only() {
    for code in [0, 1, 3, 75, 78] {
        let bench = Bench::new();
        // Both tasks in turn. Task 1 is killed, which is not the job's end.
        let srun = "while [ $1 != bash ]; do shift; done; export SLURM_STEP_ID=0\n\
            SLURM_PROCID=1 \"$@\"; SLURM_PROCID=0 \"$@\"";
        let finetune = format!("[ $SLURM_PROCID = 0 ] || exit 137; exit {code}");
        let stand_ins = [("srun", srun), ("scontrol", ""), ("scancel", ""), ("finetune", finetune.as_str())];
        let mut job = bash(&bench, "recipes/slurm/job.sbatch", &stand_ins);
        job.current_dir(bench.path("")).env("SLURM_JOB_ID", "3017").env_remove("SLURM_ARRAY_TASK_ID");
        let out = job.args(["demo", "--rank", "4"]).output().unwrap();
        let calls = calls(&bench);
        assert_eq!(out.status.code(), Some(code), "{calls}{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(calls.contains("scontrol requeue 3017"), code == 75, "{calls}");
        // The other tasks do not wait for a task 0 that has failed.
        assert_eq!(calls.contains("scancel --signal=TERM 3017.0"), code != 0, "{calls}");
        let run = "finetune demo --rank 4 --role auto --output runs/slurm-3017 --resume\n";
        assert_eq!(calls.matches(run).count(), 2, "{calls}");
    }
}

#[test]
fn line_of_a_file_has_the_options_of_an_array_job() {
    let bench = Bench::new();
    let options = bench.file("runs.txt", "demo --rank 4\nother --sample-prompt 'two words'\n");
    let stand_ins = [("srun", "exit 1"), ("scontrol", "")];
    let mut job = bash(&bench, "recipes/slurm/job.sbatch", &stand_ins);
    job.current_dir(bench.path("")).env("SLURM_JOB_ID", "9").env("SLURM_ARRAY_TASK_ID", "2").arg(options);
    // srun itself failed: there is no exit code of task 0.
    assert_eq!(job.output().unwrap().status.code(), Some(1));
    let calls = calls(&bench);
    assert!(calls.contains("bash other --sample-prompt two words\n"), "{calls}");
}
