//! Whether a device computes what the portable class is made of: operations that round once, on numbers from a fixed seed.

use super::super::device::Call;
use super::super::instance::Adapter;
use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::Kernel;
use super::super::pace::Kind;
use super::super::rows::kernel;
use super::super::{Memory, Wgpu};
use super::MultiplyAdd;
use crate::backend::{Backend, Fault, Product, Transpose, Write, view, view_mut};
use crate::numeric::rng::Stream;
use crate::numeric::slices::slices;

kernel!(TRIAL, "portable_trial", ["portable"], [Written, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&TRIAL];

/// Triples of numbers.
const TRIPLES: usize = 4096;
/// Results of a triple.
const RESULTS: usize = 5;

/// Numbers between 2^-60 and 2^60; in half of the triples the sum cancels most of the product.
fn triples() -> Vec<f32> {
    let mut draws = Stream::new(&[25]);
    let mut number = || {
        let size = (1.0 + draws.unit()) * f32::powi(2.0, draws.below(120) as i32 - 60);
        if draws.below(2) == 0 { size } else { -size }
    };
    let triple = |i: usize| {
        let (a, b, c) = (number(), number(), number());
        [a, b, if i.is_multiple_of(2) { c } else { -(a * b) * (1.0 + c.signum() * 1e-6) }]
    };
    (0..TRIPLES).flat_map(triple).collect()
}

/// Whether a result has the bits that it should have. A device may replace a number below 2^-126 by 0.
fn right(got: f32, want: f32) -> bool {
    got.to_bits() == want.to_bits() || (got == 0.0 && want.is_subnormal())
}

/// Which of a triple's results is wrong, if one is.
fn wrong([a, b, c]: [f32; 3], got: &[f32]) -> Option<&'static str> {
    let want = [a.mul_add(b, c), a * b + c, a / b, a.abs().sqrt()];
    let what = ["a multiply-add", "a product and a sum", "a quotient", "a root"];
    let off = got[1..].iter().zip(want).position(|(got, want)| !right(*got, want))?;
    Some(what[off])
}

/// Rows, columns and terms of the product of a trial: no multiple of a tile, and two slices.
const PRODUCT: (usize, usize, usize) = (67, 33, 801);

impl Wgpu {
    /// Makes the device one of the portable class: by its own multiply-add, or by a composed one on a software driver whose own
    /// rounds twice. `typed` is used without a trial, for tests.
    pub(in super::super) fn become_portable(
        &mut self,
        adapter: &Adapter,
        typed: Option<MultiplyAdd>,
    ) -> Result<(), Fault> {
        self.class = crate::backend::PORTABLE.into();
        self.portable = typed;
        if typed.is_some() {
            return Ok(());
        }
        let refused = match adapter.info.backend {
            wgpu::Backend::Vulkan => self.chosen_by_trial(Kind::of(adapter))?,
            other => Some(format!("its kernels were tried through Vulkan alone, not through {other}")),
        };
        refused.map_or(Ok(()), |why| {
            let reason = format!("cannot compute as --dtype portable: {why}");
            Err(Fault::Device { device: self.gpu.faults.device().to_string(), reason })
        })
    }

    /// Chooses the multiply-add; returns what is wrong, if anything is.
    fn chosen_by_trial(&mut self, kind: Kind) -> Result<Option<String>, Fault> {
        let x = triples();
        let mut got = self.tried_with(MultiplyAdd::Fused, &x)?;
        let once = |(x, got): (&[f32], &[f32])| right(got[0], x[0].mul_add(x[1], x[2]));
        let fused = x.chunks_exact(3).zip(got.chunks_exact(RESULTS)).all(once);
        if !fused && kind == Kind::Hardware {
            return Ok(Some("its multiply-add rounds twice".into()));
        }
        if !fused {
            got = self.tried_with(MultiplyAdd::Composed, &x)?;
        }
        for (x, got) in x.chunks_exact(3).zip(got.chunks_exact(RESULTS)) {
            if let Some(what) = wrong([x[0], x[1], x[2]], got) {
                let of = format!("{:e}, {:e} and {:e}", x[0], x[1], x[2]);
                return Ok(Some(format!("{what} of {of} is not rounded as IEEE 754 says")));
            }
        }
        self.portable = Some(if fused { MultiplyAdd::Fused } else { MultiplyAdd::Composed });
        self.tried_product(&x)
    }

    /// A product against the chains of the host: a driver may fuse in one kernel and not in another.
    fn tried_product(&mut self, numbers: &[f32]) -> Result<Option<String>, Fault> {
        let (m, n, k) = PRODUCT;
        let mantissa = |i: usize| numbers[i % numbers.len()].to_bits() & 0x807f_ffff | 0x3f80_0000;
        let [a, b] = [m * k, k * n]
            .map(|len| (0..len).map(|i| f32::from_bits(mantissa(i * 7 + len))).collect::<Vec<_>>());
        let [mut left, mut right, mut out] = [m * k, k * n, m * n].map(|len| self.memory(len));
        self.upload(view_mut(&mut left, m, k), &a);
        self.upload(view_mut(&mut right, k, n), &b);
        let of = Product {
            a: view(&left, m, k),
            b: view(&right, k, n),
            transpose: Transpose::Neither,
            scale: 1.0,
        };
        self.matmul(view_mut(&mut out, m, n), Write::Set, of);
        let mut got = vec![0.0; m * n];
        let read = self.read(view(&out, m, n), &mut got);
        [left, right, out].into_iter().for_each(|m| self.recycle(m));
        read?;
        let chain = |at: usize, (from, terms): (usize, usize)| {
            (from..from + terms).fold(0.0f32, |sum, t| a[at / n * k + t].mul_add(b[t * n + at % n], sum))
        };
        let want = |at: usize| slices(k).map(|slice| chain(at, slice)).reduce(|sum, part| sum + part);
        let differs = (0..m * n).any(|at| want(at).map(f32::to_bits) != Some(got[at].to_bits()));
        Ok(differs.then(|| "a product is not the sum of fused multiply-adds".into()))
    }

    fn tried_with(&mut self, fma: MultiplyAdd, x: &[f32]) -> Result<Vec<f32>, Fault> {
        let n = x.len() / 3;
        let (mut from, mut to): (Memory, Memory) = (self.memory(x.len()), self.memory(RESULTS * n));
        self.upload(view_mut(&mut from, n, 3), x);
        let (o, i) = (self.at_mut(&view_mut(&mut to, n, RESULTS)), self.at(view(&from, n, 3)));
        self.gpu.dispatch(Call {
            kernel: &TRIAL,
            constants: &[fma.constant()],
            params: &[n as u32],
            slots: &[o.slot, i.slot],
            groups: n.div_ceil(64) as u64,
            work: 1e3 * n as f64,
        });
        let mut got = vec![0.0; RESULTS * n];
        let read = self.read(view(&to, n, RESULTS), &mut got);
        [from, to].into_iter().for_each(|m| self.recycle(m));
        read.map(|()| got)
    }
}

#[cfg(test)]
mod tests {
    use super::wrong;

    #[test]
    fn each_operation_that_is_one_ulp_off_is_named() {
        let (a, b, c) = (1.1f32, -0.7f32, 0.77f32);
        let right = [0.0, a.mul_add(b, c), a * b + c, a / b, a.sqrt()];
        assert_eq!(wrong([a, b, c], &right), None);
        for (i, name) in
            ["a multiply-add", "a product and a sum", "a quotient", "a root"].into_iter().enumerate()
        {
            let mut off = right;
            off[i + 1] = f32::from_bits(off[i + 1].to_bits() + 1);
            assert_eq!(wrong([a, b, c], &off), Some(name));
        }
    }

    #[test]
    fn a_device_may_flush_subnormal_results_alone() {
        let (a, b) = (f32::powi(2.0, -60), f32::powi(2.0, -60));
        let c = -(a * b) * (1.0 + 1e-6);
        let flushed = |sum: f32| [0.0, sum, sum, a / b, a.sqrt()];
        assert!((a * b + c).is_subnormal());
        assert_eq!(wrong([a, b, c], &flushed(a * b + c)), None);
        assert_eq!(wrong([a, b, c], &flushed(0.0)), None);
        assert_eq!(wrong([a, b, c], &flushed(f32::from_bits(1))), Some("a multiply-add"));
        assert_eq!(wrong([a, b, 2.0 * c], &flushed(0.0)), Some("a multiply-add"));
    }
}
