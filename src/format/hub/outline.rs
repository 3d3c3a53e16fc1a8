//! A model without the values of its weights: configuration, tokenizer, and the header of each weight file, which lists
//! its tensors. After the header the file is a hole of the right length, so that code that opens a model without
//! reading weights can use it unchanged. Outlines are in a separate cache, which is never searched for complete models.
//! Several processes may create the same outline at once: every file is written atomically.

use super::cache::{INDEX, Repository, SMALL_FILES};
use super::client::Failure;
use super::{Kind, Progress, Session, odd};
use crate::format::atomic;
use crate::format::error::FormatError;
use crate::format::safetensors::header_len;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Size of the first request: most headers fit.
const FIRST: u64 = 1 << 18;

impl Session {
    /// Creates the outline of `commit` in `cache`; the small files must be in the snapshot.
    pub(super) fn outline(
        &self,
        commit: &str,
        weights: &[String],
        (cache, progress): (&Path, &mut dyn FnMut(&Progress)),
    ) -> Result<PathBuf, FormatError> {
        let (whole, folder) =
            (self.here.snapshot(commit), Repository::new(cache, Kind::Model, &self.id).snapshot(commit));
        fs::create_dir_all(&folder).map_err(|e| FormatError::io(&folder, e))?;
        for name in SMALL_FILES.iter().chain([&INDEX]).filter(|name| whole.join(name).is_file()) {
            let to = folder.join(name);
            let bytes = fs::read(whole.join(name)).map_err(|e| FormatError::io(&whole, e))?;
            atomic::write_file(&to, &bytes)?;
        }
        for file in self.list(commit, weights)? {
            let path = folder.join(&file.name);
            if fs::metadata(&path).is_ok_and(|there| there.len() == file.size) {
                continue;
            }
            let header = self.header(commit, &file.name, file.size)?;
            let done = header.len() as u64;
            atomic::write_checked(&path, |temporary| {
                hole(temporary, &header, file.size).map_err(|e| FormatError::io(&path, e))
            })?;
            progress(&Progress { file: format!("{}, its header", file.name), done, total: done });
        }
        Ok(folder)
    }

    /// The header of a file with its length field.
    fn header(&self, commit: &str, name: &str, size: u64) -> Result<Vec<u8>, FormatError> {
        let mut bytes = self.beginning(commit, name, FIRST.min(size))?;
        let end = bytes.first_chunk().and_then(header_len).filter(|end| *end <= size);
        let end =
            end.ok_or_else(|| odd(&self.id, &format!("'{name}' does not begin as a safetensors file")))?;
        if (bytes.len() as u64) < end {
            bytes = self.beginning(commit, name, end)?;
        }
        bytes.truncate(end as usize);
        Ok(bytes)
    }

    /// The first `most` bytes of a file; from a server that ignores ranges, no further bytes are read.
    fn beginning(&self, commit: &str, name: &str, most: u64) -> Result<Vec<u8>, FormatError> {
        let answer = self.client.content(&self.content_path(commit, name), Some(0..most));
        let (_, content) = answer.map_err(|failure| self.explain(failure))?;
        let mut bytes = Vec::new();
        let read = content.take(most).read_to_end(&mut bytes);
        read.map_err(|e| self.explain(Failure::from(e)))?;
        if (bytes.len() as u64) < most {
            return Err(odd(&self.id, &format!("'{name}' ended at byte {} of {most}", bytes.len())));
        }
        Ok(bytes)
    }
}

/// Creates a file of `size` bytes that begins with `beginning`, followed by a hole.
fn hole(path: &Path, beginning: &[u8], size: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(beginning)?;
    file.set_len(size)
}
