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

/// The file of this user: `~/.config/finetune/token`, or under XDG_CONFIG_HOME.
pub fn own_file() -> Option<PathBuf> {
    own_file_by(|name| std::env::var_os(name).map(PathBuf::from))
}

fn own_file_by(read: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    // A relative one means nothing (so the specification of these folders says).
    let folder = |name: &str| read(name).filter(|p| p.is_absolute());
    let config = folder("XDG_CONFIG_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .or_else(|| folder("APPDATA"))?;
    Some(config.join("finetune").join("token"))
}

/// The token of this machine, None where there is none and none was named.
pub fn find(named: Option<&Path>) -> Result<Option<Found>, KeepError> {
    let found = |token, source| Some(Found { token, source, made: false });
    if let Some(path) = named {
        let token = read(path)?.ok_or_else(|| KeepError::Missing(path.into()))?;
        return Ok(found(token, Source::File(path.into())));
    }
    if let Some(text) = std::env::var_os(VARIABLE).filter(|t| !t.is_empty()) {
        let bad = |why| KeepError::Bad { place: VARIABLE.into(), why };
        let token = Token::parse(&text.to_string_lossy()).map_err(bad)?;
        return Ok(found(token, Source::Variable));
    }
    let Some(path) = own_file() else { return Ok(None) };
    Ok(read(&path)?.and_then(|token| found(token, Source::File(path))))
}

/// The token of this machine; where there is none, one is made and kept, in `named` or in the user's file.
pub fn find_or_make(named: Option<&Path>) -> Result<Found, KeepError> {
    match find(named) {
        Ok(Some(found)) => Ok(found),
        Ok(None) | Err(KeepError::Missing(_)) => {
            let path = named.map(PathBuf::from).or_else(own_file).ok_or(KeepError::NoHome)?;
            let token = Token::random()?;
            if write(&token, &path, Instead::Keep)? {
                return Ok(Found { token, source: Source::File(path), made: true });
            }
            // Somebody was faster.
            let token = read(&path)?.ok_or_else(|| KeepError::Missing(path.clone()))?;
            Ok(Found { token, source: Source::File(path), made: false })
        }
        Err(e) => Err(e),
    }
}

/// Keeps `token` in `named`, or in the user's file, in place of what is there.
pub fn keep(token: &Token, named: Option<&Path>) -> Result<PathBuf, KeepError> {
    let path = named.map(PathBuf::from).or_else(own_file).ok_or(KeepError::NoHome)?;
    write(token, &path, Instead::Replace)?;
    Ok(path)
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> KeepError + '_ {
    |e| KeepError::File { path: path.into(), cause: super::error::words(&e) }
}

/// None where there is no such file.
fn read(path: &Path) -> Result<Option<Token>, KeepError> {
    let file = match File::open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
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
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(draft)?;
    writeln!(file, "{}", token.text())?;
    file.sync_all()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn made_once_kept_for_the_owner_and_replaced_only_when_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/token");
        let first = find_or_make(Some(&path)).unwrap();
        assert!(first.made);
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let second = find_or_make(Some(&path)).unwrap();
        assert!(!second.made);
        assert_eq!(second.token.text(), first.token.text());
        let third = Token::random().unwrap();
        keep(&third, Some(&path)).unwrap();
        assert_eq!(find(Some(&path)).unwrap().unwrap().token.text(), third.text());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "a draft was left");
    }

    #[test]
    fn a_hundred_that_make_one_at_once_have_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        // Threads share a process id, and so a draft: they take turns there, and race for the name.
        let make = || find_or_make(Some(&path)).map(|f| f.token.text());
        let texts: Vec<_> = (0..100).map(|_| make().unwrap()).collect();
        assert!(texts.iter().all(|t| *t == texts[0]));
        assert!(!write(&Token::random().unwrap(), &path, Instead::Keep).unwrap(), "it never replaces");
    }

    /// The line for a file of that text and mode.
    fn check(text: &str, bits: u32, expected: &str) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
        let line = find(Some(&path)).unwrap_err().to_string();
        let expected = expected.replace("PATH", &path.display().to_string());
        assert!(line.contains(&expected), "{line}");
        assert!(text.len() < 8 || !line.contains(text), "the secret is repeated: {line}");
    }

    #[test]
    fn files_that_are_no_secret() {
        let token = Token::random().unwrap().text();
        for bits in [0o644, 0o640, 0o660, 0o604, 0o666, 0o610] {
            check(&token, bits, &format!("PATH: others may read it (mode {bits:03o}): chmod 600 PATH"));
        }
        check("hunter2hunter2", 0o600, "PATH: that is no token: 112 bits or fewer");
        check("", 0o600, "PATH: that is no token");
        check(&"x".repeat(100_000), 0o600, "PATH: that is no token");
        let absent = Path::new("no/such/token");
        let line = find(Some(absent)).unwrap_err().to_string();
        assert_eq!(line, "no/such/token: no such file: `finetune token --token-file no/such/token` makes it");
    }

    #[test]
    fn the_users_own_file() {
        let of = |set: &[(&str, &str)]| {
            own_file_by(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.config/finetune/token".into()));
        assert_eq!(of(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "/x")]), Some("/x/finetune/token".into()));
        assert_eq!(of(&[("HOME", "/h"), ("XDG_CONFIG_HOME", "x")]), Some("/h/.config/finetune/token".into()));
        assert_eq!(of(&[]), None);
    }
}
