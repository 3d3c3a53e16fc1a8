//! Attention by wgmma, sm_90a: 128 queries of one head a block, 64 of them a warpgroup, probabilities as the left
//! operand in registers.

use crate::flash::{Head, entry_of_list, pack, write};
use crate::flash_sm90a::{
    BLOCK, HELD, Left, Operand, Ring, SIZES, Sums, Tile, commit, copy, describe, fence, fills, give, held,
    hold, multiplies, multiply, open, release, take, wait,
};
use crate::operand::Layout;
use crate::{File, Text, Uses, window};

/// Keys of a tile.
const KEYS: usize = 128;
/// k and v of this tile, and of the next.
const SLOTS: usize = 4;

const HEAD: &str = "
attention_sm90a: out[T, H D] = softmax(scale q k^T) v; logsumexp[T, H]. Query i sees key j of its row if 0 <= i - j < window
(2^30: no window).
q, k and v are bf16 rows (narrow of product_sm80.ptx); D is 64 or 128.

  block (x, h): 128 queries of the entry of the list = (first, count, row start, end), the last entry first because
  it has the most keys; n = tiles of 128 keys, from that of the first key seen by the first of them to those seen by the
  last; m begins as -2^126, so that a tile of which a query sees nothing leaves it, with p = 0
  warpgroup 0, one thread of it:                         24 registers
      q tile;  then into four slots in turn: k 0, (k j + 1, v j) for j in 0 .. n - 1, v n - 1
      each slot: wait until it is empty, full[slot] expects a tile, boxes of the tensor maps
  warpgroups 1, 2, queries 0 and 64 of the tile:         240 registers
      s = q k 0^T;  p, m, l of it
      for j in 0 .. n - 1:
          s = q k j + 1^T;  acc += bf16(p) v j           wgmma, one after the other
          meanwhile, once s is there: its k is released;  s = -inf where not seen
              m' = max(m, largest of s);  p = 2^((s - m') scale log2 e);  shrink = 2^((m - m') scale log2 e)
              l = l shrink + sum of p
          once acc is there: its v is released;  acc = acc shrink
      acc += bf16(p) v n - 1
  out = acc / l;  logsumexp = m scale + ln l

Tiles: 128 tokens of a head, for each 64 columns rows of 128 bytes, swizzled; k is an operand along K, v across it. A
thread has rows lane / 4 and those 8 below of its warp's 16, columns 8 i + 2 (lane % 4) and the next: sums of 16 columns,
packed, are a left operand of 16 terms.
A tile that goes beyond the row holds tokens of the next one, or zeros beyond T. What a query does not see has p = 0, so
only a v that is not finite would be seen there: then its own row's outputs are not finite either, nor is the microbatch's
gradient, and the run halts.
Sums: the order of d and of keys in steps of 16, inside as the tensor core has it; l in each of the four lanes of a row
by even and odd columns, then over the lanes by a butterfly 1, 2: not the bits of attention_sm80.
launch: grid (blocks of 128 queries, H), 384 threads, dynamic shared memory as much as the budget says.
map_q, map_k, map_v: boxes 64 x 128 of [T, H D], [T, G D].
registers: a thread that multiplies has D / 2 sums, 64 scores, 32 packed, m and l of two rows, addresses.
budget: 168 registers, {SHARED} bytes of shared memory
promises: HGMMA UTMALDG USETMAXREG
";

const PARAMS: [(&str, &str); 10] = [
    ("u64", "out"),
    ("u64", "lse"),
    ("align 64 .b8", "map_q[128]"),
    ("align 64 .b8", "map_k[128]"),
    ("align 64 .b8", "map_v[128]"),
    ("u64", "blocks"),
    ("u32", "hq"),
    ("u32", "hkv"),
    ("f32", "scale"),
    window::PARAM,
];

fn tile(d: usize) -> Tile {
    Tile { d, rows: KEYS }
}

fn ring(d: usize) -> Ring {
    Ring { held: Tile { d, rows: HELD }.bytes(), slots: SLOTS, bytes: tile(d).bytes() }
}

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    let shared = SIZES.map(|d| ring(d).shared()).into_iter().max().unwrap_or(0);
    t.head(&HEAD.replace("{SHARED}", &shared.to_string()), ("8.0", "sm_90a"));
    t.line(".extern .shared .align 16 .b8 tiles[];\n");
    SIZES.into_iter().for_each(|d| forward(&mut t, d));
    vec![t.finish("attention_sm90a.ptx")]
}

fn forward(t: &mut Text, d: usize) {
    t.entry_within(&format!("attention_sm90a_{d}"), &PARAMS, BLOCK);
    open(t, ring(d), &["map_q", "map_k", "map_v"]);
    t.code(format!(
        ".reg .f32 %acc<{}>, %s<64>, %m<2>, %l<2>, %shrink<2>, %big, %low, %sum; .reg .b32 %fp<32>;
         .reg .u64 %dq, %dk, %dv, %at, %out<2>, %lse;
         .reg .u32 %end, %total, %column, %tok, %next, %j0, %kbar, %vbar, %mine, %wfirst, %r; .reg .pred %in<2>;
         mov.u32 %x, %nctaid.x; mov.u32 %y, %ctaid.x; sub.u32 %x, %x, %y; sub.u32 %x, %x, 1",
        d / 2
    ));
    entry_of_list(t);
    t.code(format!(
        "mov.u32 %head, %ctaid.y; div.u32 %x, %hq, %hkv; div.u32 %group, %head, %x; mov.u32 %d, {d};
         add.u32 %end, %first, %count; sub.u32 %total, %end, %start; sub.u32 %tok, %first, %start"
    ));
    window::first_tile(t, "%tok", KEYS);
    fills(t);
    fill(t, d);
    multiplies(t);
    attend(t, d);
    finish(t, d);
    t.label("END");
    t.end();
}

/// The one thread that fills slots: q, then keys and values in the order of their use.
fn fill(t: &mut Text, d: usize) {
    let t = &mut t.part(
        "fill",
        &Uses {
            reads: ".u32 %head, %group, %first, %start, %j0, %end, %bars, %base; .u64 %map_q, %map_k, %map_v",
            changes: ".u32 %slot",
            scratch: ".u32 %parity, %column, %tok, %next, %bar, %to, %x, %y; .pred %p",
        },
    );
    let (ring, tile) = (ring(d), tile(d));
    let all = (tile, KEYS);
    hold(t, ring);
    t.code(format!("mul.lo.u32 %column, %head, {d}"));
    copy(t, "%map_q", ("%column", "%first"), (Tile { d, rows: HELD }, HELD));
    t.code(format!("mul.lo.u32 %column, %group, {d}; add.u32 %tok, %start, %j0"));
    give(t, ring, "EMPTY");
    copy(t, "%map_k", ("%column", "%tok"), all);
    t.label("FILL");
    t.code(format!("add.u32 %next, %tok, {KEYS}; setp.ge.u32 %p, %next, %end; @%p bra LAST_V"));
    give(t, ring, "EMPTY_K");
    copy(t, "%map_k", ("%column", "%next"), all);
    give(t, ring, "EMPTY_V");
    copy(t, "%map_v", ("%column", "%tok"), all);
    t.code("mov.u32 %tok, %next; bra FILL");
    t.label("LAST_V");
    give(t, ring, "EMPTY_LAST");
    copy(t, "%map_v", ("%column", "%tok"), all);
}

/// The two warpgroups that multiply.
fn attend(t: &mut Text, d: usize) {
    let (ring, tile) = (ring(d), tile(d));
    t.say("where this thread's first query stands in the block, and the warp's in its row");
    t.code(
        "and.b32 %mine, %warp, 3; shl.b32 %mine, %mine, 4; mad.lo.u32 %mine, %wg, 64, %mine;
         sub.u32 %wfirst, %first, %start; add.u32 %wfirst, %wfirst, %mine; add.u32 %mine, %mine, %g;
         mad.lo.u32 %y, %wg, 8192, %base",
    );
    describe(t, "%dq", "%y", (Tile { d, rows: HELD }, Layout::AlongK));
    t.code(format!("add.u32 %y, %base, {}", ring.held));
    describe(t, "%dk", "%y", (tile, Layout::AlongK));
    describe(t, "%dv", "%y", (tile, Layout::AcrossK));
    (0..d / 2).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    (0..2).for_each(|i| t.code(format!("mov.f32 %m{i}, 0fFE800000; mov.f32 %l{i}, 0f00000000")));
    held(t, ring);
    take(t, ring, "FIRST", ("%kbar", "%at"));
    fence(t);
    scores(t, d);
    commit(t);
    wait(t, 0);
    release(t, ring, "%kbar");
    soften(t, "FIRST");
    probabilities(t);
    t.label("KEYS");
    t.code(format!("add.u32 %next, %j0, {KEYS}; setp.ge.u32 %p, %next, %total; @%p bra LAST"));
    take(t, ring, "FULL_K", ("%kbar", "%at"));
    fence(t);
    scores(t, d);
    commit(t);
    take(t, ring, "FULL_V", ("%vbar", "%at"));
    sums(t, d);
    commit(t);
    wait(t, 1);
    release(t, ring, "%kbar");
    t.code("mov.u32 %j0, %next");
    soften(t, "NEXT");
    wait(t, 0);
    release(t, ring, "%vbar");
    (0..d / 2).for_each(|i| t.code(format!("mul.f32 %acc{i}, %acc{i}, %shrink{}", i / 2 % 2)));
    probabilities(t);
    t.code("bra KEYS");
    t.label("LAST");
    take(t, ring, "FULL_LAST", ("%vbar", "%at"));
    fence(t);
    sums(t, d);
    commit(t);
    wait(t, 0);
}

/// s = q k^T of the tile at offset %at from the first slot.
fn scores(t: &mut Text, d: usize) {
    t.code("add.u64 %wide, %dk, %at");
    let q = Operand { descriptor: "%dq", tile: Tile { d, rows: HELD }, layout: Layout::AlongK };
    let k = Operand { descriptor: "%wide", tile: tile(d), layout: Layout::AlongK };
    multiply(t, ("%s", KEYS, Sums::Set), Left::Shared(q), k, d / 16);
}

/// acc += bf16(p) v of the tile at offset %at from the first slot.
fn sums(t: &mut Text, d: usize) {
    t.code("add.u64 %wide, %dv, %at");
    let v = Operand { descriptor: "%wide", tile: tile(d), layout: Layout::AcrossK };
    multiply(t, ("%acc", d, Sums::Add), Left::Registers("%fp"), v, KEYS / 16);
}

/// The places of the scores of a thread's row (0 or 8 from its first): column 8 (j / 2) + j % 2 from its own.
fn place(row: usize, j: usize) -> usize {
    4 * (j / 2) + 2 * row + j % 2
}

/// -inf where a query does not see a key: in the last tile, and in those where windows begin.
fn mask(t: &mut Text, label: &str) {
    let uses = Uses {
        reads: ".u32 %j0, %wfirst, %g, %pair, %window",
        changes: ".f32 %s<64>",
        scratch: ".u32 %x, %r; .pred %p, %q",
    };
    let t = &mut t.part("mask", &uses);
    t.say("-inf where a query does not see a key: in the last tile, and in those where windows begin");
    t.code(format!(
        "add.u32 %x, %j0, {}; setp.le.u32 %p, %x, %wfirst; add.u32 %x, %j0, %window; add.u32 %r, %wfirst, 15;
         setp.gt.u32 %q, %x, %r; and.pred %p, %p, %q; @%p bra SEEN_{label}",
        KEYS - 1
    ));
    for row in 0..2 {
        t.code(format!(
            "add.u32 %r, %wfirst, %g; add.u32 %r, %r, {}; sub.u32 %r, %r, %j0; sub.u32 %r, %r, %pair",
            8 * row
        ));
        for j in 0..KEYS / 4 {
            let s = format!("%s{}", place(row, j));
            t.code(format!(
                "sub.u32 %x, %r, {}; setp.ge.u32 %p, %x, %window; selp.f32 {s}, 0fFF800000, {s}, %p",
                8 * (j / 2) + j % 2
            ));
        }
    }
    t.label(&format!("SEEN_{label}"));
}

/// Converts scores of the tile at %j0 to probabilities under the new running maxima; %shrink is the factor of old
/// values.
fn soften(t: &mut Text, label: &str) {
    let t = &mut t.part(
        "soften",
        &Uses {
            reads: ".u32 %j0, %wfirst, %g, %pair, %window; .f32 %c2",
            changes: ".f32 %s<64>, %m<2>, %l<2>, %shrink<2>",
            scratch: ".u32 %x, %r; .f32 %big, %v, %other, %low, %sum; .pred %p, %q",
        },
    );
    let n = KEYS / 4;
    mask(t, label);
    for row in 0..2 {
        let at = |j: usize| format!("%s{}", place(row, j));
        t.say(&format!(
            "row {}: its largest, exponentials and their sum, even and odd columns apart",
            8 * row
        ));
        t.code(format!("max.f32 %big, %m{row}, {}; mov.f32 %v, {}", at(0), at(1)));
        (2..n).for_each(|j| {
            let to = ["%big", "%v"][j % 2];
            t.code(format!("max.f32 {to}, {to}, {}", at(j)));
        });
        t.code("max.f32 %big, %big, %v");
        for by in [1, 2] {
            t.code(format!(
                "shfl.sync.bfly.b32 %other, %big, {by}, 31, 0xffffffff; max.f32 %big, %big, %other"
            ));
        }
        t.code(format!(
            "sub.f32 %v, %m{row}, %big; mul.f32 %v, %v, %c2; ex2.approx.ftz.f32 %shrink{row}, %v; mov.f32 %m{row}, %big;
             mul.f32 %low, %big, %c2; neg.f32 %low, %low; mul.f32 %l{row}, %l{row}, %shrink{row};
             mov.f32 %sum, 0f00000000"
        ));
        for (j, s) in (0..n).map(|j| (j, at(j))) {
            let to = [format!("%l{row}"), "%sum".into()][j % 2].clone();
            t.code(format!(
                "fma.rn.f32 {s}, {s}, %c2, %low; ex2.approx.ftz.f32 {s}, {s}; add.f32 {to}, {to}, {s}"
            ));
        }
        t.code(format!("add.f32 %l{row}, %l{row}, %sum"));
    }
}

/// bf16(p), once no product reads the previous ones.
fn probabilities(t: &mut Text) {
    (0..KEYS / 16).for_each(|step| pack(t, ("%fp", 4 * step), ("%s", 8 * step)));
}

/// out and logsumexp of this thread's two rows.
fn finish(t: &mut Text, d: usize) {
    let t = &mut t.part("finish", &Uses { reads: ".u32 %hq, %head, %mine, %count, %first, %pair, %d; .f32 %scale", scratch: &format!(".f32 %l<2>, %m<2>, %acc<{}>, %v, %other; .u64 %safe, %lse, %row, %wide, %out<2>; .u32 %wq, %x, %y; .pred %p, %q, %in<2>", d / 2), ..Uses::default() });
    t.code(format!("ld.param.u64 %safe, [out]; ld.param.u64 %lse, [lse]; mul.lo.u32 %wq, %hq, {d}"));
    for row in 0..2 {
        for by in [1, 2] {
            t.code(format!(
                "shfl.sync.bfly.b32 %other, %l{row}, {by}, 31, 0xffffffff; add.f32 %l{row}, %l{row}, %other"
            ));
        }
        t.code(format!(
            "add.u32 %x, %mine, {}; setp.lt.u32 %in{row}, %x, %count; add.u32 %x, %x, %first;
             lg2.approx.f32 %v, %l{row}; mul.f32 %v, %v, 0f3F317218; fma.rn.f32 %v, %m{row}, %scale, %v;
             mad.lo.u32 %y, %x, %hq, %head; mad.wide.u32 %row, %y, 4, %lse; setp.eq.u32 %p, %pair, 0;
             and.pred %p, %p, %in{row}; @%p st.global.f32 [%row], %v; mad.lo.u32 %y, %head, {d}, %pair;
             cvt.u64.u32 %wide, %y; mad.wide.u32 %row, %x, %wq, %wide; shl.b64 %row, %row, 2;
             add.u64 %out{row}, %safe, %row; rcp.approx.f32 %m{row}, %l{row}",
            8 * row
        ));
    }
    write(t, Head { d }, ("%acc", 0), ("%out", "%in"), [Some("%m0"), Some("%m1")]);
}
