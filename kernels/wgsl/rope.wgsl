// Rotates pairs (i, i + D/2) of every head in place by the angles of a token's position; sign -1 turns back, which is
// the gradient. table [positions, D]: cosines of D/2 angles, then their sines.
struct Params { x_at: u32, table_at: u32, positions_at: u32, n: u32, cols: u32, size: u32, sign: f32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;
@group(0) @binding(2) var<storage, read> table: array<f32>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    let half = p.size / 2u;
    let per_row = p.cols / 2u;
    let t = i / per_row;
    let angle = p.table_at + positions[p.positions_at + t] * p.size + (i % per_row) % half;
    let c = table[angle];
    let s = p.sign * table[angle + half];
    let at = p.x_at + t * p.cols + (i % per_row) / half * p.size + (i % per_row) % half;
    let a = x[at];
    let b = x[at + half];
    x[at] = mad(a, c, -settled(b * s));
    x[at + half] = mad(b, c, settled(a * s));
}
