// dk, dv [T, G*D] of flash attention: a workgroup per 32 keys and key/value head, over the heads of its group in order
// and the queries from its first key to the last that sees its last key. Rows are keys here, columns queries. PART 0
// computes both; 1 dv and 2 dk alone, with fewer sums in registers.
struct Params { dk_at: u32, dv_at: u32, q_at: u32, k_at: u32, v_at: u32, dout_at: u32, tokens: u32, begin: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> dk: array<f32>;
@group(0) @binding(2) var<storage, read_write> dv: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;
@group(0) @binding(6) var<storage, read> dout: array<f32>;
@group(0) @binding(7) var<storage, read> saved: array<f32>;
@group(0) @binding(8) var<storage, read> integers: array<u32>;

#use by_channel k kv_heads
#use by_channel v kv_heads
#use by_channel q heads
#use by_channel dout heads
#use by_row q heads
#use by_row dout heads

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= (p.count + 31u) / 32u * p.kv_heads) {
        return;
    }
    let first = p.begin + number / p.kv_heads * 32u;
    let kv = number % p.kv_heads;
    let each = p.heads / p.kv_heads;
    let ty = lane / 8u;
    let tx = lane % 8u;
    let last = min(first + 31u, p.begin + p.count - 1u);
    let end = end_of_queries(last);
#for i in 0..4
    let key$i = min(first + ty * 4u + ${i}u, last);
    let end$i = end_of_queries(key$i);
#for c in 0..CHUNKS
#if PART != 1
    var dk${c}_$i = vec4<f32>();
#end
#if PART != 2
    var dv${c}_$i = vec4<f32>();
#end
#end
#end
    for (var head = kv * each; head < (kv + 1u) * each; head++) {
        for (var start = first; start < end; start += 32u) {
            var s = array<vec4<f32>, 4>();
            var d = array<vec4<f32>, 4>();
            for (var c = 0u; c < CHUNKS; c++) {
                k_by_channel(first, kv, c, lane, true);
                q_by_channel(start, head, c, lane, false);
                workgroupBarrier();
                s = dots(s, ty, tx);
                workgroupBarrier();
#if PART != 1
                v_by_channel(first, kv, c, lane, true);
                dout_by_channel(start, head, c, lane, false);
                workgroupBarrier();
                d = dots(d, ty, tx);
                workgroupBarrier();
#end
            }
            let query = vec4<u32>(start + tx * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let at = min(query, vec4<u32>(end - 1u)) * p.heads + head;
            let lse = vec4<f32>(saved[at.x], saved[at.y], saved[at.z], saved[at.w]);
            let off = vec4<f32>(saved[p.tokens * p.heads + at.x], saved[p.tokens * p.heads + at.y], saved[p.tokens * p.heads + at.z], saved[p.tokens * p.heads + at.w]);
#for i in 0..4
            let seen$i = (query >= vec4<u32>(key$i)) & (query < vec4<u32>(end$i));
            let w$i = select(vec4<f32>(), exp(s[$i] * p.scale - lse), seen$i);
            let ds$i = select(vec4<f32>(), w$i * (d[$i] - off) * p.scale, seen$i);
#end
#if PART != 2
            share(array<vec4<f32>, 4>(w0, w1, w2, w3), ty, tx);
#for c in 0..CHUNKS
            dout_by_row(start, head, ${c}u, lane);
            workgroupBarrier();
            {
                let sum = spread(array<vec4<f32>, 4>(dv${c}_0, dv${c}_1, dv${c}_2, dv${c}_3), ty, tx);
#for i in 0..4
                dv${c}_$i = sum[$i];
#end
            }
            workgroupBarrier();
#end
#end
#if PART != 1
            share(array<vec4<f32>, 4>(ds0, ds1, ds2, ds3), ty, tx);
#for c in 0..CHUNKS
            q_by_row(start, head, ${c}u, lane);
            workgroupBarrier();
            {
                let sum = spread(array<vec4<f32>, 4>(dk${c}_0, dk${c}_1, dk${c}_2, dk${c}_3), ty, tx);
#for i in 0..4
                dk${c}_$i = sum[$i];
#end
            }
            workgroupBarrier();
#end
#end
        }
    }
#for i in 0..4
    if (first + ty * 4u + ${i}u <= last) {
#for c in 0..CHUNKS
#for l in 0..4
        if (${c * 32 + l}u + tx * 4u < SIZE) {
#if PART != 1
            dk[p.dk_at + key$i * p.kv_heads * SIZE + kv * SIZE + ${c * 32 + l}u + tx * 4u] = dk${c}_$i[$l];
#end
#if PART != 2
            dv[p.dv_at + key$i * p.kv_heads * SIZE + kv * SIZE + ${c * 32 + l}u + tx * 4u] = dv${c}_$i[$l];
#end
        }
#end
#end
    }
#end
}
