//! Clients that send too much, too little or nothing, and clients that go.

use crate::server::{Server, adapters, wait_for};
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

#[test]
fn hostile_requests_get_an_error_each() {
    let server = Server::start(adapters(), "--gpus none");
    let huge = vec![b' '; (8 << 20) + 1];
    let deep = "[".repeat(100_000);
    let nulls = vec![0; 1000];
    for (what, method, path, headers, body, status) in [
        ("a huge body", "POST", "/v1/completions", "", &huge[..], 413),
        ("deep nesting", "POST", "/v1/completions", "", deep.as_bytes(), 400),
        ("no JSON", "POST", "/v1/chat/completions", "", &nulls, 400),
        ("no body", "POST", "/v1/chat/completions", "", b"", 400),
        ("another method", "DELETE", "/v1/models", "", b"", 405),
        ("another path", "GET", "/../../etc/passwd", "", b"", 404),
        ("another host", "GET", "/v1/models", "Host: evil.example\r\n", b"", 421),
        ("a foreign page", "POST", "/v1/completions", "Origin: https://evil.example\r\n", b"{}", 403),
        ("a foreign address", "POST", "/v1/completions", "Origin: http://203.0.113.7\r\n", b"{}", 403),
        ("a file", "POST", "/v1/completions", "Origin: null\r\n", b"{}", 403),
        ("an own page", "GET", "/v1/models", "Origin: http://localhost:3000\r\n", b"", 200),
    ] {
        let answer = server.raw(method, path, headers, body);
        assert_eq!(answer.status, status, "{what}: {}", answer.body);
        assert!(answer.head.contains("content-type: application/json"), "{what}: {}", answer.head);
        assert_eq!(answer.json()["error"].is_object(), status != 200, "{what}");
    }
    // A body without a length, which does not end by itself.
    let mut endless = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    endless.write_all(head.as_bytes()).unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 16, " ".repeat(1 << 16));
    let sent = (0..10_000).take_while(|_| endless.write_all(chunk.as_bytes()).is_ok()).count();
    assert!(sent < 10_000, "all of {sent} chunks were taken");
    let mut garbage = server.connect();
    garbage.write_all(b"\x16\x03\x01 garbage\r\n\r\n").unwrap();
    wait_for(&mut garbage, "400");
    assert_eq!(server.get("/v1/models").status, 200);
}

#[test]
fn silent_connections_do_not_block_others() {
    let server = Server::start(adapters(), "--gpus none");
    let begin = |i: usize| {
        let mut stream = server.connect();
        let part = [
            "",
            "POST /v1/comp",
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        ];
        stream.write_all(part[i % 3].as_bytes()).unwrap();
        stream
    };
    let open: Vec<_> = (0..300).map(begin).collect();
    assert_eq!(server.get("/v1/models").status, 200);
    let body = json!({ "model": "demo", "prompt": "git", "max_tokens": 3 });
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    drop(open);
}

#[test]
fn silent_connections_do_not_end_a_stream() {
    let server = Server::start(adapters(), "--gpus none");
    let body =
        json!({ "model": "demo", "prompt": "git", "max_tokens": 400, "temperature": 2, "stream": true });
    let mut stream = server.connect();
    server.send(&mut stream, "POST", "/v1/completions", "", body.to_string().as_bytes());
    wait_for(&mut stream, "data: ");
    let open: Vec<_> = (0..300).map(|_| server.connect()).collect();
    assert_eq!(server.get("/v1/models").status, 200);
    wait_for(&mut stream, "data: [DONE]");
    drop(open);
}

#[test]
fn a_full_queue_refuses_and_a_lost_client_frees_it() {
    let server = Server::start(adapters(), "--gpus none --max-sessions 1 --max-waiting 39");
    let small = json!({ "model": "demo", "prompt": "git", "max_tokens": 2 });
    let large = |n: usize, stream: bool| json!({ "model": "demo", "prompt": vec!["git"; n], "max_tokens": 500, "temperature": 2, "stream": stream });
    assert_eq!(server.post("/v1/completions", &large(41, false)).status, 400, "more prompts than places");
    for stream in [false, true] {
        let (body, began) = (large(40, stream).to_string(), Instant::now());
        let (open, refused) = loop {
            let mut open = server.connect();
            server.send(&mut open, "POST", "/v1/completions", "", body.as_bytes());
            std::thread::sleep(Duration::from_millis(200));
            // A large request that comes while a small one has a place is refused itself.
            let answer = server.post("/v1/completions", &small);
            if answer.status != 200 || began.elapsed() > Duration::from_secs(60) {
                break (open, answer);
            }
        };
        assert_eq!((refused.status, &refused.json()["error"]["type"]), (429, &json!("rate_limit_error")));
        assert!(refused.head.contains("retry-after: 1"));
        drop(open);
        let began = Instant::now();
        while server.post("/v1/completions", &small).status != 200 {
            assert!(began.elapsed() < Duration::from_secs(60), "the places of a lost client are not free");
        }
    }
}

#[test]
fn a_text_that_waits_too_long_is_refused() {
    let server = Server::start(adapters(), "--gpus none --max-sessions 1 --request-timeout 1ms");
    let body = json!({ "model": "demo", "prompt": vec!["git"; 30], "max_tokens": 400, "temperature": 2 });
    let answer = server.post("/v1/completions", &body);
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (503, &json!("server_error")));
}
