//! What kernels may take on AMD cards by RADV's compiler: measured on 2026-11-27. Lower a number when
//! a kernel gets smaller; raise one only with the reason in the commit.

/// The Mesa with which it was measured: that of Debian 12.
pub const MESA: &str = "Mesa 22.3.6";

/// RX 6700 to 6800M. That Mesa knows navi31 (RX 7900) as gfx1100, with an early compiler that uses at most 132 registers and spills.
pub const CHIP: &str = "navi22";

/// A kernel and constants, the most vector registers of a lane, the most bytes of workgroup memory. The first row that names a
/// kernel counts. Nothing may spill. The fewer registers, the more
/// subgroups a card runs at a time.
pub const BUDGETS: &[(&str, u32, u32)] = &[
    ("flash SIZE=16", 88, 13_312),
    ("flash SIZE=32", 88, 13_312),
    ("flash SIZE=64", 96, 13_312),
    ("flash SIZE=80", 112, 13_312),
    ("flash SIZE=128", 128, 13_312),
    ("flash SIZE=256", 192, 13_312),
    ("flash_grad_q SIZE=16", 96, 12_288),
    ("flash_grad_q SIZE=32", 96, 12_288),
    ("flash_grad_q SIZE=64", 112, 12_288),
    ("flash_grad_q SIZE=80", 128, 12_288),
    ("flash_grad_q SIZE=128", 144, 12_288),
    ("flash_grad_q SIZE=256", 208, 12_288),
    ("flash_grad_kv SIZE=16", 104, 12_288),
    ("flash_grad_kv SIZE=32", 104, 12_288),
    ("flash_grad_kv SIZE=64", 136, 12_288),
    ("flash_grad_kv SIZE=80", 168, 12_288),
    ("flash_grad_kv SIZE=128", 208, 12_288),
    ("flash_grad_kv SIZE=256 PART=1", 176, 12_288),
    ("flash_grad_kv SIZE=256 PART=2", 192, 12_288),
    ("product_tiled ENCODING=0 BM=64", 48, 8192),
    ("product_tiled ENCODING=1 BM=64", 56, 8192),
    ("product_tiled ENCODING=2 BM=64", 56, 8192),
    ("product_tiled BM=64", 96, 8192),
    ("product_tiled ENCODING=0 BM=16", 32, 5120),
    ("product_tiled ENCODING=1 BM=16", 40, 5120),
    ("product_tiled ENCODING=2 BM=16", 40, 5120),
    ("product_tiled BM=16", 80, 5120),
    ("linear ENCODING=0", 32, 8192),
    ("linear ENCODING=1", 32, 8192),
    ("linear ENCODING=2", 32, 8192),
    ("linear", 64, 8192),
    ("linear_grad ENCODING=0", 32, 8192),
    ("linear_grad ENCODING=1", 32, 8192),
    ("linear_grad ENCODING=2", 32, 8192),
    ("linear_grad", 64, 8192),
    ("matmul", 32, 8192),
    ("fold", 8, 0),
    ("attention", 16, 1536),
    ("attention_cached", 16, 1536),
    ("attention_delta", 8, 0),
    ("attention_grad_q", 24, 2560),
    ("attention_grad_kv", 24, 2560),
    ("convolution_silu", 8, 0),
    ("convolution_silu_grad", 16, 0),
    ("delta_factors", 8, 0),
    ("delta_rule", 16, 16_384),
    ("delta_rule_back", 16, 16_384),
    ("delta_rule_forth", 24, 16_384),
    ("delta_rule_dots", 16, 0),
    ("delta_rule_sums", 16, 0),
    ("convolution", 8, 0),
    ("convolution_grad", 8, 0),
    ("rmsnorm", 8, 1024),
    ("rmsnorm_grad", 8, 1024),
    ("scale_rows", 8, 0),
    ("scale_rows_grad", 8, 1024),
    ("cross_entropy", 16, 1024),
    ("gather_rows", 8, 0),
    ("gather_rows_grad", 8, 0),
    ("fill", 8, 0),
    ("copy", 8, 0),
    ("add", 8, 0),
    ("bias", 8, 0),
    ("widen", 40, 0),
    ("embed ENCODING=0", 8, 0),
    ("embed ENCODING=1", 8, 0),
    ("embed ENCODING=2", 8, 0),
    ("embed", 40, 0),
    ("rope", 8, 0),
    ("gated", 8, 0),
    ("gated_grad", 16, 0),
    ("dropout", 8, 0),
    ("proof", 8, 0),
];

/// Most instructions for a multiply-add in the inner loops of a kernel with these constants, on that chip.
pub const INNER: &[(&str, f64)] = &[
    (
        "product_tiled ENCODING=1 LEFT_ACROSS=0 RIGHT_ACROSS=0 VECTOR=0 HALF=0 SPLIT=0 BM=64 BN=64 BK=16 TM=8 TN=4",
        1.18,
    ),
    (
        "product_tiled ENCODING=1 LEFT_ACROSS=0 RIGHT_ACROSS=0 VECTOR=0 HALF=1 SPLIT=0 BM=64 BN=64 BK=16 TM=8 TN=4",
        1.26,
    ),
    ("flash SIZE=64 PER_LANE=1 CHUNKS=2 LANES=0 PART=0", 1.24),
    ("flash SIZE=128 PER_LANE=2 CHUNKS=4 LANES=0 PART=0", 1.24),
    ("flash_grad_q SIZE=128 PER_LANE=2 CHUNKS=4 LANES=0 PART=0", 1.21),
    ("flash_grad_kv SIZE=128 PER_LANE=2 CHUNKS=4 LANES=0 PART=0", 1.21),
];
