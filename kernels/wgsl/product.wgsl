// out[m, n] (=|+=) scale * a b: the plain product that every other variant is compared with. Tiles of 64 x 64 by 256
// lanes, sixteen outputs a lane; sums run along k in order. A kernel brings left(row, k) and right(k, col), which
// are only asked for what exists.
var<workgroup> tile_a: array<f32, 1024>;
var<workgroup> tile_b: array<f32, 1024>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let across = (p.n + 63u) / 64u;
    let number = flat(group, groups);
    if (number >= across * ((p.m + 63u) / 64u)) {
        return;
    }
    let row0 = number / across * 64u;
    let col0 = number % across * 64u;
    let row = lane / 16u * 4u;
    let col = lane % 16u * 4u;
    var sums: array<vec4<f32>, 4>;
    for (var k0 = 0u; k0 < p.k; k0 += 16u) {
        for (var i = lane; i < 1024u; i += 256u) {
            // Neighbouring lanes read neighbouring numbers, whatever the layout of a factor.
            let a_row = select(i / 16u, i % 64u, LEFT_ACROSS == 1u);
            let a_k = select(i % 16u, i / 64u, LEFT_ACROSS == 1u);
            let b_col = select(i / 16u, i % 64u, RIGHT_ACROSS == 1u);
            let b_k = select(i % 16u, i / 64u, RIGHT_ACROSS == 1u);
            var a = 0.0;
            if (row0 + a_row < p.m && k0 + a_k < p.k) {
                a = left(row0 + a_row, k0 + a_k);
            }
            var b = 0.0;
            if (col0 + b_col < p.n && k0 + b_k < p.k) {
                b = right(k0 + b_k, col0 + b_col);
            }
            tile_a[a_k * 64u + a_row] = a;
            tile_b[b_k * 64u + b_col] = b;
        }
        workgroupBarrier();
        for (var k = 0u; k < 16u; k++) {
            let at = k * 64u;
            let b = vec4<f32>(tile_b[at + col], tile_b[at + col + 1u], tile_b[at + col + 2u], tile_b[at + col + 3u]);
            sums[0] += tile_a[at + row] * b;
            sums[1] += tile_a[at + row + 1u] * b;
            sums[2] += tile_a[at + row + 2u] * b;
            sums[3] += tile_a[at + row + 3u] * b;
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if (row0 + row + i < p.m && col0 + col + j < p.n) {
                let at = p.out_at + (row0 + row + i) * p.out_stride + col0 + col + j;
                var value = p.scale * sums[i][j];
                if (p.add == 1u) {
                    value += out[at];
                }
                out[at] = value;
            }
        }
    }
}
