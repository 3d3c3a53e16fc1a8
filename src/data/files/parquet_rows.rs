//! Rows of a Parquet file as JSON objects, through the record reader, one row group at a time.
//!
//! A null inside a nested group is removed: Arrow gives every message of a list the same fields, but a template that
//! tests `tool_calls is defined` asks whether there are tool calls.

use crate::data::error::{DataError, Place};
use crate::data::files::{Flow, Raw, RawRow, Sink};
use crate::support::panics::{caught, without_place};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};
use std::fs::File;

/// Reads all rows, or until the sink stops.
pub fn read(opened: File, file: &str, sink: Sink<'_>) -> Result<Flow, DataError> {
    let failed = |reason: String| DataError::Format {
        file: file.to_owned(),
        reason: format!("not a readable Parquet file: {reason}"),
    };
    let reader = answered(|| SerializedFileReader::new(opened)).map_err(failed)?;
    let mut rows = answered(|| reader.get_row_iter(None)).map_err(failed)?;
    let mut number = 0;
    loop {
        number += 1;
        let place = Place::Row { file: file.to_owned(), row: number };
        let next = answered(|| rows.next().transpose());
        let Some(row) = next.map_err(|reason| DataError::Row { place: place.clone(), reason })? else {
            return Ok(Flow::Continue);
        };
        let value = Value::Object(row.get_column_iter().map(|(n, f)| (n.clone(), value(f))).collect());
        if sink(RawRow { place, raw: Raw::Value(value) })? == Flow::Stop {
            return Ok(Flow::Stop);
        }
    }
}

/// Runs a call of the library and returns errors and panics as text: the library asserts properties of damaged files.
fn answered<T>(run: impl FnOnce() -> parquet::errors::Result<T>) -> Result<T, String> {
    match caught(run) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => Err(without_place(&panic).to_owned()),
    }
}

fn group(row: &Row) -> Value {
    let mut map = Map::new();
    for (name, field) in row.get_column_iter() {
        if !matches!(field, Field::Null) {
            map.insert(name.clone(), value(field));
        }
    }
    Value::Object(map)
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => Value::from(*b),
        Field::Byte(i) => Value::from(*i),
        Field::Short(i) => Value::from(*i),
        Field::Int(i) => Value::from(*i),
        Field::Long(i) => Value::from(*i),
        Field::UByte(i) => Value::from(*i),
        Field::UShort(i) => Value::from(*i),
        Field::UInt(i) => Value::from(*i),
        Field::ULong(i) => Value::from(*i),
        Field::Float(x) => Value::from(*x),
        Field::Double(x) => Value::from(*x),
        Field::Str(s) => Value::from(s.as_str()),
        // Strings written without the UTF-8 annotation.
        Field::Bytes(b) => Value::from(String::from_utf8_lossy(b.data())),
        Field::Group(row) => group(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => Value::Object(
            map.entries()
                .iter()
                .map(|(k, v)| (k.to_string().trim_matches('"').to_owned(), value(v)))
                .collect(),
        ),
        other => Value::from(other.to_string()),
    }
}
