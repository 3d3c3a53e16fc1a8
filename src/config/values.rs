//! Values of settings: numbers in their range, sizes, lists. A flag whose value does not parse is wrong usage; a value
//! that parses but is out of range is an invalid configuration.

use super::refusal::Refusal;
use super::settings::Settings;
use crate::data::Counts;
use crate::data::new_tokens::NewToken;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// An amount, absolute or relative to a total.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// A number.
    Count(u64),
    /// A percentage of the total, rounded up.
    Percent(f64),
}

impl Amount {
    /// The number for `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Amount::Count(n) => n,
            Amount::Percent(p) => (total as f64 * p / 100.0).ceil() as u64,
        }
    }
}

/// Interval of an action during a run, besides its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Every {
    /// Not at all.
    Never,
    /// Every N steps.
    Steps(u64),
    /// About this many times per epoch: at an interval of steps that is rounded up. With 1, at the last step of each
    /// epoch.
    Epoch(u64),
    /// At intervals of this percentage of all steps, rounded up like in transformers.
    Percent(f64),
}

impl Every {
    /// Interval in steps, for a run of `total` steps with `epoch` steps per epoch; `None` for never.
    pub fn steps(self, total: u64, epoch: u64) -> Option<u64> {
        match self {
            Every::Never => None,
            Every::Steps(n) => Some(n),
            Every::Epoch(times) => Some(epoch.div_ceil(times).max(1)),
            Every::Percent(p) => Some(Amount::Percent(p).of(total).max(1)),
        }
    }
}

/// An entry of --data, and its weight: `PATH=WEIGHT`. A file of the whole name wins.
pub fn weighted(text: &str) -> (&str, Option<f64>) {
    let split = text.rsplit_once('=').filter(|_| !Path::new(text).exists());
    split.and_then(|(path, weight)| Some((path, Some(weight.parse().ok()?)))).unwrap_or((text, None))
}

/// The name and the path of a NAME=PATH, unless there is a path of this text; otherwise an empty name.
pub fn named_path(text: &str) -> (&str, &str) {
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
    };
    match text.split_once('=') {
        Some((name, path)) if is_name(name) && !Path::new(text).exists() => (name, path),
        _ => ("", text),
    }
}

/// The sets of --eval-data; rows without a name are one set and come first.
pub fn eval_sets(s: &Settings) -> Result<Vec<(String, Vec<PathBuf>)>, Refusal> {
    let mut sets: Vec<(String, Vec<PathBuf>)> = Vec::new();
    for (name, path) in s.list("eval-data").iter().map(|text| named_path(text)) {
        if path.is_empty() {
            return Err(s.refuse("eval-data", format!("{name}= has no path: write {name}=PATH")));
        }
        match sets.iter_mut().find(|(known, _)| known == name) {
            Some((_, paths)) => paths.push(path.into()),
            None => sets.push((name.to_string(), vec![path.into()])),
        }
    }
    sets.sort_by_key(|(name, _)| !name.is_empty());
    Ok(sets)
}

/// The value of an option with a default in the table. Only an empty list in a file has none.
pub fn filled<T>(s: &Settings, name: &str, value: Option<T>) -> Result<T, Refusal> {
    value.ok_or_else(|| s.refuse(name, "expected a value, not an empty list"))
}

/// A whole number of at least `least`.
pub fn whole(s: &Settings, name: &str, least: usize) -> Result<Option<usize>, Refusal> {
    match s.parse::<i128>(name, "a whole number")? {
        None => Ok(None),
        Some(n) if n < least as i128 => Err(s.refuse(name, format!("must be at least {least}, is {n}"))),
        Some(n) if n > i64::MAX as i128 => {
            Err(s.refuse(name, format!("must be at most {}, is {n}", i64::MAX)))
        }
        Some(n) => Ok(Some(n as usize)),
    }
}

/// A number that satisfies `fits`.
pub fn real(
    s: &Settings,
    name: &str,
    fits: impl Fn(f64) -> bool,
    rule: &str,
) -> Result<Option<f64>, Refusal> {
    match s.parse::<f64>(name, "a number")? {
        Some(v) if !fits(v) || (v as f32).is_infinite() => Err(s.refuse(name, format!("{rule}, is {v}"))),
        v => Ok(v),
    }
}

/// One of the `known` words.
pub fn choice<'a>(s: &'a Settings, name: &str, known: &[&str], rule: &str) -> Result<&'a str, Refusal> {
    let text = s.text(name)?.unwrap_or_default();
    match known.contains(&text) {
        true => Ok(text),
        false => Err(s.refuse(name, format!("{text:?}: {rule}"))),
    }
}

/// A number or a percentage.
pub fn amount(s: &Settings, name: &str) -> Result<Option<Amount>, Refusal> {
    let Some(text) = s.text(name)? else { return Ok(None) };
    let Some(percent) = text.strip_suffix('%') else {
        return Ok(s.parse(name, "a whole number, or a percentage as 3%")?.map(Amount::Count));
    };
    match percent.parse::<f64>() {
        Ok(p) if (0.0..=100.0).contains(&p) => Ok(Some(Amount::Percent(p))),
        _ => Err(s.malformed(name, format!("{text:?} is not a percentage of 0 to 100"))),
    }
}

/// A number of steps, `epoch`, `epoch/4`, or a part of all steps: `25%`, or 0.25 as in transformers.
pub fn every(s: &Settings, name: &str) -> Result<Every, Refusal> {
    let Some(text) = s.text(name)? else { return Ok(Every::Never) };
    let share = |p: f64| (p > 0.0 && p <= 100.0).then_some(Every::Percent(p));
    let found = if let Some(percent) = text.strip_suffix('%') {
        percent.parse().ok().and_then(share)
    } else if let Some(rest) = text.strip_prefix("epoch") {
        let times =
            if rest.is_empty() { Some(1) } else { rest.strip_prefix('/').and_then(|n| n.parse().ok()) };
        times.filter(|n| *n > 0).map(Every::Epoch)
    } else if let Ok(n) = text.replace('_', "").parse::<u64>() {
        Some(if n == 0 { Every::Never } else { Every::Steps(n) })
    } else {
        text.parse().ok().filter(|part| *part < 1.0).and_then(|part: f64| share(100.0 * part))
    };
    let what =
        "a number of steps, a percentage of all as 25%, or epoch (epoch/4: about four times per epoch)";
    found.ok_or_else(|| s.malformed(name, format!("{text:?} is not {what}")))
}

/// --target-layers, ascending.
pub fn layers(s: &Settings) -> Result<Vec<usize>, Refusal> {
    let name = "target-layers";
    let mut all = BTreeSet::new();
    for text in s.list(name).iter().map(|text| text.trim()).filter(|text| !text.is_empty()) {
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        let ends = from.trim().parse::<u16>().ok().zip(to.trim().parse::<u16>().ok());
        match ends.filter(|(from, to)| from <= to) {
            Some((from, to)) => all.extend(usize::from(from)..=usize::from(to)),
            None => return Err(s.malformed(name, format!("{text:?} is neither a layer nor a range as 8-15"))),
        }
    }
    Ok(all.into_iter().collect())
}

/// An option of NAME=VALUE pairs with numbers that satisfy `fits`; each name once. A name may contain `=`.
pub fn pairs<T: FromStr>(
    s: &Settings,
    name: &str,
    fits: impl Fn(&T) -> bool,
    rule: &str,
) -> Result<Vec<(String, T)>, Refusal> {
    let mut all: Vec<(String, T)> = Vec::new();
    for text in s.list(name) {
        let wrong = || s.malformed(name, format!("{text:?} is not NAME=NUMBER"));
        let (key, value) = text.rsplit_once('=').ok_or_else(wrong)?;
        let (key, value) = (key.trim(), value.trim().parse::<T>().map_err(|_| wrong())?);
        if key.is_empty() {
            return Err(wrong());
        }
        if !fits(&value) {
            return Err(s.refuse(name, format!("{text}: the number must be {rule}")));
        }
        if all.iter().any(|(before, _)| before == key) {
            return Err(s.refuse(name, format!("{key} is given twice: leave one out")));
        }
        all.push((key.to_owned(), value));
    }
    Ok(all)
}

/// The tokens of --add-tokens, then those of --add-special-tokens.
pub fn new_tokens(s: &Settings) -> Result<Vec<NewToken>, Refusal> {
    let mut all: Vec<NewToken> = Vec::new();
    for (name, special) in [("add-tokens", false), ("add-special-tokens", true)] {
        for text in s.list(name) {
            if text.trim().is_empty() {
                return Err(s.refuse(name, "a token has no text"));
            }
            if all.iter().any(|token| token.text == *text) {
                return Err(s.refuse(name, format!("{text:?} is given twice: leave one out")));
            }
            all.push(NewToken { text: text.clone(), special, entry: None });
        }
    }
    Ok(all)
}

/// --template-args as names and values. A value is JSON, else a word of Python, else a text.
pub fn template_args(s: &Settings) -> Result<Vec<(String, Value)>, Refusal> {
    let name = "template-args";
    let word = |text: &str| match text {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|_| text.into()),
    };
    let mut all: Vec<(String, Value)> = Vec::new();
    for text in s.list(name) {
        let wrong = || s.malformed(name, format!("{text:?} is not NAME=VALUE, nor an object in JSON"));
        match text.trim_start().starts_with('{') {
            true => all.extend(serde_json::from_str::<serde_json::Map<_, _>>(text).map_err(|_| wrong())?),
            false => {
                let (variable, value) = text.split_once('=').ok_or_else(wrong)?;
                all.push((variable.trim().to_string(), word(value.trim())));
            }
        }
    }
    for (i, (variable, value)) in all.iter().enumerate() {
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let set = ["messages", "tools", "documents", "add_generation_prompt"];
        if variable.is_empty()
            || !variable.chars().all(letter)
            || variable.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(s.refuse(name, format!("{variable:?} is not a name of a variable")));
        }
        if set.contains(&variable.as_str()) || variable.ends_with("_token") {
            return Err(s.refuse(name, format!("{variable} is set by finetune: leave it out")));
        }
        if all[..i].iter().any(|(before, _)| before == variable) {
            return Err(s.refuse(name, format!("{variable} is given twice: leave one out")));
        }
        if value.to_string().contains("%}") {
            return Err(s.refuse(
                name,
                format!("{variable}: its value contains %}}, which ends a tag of the template"),
            ));
        }
    }
    Ok(all)
}

/// --max-dropped: refuses data with more rows without supervised tokens. A percentage is relative to all rows read.
pub fn within(s: &Settings, counts: &Counts) -> Result<(), Refusal> {
    let (dropped, rows) = (counts.dropped, counts.rows);
    let allowed = match amount(s, "max-dropped")? {
        None => return Ok(()),
        Some(Amount::Count(n)) if dropped <= n => return Ok(()),
        Some(Amount::Percent(p)) if 100.0 * dropped as f64 <= p * rows as f64 => return Ok(()),
        Some(Amount::Count(n)) => n.to_string(),
        Some(Amount::Percent(p)) => format!("{p}%"),
    };
    let first = counts.first_dropped.as_ref().map(|p| format!(" (first: {p})")).unwrap_or_default();
    let what = format!("{dropped} of {rows} rows have nothing to train on{first}");
    let way = "check the fields and --max-seq-len, or allow more";
    Err(Refusal::failure(format!("{what}, --max-dropped allows {allowed}: {way}")))
}

/// Bytes of the option `name`.
pub fn memory(s: &Settings, name: &str) -> Result<Option<u64>, Refusal> {
    let Some(text) = s.text(name)? else { return Ok(None) };
    match size(text) {
        // A number without a unit is more often gigabytes than bytes.
        Some(bytes) if bytes < 1 << 10 => {
            Err(s.malformed(name, format!("{text:?} is {bytes} bytes: add a unit, as 8GB")))
        }
        Some(bytes) => Ok(Some(bytes)),
        None => Err(s.malformed(name, format!("{text:?} is not a size, as 2GB or 1500MiB"))),
    }
}

/// A size in bytes: `2GB`, `1500MiB`; above 0.
pub fn size(text: &str) -> Option<u64> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit = match unit.to_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    number.trim().parse::<f64>().ok().filter(|n| *n > 0.0 && n.is_finite()).map(|n| (n * unit) as u64)
}

/// A time: `90`, `90s`, `10m`, `1h30m`. Above zero, at most a hundred days.
pub fn duration(s: &Settings, name: &str) -> Result<Option<Duration>, Refusal> {
    let Some(text) = s.text(name)? else { return Ok(None) };
    match read_duration(text) {
        Some(d) if d.is_zero() => Err(s.refuse(name, "must be longer than 0; leave it out for the default")),
        Some(d) if d > Duration::from_secs(100 * 86_400) => Err(s.refuse(name, "must be at most 100 days")),
        Some(d) => Ok(Some(d)),
        None => Err(s.malformed(name, format!("{text:?} is not a duration, as 90s, 10m or 1h30m"))),
    }
}

fn read_duration(text: &str) -> Option<Duration> {
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number: f64 = rest[..end].parse().ok()?;
        rest = &rest[end..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let unit = match rest[..end].trim() {
            "" | "s" => 1.0,
            "ms" => 1e-3,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return None,
        };
        total = total.checked_add(Duration::try_from_secs_f64(number * unit).ok()?)?;
        rest = &rest[end..];
    }
    (!text.trim().is_empty()).then_some(total)
}

/// --class-weights, one for each class.
pub fn class_weights(s: &Settings) -> Result<Option<Vec<f32>>, Refusal> {
    let weight = |v: &String| match v.parse::<f32>() {
        Ok(w) if w.is_finite() && w >= 0.0 => Ok(w),
        Ok(w) => Err(s.refuse("class-weights", format!("{w} is not a weight: finite, 0 or more"))),
        Err(_) => Err(s.malformed("class-weights", format!("{v:?} is not a number"))),
    };
    let weights: Vec<f32> = s.list("class-weights").iter().map(weight).collect::<Result<_, _>>()?;
    if !weights.is_empty() && weights.iter().all(|w| *w == 0.0) {
        return Err(s.refuse("class-weights", "all are 0: nothing would be trained on"));
    }
    Ok((!weights.is_empty()).then_some(weights))
}

/// --data-fields, as (field of the form, name in the rows).
pub fn field_names(s: &Settings) -> Result<Vec<(String, String)>, Refusal> {
    let field = |v: &String| match v.split_once('=') {
        Some((form, row)) if !form.is_empty() && !row.is_empty() => Ok((form.to_string(), row.to_string())),
        _ => Err(s.malformed("data-fields", format!("{v:?} is not FIELD=COLUMN, as prompt=question"))),
    };
    s.list("data-fields").iter().map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        let seconds = |t| read_duration(t).map(|d| d.as_secs_f64());
        let cases = [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h30m", 5400.0), ("2d", 172_800.0)];
        for (text, expected) in cases {
            assert_eq!(seconds(text), Some(expected), "{text}");
        }
        assert_eq!(seconds("250ms"), Some(0.25));
        for text in ["", " ", "soon", "m", "1x", "-1s", "1..5s", "9e9", "99999999999999999999999999d"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}
