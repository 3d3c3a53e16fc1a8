//! What an adapter's folder says of its run, and what it cannot say of its base.

use super::super::demo;
use super::super::options::groups::Options;
use super::Job;
use crate::format::peft;
use crate::report::{self, Live};
use crate::train::event::{Change, Event, What};
use crate::train::schedule::Decay;
use std::path::Path;

impl Job {
    /// The numbers of the model card, so far.
    pub(super) fn numbers(&self, history: &Live) -> Vec<(&'static str, String)> {
        let mut numbers = report::card(&history.now());
        let s = &self.schedule;
        let shape = match s.decay {
            Decay::Cosine => "cosine",
            Decay::Linear => "linear",
            Decay::Constant => "constant",
        };
        numbers.push(("learning rate", format!("{:e}, {shape}, {} warm-up steps", s.peak, s.warmup)));
        numbers
    }

    /// A note about an adapter in `dir` that PEFT cannot find the base of by itself. The demonstration's base is of no
    /// use elsewhere.
    pub(super) fn unnamed_base(&self, options: &Options, dir: &Path, step: u64) -> Option<Event> {
        if self.writer.config.base_model_name_or_path.is_some() || options.model.model == demo::NAME {
            return None;
        }
        let reason = format!(
            "the base has no Hub id, so PEFT's AutoPeftModel cannot find it: give --base-id ID, \
             or set base_model_name_or_path in {}",
            dir.join(peft::CONFIG).display()
        );
        let (worker, devices) = (String::new(), vec![]);
        Some(Event::Device(Change { step, what: What::Note, worker, devices, reason }))
    }
}
