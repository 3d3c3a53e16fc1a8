//! The allocator of the process: the system's, with two limits.
//!
//! Where the system has no memory left, the process ends with a line that gives the solution and exit code 1 instead of
//! a signal. [`within`] limits third-party code that untrusted input controls: a chat template or a tokenizer.json can
//! double a text until the machine has no memory left, and the libraries that run them have no limit. The allocator
//! counts the bytes of one thread meanwhile. A failed allocation aborts a Rust process, so above this limit too the
//! process prints one line and ends with exit code 1.

use crate::support::stderr::say;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::io::Write;

/// `LEFT` where bytes are not counted.
const UNBOUNDED: isize = isize::MAX;

thread_local! {
    /// Bytes that this thread may still allocate.
    static LEFT: Cell<isize> = const { Cell::new(UNBOUNDED) };
    /// The line that is printed at the end of the process.
    static LINE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `run`, which may allocate up to `bytes` beyond the current memory of this thread. Above the limit the process
/// prints `line` and exits with code 1. Threads that `run` starts are not counted.
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

/// Install it as `#[global_allocator]`; otherwise nothing is limited.
pub struct Allocator;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn count(bytes: isize) {
    let left = LEFT.get();
    if left != UNBOUNDED {
        let left = left.saturating_sub(bytes).min(UNBOUNDED - 1);
        LEFT.set(left);
        if left < 0 {
            end();
        }
    }
}

#[cold]
fn end() -> ! {
    LEFT.set(UNBOUNDED);
    say!("error: {}", LINE.take());
    super::end::leave(1)
}

/// Returns the allocated pointer, or ends the process where it is null.
fn or_end(allocated: *mut u8, bytes: usize) -> *mut u8 {
    if !allocated.is_null() {
        return allocated;
    }
    // This code must not allocate, so the line is written into a buffer on the stack.
    let mut line = [0; 256];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "error: out of memory: {bytes} bytes could not be allocated: raise the limit (ulimit -v, the container's memory); \
         a run needs less with a lower --rank, --micro-batch-tokens or --threads"
    );
    let left = rest.len();
    let _ = std::io::stderr().write_all(&line[..line.len() - left]);
    // SAFETY: ends the process without running code that could allocate.
    unsafe { libc::_exit(1) }
}

// SAFETY: every call goes to the system's allocator unchanged, and its result is returned unchanged; counting allocates
// nothing and does not unwind.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller guarantees the same conditions.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller guarantees the same conditions.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller guarantees the same conditions.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        count(new as isize - layout.size() as isize);
        // SAFETY: the caller guarantees the same conditions.
        or_end(unsafe { System.realloc(pointer, layout, new) }, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_counts_held_bytes_and_ends_with_its_scope() {
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
