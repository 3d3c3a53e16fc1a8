//! Python's printing, comparison and serialisation of values, where minijinja differs.
//!
//! `{{ none }}` is `None`, `{{ true }}` is `True`, a list is printed as its `repr`, and `tojson` is `json.dumps`
//! without ensure_ascii: floats keep `.0`, separators are `, ` and `: `, and no character is escaped for HTML.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value as Jinja};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::ops::RangeInclusive;

/// Converts a JSON value for a template; objects keep the order of their keys.
pub fn from_json(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(b) => Jinja::from(*b),
        Value::String(s) => Jinja::from(s.as_str()),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Jinja::from(i),
            (None, Some(u)) => Jinja::from(u),
            (None, None) => Jinja::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Array(items) => items.iter().map(from_json).collect(),
        Value::Object(map) => Jinja::from_pairs(map.iter().map(|(k, v)| (k.as_str(), from_json(v)))),
    }
}

/// Prepares messages as transformers does: null keys are removed, because templates test whether a key exists, and
/// `reasoning_content` and its older names are filled from each other.
pub fn normalise(messages: &Value) -> Value {
    let one = |message: &Value| -> Value {
        let Some(map) = message.as_object() else { return message.clone() };
        let given = || map.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone()));
        let names = ["reasoning_content", "thinking", "reasoning"];
        let Some(text) = names.iter().find_map(|n| map.get(*n).filter(|v| !v.is_null())) else {
            return Value::Object(given().collect());
        };
        let mut out = Map::new();
        out.insert("thinking".into(), text.clone());
        out.extend(given());
        out.insert("reasoning_content".into(), text.clone());
        Value::Object(out)
    };
    match messages.as_array() {
        Some(list) => Value::Array(list.iter().map(one).collect()),
        None => messages.clone(),
    }
}

/// The test `is iterable`: whether Python can iterate over the value; false for none.
pub fn is_iterable(value: &Jinja) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// The test `is sequence`: true for a value with a length and items, including strings and mappings; Jinja's undefined
/// has both.
pub fn is_sequence(value: &Jinja) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

/// Writes the output of `{{ value }}`.
pub fn format(out: &mut Output, _: &mut State, value: &Jinja) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(s) => out.write_str(s),
        None => out.write_str(&str(value)),
    };
    written.map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot write"))
}

/// Python's `str(value)`.
pub fn str(value: &Jinja) -> String {
    match value.as_str() {
        Some(s) => s.to_owned(),
        None => {
            let mut out = String::new();
            repr(&mut out, value);
            out
        }
    }
}

fn repr(out: &mut String, value: &Jinja) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(out, value),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            let items: Vec<Jinja> = value.try_iter().map(Iterator::collect).unwrap_or_default();
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, item);
            }
            out.push_str(if value.is_tuple() && items.len() == 1 { "," } else { "" });
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, (key, item)) in pairs(value).into_iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &key);
                out.push_str(": ");
                repr(out, &item);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// Characters beyond ASCII that repr escapes: Unicode's categories Cf, Zl, Zp and Zs, private-use and control
/// characters. Unassigned code points are not escaped.
const UNPRINTABLE: [RangeInclusive<u32>; 26] = [
    0x80..=0xa0,
    0xad..=0xad,
    0x600..=0x605,
    0x61c..=0x61c,
    0x6dd..=0x6dd,
    0x70f..=0x70f,
    0x890..=0x891,
    0x8e2..=0x8e2,
    0x1680..=0x1680,
    0x180e..=0x180e,
    0x2000..=0x200f,
    0x2028..=0x202f,
    0x205f..=0x2064,
    0x2066..=0x206f,
    0x3000..=0x3000,
    0xe000..=0xf8ff,
    0xfeff..=0xfeff,
    0xfff9..=0xfffb,
    0x110bd..=0x110bd,
    0x110cd..=0x110cd,
    0x13430..=0x1343f,
    0x1bca0..=0x1bca3,
    0x1d173..=0x1d17a,
    0xe0001..=0xe0001,
    0xe0020..=0xe007f,
    0xf0000..=0x10ffff,
];

/// Python's repr of a string: with single quotes, unless the string contains a single and no double quote.
fn quoted(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c if UNPRINTABLE.iter().any(|r| r.contains(&(c as u32))) => {
                let _ = match c as u32 {
                    n @ ..=0xff => write!(out, "\\x{n:02x}"),
                    n @ ..=0xffff => write!(out, "\\u{n:04x}"),
                    n => write!(out, "\\U{n:08x}"),
                };
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Prints integers unchanged and floats as Python's repr: shortest digits, with an exponent below 1e-4 and from 1e16.
fn number(out: &mut String, value: &Jinja) {
    let Some(x) = (!value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten() else {
        out.push_str(&value.to_string());
        return;
    };
    if !x.is_finite() {
        out.push_str(if x.is_nan() { "nan" } else { ["inf", "-inf"][usize::from(x < 0.0)] });
    } else if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        let _ = write!(out, "{x:?}");
    } else {
        // Rust prints 1e-5 and 1e16, Python prints 1e-05 and 1e+16.
        let text = format!("{x:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |d| ('-', d));
        let _ = write!(out, "{mantissa}e{sign}{digits:0>2}");
    }
}

fn pairs(map: &Jinja) -> Vec<(Jinja, Jinja)> {
    let keys: Vec<Jinja> = map.try_iter().map(Iterator::collect).unwrap_or_default();
    keys.into_iter().map(|k| (k.clone(), map.get_item(&k).unwrap_or_default())).collect()
}

/// `json.dumps(value, ensure_ascii=..., indent=..., separators=..., sort_keys=...)`.
pub fn tojson(value: &Jinja, positional: Option<Jinja>, options: Kwargs) -> Result<String, Error> {
    let given = |v: Option<Jinja>| v.filter(|v| !v.is_none() && !v.is_undefined());
    // The first positional argument of transformers' filter is ensure_ascii.
    let ascii = given(positional).or(given(options.get("ensure_ascii")?)).is_some_and(|v| v.is_true());
    let indent = match given(options.get("indent")?) {
        None => None,
        Some(v) => match v.as_str() {
            Some(s) => Some(s.to_owned()),
            None => Some(" ".repeat(usize::try_from(v).unwrap_or(0))),
        },
    };
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let (item, key) = match given(options.get("separators")?) {
        Some(pair) => (str(&pair.get_item_by_index(0)?), str(&pair.get_item_by_index(1)?)),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    options.assert_all_used()?;
    let mut writer = Json { out: String::new(), indent, item, key, ascii, sort };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Json {
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Json {
    fn value(&mut self, value: &Jinja, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match f64::try_from(value.clone()) {
                Ok(x) if x.is_nan() => self.out.push_str("NaN"),
                Ok(x) if x.is_infinite() => {
                    self.out.push_str(["Infinity", "-Infinity"][usize::from(x < 0.0)])
                }
                _ => number(&mut self.out, value),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Jinja> = value.try_iter()?.collect();
                self.container(('[', ']'), depth, items, |w, item| w.value(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut items = pairs(value);
                if self.sort {
                    items.sort_by_key(|(k, _)| str(k));
                }
                self.container(('{', '}'), depth, items, |w, (key, item)| {
                    match key.kind() {
                        ValueKind::String => w.value(&key, 0)?,
                        _ => {
                            w.out.push('"');
                            w.value(&key, 0)?;
                            w.out.push('"');
                        }
                    }
                    let colon = w.key.clone();
                    w.out.push_str(&colon);
                    w.value(&item, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn container<T>(
        &mut self,
        brackets: (char, char),
        depth: usize,
        items: Vec<T>,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(brackets.0);
        let empty = items.is_empty();
        for (i, item) in items.into_iter().enumerate() {
            if i > 0 {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(brackets.1);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, s: &str) {
        self.out.push('"');
        for c in s.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's methods: those of minijinja-contrib, and the missing ones.
pub fn method(state: &mut State, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    if let Some(s) = value.as_str() {
        match name {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Jinja::from(s.strip_prefix(prefix).unwrap_or(s)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Jinja::from(s.strip_suffix(suffix).unwrap_or(s)));
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                let (cut, miss) = match name {
                    "partition" => (s.split_once(separator), [s, "", ""]),
                    _ => (s.rsplit_once(separator), ["", "", s]),
                };
                let parts = cut.map_or(miss, |(a, b)| [a, separator, b]);
                return Ok(parts.into_iter().map(Jinja::from).collect());
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}
