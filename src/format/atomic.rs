//! No reader ever sees a partial file: a file or directory is written next to its destination under a temporary name,
//! synced to disk, and renamed. If anything fails before the rename, the old file stays and the temporary one is
//! removed.

use super::error::FormatError;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Replaces the file `path` by `bytes`.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FormatError> {
    write_with(path, |out| out.write_all(bytes)).map_err(|error| match error {
        FormatError::DiskFull { path, .. } => FormatError::DiskFull { path, bytes: Some(bytes.len() as u64) },
        other => other,
    })
}

/// Replaces the file `path` by the output of `fill`.
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

/// The error of a writer: an I/O error, or a complete [`FormatError`].
pub enum WriteFault {
    /// An error of the file itself.
    Io(io::Error),
    /// An error of the source of the bytes.
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

/// Replaces `path` by a file that `fill` writes to the given temporary path and checks. The error type of the caller is
/// passed through.
pub fn write_checked<T, E: From<FormatError>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let (parent, temporary) = beside(path, |builder, parent| builder.tempfile_in(parent))?;
    let value = fill(temporary.path())?;
    let fail = |cause| FormatError::io(path, cause);
    open_to_others(temporary.as_file()).map_err(fail)?;
    temporary.as_file().sync_all().map_err(fail)?;
    temporary.persist(path).map_err(|e| fail(e.error))?;
    sync_dir(&parent)?;
    Ok(value)
}

/// Creates the directory `path` from the files that `fill` writes to the given temporary directory, and replaces an
/// older `path` as a whole. The error type of the caller is passed through.
pub fn write_dir<T, E: From<FormatError>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let (parent, temporary) = beside(path, |builder, parent| builder.tempdir_in(parent))?;
    let value = fill(temporary.path())?;
    sync_tree(temporary.path())?;
    let made = temporary.keep();
    if let Err(error) = swap_in(&made, path) {
        // The clean-up is best effort: the first error is the one to report.
        let _ = fs::remove_dir_all(&made);
        return Err(error.into());
    }
    sync_dir(&parent)?;
    Ok(value)
}

/// Creates the folder of `path`, and in it what `make` gives: the temporary file or directory that replaces `path`.
fn beside<T>(
    path: &Path,
    make: impl FnOnce(&tempfile::Builder, &Path) -> io::Result<T>,
) -> Result<(PathBuf, T), FormatError> {
    let parent = parent_of(path);
    fs::create_dir_all(&parent).map_err(|e| FormatError::io(&parent, e))?;
    let prefix = hidden(path);
    let mut builder = tempfile::Builder::new();
    let made = make(builder.prefix(&prefix).suffix(".tmp"), &parent).map_err(|e| FormatError::io(path, e))?;
    Ok((parent, made))
}

/// Moves `made` to `path`. A directory cannot be renamed over a non-empty one, so the old directory is moved aside
/// first, and moved back if the rename fails.
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

/// Removes temporary files and replaced directories that interrupted writes left next to `path`. An older `path` that
/// was moved aside and not replaced is restored.
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

/// The prefix `.name.` of temporary names: hidden, in the same directory, and distinct from all other names by its
/// suffix.
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

/// Syncs `dir` and all files and directories below it to disk.
fn sync_tree(dir: &Path) -> Result<(), FormatError> {
    for entry in fs::read_dir(dir).map_err(|e| FormatError::io(dir, e))? {
        let path = entry.map_err(|e| FormatError::io(dir, e))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            // Windows syncs only files that are open for writing.
            let file = OpenOptions::new().read(true).write(cfg!(windows)).open(&path);
            file.and_then(|f| f.sync_all()).map_err(|e| FormatError::io(&path, e))?;
        }
    }
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<(), FormatError> {
    // Windows cannot open a directory as a file; a rename is durable there.
    if cfg!(unix) {
        File::open(dir).and_then(|f| f.sync_all()).map_err(|e| FormatError::io(dir, e))?;
    }
    Ok(())
}

/// Sets the permissions of an ordinary output; temporary files are readable by their owner only.
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
