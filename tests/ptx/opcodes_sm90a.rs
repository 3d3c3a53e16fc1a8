//! Known answers for what the interpreter knows of sm_90a, on one box of each operand and one wgmma, and what it must
//! refuse, by name.

use crate::interpreter::{Machine, Shape, TensorMap, Value, read};

/// Numbers of a row of both matrices as they lie.
const COLS: usize = 64;

/// a [64, 64]; b [256, 64] or, across, [64, 256] as four boxes beside each other.
fn kernel(across: bool) -> String {
    let sums: Vec<String> = (0..128).map(|i| format!("%d{i}")).collect();
    let stores: String = (0..128).map(|i| format!("st.global.f32 [%out+{}], %d{i};\n", 4 * i)).collect();
    let boxes: String = match across {
        false => copy("8192", "%mapb", "{0, 0}"),
        true => (0..4)
            .map(|i| copy(&format!("{}", 8192 + 8192 * i), "%mapb", &format!("{{{}, 0}}", 64 * i)))
            .collect(),
    };
    let (b, trans) = if across { (0x4000_0040_0200_0000u64, 1) } else { (0x4000_0040_0001_0000, 0) };
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 all[];\n\
         .visible .entry f(\n.param .u64 out, .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128]\n\
         ) .reqntid 128, 1, 1\n{{\n\
         .reg .f32 %d<128>; .reg .u64 %out, %mapa, %mapb, %da, %db; .reg .u32 %t, %base, %bar, %x; .reg .pred %p, %one;\n\
         ld.param.u64 %out, [out]; mov.b64 %mapa, map_a; mov.b64 %mapb, map_b; mov.u32 %t, %tid.x;\n\
         mov.u32 %base, all; add.u32 %base, %base, 1023; and.b32 %base, %base, -1024; add.u32 %bar, %base, 40960;\n\
         setp.ne.u32 %p, %t, 0; @%p bra READY;\n\
         mbarrier.init.shared::cta.b64 [%bar], 1;\n\
         fence.mbarrier_init.release.cluster;\n\
         READY:\n\
         bar.sync 0;\n\
         @%p bra WAIT;\n\
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 40960;\n\
         {}{boxes}\n\
         WAIT:\n\
         mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;\n\
         @!%p bra WAIT;\n\
         shr.u32 %x, %base, 4; cvt.u64.u32 %da, %x; add.u64 %da, %da, 0x4000004000010000;\n\
         add.u32 %x, %base, 8192; shr.u32 %x, %x, 4; cvt.u64.u32 %db, %x; add.u64 %db, %db, 0x{b:x};\n\
         setp.ne.u32 %one, %t, %t;\n\
         wgmma.fence.sync.aligned;\n\
         wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{}}}, %da, %db, %one, 1, 1, 0, {trans};\n\
         wgmma.commit_group.sync.aligned;\n\
         wgmma.wait_group.sync.aligned 0;\n\
         mad.wide.u32 %out, %t, 512, %out;\n{stores}ret;\n}}\n",
        copy("0", "%mapa", "{0, 0}"),
        sums.join(", ")
    )
}

fn copy(to: &str, map: &str, place: &str) -> String {
    format!(
        "add.u32 %x, %base, {to}; cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%x], \
         [{map}, {place}], [%bar];\n"
    )
}

/// What a thread stores: 128 sums of a [64, cols] and b, of which only so many numbers are real; `seed` decides the order.
fn execute(text: &str, (a, b): (&[f32], &[f32]), real: usize, seed: u64) -> Result<Vec<f32>, String> {
    let mut machine = Machine::default();
    machine.seed = seed;
    machine.load(&read(text)?);
    let mut put = |x: &[f32]| {
        let at = machine.memory.alloc(2 * x.len());
        let bytes: Vec<u8> = x.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        machine.memory.find(at).unwrap().0.put(0, &bytes);
        at
    };
    let (a, between) = (put(a), 2 * b.len() as u64 / if text.contains("0, 1;") { 64 } else { 256 });
    let across = text.contains("0, 1;");
    let (rows, cols) = if across { (64, 256) } else { (256, real as u32) };
    let b =
        TensorMap { address: put(b), rows, cols, stride: between, part: (64, if across { 64 } else { 256 }) };
    let a = TensorMap { address: a, rows: 64, cols: real as u32, stride: 2 * COLS as u64, part: (64, 64) };
    machine.maps = vec![a, b];
    let out = machine.memory.alloc(128 * 512);
    let args = [(out, 8), (0, 128), (1, 128)].map(|(bits, bytes)| Value { bits, bytes });
    machine.launch("f", Shape { grid: [1, 1, 1], threads: 128, shared: 42_000 }, &args)?;
    let mut bytes = vec![0; 128 * 512];
    machine.memory.find(out)?.0.get(0, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// a's rows are their number in column `k`, b's outputs theirs: every product of two tells where it came from.
fn numbered(k: usize, across: bool) -> (Vec<f32>, Vec<f32>) {
    let mut a = vec![0.0; 64 * COLS];
    let mut b = vec![0.0; 256 * COLS];
    (0..64).for_each(|m| a[m * COLS + k] = m as f32);
    (0..256).for_each(|n| b[if across { k * 256 + n } else { n * COLS + k }] = n as f32);
    (a, b)
}

#[test]
fn sums_lie_as_the_manual_has_them() {
    for (across, k) in [(false, 0), (false, 11), (true, 0), (true, 11)] {
        let (a, b) = numbered(k, across);
        for seed in [0, 1, 2] {
            let got = execute(&kernel(across), (&a, &b), COLS, seed).unwrap();
            for (t, i) in (0..128).flat_map(|t| (0..128).map(move |i| (t, i))) {
                let row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2);
                let col = 8 * (i / 4) + 2 * (t % 4) + i % 2;
                assert_eq!(got[128 * t + i], (row * col) as f32, "thread {t}, sum {i}, {across}, {k}");
            }
        }
    }
}

#[test]
fn what_lies_beyond_a_matrix_is_zero() {
    let (a, b) = (vec![1.0; 64 * COLS], vec![1.0; 256 * COLS]);
    for real in [1, 5, 8, 15, 16] {
        let got = execute(&kernel(false), (&a, &b), real, 0).unwrap();
        assert!(got.iter().all(|x| *x == real as f32), "{real}: {:?}", &got[..4]);
    }
}

/// What stands there, what comes in its place, what is said.
const MISUSE: &[(&str, &str, &str)] = &[
    ("@!%p bra WAIT;", "", "is multiplied"),
    ("wgmma.fence.sync.aligned;", "", "wgmma without wgmma.fence"),
    (
        "wgmma.fence.sync.aligned;",
        "wgmma.fence.sync.aligned; mov.f32 %d7, 0f00000000;",
        "wgmma without wgmma.fence",
    ),
    ("wgmma.commit_group.sync.aligned;", "", "a register of a wgmma that nobody waited for"),
    (
        "wgmma.wait_group.sync.aligned 0;",
        "wgmma.wait_group.sync.aligned 1;",
        "a register of a wgmma that nobody",
    ),
    ("setp.ne.u32 %one, %t, %t;", "setp.eq.u32 %one, %t, %t;", "sums that were never set"),
    ("setp.ne.u32 %one, %t, %t;", "setp.ne.u32 %one, %t, 3;", "a warp's operands differ"),
    ("fence.mbarrier_init.release.cluster;", "", "without fence.mbarrier_init"),
    ("bar.sync 0;", "", "mbarrier"),
    ("[%bar], 40960;", "[%bar], 40944;", "no warp can go on"),
    ("[%bar], 40960;", "[%bar], 40976;", "no warp can go on"),
    (
        "mbarrier.init.shared::cta.b64 [%bar], 1",
        "mbarrier.init.shared::cta.b64 [%bar], 2",
        "no warp can go on",
    ),
    ("mbarrier.init.shared::cta.b64 [%bar], 1", "mbarrier.init.shared::cta.b64 [%bar+4], 1", "not aligned"),
    (
        "@%p bra WAIT;",
        "mbarrier.arrive.shared::cta.b64 _, [%bar]; @%p bra WAIT;",
        "more arrivals at an mbarrier",
    ),
    ("0x4000004000010000", "0x8000004000010000", "a descriptor other than"),
    ("0x4000004000010000", "0x4002004000010000", "a descriptor other than"),
    ("0x4000004000010000", "0x4000004000010a00", "no copy brought it"),
    ("0x4000004000010000", "0x4000004000010008", "a descriptor that begins within"),
    ("add.u32 %x, %base, 8192; cp", "add.u32 %x, %base, 8200; cp", "not aligned"),
    ("add.u32 %x, %base, 8192; cp", "add.u32 %x, %base, 7168; cp", "two copies to one place"),
    ("and.b32 %base, %base, -1024", "and.b32 %base, %base, -512", "a descriptor that begins within"),
    (
        "mad.wide.u32 %out, %t, 512, %out;",
        "ld.shared.f32 %d0, [%base]; mad.wide.u32 %out, %t, 512, %out;",
        "copy engine",
    ),
    ("%one, 1, 1, 0, 0", "%one, -1, 1, 0, 0", "wgmma with a sign"),
    ("%one, 1, 1, 0, 0", "%one, 1, 1, 1, 0", "a transposed"),
    (
        "wgmma.fence.sync.aligned;",
        "@%p bra OFF; ret; OFF: setp.gt.u32 %p, %t, 99; @%p bra OUT; OUT: @%p ret; wgmma.fence.sync.aligned;",
        "not all lanes",
    ),
    (
        "wgmma.fence.sync.aligned;",
        "setp.gt.u32 %p, %t, 95; @%p ret; wgmma.fence.sync.aligned;",
        "do not multiply as often",
    ),
    (
        "wgmma.fence.sync.aligned;",
        "setmaxnreg.inc.sync.aligned.u32 250; wgmma.fence.sync.aligned;",
        "setmaxnreg from 512 to 250",
    ),
];

#[test]
fn what_a_device_would_forgive_is_an_error() {
    let (a, b) = numbered(0, false);
    let (text, mut missed) = (kernel(false), Vec::new());
    for (from, to, want) in MISUSE {
        assert!(text.contains(from), "{from}");
        let changed = text.replacen(from, to, 1);
        // Some go well in one order and not in another.
        let said: Vec<String> =
            [0, 1, 2].iter().filter_map(|seed| execute(&changed, (&a, &b), COLS, *seed).err()).collect();
        if !said.iter().any(|s| s.contains(want)) {
            missed.push(format!("{to:?} for {from:?}: {said:?}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
