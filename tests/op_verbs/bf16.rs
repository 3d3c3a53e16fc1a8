//! Products in bf16, frozen ones and those of adapters: against the f64 formula of the rounded factors (the only errors
//! are f32 sums), against the formula of the exact factors (each is off by 2^-8 at most), and the two kernels against
//! each other, bit for bit.

use crate::bench::{Mat, close};
use crate::fused::{headed, projected};
use crate::products::weight;
use crate::rows::{bounds, tokens};
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

const SIZES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (1, 5, 3),
    (3, 7, 33),
    (17, 65, 129),
    (129, 31, 515),
    (17, 577, 100),
    (130, 100, 1100),
    (300, 192, 48),
    (1, 576, 1537),
    (2, 1537, 576),
];

#[test]
fn products_match_rounded_factors_on_every_kernel() {
    for (t, n, k) in SIZES {
        for (write, dtype) in [(Write::Set, Dtype::Bf16), (Write::Add, Dtype::F32)] {
            let name = format!("bf16 {t}x{n}x{k} {write:?} {dtype:?}");
            let (x, dy, w) = (Mat::random(t, k, 1), Mat::random(t, n, 2), Mat::random(n, k, 3));
            let go = |cpu: Cpu| products(cpu.poisoning(), [&x, &dy, &w], write, dtype);
            let got = go(Cpu::bf16(2));
            for threads in [1, 3, 7] {
                assert!(bits(&go(Cpu::bf16(threads))) == bits(&got), "{name}: {threads} threads");
            }
            if let Some(twin) = Cpu::bf16_twin(2) {
                assert!(bits(&go(twin)) == bits(&got), "{name}: the other kernel");
            }
            let old = |m: &Mat| if write == Write::Add { m.v.clone() } else { vec![0.0; m.v.len()] };
            let sum = |a: Vec<f64>, b: Mat| -> Vec<f64> { a.iter().zip(&b.v).map(|(a, b)| a + b).collect() };
            let (rx, rdy, rw) = (rounded(&x), rounded(&dy), rounded(&w));
            let (y, dx) = (sum(old(&dy), rx.mul(&rw.t())), sum(old(&x), rdy.mul(&rw)));
            close(&format!("{name} forward"), &got[0], &y, 2e-6);
            close(&format!("{name} backward"), &got[1], &dx, 2e-6);
            let slow = go(Cpu::bf16(1).spelled());
            close(&format!("{name} forward, crate"), &slow[0], &y, 2e-6);
            close(&format!("{name} backward, crate"), &slow[1], &dx, 2e-6);
            // Each factor is off by at most 2^-8 of itself, 2^-9 on average, in k terms of size one: 2^-8 of their sum.
            let (y, dx) = (sum(old(&dy), x.mul(&w.t())), sum(old(&x), dy.mul(&w)));
            for (what, got, want, terms) in [("forward", &got[0], y, k), ("backward", &got[1], dx, n)] {
                let bound = (terms as f64 + 4.0) / 256.0;
                let off = got.iter().zip(&want).map(|(&g, w)| (f64::from(g) - w).abs()).fold(0.0, f64::max);
                assert!(off <= bound, "{name} {what}: {off} of {bound}");
            }
        }
    }
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
    if let Some(twin) = Cpu::bf16_twin(1) {
        assert!(bits(&go(twin)[..1])[..33] == bits(&got[..1])[..33]);
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
            if let Some(twin) = Cpu::bf16_twin(2) {
                assert!(bits(&go(twin)) == bits(&got), "{name}: the other kernel");
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
        if let Some(twin) = Cpu::bf16_twin(2) {
            assert!(bits(&go(twin)) == bits(&got), "{name}: the other kernel");
        }
    }
}

/// out, logsumexp, dq, dk, dv of attention by the formula, and the sums of the absolute values of the terms of out, dq,
/// dk and dv: the error from rounding one factor of each term is proportional to them.
fn attended([q, k, v, dout]: [&Mat; 4], heads: Heads, bounds: &[u32]) -> ([Mat; 5], [Mat; 4]) {
    let (d, group, scale) = (heads.size, heads.query / heads.kv, 1.0 / (heads.size as f64).sqrt());
    let like = |x: &Mat| Mat::zeros(x.rows, x.cols);
    let (mut out, mut lse) = (like(q), Mat::zeros(q.rows, heads.query));
    let (mut dq, mut dk, mut dv) = (like(q), like(k), like(v));
    let mut sizes = [like(q), like(q), like(k), like(v)];
    for (h, w) in (0..heads.query).flat_map(|h| bounds.windows(2).map(move |w| (h, w))) {
        let (qo, ko) = (h * d, h / group * d);
        let dot = |a: &Mat, i: usize, ao: usize, b: &Mat, j: usize, bo: usize| -> f64 {
            (0..d).map(|c| a.at(i, ao + c) * b.at(j, bo + c)).sum()
        };
        for i in w[0] as usize..w[1] as usize {
            let keys = w[0] as usize..=i;
            let scores: Vec<f64> = keys.clone().map(|j| scale * dot(q, i, qo, k, j, ko)).collect();
            let most = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
            *lse.at_mut(i, h) = most + sum.ln();
            let p: Vec<f64> = scores.iter().map(|s| (s - most).exp() / sum).collect();
            let dp: Vec<f64> = keys.clone().map(|j| dot(dout, i, qo, v, j, ko)).collect();
            let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for ((j, p), dp) in keys.zip(p).zip(dp) {
                let ds = scale * p * (dp - delta);
                for c in 0..d {
                    let terms = [
                        (&mut out, 0, (i, qo + c), p * v.at(j, ko + c)),
                        (&mut dq, 1, (i, qo + c), ds * k.at(j, ko + c)),
                        (&mut dk, 2, (j, ko + c), ds * q.at(i, qo + c)),
                        (&mut dv, 3, (j, ko + c), p * dout.at(i, qo + c)),
                    ];
                    for (to, which, (row, col), term) in terms {
                        *to.at_mut(row, col) += term;
                        *sizes[which].at_mut(row, col) += term.abs();
                    }
                }
            }
        }
    }
    ([out, lse, dq, dk, dv], sizes)
}

/// out, logsumexp, and the gradients for the given out and logsumexp. With `settled`, q, k, v and out are settled
/// first.
fn attention(
    mut cpu: Cpu,
    x: [&Mat; 4],
    saved: [&Mat; 2],
    (heads, settled): (Heads, bool),
    bounds: &[u32],
) -> Vec<Vec<f32>> {
    let mut up = |m: &Mat| {
        let mut memory = cpu.memory(m.v.len());
        cpu.upload(view_mut(&mut memory, m.rows, m.cols), &m.f32s());
        memory
    };
    let [q, k, v, dout] = x.map(&mut up);
    let [mut out, lse] = saved.map(&mut up);
    let (t, wide, narrow) = (x[0].rows, x[0].cols, x[1].cols);
    let [mut o, mut dq] = [t * wide; 2].map(|len| cpu.memory(len));
    let [mut l, mut dk, mut dv] = [t * heads.query, t * narrow, t * narrow].map(|len| cpu.memory(len));
    let tokens = tokens(&mut cpu, bounds);
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    cpu.attention(view_mut(&mut o, t, wide), view_mut(&mut l, t, heads.query), qkv, heads, &tokens);
    let (mut q, mut k, mut v) = (q, k, v);
    if settled {
        [q, k, v, out] = [(q, wide), (k, narrow), (v, narrow), (out, wide)].map(|(m, n)| cpu.settle(m, t, n));
    }
    let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
    let grad = QkvGrad {
        dq: view_mut(&mut dq, t, wide),
        dk: view_mut(&mut dk, t, narrow),
        dv: view_mut(&mut dv, t, narrow),
    };
    let saved = AttentionSaved { qkv, out: view(&out, t, wide), logsumexp: view(&lse, t, heads.query) };
    cpu.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
    [(o, t * wide), (l, t * heads.query), (dq, t * wide), (dk, t * narrow), (dv, t * narrow)]
        .map(|(m, len)| {
            let mut out = vec![0.0; len];
            cpu.read(view(&m, 1, len), &mut out).unwrap();
            out
        })
        .to_vec()
}

#[test]
fn bf16_attention_is_near_its_formula_on_every_kernel() {
    for (query, kv, size) in [(1, 1, 4), (2, 1, 6), (3, 3, 34), (9, 3, 64), (4, 2, 128), (2, 2, 10)] {
        for t in [1, 2, 3, 17, 97, 129, 200, 650] {
            if t > 100 && query * size > 300 || t > 600 && size != 6 {
                continue; // the formula is slow
            }
            let heads = Heads { query, kv, size };
            let name = format!("bf16 attention T={t} {query}/{kv}x{size}");
            // Rows of odd lengths, one after the other: pairs start again in each row.
            let bounds = if t > 600 { vec![0, t as u32] } else { bounds(t) };
            let random = |heads: usize, key: u64| rounded(&Mat::random(t, heads * size, key));
            let q = random(query, 1).map(|v| v * 4.0);
            let (k, v, dout) = (random(kv, 2), random(kv, 3), random(query, 4));
            let (want, sizes) = attended([&q, &k, &v, &dout], heads, &bounds);
            let saved = [want[0].map(|v| v), want[1].map(|v| v)];
            let go = |cpu: Cpu| {
                attention(
                    cpu.poisoning(),
                    [&q, &k, &v, &dout],
                    [&saved[0], &saved[1]],
                    (heads, false),
                    &bounds,
                )
            };
            let short = |settled| {
                let (cpu, saved) = (Cpu::bf16(2).poisoning(), [&rounded(&saved[0]), &saved[1]]);
                attention(cpu, [&q, &k, &v, &dout], saved, (heads, settled), &bounds)
            };
            assert!(bits(&short(true)) == bits(&short(false)), "{name}: settled");
            let got = go(Cpu::bf16(2));
            for threads in [1, 3, 7] {
                assert!(bits(&go(Cpu::bf16(threads))) == bits(&got), "{name}: {threads} threads");
            }
            if let Some(twin) = Cpu::bf16_twin(2) {
                assert!(bits(&go(twin)) == bits(&got), "{name}: the other kernel");
            }
            let slow = go(Cpu::bf16(1).spelled());
            for got in [&got, &slow] {
                // Scores are products of numbers that bf16 represents exactly.
                close(&format!("{name} logsumexp"), &got[1], &want[1].v, 3e-6);
                // Probabilities and their gradients are rounded: 2^-8 of each term at most.
                for (which, of) in [("out", 0), ("dq", 2), ("dk", 3), ("dv", 4)] {
                    let size = &sizes[if of == 0 { 0 } else { of - 1 }];
                    for ((&got, want), size) in got[of].iter().zip(&want[of].v).zip(&size.v) {
                        let off = (f64::from(got) - want).abs();
                        assert!(off <= size / 256.0 + 1e-5, "{name} {which}: {got}, not {want} of {size}");
                    }
                }
            }
        }
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
