//! A warp: registers of 32 lanes, statements in lock step, divergence as groups of lanes with the same next statement.

use super::block::Block;
use super::ins::{Arg, Ins, Lanes, Op, Shuffle, Special};
use super::memory::{Global, Who};
use super::ring::{Clock, Shared};
use super::tensor;
use super::wgmma::Group;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};

/// The reason why a warp stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// At the barrier of this statement: its number, and its number of threads.
    Barrier(usize, u64, u32),
    /// Waiting for an mbarrier, or for registers.
    Waits,
    Ended,
}

/// A copy to shared memory without a wait so far.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub lane: u32,
    pub to: u64,
    pub len: usize,
    pub bytes: [u8; 16],
}

#[derive(Default)]
pub struct Warp {
    index: u32,
    /// Lanes by their next statement, lowest first.
    groups: Vec<(usize, u32)>,
    pub registers: Vec<Lanes>,
    pub defined: Vec<u32>,
    barriers: u32,
    warp_barriers: u32,
    part_barriers: u32,
    part: u32,
    /// Copies of the current group, and pending groups.
    pub open: Vec<Copy>,
    pub under_way: Vec<Vec<Copy>>,
    pub steps: u64,
    /// The clocks of other warps that this one has seen, and the phases of mbarriers that it has seen complete.
    pub clock: Clock,
    pub seen: HashMap<u64, u32>,
    /// wgmma: the current group, pending groups, their registers, and the number of issued ones.
    pub filling: Group,
    pub groups_under_way: VecDeque<Group>,
    pub in_flight: Vec<u32>,
    pub multiplied: usize,
    /// Number of wgmma.fence so far; for every register this number at its last use, plus one.
    pub fences: u32,
    pub touched: Vec<Cell<u32>>,
}

/// Global and shared memory.
pub type Memories<'m> = (&'m mut Global, &'m mut Shared);

impl Warp {
    pub fn new(index: u32, lanes: u32, registers: usize, warps: usize) -> Self {
        let all = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
        Warp {
            index,
            groups: vec![(0, all)],
            registers: vec![[0; 32]; registers],
            defined: vec![0; registers],
            clock: (0..warps).map(|w| u32::from(w == index as usize)).collect(),
            in_flight: vec![0; registers],
            touched: vec![Cell::new(0); registers],
            ..Warp::default()
        }
    }

    /// Runs until the next barrier or the end.
    pub fn run(&mut self, block: &Block, mut memory: Memories, fuel: u64) -> Result<Stop, String> {
        let body = &block.call.kernel.body;
        let start = self.steps;
        while let Some(&(at, lanes)) = self.groups.first() {
            if self.groups.get(1).is_some_and(|(other, _)| *other == at) {
                let (_, more) = self.groups.remove(1);
                self.groups[0].1 |= more;
                continue;
            }
            let ins = body.get(at).ok_or("the end of the body is reached without ret")?;
            self.steps += 1;
            if self.steps - start > fuel {
                return Err(format!("line {}: no end in sight", ins.line));
            }
            let active = match ins.guard {
                Some((p, wanted)) => {
                    let mut room = [0; 32];
                    let p = self.look(&Arg::Reg(p), lanes, block, &mut room);
                    let p = p.map_err(|e| address(ins, &e, self.index))?;
                    lanes & (0..32).fold(0, |m, l| m | u32::from((p[l] == 1) == wanted) << l)
                }
                None => lanes,
            };
            self.groups[0].0 = at + 1;
            if let Op::Barrier = ins.op {
                if self.groups.len() > 1 || active != lanes {
                    return Err(address(ins, "a barrier that not all lanes of the warp reach", self.index));
                }
                let [Arg::Imm(number), rest @ ..] = &ins.args[..] else {
                    return Err(address(ins, "a barrier without a number", self.index));
                };
                let threads = match rest {
                    [Arg::Imm(threads)] => *threads as u32,
                    _ => block.call.shape.threads,
                };
                return Ok(Stop::Barrier(at, *number, threads));
            }
            if active != 0 && ins.op.orders() {
                let on = self.order(&ins.op, &ins.args, active, (block, &mut memory));
                if !on.map_err(|e| address(ins, &e, self.index))? {
                    // A wait for registers is repeated here; the kernel itself tests an mbarrier again.
                    self.groups[0].0 = if matches!(ins.op, Op::Registers(_)) { at } else { at + 1 };
                    return Ok(Stop::Waits);
                }
                continue;
            }
            self.step(ins, active, lanes, (block, &mut memory)).map_err(|e| address(ins, &e, self.index))?;
        }
        if self.multiplies() {
            return Err(format!("warp {}: ends with wgmma that was not waited for", self.index));
        }
        if !self.open.is_empty() || self.under_way.iter().any(|g| !g.is_empty()) {
            return Err(format!("warp {}: ends with copies that were not waited for", self.index));
        }
        Ok(Stop::Ended)
    }

    fn step(
        &mut self,
        ins: &Ins,
        active: u32,
        lanes: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        match &ins.op {
            Op::Branch => self.branch(ins, active, lanes),
            Op::Exit => self.leave(active),
            _ if active == 0 => {}
            op @ (Op::Load(..) | Op::LoadConstant(_) | Op::Store(..) | Op::CopyAsync(_)) => {
                self.access(op, &ins.args, active, (block, memory))?;
            }
            Op::CommitGroup => {
                let group = std::mem::take(&mut self.open);
                self.under_way.push(group);
            }
            Op::WaitGroup => self.wait(&ins.args, (block, memory))?,
            Op::CopyBox => self.copy_box(&ins.args, active, (block, memory))?,
            Op::MultiplyAsync(n) => {
                self.multiply_async(*n, &ins.args, active, (ins.line, block, memory))?;
            }
            Op::MultiplyFence | Op::MultiplyCommit | Op::MultiplyWait => {
                self.together(active)?;
                self.group(ins, memory)?;
            }
            Op::WarpBarrier => {
                self.together(active)?;
                self.warp_barriers += 1;
            }
            Op::Shuffle(mode) => {
                self.together(active)?;
                self.shuffle(*mode, &ins.args, active, block)?;
            }
            Op::LoadMatrix(n, transposed) => {
                self.together(active)?;
                let address = self.addresses(&ins.args[1], active, block)?;
                let who = |lane| self.who(block, lane);
                let out = tensor::load_matrix((*n, *transposed), &address, &mut memory.1.region, who)?;
                let Arg::Vector(registers) = &ins.args[0] else {
                    return Err("registers are expected".into());
                };
                registers.iter().zip(out).try_for_each(|(r, v)| self.set(r, v, active))?;
            }
            Op::Multiply => {
                self.together(active)?;
                let operands: Vec<Vec<Lanes>> =
                    ins.args[1..].iter().map(|a| self.vector(a, active, block)).collect::<Result<_, _>>()?;
                let out = tensor::multiply(&operands[0], &operands[1], &operands[2])?;
                let Arg::Vector(registers) = &ins.args[0] else {
                    return Err("registers are expected".into());
                };
                registers.iter().zip(out).try_for_each(|(r, v)| self.set(r, v, active))?;
            }
            Op::Wmma(op) => self.wmma(*op, &ins.args, active, (block, memory))?,
            op => self.compute(op, &ins.args, active, block)?,
        }
        Ok(())
    }

    fn compute(&mut self, op: &Op, args: &[Arg], active: u32, block: &Block) -> Result<(), String> {
        let [mut a, mut b, mut c] = [[0; 32]; 3];
        let look = |i: usize, room| self.look(&args[i], active, block, room);
        let out: Lanes = match op {
            Op::One(f) => f([look(1, &mut a)?]),
            Op::Two(f) => f([look(1, &mut a)?, look(2, &mut b)?]),
            Op::Three(f) => f([look(1, &mut a)?, look(2, &mut b)?, look(3, &mut c)?]),
            Op::Pack(bits) => {
                let parts = self.vector(&args[1], active, block)?;
                let mask = u64::MAX >> (64 - bits);
                std::array::from_fn(|l| parts.iter().rev().fold(0, |v, p| (v << bits) | (p[l] & mask)))
            }
            Op::Unpack(bits) => {
                let v = self.get(&args[1], active, block)?;
                let Arg::Vector(parts) = &args[0] else { return Err("registers are expected".into()) };
                for (i, part) in parts.iter().enumerate() {
                    let mask = u64::MAX >> (64 - bits);
                    self.set(part, std::array::from_fn(|l| v[l] >> (i as u32 * bits) & mask), active)?;
                }
                return Ok(());
            }
            _ => return Err("an operation that computes nothing".into()),
        };
        self.set(&args[0], out, active)
    }

    /// `.sync` requires all 32 lanes.
    pub fn together(&self, active: u32) -> Result<(), String> {
        if active == u32::MAX { Ok(()) } else { Err(format!("not all lanes take part: {active:#034b}")) }
    }

    fn shuffle(&mut self, mode: Shuffle, args: &[Arg], active: u32, block: &Block) -> Result<(), String> {
        let x = self.get(&args[1], active, block)?;
        let by = self.get(&args[2], active, block)?;
        let clamp = self.get(&args[3], active, block)?;
        let all = self.get(&args[4], active, block)?;
        if all[0] as u32 != u32::MAX {
            return Err("a mask that is not 0xffffffff".into());
        }
        let out = std::array::from_fn(|l| {
            let (c, b) = (clamp[l] as usize & 31, by[l] as usize & 31);
            let segment = clamp[l] as usize >> 8 & 31;
            let (low, high) = (l & segment, (l & segment) | (c & !segment));
            let from = match mode {
                Shuffle::Butterfly => l ^ b,
                Shuffle::Index => low | (b & !segment),
                Shuffle::Down => l + b,
                Shuffle::Up => return if l >= b + low { x[l - b] } else { x[l] },
            };
            if from <= high { x[from] } else { x[l] }
        });
        self.set(&args[0], out, active)
    }

    fn branch(&mut self, ins: &Ins, active: u32, lanes: u32) {
        let Some(Arg::Label(to)) = ins.args.first() else { return };
        let next = self.groups[0].0;
        self.groups.remove(0);
        for (at, mask) in [(*to, active), (next, lanes & !active)] {
            if mask != 0 {
                match self.groups.iter_mut().find(|(a, _)| *a == at) {
                    Some((_, m)) => *m |= mask,
                    None => self.groups.push((at, mask)),
                }
            }
        }
        self.groups.sort_unstable();
    }

    fn leave(&mut self, active: u32) {
        self.groups[0].1 &= !active;
        if self.groups[0].1 == 0 {
            self.groups.remove(0);
        }
    }

    pub fn who(&self, block: &Block, lane: u32) -> Who {
        Who {
            launch: block.call.launch,
            block: block.index,
            thread: self.index * 32 + lane,
            barriers: self.barriers,
            warp_barriers: self.warp_barriers,
            part_barriers: self.part_barriers,
            part: self.part,
        }
    }

    /// Of the block.
    pub fn number(&self) -> usize {
        self.index as usize
    }

    /// Resumes after a barrier of the whole block, or of the warps in `part`, which must always be the same ones.
    pub fn passes(&mut self, part: Option<u32>) -> Result<(), String> {
        match part {
            None => self.barriers += 1,
            Some(part) if self.part == 0 || self.part == part => {
                (self.part, self.part_barriers) = (part, self.part_barriers + 1);
            }
            Some(_) => return Err(format!("warp {} meets others than before at a barrier", self.index)),
        }
        Ok(())
    }

    pub fn addresses(&self, arg: &Arg, active: u32, block: &Block) -> Result<Lanes, String> {
        let Arg::Address(base, offset) = arg else { return Err("an address is expected".into()) };
        let mut room = [0; 32];
        let base = self.look(base, active, block, &mut room)?;
        Ok(std::array::from_fn(|l| base[l].wrapping_add(*offset as u64)))
    }

    pub fn vector(&self, arg: &Arg, active: u32, block: &Block) -> Result<Vec<Lanes>, String> {
        let Arg::Vector(parts) = arg else { return Err("a vector is expected".into()) };
        parts.iter().map(|a| self.get(a, active, block)).collect()
    }

    pub fn get(&self, arg: &Arg, active: u32, block: &Block) -> Result<Lanes, String> {
        let mut room = [0; 32];
        self.look(arg, active, block, &mut room).copied()
    }

    /// The values of a register, or those of another operand, in `room`: a copy of all lanes takes as long as an addition.
    fn look<'a>(
        &'a self,
        arg: &Arg,
        active: u32,
        block: &Block,
        room: &'a mut Lanes,
    ) -> Result<&'a Lanes, String> {
        match arg {
            Arg::Reg(r) => {
                let missing = active & !self.defined[*r];
                if missing != 0 {
                    let name = &block.call.kernel.registers[*r];
                    let t = self.index * 32 + missing.trailing_zeros();
                    return Err(format!("thread {t}: register {name} was never set"));
                }
                self.own(*r)?;
                return Ok(&self.registers[*r]);
            }
            Arg::Imm(v) => room.fill(*v),
            Arg::Special(s) => {
                *room = std::array::from_fn(|l| {
                    u64::from(match *s {
                        Special::Thread => self.index * 32 + l as u32,
                        Special::Threads => block.call.shape.threads,
                        Special::Block(i) => block.place[i],
                        Special::Blocks(i) => block.call.shape.grid[i],
                        Special::Lane => l as u32,
                    })
                });
            }
            _ => return Err("a value is expected".into()),
        }
        Ok(room)
    }

    /// Checks that wgmma does not use a register, and records its use.
    fn own(&self, register: usize) -> Result<(), String> {
        self.touched[register].set(self.fences + 1);
        if self.in_flight[register] == 0 {
            Ok(())
        } else {
            Err("a register of a wgmma that was not waited for".into())
        }
    }

    pub fn set(&mut self, arg: &Arg, values: Lanes, active: u32) -> Result<(), String> {
        let Arg::Reg(r) = arg else { return Err("a register is expected".into()) };
        self.own(*r)?;
        self.defined[*r] |= active;
        let old = &mut self.registers[*r];
        if active == u32::MAX {
            *old = values;
        } else {
            (0..32).filter(|l| active >> l & 1 == 1).for_each(|l| old[l] = values[l]);
        }
        Ok(())
    }
}

fn address(ins: &Ins, what: &str, warp: u32) -> String {
    format!("line {}, warp {warp}: {what}", ins.line)
}
