//! Forecast of a run's time, from the work of its steps and the speeds of its devices: a pure function of both. Work is
//! assigned as a coordinator does it, the largest microbatch first and each to the device that would finish it first,
//! so that a slow device gets only work that does not delay the others. Transfers overlap with computing only with
//! `--delay 1`: without it the forecast is a little pessimistic on a slow network.

use super::profile::{Link, Pace};
use crate::train::island::{Islands, VECTORS};
use crate::train::shares::Shares;

/// A device in the run.
#[derive(Debug, Clone, PartialEq)]
pub struct Participant {
    /// Expected speed.
    pub pace: Pace,
    /// Link to the device; `None` in the coordinator's own process.
    pub link: Option<Link>,
}

/// Work of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Workload {
    /// Tokens of every microbatch of every step.
    pub steps: Vec<Vec<u32>>,
    /// Number of repetitions of these steps, where only the first ones of a very long run are listed.
    pub times: Option<f64>,
    /// Tokens of one evaluation, and the number of evaluations.
    pub eval: (u64, u64),
    /// Number of steps after which something else is computed, or nothing: the last one, and those before an evaluation.
    pub pauses: u64,
    /// Tokens of the answers that a reference scores before the first step.
    pub reference: u64,
    /// Number of checkpoints.
    pub saves: u64,
    /// Number of answered prompts.
    pub answers: u64,
    /// Number of trained values.
    pub trained: u64,
    /// What travels.
    pub sent: Sent,
}

/// What travels between the coordinator and workers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sent {
    /// Bits of a sum's values: `--sum-bits`; 0: they are exact.
    pub sum: u32,
    /// Bits of a change's values: `--update-bits`; 0: parameters travel.
    pub update: u32,
    /// `--islands` and `--inner-steps`: moments travel too, once for all of these steps.
    pub islands: Option<Islands>,
    /// Whether workers may be relays: `--relays`.
    pub relays: bool,
    /// `--delay`: with 1 the next step is computed during a transfer.
    pub delay: u64,
}

impl Sent {
    /// Bytes per value each time, of a sum and of the parameters.
    fn bytes(self) -> f64 {
        self.ways().0 + self.ways().1
    }

    fn ways(self) -> (f64, f64) {
        let up = if self.sum == 0 { UP } else { f64::from(self.sum) / 8.0 + SPREAD };
        let down = if self.update == 0 { DOWN } else { f64::from(self.update) / 8.0 + WIDTHS };
        // Islands send f32.
        match self.islands {
            Some(_) => (VECTORS as f64 * WHOLE, VECTORS as f64 * WHOLE),
            None => (up, down),
        }
    }

    /// Seconds in which parameters and sums of workers behind these links travel: one after the other through the
    /// coordinator's own link, or among the workers too, where that is clearly faster.
    fn travels(self, links: &[Link], trained: u64) -> f64 {
        let apart: f64 = links.iter().map(|link| self.bytes() * trained as f64 / link.bandwidth).sum();
        if !self.relays || links.len() < 3 {
            return apart;
        }
        let bandwidths: Vec<f64> = links.iter().map(|link| link.bandwidth).collect();
        let [all, together] = Shares::of(&bandwidths).seconds(&bandwidths, trained as usize, self.ways());
        if all > FASTER * together { apart.min(together) } else { apart }
    }

    /// Steps between two transfers.
    pub fn steps(self) -> u64 {
        self.islands.map_or(1, |islands| islands.inner)
    }

    /// What one device computes without another: the microbatches of an item. Those of `steps` steps, by step.
    fn items<'s>(self, steps: &'s [Vec<u32>]) -> Vec<Vec<&'s [u32]>> {
        let single = |step: &'s Vec<u32>| step.chunks(1).map(|size| vec![size]);
        let Some(Islands { count, .. }) = self.islands else {
            return steps.iter().flat_map(single).collect();
        };
        // The turns of the first step of a run are not known here, and do not matter.
        let of = |island: usize| {
            let own = |(turn, step): (usize, &'s Vec<u32>)| {
                step.chunks(1).enumerate().filter(move |(n, _)| (n + turn) % count == island)
            };
            steps.iter().enumerate().flat_map(own).map(|(_, size)| size).collect()
        };
        (0..count).map(of).collect()
    }
}

/// Forecast of a run's time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimeForecast {
    /// Seconds of all steps.
    pub steps: f64,
    /// Part of `steps` in which devices wait for sums or parameters.
    pub sync: f64,
    /// Seconds of all evaluations and answers.
    pub looks: f64,
    /// Seconds in which a reference scores answers.
    pub reference: f64,
    /// Seconds of all checkpoints.
    pub saves: f64,
    /// Tokens of all steps by their seconds.
    pub tokens_per_second: f64,
    /// Every worker's share of the tokens.
    pub shares: Vec<f64>,
    /// Every worker's share of idle time.
    pub idle: Vec<f64>,
}

impl TimeForecast {
    /// Total seconds.
    pub fn total(&self) -> f64 {
        self.steps + self.looks + self.reference + self.saves
    }
}

/// Bytes per value in a transfer of parameters to a worker, as differences, and in a sum sent back.
const DOWN: f64 = 3.0;
const UP: f64 = 4.5;
/// Bytes of a value of f32.
const WHOLE: f64 = 4.0;
/// Bytes per value that a sum of rounded gradients needs beyond their bits, and a rounded change beyond its own.
const SPREAD: f64 = 0.5;
const WIDTHS: f64 = 0.1;
/// How many times faster transfers have to get for relays.
const FASTER: f64 = 1.3;
/// Round trips per step: parameters, a lease, its grant, the sum.
const WAITS: f64 = 3.0;

impl Participant {
    /// Seconds of one transfer of parameters and sum.
    pub fn sync(&self, trained: u64, sent: Sent) -> f64 {
        let bytes = sent.bytes() * trained as f64;
        self.link.map_or(0.0, |link| bytes / link.bandwidth + WAITS * link.round_trip)
    }
}

/// Forecasts `load` on `team`.
pub fn forecast(team: &[Participant], load: &Workload) -> TimeForecast {
    let mut all = TimeForecast {
        shares: vec![0.0; team.len()],
        idle: vec![0.0; team.len()],
        ..TimeForecast::default()
    };
    let (mut tokens, mut busy) = (0.0, vec![0.0; team.len()]);
    if team.is_empty() {
        return all;
    }
    let links: Vec<Link> = team.iter().filter_map(|w| w.link).collect();
    let waits = links.iter().map(|link| WAITS * link.round_trip).fold(0.0, f64::max);
    let (sync, mut hidden): (f64, f64) = (load.sent.travels(&links, load.trained) + waits, 0.0);
    let besides = team.iter().map(|w| w.pace.step).fold(f64::INFINITY, f64::min);
    let between = usize::try_from(load.sent.steps()).unwrap_or(usize::MAX);
    for steps in load.steps.chunks(between) {
        // An island has optimizer steps of its own.
        let own = if load.sent.islands.is_some() { steps.len() as f64 } else { 0.0 };
        let of = |item: Vec<&[u32]>| item.into_iter().flatten().map(|n| f64::from(*n)).collect::<Vec<_>>();
        let mut items: Vec<Vec<f64>> = load.sent.items(steps).into_iter().map(of).collect();
        items.sort_by(|a, b| b.iter().sum::<f64>().total_cmp(&a.iter().sum()));
        let mut free = vec![0.0; team.len()];
        for item in items {
            let takes = |w: &Participant| {
                item.iter().map(|size| w.pace.train.at(*size)).sum::<f64>() + own * w.pace.step
            };
            let ends = team.iter().zip(&free).map(|(w, free): (&Participant, &f64)| free + takes(w));
            let Some((at, end)) = ends.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)) else { break };
            busy[at] += end - free[at];
            free[at] = end;
            all.shares[at] += item.iter().sum::<f64>();
            tokens += item.iter().sum::<f64>();
        }
        let work = free.iter().copied().fold(0.0, f64::max);
        let behind = if load.sent.delay > 0 { sync.min(work) } else { 0.0 };
        all.steps += work + besides + sync - behind;
        all.sync += sync - behind;
        hidden += behind;
    }
    let times = load.times.unwrap_or(1.0);
    // Nothing is computed meanwhile after some of the steps.
    let alone = (hidden / load.steps.len().max(1) as f64 * load.pauses as f64).min(hidden * times);
    (all.steps, all.sync) = (all.steps * times + alone, all.sync * times + alone);
    all.tokens_per_second = if all.steps > 0.0 { tokens * times / all.steps } else { 0.0 };
    all.shares.iter_mut().for_each(|share| *share /= tokens.max(1.0));
    all.idle = busy.iter().map(|busy| (1.0 - busy * times / all.steps.max(1e-12)).clamp(0.0, 1.0)).collect();
    let together: f64 = team.iter().map(|w| 1.0 / w.pace.eval.max(1e-12)).sum();
    all.looks = (load.eval.0 * load.eval.1) as f64 / together;
    all.reference = load.reference as f64 / together;
    all.looks += load.answers as f64 * team.iter().map(|w| w.pace.answer).fold(f64::INFINITY, f64::min);
    all.saves = load.saves as f64 * team.iter().map(|w| w.pace.save).fold(0.0, f64::max);
    all
}

/// Number of workers with the slowest processors, and of those with the slowest links, that are tried as removals from
/// a large team: each trial forecasts the whole run.
const TRIED: usize = 8;

fn doubtful(team: &[Participant], left: &[usize]) -> Vec<usize> {
    let slowest = |cost: fn(&Participant) -> f64| {
        let mut order = left.to_vec();
        order.sort_by(|a, b| cost(&team[*b]).total_cmp(&cost(&team[*a])));
        order.truncate(TRIED);
        order
    };
    let mut found = slowest(|w| w.pace.train.each);
    found.extend(slowest(|w| w.link.map_or(0.0, |link| 1.0 / link.bandwidth)));
    found.sort_unstable();
    found.dedup();
    found
}

/// Workers whose removal would not slow the run down, the most useless first, with the seconds that each costs.
pub fn useless(team: &[Participant], load: &Workload) -> Vec<(usize, f64)> {
    let mut left: Vec<usize> = (0..team.len()).collect();
    let mut found = Vec::new();
    while left.len() > 1 {
        let with = |kept: &[usize]| {
            let team: Vec<Participant> = kept.iter().map(|&at| team[at].clone()).collect();
            forecast(&team, load).total()
        };
        let now = with(&left);
        let without = doubtful(team, &left).into_iter().map(|gone| {
            let kept: Vec<usize> = left.iter().copied().filter(|at| *at != gone).collect();
            (gone, now - with(&kept))
        });
        // A device that saves less than half a percent does not justify its energy.
        match without.max_by(|a, b| a.1.total_cmp(&b.1)) {
            Some((gone, gain)) if gain > -0.005 * now => {
                left.retain(|at| *at != gone);
                found.push((gone, gain.max(0.0)));
            }
            _ => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::profile::Basis;
    use crate::numeric::line::Line;
    use crate::train::island::Outer;

    fn worker(fixed: f64, each: f64, link: Option<(f64, f64)>) -> Participant {
        let train = Line { fixed, each };
        let pace = Pace {
            train,
            eval: each / 2.0,
            step: 0.5,
            save: 2.0,
            answer: 3.0,
            link: None,
            basis: Basis::Measured,
        };
        let link = link.map(|(bandwidth, round_trip)| Link { bandwidth, round_trip });
        Participant { pace, link }
    }

    fn load(steps: &[&[u32]]) -> Workload {
        let steps = steps.iter().map(|s| s.to_vec()).collect();
        Workload { steps, trained: 1000, ..Workload::default() }
    }

    #[test]
    fn single_device_forecast_adds_up() {
        let load =
            Workload { eval: (100, 2), reference: 40, saves: 1, answers: 2, ..load(&[&[10, 20], &[30]]) };
        let f = forecast(&[worker(1.0, 0.1, None)], &load);
        // Three microbatches, 60 tokens, two steps.
        assert!((f.steps - (3.0 + 6.0 + 1.0)).abs() < 1e-9, "{f:?}");
        assert!((f.tokens_per_second - 6.0).abs() < 1e-9);
        assert!((f.looks - (10.0 + 6.0)).abs() < 1e-9 && (f.saves - 2.0).abs() < 1e-9);
        // As fast as an evaluation, which takes 10 s for 200 tokens.
        assert!((f.reference - 2.0).abs() < 1e-9 && (f.total() - f.steps - 20.0).abs() < 1e-9);
        assert!((f.total() - 30.0).abs() < 1e-9);
        assert_eq!((f.shares, f.sync), (vec![1.0], 0.0));
    }

    #[test]
    fn work_goes_to_the_first_free_device_and_costs_transfer() {
        let team = [worker(0.0, 0.1, None), worker(0.0, 0.3, Some((1000.0, 0.5)))];
        let f = forecast(&team, &load(&[&[10, 10, 10, 10]]));
        // 1, 2 and 3 seconds on the fast worker; 3 on the slow one.
        assert!((f.shares[0] - 0.75).abs() < 1e-9, "{f:?}");
        // 1000 values of 7.5 bytes at 1000 per second, and three round trips.
        assert!((f.sync - (7.5 + 1.5)).abs() < 1e-9, "{f:?}");
        assert!((f.steps - (3.0 + 0.5 + 9.0)).abs() < 1e-9, "{f:?}");
        let sent = Sent { sum: 8, update: 8, ..Sent::default() };
        let f = forecast(&team, &Workload { sent, ..load(&[&[10, 10, 10, 10]]) });
        assert!((f.sync - (1.5 + 1.1 + 1.5)).abs() < 1e-9, "{f:?}");
        assert_eq!(team[1].sync(1000, sent), f.sync);
    }

    #[test]
    fn relays_share_what_travels_from_three_workers_on() {
        let sync = |workers: usize, relays: bool| {
            let team = vec![worker(0.0, 0.1, Some((1000.0, 0.0))); workers];
            let sent = Sent { relays, ..Sent::default() };
            forecast(&team, &Workload { sent, ..load(&[&[10, 10, 10, 10]]) }).sync
        };
        // 1000 values of 7.5 bytes at 1000 per second.
        for (workers, relays, seconds) in [(2, true, 15.0), (3, true, 7.5), (4, true, 7.5), (4, false, 30.0)]
        {
            assert!((sync(workers, relays) - seconds).abs() < 1e-9, "{workers} {relays}");
        }
    }

    #[test]
    fn islands_wait_for_the_network_once_in_several_steps() {
        let team = [worker(0.0, 0.1, None), worker(0.0, 0.1, Some((1000.0, 0.5)))];
        let sent =
            Sent { islands: Some(Islands { count: 2, inner: 2, outer: Outer::MEAN }), ..Sent::default() };
        let steps: &[&[u32]] = &[&[10, 20, 10], &[10, 20, 10], &[10, 20]];
        let f = forecast(&team, &Workload { sent, ..load(steps) });
        // Two exchanges of 1000 values of 24 bytes; two islands of 40 tokens with two steps each, then of 10 and 20 with one.
        assert!((f.sync - 2.0 * (24.0 + 1.5)).abs() < 1e-9, "{f:?}");
        assert!((f.steps - (4.0 + 1.0 + 2.0 + 0.5) - 2.0 * 0.5 - f.sync).abs() < 1e-9, "{f:?}");
        let sum: f64 = f.shares.iter().sum();
        assert!((sum - 1.0).abs() < 1e-9, "{f:?}");
    }

    #[test]
    fn delayed_steps_hide_transfers_but_the_last() {
        let team = [worker(0.0, 0.1, None), worker(0.0, 0.1, Some((1000.0, 0.5)))];
        let steps: &[&[u32]] = &[&[80, 80], &[80, 80], &[120, 120]];
        let sent = Sent { delay: 1, ..Sent::default() };
        let f = forecast(&team, &Workload { sent, pauses: 1, ..load(steps) });
        // A transfer takes 9 s. 8 s of it are hidden twice, all of it once; the mean of that is not hidden at the end.
        assert!((f.sync - (1.0 + 1.0 + 0.0 + 25.0 / 3.0)).abs() < 1e-9, "{f:?}");
        assert!((f.steps - (8.0 + 8.0 + 12.0 + 3.0 * 0.5) - f.sync).abs() < 1e-9, "{f:?}");
        let sync = |pauses| forecast(&team, &Workload { sent, pauses, ..load(steps) }).sync;
        assert!((sync(2) - f.sync - 25.0 / 3.0).abs() < 1e-9);
        // Nothing overlaps, as without a delay.
        let plain = forecast(&team, &load(steps));
        assert!((sync(3) - plain.sync).abs() < 1e-9 && (sync(9) - plain.sync).abs() < 1e-9);
        assert!((plain.tokens_per_second * plain.steps - 560.0).abs() < 1e-6, "{plain:?}");
        assert!((f.tokens_per_second * f.steps - 560.0).abs() < 1e-6, "{f:?}");
    }

    #[test]
    fn device_that_slows_the_run_is_named() {
        let steps: &[&[u32]] = &[&[10, 10, 10, 10]];
        let (fast, slow) = (worker(0.0, 0.1, None), worker(0.0, 0.3, Some((1000.0, 0.5))));
        // 12.5 s with this worker, 4.5 s without.
        let found = useless(&[fast.clone(), slow], &load(steps));
        assert_eq!(found.len(), 1);
        assert!(found[0].0 == 1 && (found[0].1 - 8.0).abs() < 1e-9, "{found:?}");
        assert_eq!(useless(&[fast.clone(), fast.clone()], &load(steps)), vec![]);
        // A worker that never gets work.
        assert_eq!(useless(&[fast.clone(), worker(0.0, 9.0, None)], &load(steps)), vec![(1, 0.0)]);
        assert_eq!(useless(std::slice::from_ref(&fast), &load(steps)), vec![]);
        // A fast worker on a slow link, among many.
        let mut crowd = vec![fast; 30];
        crowd[17] = worker(0.0, 0.1, Some((1.0, 1.0)));
        assert_eq!(useless(&crowd, &load(&[&[10; 60]])).first().map(|(at, _)| *at), Some(17));
    }
}
