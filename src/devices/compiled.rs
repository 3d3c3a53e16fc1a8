//! Storage of drivers' compiled kernels between runs: one file per adapter in the user's cache folder, with its BLAKE3
//! hash in front, replaced as a whole. Only time depends on it: an unreadable, unwritable or damaged file counts as
//! missing.

use crate::backend::wgpu::{Adapter, Cache};
use crate::config::cache;
use crate::format::atomic;
use std::path::PathBuf;
use std::sync::Arc;

const HASH: usize = blake3::OUT_LEN;

/// The stored kernels of an adapter, and the function that stores more; `None` where its kind of driver stores none.
pub fn of(adapter: &Adapter) -> Option<Cache> {
    let path = path(adapter)?;
    let found = std::fs::read(&path).ok().and_then(checked);
    let keep = move |data: &[u8]| {
        let folder = path.parent().map(std::fs::create_dir_all);
        let mut bytes = blake3::hash(data).as_bytes().to_vec();
        bytes.extend_from_slice(data);
        if matches!(folder, Some(Ok(()))) {
            // If the write fails, the next run compiles again.
            let _ = atomic::write_file(&path, &bytes);
        }
    };
    Some(Cache { found, keep: Arc::new(keep) })
}

fn path(adapter: &Adapter) -> Option<PathBuf> {
    let key = adapter.cache_key()?;
    Some(cache::folder()?.join("kernels").join(key))
}

fn checked(bytes: Vec<u8>) -> Option<Vec<u8>> {
    let (hash, data) = bytes.split_at_checked(HASH)?;
    (blake3::hash(data).as_bytes() == hash).then(|| data.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_kernel_cache_is_ignored() {
        let mut bytes = blake3::hash(b"kernels").as_bytes().to_vec();
        bytes.extend_from_slice(b"kernels");
        assert_eq!(checked(bytes.clone()), Some(b"kernels".to_vec()));
        bytes[HASH] ^= 1;
        assert_eq!(checked(bytes.clone()), None);
        assert_eq!(checked(bytes[..9].to_vec()), None);
    }
}
