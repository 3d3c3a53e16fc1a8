//! Why a run did not go on, as facts; each prints as one line that says what, where and what to do.

use super::checkpoint::OTHER_STEPS;
use crate::model::stage::Fault;
use std::path::{Path, PathBuf};

/// A run that could not begin, go on or be saved.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A value that is not finite, or too large for exact sums. Nothing was updated with it.
    #[error(
        "step {step}: {tensor} became {} in microbatch {microbatch} (rows {}) on {finding}; the parameters of \
         step {} stand: {}",
        short(*.value),
        list(.rows),
        .step.saturating_sub(1),
        .finding.advice()
    )]
    NonFinite {
        /// The step that was under way.
        step: u64,
        /// Its microbatch, from 0.
        microbatch: usize,
        /// Ids of the microbatch's rows.
        rows: Vec<u64>,
        /// The tensor of the flat layout, or `the loss`.
        tensor: String,
        /// The value.
        value: f64,
        /// Who computed it, and whether it is so elsewhere.
        finding: Box<Finding>,
    },
    /// The update itself gave a value that is not finite.
    #[error(
        "step {step}: the update made {tensor} {}; the parameters of step {} stand: lower the learning rate",
        short(*.value),
        .step - 1
    )]
    Update {
        /// The step that was under way.
        step: u64,
        /// The tensor of the flat layout.
        tensor: String,
        /// The value.
        value: f64,
    },
    /// A loss that is not finite while evaluating.
    #[error(
        "evaluation after step {step}: the loss became {} (rows {}){}",
        short(*.value),
        list(.rows),
        .finding.as_ref().map_or(": look at these rows".into(), |f| format!(" on {f}: {}", f.advice()))
    )]
    Evaluation {
        /// Steps that were taken.
        step: u64,
        /// Ids of the microbatch's rows.
        rows: Vec<u64>,
        /// The value.
        value: f64,
        /// Who computed it, where that is known.
        finding: Option<Box<Finding>>,
    },
    /// Too few devices for too long; what was trained is saved.
    #[error(
        "{have} of {want} devices were here after {seconds} s: {}, or wait for fewer (--expect-workers, --min-workers)",
        if *.step > 0 { "start more workers and go on with --resume" } else { "start more workers and run this again" }
    )]
    Alone {
        /// Devices that were here.
        have: usize,
        /// Devices that were waited for.
        want: usize,
        /// How long.
        seconds: u64,
        /// The last finished step.
        step: u64,
    },
    /// The device failed.
    #[error("step {step}: {fault}")]
    Device {
        /// The step that was under way.
        step: u64,
        /// What it said.
        fault: Fault,
    },
    /// A checkpoint could not be written; earlier ones were left alone.
    #[error("{}: the checkpoint of step {step} could not be written: {reason}{}", .path.display(), standing(.kept))]
    Save {
        /// Its directory.
        path: PathBuf,
        /// The step that it would have held.
        step: u64,
        /// What the system said.
        reason: String,
        /// The newest checkpoint that stands.
        kept: Option<PathBuf>,
    },
    /// No checkpoint to resume from.
    #[error("{}: {reason}", .path.display())]
    Checkpoint {
        /// Where it was looked for.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A folder without a single checkpoint.
    #[error("{}: no checkpoint-N here to resume from; start without --resume", .path.display())]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
    },
    /// The run's folder is no longer where it was; nothing is written in its place.
    #[error(
        "{}: this folder, or the run.lock in it, was removed, moved or replaced during the run; nothing was saved at step \
         {step}: where the folder was moved, go on with --resume=DIR, else start again",
        .path.display()
    )]
    Gone {
        /// Where it was.
        path: PathBuf,
        /// The last finished step.
        step: u64,
    },
    /// The checkpoint belongs to another model, other rows or another configuration.
    #[error("{}: cannot resume: {}; {}", .path.display(), .differences.join("; "), instead(.path, .differences))]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// One line each: `learning_rate was 0.0002, is 0.0005`.
        differences: Vec<String>,
    },
}

/// Where a bad value arose, and what became of the same microbatch when it was computed once more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Worker and device: `worker a, cpu 0`.
    pub place: String,
    /// Its numeric class.
    pub class: String,
    /// None where there was nobody to compute it again.
    pub again: Option<Again>,
}

/// A second computation of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Again {
    /// Worker and device.
    pub place: String,
    /// Whether its values are bad there too.
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
    /// What to do: values that are bad wherever they are computed come from the rows or the rate, others from
    /// the device. A device that says the same twice has shown neither.
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
    /// What the process ends with: 3 for values that are not finite, 75 where devices
    /// are missing, 78 for a mismatch, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            TrainError::NonFinite { .. } | TrainError::Update { .. } | TrainError::Evaluation { .. } => 3,
            TrainError::Device { fault: Fault::NonFinite { .. }, .. } => 3,
            TrainError::Mismatch { .. } => 78,
            TrainError::Alone { .. } => 75,
            _ => 1,
        }
    }
}

/// A value in a few digits: 1e300 has 300 where it is written out.
fn short(value: f64) -> String {
    if value.is_finite() && value.abs() >= 1e7 { format!("{value:e}") } else { value.to_string() }
}

/// At most eight row numbers: a line stays a line.
fn list(rows: &[u64]) -> String {
    let mut text = rows.iter().take(8).map(u64::to_string).collect::<Vec<_>>().join(", ");
    if rows.len() > 8 {
        text += &format!(" and {} more", rows.len() - 8);
    }
    text
}

/// What to do with a checkpoint of another configuration. A run of another length may start from what this one learnt.
fn instead(path: &Path, differences: &[String]) -> String {
    // A warm-up that is a part of all steps differs with them.
    let longer = |line: &String| line.starts_with(OTHER_STEPS) || line.starts_with("warmup_steps ");
    match differences.iter().all(longer) && differences.iter().any(|line| line.starts_with(OTHER_STEPS)) {
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

    #[test]
    fn f16_class_is_advised_to_try_f32_first() {
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
        let line = TrainError::Evaluation { step: 1, rows: vec![], value, finding: None }.to_string();
        assert!(line.contains("became -1e300 (rows"), "{line}");
        assert_eq!([short(12.5), short(f64::NAN), short(3e38)], ["12.5", "NaN", "3e38"]);
    }
}
