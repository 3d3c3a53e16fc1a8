//! wgmma: 64 x N sums of a warpgroup, with operands in shared memory by descriptors with the 128-byte swizzle, or the
//! left one in registers (PTX manual, sections on the matrix descriptor, on strides and on the fragments of
//! m64nNk16). A warp computes its 16 rows when it issues; until the wait, registers and operands belong to the tensor
//! cores.

use super::block::Block;
use super::ins::{Arg, Ins, Lanes, Op};
use super::tensor_map::swizzled;
use super::warp::{Memories, Warp};

/// Terms of one step.
const K: usize = 16;

/// A pending group: pieces that it reads, registers that it writes, by wgmma, and registers that it reads.
#[derive(Default)]
pub struct Group {
    number: u32,
    pieces: Vec<usize>,
    sums: Vec<Vec<usize>>,
    left: Vec<usize>,
}

/// The place of an operand.
struct Descriptor {
    start: u64,
    /// Bytes from 64 columns to the next, if K is not contiguous.
    leading: u64,
    /// Bytes from 8 rows of 128 bytes to the next.
    stride: u64,
}

impl Descriptor {
    fn of(bits: u64) -> Result<Descriptor, String> {
        let field = |from: u32| (bits >> from & 0x3fff) << 4;
        let known = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62;
        if bits & !known != 0 || bits >> 62 != 1 {
            return Err(format!("a descriptor other than of 128 bytes' swizzle: {bits:#x}"));
        }
        let start = field(0);
        if start >> 7 & 7 != 0 {
            return Err(
                "a descriptor that begins within the swizzle's 1024 bytes, and does not say so".into()
            );
        }
        Ok(Descriptor { start, leading: field(16), stride: field(32) })
    }

    /// Number `mn` of the outputs, term `k`.
    fn at(&self, mn: usize, k: usize, across: bool) -> u64 {
        let (mn, k) = (mn as u64, k as u64);
        swizzled(
            self.start
                + match across {
                    false => mn / 8 * self.stride + mn % 8 * 128 + 2 * k,
                    true => mn / 64 * self.leading + mn % 64 * 2 + k / 8 * self.stride + k % 8 * 128,
                },
        )
    }
}

impl Warp {
    /// `wgmma.mma_async ... d, a, b, keeps, 1, 1, 0, across`, without the 0 if a is in registers.
    pub fn multiply_async(
        &mut self,
        n: usize,
        args: &[Arg],
        active: u32,
        (at, block, memory): (usize, &Block, &mut Memories),
    ) -> Result<(), String> {
        self.together(active)?;
        let one =
            |x: Lanes| if x.iter().all(|v| *v == x[0]) { Ok(x[0]) } else { Err("a warp's operands differ") };
        let in_registers = matches!(args[1], Arg::Vector(_));
        let mut operands = [0; 3];
        for (x, arg) in operands.iter_mut().zip(&args[1..4]).skip(usize::from(in_registers)) {
            *x = one(self.get(arg, active, block)?)?;
        }
        let [a, b, keeps] = operands;
        let across = match (in_registers, &args[4..]) {
            (true, [Arg::Imm(1), Arg::Imm(1), Arg::Imm(across)])
            | (false, [Arg::Imm(1), Arg::Imm(1), Arg::Imm(0), Arg::Imm(across)]) => *across == 1,
            _ => return Err("wgmma with a sign or with a transposed".into()),
        };
        self.like_the_others(at, operands, memory)?;
        let sums = self.sums(n, &args[0])?;
        let fa = match in_registers {
            true => self.left(&args[1])?,
            false => self.rows(&Descriptor::of(a)?, memory)?,
        };
        let fb = self.right(n, (&Descriptor::of(b)?, across), memory)?;
        for (i, &r) in sums.iter().enumerate() {
            let old = self.registers[r];
            self.registers[r] = std::array::from_fn(|l| {
                let (row, col) = (l / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (l % 4) + i % 2);
                let terms = fa[row * K..][..K].iter().zip(&fb[col * K..][..K]);
                let start = if keeps == 1 { f64::from(f32::from_bits(old[l] as u32)) } else { 0.0 };
                u64::from(((start + terms.map(|(a, b)| a * b).sum::<f64>()) as f32).to_bits())
            });
            if keeps == 1 && self.defined[r] != u32::MAX {
                return Err("sums that were never set".into());
            }
            self.defined[r] = u32::MAX;
            self.in_flight[r] += 1;
        }
        self.filling.sums.push(sums);
        Ok(())
    }

    /// The warp's 16 rows of the left operand.
    fn rows(&mut self, a: &Descriptor, memory: &mut Memories) -> Result<Vec<f64>, String> {
        let mut out = vec![0.0; 16 * K];
        for (i, k) in (0..16).flat_map(|i| [(i, 0), (i, 8)]) {
            let eight = self.operand(a.at(16 * (self.number() % 4) + i, k, false), memory)?;
            out[i * K + k..][..8].copy_from_slice(&eight);
        }
        Ok(out)
    }

    /// The same in registers, two numbers each: rows 0 and 8, then both rows eight terms further.
    fn left(&mut self, a: &Arg) -> Result<Vec<f64>, String> {
        let registers = named(a)?;
        if registers.len() != 4 {
            return Err(format!("{} registers of 64 x 16 numbers", registers.len()));
        }
        let groups = || self.groups_under_way.iter().chain([&self.filling]);
        for &r in &registers {
            if self.defined[r] != u32::MAX {
                return Err("a left operand that was never set".into());
            }
            if groups().flat_map(|g| &g.sums).any(|sums| sums.contains(&r)) {
                return Err("a register of a wgmma that was not waited for".into());
            }
        }
        self.fenced(&registers)?;
        let mut out = vec![0.0; 16 * K];
        for (i, &r) in registers.iter().enumerate() {
            for (l, both) in self.registers[r].iter().enumerate() {
                let at = (l / 4 + 8 * (i % 2)) * K + 8 * (i / 2) + 2 * (l % 4);
                for (c, bits) in [*both as u16, (*both >> 16) as u16].into_iter().enumerate() {
                    out[at + c] = f64::from(half::bf16::from_bits(bits).to_f32());
                }
            }
            self.in_flight[r] += 1;
        }
        self.filling.left.extend(registers);
        Ok(out)
    }

    /// The right operand by its outputs.
    fn right(
        &mut self,
        n: usize,
        (b, across): (&Descriptor, bool),
        memory: &mut Memories,
    ) -> Result<Vec<f64>, String> {
        let mut out = vec![0.0; n * K];
        for piece in 0..n * K / 8 {
            // Eight contiguous numbers: terms of one output, or outputs of one term.
            let (mn, k) = match across {
                true => (piece % (n / 8) * 8, piece / (n / 8)),
                false => (piece / 2, piece % 2 * 8),
            };
            let eight = self.operand(b.at(mn, k, across), memory)?;
            let apart = if across { K } else { 1 };
            eight.iter().enumerate().for_each(|(i, x)| out[mn * K + k + i * apart] = *x);
        }
        Ok(out)
    }

    /// The registers of the sums. Pending sums must have the same registers in the same order, or none of them.
    fn sums(&self, n: usize, d: &Arg) -> Result<Vec<usize>, String> {
        let registers = named(d)?;
        if registers.len() != n / 2 {
            return Err(format!("{} registers of 64 x {n} sums", registers.len()));
        }
        for group in self.groups_under_way.iter().chain([&self.filling]) {
            let shared = |other: &[usize]| other.iter().any(|r| registers.contains(r));
            if shared(&group.left) || group.sums.iter().any(|s| *s != registers && shared(s)) {
                return Err("a register of another wgmma that was not waited for".into());
            }
        }
        self.fenced(&registers)?;
        Ok(registers)
    }

    /// Checks that a fence separates wgmma from earlier uses of its registers.
    fn fenced(&self, registers: &[usize]) -> Result<(), String> {
        if self.fences == 0 || registers.iter().any(|r| self.touched[*r].get() > self.fences) {
            return Err("wgmma without wgmma.fence after what was done with its registers".into());
        }
        Ok(())
    }

    /// Checks that the four warps of a warpgroup multiply the same operands.
    fn like_the_others(
        &mut self,
        at: usize,
        operands: [u64; 3],
        memory: &mut Memories,
    ) -> Result<(), String> {
        let all = memory.1.multiplied.entry(self.number() / 4).or_default();
        match all.get(self.multiplied) {
            None => all.push((at, operands)),
            Some(other) if *other == (at, operands) => {}
            Some(_) => return Err("the warps of a warpgroup do not multiply alike".into()),
        }
        self.multiplied += 1;
        Ok(())
    }

    /// Eight bf16 numbers of an operand; the warp must have seen that their copy is complete.
    fn operand(&mut self, at: u64, memory: &mut Memories) -> Result<[f64; 8], String> {
        if !at.is_multiple_of(16) {
            return Err("an operand that does not begin at a multiple of 16 bytes".into());
        }
        let (me, shared) = (self.number(), &mut *memory.1);
        let piece = shared.pieces.get_mut(at as usize / 16).ok_or("an operand beyond shared memory")?;
        match piece.filled {
            _ if piece.under_way => return Err(format!("byte {at} is multiplied while it is copied")),
            None => return Err(format!("byte {at} is multiplied, and no copy brought it")),
            Some((barrier, phase)) if self.seen.get(&barrier).is_none_or(|seen| *seen <= phase) => {
                return Err(format!("byte {at} is multiplied before its mbarrier is waited for"));
            }
            Some(_) => {}
        }
        if piece.reading[me] != self.filling.number + 1 {
            piece.reading[me] = self.filling.number + 1;
            self.filling.pieces.push(at as usize / 16);
        }
        let bytes = &shared.region.bytes[at as usize..][..16];
        let number =
            |i: usize| f64::from(half::bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32());
        Ok(std::array::from_fn(number))
    }

    /// Fence, commit and wait of wgmma, executed equally by all four warps of a warpgroup.
    pub fn group(&mut self, ins: &Ins, memory: &mut Memories) -> Result<(), String> {
        self.like_the_others(ins.line, [0; 3], memory)?;
        match ins.op {
            Op::MultiplyFence => self.fences += 1,
            Op::MultiplyCommit => self.commit(),
            _ => self.wait_groups(&ins.args, memory)?,
        }
        Ok(())
    }

    fn commit(&mut self) {
        let number = self.filling.number + 1;
        let group = std::mem::replace(&mut self.filling, Group { number, ..Group::default() });
        self.groups_under_way.push_back(group);
    }

    /// Waits until at most the given number of groups is pending.
    fn wait_groups(&mut self, args: &[Arg], memory: &mut Memories) -> Result<(), String> {
        let Some(Arg::Imm(left)) = args.first() else { return Err("a number is expected".into()) };
        let me = self.number();
        while self.groups_under_way.len() as u64 > *left {
            let Some(group) = self.groups_under_way.pop_front() else { break };
            group.sums.iter().flatten().chain(&group.left).for_each(|r| self.in_flight[*r] -= 1);
            for number in group.pieces {
                let piece = &mut memory.1.pieces[number];
                if piece.reading[me] == group.number + 1 {
                    (piece.reading[me], piece.read[me]) = (0, self.clock[me]);
                }
            }
        }
        Ok(())
    }

    /// Checks that no product is pending when a warp ends.
    pub fn multiplies(&self) -> bool {
        !self.groups_under_way.is_empty() || !self.filling.sums.is_empty()
    }
}

fn named(registers: &Arg) -> Result<Vec<usize>, String> {
    let Arg::Vector(all) = registers else { return Err("registers are expected".into()) };
    all.iter()
        .map(|x| if let Arg::Reg(r) = x { Ok(*r) } else { Err("a register is expected".into()) })
        .collect()
}
