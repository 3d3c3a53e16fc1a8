// A block of logits [n, count] of a part of the vocabulary, whose first number is `column`: a row becomes e^(logit - largest so
// far), with the CPU's bits. stats [4, n]: largest, sum of these, the target's logit, and what sums so far shrink by. Sixteen
// lanes have a row.
struct Params { logits_at: u32, stats_at: u32, targets_at: u32, n: u32, count: u32, stride: u32, column: u32, begins: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let there = number < p.n;
    let row = min(number, p.n - 1u);
    let at = p.stats_at + row;
    let begin = p.logits_at + row * p.stride;
    var before = -3.4e38;
    var sum = 0.0;
    var chosen = 0.0;
    if (p.begins == 0u) {
        before = stats[at];
        sum = stats[at + p.n];
        chosen = stats[at + 2u * p.n];
    }
    let aim = targets[p.targets_at + row];
    if (aim >= p.column && aim < p.column + p.count) {
        chosen = logits[begin + aim - p.column];
    }
    var largest = before;
    for (var i = lane % 16u; i < p.count; i += 16u) {
        largest = max(largest, logits[begin + i]);
    }
    largest = max_of_lanes(largest, lane);
    var part = 0.0;
    for (var i = lane % 16u; i < p.count; i += 16u) {
        let e = e_to(logits[begin + i] - largest);
        part += e;
        if (there) {
            logits[begin + i] = e;
        }
    }
    let block = sum_of_lanes(part, lane);
    if (there && lane % 16u == 0u) {
        let shrink = e_to(before - largest);
        stats[at] = largest;
        stats[at + p.n] = settled(sum * shrink) + block;
        stats[at + 2u * p.n] = chosen;
        stats[at + 3u * p.n] = shrink;
    }
}
