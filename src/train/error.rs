//! Reasons why a run did not continue, as facts. Each prints as one line with what, where and what to do.

use super::checkpoint::{JOURNAL, OTHER_STEPS};
use crate::model::stage::Fault;
use std::path::{Path, PathBuf};

/// A run could not start, continue or be saved.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A value is not finite, or too large for exact sums. It did not change the parameters.
    #[error(
        "step {step}: {} became {} in microbatch {microbatch} (rows {}) on {finding}; the parameters of \
         step {} stand: {}",
        shown(.tensor),
        short(*.value),
        list(.rows),
        .step.saturating_sub(1),
        .finding.advice()
    )]
    NonFinite {
        /// The step in progress.
        step: u64,
        /// The microbatch of the step, from 0.
        microbatch: usize,
        /// Row numbers of the microbatch.
        rows: Vec<u64>,
        /// The tensor whose gradient has the value, or another value by its name, which begins with `the`.
        tensor: String,
        /// The bad value.
        value: f64,
        /// The device, and the result of a second computation.
        finding: Box<Finding>,
    },
    /// A value of an island is not finite, or too large for exact sums. It did not change the parameters.
    #[error(
        "steps {} to {last}: {what} became {} in island {island} (rows {}) on {finding}; the parameters of step {after} \
         stand: {}",
        .after + 1,
        short(*.value),
        list(.rows),
        .finding.advice()
    )]
    Island {
        /// The step of the parameters.
        after: u64,
        /// The last step of the island.
        last: u64,
        /// The island, from 0.
        island: usize,
        /// Row numbers of its microbatches.
        rows: Vec<u64>,
        /// What has the value.
        what: String,
        /// The value.
        value: f64,
        /// The device, and the result of a second computation.
        finding: Box<Finding>,
    },
    /// The update gave a parameter that is not finite.
    #[error(
        "step {step}: the update made {tensor} {}; the parameters of step {} stand: lower the learning rate",
        short(*.value),
        .step - 1
    )]
    Update {
        /// The step in progress.
        step: u64,
        /// The tensor of the flat layout.
        tensor: String,
        /// The bad value.
        value: f64,
    },
    /// The loss of an evaluation, or a value on the way to it, is not finite.
    #[error(
        "evaluation after step {step}: {} became {}{}{}",
        shown(.tensor),
        short(*.value),
        if .rows.is_empty() { String::new() } else { format!(" (rows {})", list(.rows)) },
        .finding.as_ref().map_or(": look at these rows".into(), |f| format!(" on {f}: {}", f.advice()))
    )]
    Evaluation {
        /// Steps taken before the evaluation.
        step: u64,
        /// Row numbers of the microbatch.
        rows: Vec<u64>,
        /// What has the value, as in [`TrainError::NonFinite`].
        tensor: String,
        /// The bad value.
        value: f64,
        /// The device, if known.
        finding: Option<Box<Finding>>,
    },
    /// Too few devices for too long; the trained state is saved.
    #[error(
        "{have} of {want} {of}s were here after {seconds} s: {}, or wait for fewer (--expect-workers, --min-workers)",
        if *.step > 0 { "start more workers and go on with --resume" } else { "start more workers and run this again" }
    )]
    Alone {
        /// Number present.
        have: usize,
        /// Number that the run waits for.
        want: usize,
        /// What is counted, in the singular.
        of: &'static str,
        /// Waiting time.
        seconds: u64,
        /// The last finished step.
        step: u64,
    },
    /// Devices of one class have different gradients of a microbatch, and no third one can decide; the trained state is
    /// saved.
    #[error(
        "step {step}: microbatch {microbatch} (rows {}) differs between devices of one class: {results}; no other device \
         of the class is here to decide: go on with --resume without one of them, or with one more",
        list(.rows)
    )]
    Dispute {
        /// The step in progress.
        step: u64,
        /// The microbatch of the step, from 0.
        microbatch: usize,
        /// Row numbers of the microbatch.
        rows: Vec<u64>,
        /// The devices and the hashes of their gradients.
        results: String,
    },
    /// A device failed.
    #[error("step {step}: {fault}")]
    Device {
        /// The step in progress.
        step: u64,
        /// The error of the device.
        fault: Fault,
    },
    /// A checkpoint could not be written; earlier ones are unchanged.
    #[error("{}: the checkpoint of step {step} could not be written: {reason}{}", .path.display(), standing(.kept))]
    Save {
        /// Directory of the checkpoint.
        path: PathBuf,
        /// Step of the checkpoint.
        step: u64,
        /// The error of the operating system.
        reason: String,
        /// The newest existing checkpoint.
        kept: Option<PathBuf>,
    },
    /// A checkpoint cannot be read.
    #[error("{}: {reason}", .path.display())]
    Checkpoint {
        /// Path of the checkpoint.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The directory contains no checkpoint.
    #[error("{}: no checkpoint-N here to resume from; start without --resume", .path.display())]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
    },
    /// The output directory of the run was removed, moved or replaced; nothing is written in its place.
    #[error(
        "{}: this folder, or the run.lock in it, was removed, moved or replaced during the run; nothing was saved at step \
         {step}: where the folder was moved, go on with --resume=DIR, else start again",
        .path.display()
    )]
    Gone {
        /// Former path of the directory.
        path: PathBuf,
        /// The last finished step.
        step: u64,
    },
    /// The checkpoint belongs to another model, other rows or another configuration.
    #[error("{}: cannot resume: {}; {}", .path.display(), .differences.join("; "), instead(.path, .differences))]
    Mismatch {
        /// Path of the checkpoint.
        path: PathBuf,
        /// One line for each difference: `learning_rate was 0.0002, is 0.0005`.
        differences: Vec<String>,
    },
}

/// Where a bad value arose, and the result of a second computation of the same microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Worker and device: `worker a, cpu 0`.
    pub place: String,
    /// Numeric class of the device.
    pub class: String,
    /// None if no device could repeat the computation.
    pub again: Option<Again>,
}

/// A second computation of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Again {
    /// Worker and device.
    pub place: String,
    /// Whether the second computation also gave a bad value.
    pub bad: bool,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.place)?;
        match &self.again {
            None => Ok(()),
            Some(Again { place, bad }) if *place == self.place => f.write_str(if *bad {
                ", and again when computed once more"
            } else {
                ", but not when computed once more"
            }),
            Some(Again { place, bad: true }) => write!(f, ", and also on {place}"),
            Some(Again { place, bad: false }) => write!(f, ", but not on {place}"),
        }
    }
}

impl Finding {
    /// Advice for the user. A value that is bad on two devices comes from the rows or the learning rate; otherwise the
    /// device is at fault. A repeated bad value on one device proves neither.
    fn advice(&self) -> String {
        let advice = self.suspects();
        match self.class.split('-').any(|word| word == "f16") {
            true => {
                format!(
                    "factors are rounded to f16 there, which ends at 65504: try --dtype f32; else {advice}"
                )
            }
            false => advice,
        }
    }

    fn suspects(&self) -> String {
        match &self.again {
            Some(Again { bad: false, .. }) => format!("the device is at fault: leave {} out", self.place),
            Some(Again { place, .. }) if *place == self.place => {
                format!("data or device: look at these rows, lower the learning rate, or try without {place}")
            }
            Some(_) => {
                "two devices agree, so it is the learning rate or the rows: lower the rate, or look at these rows".into()
            }
            None => "look at these rows, or lower the learning rate".into(),
        }
    }
}

impl TrainError {
    /// The exit code of the process: 3 for values that are not finite, 75 for missing devices and for devices that differ, 78 for a mismatch,
    /// otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            TrainError::NonFinite { .. }
            | TrainError::Island { .. }
            | TrainError::Update { .. }
            | TrainError::Evaluation { .. } => 3,
            TrainError::Device { fault: Fault::NonFinite { .. }, .. } => 3,
            TrainError::Mismatch { .. } => 78,
            TrainError::Alone { .. } | TrainError::Dispute { .. } => 75,
            _ => 1,
        }
    }
}

fn shown(tensor: &str) -> String {
    if tensor.starts_with("the ") { tensor.into() } else { format!("the gradient of {tensor}") }
}

/// A value in a few digits, because 1e300 has 300 digits without an exponent.
fn short(value: f64) -> String {
    if value.is_finite() && value.abs() >= 1e7 { format!("{value:e}") } else { value.to_string() }
}

/// At most eight row numbers, so that the message stays short.
fn list(rows: &[u64]) -> String {
    let mut text = rows.iter().take(8).map(u64::to_string).collect::<Vec<_>>().join(", ");
    if rows.len() > 8 {
        text += &format!(" and {} more", rows.len() - 8);
    }
    text
}

/// Advice for a checkpoint with another configuration. A run with another number of steps may start from its adapter.
fn instead(path: &Path, differences: &[String]) -> String {
    // A warm-up given as a share of all steps changes with the number of steps.
    let longer = |line: &String| line.starts_with(OTHER_STEPS) || line.starts_with("warmup_steps ");
    // A state of the journal is no adapter.
    let is_adapter = !path.parent().is_some_and(|folder| folder.ends_with(JOURNAL));
    let is_longer = differences.iter().any(|line| line.starts_with(OTHER_STEPS));
    match is_adapter && is_longer && differences.iter().all(longer) {
        true => format!("to train on, start another run from its adapter: --init-adapter {}", path.display()),
        false => "start afresh with another --output".into(),
    }
}

fn standing(kept: &Option<PathBuf>) -> String {
    match kept {
        Some(path) => format!("; {} stands: free space and go on with --resume", path.display()),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Again, Finding, TrainError, short};
    use crate::train::sum::THE_LOSS;

    #[test]
    fn advice_for_f16_classes_begins_with_f32() {
        let advice = |class: &str, bad| {
            let again = Some(Again { place: "b".into(), bad });
            Finding { place: "a".into(), class: class.into(), again }.advice()
        };
        for bad in [true, false] {
            for class in ["wgpu-coop16+tiled-f16-card", "cuda-sm75-f16-card"] {
                assert!(advice(class, bad).contains("try --dtype f32; else "), "{class} {bad}");
            }
            assert!(!advice("wgpu-tiled+flash-f32-card", bad).contains("--dtype"));
        }
        assert_eq!(advice("cpu-avx2-f32", false), "the device is at fault: leave a out");
        assert!(advice("cpu-avx2-f32", true).contains("the learning rate or the rows"));
    }

    #[test]
    fn large_values_have_few_digits() {
        let value = -1e300;
        let (tensor, rows) = (THE_LOSS.into(), vec![7]);
        let line = TrainError::Evaluation { step: 1, rows, tensor, value, finding: None }.to_string();
        assert!(line.contains("became -1e300 (rows 7)"), "{line}");
        assert_eq!([short(12.5), short(f64::NAN), short(3e38)], ["12.5", "NaN", "3e38"]);
    }
}
