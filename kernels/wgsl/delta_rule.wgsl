// The gated delta rule: a workgroup for each row of tokens, value head and tile of columns. A lane keeps its column of the
// state in shared memory and passes over it once for a token: the update of the token before is applied with the decay.
// No lane reads another's column, so that there is no barrier.
struct Params { out_at: u32, errors_at: u32, state_at: u32, q_at: u32, k_at: u32, v_at: u32, factors_at: u32, tokens: u32, first: u32, count: u32, values: u32, keys: u32, value_size: u32, key_size: u32, columns: u32, continues: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> errors: array<f32>;
@group(0) @binding(3) var<storage, read_write> kept: array<f32>;
@group(0) @binding(4) var<storage, read> q: array<f32>;
@group(0) @binding(5) var<storage, read> k: array<f32>;
@group(0) @binding(6) var<storage, read> v: array<f32>;
@group(0) @binding(7) var<storage, read> factors: array<f32>;
@group(0) @binding(8) var<storage, read> integers: array<u32>;

var<workgroup> state: array<f32, 4096>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let number = flat(group, groups);
    let tiles = (p.value_size + p.columns - 1u) / p.columns;
    let task = p.first + number;
    let j = task % tiles * p.columns + lane;
    if (number >= p.count || lane >= p.columns || j >= p.value_size) {
        return;
    }
    let h = task / tiles % p.values;
    let r = task / tiles / p.values;
    let head = h / (p.values / p.keys) * p.key_size;
    let own = p.state_at + h * p.key_size * p.value_size + j;
    for (var i = 0u; i < p.key_size; i += 1u) {
        state[i * p.columns + lane] = 0.0;
        if (p.continues == 1u) {
            state[i * p.columns + lane] = kept[own + i * p.value_size];
        }
    }
    let begin = integers[4u * p.tokens + r];
    let end = integers[4u * p.tokens + r + 1u];
    var update = 0.0;
    for (var t = begin; t < end; t += 1u) {
        let at = t * p.keys * p.key_size + head;
        let before = (max(t, begin + 1u) - 1u) * p.keys * p.key_size + head;
        let d = factors[p.factors_at + t * p.values + h];
        var read = 0.0;
        var o = 0.0;
        var inner = 0.0;
        for (var i = 0u; i < p.key_size; i += 1u) {
            let key = k[p.k_at + at + i];
            let query = q[p.q_at + at + i];
            let s = d * (state[i * p.columns + lane] + k[p.k_at + before + i] * update);
            state[i * p.columns + lane] = s;
            read += key * s;
            o += query * s;
            inner += query * key;
        }
        let to = (t * p.values + h) * p.value_size + j;
        let e = v[p.v_at + to] - read;
        update = factors[p.factors_at + (p.tokens + t) * p.values + h] * e;
        errors[p.errors_at + to] = e;
        out[p.out_at + to] = o + inner * update;
    }
    if (p.continues == 1u && end > begin) {
        let last = (end - 1u) * p.keys * p.key_size + head;
        for (var i = 0u; i < p.key_size; i += 1u) {
            kept[own + i * p.value_size] = state[i * p.columns + lane] + k[p.k_at + last + i] * update;
        }
    }
}
