//! benches/first_contact.sh on the stand-in: every call runs to its end and says what it found. The stand-in computes
//! nothing, so most tests fail there.

use crate::standin::standin_with;
use std::path::Path;
use std::process::Command;

/// The script, with no program for its peers.
fn script(call: &str, here: &Path) -> Command {
    let mut script = Command::new("bash");
    script.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/first_contact.sh")).arg(call);
    script.env("PTX", std::env::current_exe().unwrap()).env("FINETUNE", env!("CARGO_BIN_EXE_finetune"));
    script.env("OUT", here.join("out")).env("PYTHON", "true").env("CUDA_CACHE_PATH", here.join("jit"));
    script.env("XDG_CACHE_HOME", here).env("VK_DRIVER_FILES", "/nowhere.json");
    script
}

/// What it says, with a stand-in for the card and for nvidia-smi.
fn said(call: &str, case: &str, (all, each): (&str, &str), libraries: &Path) -> (Option<i32>, String) {
    let here = tempfile::tempdir().unwrap();
    let smi = here.path().join("nvidia-smi");
    std::fs::write(&smi, "#!/bin/sh\necho 'GPU 0: Stand-in'\n").unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&smi).status().unwrap().success());
    let path = format!("{}:{}", here.path().display(), std::env::var("PATH").unwrap());
    let mut script = script(call, here.path());
    script.env("PATH", path).env("LD_LIBRARY_PATH", libraries).env("STANDIN", case);
    let done = script
        .env("SECONDS_IN_ALL", all)
        .env("SECONDS_EACH", each)
        .env("FINETUNE_CUDA_WAIT", "1")
        .output()
        .unwrap();
    let report = std::fs::read_to_string(here.path().join(format!("out/first-contact-{call}.txt"))).unwrap();
    assert_eq!(report, String::from_utf8_lossy(&done.stdout), "the report is what is printed");
    (done.status.code(), report)
}

#[test]
fn first_contact_runs_each_test_of_its_ladder_by_itself() {
    let Some(folder) = standin_with(&[]) else { return };
    let (code, said) = said("1", "hopper", ("510", "45"), folder.path());
    assert!(!said.contains("no such test") && !said.contains("not run"), "{said}");
    let ended = |name: &str| {
        said.lines().find(|line| line.ends_with(name)).unwrap_or_else(|| panic!("{name}: {said}"))
    };
    // Faults of one leave the next ones alone.
    assert!(ended(" cases::every_op_case_holds_in_ptx").starts_with("FAIL"), "{said}");
    for name in [" model::a_whole_model_with_attention_by_wgmma_is_near", " selftest", " lab attention"] {
        assert!(!ended(name).starts_with("not run"), "{said}");
    }
    assert!(ended(" sm70::a_gradient_is_added_to_what_is_there").starts_with("skipped"), "{said}");
    assert_eq!(code, Some(1), "failures show in its exit status");
}

#[test]
fn first_contact_ends_by_its_own_limit_on_a_card_that_hangs() {
    let Some(folder) = standin_with(&[]) else { return };
    let (code, said) = said("1", "silent", ("9", "8"), folder.path());
    assert!(said.contains("no answer within 1 s, at or before"), "{said}");
    assert!(said.contains("not run: selftest") && code == Some(1), "{said}");
}

#[test]
fn first_contact_says_that_there_is_no_card() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("bin");
    std::fs::create_dir(&path).unwrap();
    for tool in ["bash", "dirname"] {
        let found = Command::new("sh").args(["-c", &format!("command -v {tool}")]).output().unwrap();
        std::os::unix::fs::symlink(String::from_utf8_lossy(&found.stdout).trim(), path.join(tool)).unwrap();
    }
    let done = script("1", here.path()).env("PATH", &path).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "skipped: no cuda\n");
    assert_eq!(done.status.code(), Some(0));
}
