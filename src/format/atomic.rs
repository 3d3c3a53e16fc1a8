//! Nothing is ever seen half-written: a file or directory is made beside its place under a temporary name,
//! brought to the disk, and renamed. Whatever goes wrong before the rename, the old one survives and the
//! temporary is removed.

use super::error::FormatError;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Replaces `path` by `bytes`.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FormatError> {
    write_with(path, |out| out.write_all(bytes)).map_err(|error| match error {
        FormatError::DiskFull { path, .. } => FormatError::DiskFull { path, bytes: Some(bytes.len() as u64) },
        other => other,
    })
}

/// Replaces `path` by what `fill` writes.
pub fn write_with<E>(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), FormatError>
where
    E: Into<WriteFault>,
{
    let parent = parent_of(path);
    fs::create_dir_all(&parent).map_err(|e| FormatError::io(&parent, e))?;
    let mut temporary = tempfile::Builder::new()
        .prefix(&hidden(path))
        .suffix(".tmp")
        .tempfile_in(&parent)
        .map_err(|e| FormatError::io(path, e))?;
    let mut out = BufWriter::with_capacity(1 << 20, temporary.as_file_mut());
    fill(&mut out).map_err(|e| e.into().at(path))?;
    out.flush().map_err(|e| FormatError::io(path, e))?;
    drop(out);
    open_to_others(temporary.as_file()).map_err(|e| FormatError::io(path, e))?;
    temporary.as_file().sync_all().map_err(|e| FormatError::io(path, e))?;
    temporary.persist(path).map_err(|e| FormatError::io(path, e.error))?;
    sync_dir(&parent)
}

/// What a writer may fail with: the system's word, or a finished error.
pub enum WriteFault {
    /// From the file itself.
    Io(io::Error),
    /// From what produces the bytes.
    Format(FormatError),
}

impl From<io::Error> for WriteFault {
    fn from(cause: io::Error) -> Self {
        WriteFault::Io(cause)
    }
}

impl From<FormatError> for WriteFault {
    fn from(error: FormatError) -> Self {
        WriteFault::Format(error)
    }
}

impl WriteFault {
    fn at(self, path: &Path) -> FormatError {
        match self {
            WriteFault::Io(cause) => FormatError::io(path, cause),
            WriteFault::Format(error) => error,
        }
    }
}

/// Replaces `path` by the file that `fill` makes at the temporary path that it is given, once `fill` has found
/// it good. The caller's error type travels through.
pub fn write_checked<T, E: From<FormatError>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let parent = parent_of(path);
    fs::create_dir_all(&parent).map_err(|e| FormatError::io(&parent, e))?;
    let temporary = tempfile::Builder::new()
        .prefix(&hidden(path))
        .suffix(".tmp")
        .tempfile_in(&parent)
        .map_err(|e| FormatError::io(path, e))?;
    let value = fill(temporary.path())?;
    let fail = |cause| FormatError::io(path, cause);
    open_to_others(temporary.as_file()).map_err(fail)?;
    temporary.as_file().sync_all().map_err(fail)?;
    temporary.persist(path).map_err(|e| fail(e.error))?;
    sync_dir(&parent)?;
    Ok(value)
}

/// Makes the directory `path` out of what `fill` puts into the temporary directory that it is given, and
/// replaces an older `path` as a whole. The caller's error type travels through.
pub fn write_dir<T, E: From<FormatError>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let parent = parent_of(path);
    fs::create_dir_all(&parent).map_err(|e| FormatError::io(&parent, e))?;
    let temporary = tempfile::Builder::new()
        .prefix(&hidden(path))
        .suffix(".tmp")
        .tempdir_in(&parent)
        .map_err(|e| FormatError::io(path, e))?;
    let value = fill(temporary.path())?;
    sync_tree(temporary.path())?;
    let made = temporary.keep();
    if let Err(error) = swap_in(&made, path) {
        // Best effort: the error that matters is the first.
        let _ = fs::remove_dir_all(&made);
        return Err(error.into());
    }
    sync_dir(&parent)?;
    Ok(value)
}

/// Puts `made` in the place of `path`. A directory cannot be renamed over another that is not empty, so the
/// old one steps aside first, and comes back if the rename fails.
fn swap_in(made: &Path, path: &Path) -> Result<(), FormatError> {
    let fail = |cause| FormatError::io(path, cause);
    mode_for_all(made).map_err(fail)?;
    if fs::symlink_metadata(path).is_err() {
        return fs::rename(made, path).map_err(fail);
    }
    let mut aside = made.as_os_str().to_owned();
    aside.push(".old");
    let aside = PathBuf::from(aside);
    fs::rename(path, &aside).map_err(fail)?;
    if let Err(cause) = fs::rename(made, path) {
        let _ = fs::rename(&aside, path);
        return Err(fail(cause));
    }
    let gone = if aside.is_dir() { fs::remove_dir_all(&aside) } else { fs::remove_file(&aside) };
    gone.map_err(|cause| FormatError::io(&aside, cause))
}

/// Removes what interrupted writes left beside `path`: temporaries, and a directory that had stepped aside.
/// An older `path` that stepped aside and was never replaced comes back.
pub fn recover(path: &Path) -> Result<(), FormatError> {
    let parent = parent_of(path);
    let prefix = hidden(path);
    let Ok(listing) = fs::read_dir(&parent) else { return Ok(()) };
    let mut left: Vec<PathBuf> = listing.flatten().map(|entry| entry.path()).collect();
    left.retain(|p| p.file_name().is_some_and(|n| is_ours(n, &prefix)));
    left.sort();
    for item in &left {
        if item.extension().is_some_and(|e| e == "old") && fs::symlink_metadata(path).is_err() {
            fs::rename(item, path).map_err(|e| FormatError::io(path, e))?;
        } else {
            let gone = if item.is_dir() { fs::remove_dir_all(item) } else { fs::remove_file(item) };
            gone.map_err(|e| FormatError::io(item, e))?;
        }
    }
    Ok(())
}

fn is_ours(name: &std::ffi::OsStr, prefix: &OsString) -> bool {
    let (name, prefix) = (name.to_string_lossy(), prefix.to_string_lossy());
    name.starts_with(&*prefix) && (name.ends_with(".tmp") || name.ends_with(".tmp.old"))
}

/// `.name.` : hidden, beside its place, and told apart from every other name by what follows.
fn hidden(path: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name
}

fn parent_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Brings every file and directory below `dir`, and itself, to the disk.
fn sync_tree(dir: &Path) -> Result<(), FormatError> {
    for entry in fs::read_dir(dir).map_err(|e| FormatError::io(dir, e))? {
        let path = entry.map_err(|e| FormatError::io(dir, e))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            File::open(&path).and_then(|f| f.sync_all()).map_err(|e| FormatError::io(&path, e))?;
        }
    }
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<(), FormatError> {
    // Windows cannot open a directory as a file; its rename is durable by itself.
    if cfg!(unix) {
        File::open(dir).and_then(|f| f.sync_all()).map_err(|e| FormatError::io(dir, e))?;
    }
    Ok(())
}

/// Temporaries are made for their owner alone; what stays has the permissions of any other output.
#[cfg(unix)]
fn open_to_others(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

#[cfg(unix)]
fn mode_for_all(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn open_to_others(_: &File) -> io::Result<()> {
    Ok(())
}

#[cfg(not(unix))]
fn mode_for_all(_: &Path) -> io::Result<()> {
    Ok(())
}
