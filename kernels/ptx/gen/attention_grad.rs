//! The gradient of attention, in three kernels: delta = dout . out per query and head; dq by blocks of queries; dk
//! and dv by blocks of keys, over the query heads that share them, in order, so that nothing is added atomically.

use crate::attention_tile::{Load, Tile, accumulate, begin, load, put, registers, scores, write_rows};
use crate::{File, Text, Uses, window};

const BACKWARD: [Tile; 3] = [Tile { d: 64, b: 32 }, Tile { d: 128, b: 16 }, Tile { d: 256, b: 8 }];

const HEAD: &str = "
attention_grad: dq[T, H D], dk[T, G D], dv[T, G D] from dout, the saved logsumexp and out. Query i sees key j of its row if
0 <= i - j < window (2^30: no window).

  attention_grad_delta:  a warp per (query, head): delta = dout . out
  attention_grad_q, block (x, h) has B queries:        attention_grad_kv, block (x, g) has B keys:
      for tiles of B keys that they see:                   for query heads h of g, for tiles of B queries that see them:
          dp = dout v^T;  s = q k^T                            dp = v dout^T;  s = k q^T
          p = 2^((scale s - logsumexp) log2 e), 0 where not seen
          ds = scale p (dp - delta)
          dq += ds k                                           dk += ds q;  dv += p dout

Probabilities are recomputed from the logsumexp. Sums run in the order of d, of rows within a tile, of tiles, of
heads. One entry per size of head: 64, 128, 256.
launch: delta: grid ceil(T H / 4), 128 threads; q and kv: grid (blocks * 32 / B, H or G), 4 B threads; B = 32, 16, 8.
registers: 2 x D / 8 sums (kv: twice), 2 x B / 8 scores twice, logsumexp and delta of a thread's queries.
budget: 255 registers, 41728 bytes of shared memory
";

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_70"));
    delta(&mut t, "attention_grad_delta", Stored::F32);
    BACKWARD.iter().for_each(|tile| grad_q(&mut t, *tile));
    BACKWARD.iter().for_each(|tile| grad_kv(&mut t, *tile));
    vec![t.finish("attention_grad.ptx")]
}

/// The type in which the output's gradient is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    F32,
    Bf16,
}

/// delta = dout . out, a warp per (query, head).
pub fn delta(t: &mut Text, name: &str, stored: Stored) {
    let (bytes, bits) = if stored == Stored::F32 { (4, 2) } else { (2, 1) };
    let params = [("u64", "delta"), ("u64", "dout"), ("u64", "out"), ("u32", "rows"), ("u32", "d")];
    t.entry(name, &params, 128);
    if stored == Stored::Bf16 {
        t.code(".reg .b16 %h; .reg .b32 %w");
    }
    t.code(
        ".reg .u64 %delta, %dout, %out, %row; .reg .u32 %r, %rows, %d, %lane, %x, %i;
         .reg .f32 %a, %b, %sum, %other; .reg .pred %p;
         ld.param.u64 %delta, [delta]; ld.param.u64 %dout, [dout]; ld.param.u64 %out, [out];
         ld.param.u32 %rows, [rows]; ld.param.u32 %d, [d];
         mov.u32 %lane, %tid.x; shr.u32 %r, %lane, 5; and.b32 %lane, %lane, 31; mov.u32 %x, %ctaid.x;
         mad.lo.u32 %r, %x, 4, %r; setp.ge.u32 %p, %r, %rows; @%p ret;
         mul.wide.u32 %row, %r, %d; shl.b64 %row, %row, 2; mad.wide.u32 %row, %lane, 4, %row;
         add.u64 %out, %out, %row; mov.f32 %sum, 0f00000000; mov.u32 %i, %lane",
    );
    if stored == Stored::Bf16 {
        t.code(format!(
            "mul.wide.u32 %row, %r, %d; shl.b64 %row, %row, {bits}; mad.wide.u32 %row, %lane, {bytes}, %row"
        ));
    }
    t.code("add.u64 %dout, %dout, %row; setp.ge.u32 %p, %i, %d; @%p bra SUMMED");
    t.label("SUM");
    t.code(match stored {
        Stored::F32 => "ld.global.nc.f32 %a, [%dout]",
        Stored::Bf16 => "ld.global.nc.b16 %h, [%dout]; mov.b32 %w, {0, %h}; mov.b32 %a, %w",
    });
    t.code(format!("add.u64 %dout, %dout, {}", 32 * bytes));
    t.code(
        "ld.global.nc.f32 %b, [%out]; fma.rn.f32 %sum, %a, %b, %sum;
         add.u64 %out, %out, 128; add.u32 %i, %i, 32;
         setp.lt.u32 %p, %i, %d; @%p bra SUM",
    );
    t.label("SUMMED");
    for by in [16, 8, 4, 2, 1] {
        t.code(format!("shfl.sync.bfly.b32 %other, %sum, {by}, 31, 0xffffffff; add.f32 %sum, %sum, %other"));
    }
    t.code("setp.eq.u32 %p, %lane, 0; mad.wide.u32 %delta, %r, 4, %delta; @%p st.global.f32 [%delta], %sum");
    t.end();
}

pub(super) const INPUTS: [(&str, &str); 12] = [
    ("u64", "q"),
    ("u64", "k"),
    ("u64", "v"),
    ("u64", "dout"),
    ("u64", "lse"),
    ("u64", "delta"),
    ("u64", "blocks"),
    ("u32", "hq"),
    ("u32", "hkv"),
    ("u32", "d"),
    ("f32", "scale"),
    window::PARAM,
];

fn declare(t: &mut Text, tile: Tile, tiles: &[&str], scores: &[&str]) {
    registers(t, tile);
    let n = tile.scores();
    t.code(format!(
        ".reg .f32 %s<{0}>, %dp<{0}>, %lse<{1}>, %delta<{1}>;
         .reg .u64 %qp, %kp, %vp, %dop, %lsep, %deltap; .reg .u32 %total, %tok, %seen",
        2 * n,
        n.max(2)
    ));
    let size = tile.b * tile.stride();
    tiles.iter().for_each(|name| t.code(format!(".shared .align 16 .f32 {name}[{size}]")));
    let size = tile.b * (tile.b + 1);
    scores.iter().for_each(|name| t.code(format!(".shared .align 16 .f32 {name}[{size}]")));
}

fn pointers(t: &mut Text) {
    t.code(
        "ld.param.u64 %qp, [q]; ld.param.u64 %kp, [k]; ld.param.u64 %vp, [v]; ld.param.u64 %dop, [dout];
         ld.param.u64 %lsep, [lse]; ld.param.u64 %deltap, [delta]",
    );
}

/// %lse{i} and %delta{i} of the query token %x of head %head, 0 where not %p.
fn of_query(t: &mut Text, i: usize) {
    let t = &mut t.part(
        "of_query",
        &Uses {
            reads: ".u32 %x, %hq, %head; .u64 %lsep, %deltap; .pred %p",
            changes: &format!(".f32 %lse{i}, %delta{i}"),
            scratch: ".u64 %wide, %row",
        },
    );
    t.code(format!(
        "cvt.u64.u32 %wide, %head; mad.wide.u32 %row, %x, %hq, %wide; shl.b64 %row, %row, 2;
         add.u64 %wide, %row, %deltap; add.u64 %row, %row, %lsep; mov.f32 %lse{i}, 0f00000000;
         mov.f32 %delta{i}, 0f00000000; @%p ld.global.nc.f32 %lse{i}, [%row]; @%p ld.global.nc.f32 %delta{i}, [%wide]"
    ));
}

/// Replaces s by p and dp by ds at one place; %p is set if the place is masked.
fn soften(t: &mut Text, at: usize, query: usize) {
    let t = &mut t.part(
        "soften",
        &Uses {
            reads: &format!(".f32 %scale, %lse{query}, %delta{query}; .pred %p"),
            changes: &format!(".f32 %s{at}, %dp{at}"),
            ..Uses::default()
        },
    );
    t.code(format!(
        "mul.f32 %s{at}, %s{at}, %scale; sub.f32 %s{at}, %s{at}, %lse{query}; mul.f32 %s{at}, %s{at}, 0f3FB8AA3B;
         ex2.approx.f32 %s{at}, %s{at}; selp.f32 %s{at}, 0f00000000, %s{at}, %p;
         sub.f32 %dp{at}, %dp{at}, %delta{query}; mul.f32 %dp{at}, %dp{at}, %s{at};
         mul.f32 %dp{at}, %dp{at}, %scale"
    ));
}

fn open_q(t: &mut Text, tile: Tile) {
    let columns = tile.columns();
    let params: Vec<_> = std::iter::once(("u64", "dq")).chain(INPUTS).collect();
    t.entry(&format!("attention_grad_q_{}", tile.d), &params, tile.threads());
    declare(t, tile, &["q_tile", "do_tile", "kv_tile"], &["ds_tile"]);
    t.code(format!(".reg .f32 %acc<{}>; .reg .u64 %dq", 2 * columns));
    begin(t, tile, "%head");
    pointers(t);
    t.code(
        "ld.param.u64 %dq, [dq]; div.u32 %x, %hq, %hkv; div.u32 %group, %head, %x;
         mul.lo.u32 %offq, %head, %d; mul.lo.u32 %offkv, %group, %d;
         sub.u32 %seen, %first, %start; add.u32 %total, %seen, %count",
    );
    window::first_tile(t, "%seen", tile.b);
}

fn grad_q(t: &mut Text, tile: Tile) {
    let (n, columns) = (tile.scores(), tile.columns());
    open_q(t, tile);
    let (queries, keys) = (("%wq", "%offq"), ("%wkv", "%offkv"));
    let q = Load {
        label: "LOAD_Q",
        to: "q_tile",
        pointer: "%qp",
        from: "%first",
        count: "%count",
        wide: queries,
        scaled: None,
    };
    load(t, tile, &q);
    load(t, tile, &Load { label: "LOAD_DO", to: "do_tile", pointer: "%dop", ..q });
    for i in 0..2 {
        t.code(format!(
            "shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; setp.lt.u32 %p, %r, %count; add.u32 %x, %first, %r"
        ));
        of_query(t, i);
    }
    (0..2 * columns).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.label("KEYS");
    t.code(format!(
        "bar.sync 0; sub.u32 %keys, %total, %j0; min.u32 %keys, %keys, {}; add.u32 %tok, %start, %j0",
        tile.b
    ));
    let v = Load {
        label: "LOAD_V",
        to: "kv_tile",
        pointer: "%vp",
        from: "%tok",
        count: "%keys",
        wide: keys,
        scaled: None,
    };
    load(t, tile, &v);
    t.code("bar.sync 0");
    scores(t, tile, "DOT_V", ("dp", "do_tile", "kv_tile"));
    t.code("bar.sync 0");
    load(t, tile, &Load { label: "LOAD_K", pointer: "%kp", ..v });
    t.code("bar.sync 0");
    scores(t, tile, "DOT_K", ("s", "q_tile", "kv_tile"));
    for (i, j) in (0..2 * n).map(|x| (x / n, x % n)) {
        t.code(format!(
            "shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; add.u32 %r, %r, %seen;
             add.u32 %c, %j0, %cx; add.u32 %c, %c, {}; sub.u32 %c, %r, %c; setp.ge.u32 %p, %c, %window",
            8 * j
        ));
        soften(t, i * n + j, i);
    }
    put(t, tile, ("dp", "ds_tile"));
    t.code("bar.sync 0");
    accumulate(t, tile, "SUM", ("acc", "ds_tile", "kv_tile"));
    t.code(format!("add.u32 %j0, %j0, {}; setp.lt.u32 %p, %j0, %total; @%p bra KEYS", tile.b));
    write_rows(t, tile, ("acc", "%dq"), queries, &[]);
    t.end();
}

fn open_kv(t: &mut Text, tile: Tile) {
    let columns = tile.columns();
    let params: Vec<_> = [("u64", "dk"), ("u64", "dv")].into_iter().chain(INPUTS).collect();
    t.entry(&format!("attention_grad_kv_{}", tile.d), &params, tile.threads());
    declare(t, tile, &["k_tile", "v_tile", "q_tile", "do_tile"], &["p_tile", "ds_tile"]);
    t.code(format!(
        ".reg .f32 %ka<{0}>, %va<{0}>; .reg .u64 %dk, %dv; .reg .u32 %shared, %last, %end",
        2 * columns
    ));
    begin(t, tile, "%group");
    pointers(t);
    t.code(
        "ld.param.u64 %dk, [dk]; ld.param.u64 %dv, [dv]; div.u32 %shared, %hq, %hkv;
         mul.lo.u32 %offkv, %group, %d; mul.lo.u32 %head, %group, %shared; add.u32 %last, %head, %shared",
    );
    window::last_query(t);
}

fn grad_kv(t: &mut Text, tile: Tile) {
    let columns = tile.columns();
    open_kv(t, tile);
    let (queries, keys) = (("%wq", "%offq"), ("%wkv", "%offkv"));
    let k = Load {
        label: "LOAD_K",
        to: "k_tile",
        pointer: "%kp",
        from: "%first",
        count: "%count",
        wide: keys,
        scaled: None,
    };
    load(t, tile, &k);
    load(t, tile, &Load { label: "LOAD_V", to: "v_tile", pointer: "%vp", ..k });
    for i in 0..2 * columns {
        t.code(format!("mov.f32 %ka{i}, 0f00000000; mov.f32 %va{i}, 0f00000000"));
    }
    t.label("HEADS");
    t.code("mul.lo.u32 %offq, %head, %d; mov.u32 %j0, %first");
    t.label("QUERIES");
    t.code(format!("bar.sync 0; sub.u32 %keys, %stop, %j0; min.u32 %keys, %keys, {}", tile.b));
    let q = Load {
        label: "LOAD_Q",
        to: "q_tile",
        pointer: "%qp",
        from: "%j0",
        count: "%keys",
        wide: queries,
        scaled: None,
    };
    load(t, tile, &q);
    load(t, tile, &Load { label: "LOAD_DO", to: "do_tile", pointer: "%dop", ..q });
    t.code("bar.sync 0");
    scores(t, tile, "DOT_V", ("dp", "v_tile", "do_tile"));
    scores(t, tile, "DOT_K", ("s", "k_tile", "q_tile"));
    soften_queries(t, tile);
    put(t, tile, ("s", "p_tile"));
    put(t, tile, ("dp", "ds_tile"));
    t.code("bar.sync 0");
    accumulate(t, tile, "SUM_K", ("ka", "ds_tile", "q_tile"));
    accumulate(t, tile, "SUM_V", ("va", "p_tile", "do_tile"));
    t.code(format!("add.u32 %j0, %j0, {}; setp.lt.u32 %p, %j0, %end; @%p bra QUERIES", tile.b));
    t.code("add.u32 %head, %head, 1; setp.lt.u32 %p, %head, %last; @%p bra HEADS");
    write_rows(t, tile, ("ka", "%dk"), keys, &[]);
    write_rows(t, tile, ("va", "%dv"), keys, &[]);
    t.end();
}

/// Columns are queries here: token %j0 + cx + 8 j sees the key %first + 2 g + i if it is in the same row and the key is
/// in its window.
fn soften_queries(t: &mut Text, tile: Tile) {
    let n = tile.scores();
    for j in 0..n {
        t.code(format!("add.u32 %x, %j0, %cx; add.u32 %x, %x, {}; setp.lt.u32 %p, %x, %stop", 8 * j));
        of_query(t, j);
    }
    for (i, j) in (0..2 * n).map(|x| (x / n, x % n)) {
        t.code(format!(
            "shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; add.u32 %r, %r, %first;
             add.u32 %x, %j0, %cx; add.u32 %x, %x, {}; setp.ge.u32 %q, %x, %stop; sub.u32 %x, %x, %r;
             setp.ge.u32 %p, %x, %window; or.pred %p, %p, %q",
            8 * j
        ));
        soften(t, i * n + j, j);
    }
}
