// gate := d gate, up := d up, in place, given dout
struct Params { gate_at: u32, up_at: u32, dout_at: u32, n: u32, act: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> up: array<f32>;
@group(0) @binding(3) var<storage, read> dout: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i < p.n) {
        let g = gate[p.gate_at + i];
        let u = up[p.up_at + i];
        let d = dout[p.dout_at + i];
        if (p.act == 1u) {
            let e = gelu_exp(g);
            let s = 1.0 / (1.0 + e);
            // e s is 1 - s without cancellation.
            gate[p.gate_at + i] = d * u * s * (1.0 + g * (e * s) * gelu_slope(g));
            up[p.up_at + i] = d * g * s;
        } else if (p.act == 2u) {
            let s = 1.0 / (1.0 + exp(-g));
            gate[p.gate_at + i] = d * u * s * (1.0 - s);
            up[p.up_at + i] = d * s;
        } else if (p.act == 3u) {
            let c = select(g, 7.0, g > 7.0);
            let v = select(select(u, 7.0, u > 7.0), -7.0, u < -7.0);
            let s = 1.0 / (1.0 + exp(-1.702 * c));
            gate[p.gate_at + i] = select(d * (v + 1.0) * s * (1.0 + 1.702 * c * (1.0 - s)), 0.0, g > 7.0);
            up[p.up_at + i] = select(d * c * s, 0.0, u > 7.0 || u < -7.0);
        } else {
            let s = 1.0 / (1.0 + exp(-g));
            gate[p.gate_at + i] = d * u * s * (1.0 + g * (1.0 - s));
            up[p.up_at + i] = d * g * s;
        }
    }
}
