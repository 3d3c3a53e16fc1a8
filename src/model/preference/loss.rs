//! The losses as one table: each row is a function of two numbers per pair, with its derivatives. The numbers are
//! log-probabilities of the chosen and the rejected answer, as sums or as means over tokens, minus those of the
//! reference where a loss has one. The formulas are those of TRL 1.16.

use serde::{Deserialize, Serialize};

/// A loss on preferences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    /// DPO (Rafailov et al. 2023, arXiv:2305.18290).
    Sigmoid,
    /// SLiC (Zhao et al. 2023, arXiv:2305.10425), against the reference.
    Hinge,
    /// IPO (Azar et al. 2023, arXiv:2310.12036).
    Ipo,
    /// DPO for labels that are wrong with the probability `smoothing` (Chowdhury et al. 2024, arXiv:2403.00409).
    Robust,
    /// APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266).
    ApoZero,
    /// APO-down (the same paper).
    ApoDown,
    /// The two terms of APO-zero for rows that are no pairs.
    ApoZeroUnpaired,
    /// ORPO (Hong et al. 2024, arXiv:2403.07691).
    Orpo,
    /// SimPO (Meng et al. 2024, arXiv:2405.14734).
    SimPo,
    /// CPO (Xu et al. 2024, arXiv:2401.08417).
    Cpo,
    /// CPO with the hinge of SLiC.
    CpoHinge,
    /// CPO with the square of IPO.
    CpoIpo,
}

/// A loss with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Objective {
    /// The loss.
    pub loss: Loss,
    /// Factor of the log-probabilities; for ORPO of the odds ratio.
    pub beta: f64,
    /// Probability that chosen and rejected are exchanged, for the losses that know it.
    pub smoothing: f64,
    /// Margin of SimPO.
    pub gamma: f64,
    /// Weight of the mean loss of the tokens of the chosen answers, which is added; ORPO's is 1, and prompts count.
    pub nll: f64,
}

/// Log-probabilities of the chosen and the rejected answer of a pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// Sums under the policy.
    pub policy: [f64; 2],
    /// Sums under the reference; 0 where the loss has none.
    pub reference: [f64; 2],
    /// Tokens of the answers.
    pub tokens: [f64; 2],
}

/// A loss at a pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Value {
    /// Its value.
    pub loss: f64,
    /// Its derivatives in the sums under the policy.
    pub slopes: [f64; 2],
    /// The rewards of both answers.
    pub rewards: [f64; 2],
}

/// What a loss reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Sums minus those of the reference.
    Ratios,
    /// The same, divided by the number of tokens.
    MeanRatios,
    /// Sums.
    Sums,
    /// Means over tokens.
    Means,
}

/// Value and derivatives at the two numbers.
type At = fn(&Objective, f64, f64) -> (f64, f64, f64);

impl Loss {
    /// Every loss.
    pub const ALL: [Loss; 12] = [
        Loss::Sigmoid,
        Loss::Hinge,
        Loss::Ipo,
        Loss::Robust,
        Loss::ApoZero,
        Loss::ApoDown,
        Loss::ApoZeroUnpaired,
        Loss::Orpo,
        Loss::SimPo,
        Loss::Cpo,
        Loss::CpoHinge,
        Loss::CpoIpo,
    ];

    /// The table: name, what it reads, value and derivatives.
    #[rustfmt::skip]
    fn row(self) -> (&'static str, Reads, At) {
        match self {
            Loss::Sigmoid => ("sigmoid", Reads::Ratios, sigmoid),
            Loss::Hinge => ("hinge", Reads::Ratios, hinge),
            Loss::Ipo => ("ipo", Reads::MeanRatios, square),
            Loss::Robust => ("robust", Reads::Ratios, robust),
            Loss::ApoZero => ("apo_zero", Reads::Ratios, apo_zero),
            Loss::ApoDown => ("apo_down", Reads::Ratios, apo_down),
            Loss::ApoZeroUnpaired => ("apo_zero_unpaired", Reads::Ratios, apo_zero),
            Loss::Orpo => ("orpo", Reads::Means, orpo),
            Loss::SimPo => ("simpo", Reads::Means, simpo),
            Loss::Cpo => ("cpo", Reads::Sums, smoothed),
            Loss::CpoHinge => ("cpo_hinge", Reads::Sums, hinge),
            Loss::CpoIpo => ("cpo_ipo", Reads::Means, square),
        }
    }

    /// The name of the loss in output.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Whether the loss compares the policy with a reference.
    pub fn has_reference(self) -> bool {
        matches!(self.row().1, Reads::Ratios | Reads::MeanRatios)
    }

    /// Whether `smoothing` has an effect.
    pub fn smooths(self) -> bool {
        matches!(self, Loss::Robust | Loss::SimPo | Loss::Cpo)
    }
}

impl Objective {
    /// The loss at a pair. Of a row without its other half, the half that is missing has the log-ratio 0.
    pub fn at(&self, pair: &Pair) -> Value {
        let (_, reads, at) = self.loss.row();
        let ratios = [0, 1].map(|i| pair.policy[i] - pair.reference[i]);
        let per = match reads {
            Reads::Ratios | Reads::Sums => [1.0; 2],
            Reads::MeanRatios | Reads::Means => pair.tokens.map(f64::recip),
        };
        let read = [0, 1].map(|i| ratios[i] * per[i]);
        let (loss, chosen, rejected) = at(self, read[0], read[1]);
        // The rewards of losses with a reference are sums also where the loss reads means.
        let rewards = if self.loss.has_reference() { ratios } else { read }.map(|r| self.beta * r);
        Value { loss, slopes: [chosen * per[0], rejected * per[1]], rewards }
    }
}

/// 1 / (1 + e^-x)
pub(super) fn logistic(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + libm::exp(-x)) } else { libm::exp(x) / (1.0 + libm::exp(x)) }
}

/// ln(1 + e^x), that is -ln logistic(-x)
pub(super) fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p(libm::exp(-x.abs()))
}

/// ln(1 - e^x) for x < 0
fn ln_1m_exp(x: f64) -> f64 {
    libm::log1p(-libm::exp(x))
}

/// A function of beta times the difference, with its derivative there.
fn of_difference(
    o: &Objective,
    chosen: f64,
    rejected: f64,
    f: impl Fn(f64) -> (f64, f64),
) -> (f64, f64, f64) {
    let (loss, slope) = f(o.beta * (chosen - rejected));
    (loss, o.beta * slope, -o.beta * slope)
}

fn sigmoid(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    of_difference(o, u, v, |x| (softplus(-x), -logistic(-x)))
}

fn hinge(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    of_difference(o, u, v, |x| if x < 1.0 { (1.0 - x, -1.0) } else { (0.0, 0.0) })
}

fn square(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    let h = u - v - 1.0 / (2.0 * o.beta);
    (h * h, 2.0 * h, -2.0 * h)
}

/// -(1 - e) ln s(x) - e ln s(-x)
fn mixed(x: f64, e: f64) -> (f64, f64) {
    let (right, wrong) = (1.0 - e, e);
    (right * softplus(-x) + wrong * softplus(x), wrong * logistic(x) - right * logistic(-x))
}

fn robust(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    let by = 1.0 / (1.0 - 2.0 * o.smoothing);
    let of = |x: f64| {
        let (right, wrong) = (1.0 - o.smoothing, o.smoothing);
        let loss = right * softplus(-x) - wrong * softplus(x);
        (by * loss, -by * (right * logistic(-x) + wrong * logistic(x)))
    };
    of_difference(o, u, v, of)
}

fn apo_zero(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    let (su, sv) = (logistic(o.beta * u), logistic(o.beta * v));
    (1.0 - su + sv, -o.beta * su * (1.0 - su), o.beta * sv * (1.0 - sv))
}

fn apo_down(o: &Objective, u: f64, v: f64) -> (f64, f64, f64) {
    let (su, sd) = (logistic(o.beta * u), logistic(o.beta * (u - v)));
    let slope = o.beta * sd * (1.0 - sd);
    (su + 1.0 - sd, o.beta * su * (1.0 - su) - slope, slope)
}

fn orpo(o: &Objective, x: f64, y: f64) -> (f64, f64, f64) {
    // Odds of a certain answer are infinite.
    let [x, y] = [x, y].map(|x| x.min(-1e-9));
    let odds = (x - y) - (ln_1m_exp(x) - ln_1m_exp(y));
    let slope = -o.beta * logistic(-odds);
    let of = |x: f64| 1.0 / -libm::expm1(x);
    (o.beta * softplus(-odds), slope * of(x), -slope * of(y))
}

fn simpo(o: &Objective, x: f64, y: f64) -> (f64, f64, f64) {
    of_difference(o, x, y, |z| mixed(z - o.gamma, o.smoothing))
}

fn smoothed(o: &Objective, x: f64, y: f64) -> (f64, f64, f64) {
    of_difference(o, x, y, |z| mixed(z, o.smoothing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::rng::Stream;

    fn objective(loss: Loss, beta: f64) -> Objective {
        Objective { loss, beta, smoothing: if loss.smooths() { 0.2 } else { 0.0 }, gamma: 0.5, nll: 0.0 }
    }

    #[test]
    fn slopes_are_central_differences_of_the_loss() {
        let mut draws = Stream::new(&[7]);
        let mut draw = |scale: f64| f64::from(draws.unit()) * scale;
        for loss in Loss::ALL {
            for beta in [0.1, 0.5, 2.0] {
                let o = objective(loss, beta);
                for _ in 0..50 {
                    let pair = Pair {
                        policy: [-1.0 - draw(40.0), -1.0 - draw(40.0)],
                        reference: [-1.0 - draw(40.0), -1.0 - draw(40.0)]
                            .map(|r| if loss.has_reference() { r } else { 0.0 }),
                        tokens: [1.0 + draw(9.0).floor(), 1.0 + draw(9.0).floor()],
                    };
                    let got = o.at(&pair);
                    for side in 0..2 {
                        let h = 1e-5;
                        let moved = |by: f64| {
                            let mut there = pair;
                            there.policy[side] += by;
                            o.at(&there).loss
                        };
                        let want = (moved(h) - moved(-h)) / (2.0 * h);
                        let bound = 1e-6 * (1.0 + want.abs() + got.loss.abs());
                        // The hinge has no derivative at its corner.
                        let from = if loss.has_reference() { pair.reference } else { [0.0; 2] };
                        let corner = o.beta * ((pair.policy[0] - from[0]) - (pair.policy[1] - from[1]));
                        if matches!(loss, Loss::Hinge | Loss::CpoHinge) && (corner - 1.0).abs() < 1e-4 {
                            continue;
                        }
                        assert!((got.slopes[side] - want).abs() < bound, "{loss:?}: {got:?}, {want}");
                    }
                }
            }
        }
    }

    /// The values of torch in f64 for the formulas of TRL's trainers: beta 0.5, smoothing 0.2 where it is known,
    /// gamma 0.5, at the pair of the test.
    #[test]
    fn losses_have_the_values_of_torch() {
        let pair = Pair { policy: [-6.0, -7.5], reference: [-6.4, -9.0], tokens: [3.0, 5.0] };
        for (loss, want) in Loss::ALL.into_iter().zip(WANTS) {
            let reference = if loss.has_reference() { pair.reference } else { [0.0; 2] };
            let got = objective(loss, 0.5).at(&Pair { reference, ..pair }).loss;
            assert!((got - want).abs() < 1e-12, "{loss:?}: {got}, {want}");
        }
    }

    #[test]
    fn extreme_log_probabilities_stay_finite() {
        for loss in Loss::ALL {
            for (x, y) in [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4), (0.0, 0.0)] {
                let reference = if loss.has_reference() { [-5.0; 2] } else { [0.0; 2] };
                let pair = Pair { policy: [x, y], reference, tokens: [4.0; 2] };
                let value = objective(loss, 0.1).at(&pair);
                let all = [value.loss, value.slopes[0], value.slopes[1], value.rewards[0], value.rewards[1]];
                assert!(all.iter().all(|v| v.is_finite()), "{loss:?} {value:?}");
            }
        }
    }

    const WANTS: [f64; 12] = [
        1.0054924814633375,
        1.5499999999999998,
        1.3611111111111107,
        1.188825814796671,
        1.129344701862915,
        1.1839695883232786,
        1.129344701862915,
        0.5210289039635672,
        0.9868710061149,
        0.5368710061149,
        0.25,
        2.25,
    ];
}
