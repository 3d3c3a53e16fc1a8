// out[rows, cols] (=|+=) scale * the sum of `parts` such matrices, stored one after the other; always from the first on.
struct Params { out_at: u32, out_stride: u32, x_at: u32, cols: u32, count: u32, parts: u32, scale: f32, add: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.count) {
        return;
    }
    var sum = 0.0;
    for (var part = 0u; part < p.parts; part += 1u) {
        sum += x[p.x_at + part * p.count + i];
    }
    let at = p.out_at + i / p.cols * p.out_stride + i % p.cols;
    if (p.add == 1u) {
        out[at] += p.scale * sum;
    } else {
        out[at] = p.scale * sum;
    }
}
