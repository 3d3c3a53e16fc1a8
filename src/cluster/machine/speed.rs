//! How fast devices are. What a device says of itself is measured, not believed for ever: the estimate is the
//! median of its last few microbatches, so that one hiccup moves nothing and a lasting change is seen after half
//! of them.

use super::super::message::Trials;
use super::event::Kind;
use crate::model::memory::{InUse, Used};
use crate::numeric::line::{Line, Points};
use std::collections::VecDeque;

/// Samples that the median is taken of.
const SAMPLES: usize = 7;

/// Microseconds per token of a device that nothing is known of, nor of any other.
const PRIOR: f64 = 1000.0;

/// A running median.
#[derive(Debug, Clone, Default)]
pub(super) struct Estimate {
    recent: VecDeque<f64>,
}

impl Estimate {
    pub fn add(&mut self, sample: f64) {
        if self.recent.len() == SAMPLES {
            self.recent.pop_front();
        }
        self.recent.push_back(sample);
    }

    pub fn get(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        // The lower of two middles: the first sample of a device often holds a warm-up.
        sorted.get(sorted.len().saturating_sub(1) / 2).copied()
    }
}

/// Microseconds per token of a device, by what it does. What a microbatch takes besides its tokens is counted in
/// tokens: those that take as long.
#[derive(Debug, Clone, Default)]
pub(super) struct Speed {
    by_kind: [Estimate; 3],
    /// Tokens and seconds of its training microbatches, trials included.
    pub points: Points,
    /// Trials among them.
    pub trials: u64,
    /// Tokens and bytes of its training microbatches, trials included.
    pub memory: Used,
    /// Tokens that take as long as all that a microbatch takes besides its own.
    lead: f64,
    /// What was believed before it was doubted, until there is something better to believe.
    doubted: Option<[Estimate; 3]>,
}

/// Most tokens that a lead can be: what a worker says of itself is bounded.
const LEAD: f64 = 1e5;

impl Speed {
    /// What it was measured to need before it took part: an estimate to begin with, and how times go with sizes.
    pub fn admit(&mut self, trials: &Trials) {
        if trials.memory.fit().is_some() {
            self.memory = trials.memory;
        }
        let trials = &trials.time;
        let Some(Line { fixed, each }) = trials.line() else { return };
        // Finite too: they are written down, and added to.
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

    /// A lease of so many tokens took so long.
    pub fn measure(&mut self, kind: Kind, tokens: u64, micros: u64) {
        // What a worker says is bounded, so that no arithmetic on it can go wrong.
        let each = micros as f64 / self.size(tokens.max(1));
        self.by_kind[kind as usize].add(each.clamp(1e-3, 1e9));
        self.doubted = None;
        if kind == Kind::Train {
            self.points.add(tokens as f64, micros as f64 / 1e6);
        }
    }

    /// Believes nothing of it until it has done something: a measurement so bad that nothing falls to a device would
    /// else be the last one.
    pub fn doubt(&mut self) {
        if self.doubted.is_none() && self.any() {
            self.doubted = Some(std::mem::take(&mut self.by_kind));
        }
    }

    /// It was called back before it was done: what was believed before holds again. False where nothing was doubted.
    pub fn confirm(&mut self) -> bool {
        let before = self.doubted.take();
        before.map(|before| self.by_kind = before).is_some()
    }

    /// A microbatch of so many tokens had so many bytes in use. What blocks keep is known of who was tried alone.
    pub fn takes(&mut self, tokens: u64, bytes: u64) {
        if self.memory.points.n == 0.0 {
            return;
        }
        self.memory.add(tokens as f64, InUse { bytes, blocks: self.memory.blocks });
    }

    /// Tokens of a lease, and those that its beginning and end are worth.
    pub fn size(&self, tokens: u64) -> f64 {
        tokens as f64 + self.lead
    }

    pub fn known(&self, kind: Kind) -> Option<f64> {
        self.by_kind[kind as usize].get()
    }

    /// Whether anything was measured.
    pub fn any(&self) -> bool {
        self.by_kind.iter().any(|e| e.get().is_some())
    }

    /// What it should be from the device's own other rounds: a forward pass is about a third of a training
    /// microbatch, and a token that is generated alone costs what many do together.
    fn likely(&self, kind: Kind) -> Option<f64> {
        const TIMES: [f64; 3] = [3.0, 1.0, 10.0];
        let from = |k: Kind| Some(self.known(k)? / TIMES[k as usize] * TIMES[kind as usize]);
        self.known(kind).or_else(|| from(Kind::Train)).or_else(|| from(Kind::Eval))
    }
}

/// The speeds to plan with: a device's own, else the median of its class, else of all, else a guess that is the
/// same for everybody.
pub(super) fn assumed(devices: &[(&str, &Speed)], kind: Kind) -> Vec<f64> {
    let likely: Vec<Option<f64>> = devices.iter().map(|(_, s)| s.likely(kind)).collect();
    let median = |class: Option<&str>| {
        let of = devices.iter().zip(&likely).filter(|((c, _), _)| class.is_none_or(|class| class == *c));
        let mut known: Vec<f64> = of.filter_map(|(_, l)| *l).collect();
        known.sort_by(f64::total_cmp);
        known.get(known.len().saturating_sub(1) / 2).copied()
    };
    let one = |((class, _), own): (&(&str, &Speed), &Option<f64>)| {
        own.or_else(|| median(Some(class))).or_else(|| median(None)).unwrap_or(PRIOR)
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
        // 100 microseconds a token, and as much as 100 tokens take besides.
        let near = |a: f64, b: f64| (a - b).abs() < 1e-6 * b;
        assert!(near(s.known(Kind::Train).unwrap(), 100.0) && near(s.size(300), 400.0));
        // Microbatches of any size that follow the line change nothing.
        for tokens in [10, 1000, 50] {
            s.measure(Kind::Train, tokens, 10_000 + 100 * tokens);
            assert!(near(s.known(Kind::Train).unwrap(), 100.0));
        }
        assert_eq!((s.points.n, s.trials), (6.0, 3));
        for nonsense in [Points::default(), Points { n: f64::NAN, ..trials }, Points { y: 1e30, ..trials }] {
            let mut s = Speed::default();
            s.admit(&of(nonsense));
            assert_eq!((s.known(Kind::Train), s.size(7)), (None, 7.0));
        }
    }

    #[test]
    fn unmeasured_speed_is_not_doubted() {
        let mut s = Speed::default();
        s.doubt();
        assert!(!s.confirm(), "there is nothing to go back to");
        s.measure(Kind::Train, 10, 100);
        s.doubt();
        assert!(!s.any() && s.confirm());
        assert_eq!(s.known(Kind::Train), Some(10.0));
    }

    #[test]
    fn unknown_devices_are_assumed_as_fast_as_their_class() {
        let of = |micros| {
            let mut s = Speed::default();
            s.measure(Kind::Train, 10, micros);
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
