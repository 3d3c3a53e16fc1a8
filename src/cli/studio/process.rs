//! Processes of runs: which one uses a folder, and the signals that ask it to end.

use crate::train::stop::Urgency;
use std::path::Path;

/// The process that has locked the folder of a run. It is found without touching the lock, which a starting run could
/// find taken otherwise; only Linux says who holds a lock.
#[cfg(target_os = "linux")]
pub fn holder(dir: &Path) -> Option<u32> {
    use crate::cluster::coordinator::run_lock::LOCK;
    use std::os::unix::fs::MetadataExt;
    let lock = dir.join(LOCK).canonicalize().ok()?;
    let inode = std::fs::metadata(&lock).ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // 1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF
    let holds = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, place, ..] = words[..] else { return None };
        (place.rsplit(':').next() == Some(inode.as_str())).then(|| pid.parse().ok()).flatten()
    };
    // Another file system may have a file of that number.
    let opened = |pid: &u32| {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| std::fs::read_link(file.path()).ok()).any(|path| path == lock)
    };
    locks.lines().filter_map(holds).find(opened)
}

/// Not known on other systems.
#[cfg(not(target_os = "linux"))]
pub fn holder(_: &Path) -> Option<u32> {
    None
}

/// Sends the signal of Ctrl-C, or the one that ends a run at once; whether it was sent.
#[cfg(unix)]
pub fn signal(pid: u32, urgency: Urgency) -> bool {
    use rustix::process::{Pid, Signal, kill_process};
    let signal = if urgency == Urgency::Now { Signal::TERM } else { Signal::INT };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Other systems have no signals.
#[cfg(not(unix))]
pub fn signal(_: u32, _: Urgency) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::cluster::coordinator::Lock;

    #[test]
    fn holder_of_a_folder_is_found_without_taking_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let lock = Lock::take(dir.path()).unwrap();
        assert_eq!(holder(dir.path()), Some(std::process::id()));
        drop(lock);
        std::fs::write(dir.path().join("run.lock"), "").unwrap();
        assert_eq!(holder(dir.path()), None, "a file that is left holds nothing");
    }
}
