//! Chooses the files of a split among the files of a data set of the Hub, by the names that the Hub uses: the
//! configurations in the head of README.md, else `train-00000-of-00002.parquet`, `train.jsonl`, `train/0000.parquet`.
//! Files that are not known to belong together are refused.

use crate::data::files::{self, Part};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What the rows are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training: the split `train` unless another one is named.
    Train,
    /// Evaluation: `validation`, else `test`.
    Eval,
}

/// Files with names of rows that hold none.
const NO_ROWS: [&str; 4] = ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "config.json"];
/// Names that an error lists.
const LISTED: usize = 12;

/// A configuration of README.md.
struct Config {
    name: String,
    is_default: bool,
    /// Names of splits, and patterns of their files; one without a name has the files of all splits.
    splits: Vec<(String, Vec<String>)>,
}

/// The files of the split `part`: `SPLIT`, `CONFIG`, `CONFIG/SPLIT` or the name of a file. The error says what is there
/// and what can be named.
pub fn choose(
    names: &[String],
    card: Option<&str>,
    (part, purpose): (Option<&str>, Purpose),
) -> Result<Vec<String>, String> {
    let mut rows: Vec<&str> = names.iter().map(String::as_str).filter(|name| holds_rows(name)).collect();
    rows.sort_unstable();
    if rows.is_empty() {
        return Err(none(names));
    }
    if let Some(file) = part.filter(|part| rows.contains(part)) {
        return Ok(vec![file.to_owned()]);
    }
    let configs = card.map(configs).transpose()?.unwrap_or_default();
    let chosen = match configs.is_empty() {
        true => by_names(&rows, part, purpose)?,
        false => by_config(&configs, &rows, (part, purpose))?,
    };
    complete(&chosen)?;
    Ok(chosen.into_iter().map(str::to_owned).collect())
}

fn holds_rows(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    let hidden = name.split('/').any(|part| part.starts_with(['.', '_']));
    files::holds_rows(Path::new(name)) && !hidden && !NO_ROWS.contains(&file)
}

/// Why a repository without files of rows cannot be used.
fn none(names: &[String]) -> String {
    match names.iter().find(|name| name.ends_with(".py")) {
        Some(script) => format!(
            "its rows come from the script {script}, which is not run: the Hub's own copy may be at the revision \
             refs/convert/parquet"
        ),
        None => format!("it has no files of rows: {}", listed(names.iter().map(String::as_str))),
    }
}

fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.collect();
    names.dedup();
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", names.join(", "))
}

/// The configurations in the head of README.md.
fn configs(card: &str) -> Result<Vec<Config>, String> {
    let head =
        card.strip_prefix("---").and_then(|rest| rest.split_once("\n---")).map_or("", |(head, _)| head);
    let options = serde_yaml::options! { with_snippet: false };
    let head: Value = match head.trim() {
        "" => Value::Null,
        _ => serde_yaml::from_str_with_options(head, options).map_err(|e| {
            format!("the head of README.md is not YAML ({}): name a file as :FILE", e.without_snippet())
        })?,
    };
    let config = |config: &Value| {
        let splits = match (&config["data_files"], config["data_dir"].as_str()) {
            (Value::Null, None) => return None,
            (Value::Null, Some(dir)) => vec![(String::new(), vec![format!("{}/**", dir.trim_matches('/'))])],
            (files, _) => splits(files),
        };
        let name = config["config_name"].as_str().unwrap_or("default").to_owned();
        Some(Config { is_default: config["default"] == true || name == "default", name, splits })
    };
    Ok(head["configs"].as_array().into_iter().flatten().filter_map(config).collect())
}

/// `data_files` of a configuration: a pattern, a list of them, or those of each split.
fn splits(files: &Value) -> Vec<(String, Vec<String>)> {
    let patterns = |value: &Value| -> Vec<String> {
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        list.iter().filter_map(Value::as_str).map(|p| p.trim_start_matches("./").to_owned()).collect()
    };
    match files {
        Value::Object(map) => map.iter().map(|(split, value)| (split.clone(), patterns(value))).collect(),
        Value::Array(list) if list.iter().all(Value::is_object) => {
            let split =
                |item: &Value| (item["split"].as_str().unwrap_or("train").into(), patterns(&item["path"]));
            list.iter().map(split).collect()
        }
        _ => vec![(String::new(), patterns(files))],
    }
}

fn by_config<'a>(
    configs: &[Config],
    rows: &[&'a str],
    (part, purpose): (Option<&str>, Purpose),
) -> Result<Vec<&'a str>, String> {
    let named = |name: &str| configs.iter().find(|config| config.name == name);
    let asked = part.and_then(|part| match part.split_once('/') {
        Some((config, split)) => Some((named(config)?, Some(split))),
        None => Some((named(part)?, None)),
    });
    let (config, split) = match (asked, configs) {
        (Some(asked), _) => asked,
        (None, [only]) => (only, part),
        (None, _) => {
            let all = || listed(configs.iter().map(|config| config.name.as_str()));
            let config = configs.iter().find(|config| config.is_default);
            (
                config.ok_or_else(|| {
                    format!("it has several configurations ({}): name one as :CONFIG", all())
                })?,
                part,
            )
        }
    };
    let matching = |patterns: &[String]| -> Vec<&'a str> {
        rows.iter()
            .copied()
            .filter(|row| patterns.iter().any(|p| matches(p.as_bytes(), row.as_bytes())))
            .collect()
    };
    if let [(unnamed, patterns)] = &config.splits[..]
        && unnamed.is_empty()
    {
        let files = matching(patterns);
        // The card says that they belong together.
        let all = split.is_none() && purpose == Purpose::Train && !files.is_empty();
        return match all && files.iter().all(|file| split_of(file).is_none()) {
            true => Ok(files),
            false => by_names(&files, split, purpose),
        };
    }
    let of = |name: &str| config.splits.iter().find(|(split, _)| split == name);
    let found = match (split, purpose, &config.splits[..]) {
        (Some(split), ..) => of(split),
        (None, Purpose::Train, [only]) => Some(only),
        (None, Purpose::Train, _) => of("train"),
        (None, Purpose::Eval, _) => of("validation").or_else(|| of("test")),
    };
    let Some((name, patterns)) = found else {
        let all = listed(config.splits.iter().map(|(split, _)| split.as_str()));
        return Err(format!("the configuration {} has the splits {all}: name one as :SPLIT", config.name));
    };
    match patterns.iter().find(|pattern| matching(std::slice::from_ref(*pattern)).is_empty()) {
        Some(gone) => Err(format!("README.md names {gone} for the split {name}, which is no file of rows")),
        None => Ok(matching(patterns)),
    }
}

/// Whether a pattern matches a name: `*` and `?` within a folder, `**` across folders.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match pattern {
        [] => name.is_empty(),
        [b'*', b'*', b'/', rest @ ..] if matches(rest, name) => true,
        [b'*', b'*', rest @ ..] => (0..=name.len()).any(|at| matches(rest, &name[at..])),
        [b'*', rest @ ..] => {
            let folder = name.iter().position(|&b| b == b'/').unwrap_or(name.len());
            (0..=folder).any(|at| matches(rest, &name[at..]))
        }
        [b'?', rest @ ..] => name.first().is_some_and(|&b| b != b'/') && matches(rest, &name[1..]),
        [first, rest @ ..] => name.first() == Some(first) && matches(rest, &name[1..]),
    }
}

fn by_names<'a>(rows: &[&'a str], part: Option<&str>, purpose: Purpose) -> Result<Vec<&'a str>, String> {
    let below = |folder: &str| -> Vec<&'a str> {
        let inside = |row: &&&str| row.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        rows.iter().filter(inside).copied().collect()
    };
    let (rows, split) = match part {
        Some(part) if split(part).is_none() && !below(part).is_empty() => (below(part), None),
        Some(part) => match part.rsplit_once('/') {
            Some((folder, split)) => (below(folder), Some(split)),
            None => (rows.to_vec(), Some(part)),
        },
        None => (rows.to_vec(), None),
    };
    let of = |name: &str| -> Vec<&'a str> {
        rows.iter().copied().filter(|row| split_of(row).as_deref() == Some(name)).collect()
    };
    let files = match (split, purpose) {
        (Some(name), _) => {
            let exact: Vec<&str> = rows.iter().copied().filter(|row| stem(row) == name).collect();
            if exact.is_empty() { of(&canonical(name)) } else { exact }
        }
        (None, Purpose::Eval) if of("validation").is_empty() => of("test"),
        (None, Purpose::Eval) => of("validation"),
        (None, Purpose::Train) if rows.iter().all(|row| split_of(row).is_none()) => rows.clone(),
        (None, Purpose::Train) => of("train"),
    };
    let wanted = match (split, purpose) {
        (Some(name), _) => name,
        (None, Purpose::Train) => "train",
        (None, Purpose::Eval) => "validation",
    };
    match files.first() {
        None => Err(format!(
            "no file is known to be of the split {wanted}: {}; name one as :FILE",
            listed(rows.into_iter())
        )),
        Some(first) if files.iter().all(|file| series(file) == series(first)) => Ok(files),
        Some(_) => Err(format!(
            "several files may be the split {wanted}: {}; name one as :FILE, or their folder as :FOLDER/{wanted}",
            listed(files.into_iter())
        )),
    }
}

/// A name without folder, extension and number of the part.
fn stem(name: &str) -> &str {
    let file = name.rsplit('/').next().unwrap_or(name);
    let file = file.split('.').next().unwrap_or(file);
    numbered(file).map_or(file, |(stem, ..)| stem)
}

/// Name, number and count of `train-00000-of-00002` or `train-00000-of-00002-0123456789abcdef`.
fn numbered(file: &str) -> Option<(&str, u64, u64)> {
    let at = file.rfind("-of-")?;
    let (stem, number) = file[..at].rsplit_once('-')?;
    let count = file[at + 4..].split('-').next()?;
    Some((stem, number.parse().ok()?, count.parse().ok()?))
}

/// A name without what counts its parts: files of one series belong together.
fn series(name: &str) -> String {
    let (above, file) = name.rsplit_once('/').unwrap_or(("", name));
    let ending = file.split_once('.').map_or("", |(_, ending)| ending);
    format!("{above}/{}.{ending}", stem(name).trim_end_matches(|c: char| c.is_ascii_digit()))
}

/// The usual name of a split.
fn canonical(name: &str) -> String {
    split(name).map_or_else(|| name.to_owned(), str::to_owned)
}

/// The usual name of a split, if the word is one.
fn split(word: &str) -> Option<&'static str> {
    Some(match files::part(&word.to_lowercase())? {
        Part::Train => "train",
        Part::Eval => "validation",
        Part::Test => "test",
    })
}

/// The split of a file: that of its whole name, of a folder, of the series, or of a word of its name.
fn split_of(name: &str) -> Option<String> {
    let (above, file) = name.rsplit_once('/').unwrap_or(("", name));
    let whole = split(stem(name)).or_else(|| above.split('/').rev().find_map(split));
    if let Some(known) = whole {
        return Some(known.into());
    }
    let file = file.split('.').next().unwrap_or(file);
    if numbered(file).is_some() {
        return Some(stem(name).to_owned());
    }
    stem(name).split(|c: char| !c.is_ascii_alphabetic()).find_map(split).map(str::to_owned)
}

/// Refuses a series of which parts are missing.
fn complete(files: &[&str]) -> Result<(), String> {
    let mut all = BTreeMap::new();
    for file in files {
        let (above, last) = file.rsplit_once('/').unwrap_or(("", file));
        let (whole, ending) = last.split_once('.').unwrap_or((last, ""));
        if let Some((stem, _, count)) = numbered(whole) {
            all.entry((above, stem, ending, count)).or_insert((0, *file)).0 += 1;
        }
    }
    match all.iter().find(|((.., count), (there, _))| there != count) {
        Some(((.., count), (there, file))) => Err(format!("{there} of {count} parts of {file} are there")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str], card: Option<&str>, part: Option<&str>, purpose: Purpose, expected: &[&str]) {
        let names: Vec<String> = names.iter().map(|name| (*name).into()).collect();
        let got = choose(&names, card, (part, purpose)).unwrap_or_else(|e| vec![e]);
        let fits = match &got[..] {
            [error] if error.contains(' ') => error.contains(expected[0]),
            files => *files == *expected,
        };
        assert!(fits, "{names:?} {part:?} {purpose:?} gives {got:?}, not {expected:?}");
    }

    const USUAL: &[&str] = &[
        "README.md",
        "data/test-00000-of-00001.parquet",
        "data/train-00001-of-00002-0123456789abcdef.parquet",
        "data/train-00000-of-00002-aaaa456789abcdef.parquet",
        "dataset_infos.json",
    ];
    const TWO: [&str; 2] = [
        "data/train-00000-of-00002-aaaa456789abcdef.parquet",
        "data/train-00001-of-00002-0123456789abcdef.parquet",
    ];

    #[test]
    fn splits_are_known_by_the_names_of_files() {
        use Purpose::{Eval, Train};
        check(USUAL, None, None, Train, &TWO);
        check(USUAL, None, Some("train"), Eval, &TWO);
        check(USUAL, None, None, Eval, &[USUAL[1]]);
        check(
            USUAL,
            None,
            Some("validation"),
            Train,
            &["no file is known to be of the split validation: data/test"],
        );
        check(USUAL, None, Some(USUAL[2]), Train, &[USUAL[2]]);
        check(&USUAL[..3], None, None, Train, &["1 of 2 parts of data/train-00001"]);
        let plain = ["train.jsonl", "dev.jsonl", "test.jsonl"];
        check(&plain, None, None, Train, &["train.jsonl"]);
        check(&plain, None, None, Eval, &["dev.jsonl"]);
        check(&plain, None, Some("validation"), Train, &["dev.jsonl"]);
        check(&["alpaca_data.json", ".x.json"], None, None, Train, &["alpaca_data.json"]);
        check(&["hh_train.jsonl", "hh_test.jsonl"], None, None, Train, &["hh_train.jsonl"]);
        let sft = ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"];
        check(
            &sft,
            None,
            None,
            Train,
            &["no file is known to be of the split train: data/train_gen-00000-of-00001"],
        );
        check(&sft, None, Some("train_sft"), Train, &sft[..1]);
        let folders =
            ["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet", "b/train.json"];
        check(
            &folders,
            None,
            None,
            Train,
            &["several files may be the split train: b/train.json, main/train/0000"],
        );
        check(&folders, None, Some("main"), Train, &folders[..2]);
        check(&folders, None, Some("main/test"), Train, &folders[2..3]);
        check(
            &["a.json", "b.json"],
            None,
            None,
            Train,
            &["several files may be the split train: a.json, b.json"],
        );
        check(&["train.json", "train.csv"], None, None, Train, &["several files may be the split train"]);
        check(&["set.py", "README.md"], None, None, Train, &["the script set.py, which is not run"]);
        check(&["README.md", "x.zip"], None, None, Train, &["it has no files of rows: README.md, x.zip"]);
    }

    #[test]
    fn configurations_of_the_card_decide_first() {
        use Purpose::{Eval, Train};
        let files = ["en/a.jsonl", "en/b.jsonl", "en/held.jsonl", "de/x.csv", "de/deep/y.csv"];
        let card = "---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: [en/a.jsonl, \
                    \"en/b*\"]\n  - split: test\n    path: en/held.jsonl\n- config_name: de\n  data_files: \"de/**\"\n---\ntext";
        let check = |part, purpose, expected: &[&str]| {
            super::tests::check(&files, Some(card), part, purpose, expected)
        };
        check(None, Train, &["several configurations (en, de): name one as :CONFIG"]);
        check(Some("en"), Train, &files[..2]);
        check(Some("en"), Eval, &files[2..3]);
        check(Some("en/test"), Train, &files[2..3]);
        check(Some("en/other"), Train, &["the configuration en has the splits train, test"]);
        check(Some("de"), Train, &["de/deep/y.csv", "de/x.csv"]);
        let of_one = card.replace("config_name: en", "config_name: en\n  default: true");
        super::tests::check(&files, Some(&of_one), None, Train, &files[..2]);
        super::tests::check(&files, Some(&of_one), Some("test"), Train, &files[2..3]);
        super::tests::check(
            &files,
            Some("---\na: [\n---\n"),
            None,
            Train,
            &["the head of README.md is not YAML"],
        );
        let parts = [
            "d/part1-00000-of-00002.json",
            "d/part1-00001-of-00002.json",
            "d/part2-00000-of-00002.json",
            "d/part2-00001-of-00002.json",
        ];
        let of_parts = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: [d/part1-*, d/part2-*]\n---\n";
        super::tests::check(&parts, Some(of_parts), None, Train, &parts);
        super::tests::check(&parts[..3], Some(of_parts), None, Train, &["1 of 2 parts of d/part2-00000"]);
        let gone = card.replace("en/held", "en/gone");
        super::tests::check(&files, Some(&gone), Some("en/test"), Train, &["README.md names en/gone.jsonl"]);
        let gone = card.replace("en/a.jsonl", "en/gone.jsonl");
        super::tests::check(&files, Some(&gone), Some("en"), Train, &["README.md names en/gone.jsonl"]);
        for (pattern, name, expected) in [
            ("*.json", "a.json", true),
            ("*.json", "d/a.json", false),
            ("**/a?.json", "d/e/a1.json", true),
            ("**/a.json", "a.json", true),
            ("data/train-*", "data/train-0.parquet", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }
}
