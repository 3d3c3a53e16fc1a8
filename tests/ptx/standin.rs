//! Failures of a driver, simulated by a stand-in libcuda.so.1 that is compiled here. A process loads the library
//! once, so each case runs in its own process: this test program, with one test.

use finetune::backend::cuda::{Trial, devices};
use finetune::backend::{Backend, Cuda, view, view_mut};
use std::path::Path;
use std::process::Command;

/// The value of STANDIN, and the message that the run must print.
const CASES: &[(&str, &str)] = &[
    ("fine", "8.6 Stand-in 0000:0a:00.0 17179869184 | read [0.0, 0.0, 0.0] cuda-sm86-f32-stand-in-"),
    ("one-broken", "8.6 Stand-in 0000:0a:00.0 17179869184 | read [0.0, 0.0, 0.0]"),
    ("broken", "the NVIDIA driver does not describe device 0: CUDA_ERROR_UNKNOWN; `nvidia-smi` says more"),
    (
        "pascal",
        "cuda:0: compute capability 6.1, and the kernels need 7.0 (Volta): --gpu-backend wgpu drives it through Vulkan",
    ),
    ("context", "cuda:0 (Stand-in): CUDA_ERROR_INVALID_CONTEXT"),
    ("stream", "cuda:0 (Stand-in): CUDA_ERROR_"),
    ("pinned", "cuda:0 (Stand-in): CUDA_ERROR_OUT_OF_MEMORY"),
    ("upload", "upload: CUDA_ERROR_ILLEGAL_ADDRESS, at or before start"),
    ("gone", "read: CUDA_ERROR_LAUNCH_FAILED, at or before fill"),
    ("no-device", "the NVIDIA driver has no device (CUDA_VISIBLE_DEVICES may hide it)"),
    ("hidden", "the NVIDIA driver has no device (CUDA_VISIBLE_DEVICES may hide it)"),
    ("stub", "put the folder of the driver's libcuda.so.1 first in LD_LIBRARY_PATH"),
    ("mismatch", "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ("old", "the NVIDIA driver is too old: CUDA 10.2, which reads PTX 6.5, and the kernels are PTX 7.0"),
    ("busy", "cuda:0 (Stand-in): CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ("out-of-memory", "cuda:0 (Stand-in): out of memory: 512 bytes needed"),
    (
        "compiler",
        "fill.ptx does not compile: CUDA_ERROR_INVALID_PTX: ptxas application ptx input, line 7; error",
    ),
    ("entry", "fill.ptx: entry fill: CUDA_ERROR_NOT_FOUND"),
    ("launch", "launch: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, at or before fill"),
    ("illegal-address", "read: CUDA_ERROR_ILLEGAL_ADDRESS, at or before fill"),
    ("lost", "read: CUDA_ERROR_LAUNCH_FAILED, at or before fill"),
    ("silent", "cuda:0 (Stand-in): read: no answer within 1 s, at or before fill"),
    // The same for sm_70.
    ("volta", "cuda-sm70-f16-stand-in-"),
    ("turing", "cuda-sm75-f16-stand-in-"),
    ("volta-compiler", "cuda-sm70-f32-stand-in-"),
    ("volta-compiler", "cuda:0 (Stand-in): product_sm70.ptx does not compile: CUDA_ERROR_INVALID_PTX"),
    // For sm_90a: the stand-in computes nothing, and nothing disagrees with that; any speed is accepted here.
    ("hopper", "cuda-sm90-bf16-wgmma-stand-in-"),
    ("hopper-old", "cuda-sm90-bf16-stand-in-"),
    ("hopper-maps", "product_sm90a_nt: tensor map: CUDA_ERROR_NOT_SUPPORTED"),
    ("hopper-registers", "product_sm90a_nt: compiled for 160 registers, and it divides 168"),
    ("hopper-unknown", "product_sm90a_nt: registers: CUDA_ERROR_INVALID_VALUE"),
    ("hopper-attribute", "product_sm90a_nt: 197696 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"),
];

/// One case, inside its process: the result, in one line.
fn happens() -> Result<String, String> {
    let found = devices().map_err(|e| e.to_string())?;
    let broken = || found.broken.iter().map(|(_, why)| why.to_string()).collect::<Vec<_>>().join(", ");
    let d = found.devices.first().ok_or_else(broken)?;
    let listed = format!("{}.{} {} {} {}", d.capability.0, d.capability.1, d.name, d.pci, d.memory);
    let mut cuda = Cuda::open(0).map_err(|e| e.to_string())?;
    let (mut x, other) = (cuda.memory(3), cuda.memory(3));
    cuda.upload(view_mut(&mut x, 1, 3), &[0.0; 3]);
    // Used and dropped on another thread than the one that opened it, like one of several devices.
    let elsewhere = std::thread::spawn(move || {
        cuda.fill(view_mut(&mut x, 1, 3), 1.0);
        let mut out = [9.0; 3];
        cuda.read(view(&x, 1, 3), &mut out).map_err(|e| e.to_string())?;
        cuda.recycle(other);
        // Longer than the pinned memory for transfers.
        let long: Vec<f32> = (0..5 << 20).map(|i| i as f32).collect();
        let mut all = cuda.memory(long.len());
        cuda.upload(view_mut(&mut all, 1, long.len()), &long);
        let mut back = vec![0.0; long.len()];
        cuda.read(view(&all, 1, long.len()), &mut back).map_err(|e| e.to_string())?;
        assert!(back == long, "what was uploaded comes back");
        let second = Cuda::open(0).map_err(|e| e.to_string())?;
        drop(cuda);
        if std::env::var("STANDIN").is_ok_and(|case| case.starts_with("hopper")) {
            let trial = Trial { timed: (256, 512, 128), faster: 0.0 };
            let tried = second.bf16().map_err(|e| e.to_string())?.sm90a(trial);
            return Ok(format!("{} {}", tried.class(), tried.below().unwrap_or("")));
        }
        if std::env::var("STANDIN").is_ok_and(|case| case.starts_with("volta") || case == "turing") {
            let tried = second.sm70(Trial { timed: (130, 140, 64), faster: 0.0 });
            return Ok(format!("{} {}", tried.class(), tried.below().unwrap_or("")));
        }
        Ok(format!("read {out:?} {}", second.class()))
    });
    let said: Result<String, String> = elsewhere.join().unwrap();
    Ok(format!("{listed} | {}", said?))
}

#[test]
fn one_case() {
    if std::env::var_os("STANDIN").is_some() {
        println!("said: {}", happens().unwrap_or_else(|e| e));
    }
}

fn run(case: &str, libraries: &Path) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "standin::one_case", "--nocapture"]);
    child.env("FINETUNE_CUDA_WAIT", if case == "silent" { "1" } else { "120" });
    let done = child.env("STANDIN", case).env("LD_LIBRARY_PATH", libraries).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success(), "{case}: {said}{}", String::from_utf8_lossy(&done.stderr));
    said.lines().find_map(|l| l.split_once("said: ")).unwrap_or_else(|| panic!("{case}: {said}")).1.into()
}

/// The stand-in in a separate folder; None without a C compiler.
fn standin() -> Option<tempfile::TempDir> {
    standin_with(&[])
}

/// The same, with further arguments for the C compiler.
pub fn standin_with(flags: &[&str]) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ptx/libcuda.c");
    let library = folder.path().join("libcuda.so.1");
    match Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(&library)
        .arg(&source)
        .args(flags)
        .status()
    {
        Ok(status) => assert!(status.success(), "the stand-in compiles"),
        Err(_) => {
            println!("skipped: no C compiler");
            return None;
        }
    }
    std::fs::copy(&library, folder.path().join("libcuda.so")).unwrap();
    Some(folder)
}

/// The result, the messages, and the record of the stand-in.
pub struct Ran {
    pub out: String,
    pub said: String,
    pub log: Vec<String>,
}

impl Ran {
    /// Kernels and uploads, started in any way.
    pub fn work(&self) -> Vec<&str> {
        self.log.iter().map(String::as_str).filter(|line| !line.starts_with('#')).collect()
    }

    pub fn count(&self, line: &str) -> usize {
        self.log.iter().filter(|l| l.starts_with(line)).count()
    }
}

/// Runs that test in a separate process with STANDIN as the case and STANDIN_WORK as its work, and returns its result.
pub fn child(test: &str, case: &str, work: &str, libraries: &Path) -> Ran {
    let log = libraries.join(format!("{case}-{work}.log"));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env("STANDIN_LOG", &log);
    child.env("FINETUNE_CUDA_WAIT", if case == "silent" { "1" } else { "120" });
    child.env("STANDIN", case).env("STANDIN_WORK", work).env("LD_LIBRARY_PATH", libraries);
    let done = child.output().unwrap();
    let [out, said] = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(done.status.success() && !said.contains("misuse"), "{case}: {out}{said}");
    let out =
        out.lines().find_map(|l| l.split_once("said: ")).unwrap_or_else(|| panic!("{case}: {out}")).1.into();
    let log = std::fs::read_to_string(log).unwrap_or_default().lines().map(String::from).collect();
    Ran { out, said, log }
}

#[test]
fn every_failure_of_a_driver_has_a_name() {
    let Some(folder) = standin() else { return };
    for (case, want) in CASES {
        let said = run(case, folder.path());
        assert!(said.contains(want), "{case}: {said}");
    }
}

#[test]
fn a_driver_without_tensor_maps_is_no_panic() {
    let Some(folder) = standin_with(&["-DWITHOUT_MAPS"]) else { return };
    let said = run("hopper", folder.path());
    assert!(said.contains("cuda-sm90-bf16-stand-in-"), "{said}");
}

/// The value of STANDIN, the command line, the exit code, and a part of the last line.
const PROGRAM: &[(&str, &str, i32, &str)] = &[
    ("fine", "devices", 0, "Stand-in"),
    ("fine", "devices", 0, "discrete, cuda"),
    ("jetson", "devices", 0, "integrated, cuda"),
    ("pascal", "devices", 0, "compute capability 6.1, and the kernels need 7.0"),
    ("one-broken", "devices", 0, "cannot be opened: the NVIDIA driver does not describe device 1"),
    ("broken", "devices", 0, "cannot be opened: the NVIDIA driver does not describe device 0"),
    ("broken", "--gpu-backend cuda -o out", 78, "does not describe device 0: CUDA_ERROR_UNKNOWN"),
    // Another process uses the card: the message says this, not that memory is missing.
    ("busy", "--gpu-backend cuda -o out", 78, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (
        "old",
        "devices",
        0,
        "no GPU through cuda: the NVIDIA driver is too old: CUDA 10.2, which reads PTX 6.5",
    ),
    ("hidden", "devices", 0, "no GPU through cuda: the NVIDIA driver has no device (CUDA_VISIBLE_"),
    ("mismatch", "devices", 0, "no GPU through cuda: the NVIDIA driver does not start: CUDA_ERROR_"),
    ("busy", "devices", 0, "cannot be opened: cuda:0 (Stand-in): CUDA_ERROR_DEVICE_UNAVAILABLE"),
    ("fine", "devices --check", 1, "cuda 0: computes wrong numbers"),
    ("fine", "generate --gpu-backend cuda --prompt hi", 1, "cuda 0 Stand-in: computes wrong numbers"),
    // Its kernels do nothing: the self-test detects that before the first step.
    ("fine", "--gpu-backend cuda -o out", 78, "cuda 0 Stand-in: computes wrong numbers"),
    // Without a typed backend too: the card is of capability 8.6.
    ("fine", "-o out", 78, "cuda 0 Stand-in: computes wrong numbers"),
    // Two cards in one process, each with a thread.
    (
        "two",
        "--gpu-backend cuda --gpus 0,1 -o out",
        78,
        "check its driver; cuda 1 Stand-in: computes wrong numbers",
    ),
    ("launch", "--gpu-backend cuda -o out", 78, "launch: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    ("fine", "--gpu-backend cuda --memory-limit 1MB -o out", 78, " MB, it has 1 MB)"),
    (
        "fine",
        "generate --gpu-backend cuda --memory-limit 1MB --offload never --prompt hi",
        78,
        "the weights alone do not fit: choose",
    ),
    // A list launches no kernel that is untried, and says so in the class.
    ("volta-compiler", "devices", 0, "class cuda-sm70-f32-stand-in-cuda12080-untried"),
    ("hopper", "devices", 0, "-untried"),
    // The trial's message, once for any number of openings of the card, and not if f32 is typed.
    (
        "volta-compiler",
        "--gpu-backend cuda -o out",
        78,
        "cuda 0: products stay in f32: cuda:0 (Stand-in): product_sm70.ptx does not compile",
    ),
    (
        "volta-compiler",
        "--gpu-backend cuda --dtype f32 -o out",
        78,
        "cuda 0 Stand-in: computes wrong numbers",
    ),
    ("old", "--gpu-backend cuda -o out", 78, "the NVIDIA driver is too old"),
    ("hidden", "--gpu-backend cuda --gpus 0 -o out", 78, "CUDA_VISIBLE_DEVICES may hide it"),
    ("fine", "--gpu-backend cuda --gpus 1 -o out", 78, "device 1; what there is: device 0 Stand-in"),
];

#[test]
fn the_program_refuses_a_card_that_does_not_count_right() {
    let Some(folder) = standin() else { return };
    for (case, typed, code, part) in PROGRAM {
        let here = tempfile::tempdir().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_finetune"));
        program.current_dir(here.path()).args(typed.split(' ')).env("XDG_CACHE_HOME", here.path());
        // No other card answers.
        program.env("VK_DRIVER_FILES", "/nowhere.json").env("VK_ICD_FILENAMES", "/nowhere.json");
        let log = here.path().join("log");
        program.env("STANDIN", case).env("STANDIN_LOG", &log).env("LD_LIBRARY_PATH", folder.path());
        let done = program.output().unwrap();
        let said =
            [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
        assert_eq!(done.status.code(), Some(*code), "{case}, {typed}: {said}");
        assert!(said.contains(part) && !said.contains("misuse"), "{case}, {typed}: {said}");
        // Once when it happens, and once at the end of the run.
        assert!(said.matches("can take part").count() <= 1, "{case}, {typed}: {said}");
        assert!(said.matches(part).count() <= 2, "{case}, {typed}: {said}");
        let tried =
            usize::from(*case == "volta-compiler" && typed.contains("-o out") && !typed.contains("f32"));
        assert_eq!(said.matches("products stay in f32").count(), tried, "{case}, {typed}: {said}");
        assert!(!here.path().join("out").exists(), "{case}, {typed}: a folder was left");
        // The memory check precedes any upload, also for the self-test.
        let log = std::fs::read_to_string(log).unwrap_or_default();
        let launched = log.lines().any(|line| !line.starts_with('#'));
        assert!(!(launched && *typed == "devices"), "{case}: a list launches kernels: {log}");
        let uploaded = log.contains("upload");
        assert!(!(uploaded && typed.contains("--memory-limit")), "{case}, {typed}: {said}");
        assert!(uploaded || !said.contains("computes wrong numbers"), "{case}, {typed}: {said}");
    }
}

/// The output of a run or a list on the stand-in, with a cache folder in `here`.
fn said(case: &str, typed: &str, here: &Path, libraries: &Path) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_finetune"));
    program.current_dir(here).args(typed.split(' ')).env("XDG_CACHE_HOME", here);
    program.env("VK_DRIVER_FILES", "/nowhere.json").env("VK_ICD_FILENAMES", "/nowhere.json");
    program.env("STANDIN", case).env("LD_LIBRARY_PATH", libraries).env("FINETUNE_CUDA_WAIT", "2");
    let done = program.output().unwrap();
    let said = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
    assert!(!said.contains("misuse"), "{case}, {typed}: {said}");
    said
}

const RUN: &str = "--gpu-backend cuda -o out";

#[test]
fn verdict_of_a_trial_is_kept_between_processes() {
    let Some(folder) = standin() else { return };
    let here = tempfile::tempdir().unwrap();
    let said = |typed: &str| said("volta-compiler", typed, here.path(), folder.path());
    assert!(said("devices").contains("-untried"));
    assert!(said(RUN).contains("products stay in f32"), "the first run tries");
    let again = said(RUN);
    assert!(!again.contains("products stay in f32") && again.contains("computes wrong numbers"), "{again}");
    let listed = said("devices");
    assert!(listed.contains("class cuda-sm70-f32") && !listed.contains("-untried"), "{listed}");
    let trials: Vec<_> = std::fs::read_dir(here.path().join("finetune/trials")).unwrap().flatten().collect();
    for damaged in ["damaged", "[1, 2]", r#"{"f16": {"forward": true}}"#, r#"{"other": 1}"#] {
        std::fs::write(trials[0].path(), damaged).unwrap();
        assert!(said(RUN).contains("products stay in f32"), "{damaged}: counts as none");
        assert!(!said(RUN).contains("products stay in f32"), "{damaged}: is written again");
    }
}

/// A run on the f32 class does not use the f16 products that another run tried.
#[test]
fn verdict_counts_only_in_its_class() {
    let Some(folder) = standin() else { return };
    let here = tempfile::tempdir().unwrap();
    let said = |typed: &str| said("volta", typed, here.path(), folder.path());
    said(RUN);
    let trials: Vec<_> = std::fs::read_dir(here.path().join("finetune/trials")).unwrap().flatten().collect();
    let yes = r#"{"f16": {"forward": true, "backward": true, "why": null}}"#;
    std::fs::write(trials[0].path(), yes).unwrap();
    let listed = said("devices");
    assert!(listed.contains("class cuda-sm70-f16-stand-in"), "{listed}");
    let log = |dtype: &str| {
        let log = here.path().join(dtype);
        let mut program = Command::new(env!("CARGO_BIN_EXE_finetune"));
        program.current_dir(here.path()).args(RUN.split(' ')).args(["--dtype", dtype]);
        program.env("XDG_CACHE_HOME", here.path()).env("VK_DRIVER_FILES", "/nowhere.json");
        program.env("STANDIN", "volta").env("STANDIN_LOG", &log).env("LD_LIBRARY_PATH", folder.path());
        program.output().unwrap();
        std::fs::read_to_string(log).unwrap()
    };
    let (f32, auto) = (log("f32"), log("auto"));
    assert!(!f32.contains("product_sm70") && auto.contains("product_sm70"), "{f32}");
}

/// What goes wrong in a trial, and a part of the message. The card itself is used: its self-test runs.
const IN_A_TRIAL: &[(&str, &str)] = &[
    ("hopper-fault", "CUDA_ERROR_ILLEGAL_ADDRESS, at or before product_sm90a_nt"),
    ("hopper-silent", "no answer within 2 s, at or before product_sm90a_nt"),
    ("hopper-blocks", "the trial did not end within 6 s"),
    ("hopper-crash", "the trial ended by signal: 6"),
];

#[test]
fn fault_or_hang_in_a_trial_costs_the_tier_not_the_card() {
    let Some(folder) = standin() else { return };
    for (case, part) in IN_A_TRIAL {
        let here = tempfile::tempdir().unwrap();
        let said = |typed: &str| said(case, typed, here.path(), folder.path());
        assert!(said("devices").contains("-untried"), "{case}: a list runs no trial");
        let first = said(RUN);
        let line = first.lines().find(|line| line.contains("products stay with mma")).unwrap_or(&first);
        assert!(line.contains(part), "{case}: {first}");
        assert!(first.contains("attention stays with mma"), "{case}: {first}");
        assert!(first.contains("computes wrong numbers"), "{case}: the card is used: {first}");
        let listed = said("devices");
        assert!(listed.contains("class cuda-sm90-bf16-stand-in-cuda12080\n"), "{case}: {listed}");
        let again = said(RUN);
        assert!(!again.contains("stay") && again.contains("computes wrong numbers"), "{case}: {again}");
    }
}

/// A trial that the end of its process cut short decides nothing: the next process tries again.
#[test]
fn trial_that_was_stopped_decides_nothing() {
    let Some(folder) = standin() else { return };
    let here = tempfile::tempdir().unwrap();
    let said = |case: &str| said(case, RUN, here.path(), folder.path());
    for _ in 0..2 {
        let first = said("hopper-term");
        let line = first.lines().find(|line| line.contains("products stay with mma")).unwrap_or(&first);
        assert!(line.contains("signal: 15") && line.ends_with("(undecided)"), "{first}");
    }
    assert!(!here.path().join("finetune/trials").exists());
    assert!(said("hopper-crash").contains("signal: 6"), "this one decides");
}

/// A card that never answers has a name for it and is left; no call of the driver may block or free.
#[test]
fn program_leaves_a_card_that_does_not_answer() {
    let Some(folder) = standin() else { return };
    let here = tempfile::tempdir().unwrap();
    let said = said("silent", RUN, here.path(), folder.path());
    assert!(said.contains("no answer within 2 s, at or before"), "{said}");
}

/// Launches that nothing reads are awaited before the driver's queue is full: with a full queue, a launch blocks.
#[test]
fn launches_do_not_fill_the_queue_of_the_driver() {
    if std::env::var_os("STANDIN_WORK").is_some() {
        let mut cuda = Cuda::open(0).unwrap();
        let mut x = cuda.memory(3);
        (0..3000).for_each(|_| cuda.fill(view_mut(&mut x, 1, 3), 1.0));
        let read = cuda.read(view(&x, 1, 3), &mut [0.0; 3]);
        return println!("said: {}", read.map_or_else(|e| e.to_string(), |()| "read".into()));
    }
    let Some(folder) = standin() else { return };
    let of =
        |case| child("standin::launches_do_not_fill_the_queue_of_the_driver", case, "w", folder.path()).out;
    assert_eq!(of("fine"), "read");
    assert!(of("silent").contains("wait: no answer within"), "{}", of("silent"));
}

#[test]
fn missing_driver_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let said = run("no-driver", folder.path());
    if !said.starts_with("no NVIDIA driver") {
        println!("skipped: no machine without a driver ({said})");
        return;
    }
    assert_eq!(said, "no NVIDIA driver: libcuda is not there; install the driver, no toolkit is needed");
}
