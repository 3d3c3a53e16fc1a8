//! A run as other programs read it: Debian's prometheus scrapes a process that trains, and the tensorboard package
//! reads the files of `--tensorboard`. Without one of them its test prints `skipped`; tests/run.sh installs both and
//! sets FINETUNE_NEED_PROMETHEUS and FINETUNE_NEED_TENSORBOARD, which makes that a failure.

use crate::cli_fixture::Bench;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// Kills the process at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn skipped(what: &str, variable: &str) {
    assert!(std::env::var_os(variable).is_none(), "{what} must be installed here ({variable})");
    eprintln!("skipped: no {what}");
}

fn get(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_string());
    body.ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}

/// Repeats the request until there is an answer.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = ask() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn prometheus_scrapes_a_run() {
    if Command::new("prometheus").arg("--version").output().is_err() {
        return skipped("prometheus", "FINETUNE_NEED_PROMETHEUS");
    }
    let bench = Bench::new();
    let mut child = bench
        .command(
            "demo --data rows.jsonl --max-steps 1000000 --batch-size 4 --micro-batch-tokens 64 --save-steps 0",
        )
        .args(["--gpu-backend", "cpu", "--gpus", "0,1", "--dashboard=127.0.0.1:0", "-o", "out"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let _child = Running(child);
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains("http://")).unwrap();
    let run = line.split("http://").nth(1).unwrap().trim_end_matches('/').to_string();
    std::thread::spawn(move || lines.count());
    let text = until("no steps", || {
        get(&run, "/metrics").ok().filter(|t| t.contains("finetune_device_tokens_total"))
    });
    promtool(&text);

    bench.file(
        "prometheus.yml",
        &format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs:\n- job_name: finetune\n  static_configs: [{{targets: ['{run}']}}]\n"
        ),
    );
    // A port that was free a moment ago.
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let log = std::fs::File::create(bench.path("prometheus.log")).unwrap();
    let server = Command::new("prometheus")
        .current_dir(bench.path(""))
        .args(["--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"])
        .arg(format!("--web.listen-address={at}"))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn();
    let _server = Running(server.unwrap());
    let ask = |query: &str| -> Option<Vec<(Value, f64)>> {
        let answer: Value =
            serde_json::from_str(&get(&at, &format!("/api/v1/query?query={query}")).ok()?).ok()?;
        let all = answer["data"]["result"].as_array()?.iter();
        let pair = |r: &Value| Some((r["metric"].clone(), r["value"][1].as_str()?.parse().ok()?));
        let all: Option<Vec<_>> = all.map(pair).collect();
        all.filter(|all| !all.is_empty())
    };
    let steps = until("prometheus has no steps", || ask("finetune_steps_total").filter(|s| s[0].1 >= 1.0));
    assert_eq!(steps[0].0["job"], "finetune");
    let devices = until("prometheus has no devices", || ask("finetune_device_tokens_total"));
    let mut names: Vec<&str> = devices.iter().map(|(m, _)| m["device"].as_str().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["cpu 0", "cpu 1"]);
    let running = until("no state", || ask("finetune_state{state=%22running%22}"));
    assert_eq!(running[0].1, 1.0);
    // A counter has a rate.
    until("no rate", || ask("rate(finetune_tokens_total[30s])").filter(|r| r[0].1 > 0.0));
}

/// Names, units and types by Prometheus' own conventions.
fn promtool(text: &str) {
    let tool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut tool) = tool else { return skipped("promtool", "FINETUNE_NEED_PROMETHEUS") };
    tool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let said = tool.wait_with_output().unwrap();
    assert!(said.status.success(), "{}\n{text}", String::from_utf8_lossy(&said.stderr));
    assert!(said.stderr.is_empty(), "{}", String::from_utf8_lossy(&said.stderr));
}

const READ: &str = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
def read(folder):
    log = EventAccumulator(folder, size_guidance={'scalars': 0})
    log.Reload()
    return {tag: [[e.step, e.value] for e in log.Scalars(tag)] for tag in log.Tags()['scalars']}
print(json.dumps([read(folder) for folder in sys.argv[1:]]))
";

/// Steps and values of a run's metrics.jsonl, in 32 bits, as TensorBoard stores them.
fn logged(bench: &Bench, run: &str, (event, field): (&str, &str)) -> Vec<(u64, f32)> {
    let log = String::from_utf8(bench.read(&format!("{run}/metrics.jsonl"))).unwrap();
    let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of = events.filter(|e| e["event"] == event);
    of.map(|e| (e["step"].as_u64().unwrap(), e[field].as_f64().unwrap() as f32)).collect()
}

/// Two runs of the same name, and the first one resumed from a checkpoint: each has one folder with its curves.
#[test]
fn tensorboard_reads_every_run() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tensorboard/bin/python");
    if !python.exists() {
        return skipped("tensorboard", "FINETUNE_NEED_TENSORBOARD");
    }
    let bench = Bench::new();
    let rows = "demo --data rows.jsonl --eval-data eval.jsonl --epochs 2 --batch-size 4 --eval-steps 4 --save-steps 4";
    for (line, rest) in [
        (rows, &["-o", "out"][..]),
        (rows, &["--learning-rate", "1e-3", "-o", "elsewhere/out"]),
        ("", &["--resume=out/checkpoint-4"]),
    ] {
        let run = bench.command(line).args(["--gpus", "none", "--tensorboard", "events"]).args(rest).output();
        let run = run.unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    }
    let mut folders: Vec<_> =
        std::fs::read_dir(bench.path("events")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders, [bench.path("events/out"), bench.path("events/out-2")]);
    let said = Command::new(python).args(["-c", READ]).args(&folders).output().unwrap();
    let err = String::from_utf8_lossy(&said.stderr);
    let read: Value = serde_json::from_slice(&said.stdout).unwrap_or_else(|e| panic!("{e}: {err}"));
    for (read, run) in read.as_array().unwrap().iter().zip(["out", "elsewhere/out"]) {
        for (tag, what) in [
            ("train/loss", ("step", "loss")),
            ("train/grad_norm", ("step", "grad_norm")),
            ("train/learning_rate", ("step", "lr")),
            ("eval/loss", ("eval", "eval_loss")),
        ] {
            let want = logged(&bench, run, what);
            let got = read[tag].as_array().unwrap_or_else(|| panic!("no {tag} in {read}"));
            let got: Vec<(u64, f32)> =
                got.iter().map(|p| (p[0].as_u64().unwrap(), p[1].as_f64().unwrap() as f32)).collect();
            assert!(want.len() >= 3, "{tag}");
            assert_eq!(got, want, "{tag} of {run}");
        }
    }
}
