//! From the names of --data and --eval-data to files: a path on this machine, or a data set of the Hub as
//! `owner/name[:SPLIT][@REVISION]`. A path wins.

use super::base_model::progress_lines;
use crate::config::groups::Options;
use crate::config::refusal::Refusal;
use crate::data::files;
use crate::data::splits::{self, Purpose};
use crate::format;
use crate::format::hub::Hub;
use std::path::{Path, PathBuf};

/// The files of a set of rows: of an entry of --data or --eval-data.
pub type Set = Vec<PathBuf>;

/// Name and sets of each evaluation.
pub type Evals = Vec<(String, Vec<Set>)>;

/// Training sets, and the sets of each evaluation, the deciding one first; a folder has both.
pub fn sets(options: &Options) -> Result<(Vec<Set>, Evals), Refusal> {
    let (data, deciding) = (&options.data, &options.output.best_set);
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    for path in &data.data {
        match path.is_dir() {
            true => {
                let folder = files::folder(path)?;
                train.push(folder.train);
                eval.extend(Some(folder.eval).filter(|files| !files.is_empty()));
            }
            false => train.push(files_of(path, Purpose::Train)?),
        }
    }
    if data.eval_data.is_empty() {
        let of_folders = Some((String::new(), eval)).filter(|(_, sets)| !sets.is_empty());
        return Ok((train, of_folders.into_iter().collect()));
    }
    let named = |(name, paths): &(String, Vec<PathBuf>)| Ok((name.clone(), eval_sets(paths)?));
    let mut evals = data.eval_data.iter().map(named).collect::<Result<Evals, Refusal>>()?;
    evals.sort_by_key(|(name, _)| deciding.as_ref().is_some_and(|deciding| deciding != name));
    Ok((train, evals))
}

/// Evaluation sets; of a folder its evaluation files, else its test files, else all.
pub fn eval_sets(paths: &[PathBuf]) -> Result<Vec<Set>, Refusal> {
    let set = |path: &PathBuf| {
        if !path.is_dir() {
            return files_of(path, Purpose::Eval);
        }
        let folder = files::folder(path)?;
        let named = if folder.eval.is_empty() { folder.test } else { folder.eval };
        Ok(if named.is_empty() { folder.train } else { named })
    };
    paths.iter().map(set).collect()
}

/// The file, or the files of the split on the Hub.
pub fn files_of(path: &Path, purpose: Purpose) -> Result<Set, Refusal> {
    let text = path.to_string_lossy();
    let Some(Named { id, part, revision }) = on_hub(&text) else { return Ok(vec![path.to_owned()]) };
    let set = Hub::from_environment().data_set(id, revision)?;
    let card = set.card()?;
    let files = splits::choose(set.names(), card.as_deref(), (part, purpose))
        .map_err(|why| Refusal::configuration(format!("{text}: {why}")))?;
    Ok(set.fetch(&files, &mut progress_lines())?)
}

/// A data set of the Hub by name.
#[derive(Debug, PartialEq, Eq)]
pub struct Named<'a> {
    id: &'a str,
    part: Option<&'a str>,
    revision: Option<&'a str>,
}

/// The data set that a name means; `None` for a path: it exists, or ends like a file of rows.
pub fn on_hub(name: &str) -> Option<Named<'_>> {
    let (rest, revision) = name.split_once('@').map_or((name, None), |(rest, r)| (rest, Some(r)));
    let (id, part) = rest.split_once(':').map_or((rest, None), |(id, part)| (id, Some(part)));
    let local = Path::new(name).exists() || part.is_none() && files::holds_rows(Path::new(id));
    (!local && format::looks_like_id(id)).then_some(Named { id, part, revision })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_data_sets_differ_from_paths() {
        let named = |id, part, revision| Some(Named { id, part, revision });
        assert_eq!(on_hub("owner/name"), named("owner/name", None, None));
        assert_eq!(on_hub("owner/name:test"), named("owner/name", Some("test"), None));
        assert_eq!(on_hub("o/n:a/b.jsonl@refs/pr/1"), named("o/n", Some("a/b.jsonl"), Some("refs/pr/1")));
        for path in ["-", "rows.jsonl", "none/rows.jsonl", "./a/b", "/a/b", "a/b/c", "src/run", "C:/a/b", "a"]
        {
            assert_eq!(on_hub(path), None, "{path}");
        }
    }
}
