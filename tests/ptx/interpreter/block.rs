//! A block: its warps run between barriers one after the other, in an order that the seed decides.

use super::ins::Kernel;
use super::memory::{Global, Region};
use super::warp::{Stop, Warp};
use super::{Shape, Value, shuffle};

/// What all blocks of a launch share.
pub struct Call<'a> {
    pub kernel: &'a Kernel,
    pub shape: Shape,
    pub args: &'a [Value],
    pub launch: u32,
    pub seed: u64,
}

/// One block under way.
pub struct Block<'a> {
    pub call: &'a Call<'a>,
    pub index: u32,
    pub place: [u32; 3],
    warps: Vec<Warp>,
}

/// Statements that a warp may execute: nothing in a test takes more.
const FUEL: u64 = 50_000_000;

impl<'a> Block<'a> {
    pub fn new(call: &'a Call<'a>, index: u32, place: [u32; 3]) -> Self {
        let threads = call.shape.threads;
        let registers = call.kernel.registers.len();
        let warps = (0..threads.div_ceil(32)).map(|w| Warp::new(w, (threads - 32 * w).min(32), registers));
        Block { call, index, place, warps: warps.collect() }
    }

    pub fn run(&mut self, memory: &mut Global, steps: &mut u64) -> Result<(), String> {
        let mut shared = Region::new(self.call.kernel.shared);
        let mut round = 0;
        loop {
            let mut order: Vec<usize> = (0..self.warps.len()).collect();
            let seed = if self.call.seed == 0 { 0 } else { self.call.seed + round + u64::from(self.index) };
            shuffle(&mut order, seed);
            let mut stops = Vec::new();
            for w in order {
                let mut warp = std::mem::take(&mut self.warps[w]);
                let stop = warp.run(self, (memory, &mut shared), FUEL);
                *steps += std::mem::take(&mut warp.steps);
                self.warps[w] = warp;
                stops.push(
                    stop.map_err(|e| format!("{}, {e}, block {:?}", self.call.kernel.name, self.place))?,
                );
            }
            if stops.iter().all(|s| *s == Stop::Ended) {
                return Ok(());
            }
            if stops.contains(&Stop::Ended) {
                return Err(format!("{}: a warp ends while others wait at a barrier", self.call.kernel.name));
            }
            if stops.iter().any(|s| *s != stops[0]) {
                return Err(format!(
                    "{}: warps wait at different barriers: {stops:?}",
                    self.call.kernel.name
                ));
            }
            round += 1;
        }
    }
}
