// A workgroup for each row of tokens and key head: its value heads and their tiles of columns go one after the other. A lane
// keeps a column of a state in shared memory, which is 0 at first. A kernel brings walk(w, lane), which passes over the tokens.
struct Walk { begin: u32, end: u32, g: u32, h: u32, tile: u32, width: u32, first: bool }

var<workgroup> state: array<f32, 4096>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    if (number >= p.count) {
        return;
    }
    let r = (p.first + number) / p.keys;
    let g = (p.first + number) % p.keys;
    let sharing = p.values / p.keys;
    let begin = integers[4u * p.tokens + r];
    let end = integers[4u * p.tokens + r + 1u];
    for (var n = 0u; n < sharing; n += 1u) {
        let h = g * sharing + n;
        for (var tile = 0u; tile < p.value_size; tile += p.columns) {
            let width = min(p.columns, p.value_size - tile);
            if (lane < width) {
                for (var i = 0u; i < p.key_size; i += 1u) {
                    state[i * p.columns + lane] = 0.0;
                }
            }
            walk(Walk(begin, end, g, h, tile, width, n == 0u && tile == 0u), lane);
        }
    }
}
