// dv and a part of dk of the gated delta rule, from the last token of a row to the first: a workgroup for each row and key
// head. With the gradient R of the state, y = R^T k, dv = b y and dk = b R e. For dk a lane adds up
// rows, each from the column of its own number on (delta_rule_rows.wgsl).
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

fn walk(w: Walk, lane: u32) {
    var d = 0.0;
    var update = 0.0;
    for (var t = w.end; t > w.begin; t -= 1u) {
        let at = ((t - 1u) * p.keys + w.g) * p.key_size;
        let after = (min(t, w.end - 1u) * p.keys + w.g) * p.key_size;
        let to = ((t - 1u) * p.values + w.h) * p.value_size + w.tile;
        let b = factors[p.factors_at + (p.tokens + t - 1u) * p.values + w.h];
        if (lane < w.width) {
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
            for (var c = 0u; c < w.width; c += 1u) {
                let j = (c + lane) % w.width;
                sum += state[i * p.columns + j] * errors[p.errors_at + to + j];
            }
            sum *= b;
            if (!w.first) {
                sum += dk[p.dk_at + at + i];
            }
            dk[p.dk_at + at + i] = sum;
        }
        workgroupBarrier();
        d = factors[p.factors_at + (t - 1u) * p.values + w.h];
    }
}
