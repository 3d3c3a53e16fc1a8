//! Fault injection, for tests that show what a broken machine does to a run. Faults come from one environment
//! variable and are reported when they are set. Each happens once per process, but for `slow` and `forge`.

use crate::numeric::fixed;
use crate::numeric::rng::Stream;
use crate::support::stderr::say;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The environment variable that names the faults.
const VARIABLE: &str = "FINETUNE_INJECT";

/// The faults to inject.
#[derive(Debug, Clone, Default)]
pub struct Inject(Arc<Faults>);

#[derive(Debug, Default)]
struct Faults {
    at: Vec<(What, u64, AtomicBool)>,
    selftest: bool,
    slow: Option<f64>,
    forgery: Option<Forgery>,
    /// The first gradient, for stale ones.
    first: Mutex<Vec<f32>>,
    pretend: Option<String>,
    cards: usize,
}

/// How every gradient is wrong: that of a lying worker, or of a faulty device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Forgery {
    Scaled,
    /// The first gradient again.
    Stale,
    Random,
    Flipped,
    /// One bit of one value.
    Bit,
}

const FORGERIES: [(&str, Forgery); 5] = [
    ("forge=scaled", Forgery::Scaled),
    ("forge=stale", Forgery::Stale),
    ("forge=random", Forgery::Random),
    ("forge=flipped", Forgery::Flipped),
    ("forge=bit", Forgery::Bit),
];

/// A fault in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// A gradient holds a NaN.
    Nan,
    /// A gradient holds a finite value above what exact sums can hold.
    Huge,
    /// The device gives an error; in step 0 it cannot even be opened.
    Error,
    /// The device's thread panics, as a library may do when a device is lost.
    Panic,
    /// The device is lost, as after a driver reset. Only a device apart from the CPU can be.
    Lost,
    /// The device of a seat runs out of memory.
    Memory,
    /// The parameters are damaged before they are used.
    Hash,
    /// The process aborts.
    Die,
}

const STEPS: [(&str, What); 8] = [
    ("nan", What::Nan),
    ("huge", What::Huge),
    ("error", What::Error),
    ("panic", What::Panic),
    ("lost", What::Lost),
    ("memory", What::Memory),
    ("hash", What::Hash),
    ("die", What::Die),
];

impl Inject {
    /// The faults that the environment variable names. The error is one line.
    pub fn from_environment() -> Result<Self, String> {
        match std::env::var(VARIABLE) {
            Ok(text) if !text.trim().is_empty() => {
                say!("warning: {VARIABLE}={text}: faults are injected on purpose");
                text.parse().map_err(|e| format!("{VARIABLE}: {e}"))
            }
            _ => Ok(Inject::default()),
        }
    }

    /// The same without a line, and without an error: the caller above has both.
    pub fn quietly() -> Self {
        std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// Called before the backend `at` of a chain is opened: fails where the first one is to fail.
    pub fn opening(&self, at: usize) -> Result<(), String> {
        match at == 0 && self.strikes(What::Error, 0) {
            true => Err("an injected error".into()),
            false => Ok(()),
        }
    }

    /// Whether the device is lost before this step.
    pub fn loses_device(&self, step: u64) -> bool {
        self.strikes(What::Lost, step)
    }

    /// Whether the device of a seat runs out of memory in this step.
    pub fn exhausts_memory(&self, step: u64) -> bool {
        self.strikes(What::Memory, step)
    }

    /// Called before a microbatch of this step is computed: ends the process, panics, or fails.
    pub fn before(&self, step: u64) -> Result<(), String> {
        if self.strikes(What::Die, step) {
            std::process::abort();
        }
        if self.strikes(What::Panic, step) {
            panic!("an injected panic");
        }
        match self.strikes(What::Error, step) {
            true => Err("an injected error".into()),
            false => Ok(()),
        }
    }

    /// Called after a microbatch of this step is computed: damages its gradient, whose values may reach `cap`.
    pub fn after(&self, step: u64, gradient: &mut [f32], cap: i64) {
        if let (true, Some(value)) = (self.strikes(What::Nan, step), gradient.first_mut()) {
            *value = f32::NAN;
        }
        if let (true, Some(value)) = (self.strikes(What::Huge, step), gradient.last_mut()) {
            *value = (fixed::to_f64(cap) * 1.01) as f32;
        }
        self.forge(step, gradient);
    }

    fn forge(&self, step: u64, gradient: &mut [f32]) {
        let Some(forgery) = self.0.forgery else { return };
        match forgery {
            Forgery::Scaled => gradient.iter_mut().for_each(|value| *value *= 1.5),
            Forgery::Flipped => gradient.iter_mut().for_each(|value| *value = -*value),
            Forgery::Random => {
                let mut draws = Stream::new(&[step, gradient.len() as u64]);
                gradient.iter_mut().for_each(|value| *value = 1e-3 * (draws.unit() - 0.5));
            }
            Forgery::Stale => {
                let mut first = self.0.first.lock().unwrap_or_else(PoisonError::into_inner);
                match first.is_empty() {
                    true => first.extend_from_slice(gradient),
                    false => gradient.copy_from_slice(&first),
                }
            }
            Forgery::Bit => {
                let at = (step as usize).wrapping_mul(7919) % gradient.len().max(1);
                let far = gradient.iter_mut().skip(at).find(|value| value.abs() > 1e-6);
                far.into_iter().for_each(|value| *value = f32::from_bits(value.to_bits() ^ (1 << 20)));
            }
        }
    }

    /// Whether the parameters of this step are damaged before they are used.
    pub fn damages_parameters(&self, step: u64) -> bool {
        self.strikes(What::Hash, step)
    }

    /// Whether this fault happens now: true once, in the step that was asked for.
    fn strikes(&self, what: What, step: u64) -> bool {
        let meant = |(w, s, _): &&(What, u64, AtomicBool)| (*w, *s) == (what, step);
        self.0.at.iter().filter(meant).any(|(_, _, done)| !done.swap(true, Ordering::Relaxed))
    }

    /// Whether self-tests fail.
    pub fn fails_selftest(&self) -> bool {
        self.0.selftest
    }

    /// Factor by which all work takes longer; `None` for no change.
    pub fn slow(&self) -> Option<f64> {
        self.0.slow
    }

    /// The number of cards that this machine pretends to have. The CPU computes in their place.
    pub fn cards(&self) -> usize {
        self.0.cards
    }

    /// The backend whose name a CPU model takes before it may fall back to the CPU's own.
    pub fn pretend(&self) -> Option<&str> {
        self.0.pretend.as_deref()
    }
}

impl std::str::FromStr for Inject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Faults::default();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let step = |(name, what)| Some((what, part.strip_prefix(name)?.strip_prefix('@')?.parse().ok()?));
            let slow = part.strip_prefix("slow=").and_then(|f| f.parse().ok());
            match (part, STEPS.into_iter().find_map(step), slow) {
                ("selftest", ..) => faults.selftest = true,
                ("pretend=wgpu" | "pretend=cuda", ..) => {
                    faults.pretend = Some(part["pretend=".len()..].into())
                }
                _ if part.starts_with("cards=") => {
                    faults.cards =
                        part["cards=".len()..].parse().map_err(|_| format!("{part:?}: no number"))?;
                }
                (_, Some((what, step)), _) => faults.at.push((what, step, AtomicBool::new(false))),
                _ if FORGERIES.iter().any(|(name, _)| *name == part) => {
                    faults.forgery =
                        FORGERIES.into_iter().find(|(name, _)| *name == part).map(|(_, forgery)| forgery);
                }
                (_, _, Some(factor)) if (1.0..=1e6).contains(&factor) => faults.slow = Some(factor),
                _ => {
                    return Err(format!(
                        "{part:?} is no fault: there are nan@STEP, huge@STEP, error@STEP, panic@STEP, lost@STEP, \
                         memory@STEP, hash@STEP, die@STEP, selftest, slow=FACTOR, forge=scaled (stale, random, flipped, bit), cards=N, pretend=wgpu and pretend=cuda"
                    ));
                }
            }
        }
        Ok(Inject(Arc::new(faults)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_injected_once_in_its_step() {
        let inject: Inject = "nan@3, slow=4,pretend=wgpu,error@0,selftest".parse().unwrap();
        assert!(!inject.strikes(What::Nan, 2));
        assert!(inject.strikes(What::Nan, 3) && !inject.strikes(What::Nan, 3));
        assert!(inject.clone().strikes(What::Error, 0) && !inject.strikes(What::Error, 0));
        assert_eq!(
            (inject.slow(), inject.pretend(), inject.fails_selftest()),
            (Some(4.0), Some("wgpu"), true)
        );
        assert!(!Inject::default().strikes(What::Nan, 3));
    }

    #[test]
    fn every_forgery_alters_a_gradient() {
        for (name, _) in FORGERIES {
            let inject: Inject = name.parse().unwrap();
            let forged = |truth: &[f32]| {
                let mut gradient = truth.to_vec();
                inject.after(1, &mut gradient, i64::MAX);
                gradient
            };
            // The first one is what a stale one repeats.
            forged(&[0.5, 0.0, 1.0]);
            let truth = [0.25, 0.5, -2.0];
            assert_ne!(forged(&truth), truth, "{name}");
        }
    }

    #[test]
    fn unknown_fault_is_refused() {
        for text in ["nan", "nan@", "nan@x", "slow=0.5", "slow=inf", "pretend=tpu", "sleep", "forge=white"] {
            let refused = text.parse::<Inject>().unwrap_err();
            assert!(refused.contains(text), "{refused}");
        }
        assert!("".parse::<Inject>().is_ok());
    }
}
