//! What the copy engine (TMA) and wgmma do with shared memory behind the threads' backs, and the mbarriers that order
//! it. A piece of 16 bytes knows which copy filled it and who reads it: what reads before it has seen the copy's
//! mbarrier complete, and a copy over what somebody reads or may still read, are errors. Clocks tell the latter: each
//! warp counts what it releases (arrivals, barriers), and knows how far every other warp's count had come at the last
//! release that it has seen.

use super::block::Block;
use super::ins::{Arg, Op};
use super::memory::Region;
use super::tensor_map::Landing;
use super::warp::{Memories, Warp};
use std::collections::BTreeMap;

/// Of every warp of a block, how many of its releases are seen, and one more.
pub type Clock = Vec<u32>;

pub fn join(into: &mut Clock, other: &Clock) {
    into.resize(into.len().max(other.len()), 0);
    into.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
}

/// One mbarrier.
struct Barrier {
    expected: u32,
    /// Arrivals that the phase still waits for, and bytes.
    arrivals: u32,
    bytes: i64,
    /// Phases that are over.
    phases: u32,
    /// What arrivals of this phase release, and those of all phases that are over.
    gathered: Clock,
    released: Clock,
    /// The warp that initialised it, and its clock then.
    made: (usize, u32),
    /// fence.mbarrier_init came after.
    fenced: bool,
}

/// 16 bytes of shared memory as the copy engine and wgmma know them.
#[derive(Clone, Default)]
pub struct Piece {
    /// A copy is on its way here.
    pub under_way: bool,
    /// The mbarrier of the copy that filled it, and the phase that the copy was part of.
    pub filled: Option<(u64, u32)>,
    /// By warp: the group of wgmma that reads it and is not waited for, 0 for none; its clock when the last was over.
    pub reading: Vec<u32>,
    pub read: Vec<u32>,
}

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

/// A block's shared memory, and what else happens there.
pub struct Shared {
    pub region: Region,
    barriers: BTreeMap<u64, Barrier>,
    pub pieces: Vec<Piece>,
    pub landing: Vec<Landing>,
    /// Counts what may let a warp go on that waits.
    pub events: u64,
    /// Registers of every warp's threads.
    registers: Vec<u32>,
    /// What every warpgroup has multiplied: statement and operands, which its four warps must have in common.
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

    /// A thread's own access: where the copy engine has been, the interpreter knows only wgmma.
    pub fn untouched(&self, at: u64, len: usize) -> Result<(), String> {
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
        let barrier = self.barriers.get_mut(&at).ok_or_else(|| format!("no mbarrier lies at {at:#x}"))?;
        let (by, then) = barrier.made;
        if by != warp && clock[by] < then {
            return Err("an mbarrier is used, and nothing orders it after its initialisation".into());
        }
        Ok(barrier)
    }

    /// The phase that a copy of this mbarrier is part of.
    pub fn phase(&mut self, at: u64, warp: usize, clock: &Clock) -> Result<u32, String> {
        let barrier = self.barrier(at, warp, clock)?;
        if !barrier.fenced {
            return Err("an mbarrier goes to the copy engine without fence.mbarrier_init".into());
        }
        Ok(barrier.phases)
    }

    /// Bytes of a copy have come.
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

    /// setmaxnreg; false where the registers are not free yet.
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
    /// The phase is over where everybody has arrived and all bytes have come.
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
    /// An opcode of mbarriers, fences or registers; false where the warp must wait before it goes on.
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
                return Err("an mbarrier out of bounds, not aligned or of nobody".into());
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
            // The phase before the first counts as over, of odd parity.
            out[l] = u64::from(u64::from(barrier.phases & 1) != parity[l]);
            if out[l] == 1 {
                let seen = self.seen.entry(at[l]).or_default();
                *seen = barrier.phases.max(*seen);
                join(&mut self.clock, &barrier.released);
            }
        }
        self.set(&args[0], out, active)?;
        // As if its time were over: only a kernel that asks again is right.
        Ok(lanes(active).all(|l| out[l] == 1))
    }
}

fn lanes(active: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |l| active >> l & 1 == 1)
}
