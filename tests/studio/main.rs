//! `finetune studio` as a process: what its page can do, and what it refuses.
#![cfg(unix)]

mod browser;
#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod click;
mod server;

use cli_fixture::Bench;
use serde_json::{Value, json};
use server::Server;

/// Options of a run of a few steps.
fn small(more: Value) -> Value {
    let mut options = json!({ "model": "demo", "data": "rows.jsonl", "gpus": "cpu", "batch-size": 4 });
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    options
}

#[test]
fn requests_without_the_key_or_from_elsewhere_are_refused() {
    let server = Server::start(&Bench::new());
    let page = server.send("GET", "/", &[], None);
    assert!(page.status == 200 && !page.body.contains(&server.key), "{}", page.body);
    assert!(!page.body.contains("http://") && !page.body.contains("https://"), "the page names another host");
    let key = format!("Bearer {}", server.key);
    let own = format!("http://127.0.0.1:{}", server.port);
    for (method, path, headers, status) in [
        ("GET", "/api/runs", &[][..], 401),
        ("POST", "/api/start", &[], 401),
        ("POST", "/api/stop", &[("authorization", "Bearer wrong")], 401),
        ("GET", "/api/runs", &[("authorization", &*key)], 200),
        ("POST", "/api/start", &[("authorization", &key), ("origin", "http://evil.example")], 403),
        ("POST", "/api/start", &[("authorization", &key), ("origin", "null")], 403),
        ("POST", "/api/start", &[("authorization", &key), ("origin", &own)], 400),
        ("GET", "/api/runs", &[("authorization", &key), ("host", "evil.example")], 421),
        ("GET", "/", &[("host", "evil.example")], 421),
        ("GET", "/api/start", &[("authorization", &key)], 405),
        ("POST", "/api/runs", &[("authorization", &key)], 405),
        ("GET", "/api/else", &[("authorization", &key)], 404),
    ] {
        let body = (method == "POST").then_some("{}");
        let answer = server.send(method, path, headers, body);
        assert_eq!(answer.status, status, "{method} {path} {headers:?}: {}", answer.body);
    }
    for body in ["", "[]", "{", "\u{0}"] {
        assert_eq!(
            server.send("POST", "/api/plan", &[("authorization", &key)], Some(body)).status,
            400,
            "{body:?}"
        );
    }
}

#[test]
fn bad_input_gives_one_line_and_leaves_nothing() {
    let bench = Bench::new();
    bench.file("above.jsonl", "{}");
    bench.file("root/rows.jsonl", &cli_fixture::rows(4));
    let server = Server::with(&bench, "--root root");
    for path in ["..", "../root/..", "/etc", "/"] {
        assert_eq!(server.get(&format!("/api/files?path={path}")).status, 400, "{path}");
    }
    for (path, body, part) in [
        ("/api/mask", small(json!({ "data": "../above.jsonl" })), "above.jsonl is outside"),
        ("/api/plan", small(json!({ "data": "/etc/passwd" })), "is outside"),
        ("/api/start", small(json!({ "output": "../x" })), "names no place"),
        ("/api/start", small(json!({ "log-json": "x" })), "is not for the page"),
        ("/api/start", small(json!({ "data": "no.jsonl" })), "no.jsonl: no such file"),
    ] {
        let answer = server.post(path, &json!({ "options": body }));
        let line = answer.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(answer.status == 400 && line.contains(part) && line.lines().count() == 1, "{line}");
    }
    for (path, body) in [("/api/run", "run=.."), ("/api/run", "run=nowhere"), ("/api/compare", "run=../root")]
    {
        assert!(server.get(&format!("{path}?{body}")).status >= 400, "{path} {body}");
    }
    let outside = server.post("/api/export", &json!({ "run": ".", "to": "peft", "output": "../out" }));
    assert!(outside.status == 400 && outside.body.contains("names no place"), "{}", outside.body);
    // What the command itself refuses is its own line, and the run leaves no folder.
    let plan = server.work("/api/plan", &json!({ "options": small(json!({ "rank": "many" })) }));
    let line = plan["error"].as_str().unwrap();
    assert!(line.contains("rank") && line.contains("many") && line.lines().count() == 1, "{line}");
    let run = server.begin(small(json!({ "learning-rate": "-1" })));
    let shown = server.wait(&run, "failed");
    assert!(shown["error"].as_str().unwrap().contains("learning-rate"), "{shown}");
    // A run that is stopped before its first step has nothing to save.
    let early = server.begin(small(json!({ "max-steps": 1_000_000 })));
    server.post("/api/stop", &json!({ "run": early })).ok();
    let shown = server.wait(&early, "stopped");
    assert!(shown["saved"] == false && !shown["error"].is_null(), "{shown}");
    let left: Vec<_> =
        std::fs::read_dir(bench.path("root")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["rows.jsonl"]);
    assert!(!bench.path("x").exists());
}

#[test]
fn mask_and_plan_are_those_of_the_commands() {
    let bench = Bench::new();
    let server = Server::start(&bench);
    let fields = small(json!({ "learn": "all", "max-steps": 3 }));
    let mask = server.work("/api/mask", &json!({ "options": fields, "rows": 2 }));
    let same = bench.ok("inspect rows.jsonl --model demo --learn all --rows 2 --json");
    assert_eq!(mask["result"], serde_json::from_str::<Value>(&same).unwrap());
    let plan = server.work("/api/plan", &json!({ "options": fields }));
    let same =
        bench.ok("plan demo --data rows.jsonl --learn all --max-steps 3 --gpus cpu --batch-size 4 --json");
    let same: Value = serde_json::from_str(&same).unwrap();
    for part in ["model", "rows", "steps", "adapter"] {
        assert_eq!(plan["result"][part], same[part], "{part}");
    }
    assert_eq!(
        plan["result"]["devices"][0]["memory_bytes"]["weights"],
        same["devices"][0]["memory_bytes"]["weights"]
    );
    let files = server.get("/api/files?path=").json();
    let rows = files["entries"].as_array().unwrap().iter().find(|entry| entry["name"] == "rows.jsonl");
    assert_eq!(rows.unwrap()["kind"], "rows", "{files}");
}

#[test]
fn a_run_of_the_page_is_that_of_the_command_line() {
    let bench = Bench::new();
    let server = Server::start(&bench);
    let begun = server.post("/api/start", &json!({ "options": small(json!({ "max_steps": 6 })) })).ok();
    assert_eq!(begun["run"], "runs/demo-1");
    let typed = "--model=demo --data=rows.jsonl --max-steps=6 --batch-size=4 --gpus=cpu";
    assert_eq!(begun["command"], format!("finetune {typed} --output=runs/demo-1"));
    let shown = server.wait("runs/demo-1", "complete");
    assert!(shown["html"].as_str().unwrap().contains("of 6"), "{shown}");
    bench.ok(&format!("{typed} --output=typed -q"));
    bench.same_adapter("runs/demo-1", "typed");
    let options = |run: &str| {
        let text = String::from_utf8(bench.read(&format!("{run}/run.yaml"))).unwrap();
        let lines = text.lines().filter(|l| !l.starts_with("  output:") && !l.starts_with("  quiet:"));
        lines.take_while(|l| !l.starts_with("run:")).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(options("runs/demo-1"), options("typed"));
    // Both are listed and compared.
    let list = server.get("/api/runs").json();
    let state =
        |run: &str| list.as_array().unwrap().iter().find(|one| one["run"] == run).unwrap()["state"].clone();
    assert_eq!((state("typed"), state("runs/demo-1")), (json!("complete"), json!("complete")));
    let both = server.get("/api/compare?run=typed&run=runs%2Fdemo-1").ok();
    let html = both["html"].as_str().unwrap();
    assert!(html.contains("2 runs") && html.contains(">typed<"), "{html}");
    assert_eq!(server.get("/api/compare?run=typed").status, 400);

    // Its adapter answers as with `generate`, and is exported as with `export`.
    let closed = server.post("/api/talk", &json!({ "run": "typed", "prompt": "git" }));
    assert!(closed.body.contains("its model is not loaded"), "{}", closed.body);
    let opened = server.work("/api/talk/open", &json!({ "run": "runs/demo-1" }));
    assert_eq!(opened["result"]["base"], "demo", "{opened}");
    for (tuned, with) in [(true, "--adapter typed"), (false, "demo")] {
        let ask = json!({ "run": "runs/demo-1", "prompt": "git br", "max_tokens": 8, "tuned": tuned });
        let line = bench.ok(&format!("generate {with} --raw --prompt 'git br' --max-new-tokens 8 --json"));
        let expected: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(server.said(&ask), expected["text"].as_str().unwrap(), "{with}");
    }
    server.post("/api/talk/close", &json!({})).ok();
    let exported = server
        .work("/api/export", &json!({ "run": "runs/demo-1", "to": "gguf-lora", "output": "out/a.gguf" }));
    assert_eq!(exported["result"]["output"], "out/a.gguf", "{exported}");
    assert!(bench.path("out/a.gguf").is_file());
}

#[test]
fn a_run_survives_the_studio_and_is_stopped_and_resumed() {
    let bench = Bench::new();
    let server = Server::start(&bench);
    let run = server.begin(small(json!({ "max-steps": 1_000_000, "save-steps": 0, "output": "long" })));
    assert_eq!(run, "long");
    server.wait("long", "running");
    server.wait_for(|| server.step("long") > 0);
    let second = server.post("/api/start", &json!({ "options": small(json!({ "output": "long" })) }));
    assert!(second.status == 409 && second.body.contains("at work"), "{}", second.body);
    server.post("/api/stop", &json!({ "run": "long" })).ok();
    let shown = server.wait("long", "stopped");
    assert_eq!((&shown["ended"], &shown["error"]), (&json!(true), &Value::Null), "{shown}");
    assert_eq!(server.post("/api/stop", &json!({ "run": "long" })).status, 409);
    let before = server.step("long");
    server.post("/api/resume", &json!({ "run": "long" })).ok();
    server.wait("long", "running");
    server.wait_for(|| server.step("long") > before);
    server.kill();
    // Another studio finds the run at work, and can stop it too where the system says which process it is.
    let server = Server::start(&bench);
    let step = server.step("long");
    server.wait_for(|| server.step("long") > step);
    if cfg!(target_os = "linux") {
        server.post("/api/stop", &json!({ "run": "long", "now": true })).ok();
        server.wait("long", "stopped");
        // The adapter of its newest checkpoint is at hand.
        let exported =
            server.work("/api/export", &json!({ "run": "long", "to": "peft", "output": "long-peft" }));
        assert!(bench.path("long-peft/adapter_model.safetensors").exists(), "{exported}");
    }
}

#[test]
fn machines_join_a_run_of_the_page() {
    let bench = Bench::new();
    let server = Server::start(&bench);
    let several = json!({
        "role": "coordinator", "bind": "127.0.0.1:0", "expect-workers": 2, "max-steps": 4, "output": "team",
    });
    server.begin(small(several));
    let lines = || server.get("/api/run?run=team").json()["lines"].to_string();
    let address =
        || lines().split("--coordinator ").nth(1).map(|rest| rest.split('"').next().unwrap().to_string());
    server.wait_for(|| address().is_some());
    let mut worker =
        server::at_home(&bench, &format!("--role worker --gpus cpu --coordinator {}", address().unwrap()));
    let mut worker = worker.stderr(std::process::Stdio::null()).spawn().unwrap();
    let shown = server.wait("team", "complete");
    assert!(worker.wait().unwrap().success());
    let html = shown["html"].as_str().unwrap();
    assert!(html.contains("topology") && html.contains("joined"), "{html}");
}
