//! The run's record on the coordinator's disk: the lock that keeps a second coordinator out, and the run's id with
//! its epoch. The epoch is raised and written before a worker can connect. A worker that has met a higher epoch
//! follows no lower one, so an old coordinator and its restarted successor cannot be confused.

use crate::format::{FormatError, atomic};
use crate::train::checkpoint::differences;
use ring::rand::SecureRandom;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

/// File of the run's id and epoch.
pub const FILE: &str = "coordinator.json";
/// Lock file, locked while a run uses the folder and removed at its end.
pub const LOCK: &str = "run.lock";
/// Most attempts to take a lock file that another run removes at the same moment.
const TRIES: usize = 100;

/// Why a folder cannot be used by a coordinator.
#[derive(Debug, thiserror::Error)]
pub enum RunLockError {
    /// The disk.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Another run has locked it.
    #[error("{}: another run has this folder: stop it, or choose another --output", .0.display())]
    Locked(PathBuf),
    /// The file system has no locks.
    #[error(
        "{}: this file system has no locks ({cause}), so a second coordinator could use the folder: choose an --output \
         on another one (NFS 4, or a mount with locks: lockd, Lustre's -o flock)",
        .dir.display()
    )]
    NoLocks {
        /// The folder.
        dir: PathBuf,
        /// The system's message.
        cause: String,
    },
    /// Its record is not readable.
    #[error("{}: {reason}; start afresh with another --output", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The parse error.
        reason: String,
    },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers for the run's id")]
    Random,
    /// The folder belongs to a different run.
    #[error("{}: cannot resume: {}; start afresh with another --output", .path.display(), .differences.join("; "))]
    Other {
        /// The record.
        path: PathBuf,
        /// The differences, one line each.
        differences: Vec<String>,
    },
}

/// Excludes other runs from the folder while it is held. The system releases the lock however the process ends. Only
/// the holder removes the file, at its end.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Locks an existing folder.
    pub fn take(dir: &Path) -> Result<Self, RunLockError> {
        let path = dir.join(LOCK);
        let fail = |e| FormatError::io(&path, e);
        let mut tries = 0;
        loop {
            let file =
                OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(fail)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(RunLockError::Locked(dir.to_owned())),
                Err(TryLockError::Error(e)) => return Err(failed(dir, &path, e)),
            }
            let lock = Lock { file, path: path.clone() };
            tries += 1;
            // The previous run may have removed the file between opening and locking: a lock on it excludes no other
            // run.
            if lock.stands() {
                return Ok(lock);
            }
            if tries == TRIES {
                return Err(fail(std::io::Error::other("its lock does not last")).into());
            }
        }
    }

    /// Whether the locked file is still the one in the folder.
    pub fn stands(&self) -> bool {
        is_at(&self.file, &self.path)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.stands() {
            // A file that could not be removed is locked again by the next run.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Why a lock fails: most often because a network file system has none.
fn failed(dir: &Path, path: &Path, e: std::io::Error) -> RunLockError {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        let none = [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP, Errno::NOTSUP].map(Errno::raw_os_error);
        if e.raw_os_error().is_some_and(|code| none.contains(&code)) {
            return RunLockError::NoLocks { dir: dir.to_owned(), cause: e.to_string() };
        }
    }
    let _ = dir;
    FormatError::io(path, e).into()
}

/// Whether `path` still names the file that was opened as `file`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |m: std::fs::Metadata| (m.dev(), m.ino());
    file.metadata().map(id).ok().is_some_and(|ours| std::fs::metadata(path).map(id).ok() == Some(ours))
}

/// Other systems: whether `path` names a file at all.
#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Run id, epoch and identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    /// Random, drawn once.
    pub run: String,
    /// Raised at every start of a coordinator.
    pub epoch: u64,
    /// The run's identity by name. A resume must match it even if no checkpoint was reached.
    pub identity: BTreeMap<String, String>,
}

impl RunRecord {
    /// The next epoch of the run in `dir`, or the first epoch of a new run. The record is on the disk when this
    /// returns.
    pub fn raise(dir: &Path, identity: BTreeMap<String, String>) -> Result<Self, RunLockError> {
        let path = dir.join(FILE);
        let record = match std::fs::read(&path) {
            Ok(bytes) => {
                let record =
                    |e: serde_json::Error| RunLockError::Record { path: path.clone(), reason: e.to_string() };
                let was: RunRecord = serde_json::from_slice(&bytes).map_err(record)?;
                was.next(&path, identity)?
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let mut id = [0; 16];
                ring::rand::SystemRandom::new().fill(&mut id).map_err(|_| RunLockError::Random)?;
                RunRecord { run: id.iter().map(|b| format!("{b:02x}")).collect(), epoch: 1, identity }
            }
            Err(e) => return Err(FormatError::io(&path, e).into()),
        };
        let text = serde_json::to_string_pretty(&record).map_err(|e| FormatError::io(&path, e.into()))?;
        atomic::write_file(&path, (text + "\n").as_bytes())?;
        Ok(record)
    }

    /// The record of a run in one process, which is not written.
    pub fn of_one_process() -> Self {
        RunRecord { run: String::new(), epoch: 1, identity: BTreeMap::new() }
    }

    fn next(self, path: &Path, identity: BTreeMap<String, String>) -> Result<Self, RunLockError> {
        let differences = differences(&self.identity, &identity);
        if !differences.is_empty() {
            return Err(RunLockError::Other { path: path.to_owned(), differences });
        }
        Ok(RunRecord { epoch: self.epoch + 1, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(rank: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("rank".into(), rank.into())])
    }

    #[test]
    fn every_start_raises_the_epoch_of_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let first = RunRecord::raise(dir.path(), identity("4")).unwrap();
        let second = RunRecord::raise(dir.path(), identity("4")).unwrap();
        assert_eq!((first.epoch, second.epoch), (1, 2));
        assert_eq!((first.run.len(), &first.run), (32, &second.run));
        let other = RunRecord::raise(dir.path(), identity("8")).unwrap_err().to_string();
        assert!(other.contains("rank was 4, is 8"), "{other}");
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(matches!(RunRecord::raise(dir.path(), identity("4")), Err(RunLockError::Record { .. })));
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

    #[cfg(unix)]
    #[test]
    fn file_system_without_locks_is_named() {
        let (dir, path) = (Path::new("/nfs/out"), Path::new("/nfs/out/run.lock"));
        for errno in [rustix::io::Errno::NOLCK, rustix::io::Errno::NOSYS] {
            let line = failed(dir, path, errno.into()).to_string();
            assert!(
                line.starts_with("/nfs/out: this file system has no locks (") && line.contains("--output"),
                "{line}"
            );
        }
        let other = failed(dir, path, rustix::io::Errno::IO.into()).to_string();
        assert!(other.contains("run.lock") && !other.contains("no locks"), "{other}");
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
