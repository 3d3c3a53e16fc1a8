// The folds of rows.wgsl with subgroups of any size from 4 to 64: each adds up its own lanes, then every lane adds up
// the subgroups in order. A workgroup's lanes fill its subgroups one after the other; where a driver deals them
// otherwise, the check on the device fails and this variant is dropped. On software adapters, which pay for every
// barrier, a workgroup is one subgroup.
#if WIDTH <= 8
fn sum_of_lanes(value: f32, lane: u32) -> f32 {
    return subgroupAdd(value);
}

fn max_of_lanes(value: f32, lane: u32) -> f32 {
    return subgroupMax(value);
}
#else
var<workgroup> folded: array<f32, 64>;

fn sum_of_lanes(value: f32, lane: u32) -> f32 {
    let part = subgroupAdd(value);
    let size = subgroupAdd(1u);
    workgroupBarrier();
    if (lane % size == 0u) {
        folded[lane / size] = part;
    }
    workgroupBarrier();
    var sum = folded[0];
    for (var i = 1u; i < WIDTH / size; i++) {
        sum += folded[i];
    }
    return sum;
}

fn max_of_lanes(value: f32, lane: u32) -> f32 {
    let part = subgroupMax(value);
    let size = subgroupAdd(1u);
    workgroupBarrier();
    if (lane % size == 0u) {
        folded[lane / size] = part;
    }
    workgroupBarrier();
    var most = folded[0];
    for (var i = 1u; i < WIDTH / size; i++) {
        most = max(most, folded[i]);
    }
    return most;
}
#end
