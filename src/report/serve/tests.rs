//! The page over real sockets.

use super::*;
use crate::train::event::{Event, RunStart};
use std::io::{Read, Write};

/// Status line and body of a request as it goes over the wire.
fn ask(address: SocketAddr, request: &str) -> (String, String) {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.lines().next().unwrap_or_default().into(), body.into())
}

fn open(key: Option<&str>, history: Live) -> Dashboard {
    let (address, around) = (([127, 0, 0, 1], 0).into(), Surroundings::default());
    Dashboard::open(address, key.map(String::from), around, history).unwrap()
}

#[test]
fn access_depends_on_host_path_and_token() {
    let free = open(None, Live::default());
    let locked = open(Some("secret"), Live::default());
    for (board, method, target, host, want) in [
        (&free, "GET", "/", "127.0.0.1", "200"),
        (&free, "GET", "/body", "localhost", "200"),
        (&free, "GET", "/metrics", "[::1]", "200"),
        (&free, "GET", "/etc/passwd", "localhost", "404"),
        (&free, "GET", "/../run.yaml", "localhost", "404"),
        (&free, "POST", "/", "localhost", "405"),
        (&free, "GET", "/", "evil.example", "421"),
        (&free, "GET", "/", "127.0.0.1.evil.example", "421"),
        (&locked, "GET", "/", "localhost", "403"),
        (&locked, "GET", "/body?key=secre", "localhost", "403"),
        (&locked, "GET", "/metrics?key=Secret", "localhost", "403"),
        (&locked, "GET", "/?key=secret", "localhost", "200"),
        (&locked, "GET", "/?key=secret", "gpubox", "200"),
        (&locked, "GET", "/", "gpubox", "403"),
    ] {
        let port = board.address().port();
        let request =
            format!("{method} {target} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n");
        let (status, _) = ask(board.address(), &request);
        assert!(status.contains(want), "{method} {target} of {host}: {status}, not {want}");
    }
    // Through a tunnel, whose port is another one; and without being asked to hang up.
    let (status, _) = ask(free.address(), "GET / HTTP/1.1\r\nHost: localhost:8080\r\n\r\n");
    assert!(status.contains("200"), "{status}");
    let (status, _) = ask(free.address(), "GET / HTTP/1.1\r\n\r\n");
    assert!(status.contains("421"), "no host: {status}");
    let (status, _) = ask(free.address(), "\u{1}\u{2} garbage\r\n\r\n");
    assert!(status.contains("400"), "{status}");
}

#[test]
fn gzip_is_sent_where_accepted() {
    let history = Live::default();
    let board = open(None, history.clone());
    let fetch = |path: &str, more: &str| {
        let mut stream = std::net::TcpStream::connect(board.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_lowercase();
        (head, answer[end + 4..].to_vec())
    };
    for path in ["/", "/body", "/metrics"] {
        let (head, plain) = fetch(path, "");
        assert!(!head.contains("content-encoding") && head.contains("vary: accept-encoding"), "{head}");
        let (head, packed) = fetch(path, "Accept-Encoding: br, gzip;q=0.5\r\n");
        assert!(head.contains("content-encoding: gzip"), "{head}");
        assert!(packed.len() < plain.len(), "{path}: {} of {}", packed.len(), plain.len());
        let mut text = Vec::new();
        flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut text).unwrap();
        assert!(text == plain, "{path}");
    }
    let (head, _) = fetch("/body", "Accept-Encoding: gzip;q=0\r\n");
    assert!(!head.contains("content-encoding"), "{head}");
}

#[test]
fn event_is_streamed_and_appears_in_the_body() {
    let history = Live::default();
    let board = open(None, history.clone());
    let mut stream = std::net::TcpStream::connect(board.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let host = format!("localhost:{}", board.address().port());
    write!(stream, "GET /news HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let mut seen = String::new();
    let mut until = |text: &str| {
        let mut piece = [0; 512];
        while !seen.contains(text) {
            let n = stream.read(&mut piece).unwrap();
            assert!(n > 0, "the stream ended: {seen}");
            seen += &String::from_utf8_lossy(&piece[..n]);
        }
    };
    until("data: 0\n\n");
    let notes = vec!["model    demo-model (Llama)".into()];
    let before = ask(board.address(), &format!("GET /body HTTP/1.1\r\nHost: {host}\r\n\r\n")).1;
    assert!(!before.contains("demo-model"));
    history.see(&Event::Run(RunStart { total_steps: 7, notes, ..RunStart::default() }));
    board.tell();
    until("data: 1\n\n");
    let request = format!("GET /body HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let (_, body) = ask(board.address(), &request);
    assert!(body.contains("demo-model") && body.contains("of 7"), "{body}");
}

/// A stream of news that has said its first line.
fn stream_of(board: &Dashboard) -> std::net::TcpStream {
    let mut stream = std::net::TcpStream::connect(board.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET /news HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    wait_for(&mut stream, "data: 0\n\n");
    stream
}

#[track_caller]
fn wait_for(stream: &mut std::net::TcpStream, text: &str) {
    let (mut seen, mut piece) = (String::new(), [0; 512]);
    while !seen.contains(text) {
        let n = stream.read(&mut piece).unwrap();
        assert!(n > 0, "the stream ended: {seen}");
        seen += &String::from_utf8_lossy(&piece[..n]);
    }
}

#[test]
fn open_streams_do_not_block_readers() {
    let board = open(None, Live::default());
    let mut streams: Vec<_> = (0..READERS + 6).map(|_| stream_of(&board)).collect();
    let (status, _) = ask(board.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(status.contains("200"), "{status}");
    // The oldest has made room, the newest still hears.
    let mut rest = Vec::new();
    streams[0].read_to_end(&mut rest).unwrap_or_default();
    board.tell();
    wait_for(streams.last_mut().unwrap(), "data: 1\n\n");
}

#[test]
fn silent_connections_are_closed_before_streams() {
    let board = open(None, Live::default());
    let mut stream = stream_of(&board);
    let silent = |_| std::net::TcpStream::connect(board.address()).unwrap();
    let mut all: Vec<_> = (0..READERS + 6).map(silent).collect();
    let (status, _) = ask(board.address(), "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(status.contains("200"), "{status}");
    board.tell();
    wait_for(&mut stream, "data: 1\n\n");
    assert_eq!(all[0].read(&mut [0]).unwrap_or(0), 0, "the oldest silent one has made room");
}
