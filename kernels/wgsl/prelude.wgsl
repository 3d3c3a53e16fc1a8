// Stands before every kernel.

// A grid of workgroups is two-dimensional because a dimension ends at 65,535; this is its row-major number.
fn flat(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.y * groups.x + group.x;
}
