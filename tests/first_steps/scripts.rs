//! Scripts with stand-ins, which come first in PATH and record their calls: tests/run.sh installs nothing without a
//! request, and recipes/slurm.sbatch requeues the job only if a resume can succeed.

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
    assert!(code == 0 && calls.lines().count() == 5 && calls.contains("--test op_verbs"), "{calls}");
}

#[test]
fn slurm_job_is_requeued_on_exit_75_only() {
    for code in [0, 1, 3, 75, 78] {
        let bench = Bench::new();
        let srun = format!("case \"$*\" in *coordinator*bind*) exit {code};; esac");
        let scontrol = "[ \"$1\" != show ] || printf 'n7\\nn8\\n'";
        let stand_ins = [("srun", srun.as_str()), ("scontrol", scontrol), ("finetune", "")];
        let out = bash(&bench, "recipes/slurm.sbatch", &stand_ins)
            .args(["demo", "--rank", "4"])
            .current_dir(bench.path(""))
            .env("SLURM_JOB_ID", "3017")
            .env("SLURM_JOB_NODELIST", "n[7-8]")
            .env("SLURM_NNODES", "2")
            .output()
            .unwrap();
        let calls = calls(&bench);
        assert_eq!(out.status.code(), Some(code), "{calls}{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(calls.contains("scontrol requeue 3017"), code == 75, "{calls}");
        assert!(
            calls.contains("--nodelist=n7 finetune demo --rank 4 --role coordinator --bind :9017"),
            "{calls}"
        );
        // The script does not wait for the workers of a failed run.
        assert!(code != 0 || calls.contains("finetune --role worker --coordinator n7:9017"), "{calls}");
    }
}
