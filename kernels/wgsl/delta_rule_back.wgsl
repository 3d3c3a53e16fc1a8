// dv and a part of dk of the gated delta rule, from the last token of a row to the first: a workgroup for each row and key
// head. With the gradient R of the state, y = R^T k, dv = b y and dk = b R e. A lane keeps a column of R in shared memory; for
// dk it adds up rows, each from the column of its own number on. Value heads and tiles of columns go one after the other.
struct Params { dv_at: u32, dk_at: u32, q_at: u32, k_at: u32, dout_at: u32, errors_at: u32, factors_at: u32, tokens: u32, first: u32, count: u32, values: u32, keys: u32, value_size: u32, key_size: u32, columns: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dv: array<f32>;
@group(0) @binding(2) var<storage, read_write> dk: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
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
            var d = 0.0;
            var update = 0.0;
            for (var t = end; t > begin; t -= 1u) {
                let at = ((t - 1u) * p.keys + g) * p.key_size;
                let after = (min(t, end - 1u) * p.keys + g) * p.key_size;
                let to = ((t - 1u) * p.values + h) * p.value_size + tile;
                let b = factors[p.factors_at + (p.tokens + t - 1u) * p.values + h];
                if (lane < width) {
                    let o = dout[p.dout_at + to + lane];
                    var y = 0.0;
                    for (var i = 0u; i < p.key_size; i += 1u) {
                        let before = d * (state[i * p.columns + lane] - k[p.k_at + after + i] * update);
                        let s = before + q[p.q_at + at + i] * o;
                        state[i * p.columns + lane] = s;
                        y += k[p.k_at + at + i] * s;
                    }
                    update = b * y;
                    dv[p.dv_at + to + lane] = update;
                }
                workgroupBarrier();
                for (var i = lane; i < p.key_size; i += 32u) {
                    var sum = 0.0;
                    for (var c = 0u; c < width; c += 1u) {
                        let j = (c + lane) % width;
                        sum += state[i * p.columns + j] * errors[p.errors_at + to + j];
                    }
                    sum *= b;
                    if (n > 0u || tile > 0u) {
                        sum += dk[p.dk_at + at + i];
                    }
                    dk[p.dk_at + at + i] = sum;
                }
                workgroupBarrier();
                d = factors[p.factors_at + (t - 1u) * p.values + h];
            }
        }
    }
}
