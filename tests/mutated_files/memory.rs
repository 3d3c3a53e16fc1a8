//! Bytes held by this process, counted by its allocator: the current number, and the peak since [`begin`].

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// More than any case may request: a larger request fails like an exhausted memory.
const MOST: usize = 4 << 30;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Counts `more` bytes; returns false if the total is too large.
fn grows(more: usize) -> bool {
    let live = LIVE.fetch_add(more, Relaxed).saturating_add(more);
    PEAK.fetch_max(live, Relaxed);
    if live > MOST {
        LIVE.fetch_sub(more, Relaxed);
        crate::name_the_case("asks for more than 4 GiB");
    }
    live <= MOST
}

// SAFETY: every request goes to the system's allocator unchanged, or fails with null; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match grows(layout.size()) {
            // SAFETY: the caller keeps the contract of `alloc`.
            true => unsafe { System.alloc(layout) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match grows(layout.size()) {
            // SAFETY: the caller keeps the contract of `alloc_zeroed`.
            true => unsafe { System.alloc_zeroed(layout) },
            false => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `at` came from the system's allocator with this layout.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() && !grows(size - layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of `realloc`; `at` came from the system's allocator.
        let moved = unsafe { System.realloc(at, layout, size) };
        if size < layout.size() {
            LIVE.fetch_sub(layout.size() - size, Relaxed);
        }
        moved
    }
}

/// Resets the peak; returns the bytes held now.
pub fn begin() -> usize {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    live
}

/// The peak since [`begin`], minus the `before` that `begin` returned.
pub fn most(before: usize) -> usize {
    PEAK.load(Relaxed).saturating_sub(before)
}
