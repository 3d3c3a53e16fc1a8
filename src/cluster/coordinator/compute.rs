//! The coordinator as [`Compute`] for the training loop: rounds of gradients, scores and answers.

use super::super::machine::{Event, Kind, Round};
use super::super::message::{ToCoordinator, Work};
use super::parameters::Coming;
use super::round::Task;
use super::{Coordinator, events};
use crate::model::layout::Layout;
use crate::model::stage::{Microbatch, Sampling, Traffic};
use crate::train::event::{Change, Speed};
use crate::train::island::Island;
use crate::train::optimizer_step::Stretch;
use crate::train::sum::Sums;
use crate::train::{Compute, Effort, Say, Scoring, TrainError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

impl Coordinator<'_> {
    fn task<'t>(
        &self,
        (kind, count): (Kind, usize),
        work: &'t dyn Fn(usize) -> Work,
        result: &'t mut dyn FnMut(usize, ToCoordinator) -> Result<(), TrainError>,
        say: Say<'t>,
    ) -> Task<'t> {
        let after = self.parameters.as_ref().map_or(0, |p| p.step);
        let before = self.before.as_ref().map(|p| p.step).filter(|_| kind == Kind::Train);
        Task {
            kind,
            count,
            after,
            with: before.unwrap_or(after),
            ahead: 0,
            work,
            result,
            say,
            leases: BTreeMap::new(),
            done: None,
            failed: None,
        }
    }

    /// A training round, whose results are added up in `sums`.
    fn summed(
        &mut self,
        round: Round,
        item: &dyn Fn(usize) -> Work,
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError> {
        self.accounts.begin(self.machine.devices());
        self.traffic = Traffic::default();
        let mut nothing = |_, _| Ok(());
        let task = self.task((Kind::Train, round.tokens.len()), item, &mut nothing, say);
        let mut task = Task { ahead: round.ahead.len(), ..task };
        let Some(tally) = self.round(round, &mut task)? else { return Ok(None) };
        self.reducer.total(sums);
        let computing = (tally.computing + tally.exposed).as_secs_f64();
        let shared = self.accounts.finish(tally, self.machine.devices());
        self.consider_relays(&shared, computing + shared.parameter_seconds, &mut task);
        let shared = Some(shared);
        let traffic = Some(self.traffic).filter(|t| t.submissions > 0);
        Ok(Some(Effort { shared, spans: Vec::new(), traffic }))
    }
}

impl Compute for Coordinator<'_> {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn classes(&self) -> Vec<String> {
        self.classes.iter().cloned().collect()
    }

    fn remarks(&self) -> Vec<Change> {
        let rejected = self.rejected.as_ref().map_or(0, |counter| counter.load(Ordering::Relaxed));
        let checks = events::checks(self.counts);
        checks.into_iter().chain(events::rejections(rejected, self.counts)).collect()
    }

    fn parameters_ahead(&mut self, step: u64, stretch: Stretch) {
        let before = self.parameters.as_ref().filter(|before| before.step + 1 == step);
        if stretch.from == 0 {
            // Members that hold the parameters of the previous step wait for these. Rounded changes do not go through relays.
            let (to, relays) = match before {
                Some(_) if stretch.changes.is_empty() => {
                    (&self.served, self.relays.spread(self.began.elapsed()))
                }
                Some(_) => (&self.served, Vec::new()),
                None => (&BTreeSet::new(), Vec::new()),
            };
            self.coming = Some(Coming::new(step, to.clone(), relays));
            self.accounts.parameters();
        }
        if let Some(coming) = self.coming.as_mut().filter(|coming| coming.follows(step, stretch.from)) {
            let said = coming.add(stretch, before, |member| self.members.get(&member));
            self.accounts.sent(said);
        }
    }

    fn set_parameters(&mut self, step: u64, flat: &[f32]) -> Result<Option<()>, TrainError> {
        let ahead = self.coming.take().filter(|coming| coming.follows(step, flat.len()));
        let broadcast = ahead.unwrap_or_else(|| {
            self.accounts.parameters();
            let mut coming = Coming::new(step, BTreeSet::new(), Vec::new());
            coming.add(Stretch { from: 0, values: flat, changes: &[] }, None, |_| None);
            coming
        });
        let broadcast = broadcast.whole();
        let event = Event::Parameters { after: step, hash: broadcast.hash };
        let before = self.parameters.replace(broadcast);
        self.before = before.filter(|before| self.delay > 0 && before.step + 1 == step);
        let mut nothing = |_, _| Ok(());
        // This event only sends parameters, so no output of the round is expected.
        let mut quiet = |_| ();
        let prompt = |_| Work::Prompt { ids: vec![], sampling: Sampling::default() };
        let mut task = self.task((Kind::Prompt, 0), &prompt, &mut nothing, &mut quiet);
        self.tick(event, &mut task);
        Ok(Some(()))
    }

    fn gradients(
        &mut self,
        _: u64,
        work: &[Microbatch],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError> {
        let ahead = std::mem::take(&mut self.ahead);
        let tokens = |work: &[Microbatch]| work.iter().map(|batch| batch.ids.len() as u64).collect();
        let item = |index: usize| {
            let batch = work.get(index).unwrap_or_else(|| &ahead[index - work.len()]);
            Work::Train(batch.clone())
        };
        let round = Round { ahead: tokens(&ahead), ..Round::of(Kind::Train, tokens(work)) };
        self.summed(round, &item, sums, say)
    }

    fn ahead(&mut self, work: Vec<Microbatch>) {
        self.ahead = work;
    }

    fn islands(
        &mut self,
        _: u64,
        work: &[Island],
        sums: &mut Sums,
        say: Say,
    ) -> Result<Option<Effort>, TrainError> {
        let tokens = work.iter().map(Island::tokens).collect();
        let microbatches = work.iter().map(|island| island.batches().count() as u64).max().unwrap_or(1);
        let round = Round { microbatches, ..Round::of(Kind::Train, tokens) };
        self.summed(round, &|index| Work::Island(work[index].clone()), sums, say)
    }

    fn losses(&mut self, _: u64, scoring: Scoring, say: Say) -> Result<Option<()>, TrainError> {
        let Scoring { count, predict, batch, each } = scoring;
        let tokens = (0..count).map(|index| batch(index).ids.len() as u64).collect();
        let item = |index| if predict { Work::Predict(batch(index)) } else { Work::Eval(batch(index)) };
        let mut result = |index, message| match message {
            ToCoordinator::Score { sums, .. } => each(index, &batch(index), &sums),
            _ => Ok(()),
        };
        let mut task = self.task((Kind::Eval, count), &item, &mut result, say);
        Ok(self.round(Round::of(Kind::Eval, tokens), &mut task)?.map(|_| ()))
    }

    fn answer(
        &mut self,
        _: u64,
        prompt: &[u32],
        sampling: &Sampling,
        say: Say,
    ) -> Result<Option<Vec<u32>>, TrainError> {
        let tokens = vec![(prompt.len() + sampling.max_new_tokens) as u64];
        let item = |_| Work::Prompt { ids: prompt.to_vec(), sampling: sampling.clone() };
        let mut answer = Vec::new();
        let mut result = |_, message| {
            if let ToCoordinator::Answer { ids, .. } = message {
                answer = ids;
            }
            Ok(())
        };
        let mut task = self.task((Kind::Prompt, 1), &item, &mut result, say);
        let done = self.round(Round::of(Kind::Prompt, tokens), &mut task)?;
        drop(task);
        Ok(done.map(|_| answer))
    }

    fn speeds(&self, step: u64) -> Vec<Speed> {
        self.machine.devices().into_iter().filter_map(|device| events::speed(device, step)).collect()
    }
}
