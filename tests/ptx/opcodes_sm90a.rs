//! Known answers for the opcodes of sm_90a, with one box of each operand and one wgmma, and misuse that the
//! interpreter must reject by name.

use crate::interpreter::{Machine, Shape, TensorMap, Value, read};

/// Numbers in a row of both matrices in memory.
const COLS: usize = 64;

/// One wgmma of 64 x `n` sums.
#[derive(Debug, Clone, Copy)]
struct Form {
    n: usize,
    /// b is stored as [64, n], in boxes of 64 columns beside each other; else as [n, 64].
    across: bool,
    /// a [64, 64] comes from registers, not from its box.
    registers: bool,
}

const WIDE: Form = Form { n: 256, across: false, registers: false };

impl Form {
    fn all() -> impl Iterator<Item = Form> {
        let each = |n| [(false, false), (false, true), (true, false), (true, true)].map(|x| (n, x));
        let all = [64, 128, 256].into_iter().flat_map(each);
        all.map(|(n, (across, registers))| Form { n, across, registers })
    }

    /// Bytes of both operands' boxes.
    fn bytes(self) -> usize {
        8192 + 128 * self.n
    }

    fn boxes(self) -> String {
        let of_b = |i| copy(&format!("{}", 8192 + 8192 * i), "%mapb", &format!("{{{}, 0}}", 64 * i));
        let count = if self.across { self.n / 64 } else { 1 };
        copy("0", "%mapa", "{0, 0}") + &(0..count).map(of_b).collect::<String>()
    }

    fn multiply(self) -> String {
        let sums: Vec<String> = (0..self.n / 2).map(|i| format!("%d{i}")).collect();
        let (a, of_a) = if self.registers { ("{%a0, %a1, %a2, %a3}", "") } else { ("%da", ", 0") };
        format!(
            "wgmma.mma_async.sync.aligned.m64n{}k16.f32.bf16.bf16 {{{}}}, {a}, %db, %one, 1, 1{of_a}, {};\n",
            self.n,
            sums.join(", "),
            u32::from(self.across)
        )
    }
}

fn kernel(form: Form) -> String {
    let all = form.bytes();
    let stores: String =
        (0..form.n / 2).map(|i| format!("st.global.f32 [%out+{}], %d{i};\n", 4 * i)).collect();
    let b = if form.across { 0x4000_0040_0200_0000u64 } else { 0x4000_0040_0001_0000 };
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.extern .shared .align 16 .b8 all[];\n\
         .visible .entry f(\n.param .u64 out, .param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128],\n\
         .param .u64 left\n) .reqntid 128, 1, 1\n{{\n\
         .reg .f32 %d<128>; .reg .u64 %out, %mapa, %mapb, %da, %db, %left; .reg .u32 %t, %base, %bar, %x, %y;\n\
         .reg .b32 %a<4>; .reg .pred %p, %one;\n\
         ld.param.u64 %out, [out]; mov.b64 %mapa, map_a; mov.b64 %mapb, map_b; mov.u32 %t, %tid.x;\n\
         mov.u32 %base, all; add.u32 %base, %base, 1023; and.b32 %base, %base, -1024; add.u32 %bar, %base, {all};\n\
         shr.u32 %x, %t, 5; shl.b32 %x, %x, 4; and.b32 %y, %t, 31; shr.u32 %y, %y, 2; add.u32 %x, %x, %y;\n\
         and.b32 %y, %t, 3; shl.b32 %y, %y, 2; mad.lo.u32 %x, %x, 128, %y; ld.param.u64 %left, [left];\n\
         cvt.u64.u32 %da, %x; add.u64 %left, %left, %da; ld.global.b32 %a0, [%left]; ld.global.b32 %a1, [%left+1024];\n\
         ld.global.b32 %a2, [%left+16]; ld.global.b32 %a3, [%left+1040];\n\
         setp.ne.u32 %p, %t, 0; @%p bra READY;\n\
         mbarrier.init.shared::cta.b64 [%bar], 1;\n\
         fence.mbarrier_init.release.cluster;\n\
         READY:\n\
         bar.sync 0;\n\
         @%p bra WAIT;\n\
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {all};\n\
         {}\n\
         WAIT:\n\
         mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;\n\
         @!%p bra WAIT;\n\
         shr.u32 %x, %base, 4; cvt.u64.u32 %da, %x; add.u64 %da, %da, 0x4000004000010000;\n\
         add.u32 %x, %base, 8192; shr.u32 %x, %x, 4; cvt.u64.u32 %db, %x; add.u64 %db, %db, 0x{b:x};\n\
         setp.ne.u32 %one, %t, %t;\n\
         wgmma.fence.sync.aligned;\n\
         {}\
         wgmma.commit_group.sync.aligned;\n\
         wgmma.wait_group.sync.aligned 0;\n\
         mad.wide.u32 %out, %t, 512, %out;\n{stores}ret;\n}}\n",
        form.boxes(),
        form.multiply()
    )
}

fn copy(to: &str, map: &str, place: &str) -> String {
    format!(
        "add.u32 %x, %base, {to}; cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%x], \
         [{map}, {place}], [%bar];\n"
    )
}

/// The values that threads store: n / 2 sums of a [64, cols] and b with the given valid numbers; `seed` sets the order.
fn execute(
    (form, text): (Form, &str),
    (a, b): (&[f32], &[f32]),
    real: usize,
    seed: u64,
) -> Result<Vec<f32>, String> {
    let mut machine = Machine::default();
    machine.seed = seed;
    machine.load(&read(text)?);
    let mut put = |x: &[f32]| {
        let at = machine.memory.alloc(2 * x.len());
        let bytes: Vec<u8> = x.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        machine.memory.find(at).unwrap().0.put(0, &bytes);
        at
    };
    let (left, n) = (put(a), form.n as u32);
    let (rows, cols, box_rows) = if form.across { (64, n, 64) } else { (n, real as u32, n) };
    let stride = 2 * if form.across { form.n as u64 } else { COLS as u64 };
    let b = TensorMap { address: put(b), rows, cols, stride, part: (64, box_rows) };
    let a = TensorMap { address: left, rows: 64, cols: real as u32, stride: 2 * COLS as u64, part: (64, 64) };
    machine.maps = vec![a, b];
    let out = machine.memory.alloc(128 * 512);
    let args = [(out, 8), (0, 128), (1, 128), (left, 8)].map(|(bits, bytes)| Value { bits, bytes });
    machine.launch("f", Shape { grid: [1, 1, 1], threads: 128, shared: 42_000 }, &args)?;
    let region = machine.memory.find(out)?.0;
    let mut all = Vec::new();
    for thread in 0..128 {
        let mut bytes = vec![0; 2 * form.n];
        region.get(512 * thread, &mut bytes)?;
        all.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    }
    Ok(all)
}

/// Column `k` of a has the row number, and b the output number, so that every product identifies its source.
fn numbered(form: Form, k: usize) -> (Vec<f32>, Vec<f32>) {
    let mut a = vec![0.0; 64 * COLS];
    let mut b = vec![0.0; form.n * COLS];
    (0..64).for_each(|m| a[m * COLS + k] = m as f32);
    (0..form.n).for_each(|n| b[if form.across { k * form.n + n } else { n * COLS + k }] = n as f32);
    (a, b)
}

#[test]
fn sums_have_the_layout_of_the_manual() {
    for (form, k) in Form::all().flat_map(|form| [0, 3, 11].map(|k| (form, k))) {
        let (a, b) = numbered(form, k);
        for seed in [0, 1, 2] {
            let got = execute((form, &kernel(form)), (&a, &b), COLS, seed).unwrap();
            let each = form.n / 2;
            for (t, i) in (0..128).flat_map(|t| (0..each).map(move |i| (t, i))) {
                let row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2);
                let col = 8 * (i / 4) + 2 * (t % 4) + i % 2;
                assert_eq!(got[each * t + i], (row * col) as f32, "thread {t}, sum {i}, {form:?}, {k}");
            }
        }
    }
}

/// Sums of 16 columns, packed two to a register in their order, form a left operand of 16 terms.
#[test]
fn packed_sums_are_a_left_operand() {
    let form = Form { n: 64, across: false, registers: true };
    let product = form.multiply();
    let pack = |i: usize| format!("cvt.rn.bf16x2.f32 %a{i}, %d{}, %d{};\n", 2 * i + 1, 2 * i);
    let again = format!(
        "{product}wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n{}wgmma.fence.sync.aligned;\n{product}",
        (0..4).map(pack).collect::<String>()
    );
    let text = kernel(form).replace(&product, &again);
    // a's row r has r in its first column; b keeps the first column, then what it made of it: (r, 2 r, 3 r, ...) b.
    let (mut a, mut b) = (vec![0.0; 64 * COLS], vec![0.0; 64 * COLS]);
    (0..64).for_each(|r| a[r * COLS] = r as f32);
    (0..64).for_each(|n| b[n * COLS] = (n % 4) as f32);
    (0..64).for_each(|n| b[n * COLS + 1 + n % 15] = (1 + n / 15) as f32);
    let got = execute((form, &text), (&a, &b), COLS, 0).unwrap();
    for (t, i) in (0..128).flat_map(|t| (0..32).map(move |i| (t, i))) {
        let row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2);
        let n = 8 * (i / 4) + 2 * (t % 4) + i % 2;
        let once = |n: usize| (n % 4 * row) as f32;
        let want = once(0) * b[n * COLS] + once(1 + n % 15) * (1 + n / 15) as f32;
        assert_eq!(got[32 * t + i], want, "thread {t}, sum {i}");
    }
}

#[test]
fn values_outside_a_matrix_are_zero() {
    let (a, b) = (vec![1.0; 64 * COLS], vec![1.0; 256 * COLS]);
    for real in [1, 5, 8, 15, 16] {
        let got = execute((WIDE, &kernel(WIDE)), (&a, &b), real, 0).unwrap();
        assert!(got.iter().all(|x| *x == real as f32), "{real}: {:?}", &got[..4]);
    }
}

/// Old text, new text, message.
const MISUSE: &[(&str, &str, &str)] = &[
    ("@!%p bra WAIT;", "", "is multiplied"),
    ("wgmma.fence.sync.aligned;", "", "wgmma without wgmma.fence"),
    (
        "wgmma.fence.sync.aligned;",
        "wgmma.fence.sync.aligned; mov.f32 %d7, 0f00000000;",
        "wgmma without wgmma.fence",
    ),
    (
        "wgmma.wait_group.sync.aligned 0;",
        "setp.lt.u32 %one, %t, 64; @%one bra LATE;\nwgmma.wait_group.sync.aligned 0;\nLATE:\nwgmma.wait_group.sync.aligned 0;",
        "the warps of a warpgroup do not multiply alike",
    ),
    ("wgmma.commit_group.sync.aligned;", "", "a register of a wgmma that was not waited for"),
    (
        "wgmma.wait_group.sync.aligned 0;",
        "wgmma.wait_group.sync.aligned 1;",
        "a register of a wgmma that was not",
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

/// The same for a left operand in registers.
const MISUSE_OF_REGISTERS: &[(&str, &str, &str)] = &[
    ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %a2, 0;", "wgmma without wgmma.fence"),
    (
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; mov.b32 %a1, 0;",
        "a register of a wgmma that was not waited for",
    ),
    (
        "wgmma.wait_group.sync.aligned 0;",
        "wgmma.wait_group.sync.aligned 1; mov.b32 %x, %a3; wgmma.wait_group.sync.aligned 0;",
        "a register of a wgmma that was not waited for",
    ),
    ("ld.global.b32 %a3, [%left+1040];", "", "a left operand that was never set"),
    ("{%a0, %a1, %a2, %a3}", "{%a0, %a1, %a2}", "3 registers of 64 x 16 numbers"),
    ("{%a0, %a1, %a2, %a3}", "{%a0, %a1, %a2, %d3}", "a left operand that was never set"),
    ("%one, 1, 1, 0", "%one, 1, 1, 0, 0", "a transposed"),
    ("%one, 1, 1, 0", "%one, 1, -1, 0", "wgmma with a sign"),
];

/// Tries every misuse of a form; each must be reported in at least one order.
fn misused(form: Form, all: &[(&str, &str, &str)]) {
    let (a, b) = numbered(form, 0);
    let (text, mut missed) = (kernel(form), Vec::new());
    for (from, to, want) in all {
        assert!(text.contains(from), "{from}");
        let changed = text.replacen(from, to, 1);
        // Some are harmless in one order and not in another.
        let on = |seed: &u64| execute((form, &changed), (&a, &b), COLS, *seed).err();
        let said: Vec<String> = [0, 1, 2].iter().filter_map(on).collect();
        if !said.iter().any(|s| s.contains(want)) {
            missed.push(format!("{to:?} for {from:?}: {said:?}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn what_a_device_would_forgive_is_an_error() {
    misused(WIDE, MISUSE);
    misused(Form { n: 64, across: false, registers: true }, MISUSE_OF_REGISTERS);
}

/// Pending sums and left operands: a second wgmma may use the same sums, but no part of them, and no sum as its
/// operand.
#[test]
fn what_is_under_way_is_used_as_it_stands() {
    let form = Form { n: 64, across: false, registers: true };
    let (a, b) = numbered(form, 0);
    let product = form.multiply();
    let with = |second: String| {
        let text = kernel(form).replace(&product, &format!("{product}{second}"));
        execute((form, &text), (&a, &b), COLS, 0).err().unwrap_or_default()
    };
    assert_eq!(with(product.clone()), "");
    for (from, to) in [("{%d0, %d1,", "{%d1, %d0,"), ("%d31}", "%d32}"), ("%a3}", "%d3}"), ("{%d0,", "{%a0,")]
    {
        let said = with(product.replace(from, to));
        assert!(said.contains("wgmma that was not waited for"), "{from} {to}: {said}");
    }
}
