// out[T, G*D] = the sum of parts [T, H*D] over the query heads of each key/value head, in order; `each` of them.
struct Params { out_at: u32, parts_at: u32, n: u32, size: u32, each: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> parts: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let at = p.parts_at + i / p.size * p.each * p.size + i % p.size;
    var sum = parts[at];
    for (var h = 1u; h < p.each; h += 1u) {
        sum += parts[at + h * p.size];
    }
    out[p.out_at + i] = sum;
}
