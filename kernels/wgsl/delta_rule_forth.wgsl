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

fn walk(w: Walk, lane: u32) {
    var update = 0.0;
    for (var t = w.begin; t < w.end; t += 1u) {
        let at = (t * p.keys + w.g) * p.key_size;
        let before = ((max(t, w.begin + 1u) - 1u) * p.keys + w.g) * p.key_size;
        let to = (t * p.values + w.h) * p.value_size + w.tile;
        let d = factors[p.factors_at + t * p.values + w.h];
        let b = factors[p.factors_at + (p.tokens + t) * p.values + w.h];
        if (lane < w.width) {
            for (var i = 0u; i < p.key_size; i += 1u) {
                let s = state[i * p.columns + lane] + k[p.k_at + before + i] * update;
                state[i * p.columns + lane] = d * s;
            }
            update = b * errors[p.errors_at + to + lane];
        }
        workgroupBarrier();
        var inner = 0.0;
        for (var j = 0u; j < w.width; j += 1u) {
            inner += errors[p.errors_at + to + j] * dout[p.dout_at + to + j];
        }
        inner *= b;
        for (var i = lane; i < p.key_size; i += 32u) {
            var of_q = 0.0;
            var of_k = 0.0;
            for (var c = 0u; c < w.width; c += 1u) {
                let j = (c + lane) % w.width;
                let s = state[i * p.columns + j];
                of_q += s * dout[p.dout_at + to + j];
                of_k += s * dv[p.dv_at + to + j];
            }
            of_q += inner * k[p.k_at + at + i];
            if (!w.first) {
                of_q += dq[p.dq_at + at + i];
            }
            dq[p.dq_at + at + i] = of_q;
            dk[p.dk_at + at + i] -= of_k;
        }
        workgroupBarrier();
    }
}
