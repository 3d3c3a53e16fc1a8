//! The roles as command lines, each a process with a separate home folder: the output on both sides, the time that it
//! takes, and the exit code.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn command(home: &Path, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
    command.args(args.split_whitespace()).env_clear().env("HOME", home).current_dir(home);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(home: &Path, args: &str, stdin: &str) -> Output {
    let mut child = command(home, args).spawn().unwrap();
    // The process may not read its stdin at all.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

/// A coordinator of three steps, and its output up to now.
struct Coordinator {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Coordinator {
    fn begin(home: &Path, args: &str) -> Self {
        let line = format!("--role coordinator --expect-workers 1 --max-steps 3 -o out {args}");
        let mut child = command(home, &line).spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (err, note) = (child.stderr.take().unwrap(), said.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(err).lines().map_while(Result::ok) {
                *note.lock().unwrap() += &(line + "\n");
            }
        });
        Coordinator { child, said }
    }

    /// Waits until the coordinator has printed `part`.
    #[track_caller]
    fn says(&self, part: &str) -> String {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let said = self.said.lock().unwrap().clone();
            if said.contains(part) {
                return said;
            }
            assert!(Instant::now() < end, "wanted {part:?} in\n{said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The address in the command that the coordinator prints for the next machine.
    fn address(&self) -> String {
        let said = self.says("--role worker --coordinator ");
        let rest = said.split("--role worker --coordinator ").nth(1).unwrap();
        rest.split_whitespace().next().unwrap().to_string()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A refused worker: exit code and line within five seconds.
#[track_caller]
fn check(home: &Path, args: &str, code: i32, expected: &str) {
    let begin = Instant::now();
    let out = run(home, &format!("--role worker {args}"), "");
    let took = begin.elapsed();
    let said = String::from_utf8(out.stderr).unwrap();
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("error: ") && last.contains(expected), "{args}: wanted {expected:?} in\n{said}");
    assert_eq!(out.status.code(), Some(code), "{args}: {said}");
    assert!(took < Duration::from_secs(8), "{args}: {took:?}");
}

#[test]
fn foreign_peer_is_refused_and_the_run_continues() {
    let homes = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [one, two, three] = homes.each_ref().map(|h| h.path());
    let mut coordinator = Coordinator::begin(one, "--bind 127.0.0.1:0");
    let at = coordinator.address();
    let to = format!("--coordinator {at} --join-timeout 30s");
    coordinator.says("made a token, fingerprint ");
    let said = coordinator.says("on this machine type:");
    assert!(!said.contains("token --set"), "only this machine can reach it: {said}");

    check(two, &to, 78, "wants a token (fingerprint ");
    run(two, "token", "");
    check(two, &to, 78, "has another token (fingerprint ");
    check(two, &format!("{to} --insecure"), 78, "has a token and this side speaks plain TCP");
    check(two, "--bind 203.0.113.1:9001", 78, "cannot listen on 203.0.113.1:9001");
    check(
        two,
        "--coordinator no-such-host.invalid --join-timeout 1s",
        1,
        "no-such-host.invalid: unknown name",
    );
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    check(two, &format!("--coordinator {free} --join-timeout 1s"), 1, &format!("nothing listens on {free}"));
    let taken = run(two, &format!("--role coordinator --bind {at} -o taken"), "");
    let line = String::from_utf8(taken.stderr).unwrap();
    assert!(line.contains("is in use here: stop what uses it"), "{line}");
    assert_eq!(taken.status.code(), Some(1), "{line}");
    let mut http = std::net::TcpStream::connect(&at).unwrap();
    http.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = http.read_to_end(&mut answer);
    assert!(answer.is_empty(), "a stranger learns nothing");
    for part in ["has no token", "has another token", "speaks plain TCP", "is not finetune (it says \"GET /"]
    {
        coordinator.says(part);
    }

    let secret = String::from_utf8(run(one, "token", "").stdout).unwrap();
    assert!(run(three, "token --set", &secret).status.success());
    let worker = run(three, &format!("--role worker {to}"), "");
    assert!(worker.status.success(), "{}", String::from_utf8_lossy(&worker.stderr));
    assert!(coordinator.child.wait().unwrap().success(), "{}", coordinator.said.lock().unwrap());
    assert!(one.join("out/adapter_model.safetensors").exists());
}

/// The worker listens, and the coordinator dials it over plain TCP on this machine.
#[test]
fn listening_worker_is_dialled() {
    let homes = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [one, two] = homes.each_ref().map(|h| h.path());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let worker = command(two, &format!("--role worker --insecure --bind {free}")).spawn().unwrap();
    let nodes = format!("--insecure --bind 127.0.0.1:0 --nodes {free}");
    let mut coordinator = Coordinator::begin(one, &nodes);
    assert!(coordinator.address().starts_with("127.0.0.1:"));
    let worker = worker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&worker.stderr);
    assert!(worker.status.success(), "{said}");
    assert!(said.contains("plain TCP without a token (--insecure), on this machine only"), "{said}");
    assert!(coordinator.child.wait().unwrap().success(), "{}", coordinator.said.lock().unwrap());
}
