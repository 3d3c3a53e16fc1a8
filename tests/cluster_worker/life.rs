//! A worker from its user's view: command line, output, exit code.
#![cfg(unix)]

use super::process::*;
use std::time::{Duration, Instant};

/// A worker that ends within 5 s (and its join timeout) with this code, and this in its last line.
fn check_alone(line: &str, code: i32, parts: &[&str]) {
    let place = Place::new();
    let began = Instant::now();
    let (got, last) = place.start("worker", &format!("--role worker {line}")).ends();
    assert_eq!(got, code, "{line}: {last}");
    parts.iter().for_each(|part| assert!(last.contains(part), "{line}: {part:?} in {last:?}"));
    assert!(began.elapsed() < Duration::from_secs(1 + 8));
}

#[test]
fn worker_without_a_coordinator_says_why() {
    check_alone("--coordinator 127.0.0.1:1 --join-timeout 1s", 1, &["nothing listens on 127.0.0.1:1"]);
    check_alone("--coordinator no-such-host.invalid:9000 --join-timeout 1s", 1, &["no-such-host.invalid"]);
    check_alone("--bind 127.0.0.1:0 --join-timeout 1s", 1, &["no coordinator", "--nodes"]);
    check_alone("FINETUNE_INJECT=nonsense --coordinator 127.0.0.1:1", 2, &["FINETUNE_INJECT", "nonsense"]);
    check_alone("--coordinator 127.0.0.1:1 no/such.gguf", 1, &["no/such.gguf"]);
}

/// A waiting coordinator and a worker that it refuses: both say so, each within 5 s.
fn check_refused(line: &str, parts: &[&str]) {
    let place = Place::new();
    let (coordinator, address) = place.coordinator(&format!("--expect-workers 1 {RUN} out"));
    let began = Instant::now();
    let (code, last) = place.start("worker", &format!("--role worker --coordinator {address} {line}")).ends();
    assert_eq!(code, 78, "{line}: {last}");
    parts.iter().for_each(|part| assert!(last.contains(part), "{line}: {part:?} in {last:?}"));
    assert!(began.elapsed() < Duration::from_secs(8));
    coordinator.says("refused");
}

#[test]
fn mismatched_worker_is_refused_permanently() {
    let other = TOKEN.replace("5f3c", "0000");
    check_refused(&format!("FINETUNE_TOKEN={other}"), &["token"]);
    check_refused("--rank 7", &["--rank 7", "16"]);
    check_refused("--data other.jsonl", &["--data other.jsonl"]);
    // The demonstration's model with one more line in its config.json.
    let other = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model")).unwrap().flatten() {
        std::fs::copy(entry.path(), other.path().join(entry.file_name())).unwrap();
    }
    let same = other.path().display().to_string();
    let config = other.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replacen('{', "{\n  \"note\": \"changed\",", 1)).unwrap();
    check_refused(&same, &["another model"]);
}

#[test]
fn listening_worker_is_dialled_and_staying_worker_waits() {
    let place = Place::new();
    let mut listener = place.start("listener", "--role worker --bind 127.0.0.1:0");
    let at = listener.listens();
    let line = format!("--role coordinator --bind 127.0.0.1:0 --nodes {at} --expect-workers 1 {RUN} one");
    assert_eq!(place.start("dialler", &line).ends().0, 0);
    assert_eq!(listener.ends().0, 0);

    let (mut first, address) = place.coordinator(&format!("--expect-workers 1 {RUN} two"));
    let stays = format!("--role worker --coordinator {address} --stay --rank 16");
    let mut stays = place.start("stays", &stays);
    assert_eq!(first.ends().0, 0, "{}", first.said());
    stays.says("waiting for the next run");
    let again = format!("--role coordinator --bind {address} --expect-workers 1 {RUN} three");
    let mut second = place.start("second", &again);
    assert_eq!(second.ends().0, 0, "{}", second.said());
    stays.terminate();
    assert_eq!(stays.ends().0, 0);
    assert!(place.adapter("one") == place.adapter("two") && place.adapter("two") == place.adapter("three"));
}

/// A listening worker with a wrong token is corrected on its own machine, without a restart of the coordinator.
#[test]
fn listening_worker_is_dialled_again_with_the_right_token() {
    let place = Place::new();
    let other = TOKEN.replace("5f3c", "0000");
    let mut wrong = place.start("wrong", &format!("FINETUNE_TOKEN={other} --role worker --bind 127.0.0.1:0"));
    let at = wrong.listens();
    let line = format!("--role coordinator --bind 127.0.0.1:0 --nodes {at} --expect-workers 1 {RUN} out");
    let mut dialler = place.start("dialler", &line);
    dialler.says("has another token");
    wrong.terminate();
    assert_eq!(wrong.ends().0, 0);
    let mut right = place.start("right", &format!("--role worker --bind {at}"));
    assert_eq!((dialler.ends().0, right.ends().0), (0, 0), "{}{}", dialler.said(), right.said());
    assert_eq!(dialler.said().matches("has another token").count(), 1, "{}", dialler.said());
}

#[test]
fn failed_device_falls_back_and_the_adapter_is_the_same() {
    let place = Place::new();
    assert_eq!(place.start("alone", &format!("{RUN} alone")).ends().0, 0);
    let cases = [
        ("pretend=wgpu,error@2", "cpu"),
        ("pretend=cuda,error@0", "this build"),
        ("pretend=wgpu,error@0", "cpu"),
        ("pretend=wgpu,panic@2", "an injected panic"),
    ];
    for (i, (inject, said)) in cases.iter().enumerate() {
        let (mut coordinator, address) = place.coordinator(&format!("--expect-workers 1 {RUN} out{i}"));
        let line = format!("FINETUNE_INJECT={inject} --role worker --coordinator {address}");
        let mut worker = place.start(&format!("worker{i}"), &line);
        assert_eq!(
            (coordinator.ends().0, worker.ends().0),
            (0, 0),
            "{}{}",
            coordinator.said(),
            worker.said()
        );
        assert!(worker.said().contains(said), "{inject}: {}", worker.said());
        assert!(place.adapter(&format!("out{i}")) == place.adapter("alone"), "{inject}");
    }
}

#[test]
fn refused_worker_is_named_and_the_run_continues() {
    let place = Place::new();
    let (mut coordinator, address) = place.coordinator(&format!("--expect-workers 1 {RUN} out"));
    let worker =
        |name: &str, line: &str| place.start(name, &format!("{line} --role worker --coordinator {address}"));
    let (code, last) = worker("small", "--offload never --memory-limit 12MB").ends();
    assert!(code == 78 && last.contains("--micro-batch-tokens"), "{code} {last}");
    let (code, last) = worker("liar", "FINETUNE_INJECT=selftest").ends();
    assert!(code == 78 && last.contains("wrong numbers"), "{code} {last}");
    let mut good = worker("good", "--threads 1");
    assert_eq!((coordinator.ends().0, good.ends().0), (0, 0));
    let said = coordinator.said();
    assert!(said.contains("--micro-batch-tokens") && said.contains("wrong numbers"), "{said}");
}

#[test]
fn stopped_worker_leaves_at_once_and_can_be_replaced() {
    let place = Place::new();
    let (mut coordinator, address) = place.coordinator(&format!("--expect-workers 1 {RUN} out"));
    let line = format!("--role worker --coordinator {address}");
    let mut slow = place.start("slow", &format!("FINETUNE_INJECT=slow=300 {line}"));
    coordinator.says("joined");
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    slow.terminate();
    assert_eq!(slow.ends().0, 0);
    assert!(began.elapsed() < Duration::from_secs(4));
    let mut other = place.start("other", &line);
    assert_eq!((coordinator.ends().0, other.ends().0), (0, 0), "{}", coordinator.said());
}

#[test]
fn doctor_handshake_leaves_no_trace() {
    let place = Place::new();
    let (coordinator, address) = place.coordinator(&format!("--expect-workers 1 {RUN} out"));
    let doctor = |name: &str, line: &str| {
        let mut doctor = place.start(name, &format!("doctor --coordinator {line}"));
        doctor.ends();
        doctor.said()
    };
    let said = doctor("doctor", &address);
    let good = format!("ok       coordinator  {address} takes this machine (run ");
    assert!(said.contains(&good), "{said}");
    let said = doctor("absent", "127.0.0.1:1");
    assert!(said.contains("failed   coordinator  nothing listens on 127.0.0.1:1\n"), "{said}");
    assert!(said.contains("fix          start the coordinator there") && !said.contains("ufw"), "{said}");
    for complaint in ["refused", "lost", "left", "warning"] {
        assert!(!coordinator.said().contains(complaint), "{}", coordinator.said());
    }
    let said = doctor("stranger", &format!("{address} FINETUNE_TOKEN={}", TOKEN.replace("5f3c", "0000")));
    let found = said.lines().find(|line| line.starts_with("failed   coordinator")).unwrap_or_default();
    assert!(found.contains("another token (fingerprint ") && found.ends_with(" here)"), "{said}");
    assert!(said.contains("fix          finetune token --set"), "{said}");
}

#[test]
fn worker_prints_progress_and_a_summary() {
    let place = Place::new();
    let (mut coordinator, address) = place.coordinator(&format!("--expect-workers 2 {RUN} out"));
    let mut stranger = std::net::TcpStream::connect(&address).unwrap();
    std::io::Write::write_all(&mut stranger, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    coordinator.says("refused  127.0.0.1:");
    let mut worker = place.start("worker", &format!("--role worker --coordinator {address}"));
    let mut quiet = place.start("quiet", &format!("-q --role worker --coordinator {address}"));
    let (code, last) = worker.ends();
    assert!(code == 0 && last.starts_with("run complete: ") && last.contains(" microbatch"), "{last}");
    assert!(last.contains(" tokens, 0:"), "{last}");
    let said = worker.said();
    assert!(said.contains("step 1/4  25 %  ") && said.contains(" tokens/s"), "{said}");
    assert_eq!((quiet.ends().0, quiet.said().as_str()), (0, ""));
    let (code, last) = coordinator.ends();
    assert!(code == 0 && last.starts_with("adapter  "), "{last}");
    let said = coordinator.said();
    assert!(said.contains("note     rejected: 1 connection, 0 workers "), "{said}");
    // A worker that leaves prints its share up to then.
    let slow = format!("--expect-workers 1 {RUN} slow --max-steps 400");
    let (_slow, address) = place.coordinator(&slow.replace("--max-steps 4 ", ""));
    let mut leaves = place.start("leaves", &format!("--role worker --coordinator {address}"));
    leaves.says("step ");
    leaves.terminate();
    let (code, last) = leaves.ends();
    assert!(code == 0 && last.starts_with("stopped: ") && last.contains(" microbatch"), "{last}");
}
