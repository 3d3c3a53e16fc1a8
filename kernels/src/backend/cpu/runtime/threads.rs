//! Threads. Work is divided into tasks by the shapes alone; which thread runs a task, and how many threads
//! there are, changes nothing but the time.
//!
//! A pool of our own: the caller works too, and a worker that has just finished looks out for the next verb
//! for a while before it sleeps, because the next verb is a few microseconds away. (rayon's `install` hands
//! the work to other threads and sleeps: 50 microseconds for each of 2,400 verbs of a step.)

use crate::support::panics::caught;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};

/// Looks at the state before a worker sleeps: about 100 microseconds.
const SPINS: u32 = 2_000;
/// Bit of the state: the job may be joined. Below it is the number of workers in it, above it the job's number.
const OPEN: u64 = 1 << 16;
const JOB: u64 = 1 << 17;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// What the caller and the workers share.
struct Board {
    state: AtomicU64,
    next: AtomicUsize,
    tasks: AtomicUsize,
    /// The job, valid from its opening until the last worker has left it.
    job: Mutex<Option<Job>>,
    /// What the panic of a worker's task said.
    panicked: Mutex<Option<String>>,
    stop: AtomicBool,
    asleep: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

#[derive(Clone, Copy)]
struct Job(*const Task<'static>);
// SAFETY: the task is Sync, and the pointer is followed only while the caller of `each` waits.
unsafe impl Send for Job {}

/// A fixed number of threads.
pub struct Threads {
    board: Arc<Board>,
    workers: Vec<std::thread::JoinHandle<()>>,
    /// Held by the caller whose job it is; others, and tasks that call again, work alone.
    caller: Mutex<()>,
}

impl Board {
    fn take_tasks(&self, task: &Task) {
        let tasks = self.tasks.load(SeqCst);
        loop {
            let i = self.next.fetch_add(1, SeqCst);
            if i >= tasks {
                return;
            }
            task(i);
        }
    }

    /// Joins the job that is open, if it is not the one that was `seen` before.
    fn join(&self, seen: u64) -> Option<(u64, Job)> {
        let mut state = self.state.load(SeqCst);
        while state & OPEN != 0 && state / JOB != seen {
            match self.state.compare_exchange(state, state + 1, SeqCst, SeqCst) {
                Ok(_) => {
                    let job = *self.job.lock().unwrap_or_else(PoisonError::into_inner);
                    return job.map(|j| (state / JOB, j));
                }
                Err(now) => state = now,
            }
        }
        None
    }

    fn work(&self) {
        let mut seen = 0;
        while !self.stop.load(SeqCst) {
            let found = (0..SPINS).find_map(|_| {
                std::hint::spin_loop();
                self.join(seen)
            });
            let Some((number, job)) = found.or_else(|| self.sleep(seen)) else { continue };
            seen = number;
            // SAFETY: we are in the job, so its caller waits, and what it borrows is alive.
            let task = unsafe { &*job.0 };
            // The caller goes on with it, in its own thread: the process's hook is not to end everything here.
            if let Err(text) = caught(|| self.take_tasks(task)) {
                *self.panicked.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
            self.state.fetch_sub(1, SeqCst);
        }
    }

    /// Waits for the bell, unless there is something to do.
    fn sleep(&self, seen: u64) -> Option<(u64, Job)> {
        let bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
        self.asleep.fetch_add(1, SeqCst);
        let found = self.join(seen);
        if found.is_none() && !self.stop.load(SeqCst) {
            drop(self.bell.wait(bed));
        }
        self.asleep.fetch_sub(1, SeqCst);
        found
    }

    fn wake(&self) {
        if self.asleep.load(SeqCst) > 0 {
            let _bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_all();
        }
    }

    /// No thread may join any more; waits for those that have.
    fn close(&self) {
        self.state.fetch_and(!OPEN, SeqCst);
        let mut looks = 0u32;
        while !self.state.load(SeqCst).is_multiple_of(OPEN) {
            std::hint::spin_loop();
            looks += 1;
            if looks > SPINS {
                std::thread::yield_now();
            }
        }
    }
}

/// Closes the job even where the caller's own task panics: workers may still be reading what it borrowed.
struct Closing<'a>(&'a Board);
impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Threads {
    /// `count` of them, the caller's among them. Where the system gives none, the caller works alone.
    pub fn new(count: usize) -> Threads {
        let board = Arc::new(Board {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            job: Mutex::new(None),
            panicked: Mutex::new(None),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let start = |i: usize| {
            let board = Arc::clone(&board);
            std::thread::Builder::new().name(format!("cpu-{i}")).spawn(move || board.work()).ok()
        };
        let workers = (1..count.clamp(1, 1024)).filter_map(start).collect();
        Threads { board, workers, caller: Mutex::new(()) }
    }

    /// How many threads work.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` .. `task(tasks - 1)`, in any order, and waits.
    pub fn each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        let free = match self.caller.try_lock() {
            _ if tasks < 2 || self.workers.is_empty() => None,
            Ok(free) => Some(free),
            // A task has panicked once: the lock holds nothing that could be broken.
            Err(TryLockError::Poisoned(free)) => Some(free.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(free) = free else { return (0..tasks).for_each(task) };
        let board = &*self.board;
        let task: &Task = &task;
        // SAFETY: only the lifetime changes. Workers follow the pointer between joining and leaving, and
        // `Closing` lets no thread join and waits for all to leave before `task` goes out of scope.
        let job = Job(unsafe { std::mem::transmute::<*const Task, *const Task<'static>>(task) });
        *board.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
        board.tasks.store(tasks, SeqCst);
        board.next.store(0, SeqCst);
        // If a caller panicked itself, its panic was not taken.
        board.panicked.lock().unwrap_or_else(PoisonError::into_inner).take();
        let number = board.state.load(SeqCst) / JOB + 1;
        board.state.store(number * JOB + OPEN, SeqCst);
        board.wake();
        {
            let _closing = Closing(board);
            board.take_tasks(task);
        }
        let panicked = board.panicked.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(free);
        if let Some(text) = panicked {
            panic!("a task panicked on another thread: {text}");
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

impl Drop for Threads {
    fn drop(&mut self) {
        self.board.stop.store(true, SeqCst);
        {
            let _bed = self.board.bed.lock().unwrap_or_else(PoisonError::into_inner);
            self.board.bell.notify_all();
        }
        self.workers.drain(..).for_each(|w| drop(w.join()));
    }
}

/// A slice whose parts several tasks write.
pub struct Shared<'a, T = f32> {
    at: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a pointer to values that may be sent; code that makes slices of it promises that they do not overlap.
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
        assert!(from <= self.len && len <= self.len - from, "a part is inside the whole");
        // SAFETY: inside the slice that `new` was given, which stays borrowed; disjoint as promised.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(from), len) }
    }

    /// A pointer to element `from`, for kernels that write strided tiles.
    pub fn pointer(&self, from: usize) -> *mut T {
        assert!(from <= self.len, "inside the whole");
        self.at.wrapping_add(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(count);
            for tasks in [0, 1, 2, 5, 1000] {
                for _ in 0..50 {
                    let mut hits = vec![0u32; tasks];
                    threads.chunks(&mut hits, 1, |_, hit| hit[0] += 1);
                    assert!(hits.iter().all(|&h| h == 1));
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(5)); // workers fall asleep, and wake again
            let sum = AtomicUsize::new(0);
            threads.each(100, |i| {
                // a task may ask for tasks
                threads.each(2, |j| {
                    sum.fetch_add(i * j, SeqCst);
                });
            });
            assert_eq!(sum.load(SeqCst), 4950);
        }
    }

    #[test]
    fn panic_reaches_the_caller_and_the_pool_survives() {
        let threads = Threads::new(3);
        for _ in 0..20 {
            let run = || threads.each(8, |i| assert!(i != 5, "five"));
            assert!(caught(run).unwrap_err().contains("five"), "the panic of any thread is caught");
            threads.each(8, |_| ());
        }
        let caller = || threads.each(2, |_| assert!(std::thread::current().name() == Some("cpu-1")));
        for _ in 0..20 {
            let _ = caught(caller); // panics on the caller's own thread
        }
        assert_eq!(who(&threads), 3, "all threads go on working");
    }

    /// Threads that work on three tasks that wait for each other.
    fn who(threads: &Threads) -> usize {
        let (seen, meeting) = (Mutex::new(std::collections::HashSet::new()), AtomicUsize::new(0));
        threads.each(3, |_| {
            seen.lock().unwrap().insert(std::thread::current().id());
            meeting.fetch_add(1, SeqCst);
            let patience = std::time::Instant::now();
            while meeting.load(SeqCst) < 3 && patience.elapsed().as_secs() < 10 {
                std::thread::yield_now();
            }
        });
        seen.into_inner().unwrap().len()
    }
}
