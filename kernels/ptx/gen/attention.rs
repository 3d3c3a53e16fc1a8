//! Attention of the baseline, flash-style in f32, on tiles of `attention_tile`.

use crate::attention_tile::{
    Load, Tile, accumulate, begin, load, of_row, put, registers, scores, write_rows,
};
use crate::{File, Text, Uses, window};

const FORWARD: [Tile; 3] = [Tile { d: 64, b: 32 }, Tile { d: 128, b: 32 }, Tile { d: 256, b: 16 }];

const HEAD: &str = "
attention: out[T, H D] = softmax(scale q k^T) v; logsumexp[T, H]. Query i sees key j of its row if
0 <= i - j < window (2^30: no window).

  block (x, h): queries of part x % (32 / B) of the block list's entry x / (32 / B) = (first, count, row start, end)
  q_tile = scale * q;  m = -2^126, l = 0, acc = 0 per query
  for j0 in first key that the first query sees, rounded down to B .. keys seen by the last query, step B:
      kv_tile = k[j0 ..];   s = q_tile kv_tile^T, -inf where query r, at first - start + past + r, does not see j
      m' = max(m, largest of s);  p = 2^((s - m') log2 e);  shrink = 2^((m - m') log2 e)
      l = l shrink + sum of p;  acc = acc shrink;  p_tile = p
      kv_tile = v[j0 ..];   acc += p_tile kv_tile
  out = acc / l;  logsumexp = m + ln l

m is finite, so that a tile of which a query sees nothing leaves it, with p = 0. Never holds T x T. Sums run in the order of d, of keys within a tile, and of tiles. One entry per size of head: 64,
128, 256; smaller heads are padded with zeros in shared memory.
launch: grid (blocks * 32 / B, H), 4 B threads; B = 32, 32, 16.
registers: 2 x D / 8 sums, 2 x B / 8 scores, running m and l of two rows.
budget: 168 registers, 37248 bytes of shared memory
";

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_70"));
    FORWARD.iter().for_each(|tile| forward(&mut t, *tile));
    vec![t.finish("attention.ptx")]
}

/// The first parameters of the forward pass: outputs and their logsumexp, inputs, the tokens of each block of threads, the
/// numbers of heads and their width.
pub(super) const PARAMS: [(&str, &str); 9] = [
    ("u64", "out"),
    ("u64", "lse"),
    ("u64", "q"),
    ("u64", "k"),
    ("u64", "v"),
    ("u64", "blocks"),
    ("u32", "hq"),
    ("u32", "hkv"),
    ("u32", "d"),
];

/// Declarations, parameters, and the keys that the block's queries attend to.
fn open_forward(t: &mut Text, tile: Tile) {
    let (n, columns) = (tile.scores(), tile.columns());
    let params = [&PARAMS[..], &[("u32", "past"), ("f32", "scale"), window::PARAM]].concat();
    t.entry(&format!("attention_{}", tile.d), &params, tile.threads());
    registers(t, tile);
    t.code(format!(
        ".reg .f32 %acc<{}>, %s<{}>, %m<2>, %big, %shrink, %by<2>;
         .reg .u64 %out, %lse, %qp, %kp, %vp;
         .reg .u32 %past, %seen, %total, %tok;
         .shared .align 16 .f32 q_tile[{2}];
         .shared .align 16 .f32 kv_tile[{2}];
         .shared .align 16 .f32 p_tile[{3}]",
        2 * columns,
        2 * n,
        tile.b * tile.stride(),
        tile.b * tile.score_stride()
    ));
    begin(t, tile, "%head");
    t.code(
        "ld.param.u64 %out, [out]; ld.param.u64 %lse, [lse]; ld.param.u64 %qp, [q]; ld.param.u64 %kp, [k];
         ld.param.u64 %vp, [v]; ld.param.u32 %past, [past];
         div.u32 %x, %hq, %hkv; div.u32 %group, %head, %x;
         mul.lo.u32 %offq, %head, %d; mul.lo.u32 %offkv, %group, %d;
         sub.u32 %seen, %first, %start; add.u32 %seen, %seen, %past; add.u32 %total, %seen, %count",
    );
    window::first_tile(t, "%seen", tile.b);
}

fn forward(t: &mut Text, tile: Tile) {
    let columns = tile.columns();
    open_forward(t, tile);
    let (queries, keys) = (("%wq", "%offq"), ("%wkv", "%offkv"));
    let q = Load {
        label: "LOAD_Q",
        to: "q_tile",
        pointer: "%qp",
        from: "%first",
        count: "%count",
        wide: queries,
        scaled: Some("%scale"),
    };
    load(t, tile, &q);
    (0..2 * columns).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.code(
        "mov.f32 %m0, 0fFE800000; mov.f32 %m1, 0fFE800000; mov.f32 %l0, 0f00000000; mov.f32 %l1, 0f00000000",
    );
    t.label("KEYS");
    t.code(format!(
        "bar.sync 0; sub.u32 %keys, %total, %j0; min.u32 %keys, %keys, {}; add.u32 %tok, %start, %j0",
        tile.b
    ));
    let k = Load {
        label: "LOAD_K",
        to: "kv_tile",
        pointer: "%kp",
        from: "%tok",
        count: "%keys",
        wide: keys,
        scaled: None,
    };
    load(t, tile, &k);
    t.code("bar.sync 0");
    scores(t, tile, "DOT", ("s", "q_tile", "kv_tile"));
    (0..2).for_each(|i| soften(t, tile, i));
    put(t, tile, ("s", "p_tile"));
    t.code("bar.sync 0");
    load(t, tile, &Load { label: "LOAD_V", pointer: "%vp", ..k });
    t.code("bar.sync 0");
    accumulate(t, tile, "SUM", ("acc", "p_tile", "kv_tile"));
    t.code(format!("add.u32 %j0, %j0, {}; setp.lt.u32 %p, %j0, %total; @%p bra KEYS", tile.b));
    t.code("rcp.approx.f32 %by0, %l0; rcp.approx.f32 %by1, %l1");
    write_rows(t, tile, ("acc", "%out"), queries, &["%by0", "%by1"]);
    logsumexp(t);
    t.end();
}

/// m + ln l of both rows.
fn logsumexp(t: &mut Text) {
    let t = &mut t.part(
        "logsumexp",
        &Uses {
            reads: ".f32 %l<2>, %m<2>; .u32 %cx, %g, %count, %first, %head, %hq; .u64 %lse",
            scratch: ".f32 %v; .u32 %r, %x; .u64 %wide, %row; .pred %p, %q",
            ..Uses::default()
        },
    );
    t.say("logsumexp, by the first thread of each row");
    t.code("setp.eq.u32 %q, %cx, 0");
    for i in 0..2 {
        t.code(format!(
            "lg2.approx.f32 %v, %l{i}; fma.rn.f32 %v, %v, 0f3F317218, %m{i};
             shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; setp.lt.u32 %p, %r, %count; and.pred %p, %p, %q;
             add.u32 %x, %first, %r; cvt.u64.u32 %wide, %head; mad.wide.u32 %row, %x, %hq, %wide;
             shl.b64 %row, %row, 2; add.u64 %row, %row, %lse; @%p st.global.f32 [%row], %v"
        ));
    }
}

/// Converts row i of a tile of scores to probabilities under the new running maximum.
fn soften(t: &mut Text, tile: Tile, i: usize) {
    let (n, columns) = (tile.scores(), tile.columns());
    t.say(&format!("row {i}: what it does not see, its largest, exponentials and their sum"));
    t.code(format!(
        "shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; add.u32 %r, %r, %seen; sub.u32 %r, %r, %j0; sub.u32 %r, %r, %cx;
         mov.f32 %big, %m{i}"
    ));
    for s in (0..n).map(|j| format!("%s{}", i * n + j)).enumerate().map(|(j, s)| (8 * j, s)) {
        t.code(format!(
            "sub.u32 %c, %r, {}; setp.ge.u32 %p, %c, %window; selp.f32 {1}, 0fFF800000, {1}, %p;
             max.f32 %big, %big, {1}",
            s.0, s.1
        ));
    }
    of_row(t, "max", "%big");
    t.code(format!(
        "sub.f32 %shrink, %m{i}, %big; mul.f32 %shrink, %shrink, 0f3FB8AA3B; ex2.approx.f32 %shrink, %shrink;
         mov.f32 %m{i}, %big; mov.f32 %v, 0f00000000"
    ));
    for s in (0..n).map(|j| format!("%s{}", i * n + j)) {
        t.code(format!(
            "sub.f32 {s}, {s}, %big; mul.f32 {s}, {s}, 0f3FB8AA3B; ex2.approx.f32 {s}, {s}; add.f32 %v, %v, {s}"
        ));
    }
    of_row(t, "add", "%v");
    t.code(format!("fma.rn.f32 %l{i}, %l{i}, %shrink, %v"));
    (0..columns).for_each(|j| t.code(format!("mul.f32 %acc{0}, %acc{0}, %shrink", i * columns + j)));
}
