// out[T, H*D] = softmax(scale q k^T) v over the keys of a window, with the CPU's bits; logsumexp [T, H] is kept. One
// workgroup of 96 lanes per query and head: keys in blocks of 96 from the first of the row on, a lane each for the scores,
// then a lane per channel for the values. A kernel brings keys(i): the first key of the row, the first that is seen, and
// the last.
var<workgroup> query: array<f32, SIZE>;
var<workgroup> weight: array<f32, KEYS>;

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
    }
    workgroupBarrier();
    let seen = keys(i);
    var largest = -3.4e38;
    var sum = 0.0;
    var acc: array<f32, PER_LANE>;
    for (var begin = seen.x + (seen.y - seen.x) / KEYS * KEYS; begin <= seen.z; begin += KEYS) {
        let key = begin + lane;
        let there = key >= seen.y && key <= seen.z;
        var score = -3.4e38;
        if (there) {
            let at = p.k_at + key * narrow + kv * SIZE;
            var dot = 0.0;
            for (var c = 0u; c < SIZE; c++) {
                dot = mad(k[at + c], query[c], dot);
            }
            score = settled(dot * p.scale);
        }
        weight[lane] = score;
        workgroupBarrier();
        let nearest = max(begin, seen.y) - begin;
        let end = min(begin + (KEYS - 1u), seen.z) + 1u - begin;
        var top = largest;
        for (var j = nearest; j < end; j++) {
            top = max(top, weight[j]);
        }
        workgroupBarrier();
        weight[lane] = select(0.0, e_to(score - top), there);
        workgroupBarrier();
        let shrink = e_to(largest - top);
        var block = 0.0;
        for (var j = nearest; j < end; j++) {
            block += weight[j];
        }
        sum = mad(sum, shrink, block);
        for (var e = 0u; e < PER_LANE; e++) {
            let c = lane + e * KEYS;
            var part = 0.0;
            if (c < SIZE) {
                for (var j = nearest; j < end; j++) {
                    part = mad(weight[j], v[p.v_at + (begin + j) * narrow + kv * SIZE + c], part);
                }
            }
            acc[e] = settled(acc[e] * shrink) + part;
        }
        largest = top;
        workgroupBarrier();
    }
    let by = divided(1.0, sum);
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * KEYS;
        if (c < SIZE) {
            out[p.out_at + i * wide + head * SIZE + c] = acc[e] * by;
        }
    }
    if (lane == 0u) {
        logsumexp[p.lse_at + i * p.heads + head] = largest + log_of(sum);
    }
}
