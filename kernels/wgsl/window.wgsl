// A query sees itself and the keys before it: those of its row, and window of them at most.

// Query i sees keys first_key(i) ..= i.
fn first_key(i: u32) -> u32 {
    return max(integers[2u * p.tokens + i], i + 1u - min(p.window, i + 1u));
}

// Key j is seen by queries j .. end_of_queries(j).
fn end_of_queries(j: u32) -> u32 {
    return j + min(p.window, integers[3u * p.tokens + j] - j);
}
