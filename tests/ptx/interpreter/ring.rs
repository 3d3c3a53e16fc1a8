//! Asynchronous accesses of the copy engine (TMA) and of wgmma to shared memory, and the mbarriers that order them.
//! Each piece of 16 bytes records the copy that filled it and its readers. Two things are errors: a read by a warp
//! that has not seen the copy's mbarrier complete, and a copy over a piece that is read or may still be read. Clocks
//! detect the latter: each warp counts its releases (arrivals, barriers), and stores the count of every other warp at
//! the last release that it has seen.

use super::block::Block;
use super::ins::{Arg, Op};
use super::memory::Region;
use super::tensor_map::Landing;
use super::warp::{Memories, Warp};
use std::collections::BTreeMap;

/// For every warp of a block, the number of its releases that are seen, plus one.
pub type Clock = Vec<u32>;

pub fn join(into: &mut Clock, other: &Clock) {
    into.resize(into.len().max(other.len()), 0);
    into.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
}

/// One mbarrier.
struct Barrier {
    expected: u32,
    /// Arrivals and bytes that the phase still waits for.
    arrivals: u32,
    bytes: i64,
    /// Completed phases.
    phases: u32,
    /// The clocks that arrivals of this phase release, and those of all completed phases.
    gathered: Clock,
    released: Clock,
    /// The warp that initialized it, and its clock at that time.
    made: (usize, u32),
    /// Whether fence.mbarrier_init followed.
    fenced: bool,
}

/// 16 bytes of shared memory, with the accesses of the copy engine and of wgmma.
#[derive(Clone, Default)]
pub struct Piece {
    /// A copy to it is pending.
    pub under_way: bool,
    /// The mbarrier of the copy that filled it, and the copy's phase.
    pub filled: Option<(u64, u32)>,
    /// By warp: the group of wgmma that reads it without a wait so far, 0 for none; the warp's clock at the end of
    /// the last one.
    pub reading: Vec<u32>,
    pub read: Vec<u32>,
}

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

/// A block's shared memory and its asynchronous state.
pub struct Shared {
    pub region: Region,
    barriers: BTreeMap<u64, Barrier>,
    pub pieces: Vec<Piece>,
    pub landing: Vec<Landing>,
    /// Counts events that may resume a waiting warp.
    pub events: u64,
    /// Registers of every warp's threads.
    registers: Vec<u32>,
    /// The products of every warpgroup: statement and operands, which must be equal in its four warps.
    pub multiplied: BTreeMap<usize, Vec<(usize, [u64; 3])>>,
}

impl Shared {
    pub fn new(bytes: usize, warps: usize, copies: bool) -> Shared {
        let pieces = if copies { bytes.div_ceil(16) } else { 0 };
        let of_warps = vec![0; warps];
        let piece = Piece { reading: of_warps.clone(), read: of_warps, ..Piece::default() };
        Shared {
            region: Region::new(bytes),
            barriers: BTreeMap::new(),
            pieces: vec![piece; pieces],
            landing: Vec::new(),
            events: 0,
            registers: vec![REGISTERS / (32 * warps as u32) / 8 * 8; warps],
            multiplied: BTreeMap::new(),
        }
    }

    /// A direct access by a thread: in memory that the copy engine has filled, the interpreter supports only wgmma.
    pub fn untouched(&self, at: u64, len: usize) -> Result<(), String> {
        if self.pieces.is_empty() {
            return Ok(());
        }
        let (from, to) = ((at & 0xffff_ffff) as usize / 16, ((at & 0xffff_ffff) as usize + len).div_ceil(16));
        let taken = |p: &Piece| p.under_way || p.filled.is_some();
        match self.pieces.get(from..to.min(self.pieces.len())) {
            Some(pieces) if pieces.iter().any(taken) => {
                Err("a thread's own access where the copy engine writes".into())
            }
            _ => Ok(()),
        }
    }

    fn barrier(&mut self, at: u64, warp: usize, clock: &Clock) -> Result<&mut Barrier, String> {
        let barrier = self.barriers.get_mut(&at).ok_or_else(|| format!("there is no mbarrier at {at:#x}"))?;
        let (by, then) = barrier.made;
        if by != warp && clock[by] < then {
            return Err("an mbarrier is used, and nothing orders it after its initialisation".into());
        }
        Ok(barrier)
    }

    /// The phase of a copy with this mbarrier.
    pub fn phase(&mut self, at: u64, warp: usize, clock: &Clock) -> Result<u32, String> {
        let barrier = self.barrier(at, warp, clock)?;
        if !barrier.fenced {
            return Err("an mbarrier goes to the copy engine without fence.mbarrier_init".into());
        }
        Ok(barrier.phases)
    }

    /// Counts the bytes of a completed copy.
    pub fn complete(&mut self, at: u64, bytes: usize) -> Result<(), String> {
        let Some(barrier) = self.barriers.get_mut(&at) else { return Err("an mbarrier is gone".into()) };
        barrier.bytes -= bytes as i64;
        barrier.over();
        self.events += 1;
        Ok(())
    }

    fn arrive(&mut self, at: u64, bytes: u32, warp: usize, clock: &Clock) -> Result<(), String> {
        let barrier = self.barrier(at, warp, clock)?;
        if barrier.arrivals == 0 {
            return Err("more arrivals at an mbarrier than it expects".into());
        }
        barrier.bytes += i64::from(bytes);
        barrier.arrivals -= 1;
        join(&mut barrier.gathered, clock);
        barrier.over();
        self.events += 1;
        Ok(())
    }

    /// setmaxnreg; false if the registers are not free yet.
    fn resize(&mut self, warp: usize, to: u32, more: bool) -> Result<bool, String> {
        let now = self.registers[warp];
        if !to.is_multiple_of(8) || !(24..=256).contains(&to) || (to != now && (to > now) != more) {
            return Err(format!("setmaxnreg from {now} to {to} registers"));
        }
        let others: u32 = self.registers.iter().sum::<u32>() - now;
        if 32 * (others + to) > REGISTERS {
            return Ok(false);
        }
        self.registers[warp] = to;
        self.events += 1;
        Ok(true)
    }
}

impl Barrier {
    /// Completes the phase if all arrivals and all bytes have come.
    fn over(&mut self) {
        if self.arrivals == 0 && self.bytes == 0 {
            self.phases += 1;
            self.arrivals = self.expected;
            let gathered = std::mem::take(&mut self.gathered);
            join(&mut self.released, &gathered);
        }
    }
}

impl Warp {
    /// An opcode of mbarriers, fences or registers; false if the warp must wait.
    pub fn order(
        &mut self,
        op: &Op,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<bool, String> {
        let (me, shared) = (self.number(), &mut *memory.1);
        match op {
            Op::BarrierInit => self.initialise(args, active, (block, shared))?,
            Op::BarrierFence => {
                shared.barriers.values_mut().filter(|b| b.made.0 == me).for_each(|b| b.fenced = true);
            }
            Op::Arrive | Op::ArriveExpect => {
                let at = self.addresses(&args[1], active, block)?;
                let expects = matches!(op, Op::ArriveExpect);
                let bytes = if expects { self.get(&args[2], active, block)? } else { [0; 32] };
                for l in lanes(active) {
                    shared.arrive(at[l], bytes[l] as u32, me, &self.clock)?;
                }
                self.clock[me] += 1;
            }
            Op::TryWait => return self.ask(args, active, (block, shared)),
            Op::Registers(more) => {
                self.together(active)?;
                let Arg::Imm(to) = args[0] else { return Err("a number is expected".into()) };
                return shared.resize(me, to as u32, *more);
            }
            _ => return Err("an operation that orders nothing".into()),
        }
        Ok(true)
    }

    fn initialise(
        &mut self,
        args: &[Arg],
        active: u32,
        (block, shared): (&Block, &mut Shared),
    ) -> Result<(), String> {
        let (at, expected) = (self.addresses(&args[0], active, block)?, self.get(&args[1], active, block)?);
        for l in lanes(active) {
            let (at, expected, me) = (at[l], expected[l] as u32, self.number());
            if !at.is_multiple_of(8) || at as usize + 8 > shared.region.bytes.len() || expected == 0 {
                return Err("an mbarrier out of bounds, not aligned or without arrivals".into());
            }
            let barrier = Barrier {
                expected,
                arrivals: expected,
                bytes: 0,
                phases: 0,
                gathered: Clock::new(),
                released: Clock::new(),
                made: (me, self.clock[me]),
                fenced: false,
            };
            if shared.barriers.insert(at, barrier).is_some() {
                return Err("an mbarrier is initialised twice".into());
            }
        }
        Ok(())
    }

    /// `mbarrier.try_wait.parity p, [mbarrier], parity`
    fn ask(
        &mut self,
        args: &[Arg],
        active: u32,
        (block, shared): (&Block, &mut Shared),
    ) -> Result<bool, String> {
        let me = self.number();
        let (at, parity) = (self.addresses(&args[1], active, block)?, self.get(&args[2], active, block)?);
        let mut out = [0; 32];
        for l in lanes(active) {
            let barrier = shared.barrier(at[l], me, &self.clock)?;
            // The phase before the first counts as complete, with odd parity.
            out[l] = u64::from(u64::from(barrier.phases & 1) != parity[l]);
            if out[l] == 1 {
                let seen = self.seen.entry(at[l]).or_default();
                *seen = barrier.phases.max(*seen);
                join(&mut self.clock, &barrier.released);
            }
        }
        self.set(&args[0], out, active)?;
        // Simulates a timeout: only a kernel that tests again is correct.
        Ok(lanes(active).all(|l| out[l] == 1))
    }
}

fn lanes(active: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |l| active >> l & 1 == 1)
}
