//! Texts and tables of the page: samples, events, confusion, configuration, contracts.

use super::{HALTS, Surroundings};
use crate::report::confusion;
use crate::report::draw::escape;
use crate::report::history::{History, RunState};
use crate::report::words::change_line;

/// Maximum number of lines of a long list; the newest lines are shown.
const MOST: usize = 60;

pub fn samples(history: &History) -> String {
    let Some(first) = history.samples.first() else { return String::new() };
    let mut shown: Vec<_> = history.samples.iter().collect();
    // The first answers and the newest answers show the progress.
    let prompts = history.samples.iter().filter(|s| s.step == first.step).count();
    if shown.len() > 6 * prompts {
        shown.drain(prompts..shown.len() - 5 * prompts);
    }
    let item = |s: &&crate::train::event::Sample| {
        let (text, expected) = (s.text.trim(), s.expected.as_deref());
        let text = if text.is_empty() { "<i>(empty)</i>".into() } else { escape(&s.text) };
        let verdict = match (s.right, expected) {
            (Some(true), _) => " <i>(right)</i>".to_owned(),
            (Some(false), Some(expected)) => format!(" <i>(wrong; the row: {})</i>", escape(expected)),
            _ => String::new(),
        };
        format!(r#"<li><b>step {}</b><q>{}</q><p>{text}{verdict}</p></li>"#, s.step, escape(&s.prompt))
    };
    let items: String = shown.iter().map(item).collect();
    format!(
        r#"<div class="panels"><div class="panel full"><h2>samples</h2><ul class="samples">{items}</ul></div></div>"#
    )
}

pub fn changes(history: &History) -> String {
    if history.changes.is_empty() {
        return String::new();
    }
    let from = history.changes.len().saturating_sub(MOST);
    let item = |c: &crate::train::event::Change| {
        format!("<li><b>step {}</b> {}</li>", c.step, escape(&change_line(c)))
    };
    let items: String = history.changes[from..].iter().rev().map(item).collect();
    format!(
        r#"<div class="panels"><div class="panel full"><h2>events</h2><ul class="events">{items}</ul></div></div>"#
    )
}

pub fn confusion(history: &History) -> String {
    let Some(matrix) = history.evals.last().and_then(|e| e.confusion.as_ref()) else { return String::new() };
    let name = |i: usize| escape(&confusion::name(&history.progress.labels, i));
    let head: String = (0..matrix.len()).map(|j| format!("<th>{}</th>", name(j))).collect();
    let row = |(i, row): (usize, &Vec<u64>)| {
        let all = row.iter().sum::<u64>().max(1) as f64;
        let cell = |(j, n): (usize, &u64)| {
            let (share, class) = (*n as f64 / all, if i == j { "right" } else { "wrong" });
            format!(r#"<td class="{class}" style="--share:{share:.2}">{n}</td>"#)
        };
        format!("<tr><th>{}</th>{}</tr>", name(i), row.iter().enumerate().map(cell).collect::<String>())
    };
    let rows: String = matrix.iter().enumerate().map(row).collect();
    format!(
        r#"<div class="panels"><div class="panel full"><h2>confusion matrix (rows: true label, columns: predicted)</h2><table class="confusion"><tr><th></th>{head}</tr>{rows}</table></div></div>"#
    )
}

pub fn configuration(around: &Surroundings) -> String {
    match around.configuration.as_str() {
        "" => String::new(),
        text => format!("<details><summary>configuration</summary><pre>{}</pre></details>", escape(text)),
    }
}

/// The table of contracts. A contract that is enforced during the run has held so far unless the run halted.
pub fn contracts(history: &History, around: &Surroundings) -> String {
    if around.contracts.is_empty() {
        return String::new();
    }
    let halted = |id: &str| history.state() == RunState::Halted && id == HALTS;
    // A contract of a backend (F-WGPU-001) does not apply to a run without such a device.
    let classes = history.start.as_ref().map_or(&[][..], |start| &start.classes);
    let concerned = |id: &str| match id.split('-').nth(1) {
        Some(backend @ ("WGPU" | "CUDA")) => {
            classes.iter().any(|class| class.starts_with(&backend.to_lowercase()))
        }
        _ => true,
    };
    let row = |c: &super::Contract| {
        let (class, word) = match &c.enforced {
            _ if halted(&c.id) => ("bad", "halted the run"),
            Some(_) if !concerned(&c.id) => ("quiet", "not in this run"),
            Some(_) => ("good", "held so far"),
            None => ("quiet", "checked by tests"),
        };
        let where_ = escape(c.enforced.as_deref().unwrap_or_default());
        let (id, statement) = (escape(&c.id), escape(&c.statement));
        format!(
            r#"<tr title="{where_}"><td>{id}</td><td>{statement}</td><td class="{class}">{word}</td></tr>"#
        )
    };
    let rows: String = around.contracts.iter().map(row).collect();
    format!("<details><summary>contracts</summary><table>{rows}</table></details>")
}
