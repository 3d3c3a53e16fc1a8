//! A bound on the memory of third-party code that untrusted input controls: a chat template or a tokenizer.json can
//! double a text until the machine has no memory left, and the libraries that run them have no limit.
//!
//! The allocator of the process counts the bytes of one thread while [`within`] runs. A failed allocation aborts a Rust
//! process, so that above the bound the process says one line and ends with exit code 1.

use crate::numeric::say::say;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};

#[global_allocator]
static COUNTING: Counting = Counting;

/// `LEFT` where nothing is counted.
const UNBOUNDED: isize = isize::MAX;

thread_local! {
    /// Bytes that this thread may still allocate.
    static LEFT: Cell<isize> = const { Cell::new(UNBOUNDED) };
    /// The line for the end of the process.
    static LINE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `run`, which may hold up to `bytes` of memory beyond what this thread holds now. Above it the process says
/// `line` and exits with code 1. Threads that `run` starts are not counted.
pub fn within<T>(bytes: usize, line: String, run: impl FnOnce() -> T) -> T {
    struct Before(isize, String);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
            LINE.replace(std::mem::take(&mut self.1));
        }
    }
    let _before = Before(LEFT.get(), LINE.replace(line));
    LEFT.set(isize::try_from(bytes).unwrap_or(UNBOUNDED));
    run()
}

struct Counting;

impl Counting {
    fn count(&self, bytes: isize) {
        let left = LEFT.get();
        if left != UNBOUNDED {
            let left = left.saturating_sub(bytes).min(UNBOUNDED - 1);
            LEFT.set(left);
            if left < 0 {
                end();
            }
        }
    }
}

#[cold]
fn end() -> ! {
    LEFT.set(UNBOUNDED);
    say!("error: {}", LINE.take());
    std::process::exit(1)
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing, and does not unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.count(-(layout.size() as isize));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        self.count(new as isize - layout.size() as isize);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, new) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_counts_what_is_held_and_ends_with_the_scope() {
        let used = within(1 << 20, "too much".into(), || {
            for _ in 0..100 {
                drop(std::hint::black_box(vec![1u8; 100_000]));
            }
            let held = std::hint::black_box(vec![1u8; 500_000]);
            (1 << 20) - LEFT.get() - held.len() as isize
        });
        assert!((0..1000).contains(&used), "{used}");
        assert_eq!(LEFT.get(), UNBOUNDED);
        let all = within(10, "outer".into(), || within(1 << 20, "inner".into(), || vec![0u8; 1000].len()));
        assert_eq!(all, 1000, "an inner scope has a bound of its own");
    }
}
