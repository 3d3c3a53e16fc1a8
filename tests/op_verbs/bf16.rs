//! bf16 beside the cases of tests/op_cases: an adapter's factors against the f64 formula of the rounded ones, the two
//! kernels against each other, bit for bit, a head, settled memory, numbers that are not finite.

use crate::fused::{headed, projected};
use crate::op_cases::{Mat, bounds, close, tokens, weight};
use finetune::backend::{AttentionSaved, Backend, Cpu, Heads, Qkv, QkvGrad, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;

fn rounded(m: &Mat) -> Mat {
    m.map(|x| half::bf16::from_f32(x as f32).to_f64())
}

pub fn bits(x: &[Vec<f32>]) -> Vec<u32> {
    x.iter().flatten().map(|v| v.to_bits()).collect()
}

/// y and dx of a frozen product, written or added to `old`.
fn products(mut cpu: Cpu, [x, dy, w]: [&Mat; 3], write: Write, dtype: Dtype) -> Vec<Vec<f32>> {
    let (t, n, k) = (x.rows, w.rows, w.cols);
    let [mut mx, mut mdy, mut y, mut dx] = [t * k, t * n, t * n, t * k].map(|len| cpu.memory(len));
    cpu.upload(view_mut(&mut mx, t, k), &x.f32s());
    cpu.upload(view_mut(&mut mdy, t, n), &dy.f32s());
    if write == Write::Add {
        cpu.copy(view_mut(&mut y, t, n), view(&mdy, t, n));
        cpu.copy(view_mut(&mut dx, t, k), view(&mx, t, k));
    }
    let w = weight(&mut cpu, w, dtype);
    cpu.linear(view_mut(&mut y, t, n), write, view(&mx, t, k), &w);
    cpu.linear_grad(view_mut(&mut dx, t, k), write, view(&mdy, t, n), &w);
    [(y, t * n), (dx, t * k)]
        .map(|(m, len)| {
            let mut out = vec![0.0; len];
            cpu.read(view(&m, 1, len), &mut out).unwrap();
            out
        })
        .to_vec()
}

#[test]
fn subnormals_count_as_zero_and_non_finite_values_stay() {
    let mut x = Mat::random(3, 40, 1);
    (x.v[0], x.v[41], x.v[82]) = (1e-39, f64::INFINITY, f64::NAN);
    let (dy, mut w) = (Mat::random(3, 33, 2), Mat::random(33, 40, 3));
    w.v[3] = 1e-40;
    let go = |cpu: Cpu| products(cpu.poisoning(), [&x, &dy, &w], Write::Set, Dtype::F32);
    let got = go(Cpu::bf16(1));
    assert!(got[0][..33].iter().all(|v| v.is_finite()));
    assert!(got[0][33..66].iter().all(|v| !v.is_finite()) && got[0][66..].iter().all(|v| v.is_nan()));
    if let Some(reference) = Cpu::bf16_reference(1) {
        assert!(bits(&go(reference)[..1])[..33] == bits(&got[..1])[..33]);
    }
}

/// Each value is near the expected one, or, if a factor was halfway between two bf16 numbers, within the rounding of
/// all its terms; and most values are near.
fn near_but_for_ties(name: &str, got: &[f32], want: &Mat, terms: &Mat) {
    let largest = want.v.iter().fold(0.02f64, |m, v| m.max(v.abs()));
    let off = |i: usize| (f64::from(got[i]) - want.v[i]).abs();
    let far = (0..got.len()).filter(|&i| off(i) > 4e-6 * largest).count();
    assert!(far * 50 <= got.len().max(50), "{name}: {far} of {} are off", got.len());
    for (i, (got, terms)) in got.iter().zip(&terms.v).enumerate() {
        assert!(off(i) <= terms / 256.0 + 4e-6 * largest, "{name}: {got} for {}", want.v[i]);
    }
}

/// x, A, B, dy, the matrix that y and dx are added to, and the frozen matrix: operands of lora_linear and its gradient.
struct Adapted<'a>([&'a Mat; 6], Write);

fn twice(m: Mat) -> Mat {
    m.map(|v| v * 2.0)
}

impl Adapted<'_> {
    /// The sum of the old y or dx, if it is kept, and two products.
    fn sum(&self, old: &Mat, a: Mat, b: Mat) -> Vec<f64> {
        let old = |i: usize| if self.1 == Write::Add { old.v[i] } else { 0.0 };
        (0..a.v.len()).map(|i| old(i) + a.v[i] + b.v[i]).collect()
    }

    /// y, h, dx, dA and dB if only the frozen products are rounded.
    fn exact(&self) -> [Vec<f64>; 5] {
        let [x, a, b, dy, before, w] = self.0;
        let (h, dh) = (x.mul(&a.t()), twice(dy.mul(b)));
        [
            self.sum(dy, rounded(x).mul(&w.t()), twice(h.mul(&b.t()))),
            h.v.clone(),
            self.sum(before, rounded(dy).mul(w), dh.mul(a)),
            dh.t().mul(x).v,
            twice(dy.t().mul(&h)).v,
        ]
    }

    /// Intermediate matrices are rounded too; they are f32 if the rank is too large for one pass.
    fn check_rounded(&self, name: &str, got: &[Vec<f32>]) {
        let [x, a, b, dy, before, w] = self.0;
        let [rx, ra, rb, rdy] = [x, a, b, dy].map(rounded);
        let h = Mat { rows: x.rows, cols: a.rows, v: got[1].iter().map(|&v| f64::from(v)).collect() };
        let dh = twice(rdy.mul(&rb));
        let kept = |m: &Mat| if a.rows > 768 { m.clone() } else { rounded(m) };
        let (hs, dhs) = (kept(&twice(h.clone())), kept(&dh));
        close(&format!("{name} h"), &got[1], &rx.mul(&ra.t()).v, 4e-6);
        let y = self.sum(dy, rx.mul(&w.t()), hs.mul(&kept(b).t()));
        close(&format!("{name} y"), &got[0], &y, 4e-6);
        close(&format!("{name} dB"), &got[4], &twice(rdy.t().mul(&rounded(&h))).v, 4e-6);
        let size = |m: &Mat| m.map(f64::abs);
        let v = self.sum(before, rdy.mul(w), dhs.mul(&kept(a)));
        let dx = Mat { rows: x.rows, cols: x.cols, v };
        near_but_for_ties(&format!("{name} dx"), &got[2], &dx, &size(&dhs).mul(&size(a)));
        let (da, terms) = (rounded(&dh).t().mul(&rx), size(&dh).t().mul(&size(&rx)));
        near_but_for_ties(&format!("{name} dA"), &got[3], &da, &terms);
    }
}

#[test]
fn adapter_factors_are_rounded_beside_a_bf16_product() {
    for (t, k, r, n) in
        [(1, 3, 1, 5), (17, 64, 8, 33), (129, 577, 16, 192), (600, 100, 3, 800), (9, 40, 800, 50)]
    {
        for (dtype, write) in [(Dtype::Bf16, Write::Set), (Dtype::F16, Write::Add)] {
            let name = format!("bf16 lora_linear {t}x{k}x{r}x{n} {dtype:?} {write:?}");
            let (x, a, b) = (Mat::random(t, k, 1), Mat::random(r, k, 2), Mat::random(n, r, 3));
            let (dy, before, w) =
                (Mat::random(t, n, 4), Mat::random(t, k, 6), rounded(&Mat::random(n, k, 5)));
            let all = [&x, &a, &b, &dy, &before, &w];
            let go = |cpu: Cpu| projected(&mut cpu.poisoning(), &all, dtype, write);
            let got = go(Cpu::bf16(2));
            for threads in [1, 3, 7] {
                assert!(bits(&go(Cpu::bf16(threads))) == bits(&got), "{name}: {threads} threads");
            }
            if let Some(reference) = Cpu::bf16_reference(2) {
                assert!(bits(&go(reference)) == bits(&got), "{name}: the other kernel");
            }
            let (slow, of) = (go(Cpu::bf16(1).spelled()), Adapted(all, write));
            // If the gemm crate multiplies, adapters stay f32.
            let crates = Cpu::bf16(1).short_bytes() == 4;
            for (i, want) in of.exact().iter().enumerate() {
                close(&format!("{name} output {i} spelled"), &slow[i], want, 4e-6);
                if crates {
                    close(&format!("{name} output {i}"), &got[i], want, 4e-6);
                }
            }
            if !crates {
                of.check_rounded(&name, &got);
            }
        }
    }
}

#[test]
fn bf16_head_is_near_f32_and_equal_on_every_kernel() {
    for (n, c, vocab) in [(1, 3, 33), (301, 41, 2999), (13, 800, 300), (600, 31, 2049)] {
        let name = format!("bf16 head {n}x{c}x{vocab}");
        let w = rounded(&Mat::random(vocab, c, 2));
        let logits = Mat::random(n, c, 1).mul(&w.t());
        let by = 8.0 / logits.v.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        let x = rounded(&Mat::random(n, c, 1).map(|v| v * by)).f32s();
        let targets: Vec<u32> = (0..n).map(|i| (i * 977 % vocab) as u32).collect();
        let go = |cpu: Cpu| headed(&mut cpu.poisoning(), (&x, &w), &targets);
        let (got, exact) = (go(Cpu::bf16(2)), go(Cpu::new(2)));
        // The factors of the logits are bf16 numbers already, so the losses equal those of f32.
        assert_eq!(got[0], exact[0], "{name}: losses");
        assert_eq!(got[0], got[2], "{name}: the loss alone");
        // Probabilities are rounded, by 2^-9 of each on average, so of their sum, times weights of size one.
        for (a, b) in got[1].iter().zip(&exact[1]) {
            assert!((a - b).abs() <= 1.0 / 500.0, "{name}: dx {a}, in f32 {b}");
        }
        for threads in [1, 3, 9] {
            assert!(bits(&go(Cpu::bf16(threads))) == bits(&got), "{name}: {threads} threads");
        }
        if let Some(reference) = Cpu::bf16_reference(2) {
            assert!(bits(&go(reference)) == bits(&got), "{name}: the other kernel");
        }
    }
}

/// dq, dk, dv with q, k, v and out in 32 bits, or settled.
fn attention_grad(x: [&Mat; 5], lse: &Mat, heads: Heads, settled: bool) -> Vec<Vec<f32>> {
    let mut cpu = Cpu::bf16(2).poisoning();
    let (t, wide, narrow) = (x[0].rows, x[0].cols, x[1].cols);
    let mut up = |m: &Mat| {
        let mut memory = cpu.memory(m.v.len());
        cpu.upload(view_mut(&mut memory, m.rows, m.cols), &m.f32s());
        memory
    };
    let ([mut q, mut k, mut v, mut out, dout], lse) = (x.map(&mut up), up(lse));
    if settled {
        [q, k, v, out] = [(q, wide), (k, narrow), (v, narrow), (out, wide)].map(|(m, n)| cpu.settle(m, t, n));
    }
    let [mut dq, mut dk, mut dv] = [wide, narrow, narrow].map(|n| cpu.memory(t * n));
    let tokens = tokens(&mut cpu, &bounds(t));
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    let saved = AttentionSaved { qkv, out: view(&out, t, wide), logsumexp: view(&lse, t, heads.query) };
    let grad = QkvGrad {
        dq: view_mut(&mut dq, t, wide),
        dk: view_mut(&mut dk, t, narrow),
        dv: view_mut(&mut dv, t, narrow),
    };
    cpu.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
    let read = |(m, n): (_, usize)| {
        let mut out = vec![0.0; t * n];
        cpu.read(view(&m, t, n), &mut out).unwrap();
        out
    };
    [(dq, wide), (dk, narrow), (dv, narrow)].map(read).into()
}

#[test]
fn settled_attention_has_the_gradient_of_rounded_numbers() {
    for (t, (query, kv, size)) in [(1, (1, 1, 4)), (17, (3, 3, 34)), (129, (2, 1, 6)), (200, (2, 2, 10))] {
        let heads = Heads::new(query, kv, size);
        let random = |heads: usize, key: u64| rounded(&Mat::random(t, heads * size, key));
        let [q, k, v, dout] =
            [(query, 1), (kv, 2), (kv, 3), (query, 4)].map(|(heads, key)| random(heads, key));
        // Any numbers serve as the output of attention.
        let (out, lse) = (random(query, 5), Mat::random(t, query, 6).map(|x| x + 3.0));
        let go = |settled| attention_grad([&q, &k, &v, &out, &dout], &lse, heads, settled);
        assert!(bits(&go(true)) == bits(&go(false)), "T={t} {heads:?}");
    }
}

#[test]
fn single_token_has_the_bits_of_a_token_in_a_batch() {
    for (r, n, k) in [(1, 3, 1), (16, 577, 100), (3, 100, 1537), (16, 1536, 576), (385, 40, 33)] {
        let [x, a, b, dy, before, w] = [(5, k), (r, k), (n, r), (5, n), (5, k), (n, k)]
            .map(|(rows, cols)| Mat::random(rows, cols, (rows * 7 + cols) as u64));
        for make in [Cpu::new, Cpu::bf16] {
            for (dtype, write) in
                [(Dtype::Bf16, Write::Set), (Dtype::F16, Write::Add), (Dtype::F32, Write::Set)]
            {
                let y = |rows: std::ops::Range<usize>| {
                    let cut = |m: &Mat| {
                        let v = m.v[rows.start * m.cols..rows.end * m.cols].to_vec();
                        Mat { rows: rows.len(), cols: m.cols, v }
                    };
                    let (x, dy, before) = (cut(&x), cut(&dy), cut(&before));
                    projected(&mut make(2).poisoning(), &[&x, &a, &b, &dy, &before, &w], dtype, write)[0]
                        .clone()
                };
                let alone = [y(0..1), y(1..3), y(3..5)].concat();
                assert!(bits(&[y(0..5)]) == bits(&[alone]), "{r} {n}x{k} {dtype:?}");
            }
        }
    }
}

#[test]
fn class_names_its_precision() {
    let class = Cpu::bf16(1).class();
    assert!(class.ends_with("-bf16") && class[..class.len() - 5] == Cpu::new(1).class()[..class.len() - 5]);
    assert_ne!(Cpu::bf16(1).spelled().class(), Cpu::new(1).class());
}
