//! Rows of data sets by id.

use super::{COMMIT, Site};
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// A data set with two splits, one of which has two files.
fn data_site() -> Site {
    let rows = |numbers: std::ops::Range<usize>| -> Vec<u8> {
        numbers
            .map(|i| format!("{{\"prompt\": \"q{i}\", \"completion\": \"a{i}\"}}\n"))
            .collect::<String>()
            .into()
    };
    let files = HashMap::from([
        ("README.md", b"---\nlicense: mit\n---\n".to_vec()),
        ("data/train-00000-of-00002.jsonl", rows(0..5)),
        ("data/train-00001-of-00002.jsonl", rows(5..12)),
        ("data/test-00000-of-00001.jsonl", rows(20..23)),
        ("../../../../evil.jsonl", rows(0..1)),
        ("/evil/train.jsonl", rows(0..1)),
        ("images.zip", b"not wanted".to_vec()),
    ]);
    Site { files, data: true, ..Site::default() }
}

/// Runs the program in a folder, with this Hub and the cache in that folder.
fn finetune(folder: &Path, endpoint: &str, args: &str) -> Result<String, (i32, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_HUB_CACHE"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    let offline = if endpoint.is_empty() { "1" } else { "0" };
    command.env("HF_ENDPOINT", endpoint).env("HF_HUB_OFFLINE", offline).env("HF_HOME", folder.join("home"));
    let out = command.args(args.split_whitespace()).current_dir(folder).output().unwrap();
    match out.status.success() {
        true => Ok(String::from_utf8(out.stderr).unwrap()),
        false => Err((out.status.code().unwrap_or(-1), String::from_utf8(out.stderr).unwrap())),
    }
}

const RUN: &str = "demo --max-steps 2 --batch-size 4 --rank 2 --eval-steps 1";

#[test]
fn a_data_set_trains_like_its_files() {
    let (site, folder) = (data_site(), tempfile::tempdir().unwrap());
    let (at, endpoint) = (folder.path(), site.serve());
    let train = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
        .map(|name| &site.files[name][..]);
    std::fs::write(at.join("train.jsonl"), train.concat()).unwrap();
    std::fs::write(at.join("held.jsonl"), &site.files["data/test-00000-of-00001.jsonl"]).unwrap();
    let said = finetune(at, &endpoint, &format!("{RUN} --data owner/tiny -o hub")).unwrap();
    assert!(said.contains("data/train-00001-of-00002.jsonl: 0.0 of 0.0 MB"), "{said}");
    let log = site.log().join("\n");
    assert!(!log.contains("test-00000") && !log.contains("zip") && !log.contains("evil"), "{log}");
    // Offline only what was fetched is there.
    let offline = finetune(at, "", &format!("{RUN} --data owner/tiny --eval-data owner/tiny -o none"));
    let (code, said) = offline.unwrap_err();
    assert!(
        code == 1 && said.contains("'data/test-00000-of-00001.jsonl' is not in the cache"),
        "{code} {said}"
    );
    finetune(at, &endpoint, &format!("{RUN} --data owner/tiny:train@v1 --eval-data owner/tiny:test -o both"))
        .unwrap();
    let before = site.log().len();
    finetune(at, "", "--config both/run.yaml --overwrite -o both").unwrap();
    let gone = "http://127.0.0.1:9";
    finetune(at, &endpoint, &format!("{RUN} --data owner/tiny@{COMMIT} --max-rows 12 -o pinned")).unwrap();
    finetune(at, gone, &format!("{RUN} --data owner/tiny -o away")).unwrap();
    assert_eq!(site.log().len(), before);
    finetune(at, gone, &format!("{RUN} --data train.jsonl -o local")).unwrap();
    finetune(at, gone, &format!("{RUN} --data train.jsonl --eval-data held.jsonl -o held")).unwrap();
    let read = |name: &str| std::fs::read(at.join(name)).unwrap();
    for out in ["hub", "both", "pinned", "away", "held"] {
        assert_eq!(
            read(&format!("{out}/adapter_model.safetensors")),
            read("local/adapter_model.safetensors"),
            "{out}"
        );
    }
    let eval = |out: &str| {
        let log = String::from_utf8(read(&format!("{out}/metrics.jsonl"))).unwrap();
        let losses = log
            .lines()
            .filter_map(|line| line.split("\"eval_loss\":").nth(1)?.split(',').next().map(str::to_owned));
        losses.collect::<Vec<_>>()
    };
    assert_eq!(eval("both"), eval("held"));
    assert!(!eval("both").is_empty());
}

#[test]
fn a_local_folder_wins_over_a_data_set() {
    let (site, folder) = (data_site(), tempfile::tempdir().unwrap());
    std::fs::create_dir_all(folder.path().join("owner/tiny")).unwrap();
    let rows = &site.files["data/test-00000-of-00001.jsonl"];
    std::fs::write(folder.path().join("owner/tiny/train.jsonl"), rows).unwrap();
    let said = finetune(folder.path(), &site.serve(), &format!("{RUN} --data owner/tiny -o out")).unwrap();
    assert!(said.contains("rows     3 read"), "{said}");
    assert_eq!(site.log(), Vec::<String>::new());
}

#[test]
fn what_a_data_set_lacks_is_said_by_name() {
    let (mut site, folder) = (data_site(), tempfile::tempdir().unwrap());
    site.files.insert("data/other.jsonl", b"{}".to_vec());
    site.files.insert("more/train.jsonl", b"{}".to_vec());
    let endpoint = site.serve();
    let check = |data: &str, code: i32, part: &str| {
        let (got, said) =
            finetune(folder.path(), &endpoint, &format!("{RUN} --data {data} -o out")).unwrap_err();
        assert!(got == code && said.contains(part), "{data}: {got} {said}");
        assert!(!folder.path().join("out").exists());
    };
    check(
        "owner/tiny",
        78,
        "several files may be the split train: data/train-00000-of-00002.jsonl, data/train-00001",
    );
    check(
        "owner/tiny:valid",
        78,
        "no file is known to be of the split valid: data/other.jsonl, data/test-00000",
    );
    check("owner/tiny@v9", 78, "owner/tiny: it has no revision 'v9'");
    check("owner/none", 78, "owner/none: no such data set on the Hub");
    check("owner/none.jsonl", 1, "owner/none.jsonl: ");
    let inspected = finetune(folder.path(), &endpoint, "inspect owner/tiny:data/test-00000-of-00001.jsonl");
    inspected.unwrap();
}
