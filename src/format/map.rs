//! A file mapped into memory, read-only: the only `unsafe` of this floor.
//!
//! Weights are mapped, because reading them would double the memory. The system does not promise that a mapped file
//! stays as it is. Where another program cuts it short, the next look at the missing part is a bus error: a handler
//! says which file it was and ends the process with code 1. A file that is changed in place is not detected:
//! the numbers are then those of the new bytes. (This program, and others, write beside a file and rename.)

use super::error::FormatError;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file; empty for an empty file.
#[derive(Debug)]
pub struct Map(Option<Mapped>);

#[derive(Debug)]
struct Mapped {
    // Dropped before `map`: once that is unmapped, its addresses may be another file's.
    _watched: fault::Watched,
    map: memmap2::Mmap,
}

impl Map {
    /// Maps `path`; an error where it is missing, unreadable or a directory.
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
        // SAFETY: the map is read-only and private to this process; see the head of this file for what
        // happens to it when another program cuts the file short.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        let watched = fault::watch(&map, path);
        Ok(Map(Some(Mapped { map, _watched: watched })))
    }
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

/// Bus errors in mapped files.
#[cfg(unix)]
mod fault {
    use std::path::Path;
    use std::sync::Once;
    use std::sync::atomic::{AtomicPtr, Ordering};

    /// Files that are watched at once; more stay mapped, and their bus error has no name.
    const MOST: usize = 256;

    /// A mapped file, as the handler needs it: nothing to allocate, lock or free.
    struct Entry {
        start: usize,
        length: usize,
        line: Vec<u8>,
    }

    /// The handler reads these; an entry is never freed, because the handler of another thread may be reading it.
    static MAPPED: [AtomicPtr<Entry>; MOST] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST];

    /// Ends the watch when it is dropped.
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
            crate::numeric::say::inline(&path.display().to_string())
        );
        let (start, length) = (bytes.as_ptr() as usize, bytes.len());
        let entry = Box::into_raw(Box::new(Entry { start, length, line: line.into_bytes() }));
        let free = |slot: &AtomicPtr<Entry>| {
            let empty = std::ptr::null_mut();
            slot.compare_exchange(empty, entry, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Watched(MAPPED.iter().position(free))
    }

    fn install() {
        // SAFETY: the structure is plain data, all zeroes is a value of it, and the handler has the signature that
        // SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }

    /// Only calls that a signal handler may make: atomics, write, _exit, sigaction.
    extern "C" fn on_bus_error(_: libc::c_int, about: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes a valid siginfo_t; entries are never freed, and hold their line whole.
        unsafe {
            let at = (*about).si_addr() as usize;
            for slot in &MAPPED {
                let Some(entry) = slot.load(Ordering::Acquire).as_ref() else { continue };
                if at.wrapping_sub(entry.start) < entry.length {
                    libc::write(2, entry.line.as_ptr().cast(), entry.line.len());
                    libc::_exit(1);
                }
            }
            // Another fault: the system's own answer, when the instruction is tried again.
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }
}

/// A mapped file cannot be cut short on Windows.
#[cfg(not(unix))]
mod fault {
    use std::path::Path;

    #[derive(Debug)]
    pub struct Watched;

    pub fn watch(_: &[u8], _: &Path) -> Watched {
        Watched
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::process::Command;

    const NAME: &str = "format::map::tests::truncated_map_ends_with_one_line";

    /// The test starts itself, because its other half ends by a signal handler.
    #[test]
    fn truncated_map_ends_with_one_line() {
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
