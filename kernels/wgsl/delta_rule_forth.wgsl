// dq and the rest of dk of the gated delta rule, from the first token of a row to the last: a workgroup for each row and key
// head. The decayed states S are made again from the errors: dq = S dout + b (e dout) k and dk -= S dv. Lanes as in
// delta_rule_back.wgsl.
struct Params { dq_at: u32, dk_at: u32, k_at: u32, dv_at: u32, dout_at: u32, errors_at: u32, factors_at: u32, tokens: u32, first: u32, count: u32, values: u32, keys: u32, value_size: u32, key_size: u32, columns: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dq: array<f32>;
@group(0) @binding(2) var<storage, read_write> dk: array<f32>;
@group(0) @binding(3) var<storage, read> k: array<f32>;
@group(0) @binding(4) var<storage, read> dv: array<f32>;
@group(0) @binding(5) var<storage, read> dout: array<f32>;
@group(0) @binding(6) var<storage, read> errors: array<f32>;
@group(0) @binding(7) var<storage, read> factors: array<f32>;
@group(0) @binding(8) var<storage, read> integers: array<u32>;

var<workgroup> state: array<f32, 4096>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= p.count) {
        return;
    }
    let r = (p.first + number) / p.keys;
    let g = (p.first + number) % p.keys;
    let sharing = p.values / p.keys;
    let begin = integers[4u * p.tokens + r];
    let end = integers[4u * p.tokens + r + 1u];
    for (var n = 0u; n < sharing; n += 1u) {
        let h = g * sharing + n;
        for (var tile = 0u; tile < p.value_size; tile += p.columns) {
            let width = min(p.columns, p.value_size - tile);
            if (lane < width) {
                for (var i = 0u; i < p.key_size; i += 1u) {
                    state[i * p.columns + lane] = 0.0;
                }
            }
            var update = 0.0;
            for (var t = begin; t < end; t += 1u) {
                let at = (t * p.keys + g) * p.key_size;
                let before = ((max(t, begin + 1u) - 1u) * p.keys + g) * p.key_size;
                let to = (t * p.values + h) * p.value_size + tile;
                let d = factors[p.factors_at + t * p.values + h];
                let b = factors[p.factors_at + (p.tokens + t) * p.values + h];
                if (lane < width) {
                    for (var i = 0u; i < p.key_size; i += 1u) {
                        let s = state[i * p.columns + lane] + k[p.k_at + before + i] * update;
                        state[i * p.columns + lane] = d * s;
                    }
                    update = b * errors[p.errors_at + to + lane];
                }
                workgroupBarrier();
                var inner = 0.0;
                for (var j = 0u; j < width; j += 1u) {
                    inner += errors[p.errors_at + to + j] * dout[p.dout_at + to + j];
                }
                inner *= b;
                for (var i = lane; i < p.key_size; i += 32u) {
                    var of_q = 0.0;
                    var of_k = 0.0;
                    for (var c = 0u; c < width; c += 1u) {
                        let j = (c + lane) % width;
                        let s = state[i * p.columns + j];
                        of_q += s * dout[p.dout_at + to + j];
                        of_k += s * dv[p.dv_at + to + j];
                    }
                    of_q += inner * k[p.k_at + at + i];
                    if (n > 0u || tile > 0u) {
                        of_q += dq[p.dq_at + at + i];
                    }
                    dq[p.dq_at + at + i] = of_q;
                    dk[p.dk_at + at + i] -= of_k;
                }
                workgroupBarrier();
            }
        }
    }
}
