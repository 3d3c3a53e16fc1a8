// out[0, i] = exp(rate * softplus(decay[i] + bias)), out[1, i] = sigmoid(beta[i]), with i = token * heads + head.
struct Params { out_at: u32, beta_at: u32, decay_at: u32, rates_at: u32, n: u32, heads: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> beta: array<f32>;
@group(0) @binding(3) var<storage, read> decay: array<f32>;
@group(0) @binding(4) var<storage, read> rates: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let h = i % p.heads;
    let x = decay[p.decay_at + i] + rates[p.rates_at + p.heads + h];
    let softplus = max(x, 0.0) + log(1.0 + exp(-abs(x)));
    out[p.out_at + i] = exp(rates[p.rates_at + h] * softplus);
    out[p.out_at + p.n + i] = 1.0 / (1.0 + exp(-beta[p.beta_at + i]));
}
