//! Downloads files into the cache. A blob grows as `HASH.incomplete` and gets its final name only when it is complete
//! and its hash is correct. After an interruption the download continues with the missing bytes.

use super::client::{Failure, JSON};
use super::{Progress, Session, encoded, hash, is_plain, odd};
use crate::format::error::FormatError;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// Maximum number of attempts in a row without any data.
pub(super) const FRUITLESS_ATTEMPTS: u32 = 3;
/// Most bytes of a file that the Hub keeps in git itself.
pub(super) const MOST_IN_GIT: u64 = 10 << 20;

/// A file in the listing of the Hub.
pub(super) struct Listed {
    pub name: String,
    pub size: u64,
    /// The SHA-1 of the git object: the name of a small file's blob, and of a partial file.
    oid: String,
    /// The SHA-256 of the content, which is the name of a large file's blob, if the Hub lists it.
    sha256: Option<String>,
    large: bool,
}

impl Session {
    /// Downloads `names` of `commit` into the snapshot, except those that exist.
    pub fn files(
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
        for file in self.list(commit, &wanted)? {
            if !is_plain(&file.oid) || file.sha256.as_deref().is_some_and(|h| !is_plain(h)) {
                return Err(odd(&self.id, &format!("the hash of '{}' is not one", file.name)));
            }
            let blob = self.blob(commit, &file, progress)?;
            self.here.link(commit, &file.name, &blob)?;
        }
        Ok(())
    }

    /// The Hub's listing of the files `names`, in their order.
    pub fn list(&self, commit: &str, names: &[String]) -> Result<Vec<Listed>, FormatError> {
        let path = format!("/api/{}/{}/paths-info/{}", self.kind.plural(), self.id, encoded(commit));
        let answer = self.client.post_json(&path, JSON, &serde_json::json!({"paths": names}));
        let answer = answer.map_err(|failure| self.explain(failure))?;
        let mut all: Vec<_> = answer.as_array().into_iter().flatten().filter_map(listed).collect();
        let take = |name: &String| {
            let at = all.iter().position(|f| f.name == *name);
            at.map(|at| all.swap_remove(at)).ok_or_else(|| odd(&self.id, &format!("it lists no '{name}'")))
        };
        names.iter().map(take).collect()
    }

    /// The blob name of `file`; downloads the blob if necessary.
    fn blob(
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
        self.grow(&partial, commit, file, progress)?;
        let hash = self.checked_hash(&partial, file)?;
        let blob = self.here.blob(&hash);
        fs::rename(&partial, &blob).map_err(|e| FormatError::io(&blob, e))?;
        drop(lock);
        Ok(hash)
    }

    /// Requests missing bytes until the file is complete.
    fn grow(
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
            let end = self.append(&mut out, &mut done, (commit, file), progress);
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
                    std::thread::sleep(Duration::from_millis(500 << fruitless));
                }
            }
        }
        out.sync_all().map_err(fail)
    }

    /// Requests bytes `done..` once and appends them as they arrive.
    fn append(
        &self,
        out: &mut File,
        done: &mut u64,
        (commit, file): (&str, &Listed),
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<(), FormatError> {
        let path = self.here.root().to_owned();
        let fail = |e| FormatError::io(&path, e);
        let range = (*done > 0).then_some(*done..file.size);
        let answer = self.client.content(&self.content_path(commit, &file.name), range);
        let (exact, mut content) = answer.map_err(|failure| self.explain(failure))?;
        if !exact {
            // The server ignores ranges and sends the whole file.
            out.set_len(0).map_err(fail)?;
            *done = 0;
        }
        let mut buffer = vec![0; 1 << 17];
        loop {
            let n = content.read(&mut buffer).map_err(|e| self.explain(Failure::from(e)))?;
            if n == 0 {
                break;
            }
            let chunk = &buffer[..n];
            if *done + chunk.len() as u64 > file.size {
                out.set_len(0).map_err(fail)?;
                *done = 0;
                return Err(odd(&self.id, &format!("it sent more of '{}' than there is", file.name)));
            }
            out.write_all(chunk).map_err(fail)?;
            *done += chunk.len() as u64;
            progress(&Progress { file: file.name.clone(), done: *done, total: file.size });
        }
        if *done < file.size {
            return Err(odd(&self.id, &format!("'{}' ended at byte {done} of {}", file.name, file.size)));
        }
        Ok(())
    }

    /// The hash of the content, which names the blob; a partial file without the listed hash is deleted.
    fn checked_hash(&self, partial: &Path, file: &Listed) -> Result<String, FormatError> {
        let fail = |e| FormatError::io(partial, e);
        let hash = match file.large {
            true => hash::sha256(partial),
            false => hash::git_object(partial, file.size),
        };
        let hash = hash.map_err(fail)?;
        // Of a listing without `lfs`, the oid of a large file is that of its pointer.
        let is_git = file.oid.len() == hash.len() && file.size <= MOST_IN_GIT;
        let listed = if file.large { file.sha256.as_ref() } else { Some(&file.oid).filter(|_| is_git) };
        if let Some(listed) = listed.filter(|listed| !listed.eq_ignore_ascii_case(&hash)) {
            fs::remove_file(partial).map_err(fail)?;
            let name = &file.name;
            return Err(odd(
                &self.id,
                &format!("the content of '{name}' does not have its hash {listed}, but {hash}"),
            ));
        }
        Ok(hash)
    }
}

/// A file of the listing; `None` for a folder.
fn listed(entry: &serde_json::Value) -> Option<Listed> {
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let (name, size, oid) = (text(&entry["path"])?, entry["size"].as_u64()?, text(&entry["oid"])?);
    (entry["type"] == "file").then(|| Listed {
        name,
        size,
        oid,
        sha256: text(&entry["lfs"]["oid"]),
        large: entry["lfs"].is_object(),
    })
}
