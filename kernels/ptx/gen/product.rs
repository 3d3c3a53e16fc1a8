//! The f32 product of the baseline: 64 x 64 outputs by 256 threads, K in steps of 16 through shared memory, 4 x 4
//! outputs per thread. matmul, linear and linear_grad differ in the layouts of operands and the type of the weight.

use crate::operand::{Layout, Stored};
use crate::registers::numbered;
use crate::{File, Text, Uses, edge};

const HEAD: &str = "
out[M, N] (=|+=) scale * op(a) op(b), f32 arithmetic: one fused multiply-add per term, in the order of k, so that
every tile shape gives the same bits.

  the first tiles to registers, zero beyond the edges                   (4 numbers of each per thread)
  for k0 in 0..K step 16:
      barrier
      a_tile[16][64], b_tile[16][64] = registers; the next tiles to registers
      barrier
      for k in 0..16:  acc[4][4] += a_tile[k][4 ty ..] x b_tile[k][4 tx ..]
  out = scale * acc (+ out where add is not 0)                          all loads, then all stores; 16 bytes each
                                                                        where the tile is whole and out allows it

launch: grid (ceil(N / 64), ceil(M / 64)), 256 threads; tx = thread % 16, ty = thread / 16.
lda, ldb, ldo: numbers between rows of a, b and out as stored.
registers: 16 sums, 4 + 4 operands, 4 + 4 fetched numbers, 8 addresses of 64 bits, predicates of the edges.
Rows of a tile are 68 numbers apart: 16-byte reads stay aligned and stores of a column meet few banks twice.
budget: 80 registers, 8704 bytes of shared memory
";

pub fn files() -> Vec<File> {
    use Layout::{AcrossK, AlongK};
    let weights = [("f32", Stored::F32), ("bf16", Stored::Bf16), ("f16", Stored::F16)];
    let of = |name, title: &str, entries: Vec<(String, Layout, (Layout, Stored))>| {
        let mut t = Text::default();
        t.head(&format!("{title}\n{HEAD}"), ("7.0", "sm_70"));
        entries.iter().for_each(|(name, a, b)| entry(&mut t, name, *a, *b));
        t.finish(name)
    };
    let plain = |name: &str, a, b| (name.to_string(), a, (b, Stored::F32));
    let matmul = vec![
        plain("matmul_nn", AlongK, AcrossK),
        plain("matmul_nt", AlongK, AlongK),
        plain("matmul_tn", AcrossK, AcrossK),
    ];
    let linear = weights.map(|(n, s)| (format!("linear_{n}"), AlongK, (AlongK, s))).to_vec();
    let grad = weights.map(|(n, s)| (format!("linear_grad_{n}"), AlongK, (AcrossK, s))).to_vec();
    vec![
        of("matmul.ptx", "matmul: nn is a b, nt is a b^T, tn is a^T b.", matmul),
        of("linear.ptx", "linear: y[T, N] (=|+=) x[T, K] w^T with w [N, K] as stored.", linear),
        of("linear_grad.ptx", "linear_grad: dx[T, K] (=|+=) dy[T, N] w; the sum runs over N.", grad),
    ]
}

/// Parameters of every product with operands in memory: out [M, N], a, b; sizes; row distances; scale, and whether it
/// adds.
pub const PARAMS: [(&str, &str); 11] = [
    ("u64", "out"),
    ("u64", "a"),
    ("u64", "b"),
    ("u32", "m"),
    ("u32", "n"),
    ("u32", "k"),
    ("u32", "lda"),
    ("u32", "ldb"),
    ("u32", "ldo"),
    ("f32", "scale"),
    ("u32", "add"),
];

/// Reads all parameters but the distance of output rows, which is read where it is used.
pub fn read(t: &mut Text) {
    t.code(
        "ld.param.u64 %out, [out]; ld.param.u64 %pa0, [a]; ld.param.u64 %pb0, [b];
         ld.param.u32 %m, [m]; ld.param.u32 %n, [n]; ld.param.u32 %k, [k];
         ld.param.u32 %lda, [lda]; ld.param.u32 %ldb, [ldb];
         ld.param.f32 %scale, [scale]; ld.param.u32 %add, [add]",
    );
}

fn entry(t: &mut Text, name: &str, a: Layout, (b, stored): (Layout, Stored)) {
    t.entry(name, &PARAMS, 256);
    t.code(
        ".reg .f32 %acc<16>, %a<4>, %b<4>, %ga<4>, %gb<4>, %scale, %v, %old<16>;
         .reg .u64 %out, %pa<4>, %pb<4>, %stepa, %stepb, %row, %row<4>, %wide;
         .reg .u32 %t, %tx, %ty, %m, %n, %k, %lda, %ldb, %ldo, %add, %m0, %n0, %i, %x, %y, %sa, %sb, %qa, %qb;
         .reg .u32 %oa, %ob, %ka, %kb, %left;
         .reg .b16 %h<4>;
         .reg .pred %ina<4>, %inb<4>, %p, %q, %adding, %full, %col<4>;
         .shared .align 16 .f32 tile_a[1088];
         .shared .align 16 .f32 tile_b[1088]",
    );
    read(t);
    t.code(
        "mov.u32 %t, %tid.x; and.b32 %tx, %t, 15; shr.u32 %ty, %t, 4;
         mov.u32 %x, %ctaid.y; shl.b32 %m0, %x, 6;
         mov.u32 %x, %ctaid.x; shl.b32 %n0, %x, 6;
         mov.u32 %left, %k",
    );
    place(t, "a", ("%m0", "%m"), (a, Stored::F32));
    place(t, "b", ("%n0", "%n"), (b, stored));
    (0..16).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    fetch(t, "a", (a, Stored::F32));
    fetch(t, "b", (b, stored));
    t.label("STEP");
    t.code("bar.sync 0");
    keep(t, "a", (a, Stored::F32));
    keep(t, "b", (b, stored));
    t.say("the next step's loads stand before the barrier: after it, ptxas moves them behind the products");
    t.code("sub.s32 %left, %left, 16");
    for i in 0..4 {
        t.code(format!("add.u64 %pa{i}, %pa{i}, %stepa; add.u64 %pb{i}, %pb{i}, %stepb"));
    }
    fetch(t, "a", (a, Stored::F32));
    fetch(t, "b", (b, stored));
    t.code("bar.sync 0");
    multiply(t);
    t.code("setp.gt.s32 %q, %left, 0; @%q bra STEP");
    store(t);
    t.end();
}

/// The source of this thread's four numbers of an operand, and their place in the tile.
fn place(t: &mut Text, x: &str, (first, count): (&str, &str), (layout, stored): (Layout, Stored)) {
    let t = &mut t.part(
        "place",
        &Uses {
            reads: &format!(".u32 %t, %ld{x}, {first}, {count}"),
            changes: &format!(".u32 %o{x}, %k{x}, %s{x}; .u64 %p{x}<4>, %step{x}; .pred %in{x}<4>"),
            scratch: ".u64 %row, %wide; .u32 %x",
        },
    );
    let size = stored.size();
    t.say(&format!("{x}: %o{x} is the output's row or column, %k{x} the place in K"));
    match layout {
        Layout::AlongK => t.code(format!("and.b32 %k{x}, %t, 15; shr.u32 %o{x}, %t, 4")),
        Layout::AcrossK => t.code(format!("and.b32 %o{x}, %t, 63; shr.u32 %k{x}, %t, 6")),
    }
    t.code(format!(
        "mov.u32 %s{x}, tile_{x}; mad.lo.u32 %s{x}, %k{x}, 272, %s{x};
         shl.b32 %x, %o{x}, 2; add.u32 %s{x}, %s{x}, %x; add.u32 %o{x}, %o{x}, {first}"
    ));
    let (rows, cols, between) = match layout {
        Layout::AlongK => (format!("%o{x}"), format!("%k{x}"), 16),
        Layout::AcrossK => (format!("%k{x}"), format!("%o{x}"), 4),
    };
    t.code(format!(
        "mul.wide.u32 %row, {rows}, %ld{x}; cvt.u64.u32 %wide, {cols}; add.u64 %row, %row, %wide;
         mul.lo.u64 %row, %row, {size}; add.u64 %p{x}0, %p{x}0, %row;
         mul.wide.u32 %row, %ld{x}, {}",
        between * size
    ));
    (1..4).for_each(|i| t.code(format!("add.u64 %p{x}{i}, %p{x}{}, %row", i - 1)));
    match layout {
        Layout::AlongK => {
            t.code(format!("mov.u64 %step{x}, {}", 16 * size));
            for i in 0..4 {
                t.code(format!("add.u32 %x, %o{x}, {}; setp.lt.u32 %in{x}{i}, %x, {count}", 16 * i));
            }
        }
        Layout::AcrossK => {
            t.code(format!("mul.wide.u32 %step{x}, %ld{x}, {}", 16 * size));
            (0..4).for_each(|i| t.code(format!("setp.lt.u32 %in{x}{i}, %o{x}, {count}")));
        }
    }
}

/// The registers that a fetch fills: only b is stored in 16 bits.
fn fetched(x: &str, stored: Stored) -> &'static str {
    match (stored, x) {
        (Stored::F32, "a") => ".f32 %ga<4>",
        (Stored::F32, _) => ".f32 %gb<4>",
        _ => ".b16 %h<4>",
    }
}

/// Loads the next four numbers into registers, zero beyond the edges. Not `ld.global.nc`, which ptxas would move beyond
/// a barrier.
fn fetch(t: &mut Text, x: &str, (layout, stored): (Layout, Stored)) {
    let t = &mut t.part(
        "fetch",
        &Uses {
            reads: &format!(".u32 %k{x}, %left; .u64 %p{x}<4>; .pred %in{x}<4>"),
            changes: fetched(x, stored),
            scratch: ".u32 %x; .pred %q",
        },
    );
    for i in 0..4 {
        let ahead = if layout == Layout::AcrossK { 4 * i } else { 0 };
        t.code(format!("add.u32 %x, %k{x}, {ahead}; setp.lt.s32 %q, %x, %left; and.pred %q, %q, %in{x}{i}"));
        match stored {
            Stored::F32 => {
                t.code(format!("mov.f32 %g{x}{i}, 0f00000000; @%q ld.global.f32 %g{x}{i}, [%p{x}{i}]"));
            }
            _ => t.code(format!("mov.b16 %h{i}, 0; @%q ld.global.b16 %h{i}, [%p{x}{i}]")),
        }
    }
}

/// Stores the four numbers in the tile. They become f32 here, so that no thread waits for them before.
fn keep(t: &mut Text, x: &str, (layout, stored): (Layout, Stored)) {
    let reads = format!(".u32 %s{x}; {}", fetched(x, stored));
    let t = &mut t.part("keep", &Uses { reads: &reads, scratch: ".f32 %v; .b32 %i", ..Uses::default() });
    let apart = if layout == Layout::AlongK { 64 } else { 4 * 272 };
    for i in 0..4 {
        let v = match stored {
            Stored::F32 => format!("%g{x}{i}"),
            Stored::Bf16 => {
                t.code(format!("mov.b32 %i, {{0, %h{i}}}; mov.b32 %v, %i"));
                "%v".into()
            }
            Stored::F16 => {
                t.code(format!("cvt.f32.f16 %v, %h{i}"));
                "%v".into()
            }
        };
        t.code(format!("st.shared.f32 [%s{x}+{}], {v}", i * apart));
    }
}

fn multiply(t: &mut Text) {
    let t = &mut t.part(
        "multiply",
        &Uses {
            reads: ".u32 %tx, %ty",
            changes: ".f32 %acc<16>",
            scratch: ".u32 %x, %qa, %qb, %i; .f32 %a<4>, %b<4>; .pred %q",
        },
    );
    t.code("mov.u32 %qa, tile_a; mov.u32 %qb, tile_b");
    t.code("shl.b32 %x, %ty, 4; add.u32 %qa, %qa, %x; shl.b32 %x, %tx, 4; add.u32 %qb, %qb, %x");
    t.code("mov.u32 %i, 0");
    t.label("INNER");
    for k in 0..4 {
        t.code(format!(
            "ld.shared.v4.f32 {{%a0, %a1, %a2, %a3}}, [%qa+{0}];
             ld.shared.v4.f32 {{%b0, %b1, %b2, %b3}}, [%qb+{0}]",
            272 * k
        ));
        for (i, j) in (0..16).map(|x| (x / 4, x % 4)) {
            t.code(format!("fma.rn.f32 %acc{0}, %a{i}, %b{j}, %acc{0}", 4 * i + j));
        }
    }
    t.code("add.u32 %qa, %qa, 1088; add.u32 %qb, %qb, 1088; add.u32 %i, %i, 4");
    t.code("setp.lt.u32 %q, %i, 16; @%q bra INNER");
}

fn store(t: &mut Text) {
    let t = &mut t.part("store", &Uses { reads: ".f32 %acc<16>, %scale; .u32 %add, %tx, %ty, %m, %n; .u64 %out", scratch: ".u32 %ldo, %x, %y, %m0, %n0; .u64 %row<4>, %wide; .f32 %v, %old<16>; .pred %adding, %full, %p, %q, %col<4>", ..Uses::default() });
    t.code("ld.param.u32 %ldo, [ldo]; setp.ne.u32 %adding, %add, 0");
    edge::whole(t, (64, 64), 16);
    t.code(
        "shl.b32 %x, %tx, 2; add.u32 %n0, %n0, %x; shl.b32 %x, %ty, 2; add.u32 %m0, %m0, %x; cvt.u64.u32 %wide, %n0;
         mad.wide.u32 %row0, %m0, %ldo, %wide; shl.b64 %row0, %row0, 2; add.u64 %row0, %row0, %out;
         mul.wide.u32 %wide, %ldo, 4",
    );
    (1..4).for_each(|i| t.code(format!("add.u64 %row{i}, %row{}, %wide", i - 1)));
    (0..16).for_each(|i| t.code(format!("mov.f32 %old{i}, 0f00000000")));
    t.code("@!%full bra EDGE");
    let four = |i: usize| format!("{{{}}}", numbered("%old", 4 * i, 4));
    (0..4).for_each(|i| t.code(format!("@%adding ld.global.v4.f32 {}, [%row{i}]", four(i))));
    values(t);
    (0..4).for_each(|i| t.code(format!("st.global.v4.f32 [%row{i}], {}", four(i))));
    t.code("bra STORED");
    t.label("EDGE");
    (0..4).for_each(|j| t.code(format!("add.u32 %x, %n0, {j}; setp.lt.u32 %col{j}, %x, %n")));
    singles(t, |i, j| {
        format!("and.pred %q, %q, %adding; @%q ld.global.f32 %old{}, [%row{i}+{}]", 4 * i + j, 4 * j)
    });
    values(t);
    singles(t, |i, j| format!("@%q st.global.f32 [%row{i}+{}], %old{}", 4 * j, 4 * i + j));
    t.label("STORED");
}

/// %old = scale * acc + %old.
fn values(t: &mut Text) {
    (0..16).for_each(|i| t.code(format!("mul.f32 %v, %acc{i}, %scale; add.f32 %old{i}, %v, %old{i}")));
}

/// Statements for each output of the thread; %q: it is inside the edges.
fn singles(t: &mut Text, of: impl Fn(usize, usize) -> String) {
    for i in 0..4 {
        t.code(format!("add.u32 %x, %m0, {i}; setp.lt.u32 %p, %x, %m"));
        (0..4).for_each(|j| t.code(format!("and.pred %q, %p, %col{j}; {}", of(i, j))));
    }
}
