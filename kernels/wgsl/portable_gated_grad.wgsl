// gated_grad.wgsl with the CPU's bits.
struct Params { gate_at: u32, up_at: u32, dout_at: u32, n: u32, act: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> up: array<f32>;
@group(0) @binding(3) var<storage, read> dout: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i < p.n) {
        let both = act(gate[p.gate_at + i]);
        let by = factor(up[p.up_at + i]);
        let d = dout[p.dout_at + i];
        gate[p.gate_at + i] = settled(d * by.x) * both.y;
        up[p.up_at + i] = select(0.0, d * both.x, by.y == 1.0);
    }
}
