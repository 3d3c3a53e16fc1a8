//! The user's folder for data that can be computed or downloaded again.

use std::path::PathBuf;

/// The cache folder of the operating system; XDG_CACHE_HOME overrides it everywhere.
pub fn folder() -> Option<PathBuf> {
    folder_by(std::env::consts::OS, |name| std::env::var_os(name).map(PathBuf::from))
}

fn folder_by(system: &str, read: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // The specification of these folders says that relative paths are ignored.
    let absolute = |name: &str| read(name).filter(|path| path.is_absolute());
    let of_system = || match system {
        "windows" => absolute("LOCALAPPDATA"),
        "macos" => absolute("HOME").map(|home| home.join("Library/Caches")),
        _ => absolute("HOME").map(|home| home.join(".cache")),
    };
    absolute("XDG_CACHE_HOME").or_else(of_system).map(|caches| caches.join("finetune"))
}

/// The file with the measured speeds of devices (`forecast::profile`).
pub fn profiles() -> Option<PathBuf> {
    Some(folder()?.join("profiles.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folder_follows_the_operating_system() {
        let of = |system: &str, set: &[(&str, &str)]| {
            folder_by(system, |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        assert_eq!(of("linux", &[("HOME", "/h")]), Some("/h/.cache/finetune".into()));
        assert_eq!(of("macos", &[("HOME", "/h")]), Some("/h/Library/Caches/finetune".into()));
        assert_eq!(of("windows", &[("HOME", "/h"), ("LOCALAPPDATA", "/l")]), Some("/l/finetune".into()));
        for system in ["linux", "macos", "windows"] {
            let both = [("HOME", "/h"), ("LOCALAPPDATA", "/l"), ("XDG_CACHE_HOME", "/x")];
            assert_eq!(of(system, &both), Some("/x/finetune".into()));
            assert_eq!(of(system, &[("XDG_CACHE_HOME", "x")]), None);
        }
    }
}
