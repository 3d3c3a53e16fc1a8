// What flash attention is built of (Dao et al. 2022, arXiv:2205.14135). A workgroup of 64 lanes owns 32 rows: queries in
// the forward pass and for dq, keys for dk and dv; it meets the other side 32 at a time, and channels 32 at a time
// (CHUNKS of them), so it holds 32 x 32 scores and never T x T. Lane (ty, tx) owns rows 4 ty .. 4 ty + 3 of columns
// 4 tx .. 4 tx + 3. Sums run over channels, then over blocks, in ascending order.
var<workgroup> left_tile: array<vec4<f32>, 256>;
var<workgroup> right_tile: array<vec4<f32>, 256>;
var<workgroup> cross_tile: array<vec4<f32>, 256>;

// Four rows of LEFT times four columns of right, over the 32 rows of either that are staged.
#piece product NAME LEFT
fn NAME(sum: array<vec4<f32>, 4>, ty: u32, tx: u32) -> array<vec4<f32>, 4> {
#for i in 0..4
    var s$i = sum[$i];
#end
#if LANES
    // Lanes of a subgroup share ty: each loads another channel, and hands it to all.
    for (var c = 0u; c < 32u; c += ${LANES}u) {
        let mine = LEFT[(c + tx % ${LANES}u) * 8u + ty];
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
        let l = LEFT[c * 8u + ty];
        let r = right_tile[c * 8u + tx];
#for i in 0..4
        s$i = fma(vec4<f32>(l[$i]), r, s$i);
#end
    }
#end
    return array<vec4<f32>, 4>(s0, s1, s2, s3);
}
#end

// Scores: over the channels that are staged.
#use product dots left_tile

// Keeps 4 x 4 numbers for all lanes: column by column, four rows in a vector.
fn share(s: array<vec4<f32>, 4>, ty: u32, tx: u32) {
#for j in 0..4
    cross_tile[(tx * 4u + ${j}u) * 8u + ty] = vec4<f32>(s[0][$j], s[1][$j], s[2][$j], s[3][$j]);
#end
}

// Four rows of what is shared times 32 staged rows of four channels.
#use product spread cross_tile

// 32 rows (queries, or keys) of 32 channels of a buffer, channel by channel, four rows in a vector.
#piece by_channel BUFFER HEADS
fn BUFFER_by_channel(first: u32, head: u32, chunk: u32, lane: u32, into_left: bool) {
    for (var e = lane; e < 256u; e += 64u) {
        let c = chunk * 32u + e % 32u;
        let row = first + e / 32u * 4u;
        var four = vec4<f32>();
        if (c < SIZE) {
            let at = p.BUFFER_at + head * SIZE + c;
            four = vec4<f32>(BUFFER[at + min(row, p.tokens - 1u) * p.HEADS * SIZE], BUFFER[at + min(row + 1u, p.tokens - 1u) * p.HEADS * SIZE], BUFFER[at + min(row + 2u, p.tokens - 1u) * p.HEADS * SIZE], BUFFER[at + min(row + 3u, p.tokens - 1u) * p.HEADS * SIZE]);
        }
        if (into_left) {
            left_tile[e % 32u * 8u + e / 32u] = four;
        } else {
            right_tile[e % 32u * 8u + e / 32u] = four;
        }
    }
}
#end

// 32 rows of 32 channels of a buffer, row by row, four channels in a vector.
#piece by_row BUFFER HEADS
fn BUFFER_by_row(first: u32, head: u32, chunk: u32, lane: u32) {
    for (var e = lane; e < 256u; e += 64u) {
        let c = chunk * 32u + e % 8u * 4u;
        let at = p.BUFFER_at + min(first + e / 8u, p.tokens - 1u) * p.HEADS * SIZE + head * SIZE;
        right_tile[e] = vec4<f32>(select(0.0, BUFFER[at + min(c + 0u, SIZE - 1u)], c + 0u < SIZE), select(0.0, BUFFER[at + min(c + 1u, SIZE - 1u)], c + 1u < SIZE), select(0.0, BUFFER[at + min(c + 2u, SIZE - 1u)], c + 2u < SIZE), select(0.0, BUFFER[at + min(c + 3u, SIZE - 1u)], c + 3u < SIZE));
    }
}
#end
