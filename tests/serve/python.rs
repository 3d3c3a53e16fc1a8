//! OpenAI's own Python client. Without it the test prints `skipped`; tests/run.sh installs it and sets
//! FINETUNE_NEED_OPENAI, which makes that a failure.

use crate::server::{Server, adapters};
use std::path::Path;
use std::process::Command;

#[test]
fn the_official_client_works() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/openai-client/bin/python");
    if !python.exists() {
        assert!(std::env::var_os("FINETUNE_NEED_OPENAI").is_none(), "the client must be installed here");
        eprintln!("skipped: no openai client");
        return;
    }
    let bench = adapters();
    bench.file("key", "secret-key");
    let server = Server::start(bench, "--adapter a --gpus none --api-key-file key");
    let script = root.join("tests/serve/client.py");
    let out = Command::new(python).arg(script).args([server.url(), "secret-key".into()]).output().unwrap();
    let (shown, wrong) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && shown.ends_with("done\n"), "{shown}{wrong}");
}
