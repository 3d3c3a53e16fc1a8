// For software adapters, which load lane by lane, branch for each load, and multiply whole vectors: a workgroup is one
// subgroup of LANES and owns TM x (LANES * TN) outputs. Each lane loads some k of a's rows and hands them to all by
// broadcasts, so a number of a is loaded once; b comes in vectors where rows are aligned to them (VECTOR). No
// workgroup memory, no barrier. Terms are added in ascending k.
@compute @workgroup_size($LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let across = (p.n + ${LANES * TN - 1}u) / ${LANES * TN}u;
    let number = flat(group, groups);
    if (number >= across * ((p.m + ${TM - 1}u) / ${TM}u)) {
        return;
    }
    let row0 = number / across * ${TM}u;
    let col0 = number % across * ${LANES * TN}u + lane * ${TN}u;
#for i in 0..TM
    let a_at$i = p.a_at + min(row0 + ${i}u, p.m - 1u) * p.a_row;
#for j in 0..TN
    var sum${i}_$j = 0.0;
#end
#end
#if RIGHT_ACROSS && VECTOR
    let b_at = p.b_at + min(col0, p.n - ${TN}u);
#else
#for j in 0..TN
    let b_at$j = p.b_at + min(col0 + ${j}u, p.n - 1u) * p.b_col;
#end
#end
    for (var k0 = 0u; k0 < p.k; k0 += ${KB}u) {
#for h in 0..KB / LANES
        let k_$h = min(k0 + ${h * LANES}u + lane, p.k - 1u) * p.a_k;
        let there$h = k0 + ${h * LANES}u + lane < p.k;
#for i in 0..TM
        let a${i}_$h = select(0.0, a[a_at$i + k_$h], there$h);
#end
#end
#if VECTOR && RIGHT_ACROSS == 0
#for j in 0..TN
#for v in 0..KB / PER
        let w${j}_$v = b[(b_at$j + k0) / ${PER}u + ${v}u];
#end
#end
#end
#for q in 0..KB
        {
#if VECTOR == 0
            let at = min(k0 + ${q}u, p.k - 1u) * p.b_k;
#for j in 0..TN
            let b$j = value_of(b_at$j + at);
#end
#end
#if VECTOR && RIGHT_ACROSS
#for v in 0..TN / PER
            let w$v = b[(b_at + min(k0 + ${q}u, p.k - 1u) * p.b_k) / ${PER}u + ${v}u];
#end
#for j in 0..TN
            let b$j = unpack(w${j / PER}[${j % PER * 4 / PER}], ${j}u);
#end
#end
#if VECTOR && RIGHT_ACROSS == 0
#for j in 0..TN
            let b$j = unpack(w${j}_${q / PER}[${q % PER * 4 / PER}], ${q}u);
#end
#end
#for i in 0..TM
            let x$i = subgroupBroadcast(a${i}_${q / LANES}, ${q % LANES}u);
#for j in 0..TN
            sum${i}_$j = fma(x$i, b$j, sum${i}_$j);
#end
#end
        }
#end
    }
#for i in 0..TM
#for j in 0..TN
    put(row0 + ${i}u, col0 + ${j}u, sum${i}_$j * p.scale);
#end
#end
}
