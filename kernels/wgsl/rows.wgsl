// Sums and maxima over the 256 lanes of a workgroup, in one order: halves are folded onto each other.
var<workgroup> folded: array<f32, 256>;

fn sum_of_lanes(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    folded[lane] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half >>= 1u) {
        if (lane < half) {
            folded[lane] += folded[lane + half];
        }
        workgroupBarrier();
    }
    return folded[0];
}

fn max_of_lanes(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    folded[lane] = value;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half >>= 1u) {
        if (lane < half) {
            folded[lane] = max(folded[lane], folded[lane + half]);
        }
        workgroupBarrier();
    }
    return folded[0];
}
