//! A read-only memory map of a file: the only `unsafe` code of this floor.
//!
//! Weights are mapped because reading them would double the memory. The operating system does not guarantee that a
//! mapped file stays unchanged. If another program truncates the file, an access to the missing part is a bus error: a
//! handler prints the name of the file and ends the process with exit code 1. A change in place is not detected: the
//! values are then those of the new bytes. (This program, like others, writes a new file and renames it.)

use super::error::FormatError;
use crate::numeric::tensor::Use;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file; empty for an empty file.
#[derive(Debug)]
pub struct Map(Option<Mapped>);

#[derive(Debug)]
struct Mapped {
    // Must be dropped before `map`: after unmapping, another file may use the addresses.
    _watched: fault::Watched,
    map: memmap2::Mmap,
}

impl Map {
    /// Maps `path`; an error if it is missing, unreadable or a directory.
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let fail = |cause| FormatError::io(path, cause);
        let file = File::open(path).map_err(fail)?;
        let about = file.metadata().map_err(fail)?;
        if !about.is_file() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "not a file")));
        }
        if about.len() == 0 {
            return Ok(Map(None));
        }
        // SAFETY: the map is read-only; the top of this file describes the effect of
        // another program that truncates the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        let watched = fault::watch(&map, path);
        Ok(Map(Some(Mapped { map, _watched: watched })))
    }
}

/// Tells the system when these bytes of a [`Map`] will be read. Other bytes are left alone.
pub fn advise(bytes: &[u8], when: Use) {
    fault::advise(bytes, when);
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |mapped| &mapped.map)
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Handling of bus errors in mapped files.
#[cfg(unix)]
mod fault {
    use crate::numeric::tensor::Use;
    use std::path::Path;
    use std::sync::Once;
    use std::sync::atomic::{AtomicPtr, Ordering};

    /// Maximum number of watched files; a bus error in any further mapped file has no name.
    const MOST: usize = 256;

    /// A mapped file, for the signal handler: no allocation, lock or deallocation is needed.
    struct Entry {
        start: usize,
        length: usize,
        line: Vec<u8>,
    }

    /// Read by the signal handler. An entry is never freed, because the handler of another thread may be reading it.
    static MAPPED: [AtomicPtr<Entry>; MOST] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST];

    /// Ends the watch when dropped.
    #[derive(Debug)]
    pub struct Watched(Option<usize>);

    impl Drop for Watched {
        fn drop(&mut self) {
            if let Some(i) = self.0 {
                MAPPED[i].store(std::ptr::null_mut(), Ordering::Release);
            }
        }
    }

    pub fn watch(bytes: &[u8], path: &Path) -> Watched {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(install);
        let line = format!(
            "error: {}: the file was cut short or its disk failed while the model was in use: restore it, then run \
             this again (a run goes on with --resume)\n",
            crate::support::stderr::inline(&path.display().to_string())
        );
        let (start, length) = (bytes.as_ptr() as usize, bytes.len());
        let entry = Box::into_raw(Box::new(Entry { start, length, line: line.into_bytes() }));
        let free = |slot: &AtomicPtr<Entry>| {
            let empty = std::ptr::null_mut();
            slot.compare_exchange(empty, entry, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Watched(MAPPED.iter().position(free))
    }

    /// Frees or reads ahead the pages of `bytes`, if a watched file holds them: only of a file the system can read the
    /// freed pages again.
    pub fn advise(bytes: &[u8], when: Use) {
        let (start, length) = (bytes.as_ptr() as usize, bytes.len());
        let within = |slot: &AtomicPtr<Entry>| {
            // SAFETY: entries are never freed.
            let entry = unsafe { slot.load(Ordering::Acquire).as_ref() };
            entry.is_some_and(|e| start >= e.start && start + length <= e.start + e.length)
        };
        if length == 0 || !MAPPED.iter().any(within) {
            return;
        }
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
        let first = start / page * page;
        let advice = match when {
            Use::Soon => libc::MADV_WILLNEED,
            Use::Later => libc::MADV_DONTNEED,
        };
        // SAFETY: a shared, read-only map of a file has no private pages: freed pages are read again from the file, and
        // the borrow keeps the map. A failure is without effect.
        unsafe {
            libc::madvise(first as *mut libc::c_void, start + length - first, advice);
        }
    }

    fn install() {
        // SAFETY: the structure is plain data, all zeros is a valid value, and the handler has the signature that
        // SA_SIGINFO requires.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }

    /// Makes only async-signal-safe calls: atomics, write, _exit, sigaction.
    extern "C" fn on_bus_error(_: libc::c_int, about: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes a valid siginfo_t; entries are never freed and contain a complete line.
        unsafe {
            let at = (*about).si_addr() as usize;
            for slot in &MAPPED {
                let Some(entry) = slot.load(Ordering::Acquire).as_ref() else { continue };
                if at.wrapping_sub(entry.start) < entry.length {
                    libc::write(2, entry.line.as_ptr().cast(), entry.line.len());
                    libc::_exit(1);
                }
            }
            // For any other bus error the default action applies when the instruction is repeated.
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }
}

/// Windows does not allow truncation of a mapped file.
#[cfg(not(unix))]
mod fault {
    use crate::numeric::tensor::Use;
    use std::path::Path;

    #[derive(Debug)]
    pub struct Watched;

    pub fn watch(_: &[u8], _: &Path) -> Watched {
        Watched
    }

    pub fn advise(_: &[u8], _: Use) {}
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::process::Command;

    const NAME: &str = "format::map::tests::truncated_map_ends_the_process_with_one_line";

    /// The test starts itself as a child process, because the other half ends in a signal handler.
    #[test]
    fn truncated_map_ends_the_process_with_one_line() {
        let path = std::env::temp_dir().join(format!("map-cut-short-{}", std::process::id()));
        if let Some(path) = std::env::var_os("FINETUNE_TEST_CUT_SHORT") {
            let map = Map::open(Path::new(&path)).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
            std::process::exit(i32::from(std::hint::black_box(map[100_000])) + 40);
        }
        std::fs::write(&path, vec![0u8; 200_000]).unwrap();
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env("FINETUNE_TEST_CUT_SHORT", &path)
            .output()
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{text}");
        assert!(text.contains(&format!("error: {}: the file was cut short", path.display())), "{text}");
    }
}
