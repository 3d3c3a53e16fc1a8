// ddecay := rate * sigmoid(decay + bias) * the sum of ddecay from the token on, in place: a lane for each row and value head.
struct Params { ddecay_at: u32, decay_at: u32, rates_at: u32, n: u32, tokens: u32, heads: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> ddecay: array<f32>;
@group(0) @binding(2) var<storage, read> decay: array<f32>;
@group(0) @binding(3) var<storage, read> rates: array<f32>;
@group(0) @binding(4) var<storage, read> integers: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 256u + lane;
    if (number >= p.n) {
        return;
    }
    let r = number / p.heads;
    let h = number % p.heads;
    let rate = rates[p.rates_at + h];
    let bias = rates[p.rates_at + p.heads + h];
    var sum = 0.0;
    for (var t = integers[4u * p.tokens + r + 1u]; t > integers[4u * p.tokens + r]; t -= 1u) {
        let i = (t - 1u) * p.heads + h;
        sum += ddecay[p.ddecay_at + i];
        ddecay[p.ddecay_at + i] = sum * rate / (1.0 + exp(-(decay[p.decay_at + i] + bias)));
    }
}
