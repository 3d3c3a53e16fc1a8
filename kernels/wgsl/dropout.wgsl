// out (=|+=) x * mask / (1 - p). bases [T]: the hash of (seed, step, row id) of a token's row; module and the token's
// place in its row are mixed in here, then the channel: the same integers as on every backend.
struct Params { out_at: u32, x_at: u32, t_at: u32, tokens: u32, n: u32, cols: u32, module_low: u32, module_high: u32, threshold: u32, scale: f32, add: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> bases: array<u32>;
@group(0) @binding(4) var<storage, read> integers: array<u32>;

fn mix_in(hash: u32, word: u32) -> u32 {
    let w = word * 0xcc9e2d51u;
    var v = hash ^ (((w << 15u) | (w >> 17u)) * 0x1b873593u);
    v = ((v << 13u) | (v >> 19u)) * 5u + 0xe6546b64u;
    v ^= v >> 16u;
    v *= 0x85ebca6bu;
    v ^= v >> 13u;
    v *= 0xc2b2ae35u;
    return v ^ (v >> 16u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let t = p.t_at + i / p.cols;
    let place = t - integers[2u * p.tokens + t];
    var hash = mix_in(mix_in(bases[t], p.module_low), p.module_high);
    hash = mix_in(mix_in(mix_in(hash, place), 0u), i % p.cols);
    var value = 0.0;
    if (hash >= p.threshold) {
        value = settled(x[p.x_at + i] * p.scale);
    }
    if (p.add == 1u) {
        value += out[p.out_at + i];
    }
    out[p.out_at + i] = value;
}
