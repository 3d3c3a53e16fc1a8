//! Base models by their content: a folder under the model's hash, which appears only once every file in it has the
//! hash that the coordinator named, and is checked again whenever it is used. Files that are on their way lie beside
//! it and are gone on with; one worker of a machine fetches at a time, and the others find what it has fetched.

use super::Outcome;
use super::outbox::Outbox;
use crate::cluster::message::{Hash, Manifest, ModelFile, ToCoordinator, ToWorker};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes that are asked for at a time; two such parts are on their way.
const PART: u64 = 8 << 20;
/// How often a folder that another worker fetches into is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Where models are kept.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// A file that a thing went wrong with.
fn fail(path: &Path, e: impl std::fmt::Display) -> Outcome {
    Outcome::Failed { reason: format!("{}: {e}", path.display()) }
}

impl Cache {
    /// In `root`, which is made when it is needed.
    pub fn new(root: PathBuf) -> Self {
        Cache { root }
    }

    /// The model of a run: found, or fetched. A path to open.
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
                    // What is whole of it is not fetched twice.
                    let partial = self.partial(manifest);
                    let _ = std::fs::remove_dir_all(&partial);
                    std::fs::rename(&whole, &partial).map_err(|e| fail(&whole, e))?;
                }
            }
        }
        self.fetch(manifest, outbox, say).await?;
        let partial = self.partial(manifest);
        std::fs::rename(&partial, &whole).map_err(|e| fail(&whole, e))?;
        // So that the folder's name is not on the disk before its contents.
        let _ = File::open(&self.root).and_then(|dir| dir.sync_all());
        Ok(opens(&whole, manifest))
    }

    fn partial(&self, manifest: &Manifest) -> PathBuf {
        self.root.join(format!("{}.partial", manifest.model_hash))
    }

    /// Held while a model is looked at or fetched; the system lets go of it whatever becomes of the process.
    async fn lock(&self, model: &str, outbox: &mut Outbox<'_>, say: &dyn Fn(&str)) -> Result<File, Outcome> {
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

    /// Every file that is not there yet, each checked.
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
        for (index, file) in (0..).zip(&manifest.files) {
            // A second time from the start, where what lay there turns out to be something else.
            for attempt in 0..2 {
                let path = dir.join(&file.name);
                one_file(&path, index, file, outbox).await?;
                let read = path.clone();
                match outbox.meanwhile(move || hash(&read)).await? {
                    Ok(found) if found == file.hash => break,
                    Ok(_) if attempt == 0 => std::fs::remove_file(&path).map_err(|e| fail(&path, e))?,
                    Ok(_) => return Err(fail(&path, "what came from the coordinator has another hash")),
                    Err(e) => return Err(fail(&path, e)),
                }
            }
        }
        Ok(())
    }
}

/// Goes on with a file where it ends.
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
    let mut asked = have;
    while have < file.size {
        while asked < file.size && asked < have + 2 * PART {
            let len = PART.min(file.size - asked);
            outbox.say(ToCoordinator::Fetch { file: index, offset: asked, len });
            asked += len;
        }
        match outbox.hear().await? {
            ToWorker::Piece { file: of, offset, bytes } if of == index && offset == have => {
                let room = file.size - have;
                if bytes.is_empty() || bytes.len() as u64 > room {
                    return Err(Outcome::Lost { reason: "a piece of the model has the wrong size".into() });
                }
                out.write_all(&bytes).map_err(to_disk)?;
                have += bytes.len() as u64;
            }
            ToWorker::Piece { .. } => {
                return Err(Outcome::Lost { reason: "a piece of the model that was not asked for".into() });
            }
            _ => {}
        }
    }
    out.sync_all().map_err(to_disk)
}

/// Names come from another machine: only plain ones may become files.
fn check_names(manifest: &Manifest) -> Result<(), Outcome> {
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

/// What is to be opened: the folder, or the one file of a GGUF.
fn opens(dir: &Path, manifest: &Manifest) -> PathBuf {
    match manifest.files.as_slice() {
        [one] if !one.name.ends_with(".safetensors") => dir.join(&one.name),
        _ => dir.to_path_buf(),
    }
}

fn holds(dir: &Path, file: &ModelFile) -> bool {
    let path = dir.join(&file.name);
    let size = std::fs::metadata(&path).map(|about| about.len());
    size.is_ok_and(|size| size == file.size) && hash(&path).is_ok_and(|found| found == file.hash)
}

fn hash(path: &Path) -> std::io::Result<Hash> {
    Ok(*blake3::Hasher::new().update_mmap_rayon(path)?.finalize().as_bytes())
}
