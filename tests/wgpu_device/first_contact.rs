//! benches/wgpu_first.sh on an adapter of the tests: it runs each test by itself and says what it found.

use crate::tested_adapters;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest program of a test that was built beside this one; the names of their files end in a hash.
fn built(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().unwrap();
    let is_it = |path: &PathBuf| {
        let stem = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let hash = stem.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        hash.is_some_and(|hash| hash.chars().all(|c| c.is_ascii_hexdigit()))
    };
    let found = std::fs::read_dir(own.parent().unwrap()).unwrap().flatten().map(|entry| entry.path());
    found.filter(is_it).max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok())
}

/// The script, with the programs that are built; `adapter` is a part of a name.
fn script(call: &str, adapter: &str, here: &Path) -> Command {
    let programs = here.join("programs");
    std::fs::create_dir_all(&programs).unwrap();
    let link = |from: &Path, name: &str| std::os::unix::fs::symlink(from, programs.join(name)).unwrap();
    link(Path::new(env!("CARGO_BIN_EXE_finetune")), "finetune");
    link(&std::env::current_exe().unwrap(), "wgpu_device");
    for name in ["op_verbs", "wgpu_variants"] {
        built(name).iter().for_each(|path| link(path, name));
    }
    let mut script = Command::new("bash");
    script.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/wgpu_first.sh")).arg(call);
    script.env("PROGRAMS", programs).env("OUT", here.join("out")).env("FINETUNE_TEST_ADAPTER", adapter);
    script
}

/// The names of tests in the script, by program.
#[test]
fn first_contact_names_tests_that_exist() {
    let script =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/wgpu_first.sh")).unwrap();
    for (name, least) in
        [("wgpu_device", 15), ("wgpu_variants", 7), ("op_verbs", 3), ("parity", 1), ("quantised", 1)]
    {
        let start = format!("{name}:");
        let words = script.split([' ', '\n', '"', '=']).filter_map(|word| word.strip_prefix(&start));
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        assert!(words.len() >= least, "{name}: {words:?}");
        // Other programs need not be built.
        let own = (name == "wgpu_device").then(|| std::env::current_exe().unwrap());
        let Some(program) = own.or_else(|| built(name)) else { continue };
        let listed = Command::new(program).arg("--list").output().unwrap();
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let missing = words.iter().filter(|word| !listed.lines().any(|line| line == format!("{word}: test")));
        assert_eq!(missing.collect::<Vec<_>>(), [&""; 0], "{name}");
    }
}

#[test]
fn first_contact_runs_each_test_by_itself_within_its_limit() {
    let Some(tested) = tested_adapters::one() else { return };
    let here = tempfile::tempdir().unwrap();
    let mut script = script("1", tested.adapter.name(), here.path());
    // Listing opens every driver.
    let files = std::env::var("VK_DRIVER_FILES").unwrap_or_default();
    if let Some(file) = files.split(':').find(|file| tested.adapter.is_software() && file.contains("lvp")) {
        script.env("VK_DRIVER_FILES", file).env("VK_ICD_FILENAMES", file);
    }
    let tests = [
        "faults::a_weight_of_the_wrong_length_is_a_fault_of_its_device",
        "no_such_test",
        "first_contact::hangs",
    ];
    let tests = tests.map(|test| format!("wgpu_device:{test}"));
    let done =
        script.env("TESTS", tests.join(" ")).env("SECONDS_EACH", "20").env("HANGS", "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    let report = std::fs::read_to_string(here.path().join("out/wgpu-first-1.txt")).unwrap();
    assert_eq!(report, said, "the report is what is printed: {}", String::from_utf8_lossy(&done.stderr));
    assert!(said.starts_with("wgpu ") && said.contains(tested.adapter.name()), "{said}");
    let how: Vec<&str> = said.lines().filter(|line| line.contains(" wgpu_device ")).collect();
    let [passes, is_missing, hangs] = &how[..] else { panic!("{said}") };
    assert!(passes.starts_with("PASS ") && is_missing.ends_with("no such test"), "{said}");
    assert!(hangs.starts_with("HANG ") && done.status.code() == Some(1), "{said}");
}

/// For the test above: hangs if it is asked to.
#[test]
fn hangs() {
    if std::env::var_os("HANGS").is_some() {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
}

#[test]
fn first_contact_says_that_there_is_no_such_card() {
    let here = tempfile::tempdir().unwrap();
    let mut script = script("1", "no such card", here.path());
    let done = script
        .env("VK_DRIVER_FILES", "/nowhere.json")
        .env("VK_ICD_FILENAMES", "/nowhere.json")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "skipped: no wgpu adapter no such card\n");
    assert_eq!(done.status.code(), Some(0));
}
