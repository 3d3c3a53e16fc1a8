// dk, dv [T, G*D]: one workgroup of 64 lanes per key and key/value head, over the heads of its group in order and the
// queries that see it.
struct Params { dk_at: u32, dv_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dk: array<f32>;
@group(0) @binding(2) var<storage, read_write> dv: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;
@group(0) @binding(6) var<storage, read> dout: array<f32>;
@group(0) @binding(7) var<storage, read> saved: array<f32>;
@group(0) @binding(8) var<storage, read> integers: array<u32>;

var<workgroup> key: array<f32, SIZE>;
var<workgroup> value: array<f32, SIZE>;
var<workgroup> prob: array<f32, 64>;
var<workgroup> ds: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= p.count * p.kv_heads) {
        return;
    }
    let j = p.first + number / p.kv_heads;
    let kv = number % p.kv_heads;
    let each = p.heads / p.kv_heads;
    let wide = p.heads * SIZE;
    let narrow = p.kv_heads * SIZE;
    for (var c = lane; c < SIZE; c += 64u) {
        key[c] = k[p.k_at + j * narrow + kv * SIZE + c];
        value[c] = v[p.v_at + j * narrow + kv * SIZE + c];
    }
    workgroupBarrier();
    let end = end_of_queries(j);
    var acc_k: array<f32, PER_LANE>;
    var acc_v: array<f32, PER_LANE>;
    for (var head = kv * each; head < (kv + 1u) * each; head++) {
        for (var begin = j; begin < end; begin += 64u) {
            let count = min(64u, end - begin);
            if (lane < count) {
                let i = begin + lane;
                let at = i * wide + head * SIZE;
                var score = 0.0;
                var dp = 0.0;
                for (var c = 0u; c < SIZE; c++) {
                    score += q[p.q_at + at + c] * key[c];
                    dp += dout[p.dout_at + at + c] * value[c];
                }
                let w = exp(score * p.scale - saved[i * p.heads + head]);
                prob[lane] = w;
                ds[lane] = w * (dp - saved[(p.tokens + i) * p.heads + head]) * p.scale;
            }
            workgroupBarrier();
            for (var e = 0u; e < PER_LANE; e++) {
                let c = lane + e * 64u;
                if (c < SIZE) {
                    for (var i = 0u; i < count; i++) {
                        let at = (begin + i) * wide + head * SIZE + c;
                        acc_k[e] += ds[i] * q[p.q_at + at];
                        acc_v[e] += prob[i] * dout[p.dout_at + at];
                    }
                }
            }
            workgroupBarrier();
        }
    }
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * 64u;
        if (c < SIZE) {
            dk[p.dk_at + j * narrow + kv * SIZE + c] = acc_k[e];
            dv[p.dv_at + j * narrow + kv * SIZE + c] = acc_v[e];
        }
    }
}
