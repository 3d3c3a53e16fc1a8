// saved := logsumexp [T, H], then delta [T, H], the sum over a head of dout * out: what the gradient of a softmax
// takes off. Side by side they are one binding.
struct Params { saved_at: u32, lse_at: u32, dout_at: u32, out_at: u32, n: u32, size: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> saved: array<f32>;
@group(0) @binding(2) var<storage, read> dout: array<f32>;
@group(0) @binding(3) var<storage, read> out: array<f32>;
@group(0) @binding(4) var<storage, read> logsumexp: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    var sum = 0.0;
    for (var c = 0u; c < p.size; c++) {
        sum += dout[p.dout_at + i * p.size + c] * out[p.out_at + i * p.size + c];
    }
    saved[p.saved_at + i] = logsumexp[p.lse_at + i];
    saved[p.saved_at + p.n + i] = sum;
}
