//! The system's allocator, but for how the process ends where there is no memory left: by a line that says what to do and
//! the exit code of a failure, not by a signal. Whoever can go on with less has to ask for less beforehand.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;

/// To be a binary's `#[global_allocator]`.
pub struct OrLine;

/// What was allocated, or the end of the process.
fn or_line(allocated: *mut u8, bytes: usize) -> *mut u8 {
    if !allocated.is_null() {
        return allocated;
    }
    // Nothing may be allocated here, so the line is written into a buffer of the stack.
    let mut line = [0; 256];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "error: out of memory: {bytes} bytes could not be allocated: lower --rank, --micro-batch-tokens or --threads, or \
         raise the limit (ulimit -v, the container's memory)"
    );
    let left = rest.len();
    let _ = std::io::stderr().write_all(&line[..line.len() - left]);
    // SAFETY: ends the process without running anything of it that could allocate.
    unsafe { libc::_exit(1) }
}

// SAFETY: every call is passed on to the system's allocator, and what it gives is returned as it is.
unsafe impl GlobalAlloc for OrLine {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        or_line(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        or_line(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        or_line(unsafe { System.realloc(old, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}
