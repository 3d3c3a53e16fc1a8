//! Threads. Work is divided into tasks by the shapes alone; which thread runs a task, and how many threads
//! there are, changes nothing but the time.

use rayon::prelude::*;
use std::marker::PhantomData;

/// A fixed number of threads.
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    /// `count` of them, at least one. Where the system gives none, the caller's own thread does the work.
    pub fn new(count: usize) -> Threads {
        let named = |i| format!("cpu-{i}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count.max(1)).thread_name(named).build();
        Threads { pool: if count > 1 { pool.ok() } else { None } }
    }

    /// Runs `task(0)` .. `task(tasks - 1)`, in any order, and waits.
    pub fn each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        match &self.pool {
            Some(pool) if tasks > 1 => {
                pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(&task));
            }
            _ => (0..tasks).for_each(task),
        }
    }

    /// Runs `task(i, chunk i of out)` for chunks of `size` values.
    pub fn chunks<T: Send>(&self, out: &mut [T], size: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        let (len, shared) = (out.len(), Shared::new(out));
        self.each(len.div_ceil(size.max(1)), |i| {
            // SAFETY: chunk i belongs to task i alone.
            task(i, unsafe { shared.slice(i * size, size.min(len - i * size)) });
        });
    }

    /// The same over two outputs that are cut into equally many chunks.
    pub fn chunks2(
        &self,
        out: (&mut [f32], &mut [f32]),
        size: (usize, usize),
        task: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        let (len0, len1) = (out.0.len(), out.1.len());
        let tasks = len0.div_ceil(size.0.max(1));
        assert_eq!(tasks, len1.div_ceil(size.1.max(1)), "both outputs have as many chunks");
        let (shared0, shared1) = (Shared::new(out.0), Shared::new(out.1));
        self.each(tasks, |i| {
            // SAFETY: chunk i of either belongs to task i alone.
            let (a, b) = unsafe {
                (
                    shared0.slice(i * size.0, size.0.min(len0 - i * size.0)),
                    shared1.slice(i * size.1, size.1.min(len1 - i * size.1)),
                )
            };
            task(i, a, b);
        });
    }
}

/// A slice whose parts several tasks write.
pub struct Shared<'a, T = f32> {
    at: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a pointer to values that may be sent; whoever turns it into slices promises that they do not overlap.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Of a slice that stays borrowed.
    pub fn new(values: &'a mut [T]) -> Shared<'a, T> {
        Shared { at: values.as_mut_ptr(), len: values.len(), lifetime: PhantomData }
    }

    /// Values in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Part of it.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, from: usize, len: usize) -> &mut [T] {
        assert!(from <= self.len && len <= self.len - from, "a part lies inside the whole");
        // SAFETY: inside the slice that `new` was given, which stays borrowed; disjoint as promised.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), len) }
    }

    /// A pointer to element `from`, for kernels that write strided tiles.
    pub fn pointer(&self, from: usize) -> *mut T {
        assert!(from <= self.len, "inside the whole");
        self.at.wrapping_add(from)
    }
}
