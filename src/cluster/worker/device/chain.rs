//! The backends of a device, one after the other: what cannot be opened, or panics while it is, leaves its turn to the
//! next. Two things end the chain: wrong numbers always, and at the start of a run too little memory.

use super::DeviceWorker;
use crate::cluster::inject::What;
use crate::cluster::worker::blueprint::Begin;
use crate::model::memory::{Used, size};
use crate::model::stage::Model;
use crate::model::weights::ModelError;
use crate::support::panics::caught;

/// What became of a device once it was measured.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Settled {
    /// It is what it was.
    Stands,
    /// Its blocks keep less than they did.
    Again,
}

impl DeviceWorker {
    /// What trials took decides, where shapes had only said what they should: whether the longest microbatch of the run
    /// has room, and what blocks keep. The error is why it cannot take part.
    pub(in super::super) fn settle(&mut self, memory: &Used) -> Result<Settled, String> {
        let (Some(fit), opener) = (memory.fit(), self.candidate.chain[self.at].clone()) else {
            return Ok(Settled::Stands);
        };
        let told = |worker: &Self, e: ModelError| match e {
            ModelError::Memory { needed, limit, way_out } => {
                format!("{}, measured", worker.too_small(needed, limit, &way_out))
            }
            e => format!("{}: {e}", worker.candidate.name),
        };
        match opener.stands(&self.shared.blueprint, fit) {
            Ok(true) => return Ok(Settled::Stands),
            Ok(false) => {}
            Err(e) => return Err(told(self, e)),
        }
        // Not both at once.
        let _ = caught(|| drop(self.model.take()));
        self.holds = None;
        let opened = caught(|| opener.open_within(&self.shared.blueprint, fit));
        let opened =
            opened.unwrap_or_else(|text| Err(ModelError::Source(format!("an internal error: {text}"))));
        let mut model = opened.map_err(|e| told(self, e))?;
        model.heed(self.queue.flag());
        self.model = Some(model);
        Ok(Settled::Again)
    }

    /// Opens the next backend from `from` on. One that computes wrong numbers ends the chain: a device that lies
    /// is refused, not replaced.
    pub(super) fn next_backend(&mut self, from: usize) -> Result<Vec<String>, String> {
        let (name, mut lines) = (self.candidate.name.clone(), Vec::new());
        // What is left of a device that is gone may panic once more.
        let _ = caught(|| drop(self.model.take()));
        self.holds = None;
        for at in from..self.candidate.chain.len() {
            let opener = &self.candidate.chain[at];
            // What panics there is as good as what says that it cannot be opened.
            let opened = caught(|| self.tested(at)).unwrap_or_else(|text| {
                Ok(Err(ModelError::Source(format!("an internal error while it was opened: {text}"))))
            });
            match opened.map_err(|wrong| format!("{name}: {wrong}"))? {
                Ok(mut model) => {
                    model.heed(self.queue.flag());
                    (self.model, self.at) = (Some(model), at);
                    return Ok(lines);
                }
                // In the middle of a run the next backend may have more; at its start a smaller microbatch is better
                // than a slower device.
                Err(ModelError::Memory { needed, limit, way_out }) if from == 0 => {
                    self.at = at;
                    return Err(self.too_small(needed, limit, &way_out));
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

    /// A model on that backend of the chain, once it has proved that it counts right; the outer error is wrong numbers.
    fn tested(&self, at: usize) -> Result<Result<Box<dyn Model>, ModelError>, String> {
        let opener = &self.candidate.chain[at];
        let tested = self.shared.reference.check(&**opener, &self.shared.inject)?;
        let open = || match at == 0 && self.shared.inject.strikes(What::Error, 0) {
            true => Err(ModelError::Source("an injected error".into())),
            false => opener.open(&self.shared.blueprint),
        };
        Ok(match tested {
            Ok(()) => open(),
            // Where not even the self-test has room, what the run would need is what its user can change.
            Err(e @ ModelError::Memory { .. }) => open().and(Err(e)),
            Err(e) => Err(e),
        })
    }

    /// No device makes microbatches smaller by itself: they are the plan's, the same for every device.
    fn too_small(&self, needed: u64, limit: u64, way_out: &str) -> String {
        let (name, tokens) = (&self.candidate.name, self.shared.blueprint.shape.tokens);
        let (needed, limit) = (size(needed), size(limit));
        format!(
            "{name}: too small for microbatches of {tokens} tokens (needs {needed}, it has {limit}): leave it out, or \
             on the coordinator {way_out}"
        )
    }
}
