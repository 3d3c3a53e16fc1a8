// The device's matrix units: factors in f16, sums in f32. A workgroup of 128 lanes owns 64 x 64 outputs in four
// quarters of 32 x 32; a subgroup of any size takes whole quarters, of SIDE x SIDE fragments. Slices of 32 k are staged
// in workgroup memory as they are stored in the factors, where k beyond the last is zero; rows and columns beyond the last are
// those of the last, and are not written. Rows of a tile are 8 numbers longer than their contents, so that the rows of a
// fragment meet all banks. Sums leave through workgroup memory, fragment by fragment.
var<workgroup> a_tile: array<f16, 2560>;
#if RIGHT_ACROSS
var<workgroup> b_tile: array<f16, 2304>;
#else
var<workgroup> b_tile: array<f16, 2560>;
#end
var<workgroup> stage: array<f32, ${4 * SIDE * SIDE}>;

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
#if LEFT_ACROSS
            for (var e = lane; e < 2048u; e += 128u) {
                let k = k0 + e / 64u;
                let at = p.a_at + min(row0 + e % 64u, p.m - 1u) * p.a_row + min(k, p.k - 1u) * p.a_k;
                a_tile[e % 64u * 40u + e / 64u] = f16(select(0.0, a[at] * p.lift, k < p.k));
            }
#else
            let a_k = k0 + lane % 32u;
            let a_from = p.a_at + min(a_k, p.k - 1u) * p.a_k;
            for (var x = lane / 32u; x < 64u; x += 4u) {
                let number = a[a_from + min(row0 + x, p.m - 1u) * p.a_row];
                a_tile[x * 40u + lane % 32u] = f16(select(0.0, number * p.lift, a_k < p.k));
            }
#end
#if ENCODING < 3 && RIGHT_ACROSS
            let b_from = p.b_at + min(col0 + lane % 64u, p.n - 1u) * p.b_col;
            for (var x = lane / 64u; x < 32u; x += 2u) {
                let number = value_of(b_from + min(k0 + x, p.k - 1u) * p.b_k);
                b_tile[x * 72u + lane % 64u] = f16(select(0.0, number, k0 + x < p.k));
            }
#end
#if ENCODING < 3 && RIGHT_ACROSS == 0
            let b_k = k0 + lane % 32u;
            let b_from = p.b_at + min(b_k, p.k - 1u) * p.b_k;
            for (var x = lane / 32u; x < 64u; x += 4u) {
                let number = value_of(b_from + min(col0 + x, p.n - 1u) * p.b_col);
                b_tile[x * 40u + lane % 32u] = f16(select(0.0, number, b_k < p.k));
            }
#end
#if ENCODING >= 3
            // Four neighbours of a block at a time; along k there are whole blocks.
            for (var e = lane; e < 512u; e += 128u) {
#if RIGHT_ACROSS
                let k = k0 + e / 16u;
                let col = col0 + e % 16u * 4u;
                let at = p.b_at + min(k, p.k - 1u) * p.b_k + min(col, p.n - 4u);
                let four = select(vec4<f32>(), quad_of(at), k < p.k);
                let to = e / 16u * 72u + e % 16u * 4u;
#else
                let k = e % 8u * 4u;
                let at = p.b_at + k0 + k + min(col0 + e / 8u, p.n - 1u) * p.b_col;
                let four = quad_of(at);
                let to = e / 8u * 40u + k;
#end
#for i in 0..4
                b_tile[to + ${i}u] = f16(four[$i]);
#end
            }
#end
            workgroupBarrier();
            for (var k = 0u; k < 32u; k += ${SIDE}u) {
#for i in 0..32 / SIDE
                let a_from$i = (my_row + ${i * SIDE}u) * 40u + k;
                let a$i = coopLoadT<coop_mat${SIDE}x${SIDE}<f16, A>>(&a_tile[a_from$i], 40u);
#end
#for j in 0..32 / SIDE
#if RIGHT_ACROSS
                let b_from$j = k * 72u + my_col + ${j * SIDE}u;
                let b$j = coopLoadT<coop_mat${SIDE}x${SIDE}<f16, B>>(&b_tile[b_from$j], 72u);
#else
                let b_from$j = (my_col + ${j * SIDE}u) * 40u + k;
                let b$j = coopLoad<coop_mat${SIDE}x${SIDE}<f16, B>>(&b_tile[b_from$j], 40u);
#end
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
