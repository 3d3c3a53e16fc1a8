//! A variant is used on a device only after its results were correct there: products and rows against formulas in f64
//! on the host, flash attention against the plain kernels. A variant that is wrong or does not compile is dropped by
//! name, and the next one in the list is tried; the plain kernels always remain. A model's head sizes and encodings
//! need other kernels, so a variant is tried again on them before anything is computed.

use super::variants::{LIFT, Variant, Variants};
use super::weight::Part;
use super::{Memory, Weight, Wgpu};
use crate::backend::*;
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use half::{bf16, f16};
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// F-WGPU-001: relative to the largest expected value, or to the sum of absolute terms if factors are rounded.
const BOUND: f64 = 1e-4;

/// The input of a trial.
enum Trial<'a> {
    /// The trials of every device when it is opened.
    Usual,
    /// Heads of the model's size.
    Heads(usize),
    /// The first rows of a matrix of the model, and their numbers.
    Matrix(&'a Weight, &'a [f32]),
}

impl Trial<'_> {
    fn name(&self) -> String {
        match self {
            Trial::Usual => "usual".into(),
            Trial::Heads(size) => format!("heads {size}"),
            Trial::Matrix(w, _) => format!("matrix {}", w.encoding.name()),
        }
    }
}

/// Successful trials of this process: card and driver, variant, trial. A driver may take seconds to compile a variant.
fn right() -> MutexGuard<'static, HashSet<String>> {
    static RIGHT: OnceLock<Mutex<HashSet<String>>> = OnceLock::new();
    RIGHT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wgpu {
    /// Enables the offered variants that are correct, and names the class.
    pub(super) fn choose(&mut self) -> Result<(), Fault> {
        for variant in self.origin.offered.clone() {
            if !self.variants.covers(variant) && self.is_right(variant, &Trial::Usual) {
                self.variants.take(variant);
            }
        }
        if !self.variants.dropped.is_empty() {
            // A lost device fails here.
            let mut one = self.memory(1);
            self.fill(view_mut(&mut one, 1, 1), 1.0);
            self.read(view(&one, 1, 1), &mut [0.0])?;
            self.recycle(one);
        }
        let reduced = self.variants.products.iter().any(|v| v.is_reduced());
        let numbers = if reduced { "f16" } else { "f32" };
        self.class = format!("wgpu-{}-{numbers}-{}", self.variants.names(), self.origin.slug);
        Ok(())
    }

    /// Tries flash attention on a model's head size: other sizes need other kernels.
    pub(super) fn try_heads(&mut self, size: usize) -> Result<(), Fault> {
        let flash = self.portable.is_none() && self.variants.flash && size <= super::attention::FLASH_SIZE;
        if flash && !self.is_right(Variant::Flash, &Trial::Heads(size)) {
            self.choose()?;
        }
        Ok(())
    }

    /// Tries the products with frozen matrices on the first matrix of an encoding: other encodings need other kernels.
    pub(super) fn try_matrix(&mut self, w: &Weight, bytes: &[u8]) -> Result<(), Fault> {
        const ENOUGH: usize = 1 << 17;
        let Some(part) = w
            .parts
            .first()
            .filter(|_| w.cols > 0 && self.portable.is_none() && !self.tried.contains(&w.encoding))
        else {
            return Ok(());
        };
        self.tried.push(w.encoding);
        let rows = (ENOUGH / w.cols).clamp(1, 96).min(part.rows);
        let values = w.encoding.first(bytes, rows * w.cols);
        let parts = vec![Part { storage: part.storage.clone(), from: 0, rows }];
        let first = Weight { rows, cols: w.cols, encoding: w.encoding, parts };
        while let Some(&variant) = self.variants.products.first() {
            if self.is_right(variant, &Trial::Matrix(&first, &values)) {
                break;
            }
            // The next variant is tried; it has not yet passed on the encodings of the one before.
            self.tried.retain(|encoding| *encoding == w.encoding);
            self.choose()?;
        }
        Ok(())
    }

    /// Whether the variant is correct; if not, it is dropped by name. Its time and traffic are not counted.
    fn is_right(&mut self, variant: Variant, trial: &Trial) -> bool {
        let known = format!("{} {} {}", self.origin.card, variant.name(), trial.name());
        if self.variants.spoiled.is_none() && right().contains(&known) {
            return true;
        }
        let (pace, traffic) = (self.gpu.pace.clone(), self.gpu.traffic);
        // Work that was lost before is no fault of the variant. The next read returns it.
        if self.gpu.proven().is_err() {
            return true;
        }
        let Variants { spoiled, spoiled_beyond, lanes, .. } = self.variants;
        let mut alone = Variants { spoiled, spoiled_beyond, lanes, ..Variants::default() };
        alone.take(variant);
        let used = std::mem::replace(&mut self.variants, alone);
        let verdict = match (variant, trial) {
            (_, Trial::Matrix(w, values)) => {
                [33, 3].iter().try_for_each(|&t| self.judge_frozen(t, w, values, variant))
            }
            (Variant::Flash, Trial::Heads(size)) => self.judge_attention(*size),
            (Variant::Flash, _) => self.judge_attention(20),
            (Variant::Subgroups, _) => self.judge_rows(),
            (Variant::Split, _) => self.judge_split(),
            (product, _) => self.judge_products(product),
        };
        self.variants = used;
        if let Err(seen) = &verdict {
            // Drops the recorded work.
            self.gpu.submit();
            self.gpu.forgive();
            self.variants.drop_one(variant, seen.clone());
        } else {
            right().insert(known);
        }
        (self.gpu.pace, self.gpu.traffic) = (pace, traffic);
        verdict.is_ok()
    }

    fn loaded(&mut self, values: &[f32]) -> Memory {
        let mut memory = self.memory(values.len());
        self.upload(view_mut(&mut memory, 1, values.len()), values);
        memory
    }

    /// Reads a memory and recycles it.
    fn taken(&mut self, memory: Memory) -> Result<Vec<f32>, String> {
        let mut out = vec![0.0; memory.len];
        let read = self.read(view(&memory, 1, memory.len), &mut out);
        self.recycle(memory);
        read.map(|()| out).map_err(|fault| fault.to_string())
    }

    fn judge_products(&mut self, variant: Variant) -> Result<(), String> {
        // Rows that fit vectors, rows that do not, and tiles for few rows or columns.
        for (t, n, k) in [(33, 96, 72), (19, 35, 21), (40, 70, 12), (9, 12, 40)] {
            let (x, dy, w) = (numbers(t * k, 1), numbers(t * n, 2), numbers(n * k, 3));
            let bytes: Vec<u8> = w.iter().flat_map(|v| bf16::from_f32(*v).to_bits().to_le_bytes()).collect();
            let frozen =
                self.sent((n, k), Encoding::Plain(Dtype::Bf16), &bytes).map_err(|f| f.to_string())?;
            self.judge_frozen(t, &frozen, &Dtype::Bf16.widen(&bytes), variant)?;
            if !variant.is_reduced() {
                let (mx, mdy) = (self.loaded(&x), self.loaded(&dy));
                let own = self.judge_own((t, n, k), [&x, &dy], [&mx, &mdy]);
                self.recycle(mx);
                self.recycle(mdy);
                own?;
            }
        }
        Ok(())
    }

    /// Multiplies `t` rows by a frozen matrix with the numbers `w`, in both directions.
    fn judge_frozen(&mut self, t: usize, frozen: &Weight, w: &[f32], variant: Variant) -> Result<(), String> {
        let (n, k, reduced) = (frozen.rows, frozen.cols, variant.is_reduced());
        let (x, dy) = (numbers(t * k, 1), numbers(t * n, 2));
        let (mx, mdy) = (self.loaded(&x), self.loaded(&dy));
        let (mut y, mut dx) = (self.memory(t * n), self.memory(t * k));
        self.linear(view_mut(&mut y, t, n), Write::Set, view(&mx, t, k), frozen);
        self.linear_grad(view_mut(&mut dx, t, k), Write::Set, view(&mdy, t, n), frozen);
        // Everything is read and its memory recycled before the comparison.
        let (y, dx) = (self.taken(y), self.taken(dx));
        self.recycle(mx);
        self.recycle(mdy);
        let (y, dx) = (y?, dx?);
        let round = |x: &[f32], lift| if reduced { rounded(x, lift) } else { x.to_vec() };
        let rw = round(w, 1.0);
        near("linear", &y, &Host { a: (&round(&x, 1.0), k, 1), b: (&rw, 1, k), sizes: (t, n, k) })?;
        near("linear_grad", &dx, &Host { a: (&round(&dy, LIFT), n, 1), b: (&rw, k, 1), sizes: (t, k, n) })
    }

    /// An adapter's gradient over enough tokens that its sums are split, with a shorter last part.
    fn judge_split(&mut self) -> Result<(), String> {
        let (r, n, t) = (12, 70, 1100);
        self.variants.take(Variant::Tiled);
        let (dy, x) = (numbers(t * r, 1), numbers(t * n, 2));
        let (mdy, mx) = (self.loaded(&dy), self.loaded(&x));
        let mut out = self.memory(r * n);
        for write in [Write::Set, Write::Add] {
            let (a, b) = (view(&mdy, t, r), view(&mx, t, n));
            let product = Product { a, b, transpose: Transpose::Left, scale: 0.5 };
            self.matmul(view_mut(&mut out, r, n), write, product);
        }
        let out = self.taken(out);
        self.recycle(mdy);
        self.recycle(mx);
        near("matmul aT b in parts", &out?, &Host { a: (&dy, 1, r), b: (&x, n, 1), sizes: (r, n, t) })
    }

    /// Products of two f32 matrices, for each transpose: x [T, K] and dy [T, N].
    fn judge_own(
        &mut self,
        (t, n, k): (usize, usize, usize),
        [x, dy]: [&[f32]; 2],
        [mx, mdy]: [&Memory; 2],
    ) -> Result<(), String> {
        let mut left = self.memory(n * k);
        let (a, b, scale) = (view(mdy, t, n), view(mx, t, k), 1.0);
        self.matmul(
            view_mut(&mut left, n, k),
            Write::Set,
            Product { a, b, transpose: Transpose::Left, scale },
        );
        // dy as [N, T] and x as [K, T], and x as [T, K].
        let (mut right, mut neither) = (self.memory(n * k), self.memory(n * k));
        let (a, b) = (view(mdy, n, t), view(mx, k, t));
        self.matmul(
            view_mut(&mut right, n, k),
            Write::Set,
            Product { a, b, transpose: Transpose::Right, scale },
        );
        let (a, b) = (view(mdy, n, t), view(mx, t, k));
        let product = Product { a, b, transpose: Transpose::Neither, scale };
        self.matmul(view_mut(&mut neither, n, k), Write::Set, product);
        let [left, right, neither] = [left, right, neither].map(|m| self.taken(m));
        near("matmul aT b", &left?, &Host { a: (dy, 1, n), b: (x, k, 1), sizes: (n, k, t) })?;
        near("matmul a bT", &right?, &Host { a: (dy, t, 1), b: (x, 1, t), sizes: (n, k, t) })?;
        near("matmul a b", &neither?, &Host { a: (dy, t, 1), b: (x, k, 1), sizes: (n, k, t) })
    }

    fn judge_rows(&mut self) -> Result<(), String> {
        let (rows, cols) = (3, 611);
        let (x, gain) = (numbers(rows * cols, 1), numbers(cols, 2));
        let (mx, mg) = (self.loaded(&x), self.loaded(&gain));
        let [mut out, mut inv, mut losses] = [rows * cols, rows, rows].map(|len| self.memory(len));
        let (o, i) = (view_mut(&mut out, rows, cols), view_mut(&mut inv, rows, 1));
        self.rmsnorm(o, i, view(&mx, rows, cols), view(&mg, 1, cols), 1e-5);
        let (out, inv) = (self.taken(out), self.taken(inv));
        let mut want = (Vec::new(), Vec::new(), Vec::new());
        for (r, row) in x.chunks_exact(cols).enumerate() {
            let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
            let by = 1.0 / (squares / cols as f64 + 1e-5).sqrt();
            want.0.push(by);
            want.1.extend(row.iter().zip(&gain).map(|(v, g)| f64::from(*v) * by * f64::from(*g)));
            let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
            want.2.push(sum.ln() - f64::from(row[r]));
        }
        let targets = self.ids(&[0, 1, 2]);
        let mut logits = mx;
        self.cross_entropy(view_mut(&mut losses, rows, 1), view_mut(&mut logits, rows, cols), &targets, None);
        let losses = self.taken(losses);
        self.recycle(logits);
        self.recycle(mg);
        close("inverse root", &inv?, &want.0)?;
        close("rmsnorm", &out?, &want.1)?;
        close("cross_entropy", &losses?, &want.2)
    }

    fn judge_attention(&mut self, size: usize) -> Result<(), String> {
        let flash = self.attention_case(size)?;
        let variants = std::mem::take(&mut self.variants);
        let plain = self.attention_case(size);
        self.variants = variants;
        for ((name, got), (_, want)) in flash.iter().zip(&plain?) {
            close(name, got, &want.iter().map(|v| f64::from(*v)).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Two rows over more than one tile, with grouped heads. Returns every output and gradient.
    fn attention_case(&mut self, size: usize) -> Result<Vec<(&'static str, Vec<f32>)>, String> {
        // The last queries of the second row do not see its first keys.
        let (t, heads) = (45, Heads { window: Some(30), ..Heads::new(2, 1, size) });
        let (wide, narrow) = (heads.query * heads.size, heads.kv * heads.size);
        let ids = vec![0; t];
        let tokens =
            self.tokens(TokenRows { ids: &ids, bounds: &[0, 7, t as u32], past: 0, short: u32::MAX });
        let inputs = [(wide, 1), (narrow, 2), (narrow, 3), (wide, 4)];
        let [q, k, v, dout] = inputs.map(|(cols, seed)| self.loaded(&numbers(t * cols, seed)));
        let sizes = [wide, heads.query, wide, narrow, narrow];
        let [mut out, mut lse, mut dq, mut dk, mut dv] = sizes.map(|cols| self.memory(t * cols));
        let qkv = Qkv { q: view(&q, t, wide), k: view(&k, t, narrow), v: view(&v, t, narrow) };
        let (o, l) = (view_mut(&mut out, t, wide), view_mut(&mut lse, t, heads.query));
        self.attention(o, l, qkv, heads, &tokens);
        let grad = QkvGrad {
            dq: view_mut(&mut dq, t, wide),
            dk: view_mut(&mut dk, t, narrow),
            dv: view_mut(&mut dv, t, narrow),
        };
        let saved = AttentionSaved { qkv, out: view(&out, t, wide), logsumexp: view(&lse, t, heads.query) };
        self.attention_grad(grad, view(&dout, t, wide), saved, heads, &tokens);
        [q, k, v, dout].into_iter().for_each(|m| self.recycle(m));
        let all = [("attention", out), ("logsumexp", lse), ("dq", dq), ("dk", dk), ("dv", dv)];
        let all: Vec<_> = all.into_iter().map(|(name, m)| (name, self.taken(m))).collect();
        all.into_iter().map(|(name, got)| got.map(|x| (name, x))).collect()
    }
}

/// Reproducible numbers between -1 and 1.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn rounded(x: &[f32], lift: f32) -> Vec<f32> {
    x.iter().map(|v| f16::from_f32(v * lift).to_f32() / lift).collect()
}

/// A product on the host: factors with the strides of their rows and columns; m, n, k.
struct Host<'a> {
    a: (&'a [f32], usize, usize),
    b: (&'a [f32], usize, usize),
    sizes: (usize, usize, usize),
}

/// Checks that every output is within [`BOUND`] of its sum of absolute terms.
fn near(name: &str, got: &[f32], host: &Host) -> Result<(), String> {
    let (m, n, k) = host.sizes;
    for (at, got) in got.iter().enumerate().take(m * n) {
        let (i, j) = (at / n, at % n);
        let term = |t: usize| {
            let a = host.a.0[i * host.a.1 + t * host.a.2];
            let b = host.b.0[t * host.b.1 + j * host.b.2];
            f64::from(a) * f64::from(b)
        };
        let (want, terms) = (0..k).fold((0.0, 0.0), |(w, s), t| (w + term(t), s + term(t).abs()));
        let off = (f64::from(*got) - want).abs();
        // A NaN is never within a bound.
        let within = off <= BOUND * terms;
        if !within {
            return Err(format!("{name} [{i}, {j}] of {m} x {n} x {k} is {got}, not {want:.6}"));
        }
    }
    Ok(())
}

/// Checks that every value is within [`BOUND`] of the largest expected value.
fn close(name: &str, got: &[f32], want: &[f64]) -> Result<(), String> {
    let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let within = (f64::from(*got) - want).abs() <= BOUND * scale;
        if !within {
            return Err(format!("{name} [{i}] is {got}, not {want:.6}"));
        }
    }
    Ok(())
}
