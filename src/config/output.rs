//! The group `output`: the files of a run, the times when they are written, and which state is the result.

use super::refusal::Refusal;
use super::settings::Settings;
use super::values::{Every, every, filled, whole};
use crate::data::Task;
use crate::net::Endpoint;
use crate::train::best::{Choice, Metric};
use std::path::PathBuf;

/// Whether an earlier run is continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// A new run.
    No,
    /// The last checkpoint of the output folder.
    Output,
    /// The given run or checkpoint.
    From(PathBuf),
}

/// `output`
#[derive(Debug, Clone, PartialEq)]
pub struct OutputOptions {
    /// Folder of the run; `None`: the next free one.
    pub output: Option<PathBuf>,
    /// Whether an existing run is replaced.
    pub overwrite: bool,
    /// Whether and from where the run is resumed.
    pub resume: Resume,
    /// Interval of evaluations, besides those at the start and at the end.
    pub eval_steps: Every,
    /// Interval of checkpoints, besides the one at the end.
    pub save_steps: Every,
    /// Decisions that depend on evaluations.
    pub choice: Choice,
    /// The set of --eval-data that decides; `None`: the first one.
    pub best_set: Option<String>,
    /// Whether evaluations count the most probable tokens that are right.
    pub token_accuracy: bool,
    /// Maximum number of checkpoints kept.
    pub save_total_limit: Option<usize>,
    /// Prompts that are answered before and after training.
    pub sample_prompts: Vec<String>,
    /// Number of rows of the evaluation that are answered and compared.
    pub sample_rows: usize,
    /// Path of metrics.jsonl outside the run's folder.
    pub log_json: Option<PathBuf>,
    /// Folder of TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// Listening address of the run's page.
    pub dashboard: Option<Endpoint>,
    /// Whether progress is hidden.
    pub quiet: bool,
}

/// Address of the page: on this machine unless another address is given.
fn dashboard(s: &Settings) -> Result<Option<Endpoint>, Refusal> {
    const PORT: u16 = 9080;
    match (s.is_given("dashboard"), s.text("dashboard")?) {
        (false, _) | (_, Some("false")) => Ok(None),
        (true, None | Some("" | "true")) => Ok(Some(Endpoint::loopback(PORT))),
        (true, Some(text)) => {
            // A single number is a port.
            if let Ok(port) = text.parse() {
                return Ok(Some(Endpoint::loopback(port)));
            }
            Endpoint::parse(text, PORT).map(Some).map_err(|e| s.malformed("dashboard", e.to_string()))
        }
    }
}

/// Reads the group.
pub fn output(s: &Settings, task: Task, sets: &[String]) -> Result<OutputOptions, Refusal> {
    let resume = match (s.is_given("resume"), s.text("resume")?) {
        (false, _) | (_, Some("false")) => Resume::No,
        (true, None | Some("true")) => Resume::Output,
        (true, Some(dir)) => Resume::From(dir.into()),
    };
    let eval_steps = every(s, "eval-steps")?;
    let (choice, best_set) = best(s, (task, sets), eval_steps)?;
    Ok(OutputOptions {
        output: s.text("output")?.map(PathBuf::from),
        overwrite: s.switch("overwrite")?,
        resume,
        eval_steps,
        save_steps: every(s, "save-steps")?,
        choice,
        best_set,
        token_accuracy: token_accuracy(s, task)?,
        save_total_limit: whole(s, "save-total-limit", 1)?,
        sample_prompts: s.list("sample-prompt").to_vec(),
        sample_rows: sample_rows(s, task)?,
        log_json: s.text("log-json")?.map(PathBuf::from),
        tensorboard: s.text("tensorboard")?.map(PathBuf::from),
        dashboard: dashboard(s)?,
        quiet: s.switch("quiet")?,
    })
}

/// Reads --token-accuracy. Classes and answers have an accuracy of their own.
pub fn token_accuracy(s: &Settings, task: Task) -> Result<bool, Refusal> {
    match s.switch("token-accuracy")? && task != Task::Sft {
        true => {
            Err(s.refuse("token-accuracy", "goes with --task sft: other tasks report their own accuracy"))
        }
        false => s.switch("token-accuracy"),
    }
}

/// Reads --sample-rows. A classifier generates no text.
fn sample_rows(s: &Settings, task: Task) -> Result<usize, Refusal> {
    let rows = filled(s, "sample-rows", whole(s, "sample-rows", 0)?)?;
    match rows > 0 && task.has_head() {
        true => Err(s.refuse(
            "sample-rows",
            "a model with a head writes no answers: its evaluation reports its scores",
        )),
        false => Ok(rows),
    }
}

/// Reads the decisions that depend on evaluations. Without any evaluation besides the last one there is no choice.
/// Returns the deciding set too, where it is named.
fn best(
    s: &Settings,
    (task, sets): (Task, &[String]),
    evals: Every,
) -> Result<(Choice, Option<String>), Refusal> {
    let name = filled(s, "best-metric", s.text("best-metric")?.map(str::to_string))?;
    let metrics = [
        ("loss", Metric::Loss),
        ("accuracy", Metric::Accuracy),
        ("macro_f1", Metric::MacroF1),
        ("f1", Metric::F1),
    ];
    let of = name.strip_prefix("eval_").unwrap_or(&name);
    let found = metrics.into_iter().find_map(|(end, metric)| {
        let set = of.strip_suffix(end)?;
        let set = if set.is_empty() { set } else { set.strip_suffix('_').filter(|set| !set.is_empty())? };
        Some((set.to_string(), metric))
    });
    let Some((set, metric)) = found else {
        let rule =
            "expected one of loss, accuracy, macro_f1, f1, or a set of --eval-data before it, as code_loss";
        return Err(s.refuse("best-metric", format!("{name:?}: {rule}")));
    };
    if !set.is_empty() && !sets.contains(&set) {
        return Err(s.refuse("best-metric", format!("{name}: no set of --eval-data has the name {set}")));
    }
    let known = match task {
        Task::Tag => true,
        Task::Classify => metric != Metric::F1,
        Task::Pairs | Task::Reward => matches!(metric, Metric::Loss | Metric::Accuracy),
        Task::Sft | Task::Unpaired | Task::Regress => metric == Metric::Loss,
    };
    if !known {
        return Err(s.refuse(
            "best-metric",
            format!(
                "{name} goes with --task classify and token-classification (f1: the latter); accuracy also with pairs of \
                 answers"
            ),
        ));
    }
    let keep = s.switch("keep-best")?;
    let patience = whole(s, "early-stopping", 0)?.filter(|n| *n > 0).map(|n| n as u64);
    for (name, asked) in [("keep-best", keep), ("early-stopping", patience.is_some())] {
        if asked && evals == Every::Never {
            return Err(s.refuse(name, "needs evaluations during the run: --eval-steps epoch, 25% or N"));
        }
    }
    Ok((Choice { metric, keep, patience }, Some(set).filter(|set| !set.is_empty())))
}
