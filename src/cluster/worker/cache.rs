//! Cache of base models by content: a folder named by the model's hash. It appears only once every file in it has
//! the hash that the coordinator named, and it is checked again at every use. Partially fetched files are kept
//! beside it and completed later. One worker of a machine fetches at a time; the others use the result.

use super::Outcome;
use super::outbox::Outbox;
use super::progress;
use crate::cluster::message::{Hash, Manifest, ModelFile, ToCoordinator, ToWorker};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of one request; two requests are outstanding at a time.
const REQUEST: u64 = 8 << 20;
/// Interval between checks of a lock that another worker holds.
const LOOK: Duration = Duration::from_millis(100);

/// Why a fetched file is refused.
pub(super) const OTHER: &str = "what came from the coordinator has another hash";

/// The folder of cached models.
#[derive(Debug, Clone)]
pub struct Cache {
    pub(super) root: PathBuf,
}

/// The error of a file operation.
pub(super) fn fail(path: &Path, e: impl std::fmt::Display) -> Outcome {
    Outcome::Failed { reason: format!("{}: {e}", path.display()) }
}

impl Cache {
    /// A cache in `root`, which is created when needed.
    pub fn new(root: PathBuf) -> Self {
        Cache { root }
    }

    /// The path of the run's model, from the cache or fetched.
    pub(super) async fn obtain(
        &self,
        manifest: &Manifest,
        outbox: &mut Outbox<'_>,
        say: &dyn Fn(&str),
    ) -> Result<PathBuf, Outcome> {
        check_names(manifest)?;
        std::fs::create_dir_all(&self.root).map_err(|e| fail(&self.root, e))?;
        let whole = self.root.join(&manifest.model_hash);
        let _lock = self.lock(&manifest.model_hash, outbox, say).await?;
        if whole.is_dir() {
            let (dir, files) = (whole.clone(), manifest.files.clone());
            match outbox.meanwhile(move || files.into_iter().find(|file| !holds(&dir, file))).await? {
                None => return Ok(opens(&whole, manifest)),
                Some(file) => {
                    say(&format!("{}: {} is damaged: fetched again", whole.display(), file.name));
                    // The undamaged files of the folder are kept for the fetch.
                    let partial = self.partial(manifest);
                    let _ = std::fs::remove_dir_all(&partial);
                    std::fs::rename(&whole, &partial).map_err(|e| fail(&whole, e))?;
                }
            }
        }
        self.fetch(manifest, outbox, say).await?;
        let partial = self.partial(manifest);
        std::fs::rename(&partial, &whole).map_err(|e| fail(&whole, e))?;
        // Makes sure that the folder's contents reach the disk before its name does.
        let _ = File::open(&self.root).and_then(|dir| dir.sync_all());
        Ok(opens(&whole, manifest))
    }

    fn partial(&self, manifest: &Manifest) -> PathBuf {
        self.root.join(format!("{}.partial", manifest.model_hash))
    }

    /// Locks a model while it is checked or fetched. The system releases the lock however the process ends.
    pub(super) async fn lock(
        &self,
        model: &str,
        outbox: &mut Outbox<'_>,
        say: &dyn Fn(&str),
    ) -> Result<File, Outcome> {
        let path = self.root.join(format!("{model}.lock"));
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|e| fail(&path, e))?;
        let mut said = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(e)) => return Err(fail(&path, e)),
                Err(TryLockError::WouldBlock) => {}
            }
            if !said {
                say("another worker of this machine fetches the model: waiting for it");
                said = true;
            }
            if let Ok(heard) = tokio::time::timeout(LOOK, outbox.hear()).await {
                heard?;
            }
        }
    }

    /// Fetches every missing file and checks it.
    async fn fetch(
        &self,
        manifest: &Manifest,
        outbox: &mut Outbox<'_>,
        say: &dyn Fn(&str),
    ) -> Result<(), Outcome> {
        let dir = self.partial(manifest);
        std::fs::create_dir_all(&dir).map_err(|e| fail(&dir, e))?;
        let total: u64 = manifest.files.iter().map(|f| f.size).sum();
        say(&format!("fetching {} from the coordinator: {:.1} MB", manifest.model, total as f64 / 1e6));
        let come = outbox.come.clone();
        let work = async {
            for (index, file) in (0..).zip(&manifest.files) {
                checked_file(&dir.join(&file.name), index, file, outbox).await?;
            }
            Ok(())
        };
        progress::during((&come, total), say, work).await
    }
}

/// Fetches a file and checks it.
pub(super) async fn checked_file(
    path: &Path,
    index: u32,
    file: &ModelFile,
    outbox: &mut Outbox<'_>,
) -> Result<(), Outcome> {
    // A second attempt starts from the beginning, in case the partial file was of other contents.
    for attempt in 0..2 {
        one_file(path, index, file, outbox).await?;
        let read = path.to_path_buf();
        match outbox.meanwhile(move || hash(&read)).await? {
            Ok(found) if found == file.hash => break,
            Ok(_) if attempt == 0 => std::fs::remove_file(path).map_err(|e| fail(path, e))?,
            Ok(_) => return Err(fail(path, OTHER)),
            Err(e) => return Err(fail(path, e)),
        }
    }
    Ok(())
}

/// Fetches the rest of a file, from its current end.
async fn one_file(path: &Path, index: u32, file: &ModelFile, outbox: &mut Outbox<'_>) -> Result<(), Outcome> {
    let to_disk = |e: std::io::Error| fail(path, e);
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let mut out = opened.map_err(to_disk)?;
    let mut have = out.metadata().map_err(to_disk)?.len();
    if have > file.size {
        out.set_len(0).map_err(to_disk)?;
        have = 0;
    }
    out.seek(std::io::SeekFrom::Start(have)).map_err(to_disk)?;
    outbox.come.fetch_add(have, Ordering::Relaxed);
    span(index, have..file.size, outbox, &mut |bytes| out.write_all(bytes).map_err(to_disk)).await?;
    out.sync_all().map_err(to_disk)
}

/// Fetches these bytes of a file, in order.
pub(super) async fn span(
    index: u32,
    bytes: Range<u64>,
    outbox: &mut Outbox<'_>,
    take: &mut dyn FnMut(&[u8]) -> Result<(), Outcome>,
) -> Result<(), Outcome> {
    let (mut have, mut asked) = (bytes.start, bytes.start);
    while have < bytes.end {
        while asked < bytes.end && asked < have + 2 * REQUEST {
            let len = REQUEST.min(bytes.end - asked);
            outbox.say(ToCoordinator::Fetch { file: index, offset: asked, len });
            asked += len;
        }
        match outbox.hear().await? {
            ToWorker::Piece { file: of, offset, bytes: piece } if of == index && offset == have => {
                if piece.is_empty() || piece.len() as u64 > bytes.end - have {
                    return Err(Outcome::Lost { reason: "a piece of the model has the wrong size".into() });
                }
                take(&piece)?;
                have += piece.len() as u64;
                outbox.come.fetch_add(piece.len() as u64, Ordering::Relaxed);
            }
            ToWorker::Piece { .. } => {
                return Err(Outcome::Lost { reason: "a piece of the model that was not asked for".into() });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Names come from another machine: only plain names may become files.
pub(super) fn check_names(manifest: &Manifest) -> Result<(), Outcome> {
    let plain = |name: &str| {
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.+ ".contains(c);
        !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(legal)
    };
    let names = manifest.files.iter().map(|f| f.name.as_str()).chain([manifest.model_hash.as_str()]);
    match names.into_iter().find(|name| !plain(name)) {
        None => Ok(()),
        Some(name) => {
            Err(Outcome::Refused { reason: format!("the coordinator names a file {name:?}: refused") })
        }
    }
}

/// The path to open: the folder, or the single file of a GGUF model.
pub(super) fn opens(dir: &Path, manifest: &Manifest) -> PathBuf {
    match manifest.files.as_slice() {
        [one] if !one.name.ends_with(".safetensors") => dir.join(&one.name),
        _ => dir.to_path_buf(),
    }
}

pub(super) fn holds(dir: &Path, file: &ModelFile) -> bool {
    let path = dir.join(&file.name);
    let size = std::fs::metadata(&path).map(|about| about.len());
    size.is_ok_and(|size| size == file.size) && hash(&path).is_ok_and(|found| found == file.hash)
}

fn hash(path: &Path) -> std::io::Result<Hash> {
    Ok(*blake3::Hasher::new().update_mmap_rayon(path)?.finalize().as_bytes())
}
