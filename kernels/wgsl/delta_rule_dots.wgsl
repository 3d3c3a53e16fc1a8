// ddecay[i] = out dout - v dv and dbeta[i] = (1 - b) dv e, each the product of two vectors of `size`: a lane for each token and
// value head i.
struct Params { ddecay_at: u32, dbeta_at: u32, out_at: u32, dout_at: u32, v_at: u32, dv_at: u32, errors_at: u32, factors_at: u32, n: u32, size: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> ddecay: array<f32>;
@group(0) @binding(2) var<storage, read_write> dbeta: array<f32>;
@group(0) @binding(3) var<storage, read> out: array<f32>;
@group(0) @binding(4) var<storage, read> dout: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;
@group(0) @binding(6) var<storage, read> dv: array<f32>;
@group(0) @binding(7) var<storage, read> errors: array<f32>;
@group(0) @binding(8) var<storage, read> factors: array<f32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = flat(group, groups) * 256u + lane;
    if (i >= p.n) {
        return;
    }
    var of_out = 0.0;
    var of_v = 0.0;
    var of_errors = 0.0;
    for (var j = i * p.size; j < (i + 1u) * p.size; j += 1u) {
        let d = dv[p.dv_at + j];
        of_out += out[p.out_at + j] * dout[p.dout_at + j];
        of_v += v[p.v_at + j] * d;
        of_errors += errors[p.errors_at + j] * d;
    }
    ddecay[p.ddecay_at + i] = of_out - of_v;
    dbeta[p.dbeta_at + i] = (1.0 - factors[p.factors_at + p.n + i]) * of_errors;
}
