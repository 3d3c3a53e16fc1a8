//! Complete runs in virtual time: the real machine, workers that follow docs/explain/protocol.md, and a network and
//! faults drawn from a seed. Gradients are a few integers, hashed from a microbatch and the parameters, so that a
//! microbatch that is lost, counted twice or computed with other parameters changes the next sum.
//!
//! `FINETUNE_SEEDS=100000` runs that many seeds; `FINETUNE_SEED=17` runs one seed and prints its events.

mod agenda;
mod driver;
mod fate;
mod lines;
mod network;
mod quality;
mod relays;
mod seeds;
mod truth;
mod worker;
mod world;

/// Microseconds of virtual time.
type Micros = u64;

const MILLI: Micros = 1_000;
const SECOND: Micros = 1_000_000;

/// The ends of a connection treat each other as lost after this silence.
const SILENCE: Micros = 3 * SECOND;

/// Random draws from a seed, for one purpose.
pub struct Draws(crate::numeric::rng::Stream);

impl Draws {
    pub fn new(seed: u64, purpose: u64) -> Self {
        Draws(crate::numeric::rng::Stream::new(&[seed, purpose]))
    }

    /// Uniform in `low..high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + u64::from(self.0.below((high - low).max(1) as u32))
    }

    pub fn unit(&mut self) -> f64 {
        f64::from(self.0.unit())
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// An exponential delay of this mean, at most ten times it.
    pub fn around(&mut self, mean: Micros) -> Micros {
        let e = -(1.0 - self.unit()).ln();
        (mean as f64 * e.min(10.0)) as Micros
    }
}
