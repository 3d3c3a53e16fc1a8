// What the portable class is made of, for comparison with the host: of each triple (a, b, c) fma as the device has it, a * b + c
// with one rounding, a * b + c with two, a / b and the root of |a|.
struct Params { n: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 64u + lane;
    if (i >= p.n) {
        return;
    }
    let a = x[3u * i];
    let b = x[3u * i + 1u];
    let c = x[3u * i + 2u];
    out[5u * i] = fma(a, b, c);
    out[5u * i + 1u] = mad(a, b, c);
    out[5u * i + 2u] = settled(a * b) + c;
    out[5u * i + 3u] = divided(a, b);
    out[5u * i + 4u] = root(abs(a));
}
