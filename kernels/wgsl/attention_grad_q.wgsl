// dq[T, H*D]: one workgroup of 64 lanes per query and head; probabilities are computed again from logsumexp.
struct Params { dq_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dq: array<f32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> k: array<f32>;
@group(0) @binding(4) var<storage, read> v: array<f32>;
@group(0) @binding(5) var<storage, read> dout: array<f32>;
@group(0) @binding(6) var<storage, read> saved: array<f32>;
@group(0) @binding(7) var<storage, read> integers: array<u32>;

var<workgroup> query: array<f32, SIZE>;
var<workgroup> pull: array<f32, SIZE>;
var<workgroup> ds: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= p.count * p.heads) {
        return;
    }
    let i = p.first + number / p.heads;
    let head = number % p.heads;
    let kv = head / (p.heads / p.kv_heads);
    let wide = p.heads * SIZE;
    let narrow = p.kv_heads * SIZE;
    for (var c = lane; c < SIZE; c += 64u) {
        query[c] = q[p.q_at + i * wide + head * SIZE + c];
        pull[c] = dout[p.dout_at + i * wide + head * SIZE + c];
    }
    workgroupBarrier();
    let start = first_key(i);
    let seen = i + 1u - start;
    let lse = saved[i * p.heads + head];
    let off = saved[(p.tokens + i) * p.heads + head];
    var acc: array<f32, PER_LANE>;
    for (var begin = 0u; begin < seen; begin += 64u) {
        let count = min(64u, seen - begin);
        if (lane < count) {
            let at = (start + begin + lane) * narrow + kv * SIZE;
            var score = 0.0;
            var dp = 0.0;
            for (var c = 0u; c < SIZE; c++) {
                score += query[c] * k[p.k_at + at + c];
                dp += pull[c] * v[p.v_at + at + c];
            }
            ds[lane] = exp(score * p.scale - lse) * (dp - off) * p.scale;
        }
        workgroupBarrier();
        for (var e = 0u; e < PER_LANE; e++) {
            let c = lane + e * 64u;
            if (c < SIZE) {
                for (var j = 0u; j < count; j++) {
                    acc[e] += ds[j] * k[p.k_at + (start + begin + j) * narrow + kv * SIZE + c];
                }
            }
        }
        workgroupBarrier();
    }
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * 64u;
        if (c < SIZE) {
            dq[p.dq_at + i * wide + head * SIZE + c] = acc[e];
        }
    }
}
