//! The only `unsafe` of this floor: a file mapped into memory, read-only.
//!
//! The system does not promise that the file stays as it is: a file that another program cuts short while it
//! is mapped ends this one with a bus error. Weights are never rewritten in place (we write beside and rename,
//! as others do), and reading them instead would double the memory, so the map is worth it.

use super::error::FormatError;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file; empty for an empty file.
#[derive(Debug)]
pub struct Map(Option<memmap2::Mmap>);

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
        // happens to it when somebody else cuts the file short.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(fail)?;
        Ok(Map(Some(map)))
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or(&[])
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
