// Rows of a microbatch.
struct Params { out_at: u32, lse_at: u32, q_at: u32, k_at: u32, v_at: u32, tokens: u32, first: u32, count: u32, heads: u32, kv_heads: u32, scale: f32, window: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read_write> logsumexp: array<f32>;
@group(0) @binding(3) var<storage, read> q: array<f32>;
@group(0) @binding(4) var<storage, read> k: array<f32>;
@group(0) @binding(5) var<storage, read> v: array<f32>;
@group(0) @binding(6) var<storage, read> integers: array<u32>;

fn keys(i: u32) -> vec3<u32> {
    return vec3<u32>(integers[2u * p.tokens + i], first_key(i), i);
}
