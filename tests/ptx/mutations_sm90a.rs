//! The kernels of sm_90a with an injected fault, as `mutations` for the others: at every mark (barrier, fence,
//! arrival, wait, copy), in every entry; fields of descriptors, coordinates of boxes, counts and edges are changed.
//! Only an increase by setmaxnreg is not tested here: ptxas checks that registers suffice.

use crate::bench::{ALIGNED, GUARD, Mat, Out, run_behind, weight};
use crate::device::{Interpreted, device_of, device_with_at};
use crate::files;
use crate::marks;
use crate::mutations::of_entry;
use finetune::backend::{Backend, Cuda, Fault, Fused, LoraGrad, LoraPart, Write};
use finetune::numeric::dtype::Dtype;

const T: usize = 140;
const N: usize = 270;
const K: usize = 340;

type Outcome = Result<Vec<Vec<f32>>, Fault>;

/// Runs an entry: more tiles than the interpreter has multiprocessors, more steps than stages, and a rank of more
/// than one part.
fn exercise(entry: &str, device: Cuda<Interpreted>) -> Outcome {
    let (forward, mut device) = (entry.ends_with("nt"), device.untried());
    if entry.starts_with("lora") {
        return adapter(&mut device, forward);
    }
    let (w, from, to) =
        (Mat::random(N, K, 2).coarse(), if forward { K } else { N }, if forward { N } else { K });
    let mut all = Vec::new();
    for guard in [ALIGNED, GUARD] {
        let (x, outs) = (Mat::random(T, from, 4), [Out::Poison(T, to)]);
        all.extend(run_behind(guard, "linear", &mut device, (&[&x], &outs), |d, i, o| {
            let w = weight(d, &w, Dtype::Bf16);
            match forward {
                true => d.linear(o[0].view_mut(), Write::Set, i[0], &w),
                false => d.linear_grad(o[0].view_mut(), Write::Set, i[0], &w),
            }
        })?);
    }
    Ok(all)
}

fn adapter(device: &mut Cuda<Interpreted>, forward: bool) -> Outcome {
    let (w, r) = (Mat::random(N, K, 2).coarse(), 17);
    let (a, b, h) = (Mat::random(r, K, 6), Mat::random(N, r, 7), Mat::random(T, r, 8));
    let (x, dy) = (Mat::random(T, K, 4), Mat::random(T, N, 5));
    let held = |cols| Out::Holds(Mat::random(T, cols, 9));
    let outs =
        if forward { vec![held(N), Out::Poison(T, r)] } else { vec![held(K), Out::Poison(1, r * (N + K))] };
    run_behind(ALIGNED, "lora", device, (&[&x, &dy, &a, &b, &h], &outs), |d, i, o| {
        let [out, other] = o else { unreachable!() };
        let (w, ab) = (weight(d, &w, Dtype::Bf16), (i[2], i[3]));
        if forward {
            let lora = LoraPart { h: other.view_mut(), x: i[0], ab, scale: 0.5 };
            return d.lora_linear((out.view_mut(), Write::Add), i[0], &w, lora);
        }
        let args = LoraGrad { dab: other.view_mut(), dy: i[1], x: i[0], h: i[4], ab, scale: 0.5 };
        d.lora_linear_grad((out.view_mut(), Write::Add), &w, args);
    })
}

const ENTRIES: [(&str, &str); 4] = [
    ("product_sm90a.ptx", "product_sm90a_nt"),
    ("product_sm90a.ptx", "product_sm90a_nn"),
    ("lora_linear_sm90a.ptx", "lora_linear_sm90a_nt"),
    ("lora_linear_sm90a.ptx", "lora_linear_sm90a_nn"),
];

/// The end of entry names, a text that occurs once in these entries, and the new text.
const ONCE: &[(&str, &str, &str)] = &[
    // counts, parities, stages
    ("", "mov.u32 %parity, 1", "mov.u32 %parity, 0"),
    ("", "mov.u32 %parity, 0", "mov.u32 %parity, 1"),
    ("", "selp.u32 %x, 1, 0, %p", "selp.u32 %x, 0, 0, %p"),
    ("", "and.b32 %base, %base, -1024", "and.b32 %base, %base, -512"),
    // descriptors: the warpgroup's rows, strides, swizzle, steps of K
    ("", "mad.lo.u32 %x, %group, 8192, %base", "mad.lo.u32 %x, %group, 4096, %base"),
    ("", "add.u64 %da, %da, 0x4000004000010000", "add.u64 %da, %da, 0x4000002000010000"),
    ("", "add.u64 %da, %da, 0x4000004000010000", "add.u64 %da, %da, 0x8000004000010000"),
    ("nt", "add.u64 %db, %db, 0x4000004000010000", "add.u64 %db, %db, 0x4000008000010000"),
    ("nn", "add.u64 %db, %db, 0x4000004002000000", "add.u64 %db, %db, 0x4000008002000000"),
    ("nn", "add.u64 %db, %db, 0x4000004002000000", "add.u64 %db, %db, 0x4000004001000000"),
    ("nn", "add.u64 %db, %db, 0x4000004002000000", "add.u64 %db, %db, 0x0000004002000000"),
    ("", "add.u64 %sa, %sa, 2", "add.u64 %sa, %sa, 4"),
    ("nt", "add.u64 %sb, %sb, 2", "add.u64 %sb, %sb, 1"),
    ("nn", "add.u64 %sb, %sb, 128", "add.u64 %sb, %sb, 64"),
    ("", "mul.wide.u32 %wide, %stage, 3072", "mul.wide.u32 %wide, %stage, 3000"),
    ("nt", "%first, 1, 1, 0, 0", "%first, 1, 1, 0, 1"),
    ("nn", "%first, 1, 1, 0, 1", "%first, 1, 1, 0, 0"),
    ("", "setp.ne.u32 %first, %step, 0", "setp.ne.u32 %first, %step, 1"),
    ("", "setp.eq.u32 %all, %t, %t", "setp.ne.u32 %all, %t, %t"),
    // boxes
    ("", "{%k0, %m0}", "{%m0, %k0}"),
    ("nt", "{%k0, %n0}", "{%n0, %k0}"),
    ("nn", "{%n0, %k0}", "{%k0, %n0}"),
    ("nn", "add.u32 %x, %n0, 192", "add.u32 %x, %n0, 128"),
    // tiles
    ("", "shl.b32 %n0, %n0, 8", "shl.b32 %n0, %n0, 7"),
    ("", "add.u32 %tilesm, %m, 127", "add.u32 %tilesm, %m, 0"),
    ("", "add.u32 %steps, %k, 63", "add.u32 %steps, %k, 127"),
    ("", "add.u32 %k0, %k0, 64", "add.u32 %k0, %k0, 65"),
    // edges
    (
        "",
        "%x, 8; setp.lt.u32 %p, %k0, %m; add.u32 %k0, %y, 0; setp.lt.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
        "%x, 8; setp.le.u32 %p, %k0, %m; add.u32 %k0, %y, 0; setp.lt.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
    ),
    (
        "nt",
        "%y, 9; setp.lt.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
        "%y, 9; setp.ne.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
    ),
    (
        "nn",
        "%y, 81; setp.lt.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
        "%y, 81; setp.ne.u32 %q, %k0, %n; and.pred %q, %q, %p; @%q st",
    ),
    ("", "setp.le.u32 %full, %x, %m", "setp.ge.u32 %full, %x, %m"),
    ("", "add.u32 %x, %n0, 256; setp.le.u32 %p, %x, %n", "add.u32 %x, %n0, 256; setp.ge.u32 %p, %x, %n"),
    ("", "add.f32 %old3, %acc5, %old3", "add.f32 %old3, %acc4, %old3"),
    ("", "st.global.f32 [%row+4], %old1", "st.global.f32 [%row+4], %old0"),
];

/// For products only: adapters are tested with aligned outputs only.
const PRODUCT: &[(&str, &str)] =
    &[("setp.eq.u32 %p, %x, 0; and.pred %full", "setp.ge.u32 %p, %x, 0; and.pred %full")];

/// For the adapter's part.
const ADAPTER: &[(&str, &str)] = &[
    ("min.u32 %chunk, %rest, 16", "min.u32 %chunk, %rest, 15"),
    ("{%right0, %right1}", "{%right1, %right0}"),
    ("add.u32 %col2, %n0, 64", "add.u32 %col2, %n0, 0"),
    ("and.pred %p, %p, %q", "and.pred %p, %p, %p"),
    ("mul.f32 %v, %low0, %by", "mul.f32 %v, %low1, %by"),
    ("ld.shared.f32 %left1, [%pm+32]", "ld.shared.f32 %left1, [%pm+28]"),
];

/// The words of `from`, one per line, as in the text.
fn lines(x: &str) -> String {
    x.replace("; ", ";\n    ")
}

/// Whether the changed file gives an error, or other numbers than `good`.
fn differs(file: &'static str, text: &str, entry: &str, good: &[Vec<f32>]) -> bool {
    [0, 1].into_iter().any(|seed| {
        match exercise(entry, device_with_at((9, 0), (file, text), seed).bf16().unwrap()) {
            Err(_) => true,
            Ok(bad) => {
                bad.iter().flatten().map(|x| x.to_bits()).ne(good.iter().flatten().map(|x| x.to_bits()))
            }
        }
    })
}

/// The occurrences of a text that are changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Places {
    /// One after the other.
    Each,
    First,
    /// All of them at once.
    All,
}

/// Makes the changes of one entry; returns the undetected ones.
pub fn undetected(
    (text, entry): (&str, &str),
    changes: &[(&str, &str)],
    places: Places,
    detects: impl Fn(&str) -> bool,
) -> Vec<String> {
    let ((start, end), mut missed) = (of_entry(text, entry), Vec::new());
    for (from, to) in changes {
        let (from, to) = (lines(from), lines(to));
        let found: Vec<usize> = text[start..end].match_indices(&from).map(|(i, _)| start + i).collect();
        assert!(!found.is_empty(), "{entry} has {from}");
        let one = |at: &usize| format!("{}{to}{}", &text[..*at], &text[at + from.len()..]);
        let changed: Vec<String> = match places {
            Places::Each => found.iter().map(one).collect(),
            Places::First => found.iter().take(1).map(one).collect(),
            Places::All => {
                let all = text[start..end].replace(&from, &to);
                vec![format!("{}{all}{}", &text[..start], &text[end..])]
            }
        };
        for (n, changed) in changed.iter().enumerate() {
            if !detects(changed) {
                missed.push(format!("{entry}: {to:?} for {from:?} goes undetected, place {n}"));
            }
        }
    }
    missed
}

/// Whether a changed file of an entry gives an error or other numbers.
fn detects(file: &'static str, entry: &str) -> impl Fn(&str) -> bool {
    let good = exercise(entry, device_of((9, 0), 0).bf16().unwrap()).unwrap();
    move |changed| differs(file, changed, entry, &good)
}

fn order(index: usize) {
    let (file, entry) = ENTRIES[index];
    let missed = marks::undetected((file, entry), |_| false, detects(file, entry));
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn once(index: usize) {
    let (file, entry) = ENTRIES[index];
    let here = ONCE.iter().filter(|c| entry.ends_with(c.0)).map(|c| (c.1, c.2));
    let more = if entry.starts_with("lora") { ADAPTER } else { PRODUCT };
    let changes: Vec<_> = here.chain(more.iter().copied()).collect();
    let text = files::read(file).text;
    let missed = undetected((&text, entry), &changes, Places::First, detects(file, entry));
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn any_fault_in_the_order_of_product_nt_is_detected() {
    order(0);
}

#[test]
fn any_fault_in_the_order_of_product_nn_is_detected() {
    order(1);
}

#[test]
fn any_fault_in_the_order_of_lora_linear_nt_is_detected() {
    order(2);
}

#[test]
fn any_fault_in_the_order_of_lora_linear_nn_is_detected() {
    order(3);
}

#[test]
fn any_changed_operand_of_the_products_is_detected() {
    once(0);
    once(1);
}

#[test]
fn any_changed_operand_of_the_adapters_is_detected() {
    once(2);
    once(3);
}
