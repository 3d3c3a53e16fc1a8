//! Data sets: the names of their files, and the files that the caller chooses among them. Names are kept in the cache, so
//! that a choice can be repeated without the Hub: the cache of `huggingface_hub` does not tell which files are missing.

use super::cache::Repository;
use super::{Hub, Kind, Progress, Session, error, is_pinned};
use crate::format::atomic;
use crate::format::directory;
use crate::format::error::FormatError;
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the file that describes a data set.
const CARD: &str = "README.md";

/// A data set of the Hub at one commit.
pub struct DataSet {
    id: String,
    here: Repository,
    /// None: the Hub is not asked.
    session: Option<Session>,
    revision: String,
    commit: String,
    names: Vec<String>,
}

impl Hub {
    /// The data set `id` (`owner/name`) at `revision` (default: the main branch). Its rows are not downloaded yet.
    pub fn data_set(&self, id: &str, revision: Option<&str>) -> Result<DataSet, FormatError> {
        if !directory::looks_like_id(id) {
            return Err(error(id, "not a Hub id", "write it as owner/name", true));
        }
        let of_branch = revision.unwrap_or("main").to_owned();
        let here = || Repository::new(&self.cache, Kind::Data, id);
        let known = here().commit(&of_branch).and_then(|commit| Some((names(&here(), &commit)?, commit)));
        let found = |session, (names, commit)| DataSet {
            id: id.to_owned(),
            here: here(),
            session,
            revision: of_branch.clone(),
            commit,
            names,
        };
        match known {
            Some(known) if self.offline => Ok(found(None, known)),
            Some(known) if is_pinned(revision) && here().names(&known.1).is_file() => {
                Ok(found(self.session(Kind::Data, id).ok(), known))
            }
            known => {
                let session = self.session(Kind::Data, id)?;
                match (session.listing(revision), known) {
                    (Ok((commit, mut names)), _) => {
                        names.retain(|name| is_safe(name));
                        Ok(found(Some(session), (names, commit)))
                    }
                    (Err(FormatError::Hub { permanent: false, .. }), Some(known)) => Ok(found(None, known)),
                    (Err(e), _) => Err(e),
                }
            }
        }
    }
}

impl DataSet {
    /// The names of its files.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The text that describes it, if there is one.
    pub fn card(&self) -> Result<Option<String>, FormatError> {
        if !self.names.iter().any(|name| name == CARD) {
            return Ok(None);
        }
        let path = self.files(&[CARD.to_owned()], &mut |_| ())?.remove(0);
        let text = fs::read(&path).map_err(|e| FormatError::io(&path, e))?;
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }

    /// Downloads these files and returns their paths.
    pub fn fetch(
        &self,
        files: &[String],
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Vec<PathBuf>, FormatError> {
        let paths = self.files(files, progress)?;
        if self.session.is_some() {
            atomic::write_file(&self.here.names(&self.commit), self.names.join("\n").as_bytes())?;
            self.here.remember(&self.revision, &self.commit)?;
        }
        Ok(paths)
    }

    fn files(
        &self,
        files: &[String],
        progress: &mut dyn FnMut(&Progress),
    ) -> Result<Vec<PathBuf>, FormatError> {
        let paths: Vec<PathBuf> =
            files.iter().map(|name| self.here.snapshot(&self.commit).join(name)).collect();
        match (&self.session, paths.iter().zip(files).find(|(path, _)| !path.is_file())) {
            (_, None) => {}
            (Some(session), _) => session.files(&self.commit, files, progress)?,
            (None, Some((_, name))) => {
                let what = format!("'{name}' is not in the cache, and the Hub was not asked");
                return Err(error(
                    &self.id,
                    &what,
                    "run once with a connection, without HF_HUB_OFFLINE",
                    false,
                ));
            }
        }
        Ok(paths)
    }
}

/// The names of the files of `commit`, as kept, or as other programs left them in the snapshot.
fn names(here: &Repository, commit: &str) -> Option<Vec<String>> {
    if let Ok(text) = fs::read_to_string(here.names(commit)) {
        return Some(text.lines().map(str::to_owned).collect());
    }
    let (folder, mut names) = (here.snapshot(commit), Vec::new());
    walk(&folder, "", &mut names).ok()?;
    names.sort();
    (!names.is_empty()).then_some(names)
}

fn walk(folder: &Path, above: &str, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let name = format!("{above}{name}");
        if path.is_dir() {
            walk(&path, &format!("{name}/"), names)?;
        } else {
            names.push(name);
        }
    }
    Ok(())
}

/// Whether a name of the Hub stays inside the folder of a snapshot, on every system.
fn is_safe(name: &str) -> bool {
    let part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', ':']);
    name.split('/').all(part) && !name.contains('\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_outside_the_snapshot_are_not_safe() {
        for name in ["data/train-00000-of-00001.parquet", "a b.jsonl", "..a/b.json"] {
            assert!(is_safe(name), "{name}");
        }
        for name in ["", "/etc/x", "../x", "a/../../x", "a//b", "C:/x", "a\\..\\b", "a/.", "a\nb"] {
            assert!(!is_safe(name), "{name}");
        }
    }
}
