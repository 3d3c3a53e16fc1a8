// f32 arithmetic whose bits are those of the CPU on every device (docs/explain/numerics.md, "Portable"). A kernel's Params
// end with `zero`, which is 0: no driver knows that, so that it cannot fuse or reorder what passes through settled().
// FUSED: fma of the device rounds once. Without, it is made of integers, for software drivers, which round twice.
fn settled(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ p.zero);
}

#if FUSED
// a * b + c, rounded once.
fn mad(a: f32, b: f32, c: f32) -> f32 {
    return fma(a, b, c);
}
#else
// Numbers of 64 bits: high word, low word.
fn left_by(x: vec2<u32>, n: u32) -> vec2<u32> {
    let low = x.y << (n & 31u);
    let carried = select(x.y >> (32u - (n & 31u)), 0u, (n & 31u) == 0u);
    return select(vec2<u32>((x.x << (n & 31u)) | carried, low), vec2<u32>(low, 0u), n >= 32u);
}

// The last bit is set if a bit that was lost was set.
fn right_by(x: vec2<u32>, n: u32) -> vec2<u32> {
    if (n >= 64u) {
        return vec2<u32>(0u, select(0u, 1u, (x.x | x.y) != 0u));
    }
    let s = n & 31u;
    let carried = select(x.x << (32u - s), 0u, s == 0u);
    let below = (1u << s) - 1u;
    let near = vec2<u32>(x.x >> s, (x.y >> s) | carried | select(0u, 1u, (x.y & below) != 0u));
    let far = vec2<u32>(0u, (x.x >> s) | select(0u, 1u, ((x.x & below) | x.y) != 0u));
    return select(near, far, n >= 32u);
}

fn plus(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    let low = x.y + y.y;
    return vec2<u32>(x.x + y.x + select(0u, 1u, low < x.y), low);
}

fn minus(x: vec2<u32>, y: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(x.x - y.x - select(0u, 1u, x.y < y.y), x.y - y.y);
}

// a * b + c, rounded once, but for subnormal factors and summands. Where one is 0 or not finite, rounding twice loses nothing.
fn mad(a: f32, b: f32, c: f32) -> f32 {
    let u = bitcast<u32>(a);
    let v = bitcast<u32>(b);
    let w = bitcast<u32>(c);
    let ea = (u >> 23u) & 255u;
    let eb = (v >> 23u) & 255u;
    let ec = (w >> 23u) & 255u;
    if (ea == 0u || eb == 0u || ec == 0u || ea == 255u || eb == 255u || ec == 255u) {
        return settled(settled(a * b) + c);
    }
    // The product has its first bit at 60 or 61, the summand at 61; `e` is the exponent of bit 0.
    let ma = (u & 0x7fffffu) | 0x800000u;
    let mb = (v & 0x7fffffu) | 0x800000u;
    let middle = (ma >> 12u) * (mb & 4095u) + (ma & 4095u) * (mb >> 12u);
    let outer = vec2<u32>(((ma >> 12u) * (mb >> 12u)) >> 8u, ((ma >> 12u) * (mb >> 12u)) << 24u);
    let ab = left_by(plus(plus(outer, left_by(vec2<u32>(0u, middle), 12u)), vec2<u32>(0u, (ma & 4095u) * (mb & 4095u))), 14u);
    let m = left_by(vec2<u32>(0u, (w & 0x7fffffu) | 0x800000u), 38u);
    let e_ab = i32(ea + eb) - 314;
    let e_c = i32(ec) - 188;
    let e = max(e_ab, e_c);
    let x = right_by(ab, u32(e - e_ab));
    let y = right_by(m, u32(e - e_c));
    let sign_ab = (u ^ v) & 0x80000000u;
    let sign_c = w & 0x80000000u;
    let less = x.x < y.x || (x.x == y.x && x.y < y.y);
    var sum = plus(x, y);
    if (sign_ab != sign_c) {
        sum = select(minus(x, y), minus(y, x), less);
    }
    let sign = select(sign_ab, sign_c, less);
    if ((sum.x | sum.y) == 0u) {
        return 0.0;
    }
    let first = select(firstLeadingBit(sum.y), 32u + firstLeadingBit(sum.x), sum.x != 0u);
    sum = left_by(sum, 63u - first);
    let power = e + i32(first) + 127;
    // 24 bits, or fewer of a number that is not normal; the rest decides, half to even.
    let cut = 40u + u32(clamp(1 - power, 0, 24));
    let kept = right_by(sum, cut - 2u).y;
    let up = (kept & 2u) != 0u && (kept & 5u) != 0u;
    let magnitude = (kept >> 2u) + select(0u, 1u, up);
    let bits = magnitude + (u32(max(power, 1)) - 1u) * 0x800000u;
    return bitcast<f32>(select(bits, 0x7f800000u, power >= 255 || bits > 0x7f800000u) | sign);
}
#end

// a / b, rounded once: a quotient, and the division of its remainder (Markstein 1990), of numbers that were scaled by powers of
// two so that they and the quotient are near 1.
fn divided(a: f32, b: f32) -> f32 {
    let q = settled(a / b);
#if FUSED
    let u = bitcast<u32>(a);
    let v = bitcast<u32>(b);
    let ea = (u >> 23u) & 255u;
    let eb = (v >> 23u) & 255u;
    // Zeros, subnormal and infinite numbers are the device's.
    if (ea == 0u || eb == 0u || ea == 255u || eb == 255u) {
        return q;
    }
    let x = bitcast<f32>((u & 0x807fffffu) | 0x3f800000u);
    let y = bitcast<f32>((v & 0x807fffffu) | 0x3f800000u);
    let first = settled(1.0 / y);
    let by = fma(fma(-y, first, 1.0), first, first);
    let near = settled(x * by);
    let nearer = fma(fma(-y, near, x), by, near);
    let exact = fma(fma(-y, nearer, x), by, nearer);
    // In two steps, because a power may be beyond those that f32 has.
    let power = i32(ea) - i32(eb);
    let half = power / 2;
    return settled(exact * bitcast<f32>(u32(half + 127) << 23u)) * bitcast<f32>(u32(power - half + 127) << 23u);
#else
    return q;
#end
}

// The square root of a number between 1e-30 and 1e30, rounded once.
fn root(x: f32) -> f32 {
    let s = settled(sqrt(x));
#if FUSED
    let half = settled(0.5 / s);
    let near = fma(fma(-s, s, x), half, s);
    return select(s, fma(fma(-near, near, x), half, near), x > 1e-30 && x < 1e30);
#else
    return s;
#end
}

// e^x as on the CPU (kernels/src/backend/cpu/runtime/math.rs).
fn e_to(x: f32) -> f32 {
    var c = select(x, 88.72284, x > 88.72284);
    c = select(c, -87.33655, c < -87.33655);
    let shifted = settled(mad(c, 1.44269504, 12582912.0));
    let n = bitcast<i32>(shifted) - 0x4b400000;
    var r = mad(f32(n), -0.6933594, c);
    r = mad(f32(n), 2.1219444e-4, r);
    var y = mad(1.9875692e-4, r, 1.3982e-3);
    y = mad(y, r, 8.333452e-3);
    y = mad(y, r, 4.1665796e-2);
    y = mad(y, r, 1.6666665e-1);
    y = mad(y, r, 0.5);
    y = mad(y, settled(r * r), r) + 1.0;
    let half = n >> 1u;
    y = settled(y * bitcast<f32>(u32(half + 127) << 23u)) * bitcast<f32>(u32(n - half + 127) << 23u);
    // Infinity is not a constant of WGSL.
    y = select(y, bitcast<f32>(0x7f800000u ^ p.zero), x > 88.72284);
    return select(y, 0.0, x < -87.33655);
}

fn sigmoid(x: f32) -> f32 {
    return divided(1.0, 1.0 + e_to(-x));
}

// silu(x) and its slope.
fn silu(x: f32) -> vec2<f32> {
    let s = sigmoid(x);
    let y = settled(x * s);
    return vec2<f32>(y, mad(y, 1.0 - s, s));
}

// The natural logarithm of a number of at least 2^-126, as libm's logf (FreeBSD's e_logf.c).
fn log_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    if (bits >= 0x7f800000u) {
        return x;
    }
    let i = bits + 0x4afb0du;
    let k = f32(i32(i >> 23u) - 127);
    let f = settled(bitcast<f32>((i & 0x7fffffu) + 0x3f3504f3u)) - 1.0;
    let s = divided(f, 2.0 + f);
    let z = settled(s * s);
    let w = settled(z * z);
    let t1 = settled(w * (0.40000972152 + settled(w * 0.24279078841)));
    let t2 = settled(z * (0.66666662693 + settled(w * 0.28498786688)));
    let hfsq = settled(settled(0.5 * f) * f);
    var sum = settled(settled(s * settled(hfsq + settled(t2 + t1))) + settled(k * 9.0580006145e-06));
    sum = settled(sum - hfsq);
    sum = settled(sum + f);
    return sum + settled(k * 0.69313812256);
}
