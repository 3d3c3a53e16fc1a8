//! Opcodes that compute each lane independently. The approximate functions are computed in f64 and rounded: a real
//! device differs by a few units in the last place more, which the bounds of tests allow.

use super::ins::Op;

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}
fn b(x: f32) -> u64 {
    u64::from(x.to_bits())
}
fn i(x: u64) -> i32 {
    x as u32 as i32
}
fn u(x: u64) -> u32 {
    x as u32
}
fn w(x: u32) -> u64 {
    u64::from(x)
}
fn bf16(x: f32) -> u64 {
    u64::from(half::bf16::from_f32(x).to_bits())
}

/// The operation of an opcode, or None if the interpreter does not know it.
pub fn arithmetic(opcode: &str) -> Option<Op> {
    one(opcode).or_else(|| integers(opcode)).or_else(|| floats(opcode)).or_else(|| compare(opcode))
}

fn one(opcode: &str) -> Option<Op> {
    Some(Op::One(match opcode {
        "mov.u32" | "mov.b32" | "mov.s32" | "mov.f32" => |a| w(u(a)),
        "mov.u64" | "mov.b64" | "mov.pred" | "cvta.to.global.u64" | "cvta.param.u64" => |a| a,
        "mov.u16" | "mov.b16" => |a| a & 0xffff,
        "not.b32" => |a| w(!u(a)),
        "neg.s32" => |a| w(u(a).wrapping_neg()),
        "neg.f32" => |a| b(-f(a)),
        "abs.f32" => |a| b(f(a).abs()),
        "ex2.approx.f32" | "ex2.approx.ftz.f32" => |a| b(f64::from(f(a)).exp2() as f32),
        "lg2.approx.f32" | "lg2.approx.ftz.f32" => |a| b(f64::from(f(a)).log2() as f32),
        "rcp.approx.f32" | "rcp.approx.ftz.f32" => |a| b((1.0 / f64::from(f(a))) as f32),
        "rsqrt.approx.f32" | "rsqrt.approx.ftz.f32" => |a| b((1.0 / f64::from(f(a)).sqrt()) as f32),
        "cvt.u64.u32" | "cvt.u32.u16" | "cvt.u32.u64" => |a| w(u(a)),
        "cvt.s64.s32" => |a| i64::from(i(a)) as u64,
        "cvt.rn.f32.u32" => |a| b(u(a) as f32),
        "cvt.rn.f32.s32" => |a| b(i(a) as f32),
        "cvt.f32.f16" => |a| b(half::f16::from_bits(a as u16).to_f32()),
        "cvt.rn.f16.f32" => |a| u64::from(half::f16::from_f32(f(a)).to_bits()),
        "cvt.rn.bf16.f32" => |a| bf16(f(a)),
        _ => return None,
    }))
}

fn integers(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "add.u32" | "add.s32" => Op::Two(|x, y| w(u(x).wrapping_add(u(y)))),
        "sub.u32" | "sub.s32" => Op::Two(|x, y| w(u(x).wrapping_sub(u(y)))),
        "mul.lo.u32" | "mul.lo.s32" => Op::Two(|x, y| w(u(x).wrapping_mul(u(y)))),
        "mul.wide.u32" => Op::Two(|x, y| w(u(x)) * w(u(y))),
        "div.u32" => Op::Two(|x, y| w(u(x).checked_div(u(y)).unwrap_or(u32::MAX))),
        "rem.u32" => Op::Two(|x, y| w(u(x).checked_rem(u(y)).unwrap_or(u(x)))),
        "min.u32" => Op::Two(|x, y| w(u(x).min(u(y)))),
        "max.u32" => Op::Two(|x, y| w(u(x).max(u(y)))),
        "min.s32" => Op::Two(|x, y| w(i(x).min(i(y)) as u32)),
        "max.s32" => Op::Two(|x, y| w(i(x).max(i(y)) as u32)),
        "and.b32" => Op::Two(|x, y| w(u(x) & u(y))),
        "or.b32" => Op::Two(|x, y| w(u(x) | u(y))),
        "xor.b32" => Op::Two(|x, y| w(u(x) ^ u(y))),
        "and.pred" => Op::Two(|x, y| x & y & 1),
        "or.pred" => Op::Two(|x, y| (x | y) & 1),
        "shl.b32" => Op::Two(|x, y| w(u(x).checked_shl(u(y)).unwrap_or(0))),
        "shr.u32" | "shr.b32" => Op::Two(|x, y| w(u(x).checked_shr(u(y)).unwrap_or(0))),
        "shr.s32" => Op::Two(|x, y| w((i(x) >> u(y).min(31)) as u32)),
        "add.u64" | "add.s64" => Op::Two(u64::wrapping_add),
        "sub.u64" | "sub.s64" => Op::Two(u64::wrapping_sub),
        "mul.lo.u64" => Op::Two(u64::wrapping_mul),
        "shl.b64" => Op::Two(|x, y| x.checked_shl(u(y)).unwrap_or(0)),
        "mad.lo.u32" | "mad.lo.s32" => Op::Three(|x, y, z| w(u(x).wrapping_mul(u(y)).wrapping_add(u(z)))),
        "mad.wide.u32" => Op::Three(|x, y, z| (w(u(x)) * w(u(y))).wrapping_add(z)),
        "shf.l.wrap.b32" => Op::Three(|lo, hi, by| {
            let both = (w(u(hi)) << 32) | w(u(lo));
            w(((both << (by & 31)) >> 32) as u32)
        }),
        "selp.u32" | "selp.b32" | "selp.f32" | "selp.s32" | "selp.u64" => Op::Select,
        _ => return None,
    })
}

fn floats(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "add.f32" | "add.rn.f32" => Op::Two(|x, y| b(f(x) + f(y))),
        "sub.f32" | "sub.rn.f32" => Op::Two(|x, y| b(f(x) - f(y))),
        "mul.f32" | "mul.rn.f32" => Op::Two(|x, y| b(f(x) * f(y))),
        "max.f32" => Op::Two(|x, y| b(f(x).max(f(y)))),
        "min.f32" => Op::Two(|x, y| b(f(x).min(f(y)))),
        "fma.rn.f32" => Op::Three(|x, y, z| b(f(x).mul_add(f(y), f(z)))),
        // The first operand is the high half.
        "cvt.rn.bf16x2.f32" => Op::Two(|high, low| (bf16(f(high)) << 16) | bf16(f(low))),
        _ => return None,
    })
}

fn compare(opcode: &str) -> Option<Op> {
    Some(Op::Compare(match opcode {
        "setp.eq.u32" | "setp.eq.s32" | "setp.eq.b32" => |x, y| u(x) == u(y),
        "setp.ne.u32" | "setp.ne.s32" | "setp.ne.b32" => |x, y| u(x) != u(y),
        "setp.lt.u32" => |x, y| u(x) < u(y),
        "setp.le.u32" => |x, y| u(x) <= u(y),
        "setp.gt.u32" => |x, y| u(x) > u(y),
        "setp.ge.u32" => |x, y| u(x) >= u(y),
        "setp.lt.s32" => |x, y| i(x) < i(y),
        "setp.le.s32" => |x, y| i(x) <= i(y),
        "setp.gt.s32" => |x, y| i(x) > i(y),
        "setp.ge.s32" => |x, y| i(x) >= i(y),
        "setp.eq.u64" => |x, y| x == y,
        "setp.ne.u64" => |x, y| x != y,
        "setp.gt.f32" => |x, y| f(x) > f(y),
        "setp.lt.f32" => |x, y| f(x) < f(y),
        _ => return None,
    }))
}
