// f32 arithmetic whose bits are those of the CPU on every device (docs/explain/numerics.md, "Portable"). A kernel's Params
// end with `zero`, which is 0: no driver knows that, so that it cannot fuse or reorder what passes through settled().
// FUSED: fma of the device rounds once. Without, it is composed of other operations, for software drivers, which round twice.
fn settled(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ p.zero);
}

#if FUSED
// a * b + c, rounded once.
fn mad(a: f32, b: f32, c: f32) -> f32 {
    return fma(a, b, c);
}
#else
// a + b, and what rounding it left.
fn sum_of(a: f32, b: f32) -> vec2<f32> {
    let s = settled(a + b);
    let of_b = settled(s - a);
    return vec2<f32>(s, (a - settled(s - of_b)) + (b - of_b));
}

// a * b + c, rounded once, of exact products and sums: the last sum but one is rounded to odd (Boldo and Melquiond 2008, IEEE
// Trans. Comput. 57(4)). A result below 2^-126 is 0. Where a number is 0, subnormal or not finite, mad rounds twice.
// Shifts are avoided, because processors without vectors of shifts make them one by one.
fn mad(a: f32, b: f32, c: f32) -> f32 {
    let u = bitcast<u32>(a);
    let v = bitcast<u32>(b);
    let w = bitcast<u32>(c);
    let ea = u & 0x7f800000u;
    let eb = v & 0x7f800000u;
    let ec = w & 0x7f800000u;
    // Factors between 1 and 2, and the summand times the same power, clamped to 2^-60 .. 2^60: a smaller one rounds the sum as
    // that does, and a larger one is the result.
    let x = bitcast<f32>((u & 0x807fffffu) | 0x3f800000u);
    let y = bitcast<f32>((v & 0x807fffffu) | 0x3f800000u);
    let apart = ec + 0x7f000000u - min(ec + 0x7f000000u, ea + eb);
    let z = bitcast<f32>((w & 0x807fffffu) | clamp(apart, 0x21800000u, 0x5d800000u));
    // The product and what rounding left of it, by halves of 12 bits.
    let x1 = bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
    let y1 = bitcast<f32>(bitcast<u32>(y) & 0xfffff000u);
    let x2 = x - x1;
    let y2 = y - y1;
    let xy = settled(x * y);
    let left = (settled(x1 * y1 - xy) + x1 * y2 + x2 * y1) + x2 * y2;
    let low = sum_of(z, left);
    let high = sum_of(xy, low.x);
    let last = sum_of(low.y, high.y);
    let bits = bitcast<u32>(last.x);
    let odd = select(bits - 1u, bits + 1u, (last.y > 0.0) == (last.x > 0.0));
    let sum = settled(high.x + bitcast<f32>(select(bits, odd, last.y != 0.0 && (bits & 1u) == 0u)));
    // The powers of the factors: first the one that brings the sum nearer to 1, so that no number between exceeds f32.
    let small = bitcast<f32>(min(ea, eb));
    let large = bitcast<f32>(max(ea, eb));
    let below = abs(sum) < 1.0;
    let scaled = settled(sum * select(small, large, below)) * select(large, small, below);
    let once = select(select(scaled, 0.0, abs(scaled) < 1.17549435e-38), c, apart > 0x5d800000u);
    let twice = settled(settled(a * b) + c);
    return select(once, twice, min(min(ea, eb), ec) == 0u || max(max(ea, eb), ec) == 0x7f800000u);
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
#if FUSED
    var r = mad(f32(n), -0.6933594, c);
    r = mad(f32(n), 2.1219444e-4, r);
    var y = mad(1.9875692e-4, r, 1.3982e-3);
    y = mad(y, r, 8.333452e-3);
    y = mad(y, r, 4.1665796e-2);
    y = mad(y, r, 1.6666665e-1);
    y = mad(y, r, 0.5);
    y = mad(y, settled(r * r), r) + 1.0;
#else
    // Loops, because the time that a driver takes to compile a composed multiply-add grows faster than their number.
    var parts = array<f32, 2>(-0.6933594, 2.1219444e-4);
    var r = c;
    for (var i = 0u; i < 2u; i++) {
        r = mad(f32(n), parts[i], r);
    }
    var terms = array<f32, 6>(1.3982e-3, 8.333452e-3, 4.1665796e-2, 1.6666665e-1, 0.5, r);
    var y = 1.9875692e-4;
    for (var i = 0u; i < 6u; i++) {
        y = mad(y, select(r, settled(r * r), i == 5u), terms[i]);
    }
    y += 1.0;
#end
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
