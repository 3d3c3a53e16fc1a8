//! The configuration with which a checkpoint may be resumed: all values that change the numbers, by name. Threads,
//! ports, saving and logging are not included and may change.

use crate::model::layout::Layout;
use crate::train::optim::Options;
use crate::train::schedule::{Decay, Schedule};
use std::collections::{BTreeMap, BTreeSet};

/// Names and values that decide the numbers of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    values: BTreeMap<String, String>,
}

impl Identity {
    /// The values of optimizer, schedule and layout.
    pub fn new(schedule: &Schedule, options: &Options, layout: &Layout) -> Self {
        let shapes = blake3::Hash::from_bytes(layout.hash());
        Identity::default()
            .with("learning_rate", schedule.peak)
            .with("lr_scheduler", format!("{:?}", schedule.decay).to_lowercase())
            .with("warmup_steps", schedule.warmup)
            .with_some("min_lr", (schedule.floor > 0.0).then_some(schedule.floor * schedule.peak))
            .with_some("decay_steps", (schedule.decay == Decay::Wsd).then_some(schedule.decay_steps))
            .with("steps", schedule.total)
            .with("beta1", options.beta1)
            .with("beta2", options.beta2)
            .with("eps", options.eps)
            .with("weight_decay", options.weight_decay)
            .with("max_grad_norm", options.max_grad_norm)
            .with_some("loraplus_lr_ratio", (options.ratio_of_b != 1.0).then_some(options.ratio_of_b))
            .with_some("update_bits", (options.update_bits > 0).then_some(options.update_bits))
            .with("trained tensors", format!("{} values, {}", layout.len(), shapes.to_hex()))
            .with("fraction bits", crate::numeric::fixed::FRACTION_BITS)
            .with("numerics revision", crate::numeric::REVISION)
    }

    /// Adds a value. The name should be that of its option.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.values.insert(name.to_owned(), value.to_string());
        self
    }

    /// Adds a value that not every run has.
    #[must_use]
    pub fn with_some(self, name: &str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    /// One line for each value that differs between `self` and `now`, or is missing in one of them.
    pub fn differences(&self, now: &Identity) -> Vec<String> {
        differences(&self.values, &now.values)
    }

    /// The values by name.
    pub fn values(&self) -> &BTreeMap<String, String> {
        &self.values
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        self.values
            .iter()
            .map(|(name, value)| (name.clone(), value.clone().into()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    pub(super) fn from_json(value: &serde_json::Value) -> Option<Self> {
        let pairs = value.as_object()?.iter();
        let values =
            pairs.map(|(name, v)| Some((name.clone(), v.as_str()?.to_owned()))).collect::<Option<_>>()?;
        Some(Identity { values })
    }
}

/// Name of the momentum of islands' outer optimizer, in an identity. A checkpoint with it has a velocity.
pub const OUTER_MOMENTUM: &str = "outer_momentum";

/// Name of the delay of gradients, in an identity. A checkpoint with it has the parameters before its last step.
pub const DELAY: &str = "delay";

/// Start of the line about a different number of steps, because no option is named `steps`.
pub const OTHER_STEPS: &str = "max_steps (or by epochs)";

/// One line for each value that differs between `was` and `now`, or is missing in one of them.
pub fn differences(was: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<&String> = was.keys().chain(now.keys()).collect();
    let shown = |values: &BTreeMap<String, String>, name| values.get(name).cloned().unwrap_or("unset".into());
    let label = |name: &'_ str| if name == "steps" { OTHER_STEPS.to_owned() } else { name.to_owned() };
    names
        .into_iter()
        .map(|name| (label(name), shown(was, name), shown(now, name)))
        .filter(|(_, was, is)| was != is)
        .map(|(name, was, is)| format!("{name} was {was}, is {is}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named() {
        let a = Identity::default().with("rows", "abc").with("learning_rate", 2e-4).with("seed", 1);
        let b = Identity::default()
            .with("rows", "abc")
            .with("learning_rate", 5e-4)
            .with_some("packing", Some("true"))
            .with_some("dtype", None::<&str>);
        assert_eq!(
            a.differences(&b),
            ["learning_rate was 0.0002, is 0.0005", "packing was unset, is true", "seed was 1, is unset"]
        );
        assert_eq!(Identity::from_json(&a.to_json()), Some(a));
    }
}
