//! Attention by wgmma with an injected fault, as `mutations_sm90a` for products; its gradient is in
//! `mutations_grad_sm90a`.

use crate::bench::{Mat, Out, run};
use crate::device::{Interpreted, device_of, device_with_at};
use crate::files;
use crate::marks;
use crate::mutations_sm90a::{Places, undetected};
use crate::op_cases::tokens;
use finetune::backend::cuda::Flash;
use finetune::backend::{Backend, Cuda, Fault, Heads, Qkv};

const FILE: &str = "attention_sm90a.ptx";

/// The row with four tiles of keys fills every slot twice; the other row has less than a tile, but more than the
/// gradient's blocks of 64.
const BOUNDS: [u32; 3] = [0, 70, 466];

fn exercise(
    (size, window): (usize, Option<usize>),
    device: Cuda<Interpreted>,
) -> Result<Vec<Vec<f32>>, Fault> {
    let mut device = device.bf16().unwrap().attending(Flash { forward: true, backward: false });
    let (t, heads) = (BOUNDS[2] as usize, Heads { window, ..Heads::new(2, 1, size) });
    let [q, k, v] = [2, 1, 1].map(|n| Mat::random(t, n * size, n as u64));
    let (q, outs) = (q.map(|x| 3.0 * x), [Out::Poison(t, 2 * size), Out::Poison(t, 2)]);
    run("attention", &mut device, (&[&q, &k, &v], &outs), |d, i, o| {
        let [out, lse] = o else { unreachable!() };
        let tokens = tokens(d, &BOUNDS);
        let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
        d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
    })
}

/// Changes of the computation, for the named sizes, in all places at once.
const CHANGES: &[(&str, &str, &str)] = &[
    // slots and parities
    ("", "mov.u32 %parity, 1", "mov.u32 %parity, 0"),
    ("", "mov.u32 %parity, 0", "mov.u32 %parity, 1"),
    ("", "selp.u32 %x, 1, 0, %p", "selp.u32 %x, 0, 0, %p"),
    ("", "and.b32 %base, %base, -1024", "and.b32 %base, %base, -512"),
    ("", "mul.wide.u32 %at, %slot, ", "mul.wide.u32 %at, %slot, 1"),
    ("", "mad.lo.u32 %to, %slot, ", "mad.lo.u32 %to, %slot, 1"),
    // descriptors: the warpgroup's rows, strides, swizzle, from 64 columns to the next, steps of 16 terms
    ("", "mad.lo.u32 %y, %wg, 8192", "mad.lo.u32 %y, %wg, 4096"),
    ("", "%dq, 0x4000004000010000", "%dq, 0x4000002000010000"),
    ("", "%dq, 0x4000004000010000", "%dq, 0x8000004000010000"),
    ("", "%dk, 0x4000004000010000", "%dk, 0x4000008000010000"),
    ("", "%dv, 0x4000004004000000", "%dv, 0x4000008004000000"),
    ("128", "%dv, 0x4000004004000000", "%dv, 0x4000004002000000"),
    ("", "add.u64 %sa, %dq, 2", "add.u64 %sa, %dq, 4"),
    ("128", "add.u64 %sa, %dq, 1024", "add.u64 %sa, %dq, 8"),
    ("", "add.u64 %sb, %wide, 2;", "add.u64 %sb, %wide, 1;"),
    ("", "add.u64 %sb, %wide, 256", "add.u64 %sb, %wide, 128"),
    ("", "%none, 1, 1, 0, 0", "%all, 1, 1, 0, 0"),
    ("", "%all, 1, 1, 0, 0", "%none, 1, 1, 0, 0"),
    ("", "%all, 1, 1, 0, 0", "%all, 1, 1, 0, 1"),
    ("", "%all, 1, 1, 1", "%all, 1, 1, 0"),
    ("", "%all, 1, 1, 1", "%none, 1, 1, 1"),
    ("", "{%fp0, %fp1, %fp2, %fp3}", "{%fp0, %fp2, %fp1, %fp3}"),
    // boxes, blocks, heads
    ("", "[%map_q, {%x, %y}]", "[%map_q, {%y, %x}]"),
    ("", "[%map_k, {%x, %y}]", "[%map_k, {%y, %x}]"),
    ("", "[%map_v, {%x, %y}]", "[%map_v, {%y, %x}]"),
    ("128", "add.u32 %x, %column, 64", "add.u32 %x, %column, 0"),
    ("", "mul.lo.u32 %column, %head,", "mul.lo.u32 %column, %group,"),
    ("", "div.u32 %group, %head, %x", "mov.u32 %group, %head"),
    ("", "sub.u32 %x, %x, 1", "sub.u32 %x, %x, 0"),
    ("", "add.u32 %tok, %start, %j0", "mov.u32 %tok, %first"),
    // edges
    ("", "setp.ge.u32 %p, %next, %end", "setp.gt.u32 %p, %next, %end"),
    ("", "setp.ge.u32 %p, %next, %total", "setp.gt.u32 %p, %next, %total"),
    ("", "add.u32 %x, %j0, 127", "add.u32 %x, %j0, 111"),
    ("", "sub.u32 %x, %r, 1;", "sub.u32 %x, %r, 2;"),
    ("", "selp.f32 %s1, 0fFF800000, %s1, %p", "selp.f32 %s1, 0f00000000, %s1, %p"),
    ("", "setp.lt.u32 %in0, %x, %count", "setp.le.u32 %in0, %x, %count"),
    ("", "setp.lt.u32 %in1, %x, %count", "setp.le.u32 %in1, %x, %count"),
    // probabilities and sums
    ("", "max.f32 %big, %big, %other", "mov.f32 %big, %big"),
    ("", "max.f32 %big, %big, %v", "mov.f32 %big, %big"),
    ("", "mov.f32 %m1, %big", "mov.f32 %m1, %m1"),
    ("", "mul.f32 %l0, %l0, %shrink0", "mul.f32 %l0, %l0, %shrink1"),
    ("", "mul.f32 %acc1, %acc1, %shrink0", "mul.f32 %acc1, %acc1, %shrink1"),
    ("", "add.f32 %l1, %l1, %sum", "mov.f32 %l1, %l1"),
    ("", "cvt.rn.bf16x2.f32 %fp0, %s1, %s0", "cvt.rn.bf16x2.f32 %fp0, %s0, %s1"),
    ("", "add.f32 %l1, %l1, %other", "mov.f32 %l1, %l1"),
    ("", "fma.rn.f32 %v, %m0, %scale, %v", "mov.f32 %v, %v"),
    ("", "0f3F317218", "0f3F317318"),
    ("", "rcp.approx.f32 %m1, %l1", "rcp.approx.f32 %m1, %l0"),
    // stores
    ("", "mad.lo.u32 %y, %x, %hq, %head", "mad.lo.u32 %y, %x, %hq, %group"),
    ("", "st.global.f32 [%out1+4], %acc3", "st.global.f32 [%out1+4], %acc1"),
];

/// A window in which a warp's last query of some tile misses its first key alone.
const WINDOW: usize = 143;
/// The same for what only a window uses.
const WINDOWED: &[(&str, &str, &str)] = &[
    ("", "add.u32 %x, %tok, 1;", "add.u32 %x, %tok, 129;"),
    ("", "mov.f32 %m1, 0fFE800000", "mov.f32 %m1, 0fFF800000"),
    ("", "setp.gt.u32 %q, %x, %r", "setp.ge.u32 %q, %x, %r"),
    ("", "setp.ge.u32 %p, %x, %window", "setp.gt.u32 %p, %x, %window"),
];

/// Makes the changes for one head size; each must be detected.
fn all(size: usize) {
    let missed =
        [undetected_in((size, None), CHANGES), undetected_in((size, Some(WINDOW)), WINDOWED)].concat();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn undetected_in((size, window): (usize, Option<usize>), changes: &[(&str, &str, &str)]) -> Vec<String> {
    let (text, entry) = (files::read(FILE).text, format!("attention_sm90a_{size}"));
    let bits = |all: Vec<Vec<f32>>| all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let good = bits(exercise((size, window), device_of((9, 0), 0)).unwrap());
    let detects = |changed: &str| {
        [0, 1].into_iter().any(|seed| {
            let bad = exercise((size, window), device_with_at((9, 0), (FILE, changed), seed));
            bad.map_or(true, |bad| bits(bad) != good)
        })
    };
    // The first slot is always empty at the start.
    let mut missed = match window {
        None => marks::undetected((FILE, &entry), |m| m.label == "EMPTY", detects),
        Some(_) => Vec::new(),
    };
    let name = size.to_string();
    let here: Vec<_> = changes.iter().filter(|c| name.ends_with(c.0)).map(|c| (c.1, c.2)).collect();
    missed.extend(undetected((&text, &entry), &here, Places::All, detects));
    missed
}

#[test]
fn any_fault_in_attention_sm90a_64_is_detected() {
    all(64);
}

#[test]
fn any_fault_in_attention_sm90a_128_is_detected() {
    all(128);
}
