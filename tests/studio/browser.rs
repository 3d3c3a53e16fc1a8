//! Chromium, headless, driven through its debugging pipe: two named pipes with messages that end with a zero byte.

use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(120);

pub struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    sent: u64,
    /// Events so far.
    pub events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Opens a page; `None` where there is no browser.
    pub fn open(url: &str) -> Option<Self> {
        if Command::new("chromium").arg("--version").output().is_err() {
            assert!(std::env::var_os("FINETUNE_NEED_CHROMIUM").is_none(), "chromium must be installed here");
            eprintln!("skipped: no chromium");
            return None;
        }
        let profile = tempfile::tempdir().unwrap();
        let pipes = ["to", "from"].map(|name| profile.path().join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().unwrap().success());
        let script = r#"to=$1 from=$2; shift 2; exec chromium "$@" 3<"$to" 4>"$from""#;
        let child = Command::new("sh")
            .args(["-c", script, "browser"])
            .args(&pipes)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"])
            .args(["--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--no-pings",
            ])
            .arg(format!("--user-data-dir={}", profile.path().join("profile").display()))
            .arg("about:blank")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let to = OpenOptions::new().write(true).open(&pipes[0]).unwrap();
        let from = BufReader::new(File::open(&pipes[1]).unwrap());
        let mut browser =
            Browser { child, to, from, session: None, sent: 0, events: Vec::new(), _profile: profile };
        let targets = browser.ask("Target.getTargets", json!({}));
        let page = targets["targetInfos"].as_array().unwrap().iter().find(|t| t["type"] == "page").unwrap();
        let attached =
            browser.ask("Target.attachToTarget", json!({ "targetId": page["targetId"], "flatten": true }));
        browser.session = attached["sessionId"].as_str().map(String::from);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        browser.look((1440, 900), "light");
        browser.ask("Page.navigate", json!({ "url": url }));
        Some(browser)
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser ended");
            let mut answer: Value = serde_json::from_slice(&bytes).unwrap();
            if answer["id"] == json!(self.sent) {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut answer = self.ask("Runtime.evaluate", asked);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until the expression is true.
    #[track_caller]
    pub fn until(&mut self, expression: &str) {
        let began = Instant::now();
        // An expression may fail while the page is loaded.
        let tried = format!("(() => {{ try {{ return !!({expression}) }} catch {{ return false }} }})()");
        while self.eval(&tried) != json!(true) {
            let text = || "document.body.innerText.slice(0, 3000)";
            assert!(began.elapsed() < DEADLINE, "{expression}: {}", self.eval(text()));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Presses the mouse on the middle of the element.
    #[track_caller]
    pub fn click(&mut self, selector: &str) {
        let place = format!(
            "(() => {{ const e = document.querySelector({}); if (!e) return null; e.scrollIntoView({{ block: 'center' }}); \
             const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2; \
             const top = document.elementFromPoint(x, y); return r.width && e.contains(top) && !e.disabled ? [x, y] : null; }})()",
            json!(selector)
        );
        self.until(&format!("{place} !== null"));
        let place = self.eval(&place);
        for kind in ["mousePressed", "mouseReleased"] {
            let event =
                json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.ask("Input.dispatchMouseEvent", event);
        }
    }

    /// Types into the element with the focus.
    pub fn text(&mut self, text: &str) {
        self.ask("Input.insertText", json!({ "text": text }));
    }

    /// Presses a key.
    pub fn key(&mut self, name: &str) {
        let (code, text) = match name {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            " " => (32, " "),
            _ => panic!("{name}"),
        };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({ "type": kind, "key": name, "windowsVirtualKeyCode": code, "text": if kind == "keyDown" { text } else { "" } });
            self.ask("Input.dispatchKeyEvent", event);
        }
    }

    /// Sets the size of the window and the colour scheme.
    pub fn look(&mut self, (width, height): (u32, u32), scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.ask("Emulation.setDeviceMetricsOverride", size);
        let scheme = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.ask("Emulation.setEmulatedMedia", json!({ "features": scheme }));
    }

    /// Checks that the page fits into a narrow and a wide window, in both schemes. FINETUNE_PICTURES=DIR keeps pictures.
    #[track_caller]
    pub fn fits(&mut self, name: &str) {
        for (width, scheme) in [(390, "light"), (390, "dark"), (1440, "dark"), (1440, "light")] {
            self.look((width, 900), scheme);
            let wide = self.eval("document.documentElement.scrollWidth").as_u64().unwrap();
            assert!(wide <= u64::from(width), "{name}: {wide} of {width} pixels");
            if let Some(dir) = std::env::var_os("FINETUNE_PICTURES").map(PathBuf::from) {
                // A chart is drawn again for another width.
                std::thread::sleep(Duration::from_millis(200));
                let shot = json!({ "format": "png", "captureBeyondViewport": true });
                let picture = self.ask("Page.captureScreenshot", shot);
                let bytes = base64::Engine::decode(
                    &base64::prelude::BASE64_STANDARD,
                    picture["data"].as_str().unwrap(),
                );
                std::fs::create_dir_all(&dir).unwrap();
                std::fs::write(dir.join(format!("{name}-{width}-{scheme}.png")), bytes.unwrap()).unwrap();
            }
        }
    }

    /// Events with this name, and their parameters.
    pub fn heard(&self, method: &str) -> Vec<Value> {
        let named = self.events.iter().filter(|event| event["method"] == method);
        named.map(|event| event["params"].clone()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
