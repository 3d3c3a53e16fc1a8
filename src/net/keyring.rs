//! The places of a machine's token, in order of priority: a named file, then FINETUNE_TOKEN, then the user's own
//! file. A file that others may read is refused, not repaired. A created token never replaces an existing one, so
//! that two coordinators that start together use the same token.

use super::token::{BadToken, NoRandom, Token};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The environment variable.
pub const VARIABLE: &str = "FINETUNE_TOKEN";

/// Most bytes of a token file: the token's text with some blanks.
const LONGEST: u64 = 4 << 10;

/// Where a token came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// This file.
    File(PathBuf),
    /// [`VARIABLE`].
    Variable,
}

/// A token and where it came from.
#[derive(Debug, Clone)]
pub struct FoundToken {
    /// The token.
    pub token: Token,
    /// Where it is kept.
    pub source: TokenSource,
    /// Whether it was created just now.
    pub made: bool,
}

/// Why a required token is not available.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// A file that the user named does not exist.
    #[error("{}: no such file: `finetune token --token-file {}` makes it", .0.display(), .0.display())]
    Missing(PathBuf),
    /// Others may read it.
    #[error("{}: others may read it (mode {mode:03o}): chmod 600 {}", path.display(), path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file or variable does not hold a token.
    #[error("{place}: {why}")]
    Bad {
        /// The file or the variable.
        place: String,
        /// The problem.
        why: BadToken,
    },
    /// The file cannot be read or written.
    #[error("{}: {cause}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's message.
        cause: String,
    },
    /// There is no folder to keep it in.
    #[error("no home folder to keep a token in: set {VARIABLE}, or name a file with --token-file")]
    NoHome,
    /// There is none, and a listening side must have one.
    #[error(
        "no token here: `finetune token` makes one, `finetune token --set` takes that of the other machine"
    )]
    NoToken,
    /// None can be created.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

impl std::fmt::Display for TokenSource {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            TokenSource::File(path) => write!(f, "{}", path.display()),
            TokenSource::Variable => f.write_str(VARIABLE),
        }
    }
}

/// The places where this machine's token may be.
#[derive(Debug, Clone)]
pub struct Keyring {
    /// A file that the user named; then no other place is searched.
    named: Option<PathBuf>,
    /// The value of [`VARIABLE`].
    variable: Option<String>,
    /// The user's own file.
    own: Option<PathBuf>,
}

/// `~/.config/finetune/token`, or the same under XDG_CONFIG_HOME.
fn own_file(read: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // A relative path is ignored, as the XDG specification requires.
    let folder = |name: &str| read(name).filter(|p| p.is_absolute());
    let config = folder("XDG_CONFIG_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .or_else(|| folder("APPDATA"))?;
    Some(config.join("finetune").join("token"))
}

impl Keyring {
    /// The keyring of this process's user; `named` is --token-file.
    pub fn of_user(named: Option<&Path>) -> Self {
        let variable = std::env::var_os(VARIABLE).filter(|t| !t.is_empty());
        Keyring {
            named: named.map(PathBuf::from),
            variable: variable.map(|t| t.to_string_lossy().into_owned()),
            own: own_file(|name| std::env::var_os(name).map(PathBuf::from)),
        }
    }

    /// The token, or `None` if there is none and no file was named.
    pub fn find(&self) -> Result<Option<FoundToken>, KeepError> {
        let found = |token, source| Some(FoundToken { token, source, made: false });
        if let Some(path) = &self.named {
            let token = read(path)?.ok_or_else(|| KeepError::Missing(path.clone()))?;
            return Ok(found(token, TokenSource::File(path.clone())));
        }
        if let Some(text) = &self.variable {
            let bad = |why| KeepError::Bad { place: VARIABLE.into(), why };
            return Ok(found(Token::parse(text).map_err(bad)?, TokenSource::Variable));
        }
        let Some(path) = &self.own else { return Ok(None) };
        Ok(read(path)?.and_then(|token| found(token, TokenSource::File(path.clone()))))
    }

    /// The token. If there is none, one is created and kept in the user's file.
    pub fn find_or_make(&self) -> Result<FoundToken, KeepError> {
        if let Some(found) = self.find()? {
            return Ok(found);
        }
        self.make()
    }

    /// The same, but a named file that does not exist is created.
    pub fn find_or_make_there(&self) -> Result<FoundToken, KeepError> {
        match self.find() {
            Ok(Some(found)) => Ok(found),
            Ok(None) | Err(KeepError::Missing(_)) => self.make(),
            Err(e) => Err(e),
        }
    }

    fn make(&self) -> Result<FoundToken, KeepError> {
        let path = self.place()?;
        let token = Token::random()?;
        if write(&token, &path, Instead::Keep)? {
            return Ok(FoundToken { token, source: TokenSource::File(path), made: true });
        }
        // Another process was faster.
        let token = read(&path)?.ok_or_else(|| KeepError::Missing(path.clone()))?;
        Ok(FoundToken { token, source: TokenSource::File(path), made: false })
    }

    /// Replaces the token. Returns its path, and the path of a copy of the old file if that held another token.
    pub fn keep(&self, token: &Token) -> Result<(PathBuf, Option<PathBuf>), KeepError> {
        let path = self.place()?;
        let same = matches!(read(&path), Ok(Some(before)) if before.text() == token.text());
        let before = if same { None } else { copy(&path)? };
        write(token, &path, Instead::Replace)?;
        Ok((path, before))
    }

    fn place(&self) -> Result<PathBuf, KeepError> {
        self.named.clone().or(self.own.clone()).ok_or(KeepError::NoHome)
    }

    /// Whether neither a file nor [`VARIABLE`] was named, and the user's file does not exist.
    pub fn is_bare(&self) -> bool {
        self.named.is_none() && self.variable.is_none() && self.own.as_ref().is_none_or(|path| !path.exists())
    }

    /// Whether the user's file can be created: tested by creating a file in the nearest existing folder.
    pub fn is_writable(&self) -> bool {
        let Some(path) = &self.own else { return false };
        let folder = path.ancestors().skip(1).find(|p| p.exists());
        folder.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok())
    }

    /// Whether the environment's token takes priority over the one that [`Keyring::keep`] writes.
    pub fn is_overruled(&self) -> bool {
        self.named.is_none() && self.variable.is_some()
    }
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> KeepError + '_ {
    |e| KeepError::File { path: path.into(), cause: super::error::words(&e) }
}

/// The token in a file, or `None` if there is no such file.
fn read(path: &Path) -> Result<Option<Token>, KeepError> {
    let file = match File::open(path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        opened => opened.map_err(failed(path))?,
    };
    // The mode of the open file, not of its path: the file cannot be exchanged in between.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = file.metadata().map_err(failed(path))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeepError::Open { path: path.into(), mode });
        }
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).map_err(failed(path))?;
    let bad = |why| KeepError::Bad { place: path.display().to_string(), why };
    Token::parse(&text).map(Some).map_err(bad)
}

/// What to do with an existing file.
#[derive(Clone, Copy, PartialEq)]
enum Instead {
    Replace,
    Keep,
}

/// Returns whether the file now holds `token`. It appears complete, readable by its owner only, or not at all.
fn write(token: &Token, path: &Path, instead: Instead) -> Result<bool, KeepError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).map_err(failed(folder))?;
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}", std::process::id()));
    let draft = folder.join(name);
    let done = write_draft(token, &draft).and_then(|()| match instead {
        Instead::Replace => fs::rename(&draft, path).map(|()| true),
        Instead::Keep => match fs::hard_link(&draft, path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
            // A file system without hard links.
            Err(_) if !path.exists() => fs::rename(&draft, path).map(|()| true),
            linked => linked.map(|()| true),
        },
    });
    let _ = fs::remove_file(&draft);
    done.map_err(failed(path))
}

fn write_draft(token: &Token, draft: &Path) -> std::io::Result<()> {
    let _ = fs::remove_file(draft);
    fill(draft, format!("{}\n", token.text()).as_bytes())
}

/// Copies the file to the first free name beside it. Returns `None` if there is no file.
fn copy(path: &Path) -> Result<Option<PathBuf>, KeepError> {
    let bytes = match fs::read(path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        bytes => bytes.map_err(failed(path))?,
    };
    let mut n = 1;
    loop {
        let copy = path.with_added_extension(format!("before-{n}"));
        match fill(&copy, &bytes) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => n += 1,
            filled => return filled.map(|()| Some(copy.clone())).map_err(failed(&copy)),
        }
    }
}

/// Creates a new file that only its owner may read.
fn fill(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
#[cfg(unix)]
mod tests;
