//! Device speeds. The estimate is the median of the last few microbatches of a device: one outlier changes nothing,
//! and a lasting change shows after half of the samples.

use super::super::message::Trials;
use super::event::Kind;
use crate::model::memory::{InUse, Used};
use crate::numeric::line::{Line, Points};
use std::collections::{BTreeMap, VecDeque};

/// Number of samples in the median.
const SAMPLES: usize = 7;

/// Assumed microseconds per token if neither this device nor any other was measured.
const PRIOR: f64 = 1000.0;

/// The lower of two middle values: the first sample of a device often includes warm-up.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// A running median.
#[derive(Debug, Clone, Default)]
pub(super) struct Estimate {
    recent: VecDeque<f64>,
    median: Option<f64>,
}

impl Estimate {
    pub fn add(&mut self, sample: f64) {
        if self.recent.len() == SAMPLES {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
        self.median = median(self.recent.iter().copied().collect());
    }

    pub fn get(&self) -> Option<f64> {
        self.median
    }
}

/// Microseconds per token of a device, for each kind of round. The fixed cost of a microbatch is expressed in tokens
/// that take as long.
#[derive(Debug, Clone, Default)]
pub(super) struct Speed {
    by_kind: [Estimate; 3],
    /// Tokens and seconds of its training microbatches, trials included.
    pub points: Points,
    /// Number of trials in `points`.
    pub trials: u64,
    /// Tokens and bytes in use of its training microbatches, trials included.
    pub memory: Used,
    /// Fixed cost of a microbatch, in tokens that take as long.
    lead: f64,
    /// The estimate from before the doubt, until a new measurement replaces it.
    doubted: Option<[Estimate; 3]>,
}

/// Upper bound of `lead`, because workers report their own times.
const LEAD: f64 = 1e5;

impl Speed {
    /// Starts the estimates from trial microbatches: speed, fixed cost and memory.
    pub fn admit(&mut self, trials: &Trials) {
        if trials.memory.fit().is_some() {
            self.memory = trials.memory;
        }
        let trials = &trials.time;
        let Some(Line { fixed, each }) = trials.line() else { return };
        // Sums within bounds are finite too: they are written down, and added to.
        let Points { n: _, x, y, xx, xy } = trials;
        if ![x, y, xx, xy].iter().all(|sum| (0.0..1e24).contains(*sum)) {
            return;
        }
        if !(1.0..=1e6).contains(&trials.n) || !(1e-9..=1e3).contains(&each) {
            return;
        }
        self.lead = (fixed / each).clamp(0.0, LEAD);
        self.by_kind[Kind::Train as usize].add(1e6 * each);
        (self.points, self.trials) = (*trials, trials.n as u64);
    }

    /// Adds the compute time of a lease of these numbers of tokens and microbatches.
    pub fn measure(&mut self, kind: Kind, (tokens, microbatches): (u64, u64), micros: u64) {
        // The reported time is clamped so that no later arithmetic overflows.
        let each = micros as f64 / self.size(tokens.max(1), microbatches);
        self.by_kind[kind as usize].add(each.clamp(1e-3, 1e9));
        self.doubted = None;
        if kind == Kind::Train && microbatches == 1 {
            self.points.add(tokens as f64, micros as f64 / 1e6);
        }
    }

    /// Discards the estimate until the next measurement. Otherwise a measurement so bad that the device gets no
    /// lease would never be corrected.
    pub fn doubt(&mut self) {
        if self.doubted.is_none() && self.any() {
            self.doubted = Some(std::mem::take(&mut self.by_kind));
        }
    }

    /// The lease was cancelled before its end: restores the estimate from before the doubt. Returns whether there
    /// was one.
    pub fn confirm(&mut self) -> bool {
        let before = self.doubted.take();
        before.map(|before| self.by_kind = before).is_some()
    }

    /// Adds the bytes in use during a microbatch. Ignored without trials, which determine what blocks keep.
    pub fn takes(&mut self, tokens: u64, bytes: u64) {
        if self.memory.points.n == 0.0 {
            return;
        }
        self.memory.add(tokens as f64, InUse { bytes, blocks: self.memory.blocks });
    }

    /// Tokens of a lease plus the fixed cost of its microbatches in tokens.
    pub fn size(&self, tokens: u64, microbatches: u64) -> f64 {
        tokens as f64 + microbatches as f64 * self.lead
    }

    pub fn known(&self, kind: Kind) -> Option<f64> {
        self.by_kind[kind as usize].get()
    }

    /// Whether any kind was measured.
    pub fn any(&self) -> bool {
        self.by_kind.iter().any(|e| e.get().is_some())
    }

    /// Estimate from the device's own rounds of other kinds: a forward pass costs about a third of a training
    /// microbatch, and a token generated alone costs about ten times as much as one in an evaluation.
    pub fn likely(&self, kind: Kind) -> Option<f64> {
        const TIMES: [f64; 3] = [3.0, 1.0, 10.0];
        let from = |k: Kind| Some(self.known(k)? / TIMES[k as usize] * TIMES[kind as usize]);
        self.known(kind).or_else(|| from(Kind::Train)).or_else(|| from(Kind::Eval))
    }
}

/// The speeds to plan with: a device's own, else the median of its class, else the median of all devices, else
/// [`PRIOR`].
pub(super) fn assumed(devices: &[(&str, &Speed)], kind: Kind) -> Vec<f64> {
    let likely: Vec<Option<f64>> = devices.iter().map(|(_, s)| s.likely(kind)).collect();
    if let Some(known) = likely.iter().copied().collect() {
        return known;
    }
    let mut of_class: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for ((class, _), own) in devices.iter().zip(&likely) {
        of_class.entry(*class).or_default().extend(own);
    }
    let of_all = median(likely.iter().flatten().copied().collect()).unwrap_or(PRIOR);
    let of_class: BTreeMap<&str, f64> =
        of_class.into_iter().map(|(class, known)| (class, median(known).unwrap_or(of_all))).collect();
    let one = |((class, _), own): (&(&str, &Speed), &Option<f64>)| {
        own.or_else(|| of_class.get(class).copied()).unwrap_or(of_all)
    };
    devices.iter().zip(&likely).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_ignores_one_outlier_and_follows_a_change() {
        let mut e = Estimate::default();
        (0..7).for_each(|_| e.add(1.0));
        e.add(100.0);
        assert_eq!(e.get(), Some(1.0));
        (0..3).for_each(|_| e.add(4.0));
        assert_eq!(e.get(), Some(4.0));
    }

    #[test]
    fn trials_give_the_first_estimate() {
        let mut trials = Points::default();
        [100.0, 200.0, 400.0].iter().for_each(|&t| trials.add(t, 0.01 + 0.0001 * t));
        let mut s = Speed::default();
        let of = |time: Points| Trials { time, ..Trials::default() };
        s.admit(&of(trials));
        // 100 microseconds per token, and a fixed cost of 100 tokens.
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6 * b;
        assert!(
            near(s.known(Kind::Train).unwrap(), 100.0)
                && near(s.size(300, 1), 400.0)
                && near(s.size(300, 5), 800.0)
        );
        // Microbatches on the same line change nothing.
        for tokens in [10, 1000, 50] {
            s.measure(Kind::Train, (tokens, 1), 10_000 + 100 * tokens);
            assert!(near(s.known(Kind::Train).unwrap(), 100.0));
        }
        assert_eq!((s.points.n, s.trials), (6.0, 3));
        for nonsense in [Points::default(), Points { n: f64::NAN, ..trials }, Points { y: 1e30, ..trials }] {
            let mut s = Speed::default();
            s.admit(&of(nonsense));
            assert_eq!((s.known(Kind::Train), s.size(7, 3)), (None, 7.0));
        }
    }

    #[test]
    fn unmeasured_speed_is_not_doubted() {
        let mut s = Speed::default();
        s.doubt();
        assert!(!s.confirm(), "there is nothing to go back to");
        s.measure(Kind::Train, (10, 1), 100);
        s.doubt();
        assert!(!s.any() && s.confirm());
        assert_eq!(s.known(Kind::Train), Some(10.0));
    }

    #[test]
    fn unknown_devices_are_assumed_as_fast_as_their_class() {
        let of = |micros| {
            let mut s = Speed::default();
            s.measure(Kind::Train, (10, 1), micros);
            s
        };
        let (fast, slow, new) = (of(100), of(400), Speed::default());
        let devices = [("gpu", &fast), ("cpu", &slow), ("gpu", &new), ("tpu", &new)];
        assert_eq!(assumed(&devices, Kind::Train), [10.0, 40.0, 10.0, 10.0]);
        assert_eq!(assumed(&[("x", &new)], Kind::Train), [PRIOR]);
        let eval = assumed(&devices[..2], Kind::Eval);
        assert!((eval[1] / eval[0] - 4.0).abs() < 1e-9);
    }
}
