//! Whether a device computes what the portable class is made of: operations that round once, on numbers from a fixed seed.

use super::super::device::Call;
use super::super::kernel::Access::{Read, Write as Written};
use super::super::kernel::Kernel;
use super::super::pace::Kind;
use super::super::rows::kernel;
use super::super::{Memory, Wgpu};
use super::MultiplyAdd;
use crate::backend::{Backend, Fault, view, view_mut};
use crate::numeric::rng::Stream;

kernel!(TRIAL, "portable_trial", ["portable"], [Written, Read]);

/// The kernels of this file.
pub(super) const KERNELS: &[&Kernel] = &[&TRIAL];

/// Triples of numbers.
const TRIPLES: usize = 4096;
/// Results of a triple.
const RESULTS: usize = 5;

/// Numbers between 2^-20 and 2^20; in half of the triples the sum cancels most of the product.
fn triples() -> Vec<f32> {
    let mut draws = Stream::new(&[25]);
    let mut number = || (0.5 + draws.unit() / 2.0) * f32::powi(2.0, draws.below(41) as i32 - 20);
    let signed = |x: f32, i: usize| if i.is_multiple_of(3) { -x } else { x };
    let triple = |i: usize| {
        let (a, b, c) = (signed(number(), i), number(), number());
        [a, b, if i.is_multiple_of(2) { signed(c, i / 2) } else { -(a * b) * (1.0 + c * 1e-9) }]
    };
    (0..TRIPLES).flat_map(triple).collect()
}

/// Which of a triple's results is wrong, if one is.
fn wrong([a, b, c]: [f32; 3], got: &[f32]) -> Option<&'static str> {
    let want = [a.mul_add(b, c), a * b + c, a / b, a.abs().sqrt()];
    let what = ["a multiply-add", "a product and a sum", "a quotient", "a root"];
    let off = got[1..].iter().zip(want).position(|(got, want)| got.to_bits() != want.to_bits())?;
    Some(what[off])
}

impl Wgpu {
    /// Makes the device one of the portable class, by its own multiply-add or, on a software driver whose own rounds twice,
    /// by integers.
    pub(in super::super) fn become_portable(&mut self, kind: Kind) -> Result<(), Fault> {
        let x = triples();
        let own = self.tried_with(MultiplyAdd::Fused, &x)?;
        let once = |(x, got): (&[f32], &[f32])| x[0].mul_add(x[1], x[2]).to_bits() == got[0].to_bits();
        let fused = x.chunks_exact(3).zip(own.chunks_exact(RESULTS)).all(once);
        let fault = |device: &Self, reason: String| {
            let reason = format!("cannot compute as --dtype portable: {reason}");
            Err(Fault::Device { device: device.gpu.faults.device().to_string(), reason })
        };
        if !fused && kind == Kind::Hardware {
            return fault(self, "its multiply-add rounds twice".into());
        }
        let fma = if fused { MultiplyAdd::Fused } else { MultiplyAdd::OfIntegers };
        let got = if fused { own } else { self.tried_with(fma, &x)? };
        for (x, got) in x.chunks_exact(3).zip(got.chunks_exact(RESULTS)) {
            if let Some(what) = wrong([x[0], x[1], x[2]], got) {
                return fault(
                    self,
                    format!(
                        "{what} of {:e}, {:e} and {:e} is not rounded as IEEE 754 says",
                        x[0], x[1], x[2]
                    ),
                );
            }
        }
        self.portable = Some(fma);
        self.class = crate::backend::PORTABLE.into();
        Ok(())
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
