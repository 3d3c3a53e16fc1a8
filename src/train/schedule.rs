//! Learning rates as values: a schedule is a pure function of the step. The formulas are those of
//! transformers' `get_{cosine,linear,constant}_schedule_with_warmup`, whose first warm-up step has rate 0.

use serde::{Deserialize, Serialize};

/// How the rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine down to 0.
    Cosine,
    /// A line down to 0.
    Linear,
    /// Not at all.
    Constant,
}

impl std::str::FromStr for Decay {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cosine" => Ok(Decay::Cosine),
            "linear" => Ok(Decay::Linear),
            "constant" | "constant_with_warmup" => Ok(Decay::Constant),
            _ => Err(format!("`{name}` is no schedule: cosine, linear or constant")),
        }
    }
}

/// The rate of every step of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f64,
    /// Its shape.
    pub decay: Decay,
    /// Steps of linear rise from 0.
    pub warmup: u64,
    /// Steps of the whole run.
    pub total: u64,
}

/// Steps that a share of a run's steps amounts to, rounded up as transformers does.
pub fn warmup_steps(ratio: f64, total: u64) -> u64 {
    (ratio * total as f64).ceil() as u64
}

impl Schedule {
    /// The rate of `step`, counted from 1.
    pub fn rate(&self, step: u64) -> f64 {
        self.peak * self.factor(step.saturating_sub(1))
    }

    /// `done`: steps taken before. Cosine is the `libm` crate's, so that machines agree.
    fn factor(&self, done: u64) -> f64 {
        if done < self.warmup {
            return done as f64 / self.warmup as f64;
        }
        let span = self.total.saturating_sub(self.warmup).max(1) as f64;
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => (self.total.saturating_sub(done) as f64 / span).max(0.0),
            Decay::Cosine => {
                let progress = (done - self.warmup) as f64 / span;
                (0.5 * (1.0 + libm::cos(std::f64::consts::PI * 0.5 * 2.0 * progress))).max(0.0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warmup_starts_at_zero_and_decay_ends_near_zero() {
        let s = |decay| Schedule { peak: 2.0, decay, warmup: 4, total: 12 };
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
    fn shares_of_a_run_round_up() {
        assert_eq!(warmup_steps(0.03, 40), 2);
        assert_eq!(warmup_steps(0.0, 40), 0);
        assert_eq!(warmup_steps(0.5, 3), 2);
    }
}
