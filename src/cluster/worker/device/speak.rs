//! Prompts in a seat of a line. Hidden states of a prompt, then of each new token, go up. The last seat chooses the next
//! token, which goes down to the first seat, past all others.

use super::seat::{Lost, Open, Sitting, is_prompt, lost};
use super::{DeviceWorker, Failed, Report, micros, say};
use crate::cluster::message::{LeaseId, Work};
use crate::model::generate::choose;
use crate::model::stage::{Output, Session};
use crate::support::panics::caught;
use std::time::Instant;

impl DeviceWorker {
    /// Continues a text by its prompt or its newest token, with the hidden states of the seat below.
    pub(super) fn speak(
        &mut self,
        sitting: &mut Sitting,
        lease: LeaseId,
        hidden: Option<Vec<f32>>,
    ) -> Result<(), Lost> {
        let Some(mut open) = sitting.open.remove(&lease) else { return Ok(()) };
        let Work::Prompt { ids, sampling } = &open.job.lease.work else {
            self.forget(lease);
            return self.mislead(&open.job, "its neighbour sent a microbatch twice".into());
        };
        let (began, config) = (Instant::now(), &self.shared.blueprint.config);
        let next = open.new.last().map_or(&ids[..], std::slice::from_ref);
        let most = sampling.max_new_tokens.min(config.longest_text(ids.len()).saturating_sub(ids.len()));
        let due = next.len() * config.hidden;
        let is_early = open.passes != open.new.len();
        if is_early || hidden.as_ref().is_some_and(|hidden| hidden.len() != due) || open.new.len() > most {
            self.forget(lease);
            return self.mislead(&open.job, "its neighbour sent other values than a token has".into());
        }
        open.passes += 1;
        let internal = |text| Err(Failed::Device(format!("an internal error: {text}")));
        let output = caught(|| {
            self.take_parameters(&open.job.parameters)?;
            Ok(self.model()?.extend(Session(lease), next, hidden.as_deref())?)
        });
        let output = output.unwrap_or_else(internal);
        let _ = self.throttle(began);
        match output.and_then(|output| sitting.sound(output)) {
            Ok(Output::Hidden(values)) => {
                sitting.open.insert(lease, open);
                sitting.neighbours.up(lease, &values);
                Ok(())
            }
            Ok(Output::Logits(logits)) => {
                let token = (open.new.len() < most).then(|| choose(&logits, sampling, open.new.len() as u64));
                let ends = token.is_none_or(|id| open.new.len() + 1 == most || sampling.stop.contains(&id));
                self.chosen(sitting, open, (token, ends));
                Ok(())
            }
            Ok(_) => Err(lost(open.job, "a stage gave no logits".into())),
            Err(failed) => self.failed(sitting, open.job, failed),
        }
    }

    /// The last seat has chosen the next token of a text, with which the text may end.
    fn chosen(&mut self, sitting: &mut Sitting, mut open: Open, (token, ends): (Option<u32>, bool)) {
        let (lease, parameters) = (open.job.lease.lease, open.job.parameters.hash);
        open.new.extend(token);
        let called_back = self.queue.is_called_back(lease);
        if let (Some(id), false) = (token, ends || called_back) {
            sitting.open.insert(lease, open);
            return sitting.neighbours.token(lease, id);
        }
        self.forget(lease);
        self.queue.finished_one(lease);
        sitting.neighbours.dropped(lease);
        let report = match called_back {
            true => Report::Stopped { lease, micros: micros(open.began) },
            false => Report::Answered { lease, ids: open.new, parameters },
        };
        say(&open.job, report);
    }

    /// The seat above tells the next token of a text.
    pub(super) fn token(&mut self, sitting: &mut Sitting, lease: LeaseId, id: u32) -> Result<(), Lost> {
        // A text that is not open was given up with its conversation.
        let Some(open) = sitting.open.get_mut(&lease) else { return Ok(()) };
        if !is_prompt(&open.job) || id as usize >= self.shared.blueprint.config.vocab {
            let Some(Open { job, .. }) = sitting.open.remove(&lease) else { return Ok(()) };
            self.forget(lease);
            return self.mislead(&job, format!("its neighbour sent a token {id} that belongs to no text"));
        }
        open.new.push(id);
        match &sitting.neighbours.below {
            Some(_) => {
                sitting.neighbours.token(lease, id);
                Ok(())
            }
            None => self.speak(sitting, lease, None),
        }
    }
}
