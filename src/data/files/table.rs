//! Text tables (.csv, .tsv). The delimiter (comma, semicolon or tab) is the one that is most frequent in the header.

use super::lines::Lines;
use super::{Flow, Raw, RawRow, Sink, endless, format_error};
use crate::data::error::{DataError, Place};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Possible delimiters, most common first.
const DELIMITERS: [u8; 3] = [b',', b';', b'\t'];

/// The delimiter of a .csv or .tsv file; None for other files and unreadable ones.
pub fn delimiter(path: &Path) -> Option<&'static str> {
    let kind = path.extension()?.to_str()?.to_lowercase();
    if !["csv", "tsv"].contains(&kind.as_str()) {
        return None;
    }
    let mut reader = BufReader::new(File::open(path).ok()?);
    Some(match sniff(reader.fill_buf().ok()?) {
        b';' => "semicolon",
        b'\t' => "tab",
        _ => "comma",
    })
}

/// The delimiter that occurs most often in the header, outside quotes.
fn sniff(text: &[u8]) -> u8 {
    let (mut quoted, mut counts) = (false, [0u32; DELIMITERS.len()]);
    for &byte in text {
        match byte {
            b'"' => quoted = !quoted,
            b'\n' | b'\r' if !quoted && counts == [0; 3] => {} // a blank line, or a header of one cell
            b'\n' | b'\r' if !quoted => break,
            _ if !quoted => DELIMITERS.iter().zip(&mut counts).for_each(|(d, n)| *n += u32::from(*d == byte)),
            _ => {}
        }
    }
    let most = counts.iter().max().copied().unwrap_or(0);
    counts.iter().position(|n| *n == most).map_or(b',', |i| DELIMITERS[i])
}

/// Reads a table. Each row becomes an object with the names of the header; all cells are strings.
pub fn read(opened: impl Read, file: &str, sink: Sink<'_>) -> Result<Flow, DataError> {
    let lines = Lines::default();
    let mut text = BufReader::with_capacity(1 << 16, lines.watch(opened));
    let start = text.fill_buf().map_err(|source| DataError::File { file: file.to_owned(), source })?;
    let delimiter = sniff(start);
    let mut reader = csv::ReaderBuilder::new().flexible(false).delimiter(delimiter).from_reader(text);
    let place = |at: u64| Place::Line { file: file.to_owned(), line: lines.line(at) };
    let failed = |e: csv::Error, at: u64| match e.position() {
        _ if lines.exceeded() => endless(place(at)),
        None => format_error(file, fault(&e)),
        Some(at) => DataError::Row { place: place(at.byte()), reason: fault(&e) },
    };
    let header = reader.headers().map_err(|e| failed(e, 0))?.clone();
    let names: Vec<&str> = header.iter().map(|n| n.trim_start_matches('\u{feff}')).collect();
    let mut record = csv::StringRecord::new();
    loop {
        let at = reader.position().byte();
        if !reader.read_record(&mut record).map_err(|e| failed(e, at))? {
            return Ok(Flow::Continue);
        }
        lines.next_row();
        let cell = |(name, text): (&&str, &str)| (name.to_string(), Value::from(text));
        let row = names.iter().zip(record.iter()).map(cell).collect();
        if sink(RawRow { place: place(at), raw: Raw::Value(Value::Object(row)) })? == Flow::Stop {
            return Ok(Flow::Stop);
        }
    }
}

/// The error of a record, without its position.
fn fault(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => format!(
            "not a row of this table: cells of the header {expected_len}, of the row {len}: put quotes around text \
             that holds commas, semicolons, tabs or line breaks"
        ),
        csv::ErrorKind::Utf8 { .. } => "not a row of this table: the file must be text in UTF-8".into(),
        _ => format!("not a row of this table: {error}"),
    }
}
