//! Memory accesses of a warp, lane by lane: loads, stores and asynchronous copies.

use super::block::Block;
use super::ins::{Arg, Op, Space};
use super::memory::{Region, Who};
use super::warp::{Copy, Memories, Warp};

impl Warp {
    pub fn access(
        &mut self,
        op: &Op,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        match *op {
            Op::Load(Space::Param, bytes) => {
                let Arg::Param(i) = args[1] else { return Err("a parameter is expected".into()) };
                let value = block.call.args[i];
                if value.bytes != bytes {
                    return Err(format!("a parameter of {} bytes is read as {bytes}", value.bytes));
                }
                self.set(&args[0], [value.bits; 32], active)
            }
            Op::Load(..) | Op::LoadConstant(_) => self.load(op, args, active, (block, memory)),
            Op::Store(space, bytes) => {
                let address = self.addresses(&args[0], active, block)?;
                let values = match &args[1] {
                    Arg::Vector(_) => self.vector(&args[1], active, block)?,
                    x => vec![self.get(x, active, block)?],
                };
                let (first, len) = (self.who(block, 0), bytes * values.len());
                for lane in (0..32).filter(|l| active >> l & 1 == 1) {
                    let mut all = 0u128;
                    for v in values.iter().rev() {
                        all = all << (8 * bytes)
                            | u128::from(v[lane as usize] & (u64::MAX >> (64 - 8 * bytes)));
                    }
                    let all = all.to_le_bytes();
                    let who = Who { thread: first.thread + lane, ..first };
                    let (region, at) = pick(memory, space, address[lane as usize], len)?;
                    region.write(at, &all[..len], who).map_err(|e| thread(who, &e))?;
                }
                Ok(())
            }
            _ => self.copy_async(op, args, active, (block, memory)),
        }
    }

    fn load(
        &mut self,
        op: &Op,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        let (space, bytes, constant) = match *op {
            Op::Load(space, bytes) => (space, bytes, false),
            Op::LoadConstant(bytes) => (Space::Global, bytes, true),
            _ => return Err("a load is expected".into()),
        };
        let address = self.addresses(&args[1], active, block)?;
        let parts = if let Arg::Vector(v) = &args[0] { v.len() } else { 1 };
        let mut out = vec![[0u64; 32]; parts];
        let first = self.who(block, 0);
        let (mut value, mut last, mut times) = (0, None, 0);
        for lane in (0..32).filter(|l| active >> l & 1 == 1) {
            let from = address[lane as usize];
            times = if last == Some(from) { times + 1 } else { 1 };
            last = Some(from);
            // After two lanes, the same read by others finds what they found and changes no record.
            if times <= 2 {
                let who = Who { thread: first.thread + lane, ..first };
                let (region, at) = pick(memory, space, from, bytes * parts)?;
                let mut read = region.read(at, bytes * parts, who);
                if constant && read.is_ok() {
                    read = region.constant(at, bytes * parts, who).and(read);
                }
                value = read.map_err(|e| thread(who, &e))?;
            }
            let mut read = value;
            for out in &mut out {
                out[lane as usize] = read as u64 & (u64::MAX >> (64 - 8 * bytes));
                read >>= 8 * bytes;
            }
        }
        match &args[0] {
            Arg::Vector(v) => v.iter().zip(out).try_for_each(|(r, x)| self.set(r, x, active)),
            r => self.set(r, out[0], active),
        }
    }

    /// `cp.async [to], [from], bytes, valid bytes`: the rest is zero.
    fn copy_async(
        &mut self,
        op: &Op,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        let to = self.addresses(&args[0], active, block)?;
        let from = self.addresses(&args[1], active, block)?;
        let len = self.get(&args[2], active, block)?[0] as usize;
        let real = match args.get(3) {
            Some(a) => self.get(a, active, block)?,
            None => [len as u64; 32],
        };
        if matches!(op, Op::CopyAsync(n) if *n == 16 && len != 16) {
            return Err("cp.async.cg copies 16 bytes".into());
        }
        for lane in (0..32).filter(|l| active >> l & 1 == 1) {
            let (who, l) = (self.who(block, lane), lane as usize);
            let real = real[l] as u32 as usize;
            if real > len || !from[l].is_multiple_of(len as u64) {
                return Err(thread(who, "a source that is too long or not aligned"));
            }
            let mut bytes = [0; 16];
            for part in (0..real).step_by(2) {
                let (region, at) = memory.0.find(from[l] + part as u64)?;
                let two = region.read(at, 2.min(real - part), who).map_err(|e| thread(who, &e))?;
                bytes[part..real.min(part + 2)].copy_from_slice(&two.to_le_bytes()[..2.min(real - part)]);
            }
            memory.1.region.announce(to[l], len, who).map_err(|e| thread(who, &e))?;
            self.open.push(Copy { lane, to: to[l], len, bytes });
        }
        Ok(())
    }

    pub fn wait(&mut self, args: &[Arg], (block, memory): (&Block, &mut Memories)) -> Result<(), String> {
        let Some(Arg::Imm(left)) = args.first() else { return Err("a number is expected".into()) };
        while self.under_way.len() as u64 > *left {
            for copy in self.under_way.remove(0) {
                let who = self.who(block, copy.lane);
                memory.1.region.write(copy.to, &copy.bytes[..copy.len], who).map_err(|e| thread(who, &e))?;
            }
        }
        Ok(())
    }
}

fn pick<'m>(
    memory: &'m mut Memories,
    space: Space,
    at: u64,
    len: usize,
) -> Result<(&'m mut Region, u64), String> {
    match space {
        Space::Shared => {
            memory.1.untouched(at, len)?;
            Ok((&mut memory.1.region, at & 0xffff_ffff))
        }
        _ => memory.0.find(at),
    }
}

fn thread(who: Who, what: &str) -> String {
    format!("thread {}: {what}", who.thread)
}
