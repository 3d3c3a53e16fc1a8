//! Attention by wgmma, both directions: against the reference in f64 and the CPU as for sm_80; the shapes that use
//! it; and the trial that decides whether a card uses it.

use crate::attention_sm80::{both, inputs, like_its_reference};
use crate::bench::{Mat, Out, run};
use crate::device::{Interpreted, device_at, device_of, device_with_at};
use crate::files;
use crate::op_cases::tokens;
use finetune::backend::cuda::{AttentionTrial, Driver, Flash};
use finetune::backend::{Backend, Cuda, Heads, Qkv};

/// Shared heads and others.
const HEADS: [(usize, usize, usize); 3] = [(4, 2, 64), (1, 1, 128), (3, 1, 128)];
/// Rows of a microbatch: less than a tile, its edges, several packed; four tiles of keys, so that the ring wraps twice.
const ROWS: [&[u32]; 5] = [&[0, 1], &[0, 5, 38], &[0, 128, 257], &[0, 3, 150, 167], &[0, 2, 395]];

const BOTH: Flash = Flash { forward: true, backward: true };

fn device(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((9, 0), order).bf16().ok().map(|device| device.attending(BOTH));
    let device = device.filter(|device| device.flash() == BOTH);
    if device.is_none() {
        println!("skipped: no sm_90a");
    }
    device
}

#[test]
fn attention_by_wgmma_is_that_of_rounded_inputs() {
    if device(0).is_none() {
        return;
    }
    for (query, kv, size) in HEADS {
        for bounds in ROWS {
            if *bounds.last().unwrap() > 200 && query == 3 {
                continue; // the tiles of one head
            }
            let heads = Heads::new(query, kv, size);
            like_its_reference("attention by wgmma", |order| device(order).unwrap(), (heads, bounds), 128);
        }
    }
}

/// Windows of one token, within a tile, of a tile, and over several, in rows of more tiles than slots.
#[test]
fn windows_by_wgmma_are_those_of_rounded_inputs() {
    if device(0).is_none() {
        return;
    }
    for (size, window) in [(64, 1), (64, 128), (64, 200), (128, 60), (128, 129)] {
        let heads = Heads { window: Some(window), ..Heads::new(2, 1, size) };
        like_its_reference("attention by wgmma", |order| device(order).unwrap(), (heads, &[0, 2, 395]), 128);
    }
}

/// A fault in each direction's kernels, so that their use is visible in the results.
const FAULTS: [(&str, &str, &str); 2] = [
    ("attention_sm90a.ptx", "add.f32 %l1, %l1, %sum", "mov.f32 %l1, %l1"),
    ("attention_grad_sm90a.ptx", "0fBFB8AA3B", "0fBF317218"),
];

#[test]
fn each_direction_is_taken_for_itself_in_heads_of_64_and_128() {
    let bounds = [0, 4, 90];
    for size in [8, 72, 96, 64, 128] {
        let heads = Heads::new(2, 1, size);
        for flash in [(false, true), (true, false)].map(|(forward, backward)| Flash { forward, backward }) {
            let with = |device: Cuda<Interpreted>| {
                let mut device = device.bf16().unwrap().attending(flash);
                both(&mut device, &inputs(90, heads), heads, &bounds).unwrap()
            };
            let good = with(device_of((9, 0), 0));
            for (file, from, to) in FAULTS {
                let text = files::read(file).text;
                assert!(text.contains(from), "{file} has {from}");
                let bad = with(device_with_at((9, 0), (file, &text.replace(from, to)), 0));
                let of_file = if file.contains("grad") { flash.backward } else { flash.forward };
                let taken = of_file && [64, 128].contains(&size);
                assert_eq!(bad != good, taken, "{file}, heads of {size}, {flash:?}");
            }
        }
    }
}

/// A tile extends into the next packed row. A non-finite value there has no effect in q and k, and in v only if that
/// row's own outputs are not finite either.
#[test]
fn what_is_not_finite_in_another_row_is_seen_in_its_own() {
    let (heads, bounds, t) = (Heads::new(1, 1, 64), [0, 5, 38], 38);
    let out = |x: &[Mat; 4]| {
        let mut device = device_of((9, 0), 0).bf16().unwrap().attending(BOTH);
        let outs = [Out::Poison(t, 64), Out::Poison(t, 1)];
        let got = run("attention", &mut device, (&[&x[0], &x[1], &x[2]], &outs), |d, i, o| {
            let [out, lse] = o else { unreachable!() };
            let (tokens, qkv) = (tokens(d, &bounds), Qkv { q: i[0], k: i[1], v: i[2] });
            d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
        });
        got.unwrap().swap_remove(0)
    };
    let x = inputs(t, heads);
    let good = out(&x);
    for which in 0..3 {
        let mut x = x.clone();
        x[which].v[7 * 64 + 3] = f32::INFINITY;
        let got = out(&x);
        let (first, second) = got.split_at(5 * 64);
        assert!(which == 2 || first == &good[..5 * 64], "{which}: seen by another row");
        assert!(second.iter().any(|x| !x.is_finite()), "{which}: not seen in its own row");
    }
}

/// A trial small enough for the interpreter, with the speed-up that the card must have.
fn trial(faster: f64) -> AttentionTrial {
    AttentionTrial { timed: 2, heads: (2, 1), faster }
}

#[test]
fn attention_is_taken_where_it_agrees_and_is_faster() {
    let device = device_of((9, 0), 0).bf16().unwrap().attention_sm90a(trial(0.0));
    assert_eq!((device.attention_below(), device.flash()), (None, BOTH));
    assert_eq!(device.class(), "cuda-sm90-bf16-flash");
    assert_eq!(device.untried().class(), "cuda-sm90-bf16-wgmma-flash");
    let device = device_of((9, 0), 0).bf16().unwrap().attention_sm90a(trial(f64::INFINITY));
    let why = device.attention_below().unwrap();
    let asked = "mma at 2 tokens in heads of 64, and inf is asked";
    assert!(why.starts_with("forward: wgmma: ") && why.contains("; gradient: wgmma: "), "{why}");
    assert_eq!((why.matches(asked).count(), &device.class()[..]), (2, "cuda-sm90-bf16"), "{why}");
}

#[test]
fn a_trial_without_memory_decides_nothing_of_attention() {
    let device = device_of((9, 0), 0).bf16().unwrap().within(500_000);
    let mut device = device.attention_sm90a(trial(0.0));
    assert!(device.undecided() && device.attention_below().unwrap().contains("out of memory"));
    assert_eq!((&device.class()[..], device.driver().held()), ("cuda-sm90-bf16", 0));
    let mut device = device.within(u64::MAX).sm90a(small()).attention_sm90a(trial(0.0));
    assert_eq!((device.undecided(), device.attention_below()), (false, None));
    assert_eq!((device.driver().held(), device.traffic().made, device.peak()), (0, 0, Some(0)));
    assert_eq!(device.class(), "cuda-sm90-bf16-wgmma-flash");
}

/// For products.
fn small() -> finetune::backend::cuda::Trial {
    finetune::backend::cuda::Trial { timed: (128, 256, 64), faster: 0.0 }
}

#[test]
fn other_devices_are_not_asked_for_attention() {
    for capability in [(8, 0), (10, 0), (12, 1)] {
        let device = device_of(capability, 0).bf16().unwrap().attention_sm90a(trial(0.0));
        let class = format!("cuda-sm{}{}-bf16", capability.0, capability.1);
        assert_eq!((device.attention_below(), device.class()), (None, class.clone()));
        assert_eq!(device.attending(BOTH).class(), class);
    }
    let device = device_of((9, 0), 0).attention_sm90a(trial(0.0)).attending(BOTH);
    assert_eq!((device.attention_below(), &device.class()[..]), (None, "cuda-sm90-f32"));
}

/// A defect of a kernel, and the device's message; the other direction stays in use.
#[test]
fn attention_that_disagrees_is_named_and_left_aside() {
    let (forward, gradient) = ("attention_sm90a.ptx", "attention_grad_sm90a.ptx");
    let on = |file, text: &str| device_with_at((9, 0), (file, text), 0).bf16().unwrap();
    let changes = [
        (forward, "fma.rn.f32 %v, %m0, %scale, %v", "mov.f32 %v, %v", "forward: wgmma: logsumexp "),
        (forward, "mul.f32 %acc5, %acc5, %shrink0", "mul.f32 %acc5, %acc5, %shrink1", "forward: wgmma: out "),
        (forward, "wgmma.fence.sync.aligned;", "", "forward: interpreter: attention_sm90a"),
        (gradient, "0fBFB8AA3B", "0fBF317218", "gradient: wgmma: dq "),
        (gradient, "wgmma.fence.sync.aligned;", "", "gradient: interpreter: attention_grad_sm90a"),
    ];
    for (file, from, to, says) in changes {
        let text = files::read(file).text;
        assert!(text.contains(from), "{file} has {from}");
        let device: Cuda<Interpreted> = on(file, &text.replace(from, to)).attention_sm90a(trial(0.0));
        let why = device.attention_below().unwrap_or("nothing").to_string();
        assert!(why.contains(says), "{file}, {to}: {why}");
        let left = Flash { forward: file == gradient, backward: file == forward };
        assert_eq!(device.flash(), left, "{why}");
        assert_eq!(
            device.class(),
            format!("cuda-sm90-bf16-flash{}", if left.forward { "fwd" } else { "bwd" })
        );
    }
}
