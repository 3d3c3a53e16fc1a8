//! A server on a port of its own, and requests to it.

use crate::cli_fixture::Bench;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// Long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// A bench with two adapters, `a` and `b`, which all tests share.
pub fn adapters() -> &'static Bench {
    static BENCH: OnceLock<Bench> = OnceLock::new();
    BENCH.get_or_init(|| {
        let bench = Bench::new();
        for (out, rate) in [("a", "5e-3"), ("b", "2e-2")] {
            bench.ok(&format!(
                "demo --data rows.jsonl --max-steps 16 --learning-rate {rate} --gpus none -q -o {out}"
            ));
        }
        bench
    })
}

pub struct Server {
    child: Child,
    port: u16,
    /// What it printed before it answered.
    pub shown: String,
}

/// A response.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }
}

pub fn command(bench: &Bench, options: &str) -> Command {
    let bind = if options.contains("--bind") { "" } else { "--bind 127.0.0.1:0" };
    bench.command(&format!("serve demo {bind} {options}"))
}

impl Server {
    pub fn start(bench: &Bench, options: &str) -> Self {
        Self::of(command(bench, options))
    }

    pub fn of(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut shown = String::new();
        // A server for other machines prints its key in a further line.
        let last = if command.get_args().any(|arg| arg == "0.0.0.0:0") { "\nkey" } else { "\nmodels" };
        while !shown.contains(last) {
            assert!(lines.read_line(&mut shown).unwrap() > 0, "the server ended: {shown}");
        }
        std::thread::spawn(move || drop(lines.read_to_string(&mut String::new())));
        let line = shown.lines().find(|line| line.starts_with("serve    http://")).unwrap().to_string();
        let port = line.trim_end_matches("/v1").rsplit(':').next().unwrap().parse().unwrap();
        Server { child, port, shown }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/v1", self.port)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    pub fn send(&self, stream: &mut TcpStream, method: &str, path: &str, headers: &str, body: &[u8]) {
        let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
        let head = format!(
            "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        // A server that refuses a body closes the connection while it is sent.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    }

    pub fn raw(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        self.send(&mut stream, method, path, headers, body);
        answer(&read_all(&mut stream))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.raw("GET", path, "", b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.raw("POST", path, "", body.to_string().as_bytes())
    }

    /// The events of a stream, which ends with `[DONE]`.
    pub fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        let mut lines: Vec<&str> =
            answer.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(lines.pop(), Some("[DONE]"), "{}", answer.body);
        lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Everything until the end of the connection. A reset after the response does not lose it.
pub fn read_all(stream: &mut TcpStream) -> String {
    let (mut all, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(n) = stream.read(&mut piece) {
        if n == 0 {
            break;
        }
        all.extend(&piece[..n]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

pub fn wait_for(stream: &mut TcpStream, text: &str) {
    let (mut seen, mut piece) = (String::new(), [0; 512]);
    while !seen.contains(text) {
        let n = stream.read(&mut piece).unwrap();
        assert!(n > 0, "the connection ended: {seen}");
        seen += &String::from_utf8_lossy(&piece[..n]);
    }
}

fn answer(text: &str) -> Answer {
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { joined(body) } else { body.to_string() };
    Answer { status, head: head.to_lowercase(), body }
}

/// The content of chunks.
fn joined(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out += &rest[..size];
        body = &rest[size + 2..];
        if size == 0 {
            break;
        }
    }
    out
}
