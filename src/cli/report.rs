//! `finetune report OUT`: writes the pages and pictures of a run again from its metrics.jsonl; for several runs, one
//! page that compares them. (No existing verb reads a finished run.)

pub mod difference;

use super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::format::atomic;
use crate::report::{self, History};
use crate::run::watch::surroundings;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Default path of a comparison.
const COMPARISON: &str = "comparison.html";

/// Writes the report.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let output = inv.settings.text("output")?.map(PathBuf::from);
    let runs = std::mem::take(&mut inv.positional);
    if runs.is_empty() {
        return Err(Refusal::usage("nothing to report on: give the folder of a run, or of several"));
    }
    let mut histories = Vec::new();
    for name in &runs {
        let path = Path::new(name);
        let log = if path.is_dir() { path.join("metrics.jsonl") } else { path.to_owned() };
        if !log.exists() {
            let way = "give the folder of a run, or the file that --log-json named";
            return Err(Refusal::failure(format!("{}: no such file: {way}", log.display())));
        }
        let events = report::read(&log)?;
        if events.is_empty() {
            return Err(Refusal::failure(format!("{}: no events: nothing was trained yet", log.display())));
        }
        histories.push((name.trim_end_matches('/').to_string(), History::of(&events)));
    }
    let written = match &histories[..] {
        [(name, history)] => {
            let dir = output.unwrap_or_else(|| folder(Path::new(name)));
            if dir.is_file() || dir.extension().is_some_and(|end| end == "html") {
                let way = "a report of one run is a page and its pictures: -o takes their folder";
                return Err(Refusal::failure(format!("{}: {way}", dir.display())));
            }
            std::fs::create_dir_all(&dir).map_err(|e| Refusal::failure(format!("{}: {e}", dir.display())))?;
            report::write(&dir, history, &surroundings(&folder(Path::new(name))))?
        }
        several => {
            let path = output.unwrap_or_else(|| COMPARISON.into());
            let path = if path.is_dir() { path.join(COMPARISON) } else { path };
            if path.exists() && path.extension().is_none_or(|end| end != "html") {
                let way = "exists and is no page: give -o a folder, or a name that ends in .html";
                return Err(Refusal::failure(format!("{}: {way}", path.display())));
            }
            let folders: Vec<PathBuf> = runs.iter().map(|name| folder(Path::new(name))).collect();
            let differences = difference::between(&folders);
            atomic::write_file(&path, report::comparison(several, differences.as_deref()).as_bytes())?;
            path
        }
    };
    if inv.json {
        let runs: Vec<_> = histories.iter().map(|(name, history)| summary(name, history)).collect();
        return inv.say(&json!({ "report": written, "runs": runs }).to_string());
    }
    inv.say(&written.display().to_string())
}

/// Folder of a log.
fn folder(path: &Path) -> PathBuf {
    if path.is_dir() { path.into() } else { path.parent().unwrap_or(Path::new("")).into() }
}

fn summary(name: &str, history: &History) -> serde_json::Value {
    let p = &history.progress;
    let (eval, best) = (p.eval.as_ref().map(|(_, last)| last), history.best_eval());
    json!({
        "run": name,
        "state": history.state().word(),
        "step": p.step,
        "total_steps": p.total_steps,
        "loss": p.smooth_loss(),
        "eval_loss": eval.map(|e| e.eval_loss),
        "best_eval_loss": best.map(|e| e.eval_loss),
        "best_eval_step": best.map(|e| e.step),
        "accuracy": eval.and_then(|e| e.accuracy),
        "macro_f1": eval.and_then(|e| e.macro_f1),
        "f1": eval.and_then(|e| e.f1),
        "tokens": p.tokens,
        "seconds": p.seconds,
    })
}
