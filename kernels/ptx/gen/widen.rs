//! Dequantizes blocks: one entry for every block type. A row of [`TYPES`] gives the place of four codes and their
//! scale; the rest is shared. The order of operations is that of `numeric::block`, so that the bits are those of ggml
//! and bitsandbytes.

use crate::{File, Text, Uses};

const HEAD: &str = "
A thread makes four numbers; a row of blocks is row_bytes long. Columns from .. from + cols of row r go to row r of out,
where ids are given those of row ids[r], else of row first + r:

  r = block x, c = 4 (128 block y + thread);  if c < cols:
      row   = blocks + row_bytes * (ids ? ids[r] : first + r)
      block = row + bytes * ((from + c) / elements);  place = (from + c) % elements
      d, m  = the scale of these four, and what is added or taken away then
      w     = their codes, a byte each
      out[r, c .. c + 4] = levels(w) * d (+|- m)         each rounded once, nothing fused{SCALED}

Blocks begin at multiples of two bytes, so they are read in halves of a word; those of mxfp4 begin anywhere.
launch: grid (rows, ceil(cols / 4 / 128)), 128 threads.
registers: four numbers, a scale and a minimum, codes, places, three addresses.
";

const PARAMS: [(&str, &str); 7] = [
    ("u64", "out"),
    ("u64", "blocks"),
    ("u64", "ids"),
    ("u32", "first"),
    ("u32", "row_bytes"),
    ("u32", "from"),
    ("u32", "cols"),
];

/// The factor of f32 rows, which embed sets.
const SCALE: (&str, &str) = ("f32", "scale");

/// The use of %m.
#[derive(Clone, Copy)]
enum Then {
    Nothing,
    Add,
    Subtract,
}

/// The value of a code.
#[derive(Clone, Copy)]
enum Level {
    /// The code minus a number.
    Less(u32),
    /// The code as a signed integer.
    Signed,
    /// The entry of a table; the index of code j is in the four bits of %w from the given one on.
    Table(&'static [f32; 16], [u32; 4]),
}

/// A block type. `scale` sets %d and %m, `codes` sets %w; both read %at (start of the block), %c (place in the
/// block), %run (its run of 32) and %i (place in the run).
struct Type {
    /// Name in ggml, in lower case.
    name: &'static str,
    /// Number of values of a block, and of its bytes.
    elements: usize,
    bytes: usize,
    codes: fn(&mut Text),
    level: Level,
    scale: fn(&mut Text),
    then: Then,
}

const fn row(
    (name, elements, bytes): (&'static str, usize, usize),
    codes: fn(&mut Text),
    level: Level,
    scale: fn(&mut Text),
    then: Then,
) -> Type {
    Type { name, elements, bytes, codes, level, scale, then }
}

/// The levels of NF4, as `numeric::block` has them.
const NF4_LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The levels of MXFP4, as `numeric::block` has them.
const MXFP4_LEVELS: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// The first of two codes in a byte has the upper bits.
const NF4: Level = Level::Table(&NF4_LEVELS, [4, 0, 12, 8]);
const MXFP4: Level = Level::Table(&MXFP4_LEVELS, [0, 8, 16, 24]);

const TYPES: &[Type] = &[
    row(("q8_0", 32, 34), |t| word(t, "%w", ("%i", 2)), Level::Signed, half_scale, Then::Nothing),
    row(("q4_0", 32, 18), |t| nibbles(t, 2), Level::Less(8), half_scale, Then::Nothing),
    row(("q4_1", 32, 20), |t| nibbles(t, 4), Level::Less(0), half_scales, Then::Add),
    row(("q5_0", 32, 22), |t| fifths(t, 2), Level::Less(16), half_scale, Then::Nothing),
    row(("q5_1", 32, 24), |t| fifths(t, 4), Level::Less(0), half_scales, Then::Add),
    row(("q2_k", 256, 84), |t| pairs(t, 16), Level::Less(0), q2_k_scale, Then::Subtract),
    row(("q3_k", 256, 110), q3_k_codes, Level::Less(4), q3_k_scale, Then::Nothing),
    row(("q4_k", 256, 144), |t| planes(t, 16), Level::Less(0), six_bit_scales, Then::Subtract),
    row(("q5_k", 256, 176), q5_k_codes, Level::Less(0), six_bit_scales, Then::Subtract),
    row(("q6_k", 256, 210), q6_k_codes, Level::Less(32), q6_k_scale, Then::Nothing),
    row(("nf4", 64, 36), nf4_codes, NF4, float_scale, Then::Nothing),
    row(("mxfp4", 32, 17), mxfp4_codes, MXFP4, power_of_two, Then::Nothing),
];

pub fn files() -> Vec<File> {
    let mut plain = Text::default();
    let title =
        "widen: rows of blocks become rows of f32: embed of such a table, and tiles of products in f32.";
    let head = HEAD.replace("{SCALED}", "; times scale");
    plain.head(&format!("{title}\n{head}budget: 32 registers, 0 bytes of shared memory"), ("7.0", "sm_70"));
    let mut tensor = Text::default();
    let title = "widen_sm80: rows of blocks become rows of bf16, for products on tensor cores.";
    let head = HEAD.replace("{SCALED}", "");
    tensor.head(&format!("{title}\n{head}budget: 32 registers, 0 bytes of shared memory"), ("7.0", "sm_80"));
    for kind in TYPES {
        entry(&mut plain, ("widen", &[SCALE]), kind, (2, store));
        entry(&mut tensor, ("widen_sm80", &[]), kind, (1, store_bf16));
    }
    vec![plain.finish("widen.ptx"), tensor.finish("widen_sm80.ptx")]
}

type Params<'a> = &'a [(&'a str, &'a str)];

fn entry(t: &mut Text, (stem, more): (&str, Params), kind: &Type, (size, store): (u32, fn(&mut Text))) {
    t.entry(&format!("{stem}_{}", kind.name), &[&PARAMS, more].concat(), 128);
    t.code(
        ".reg .u64 %out, %at, %ids, %wide;
         .reg .u32 %r, %c, %cols, %first, %bytes, %from, %x, %y, %s, %h, %w, %run, %i, %a<2>, %b<2>;
         .reg .f32 %d, %m, %v<4>, %t<8>;
         .reg .b16 %lo, %hi; .reg .b32 %both<2>;
         .reg .pred %p, %bit<4>;
         ld.param.u64 %out, [out]; ld.param.u64 %at, [blocks]; ld.param.u64 %ids, [ids];
         ld.param.u32 %first, [first]; ld.param.u32 %bytes, [row_bytes]; ld.param.u32 %from, [from];
         ld.param.u32 %cols, [cols];
         mov.u32 %r, %ctaid.x; mov.u32 %x, %ctaid.y; mov.u32 %c, %tid.x; mad.lo.u32 %c, %x, 128, %c;
         shl.b32 %c, %c, 2; setp.ge.u32 %p, %c, %cols; @%p ret",
    );
    t.code(format!(
        "cvt.u64.u32 %wide, %c; mad.wide.u32 %wide, %r, %cols, %wide; shl.b64 %wide, %wide, {size};
         add.u64 %out, %out, %wide;
         setp.ne.u64 %p, %ids, 0; mad.wide.u32 %ids, %r, 4, %ids; add.u32 %r, %r, %first;
         @%p ld.global.nc.u32 %r, [%ids];
         mul.wide.u32 %wide, %r, %bytes; add.u64 %at, %at, %wide; add.u32 %c, %c, %from;
         shr.u32 %x, %c, {}; mul.wide.u32 %wide, %x, {}; add.u64 %at, %at, %wide; and.b32 %c, %c, {};
         shr.u32 %run, %c, 5; and.b32 %i, %c, 31",
        kind.elements.ilog2(),
        kind.bytes,
        kind.elements - 1
    ));
    for (what, changes, write) in [("codes", ".u32 %w", kind.codes), ("scale", ".f32 %d, %m", kind.scale)] {
        let uses = Uses {
            reads: ".u64 %at; .u32 %c, %run, %i",
            changes,
            scratch: ".u64 %wide; .u32 %x, %y, %s, %h, %a<2>, %b<2>; .f32 %v<4>; .b16 %lo, %hi; .pred %p",
        };
        write(&mut t.part(what, &uses));
    }
    for j in 0..4 {
        level(t, kind.level, j);
        t.code(format!("mul.rn.f32 %v{j}, %v{j}, %d"));
        match kind.then {
            Then::Nothing => {}
            Then::Add => t.code(format!("add.rn.f32 %v{j}, %v{j}, %m")),
            Then::Subtract => t.code(format!("sub.rn.f32 %v{j}, %v{j}, %m")),
        }
    }
    store(t);
    t.end();
}

fn store(t: &mut Text) {
    t.code(".reg .f32 %scale; ld.param.f32 %scale, [scale]");
    (0..4).for_each(|j| t.code(format!("mul.rn.f32 %v{j}, %v{j}, %scale")));
    t.say("an output of embed may begin anywhere");
    t.code(
        "cvt.u32.u64 %x, %out; and.b32 %x, %x, 15; setp.eq.u32 %p, %x, 0;
         @%p st.global.v4.f32 [%out], {%v0, %v1, %v2, %v3}",
    );
    (0..4).for_each(|j| t.code(format!("@!%p st.global.f32 [%out+{}], %v{j}", 4 * j)));
}

fn store_bf16(t: &mut Text) {
    t.code(
        "cvt.rn.bf16x2.f32 %both0, %v1, %v0; cvt.rn.bf16x2.f32 %both1, %v3, %v2;
         st.global.v2.b32 [%out], {%both0, %both1}",
    );
}

/// %v = the value of code j.
fn level(t: &mut Text, level: Level, j: u32) {
    match level {
        Level::Less(less) => {
            t.code(format!("shr.u32 %x, %w, {}; and.b32 %x, %x, 255", 8 * j));
            if less > 0 {
                t.code(format!("sub.s32 %x, %x, {less}"));
            }
            t.code(format!("cvt.rn.f32.s32 %v{j}, %x"));
        }
        Level::Signed => {
            let up = 24 - 8 * j;
            t.code(format!("shl.b32 %x, %w, {up}; shr.s32 %x, %x, 24; cvt.rn.f32.s32 %v{j}, %x"));
        }
        Level::Table(levels, down) => {
            t.code(format!("shr.u32 %x, %w, {}", down[j as usize]));
            for bit in 0..4 {
                t.code(format!("and.b32 %y, %x, {}; setp.ne.u32 %bit{bit}, %y, 0", 1 << bit));
            }
            t.say("halving sixteen levels, bit by bit");
            let bits = |level: f32| format!("0f{:08X}", level.to_bits());
            for (k, pair) in levels.chunks_exact(2).enumerate() {
                t.code(format!("selp.f32 %t{k}, {}, {}, %bit0", bits(pair[1]), bits(pair[0])));
            }
            for (bit, left) in [(1, 4), (2, 2), (3, 1)] {
                for k in 0..left {
                    t.code(format!("selp.f32 %t{k}, %t{}, %t{}, %bit{bit}", 2 * k + 1, 2 * k));
                }
            }
            t.code(format!("mov.f32 %v{j}, %t0"));
        }
    }
}

/// `to` = four bytes, from byte `at` plus a register on.
fn word(t: &mut Text, to: &str, (offset, at): (&str, usize)) {
    t.code(format!(
        "cvt.u64.u32 %wide, {offset}; add.u64 %wide, %wide, %at; ld.global.nc.b16 %lo, [%wide+{at}];
         ld.global.nc.b16 %hi, [%wide+{}]; mov.b32 {to}, {{%lo, %hi}}",
        at + 2
    ));
}

/// Registers = bytes, each from its own byte plus %x on.
fn bytes(t: &mut Text, all: &[(&str, usize)]) {
    t.code("cvt.u64.u32 %wide, %x; add.u64 %wide, %wide, %at");
    all.iter().for_each(|(to, at)| t.code(format!("ld.global.nc.u8 {to}, [%wide+{at}]")));
}

fn half(t: &mut Text, to: &str, at: usize) {
    t.code(format!("ld.global.nc.b16 %lo, [%at+{at}]; cvt.f32.f16 {to}, %lo"));
}

/// The bits of %w at %s, masked by `mask` in every byte.
fn narrow(t: &mut Text, w: &str, mask: &str) {
    t.code(format!("shr.u32 {w}, {w}, %s; and.b32 {w}, {w}, 0x{}", mask.repeat(4)));
}

/// Adds the bits of %h to %w, above its own bits.
fn above(t: &mut Text, up: u32) {
    t.code(format!("shl.b32 %h, %h, {up}; or.b32 %w, %w, %h"));
}

fn nibbles(t: &mut Text, at: usize) {
    t.code("and.b32 %x, %i, 15");
    word(t, "%w", ("%x", at));
    t.code("and.b32 %s, %i, 16; shr.u32 %s, %s, 2");
    narrow(t, "%w", "0f");
}

/// Nibbles after four bytes that have one bit for each.
fn fifths(t: &mut Text, at: usize) {
    nibbles(t, at + 4);
    t.say("four bits, each to its own byte");
    t.code(format!(
        "ld.global.nc.b16 %lo, [%at+{at}]; ld.global.nc.b16 %hi, [%at+{}]; mov.b32 %h, {{%lo, %hi}};
         shr.u32 %h, %h, %i; and.b32 %h, %h, 15; mul.lo.u32 %h, %h, 0x00204081; and.b32 %h, %h, 0x01010101",
        at + 2
    ));
    above(t, 4);
}

/// Four runs in two bits each of 32 bytes.
fn pairs(t: &mut Text, at: usize) {
    t.code("shr.u32 %x, %run, 2; shl.b32 %x, %x, 5; add.u32 %x, %x, %i");
    word(t, "%w", ("%x", at));
    t.code("and.b32 %s, %run, 3; shl.b32 %s, %s, 1");
    narrow(t, "%w", "03");
}

/// Two runs in four bits each of 32 bytes.
fn planes(t: &mut Text, at: usize) {
    t.code("shr.u32 %x, %run, 1; shl.b32 %x, %x, 5; add.u32 %x, %x, %i");
    word(t, "%w", ("%x", at));
    t.code("and.b32 %s, %run, 1; shl.b32 %s, %s, 2");
    narrow(t, "%w", "0f");
}

/// %h = bit %run of four bytes.
fn bit_of_run(t: &mut Text, at: usize) {
    word(t, "%h", ("%i", at));
    t.code("mov.u32 %s, %run");
    narrow(t, "%h", "01");
}

fn q3_k_codes(t: &mut Text) {
    pairs(t, 32);
    bit_of_run(t, 0);
    above(t, 2);
}

fn q5_k_codes(t: &mut Text) {
    planes(t, 48);
    bit_of_run(t, 16);
    above(t, 4);
}

fn q6_k_codes(t: &mut Text) {
    t.code(
        "shr.u32 %y, %run, 2; shl.b32 %x, %y, 6; and.b32 %s, %run, 1; shl.b32 %s, %s, 5; add.u32 %x, %x, %s;
         add.u32 %x, %x, %i",
    );
    word(t, "%w", ("%x", 0));
    t.code("and.b32 %s, %run, 2; shl.b32 %s, %s, 1");
    narrow(t, "%w", "0f");
    t.code("shl.b32 %x, %y, 5; add.u32 %x, %x, %i");
    word(t, "%h", ("%x", 128));
    t.code("and.b32 %s, %run, 3; shl.b32 %s, %s, 1");
    narrow(t, "%h", "03");
    above(t, 4);
}

fn nf4_codes(t: &mut Text) {
    t.code(
        "shr.u32 %x, %c, 1; cvt.u64.u32 %wide, %x; add.u64 %wide, %wide, %at; ld.global.nc.b16 %lo, [%wide+4];
         cvt.u32.u16 %w, %lo",
    );
}

fn mxfp4_codes(t: &mut Text) {
    t.code("and.b32 %x, %i, 15");
    bytes(t, &[("%w", 1), ("%s", 2), ("%h", 3), ("%y", 4)]);
    t.code(
        "shl.b32 %s, %s, 8; or.b32 %w, %w, %s; shl.b32 %h, %h, 16; or.b32 %w, %w, %h; shl.b32 %y, %y, 24;
         or.b32 %w, %w, %y; and.b32 %s, %i, 16; shr.u32 %s, %s, 2",
    );
    narrow(t, "%w", "0f");
}

fn half_scale(t: &mut Text) {
    half(t, "%d", 0);
}

fn half_scales(t: &mut Text) {
    half(t, "%d", 0);
    half(t, "%m", 2);
}

fn float_scale(t: &mut Text) {
    t.code("ld.global.nc.b16 %lo, [%at]; ld.global.nc.b16 %hi, [%at+2]; mov.b32 %d, {%lo, %hi}");
}

/// 2^(e - 128) for the first byte e; subnormal if e is 0 or 1.
fn power_of_two(t: &mut Text) {
    t.code(
        "ld.global.nc.u8 %x, [%at]; sub.u32 %y, %x, 1; shl.b32 %y, %y, 23; min.u32 %s, %x, 1;
         mov.u32 %h, 0x00200000; shl.b32 %h, %h, %s; setp.lt.u32 %p, %x, 2; selp.u32 %y, %h, %y, %p;
         mov.b32 %d, %y",
    );
}

/// `d` *= the integer in `x`, of that type.
fn times(t: &mut Text, d: &str, (x, ty): (&str, &str)) {
    t.code(format!("cvt.rn.f32.{ty} %v0, {x}; mul.rn.f32 {d}, {d}, %v0"));
}

fn q2_k_scale(t: &mut Text) {
    t.code("shr.u32 %x, %c, 4");
    bytes(t, &[("%s", 0)]);
    half(t, "%d", 80);
    half(t, "%m", 82);
    t.code("and.b32 %x, %s, 15; shr.u32 %s, %s, 4");
    times(t, "%d", ("%x", "u32"));
    times(t, "%m", ("%s", "u32"));
}

fn q3_k_scale(t: &mut Text) {
    t.say("16 scales: four bits in 8 bytes, two more in 4");
    t.code("shr.u32 %y, %c, 4; and.b32 %x, %y, 7");
    bytes(t, &[("%s", 96)]);
    t.code("and.b32 %x, %y, 3");
    bytes(t, &[("%h", 104)]);
    t.code(
        "shr.u32 %x, %y, 3; shl.b32 %x, %x, 2; shr.u32 %s, %s, %x; and.b32 %s, %s, 15;
         shr.u32 %x, %y, 2; shl.b32 %x, %x, 1; shr.u32 %h, %h, %x; and.b32 %h, %h, 3; shl.b32 %h, %h, 4;
         or.b32 %s, %s, %h; sub.s32 %s, %s, 32",
    );
    half(t, "%d", 108);
    times(t, "%d", ("%s", "s32"));
}

fn six_bit_scales(t: &mut Text) {
    t.say(
        "12 bytes for eight scales and minima: the last four have their upper bits where the first have none",
    );
    t.code("and.b32 %x, %run, 3");
    bytes(t, &[("%s", 4), ("%h", 8), ("%y", 12)]);
    t.code(
        "setp.lt.u32 %p, %run, 4; and.b32 %a0, %s, 63; and.b32 %b0, %h, 63;
         and.b32 %a1, %y, 15; shr.u32 %s, %s, 6; shl.b32 %s, %s, 4; or.b32 %a1, %a1, %s;
         shr.u32 %b1, %y, 4; shr.u32 %h, %h, 6; shl.b32 %h, %h, 4; or.b32 %b1, %b1, %h;
         selp.u32 %s, %a0, %a1, %p; selp.u32 %h, %b0, %b1, %p",
    );
    half(t, "%d", 0);
    half(t, "%m", 2);
    times(t, "%d", ("%s", "u32"));
    times(t, "%m", ("%h", "u32"));
}

fn q6_k_scale(t: &mut Text) {
    t.code("shr.u32 %x, %c, 4");
    bytes(t, &[("%s", 192)]);
    t.code("shl.b32 %s, %s, 24; shr.s32 %s, %s, 24");
    half(t, "%d", 208);
    times(t, "%d", ("%s", "s32"));
}
