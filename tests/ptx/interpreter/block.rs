//! A block: its warps run one after the other, each until it must wait, in an order by the seed. Copies of the copy
//! engine complete as soon as possible, or, with a seed, when no warp can continue without one.

use super::ins::Kernel;
use super::memory::Global;
use super::ring::{Shared, join};
use super::tensor_map::TensorMap;
use super::warp::{Stop, Warp};
use super::{Shape, Value, shuffle};
use std::collections::BTreeSet;

/// State of a launch, for all blocks.
pub struct Call<'a> {
    pub kernel: &'a Kernel,
    pub shape: Shape,
    pub args: &'a [Value],
    pub maps: &'a [TensorMap],
    pub launch: u32,
    pub seed: u64,
}

/// One running block.
pub struct Block<'a> {
    pub call: &'a Call<'a>,
    pub index: u32,
    pub place: [u32; 3],
    warps: Vec<Warp>,
    /// The reason why each warp stopped.
    stops: Vec<Stop>,
}

/// Limit of statements that a warp executes: no test needs more.
const FUEL: u64 = 50_000_000;

impl<'a> Block<'a> {
    pub fn new(call: &'a Call<'a>, index: u32, place: [u32; 3]) -> Self {
        let threads = call.shape.threads;
        let (registers, count) = (call.kernel.registers.len(), threads.div_ceil(32));
        let warp = |w| Warp::new(w, (threads - 32 * w).min(32), registers, count as usize);
        let warps: Vec<Warp> = (0..count).map(warp).collect();
        let stops = vec![Stop::Waits; warps.len()];
        Block { call, index, place, warps, stops }
    }

    pub fn run(&mut self, memory: &mut Global, steps: &mut u64) -> Result<(), String> {
        let Call { kernel, shape, seed, .. } = *self.call;
        let mut shared = Shared::new(kernel.shared + shape.shared, self.warps.len(), kernel.dynamic);
        let (name, mut round) = (&kernel.name, 0);
        loop {
            let mut order: Vec<usize> =
                (0..self.warps.len()).filter(|&w| self.stops[w] == Stop::Waits).collect();
            let key = if seed == 0 { 0 } else { seed + round + u64::from(self.index) };
            shuffle(&mut order, key);
            let before = (shared.events, self.stops.clone());
            for w in order {
                let mut warp = std::mem::take(&mut self.warps[w]);
                let stop = warp.run(self, (memory, &mut shared), FUEL);
                *steps += std::mem::take(&mut warp.steps);
                self.warps[w] = warp;
                self.stops[w] = stop.map_err(|e| format!("{name}, {e}, block {:?}", self.place))?;
                while seed == 0 && !shared.landing.is_empty() {
                    shared.land(0)?;
                }
            }
            if self.stops.iter().all(|s| *s == Stop::Ended) {
                return self.ends(&shared);
            }
            let released = self.barriers().map_err(|e| format!("{name}: {e}"))?;
            if released || before != (shared.events, self.stops.clone()) {
                round += 1;
                continue;
            }
            let Some(last) = shared.landing.len().checked_sub(1) else {
                return Err(format!("{name}: no warp can go on: {:?}", self.stops));
            };
            shared.land(if key.is_multiple_of(2) { 0 } else { last })?;
            round += 1;
        }
    }

    /// Resumes the warps whose barrier is complete; returns whether there were any.
    fn barriers(&mut self) -> Result<bool, String> {
        let waiting = |s: &Stop| if let Stop::Barrier(_, number, _) = *s { Some(number) } else { None };
        let numbers: BTreeSet<u64> = self.stops.iter().filter_map(waiting).collect();
        let mut any = false;
        for number in numbers {
            let here: Vec<usize> =
                (0..self.stops.len()).filter(|&w| waiting(&self.stops[w]) == Some(number)).collect();
            let Stop::Barrier(_, _, threads) = self.stops[here[0]] else { continue };
            let whole = threads == self.call.shape.threads;
            if whole && self.stops.contains(&Stop::Ended) {
                return Err("a warp ends while others wait at a barrier".into());
            }
            if here.iter().any(|&w| self.stops[w] != self.stops[here[0]]) {
                return Err(format!("warps wait at different barriers: {:?}", self.stops));
            }
            if here.len() as u32 != threads.div_ceil(32) {
                continue;
            }
            let part = here.iter().fold(0, |m, w| m | 1 << w);
            let mut all = Vec::new();
            here.iter().for_each(|&w| join(&mut all, &self.warps[w].clock));
            for &w in &here {
                self.warps[w].clock.clone_from(&all);
                self.warps[w].clock[w] += 1;
                self.warps[w].passes((!whole).then_some(part))?;
                self.stops[w] = Stop::Waits;
            }
            any = true;
        }
        Ok(any)
    }

    /// Checks at the end of all warps.
    fn ends(&self, shared: &Shared) -> Result<(), String> {
        let name = &self.call.kernel.name;
        if !shared.landing.is_empty() {
            return Err(format!("{name}: a copy is under way when the block ends"));
        }
        let alike = |group: &[Warp]| group.iter().all(|w| w.multiplied == group[0].multiplied);
        if !self.warps.chunks(4).all(alike) {
            return Err(format!("{name}: the warps of a warpgroup do not multiply as often"));
        }
        Ok(())
    }
}
