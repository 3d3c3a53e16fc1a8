//! Attention on tensor cores, sm_80: flash-style, 128 queries of one head a block, 32 of them a warp, or half as many
//! for heads of 256.

use crate::attention::PARAMS;
use crate::flash::{
    Copy, Fragments, HEADS, Head, THREADS, WIDE, Walk, at_head, copy, entry_of_list, fragments, lanes,
    multiply, open, pack, write,
};
use crate::{File, Text, Uses, window};

/// Queries of a warp, and of a block.
fn queries(head: Head) -> (usize, usize) {
    (16 * head.groups(), THREADS / 32 * 16 * head.groups())
}

const HEAD: &str = "
attention_sm80: out[T, H D] = softmax(scale q k^T) v; logsumexp[T, H]. Query i sees key j of its row if 0 <= i - j < window
(2^30: no window).
q, k and v are bf16 rows (narrow of product_sm80.ptx); D is a multiple of 8, padded with zeros to 64, 96, 128
or 256.

  block (x, h): 128 queries of the entry of the list = (first, count, row start, end), the last entry first because
  it has the most keys; a warp has 32 of them. For D = 256 64 queries, of which a warp has 16.
  q tile, first k tile:                               cp.async, 16 bytes each, zero beyond the row and the head
  m = -2^126, l = 0, acc = 0 per query;  m is finite, so that a tile of which a query sees nothing leaves it, with p = 0
  for j0 in first key that the first query sees, rounded down to S .. keys seen by the last, step S (64; 32 for D > 64; 16
  for D = 256):
      wait for the k tile; barrier;  v tile = v[j0 ..] is fetched meanwhile
      s = q k^T, -inf where not seen;  m' = max(m, largest of s)      a warp that sees none of these keys does nothing
      p = 2^((s - m') scale log2 e);  shrink = 2^((m - m') scale log2 e);  l = l shrink + sum of p;  acc = acc shrink
      wait for the v tile; barrier;  k tile = k[j0 + S ..] is fetched meanwhile
      acc = acc + bf16(p) v                           after the barrier: fragments of v beside p spill in ptxas before 12.8
  out = acc / l;  logsumexp = m scale + ln l

Sums: products in the order of d and of keys, in steps of 16, inside as the tensor core has it; l in each of the four
lanes of a row in the order of its keys, then over the lanes by a butterfly 1, 2. Tiles as in flash.rs of the generator.
launch: grid (blocks of 128 queries, or of 64, H), 128 threads.
registers: 2 x D / 2 sums, 2 x S / 2 scores, S / 2 packed, fragments 8 + 4, m and l of four rows; half for D = 256.
budget: 255 registers, 49152 bytes of shared memory
promises: HMMA
";

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_80"));
    HEADS.into_iter().chain([WIDE]).for_each(|head| forward(&mut t, head));
    vec![t.finish("attention_sm80.ptx")]
}

/// Bytes that precede the tiles of k and v.
fn tiles(head: Head) -> (usize, usize) {
    let q = queries(head).1 * head.row();
    (q, q + head.step() * head.row())
}

fn begin(t: &mut Text, head: Head) {
    let params = [&PARAMS[..], &[("f32", "scale"), window::PARAM]].concat();
    t.entry(&format!("attention_sm80_{}", head.d), &params, THREADS);
    open(t, head, Some(tiles(head).1 + head.step() * head.row()));
    t.code(format!(
        ".reg .f32 %acc<{}>, %s<{}>, %m<{3}>, %l<{3}>, %big, %shrink, %low;
         .reg .b32 %fq<4>, %fp<{}>; .reg .u64 %qp, %kp, %vp, %out<2>, %lse;
         .reg .u32 %la, %lb, %lv, %wfirst, %total, %tok, %keys; .reg .pred %in<2>",
        head.groups() * head.d / 2,
        numbers(head),
        numbers(head) / 2,
        2 * head.groups()
    ));
    t.code("mov.u32 %x, %nctaid.x; mov.u32 %y, %ctaid.x; sub.u32 %x, %x, %y; sub.u32 %x, %x, 1");
    entry_of_list(t);
    t.code("mov.u32 %head, %ctaid.y; div.u32 %x, %hq, %hkv; div.u32 %group, %head, %x");
    at_head(t, "%qp", ("q", "%head"));
    at_head(t, "%kp", ("k", "%group"));
    at_head(t, "%vp", ("v", "%group"));
    lanes(t, head, "%la", Walk::RowsFirst);
    t.code("mov.u32 %lv, %la");
    lanes(t, head, "%lb", Walk::PiecesFirst);
    t.say("where the warp's queries stand in their row; a warp without real ones sees nothing");
    let rows = queries(head).0;
    t.code(format!(
        "mad.lo.u32 %la, %warp, {}, %la; sub.u32 %next, %first, %start; add.u32 %total, %next, %count;
         mul.lo.u32 %x, %warp, {rows}; add.u32 %wfirst, %next, %x; add.u32 %wlast, %wfirst, {};
         setp.ge.u32 %p, %x, %count; selp.s32 %wlast, -1, %wlast, %p",
        rows * head.row(),
        rows - 1
    ));
    window::first_tile(t, "%next", head.step());
}

fn keys(t: &mut Text, head: Head, pointer: &str, to: usize) {
    let t = &mut t.part(
        "keys",
        &Uses {
            reads: &format!(".u32 %total, %start, %st, %cr, %keep<{}>, %wkv; .u64 {pointer}", head.pieces()),
            scratch: ".u32 %keys, %tok, %x, %y, %z, %real; .u64 %row; .pred %p",
            ..Uses::default()
        },
    );
    t.code("sub.u32 %keys, %total, %tok; add.u32 %tok, %start, %tok");
    let c = Copy { pointer, from: "%tok", count: "%keys", apart: "%wkv", rows: head.step(), to: (None, to) };
    copy(t, head, &c);
}

fn forward(t: &mut Text, head: Head) {
    begin(t, head);
    let (k_tile, v_tile) = tiles(head);
    let q = Copy {
        pointer: "%qp",
        from: "%first",
        count: "%count",
        apart: "%wq",
        rows: queries(head).1,
        to: (None, 0),
    };
    copy(t, head, &q);
    t.code("mov.u32 %tok, %j0");
    keys(t, head, "%kp", k_tile);
    t.code("cp.async.commit_group");
    (0..head.groups() * head.d / 2).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    (0..2 * head.groups())
        .for_each(|i| t.code(format!("mov.f32 %m{i}, 0fFE800000; mov.f32 %l{i}, 0f00000000")));
    t.label("KEYS");
    t.code("cp.async.wait_group 0; bar.sync 0; mov.u32 %tok, %j0");
    keys(t, head, "%vp", v_tile);
    t.code(format!(
        "cp.async.commit_group; setp.gt.s32 %skip, %j0, %wlast; add.u32 %x, %j0, %window; add.u32 %x, %x, {};
         setp.le.u32 %p, %x, %wfirst; or.pred %skip, %skip, %p; @%skip bra SCORED",
        head.step() - 1
    ));
    scores(t, head);
    mask(t, head);
    (0..2 * head.groups()).for_each(|row| soften(t, head, row));
    t.label("SCORED");
    t.code(format!(
        "cp.async.wait_group 0; bar.sync 0; add.u32 %next, %j0, {}; setp.ge.u32 %done, %next, %total; @%done bra LAST;
         mov.u32 %tok, %next",
        head.step()
    ));
    keys(t, head, "%kp", k_tile);
    t.label("LAST");
    t.code("cp.async.commit_group; @%skip bra SUMMED");
    sums(t, head, v_tile);
    t.label("SUMMED");
    t.code("mov.u32 %j0, %next; @!%done bra KEYS; cp.async.wait_group 0");
    finish(t, head);
    t.end();
}

/// Scores of a thread.
fn numbers(head: Head) -> usize {
    head.groups() * head.step() / 2
}

/// s = q k^T of the warp's queries.
fn scores(t: &mut Text, head: Head) {
    let (n, k_tile) = (head.step(), tiles(head).0);
    let lefts = &["%fq", "%fp"][..head.groups()];
    (0..numbers(head)).for_each(|i| t.code(format!("mov.f32 %s{i}, 0f00000000")));
    for step in 0..head.depth() {
        for (i, left) in lefts.iter().enumerate() {
            let f = Fragments { lane: "%la", to: (None, 0), row: 16 * i, step, transposed: false };
            fragments(t, head, left, &f);
        }
        for pair in 0..n / 16 {
            let f = Fragments { lane: "%lb", to: (None, k_tile), row: 16 * pair, step, transposed: false };
            fragments(t, head, "%b", &f);
            for (i, left) in lefts.iter().enumerate() {
                let at = i * n / 2 + 8 * pair;
                (0..2).for_each(|j| multiply(t, ("%s", at + 4 * j), (left, 0), ("%b", 2 * j)));
            }
        }
    }
}

/// -inf at masked places; most tiles have none.
fn mask(t: &mut Text, head: Head) {
    let t = &mut t.part(
        "mask",
        &Uses {
            reads: ".u32 %j0, %wfirst, %g, %pair, %window",
            changes: &format!(".f32 %s<{}>", numbers(head)),
            scratch: ".u32 %x, %r; .pred %p, %q",
        },
    );
    let n = head.step();
    t.code(format!(
        "add.u32 %x, %j0, {}; setp.le.u32 %p, %x, %wfirst; add.u32 %x, %j0, %window; add.u32 %r, %wfirst, {};
         setp.gt.u32 %q, %x, %r; and.pred %p, %p, %q; @%p bra SEEN",
        n - 1,
        queries(head).0 - 1
    ));
    for row in 0..2 * head.groups() {
        t.code(format!(
            "add.u32 %r, %wfirst, %g; add.u32 %r, %r, {}; sub.u32 %r, %r, %j0; sub.u32 %r, %r, %pair",
            8 * row
        ));
        for j in 0..n / 4 {
            let s = format!("%s{}", place(head, row, j));
            t.code(format!(
                "sub.u32 %x, %r, {}; setp.ge.u32 %p, %x, %window; selp.f32 {s}, 0fFF800000, {s}, %p",
                8 * (j / 2) + j % 2
            ));
        }
    }
    t.label("SEEN");
}

/// The places of the scores of a thread's row (0, 8, 16, 24 from its first): column 8 (j / 2) + j % 2 from its own.
fn place(head: Head, row: usize, j: usize) -> usize {
    row / 2 * head.step() / 2 + 4 * (j / 2) + 2 * (row % 2) + j % 2
}

/// Converts scores of a row to probabilities under its new running maximum.
fn soften(t: &mut Text, head: Head, row: usize) {
    let n = head.step() / 4;
    t.say(&format!("row {}: its largest, exponentials and their sum", 8 * row));
    t.code(format!("mov.f32 %big, %m{row}"));
    (0..n).for_each(|j| t.code(format!("max.f32 %big, %big, %s{}", place(head, row, j))));
    for by in [1, 2] {
        t.code(format!("shfl.sync.bfly.b32 %other, %big, {by}, 31, 0xffffffff; max.f32 %big, %big, %other"));
    }
    t.code(format!(
        "sub.f32 %shrink, %m{row}, %big; mul.f32 %shrink, %shrink, %c2; ex2.approx.f32 %shrink, %shrink;
         mov.f32 %m{row}, %big; mul.f32 %low, %big, %c2; neg.f32 %low, %low; mul.f32 %l{row}, %l{row}, %shrink"
    ));
    for s in (0..n).map(|j| format!("%s{}", place(head, row, j))) {
        t.code(format!(
            "fma.rn.f32 {s}, {s}, %c2, %low; ex2.approx.f32 {s}, {s}; add.f32 %l{row}, %l{row}, {s}"
        ));
    }
    for i in (0..head.d / 4).map(|j| row / 2 * head.d / 2 + 4 * (j / 2) + 2 * (row % 2) + j % 2) {
        t.code(format!("mul.f32 %acc{i}, %acc{i}, %shrink"));
    }
}

/// acc += bf16(p) v
fn sums(t: &mut Text, head: Head, v_tile: usize) {
    let n = head.step();
    for (i, pair) in (0..head.groups() * n / 16).map(|x| (x / (n / 16), x % (n / 16))) {
        pack(t, ("%fp", 4 * (i * n / 16 + pair)), ("%s", i * n / 2 + 8 * pair));
    }
    for (pair, step) in (0..n / 16 * head.depth()).map(|x| (x / head.depth(), x % head.depth())) {
        let f = Fragments { lane: "%lv", to: (None, v_tile), row: 16 * pair, step, transposed: true };
        fragments(t, head, "%b", &f);
        for i in 0..head.groups() {
            let (left, at) = (4 * (i * n / 16 + pair), i * head.d / 2 + 8 * step);
            (0..2).for_each(|j| multiply(t, ("%acc", at + 4 * j), ("%fp", left), ("%b", 2 * j)));
        }
    }
}

/// out and logsumexp of the warp's queries.
fn finish(t: &mut Text, head: Head) {
    t.code("ld.param.u64 %safe, [out]; ld.param.u64 %lse, [lse]");
    for i in 0..head.groups() {
        for high in 0..2 {
            let row = 2 * i + high;
            for by in [1, 2] {
                t.code(format!(
                    "shfl.sync.bfly.b32 %other, %l{row}, {by}, 31, 0xffffffff; add.f32 %l{row}, %l{row}, %other"
                ));
            }
            t.code(format!(
                "mul.lo.u32 %x, %warp, {}; add.u32 %x, %x, %g; add.u32 %x, %x, {}; setp.lt.u32 %in{high}, %x, %count;
                 add.u32 %x, %x, %first; lg2.approx.f32 %v, %l{row}; mul.f32 %v, %v, 0f3F317218;
                 fma.rn.f32 %v, %m{row}, %scale, %v; mad.lo.u32 %y, %x, %hq, %head; mad.wide.u32 %row, %y, 4, %lse;
                 setp.eq.u32 %p, %pair, 0; and.pred %p, %p, %in{high}; @%p st.global.f32 [%row], %v;
                 mul.lo.u32 %y, %head, %d; add.u32 %y, %y, %pair; cvt.u64.u32 %wide, %y; shl.b64 %wide, %wide, 1;
                 mad.wide.u32 %row, %x, %wq, %wide; shl.b64 %row, %row, 1; add.u64 %out{high}, %safe, %row;
                 rcp.approx.f32 %m{row}, %l{row}",
                queries(head).0,
                8 * row
            ));
        }
        let by = [Some(["%m0", "%m2"][i]), Some(["%m1", "%m3"][i])];
        write(t, head, ("%acc", i * head.d / 2), ("%out", "%in"), by);
    }
}
