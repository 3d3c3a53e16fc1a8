// losses[n] from the stats [parts, 4, n] of portable_head_block.wgsl, and in place of their fourth row what the sums of
// a part are multiplied by; a lane for each row. `each` is the number of columns of a part.
struct Params { losses_at: u32, stats_at: u32, targets_at: u32, n: u32, parts: u32, each: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> losses: array<f32>;
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = flat(group, groups) * 256u + lane;
    if (row >= p.n) {
        return;
    }
    let at = p.stats_at + row;
    var most = stats[at];
    for (var part = 1u; part < p.parts; part += 1u) {
        most = max(most, stats[at + part * 4u * p.n]);
    }
    var sum = 0.0;
    for (var part = 0u; part < p.parts; part += 1u) {
        let own = at + part * 4u * p.n;
        sum += settled(e_to(stats[own] - most) * stats[own + p.n]);
    }
    let aim = targets[p.targets_at + row];
    let chosen = stats[at + aim / p.each * 4u * p.n + 2u * p.n];
    losses[p.losses_at + row] = log_of(sum) - (chosen - most);
    for (var part = 0u; part < p.parts; part += 1u) {
        let own = at + part * 4u * p.n;
        stats[own + 3u * p.n] = divided(e_to(stats[own] - most), sum);
    }
}
