//! The adapter's part of a product on tensor cores, added before the product's tile is stored: f32 through the shared
//! memory of the stages, 32 of the rank at a time. A thread's sums have the places of its fragments.

use crate::operand::Layout;
use crate::{Text, Uses};

/// Parameters after those of the product.
pub const PARAMS: [(&str, &str); 5] =
    [("u64", "left"), ("u64", "right"), ("u32", "rank"), ("u32", "between"), ("f32", "by")];

/// The part of the rank in shared memory at a time, its distance in numbers, and the start of the right operand.
const CHUNK: usize = 32;
const APART: usize = 130;
const RIGHT: usize = 4 * CHUNK * APART;

/// %low<64> = left right, in the order of the rank: left [M, R], right [N, R] along K, or [R, N] across it.
pub fn adapter(t: &mut Text, layout: Layout) {
    let t = &mut t.part(
        "adapter",
        &Uses {
            reads: ".u32 %t, %lane, %m, %n, %m0, %n0, %wm, %wn",
            scratch: ".u64 %row, %wide; .u32 %x, %y, %real; .f32 %v; .pred %p, %q",
            ..Uses::default()
        },
    );
    t.code(
        ".reg .f32 %low<64>, %left<8>, %right<8>, %by; .reg .u64 %lp, %rp;
         .reg .u32 %rank, %between, %r0, %rest, %chunk, %base2, %i, %am, %an;
         ld.param.u64 %lp, [left]; ld.param.u64 %rp, [right]; ld.param.u32 %rank, [rank];
         ld.param.u32 %between, [between]; ld.param.f32 %by, [by]",
    );
    (0..64).for_each(|i| t.code(format!("mov.f32 %low{i}, 0f00000000")));
    t.code("mov.u32 %r0, 0");
    t.label("RANK");
    t.say("everybody is done with what stood here");
    t.code(format!("bar.sync 0; sub.u32 %rest, %rank, %r0; min.u32 %chunk, %rest, {CHUNK}"));
    fill(t, ("LEFT", "%lp", "%rank"), ("%m0", "%m"), Layout::AlongK, 0);
    fill(t, ("RIGHT", "%rp", "%between"), ("%n0", "%n"), layout, RIGHT);
    t.code(
        "bar.sync 0; mov.u32 %base2, stages; shr.u32 %am, %lane, 2; add.u32 %am, %am, %wm; shl.b32 %am, %am, 2;
         add.u32 %am, %am, %base2; and.b32 %an, %lane, 3; shl.b32 %an, %an, 1; add.u32 %an, %an, %wn;
         shl.b32 %an, %an, 2; add.u32 %an, %an, %base2; mov.u32 %i, 0",
    );
    t.label("TERM");
    (0..8).for_each(|i| t.code(format!("ld.shared.f32 %left{i}, [%am+{}]", 32 * i)));
    for j in 0..4 {
        t.code(format!(
            "ld.shared.v2.f32 {{%right{}, %right{}}}, [%an+{}]",
            2 * j,
            2 * j + 1,
            RIGHT + 32 * j
        ));
    }
    for i in 0..64 {
        let (row, column) = (2 * (i / 16) + i / 2 % 2, 2 * (i / 4 % 4) + i % 2);
        t.code(format!("fma.rn.f32 %low{i}, %left{row}, %right{column}, %low{i}"));
    }
    t.code(format!(
        "add.u32 %am, %am, {0}; add.u32 %an, %an, {0}; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, %chunk; @%p bra TERM;
         add.u32 %r0, %r0, {CHUNK}; setp.lt.u32 %p, %r0, %rank; @%p bra RANK",
        4 * APART
    ));
}

/// Copies 128 outputs by 32 of the rank to shared memory, zero beyond the edges; `between` numbers from row to row.
fn fill(
    t: &mut Text,
    (label, pointer, between): (&str, &str, &str),
    (first, count): (&str, &str),
    layout: Layout,
    to: usize,
) {
    let t = &mut t.part(
        "fill",
        &Uses {
            reads: &format!(".u32 %t, %rest, %r0, {between}, {first}, {count}; .u64 {pointer}"),
            scratch: ".u32 %i, %x, %y, %real, %base2; .u64 %wide, %row; .f32 %v; .pred %p, %q",
            ..Uses::default()
        },
    );
    t.code("mov.u32 %i, %t");
    t.label(label);
    match layout {
        Layout::AlongK => t.code("and.b32 %x, %i, 31; shr.u32 %y, %i, 5"),
        Layout::AcrossK => t.code("shr.u32 %x, %i, 7; and.b32 %y, %i, 127"),
    }
    t.code(format!(
        "setp.lt.u32 %p, %x, %rest; mad.lo.u32 %real, %x, {APART}, %y; shl.b32 %real, %real, 2; mov.u32 %base2, stages;
         add.u32 %real, %real, %base2; add.u32 %x, %x, %r0; add.u32 %y, %y, {first}; setp.lt.u32 %q, %y, {count};
         and.pred %p, %p, %q"
    ));
    let (row, column) = if layout == Layout::AlongK { ("%y", "%x") } else { ("%x", "%y") };
    t.code(format!(
        "cvt.u64.u32 %wide, {column}; mad.wide.u32 %row, {row}, {between}, %wide; shl.b64 %row, %row, 2;
         add.u64 %row, %row, {pointer}; mov.f32 %v, 0f00000000; @%p ld.global.nc.f32 %v, [%row];
         st.shared.f32 [%real+{to}], %v; add.u32 %i, %i, 256; setp.lt.u32 %p, %i, {}; @%p bra {label}",
        128 * CHUNK
    ));
}
