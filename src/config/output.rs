//! The group `output`: what a run writes, when, and which of its states is the result.

use super::refusal::Refusal;
use super::settings::Settings;
use super::values::{Every, choice, every, whole};
use crate::data::Task;
use crate::net::Endpoint;
use crate::train::best::{Choice, Metric};
use std::path::PathBuf;

/// Whether an earlier run is continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// A run of its own.
    No,
    /// From the last checkpoint of the output folder.
    Output,
    /// From this run or checkpoint.
    From(PathBuf),
}

/// `output`
#[derive(Debug, Clone, PartialEq)]
pub struct OutputOptions {
    /// None: the next free one.
    pub output: Option<PathBuf>,
    /// Replace what is there.
    pub overwrite: bool,
    /// Continue.
    pub resume: Resume,
    /// When the model is scored besides at the start and at the end.
    pub eval_steps: Every,
    /// When checkpoints are written besides at the end.
    pub save_steps: Every,
    /// What evaluations decide.
    pub choice: Choice,
    /// Checkpoints kept.
    pub save_total_limit: Option<usize>,
    /// Answered before and after.
    pub sample_prompts: Vec<String>,
    /// metrics.jsonl elsewhere.
    pub log_json: Option<PathBuf>,
    /// TensorBoard's event files go here.
    pub tensorboard: Option<PathBuf>,
    /// Where the page of the run is shown.
    pub dashboard: Option<Endpoint>,
    /// No progress.
    pub quiet: bool,
}

/// Where the page goes: on this machine unless an address is named.
fn dashboard(s: &Settings) -> Result<Option<Endpoint>, Refusal> {
    const PORT: u16 = 9080;
    match (s.is_given("dashboard"), s.text("dashboard")?) {
        (false, _) | (_, Some("false")) => Ok(None),
        (true, None | Some("" | "true")) => Ok(Some(Endpoint::loopback(PORT))),
        (true, Some(text)) => {
            // A number alone is a port.
            if let Ok(port) = text.parse() {
                return Ok(Some(Endpoint::loopback(port)));
            }
            Endpoint::parse(text, PORT).map(Some).map_err(|e| s.malformed("dashboard", e.to_string()))
        }
    }
}

/// Reads the group.
pub fn output(s: &Settings, task: Task) -> Result<OutputOptions, Refusal> {
    let resume = match (s.is_given("resume"), s.text("resume")?) {
        (false, _) | (_, Some("false")) => Resume::No,
        (true, None | Some("true")) => Resume::Output,
        (true, Some(dir)) => Resume::From(dir.into()),
    };
    let eval_steps = every(s, "eval-steps")?;
    Ok(OutputOptions {
        output: s.text("output")?.map(PathBuf::from),
        overwrite: s.switch("overwrite")?,
        resume,
        eval_steps,
        save_steps: every(s, "save-steps")?,
        choice: best(s, task, eval_steps)?,
        save_total_limit: whole(s, "save-total-limit", 1)?,
        sample_prompts: s.list("sample-prompt").to_vec(),
        log_json: s.text("log-json")?.map(PathBuf::from),
        tensorboard: s.text("tensorboard")?.map(PathBuf::from),
        dashboard: dashboard(s)?,
        quiet: s.switch("quiet")?,
    })
}

/// What evaluations decide. Without any but the last one there is nothing to choose from.
fn best(s: &Settings, task: Task, evals: Every) -> Result<Choice, Refusal> {
    let known = ["loss", "accuracy", "macro_f1", "eval_loss", "eval_accuracy", "eval_macro_f1"];
    let name = choice(s, "best-metric", &known, "expected one of loss, accuracy, macro_f1")?;
    let metric = match name.trim_start_matches("eval_") {
        "accuracy" => Metric::Accuracy,
        "macro_f1" => Metric::MacroF1,
        _ => Metric::Loss,
    };
    if metric != Metric::Loss && task != Task::Classify {
        return Err(s.refuse("best-metric", format!("{name} goes with --task classify")));
    }
    let keep = s.switch("keep-best")?;
    let patience = whole(s, "early-stopping", 0)?.filter(|n| *n > 0).map(|n| n as u64);
    for (name, asked) in [("keep-best", keep), ("early-stopping", patience.is_some())] {
        if asked && evals == Every::Never {
            return Err(s.refuse(name, "needs evaluations during the run: --eval-steps epoch, 25% or N"));
        }
    }
    Ok(Choice { metric, keep, patience })
}
