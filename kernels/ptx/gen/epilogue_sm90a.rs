//! The end of a tile of product_sm90a: the adapter's part is added, then the tile is stored. 64 columns at a time, so
//! that the adapter's sums fit beside the product's.

use crate::operand::Layout;
use crate::product_sm90a::{BARRIERS, Epilogue};
use crate::{Text, Uses, edge};

/// The part of the rank in shared memory at a time, after the barriers.
const CHUNK: usize = 16;
/// Distance of one of the rank to the next in numbers, in left's tile and in right's.
const LEFT: usize = 130;
const RIGHT: usize = 66;
/// Bytes of left's tile, and of both.
const LEFTS: usize = 4 * LEFT * CHUNK;
pub const TILES: usize = LEFTS + 4 * RIGHT * CHUNK;

/// The sum `c` of the pair `j` of column group `part`, in the upper or lower half of the warp's rows.
fn sum(part: usize, j: usize, half: usize, c: usize) -> usize {
    4 * (8 * part + j) + 2 * half + c
}

/// Stores the tile at %m0, %n0.
pub fn store(t: &mut Text, b: Layout, epilogue: Epilogue) {
    let t = &mut t.part("store", &Uses { reads: ".u32 %t, %warp, %lane, %group, %m, %n, %m0, %n0, %ldo, %bars; .u64 %out; .pred %adding; .f32 %acc<128>", scratch: ".u32 %x, %y, %k0; .u64 %wide, %row; .f32 %v, %old<32>; .pred %p, %q, %full", ..Uses::default() });
    t.say("pairs are stored as such where all of them begin at multiples of 8 bytes");
    edge::whole(t, (128, 256), 8);
    if epilogue == Epilogue::Adapter {
        begin(t);
    }
    t.say("this thread's first output: row %m0 + %x, column %n0 + %y, and those 8 rows below it and 8 columns on");
    t.code(
        "and.b32 %x, %warp, 3; shl.b32 %x, %x, 4; shl.b32 %y, %group, 6; add.u32 %x, %x, %y; shr.u32 %y, %lane, 2;
         add.u32 %x, %x, %y; and.b32 %y, %lane, 3; shl.b32 %y, %y, 1",
    );
    if epilogue == Epilogue::Adapter {
        t.code(format!(
            "mad.lo.u32 %am, %x, 4, %tiles2; mad.lo.u32 %an, %y, 4, %tiles2; add.u32 %an, %an, {LEFTS}"
        ));
    }
    t.code(
        "add.u32 %x, %m0, %x; add.u32 %y, %n0, %y; cvt.u64.u32 %wide, %y; mad.wide.u32 %row, %x, %ldo, %wide;
         shl.b64 %row, %row, 2; add.u64 %row, %row, %out; mul.wide.u32 %wide, %ldo, 32; add.u64 %wide, %wide, %row",
    );
    for part in 0..4 {
        if epilogue == Epilogue::Adapter {
            adapter(t, b, part);
        }
        (0..32).for_each(|i| t.code(format!("mov.f32 %old{i}, 0f00000000")));
        t.code(format!("@!%full bra EDGE{part}"));
        pairs(t, epilogue, part);
        t.code(format!("bra STORED{part}"));
        t.label(&format!("EDGE{part}"));
        singles(t, epilogue, part);
        t.label(&format!("STORED{part}"));
    }
}

/// The address of the half's row.
fn row(half: usize) -> &'static str {
    ["%row", "%wide"][half]
}

/// The registers that both ways to store read: both halves' rows, sums, the adapter's part if there is one, and more.
fn reads(epilogue: Epilogue, more: &str) -> String {
    let low = if epilogue == Epilogue::Adapter { "; .f32 %low<32>, %by" } else { "" };
    format!(".u64 %row, %wide; .pred %adding; .f32 %acc<128>{low}{more}")
}

/// The values of a part: the sum, plus the previous value, plus the adapter's part.
fn values(t: &mut Text, epilogue: Epilogue, part: usize) {
    for old in 0..32 {
        let (half, j, c) = (old / 16, old / 2 % 8, old % 2);
        t.code(format!("add.f32 %old{old}, %acc{}, %old{old}", sum(part, j, half, c)));
        if epilogue == Epilogue::Adapter {
            t.code(format!("mul.f32 %v, %low{}, %by; add.f32 %old{old}, %v, %old{old}", sum(0, j, half, c)));
        }
    }
}

/// A tile without edges: all loads precede all stores, because a load after a store would wait for it.
fn pairs(t: &mut Text, epilogue: Epilogue, part: usize) {
    let reads = reads(epilogue, "");
    let t = &mut t.part("pairs", &Uses { reads: &reads, changes: ".f32 %old<32>", scratch: ".f32 %v" });
    let pair = |i: usize| {
        let at = format!("[{}+{}]", row(i / 8), 256 * part + 32 * (i % 8));
        (format!("{{%old{}, %old{}}}", 2 * i, 2 * i + 1), at)
    };
    for (old, at) in (0..16).map(pair) {
        t.code(format!("@%adding ld.global.v2.f32 {old}, {at}"));
    }
    values(t, epilogue, part);
    for (old, at) in (0..16).map(pair) {
        t.code(format!("st.global.v2.f32 {at}, {old}"));
    }
}

/// One number at a time, inside the edges only.
fn singles(t: &mut Text, epilogue: Epilogue, part: usize) {
    let reads = reads(epilogue, "; .u32 %x, %y, %m, %n");
    let t = &mut t.part(
        "singles",
        &Uses { reads: &reads, changes: ".f32 %old<32>", scratch: ".u32 %k0; .f32 %v; .pred %p, %q" },
    );
    inside(t, part, |old, at| format!("and.pred %q, %q, %adding; @%q ld.global.f32 {old}, {at}"));
    values(t, epilogue, part);
    inside(t, part, |old, at| format!("@%q st.global.f32 {at}, {old}"));
}

/// Statements for each output of a part; %q: it is inside the edges.
fn inside(t: &mut Text, part: usize, of: impl Fn(String, String) -> String) {
    for half in 0..2 {
        t.code(format!("add.u32 %k0, %x, {}; setp.lt.u32 %p, %k0, %m", 8 * half));
        for i in 0..16 {
            let column = 64 * part + 8 * (i / 2) + i % 2;
            t.code(format!("add.u32 %k0, %y, {column}; setp.lt.u32 %q, %k0, %n; and.pred %q, %q, %p"));
            t.code(of(format!("%old{}", 16 * half + i), format!("[{}+{}]", row(half), 4 * column)));
        }
    }
}

/// The values of the tile that the adapter's part needs.
fn begin(t: &mut Text) {
    t.code(format!(
        ".reg .f32 %low<32>, %left<2>, %right<16>, %by; .reg .u64 %lp, %rp, %at;
         .reg .u32 %rank, %between, %r0, %rest, %chunk, %tiles2, %i, %e, %am, %an, %pm, %pn, %row2, %col2, %word;
         ld.param.u64 %lp, [left]; ld.param.u64 %rp, [right]; ld.param.u32 %rank, [rank];
         ld.param.u32 %between, [between]; ld.param.f32 %by, [by]; add.u32 %tiles2, %bars, {BARRIERS}"
    ));
}

/// %low<32> = left right for the 64 columns of `part`, in the order of the rank: left [M, R], right [N, R] along K, or
/// [R, N] across it.
fn adapter(t: &mut Text, layout: Layout, part: usize) {
    let t = &mut t.part("adapter", &Uses { reads: ".u32 %t, %m, %n, %m0, %n0, %rank, %between, %tiles2, %am, %an; .u64 %lp, %rp", changes: ".f32 %low<32>", scratch: ".u32 %r0, %rest, %chunk, %col2, %pm, %pn, %i, %e, %row2, %word; .f32 %left<2>, %right<16>, %v; .u64 %at; .pred %p, %q" });
    (0..32).for_each(|i| t.code(format!("mov.f32 %low{i}, 0f00000000")));
    t.code("mov.u32 %r0, 0");
    t.label(&format!("RANK{part}"));
    t.say("everybody is done with what stood here");
    t.code(format!("bar.sync 1, 256; sub.u32 %rest, %rank, %r0; min.u32 %chunk, %rest, {CHUNK}"));
    t.code(format!("add.u32 %col2, %n0, {}", 64 * part));
    fill(t, &format!("LEFT{part}"), ("%lp", "%rank"), ("%m0", "%m", 128), (Layout::AlongK, 0, LEFT));
    fill(t, &format!("RIGHT{part}"), ("%rp", "%between"), ("%col2", "%n", 64), (layout, LEFTS, RIGHT));
    t.code("bar.sync 1, 256; mov.u32 %pm, %am; mov.u32 %pn, %an; mov.u32 %i, 0");
    t.label(&format!("TERM{part}"));
    t.code("ld.shared.f32 %left0, [%pm]; ld.shared.f32 %left1, [%pm+32]");
    for j in 0..8 {
        t.code(format!("ld.shared.v2.f32 {{%right{}, %right{}}}, [%pn+{}]", 2 * j, 2 * j + 1, 32 * j));
    }
    for (j, half, c) in (0..32).map(|x| (x / 4, x / 2 % 2, x % 2)) {
        let low = sum(0, j, half, c);
        t.code(format!("fma.rn.f32 %low{low}, %left{half}, %right{}, %low{low}", 2 * j + c));
    }
    t.code(format!(
        "add.u32 %pm, %pm, {}; add.u32 %pn, %pn, {}; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, %chunk; @%p bra TERM{part};
         add.u32 %r0, %r0, {CHUNK}; setp.lt.u32 %p, %r0, %rank; @%p bra RANK{part}",
        4 * LEFT,
        4 * RIGHT
    ));
}

/// Copies `wide` outputs by 16 of the rank to shared memory, zero beyond the edges; `between` numbers from row to row.
fn fill(
    t: &mut Text,
    label: &str,
    (pointer, between): (&str, &str),
    (first, count, wide): (&str, &str, usize),
    (layout, to, apart): (Layout, usize, usize),
) {
    let t = &mut t.part(
        "fill",
        &Uses {
            reads: &format!(".u32 %t, %rest, %r0, %tiles2, {between}, {first}, {count}; .u64 {pointer}"),
            scratch: ".u32 %i, %e, %row2, %word; .u64 %at; .f32 %v; .pred %p, %q",
            ..Uses::default()
        },
    );
    t.code("sub.u32 %i, %t, 128");
    t.label(label);
    match layout {
        Layout::AlongK => t.code(format!("and.b32 %e, %i, {}; shr.u32 %row2, %i, 4", CHUNK - 1)),
        Layout::AcrossK => {
            t.code(format!("shr.u32 %e, %i, {}; and.b32 %row2, %i, {}", wide.ilog2(), wide - 1))
        }
    }
    t.code(format!(
        "setp.lt.u32 %p, %e, %rest; mad.lo.u32 %word, %e, {apart}, %row2; mad.lo.u32 %word, %word, 4, %tiles2;
         add.u32 %e, %e, %r0; add.u32 %row2, %row2, {first}; setp.lt.u32 %q, %row2, {count}; and.pred %p, %p, %q"
    ));
    let (row, column) = if layout == Layout::AlongK { ("%row2", "%e") } else { ("%e", "%row2") };
    t.code(format!(
        "cvt.u64.u32 %at, {column}; mad.wide.u32 %at, {row}, {between}, %at; shl.b64 %at, %at, 2;
         add.u64 %at, %at, {pointer}; mov.f32 %v, 0f00000000; @%p ld.global.nc.f32 %v, [%at];
         st.shared.f32 [%word+{to}], %v; add.u32 %i, %i, 256; setp.lt.u32 %p, %i, {}; @%p bra {label}",
        wide * CHUNK
    ));
}
