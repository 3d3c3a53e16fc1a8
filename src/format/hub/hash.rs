//! Names of contents at the Hub: the SHA-256 of a large file, and the name that git gives to a small one.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::fs::File;
use std::io::{Read, Result};
use std::path::Path;

/// The SHA-256 of a file.
pub(super) fn sha256(path: &Path) -> Result<String> {
    of(path, Context::new(&SHA256))
}

/// The SHA-1 of the git object of a file, which has `size` bytes.
pub(super) fn git_object(path: &Path, size: u64) -> Result<String> {
    let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    // A git object begins with its kind and its size.
    hash.update(format!("blob {size}\0").as_bytes());
    of(path, hash)
}

fn of(path: &Path, mut hash: Context) -> Result<String> {
    let mut input = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = input.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    Ok(hash.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect())
}
