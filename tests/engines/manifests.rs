//! The manifests of recipes/kubernetes fit the types of Kubernetes, JobSet and Kubeflow's Trainer.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The objects of a manifest.
pub fn objects(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(root().join("recipes/kubernetes").join(name)).unwrap();
    text.split("\n---\n").map(|part| serde_yaml::from_str(part).unwrap()).collect()
}

/// The object of this kind in a manifest.
pub fn object(name: &str, kind: &str) -> Value {
    objects(name).into_iter().find(|object| object["kind"] == kind).unwrap()
}

fn check(python: &Path, objects: &[Value]) -> Output {
    let mut command = Command::new(python);
    command.arg(root().join("tests/engines/manifests.py")).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines: String = objects.iter().map(|object| format!("{object}\n")).collect();
    // It may have ended at an object before.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn manifests_have_the_types_of_their_engines() {
    let python: PathBuf = root().join("target/kubeflow/bin/python");
    if !python.exists() {
        assert!(std::env::var_os("FINETUNE_NEED_KUBEFLOW").is_none(), "{} is missing", python.display());
        return println!("skipped: no target/kubeflow (tests/run.sh --install)");
    }
    let all: Vec<Value> = ["job.yaml", "jobset.yaml", "trainer.yaml"].into_iter().flat_map(objects).collect();
    let out = check(&python, &all);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(String::from_utf8_lossy(&out.stdout).lines().count(), all.len());

    // A wrong name, a wrong type and a missing field, each in one object.
    for (name, kind, path, key, value) in [
        ("job.yaml", "Service", "/spec", "publishNotReady", Value::Bool(true)),
        ("job.yaml", "Job", "/spec", "backoffLimitPerIndx", 20.into()),
        ("job.yaml", "Job", "/spec/template/spec", "restart_policy", "Never".into()),
        ("job.yaml", "Job", "/spec", "completions", "four".into()),
        ("jobset.yaml", "JobSet", "/spec/network", "enableDNSHostname", Value::Bool(true)),
        ("jobset.yaml", "JobSet", "/spec/replicatedJobs/0", "name", Value::Null),
        ("trainer.yaml", "ClusterTrainingRuntime", "/spec/mlPolicy", "nodes", 4.into()),
        ("trainer.yaml", "TrainJob", "/spec/trainer", "nodes", 4.into()),
        ("trainer.yaml", "TrainJob", "/spec", "runtimeRef", Value::Null),
    ] {
        let mut object = object(name, kind);
        object.pointer_mut(path).unwrap()[key] = value;
        let out = check(&python, &[object]);
        assert!(!out.status.success(), "{kind}{path}/{key} is not refused");
    }
}
