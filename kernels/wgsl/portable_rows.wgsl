// Sixteen lanes have a row: partial sum i has elements i, i + 16, ..., and the halves are folded onto each other, as on the
// CPU. A workgroup has four rows. Lanes of rows that are not there take part in barriers.
var<workgroup> folded: array<f32, 64>;

fn sum_of_lanes(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    folded[lane] = value;
    workgroupBarrier();
    for (var half = 8u; half > 0u; half >>= 1u) {
        if (lane % 16u < half) {
            folded[lane] += folded[lane + half];
        }
        workgroupBarrier();
    }
    return folded[lane / 16u * 16u];
}

fn max_of_lanes(value: f32, lane: u32) -> f32 {
    workgroupBarrier();
    folded[lane] = value;
    workgroupBarrier();
    for (var half = 8u; half > 0u; half >>= 1u) {
        if (lane % 16u < half) {
            folded[lane] = max(folded[lane], folded[lane + half]);
        }
        workgroupBarrier();
    }
    return folded[lane / 16u * 16u];
}
