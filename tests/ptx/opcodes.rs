//! Known answers for every computing opcode of the interpreter, and for code that it must reject.

use crate::files;
use crate::interpreter::{Machine, Shape, Value, read};
use std::collections::BTreeSet;

const ONE: u32 = 0x3f80_0000;
const TWO: u32 = 0x4000_0000;
const HALF: u32 = 0x3f00_0000;
const THREE: u32 = 0x4040_0000;
const INFINITE: u32 = 0x7f80_0000;
const NAN: u32 = 0x7fc0_0000;

/// Opcode, 32-bit operands, 32-bit result.
const ANSWERS: &[(&str, &[u32], u32)] = &[
    ("mov.u32", &[7], 7),
    ("mov.f32", &[ONE], ONE),
    ("not.b32", &[0xff], 0xffff_ff00),
    ("neg.s32", &[5], 0xffff_fffb),
    ("neg.f32", &[ONE], 0xbf80_0000),
    ("abs.f32", &[0xbf80_0000], ONE),
    ("ex2.approx.f32", &[ONE], TWO),
    ("ex2.approx.ftz.f32", &[ONE], TWO),
    ("ex2.approx.f32", &[0xff80_0000], 0),
    ("lg2.approx.f32", &[TWO], ONE),
    ("rcp.approx.f32", &[TWO], HALF),
    ("rcp.approx.f32", &[INFINITE], 0),
    ("rsqrt.approx.f32", &[0x4080_0000], HALF),
    ("cvt.rn.f32.u32", &[3], THREE),
    ("cvt.rn.f32.s32", &[0xffff_ffff], 0xbf80_0000),
    ("add.u32", &[0xffff_ffff, 2], 1),
    ("sub.u32", &[1, 2], 0xffff_ffff),
    ("sub.s32", &[1, 2], 0xffff_ffff),
    ("mul.lo.u32", &[0x1_0001, 0x1_0001], 0x2_0001),
    ("div.u32", &[17, 5], 3),
    ("rem.u32", &[17, 5], 2),
    ("min.u32", &[0xffff_ffff, 1], 1),
    ("max.u32", &[0xffff_ffff, 1], 0xffff_ffff),
    ("min.s32", &[0xffff_ffff, 1], 0xffff_ffff),
    ("max.s32", &[0xffff_ffff, 1], 1),
    ("and.b32", &[0xf0, 0x3c], 0x30),
    ("or.b32", &[0xf0, 0x0c], 0xfc),
    ("xor.b32", &[0xf0, 0x3c], 0xcc),
    ("shl.b32", &[1, 31], 0x8000_0000),
    ("shl.b32", &[1, 32], 0),
    ("shr.u32", &[0x8000_0000, 31], 1),
    ("shr.u32", &[1, 40], 0),
    // one rounding each: nothing is fused
    ("mul.rn.f32", &[0x3f80_0800, 0x3f80_0800], 0x3f80_1000),
    ("add.rn.f32", &[ONE, 0x3300_0000], ONE),
    ("sub.rn.f32", &[THREE, TWO], ONE),
    ("shr.s32", &[0x8000_0000, 31], 0xffff_ffff),
    ("shr.s32", &[0x7fff_ffff, 30], 1),
    ("shr.s32", &[0xff00_0000, 99], 0xffff_ffff),
    ("mad.lo.u32", &[3, 5, 7], 22),
    ("shf.l.wrap.b32", &[0x8000_0001, 0x8000_0001, 4], 0x18),
    ("add.f32", &[ONE, TWO], THREE),
    ("sub.f32", &[THREE, TWO], ONE),
    ("mul.f32", &[THREE, HALF], 0x3fc0_0000),
    ("max.f32", &[NAN, ONE], ONE),
    ("min.f32", &[ONE, TWO], ONE),
    // one rounding: (1 + 2^-12)^2 - 1 keeps its 2^-24
    ("fma.rn.f32", &[0x3f80_0800, 0x3f80_0800, 0xbf80_0000], 0x3a00_0400),
    // the first operand is the high half; both are rounded to nearest even
    ("cvt.rn.bf16x2.f32", &[ONE, 0x3f80_8000], 0x3f80_3f80),
    ("cvt.rn.bf16x2.f32", &[0x3f81_8000, TWO], 0x3f82_4000),
];

/// Comparisons: opcode, operands, whether it holds.
const HOLDS: &[(&str, [u32; 2], bool)] = &[
    ("setp.eq.u32", [3, 3], true),
    ("setp.ne.u32", [3, 3], false),
    ("setp.lt.u32", [1, 0xffff_ffff], true),
    ("setp.le.u32", [2, 2], true),
    ("setp.gt.u32", [1, 0xffff_ffff], false),
    ("setp.ge.u32", [2, 2], true),
    ("setp.lt.s32", [1, 0xffff_ffff], false),
    ("setp.le.s32", [0xffff_ffff, 0], true),
    ("setp.gt.s32", [1, 0xffff_ffff], true),
    ("setp.ge.s32", [0xffff_ffff, 0], false),
    ("setp.gt.f32", [TWO, ONE], true),
    ("setp.lt.f32", [NAN, ONE], false),
];

/// Statements from %a (the lane) and %b (100 + lane) to %c, and the result of lane 5.
const STATEMENTS: &[(&str, &str, u32)] = &[
    ("cvt.u64.u32", "cvt.u64.u32 %w, %b; cvt.u32.u64 %c, %w", 105),
    ("cvt.u32.u64", "mov.u64 %w, 0x100000003; cvt.u32.u64 %c, %w", 3),
    ("mov.u64", "mov.u64 %w, 9; cvt.u32.u64 %c, %w", 9),
    ("mov.b64", "mov.b64 %w, 9; cvt.u32.u64 %c, %w", 9),
    ("cvta.param.u64", "mov.u64 %w, 9; cvta.param.u64 %w, %w; cvt.u32.u64 %c, %w", 9),
    ("mul.wide.u32", "mul.wide.u32 %w, 0xffffffff, 2; shl.b64 %w, %w, 1; cvt.u32.u64 %c, %w", 0xffff_fffc),
    ("mad.wide.u32", "mov.u64 %w, 7; mad.wide.u32 %w, %a, 3, %w; cvt.u32.u64 %c, %w", 22),
    ("add.u64", "mov.u64 %w, 7; add.u64 %w, %w, 5; cvt.u32.u64 %c, %w", 12),
    ("sub.u64", "mov.u64 %w, 7; sub.u64 %w, %w, 5; cvt.u32.u64 %c, %w", 2),
    ("mul.lo.u64", "mov.u64 %w, 7; mul.lo.u64 %w, %w, 5; cvt.u32.u64 %c, %w", 35),
    ("shl.b64", "mov.u64 %w, 7; shl.b64 %w, %w, 2; cvt.u32.u64 %c, %w", 28),
    ("setp.ne.u64", "mov.u64 %w, 0; setp.ne.u64 %p, %w, 0; selp.u32 %c, 1, 2, %p", 2),
    ("selp.u32", "setp.eq.u32 %p, %a, 6; selp.u32 %c, 1, 2, %p", 2),
    ("selp.s32", "setp.eq.u32 %p, %a, 5; selp.s32 %c, -1, 2, %p", 0xffff_ffff),
    ("selp.u64", "setp.eq.u32 %p, %a, 5; selp.u64 %w, 1, 2, %p; cvt.u32.u64 %c, %w", 1),
    ("selp.f32", "setp.eq.u32 %p, %a, 5; selp.f32 %c, 0f3F800000, 0f00000000, %p", ONE),
    (
        "and.pred",
        "setp.eq.u32 %p, %a, 5; setp.eq.u32 %q, %a, 6; and.pred %p, %p, %q; selp.u32 %c, 1, 2, %p",
        2,
    ),
    ("or.pred", "setp.eq.u32 %p, %a, 5; setp.eq.u32 %q, %a, 6; or.pred %p, %p, %q; selp.u32 %c, 1, 2, %p", 1),
    ("shfl.sync.bfly.b32", "shfl.sync.bfly.b32 %c, %b, 3, 31, 0xffffffff", 106),
    ("shfl.sync.idx.b32", "shfl.sync.idx.b32 %c, %b, 9, 31, 0xffffffff", 109),
    ("shfl.sync.down.b32", "shfl.sync.down.b32 %c, %b, 30, 31, 0xffffffff", 105),
    ("shfl.sync.up.b32", "shfl.sync.up.b32 %c, %b, 2, 0, 0xffffffff", 103),
    ("cvt.f32.f16", "mov.b16 %h, 15360; cvt.f32.f16 %c, %h", ONE),
    ("cvt.rn.f16.f32", "cvt.rn.f16.f32 %h, 0f3F800000; mov.b32 %c, {%h, 0}", 0x3c00),
    ("cvt.rn.bf16.f32", "cvt.rn.bf16.f32 %h, 0f3F818000; mov.b32 %c, {0, %h}", 0x3f82_0000),
    ("cvt.u32.u16", "mov.b16 %h, 0xfedc; cvt.u32.u16 %c, %h", 0xfedc),
    ("mov.b16", "mov.b16 %h, 7; mov.b32 %c, {%h, %h}", 0x7_0007),
    ("mov.b32", "mov.b32 {%h, %k}, 0x12345678; mov.b32 %c, {%k, %h}", 0x5678_1234),
    ("a branch that lanes take apart", "mov.u32 %c, 1; setp.eq.u32 %p, %a, 5; @%p bra L; mov.u32 %c, 2", 1),
];

fn kernel(body: &str) -> String {
    format!(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f(\n.param .u64 out\n) .reqntid 32, 1, 1\n{{\n\
         .reg .u64 %out, %w; .reg .b32 %a, %b, %c; .reg .b16 %h, %k; .reg .pred %p, %q;\n\
         .shared .align 16 .b8 tile[512]; .shared .align 4 .b8 words[64];\n\
         ld.param.u64 %out, [out]; mov.u32 %a, %tid.x; add.u32 %b, %a, 100;\n\
         {body};\nL:\nmad.wide.u32 %out, %a, 4, %out; st.global.u32 [%out], %c; ret;\n}}\n"
    )
}

/// The value that lane 5 stores.
fn execute(body: &str) -> Result<u32, String> {
    let mut machine = Machine::default();
    machine.load(&read(&kernel(body))?);
    let out = machine.memory.alloc(128);
    machine.launch(
        "f",
        Shape { grid: [1, 1, 1], threads: 32, shared: 0 },
        &[Value { bits: out, bytes: 8 }],
    )?;
    let mut bytes = [0; 128];
    machine.memory.find(out)?.0.get(0, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes[20..24].try_into().unwrap()))
}

#[test]
fn opcodes_answer_as_they_must() {
    for (opcode, operands, want) in ANSWERS {
        let operands: Vec<String> = operands.iter().map(|x| format!("0x{x:x}")).collect();
        let got = execute(&format!("{opcode} %c, {}", operands.join(", "))).unwrap();
        assert_eq!(got, *want, "{opcode} {operands:?}: {got:#x}");
    }
    for (opcode, [a, b], want) in HOLDS {
        let got = execute(&format!("{opcode} %p, 0x{a:x}, 0x{b:x}; selp.u32 %c, 1, 0, %p")).unwrap();
        assert_eq!(got == 1, *want, "{opcode} {a:#x} {b:#x}");
    }
    for (what, body, want) in STATEMENTS {
        let got = execute(body).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(got, *want, "{what}: {got:#x}");
    }
}

#[test]
fn every_opcode_that_kernels_use_has_a_known_answer() {
    let known: BTreeSet<&str> = ANSWERS.iter().map(|a| a.0).chain(HOLDS.iter().map(|h| h.0)).collect();
    let known: BTreeSet<&str> = known.into_iter().chain(STATEMENTS.iter().map(|s| s.0)).collect();
    // Copies and waits: the tests of every kernel depend on their effect, and `mutations` removes them.
    let elsewhere = [
        "ld.",
        "st.",
        "bar.",
        "bra",
        "ret",
        "ldmatrix",
        "mma",
        "cp.async",
        "mbarrier",
        "fence",
        "wgmma",
        "wmma",
        "setmaxnreg",
        ".",
    ];
    let mut missing = BTreeSet::new();
    for file in files::all() {
        for line in file.text.lines().map(str::trim).filter(|l| l.ends_with(';')) {
            let words: Vec<&str> = line.trim_end_matches(';').split_whitespace().collect();
            let opcode = words[usize::from(words[0].starts_with('@'))];
            if !known.contains(opcode) && !elsewhere.iter().any(|e| opcode.starts_with(e)) {
                missing.insert(opcode.to_string());
            }
        }
    }
    assert!(missing.is_empty(), "opcodes without a known answer: {missing:?}");
}

#[test]
fn what_a_device_would_forgive_is_an_error() {
    let cases = [
        ("frob.u32 %c, %a", "unknown opcode frob.u32"),
        ("ld.global.v4.u64 {%w, %w, %w, %w}, [%out]", "unknown opcode ld.global.v4.u64"),
        ("mov.u32 %c, %nothing", "unknown name %nothing"),
        ("add.u32 %a, %a, 0", "register %c was never set"),
        ("mov.u32 %c, 0; ld.global.u32 %c, [%out]", "never written"),
        ("mov.u32 %c, 0; add.u64 %out, %out, 4", "out of bounds: byte 128 of 128"),
        ("mov.u32 %c, 0; st.shared.u32 [tile+510], %a", "no multiple"),
        ("mov.u32 %c, 0; st.shared.u32 [tile+640], %a", "out of bounds"),
        ("ld.shared.u32 %c, [tile]", "never written"),
        ("mov.u32 %c, 0; st.shared.u32 [tile], %a", "no barrier orders it after the write of thread"),
        (
            "shl.b32 %b, %a, 2; mov.u32 %c, tile; add.u32 %b, %b, %c; st.shared.u32 [%b], %a; ld.shared.u32 %c, [tile]",
            "no barrier orders it after the write of thread 0",
        ),
        ("mov.u32 %c, 0; setp.eq.u32 %p, %a, 5; @%p bar.sync 0", "a barrier that not all lanes"),
        (
            "mov.u32 %c, 0; setp.eq.u32 %p, %a, 5; @%p shfl.sync.bfly.b32 %c, %a, 1, 31, 0xffffffff",
            "not all lanes",
        ),
        ("mov.u32 %c, 0; mov.u64 %w, 8; st.global.u32 [%w], %c", "belongs to nothing"),
        (
            "mad.wide.u32 %w, %a, 4, %out; st.global.u32 [%w], %a; ld.global.nc.u32 %c, [%w]",
            "read as constant, and this launch wrote it",
        ),
        (
            "mov.u32 %c, 0; mov.b16 %h, 7; st.global.b16 [%out+2], %h",
            "no barrier orders it after the write of thread",
        ),
        ("mov.u32 %c, 0; mov.u32 %b, words; st.shared.v4.b32 [%b], {%a, %a, %a, %a}", "no multiple"),
    ];
    for (body, want) in cases {
        let said = execute(body).expect_err(body);
        assert!(said.contains(want), "{body}: {said}");
        assert!(said.contains("line "), "an address: {said}");
    }
    let fine = "shl.b32 %b, %a, 2; mov.u32 %c, tile; add.u32 %b, %b, %c; st.shared.u32 [%b], %a; bar.warp.sync \
                0xffffffff; ld.shared.u32 %c, [tile+8]";
    assert_eq!(execute(fine), Ok(2));
}
