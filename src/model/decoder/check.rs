//! Checks of a microbatch before a stage runs it: every index that the stage reads must be in range.

use super::Decoder;
use crate::backend::{Fault, Fused};
use crate::model::stage::{IGNORE, Microbatch, Targets};

impl<B: Fused> Decoder<B> {
    pub(super) fn check(&self, batch: &Microbatch) -> Result<(), Fault> {
        let ascending = batch.bounds.windows(2).all(|w| w[0] < w[1]);
        let ends = (batch.bounds.first().copied(), batch.bounds.last().map(|&b| b as usize));
        if !ascending
            || ends != (Some(0), Some(batch.ids.len()))
            || batch.rows.len() + 1 != batch.bounds.len()
        {
            return Err(self.fault("row bounds do not fit the microbatch's ids"));
        }
        if self.span.first {
            self.check_ids(&batch.ids)?;
        }
        if !self.span.last {
            return Ok(());
        }
        self.check_targets(batch)
    }

    /// The same for what the head reads.
    fn check_targets(&self, batch: &Microbatch) -> Result<(), Fault> {
        if let (Targets::Answers(answers), None) = (&batch.targets, &self.config.labels) {
            self.check_ids(&batch.ids)?;
            return answers.misfit(batch).map_or(Ok(()), |why| Err(self.fault(why)));
        }
        let of_rows = self.config.labels.as_ref().filter(|_| !self.config.tags);
        match (&batch.targets, of_rows) {
            (Targets::Ranked(ranking), Some(labels)) => {
                let misfit =
                    if labels.len() == 1 { ranking.misfit(batch) } else { Some("a reward is one output") };
                return misfit.map_or(Ok(()), |why| Err(self.fault(why)));
            }
            (Targets::Numbers(numbers), Some(labels)) => {
                let fit = numbers.len() == batch.rows.len() * labels.len();
                return match fit && numbers.iter().all(|number| number.is_finite()) {
                    true => Ok(()),
                    false => Err(self.fault("numbers do not fit the microbatch's rows")),
                };
            }
            _ => {}
        }
        let (targets, limit, count, none) = match (&batch.targets, &self.config.labels) {
            (Targets::Tokens(t) | Targets::Weighted { targets: t, .. }, None) => {
                (t, self.config.vocab, batch.ids.len(), Some(IGNORE))
            }
            (Targets::Labels(t), Some(labels)) if !self.config.tags => {
                (t, labels.len(), batch.rows.len(), None)
            }
            (Targets::Classes(t), Some(labels)) if self.config.tags => {
                (t, labels.len(), batch.ids.len(), Some(IGNORE))
            }
            (_, Some(_)) if self.config.tags => {
                return Err(self.fault("the head labels tokens, not rows"));
            }
            (_, Some(_)) => {
                return Err(self.fault("a classifier predicts labels, not tokens"));
            }
            (_, None) => {
                return Err(self.fault("a language model predicts tokens, not labels"));
            }
        };
        if let Targets::Weighted { weights, .. } = &batch.targets
            && (weights.len() != batch.rows.len() || !weights.iter().all(|weight| weight.is_finite()))
        {
            return Err(self.fault("weights do not fit the microbatch's rows"));
        }
        match targets.iter().find(|&&t| Some(t) != none && t as usize >= limit) {
            Some(t) => Err(self.fault(format!("target {t} is outside the {limit} that the model knows"))),
            None if targets.len() != count => Err(self.fault("targets do not fit the microbatch")),
            None => Ok(()),
        }
    }

    pub(super) fn check_ids(&self, ids: &[u32]) -> Result<(), Fault> {
        match ids.iter().find(|&&id| id as usize >= self.config.vocab) {
            Some(id) => {
                Err(self.fault(format!("token id {id} is outside the vocabulary of {}", self.config.vocab)))
            }
            None => Ok(()),
        }
    }
}
