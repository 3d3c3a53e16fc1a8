//! The backends of a device in turn: if one cannot be opened, or panics while it is opened, the next is tried. Two
//! causes end the chain: wrong numbers always, and too little memory at the start of a run.

use super::DeviceWorker;
use crate::cluster::worker::blueprint::Begin;
use crate::model::memory::size;
use crate::model::stage::{Fault, Model};
use crate::model::weights::ModelError;
use crate::support::panics::caught;
use std::sync::atomic::Ordering;

impl DeviceWorker {
    /// Opens the next backend from `from` on. A backend that computes wrong numbers ends the chain: such a device is
    /// refused, not replaced.
    pub(super) fn next_backend(&mut self, from: usize) -> Result<Vec<String>, String> {
        let (name, mut lines) = (self.candidate.name.clone(), Vec::new());
        // Dropping the model of a lost device may panic.
        let _ = caught(|| drop(self.model.take()));
        self.holds = None;
        for at in from..self.candidate.chain.len() {
            let opener = &self.candidate.chain[at];
            // A panic is handled like an error of opening.
            let opened = caught(|| self.tested(at)).unwrap_or_else(|text| {
                Ok(Err(ModelError::Source(format!("an internal error while it was opened: {text}"))))
            });
            match opened.map_err(|wrong| format!("{name}: {wrong}"))? {
                Ok(mut model) => {
                    match &self.shared.blueprint.shape.portion {
                        // A seat that stops half-way would leave its neighbours without an answer.
                        Some(portion) => self.queue.takes_together(portion.depth),
                        None => {
                            model.heed(self.queue.flag());
                            self.queue.takes_together(model.together());
                        }
                    }
                    (self.model, self.at) = (Some(model), at);
                    return Ok(lines);
                }
                // During a run the next backend may have more memory; at its start a smaller microbatch is better
                // than a slower device.
                Err(ModelError::Memory { needed, limit, way_out }) if from == 0 => {
                    self.at = at;
                    return Err(self.too_small(needed, limit, &way_out));
                }
                // A seat comes back for fewer layers.
                Err(ModelError::Fault(fault @ Fault::OutOfMemory { .. }))
                    if from == 0 && self.shared.blueprint.shape.portion.is_some() =>
                {
                    self.shared.too_large.store(true, Ordering::Release);
                    return Err(format!("{name}: {}: {fault}", opener.backend()));
                }
                Err(e) if at == 0 && self.candidate.begin == Begin::Named => {
                    return Err(format!("{name}: {}: {e} (it was asked for by name)", opener.backend()));
                }
                Err(e) => {
                    let next = self.candidate.chain.get(at + 1).map(|next| next.backend());
                    let then = next.map(|next| format!("; falls back to {next}")).unwrap_or_default();
                    lines.push(format!("{name}: {}: {e}{then}", opener.backend()));
                }
            }
        }
        Err(lines.last().cloned().unwrap_or_else(|| format!("{name}: no backend is left")))
    }

    /// A model on this backend, after a passed self-test. The outer error is a wrong result of the self-test.
    fn tested(&self, at: usize) -> Result<Result<Box<dyn Model>, ModelError>, String> {
        let opener = &self.candidate.chain[at];
        let tested = self.shared.reference.check(&**opener, &self.shared.inject)?;
        let open = || {
            self.shared.inject.opening(at).map_err(ModelError::Source)?;
            opener.open(&self.shared.blueprint)
        };
        Ok(match tested {
            Ok(()) => open(),
            // If the self-test does not fit into memory, the run's own requirement is the error that its user can
            // act on.
            Err(e @ ModelError::Memory { .. }) => open().and(Err(e)),
            Err(e) => Err(e),
        })
    }

    /// No device makes microbatches smaller: the plan defines them, equal for every device.
    fn too_small(&self, needed: u64, limit: u64, way_out: &str) -> String {
        let (name, tokens) = (&self.candidate.name, self.shared.blueprint.shape.tokens);
        let (needed, limit) = (size(needed), size(limit));
        let layers = self.shared.blueprint.shape.portion.as_ref();
        let layers = layers
            .map(|portion| format!("layers {} to {} with ", portion.layers.start, portion.layers.end - 1));
        let layers = layers.unwrap_or_default();
        format!(
            "{name}: too small for {layers}microbatches of {tokens} tokens (needs {needed}, it has {limit}): leave it out, or \
             on the coordinator {way_out}"
        )
    }
}
