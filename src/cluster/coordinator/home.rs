//! A run's place on the coordinator's disk: the lock that keeps a second coordinator out, and the run's id with
//! its epoch, which is raised and on the disk before anybody can connect. A worker that has met a higher epoch
//! believes no lower one, so a coordinator that somebody restarted elsewhere cannot be mixed up with the old one.

use crate::format::{FormatError, atomic};
use crate::train::checkpoint::differences;
use ring::rand::SecureRandom;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

/// Run id and epoch.
pub const FILE: &str = "coordinator.json";
/// Locked while a run has the folder, and removed when it leaves it.
pub const LOCK: &str = "run.lock";
/// How often a lock that was removed while it was taken is taken again.
const TRIES: usize = 100;

/// Why a folder cannot be a coordinator's.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// The disk.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Somebody has it.
    #[error("{}: another run has this folder: stop it, or choose another --output", .0.display())]
    Locked(PathBuf),
    /// Its record does not read.
    #[error("{}: {reason}; start afresh with another --output", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers for the run's id")]
    Random,
    /// The run in it is another one.
    #[error("{}: cannot resume: {}; start afresh with another --output", .path.display(), .differences.join("; "))]
    Other {
        /// The record.
        path: PathBuf,
        /// One line each.
        differences: Vec<String>,
    },
}

/// No other run has the folder while this is held; the system takes it back whatever becomes of the process. Its file is
/// removed at the end, by its holder alone.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Locks the folder, which is there.
    pub fn take(dir: &Path) -> Result<Self, HomeError> {
        let path = dir.join(LOCK);
        let fail = |e| FormatError::io(&path, e);
        let mut tries = 0;
        loop {
            let file =
                OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(fail)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(HomeError::Locked(dir.to_owned())),
                Err(TryLockError::Error(e)) => return Err(fail(e).into()),
            }
            let lock = Lock { file, path: path.clone() };
            tries += 1;
            // Between opening and locking, the run before may have removed it: such a lock excludes no other run.
            if lock.stands() {
                return Ok(lock);
            }
            if tries == TRIES {
                return Err(fail(std::io::Error::other("its lock does not last")).into());
            }
        }
    }

    /// Whether its file is still in the folder, and not another one in its place.
    pub fn stands(&self) -> bool {
        is_at(&self.file, &self.path)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.stands() {
            // A file that stays is locked again by the next run.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether `path` still leads to what was opened as `file`, and not to another one in its place.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |m: std::fs::Metadata| (m.dev(), m.ino());
    file.metadata().map(id).ok().is_some_and(|ours| std::fs::metadata(path).map(id).ok() == Some(ours))
}

/// Elsewhere files have no identity that is asked for: whether there is something at `path`.
#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Run id and epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Drawn once.
    pub run: String,
    /// Raised at every start.
    pub epoch: u64,
    /// What the run is, by name: what it may be resumed with even where no checkpoint was reached.
    pub identity: BTreeMap<String, String>,
}

impl Home {
    /// The next epoch of the run in `dir`, or the first one of a new run; on the disk when this returns.
    pub fn raise(dir: &Path, identity: BTreeMap<String, String>) -> Result<Self, HomeError> {
        let path = dir.join(FILE);
        let home = match std::fs::read(&path) {
            Ok(bytes) => {
                let record =
                    |e: serde_json::Error| HomeError::Record { path: path.clone(), reason: e.to_string() };
                let was: Home = serde_json::from_slice(&bytes).map_err(record)?;
                was.next(&path, identity)?
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let mut id = [0; 16];
                ring::rand::SystemRandom::new().fill(&mut id).map_err(|_| HomeError::Random)?;
                Home { run: id.iter().map(|b| format!("{b:02x}")).collect(), epoch: 1, identity }
            }
            Err(e) => return Err(FormatError::io(&path, e).into()),
        };
        let text = serde_json::to_string_pretty(&home).map_err(|e| FormatError::io(&path, e.into()))?;
        atomic::write_file(&path, (text + "\n").as_bytes())?;
        Ok(home)
    }

    /// Of a run in one process, which nobody comes back to.
    pub fn of_one_process() -> Self {
        Home { run: String::new(), epoch: 1, identity: BTreeMap::new() }
    }

    fn next(self, path: &Path, identity: BTreeMap<String, String>) -> Result<Self, HomeError> {
        let differences = differences(&self.identity, &identity);
        if !differences.is_empty() {
            return Err(HomeError::Other { path: path.to_owned(), differences });
        }
        Ok(Home { epoch: self.epoch + 1, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("rank".into(), rank.into())])
    }

    #[test]
    fn every_start_has_a_higher_epoch_of_the_same_run() {
        let dir = tempfile::tempdir().unwrap();
        let first = Home::raise(dir.path(), identity("4")).unwrap();
        let second = Home::raise(dir.path(), identity("4")).unwrap();
        assert_eq!((first.epoch, second.epoch), (1, 2));
        assert_eq!((first.run.len(), &first.run), (32, &second.run));
        let other = Home::raise(dir.path(), identity("8")).unwrap_err().to_string();
        assert!(other.contains("rank was 4, is 8"), "{other}");
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(matches!(Home::raise(dir.path(), identity("4")), Err(HomeError::Record { .. })));
    }

    #[test]
    fn second_coordinator_is_locked_out() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        let second = Lock::take(dir.path()).unwrap_err().to_string();
        assert!(second.contains("another run"), "{second}");
        drop(lock);
        assert!(!dir.path().join(LOCK).exists(), "nothing is left of it");
        Lock::take(dir.path()).unwrap();
    }

    #[test]
    fn replaced_lock_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join(LOCK)).unwrap();
        let other = Lock::take(dir.path()).unwrap();
        drop(lock);
        assert!(dir.path().join(LOCK).exists());
        Lock::take(dir.path()).unwrap_err();
        drop(other);
        assert!(!dir.path().join(LOCK).exists());
    }
}
