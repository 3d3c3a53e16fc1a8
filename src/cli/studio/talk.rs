//! Conversations with the adapter of a run: `finetune serve` as a child process, with a key that only this process has.

use super::command::{command, error_of};
use super::root::{Root, wrong};
use crate::cli::listening::Failure;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The adapter's name in the child process.
const TUNED: &str = "tuned";

/// The model that talks, if one is open.
pub struct Talk {
    root: Root,
    open: Mutex<Option<Open>>,
}

struct Open {
    run: String,
    child: Child,
    /// `http://127.0.0.1:PORT/v1`; empty until the model is loaded.
    url: String,
    key: String,
    /// Name of the base.
    base: String,
}

impl Drop for Open {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Talk {
    /// No model is open.
    pub fn new(root: Root) -> Self {
        Talk { root, open: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads the model with the adapter of a run; the one that was open ends. `hear` gets the lines of the child.
    pub fn open(
        &self,
        run: &str,
        adapter: &str,
        key: String,
        hear: impl FnMut(&str) -> bool,
    ) -> Result<Value, Failure> {
        self.close();
        let failed = |e: std::io::Error| wrong(format!("the model cannot be loaded: {e}"));
        let arguments = ["serve".into(), format!("--adapter={TUNED}={adapter}"), "--bind=127.0.0.1:0".into()];
        let mut command = command(&self.root.0, &arguments).map_err(failed)?;
        command.env("FINETUNE_API_KEY", &key).stdout(Stdio::null()).stderr(Stdio::piped());
        // Ctrl-C at the terminal ends this process, which ends the child.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(failed)?;
        let (lines, pid) = (child.stderr.take().map(BufReader::new), child.id());
        let next = Open { run: run.into(), child, url: String::new(), key, base: String::new() };
        *self.lock() = Some(next);
        let mut lines = lines.into_iter().flat_map(BufRead::lines);
        let loaded = loaded(&mut lines, hear);
        std::thread::spawn(move || lines.for_each(drop));
        let mut open = self.lock();
        match (loaded, open.as_mut().filter(|one| one.child.id() == pid)) {
            (Ok((url, base)), Some(one)) => {
                (one.url, one.base) = (url, base);
                Ok(json!({ "run": run, "base": one.base }))
            }
            (Err(line), Some(_)) => {
                *open = None;
                Err(wrong(line))
            }
            (_, None) => Err(wrong("another model was loaded")),
        }
    }

    /// Ends the model's process.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// The events of an answer, as the child sends them. `ask` has the fields of a completion, and `tuned`.
    pub fn ask(&self, run: &str, ask: &Value) -> Result<impl Read + use<>, Failure> {
        let (url, key, model) = {
            let open = self.lock();
            let closed = || {
                Failure::of(StatusCode::CONFLICT, format!("{run}: its model is not loaded: load it first"))
            };
            let one = open.as_ref().filter(|one| one.run == run && !one.url.is_empty()).ok_or_else(closed)?;
            let model = if ask["tuned"] == false { one.base.clone() } else { TUNED.into() };
            (one.url.clone(), one.key.clone(), model)
        };
        let mut body = json!({ "model": model, "stream": true, "temperature": 0 });
        for field in ["messages", "prompt", "max_tokens", "temperature", "seed"] {
            if !ask[field].is_null() {
                body[field] = ask[field].clone();
            }
        }
        let path = if ask["messages"].is_array() { "chat/completions" } else { "completions" };
        // The environment may name a proxy, which cannot reach this machine's own port.
        let agent = ureq::Agent::config_builder().proxy(None).http_status_as_error(false).build().new_agent();
        let request = agent.post(format!("{url}/{path}")).header("authorization", format!("Bearer {key}"));
        let lost = |e: ureq::Error| Failure::of(StatusCode::BAD_GATEWAY, format!("the model's process: {e}"));
        let mut response = request.content_type("application/json").send(body.to_string()).map_err(lost)?;
        if response.status().is_success() {
            return Ok(response.into_body().into_reader());
        }
        let text = response.body_mut().read_to_string().map_err(lost)?;
        let value: Value = serde_json::from_str(&text).unwrap_or_default();
        Err(wrong(value["error"]["message"].as_str().unwrap_or("the model's process refused the request")))
    }
}

/// Address and name of the base, from the lines of the child; else the line with which it failed.
fn loaded(
    lines: &mut impl Iterator<Item = std::io::Result<String>>,
    mut hear: impl FnMut(&str) -> bool,
) -> Result<(String, String), String> {
    let (mut url, mut last) = (String::new(), String::new());
    while let Some(Ok(line)) = lines.next() {
        if let Some(at) = line.strip_prefix("serve    ") {
            url = at.into();
        }
        if let Some((base, _)) = line.strip_prefix("models   ").and_then(|names| names.rsplit_once(", ")) {
            return Ok((url, base.into()));
        }
        if !hear(&line) {
            return Err("the page was closed".into());
        }
        last = line;
    }
    Err(error_of(&last).unwrap_or("the model's process ended".into()))
}
