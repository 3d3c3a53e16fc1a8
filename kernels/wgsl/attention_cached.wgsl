// Decoding: q holds the last rows of a sequence whose keys and values are all of k and v.
struct Params { out_at: u32, lse_at: u32, q_at: u32, k_at: u32, v_at: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, past: u32, window: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> logsumexp: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;

fn keys(i: u32) -> vec2<u32> {
    let end = p.past + i + 1u;
    let count = min(p.window, end);
    return vec2<u32>(end - count, count);
}
