//! wmma of sm_70 in the interpreter: known answers for every layout of a matrix, and code that it must reject.

use crate::interpreter::{Machine, Shape, Value, read};
use half::f16;

/// Rows and columns of a matrix, and numbers between its lines in shared memory.
const SIDE: usize = 16;
const APART: usize = 32;

/// a and b come from global memory in lines of 16 numbers and are copied to shared memory in lines [`APART`] apart;
/// sums are stored through shared memory too. %s is the address of this lane's half line of a (for b 1024 bytes
/// further), %r that of its half line of sums.
const KERNEL: &str = "
    .reg .u64 %out, %x; .reg .b32 %t, %w, %s, %r, %y, %z, %v<8>, %a<8>, %b<8>; .reg .f32 %c<8>, %f; .reg .pred %p;
    .shared .align 128 .b8 tiles[2048]; .shared .align 128 .b8 sums[2048];
    ld.param.u64 %out, [out]; ld.param.u64 %x, [x]; mov.u32 %t, %tid.x; mov.u32 %z, tiles; mov.u32 %y, sums;
    mad.wide.u32 %x, %t, 16, %x;
    shr.u32 %w, %t, 1; mad.lo.u32 %s, %w, 64, %z; mad.lo.u32 %r, %w, 128, %y;
    and.b32 %w, %t, 1; mad.lo.u32 %s, %w, 16, %s; mad.lo.u32 %r, %w, 32, %r; mad.wide.u32 %out, %t, 32, %out;
    ld.global.u32 %v0, [%x]; ld.global.u32 %v1, [%x+4]; ld.global.u32 %v2, [%x+8]; ld.global.u32 %v3, [%x+12];
    ld.global.u32 %v4, [%x+512]; ld.global.u32 %v5, [%x+516]; ld.global.u32 %v6, [%x+520]; ld.global.u32 %v7, [%x+524];
    st.shared.v4.b32 [%s], {%v0, %v1, %v2, %v3}; st.shared.v4.b32 [%s+1024], {%v4, %v5, %v6, %v7};
";

const LOADED: &str = "LOADED: bar.warp.sync 0xffffffff;";
const ZERO: &str =
    "mov.f32 %c0, 0f3F800000; mov.f32 %c1, %c0; mov.f32 %c2, %c0; mov.f32 %c3, %c0; mov.f32 %c4, %c0;
    mov.f32 %c5, %c0; mov.f32 %c6, %c0; mov.f32 %c7, %c0;";
const LOAD_A: &str =
    "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, [%z], 32;";
const LOAD_B: &str = "wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, [%z+1024], 32;";
const MULTIPLY: &str =
    "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7},
    {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7},
    {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7};";
const STORE: &str =
    "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%y], {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7}, 32;";
const STORED: &str = "STORED: bar.warp.sync 0xffffffff;";
const OUT: &str = "ld.shared.v4.f32 {%c0, %c1, %c2, %c3}, [%r]; ld.shared.v4.f32 {%c4, %c5, %c6, %c7}, [%r+16];
    st.global.f32 [%out], %c0; st.global.f32 [%out+4], %c1; st.global.f32 [%out+8], %c2; st.global.f32 [%out+12], %c3;
    st.global.f32 [%out+16], %c4; st.global.f32 [%out+20], %c5; st.global.f32 [%out+24], %c6; st.global.f32 [%out+28], %c7;";

/// The complete body.
fn whole() -> String {
    [KERNEL, LOADED, ZERO, LOAD_A, LOAD_B, MULTIPLY, STORE, STORED, OUT].concat()
}

/// Small numbers, no two lines alike.
fn numbers(key: usize) -> Vec<f32> {
    (0..SIDE * SIDE).map(|i| ((i * 7 + i / SIDE * 3 + key) % 13) as f32 - 6.0).collect()
}

/// The lines of sums after the run.
fn execute(body: &str) -> Result<Vec<f32>, String> {
    assert_eq!(APART * 2, 64);
    let text = format!(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f(\n.param .u64 out,\n.param .u64 x\n) \
         .reqntid 32, 1, 1\n{{\n{body}\nret;\n}}\n"
    );
    let mut machine = Machine::default();
    machine.load(&read(&text)?);
    let bytes: Vec<u8> =
        [numbers(0), numbers(5)].concat().iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
    let (out, x) = (machine.memory.alloc(4 * SIDE * SIDE), machine.memory.alloc(bytes.len()));
    machine.memory.find(x)?.0.put(0, &bytes);
    let args = [out, x].map(|bits| Value { bits, bytes: 8 });
    machine.launch("f", Shape { grid: [1, 1, 1], threads: 32, shared: 0 }, &args)?;
    let mut got = vec![0u8; 4 * SIDE * SIDE];
    machine.memory.find(out)?.0.get(0, &mut got)?;
    Ok(got.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

/// 1 + a b, each stored by rows or by columns.
fn want(a: bool, b: bool, sums: bool) -> Vec<f32> {
    let at =
        |columns: bool, row: usize, col: usize| if columns { col * SIDE + row } else { row * SIDE + col };
    let (x, y, mut out) = (numbers(0), numbers(5), vec![0.0; SIDE * SIDE]);
    for (row, col) in (0..SIDE * SIDE).map(|i| (i / SIDE, i % SIDE)) {
        let sum: f32 = (0..SIDE).map(|k| x[at(a, row, k)] * y[at(b, k, col)]).sum();
        out[at(sums, row, col)] = 1.0 + sum;
    }
    out
}

#[test]
fn matrices_are_multiplied_in_every_layout() {
    let name = |columns: bool| if columns { "col" } else { "row" };
    for (a, b, sums) in (0..8).map(|i| (i & 1 == 1, i & 2 == 2, i & 4 == 4)) {
        let body = whole()
            .replace("load.a.sync.aligned.row", &format!("load.a.sync.aligned.{}", name(a)))
            .replace("load.b.sync.aligned.row", &format!("load.b.sync.aligned.{}", name(b)))
            .replace("mma.sync.aligned.row.row", &format!("mma.sync.aligned.{}.{}", name(a), name(b)))
            .replace("store.d.sync.aligned.row", &format!("store.d.sync.aligned.{}", name(sums)));
        assert!(execute(&body).unwrap() == want(a, b, sums), "{} {} {}", name(a), name(b), name(sums));
    }
}

/// A kernel that depends on the places of numbers, or confuses fragments, gives other numbers.
#[test]
fn dependence_on_fragment_layout_is_detected() {
    let right = want(false, false, false);
    let cases = [
        // A fragment of the wrong kind.
        ("{%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, {%b0", "{%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, {%b0"),
        // Loaded as rows, multiplied as columns.
        ("mma.sync.aligned.row.row", "mma.sync.aligned.col.row"),
        ("mma.sync.aligned.row.row", "mma.sync.aligned.row.col"),
        // Exchanged registers.
        ("{%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7},\n", "{%b1, %b0, %b2, %b3, %b4, %b5, %b6, %b7},\n"),
        ("f32 [%y], {%c0, %c1", "f32 [%y], {%c1, %c0"),
    ];
    for (from, to) in cases {
        assert!(whole().contains(from), "{from}");
        assert!(execute(&whole().replace(from, to)) != Ok(right.clone()), "{to}");
    }
    // Sums are not those of mma.sync: row 0, columns 0 and 1 in the first lane's first registers.
    let first = "st.global.f32 [%out], %c0; st.global.f32 [%out+4], %c1;";
    let early = whole()
        .replace(STORE, &format!("mov.f32 %f, %c1; {STORE}"))
        .replace(first, "st.global.f32 [%out], %c0; st.global.f32 [%out+4], %f;");
    assert!(execute(&early).unwrap() != right);
}

#[test]
fn what_a_device_would_forgive_is_an_error() {
    let cases = [
        (LOADED, "", "no barrier orders it after the write of thread"),
        (STORED, "", "no barrier orders it after the write of thread"),
        ("[%z], 32", "[%z+16], 32", "no multiple of 32 bytes"),
        ("[%z], 32", "[%z], 24", "no multiple of 32 bytes"),
        ("[%y], {", "[%y+16], {", "no multiple of 32 bytes"),
        ("%c7}, 32", "%c7}, 20", "no multiple of 32 bytes"),
        ("[%z+1024], 32", "[%z+8192], 32", "out of bounds"),
        ("[%z+1024], 32", "[%z+1024], 48", "never written"),
        ("[%z+1024], 32", "[%z+1024]", "a distance of rows is expected"),
        ("[%y], {", "[%y+128], {", "out of bounds"),
        ("mov.f32 %c7, %c0;", "", "register %c7 was never set"),
        ("%b6, %b7}, [%z", "%b6}, [%z", "8 registers"),
        ("[%z], 32", "[%s], 32", "lanes name different matrices"),
        ("%a7}, [%z], 32", "%a7}, [%z], %t", "lanes name different matrices"),
        ("wmma.load.a", "setp.eq.u32 %p, %t, 5; @%p wmma.load.a", "not all lanes"),
        ("wmma.load.a.sync.aligned.row.m16n16k16", "wmma.load.a.sync.aligned.row.m8n32k16", "unknown opcode"),
        (
            "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32",
            "wmma.mma.sync.aligned.row.row.m16n16k16.f16.f16",
            "unknown",
        ),
        // A factor that a lane changed after the load.
        ("wmma.mma", "setp.eq.u32 %p, %t, 5; @%p mov.u32 %a3, 7; wmma.mma", "other numbers than a load gave"),
    ];
    for (from, to, want) in cases {
        assert!(whole().contains(from), "{from}");
        let said = execute(&whole().replace(from, to)).expect_err(to);
        assert!(said.contains(want), "{from} -> {to}: {said}");
    }
}
