//! A studio on a port of its own, and requests to it.

use crate::cli_fixture::Bench;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(120);

pub struct Server {
    child: Child,
    pub port: u16,
    pub key: String,
    agent: ureq::Agent,
    /// Runs that end with the test.
    root: std::path::PathBuf,
}

pub struct Answer {
    pub status: u16,
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

/// A command with the bench's own token.
pub fn at_home(bench: &Bench, arguments: &str) -> Command {
    let mut command = bench.command(arguments);
    command.env("HOME", bench.path("home")).env("XDG_CONFIG_HOME", bench.path("home"));
    command
}

impl Server {
    pub fn start(bench: &Bench) -> Self {
        Self::with(bench, "")
    }

    pub fn with(bench: &Bench, options: &str) -> Self {
        let mut command = at_home(bench, &format!("studio --bind 127.0.0.1:0 {options}"));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut shown = String::new();
        while !shown.contains("\nroot") {
            assert!(lines.read_line(&mut shown).unwrap() > 0, "the studio ended: {shown}");
        }
        std::thread::spawn(move || drop(lines.read_to_string(&mut String::new())));
        let line = shown.lines().find_map(|line| line.strip_prefix("studio   http://127.0.0.1:")).unwrap();
        let (port, key) = line.split_once("/#key=").unwrap();
        let agent = ureq::Agent::config_builder().proxy(None).http_status_as_error(false).build().new_agent();
        let root = shown.lines().find_map(|line| line.strip_prefix("root     ")).unwrap().into();
        Server { child, port: port.parse().unwrap(), key: key.into(), agent, root }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&str>) -> Answer {
        let mut request = ureq::http::Request::builder().method(method).uri(self.url() + path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let sent = match body {
            Some(body) => self.agent.run(request.body(body.to_string()).unwrap()),
            None => self.agent.run(request.body(()).unwrap()),
        };
        let mut answer = sent.unwrap();
        Answer { status: answer.status().as_u16(), body: answer.body_mut().read_to_string().unwrap() }
    }

    fn keyed(&self, method: &str, path: &str, body: Option<&str>) -> Answer {
        self.send(method, path, &[("authorization", &format!("Bearer {}", self.key))], body)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.keyed("GET", path, None)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.keyed("POST", path, Some(&body.to_string()))
    }

    /// The last line of a command, which has its result.
    #[track_caller]
    pub fn work(&self, path: &str, body: &Value) -> Value {
        let answer = self.post(path, body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        serde_json::from_str(answer.body.lines().last().unwrap()).unwrap()
    }

    /// The text of a streamed answer.
    pub fn said(&self, ask: &Value) -> String {
        let answer = self.post("/api/talk", ask);
        assert!(answer.body.contains("data: [DONE]"), "{}", answer.body);
        let events = answer.body.lines().filter_map(|line| line.strip_prefix("data: {"));
        let texts = events.map(|event| {
            let event: Value = serde_json::from_str(&format!("{{{event}")).unwrap();
            event["choices"][0]["text"].as_str().unwrap_or_default().to_string()
        });
        texts.collect()
    }

    /// Starts a run; returns its folder.
    pub fn begin(&self, options: Value) -> String {
        let begun = self.post("/api/start", &json!({ "options": options })).ok();
        begun["run"].as_str().unwrap().to_string()
    }

    pub fn step(&self, run: &str) -> u64 {
        let list = self.get("/api/runs").ok();
        let one = list.as_array().unwrap().iter().find(|one| one["run"] == run).cloned();
        one.unwrap_or_default()["step"].as_u64().unwrap_or_default()
    }

    /// Waits until the run has this state.
    #[track_caller]
    pub fn wait(&self, run: &str, state: &str) -> Value {
        let began = Instant::now();
        loop {
            let answer = self.get(&format!("/api/run?run={run}"));
            if answer.status == 200 && answer.json()["state"] == state {
                return answer.json();
            }
            assert!(began.elapsed() < DEADLINE, "{run} is not {state}: {}", answer.body);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[track_caller]
    pub fn wait_for(&self, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() {
            assert!(began.elapsed() < DEADLINE);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends the studio as a crash does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.root.clear();
    }
}

/// Ends what a failed test left: the runs too, which would go on.
impl Drop for Server {
    fn drop(&mut self) {
        if !self.root.as_os_str().is_empty() {
            for run in self.get("/api/runs").json().as_array().into_iter().flatten() {
                let _ = self.post("/api/stop", &json!({ "run": run["run"], "now": true }));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
