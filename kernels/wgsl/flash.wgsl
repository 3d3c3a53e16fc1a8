// out[T, H*D] = softmax(scale q k^T) v over the keys of a window, each row of the microbatch alone; logsumexp
// [T, H] is kept. A workgroup per 32 queries and head; the softmax runs on (largest, sum) as blocks of keys come, from the
// oldest key that its first query sees.
struct Params { out_at: u32, lse_at: u32, q_at: u32, k_at: u32, v_at: u32, tokens: u32, begin: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> logsumexp: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;
@group(0) @binding(6) var<storage, read> integers: array<u32>;

var<workgroup> folded: array<vec4<f32>, 64>;

#use by_channel q heads
#use by_channel k kv_heads
#use by_row v kv_heads

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= (p.count + 31u) / 32u * p.heads) {
        return;
    }
    let first = p.begin + number / p.heads * 32u;
    let head = number % p.heads;
    let kv = head / (p.heads / p.kv_heads);
    let ty = lane / 8u;
    let tx = lane % 8u;
    let last = min(first + 31u, p.begin + p.count - 1u);
#for i in 0..4
    let query$i = min(first + ty * 4u + ${i}u, last);
    let start$i = first_key(query$i);
#for c in 0..CHUNKS
    var out${c}_$i = vec4<f32>();
#end
#end
    var largest = vec4<f32>(-3.4e38);
    var total = vec4<f32>();
    for (var start = first_key(first); start <= last; start += 32u) {
        var s = array<vec4<f32>, 4>();
        for (var c = 0u; c < CHUNKS; c++) {
            q_by_channel(first, head, c, lane, true);
            k_by_channel(start, kv, c, lane, false);
            workgroupBarrier();
            s = dots(s, ty, tx);
            workgroupBarrier();
        }
        let key = vec4<u32>(start + tx * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
#for i in 0..4
        let seen$i = (key >= vec4<u32>(start$i)) & (key <= vec4<u32>(query$i));
        let score$i = select(vec4<f32>(-3.4e38), s[$i] * p.scale, seen$i);
#end
        folded[lane] = vec4<f32>(most(score0), most(score1), most(score2), most(score3));
        workgroupBarrier();
        var top = largest;
        for (var i = 0u; i < 8u; i++) {
            top = max(top, folded[ty * 8u + i]);
        }
        workgroupBarrier();
        // A key that is not seen counts nothing; a NaN of a score comes through, because max hides no exponent.
#for i in 0..4
        let e$i = select(vec4<f32>(), exp(score$i - top[$i]), seen$i);
#end
        share(array<vec4<f32>, 4>(e0, e1, e2, e3), ty, tx);
        folded[lane] = vec4<f32>(dot(e0, vec4<f32>(1.0)), dot(e1, vec4<f32>(1.0)), dot(e2, vec4<f32>(1.0)), dot(e3, vec4<f32>(1.0)));
        workgroupBarrier();
        let shrink = exp(largest - top);
        total *= shrink;
        for (var i = 0u; i < 8u; i++) {
            total += folded[ty * 8u + i];
        }
        largest = top;
#for c in 0..CHUNKS
        v_by_row(start, kv, ${c}u, lane);
        workgroupBarrier();
        {
            let sum = spread(array<vec4<f32>, 4>(out${c}_0 * shrink[0], out${c}_1 * shrink[1], out${c}_2 * shrink[2], out${c}_3 * shrink[3]), ty, tx);
#for i in 0..4
            out${c}_$i = sum[$i];
#end
        }
        workgroupBarrier();
#end
    }
#for i in 0..4
    if (first + ty * 4u + ${i}u <= last) {
#for c in 0..CHUNKS
#for l in 0..4
        if (${c * 32 + l}u + tx * 4u < SIZE) {
            out[p.out_at + query$i * p.heads * SIZE + head * SIZE + ${c * 32 + l}u + tx * 4u] = out${c}_$i[$l] / total[$i];
        }
#end
#end
        if (tx == 0u) {
            logsumexp[p.lse_at + query$i * p.heads + head] = largest[$i] + log(total[$i]);
        }
    }
#end
}

fn most(v: vec4<f32>) -> f32 {
    return max(max(v.x, v.y), max(v.z, v.w));
}
