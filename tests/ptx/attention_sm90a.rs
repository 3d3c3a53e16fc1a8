//! Attention by wgmma, both directions: against the twin in f64 and the CPU as that of sm_80, what takes it, and the
//! trial that decides whether a card does.

use crate::attention_sm80::{both, inputs, within};
use crate::bench::close;
use crate::device::{Interpreted, device_at, device_of, device_with_at};
use crate::files;
use crate::twin::Case;
use finetune::backend::cpu::Cpu;
use finetune::backend::cuda::{AttentionTrial, Cuda, Driver, Flash};
use finetune::backend::{Backend, Heads};

/// Shared heads and not.
const HEADS: [(usize, usize, usize); 3] = [(4, 2, 64), (1, 1, 128), (3, 1, 128)];
/// Rows of a microbatch: less than a tile, its edges, several packed; four tiles of keys, so that the ring turns twice.
const ROWS: [&[u32]; 5] = [&[0, 1], &[0, 5, 38], &[0, 128, 257], &[0, 3, 150, 167], &[0, 2, 395]];

const BOTH: Flash = Flash { forward: true, backward: true };

fn device(order: u64) -> Option<Cuda<Box<dyn Driver>>> {
    let device = device_at((9, 0), order).bf16().ok()?.attending(BOTH);
    let takes = device.flash() == BOTH;
    if !takes {
        println!("skipped: no sm_90a");
    }
    takes.then_some(device)
}

#[test]
fn attention_by_wgmma_is_that_of_rounded_inputs() {
    for (query, kv, size) in HEADS {
        for bounds in ROWS {
            let (heads, t) = (Heads { query, kv, size }, *bounds.last().unwrap() as usize);
            if t > 200 && query == 3 {
                continue; // the tiles of one head
            }
            let name = format!("attention by wgmma {bounds:?} {query}/{kv}x{size}");
            let x = inputs(t, heads);
            let rounded = x.clone().map(|m| m.map(|v| half::bf16::from_f32(v).to_f32()));
            let on = |x, order| Some(both(&mut device(order)?, x, heads, bounds));
            let Some(got) = on(&rounded, 0) else { return };
            let got = got.unwrap_or_else(|e| panic!("{name}: {e}"));
            for order in [1, 3] {
                assert!(
                    on(&rounded, order).unwrap().unwrap() == got,
                    "{name}: the order of warps changes bits"
                );
            }
            let case = Case { x: &rounded, heads, bounds, step: 128 };
            let forward = case.forward();
            within(&format!("{name} out"), &got[0], &forward[0]);
            within(&format!("{name} logsumexp"), &got[1], &forward[1]);
            let backward = case.backward(&got[0], &got[1]);
            for ((what, got), want) in ["dq", "dk", "dv"].iter().zip(&got[2..]).zip(&backward) {
                within(&format!("{name} {what}"), got, want);
            }
            let want = both(&mut Cpu::new(1), &x, heads, bounds).unwrap();
            for (got, want) in on(&x, 0).unwrap().unwrap().iter().zip(&want) {
                close(&format!("{name} of f32"), got, want, 1.5e-2);
            }
        }
    }
}

/// Every direction for itself, and heads of 64 and 128 alone.
#[test]
fn what_is_not_taken_has_the_bits_of_mma() {
    let bounds = [0, 4, 90];
    let with = |flash, size| {
        let heads = Heads { query: 2, kv: 1, size };
        let mut device = device_of((9, 0), 0).bf16().unwrap().attending(flash);
        both(&mut device, &inputs(90, heads), heads, &bounds).unwrap()
    };
    for size in [8, 72, 96] {
        assert!(with(BOTH, size) == with(Flash::default(), size), "{size}: other bits");
    }
    for size in [64, 128] {
        let old = with(Flash::default(), size);
        for (forward, backward) in [(true, false), (false, true), (true, true)] {
            let new = with(Flash { forward, backward }, size);
            assert_eq!(new[..2] != old[..2], forward, "{size}: out and logsumexp");
            assert!(new[2..] != old[2..], "{size}: the gradient, of another out or by other kernels");
        }
    }
}

/// A trial that the interpreter ends in a test's time, of a card that must be so much faster.
fn trial(faster: f64) -> AttentionTrial {
    AttentionTrial { timed: 2, faster }
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
    let device = device_of((9, 0), 0).bf16().unwrap().within(1_500_000);
    let mut device = device.attention_sm90a(trial(0.0));
    assert!(device.undecided() && device.attention_below().unwrap().contains("out of memory"));
    assert_eq!((&device.class()[..], device.driver().held()), ("cuda-sm90-bf16", 0));
    let mut device = device.within(u64::MAX).sm90a(small()).attention_sm90a(trial(0.0));
    assert_eq!((device.undecided(), device.attention_below()), (false, None));
    assert_eq!((device.driver().held(), device.traffic().made, device.peak()), (0, 0, Some(0)));
    assert_eq!(device.class(), "cuda-sm90-bf16-wgmma-flash");
}

/// Of products.
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

/// What a kernel does wrong, and what the device says of it; only that direction stays.
#[test]
fn attention_that_disagrees_is_named_and_left_aside() {
    let (forward, gradient) = ("attention_sm90a.ptx", "attention_grad_sm90a.ptx");
    let on = |file, text: &str| device_with_at((9, 0), (file, text), 0).bf16().unwrap();
    let changes = [
        // A sum of probabilities, a product, the ring, an order, the last head's size alone.
        (forward, "add.f32 %l1, %l1, %sum", "add.f32 %l1, %l1, %v", "forward: wgmma: logsumexp "),
        (forward, "mul.f32 %acc5, %acc5, %shrink0", "mul.f32 %acc5, %acc5, %shrink1", "forward: wgmma: out "),
        (forward, "selp.u32 %x, 1, 0, %p", "selp.u32 %x, 0, 0, %p", "forward: "),
        (forward, "wgmma.fence.sync.aligned;", "", "forward: interpreter: attention_sm90a"),
        (gradient, "ex2.approx.ftz.f32", "abs.f32", "gradient: wgmma: dq "),
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
