//! The product on the tensor cores of Volta and Turing: factors rounded to f16 on their way to shared memory, f32 sums.
//! 128 x 128 outputs by 256 threads (8 warps as 2 x 4, each 64 x 32), K in steps of 32 through two stages of shared
//! memory, filled through registers: neither has cp.async, and they have no common ldmatrix.

use crate::operand::{Layout, Stored};
use crate::product::PARAMS;
use crate::registers::numbered;
use crate::{File, Text, Uses};

const HEAD: &str = "
product_sm70: out[M, N] (=|+=) scale * (lift a) op(b), factors rounded to f16, f32 sums on tensor cores
nt is a b^T, nn is a b: linear and linear_grad of frozen matrices. a is f32; b is f32, bf16 or f16, as stored.

  stage 0 = f16(lift a), f16(b) of k 0..32, zero beyond the edges     (16 numbers of each per thread, in pairs)
  barrier
  for step in 0 .. ceil(K / 32):
      the next step's a to registers
      multiply k 0..16 of this stage                    a warp: 4 x 2 products wmma m16n16k16
      f16(lift a) from registers to the other stage;  the next step's b to registers
      multiply k 16..32
      f16(b) from registers to the other stage;  barrier
  for i in 0..4:                                        16 rows of the warp's 64
      acc[i] to 16 x 32 numbers of shared memory that are the warp's own; from there, row by row,
      out = scale * acc (+ out where add is not 0)

lift, a power of two, keeps gradients above the smallest numbers of f16; scale takes it away again. What is beyond 65504
becomes infinite, and is reported as a value that is not finite.
wmma m16n16k16 runs on Volta and Turing alike, because no code depends on the lane of a number: mma m8n8k4 is
slow on Turing, m16n8k8 is not on Volta. So sums leave through shared memory.
Rows of a tile along K are 96 bytes apart, across K 288, of sums 160: multiples of 32, which wmma wants, and not of 64.
Sums: the order of k in steps of 16, inside as the tensor core has it: the class is this device's own.
launch: grid (ceil(N / 128), ceil(M / 128)), 256 threads.
lda, ldb, ldo: numbers between rows of a, b and out as stored.
registers: 64 sums, 8 + 16 fragments, 16 fetched numbers, addresses.
budget: 168 registers, 49152 bytes of shared memory
promises: HMMA
";

/// Distance of rows of a tile in bytes: 32 numbers along K, 128 outputs across it, 32 sums; each plus half a
/// fragment's row.
const ALONG: usize = 96;
const ACROSS: usize = 288;
const SUMS: usize = 160;
/// Bytes of an operand's tile; a stage has one of each.
const TILE: usize = 128 * ALONG;
const STAGE: usize = 2 * TILE;

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_70"));
    for (way, layout) in [("nt", Layout::AlongK), ("nn", Layout::AcrossK)] {
        for (stored, b) in [("f32", Stored::F32), ("bf16", Stored::Bf16), ("f16", Stored::F16)] {
            product(&mut t, &format!("product_sm70_{way}_{stored}"), layout, b);
        }
    }
    vec![t.finish("product_sm70.ptx")]
}

fn product(t: &mut Text, name: &str, b: Layout, stored: Stored) {
    t.entry(name, &[&PARAMS[..], &[("f32", "lift")]].concat(), 256);
    t.code(format!(
        ".reg .f32 %acc<64>, %g<16>, %v, %w, %old<4>, %sum<4>, %scale, %lift;
         .reg .b32 %fa<8>, %fb<16>, %both;
         .reg .b16 %b<16>, %low, %high;
         .reg .u64 %out, %pa, %pb, %hopa, %hopb, %stepa, %stepb, %row, %row1, %row2, %row3, %wide;
         .reg .u32 %t, %lane, %warp, %wm, %wn, %m, %n, %lda, %ldb, %ldo, %add, %m0, %n0, %x, %y, %i;
         .reg .u32 %oa, %ob, %ka, %kb, %sa, %sb, %la, %lb, %use, %fill;
         .reg .s32 %left, %resta, %restb, %inner;
         .reg .pred %p, %q, %r, %first, %second, %adding, %column;
         .shared .align 128 .b8 stages[{}]",
        2 * STAGE
    ));
    t.code(
        "ld.param.u64 %out, [out]; ld.param.u64 %pa, [a]; ld.param.u64 %pb, [b];
         ld.param.u32 %m, [m]; ld.param.u32 %n, [n]; ld.param.u32 %left, [k];
         ld.param.u32 %lda, [lda]; ld.param.u32 %ldb, [ldb]; ld.param.f32 %lift, [lift];
         mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5;
         and.b32 %wm, %warp, 1; shl.b32 %wm, %wm, 6; shr.u32 %wn, %warp, 1; shl.b32 %wn, %wn, 5;
         mov.u32 %x, %ctaid.y; shl.b32 %m0, %x, 7; mov.u32 %x, %ctaid.x; shl.b32 %n0, %x, 7",
    );
    place(t, "a", ("%m0", "%m"), (Layout::AlongK, Stored::F32));
    place(t, "b", ("%n0", "%n"), (b, stored));
    t.say("the warp's first fragments");
    t.code(format!("mov.u32 %x, stages; mad.lo.u32 %la, %wm, {ALONG}, %x"));
    match b {
        Layout::AlongK => t.code(format!("mad.lo.u32 %lb, %wn, {ALONG}, %x; add.u32 %lb, %lb, {TILE}")),
        Layout::AcrossK => t.code(format!("mad.lo.u32 %lb, %wn, 2, %x; add.u32 %lb, %lb, {TILE}")),
    }
    (0..64).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.code("mov.u32 %fill, 0");
    fetch(t, "a", (Layout::AlongK, Stored::F32));
    keep(t, "a", (Layout::AlongK, Stored::F32));
    fetch(t, "b", (b, stored));
    keep(t, "b", (b, stored));
    t.code(format!("bar.sync 0; mov.u32 %use, 0; mov.u32 %fill, {STAGE}"));
    t.label("STEP");
    t.code("sub.s32 %left, %left, 32");
    fetch(t, "a", (Layout::AlongK, Stored::F32));
    multiply(t, 0, b);
    keep(t, "a", (Layout::AlongK, Stored::F32));
    fetch(t, "b", (b, stored));
    multiply(t, 1, b);
    keep(t, "b", (b, stored));
    t.say("everybody is done with this stage, and the other one is there");
    t.code(format!(
        "bar.sync 0; mov.u32 %use, %fill; sub.u32 %fill, {STAGE}, %use; setp.gt.s32 %p, %left, 0; @%p bra STEP"
    ));
    store(t);
    t.end();
}

/// Threads along a row of a tile, each with a pair of numbers.
fn pairs(layout: Layout) -> usize {
    if layout == Layout::AlongK { 16 } else { 64 }
}

/// Rows of a tile that all threads load at once; a thread has eight rows at this distance.
fn rows(layout: Layout) -> usize {
    256 / pairs(layout)
}

/// The source of this thread's eight pairs of an operand, and their place in the first stage. %o is the output's row or
/// column, %k the place in K; from its first output on, %rest outputs are valid.
fn place(t: &mut Text, x: &str, (first, count): (&str, &str), (layout, stored): (Layout, Stored)) {
    let t = &mut t.part(
        "place",
        &Uses {
            reads: &format!(".u32 %t, %ld{x}, {first}, {count}"),
            changes: &format!(".u32 %o{x}, %k{x}, %s{x}; .s32 %rest{x}; .u64 %p{x}, %hop{x}, %step{x}"),
            scratch: ".u64 %row",
        },
    );
    let (size, base) = (stored.size(), if x == "a" { 0 } else { TILE });
    let (row, pair) = if layout == Layout::AlongK { ("%o", "%k") } else { ("%k", "%o") };
    let between = if layout == Layout::AlongK { ALONG } else { ACROSS };
    t.code(format!(
        "and.b32 {pair}{x}, %t, {}; shl.b32 {pair}{x}, {pair}{x}, 1; shr.u32 {row}{x}, %t, {};
         mov.u32 %s{x}, stages; mad.lo.u32 %s{x}, {row}{x}, {between}, %s{x}; mad.lo.u32 %s{x}, {pair}{x}, 2, %s{x};
         add.u32 %s{x}, %s{x}, {base}; add.u32 %o{x}, %o{x}, {first}; sub.s32 %rest{x}, {count}, %o{x}",
        pairs(layout) - 1,
        pairs(layout).ilog2()
    ));
    t.code(format!(
        "cvt.u64.u32 %row, {pair}{x}; mad.wide.u32 %row, {row}{x}, %ld{x}, %row; mul.lo.u64 %row, %row, {size};
         add.u64 %p{x}, %p{x}, %row; mul.wide.u32 %hop{x}, %ld{x}, {}",
        rows(layout) * size
    ));
    match layout {
        Layout::AlongK => t.code(format!("mov.u64 %step{x}, {}", 32 * size)),
        Layout::AcrossK => t.code(format!("mul.wide.u32 %step{x}, %ld{x}, {}", 32 * size)),
    }
}

/// The registers that a fetch fills.
fn fetched(stored: Stored) -> &'static str {
    if stored == Stored::F32 { ".f32 %g<16>" } else { ".b16 %b<16>" }
}

/// Loads the pairs of the tile that has %left of K into registers, zero beyond the edges, and advances to the next
/// tile. They are rounded when they are stored, so that no thread waits here.
fn fetch(t: &mut Text, x: &str, (layout, stored): (Layout, Stored)) {
    let got = fetched(stored);
    let t = &mut t.part(
        "fetch",
        &Uses {
            reads: &format!(".s32 %left, %rest{x}; .u32 %k{x}; .u64 %hop{x}, %step{x}"),
            changes: &format!(".u64 %p{x}; {got}"),
            scratch: ".s32 %inner; .u64 %row; .pred %p, %q, %r, %first, %second",
        },
    );
    t.code(format!("sub.s32 %inner, %left, %k{x}"));
    let (inner, outer) = match layout {
        Layout::AlongK => ("%inner".to_string(), format!("%rest{x}")),
        Layout::AcrossK => (format!("%rest{x}"), "%inner".to_string()),
    };
    t.code(format!(
        "setp.gt.s32 %first, {inner}, 0; setp.gt.s32 %second, {inner}, 1; mov.u64 %row, %p{x};
         add.u64 %p{x}, %p{x}, %step{x}"
    ));
    for i in 0..8 {
        t.code(format!(
            "setp.gt.s32 %p, {outer}, {}; and.pred %q, %p, %first; and.pred %r, %p, %second",
            rows(layout) * i
        ));
        for (j, p) in [(2 * i, "%q"), (2 * i + 1, "%r")] {
            let ahead = j % 2 * stored.size();
            match stored {
                Stored::F32 => {
                    t.code(format!("mov.f32 %g{j}, 0f00000000; @{p} ld.global.nc.f32 %g{j}, [%row+{ahead}]"));
                }
                _ => t.code(format!("mov.b16 %b{j}, 0; @{p} ld.global.nc.b16 %b{j}, [%row+{ahead}]")),
            }
        }
        if i < 7 {
            t.code(format!("add.u64 %row, %row, %hop{x}"));
        }
    }
}

/// Stores the fetched pairs, rounded to f16, in the stage at %fill.
fn keep(t: &mut Text, x: &str, (layout, stored): (Layout, Stored)) {
    let got = fetched(stored);
    let t = &mut t.part(
        "keep",
        &Uses {
            reads: &format!(".u32 %s{x}, %fill; .f32 %lift; {got}"),
            scratch: ".u32 %x; .b32 %both; .f32 %v, %w; .b16 %low, %high",
            ..Uses::default()
        },
    );
    t.code(format!("add.u32 %x, %s{x}, %fill"));
    let between = if layout == Layout::AlongK { ALONG } else { ACROSS };
    for i in 0..8 {
        for (j, half, v) in [(2 * i, "%low", "%v"), (2 * i + 1, "%high", "%w")] {
            match stored {
                Stored::F32 if x == "a" => {
                    t.code(format!("mul.f32 {v}, %g{j}, %lift; cvt.rn.f16.f32 {half}, {v}"));
                }
                Stored::F32 => t.code(format!("cvt.rn.f16.f32 {half}, %g{j}")),
                Stored::Bf16 => t.code(format!(
                    "mov.b32 %both, {{0, %b{j}}}; mov.b32 {v}, %both; cvt.rn.f16.f32 {half}, {v}"
                )),
                Stored::F16 => {}
            }
        }
        let halves = if stored == Stored::F16 {
            format!("%b{}, %b{}", 2 * i, 2 * i + 1)
        } else {
            "%low, %high".to_string()
        };
        t.code(format!(
            "mov.b32 %both, {{{halves}}}; st.shared.b32 [%x+{}], %both",
            rows(layout) * between * i
        ));
    }
}

fn list(stem: &str, from: usize, count: usize) -> String {
    format!("{{{}}}", numbered(&format!("%{stem}"), from, count))
}

/// Half a step: 16 of K.
fn multiply(t: &mut Text, half: usize, b: Layout) {
    let t = &mut t.part(
        "multiply",
        &Uses {
            reads: ".u32 %la, %lb, %use",
            changes: ".f32 %acc<64>",
            scratch: ".u32 %x, %y; .b32 %fa<8>, %fb<16>",
        },
    );
    let (layout, stride) = if b == Layout::AlongK { ("col", ALONG / 2) } else { ("row", ACROSS / 2) };
    let (deeper, further) = if b == Layout::AlongK { (32, 16 * ALONG) } else { (16 * ACROSS, 32) };
    t.code("add.u32 %x, %la, %use; add.u32 %y, %lb, %use");
    for j in 0..2 {
        t.code(format!(
            "wmma.load.b.sync.aligned.{layout}.m16n16k16.shared.f16 {}, [%y+{}], {stride}",
            list("fb", 8 * j, 8),
            half * deeper + j * further
        ));
    }
    for i in 0..4 {
        t.code(format!(
            "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {}, [%x+{}], {}",
            list("fa", 0, 8),
            half * 32 + i * 16 * ALONG,
            ALONG / 2
        ));
        for j in 0..2 {
            let d = list("acc", 16 * i + 8 * j, 8);
            t.code(format!(
                "wmma.mma.sync.aligned.row.{layout}.m16n16k16.f32.f32 {d}, {}, {}, {d}",
                list("fa", 0, 8),
                list("fb", 8 * j, 8)
            ));
        }
    }
}

/// Stores 16 rows of 32 sums at a time, each row by the lanes of a warp.
fn store(t: &mut Text) {
    let t = &mut t.part("store", &Uses { reads: ".f32 %acc<64>; .u32 %warp, %lane, %wm, %wn, %m, %n; .u64 %out", scratch: ".u32 %m0, %n0, %ldo, %x, %y, %sa, %sb, %i, %add; .s32 %resta; .u64 %row, %row1, %row2, %row3, %hopa, %wide; .f32 %scale, %old<4>, %sum<4>; .pred %adding, %column, %p, %q", ..Uses::default() });
    t.code(format!(
        "ld.param.u32 %ldo, [ldo]; ld.param.f32 %scale, [scale]; ld.param.u32 %add, [add]; setp.ne.u32 %adding, %add, 0;
         mov.u32 %x, stages; mad.lo.u32 %x, %warp, {}, %x; mad.lo.u32 %sa, %lane, 4, %x;
         add.u32 %m0, %m0, %wm; sub.s32 %resta, %m, %m0; add.u32 %n0, %n0, %wn; add.u32 %n0, %n0, %lane;
         setp.lt.u32 %column, %n0, %n; cvt.u64.u32 %wide, %n0; mad.wide.u32 %row, %m0, %ldo, %wide;
         shl.b64 %row, %row, 2; add.u64 %row, %row, %out; mul.wide.u32 %hopa, %ldo, 4",
        16 * SUMS
    ));
    for i in 0..4 {
        for j in 0..2 {
            t.code(format!(
                "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%x+{}], {}, {}",
                64 * j,
                list("acc", 16 * i + 8 * j, 8),
                SUMS / 4
            ));
        }
        t.code("bar.warp.sync 0xffffffff; mov.u32 %sb, %sa; mov.u32 %i, 0");
        t.label(&format!("ROWS{i}"));
        let rows = ["%row", "%row1", "%row2", "%row3"];
        t.say("all of out is read before any of it is stored, so that there is one wait, not four");
        for (r, row) in rows.into_iter().enumerate() {
            if r > 0 {
                t.code(format!("add.u64 {row}, {}, %hopa", rows[r - 1]));
            }
            t.code(format!(
                "ld.shared.f32 %sum{r}, [%sb+{}]; setp.gt.s32 %p, %resta, {r}; and.pred %p, %p, %column;
                 and.pred %q, %p, %adding; mov.f32 %old{r}, 0f00000000; @%q ld.global.f32 %old{r}, [{row}]",
                SUMS * r
            ));
        }
        for (r, row) in rows.into_iter().enumerate() {
            t.code(format!(
                "setp.gt.s32 %p, %resta, {r}; and.pred %p, %p, %column; mul.f32 %sum{r}, %sum{r}, %scale;
                 add.f32 %sum{r}, %sum{r}, %old{r}; @%p st.global.f32 [{row}], %sum{r}"
            ));
        }
        t.code("add.u64 %row, %row3, %hopa");
        t.code(format!(
            "sub.s32 %resta, %resta, 4; add.u32 %sb, %sb, {}; add.u32 %i, %i, 4; setp.lt.u32 %p, %i, 16; @%p bra ROWS{i}",
            4 * SUMS
        ));
        if i < 3 {
            t.code("bar.warp.sync 0xffffffff");
        }
    }
}
