//! The wrapper that every backend is used through. It asserts the shapes of each op, names the op to the backend, whose
//! faults say it, and where asked measures times. What holds for which op stands in the table, `ops.rs`.

use super::{Backend, Heads, Op};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A backend with checked ops. What only this backend has is reached through it; ops that a backend calls of itself
/// are not checked again.
pub struct Checked<B> {
    pub(super) inner: B,
    pub(super) times: Option<Times>,
}

impl<B> Deref for Checked<B> {
    type Target = B;

    fn deref(&self) -> &B {
        &self.inner
    }
}

impl<B> DerefMut for Checked<B> {
    fn deref_mut(&mut self) -> &mut B {
        &mut self.inner
    }
}

impl<B: Backend> Checked<B> {
    /// Around a backend.
    pub(super) fn around(inner: B) -> Self {
        Checked { inner, times: None }
    }

    /// The same backend with timed ops, for backends whose ops have finished when they return.
    pub fn timed(self) -> (Self, Notes) {
        let notes = Notes::default();
        let times = Times { notes: notes.clone(), frozen: (0, 0), rows: Vec::new() };
        (Checked { inner: self.inner, times: Some(times) }, notes)
    }

    /// Runs an op; one without [`Work`] is not timed.
    #[inline]
    pub(super) fn run<R>(&mut self, op: Op, work: Option<Work>, run: impl FnOnce(&mut B) -> R) -> R {
        let op = op.name();
        self.inner.doing(op);
        let (Some(times), Some(work)) = (&self.times, work) else { return run(&mut self.inner) };
        let started = Instant::now();
        let result = run(&mut self.inner);
        times.note(op, work, started.elapsed().as_secs_f64(), self.inner.short_bytes());
        result
    }
}

/// What one op has taken.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Taken {
    /// Calls.
    pub calls: u64,
    /// Seconds.
    pub seconds: f64,
    /// Multiplications and additions.
    pub flops: f64,
    /// Bytes of its inputs and outputs.
    pub bytes: f64,
}

/// By op.
#[derive(Debug, Clone, Default)]
pub struct Notes(Arc<Mutex<BTreeMap<&'static str, Taken>>>);

impl Notes {
    /// What was noted since the last call.
    pub fn take(&self) -> BTreeMap<&'static str, Taken> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Times, and what turns a [`Work`] into numbers.
pub(super) struct Times {
    notes: Notes,
    /// Bytes and numbers of all frozen matrices, whose mean every product is counted with.
    pub frozen: (usize, usize),
    /// Lengths of the rows of the tokens that came last.
    pub rows: Vec<u32>,
}

impl Times {
    /// Pairs of a query and a key that it sees.
    fn pairs(&self, window: Option<usize>) -> f64 {
        let of_row = |&row: &u32| {
            let (row, seen) =
                (f64::from(row), window.map_or(f64::from(row), |w| f64::from(row).min(w as f64)));
            seen * (seen + 1.0) / 2.0 + (row - seen) * seen
        };
        self.rows.iter().map(of_row).sum()
    }

    fn note(&self, op: &'static str, work: Work, seconds: f64, short_bytes: usize) {
        let of_frozen = self.frozen.0 as f64 / self.frozen.1.max(1) as f64;
        let mut notes = self.notes.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = notes.entry(op).or_default();
        taken.calls += 1;
        taken.seconds += seconds;
        taken.flops += work.flops + work.flops_per_pair * self.pairs(work.window);
        taken.bytes += work.bytes + work.frozen * of_frozen + work.short * short_bytes as f64;
    }
}

/// What the definition of an op needs at least.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    /// Multiplications and additions.
    pub flops: f64,
    /// The same for each pair of a query and a key.
    pub flops_per_pair: f64,
    /// Keys of these pairs that a query sees at most.
    pub window: Option<usize>,
    /// Bytes that are read and written, but for those of the next two.
    pub bytes: f64,
    /// Numbers of frozen matrices.
    pub frozen: f64,
    /// Numbers in memory of [`Backend::short`].
    pub short: f64,
}

impl Work {
    /// No arithmetic worth counting, and that many f32 numbers.
    pub fn moved(numbers: usize) -> Work {
        Work::product(0, numbers)
    }

    /// The same in memory of [`Backend::short`].
    pub fn short(numbers: usize) -> Work {
        Work { short: numbers as f64, ..Work::default() }
    }

    /// That many terms of sums, and f32 numbers.
    pub fn product(terms: usize, numbers: usize) -> Work {
        Work { flops: 2.0 * terms as f64, bytes: 4.0 * numbers as f64, ..Work::default() }
    }

    /// A product of t x k by n x k frozen numbers, with an adapter of that rank.
    pub fn frozen(t: usize, (n, k): (usize, usize), rank: usize) -> Work {
        let (t, n, k, r) = (t as f64, n as f64, k as f64, rank as f64);
        let (flops, bytes) = (2.0 * t * (n * k + r * (n + k)), 4.0 * (t * (n + k) + r * (t + n + k)));
        Work { flops, bytes, frozen: n * k, ..Work::default() }
    }

    /// That many products of a query's head with a key's, and f32 numbers.
    pub fn attention(products: f64, heads: Heads, numbers: usize) -> Work {
        let flops_per_pair = 2.0 * products * (heads.query * heads.size) as f64;
        Work { flops_per_pair, window: heads.window, ..Work::moved(numbers) }
    }
}

/// Methods of [`Checked`]. A row is an op with its arguments, a block that asserts their shapes, and its [`Work`] if it
/// is timed.
macro_rules! table {
    (@work) => { None };
    (@work $work:expr) => { Some($work) };
    ($(
        $op:ident ($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $shapes:block $(=> $work:expr)?;
    )*) => {$(
        #[inline]
        fn $op(&mut self, $($arg: $type),*) $(-> $result)? {
            $shapes
            let work = table!(@work $($work)?);
            self.run(Op::$op, work, |inner| inner.$op($($arg),*))
        }
    )*};
}
pub(super) use table;

#[cfg(test)]
mod tests {
    use crate::backend::{Backend, Cpu, Frozen, Fused, Heads, Qkv, TokenRows, Write, view, view_mut};
    use crate::numeric::dtype::Dtype;
    use crate::support::panics::caught;

    const ZEROS: Frozen = Frozen { rows: 3, cols: 4, dtype: Dtype::Bf16, bytes: &[0; 24] };

    #[test]
    fn ops_refuse_shapes_that_do_not_agree() {
        let mut cpu = Cpu::new(1);
        let (w, mut y, x) = (cpu.weight(ZEROS).unwrap(), cpu.memory(64), cpu.memory(64));
        let tokens = cpu.tokens(TokenRows { ids: &[0; 5], bounds: &[0, 5], past: 0, short: u32::MAX });
        let mut panic = |op: &dyn Fn(&mut Cpu, &mut crate::backend::cpu::Memory)| {
            caught(|| op(&mut cpu, &mut y)).expect_err("shapes do not agree")
        };
        let one = "both matrices have one shape";
        assert!(panic(&|cpu, y| cpu.add(view_mut(y, 2, 3), view(&x, 3, 2))).contains(one));
        for (rows, cols, text) in [(4, 4, one), (3, 3, "x has as many columns as the weight")] {
            let said = panic(&|cpu, y| cpu.linear(view_mut(y, 5, rows), Write::Set, view(&x, 5, cols), &w));
            assert!(said.contains(text), "{said}");
        }
        let said = panic(&|cpu, y| cpu.lora_down(view_mut(y, 5, 2), view(&x, 5, 4), view(&x, 2, 3)));
        assert!(said.contains("the inner dimensions are equal"), "{said}");
        let said = panic(&|cpu, y| cpu.rope(view_mut(y, 4, 4), view(&x, 5, 4), &tokens));
        assert!(said.contains("one position per token"), "{said}");
        let said = panic(&|cpu, y| cpu.rope_for_attention(view_mut(y, 5, 4), view(&x, 5, 3), &tokens));
        assert!(said.contains("whole heads of even size"), "{said}");
        let said = panic(&|cpu, y| {
            let qkv = Qkv { q: view(&x, 1, 6), k: view(&x, 2, 4), v: view(&x, 2, 4) };
            let mut lse = cpu.memory(3);
            cpu.attention_cached(view_mut(y, 1, 6), view_mut(&mut lse, 1, 3), qkv, Heads::new(3, 2, 2));
        });
        assert!(said.contains("key/value heads divide the query heads"), "{said}");
    }

    #[test]
    fn times_count_calls_arithmetic_and_bytes_by_op() {
        let (mut cpu, notes) = Cpu::new(1).timed();
        let w = cpu.weight(ZEROS).unwrap();
        let [mut x, mut y, mut inv, gain] = [20, 20, 5, 4].map(|len| cpu.memory(len));
        assert!(notes.take().is_empty(), "what makes memory is no op that is timed");
        cpu.fill(view_mut(&mut x, 5, 4), 1.0);
        cpu.linear(view_mut(&mut y, 5, 3), Write::Set, view(&x, 5, 4), &w);
        for _ in 0..2 {
            let (out, inv) = (view_mut(&mut y, 5, 4), view_mut(&mut inv, 5, 1));
            cpu.rmsnorm_for_linear(out, inv, view(&x, 5, 4), view(&gain, 1, 4), 1e-5);
        }
        assert_eq!(cpu.lend(&x), None, "a read is timed");
        cpu.read(view(&x, 5, 4), &mut [0.0; 20]).unwrap();
        let (mut cached, heads) = (cpu.memory(4), Heads::new(2, 1, 2));
        let tokens = cpu.tokens(TokenRows { ids: &[0; 4], bounds: &[0, 1, 4], past: 0, short: u32::MAX });
        let qkv = Qkv { q: view(&x, 4, 4), k: view(&x, 4, 2), v: view(&x, 4, 2) };
        let mut lse = cpu.memory(8);
        cpu.attention(view_mut(&mut y, 4, 4), view_mut(&mut lse, 4, 2), qkv, heads, &tokens);
        let qkv = Qkv { q: view(&x, 1, 4), k: view(&x, 3, 2), v: view(&x, 3, 2) };
        cpu.attention_cached(view_mut(&mut cached, 1, 4), view_mut(&mut lse, 1, 2), qkv, heads);
        let seen: Vec<_> = notes.take().into_iter().map(|(op, t)| (op, t.calls, t.flops, t.bytes)).collect();
        let want = [
            ("attention", 1, 4.0 * 7.0 * 4.0, 4.0 * 48.0),
            ("attention_cached", 1, 4.0 * 3.0 * 4.0, 4.0 * 20.0),
            ("fill", 1, 0.0, 80.0),
            ("linear", 1, 2.0 * 60.0, 4.0 * 35.0 + 2.0 * 12.0),
            ("read", 1, 0.0, 160.0),
            ("rmsnorm", 2, 0.0, 320.0),
        ];
        assert_eq!(seen, want);
        assert!(notes.take().is_empty());
    }

    #[test]
    fn windows_count_the_pairs_that_are_seen() {
        let (mut cpu, notes) = Cpu::new(1).timed();
        let heads = Heads { window: Some(2), ..Heads::new(1, 1, 2) };
        let tokens = cpu.tokens(TokenRows { ids: &[0; 4], bounds: &[0, 1, 4], past: 0, short: u32::MAX });
        let [x, mut y, mut lse] = [8, 8, 4].map(|len| cpu.memory(len));
        let qkv = Qkv { q: view(&x, 4, 2), k: view(&x, 4, 2), v: view(&x, 4, 2) };
        cpu.attention(view_mut(&mut y, 4, 2), view_mut(&mut lse, 4, 1), qkv, heads, &tokens);
        let qkv = Qkv { q: view(&x, 1, 2), k: view(&x, 4, 2), v: view(&x, 4, 2) };
        cpu.attention_cached(view_mut(&mut y, 1, 2), view_mut(&mut lse, 1, 1), qkv, heads);
        let taken = notes.take();
        // Pairs: 1 of the first row, 1 + 2 + 2 of the second. Two products of two channels, two operations each.
        assert_eq!(taken["attention"].flops, 6.0 * 8.0);
        assert_eq!(taken["attention_cached"].flops, 2.0 * 8.0);
    }
}
