// losses[n] = weight * (logsumexp(logits) - logits[target]) and, in place, logits := weight * (softmax - onehot); one
// workgroup per row. weighted 0: every weight is one.
struct Params { losses_at: u32, logits_at: u32, targets_at: u32, weights_at: u32, count: u32, vocab: u32, weighted: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> losses: array<f32>;
@group(0) @binding(2) var<storage, read_write> logits: array<f32>;
@group(0) @binding(3) var<storage, read> targets: array<u32>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = flat(group, groups);
    if (row >= p.count) {
        return;
    }
    let begin = p.logits_at + row * p.vocab;
    let aim = targets[p.targets_at + row];
    var weight = 1.0;
    if (p.weighted == 1u) {
        weight = weights[p.weights_at + aim];
    }
    let chosen = logits[begin + aim];
    var largest = -3.4e38;
    for (var i = lane; i < p.vocab; i += WIDTH) {
        largest = max(largest, logits[begin + i]);
    }
    largest = max_of_lanes(largest, lane);
    var part = 0.0;
    for (var i = lane; i < p.vocab; i += WIDTH) {
        part += exp(logits[begin + i] - largest);
    }
    let sum = sum_of_lanes(part, lane);
    let by = weight / sum;
    for (var i = lane; i < p.vocab; i += WIDTH) {
        var d = exp(logits[begin + i] - largest) * by;
        if (i == aim) {
            d -= weight;
        }
        logits[begin + i] = d;
    }
    if (lane == 0u) {
        losses[p.losses_at + row] = weight * (log(sum) - (chosen - largest));
    }
}
