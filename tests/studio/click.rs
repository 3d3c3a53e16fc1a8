//! From rows to an answer in a real browser, by clicks and keys.

use crate::browser::Browser;
use crate::cli_fixture::Bench;
use crate::server::{self, Server};
use serde_json::{Value, json};
use std::process::Stdio;

const STATE: &str = "document.getElementById('state').textContent";

fn state(browser: &mut Browser, word: &str) {
    browser.until(&format!("{STATE} === '{word}'"));
}

#[test]
fn a_person_gets_from_rows_to_an_answer() {
    let bench = Bench::new();
    bench.model("base");
    let server = Server::start(&bench);
    let Some(mut browser) = Browser::open(&format!("{}/#key={}", server.url(), server.key)) else { return };
    browser.until("!document.getElementById('new').hidden && document.getElementById('root').textContent");
    assert_eq!(browser.eval("location.hash"), "#new", "the key stays in the address");
    choose(&mut browser);
    browser.click("#ask-mask");
    browser.until("document.querySelector('#mask mark')?.textContent.includes('git branch --list 0')");
    browser.click("#ask-plan");
    browser.until("document.querySelector('#plan td.good')");
    browser.fits("new");

    train(&mut browser);
    answer(&mut browser, &bench);
    browser.click("#export summary");
    browser.click("#give button");
    browser.until("document.getElementById('exported').textContent.startsWith('written: ')");
    assert!(bench.path("mine-merged/model.safetensors").exists());
    stop_and_resume(&mut browser);
    join(&mut browser, &bench);

    browser.click("nav a[href='#runs']");
    browser.until("document.querySelectorAll('#list input').length === 3");
    browser.click("#list input[value='mine']");
    browser.click("#list input[value='long']");
    browser.click("#compare");
    browser.until("document.querySelector('#comparison h1')?.textContent === '2 runs'");
    browser.fits("runs");
    nothing_was_wrong(&browser, &server);
    // Without the key nothing is shown.
    browser.eval("sessionStorage.clear(); location.reload()");
    browser.until("!document.getElementById('locked').hidden");
    browser.click("#key");
    browser.text("wrong");
    browser.key("Enter");
    browser.until("document.getElementById('fault').textContent.includes('key')");
}

/// The model by keys alone, the rows by clicks.
fn choose(browser: &mut Browser) {
    browser.eval("document.getElementById('model').focus()");
    browser.key("Tab");
    browser.key("Enter");
    browser.until("document.activeElement.textContent.includes('base')");
    browser.fits("browse");
    browser.key("Enter");
    browser.until("document.getElementById('model').value === 'base'");
    browser.click("[data-browse=data]");
    browser.until("document.getElementById('browser').open");
    let rows =
        "[...document.querySelectorAll('#entries button')].find(b => b.textContent.startsWith('rows.jsonl'))";
    browser.until(rows);
    browser.eval(&format!("{rows}.id = 'wanted'"));
    browser.click("#wanted");
    browser.until("document.getElementById('data').value === 'rows.jsonl'");
    browser.click("[data-browse=eval-data]");
    browser.until("document.getElementById('browser').open");
    browser.key("Escape");
    browser.until("!document.getElementById('browser').open");
}

/// Types into the field of an option, or into that of further options.
fn fill(browser: &mut Browser, name: &str, text: &str) {
    let field = if name == "more" { "#more".to_string() } else { format!("[data-option={name}]") };
    browser.click(&field);
    browser.eval(&format!("document.querySelector('{field}').value = ''"));
    browser.text(text);
}

fn train(browser: &mut Browser) {
    for (option, text) in [
        ("epochs", "4"),
        ("learning-rate", "1e-2"),
        ("gpus", "cpu"),
        ("eval-data", "eval.jsonl"),
        ("output", "../mine"),
    ] {
        fill(browser, option, text);
    }
    browser.key("Enter");
    browser.until("document.getElementById('fault').textContent.includes('../mine')");
    browser.fits("fault");
    fill(browser, "output", "mine");
    browser.click("#start");
    state(browser, "complete");
    browser.until("document.getElementById('stop').hidden && !document.getElementById('talk').hidden");
    browser.fits("run");
}

fn answer(browser: &mut Browser, bench: &Bench) {
    browser.click("#talk summary");
    browser.click("#beside");
    browser.click("#message");
    browser.text("Show the tag again ");
    browser.key("Enter");
    browser.until("document.querySelectorAll('#log .whole').length === 2");
    browser.until("!document.getElementById('send').disabled");
    browser.fits("talk");
    let said = browser.eval("document.querySelector('#log .tuned').lastChild.textContent");
    let line = bench.ok("generate --adapter mine --raw --prompt 'Show the tag again ' --json");
    let expected: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(said, expected["text"]);
    assert!(!said.as_str().unwrap().is_empty());
}

fn stop_and_resume(browser: &mut Browser) {
    browser.click("nav a[href='#new']");
    fill(browser, "output", "long");
    browser.click("#new details summary");
    fill(browser, "more", "max_steps: 1000000\nsave_steps: 0");
    browser.click("#start");
    browser.until("location.hash === '#run=long'");
    state(browser, "running");
    browser.until("parseInt(document.querySelector('#body .tile strong').textContent) > 2");
    browser.fits("running");
    browser.click("#stop");
    state(browser, "stopped");
    browser.click("#resume");
    state(browser, "running");
    browser.click("#stop-now");
    state(browser, "stopped");
}

/// A run of two machines: the page has the line to paste on the second one, and shows both with their devices.
fn join(browser: &mut Browser, bench: &Bench) {
    browser.click("nav a[href='#new']");
    fill(browser, "output", "team");
    browser.eval("document.querySelector('[data-option=role]').value = 'coordinator'");
    fill(browser, "more", "max_steps: 8\nbind: 127.0.0.1:0\nexpect_workers: 2");
    browser.click("#start");
    browser.until("location.hash === '#run=team'");
    let address = "document.getElementById('invitation').textContent.match(/--coordinator (\\S+)/)?.[1]";
    browser.until(&format!("!document.getElementById('invite').hidden && {address}"));
    let address = browser.eval(address);
    let worker = format!("--role worker --gpus cpu --coordinator {}", address.as_str().unwrap());
    let mut worker = server::at_home(bench, &worker).stderr(Stdio::null()).spawn().unwrap();
    state(browser, "complete");
    assert!(worker.wait().unwrap().success());
    browser.until("document.querySelectorAll('#body table.devices tr').length === 3");
    browser.fits("team");
}

/// No script failed, no rule of the page was broken, and no other host was asked.
fn nothing_was_wrong(browser: &Browser, server: &Server) {
    let thrown = browser.heard("Runtime.exceptionThrown");
    assert!(thrown.is_empty(), "{thrown:?}");
    // The refused folder of the run is the one request that fails.
    let errors: Vec<Value> =
        browser.heard("Log.entryAdded").into_iter().filter(|e| e["entry"]["level"] == "error").collect();
    assert!(
        errors.len() == 1 && errors[0]["entry"]["url"] == json!(server.url() + "/api/start"),
        "{errors:?}"
    );
    let asked = browser.heard("Network.requestWillBeSent");
    assert!(asked.len() > 10);
    for request in asked {
        let url = request["request"]["url"].as_str().unwrap();
        assert!(url.starts_with(&server.url()) || url.starts_with("data:"), "{url}");
        assert!(!url.contains(&server.key), "the key is in the address of a request");
    }
}
