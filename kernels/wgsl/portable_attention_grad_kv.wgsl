// Parts of dk and dv, a matrix [T, G*D] for each query head of a group, with the CPU's bits: one workgroup of 96 lanes per key
// and query head, over blocks of 96 queries of the row from the key's own on.
struct Params { dk_at: u32, dv_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32, zero: u32 }
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
var<workgroup> prob: array<f32, KEYS>;
var<workgroup> ds: array<f32, KEYS>;

@compute @workgroup_size(KEYS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= p.count * p.heads) {
        return;
    }
    let j = p.first + number / p.heads;
    let head = number % p.heads;
    let kv = head / (p.heads / p.kv_heads);
    let wide = p.heads * SIZE;
    let narrow = p.kv_heads * SIZE;
    for (var c = lane; c < SIZE; c += KEYS) {
        key[c] = k[p.k_at + j * narrow + kv * SIZE + c];
        value[c] = v[p.v_at + j * narrow + kv * SIZE + c];
    }
    workgroupBarrier();
    let start = integers[2u * p.tokens + j];
    let end = end_of_queries(j);
    var acc_k: array<f32, PER_LANE>;
    var acc_v: array<f32, PER_LANE>;
    for (var begin = start + (j - start) / KEYS * KEYS; begin < end; begin += KEYS) {
        let i = begin + lane;
        if (i >= j && i < end) {
            let at = i * wide + head * SIZE;
            var score = 0.0;
            var dp = 0.0;
            for (var c = 0u; c < SIZE; c++) {
                score = mad(key[c], q[p.q_at + at + c], score);
                dp = mad(value[c], dout[p.dout_at + at + c], dp);
            }
            let w = e_to(settled(score * p.scale) - saved[i * p.heads + head]);
            prob[lane] = w;
            ds[lane] = w * (dp - saved[(p.tokens + i) * p.heads + head]);
        }
        workgroupBarrier();
        let first = max(begin, j) - begin;
        let count = min(begin + KEYS, end) - begin;
        for (var e = 0u; e < PER_LANE; e++) {
            let c = lane + e * KEYS;
            if (c < SIZE) {
                var part_k = 0.0;
                var part_v = 0.0;
                for (var n = first; n < count; n++) {
                    let at = (begin + n) * wide + head * SIZE + c;
                    part_k = mad(ds[n], q[p.q_at + at], part_k);
                    part_v = mad(prob[n], dout[p.dout_at + at], part_v);
                }
                acc_k[e] = mad(part_k, p.scale, acc_k[e]);
                acc_v[e] += part_v;
            }
        }
        workgroupBarrier();
    }
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * KEYS;
        if (c < SIZE) {
            let at = (head % (p.heads / p.kv_heads) * p.tokens + j) * narrow + kv * SIZE + c;
            dk[p.dk_at + at] = acc_k[e];
            dv[p.dv_at + at] = acc_v[e];
        }
    }
}
