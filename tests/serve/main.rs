//! `finetune serve` as a process: what clients get, several at a time, and what hostile ones get.
#![cfg(unix)]

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod conversation;
mod hostile;
mod python;
mod server;
#[path = "../tested_adapters/mod.rs"]
mod tested_adapters;

use cli_fixture::Bench;
use serde_json::{Value, json};
use server::{Server, adapters};
use std::time::{Duration, Instant};

/// The text of `finetune generate`.
fn generated(bench: &Bench, options: &str, prompt: &str) -> String {
    let line = bench.ok(&format!("generate {options} --prompt '{prompt}' --json"));
    let value: Value = serde_json::from_str(&line).unwrap();
    value["text"].as_str().unwrap().to_string()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn greedy_answers_equal_those_of_generate() {
    let bench = adapters();
    for flags in ["--gpus none", "--gpus none --quantize q8_0", "--gpus 0+1 --gpu-backend cpu", "--offload 2"]
    {
        let server = Server::start(bench, &format!("--adapter a --adapter second=b {flags}"));
        for (model, options) in
            [("demo", "demo".to_string()), ("a", "--adapter a".into()), ("second", "--adapter b".into())]
        {
            let body = json!({ "model": model, "prompt": "git ch", "max_tokens": 12, "temperature": 0, "echo": true });
            let answer = server.post("/v1/completions", &body).ok();
            let expected =
                generated(bench, &format!("{options} {flags} --raw --max-new-tokens 12"), "git ch");
            assert_eq!(text(&answer), format!("git ch{expected}"), "{model} {flags}");
            let messages = json!([{ "role": "user", "content": "List files" }]);
            let body = json!({ "model": model, "messages": messages, "max_tokens": 12, "temperature": 0 });
            let answer = server.post("/v1/chat/completions", &body).ok();
            let options = format!("{options} {flags} --chat --max-new-tokens 12");
            let expected = generated(bench, &options, "List files");
            assert_eq!(answer["choices"][0]["message"]["content"], json!(expected), "{model} {flags}");
        }
    }
}

#[test]
fn models_are_listed_and_found_by_name() {
    let bench = adapters();
    let server = Server::start(bench, "--adapter a --gpus none");
    let list = server.get("/v1/models").ok();
    let names: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, [&json!("demo"), &json!("a")]);
    assert_eq!(server.get("/v1/models/a").ok()["parent"], "demo");
    let missing = server.post("/v1/completions", &json!({ "model": "b", "prompt": "x" }));
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
    for (path, status) in [("/v1/models/b", 404), ("/v1/nothing", 404), ("/v1/completions", 405)] {
        assert_eq!(server.get(path).status, status, "{path}");
    }
}

/// Sampled answers of both adapters and the base, streamed and whole.
#[test]
fn clients_at_the_same_time_get_what_each_gets_alone() {
    let bench = adapters();
    let server = Server::start(bench, "--adapter a --adapter b --gpus none --max-sessions 4");
    let body = |i: usize| {
        let model = ["demo", "a", "b"][i % 3];
        let prompt = ["git", "Show the branch", "List"][i % 3].repeat(1 + i % 4);
        json!({ "model": model, "prompt": prompt, "max_tokens": 8 + i, "seed": i, "temperature": 0.8, "top_p": 0.9 })
    };
    let alone: Vec<Value> =
        (0..9).map(|i| server.post("/v1/completions", &body(i)).ok()["choices"].clone()).collect();
    assert!(alone.iter().any(|choices| *choices != alone[0]));
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for (i, alone) in alone.iter().enumerate() {
                let (server, mut body) = (&server, body(i));
                scope.spawn(move || {
                    assert_eq!(server.post("/v1/completions", &body).ok()["choices"], *alone, "request {i}");
                    body["stream"] = json!(true);
                    let streamed: String = server.events("/v1/completions", &body).iter().map(text).collect();
                    assert_eq!(streamed, alone[0]["text"].as_str().unwrap(), "request {i}");
                });
            }
        });
    }
}

#[test]
fn lists_of_prompts_are_answered_in_order() {
    let server = Server::start(adapters(), "--gpus none --max-sessions 2");
    let ask = |prompt: Value| {
        let body = json!({ "model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0 });
        server.post("/v1/completions", &body).ok()
    };
    let prompts = ["git", "Show the branch", "List"];
    let all = ask(json!(prompts));
    for (i, prompt) in prompts.iter().enumerate() {
        let alone = ask(json!(prompt));
        assert_eq!(all["choices"][i]["text"], alone["choices"][0]["text"]);
        assert_eq!(all["choices"][i]["index"], i);
    }
    let total: u64 = prompts.iter().map(|p| ask(json!(p))["usage"]["total_tokens"].as_u64().unwrap()).sum();
    assert_eq!(all["usage"]["total_tokens"], total);
}

#[test]
fn scores_of_prompts_and_answers_agree() {
    let server = Server::start(adapters(), "--adapter a --gpus none --dtype f32");
    let ask = |more: Value| {
        let mut body = json!({ "model": "a", "temperature": 0, "logprobs": 3, "echo": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).ok()["choices"][0].clone()
    };
    let made = ask(json!({ "prompt": "git branch", "max_tokens": 6 }));
    let scores = made["logprobs"]["token_logprobs"].as_array().unwrap();
    assert!(scores[0].is_null() && scores.len() > 7, "{made}");
    // The same tokens as a prompt, by text and by their ids.
    let whole = ask(json!({ "prompt": made["text"], "max_tokens": 0 }));
    assert_eq!(whole["text"], made["text"]);
    let again = whole["logprobs"]["token_logprobs"].as_array().unwrap();
    let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4;
    assert!(again[1..].iter().zip(&scores[1..]).all(|(a, b)| near(a, b)), "{made} {whole}");
    // A greedy token has the highest probability, to the bit.
    let tops = whole["logprobs"]["top_logprobs"].as_array().unwrap();
    let best =
        |top: &Value| top.as_object().unwrap().values().map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
    assert!((2..again.len()).all(|i| tops[i].as_object().unwrap().len() <= 3));
    let last = again.len() - 1;
    assert_eq!(again[last].as_f64().unwrap(), best(&tops[last]));
    let texts = whole["logprobs"]["tokens"].as_array().unwrap();
    let joined: String = texts.iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(json!(joined), whole["text"]);
    let offsets = &whole["logprobs"]["text_offset"];
    assert_eq!(offsets[1], texts[0].as_str().unwrap().len());
}

#[test]
fn stop_strings_and_lengths_end_answers() {
    let bench = adapters();
    let server = Server::start(bench, "--gpus none --context 40");
    let ask = |more: Value| {
        let mut body = json!({ "model": "demo", "prompt": "git ch", "temperature": 0, "max_tokens": 12 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body)
    };
    let whole = ask(json!({})).ok();
    let (all, _) = (text(&whole).to_string(), assert_eq!(whole["choices"][0]["finish_reason"], "length"));
    let stop: String = all.chars().skip(3).take(4).collect();
    let cut = ask(json!({ "stop": ["no such text", stop] })).ok();
    assert_eq!(text(&cut), &all[..all.find(&stop).unwrap()]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    // The context bounds answers, and refuses prompts without room.
    let usage = ask(json!({ "max_tokens": 1000, "temperature": 2, "seed": 3 })).ok()["usage"].clone();
    assert!(usage["total_tokens"].as_u64().unwrap() <= 40, "{usage}");
    let long = ask(json!({ "prompt": "git ".repeat(60) }));
    assert_eq!((long.status, &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    assert_eq!(ask(json!({ "prompt": [5, 999_999] })).status, 400);
}

#[test]
fn a_key_is_required_where_one_is_given_or_needed() {
    let bench = adapters();
    bench.file("key", "of-a-file\n");
    for (options, variable, key) in [
        ("--api-key-file key", None, Some("of-a-file")),
        ("", Some("of-the-variable"), Some("of-the-variable")),
        ("--bind 0.0.0.0:0", None, None),
    ] {
        let mut command = server::command(bench, &format!("{options} --gpus none"));
        command.env("HOME", bench.path("home")).env("XDG_CONFIG_HOME", bench.path("home"));
        command.envs(variable.map(|key| ("FINETUNE_API_KEY", key)));
        let server = Server::of(command);
        let shown = server.shown.lines().find_map(|line| line.strip_prefix("key      "));
        assert_eq!(shown.is_some(), key.is_none(), "{}", server.shown);
        let key = key.or(shown).unwrap();
        for (given, status) in [("", 401), ("Bearer wrong", 401), (key, 401), (&format!("Bearer {key}"), 200)]
        {
            let headers =
                if given.is_empty() { String::new() } else { format!("Authorization: {given}\r\n") };
            let answer = server.raw("GET", "/v1/models", &headers, b"");
            assert_eq!(answer.status, status, "{options} {given:?}");
        }
    }
}

#[test]
fn a_signal_ends_the_server_cleanly() {
    let bench = adapters();
    for signal in ["TERM", "INT"] {
        let server = Server::start(bench, "--gpus none --max-sessions 1");
        let body = json!({ "model": "demo", "prompt": vec!["git"; 12], "max_tokens": 60, "temperature": 1, "stream": true });
        let mut open = server.connect();
        server.send(&mut open, "POST", "/v1/completions", "", body.to_string().as_bytes());
        server::wait_for(&mut open, "data: ");
        let began = Instant::now();
        server.signal(signal);
        let rest = server::read_all(&mut open);
        // The text in work has ended, those that waited were refused.
        assert!(rest.contains("[DONE]") || rest.contains("the server ends"), "{rest}");
        assert_eq!(server.wait().code(), Some(0), "SIG{signal}");
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}
