//! A model without its numbers: configuration, tokenizer, and of each file of weights the header that lists its
//! tensors. Behind the header the file is a hole of the right length, so that everything that opens a model and reads
//! no weight takes it as it is. It lies in a cache of its own, never where whole models are looked for, and several
//! processes may make it at once: every file appears whole.

use super::cache::{INDEX, Repository, SMALL_FILES};
use super::{Progress, Session};
use crate::format::atomic;
use crate::format::error::FormatError;
use crate::format::safetensors::MOST_HEADER_BYTES;
use futures::StreamExt;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What is asked for first: most headers are in it.
const FIRST: u64 = 1 << 18;

impl Session<'_> {
    /// The outline of `commit`, whose small files are in the snapshot, in `cache`.
    pub(super) async fn outline(
        &self,
        commit: &str,
        weights: &[String],
        (cache, progress): (&Path, &mut dyn FnMut(&Progress)),
    ) -> Result<PathBuf, FormatError> {
        let (whole, folder) = (self.here.snapshot(commit), Repository::new(cache, self.id).snapshot(commit));
        fs::create_dir_all(&folder).map_err(|e| FormatError::io(&folder, e))?;
        for name in SMALL_FILES.iter().chain([&INDEX]).filter(|name| whole.join(name).is_file()) {
            let to = folder.join(name);
            let bytes = fs::read(whole.join(name)).map_err(|e| FormatError::io(&whole, e))?;
            atomic::write_file(&to, &bytes)?;
        }
        for file in self.list(commit, weights).await? {
            let path = folder.join(&file.name);
            if fs::metadata(&path).is_ok_and(|there| there.len() == file.size) {
                continue;
            }
            let header = self.header(commit, &file.name, file.size).await?;
            let done = header.len() as u64;
            atomic::write_checked(&path, |temporary| {
                hole(temporary, &header, file.size).map_err(|e| FormatError::io(&path, e))
            })?;
            progress(&Progress { file: format!("{}, its header", file.name), done, total: done });
        }
        Ok(folder)
    }

    /// The length of the header, and the header.
    async fn header(&self, commit: &str, name: &str, size: u64) -> Result<Vec<u8>, FormatError> {
        let mut bytes = self.beginning(commit, name, FIRST.min(size)).await?;
        let length = bytes.first_chunk::<8>().map(|length| u64::from_le_bytes(*length));
        let fits = |n: &u64| *n <= MOST_HEADER_BYTES && *n + 8 <= size;
        let end = length.filter(fits).map(|n| n + 8);
        let end = end.ok_or_else(|| self.odd(&format!("'{name}' does not begin as a safetensors file")))?;
        if (bytes.len() as u64) < end {
            bytes = self.beginning(commit, name, end).await?;
        }
        bytes.truncate(end as usize);
        Ok(bytes)
    }

    /// The first bytes of a file; a server that knows no ranges is not listened to any longer than that.
    async fn beginning(&self, commit: &str, name: &str, most: u64) -> Result<Vec<u8>, FormatError> {
        let request = self.repo.download_file_stream().filename(name).revision(commit).range(0..most);
        let (_, mut stream) = self.timed(request.send()).await?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < most {
            let next =
                tokio::time::timeout(self.patience, stream.next()).await.map_err(|_| self.stalled())?;
            let Some(chunk) = next else {
                return Err(self.odd(&format!("'{name}' ended at byte {} of {most}", bytes.len())));
            };
            bytes.extend_from_slice(&chunk.map_err(|e| self.explain(&e))?);
        }
        bytes.truncate(most as usize);
        Ok(bytes)
    }
}

/// A file that begins with those bytes and is that long.
fn hole(path: &Path, beginning: &[u8], size: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(beginning)?;
    file.set_len(size)
}
