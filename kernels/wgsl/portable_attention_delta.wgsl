// attention_delta.wgsl with the CPU's bits: sixteen lanes for each token and head.
struct Params { saved_at: u32, lse_at: u32, dout_at: u32, out_at: u32, n: u32, size: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> saved: array<f32>;
@group(0) @binding(2) var<storage, read> dout: array<f32>;
@group(0) @binding(3) var<storage, read> out: array<f32>;
@group(0) @binding(4) var<storage, read> logsumexp: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let i = min(number, p.n - 1u);
    var part = 0.0;
    for (var c = lane % 16u; c < p.size; c += 16u) {
        part = mad(dout[p.dout_at + i * p.size + c], out[p.out_at + i * p.size + c], part);
    }
    let sum = sum_of_lanes(part, lane);
    if (number < p.n && lane % 16u == 0u) {
        saved[p.saved_at + i] = logsumexp[p.lse_at + i];
        saved[p.saved_at + p.n + i] = sum;
    }
}
