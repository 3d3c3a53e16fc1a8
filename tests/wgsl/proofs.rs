//! Kernels that are compiled without run-time checks (`PROVED`) need none: tests/wgsl/ranges.rs proves of each of their texts,
//! at sizes that fit no tile, that every index is inside its array and that every loop ends.

use crate::ranges::{Sizes, doubts};
use crate::{assert_fine, parsed};
use finetune::backend::wgpu::{Entry, PROVED, catalogue};
use finetune::numeric::block::Block;
use std::collections::BTreeMap;

/// A product of m x k by k x n numbers. Buffers end with the last number that is theirs.
fn product(entry: &Entry, (m, n, k): (u32, u32, u32)) -> Sizes {
    let constant = |name| entry.constant(name).unwrap_or(0);
    let (out_at, a_at) = (3, 5);
    let block = constant("ENCODING").checked_sub(3).map(|at| &Block::ALL[at as usize]);
    let b_at = if block.is_some() { 0 } else { 2 };
    let across = |name, rows, cols| if constant(name) == 1 { (1, rows) } else { (cols, 1) };
    let ((a_row, a_k), (b_col, b_k)) = (across("LEFT_ACROSS", m, k), across("RIGHT_ACROSS", n, k));
    let words = match (block, constant("ENCODING")) {
        // A word behind the last.
        (Some(block), _) => (block.size_of((n * k) as usize) as u32).div_ceil(4) + 1,
        (None, 0) => b_at + n * k,
        (None, _) => (b_at + n * k).div_ceil(2),
    };
    // Two parts, of whole slices of k.
    let (parts, terms) =
        if constant("SPLIT") == 1 { (2, k.div_ceil(2).next_multiple_of(16)) } else { (1, k) };
    let (rows, cols) = (entry.constant("BM").unwrap_or(64), entry.constant("BN").unwrap_or(64));
    Sizes {
        params: BTreeMap::from([
            ("out_at", out_at),
            ("out_stride", n),
            ("a_at", a_at),
            ("a_row", a_row),
            ("a_k", a_k),
            ("b_at", b_at),
            ("b_k", b_k),
            ("b_col", b_col),
            ("m", m),
            ("n", n),
            ("k", k),
            ("add", 1),
            ("parts", parts),
            ("terms", terms),
        ]),
        buffers: BTreeMap::from([
            ("out", (out_at + parts * m * n, 0)),
            ("a", (a_at + m * k, 0)),
            ("b", (words, u32::MAX)),
        ]),
        // More than are needed, as a grid of two dimensions has.
        groups: parts * m.div_ceil(rows) * n.div_ceil(cols) + 3,
    }
}

/// Attention over 70 tokens. Queries are the tokens from `begin` on, keys are all tokens. `heads` is the number of heads of
/// queries, `kv_heads` that of keys and values. Each buffer ends with the last number that is its own.
fn attention(entry: &Entry, window: u32, (begin, heads, kv_heads): (u32, u32, u32)) -> Sizes {
    let (tokens, count) = (70, 70 - begin);
    let size = entry.constant("SIZE").unwrap_or(0);
    let (wide, narrow) = (tokens * heads * size, tokens * kv_heads * size);
    let starts = ["out_at", "lse_at", "q_at", "k_at", "v_at", "dout_at", "dq_at", "dk_at", "dv_at"];
    let mut params: BTreeMap<_, _> = starts.into_iter().zip(1..).collect();
    let buffers = [
        ("out", wide),
        ("q", wide),
        ("dout", wide),
        ("dq", wide),
        ("k", narrow),
        ("v", narrow),
        ("dk", narrow),
        ("dv", narrow),
    ];
    let mut buffers: BTreeMap<_, _> =
        buffers.map(|(name, length)| (name, (length + params[format!("{name}_at").as_str()], 0))).into();
    buffers.insert("logsumexp", (params["lse_at"] + tokens * heads, 0));
    buffers.insert("saved", (2 * tokens * heads, 0));
    buffers.insert("integers", (4 * tokens, tokens));
    params.extend([("tokens", tokens), ("begin", begin), ("count", count)]);
    params.extend([("heads", heads), ("kv_heads", kv_heads), ("window", window)]);
    Sizes { params, buffers, groups: count.div_ceil(32) * heads + 3 }
}

/// The sizes for which a text is proved.
fn cases(entry: &Entry) -> Vec<Sizes> {
    if entry.stem().starts_with("flash") {
        let cases = [(7, (5, 6, 2)), (u32::MAX, (5, 6, 2)), (u32::MAX, (0, 3, 3))];
        return cases.map(|(window, shape)| attention(entry, window, shape)).into();
    }
    let blocks = entry.constant("ENCODING").is_some_and(|encoding| encoding >= 3);
    // Blocks are whole along a row.
    let sizes = if blocks { [(3, 256, 256), (70, 512, 256)] } else { [(1, 1, 1), (67, 131, 77)] };
    sizes.map(|sizes| product(entry, sizes)).into()
}

#[test]
fn kernels_without_checks_index_inside_and_end() {
    let entries: Vec<Entry> =
        catalogue().0.into_iter().filter(|entry| PROVED.contains(&entry.stem())).collect();
    assert!(PROVED.iter().all(|name| entries.iter().any(|entry| entry.stem() == *name)));
    assert_fine(&entries, |entry| {
        let parsed = parsed(&entry.text).unwrap();
        let all = cases(entry).into_iter().flat_map(|sizes| doubts(&entry.text, &parsed, &sizes));
        all.map(|doubt| format!("{}: {doubt}", entry.name)).collect::<Vec<_>>()
    });
}

/// A kernel, a text in it, and what comes in its place.
const FAULTS: &[(&str, &str, &str)] = &[
    ("product_tiled", "min(row, p.m - 1u)", "row"),
    ("product_tiled", "min(k, p.k - 1u)", "k"),
    ("product_tiled", "min(col, p.n - 1u)", "col"),
    ("product_tiled", "row < p.m && col < p.n", "row < p.m"),
    ("product_tiled", "row < p.m && col < p.n", "col < p.n"),
    ("product_tiled", "k < 16u", "k < 17u"),
    ("product_tiled", "k += 1u", "k += 0u"),
    ("product_tiled", "k0 < end", "k0 < end + k0"),
    ("product_tiled", "k0 += 16u", "k0 -= 16u"),
    ("product_tiled", "e / 16u", "e / 15u"),
    ("product_coop", "e % 64u * 40u", "e % 64u * 41u"),
    ("product_coop", "x < 64u", "x < 65u"),
    ("product_coop", "x < 32u", "x < 64u"),
    ("product_coop", "base += subgroups", "base += subgroup"),
    ("product_coop", "(base + subgroup) % 4u", "(base + subgroup)"),
    ("flash", "min(row + 3u, p.tokens - 1u)", "(row + 3u)"),
    ("flash", "e < 256u", "e <= 256u"),
    ("flash", "start += 32u", "start += 0u"),
    ("flash", "start <= last", "start >= last"),
    ("flash_grad_kv", "vec4<u32>(end - 1u)", "vec4<u32>(end)"),
    ("flash_grad_kv", "4u < SIZE", "4u <= SIZE"),
    ("flash_grad_q", "query0 * p.heads", "query0 / (p.heads - 6u)"),
];

#[test]
fn wrong_index_or_endless_loop_is_detected() {
    let (entries, _) = catalogue();
    // Sizes that fit no tile, numbers as they are stored in bf16, heads of 80.
    let wanted = |name, value| move |entry: &&Entry| entry.constant(name).is_none_or(|found| found == value);
    for (kernel, text, instead) in FAULTS {
        let of = entries.iter().filter(|entry| entry.stem() == *kernel);
        let of = of.filter(wanted("ENCODING", 1)).filter(wanted("SIZE", 80));
        let all: Vec<&Entry> = of.filter(|entry| entry.text.contains(text)).collect();
        assert!(!all.is_empty(), "{kernel} has no `{text}`");
        let noticed = |entry: &&Entry| {
            let text = entry.text.replace(text, instead);
            let parsed = parsed(&text).unwrap_or_else(|why| panic!("{kernel}: `{instead}`: {why}"));
            cases(entry).iter().any(|sizes| !doubts(&text, &parsed, sizes).is_empty())
        };
        assert!(all.into_iter().take(2).all(|entry| noticed(&entry)), "{kernel}: `{instead}` for `{text}`");
    }
}

#[test]
fn store_into_a_part_of_a_variable_is_doubted() {
    for (store, count) in [("", 0), ("at.y = 9u;", 1)] {
        let text = format!(
            "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
            @compute @workgroup_size(64) fn main(@builtin(workgroup_id) group: vec3<u32>) {{
                var at = group;
                {store}
                let all = at;
                out[all.y] = 7u;
            }}"
        );
        let buffers = BTreeMap::from([("out", (4, u32::MAX))]);
        let found = doubts(&text, &parsed(&text).unwrap(), &Sizes { buffers, groups: 1, ..Sizes::default() });
        assert_eq!(found.len(), count, "{store}: {found:?}");
    }
}
