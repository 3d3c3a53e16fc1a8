//! The product on tensor cores, sm_80: bf16 operands, f32 sums. 128 x 128 outputs by 256 threads (8 warps as 2 x 4,
//! each 64 x 32), K in steps of 32 through three stages of shared memory that cp.async fills two steps ahead.

use crate::operand::Layout;
use crate::product::{self, PARAMS};
use crate::{File, Text, Uses, edge, epilogue};

const HEAD: &str = "
product_sm80: out[M, N] (=|+=) scale * a op(b), bf16 operands, f32 sums on tensor cores
nt is a b^T, nn is a b: linear and linear_grad of the bf16 class. narrow makes the operand a: bf16 rows padded to
multiples of 8 numbers, so that every row begins at a multiple of 16 bytes; weights are packed so.

  stages 0, 1 = tiles of k 0.., 32..                     cp.async 16 bytes each, zero beyond the edges
  for step in 0 .. ceil(K / 32):
      wait for this step's stage; barrier
      stage (step + 2) % 3 = tiles of k 32 (step + 2)..  everybody is done with what stood there
      for k in 0, 16:                                    a warp: 4 x 4 products m16n8k16
          a fragments: 4 ldmatrix.x4;  b fragments: 2 ldmatrix.x4
          acc[4][4] += a b
  out = scale * acc (+ out where add is not 0)

  narrow: out[r, c] = bf16(x[r, c]), rows cols apart become rows stride apart; grid (rows, ceil(cols / 256))
  narrow_whole: the same where stride = cols, 8 numbers per thread; grid ceil(rows cols / 2048)

A tile along K has rows of 4 pieces of 16 bytes: piece p of row r is stored at p ^ (r / 2 % 4); across K rows have 16
pieces: p ^ (r % 8). So the eight rows that a matrix of ldmatrix reads meet all banks once.
Sums: the order of k in steps of 16, inside as the tensor core has it: the class is this device's own.
launch: grid (ceil(N / 128), ceil(M / 128)), 256 threads.
registers: 64 sums, 16 + 8 fragments, 32 numbers of out, addresses; two blocks on a multiprocessor.
budget: 128 registers, 49152 bytes of shared memory
promises: HMMA
";

const LORA: &str = "
lora_linear_sm80: out[M, N] (=|+=) scale * a op(b) + by * left op(right), the first product as product_sm80, the second
in f32: an adapter's, added before the tile is stored, so that out is written once and not read again
nt: right [N, R], left = x A^T (lora_linear); nn: right [R, N], left = dh (lora_linear_grad)

  the product as product_sm80.ptx has it
  for r0 in 0..R step 32:
      left_tile[32][128], right_tile[32][128] where the stages were, zero beyond the edges
      for r in 0 .. min(32, R - r0):  low[64] += left x right
  out = scale * acc (+ out where add is not 0);  out = by * low + out

Sums: the product's, then those of the rank in order, one fused multiply-add per term, as matmul.ptx has them: the same
bits as the two one after the other, where the compiler fuses nothing else.
between: numbers from row to row of right. Rows of shared memory are 130 numbers apart.
launch: grid (ceil(N / 128), ceil(M / 128)), 256 threads.
registers: 64 sums and 64 of the adapter, 16 + 8 fragments, 32 numbers of out, addresses.
budget: 255 registers, 49152 bytes of shared memory
promises: HMMA
";

/// The operation on a tile before it is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Epilogue {
    Nothing,
    /// The adapter's part is added.
    Adapter,
}

/// Bytes of an operand's tile; a stage has one of each.
const TILE: usize = 8192;
const STAGES: usize = 3;

pub fn files() -> Vec<File> {
    use Layout::{AcrossK, AlongK};
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_80"));
    product(&mut t, "product_sm80_nt", AlongK, Epilogue::Nothing);
    product(&mut t, "product_sm80_nn", AcrossK, Epilogue::Nothing);
    narrow(&mut t);
    narrow_whole(&mut t);
    let mut lora = Text::default();
    lora.head(LORA, ("7.0", "sm_80"));
    product(&mut lora, "lora_linear_sm80_nt", AlongK, Epilogue::Adapter);
    product(&mut lora, "lora_linear_sm80_nn", AcrossK, Epilogue::Adapter);
    vec![t.finish("product_sm80.ptx"), lora.finish("lora_linear_sm80.ptx")]
}

fn narrow(t: &mut Text) {
    let params = [("u64", "out"), ("u64", "x"), ("u32", "cols"), ("u32", "stride")];
    t.entry("narrow", &params, 256);
    t.code(
        ".reg .u64 %out, %x, %row, %c64; .reg .u32 %r, %c, %cols, %stride, %block; .reg .f32 %v; .reg .b16 %h, %g; .reg .b32 %both;
         .reg .pred %p;
         ld.param.u64 %out, [out]; ld.param.u64 %x, [x]; ld.param.u32 %cols, [cols]; ld.param.u32 %stride, [stride];
         mov.u32 %r, %ctaid.x; mov.u32 %block, %ctaid.y; mov.u32 %c, %tid.x; mad.lo.u32 %c, %block, 256, %c;
         setp.ge.u32 %p, %c, %cols; @%p ret;
         cvt.u64.u32 %c64, %c; mad.wide.u32 %row, %r, %cols, %c64; shl.b64 %row, %row, 2; add.u64 %x, %x, %row;
         ld.global.nc.f32 %v, [%x]; cvt.rn.bf16x2.f32 %both, 0f00000000, %v; mov.b32 {%h, %g}, %both",
    );
    t.code(
        "mad.wide.u32 %row, %r, %stride, %c64; shl.b64 %row, %row, 1; add.u64 %out, %out, %row;
         st.global.b16 [%out], %h",
    );
    t.end();
}

/// The same of rows without padding, 8 numbers per thread; both addresses are multiples of 16.
fn narrow_whole(t: &mut Text) {
    t.entry("narrow_whole", &[("u64", "out"), ("u64", "x"), ("u32", "eights")], 256);
    t.code(
        ".reg .u64 %out, %x; .reg .u32 %i, %eights, %block; .reg .f32 %v<8>; .reg .b32 %w<4>; .reg .pred %p;
         ld.param.u64 %out, [out]; ld.param.u64 %x, [x]; ld.param.u32 %eights, [eights];
         mov.u32 %block, %ctaid.x; mov.u32 %i, %tid.x; mad.lo.u32 %i, %block, 256, %i;
         setp.ge.u32 %p, %i, %eights; @%p ret;
         mad.wide.u32 %x, %i, 32, %x; mad.wide.u32 %out, %i, 16, %out;
         ld.global.nc.v4.f32 {%v0, %v1, %v2, %v3}, [%x]; ld.global.nc.v4.f32 {%v4, %v5, %v6, %v7}, [%x+16]",
    );
    (0..4).for_each(|i| t.code(format!("cvt.rn.bf16x2.f32 %w{i}, %v{}, %v{}", 2 * i + 1, 2 * i)));
    t.code("st.global.v4.b32 [%out], {%w0, %w1, %w2, %w3}");
    t.end();
}

fn product(t: &mut Text, name: &str, b: Layout, epilogue: Epilogue) {
    // Activations are rows of numbers along K.
    let a = Layout::AlongK;
    match epilogue {
        // Registers for two blocks on a multiprocessor.
        Epilogue::Nothing => t.entry_within(name, &PARAMS, (256, " .minnctapersm 2")),
        Epilogue::Adapter => t.entry(name, &[&PARAMS[..], &epilogue::PARAMS].concat(), 256),
    }
    t.code(format!(
        ".reg .f32 %acc<64>, %scale, %v, %old<32>;
         .reg .b32 %fa<16>, %fb<8>;
         .reg .u64 %out, %pa<2>, %pb<2>, %stepa, %stepb, %row, %row<4>, %wide, %safe;
         .reg .u32 %t, %lane, %warp, %wm, %wn, %m, %n, %k, %lda, %ldb, %ldo, %add, %m0, %n0, %x, %y, %z, %real;
         .reg .u32 %oa<2>, %ob<2>, %ka<2>, %kb<2>, %sa<2>, %sb<2>, %la<2>, %lb<2>, %fill, %use, %k0, %base;
         .reg .u32 %keepa<2>, %keepb<2>;
         .reg .pred %p, %q, %adding, %full;
         .shared .align 128 .b8 stages[{}]",
        STAGES * 2 * TILE
    ));
    product::read(t);
    t.code(
        "mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5;
         and.b32 %wm, %warp, 1; shl.b32 %wm, %wm, 6; shr.u32 %wn, %warp, 1; shl.b32 %wn, %wn, 5;
         mov.u32 %x, %ctaid.y; shl.b32 %m0, %x, 7; mov.u32 %x, %ctaid.x; shl.b32 %n0, %x, 7",
    );
    t.code("mov.u64 %safe, %pb0");
    place(t, "a", ("%m0", "%m"), a);
    place(t, "b", ("%n0", "%n"), b);
    lanes(t, "a", a);
    lanes(t, "b", b);
    (0..64).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.say("the first two stages");
    t.code("mov.u32 %k0, 0; mov.u32 %fill, 0");
    for _ in 0..2 {
        fetch(t, a, b);
    }
    t.code("mov.u32 %use, 0; mov.u32 %z, 0");
    t.label("STEP");
    t.code("cp.async.wait_group 1; bar.sync 0");
    fetch(t, a, b);
    (0..2).for_each(|half| multiply(t, half, a, b));
    t.code(format!(
        "add.u32 %use, %use, {0}; setp.eq.u32 %p, %use, {1}; selp.u32 %use, 0, %use, %p;
         add.u32 %z, %z, 32; setp.lt.u32 %p, %z, %k; @%p bra STEP; cp.async.wait_group 0",
        2 * TILE,
        STAGES * 2 * TILE
    ));
    if epilogue == Epilogue::Adapter {
        epilogue::adapter(t, b);
    }
    store(t, epilogue);
    t.end();
}

/// The two pieces of 16 bytes that this thread copies of each tile: output index %o, place in K %k, shared address %s
/// in the first stage, global address %p; pieces beyond the outputs' edge have no valid bytes.
fn place(t: &mut Text, x: &str, (first, count): (&str, &str), layout: Layout) {
    let t = &mut t.part(
        "place",
        &Uses {
            reads: &format!(".u32 %t, %ld{x}, {first}, {count}"),
            changes: &format!(".u64 %p{x}<2>, %step{x}; .u32 %o{x}<2>, %k{x}<2>, %s{x}<2>, %keep{x}<2>"),
            scratch: ".u64 %wide, %row; .u32 %x, %y, %z; .pred %p",
        },
    );
    let base = if x == "a" { 0 } else { TILE };
    t.code(format!("mov.u64 %wide, %p{x}0"));
    for i in 0..2 {
        t.code(format!("add.u32 %x, %t, {}", 256 * i));
        match layout {
            Layout::AlongK => t.code(format!(
                "shr.u32 %o{x}{i}, %x, 2; and.b32 %y, %x, 3; shl.b32 %k{x}{i}, %y, 3;
                 shr.u32 %z, %o{x}{i}, 1; and.b32 %z, %z, 3; xor.b32 %y, %y, %z; shl.b32 %y, %y, 4;
                 shl.b32 %z, %o{x}{i}, 6"
            )),
            Layout::AcrossK => t.code(format!(
                "shr.u32 %k{x}{i}, %x, 4; and.b32 %y, %x, 15; shl.b32 %o{x}{i}, %y, 3;
                 and.b32 %z, %k{x}{i}, 7; xor.b32 %y, %y, %z; shl.b32 %y, %y, 4; shl.b32 %z, %k{x}{i}, 8"
            )),
        }
        t.code(format!(
            "mov.u32 %s{x}{i}, stages; add.u32 %s{x}{i}, %s{x}{i}, %y; add.u32 %s{x}{i}, %s{x}{i}, %z;
             add.u32 %s{x}{i}, %s{x}{i}, {base}; add.u32 %o{x}{i}, %o{x}{i}, {first}"
        ));
        let (rows, cols) = match layout {
            Layout::AlongK => (format!("%o{x}{i}"), format!("%k{x}{i}")),
            Layout::AcrossK => (format!("%k{x}{i}"), format!("%o{x}{i}")),
        };
        t.code(format!(
            "cvt.u64.u32 %row, {cols}; mad.wide.u32 %row, {rows}, %ld{x}, %row; shl.b64 %row, %row, 1;
             add.u64 %p{x}{i}, %wide, %row"
        ));
        t.say("numbers of the piece that are real along the outputs: all or none along K, up to 8 across");
        match layout {
            Layout::AlongK => {
                t.code(format!("setp.lt.u32 %p, %o{x}{i}, {count}; selp.u32 %keep{x}{i}, 8, 0, %p"));
            }
            Layout::AcrossK => t.code(format!(
                "sub.s32 %x, {count}, %o{x}{i}; min.s32 %x, %x, 8; max.s32 %keep{x}{i}, %x, 0"
            )),
        }
    }
    match layout {
        Layout::AlongK => t.code(format!("mov.u64 %step{x}, 64")),
        Layout::AcrossK => t.code(format!("mul.wide.u32 %step{x}, %ld{x}, 64")),
    }
}

/// The shared addresses, in the first stage and for the first outputs of the warp, that this lane passes to ldmatrix:
/// one for each half of the step.
fn lanes(t: &mut Text, x: &str, layout: Layout) {
    let t = &mut t.part(
        "lanes",
        &Uses {
            reads: ".u32 %lane, %wm, %wn",
            changes: &format!(".u32 %l{x}<2>"),
            scratch: ".u32 %x, %y, %z",
        },
    );
    let (base, first) = if x == "a" { (0, "%wm") } else { (TILE, "%wn") };
    // matrices in the order that the fragment wants: a walks outputs first, b walks K first
    let (output, depth) = if x == "a" { ("3", "4") } else { ("4", "3") };
    for half in 0..2 {
        t.code(format!(
            "and.b32 %x, %lane, 7; shr.u32 %y, %lane, {output}; and.b32 %y, %y, 1; shl.b32 %y, %y, 3;
             shr.u32 %z, %lane, {depth}; and.b32 %z, %z, 1"
        ));
        match layout {
            Layout::AlongK => t.code(format!(
                "add.u32 %x, %x, %y; add.u32 %x, %x, {first}; add.u32 %z, %z, {}; shr.u32 %y, %x, 1;
                 and.b32 %y, %y, 3; xor.b32 %z, %z, %y; shl.b32 %z, %z, 4; shl.b32 %x, %x, 6;
                 add.u32 %l{x}{half}, %x, %z",
                2 * half
            )),
            Layout::AcrossK => t.code(format!(
                "shl.b32 %z, %z, 3; add.u32 %x, %x, %z; add.u32 %x, %x, {}; add.u32 %y, %y, {first};
                 shl.b32 %y, %y, 1; shl.b32 %z, %x, 8; and.b32 %x, %x, 7; shl.b32 %x, %x, 4;
                 xor.b32 %y, %y, %x; add.u32 %l{x}{half}, %y, %z",
                16 * half
            )),
        }
        t.code(format!("mov.u32 %x, stages; add.u32 %l{x}{half}, %l{x}{half}, %x; add.u32 %l{x}{half}, %l{x}{half}, {base}"));
    }
}

/// Starts the copies of the step at %k0 into the stage at %fill, and advances.
fn fetch(t: &mut Text, a: Layout, b: Layout) {
    let t = &mut t.part("fetch", &Uses { reads: ".u64 %safe, %stepa, %stepb; .u32 %k, %ka<2>, %kb<2>, %keepa<2>, %keepb<2>, %sa<2>, %sb<2>", changes: ".u64 %pa<2>, %pb<2>; .u32 %k0, %fill", scratch: ".u64 %row; .u32 %x, %real; .pred %p" });
    for (x, layout) in [("a", a), ("b", b)] {
        for i in 0..2 {
            t.code(format!("add.u32 %x, %k0, %k{x}{i}; sub.s32 %real, %k, %x"));
            match layout {
                Layout::AlongK => t.code(format!(
                    "min.s32 %real, %real, %keep{x}{i}; max.s32 %real, %real, 0; shl.b32 %real, %real, 1"
                )),
                Layout::AcrossK => t.code(format!(
                    "setp.gt.s32 %p, %real, 0; selp.u32 %real, %keep{x}{i}, 0, %p; shl.b32 %real, %real, 1"
                )),
            }
            t.say("what is not real is not read: the address stays inside the matrix");
            t.code(format!(
                "setp.eq.u32 %p, %real, 0; selp.u64 %row, %safe, %p{x}{i}, %p; add.u32 %x, %s{x}{i}, %fill;
                 cp.async.cg.shared.global [%x], [%row], 16, %real; add.u64 %p{x}{i}, %p{x}{i}, %step{x}"
            ));
        }
    }
    t.code(format!(
        "cp.async.commit_group; add.u32 %k0, %k0, 32; add.u32 %fill, %fill, {};
         setp.eq.u32 %p, %fill, {}; selp.u32 %fill, 0, %fill, %p",
        2 * TILE,
        STAGES * 2 * TILE
    ));
}

/// Half a step: 16 of K.
fn multiply(t: &mut Text, half: usize, a: Layout, b: Layout) {
    let t = &mut t.part(
        "multiply",
        &Uses {
            reads: ".u32 %la<2>, %lb<2>, %use",
            changes: ".f32 %acc<64>",
            scratch: ".b32 %fa<16>, %fb<8>; .u32 %x",
        },
    );
    let transposed = |l| if l == Layout::AcrossK { ".trans" } else { "" };
    // outputs further on: along K a row is 64 bytes; across K pieces are exchanged by a row's own number
    for i in 0..4 {
        address(t, ("%la", half), a, 16 * i);
        t.code(format!(
            "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{%fa{}, %fa{}, %fa{}, %fa{}}}, [%x]",
            transposed(a),
            4 * i,
            4 * i + 1,
            4 * i + 2,
            4 * i + 3
        ));
    }
    for j in 0..2 {
        address(t, ("%lb", half), b, 16 * j);
        t.code(format!(
            "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{%fb{}, %fb{}, %fb{}, %fb{}}}, [%x]",
            transposed(b),
            4 * j,
            4 * j + 1,
            4 * j + 2,
            4 * j + 3
        ));
    }
    for (i, j) in (0..16).map(|x| (x / 4, x % 4)) {
        let c = |r| format!("%acc{}", 16 * i + 4 * j + r);
        let d = format!("{{{}, {}, {}, {}}}", c(0), c(1), c(2), c(3));
        t.code(format!(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {{%fa{}, %fa{}, %fa{}, %fa{}}}, \
             {{%fb{}, %fb{}}}, {d}",
            4 * i,
            4 * i + 1,
            4 * i + 2,
            4 * i + 3,
            2 * j,
            2 * j + 1
        ));
    }
}

/// %x = the lane's address for outputs `ahead` of the warp's first.
fn address(t: &mut Text, (lane, half): (&str, usize), layout: Layout, ahead: usize) {
    let t = &mut t.part(
        "address",
        &Uses { reads: &format!(".u32 {lane}<2>, %use"), changes: ".u32 %x", ..Uses::default() },
    );
    match layout {
        // 16 rows on leave a row's number modulo 8 as it is, and so the exchange of its pieces
        Layout::AlongK => t.code(format!("add.u32 %x, {lane}{half}, %use; add.u32 %x, %x, {}", 64 * ahead)),
        // two pieces on: tiles are 8192-aligned and the warp's first piece is a multiple of 4, so only bits differ
        Layout::AcrossK => {
            t.code(format!("xor.b32 %x, {lane}{half}, {}; add.u32 %x, %x, %use", 2 * ahead));
        }
    }
}

/// Rows of a thread, 8 apart, whose outputs are loaded before any of them is stored.
const ROWS: usize = 4;

/// Stores the tile. All loads of some rows precede their stores, because a load after a store would wait for it.
fn store(t: &mut Text, epilogue: Epilogue) {
    let low = if epilogue == Epilogue::Adapter { ", %low<64>, %by" } else { "" };
    let t = &mut t.part(
        "store",
        &Uses {
            reads: &format!(".f32 %acc<64>, %scale{low}; .u32 %add, %lane, %wm, %wn, %m, %n; .u64 %out"),
            scratch: ".u32 %ldo, %m0, %n0, %x, %y; .u64 %row<4>, %wide; .f32 %v, %old<32>; .pred %adding, %full, %p, %q",
            ..Uses::default()
        },
    );
    t.code("ld.param.u32 %ldo, [ldo]; setp.ne.u32 %adding, %add, 0");
    edge::whole(t, (128, 128), 8);
    t.code(
        "add.u32 %m0, %m0, %wm; add.u32 %n0, %n0, %wn; shr.u32 %x, %lane, 2; add.u32 %m0, %m0, %x; and.b32 %x, %lane, 3;
         shl.b32 %x, %x, 1; add.u32 %n0, %n0, %x; cvt.u64.u32 %wide, %n0; mad.wide.u32 %row0, %m0, %ldo, %wide;
         shl.b64 %row0, %row0, 2; add.u64 %row0, %row0, %out; mul.wide.u32 %wide, %ldo, 32",
    );
    (1..ROWS).for_each(|r| t.code(format!("add.u64 %row{r}, %row{}, %wide", r - 1)));
    for first in (0..8).step_by(ROWS) {
        (0..8 * ROWS).for_each(|i| t.code(format!("mov.f32 %old{i}, 0f00000000")));
        t.code(format!("@!%full bra EDGE{first}"));
        let pair = |i: usize| {
            (format!("{{%old{}, %old{}}}", 2 * i, 2 * i + 1), format!("[%row{}+{}]", i / 4, i % 4 * 32))
        };
        for (old, at) in (0..4 * ROWS).map(pair) {
            t.code(format!("@%adding ld.global.v2.f32 {old}, {at}"));
        }
        values(t, epilogue, first);
        for (old, at) in (0..4 * ROWS).map(pair) {
            t.code(format!("st.global.v2.f32 {at}, {old}"));
        }
        t.code(format!("bra STORED{first}"));
        t.label(&format!("EDGE{first}"));
        singles(t, |old, at| format!("and.pred %q, %q, %adding; @%q ld.global.f32 {old}, {at}"));
        values(t, epilogue, first);
        singles(t, |old, at| format!("@%q st.global.f32 {at}, {old}"));
        t.label(&format!("STORED{first}"));
        if first + ROWS < 8 {
            t.code(format!("add.u32 %m0, %m0, {}; shl.b64 %wide, %wide, 2", 8 * ROWS));
            (0..ROWS).for_each(|r| t.code(format!("add.u64 %row{r}, %row{r}, %wide")));
        }
    }
}

/// The values of the thread's rows from `first` on: the sum, plus the previous value, plus the adapter's part.
fn values(t: &mut Text, epilogue: Epilogue, first: usize) {
    for old in 0..8 * ROWS {
        let (row, j, c) = (first + old / 8, old / 2 % 4, old % 2);
        let acc = 8 * (row / 2 * 2) + 4 * j + 2 * (row % 2) + c;
        t.code(format!("mul.f32 %v, %acc{acc}, %scale; add.f32 %old{old}, %v, %old{old}"));
        if epilogue == Epilogue::Adapter {
            t.code(format!("mul.f32 %v, %low{acc}, %by; add.f32 %old{old}, %v, %old{old}"));
        }
    }
}

/// Statements for each output of the thread's rows from %m0 on; %q: it is inside the edges.
fn singles(t: &mut Text, of: impl Fn(String, String) -> String) {
    for row in 0..ROWS {
        t.code(format!("add.u32 %x, %m0, {}; setp.lt.u32 %p, %x, %m", 8 * row));
        for i in 0..8 {
            let column = i / 2 * 8 + i % 2;
            t.code(format!("add.u32 %x, %n0, {column}; setp.lt.u32 %q, %x, %n; and.pred %q, %q, %p"));
            t.code(of(format!("%old{}", 8 * row + i), format!("[%row{row}+{}]", 4 * column)));
        }
    }
}
