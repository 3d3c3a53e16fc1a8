// chain := the next number of a chain that depends on all numbers before it.
struct Params { number: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> chain: array<u32>;

@compute @workgroup_size(1)
fn main() {
    chain[0] = chain[0] * 747796405u + p.number;
}
