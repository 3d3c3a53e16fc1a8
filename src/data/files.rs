//! Reads rows from files as JSON objects with their positions, in chunks: a file is never held in memory as a whole.
//!
//! The format follows from the file name: .jsonl / .ndjson, .json (an array, or one object per line), .csv / .tsv,
//! .parquet; text also as .gz; `-` is JSON lines on stdin. A row of text has at most `LONGEST` bytes. The row files of a folder are named
//! train*, validation* (or valid, eval, dev) and test*.

mod lines;
mod parquet_rows;
mod table;

pub use table::delimiter;

use crate::data::error::{DataError, Place};
use flate2::read::MultiGzDecoder;
use lines::Lines;
use serde::de::{Deserializer as _, SeqAccess, Visitor};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// A row as read from its file; JSON lines are parsed later, on all threads.
#[derive(Debug)]
pub enum Raw {
    /// One line of JSON.
    Line(Vec<u8>),
    /// A parsed row.
    Value(Value),
}

impl Raw {
    /// Approximate memory of the row in bytes.
    pub fn bytes(&self) -> usize {
        fn of(value: &Value) -> usize {
            std::mem::size_of::<Value>()
                + match value {
                    Value::String(s) => s.len(),
                    Value::Array(items) => items.iter().map(of).sum(),
                    Value::Object(map) => map.iter().map(|(key, value)| key.len() + of(value)).sum(),
                    Value::Null | Value::Bool(_) | Value::Number(_) => 0,
                }
        }
        match self {
            Raw::Line(text) => text.len(),
            Raw::Value(value) => of(value),
        }
    }

    /// Parses the row; the error says what is wrong with the line and what to do.
    pub fn parse(self) -> Result<Value, String> {
        match self {
            Raw::Value(value) => Ok(value),
            // The line end is removed, so that an error at the end of the line has a column.
            Raw::Line(text) => {
                serde_json::from_slice(text.trim_ascii_end()).map_err(|e| json_fault(&e, &text))
            }
        }
    }
}

/// serde_json's message with the column only (the line number within a line is always 1), and what to do.
fn json_fault(error: &serde_json::Error, line: &[u8]) -> String {
    let text = error.to_string();
    let words = text.split(" at line ").next().unwrap_or(&text);
    let way = if std::str::from_utf8(line).is_err() || line.contains(&0) {
        "the file must be text in UTF-8"
    } else if error.is_eof() {
        "the line ends too early: a row is one JSON object on one line"
    } else {
        "a row is one JSON object on one line"
    };
    format!("not valid JSON: {words} (column {}): {way}", error.column())
}

/// A row and its position.
#[derive(Debug)]
pub struct RawRow {
    /// Position of the row.
    pub place: Place,
    /// Contents of the row.
    pub raw: Raw,
}

/// Whether the reader continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Read more rows.
    Continue,
    /// Stop reading.
    Stop,
}

/// Receives all rows in order.
pub type Sink<'a> = &'a mut dyn FnMut(RawRow) -> Result<Flow, DataError>;

const KINDS: &str =
    ".jsonl, .json, .csv, .tsv (also as .gz) or .parquet, or - for JSON lines on standard input";
const ENDINGS: [&str; 6] = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet"];

/// Whether the extension of the file is that of a row file.
pub fn holds_rows(path: &Path) -> bool {
    let (kind, packed) = kind(path);
    ENDINGS.contains(&kind.as_str()) && !(packed && kind == "parquet")
}

/// The extension of a file in lower case, and whether the file is packed by gzip.
fn kind(path: &Path) -> (String, bool) {
    let end = |path: &Path| path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    match end(path).as_str() {
        "gz" => (end(&path.with_extension("")), true),
        kind => (kind.to_owned(), false),
    }
}

/// Maximum size of a text row in bytes. A longer row is an error.
const LONGEST: u64 = 1 << 28;

/// Reads one file to its end, or until the sink stops.
pub fn read(path: &Path, sink: Sink<'_>) -> Result<Flow, DataError> {
    let file = path.display().to_string();
    if file == "-" {
        return lines(&mut std::io::stdin().lock(), "stdin", sink);
    }
    let (kind, packed) = kind(path);
    if path.is_dir() {
        return Err(format_error(&file, "is a folder without train, valid or test files".into()));
    }
    if !holds_rows(path) {
        return Err(match path.exists() {
            true => format_error(&file, format!("rows must be {KINDS}")),
            false => DataError::File { file, source: std::io::ErrorKind::NotFound.into() },
        });
    }
    let opened = File::open(path).map_err(|source| DataError::File { file: file.clone(), source })?;
    if kind == "parquet" {
        return parquet_rows::read(opened, &file, sink);
    }
    let opened: Box<dyn Read> = if packed { Box::new(MultiGzDecoder::new(opened)) } else { Box::new(opened) };
    match kind.as_str() {
        "csv" | "tsv" => table::read(opened, &file, sink),
        "json" => {
            let mut reader = BufReader::with_capacity(1 << 20, opened);
            match first_byte(&mut reader, &file)? {
                Some(b'[') => array(reader, &file, sink),
                _ => lines(&mut reader, &file, sink),
            }
        }
        _ => lines(&mut BufReader::with_capacity(1 << 20, opened), &file, sink),
    }
}

fn format_error(file: &str, reason: String) -> DataError {
    DataError::Format { file: file.to_owned(), reason }
}

/// The first byte that is not white space, without consuming it.
fn first_byte(reader: &mut impl BufRead, file: &str) -> Result<Option<u8>, DataError> {
    loop {
        let buffer = reader.fill_buf().map_err(|source| DataError::File { file: file.to_owned(), source })?;
        if buffer.is_empty() {
            return Ok(None);
        }
        match buffer.iter().position(|b| !b.is_ascii_whitespace()) {
            Some(at) => return Ok(Some(buffer[at])),
            None => {
                let all = buffer.len();
                reader.consume(all);
            }
        }
    }
}

/// Reads JSON lines. Empty lines are skipped but counted; a byte order mark before the first line is dropped.
fn lines(reader: &mut dyn BufRead, file: &str, sink: Sink<'_>) -> Result<Flow, DataError> {
    for line in 1.. {
        let mut text = Vec::new();
        let read = (&mut *reader)
            .take(LONGEST + 1)
            .read_until(b'\n', &mut text)
            .map_err(|source| DataError::File { file: file.to_owned(), source })?;
        if read == 0 {
            break;
        }
        if read as u64 > LONGEST {
            return Err(endless(Place::Line { file: file.to_owned(), line }));
        }
        if line == 1 && text.starts_with(b"\xef\xbb\xbf") {
            text.drain(..3);
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let place = Place::Line { file: file.to_owned(), line };
        if sink(RawRow { place, raw: Raw::Line(text) })? == Flow::Stop {
            return Ok(Flow::Stop);
        }
    }
    Ok(Flow::Continue)
}

/// The error for a row longer than [`LONGEST`].
fn endless(place: Place) -> DataError {
    let reason = format!(
        "the row is longer than {} MB: is this a file of rows? Split long rows into several",
        LONGEST / 1_000_000
    );
    DataError::Row { place, reason }
}

/// Reads the items of a JSON array one by one.
fn array(reader: impl Read, file: &str, sink: Sink<'_>) -> Result<Flow, DataError> {
    let lines = Lines::uncounted();
    let reader = BufReader::with_capacity(1 << 16, lines.watch(reader));
    let mut items = Items { file, sink, outcome: Ok(Flow::Continue), row: 0, lines: lines.clone() };
    let mut json = serde_json::Deserializer::from_reader(reader);
    let parsed = json.deserialize_seq(&mut items).and_then(|()| json.end());
    let place = Place::Row { file: file.to_owned(), row: items.row + 1 };
    match (items.outcome, parsed) {
        (Ok(Flow::Continue), Err(_)) if lines.exceeded() => Err(endless(place)),
        (Ok(Flow::Continue), Err(e)) => {
            let way = "the file must be one list of JSON objects: [{...}, {...}]";
            Err(DataError::Row { place, reason: format!("not valid JSON: {e}: {way}") })
        }
        (outcome, _) => outcome,
    }
}

struct Items<'a, 'b> {
    file: &'a str,
    sink: Sink<'b>,
    outcome: Result<Flow, DataError>,
    row: u64,
    lines: Lines,
}

impl<'de> Visitor<'de> for &mut Items<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(value) = seq.next_element::<Value>()? {
            self.row += 1;
            self.lines.next_row();
            let place = Place::Row { file: self.file.to_owned(), row: self.row };
            self.outcome = (self.sink)(RawRow { place, raw: Raw::Value(value) });
            if !matches!(self.outcome, Ok(Flow::Continue)) {
                // This error only leaves the array early; the outcome holds the result.
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

/// The files of a folder by purpose.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Folder {
    /// Files named train*, or all files without a purpose if there are none.
    pub train: Vec<PathBuf>,
    /// validation*, valid*, eval*, dev*.
    pub eval: Vec<PathBuf>,
    /// test*.
    pub test: Vec<PathBuf>,
}

/// Sorts the row files of a folder by the first known word of their names (`train-00000-of-00002.parquet`), in the
/// order of their names; sub-folders such as `train/`, `validation/` or `data/` are included.
pub fn folder(path: &Path) -> Result<Folder, DataError> {
    let mut files = Vec::new();
    row_files(path, 2, &mut files)?;
    files.sort();
    let (mut out, mut other) = (Folder::default(), Vec::new());
    for file in files {
        let below = file.strip_prefix(path).unwrap_or(&file).to_string_lossy().to_lowercase();
        let words: Vec<&str> = below.split(|c: char| !c.is_ascii_alphabetic()).collect();
        let list = match words.iter().find_map(|w| part(w)) {
            Some(Part::Train) => &mut out.train,
            Some(Part::Eval) => &mut out.eval,
            Some(Part::Test) => &mut out.test,
            None => &mut other,
        };
        list.push(file);
    }
    if out.train.is_empty() {
        out.train = other;
    }
    match out.train.is_empty() {
        true => Err(format_error(
            &path.display().to_string(),
            "the folder has no train file (.jsonl, .json, .csv, .tsv, .parquet)".into(),
        )),
        false => Ok(out),
    }
}

/// What a word in the name of a file says about its rows.
pub enum Part {
    /// They are trained on.
    Train,
    /// They are evaluated on during training.
    Eval,
    /// They are for a test after it.
    Test,
}

/// What a word in lower case says about the rows of a file.
pub fn part(word: &str) -> Option<Part> {
    match word {
        "train" | "training" => Some(Part::Train),
        "validation" | "valid" | "val" | "eval" | "dev" => Some(Part::Eval),
        "test" => Some(Part::Test),
        _ => None,
    }
}

fn row_files(path: &Path, depth: usize, out: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let failed = |source| DataError::File { file: path.display().to_string(), source };
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let child = entry.map_err(failed)?.path();
        if child.is_dir() && depth > 1 {
            row_files(&child, depth - 1, out)?;
        } else if holds_rows(&child) {
            out.push(child);
        }
    }
    Ok(())
}
