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

fn one(f: impl Fn(u64) -> u64 + Send + Sync + 'static) -> Op {
    Op::One(Box::new(move |[x]| {
        let mut out = [0; 32];
        out.iter_mut().zip(x).for_each(|(out, x)| *out = f(*x));
        out
    }))
}
fn two(f: impl Fn(u64, u64) -> u64 + Send + Sync + 'static) -> Op {
    Op::Two(Box::new(move |[x, y]| {
        let mut out = [0; 32];
        out.iter_mut().zip(x.iter().zip(y)).for_each(|(out, (x, y))| *out = f(*x, *y));
        out
    }))
}
fn three(f: impl Fn(u64, u64, u64) -> u64 + Send + Sync + 'static) -> Op {
    Op::Three(Box::new(move |[x, y, z]| {
        let mut out = [0; 32];
        out.iter_mut().zip(x.iter().zip(y.iter().zip(z))).for_each(|(out, (x, (y, z)))| *out = f(*x, *y, *z));
        out
    }))
}

/// The operation of an opcode, or None if the interpreter does not know it.
pub fn arithmetic(opcode: &str) -> Option<Op> {
    unary(opcode).or_else(|| integers(opcode)).or_else(|| floats(opcode)).or_else(|| compare(opcode))
}

fn unary(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "mov.u32" | "mov.b32" | "mov.s32" | "mov.f32" => one(|a| w(u(a))),
        "mov.u64" | "mov.b64" | "mov.pred" | "cvta.to.global.u64" | "cvta.param.u64" => one(|a| a),
        "mov.u16" | "mov.b16" => one(|a| a & 0xffff),
        "not.b32" => one(|a| w(!u(a))),
        "neg.s32" => one(|a| w(u(a).wrapping_neg())),
        "neg.f32" => one(|a| b(-f(a))),
        "abs.f32" => one(|a| b(f(a).abs())),
        "ex2.approx.f32" | "ex2.approx.ftz.f32" => one(|a| b(f64::from(f(a)).exp2() as f32)),
        "lg2.approx.f32" | "lg2.approx.ftz.f32" => one(|a| b(f64::from(f(a)).log2() as f32)),
        "rcp.approx.f32" | "rcp.approx.ftz.f32" => one(|a| b((1.0 / f64::from(f(a))) as f32)),
        "rsqrt.approx.f32" | "rsqrt.approx.ftz.f32" => one(|a| b((1.0 / f64::from(f(a)).sqrt()) as f32)),
        "cvt.u64.u32" | "cvt.u32.u16" | "cvt.u32.u64" => one(|a| w(u(a))),
        "cvt.s64.s32" => one(|a| i64::from(i(a)) as u64),
        "cvt.rn.f32.u32" => one(|a| b(u(a) as f32)),
        "cvt.rn.f32.s32" => one(|a| b(i(a) as f32)),
        "cvt.f32.f16" => one(|a| b(half::f16::from_bits(a as u16).to_f32())),
        "cvt.rn.f16.f32" => one(|a| u64::from(half::f16::from_f32(f(a)).to_bits())),
        "cvt.rn.bf16.f32" => one(|a| bf16(f(a))),
        _ => return None,
    })
}

fn integers(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "add.u32" | "add.s32" => two(|x, y| w(u(x).wrapping_add(u(y)))),
        "sub.u32" | "sub.s32" => two(|x, y| w(u(x).wrapping_sub(u(y)))),
        "mul.lo.u32" | "mul.lo.s32" => two(|x, y| w(u(x).wrapping_mul(u(y)))),
        "mul.wide.u32" => two(|x, y| w(u(x)) * w(u(y))),
        "div.u32" => two(|x, y| w(u(x).checked_div(u(y)).unwrap_or(u32::MAX))),
        "rem.u32" => two(|x, y| w(u(x).checked_rem(u(y)).unwrap_or(u(x)))),
        "min.u32" => two(|x, y| w(u(x).min(u(y)))),
        "max.u32" => two(|x, y| w(u(x).max(u(y)))),
        "min.s32" => two(|x, y| w(i(x).min(i(y)) as u32)),
        "max.s32" => two(|x, y| w(i(x).max(i(y)) as u32)),
        "and.b32" => two(|x, y| w(u(x) & u(y))),
        "or.b32" => two(|x, y| w(u(x) | u(y))),
        "xor.b32" => two(|x, y| w(u(x) ^ u(y))),
        "and.pred" => two(|x, y| x & y & 1),
        "or.pred" => two(|x, y| (x | y) & 1),
        "shl.b32" => two(|x, y| w(u(x).checked_shl(u(y)).unwrap_or(0))),
        "shr.u32" | "shr.b32" => two(|x, y| w(u(x).checked_shr(u(y)).unwrap_or(0))),
        "shr.s32" => two(|x, y| w((i(x) >> u(y).min(31)) as u32)),
        "add.u64" | "add.s64" => two(u64::wrapping_add),
        "sub.u64" | "sub.s64" => two(u64::wrapping_sub),
        "mul.lo.u64" => two(u64::wrapping_mul),
        "shl.b64" => two(|x, y| x.checked_shl(u(y)).unwrap_or(0)),
        "mad.lo.u32" | "mad.lo.s32" => three(|x, y, z| w(u(x).wrapping_mul(u(y)).wrapping_add(u(z)))),
        "mad.wide.u32" => three(|x, y, z| (w(u(x)) * w(u(y))).wrapping_add(z)),
        "shf.l.wrap.b32" => three(|lo, hi, by| {
            let both = (w(u(hi)) << 32) | w(u(lo));
            w(((both << (by & 31)) >> 32) as u32)
        }),
        "selp.u32" | "selp.b32" | "selp.f32" | "selp.s32" | "selp.u64" => {
            three(|x, y, p| if p == 1 { x } else { y })
        }
        _ => return None,
    })
}

fn floats(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "add.f32" | "add.rn.f32" => two(|x, y| b(f(x) + f(y))),
        "sub.f32" | "sub.rn.f32" => two(|x, y| b(f(x) - f(y))),
        "mul.f32" | "mul.rn.f32" => two(|x, y| b(f(x) * f(y))),
        "max.f32" => two(|x, y| b(f(x).max(f(y)))),
        "min.f32" => two(|x, y| b(f(x).min(f(y)))),
        "fma.rn.f32" => three(|x, y, z| b(f(x).mul_add(f(y), f(z)))),
        // The first operand is the high half.
        "cvt.rn.bf16x2.f32" => two(|high, low| (bf16(f(high)) << 16) | bf16(f(low))),
        _ => return None,
    })
}

fn compare(opcode: &str) -> Option<Op> {
    Some(match opcode {
        "setp.eq.u32" | "setp.eq.s32" | "setp.eq.b32" => two(|x, y| u64::from(u(x) == u(y))),
        "setp.ne.u32" | "setp.ne.s32" | "setp.ne.b32" => two(|x, y| u64::from(u(x) != u(y))),
        "setp.lt.u32" => two(|x, y| u64::from(u(x) < u(y))),
        "setp.le.u32" => two(|x, y| u64::from(u(x) <= u(y))),
        "setp.gt.u32" => two(|x, y| u64::from(u(x) > u(y))),
        "setp.ge.u32" => two(|x, y| u64::from(u(x) >= u(y))),
        "setp.lt.s32" => two(|x, y| u64::from(i(x) < i(y))),
        "setp.le.s32" => two(|x, y| u64::from(i(x) <= i(y))),
        "setp.gt.s32" => two(|x, y| u64::from(i(x) > i(y))),
        "setp.ge.s32" => two(|x, y| u64::from(i(x) >= i(y))),
        "setp.eq.u64" => two(|x, y| u64::from(x == y)),
        "setp.ne.u64" => two(|x, y| u64::from(x != y)),
        "setp.gt.f32" => two(|x, y| u64::from(f(x) > f(y))),
        "setp.lt.f32" => two(|x, y| u64::from(f(x) < f(y))),
        _ => return None,
    })
}
