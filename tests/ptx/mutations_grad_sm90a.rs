//! The gradient of attention by wgmma with an injected fault, as `mutations_sm90a` for products: at every mark of every
//! entry; descriptors, coordinates, edges and masks are changed. Wasted work (a warpgroup without rows that multiplies)
//! changes no number and is not tested.

use crate::attention_grad_sm90a::{FILE, Problem, SIZES, beside, kernels, run};
use crate::bench::{ALIGNED, GUARD};
use crate::files;
use crate::interpreter::Kernel;
use crate::marks;
use crate::mutations_sm90a::{Places, undetected};
use std::sync::Arc;

/// Words of entry names (`q_`, `kv_64`), old text, and new text for each occurrence in these entries.
const EVERYWHERE: &[(&str, &str, &str)] = &[
    ("", "{%x, %y}", "{%y, %x}"),
    ("", "add.u32 %j0, %j0, ", "add.u32 %j0, %j0, 1"),
    ("", "setp.lt.u32 %p, %j0, %end", "setp.gt.u32 %p, %j0, %end"),
    ("kv_", "selp.u32 %j0, %j0, %first, %p", "selp.u32 %j0, %j0, %start, %p"),
    ("kv_", "setp.lt.u32 %p, %head, %lasthead", "setp.le.u32 %p, %head, %lasthead"),
    ("", "min.u32 %y, %x, %y", "mov.u32 %y, %x"),
];

/// The same for the first occurrence only.
const ONCE: &[(&str, &str, &str)] = &[
    // slots and parities
    ("", "mov.u32 %parity, 1", "mov.u32 %parity, 0"),
    ("", "mov.u32 %parity, 0", "mov.u32 %parity, 1"),
    ("", "selp.u32 %x, 1, 0, %p", "selp.u32 %x, 0, 0, %p"),
    ("", "and.b32 %base, %base, -1024", "and.b32 %base, %base, -512"),
    ("", "mul.wide.u32 %at, %slot, ", "mul.wide.u32 %at, %slot, 1"),
    ("", "mad.lo.u32 %to, %slot, ", "mad.lo.u32 %to, %slot, 1"),
    ("", "add.u32 %to, %to, 8192", "add.u32 %to, %to, 4096"),
    ("q_ kv_64", "setp.ne.u32 %pending, %t, %t", "setp.eq.u32 %pending, %lane, 0"),
    ("q_ kv_64", "and.pred %pending, %one, %one", "and.pred %pending, %one, %none"),
    ("q_ kv_64", "mov.u32 %last, %now", "mov.u32 %last, %bars"),
    // descriptors: the warpgroup's rows, strides, swizzle, steps of 16 terms, from one tile to the next
    ("", "shl.b32 %y, %wg, 13", "shl.b32 %y, %wg, 12"),
    ("", "add.u64 %ha, %ha, 0x4000004000010000", "add.u64 %ha, %ha, 0x4000002000010000"),
    ("", "add.u64 %ha, %ha, 0x4000004000010000", "add.u64 %ha, %ha, 0x8000004000010000"),
    ("", "add.u64 %along, %along, 0x4000004000010000", "add.u64 %along, %along, 0x4000008000010000"),
    ("q_64", "add.u64 %across, %across, 0x4000004004000000", "add.u64 %across, %across, 0x4000008004000000"),
    ("128", "add.u64 %across, %across, 0x4000004002000000", "add.u64 %across, %across, 0x4000008002000000"),
    ("128", "add.u64 %across, %across, 0x4000004002000000", "add.u64 %across, %across, 0x4000004001000000"),
    ("kv_64", "add.u64 %across, %across, 0x4000004002000000", "add.u64 %across, %across, 0x0000004002000000"),
    ("", "add.u64 %sa, %ha, 2", "add.u64 %sa, %ha, 4"),
    ("", "add.u64 %sb, %ta, 2", "add.u64 %sb, %ta, 1"),
    ("", "add.u64 %sa, %hb, 4", "add.u64 %sa, %hb, 2"),
    ("128", "add.u64 %sa, %ha, 1024", "add.u64 %sa, %ha, 8"),
    ("", "add.u64 %sb, %wa, 128", "add.u64 %sb, %wa, 64"),
    ("kv_64", "add.u64 %sb, %wb, 256", "add.u64 %sb, %wb, 128"),
    ("_64", "add.u64 %hb, %ha, 1024", "add.u64 %hb, %ha, 512"),
    ("128", "add.u64 %hb, %ha, 2048", "add.u64 %hb, %ha, 1024"),
    ("", "add.u64 %tb, %ta, ", "add.u64 %tb, %ta, 1"),
    ("", "add.u64 %wa, %across, %at", "mov.u64 %wa, %across"),
    ("", "%none, 1, 1, 0, 0", "%all, 1, 1, 0, 0"),
    ("", "%all, 1, 1, 0, 0", "%none, 1, 1, 0, 0"),
    ("", "%all, 1, 1, 0, 0", "%all, 1, 1, 0, 1"),
    ("", "%all, 1, 1, 1", "%all, 1, 1, 0"),
    ("", "%all, 1, 1, 1", "%none, 1, 1, 1"),
    ("", "{%fe0, %fe1, %fe2, %fe3}", "{%fe0, %fe2, %fe1, %fe3}"),
    // boxes, blocks, heads
    ("", "add.u32 %y, %first, 64", "add.u32 %y, %first, 0"),
    ("q_128", "add.u32 %x, %column, 64", "add.u32 %x, %column, 0"),
    ("kv_128", "add.u32 %x, %columnkv, 64", "add.u32 %x, %columnkv, 0"),
    ("q_128", "div.u32 %group, %head, %z", "mov.u32 %group, %head"),
    ("q_128", "sub.u32 %x, %x, 1", "sub.u32 %x, %x, 0"),
    ("kv_64", "mul.lo.u32 %head, %group, %z", "mov.u32 %head, %group"),
    ("kv_128", "add.u32 %lasthead, %head, %z", "add.u32 %lasthead, %head, 1"),
    // edges
    ("q_64", "setp.gt.s32 %skip, %j0, %seen", "setp.le.s32 %skip, %j0, %seen"),
    ("q_128", "setp.gt.s32 %skip, %j0, %seen", "setp.ge.s32 %skip, %j0, %held"),
    ("kv_64", "setp.lt.s32 %skip, %j0, %seen", "setp.ge.s32 %skip, %j0, %seen"),
    ("kv_128", "sub.u32 %seen, %held, 63", "add.u32 %seen, %held, 63"),
    ("", "setp.lt.u32 %in0, %x, %rows", "setp.le.u32 %in0, %x, %rows"),
    ("", "setp.lt.u32 %in1, %x, %rows", "setp.ne.u32 %in1, %x, %rows"),
    ("q_64", "add.u32 %x, %j0, 127", "add.u32 %x, %j0, 63"),
    ("q_128", "add.u32 %x, %j0, 63", "add.u32 %x, %j0, 0"),
    ("q_64", "sub.u32 %x, %r, 1;", "sub.u32 %x, %r, 2;"),
    ("q_128", "sub.u32 %x, %r, -7;", "sub.u32 %x, %r, 1;"),
    ("kv_64", "add.u32 %x, %held, 63; setp.ge.u32 %whole", "add.u32 %x, %held, 0; setp.ge.u32 %whole"),
    ("kv_128", "setp.le.u32 %p, %x, %y", "setp.ge.u32 %p, %x, %y"),
    ("kv_64", "sub.u32 %x, 1, %r;", "sub.u32 %x, 2, %r;"),
    // windows
    ("q_64", "add.u32 %x, %r, 1;", "add.u32 %x, %r, 129;"),
    ("q_128", "add.u32 %x, %r, 1;", "add.u32 %x, %r, 65;"),
    ("q_", "setp.le.u32 %p, %x, %held; or.pred", "setp.ge.u32 %p, %x, %held; or.pred"),
    ("q_", "setp.gt.u32 %p, %x, %y", "setp.ge.u32 %p, %x, %y"),
    ("", "setp.ge.u32 %p, %x, %window", "setp.gt.u32 %p, %x, %window"),
    ("kv_", "add.u32 %end, %end, %window", "mov.u32 %end, %end"),
    ("kv_", "setp.ge.u32 %p, %j0, %x; or.pred", "setp.le.u32 %p, %j0, %x; or.pred"),
    ("kv_", "min.u32 %y, %y, %stop", "mov.u32 %y, %stop"),
    ("kv_128", "setp.le.s32 %q, %limit, 1;", "setp.lt.s32 %q, %limit, 1;"),
    ("", "selp.f32 %s1, 0fFF800000, %s1, %p", "selp.f32 %s1, 0f00000000, %s1, %p"),
    ("q_64", "selp.f32 %e44, 0f00000000, %e44, %p", "mov.f32 %e44, %e44"),
    ("128 kv_64", "selp.f32 %e12, 0f00000000, %e12, %p", "mov.f32 %e12, %e12"),
    // scores
    ("", "mul.f32 %lse0, %lse0, 0fBFB8AA3B", "mul.f32 %lse0, %lse0, 0fBF317218"),
    ("kv_64", "idx.b32 %u, %lse1", "idx.b32 %u, %lse0"),
    ("kv_128", "idx.b32 %u, %delta1", "idx.b32 %u, %delta0"),
    ("kv_64", "add.u32 %x, %x, 32;", "add.u32 %x, %x, 31;"),
    ("q_64", "sub.f32 %e0, %e0, %delta0", "sub.f32 %e0, %e0, %delta1"),
    ("kv_64", "sub.f32 %e0, %e0, %u", "mov.f32 %e0, %e0"),
    ("", "mul.f32 %e0, %e0, %s0", "mov.f32 %e0, %e0"),
    ("", "cvt.rn.bf16x2.f32 %fe0, %e1, %e0", "cvt.rn.bf16x2.f32 %fe0, %e0, %e1"),
    ("", "mul.f32 %ga0, %ga0, %scale", "mov.f32 %ga0, %ga0"),
    // stores
    ("", "setp.ne.u32 %p, %x, 0; @%p bra SINGLES", "setp.lt.u32 %p, %x, 0; @%p bra SINGLES"),
    ("", "{%ga0, %ga1}", "{%ga1, %ga0}"),
    ("", "st.global.f32 [%out1+4], %ga3", "st.global.f32 [%out1+4], %ga1"),
    ("", "mul.wide.u32 %wide, %y, 8", "mul.wide.u32 %wide, %y, 4"),
];

/// A row beside non-finite values, which affect ds only: small, so that most changes are detected early. And packed
/// rows with a short last block; `laps`: every slot is filled twice. And a window in which a warpgroup's last query of some
/// tile misses its first key alone.
fn problems((which, size): (&str, usize), laps: bool) -> [Problem; 3] {
    let large = match (which, size, laps) {
        ("q", 64, true) => Problem::new((1, 1, 64), &[0, 5, 930]),
        ("q", 64, false) => Problem::new((1, 1, 64), &[0, 5, 560]),
        ("q", _, true) => Problem::new((1, 1, 128), &[0, 5, 530]),
        ("kv", 64, _) => Problem::new((4, 2, 64), &[0, 5, 290]),
        _ => Problem::new((2, 1, 128), &[0, 5, 290]),
    };
    let windowed = Problem::within((2, 1, size), &[0, 5, 400], Some(191));
    [beside(size, (if which == "q" { 2 } else { 3 }, f32::INFINITY)), large, windowed]
}

fn bits(x: &[Vec<f32>]) -> Vec<u32> {
    x.iter().flatten().map(|x| x.to_bits()).collect()
}

/// Makes the changes of the entries of one kernel, and injects the faults at marks if `places` is `Each`; each must be
/// detected.
fn every(which: &str, changes: &[(&str, &str, &str)], places: Places) {
    let (text, mut missed) = (files::read(FILE).text, Vec::new());
    let right = kernels(&text);
    for size in SIZES {
        let problems = problems((which, size), places == Places::Each);
        let on = |kernels: &[Arc<Kernel>], p, (seed, guard)| run(kernels, which, (p, guard, seed));
        let good = problems.each_ref().map(|p| bits(&on(&right, p, (0, GUARD)).unwrap()));
        let detects = |changed: &str| {
            let kernels = kernels(changed);
            problems.iter().zip(&good).any(|(p, good)| {
                let orders = [(0, ALIGNED), (1, GUARD)].into_iter();
                orders.map(|o| on(&kernels, p, o)).any(|bad| bad.map_or(true, |bad| bits(&bad) != *good))
            })
        };
        let name = format!("{which}_{size}");
        let here = changes.iter().filter(|c| c.0.split(' ').any(|part| name.contains(part)));
        let here: Vec<_> = here.map(|c| (c.1, c.2)).collect();
        let entry = format!("attention_grad_sm90a_{name}");
        if places == Places::Each {
            missed.extend(marks::undetected((FILE, &entry), |_| false, detects));
        }
        missed.extend(undetected((&text, &entry), &here, places, detects));
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn any_fault_in_the_order_of_the_query_gradient_is_detected() {
    every("q", EVERYWHERE, Places::Each);
}

#[test]
fn any_fault_in_the_order_of_the_key_gradient_is_detected() {
    every("kv", EVERYWHERE, Places::Each);
}

#[test]
fn any_changed_operand_of_the_query_gradient_is_detected() {
    every("q", ONCE, Places::First);
}

#[test]
fn any_changed_operand_of_the_key_gradient_is_detected() {
    every("kv", ONCE, Places::First);
}
