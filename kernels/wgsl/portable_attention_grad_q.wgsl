// dq[T, H*D] with the CPU's bits: one workgroup of 96 lanes per query and head. Keys in blocks of 96; stretches of six
// blocks, the query's own first, then those before it.
struct Params { dq_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32, zero: u32 }
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
var<workgroup> ds: array<f32, KEYS>;

@compute @workgroup_size(KEYS)
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
    for (var c = lane; c < SIZE; c += KEYS) {
        query[c] = q[p.q_at + i * wide + head * SIZE + c];
        pull[c] = dout[p.dout_at + i * wide + head * SIZE + c];
    }
    workgroupBarrier();
    let start = integers[2u * p.tokens + i];
    let least = first_key(i);
    let lse = saved[i * p.heads + head];
    let off = saved[(p.tokens + i) * p.heads + head];
    var acc: array<f32, PER_LANE>;
    for (var stretch = (i - start) / STRETCH + 1u; stretch > (least - start) / STRETCH; stretch -= 1u) {
        let own = start + (stretch - 1u) * STRETCH;
        for (var begin = own + (max(least, own) - own) / KEYS * KEYS; begin <= min(i, own + (STRETCH - 1u)); begin += KEYS) {
            let key = begin + lane;
            if (key >= least && key <= i) {
                let at = key * narrow + kv * SIZE;
                var score = 0.0;
                var dp = 0.0;
                for (var c = 0u; c < SIZE; c++) {
                    score = mad(k[p.k_at + at + c], query[c], score);
                    dp = mad(v[p.v_at + at + c], pull[c], dp);
                }
                ds[lane] = e_to(settled(score * p.scale) - lse) * (dp - off);
            }
            workgroupBarrier();
            let first = max(begin, least) - begin;
            let end = min(begin + (KEYS - 1u), i) + 1u - begin;
            for (var e = 0u; e < PER_LANE; e++) {
                let c = lane + e * KEYS;
                if (c < SIZE) {
                    var part = 0.0;
                    for (var j = first; j < end; j++) {
                        part = mad(ds[j], k[p.k_at + (begin + j) * narrow + kv * SIZE + c], part);
                    }
                    acc[e] = mad(part, p.scale, acc[e]);
                }
            }
            workgroupBarrier();
        }
    }
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * KEYS;
        if (c < SIZE) {
            dq[p.dq_at + i * wide + head * SIZE + c] = acc[e];
        }
    }
}
