//! The page of a run in a real browser: as a file after the run, and live from the running process. The browser is
//! Debian's chromium, headless; without it the tests that need it print `skipped: no chromium`, unless
//! FINETUNE_NEED_CHROMIUM is set. FINETUNE_PICTURES=DIR keeps the pictures (this test makes those of docs/guide.md).

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod leaves;
mod pictures;

use cli_fixture::Bench;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

fn chromium(arguments: &[&str]) -> Option<std::process::Output> {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
        // Only this machine can be reached, whatever a page requests.
        .args(["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-background-networking"])
        .args(["--disable-component-update", "--disable-sync", "--disable-default-apps", "--no-pings"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .stderr(Stdio::null())
        .output();
    match output {
        Ok(output) => Some(output),
        Err(_) => {
            assert!(std::env::var_os("FINETUNE_NEED_CHROMIUM").is_none(), "chromium must be installed here");
            eprintln!("skipped: no chromium");
            None
        }
    }
}

/// Two runs on the demonstration's model; the second one on two devices.
fn trained() -> Bench {
    let bench = Bench::new();
    for (out, devices) in [("a", "0"), ("b", "0,1")] {
        let output = bench
            .command("")
            .args([
                "demo",
                "--data",
                "rows.jsonl",
                "--eval-data",
                "eval.jsonl",
                "--epochs",
                "4",
                "--batch-size",
                "4",
            ])
            .args(["--gpu-backend", "cpu", "--gpus", devices, "--micro-batch-tokens", "64", "-o", out])
            .args(["--sample-prompt", "What <is> it?", "--sample-rows", "1"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    bench
}

fn png(bytes: &[u8]) -> (u32, u32) {
    assert!(bytes.starts_with(b"\x89PNG"), "not a picture");
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    (number(16), number(20))
}

fn kept(name: &str, bytes: &[u8]) {
    if let Some(dir) = std::env::var_os("FINETUNE_PICTURES").map(PathBuf::from) {
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(name), bytes).unwrap();
    }
}

#[test]
fn run_writes_a_report_that_a_browser_renders() {
    let bench = trained();
    let pictures = ["loss.svg", "speed.svg", "learning-rate.svg", "grad-norm.svg"];
    for name in pictures.iter().chain(&["report.html"]) {
        assert!(bench.path("a").join(name).exists(), "{name}");
    }
    for name in ["timeline.svg", "topology.svg"] {
        assert!(bench.path("b").join(name).exists(), "{name}: two devices took part");
    }
    // A single device has a lane, and no connections.
    pictures::check(&bench.path("a"), 5);
    pictures::check(&bench.path("b"), 6);
    the_card_has_the_numbers_of(&bench, "b");
    let page = bench.path("b/report.html");
    let packed = zipped(&std::fs::read(&page).unwrap());
    assert!(packed < 100_000, "{packed} bytes compressed");
    let address = format!("file://{}", page.display());
    let Some((text, asked)) = leaves::shown(&bench, &address) else { return };
    assert!(asked.is_empty(), "{asked:?}");
    for part in [
        "complete",
        "cpu 0",
        "cpu 1",
        "What &lt;is&gt; it?",
        "<i>(wrong; the row: ",
        "evaluation",
        "F-DP-001",
        "topology",
        "device activity, last steps",
        "ms + ms/token",
    ] {
        assert!(text.contains(part), "{part} is not on the page");
    }
    for name in ["loss.svg", "timeline.svg", "topology.svg"] {
        kept(name, &bench.read(&format!("b/{name}")));
    }
    screenshots(&bench, &address);
}

/// The model card of the run and of its last checkpoint has the numbers of metrics.jsonl.
fn the_card_has_the_numbers_of(bench: &Bench, run: &str) {
    let log = String::from_utf8(bench.read(&format!("{run}/metrics.jsonl"))).unwrap();
    let events: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let evals: Vec<f64> = events.iter().filter_map(|e| e["eval_loss"].as_f64()).collect();
    let (before, after) = (evals[0], evals[evals.len() - 1]);
    for file in ["README.md", "checkpoint-24/README.md"] {
        let card = String::from_utf8(bench.read(&format!("{run}/{file}"))).unwrap();
        for line in [
            "| rows | 24, 3 for evaluation |".to_string(),
            "| steps | 24 |".into(),
            "| epochs | 4 |".into(),
            format!("| eval loss | {before:.4} -> {after:.4} |"),
            "| learning rate | 2e-4, cosine, warm-up steps: 1 |".into(),
        ] {
            assert!(card.lines().any(|l| l == line), "{line} in {card}");
        }
    }
}

/// Light, dark and narrow: pictures of the requested sizes, all different.
fn screenshots(bench: &Bench, address: &str) {
    // A window is at least 500 pixels wide; a frame in it may be narrower.
    let style = "body{margin:0}iframe{border:0;display:block;width:390px;height:2330px}";
    let frame = format!(r#"<!doctype html><style>{style}</style><iframe src="{address}"></iframe>"#);
    let narrow = format!("file://{}", bench.file("narrow.html", &frame).display());
    let (light, dark) = ("1", "0");
    let looks = [
        ("light.png", light, (1200, 1500), address),
        ("dark.png", dark, (1200, 1500), address),
        ("narrow.png", light, (390, 2330), &narrow),
    ];
    let mut all: Vec<Vec<u8>> = Vec::new();
    for (name, scheme, size, address) in looks {
        let bytes = screenshot(bench, (name, scheme, size), address);
        assert!(bytes.len() > 20_000, "{name}: {} bytes, an empty page", bytes.len());
        all.push(bytes);
    }
    assert!(all[0] != all[1], "dark looks like light");
}

/// A picture of the page at `address`: its name, 1 for light or 0 for dark, and its size.
fn screenshot(
    bench: &Bench,
    (name, scheme, (width, height)): (&str, &str, (u32, u32)),
    address: &str,
) -> Vec<u8> {
    let file = bench.path(name);
    let (shot, look) = (
        format!("--screenshot={}", file.display()),
        format!("--blink-settings=preferredColorScheme={scheme}"),
    );
    chromium(&[&look, &shot, "--timeout=60000", &format!("--window-size={width},{height}"), address]);
    let bytes = std::fs::read(&file).unwrap();
    assert_eq!(png(&bytes), (width, height), "{name}");
    kept(name, &bytes);
    bytes
}

#[test]
fn runs_are_reported_again_and_compared() {
    let bench = trained();
    let run = |arguments: &[&str]| {
        let output = bench.command("").arg("report").args(arguments).output().unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), said[0].trim().to_string(), said[1].trim().to_string())
    };
    let first = bench.read("b/report.html");
    std::fs::remove_file(bench.path("b/report.html")).unwrap();
    assert_eq!(run(&["b"]), (Some(0), "b/report.html".into(), String::new()));
    assert!(first == bench.read("b/report.html"), "a replayed run gives the page of the live one");
    assert_eq!(run(&["a", "b", "-o", "both.html"]), (Some(0), "both.html".into(), String::new()));
    let both = String::from_utf8(bench.read("both.html")).unwrap();
    assert!(both.contains("2 runs") && both.contains(">a<") && both.contains(">b<"));
    assert!(both.contains("<th>gpus</th><td>0</td><td>0, 1</td>"), "{both}");
    assert!(!both.contains("<th>output</th>") && !both.contains("<th>rank</th>"), "{both}");
    let (_, json, _) = run(&["a", "b", "--json", "-o", "both.html"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["runs"][1]["state"], "complete");
    assert_eq!(json["runs"][0]["eval_loss"], json["runs"][1]["eval_loss"], "the same bits from two devices");
    assert_eq!(json["runs"][0]["best_eval_loss"], json["runs"][0]["eval_loss"]);
    assert_eq!(json["runs"][0]["best_eval_step"], json["runs"][0]["step"]);

    let way = "give the folder of a run, or the file that --log-json named";
    assert_eq!(run(&["nowhere"]), (Some(1), String::new(), format!("error: nowhere: no such file: {way}")));
    bench.file("notes.md", "mine");
    for (arguments, part) in
        [(&["a", "b", "-o", "notes.md"][..], "is no page"), (&["a", "-o", "x.html"], "folder")]
    {
        let (code, _, line) = run(arguments);
        assert!(code == Some(1) && line.contains(part), "{line}");
    }
    assert_eq!(bench.read("notes.md"), b"mine");
    let (code, _, line) = run(&[]);
    assert!(code == Some(2) && line.starts_with("error: nothing to report on"), "{line}");
    bench.file("cut/metrics.jsonl", "");
    let (code, _, line) = run(&["cut"]);
    assert!(code == Some(1) && line.contains("nothing was trained yet"), "{line}");
}

#[test]
fn running_process_serves_its_page_and_metrics() {
    let bench = Bench::new();
    let mut child = bench
        .command("")
        .args([
            "demo",
            "--data",
            "rows.jsonl",
            "--max-steps",
            "1000000",
            "--batch-size",
            "2",
            "--save-steps",
            "0",
        ])
        .args(["--gpus", "none", "--dashboard=127.0.0.1:0", "-o", "out"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut child = Running(child);
    let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains("http://")).unwrap();
    let address = line.split("http://").nth(1).unwrap().trim_end_matches('/').to_string();
    // A thread reads the output, so that the process does not block.
    let reader = std::thread::spawn(move || lines.count());
    let get = |path: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let steps = |text: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix("finetune_steps_total "))?.parse().ok()
    };
    let began = std::time::Instant::now();
    while steps(&get("/metrics")).is_none_or(|n| n < 3) {
        assert!(began.elapsed() < Duration::from_secs(120), "no steps were shown");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(get("/").contains("running") && get("/body").contains("of 1000000"));
    let page = format!("http://{address}/");
    if let Some((text, asked)) = leaves::shown(&bench, &page) {
        assert!(text.contains("of 1000000") && text.contains("configuration"), "{text}");
        assert!(asked.iter().all(|url| url.starts_with(&address)), "{asked:?}");
        // The page's script may run: otherwise it would not have requested the events.
        assert!(asked.contains(&format!("{address}/news")), "{asked:?}");
        screenshot(&bench, ("live.png", "0", (1200, 1500)), &page);
    }
    Command::new("kill").args(["-TERM", &child.0.id().to_string()]).status().unwrap();
    assert_eq!(child.0.wait().unwrap().code(), Some(75));
    assert!(TcpStream::connect(&address).is_err(), "the page ends with the run");
    assert!(std::fs::read_to_string(bench.path("out/report.html")).unwrap().contains("stopped"));
    reader.join().unwrap();
}

/// Kills the process if the test fails.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// The size of the page as sent.
fn zipped(bytes: &[u8]) -> usize {
    let mut gzip =
        Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = gzip.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || input.write_all(&bytes));
    let output = gzip.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    output.stdout.len()
}

#[test]
fn a_malformed_address_is_refused_before_anything_is_written() {
    let bench = Bench::new();
    bench.file("log.jsonl", "of last week");
    let output = bench
        .command("")
        .args(["demo", "--data", "rows.jsonl", "-o", "out", "--log-json", "log.jsonl", "--dashboard=a/b"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = text.lines().last().unwrap_or_default();
    assert!(!output.status.success() && last.contains("not a host"), "{text}");
    assert!(!Path::new(&bench.path("out")).exists(), "a folder was left");
    assert_eq!(bench.read("log.jsonl"), b"of last week");
}
