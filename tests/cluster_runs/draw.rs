//! Random numbers of tests that disturb processes, and the variables that repeat or lengthen them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A number from the environment.
pub fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().expect(name))
}

/// `FINETUNE_CHAOS_SEED`, or one from the clock. It is printed, so that a failed test can be repeated.
pub fn seed() -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = setting("FINETUNE_CHAOS_SEED").unwrap_or(clock.as_nanos() as u64 % 1_000_000);
    println!("FINETUNE_CHAOS_SEED={seed}");
    seed
}

/// A sequence of random numbers that the seed alone decides (splitmix64).
pub struct Draw(pub u64);

impl Draw {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from))
    }
}
