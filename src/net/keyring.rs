//! Where a machine keeps the token. What is named wins: a file, then FINETUNE_TOKEN, then the user's own file. A
//! file that others may read holds no secret and is refused, not quietly repaired. A token that is made never
//! replaces one that is there, so that two coordinators that start together end with the same one.

use super::token::{BadToken, NoRandom, Token};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// The environment variable.
pub const VARIABLE: &str = "FINETUNE_TOKEN";

/// A token's text and some blanks.
const LONGEST: u64 = 4 << 10;

/// Where a token came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// This file.
    File(PathBuf),
    /// [`VARIABLE`].
    Variable,
}

/// A token and where it came from.
#[derive(Debug, Clone)]
pub struct Found {
    /// It.
    pub token: Token,
    /// Where it is kept.
    pub source: Source,
    /// True where it was made just now.
    pub made: bool,
}

/// Why there is no token although there should be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepError {
    /// A file of somebody's choice is not there.
    #[error("{}: no such file: `finetune token --token-file {}` makes it", .0.display(), .0.display())]
    Missing(PathBuf),
    /// Others may read it.
    #[error("{}: others may read it (mode {mode:03o}): chmod 600 {}", path.display(), path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It holds something else.
    #[error("{place}: {why}")]
    Bad {
        /// A file or the variable.
        place: String,
        /// What.
        why: BadToken,
    },
    /// It cannot be read or written.
    #[error("{}: {cause}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's words.
        cause: String,
    },
    /// There is no place for it.
    #[error("no home folder to keep a token in: set {VARIABLE}, or name a file with --token-file")]
    NoHome,
    /// There is none, and who listens must have one.
    #[error(
        "no token here: `finetune token` makes one, `finetune token --set` takes that of the other machine"
    )]
    NoToken,
    /// None can be made.
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Source::File(path) => write!(f, "{}", path.display()),
            Source::Variable => f.write_str(VARIABLE),
        }
    }
}

/// The places where this machine's token may be.
#[derive(Debug, Clone)]
pub struct Keyring {
    /// A file of somebody's choice; nothing else is looked at then.
    named: Option<PathBuf>,
    /// What [`VARIABLE`] says.
    variable: Option<String>,
    /// The user's own file.
    own: Option<PathBuf>,
}

/// `~/.config/finetune/token`, or under XDG_CONFIG_HOME.
fn own_file(read: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // A relative one means nothing (so the specification of these folders says).
    let folder = |name: &str| read(name).filter(|p| p.is_absolute());
    let config = folder("XDG_CONFIG_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .or_else(|| folder("APPDATA"))?;
    Some(config.join("finetune").join("token"))
}

impl Keyring {
    /// That of the user of this process, who has typed --token-file or not.
    pub fn of_user(named: Option<&Path>) -> Self {
        let variable = std::env::var_os(VARIABLE).filter(|t| !t.is_empty());
        Keyring {
            named: named.map(PathBuf::from),
            variable: variable.map(|t| t.to_string_lossy().into_owned()),
            own: own_file(|name| std::env::var_os(name).map(PathBuf::from)),
        }
    }

    /// The token, None where there is none and none was named.
    pub fn find(&self) -> Result<Option<Found>, KeepError> {
        let found = |token, source| Some(Found { token, source, made: false });
        if let Some(path) = &self.named {
            let token = read(path)?.ok_or_else(|| KeepError::Missing(path.clone()))?;
            return Ok(found(token, Source::File(path.clone())));
        }
        if let Some(text) = &self.variable {
            let bad = |why| KeepError::Bad { place: VARIABLE.into(), why };
            return Ok(found(Token::parse(text).map_err(bad)?, Source::Variable));
        }
        let Some(path) = &self.own else { return Ok(None) };
        Ok(read(path)?.and_then(|token| found(token, Source::File(path.clone()))))
    }

    /// The token; where there is none, one is made and kept in the user's file.
    pub fn find_or_make(&self) -> Result<Found, KeepError> {
        if let Some(found) = self.find()? {
            return Ok(found);
        }
        self.make()
    }

    /// The same, but a named file that is not there is made: for whoever was told to make it.
    pub fn find_or_make_there(&self) -> Result<Found, KeepError> {
        match self.find() {
            Ok(Some(found)) => Ok(found),
            Ok(None) | Err(KeepError::Missing(_)) => self.make(),
            Err(e) => Err(e),
        }
    }

    fn make(&self) -> Result<Found, KeepError> {
        let path = self.place()?;
        let token = Token::random()?;
        if write(&token, &path, Instead::Keep)? {
            return Ok(Found { token, source: Source::File(path), made: true });
        }
        // Somebody was faster.
        let token = read(&path)?.ok_or_else(|| KeepError::Missing(path.clone()))?;
        Ok(Found { token, source: Source::File(path), made: false })
    }

    /// Keeps `token` in place of the one that is there. Returns its path, and the path of a copy of the old file if that held
    /// another token.
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

    /// True where nothing was named, and nothing is there that could be found wanting.
    pub fn is_bare(&self) -> bool {
        self.named.is_none() && self.variable.is_none() && self.own.as_ref().is_none_or(|path| !path.exists())
    }

    /// True where the user's file could be made: asked of the nearest folder that is there, by making a file.
    pub fn is_writable(&self) -> bool {
        let Some(path) = &self.own else { return false };
        let folder = path.ancestors().skip(1).find(|p| p.exists());
        folder.is_some_and(|folder| tempfile::tempfile_in(folder).is_ok())
    }

    /// True where the environment's token comes before what [`Keyring::keep`] keeps.
    pub fn is_overruled(&self) -> bool {
        self.named.is_none() && self.variable.is_some()
    }
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> KeepError + '_ {
    |e| KeepError::File { path: path.into(), cause: super::error::words(&e) }
}

/// None where there is no such file.
fn read(path: &Path) -> Result<Option<Token>, KeepError> {
    let file = match File::open(path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        opened => opened.map_err(failed(path))?,
    };
    // Of the open file, not of its name: nobody can put another one in between.
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

/// What happens to a file that is there already.
#[derive(Clone, Copy, PartialEq)]
enum Instead {
    Replace,
    Keep,
}

/// True where the file now holds `token`. It appears whole, for its owner alone, or not at all.
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
            // A file system without links.
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

/// A copy of the file beside it, under the first free name; None where there is no file.
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

/// A new file, for its owner alone.
fn fill(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(all(test, unix))]
mod tests;
