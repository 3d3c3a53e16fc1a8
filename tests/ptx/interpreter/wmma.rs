//! wmma m16n16k16 of sm_70: f16 factors, f32 sums. The assignment of a fragment's numbers to lanes is not specified
//! (PTX manual, section on wmma fragments). Here it is an order that no device has, another one for each matrix and
//! each layout, so that a kernel that relies on one gives wrong numbers. Factors are stored twice, as on Volta.

use super::block::Block;
use super::ins::{Arg, Lanes, Op};
use super::warp::{Memories, Warp};

/// Rows and columns of a fragment.
const SIDE: usize = 16;
/// The alignment of a fragment's base and of its row distance, in bytes: the size of a lane's part.
const ALIGNED: u64 = 32;

/// One instruction; `true` for a matrix stored by columns.
#[derive(Debug, Clone, Copy)]
pub enum Wmma {
    LoadA(bool),
    LoadB(bool),
    Multiply(bool, bool),
    Store(bool),
}

/// The opcodes of this file.
pub fn op(opcode: &str) -> Option<Op> {
    let rest = opcode.strip_prefix("wmma.")?;
    let (what, rest) = rest.split_once(".sync.aligned.")?;
    let columns = |layout: &str| match layout {
        "row" => Some(false),
        "col" => Some(true),
        _ => None,
    };
    let (layout, rest) = rest.split_once('.')?;
    let layout = columns(layout)?;
    Some(Op::Wmma(match (what, rest) {
        ("load.a", "m16n16k16.shared.f16") => Wmma::LoadA(layout),
        ("load.b", "m16n16k16.shared.f16") => Wmma::LoadB(layout),
        ("store.d", "m16n16k16.shared.f32") => Wmma::Store(layout),
        ("mma", rest) => {
            let (right, rest) = rest.split_once('.')?;
            let right = columns(right)?;
            (rest == "m16n16k16.f32.f32").then_some(Wmma::Multiply(layout, right))?
        }
        _ => return None,
    }))
}

/// The row and column of the number in a place; places are ordered by lane, register, half.
fn element(order: (usize, usize), place: usize) -> (usize, usize) {
    let e = (place * order.0 + order.1) % (SIDE * SIDE);
    (e / SIDE, e % SIDE)
}

/// Odd factors, so that each number has exactly one place.
fn order_a(columns: bool) -> (usize, usize) {
    if columns { (93, 7) } else { (77, 31) }
}
fn order_b(columns: bool) -> (usize, usize) {
    if columns { (45, 113) } else { (109, 200) }
}
const SUMS: (usize, usize) = (149, 59);

/// The factors of a fragment; lanes store each twice.
fn factors(registers: &[Lanes], order: (usize, usize)) -> Result<[[f64; SIDE]; SIDE], String> {
    if registers.len() != 8 {
        return Err("a fragment of 8 registers is expected".into());
    }
    let mut bits = [[None; SIDE]; SIDE];
    for place in 0..2 * SIDE * SIDE {
        let (row, col) = element(order, place);
        let half = (registers[place / 2 % 8][place / 16] >> (16 * (place % 2))) as u16;
        if *bits[row][col].get_or_insert(half) != half {
            return Err("lanes hold other numbers than a load gave them".into());
        }
    }
    Ok(bits.map(|row| row.map(|x: Option<u16>| half::f16::from_bits(x.unwrap_or(0)).to_f64())))
}

/// The sums of a fragment, by rows.
fn sums(registers: &[Lanes]) -> Result<[[f32; SIDE]; SIDE], String> {
    if registers.len() != 8 {
        return Err("a fragment of 8 registers is expected".into());
    }
    let mut out = [[0.0; SIDE]; SIDE];
    for place in 0..SIDE * SIDE {
        let (row, col) = element(SUMS, place);
        out[row][col] = f32::from_bits(registers[place % 8][place / 8] as u32);
    }
    Ok(out)
}

impl Warp {
    pub fn wmma(
        &mut self,
        op: Wmma,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        self.together(active)?;
        match op {
            Wmma::LoadA(columns) => {
                self.load_fragment((columns, order_a(columns)), args, active, (block, memory))
            }
            Wmma::LoadB(columns) => {
                self.load_fragment((columns, order_b(columns)), args, active, (block, memory))
            }
            Wmma::Multiply(left, right) => {
                let [_, a, b, c] = args else { return Err("four fragments are expected".into()) };
                let a = factors(&self.vector(a, active, block)?, order_a(left))?;
                let b = factors(&self.vector(b, active, block)?, order_b(right))?;
                let c = sums(&self.vector(c, active, block)?)?;
                let mut out = [[0u64; 32]; 8];
                for place in 0..SIDE * SIDE {
                    let (row, col) = element(SUMS, place);
                    // Products and their sum are exact here and rounded once; a real device truncates in between.
                    let sum: f64 = (0..SIDE).map(|k| a[row][k] * b[k][col]).sum();
                    let sum = (f64::from(c[row][col]) + sum) as f32;
                    out[place % 8][place / 8] = u64::from(sum.to_bits());
                }
                self.fragment(&args[0], &out, active)
            }
            Wmma::Store(columns) => {
                let (at, stride) = self.place(&args[0], args.get(2), (active, 4), block)?;
                let sums = self.vector(&args[1], active, block)?;
                if sums.len() != 8 {
                    return Err("a fragment of 8 registers is expected".into());
                }
                for place in 0..SIDE * SIDE {
                    let (row, col) = element(SUMS, place);
                    let (line, inside) = if columns { (col, row) } else { (row, col) };
                    let (at, lane) = (at + line as u64 * stride + 4 * inside as u64, place / 8);
                    let who = self.who(block, lane as u32);
                    memory.1.untouched(at, 4)?;
                    let bytes = (sums[place % 8][lane] as u32).to_le_bytes();
                    let wrote = memory.1.region.write(at, &bytes, who);
                    wrote.map_err(|e| format!("thread {}: {e}", who.thread))?;
                }
                Ok(())
            }
        }
    }

    fn load_fragment(
        &mut self,
        (columns, order): (bool, (usize, usize)),
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        let (at, stride) = self.place(&args[1], args.get(2), (active, 2), block)?;
        let mut out = [[0u64; 32]; 8];
        for place in 0..2 * SIDE * SIDE {
            let (row, col) = element(order, place);
            let (line, inside) = if columns { (col, row) } else { (row, col) };
            let (at, lane) = (at + line as u64 * stride + 2 * inside as u64, place / 16);
            let who = self.who(block, lane as u32);
            memory.1.untouched(at, 2)?;
            let read = memory.1.region.read(at, 2, who);
            let bits = read.map_err(|e| format!("thread {}: {e}", who.thread))?;
            out[place / 2 % 8][lane] |= (bits as u64) << (16 * (place % 2));
        }
        self.fragment(&args[0], &out, active)
    }

    /// The start of a matrix and the bytes from line to line, which must be equal in all lanes.
    fn place(
        &self,
        at: &Arg,
        stride: Option<&Arg>,
        (active, size): (u32, u64),
        block: &Block,
    ) -> Result<(u64, u64), String> {
        let at = self.addresses(at, active, block)?;
        let stride = self.get(stride.ok_or("a distance of rows is expected")?, active, block)?;
        if at.iter().any(|x| *x != at[0]) || stride.iter().any(|x| *x != stride[0]) {
            return Err("lanes name different matrices".into());
        }
        let stride = size * stride[0];
        if !at[0].is_multiple_of(ALIGNED) || !stride.is_multiple_of(ALIGNED) {
            return Err(format!("a fragment's line at no multiple of {ALIGNED} bytes"));
        }
        Ok((at[0], stride))
    }

    fn fragment(&mut self, to: &Arg, values: &[Lanes; 8], active: u32) -> Result<(), String> {
        match to {
            Arg::Vector(registers) if registers.len() == 8 => {
                registers.iter().zip(values).try_for_each(|(r, v)| self.set(r, *v, active))
            }
            _ => Err("a fragment of 8 registers is expected".into()),
        }
    }
}
