// One workgroup of 64 lanes per query and head: keys in blocks of 64, a lane each for the scores, then a lane per
// channel for the values; the softmax runs on (largest, sum) as blocks come. A kernel brings keys(i): the first key
// and the number of keys that query i sees.
var<workgroup> query: array<f32, SIZE>;
var<workgroup> weight: array<f32, 64>;

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
    }
    workgroupBarrier();
    let seen = keys(i);
    var largest = -3.4e38;
    var sum = 0.0;
    var acc: array<f32, PER_LANE>;
    for (var begin = 0u; begin < seen.y; begin += 64u) {
        let count = min(64u, seen.y - begin);
        var score = -3.4e38;
        if (lane < count) {
            let at = p.k_at + (seen.x + begin + lane) * narrow + kv * SIZE;
            score = 0.0;
            for (var c = 0u; c < SIZE; c++) {
                score += query[c] * k[at + c];
            }
            score *= p.scale;
        }
        weight[lane] = score;
        workgroupBarrier();
        var top = largest;
        for (var j = 0u; j < count; j++) {
            top = max(top, weight[j]);
        }
        workgroupBarrier();
        // No number is hidden by max: a NaN of a score comes through here.
        weight[lane] = select(0.0, exp(score - top), lane < count);
        workgroupBarrier();
        let shrink = exp(largest - top);
        var block = 0.0;
        for (var j = 0u; j < count; j++) {
            block += weight[j];
        }
        sum = sum * shrink + block;
        for (var e = 0u; e < PER_LANE; e++) {
            let c = lane + e * 64u;
            var part = 0.0;
            if (c < SIZE) {
                for (var j = 0u; j < count; j++) {
                    part += weight[j] * v[p.v_at + (seen.x + begin + j) * narrow + kv * SIZE + c];
                }
            }
            acc[e] = acc[e] * shrink + part;
        }
        largest = top;
        workgroupBarrier();
    }
    for (var e = 0u; e < PER_LANE; e++) {
        let c = lane + e * 64u;
        if (c < SIZE) {
            out[p.out_at + i * wide + head * SIZE + c] = acc[e] / sum;
        }
    }
    if (lane == 0u) {
        logsumexp[p.lse_at + i * p.heads + head] = largest + log(sum);
    }
}
