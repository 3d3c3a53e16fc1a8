//! Kernels with an injected fault: each must be detected, as an error or by its numbers, else the tests of this
//! folder prove nothing. There is a fault at every mark of the generator (barrier, wait, group) and at every barrier
//! of a file by hand.

use crate::bench::{Mat, Out, run, weight};
use crate::delta_rule;
use crate::device::{Interpreted, device_of, device_with_at};
use crate::files;
use crate::fused;
use crate::marks;
use crate::op_cases::tokens;
use crate::skinny;
use finetune::backend::{
    Activation, AttentionSaved, Backend, Cuda, Fault, Heads, Product, Qkv, QkvGrad, Transpose, Write,
};
use finetune::numeric::dtype::Dtype;

/// The ops that run a changed kernel.
#[derive(Clone, Copy)]
enum Exercise {
    Matmul(Transpose),
    /// A product with few outputs across.
    Skinny(Transpose),
    /// Forward and backward, with a weight stored in this type.
    Linear(Dtype),
    /// Forward and backward, with heads of this size.
    Attention(usize),
    /// The same within a window, with heads of this size.
    Windowed(usize),
    CrossEntropy,
    /// The gradient of a delta rule.
    DeltaRule,
    Norm,
    /// Forward and backward on tensor cores.
    Tensor,
    /// The same on those of sm_70, with a weight stored in this type.
    TensorF16(Dtype),
    /// A projection with its adapter on tensor cores, forward and backward, with a rank larger than one part.
    Adapter,
    /// Attention and its gradient on tensor cores, with heads of this size.
    TensorAttention(usize),
    /// The same within a window, with heads of this size.
    TensorWindowed(usize),
    /// A norm whose copy in bf16 is read by a product.
    NormAhead,
    /// A gate whose copy in bf16 is read by a product.
    GateAhead(Activation),
    /// A rotation whose copy in bf16 is read by attention on tensor cores.
    RopeAhead,
}

use Exercise::{
    Adapter, Attention, CrossEntropy, DeltaRule, GateAhead, Linear, Matmul, Norm, NormAhead, RopeAhead,
    Skinny, Tensor, TensorAttention, TensorF16, TensorWindowed, Windowed,
};

type Outcome = Result<Vec<Vec<f32>>, Fault>;

impl Exercise {
    /// The device: only cards of sm_70 have its tensor cores.
    fn capability(self) -> (u32, u32) {
        if matches!(self, TensorF16(_)) { (7, 0) } else { (8, 0) }
    }

    fn on(self, device: Cuda<Interpreted>) -> Outcome {
        match self {
            Matmul(transpose) => matmul(device, transpose),
            Skinny(Transpose::Left) => skinny::slices(device.bf16()?),
            Skinny(transpose) => skinny::product(device.bf16()?, skinny::CHANGED, transpose, Write::Set),
            Linear(dtype) => linear(device, dtype),
            Attention(size) => attention(device, (size, 70), None),
            Windowed(size) => attention(device, (size, 70), Some(20)),
            Adapter => fused::projection(device.bf16().unwrap(), (65, 137, 200, 40), Write::Set),
            // Blocks of heads above 128 hold 64 queries, in tiles of 16 keys.
            TensorAttention(size) => {
                attention(device.bf16().unwrap(), (size, if size > 128 { 70 } else { 135 }), None)
            }
            // A warp's last query of some tile misses its first key alone.
            TensorWindowed(size) => attention(device.bf16().unwrap(), (size, 200), Some(95)),
            NormAhead => fused::normed(device.bf16().unwrap(), (9, 17, 300)),
            GateAhead(activation) => fused::activated(device.bf16().unwrap(), (9, 17, 300), activation),
            RopeAhead => fused::rotated(device.bf16().unwrap(), (33, 72)),
            CrossEntropy => cross_entropy(device),
            DeltaRule => delta_rule::gradients(device),
            Norm => norm(device),
            Tensor => linear(device.bf16().unwrap(), Dtype::Bf16),
            TensorF16(dtype) => linear(device.f16(), dtype),
        }
    }
}

fn matmul(mut device: Cuda<Interpreted>, transpose: Transpose) -> Outcome {
    let (a, b) = match transpose {
        Transpose::Neither => (Mat::random(65, 40, 1), Mat::random(40, 66, 2)),
        Transpose::Right => (Mat::random(65, 40, 1), Mat::random(66, 40, 2)),
        Transpose::Left => (Mat::random(40, 65, 1), Mat::random(40, 66, 2)),
    };
    run("matmul", &mut device, (&[&a, &b], &[Out::Poison(65, 66)]), |d, i, o| {
        let product = Product { a: i[0], b: i[1], transpose, scale: 2.0 };
        d.matmul(o[0].view_mut(), Write::Set, product);
    })
}

/// Every stage of every kernel is used twice.
fn linear(mut device: Cuda<Interpreted>, dtype: Dtype) -> Outcome {
    let (w, x, dy) = (Mat::random(137, 200, 2).coarse(), Mat::random(65, 200, 4), Mat::random(65, 137, 5));
    // Numbers that bf16 does not represent, so that f32 stays f32.
    let w = if dtype == Dtype::F32 { w.map(|x| x + 1e-4) } else { w };
    let outs = [Out::Poison(65, 137), Out::Poison(65, 200)];
    run("linear", &mut device, (&[&x, &dy], &outs), |d, i, o| {
        let [y, dx] = o else { unreachable!() };
        let w = weight(d, &w, dtype);
        d.linear(y.view_mut(), Write::Set, i[0], &w);
        d.linear_grad(dx.view_mut(), Write::Set, i[1], &w);
    })
}

fn attention(mut device: Cuda<Interpreted>, (size, t): (usize, usize), window: Option<usize>) -> Outcome {
    // Two query heads for one key head, and more tokens than two tiles.
    let heads = Heads { window, ..Heads::new(2, 1, size) };
    let (q, k, v) = (Mat::random(t, 2 * size, 1), Mat::random(t, size, 2), Mat::random(t, size, 3));
    let dout = Mat::random(t, 2 * size, 4);
    let outs = [2 * size, 2, 2 * size, size, size].map(|c| Out::Poison(t, c));
    run("attention", &mut device, (&[&q, &k, &v, &dout], &outs), |d, i, o| {
        let [out, lse, dq, dk, dv] = o else { unreachable!() };
        let tokens = tokens(d, &[0, t as u32]);
        let qkv = Qkv { q: i[0], k: i[1], v: i[2] };
        d.attention(out.view_mut(), lse.view_mut(), qkv, heads, &tokens);
        let saved = AttentionSaved { qkv, out: out.view(), logsumexp: lse.view() };
        let grad = QkvGrad { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
        d.attention_grad(grad, i[3], saved, heads, &tokens);
    })
}

fn cross_entropy(mut device: Cuda<Interpreted>) -> Outcome {
    let logits = Mat::random(3, 700, 1);
    run("cross_entropy", &mut device, (&[], &[Out::Poison(3, 1), Out::Holds(logits)]), |d, _, o| {
        let [losses, logits] = o else { unreachable!() };
        let targets = d.ids(&[5, 699, 300]);
        d.cross_entropy(losses.view_mut(), logits.view_mut(), &targets, None);
    })
}

fn norm(mut device: Cuda<Interpreted>) -> Outcome {
    let (x, gain) = (Mat::random(5, 70, 1), Mat::random(1, 70, 2));
    run("rmsnorm", &mut device, (&[&x, &gain], &[Out::Poison(5, 70), Out::Poison(5, 1)]), |d, i, o| {
        let [out, inv] = o else { unreachable!() };
        d.rmsnorm(out.view_mut(), inv.view_mut(), i[0], i[1], 1e-5);
    })
}

/// File, changed entries, and the ops that run them: every entry with a statement that orders others.
const ORDERED: &[(&str, &[&str], Exercise)] = &[
    ("matmul.ptx", &["matmul_nn"], Matmul(Transpose::Neither)),
    ("matmul.ptx", &["matmul_nt"], Matmul(Transpose::Right)),
    ("matmul.ptx", &["matmul_tn"], Matmul(Transpose::Left)),
    ("skinny.ptx", &["skinny_rows_nt"], Skinny(Transpose::Right)),
    ("skinny.ptx", &["skinny_rows_nn"], Skinny(Transpose::Neither)),
    ("skinny.ptx", &["skinny_columns"], Skinny(Transpose::Left)),
    ("linear.ptx", &["linear_f32"], Linear(Dtype::F32)),
    ("linear.ptx", &["linear_bf16"], Linear(Dtype::Bf16)),
    ("linear.ptx", &["linear_f16"], Linear(Dtype::F16)),
    ("linear_grad.ptx", &["linear_grad_f32"], Linear(Dtype::F32)),
    ("linear_grad.ptx", &["linear_grad_bf16"], Linear(Dtype::Bf16)),
    ("linear_grad.ptx", &["linear_grad_f16"], Linear(Dtype::F16)),
    ("attention.ptx", &["attention_64"], Attention(20)),
    ("attention.ptx", &["attention_128"], Attention(68)),
    ("attention.ptx", &["attention_256"], Attention(132)),
    ("attention_grad.ptx", &["attention_grad_q_64", "attention_grad_kv_64"], Attention(20)),
    ("attention_grad.ptx", &["attention_grad_q_128", "attention_grad_kv_128"], Attention(68)),
    ("attention_grad.ptx", &["attention_grad_q_256", "attention_grad_kv_256"], Attention(132)),
    ("cross_entropy.ptx", &["cross_entropy"], CrossEntropy),
    ("delta_rule.ptx", &["delta_rule_back", "delta_rule_forth"], DeltaRule),
    ("product_sm70.ptx", &["product_sm70_nt_f32", "product_sm70_nn_f32"], TensorF16(Dtype::F32)),
    ("product_sm70.ptx", &["product_sm70_nt_bf16", "product_sm70_nn_bf16"], TensorF16(Dtype::Bf16)),
    ("product_sm70.ptx", &["product_sm70_nt_f16", "product_sm70_nn_f16"], TensorF16(Dtype::F16)),
    ("product_sm80.ptx", &["product_sm80_nt", "product_sm80_nn"], Tensor),
    ("lora_linear_sm80.ptx", &["lora_linear_sm80_nt", "lora_linear_sm80_nn"], Adapter),
    ("attention_sm80.ptx", &["attention_sm80_64"], TensorAttention(16)),
    ("attention_sm80.ptx", &["attention_sm80_96"], TensorAttention(72)),
    ("attention_sm80.ptx", &["attention_sm80_128"], TensorAttention(104)),
    ("attention_sm80.ptx", &["attention_sm80_256"], TensorAttention(136)),
    (
        "attention_grad_sm80.ptx",
        &["attention_grad_sm80_q_64", "attention_grad_sm80_kv_64"],
        TensorAttention(16),
    ),
    (
        "attention_grad_sm80.ptx",
        &["attention_grad_sm80_q_96", "attention_grad_sm80_kv_96"],
        TensorAttention(72),
    ),
    (
        "attention_grad_sm80.ptx",
        &["attention_grad_sm80_q_128", "attention_grad_sm80_kv_128"],
        TensorAttention(104),
    ),
    (
        "attention_grad_wide_sm80.ptx",
        &[
            "attention_grad_wide_sm80_q_256",
            "attention_grad_wide_sm80_k_256",
            "attention_grad_wide_sm80_v_256",
        ],
        TensorAttention(136),
    ),
];

/// File, entry, old text, new text; the first occurrence after the entry's name is replaced.
const CHANGES: &[(&str, &str, &str, &str, Exercise)] = &[
    ("matmul.ptx", "matmul_nn", "and.b32 %tx, %t, 15", "and.b32 %tx, %t, 7", Matmul(Transpose::Neither)),
    ("matmul.ptx", "matmul_nn", "mov.f32 %acc0, 0f00000000", "", Matmul(Transpose::Neither)),
    ("matmul.ptx", "matmul_nn", "and.pred %q, %q, %ina0", "", Matmul(Transpose::Neither)),
    (
        "matmul.ptx",
        "matmul_nn",
        "sub.s32 %left, %left, 16",
        "sub.s32 %left, %left, 15",
        Matmul(Transpose::Neither),
    ),
    (
        "matmul.ptx",
        "matmul_nn",
        "ld.shared.v4.f32 {%a0, %a1",
        "ld.shared.v4.f32 {%a1, %a0",
        Matmul(Transpose::Neither),
    ),
    (
        "matmul.ptx",
        "matmul_nn",
        "and.pred %q, %p, %col0;\n    @%q st",
        "and.pred %q, %p, %p;\n    @%q st",
        Matmul(Transpose::Neither),
    ),
    ("matmul.ptx", "matmul_nn", "@!%full bra EDGE", "", Matmul(Transpose::Neither)),
    ("matmul.ptx", "matmul_nn", "and.b32 %x, %x, 15", "and.b32 %x, %x, 3", Matmul(Transpose::Neither)),
    ("attention.ptx", "attention_64", "sub.u32 %c, %r, 8", "sub.u32 %c, %r, 9", Attention(20)),
    (
        "attention.ptx",
        "attention_64",
        "setp.ge.u32 %p, %c, %window",
        "setp.gt.u32 %p, %c, %window",
        Windowed(20),
    ),
    ("attention.ptx", "attention_64", "add.u32 %x, %seen, 1", "add.u32 %x, %seen, 33", Windowed(20)),
    ("attention.ptx", "attention_64", "mov.f32 %m1, 0fFE800000", "mov.f32 %m1, 0fFF800000", Windowed(20)),
    (
        "attention_grad.ptx",
        "attention_grad_q_64",
        "setp.ge.u32 %p, %c, %window",
        "setp.gt.u32 %p, %c, %window",
        Windowed(20),
    ),
    (
        "attention_grad.ptx",
        "attention_grad_q_64",
        "add.u32 %x, %seen, 1",
        "add.u32 %x, %seen, 33",
        Windowed(20),
    ),
    (
        "attention_grad.ptx",
        "attention_grad_kv_64",
        "setp.ge.u32 %p, %x, %window",
        "setp.gt.u32 %p, %x, %window",
        Windowed(20),
    ),
    (
        "attention_grad.ptx",
        "attention_grad_kv_64",
        "add.u32 %end, %end, %window",
        "mov.u32 %end, %end",
        Windowed(20),
    ),
    (
        "attention.ptx",
        "attention_64",
        "fma.rn.f32 %l0, %l0, %shrink, %v",
        "add.f32 %l0, %l0, %v",
        Attention(20),
    ),
    ("attention.ptx", "attention_64", ", 4, 31", ", 2, 31", Attention(20)),
    (
        "attention_grad.ptx",
        "attention_grad_kv_64",
        "setp.lt.u32 %p, %head, %last",
        "setp.lt.u32 %p, %last, %head",
        Attention(20),
    ),
    (
        "attention_grad.ptx",
        "attention_grad_delta",
        "setp.eq.u32 %p, %lane, 0",
        "setp.ge.u32 %p, %lane, 0",
        Attention(20),
    ),
    ("cross_entropy.ptx", "cross_entropy", "add.u32 %i, %i, 256", "add.u32 %i, %i, 255", CrossEntropy),
    ("cross_entropy.ptx", "cross_entropy", "@%first st", "st", CrossEntropy),
    ("product_sm70.ptx", "product_sm70_nn_f32", "%g0, %lift", "%g0, %g0", TensorF16(Dtype::F32)),
    ("product_sm70.ptx", "product_sm70_nt_bf16", "{0, %b3}", "{%b3, 0}", TensorF16(Dtype::Bf16)),
    ("product_sm70.ptx", "product_sm70_nn_f16", "{%b4, %b5}", "{%b5, %b4}", TensorF16(Dtype::F16)),
    (
        "product_sm70.ptx",
        "product_sm70_nt_f16",
        "sub.s32 %left, %left, 32",
        "sub.s32 %left, %left, 31",
        TensorF16(Dtype::F16),
    ),
    ("product_sm70.ptx", "product_sm70_nn_f32", "%column;\n    mul", "%p;\n    mul", TensorF16(Dtype::F32)),
    (
        "product_sm70.ptx",
        "product_sm70_nt_bf16",
        "add.u32 %y, %lb, %use",
        "mov.u32 %y, %lb",
        TensorF16(Dtype::Bf16),
    ),
    (
        "product_sm70.ptx",
        "product_sm70_nn_bf16",
        "wmma.load.b.sync.aligned.row",
        "wmma.load.b.sync.aligned.col",
        TensorF16(Dtype::Bf16),
    ),
    ("product_sm80.ptx", "product_sm80_nt", "@!%full bra EDGE4", "", Tensor),
    ("product_sm80.ptx", "product_sm80_nt", "min.s32 %real, %real, %keepa1", "mov.u32 %real, 8", Tensor),
    ("product_sm80.ptx", "product_sm80_nt", "{%fb0, %fb1}", "{%fb1, %fb0}", Tensor),
    ("product_sm80.ptx", "product_sm80_nt", "xor.b32 %y, %y, %z", "or.b32 %y, %y, %z", Tensor),
    (
        "lora_linear_sm80.ptx",
        "lora_linear_sm80_nt",
        "min.u32 %chunk, %rest, 32",
        "min.u32 %chunk, %rest, 31",
        Adapter,
    ),
    ("lora_linear_sm80.ptx", "lora_linear_sm80_nn", "{%right0, %right1}", "{%right1, %right0}", Adapter),
    ("lora_linear_sm80.ptx", "lora_linear_sm80_nn", "and.pred %p, %p, %q", "", Adapter),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "sub.u32 %x, %r, 1;",
        "sub.u32 %x, %r, 2;",
        TensorAttention(16),
    ),
    ("attention_sm80.ptx", "attention_sm80_64", "mul.f32 %acc0, %acc0, %shrink", "", TensorAttention(16)),
    (
        "attention_sm80.ptx",
        "attention_sm80_96",
        "{%b0, %b1, %b2, %b3}",
        "{%b0, %b2, %b1, %b3}",
        TensorAttention(72),
    ),
    ("attention_sm80.ptx", "attention_sm80_96", "xor.b32 %x, %x, %y", "mov.u32 %x, %y", TensorAttention(72)),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "sub.u32 %x, 1, %r;",
        "sub.u32 %x, 2, %r;",
        TensorAttention(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "add.u32 %nhead, %head, 1",
        "add.u32 %nhead, %head, 2",
        TensorAttention(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_128",
        "sub.f32 %e0, %e0, %delta0",
        "",
        TensorAttention(104),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_96",
        "xor.b32 %use, %use, 12288",
        "",
        TensorAttention(72),
    ),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "setp.le.u32 %p, %x, %wfirst;\n    or.pred",
        "setp.ge.u32 %p, %x, %wfirst;\n    or.pred",
        TensorWindowed(16),
    ),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "setp.gt.u32 %q, %x, %r",
        "setp.ge.u32 %q, %x, %r",
        TensorWindowed(16),
    ),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "setp.ge.u32 %p, %x, %window",
        "setp.gt.u32 %p, %x, %window",
        TensorWindowed(16),
    ),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "mov.f32 %m3, 0fFE800000",
        "mov.f32 %m3, 0fFF800000",
        TensorWindowed(16),
    ),
    (
        "attention_sm80.ptx",
        "attention_sm80_64",
        "add.u32 %x, %next, 1",
        "add.u32 %x, %next, 65",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_64",
        "setp.le.u32 %p, %x, %held;\n    or.pred",
        "setp.ge.u32 %p, %x, %held;\n    or.pred",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_64",
        "setp.gt.u32 %q, %x, %y",
        "setp.ge.u32 %q, %x, %y",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_64",
        "setp.ge.u32 %p, %x, %window",
        "setp.gt.u32 %p, %x, %window",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_q_64",
        "add.u32 %x, %next, 1",
        "add.u32 %x, %next, 65",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "setp.ge.u32 %p, %j0, %x;\n    or.pred",
        "setp.le.u32 %p, %j0, %x;\n    or.pred",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "setp.lt.u32 %q, %x, %y",
        "setp.le.u32 %q, %x, %y",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "setp.ge.u32 %p, %x, %window",
        "setp.gt.u32 %p, %x, %window",
        TensorWindowed(16),
    ),
    (
        "attention_grad_sm80.ptx",
        "attention_grad_sm80_kv_64",
        "add.u32 %end, %end, %window",
        "mov.u32 %end, %end",
        TensorWindowed(16),
    ),
    (
        "attention_grad_wide_sm80.ptx",
        "attention_grad_wide_sm80_q_256",
        "+65536]",
        "+32768]",
        TensorAttention(136),
    ),
    (
        "attention_grad_wide_sm80.ptx",
        "attention_grad_wide_sm80_k_256",
        "sub.f32 %e0, %e0, %delta0",
        "",
        TensorAttention(136),
    ),
    (
        "attention_grad_wide_sm80.ptx",
        "attention_grad_wide_sm80_v_256",
        "{%fs0, %fs1, %fs2, %fs3}",
        "{%fs0, %fs2, %fs1, %fs3}",
        TensorAttention(136),
    ),
    ("rmsnorm_sm80.ptx", "rmsnorm_sm80", "add.u64 %copy, %copy, 64", "add.u64 %copy, %copy, 128", NormAhead),
    ("rmsnorm_sm80.ptx", "rmsnorm_sm80", "%group, %stride", "%group, %size", NormAhead),
    (
        "rmsnorm_sm80.ptx",
        "rmsnorm_sm80",
        "st.global.b16 [%copy], %h",
        "st.global.b16 [%copy], %rest",
        NormAhead,
    ),
    ("rmsnorm_sm80.ptx", "rmsnorm_sm80", ", 4, 31", ", 2, 31", NormAhead),
    ("gated_sm80.ptx", "gated_sm80", "%r, %stride", "%r, %cols", GateAhead(Activation::SwiGlu)),
    (
        "gated_sm80.ptx",
        "gated_sm80",
        "setp.ge.u32 %beyond",
        "setp.gt.u32 %beyond",
        GateAhead(Activation::SwiGlu),
    ),
    ("gated_sm80.ptx", "gated_sm80", "st.global.b16 [%copy], %h", "", GateAhead(Activation::SwiGlu)),
    (
        "gated_sm80.ptx",
        "gated_sm80",
        "fma.rn.f32 %s, %cube, %s, %line",
        "mov.f32 %s, %line",
        GateAhead(Activation::GeGlu),
    ),
    ("rope_sm80.ptx", "rope_sm80", "%apart, %half, 2", "%apart, %half, 4", RopeAhead),
    ("rope_sm80.ptx", "rope_sm80", "%both, 0f00000000, %v", "%both, 0f00000000, %u", RopeAhead),
    ("rope_sm80.ptx", "rope_sm80", "%t, %stride", "%t, %size", RopeAhead),
    ("rmsnorm.ptx", "rmsnorm", ", 16, 31", ", 8, 31", Norm),
    ("rmsnorm.ptx", "rmsnorm", "setp.lt.u32 %more", "setp.le.u32 %more", Norm),
];

/// Whether a changed file gives an error, or other numbers than the correct one.
fn detects(file: &'static str, exercise: Exercise) -> impl Fn(&str) -> bool {
    let bits = |all: Vec<Vec<f32>>| all.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let good = bits(exercise.on(device_of(exercise.capability(), 0)).unwrap());
    move |changed| {
        [0, 1].into_iter().any(|seed| {
            let bad = exercise.on(device_with_at(exercise.capability(), (file, changed), seed));
            bad.map_or(true, |bad| bits(bad) != good)
        })
    }
}

/// Begin and end of an entry's text.
pub fn of_entry(text: &str, entry: &str) -> (usize, usize) {
    let from = text.find(&format!(".entry {entry}(")).unwrap_or_else(|| panic!("no entry {entry}"));
    (from, text[from..].find("\n}").map_or(text.len(), |n| from + n))
}

/// The barriers of an entry by hand whose removal is not detected.
fn undetected_by_hand((file, entry): (&str, &str), detects: impl Fn(&str) -> bool) -> Vec<String> {
    const BARRIER: &str = "bar.sync 0;";
    let text = files::read(file).text;
    let (from, to) = of_entry(&text, entry);
    let without = |at: usize| format!("{}{}", &text[..at], &text[at + BARRIER.len()..]);
    let places = text[from..to].match_indices(BARRIER).map(|(at, _)| from + at);
    let missed = places.enumerate().filter(|(_, at)| !detects(&without(*at)));
    missed.map(|(n, _)| format!("{entry}: barrier {n} goes undetected")).collect()
}

#[test]
fn removing_any_barrier_or_wait_is_detected() {
    let mut missed = Vec::new();
    for (file, entries, exercise) in ORDERED {
        let detects = detects(file, *exercise);
        for entry in *entries {
            // Attention on tensor cores ends with a wait for an empty group.
            let tensor = file.starts_with("attention") && file.ends_with("_sm80.ptx");
            let last = marks::of_entry(file, entry).last().filter(|_| tensor);
            missed.extend(match files::is_generated(file) {
                true => marks::undetected((file, entry), |m| Some(m) == last, &detects),
                false => undetected_by_hand((file, entry), &detects),
            });
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
fn every_entry_with_a_barrier_or_wait_is_listed() {
    let listed: Vec<&str> = ORDERED.iter().flat_map(|(_, entries, _)| entries.iter().copied()).collect();
    // The entries of sm_90a have separate lists.
    for file in files::all().into_iter().filter(|f| f.target != "90a") {
        let entries = file.text.split(".entry ").skip(1).filter_map(|rest| rest.split_once('('));
        for (entry, body) in entries {
            let orders = match files::is_generated(&file.name) {
                true => marks::of_entry(&file.name, entry).next().is_some(),
                false => body.contains("bar."),
            };
            assert!(!orders || listed.contains(&entry), "{}: {entry} is not in the list", file.name);
        }
    }
}

#[test]
fn any_changed_operand_is_detected() {
    for (file, entry, from, to, exercise) in CHANGES {
        let text = files::read(file).text;
        let (start, _) = of_entry(&text, entry);
        let at = start + text[start..].find(from).unwrap_or_else(|| panic!("{entry} has {from}"));
        let end = if to.is_empty() { at + from.len() + 1 } else { at + from.len() };
        let changed = format!("{}{to}{}", &text[..at], &text[end..]);
        assert!(detects(file, *exercise)(&changed), "{entry}: {to:?} for {from:?} goes undetected");
    }
}
