//! Downloads files into the cache. A blob grows as `HASH.incomplete` and gets its final name only when it is complete
//! and its hash is correct. After an interruption the download continues with the missing bytes.

use super::{Progress, Session, is_plain};
use crate::format::error::FormatError;
use futures::StreamExt;
use hf_hub::repository::RepoTreeEntry;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// Maximum number of attempts in a row without any data.
const FRUITLESS_ATTEMPTS: u32 = 3;

/// A file in the listing of the Hub.
pub(super) struct Listed {
    pub name: String,
    pub size: u64,
    /// The hash of the git object: the name of a small file's blob, and of a partial file.
    oid: String,
    /// The SHA-256 of the content, which is the name of a large file's blob, if the Hub lists it.
    sha256: Option<String>,
    large: bool,
}

impl Session<'_> {
    /// Downloads `names` of `commit` into the snapshot, except those that exist.
    pub async fn files(
        &self,
        commit: &str,
        names: &[String],
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), FormatError> {
        let missing = |name: &&String| !self.here.snapshot(commit).join(name).is_file();
        let wanted: Vec<String> = names.iter().filter(missing).cloned().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        for file in self.list(commit, &wanted).await? {
            if !is_plain(&file.oid) || file.sha256.as_deref().is_some_and(|h| !is_plain(h)) {
                return Err(self.odd(&format!("the hash of '{}' is not one", file.name)));
            }
            let blob = self.blob(commit, &file, progress).await?;
            self.here.link(commit, &file.name, &blob)?;
        }
        Ok(())
    }

    /// The Hub's listing of the files `names`, in their order.
    pub async fn list(&self, commit: &str, names: &[String]) -> Result<Vec<Listed>, FormatError> {
        let request = self.repo.get_paths_info().paths(names.to_vec()).revision(commit).send();
        let mut all = self.timed(request).await?.into_iter().filter_map(listed).collect::<Vec<_>>();
        let take = |name: &String| {
            let at = all.iter().position(|f| f.name == *name);
            at.map(|at| all.swap_remove(at)).ok_or_else(|| self.odd(&format!("it lists no '{name}'")))
        };
        names.iter().map(take).collect()
    }

    /// The blob name of `file`; downloads the blob if necessary.
    async fn blob(
        &self,
        commit: &str,
        file: &Listed,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<String, FormatError> {
        let known = if file.large { file.sha256.clone() } else { Some(file.oid.clone()) };
        let whole = |hash: &String| fs::metadata(self.here.blob(hash)).is_ok_and(|m| m.len() == file.size);
        if let Some(hash) = known.clone().filter(whole) {
            return Ok(hash);
        }
        let lock = self.here.lock(known.as_ref().unwrap_or(&file.oid))?;
        if let Some(hash) = known.clone().filter(whole) {
            return Ok(hash);
        }
        let partial = self.here.blob(&format!("{}.incomplete", known.as_ref().unwrap_or(&file.oid)));
        if let Some(blobs) = partial.parent() {
            fs::create_dir_all(blobs).map_err(|e| FormatError::io(blobs, e))?;
        }
        self.grow(&partial, commit, file, progress).await?;
        let hash = if file.large { self.checked_sha256(&partial, file)? } else { file.oid.clone() };
        let blob = self.here.blob(&hash);
        fs::rename(&partial, &blob).map_err(|e| FormatError::io(&blob, e))?;
        drop(lock);
        Ok(hash)
    }

    /// Requests missing bytes until the file is complete.
    async fn grow(
        &self,
        partial: &Path,
        commit: &str,
        file: &Listed,
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), FormatError> {
        let fail = |e| FormatError::io(partial, e);
        let mut out = OpenOptions::new().create(true).append(true).open(partial).map_err(fail)?;
        let mut done = out.metadata().map_err(fail)?.len();
        if done > file.size {
            out.set_len(0).map_err(fail)?;
            done = 0;
        }
        let mut fruitless = 0;
        while done < file.size {
            let before = done;
            let end = self.append(&mut out, &mut done, (commit, file), progress).await;
            match end {
                Ok(()) => {}
                Err(error) if !matches!(error, FormatError::Hub { permanent: false, .. }) => {
                    return Err(error);
                }
                Err(_) if done > before => fruitless = 0,
                Err(error) => {
                    fruitless += 1;
                    if fruitless >= FRUITLESS_ATTEMPTS {
                        return Err(error);
                    }
                    tokio::time::sleep(Duration::from_millis(500 << fruitless)).await;
                }
            }
        }
        out.sync_all().map_err(fail)
    }

    /// Requests bytes `done..` once and appends them as they arrive.
    async fn append(
        &self,
        out: &mut File,
        done: &mut u64,
        (commit, file): (&str, &Listed),
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), FormatError> {
        let path = self.here.root().to_owned();
        let fail = |e| FormatError::io(&path, e);
        let range = (*done > 0).then_some(*done..file.size);
        let request =
            self.repo.download_file_stream().filename(&file.name).revision(commit).maybe_range(range);
        let (_, mut stream) = self.timed(request.send()).await?;
        loop {
            let next =
                tokio::time::timeout(self.patience, stream.next()).await.map_err(|_| self.stalled())?;
            let Some(chunk) = next else { break };
            let chunk = chunk.map_err(|e| self.explain(&e))?;
            if *done + chunk.len() as u64 > file.size {
                // More bytes than requested: the server ignores ranges and sent the whole file.
                out.set_len(0).map_err(fail)?;
                *done = 0;
                return Err(self.odd(&format!("it sent more of '{}' than there is", file.name)));
            }
            out.write_all(&chunk).map_err(fail)?;
            *done += chunk.len() as u64;
            progress(&Progress { file: file.name.clone(), done: *done, total: file.size });
        }
        if *done < file.size {
            return Err(self.odd(&format!("'{}' ended at byte {done} of {}", file.name, file.size)));
        }
        Ok(())
    }

    /// The hash of the content; a partial file with the wrong hash is deleted.
    fn checked_sha256(&self, partial: &Path, file: &Listed) -> Result<String, FormatError> {
        let fail = |e| FormatError::io(partial, e);
        let mut hasher = Sha256::new();
        let mut input = File::open(partial).map_err(fail)?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = input.read(&mut buffer).map_err(fail)?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
        }
        let hash: String = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if file.sha256.as_ref().is_some_and(|expected| *expected != hash) {
            fs::remove_file(partial).map_err(fail)?;
            return Err(self.odd(&format!("the content of '{}' does not have its hash", file.name)));
        }
        Ok(hash)
    }
}

fn listed(entry: RepoTreeEntry) -> Option<Listed> {
    match entry {
        RepoTreeEntry::File { path, size, oid, lfs, .. } => {
            let large = lfs.is_some();
            Some(Listed { name: path, size, oid, sha256: lfs.and_then(|l| l.sha256), large })
        }
        RepoTreeEntry::Directory { .. } => None,
    }
}
