//! The best adapter of a run with --keep-best: the checkpoint of its step stays until the end and becomes the result.

use super::Job;
use crate::config::groups::Every;
use crate::config::refusal::{self, Refusal};
use crate::format::{FormatError, atomic};
use crate::run::adapter;
use crate::run::folder::{RunFolder, of_checkpoint};
use crate::support::stderr::say;
use crate::train::best::Best;
use crate::train::checkpoint::{self, State};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

fn folder(run: &Path, best: Best) -> PathBuf {
    run.join(format!("checkpoint-{}", best.step))
}

impl Job {
    /// Interval in steps; 0 for never.
    pub(super) fn every(&self, every: Every) -> u64 {
        every.steps(self.plan.total_steps(), self.plan.steps_per_epoch()).unwrap_or(0)
    }

    /// Forgets a best adapter that is not beside the checkpoint that the run continues from.
    pub(super) fn find_best(&mut self, from: &Path) {
        let Some(best) = self.state.best.filter(|best| best.kept) else { return };
        let path = folder(of_checkpoint(from), best);
        if let Err(e) = checkpoint::find(&path) {
            say!("warning: {e}: the best adapter so far is lost");
            self.state.best = None;
        }
    }

    /// Copies the best checkpoint to another folder where the run continues there.
    pub(super) fn bring_best(&self, place: &RunFolder) -> Result<(), Refusal> {
        let (Some(best), Some(from)) = (self.state.best.filter(|best| best.kept), &self.from) else {
            return Ok(());
        };
        let (from, to) = (folder(of_checkpoint(from), best), folder(&place.dir, best));
        if to.exists() {
            return Ok(());
        }
        let copied: Result<(), FormatError> = atomic::write_dir(&to, |dir| {
            let io = |e| FormatError::io(&from, e);
            for entry in std::fs::read_dir(&from).map_err(io)? {
                let path = entry.map_err(io)?.path();
                if !path.is_file() {
                    continue;
                }
                std::fs::copy(&path, dir.join(path.file_name().unwrap_or_default())).map_err(io)?;
            }
            Ok(())
        });
        copied.map_err(Refusal::from)
    }

    /// The values of the adapter: those of the best evaluation where they are kept, else the last ones.
    pub(super) fn result<'a>(&self, last: &'a State, place: &RunFolder) -> Result<Cow<'a, [f32]>, Refusal> {
        let Some(best) = last.best.filter(|best| best.kept) else { return Ok(Cow::from(&last.parameters)) };
        if best.step == last.step {
            return Ok(Cow::from(&last.parameters));
        }
        let path = folder(&place.dir, best);
        let kept = checkpoint::find(&path).map_err(|e| refusal::in_file(&place.dir, e.into()))?;
        Ok(Cow::from(adapter::read_flat(&kept.path, &self.writer.layout)?))
    }
}
