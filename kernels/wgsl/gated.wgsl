// out = act(gate) * up, where act is silu, x / (1 + exp(-x)), gelu, or the sigmoid; or, clamped,
// out = g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = up clamped to [-7, 7]
struct Params { out_at: u32, gate_at: u32, up_at: u32, n: u32, act: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> gate: array<f32>;
@group(0) @binding(3) var<storage, read> up: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i < p.n) {
        let g = gate[p.gate_at + i];
        let u = up[p.up_at + i];
        if (p.act == 1u) {
            out[p.out_at + i] = g / (1.0 + gelu_exp(g)) * u;
        } else if (p.act == 2u) {
            out[p.out_at + i] = 1.0 / (1.0 + exp(-g)) * u;
        } else if (p.act == 3u) {
            let c = select(g, 7.0, g > 7.0);
            let v = select(select(u, 7.0, u > 7.0), -7.0, u < -7.0);
            out[p.out_at + i] = c / (1.0 + exp(-1.702 * c)) * (v + 1.0);
        } else {
            out[p.out_at + i] = g / (1.0 + exp(-g)) * u;
        }
    }
}
