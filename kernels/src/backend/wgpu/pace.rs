//! Limits the work of a submission. Its time is estimated from its arithmetic and the rate of earlier submissions, so
//! that nothing must be known about a device in advance.
//!
//! If a whole pass over a microbatch takes under a second, it is split once at most. If it takes longer, each
//! submission is planned to take [`SLOW`], well below the limit of half a second. Borders of blocks are the preferred
//! places to split, so a submission ends inside a block only if it would become much longer.

use super::instance::Adapter;

/// Seconds of a submission on a device that needs many of them.
const SLOW: f64 = 0.2;
/// Seconds after which such a submission ends even inside a block.
const INSIDE: f64 = 0.35;
/// Seconds of a submission if a microbatch needs few of them.
const FAST: f64 = 0.48;
/// A shorter microbatch is split in two at most.
const SHORT: f64 = 0.95;
/// A shorter measurement is mostly overhead.
const LEAST: f64 = 0.002;

/// A device's measured rate.
#[derive(Debug, Clone)]
pub struct Pace {
    /// Work per second.
    rate: f64,
    /// Lower limit of the rate, so that dispatches do not become too small.
    least: f64,
    /// Work since the last read, and between the two reads before.
    since: f64,
    last: f64,
    /// Keeps the initial rate despite measurements: for tests.
    pub steady: bool,
}

impl Pace {
    /// The initial rate, until the first measurement.
    pub fn guess(kind: Kind) -> Pace {
        let rate = match kind {
            Kind::Software => 1e9,
            // Far below the rate of a card: the system resets a slow card that gets too much work. A fast card reaches
            // its rate after three submissions.
            Kind::Hardware => 5e9,
        };
        Pace::of(rate)
    }

    /// An initial rate of `rate` work per second.
    pub fn of(rate: f64) -> Pace {
        Pace { rate, least: rate / 20.0, since: 0.0, last: f64::INFINITY, steady: false }
    }

    /// Estimated seconds of `work`.
    pub fn seconds(&self, work: f64) -> f64 {
        work / self.rate
    }

    /// Most work of one dispatch, if the verb can be split.
    pub fn most(&self) -> f64 {
        SLOW * self.rate
    }

    /// Whether a microbatch is split in two at most.
    fn is_short(&self) -> bool {
        self.seconds(self.last) < SHORT
    }

    /// Seconds after which a submission ends, even inside a block. Before the first measurement the limit is tight.
    pub fn bound(&self) -> f64 {
        match self.last.is_finite() {
            // A little more than half, so that no small rest remains.
            true if self.is_short() => (0.52 * self.seconds(self.last)).max(FAST),
            true => INSIDE,
            false => SLOW,
        }
    }

    /// Whether a submission with `work` ends at the border of a block, if the next block adds `next` and the microbatch
    /// so far has `passed`.
    pub fn ends(&self, work: f64, next: f64, passed: f64) -> bool {
        let more = self.seconds(work + next);
        match self.is_short() {
            // Not so early that the rest would be too much for one submission.
            true => more > self.bound() && self.seconds(self.last - passed) <= self.bound(),
            false => more > SLOW,
        }
    }

    /// Updates the rate after a submission.
    pub fn learn(&mut self, work: f64, seconds: f64) {
        self.since += work;
        if work <= 0.0 || self.steady {
            return;
        }
        let measured = work / seconds.max(LEAST);
        if measured < self.rate && seconds >= LEAST {
            // A lower rate is adopted at once, but one outlier at most halves the rate.
            self.rate = measured.max(0.5 * self.rate).max(self.least);
        } else if measured > self.rate {
            // A higher rate is adopted gradually, because an overestimate costs more.
            self.rate = 0.7 * self.rate + 0.3 * measured;
        }
    }

    /// Updates the rate from an upper bound of a submission's time.
    pub fn learn_at_most(&mut self, work: f64, seconds: f64) {
        if work / seconds.max(LEAST) > self.rate {
            self.learn(work, seconds);
        } else {
            self.since += work;
        }
    }

    /// Marks the end of a microbatch.
    pub fn lap(&mut self) {
        self.last = std::mem::take(&mut self.since);
    }
}

/// Where a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A driver that computes on the CPU.
    Software,
    /// A card.
    Hardware,
}

impl Kind {
    /// That of an adapter.
    pub fn of(adapter: &Adapter) -> Kind {
        if adapter.is_software() { Kind::Software } else { Kind::Hardware }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_card_is_assumed_slow_until_measured() {
        for (rate, most) in [(1e9, 1.0), (1e10, 0.5), (1e12, 0.5), (1e14, 0.5)] {
            let mut pace = Pace::guess(Kind::Hardware);
            for round in 0..5 {
                let work = pace.most();
                let seconds = work / rate;
                assert!(seconds <= most, "{rate}: {seconds} s in round {round}");
                // Every kernel of the first round is compiled, which takes time and does not measure the device.
                if round == 0 { pace.learn_at_most(work, seconds + 0.05) } else { pace.learn(work, seconds) }
            }
            assert!(pace.rate >= 0.1 * rate.min(1e13) && pace.rate <= 2.0 * rate, "{rate}: {}", pace.rate);
        }
    }

    #[test]
    fn slow_device_gets_more_submissions_than_a_fast_one() {
        let mut pace = Pace::of(2e11);
        assert_eq!(pace.bound(), SLOW, "nothing is known yet");
        (0..9).for_each(|_| pace.learn(1e10, 0.1));
        pace.since = 9.4e10;
        pace.lap();
        assert!((pace.bound() - 0.4888).abs() < 1e-9, "0.94 s: two submissions, not {}", pace.bound());
        for (work, next, ends) in [(3e10, 1e10, false), (4.7e10, 1e10, true), (4.4e10, 1e10, false)] {
            assert_eq!(pace.ends(work, next, work), ends, "{work}: {next} more, and the rest in one");
        }
        pace.since = 2e11;
        pace.lap();
        assert_eq!(pace.bound(), INSIDE, "2 s: many");
        assert!(
            pace.ends(1.5e10, 6e9, 0.0) && !pace.ends(1.5e10, 4e9, 0.0),
            "so that none takes more than 0.2 s"
        );
        pace.learn(1.0, 1e-4);
        assert_eq!(pace.seconds(1e11), 1.0, "overhead is not believed");
        pace.learn(1e10, 1e4);
        assert_eq!(pace.seconds(1e11), 2.0, "nor a hiccup");
        (0..99).for_each(|_| pace.learn(1.0, 1.0));
        assert_eq!(pace.seconds(1e11), 10.0, "nor a standstill");
        pace.learn_at_most(1e10, 30.0);
        assert_eq!(pace.seconds(1e11), 10.0, "work that was not timed does not count as slow");
        (0..99).for_each(|_| pace.learn_at_most(1e10, 1e-4));
        assert!(pace.seconds(1e12) < 0.21, "what is too fast to measure shows that it is fast");
    }
}
