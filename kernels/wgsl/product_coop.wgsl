// The device's matrix units: factors in f16, sums in f32. A workgroup of 128 lanes owns 64 x 64 outputs in four
// quarters of 32 x 32; a subgroup of any size takes whole quarters, of SIDE x SIDE fragments. Slices of 32 k are staged
// in workgroup memory, where edges are filled with zeros; sums leave through it, fragment by fragment.
var<workgroup> a_tile: array<f16, 2048>;
var<workgroup> b_tile: array<f16, 2048>;
var<workgroup> stage: array<f32, ${4 * SIDE * SIDE}>;

fn a_number(row: u32, k: u32) -> f16 {
    let at = p.a_at + min(row, p.m - 1u) * p.a_row + min(k, p.k - 1u) * p.a_k;
    return f16(select(0.0, a[at] * p.lift, row < p.m && k < p.k));
}

#if ENCODING < 3
fn b_number(k: u32, col: u32) -> f16 {
    let at = p.b_at + min(k, p.k - 1u) * p.b_k + min(col, p.n - 1u) * p.b_col;
    return f16(select(0.0, value_of(at), col < p.n && k < p.k));
}
#end

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let across = (p.n + 63u) / 64u;
    let number = flat(group, groups);
    let row0 = number / across * 64u;
    let col0 = number % across * 64u;
    let by = p.scale / p.lift;
    // Where subgroups are large there are fewer than four, and each takes another quarter in another round.
    for (var base = 0u; base < 4u; base += subgroups) {
        let quarter = (base + subgroup) % 4u;
        let my_row = quarter / 2u * 32u;
        let my_col = quarter % 2u * 32u;
#for i in 0..32 / SIDE
#for j in 0..32 / SIDE
        var sum${i}_$j = coop_mat${SIDE}x${SIDE}<f32, C>();
#end
#end
        for (var k0 = 0u; k0 < p.k; k0 += 32u) {
            for (var e = lane; e < 2048u; e += 128u) {
#if LEFT_ACROSS
                a_tile[e % 64u * 32u + e / 64u] = a_number(row0 + e % 64u, k0 + e / 64u);
#else
                a_tile[e] = a_number(row0 + e / 32u, k0 + e % 32u);
#end
#if ENCODING < 3
#if RIGHT_ACROSS
                b_tile[e] = b_number(k0 + e / 64u, col0 + e % 64u);
#else
                b_tile[e % 32u * 64u + e / 32u] = b_number(k0 + e % 32u, col0 + e / 32u);
#end
#end
            }
#if ENCODING >= 3
            // Four neighbours of a block at a time; along k there are whole blocks.
            for (var e = lane; e < 512u; e += 128u) {
#if RIGHT_ACROSS
                let k = k0 + e / 16u;
                let col = col0 + e % 16u * 4u;
                let at = p.b_at + min(k, p.k - 1u) * p.b_k + min(col, p.n - 4u);
                let four = select(vec4<f32>(), quad_of(at), k < p.k && col < p.n);
#for i in 0..4
                b_tile[e * 4u + ${i}u] = f16(four[$i]);
#end
#else
                let col = col0 + e / 8u;
                let k = e % 8u * 4u;
                let at = p.b_at + k0 + k + min(col, p.n - 1u) * p.b_col;
                let four = select(vec4<f32>(), quad_of(at), col < p.n);
#for i in 0..4
                b_tile[(k + ${i}u) * 64u + e / 8u] = f16(four[$i]);
#end
#end
            }
#end
            workgroupBarrier();
            for (var k = 0u; k < 32u; k += ${SIDE}u) {
#for i in 0..32 / SIDE
                let a_from$i = (my_row + ${i * SIDE}u) * 32u + k;
                let a$i = coopLoadT<coop_mat${SIDE}x${SIDE}<f16, A>>(&a_tile[a_from$i], 32u);
#end
#for j in 0..32 / SIDE
                let b_from$j = k * 64u + my_col + ${j * SIDE}u;
                let b$j = coopLoadT<coop_mat${SIDE}x${SIDE}<f16, B>>(&b_tile[b_from$j], 64u);
#end
#for i in 0..32 / SIDE
#for j in 0..32 / SIDE
                sum${i}_$j = coopMultiplyAdd(a$i, b$j, sum${i}_$j);
#end
#end
            }
            workgroupBarrier();
        }
        // The fragment of each of the four quarters that are here, then all lanes write them out.
        let slot = min(subgroup, 3u) * ${SIDE * SIDE}u;
#for i in 0..32 / SIDE
#for j in 0..32 / SIDE
        if (subgroup < 4u) {
            coopStoreT(sum${i}_$j, &stage[slot], ${SIDE}u);
        }
        workgroupBarrier();
        for (var e = lane; e < ${4 * SIDE * SIDE}u; e += 128u) {
            let whose = e / ${SIDE * SIDE}u;
            let at = base + whose;
            if (whose < subgroups && at < 4u) {
                let inside = e % ${SIDE * SIDE}u;
                put(row0 + at / 2u * 32u + ${i * SIDE}u + inside / ${SIDE}u, col0 + at % 2u * 32u + ${j * SIDE}u + inside % ${SIDE}u, stage[e] * by);
            }
        }
        workgroupBarrier();
#end
#end
    }
}
