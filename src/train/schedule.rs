//! Learning rate schedules as values: a schedule is a pure function of the step. The formulas are those of
//! transformers' `get_{cosine,linear,constant}_schedule_with_warmup`, `get_cosine_with_min_lr_schedule_with_warmup` and
//! `get_wsd_schedule`; the first warm-up step has rate 0, or the lowest rate of the last one.

use serde::{Deserialize, Serialize};

/// Decrease of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine period down to the floor.
    #[default]
    Cosine,
    /// A straight line down to 0.
    Linear,
    /// No decrease.
    Constant,
    /// No decrease before the last steps, then a cosine down to the floor.
    Wsd,
}

impl std::str::FromStr for Decay {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cosine" => Ok(Decay::Cosine),
            "linear" => Ok(Decay::Linear),
            "constant" | "constant_with_warmup" => Ok(Decay::Constant),
            "wsd" | "warmup_stable_decay" => Ok(Decay::Wsd),
            _ => Err(format!("`{name}` is no schedule: cosine, linear, constant or wsd")),
        }
    }
}

/// The learning rate of every step of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f64,
    /// Decrease after the warm-up.
    pub decay: Decay,
    /// Steps of linear increase from 0.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
    /// The rate at the end of [`Decay::Cosine`] and [`Decay::Wsd`], as a share of the highest.
    pub floor: f64,
    /// Steps of the decrease of [`Decay::Wsd`].
    pub decay_steps: u64,
}

/// The number of steps for a share of `total`, rounded up as in transformers.
pub fn warmup_steps(ratio: f64, total: u64) -> u64 {
    (ratio * total as f64).ceil() as u64
}

impl Schedule {
    /// The learning rate of `step`, counted from 1.
    pub fn rate(&self, step: u64) -> f64 {
        self.peak * self.factor(step.saturating_sub(1))
    }

    /// `done`: the number of steps before this one. The cosine comes from the `libm` crate, so that all machines agree.
    fn factor(&self, done: u64) -> f64 {
        let above = |share: f64| (share * (1.0 - self.floor) + self.floor).max(0.0);
        // Twice 0.5 as in transformers, where 0.5 is the number of periods.
        let cosine = |progress: f64| 0.5 * (1.0 + libm::cos(std::f64::consts::PI * 0.5 * 2.0 * progress));
        if done < self.warmup {
            let risen = done as f64 / self.warmup as f64;
            return if self.decay == Decay::Wsd { above(risen) } else { risen };
        }
        let span = self.total.saturating_sub(self.warmup).max(1) as f64;
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => (self.total.saturating_sub(done) as f64 / span).max(0.0),
            Decay::Cosine => above(cosine((done - self.warmup) as f64 / span)),
            Decay::Wsd => {
                let from = self.total.saturating_sub(self.decay_steps).max(self.warmup);
                let into = done.saturating_sub(from) as f64 / self.decay_steps.max(1) as f64;
                if done < self.total { above(cosine(into)) } else { self.floor }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_starts_at_zero_and_decay_ends_near_zero() {
        let s = |decay| Schedule { peak: 2.0, decay, warmup: 4, total: 12, ..Schedule::default() };
        for decay in [Decay::Cosine, Decay::Linear, Decay::Constant] {
            assert_eq!(s(decay).rate(1), 0.0);
            assert_eq!(s(decay).rate(3), 1.0);
            assert_eq!(s(decay).rate(5), 2.0);
        }
        assert_eq!(s(Decay::Linear).rate(12), 2.0 / 8.0);
        assert!((s(Decay::Cosine).rate(9) - 1.0).abs() < 1e-15);
        assert_eq!(s(Decay::Constant).rate(12), 2.0);
    }

    #[test]
    fn warm_up_share_is_rounded_up() {
        assert_eq!(warmup_steps(0.03, 40), 2);
        assert_eq!(warmup_steps(0.0, 40), 0);
        assert_eq!(warmup_steps(0.5, 3), 2);
    }
}
