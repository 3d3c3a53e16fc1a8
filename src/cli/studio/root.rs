//! The folder that the page may see. A path of a request is resolved, links included, and must lead to a place below
//! it.

use crate::cli::listening::Failure;
use crate::data::files::holds_rows;
use crate::run::folder::RUN_FILE;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::path::{Component, Path, PathBuf};

/// Most entries of a folder that are listed.
const MOST: usize = 2000;

/// The root folder, absolute and without links.
#[derive(Debug, Clone)]
pub struct Root(pub PathBuf);

/// A refusal of a request's value, as one line.
pub fn wrong(line: impl std::fmt::Display) -> Failure {
    Failure::of(StatusCode::BAD_REQUEST, line)
}

impl Root {
    /// The path below the root of an existing file or folder, without links; `.` for the root itself.
    pub fn inside(&self, text: &str) -> Result<PathBuf, Failure> {
        let missing = |_| wrong(format!("{text}: no such file or folder below {}", self.0.display()));
        let whole = self.0.join(text).canonicalize().map_err(missing)?;
        self.below(text, &whole)
    }

    /// The path below the root of a file or folder that may be missing.
    pub fn fresh(&self, text: &str) -> Result<PathBuf, Failure> {
        let path = Path::new(text);
        let path = path.strip_prefix(&self.0).unwrap_or(path);
        let is_plain = |part: &Component| matches!(part, Component::Normal(_) | Component::CurDir);
        if !path.components().all(|part| is_plain(&part)) {
            return Err(wrong(format!("{text:?} names no place below {}", self.0.display())));
        }
        let path: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
        if path.as_os_str().is_empty() {
            return Err(wrong(format!("{text:?} names no place below {}", self.0.display())));
        }
        let whole = self.0.join(&path);
        shown(text, &path)?;
        let there = whole.ancestors().find_map(|folder| folder.canonicalize().ok());
        self.below(text, &there.unwrap_or_else(|| whole.clone()))?;
        Ok(path)
    }

    fn below(&self, text: &str, whole: &Path) -> Result<PathBuf, Failure> {
        let outside = |_| {
            let way = "start finetune studio with --root of a folder above both";
            wrong(format!("{text} is outside {}: {way}", self.0.display()))
        };
        let rest = whole.strip_prefix(&self.0).map_err(outside)?;
        shown(text, rest)?;
        Ok(if rest.as_os_str().is_empty() { ".".into() } else { rest.to_owned() })
    }

    /// The entries of a folder: folders first, by name. Hidden ones are left out.
    pub fn list(&self, text: &str) -> Result<Value, Failure> {
        let path = self.inside(if text.is_empty() { "." } else { text })?;
        let failed = |e| wrong(format!("{}: {e}", path.display()));
        let mut all: Vec<(bool, String, Value)> = Vec::new();
        for entry in std::fs::read_dir(self.0.join(&path)).map_err(failed)?.flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            // Of a link, what it leads to.
            let Ok(about) = std::fs::metadata(entry.path()) else { continue };
            if name.starts_with('.') || self.inside(&path.join(&name).to_string_lossy()).is_err() {
                continue;
            }
            let kind = kind(&entry.path());
            let size = about.is_file().then_some(about.len());
            let value = json!({ "name": name, "kind": kind, "folder": about.is_dir(), "size": size });
            all.push((about.is_file(), name, value));
        }
        all.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let cut = all.len() > MOST;
        let entries: Vec<Value> = all.into_iter().take(MOST).map(|(.., value)| value).collect();
        let path = if path == Path::new(".") { String::new() } else { path.display().to_string() };
        Ok(json!({ "path": path, "entries": entries, "cut": cut }))
    }
}

/// Refuses hidden files and folders: keys of other programs are there.
fn shown(text: &str, path: &Path) -> Result<(), Failure> {
    let is_hidden = |part: Component| part.as_os_str().to_string_lossy().starts_with('.');
    match path.components().any(is_hidden) {
        true => Err(wrong(format!("{text}: hidden files and folders are not for the page"))),
        false => Ok(()),
    }
}

/// What an entry can be used as.
fn kind(path: &Path) -> &'static str {
    match path.is_dir() {
        true if path.join(RUN_FILE).exists() => "run",
        true if path.join("config.json").exists() && !path.join("adapter_config.json").exists() => "model",
        true => "folder",
        false if path.extension().is_some_and(|end| end == "gguf") => "model",
        false if holds_rows(path) => "rows",
        false => "file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_the_root_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let whole = dir.path().canonicalize().unwrap();
        let root = Root(whole.join("root"));
        std::fs::create_dir_all(root.0.join("a/b")).unwrap();
        std::fs::create_dir_all(whole.join("rootless")).unwrap();
        std::fs::write(whole.join("secret.jsonl"), "").unwrap();
        let inside = |text: &str| root.inside(text).map(|p| p.display().to_string()).ok();
        for (text, expected) in [("a/b", Some("a/b")), (".", Some(".")), ("a/../a", Some("a")), ("c", None)] {
            assert_eq!(inside(text).as_deref(), expected, "{text}");
        }
        assert_eq!(inside(&root.0.join("a").display().to_string()).as_deref(), Some("a"));
        for text in ["..", "../secret.jsonl", "a/../../secret.jsonl", "/etc/passwd", "../rootless"] {
            assert!(
                inside(text).is_none() && root.fresh(text).is_err() && root.list(text).is_err(),
                "{text}"
            );
        }
        assert_eq!(root.fresh("a/new/run").unwrap(), Path::new("a/new/run"));
        assert_eq!(root.fresh("./a//new/").unwrap(), Path::new("a/new"));
        assert!(
            ["", ".", "a/./../..", "a/../b", ".new", "a/.new"].iter().all(|text| root.fresh(text).is_err())
        );
        std::fs::create_dir(root.0.join(".ssh")).unwrap();
        std::fs::write(root.0.join(".ssh/id"), "").unwrap();
        assert!([".ssh", ".ssh/id", "a/../.ssh/id"].iter().all(|text| root.inside(text).is_err()));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&whole, root.0.join("out")).unwrap();
            for text in ["out", "out/secret.jsonl"] {
                assert!(inside(text).is_none() && root.fresh(text).is_err(), "{text}");
            }
            assert!(root.fresh("out/new").is_err());
            assert_eq!(
                root.list("").unwrap()["entries"].as_array().unwrap().len(),
                1,
                "the link is left out"
            );
        }
    }
}
