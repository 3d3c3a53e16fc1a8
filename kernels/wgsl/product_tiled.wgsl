// A workgroup owns BM x BN outputs and walks k in slices of BK that it stages in workgroup memory; a lane owns TM x TN
// outputs in registers and adds its terms in ascending k, so the order of a sum depends on nothing. HALF: factors
// are rounded to f16 there, which halves what is moved; their products are exact in f32 and so are sums kept.
// PORTABLE: one slice of a product of the portable class, whose chain the output may hold the beginning of (add 2); LOOPED:
// its multiply-add is long, and loops keep the text short, so that drivers compile it in seconds.
// SPLIT: each part of the sum has as many workgroups as a whole sum would, and each part has an output of its own.
#if HALF
alias Four = vec4<f16>;
#else
alias Four = vec4<f32>;
#end

// Numbers are stored k by k: four neighbouring rows (or columns) of one k are one vector.
var<workgroup> a_tile: array<Four, ${BK * BM / 4}>;
var<workgroup> b_tile: array<Four, ${BK * BN / 4}>;

fn a_number(row: u32, k: u32) -> f32 {
    let at = p.a_at + min(row, p.m - 1u) * p.a_row + min(k, p.k - 1u) * p.a_k;
    return select(0.0, a[at] * p.lift, k < p.k);
}

#if ENCODING < 3
fn b_number(k: u32, col: u32) -> f32 {
    let at = p.b_at + min(k, p.k - 1u) * p.b_k + min(col, p.n - 1u) * p.b_col;
    return select(0.0, value_of(at), k < p.k);
}
#end

#if PORTABLE
fn held(row: u32, col: u32) -> f32 {
    return out[p.out_at + min(row, p.m - 1u) * p.out_stride + min(col, p.n - 1u)];
}
#end

#if SPLIT
fn put_part(part: u32, row: u32, col: u32, value: f32) {
    if (row < p.m && col < p.n) {
        out[p.out_at + (part * p.m + row) * p.n + col] = value;
    }
}
#end

@compute @workgroup_size(${BM / TM * (BN / TN)})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let across = (p.n + ${BN - 1}u) / ${BN}u;
    let tiles = across * ((p.m + ${BM - 1}u) / ${BM}u);
#if SPLIT
    let part = flat(group, groups) / tiles;
    let number = flat(group, groups) % tiles;
    if (part >= p.parts) {
        return;
    }
    let first = part * p.terms;
    let end = min(first + p.terms, p.k);
#else
    let number = flat(group, groups);
    if (number >= tiles) {
        return;
    }
    let first = 0u;
    let end = p.k;
#end
    let row0 = number / across * ${BM}u;
    let col0 = number % across * ${BN}u;
    let my_row = lane / ${BN / TN}u;
    let my_col = lane % ${BN / TN}u;
#if LOOPED
    var sums: array<vec4<f32>, ${TM}>;
    for (var i = 0u; i < ${TM}u; i += 1u) {
#for j in 0..4
        sums[i][$j] = select(0.0, held(row0 + my_row * 4u + i, col0 + my_col * 4u + ${j}u), p.add == 2u);
#end
    }
#else
#for i in 0..TM
#for j in 0..TN / 4
    var sum${i}_$j = vec4<f32>();
#end
#end
#if PORTABLE
    if (p.add == 2u) {
#for i in 0..TM
#for j in 0..TN / 4
#for l in 0..4
        sum${i}_$j[$l] = held(row0 + (my_row + ${i / 4 * (BM / TM)}u) * 4u + ${i % 4}u, col0 + (my_col + ${j * (BN / TN)}u) * 4u + ${l}u);
#end
#end
#end
    }
#end
#end
    for (var k0 = first; k0 < end; k0 += ${BK}u) {
        // Neighbouring lanes read neighbouring numbers, whatever the layout of a factor.
        for (var e = lane; e < ${BK * BM / 4}u; e += ${BM / TM * (BN / TN)}u) {
#if LEFT_ACROSS
            let x = e % ${BM / 4}u;
            let k = e / ${BM / 4}u;
#else
            let x = e / ${BK}u;
            let k = e % ${BK}u;
#end
            let r = row0 + x * 4u;
            a_tile[k * ${BM / 4}u + x] = Four(vec4<f32>(a_number(r, k0 + k), a_number(r + 1u, k0 + k), a_number(r + 2u, k0 + k), a_number(r + 3u, k0 + k)));
        }
#if ENCODING >= 3 && RIGHT_ACROSS
        // Blocks run along the columns: four neighbours are a vector.
        for (var e = lane; e < ${BK * BN / 4}u; e += ${BM / TM * (BN / TN)}u) {
            let k = k0 + e / ${BN / 4}u;
            let at = p.b_at + min(k, p.k - 1u) * p.b_k + min(col0 + e % ${BN / 4}u * 4u, p.n - 4u);
            b_tile[e] = Four(select(vec4<f32>(), quad_of(at), k < p.k));
        }
#end
#if ENCODING >= 3 && RIGHT_ACROSS == 0
        // Blocks run along k, which is whole blocks: four neighbours of each of four columns, transposed.
        for (var e = lane; e < ${BK * BN / 16}u; e += ${BM / TM * (BN / TN)}u) {
            let x = e / ${BK / 4}u;
            let k = e % ${BK / 4}u * 4u;
            let at = p.b_at + k0 + k;
            let c = col0 + x * 4u;
#for i in 0..4
            let q$i = quad_of(at + min(c + ${i}u, p.n - 1u) * p.b_col);
#end
#for i in 0..4
            b_tile[(k + ${i}u) * ${BN / 4}u + x] = Four(vec4<f32>(q0[$i], q1[$i], q2[$i], q3[$i]));
#end
        }
#end
#if ENCODING < 3
        for (var e = lane; e < ${BK * BN / 4}u; e += ${BM / TM * (BN / TN)}u) {
#if RIGHT_ACROSS
            let x = e % ${BN / 4}u;
            let k = e / ${BN / 4}u;
#else
            let x = e / ${BK}u;
            let k = e % ${BK}u;
#end
            let c = col0 + x * 4u;
            b_tile[k * ${BN / 4}u + x] = Four(vec4<f32>(b_number(k0 + k, c), b_number(k0 + k, c + 1u), b_number(k0 + k, c + 2u), b_number(k0 + k, c + 3u)));
        }
#end
        workgroupBarrier();
        for (var k = 0u; k < ${BK}u; k += 1u) {
#if LOOPED
            let a_four = a_tile[k * ${BM / 4}u + my_row];
            let b_four = b_tile[k * ${BN / 4}u + my_col];
            for (var i = 0u; i < ${TM}u; i += 1u) {
                let factor = a_four[i];
                var row = sums[i];
#for j in 0..4
                row[$j] = mad(factor, b_four[$j], row[$j]);
#end
                sums[i] = row;
            }
#else
#for j in 0..TN / 4
            let b$j = vec4<f32>(b_tile[k * ${BN / 4}u + my_col + ${j * (BN / TN)}u]);
#end
#for i in 0..TM / 4
            let a$i = vec4<f32>(a_tile[k * ${BM / 4}u + my_row + ${i * (BM / TM)}u]);
#for l in 0..4
#for j in 0..TN / 4
            sum${i * 4 + l}_$j = fma(vec4<f32>(a$i[$l]), b$j, sum${i * 4 + l}_$j);
#end
#end
#end
#end
        }
        workgroupBarrier();
    }
#if SPLIT == 0 && PORTABLE == 0
    let by = p.scale / p.lift;
#end
#if LOOPED
    for (var i = 0u; i < ${TM}u; i += 1u) {
#for j in 0..4
        put(row0 + my_row * 4u + i, col0 + my_col * 4u + ${j}u, sums[i][$j]);
#end
    }
#else
#for i in 0..TM
#for j in 0..TN / 4
#for l in 0..4
#if SPLIT
    put_part(part, row0 + (my_row + ${i / 4 * (BM / TM)}u) * 4u + ${i % 4}u, col0 + (my_col + ${j * (BN / TN)}u) * 4u + ${l}u, sum${i}_$j[$l]);
#else
#if PORTABLE
    put(row0 + (my_row + ${i / 4 * (BM / TM)}u) * 4u + ${i % 4}u, col0 + (my_col + ${j * (BN / TN)}u) * 4u + ${l}u, sum${i}_$j[$l]);
#else
    put(row0 + (my_row + ${i / 4 * (BM / TM)}u) * 4u + ${i % 4}u, col0 + (my_col + ${j * (BN / TN)}u) * 4u + ${l}u, sum${i}_$j[$l] * by);
#end
#end
#end
#end
#end
#end
}
