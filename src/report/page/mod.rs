//! The page of a run: one function of its history, live from the coordinator or as report.html. The page is
//! self-contained: it loads no font, script or picture from elsewhere and contacts no other host.

mod panels;
mod tables;

use super::draw::{Chart, escape};
use super::history::History;

pub use panels::{charts, lanes, topology};

const COLOURS: &str = include_str!("colours.css");
const SHAPES: &str = include_str!("shapes.css");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("live.js");

/// Contents of a page other than events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The resolved configuration, in the format of run.yaml.
    pub configuration: String,
    /// All contracts.
    pub contracts: Vec<Contract>,
}

/// A contract, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contract {
    /// Identifier: `F-DP-001`.
    pub id: String,
    /// The guarantee.
    pub statement: String,
    /// What enforces the contract during a run; None if only tests check it.
    pub enforced: Option<String>,
}

/// The contract that halts a run if a value is not finite.
const HALTS: &str = "F-DP-003";

/// How a page is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A file.
    File,
    /// A response of a running process: the page requests updates.
    Live,
}

/// The complete document.
pub fn document(history: &History, around: &Surroundings, form: Form) -> String {
    let (script, allowed) = match form {
        Form::File => (String::new(), String::new()),
        Form::Live => (format!("<script>{SCRIPT}</script>"), only(SCRIPT)),
    };
    let name = history.note("model").map_or("run", model_name);
    let all = format!(r#"<main id="run">{}</main>{script}"#, body(history, around));
    shell(&format!("{name} · finetune"), &all, &allowed)
}

/// A document with the given body.
pub fn frame(title: &str, body: &str) -> String {
    shell(title, &format!("<main>{body}</main>"), "")
}

/// A page with a script of its own: the same colours and pictures, and a style sheet beside that of runs.
pub fn application(title: &str, style: &str, body: &str, script: &str) -> String {
    let body = format!("<style>{style}</style>{body}<script>{script}</script>");
    shell(title, &body, &only(script))
}

/// Content security policy of a page with a script: only this one may run, and only the page's own host may be contacted.
fn only(script: &str) -> String {
    use base64::{Engine, prelude::BASE64_STANDARD};
    use ring::digest::{SHA256, digest};
    format!(
        " script-src 'sha256-{}'; connect-src 'self';",
        BASE64_STANDARD.encode(digest(&SHA256, script.as_bytes()))
    )
}

fn shell(title: &str, body: &str, allowed: &str) -> String {
    format!(
        r#"<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:;{allowed} base-uri 'none'; form-action 'none'">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,"><title>{}</title>
<style>{COLOURS}{SHAPES}{STYLE}</style></head>
<body>{body}</body></html>
"#,
        escape(title),
    )
}

/// A panel with one chart.
pub fn panel(chart: &Chart) -> String {
    format!(
        r#"<div class="panel full">{}</div>"#,
        panels::both(chart.draw(1008.0, 280.0), chart.draw(340.0, 200.0))
    )
}

/// The part of the page that changes during a run.
pub fn body(history: &History, around: &Surroundings) -> String {
    [
        panels::head(history),
        panels::tiles(history),
        panels::curves(history),
        panels::devices(history),
        tables::confusion(history),
        tables::samples(history),
        tables::changes(history),
        tables::configuration(around),
        tables::contracts(history, around),
    ]
    .concat()
}

/// The last folder of the path in a model note.
fn model_name(note: &str) -> &str {
    let path = note.split(" (").next().unwrap_or(note);
    let mut parts = path.trim_end_matches('/').rsplit('/');
    match (parts.next(), parts.next()) {
        // For a path `NAME/model`, the folder above is the better name.
        (Some("model"), Some(above)) => above,
        (Some(name), _) => name,
        _ => path,
    }
}

#[cfg(test)]
mod tests;
