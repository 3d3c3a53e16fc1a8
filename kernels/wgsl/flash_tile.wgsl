// What flash attention is built of (Dao et al. 2022, arXiv:2205.14135). A workgroup of 64 lanes owns 32 rows: queries in
// the forward pass and for dq, keys for dk and dv; it meets the other side 32 at a time, and channels 32 at a time
// (CHUNKS of them), so it holds 32 x 32 scores and never T x T. Lane (ty, tx) owns rows 4 ty .. 4 ty + 3 of columns
// 4 tx .. 4 tx + 3. Sums run over channels, then over blocks, in ascending order.
var<workgroup> left_tile: array<vec4<f32>, 256>;
var<workgroup> right_tile: array<vec4<f32>, 256>;
var<workgroup> cross_tile: array<vec4<f32>, 256>;

// Four rows of left times four columns of right, over the channels that are staged.
fn dots(sum: array<vec4<f32>, 4>, ty: u32, tx: u32) -> array<vec4<f32>, 4> {
#for i in 0..4
    var s$i = sum[$i];
#end
#if LANES
    // Lanes of a subgroup share ty: each loads another channel, and hands it to all.
    for (var c = 0u; c < 32u; c += ${LANES}u) {
        let mine = left_tile[(c + tx % ${LANES}u) * 8u + ty];
#for q in 0..LANES
        {
            let l = subgroupBroadcast(mine, ${q}u);
            let r = right_tile[(c + ${q}u) * 8u + tx];
#for i in 0..4
            s$i = fma(vec4<f32>(l[$i]), r, s$i);
#end
        }
#end
    }
#else
    for (var c = 0u; c < 32u; c++) {
        let l = left_tile[c * 8u + ty];
        let r = right_tile[c * 8u + tx];
#for i in 0..4
        s$i = fma(vec4<f32>(l[$i]), r, s$i);
#end
    }
#end
    return array<vec4<f32>, 4>(s0, s1, s2, s3);
}

// Keeps 4 x 4 numbers for all lanes: column by column, four rows in a vector.
fn share(s: array<vec4<f32>, 4>, ty: u32, tx: u32) {
#for j in 0..4
    cross_tile[(tx * 4u + ${j}u) * 8u + ty] = vec4<f32>(s[0][$j], s[1][$j], s[2][$j], s[3][$j]);
#end
}

// Four rows of what is shared times 32 staged rows of four channels.
fn spread(sum: array<vec4<f32>, 4>, ty: u32, tx: u32) -> array<vec4<f32>, 4> {
#for i in 0..4
    var s$i = sum[$i];
#end
#if LANES
    // Lanes of a subgroup share ty: each loads another channel, and hands it to all.
    for (var c = 0u; c < 32u; c += ${LANES}u) {
        let mine = cross_tile[(c + tx % ${LANES}u) * 8u + ty];
#for q in 0..LANES
        {
            let l = subgroupBroadcast(mine, ${q}u);
            let r = right_tile[(c + ${q}u) * 8u + tx];
#for i in 0..4
            s$i = fma(vec4<f32>(l[$i]), r, s$i);
#end
        }
#end
    }
#else
    for (var c = 0u; c < 32u; c++) {
        let l = cross_tile[c * 8u + ty];
        let r = right_tile[c * 8u + tx];
#for i in 0..4
        s$i = fma(vec4<f32>(l[$i]), r, s$i);
#end
    }
#end
    return array<vec4<f32>, 4>(s0, s1, s2, s3);
}
