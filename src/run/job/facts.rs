//! Descriptions of a run in its folder: facts in run.yaml, numbers in the model card, and a note about a base that
//! neither can identify.

use super::Job;
use crate::config::demo;
use crate::config::groups::Options;
use crate::numeric::fixed::FRACTION_BITS;
use crate::report;
use crate::run::run_file::{CHAT, PROMPTS};
use crate::train::schedule::Decay;

impl Job {
    /// Entries of run.yaml besides the options.
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let p = &self.prepared;
        let c = &p.train.counts;
        let mut facts = vec![
            ("fixed_point_exponent", FRACTION_BITS.to_string()),
            ("architecture", p.config.architecture()),
            ("weights", p.base.files.kind.clone()),
            ("model_hash", self.model_hash.clone()),
            ("data_hash", p.train.hash.clone()),
            ("total_steps", self.schedule.total.to_string()),
            ("steps_per_epoch", self.plan.steps_per_epoch().to_string()),
            ("warmup_steps", self.schedule.warmup.to_string()),
            ("micro_batch_tokens", self.plan.micro_batch_tokens().to_string()),
            ("trained_values", self.writer.layout.len().to_string()),
            ("rows_read", c.rows.to_string()),
            ("rows_dropped", c.dropped.to_string()),
            ("rows_truncated", c.truncated.to_string()),
            ("tokens", c.tokens.to_string()),
            ("supervised", c.supervised.to_string()),
            ("eval_rows", p.eval.as_ref().map_or(0, |e| e.samples.len()).to_string()),
        ];
        let further = [("rows_split", c.split.0), ("rows_too_long", c.too_long)];
        facts.extend(further.into_iter().filter(|(_, n)| *n > 0).map(|(key, n)| (key, n.to_string())));
        match &p.config.labels {
            Some(outputs) if p.config.numbers => facts.push(("outputs", outputs.len().to_string())),
            Some(labels) => facts.push(("labels", labels.join(", "))),
            None => facts.push((PROMPTS, if p.chat { CHAT } else { "plain" }.into())),
        }
        facts
    }

    /// The numbers of the model card so far.
    pub(super) fn numbers(&self) -> Vec<(&'static str, String)> {
        let mut numbers = report::card(&self.history.now());
        let s = &self.schedule;
        let shape = match s.decay {
            Decay::Cosine => "cosine",
            Decay::Linear => "linear",
            Decay::Constant => "constant",
            Decay::Wsd => "warm-up, stable, decay",
        };
        numbers.push(("learning rate", format!("{:e}, {shape}, warm-up steps: {}", s.peak, s.warmup)));
        numbers
    }

    /// Returns a note about a base that adapter_config.json cannot name: a local path has no meaning on another
    /// machine. The demonstration's base needs no note because it is of no use elsewhere.
    pub(super) fn unnamed_base(&self, options: &Options) -> Option<String> {
        let named = self.writer.config.base_model_name_or_path.is_some() || options.model.model == demo::NAME;
        (!named).then(|| {
            "base     no Hub id is known: for PEFT's AutoPeftModel give --base-id ID, or set \
             base_model_name_or_path in adapter_config.json"
                .into()
        })
    }
}
