//! Values of the system: free disk space, limits of the process, clock synchronisation. `None` where a system does not
//! provide them.

use std::path::Path;
#[cfg(target_os = "linux")]
use std::process::Command;

/// Free bytes for this user on the file system of `path`, which need not exist yet.
pub fn free_disk(path: &Path) -> Option<u64> {
    let absolute = std::path::absolute(path).ok()?;
    let there = absolute.ancestors().find(|p| p.exists())?;
    #[cfg(unix)]
    return rustix::fs::statvfs(there).ok().map(|s| s.f_bavail.saturating_mul(s.f_frsize));
    #[cfg(not(unix))]
    {
        let _ = there;
        None
    }
}

/// A limit of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Open files.
    Files,
    /// Bytes of address space.
    Space,
}

/// The effective (soft) limit; u64::MAX means unlimited.
pub fn limit(which: Limit) -> Option<u64> {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit};
        let resource = match which {
            Limit::Files => Resource::Nofile,
            Limit::Space => Resource::As,
        };
        Some(getrlimit(resource).current.unwrap_or(u64::MAX))
    }
    #[cfg(not(unix))]
    {
        let _ = which;
        None
    }
}

/// Whether the clock is synchronised; `None` where this is unknown.
pub fn clock_is_kept() -> Option<bool> {
    #[cfg(target_os = "linux")]
    {
        let asked = Command::new("timedatectl").args(["show", "-p", "NTPSynchronized", "--value"]).output();
        if let Some(said) = asked.ok().filter(|o| o.status.success()) {
            return Some(String::from_utf8_lossy(&said.stdout).trim() == "yes");
        }
        Path::new("/run/systemd/timesync/synchronized").exists().then_some(true)
    }
    #[cfg(not(target_os = "linux"))]
    None
}
