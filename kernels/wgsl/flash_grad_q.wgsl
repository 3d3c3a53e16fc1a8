// dq[T, H*D] of flash attention: a workgroup per 32 queries and head; probabilities are computed again from logsumexp.
struct Params { dq_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, begin: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dq: array<f32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> k: array<f32>;
@group(0) @binding(4) var<storage, read> v: array<f32>;
@group(0) @binding(5) var<storage, read> dout: array<f32>;
@group(0) @binding(6) var<storage, read> saved: array<f32>;
@group(0) @binding(7) var<storage, read> integers: array<u32>;

#use by_channel q heads
#use by_channel dout heads
#use by_channel k kv_heads
#use by_channel v kv_heads
#use by_row k kv_heads

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
    let lse$i = saved[query$i * p.heads + head];
    let off$i = saved[(p.tokens + query$i) * p.heads + head];
#for c in 0..CHUNKS
    var sum${c}_$i = vec4<f32>();
#end
#end
    for (var start = first_key(first); start <= last; start += 32u) {
        var s = array<vec4<f32>, 4>();
        var d = array<vec4<f32>, 4>();
        for (var c = 0u; c < CHUNKS; c++) {
            q_by_channel(first, head, c, lane, true);
            k_by_channel(start, kv, c, lane, false);
            workgroupBarrier();
            s = dots(s, ty, tx);
            workgroupBarrier();
            dout_by_channel(first, head, c, lane, true);
            v_by_channel(start, kv, c, lane, false);
            workgroupBarrier();
            d = dots(d, ty, tx);
            workgroupBarrier();
        }
        let key = vec4<u32>(start + tx * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
#for i in 0..4
        let seen$i = (key >= vec4<u32>(start$i)) & (key <= vec4<u32>(query$i));
        let ds$i = select(vec4<f32>(), exp(s[$i] * p.scale - lse$i) * (d[$i] - off$i) * p.scale, seen$i);
#end
        share(array<vec4<f32>, 4>(ds0, ds1, ds2, ds3), ty, tx);
#for c in 0..CHUNKS
        k_by_row(start, kv, ${c}u, lane);
        workgroupBarrier();
        {
            let sum = spread(array<vec4<f32>, 4>(sum${c}_0, sum${c}_1, sum${c}_2, sum${c}_3), ty, tx);
#for i in 0..4
            sum${c}_$i = sum[$i];
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
            dq[p.dq_at + query$i * p.heads * SIZE + head * SIZE + ${c * 32 + l}u + tx * 4u] = sum${c}_$i[$l];
        }
#end
#end
    }
#end
}
