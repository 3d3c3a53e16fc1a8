// cross_entropy.wgsl with the CPU's bits.
struct Params { losses_at: u32, logits_at: u32, targets_at: u32, weights_at: u32, count: u32, vocab: u32, weighted: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> losses: array<f32>;
@group(0) @binding(2) var<storage, read_write> logits: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<u32>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups) * 4u + lane / 16u;
    let there = number < p.count;
    let row = min(number, p.count - 1u);
    let begin = p.logits_at + row * p.vocab;
    let aim = targets[p.targets_at + row];
    var weight = 1.0;
    if (p.weighted == 1u) {
        weight = weights[p.weights_at + aim];
    }
    let chosen = logits[begin + aim];
    var largest = -3.4e38;
    for (var i = lane % 16u; i < p.vocab; i += 16u) {
        largest = max(largest, logits[begin + i]);
    }
    largest = max_of_lanes(largest, lane);
    var part = 0.0;
    for (var i = lane % 16u; i < p.vocab; i += 16u) {
        part += e_to(logits[begin + i] - largest);
    }
    let sum = sum_of_lanes(part, lane);
    let by = divided(weight, sum);
    if (there) {
        for (var i = lane % 16u; i < p.vocab; i += 16u) {
            let d = settled(e_to(logits[begin + i] - largest) * by);
            logits[begin + i] = select(d, d - weight, i == aim);
        }
        if (lane % 16u == 0u) {
            losses[p.losses_at + row] = weight * (log_of(sum) - (chosen - largest));
        }
    }
}
