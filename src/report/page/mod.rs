//! The page of a run: one function of its history, live from the coordinator or as report.html. Everything is in
//! the page itself: no font, script or picture comes from elsewhere, and nothing is asked of another host.

mod panels;
mod tables;

use super::draw::{Chart, escape};
use super::history::History;

pub use panels::{charts, lanes, topology};

const COLOURS: &str = include_str!("colours.css");
const SHAPES: &str = include_str!("shapes.css");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("live.js");

/// What a page shows beside the events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The resolved configuration, as run.yaml has it.
    pub configuration: String,
    /// The contracts: id, statement, and what enforces them.
    pub contracts: Vec<Contract>,
}

/// A contract, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contract {
    /// `F-DP-001`
    pub id: String,
    /// What holds.
    pub statement: String,
    /// What enforces it while a run goes on; None where tests alone do.
    pub enforced: Option<String>,
}

/// The contract that ends a run whose numbers are no numbers any more.
const HALTS: &str = "F-DP-003";

/// How a page comes to its reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A file.
    File,
    /// From a running process: it asks for news.
    Live,
}

/// The whole document.
pub fn document(history: &History, around: &Surroundings, form: Form) -> String {
    let (script, allowed) = match form {
        Form::File => (String::new(), String::new()),
        Form::Live => (format!("<script>{SCRIPT}</script>"), live_only()),
    };
    let name = history.note("model").map_or("run", model_name);
    let all = format!(r#"<main id="run">{}</main>{script}"#, body(history, around));
    shell(&format!("{name} · finetune"), &all, &allowed)
}

/// A document with one body.
pub fn frame(title: &str, body: &str) -> String {
    shell(title, &format!("<main>{body}</main>"), "")
}

/// The one script, by its hash, and the host that it asks for news: nothing else may run or be asked.
fn live_only() -> String {
    use base64::{Engine, prelude::BASE64_STANDARD};
    use sha2::{Digest, Sha256};
    format!(" script-src 'sha256-{}'; connect-src 'self';", BASE64_STANDARD.encode(Sha256::digest(SCRIPT)))
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

/// What changes while a run goes on.
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

/// The first word of a model's note: its path without the folders above it.
fn model_name(note: &str) -> &str {
    let path = note.split(" (").next().unwrap_or(note);
    let mut parts = path.trim_end_matches('/').rsplit('/');
    match (parts.next(), parts.next()) {
        // A folder of that name says less than the one above it.
        (Some("model"), Some(above)) => above,
        (Some(name), _) => name,
        _ => path,
    }
}

#[cfg(test)]
mod tests;
