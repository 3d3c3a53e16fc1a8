//! The product on the tensor cores of sm_90a: wgmma, whose operands the copy engine (TMA) loads into shared memory.
//! 128 x 256 outputs by two warpgroups, each 64 x 256, K in steps of 64 through four stages that one thread
//! of a third warpgroup fills. Blocks are persistent: stages of the next tile are filled while one is stored.

use crate::operand::Layout;
use crate::registers::numbered;
use crate::{File, Text, Uses, epilogue_sm90a};

const HEAD: &str = "
product_sm90a: out[M, N] (=|+=) a op(b), bf16 operands, f32 sums on tensor cores
nt is a b^T with b [N, K], nn is a b with b [K, N]: linear and linear_grad of the bf16 class, as product_sm80.

  warpgroup 0, one thread of it:                         24 registers
      for each tile of this block, for step in 0 .. ceil(K / 64):
          wait until empty[stage];  full[stage] expects 49152 bytes
          stage = a[128][64], b[256][64] (nn: four of b[64][64])      boxes of the tensor maps, zero beyond the edges
  warpgroups 1, 2, rows 0 and 64 of the tile:            240 registers
      for each tile of this block:
          for step in 0 .. ceil(K / 64):
              wait until full[stage]
              acc[64][256] += a[64][16] b[16][256], four times        wgmma m64n256k16
              once the step before is multiplied: one thread a warp arrives at its empty[stage]
          out = acc (+ out where add is not 0)

A stage is a's tile, 128 rows of 128 bytes, then b's: nt 256 rows of 128 bytes along K; nn four tiles beside each other,
each 64 rows of 128 bytes along N. Within 1024 bytes the piece of 16 bytes p of row r is at p ^ r (swizzle of 128
bytes, of the tensor map and of the descriptors alike). Descriptors: address / 16; bits 16: bytes / 16 from 64 columns
to the next (nn, 8192; else not used, 1); bits 32: bytes / 16 from 8 rows to the next, 1024; bits 62: 1, that swizzle.
Tiles in groups of 8 rows of tiles, down a group first: what blocks read at a time stays in the L2.
Sums: the order of k in steps of 16, inside as the tensor core has it: not the bits of product_sm80.
launch: grid min(tiles, multiprocessors), 384 threads, dynamic shared memory as much as the budget says.
map_a: boxes 64 x 128 of a [M, K]; map_b: 64 x 256 of b [N, K] (nt), 64 x 64 of b [K, N] (nn).
registers: a thread that multiplies has 128 sums, 32 numbers of out, addresses.
budget: 168 registers, {SHARED} bytes of shared memory
promises: HGMMA UTMALDG USETMAXREG
";

const LORA: &str = "
lora_linear_sm90a: out[M, N] (=|+=) a op(b) + by * left op(right), the first product as product_sm90a, the second in
f32: an adapter's, added before the tile is stored, so that out is written once and not read again
nt: right [N, R], left = x A^T (lora_linear); nn: right [R, N], left = dh (lora_linear_grad)

  the product as product_sm90a.ptx has it; then warpgroups 1 and 2, for 64 columns of the tile at a time:
      for r0 in 0..R step 16:
          barrier 1; left_tile[16][128], right_tile[16][64], zero beyond the edges; barrier 1
          for r in 0 .. min(16, R - r0):  low[32] += left x right
      out = acc (+ out where add is not 0);  out = by * low + out

Sums: the product's, then those of the rank in order, one fused multiply-add per term, as matmul.ptx has them: the same
bits as the two one after the other, where the compiler fuses nothing else.
between: numbers from row to row of right. Rows of left_tile are 130 numbers apart, of right_tile 66.
launch: grid min(tiles, multiprocessors), 384 threads, dynamic shared memory as much as the budget says.
map_a, map_b: as product_sm90a.ptx has them.
registers: 128 sums and 32 of the adapter, 32 numbers of out, 2 + 16 factors, addresses.
budget: 168 registers, {SHARED} bytes of shared memory
promises: HGMMA UTMALDG USETMAXREG
";

/// The operation on a tile before it is stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    Nothing,
    /// The adapter's part is added.
    Adapter,
}

const PARAMS: [(&str, &str); 8] = [
    ("u64", "out"),
    ("align 64 .b8", "map_a[128]"),
    ("align 64 .b8", "map_b[128]"),
    ("u32", "m"),
    ("u32", "n"),
    ("u32", "k"),
    ("u32", "ldo"),
    ("u32", "add"),
];

/// Bytes of a's tile, of a stage, and of all stages; the barriers follow them.
const A: usize = 128 * 128;
const STAGE: usize = A + 256 * 128;
const STAGES: usize = 4;
const ALL: usize = STAGES * STAGE;
/// full of every stage, then empty of every stage.
pub const BARRIERS: usize = 16 * STAGES;

pub fn files() -> Vec<File> {
    let of = |name: &'static str, head: &str, epilogue| {
        let mut t = Text::default();
        // The launch's memory may begin up to 1023 bytes before a multiple of 1024.
        let shared =
            ALL + BARRIERS + 1024 + if epilogue == Epilogue::Adapter { epilogue_sm90a::TILES } else { 0 };
        t.head(&head.replace("{SHARED}", &shared.to_string()), ("8.0", "sm_90a"));
        t.line(".extern .shared .align 16 .b8 stages[];\n");
        let stem = name.trim_end_matches(".ptx");
        product(&mut t, &format!("{stem}_nt"), Layout::AlongK, epilogue);
        product(&mut t, &format!("{stem}_nn"), Layout::AcrossK, epilogue);
        t.finish(name)
    };
    vec![
        of("product_sm90a.ptx", HEAD, Epilogue::Nothing),
        of("lora_linear_sm90a.ptx", LORA, Epilogue::Adapter),
    ]
}

fn product(t: &mut Text, name: &str, b: Layout, epilogue: Epilogue) {
    // One block per multiprocessor: it divides all registers among its warpgroups.
    let one = (384, " .minnctapersm 1");
    match epilogue {
        Epilogue::Nothing => t.entry_within(name, &PARAMS, one),
        Epilogue::Adapter => t.entry_within(name, &[&PARAMS[..], &crate::epilogue::PARAMS].concat(), one),
    }
    t.code(
        ".reg .f32 %acc<128>, %v, %old<32>;
         .reg .u64 %out, %mapa, %mapb, %wide, %row, %da, %db, %sa, %sb;
         .reg .u32 %t, %lane, %warp, %group, %m, %n, %k, %ldo, %add, %base, %bars, %bar, %last, %to, %x, %y;
         .reg .u32 %tile, %tiles, %tilesm, %tilesn, %per, %blocks, %m0, %n0, %k0, %steps, %step, %stage, %parity;
         .reg .pred %p, %q, %adding, %first, %on, %all, %full",
    );
    t.code(
        "ld.param.u64 %out, [out]; ld.param.u32 %m, [m]; ld.param.u32 %n, [n]; ld.param.u32 %k, [k];
         ld.param.u32 %ldo, [ldo]; ld.param.u32 %add, [add]; mov.b64 %mapa, map_a; cvta.param.u64 %mapa, %mapa;
         mov.b64 %mapb, map_b; cvta.param.u64 %mapb, %mapb; mov.u32 %t, %tid.x; and.b32 %lane, %t, 31",
    );
    t.say("one value for the warp, which the compiler then knows");
    t.code(
        "shr.u32 %warp, %t, 5; shfl.sync.idx.b32 %warp, %warp, 0, 31, 0xffffffff; shr.u32 %group, %warp, 2",
    );
    t.say("stages begin at multiples of 1024 bytes, as the swizzle counts");
    t.code(format!(
        "mov.u32 %base, stages; add.u32 %base, %base, 1023; and.b32 %base, %base, -1024; add.u32 %bars, %base, {ALL}"
    ));
    t.code("setp.ne.u32 %p, %t, 0; @%p bra READY");
    for stage in 0..STAGES {
        t.code(format!("mbarrier.init.shared::cta.b64 [%bars+{}], 1", 8 * stage));
        t.code(format!("mbarrier.init.shared::cta.b64 [%bars+{}], 8", 8 * (STAGES + stage)));
    }
    t.say("the copy engine sees them");
    t.code("fence.mbarrier_init.release.cluster");
    t.label("READY");
    t.code(
        "bar.sync 0;
         add.u32 %tilesm, %m, 127; shr.u32 %tilesm, %tilesm, 7; add.u32 %tilesn, %n, 255; shr.u32 %tilesn, %tilesn, 8;
         mul.lo.u32 %tiles, %tilesm, %tilesn; shl.b32 %per, %tilesn, 3; add.u32 %steps, %k, 63; shr.u32 %steps, %steps, 6;
         mov.u32 %tile, %ctaid.x; mov.u32 %blocks, %nctaid.x; mov.u32 %stage, 0;
         setp.ne.u32 %p, %group, 0; @%p bra MULTIPLIES",
    );
    fill(t, b);
    t.label("MULTIPLIES");
    multiply(t, b, epilogue);
    t.label("END");
    t.end();
}

/// The start of the tile.
fn place(t: &mut Text) {
    let t = &mut t.part(
        "place",
        &Uses { reads: ".u32 %tile, %per, %tilesm", changes: ".u32 %m0, %n0", scratch: ".u32 %x, %y" },
    );
    t.code(
        "div.u32 %x, %tile, %per; mul.lo.u32 %y, %x, %per; sub.u32 %y, %tile, %y; shl.b32 %m0, %x, 3;
         sub.u32 %x, %tilesm, %m0; min.u32 %x, %x, 8; div.u32 %n0, %y, %x; mul.lo.u32 %x, %n0, %x;
         sub.u32 %x, %y, %x; add.u32 %m0, %m0, %x; shl.b32 %m0, %m0, 7; shl.b32 %n0, %n0, 8",
    );
}

/// The next stage; the parity changes when the ring wraps around.
fn next(t: &mut Text) {
    let t = &mut t.part(
        "next",
        &Uses { changes: ".u32 %stage, %parity", scratch: ".u32 %x; .pred %p", ..Uses::default() },
    );
    t.code(format!(
        "add.u32 %stage, %stage, 1; setp.eq.u32 %p, %stage, {STAGES}; selp.u32 %stage, 0, %stage, %p;
         selp.u32 %x, 1, 0, %p; xor.b32 %parity, %parity, %x"
    ));
}

/// The one thread that fills stages.
fn fill(t: &mut Text, b: Layout) {
    let t = &mut t.part(
        "fill",
        &Uses {
            reads: ".u32 %t, %k, %tiles, %tilesm, %per, %blocks, %base, %bars; .u64 %mapa, %mapb",
            changes: ".u32 %tile, %stage",
            scratch: ".u32 %parity, %m0, %n0, %k0, %x, %y, %bar, %to; .pred %p",
        },
    );
    t.code("setmaxnreg.dec.sync.aligned.u32 24; setp.ne.u32 %p, %t, 0; @%p bra END");
    t.say("stages are empty when no thread has arrived yet: the phase before the first counts as over");
    t.code("mov.u32 %parity, 1");
    t.label("FILL_TILE");
    t.code("setp.ge.u32 %p, %tile, %tiles; @%p bra END");
    place(t);
    t.code("mov.u32 %k0, 0");
    t.label("FILL");
    t.code("shl.b32 %x, %stage, 3; add.u32 %bar, %bars, %x");
    t.label("EMPTY");
    t.code(format!(
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar+{}], %parity; @!%p bra EMPTY;
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {STAGE}; mad.lo.u32 %to, %stage, {STAGE}, %base",
        8 * STAGES
    ));
    copy(t, "%mapa", ("%k0", "%m0"));
    t.code(format!("add.u32 %to, %to, {A}"));
    match b {
        Layout::AlongK => copy(t, "%mapb", ("%k0", "%n0")),
        Layout::AcrossK => {
            copy(t, "%mapb", ("%n0", "%k0"));
            for i in 1..4 {
                t.code(format!("add.u32 %to, %to, 8192; add.u32 %x, %n0, {}", 64 * i));
                copy(t, "%mapb", ("%x", "%k0"));
            }
        }
    }
    next(t);
    t.code(
        "add.u32 %k0, %k0, 64; setp.lt.u32 %p, %k0, %k; @%p bra FILL; add.u32 %tile, %tile, %blocks; bra FILL_TILE",
    );
}

fn copy(t: &mut Text, map: &str, (column, row): (&str, &str)) {
    let t = &mut t.part(
        "copy",
        &Uses { reads: &format!(".u32 %to, %bar, {column}, {row}; .u64 {map}"), ..Uses::default() },
    );
    t.code(format!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
         [%to], [{map}, {{{column}, {row}}}], [%bar]"
    ));
}

/// The two warpgroups that multiply and store.
fn multiply(t: &mut Text, b: Layout, epilogue: Epilogue) {
    let t = &mut t.part("multiply", &Uses { reads: ".u32 %t, %lane, %warp, %m, %n, %ldo, %add, %tiles, %tilesm, %per, %blocks, %steps, %base, %bars; .u64 %out", changes: ".u32 %tile, %stage, %group", scratch: ".f32 %acc<128>, %v, %old<32>; .u64 %wide, %row, %da, %db, %sa, %sb; .u32 %parity, %m0, %n0, %k0, %x, %y, %bar, %last, %step; .pred %p, %q, %adding, %first, %on, %all, %full" });
    let descriptor = |apart: u64| (apart / 16) << 16 | (1024 / 16) << 32 | 1 << 62;
    let (apart, ahead, transposed) = if b == Layout::AlongK { (16, 32, 0) } else { (8192, 2048, 1) };
    t.code("setmaxnreg.inc.sync.aligned.u32 240; mov.u32 %parity, 0; setp.ne.u32 %adding, %add, 0");
    t.say("descriptors of the first stage: a's rows of this warpgroup, and b's tile");
    t.code(format!(
        "sub.u32 %group, %group, 1; mad.lo.u32 %x, %group, 8192, %base; shr.u32 %x, %x, 4; cvt.u64.u32 %da, %x;
         add.u64 %da, %da, 0x{:x}; add.u32 %x, %base, {A}; shr.u32 %x, %x, 4; cvt.u64.u32 %db, %x; add.u64 %db, %db, 0x{:x};
         setp.eq.u32 %on, %lane, 0; setp.eq.u32 %all, %t, %t",
        descriptor(16),
        descriptor(apart)
    ));
    t.say("without values before the first product, ptxas up to 12.8 waits after each wgmma (C7515)");
    (0..128).for_each(|i| t.code(format!("mov.f32 %acc{i}, 0f00000000")));
    t.label("TILE");
    t.code("setp.ge.u32 %p, %tile, %tiles; @%p bra END");
    place(t);
    t.code("mov.u32 %step, 0; mov.u32 %last, %bars");
    t.label("STEP");
    t.code("shl.b32 %x, %stage, 3; add.u32 %bar, %bars, %x");
    t.label("FULL");
    t.code(format!(
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %parity; @!%p bra FULL;
         setp.ne.u32 %first, %step, 0; mul.wide.u32 %wide, %stage, {}; add.u64 %sa, %da, %wide; add.u64 %sb, %db, %wide;
         wgmma.fence.sync.aligned",
        STAGE / 16
    ));
    let sums = numbered("%acc", 0, 128);
    for j in 0..4 {
        let keeps = if j == 0 { "%first" } else { "%all" };
        t.code(format!(
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{sums}}}, %sa, %sb, {keeps}, 1, 1, 0, {transposed}"
        ));
        if j < 3 {
            t.code(format!("add.u64 %sa, %sa, 2; add.u64 %sb, %sb, {}", ahead / 16));
        }
    }
    t.say("the step before is over once at most this one is under way: its stage may be filled again");
    t.code(format!(
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; and.pred %q, %first, %on;
         @%q mbarrier.arrive.shared::cta.b64 _, [%last+{0}]; mov.u32 %last, %bar",
        8 * STAGES
    ));
    next(t);
    t.code(format!(
        "add.u32 %step, %step, 1; setp.lt.u32 %p, %step, %steps; @%p bra STEP;
         wgmma.wait_group.sync.aligned 0; @%on mbarrier.arrive.shared::cta.b64 _, [%last+{}]",
        8 * STAGES
    ));
    epilogue_sm90a::store(t, b, epilogue);
    t.code("add.u32 %tile, %tile, %blocks; bra TILE");
}
