//! f32 products with few outputs across: those of an adapter, whose rank is far below the other sizes. They read their
//! large factor once per 16 outputs across, so the memory's bandwidth bounds them.

use crate::operand::Layout;
use crate::product::PARAMS;
use crate::registers::numbered;
use crate::{File, Text, Uses};

const HEAD: &str = "
Products of an adapter in f32: one side of the output is at most 64 wide. The large factor is read once per 16
outputs across, 16 bytes per lane.

skinny_rows: out[M, N] (=|+=) scale * a[M, K] op(b), N small; nt: b [N, K], nn: b [K, N].
A warp makes 4 rows of 16 outputs. Lane l takes the terms 4 l .. 4 l + 3 of each 128, in the order of k; then the lanes are added
in pairs that are 16, 8, 4, 2, 1 apart. b passes through shared memory, 16 x 128 numbers at a time, in two buffers.

  w[0] = b's first 16 x 128;  x = a's first 4 x 4 numbers
  for k0 in 0..K step 128:
      wait for w;  barrier;  the other w = b's next
      acc[4][16] += x[4][4] w[16][4];  x = a's next

skinny_columns: part[s][R, C] = left[T, R]^T x[T, C], R small, over the rows of slice s, in their order.
A thread makes 16 outputs of 4 columns; 128 rows of left at a time are in shared memory.

skinny_sums: out (=|+=) scale * (the sum of part over the slices, in their order); `transposed`: out is [C, R].

launch: rows: grid (ceil(N / 16), ceil(M / 32)), 256 threads.
        columns: grid (ceil(C / 512), ceil(T / slice), ceil(R / 16)), 128 threads; slice is a multiple of 8.
        sums: grid (ceil(C / 256), R), 256 threads.
K of rows and C of columns are multiples of 4, and a, x and part are aligned to 16 bytes.
registers: rows: 64 sums, 16 of x, 4 of w; columns: 64 sums, 32 of x, 16 of left.
budget: 128 registers, 16384 bytes of shared memory
";

/// Rows of a warp, and columns of every kernel.
const ROWS: usize = 4;
const ACROSS: usize = 16;
/// Bytes of a buffer of b, and of 128 terms in it.
const BUFFER: usize = 8192;
const LINE: usize = 512;

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_80"));
    rows(&mut t, "skinny_rows_nt", Layout::AlongK);
    rows(&mut t, "skinny_rows_nn", Layout::AcrossK);
    columns(&mut t);
    sums(&mut t);
    vec![t.finish("skinny.ptx")]
}

fn rows(t: &mut Text, name: &str, b: Layout) {
    t.entry_within(name, &PARAMS, (256, "\n.minnctapersm 2"));
    t.code(
        ".reg .f32 %acc<64>, %x<16>, %w<4>, %send, %keep, %other, %scale, %old;
         .reg .u64 %out, %px<4>, %pw, %row, %wide, %step;
         .reg .u32 %t, %lane, %warp, %m, %n, %k, %lda, %ldb, %ldo, %add, %m0, %n0, %left, %kx, %kw, %rw, %fill, %from, %fills, %froms;
         .reg .u32 %i, %j;
         .reg .pred %in<8>, %p, %q, %adding;
         .shared .align 16 .f32 tile_w[4096]",
    );
    t.code(
        "ld.param.u64 %out, [out]; ld.param.u64 %px0, [a]; ld.param.u64 %pw, [b];
         ld.param.u32 %m, [m]; ld.param.u32 %n, [n]; ld.param.u32 %k, [k];
         ld.param.u32 %lda, [lda]; ld.param.u32 %ldb, [ldb];
         mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5;
         mov.u32 %i, %ctaid.y; shl.b32 %m0, %i, 5; mad.lo.u32 %m0, %warp, 4, %m0;
         mov.u32 %i, %ctaid.x; shl.b32 %n0, %i, 4;
         mov.u32 %left, %k; shl.b32 %kx, %lane, 2;
         mov.u32 %from, tile_w; mad.lo.u32 %from, %lane, 16, %from",
    );
    t.say("rows beyond the last one read that one");
    t.code("sub.u32 %j, %m, 1");
    for i in (0..ROWS).rev() {
        t.code(format!(
            "add.u32 %i, %m0, {i}; min.u32 %i, %i, %j; mul.wide.u32 %row, %i, %lda;
             cvt.u64.u32 %wide, %kx; add.u64 %row, %row, %wide; shl.b64 %row, %row, 2; add.u64 %px{i}, %px0, %row"
        ));
    }
    place(t, b);
    (0..ROWS * ACROSS).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    copy_w(t, b);
    fetch_x(t);
    t.label("STEP");
    t.code("cp.async.wait_group 0; bar.sync 0; sub.s32 %left, %left, 128; add.u64 %pw, %pw, %step");
    t.code("sub.u32 %fill, %fills, %fill");
    copy_w(t, b);
    multiply(t);
    t.code("sub.u32 %from, %froms, %from");
    (0..ROWS).for_each(|i| t.code(format!("add.u64 %px{i}, %px{i}, {LINE}")));
    fetch_x(t);
    t.code("setp.gt.s32 %p, %left, 0; @%p bra STEP; cp.async.wait_group 0");
    add_lanes(t);
    store(t);
    t.end();
}

/// The source of the thread's eight numbers of b, and their place in the buffer. `%in`: the output is there.
fn place(t: &mut Text, b: Layout) {
    match b {
        Layout::AlongK => {
            t.say("row n0 + t / 16 of b, terms t % 16 + 16 i");
            t.code(
                "shr.u32 %rw, %t, 4; and.b32 %kw, %t, 15; mov.u32 %fill, tile_w;
                 mad.lo.u32 %fill, %rw, 512, %fill; mad.lo.u32 %fill, %kw, 4, %fill;
                 add.u32 %rw, %rw, %n0; setp.lt.u32 %in0, %rw, %n;
                 mul.wide.u32 %row, %rw, %ldb; cvt.u64.u32 %wide, %kw; add.u64 %row, %row, %wide;
                 mov.u64 %step, 512",
            );
        }
        Layout::AcrossK => {
            t.say("row t / 2 of b, outputs n0 + 8 (t % 2) + i");
            t.code(
                "shr.u32 %kw, %t, 1; and.b32 %rw, %t, 1; shl.b32 %rw, %rw, 3; mov.u32 %fill, tile_w;
                 mad.lo.u32 %fill, %rw, 512, %fill; mad.lo.u32 %fill, %kw, 4, %fill; add.u32 %rw, %rw, %n0;
                 mul.wide.u32 %row, %kw, %ldb; cvt.u64.u32 %wide, %rw; add.u64 %row, %row, %wide;
                 mul.wide.u32 %step, %ldb, 512",
            );
            (0..8).for_each(|i| t.code(format!("add.u32 %i, %rw, {i}; setp.lt.u32 %in{i}, %i, %n")));
        }
    }
    t.code("shl.b64 %row, %row, 2; add.u64 %pw, %pw, %row");
    t.say("the sum of both places in the two buffers");
    t.code(format!("shl.b32 %fills, %fill, 1; add.u32 %fills, %fills, {BUFFER}"));
    t.code(format!("shl.b32 %froms, %from, 1; add.u32 %froms, %froms, {BUFFER}"));
}

/// Copies the next eight numbers of b to a buffer, zero beyond the edges.
fn copy_w(t: &mut Text, b: Layout) {
    for i in 0..8 {
        let (there, ahead, apart) = match b {
            Layout::AlongK => ("%in0".into(), 16 * i, 64),
            Layout::AcrossK => (format!("%in{i}"), 0, 4),
        };
        let to = i * if b == Layout::AlongK { 64 } else { LINE };
        t.code(format!(
            "add.u32 %i, %kw, {ahead}; setp.lt.s32 %q, %i, %left; and.pred %q, %q, {there}; selp.u32 %i, 4, 0, %q;
             cp.async.ca.shared.global [%fill+{to}], [%pw+{}], 4, %i",
            apart * i
        ));
    }
    t.code("cp.async.commit_group");
}

/// The next four numbers of four rows of a, zero beyond K.
fn fetch_x(t: &mut Text) {
    t.code("setp.lt.s32 %q, %kx, %left");
    (0..16).for_each(|i| t.code(format!("mov.f32 %x{i}, 0f00000000")));
    (0..ROWS)
        .for_each(|i| t.code(format!("@%q ld.global.v4.f32 {{{}}}, [%px{i}]", numbered("%x", 4 * i, 4))));
}

fn multiply(t: &mut Text) {
    let uses = Uses { reads: ".f32 %x<16>; .u32 %from", changes: ".f32 %acc<64>", scratch: ".f32 %w<4>" };
    let t = &mut t.part("multiply", &uses);
    for r in 0..ACROSS {
        t.code(format!("ld.shared.v4.f32 {{{}}}, [%from+{}]", numbered("%w", 0, 4), LINE * r));
        for (j, i) in (0..16).map(|n| (n / 4, n % 4)) {
            t.code(format!("fma.rn.f32 %acc{0}, %x{1}, %w{j}, %acc{0}", ACROSS * i + r, 4 * i + j));
        }
    }
}

/// Adds the lanes' sums: each exchange halves how many sums a lane has. Lane l ends with sums 2 l and 2 l + 1 in
/// %acc0 and %acc1.
fn add_lanes(t: &mut Text) {
    let mut half = ROWS * ACROSS / 2;
    for apart in [16, 8, 4, 2, 1] {
        t.code(format!("and.b32 %i, %lane, {apart}; setp.ne.u32 %p, %i, 0"));
        for i in 0..half {
            t.code(format!(
                "selp.f32 %send, %acc{i}, %acc{0}, %p; selp.f32 %keep, %acc{0}, %acc{i}, %p;
                 shfl.sync.bfly.b32 %other, %send, {apart}, 31, 0xffffffff; add.f32 %acc{i}, %keep, %other",
                i + half
            ));
        }
        half /= 2;
    }
}

fn store(t: &mut Text) {
    t.code(
        "ld.param.u32 %ldo, [ldo]; ld.param.f32 %scale, [scale]; ld.param.u32 %add, [add];
         setp.ne.u32 %adding, %add, 0;
         shr.u32 %i, %lane, 3; add.u32 %m0, %m0, %i; and.b32 %j, %lane, 7; mad.lo.u32 %n0, %j, 2, %n0;
         mul.wide.u32 %row, %m0, %ldo; cvt.u64.u32 %wide, %n0; add.u64 %row, %row, %wide;
         shl.b64 %row, %row, 2; add.u64 %out, %out, %row; setp.lt.u32 %p, %m0, %m",
    );
    for j in 0..2 {
        t.code(format!(
            "add.u32 %i, %n0, {j}; setp.lt.u32 %q, %i, %n; and.pred %in{j}, %p, %q; and.pred %q, %in{j}, %adding;
             mul.f32 %acc{j}, %acc{j}, %scale; mov.f32 %old, 0f00000000; @%q ld.global.f32 %old, [%out+{0}];
             add.f32 %acc{j}, %acc{j}, %old; @%in{j} st.global.f32 [%out+{0}], %acc{j}",
            4 * j
        ));
    }
}

fn columns(t: &mut Text) {
    let params = [
        ("u64", "part"),
        ("u64", "left"),
        ("u64", "x"),
        ("u32", "t"),
        ("u32", "r"),
        ("u32", "c"),
        ("u32", "ldl"),
        ("u32", "ldx"),
        ("u32", "slice"),
    ];
    t.entry_within("skinny_columns", &params, (128, "\n.minnctapersm 4"));
    t.code(
        ".reg .f32 %acc<64>, %x<32>, %by<16>, %v;
         .reg .u64 %part, %left, %px, %row, %wide, %step, %far;
         .reg .u32 %t, %rows, %r, %c, %ldl, %ldx, %slice, %t0, %r0, %c0, %count, %i, %j, %at, %fill, %k, %l0, %most;
         .reg .pred %in, %p, %q, %there;
         .shared .align 16 .f32 tile_l[2048]",
    );
    t.code(
        "ld.param.u64 %part, [part]; ld.param.u64 %left, [left]; ld.param.u64 %px, [x];
         ld.param.u32 %rows, [t]; ld.param.u32 %r, [r]; ld.param.u32 %c, [c];
         ld.param.u32 %ldl, [ldl]; ld.param.u32 %ldx, [ldx]; ld.param.u32 %slice, [slice];
         mov.u32 %t, %tid.x; mov.u32 %i, %ctaid.x; shl.b32 %c0, %i, 9; mad.lo.u32 %c0, %t, 4, %c0;
         mov.u32 %i, %ctaid.y; mul.lo.u32 %t0, %i, %slice; mov.u32 %i, %ctaid.z; shl.b32 %r0, %i, 4;
         sub.u32 %count, %rows, %t0; min.u32 %count, %count, %slice; setp.lt.u32 %in, %c0, %c",
    );
    t.say("the thread fills column t % 16 of left's tile");
    t.code(
        "and.b32 %j, %t, 15; shr.u32 %k, %t, 4; add.u32 %i, %r0, %j; setp.lt.u32 %there, %i, %r;
         add.u32 %at, %t0, %k; mul.wide.u32 %row, %at, %ldl; cvt.u64.u32 %wide, %i; add.u64 %row, %row, %wide;
         shl.b64 %row, %row, 2; add.u64 %left, %left, %row; mul.wide.u32 %step, %ldl, 32;
         mov.u32 %fill, tile_l; mad.lo.u32 %fill, %t, 4, %fill;
         mul.wide.u32 %row, %t0, %ldx; cvt.u64.u32 %wide, %c0; add.u64 %row, %row, %wide; shl.b64 %row, %row, 2;
         add.u64 %px, %px, %row; mul.wide.u32 %far, %ldx, 4",
    );
    (0..64).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.label("PIECE");
    fill(t);
    t.code("mov.u32 %l0, tile_l; mov.u32 %k, 0; min.u32 %most, %count, 128; bar.sync 0");
    eights(t);
    t.code("sub.u32 %count, %count, %most; setp.eq.u32 %p, %count, 0; @%p bra WHOLE; bar.sync 0; bra PIECE");
    t.label("WHOLE");
    store_part(t);
    t.end();
}

/// The next 128 rows of left to shared memory.
fn fill(t: &mut Text) {
    t.say("128 rows of left, zero beyond the edges");
    t.code("shr.u32 %k, %t, 4");
    for i in 0..16 {
        t.code(format!(
            "setp.lt.u32 %q, %k, %count; and.pred %q, %q, %there; mov.f32 %v, 0f00000000;
             @%q ld.global.f32 %v, [%left]; st.shared.f32 [%fill+{}], %v;
             add.u32 %k, %k, 8; add.u64 %left, %left, %step",
            512 * i
        ));
    }
}

/// The sums of the rows that are there, eight at a time.
fn eights(t: &mut Text) {
    t.label("EIGHT");
    (0..32).for_each(|i| t.code(format!("mov.f32 %x{i}, 0f00000000")));
    for u in 0..8 {
        t.code(format!(
            "add.u32 %i, %k, {u}; setp.lt.u32 %q, %i, %count; and.pred %q, %q, %in;
             @%q ld.global.v4.f32 {{{}}}, [%px]; add.u64 %px, %px, %far",
            numbered("%x", 4 * u, 4)
        ));
    }
    for u in 0..8 {
        for i in 0..4 {
            t.code(format!("ld.shared.v4.f32 {{{}}}, [%l0+{}]", numbered("%by", 4 * i, 4), 64 * u + 16 * i));
        }
        for (r, j) in (0..64).map(|n| (n / 4, n % 4)) {
            t.code(format!("fma.rn.f32 %acc{0}, %by{r}, %x{1}, %acc{0}", 4 * r + j, 4 * u + j));
        }
    }
    t.code("add.u32 %l0, %l0, 512; add.u32 %k, %k, 8; setp.lt.u32 %p, %k, %most; @%p bra EIGHT");
}

fn store_part(t: &mut Text) {
    t.code(
        "mov.u32 %i, %ctaid.y; mad.lo.u32 %i, %i, %r, %r0; mul.wide.u32 %row, %i, %c; cvt.u64.u32 %wide, %c0;
         add.u64 %row, %row, %wide; shl.b64 %row, %row, 2; add.u64 %part, %part, %row; mul.wide.u32 %step, %c, 4",
    );
    for r in 0..16 {
        t.code(format!(
            "add.u32 %i, %r0, {r}; setp.lt.u32 %q, %i, %r; and.pred %q, %q, %in;
             @%q st.global.v4.f32 [%part], {{{}}}; add.u64 %part, %part, %step",
            numbered("%acc", 4 * r, 4)
        ));
    }
}

fn sums(t: &mut Text) {
    let params = [
        ("u64", "out"),
        ("u64", "part"),
        ("u32", "slices"),
        ("u32", "r"),
        ("u32", "c"),
        ("u32", "ldo"),
        ("u32", "transposed"),
        ("f32", "scale"),
        ("u32", "add"),
    ];
    t.entry("skinny_sums", &params, 256);
    t.code(
        ".reg .f32 %v<8>, %sum, %scale, %old;
         .reg .u64 %out, %part, %row, %wide, %step;
         .reg .u32 %t, %slices, %r, %c, %ldo, %transposed, %add, %at, %across, %k, %i;
         .reg .pred %p, %q, %adding, %other;
         ld.param.u64 %out, [out]; ld.param.u64 %part, [part]; ld.param.u32 %slices, [slices];
         ld.param.u32 %r, [r]; ld.param.u32 %c, [c]; ld.param.u32 %ldo, [ldo]; ld.param.u32 %transposed, [transposed];
         ld.param.f32 %scale, [scale]; ld.param.u32 %add, [add];
         mov.u32 %t, %tid.x; mov.u32 %i, %ctaid.x; shl.b32 %at, %i, 8; add.u32 %at, %at, %t;
         mov.u32 %across, %ctaid.y; setp.ge.u32 %p, %at, %c; @%p ret;
         mul.wide.u32 %row, %across, %c; cvt.u64.u32 %wide, %at; add.u64 %row, %row, %wide; shl.b64 %row, %row, 2;
         add.u64 %part, %part, %row; mul.wide.u32 %step, %r, %c; shl.b64 %step, %step, 2;
         mov.f32 %sum, 0f00000000; mov.u32 %k, 0",
    );
    t.label("EIGHT");
    for i in 0..8 {
        t.code(format!(
            "add.u32 %i, %k, {i}; setp.lt.u32 %q, %i, %slices; mov.f32 %v{i}, 0f00000000;
             @%q ld.global.f32 %v{i}, [%part]; add.u64 %part, %part, %step"
        ));
    }
    (0..8).for_each(|i| t.code(format!("add.f32 %sum, %sum, %v{i}")));
    t.code(
        "add.u32 %k, %k, 8; setp.lt.u32 %p, %k, %slices; @%p bra EIGHT;
         setp.ne.u32 %other, %transposed, 0; selp.u32 %i, %at, %across, %other; selp.u32 %k, %across, %at, %other;
         mul.wide.u32 %row, %i, %ldo; cvt.u64.u32 %wide, %k; add.u64 %row, %row, %wide; shl.b64 %row, %row, 2;
         add.u64 %out, %out, %row; setp.ne.u32 %adding, %add, 0; mov.f32 %old, 0f00000000;
         @%adding ld.global.f32 %old, [%out]; mul.f32 %sum, %sum, %scale; add.f32 %sum, %sum, %old;
         st.global.f32 [%out], %sum",
    );
    t.end();
}
