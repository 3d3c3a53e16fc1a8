//! `finetune import FILE`: converts a configuration of Axolotl, LLaMA-Factory or TRL to ours. Keys without an
//! equivalent are reported on stderr and as comments in the result, because dropping them silently would change the
//! training. (`--config` accepts spellings of other trainers too, but refuses unknown keys; this verb lists the lost
//! ones.)

mod late;
mod rows;
mod together;
mod turns;

use crate::cli::invocation::Invocation;
use crate::config::dialects::{Becomes, Dialect, ROW_KEYS, Rule, TOGETHER};
use crate::config::groups::Options;
use crate::config::refusal::{self, Refusal};
use crate::config::table::{self, Section, TABLE};
use crate::config::{Settings, alias, yaml};
use crate::support::stderr::{inline, say};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// One line of the result.
struct Line {
    key: String,
    /// The value as YAML.
    value: String,
    /// The origin in words.
    from: String,
}

/// The result of the conversion.
#[derive(Default)]
struct Import {
    lines: Vec<Line>,
    /// (foreign key, its value, reason of the loss)
    lost: Vec<(String, String, String)>,
    /// Sentences about defaults, which appear only in the result.
    remarks: Vec<String>,
    /// Factors of the number of rows per step.
    factors: Vec<(String, u64)>,
    /// NAME=VALUE that the command needs in front of it.
    variables: Vec<String>,
    /// The text of a chat template, which needs a file of its own.
    template: Option<String>,
}

/// Converts a file.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let Some(file) = inv.positional.first().cloned() else {
        return Err(Refusal::usage("nothing to import: give the FILE.yaml of Axolotl, LLaMA-Factory or TRL"));
    };
    let path = Path::new(&file);
    let text = std::fs::read_to_string(path).map_err(refusal::at(path))?;
    let from = inv.settings.text("from")?.map(String::from);
    let (dialect, mut import) = convert(&text, path, from.as_deref())?;
    let output = inv.settings.text("output")?.filter(|_| inv.settings.is_given("output")).map(PathBuf::from);
    let template = import.template.take();
    let beside = output.as_ref().map(|output| output.with_extension("jinja"));
    match (&template, &beside) {
        (Some(_), Some(file)) => import.set("chat_template", word(&file.display().to_string()), JINJA),
        (Some(text), None) => {
            let why = "with -o FILE it becomes a file beside it: chat_template: FILE";
            import.lose(JINJA, &Value::from(text.as_str()), why);
        }
        (None, _) => {}
    }
    let result = import.render(path, dialect);
    check(&result, path)?;
    for (key, value, why) in &import.lost {
        say!("{}", inline(&format!("not carried over: {key}: {value}: {why}")));
    }
    let Some(output) = output else { return inv.say(result.trim_end()) };
    if let (Some(text), Some(file)) = (template, beside) {
        crate::format::atomic::write_file(&file, text.as_bytes()).map_err(Refusal::from)?;
    }
    crate::format::atomic::write_file(&output, result.as_bytes()).map_err(Refusal::from)?;
    inv.say(&output.display().to_string())
}

/// Axolotl's key for a template, or the path of its file.
const JINJA: &str = "chat_template_jinja";

fn convert(text: &str, path: &Path, from: Option<&str>) -> Result<(Dialect, Import), Refusal> {
    let options = serde_yaml::options! { with_snippet: false };
    let root: Value = serde_yaml::from_str_with_options(text, options).map_err(|e| {
        let line = e.location().map(|l| format!(":{}", l.line())).unwrap_or_default();
        Refusal::configuration(format!("{}{line}: not YAML: {}", path.display(), e.without_snippet()))
    })?;
    let Value::Object(keys) = root else {
        return Err(Refusal::configuration(format!("{}: a mapping of keys was expected", path.display())));
    };
    let names = || Dialect::ALL.map(|(name, _)| name).join(", ");
    let dialect = match from {
        Some(name) => Dialect::ALL
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, d)| *d)
            .ok_or_else(|| Refusal::usage(format!("--from {name}: expected one of {}", names())))?,
        None => Dialect::guess(keys.keys().map(String::as_str)).ok_or_else(|| {
            let why = "no key of Axolotl, LLaMA-Factory or TRL is in it: say whose it is with --from";
            Refusal::configuration(format!("{}: {why}", path.display()))
        })?,
    };
    let mut import = Import::default();
    // Where both exist, a strategy decides, and the step count beside it is ignored.
    let (strategies, others): (Vec<_>, Vec<_>) = keys.iter().partition(|(key, _)| key.ends_with("_strategy"));
    for (key, value) in strategies.into_iter().chain(others) {
        if !(key == "stage" && together::names_its_task(&keys)) {
            import.take(dialect, key, value);
        }
    }
    rows::take(&mut import, dialect, &keys, path);
    import.finish(dialect, &keys);
    Ok((dialect, import))
}

impl Import {
    /// Sets a key. The first value wins: `load_in_4bit` and `adapter: qlora` mean the same. A different later value is
    /// recorded as lost.
    fn set(&mut self, key: &str, value: impl Into<String>, from: impl Into<String>) {
        let (value, from) = (value.into(), from.into());
        match self.lines.iter().find(|l| l.key == key) {
            None => self.lines.push(Line { key: key.into(), value, from }),
            Some(first) if first.value == value => {}
            Some(first) => {
                let why = format!("{} counts instead", first.from);
                let (theirs, value) = typed(&from, &value);
                self.lost.push((theirs, value, why));
            }
        }
    }

    /// Sets the other trainer's default where the key is missing.
    fn set_default(&mut self, key: &str, value: impl Into<String>, from: impl Into<String>) {
        if !self.lines.iter().any(|l| l.key == key) {
            self.set(key, value, from);
        }
    }

    fn lose(&mut self, key: &str, value: &Value, why: &str) {
        self.lost.push((key.into(), shown(value), why.into()));
    }

    fn take(&mut self, dialect: Dialect, key: &str, value: &Value) {
        let together = late::KEYS.contains(&key) || TOGETHER.iter().any(|(known, _)| *known == key);
        if is_empty(value) || ROW_KEYS.contains(&key) || together {
            return;
        }
        match dialect.rule(key) {
            Some(Rule::Needless(_)) => {}
            Some(Rule::PerEpoch(ours)) => match scalar(value).parse() {
                Ok(0u64) => {}
                Ok(1) => self.set(ours, "epoch", key),
                Ok(n) => self.set(ours, format!("epoch/{n}"), key),
                Err(_) => self.lose(key, value, "expected a whole number"),
            },
            Some(Rule::Lost(why)) => self.lose(key, value, why),
            Some(Rule::Elsewhere(_)) if *value == Value::Bool(false) => {}
            Some(Rule::Elsewhere(why)) => self.remarks.push(format!("{key}: {}: {why}", shown(value))),
            Some(Rule::Key(ours)) => self.set(ours, yaml_value(value), key),
            Some(Rule::When(cases, otherwise)) => {
                let word = scalar(value).to_lowercase();
                let becomes = cases.iter().find(|(v, _)| *v == word).map_or(otherwise, |(_, b)| *b);
                match becomes {
                    // The unchanged value under our key.
                    Becomes::Set(ours, "") => self.set(ours, yaml_value(value), key),
                    Becomes::Set(ours, v) => {
                        self.set(ours, self::word(v), format!("{key}: {}", shown(value)))
                    }
                    Becomes::Near(ours, v, why) => {
                        self.set(ours, v, format!("{key}: {}", shown(value)));
                        self.lose(key, value, why);
                    }
                    Becomes::Same => {}
                    Becomes::Lost(why) => self.lose(key, value, why),
                }
            }
            None => self.take_spelling(key, value),
        }
    }

    /// Takes keys that a configuration of finetune accepts unchanged.
    fn take_spelling(&mut self, key: &str, value: &Value) {
        if alias::BATCH_FACTORS.contains(&key) {
            match scalar(value).parse() {
                Ok(n) if n > 0 => self.factors.push((key.into(), n)),
                _ => self.lose(key, value, "a whole number above 0 was expected"),
            }
        } else if key == alias::WARMUP_RATIO {
            match scalar(value).parse::<f64>() {
                Ok(r) if (0.0..=1.0).contains(&r) => {
                    self.set("warmup_steps", format!("{}%", (r * 1e11).round() / 1e9), format!("{key} {r}"));
                }
                _ => self.lose(key, value, "a fraction of 0 to 1 was expected"),
            }
        } else if let Some(ours) = alias::ours(key) {
            self.set(ours, yaml_value(value), key);
        } else if let Some(meaning) = alias::foreign(key, &scalar(value)) {
            if let alias::Meaning::NotBuilt(why) | alias::Meaning::Warned(why) = meaning {
                self.lose(key, value, why);
            }
        } else if table::find(&key.replace('_', "-")).is_some() {
            self.set(key, yaml_value(value), key);
        } else {
            self.lose(key, value, "not known here");
        }
    }

    /// Converts settings that need all keys.
    fn finish(&mut self, dialect: Dialect, keys: &Map<String, Value>) {
        // Some configurations have both keys, one of them 0.
        if keys.get("warmup_steps").is_some_and(|v| scalar(v) != "0")
            && keys.contains_key(alias::WARMUP_RATIO)
        {
            self.lines.retain(|l| l.key != "warmup_steps" || l.from == "warmup_steps");
        }
        self.whole_epochs();
        if self.lines.iter().any(|l| l.key == "max_steps" && l.value.starts_with('-')) {
            self.lines.retain(|l| l.key != "max_steps");
        }
        let rows: Vec<String> = self.factors.iter().map(|(k, n)| format!("{k} {n}")).collect();
        let product = self.factors.iter().fold(1u64, |p, (_, n)| p.saturating_mul(*n));
        let has = |name: &str| self.factors.iter().any(|(k, _)| k == name);
        // transformers trains on 8 rows per device by default.
        let per_device = match dialect {
            Dialect::Axolotl => 1,
            _ if has("per_device_train_batch_size") => 1,
            _ => 8,
        };
        if !rows.is_empty() {
            let from = format!("{}; times the devices that there were", rows.join(" x "));
            self.set("batch_size", (product * per_device).to_string(), from);
        }
        let from = format!("{}'s default", dialect.name());
        late::take(self, dialect, keys);
        for (key, value) in dialect.defaults() {
            self.set_default(key, *value, from.clone());
        }
        if dialect == Dialect::LlamaFactory {
            let rank = self.lines.iter().find(|l| l.key == "rank").and_then(|l| l.value.parse::<u64>().ok());
            let alpha = (2 * rank.unwrap_or(8)).to_string();
            self.set_default("alpha", alpha, "LLaMA-Factory's default, twice the rank");
        }
    }

    fn value_of(&self, key: &str) -> Option<&str> {
        self.lines.iter().find(|l| l.key == key).map(|l| l.value.as_str())
    }

    /// Removes a line and records it as lost with a reason.
    fn take_back(&mut self, key: &str, why: &str) {
        if let Some(at) = self.lines.iter().position(|l| l.key == key) {
            let line = self.lines.remove(at);
            let (theirs, value) = typed(&line.from, &line.value);
            self.lost.push((theirs, value, why.into()));
        }
    }

    /// `3.0` epochs become 3; `1.5` is not supported.
    fn whole_epochs(&mut self) {
        let Some(at) = self.lines.iter().position(|l| l.key == "epochs") else { return };
        match self.lines[at].value.parse::<f64>() {
            Ok(n) if n.fract() == 0.0 && n >= 1.0 => self.lines[at].value = format!("{n}"),
            _ => {
                let line = self.lines.remove(at);
                self.lost.push((
                    line.from,
                    line.value,
                    "epochs must be a whole number; or give max_steps".into(),
                ));
                self.set("epochs", "1", "see below");
            }
        }
    }

    fn render(&self, path: &Path, dialect: Dialect) -> String {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut text = format!("# {name}, a configuration of {}, by finetune import.\n", dialect.name());
        let before: String = self.variables.iter().map(|v| inline(v) + " ").collect();
        text += &format!("# command   {before}finetune --config THIS\n");
        for section in Section::ALL {
            let here =
                |l: &&Line| table::find(&l.key.replace('_', "-")).is_some_and(|o| o.section == section);
            let lines: Vec<&Line> = self.lines.iter().filter(here).collect();
            if lines.is_empty() {
                continue;
            }
            text += &format!("\n# {}\n", section.name());
            for l in lines {
                text += &format!("{}: {}  # {}\n", l.key, l.value, inline(&l.from));
            }
        }
        for remark in &self.remarks {
            text += &format!("\n# {remark}\n");
        }
        if !self.lost.is_empty() {
            text += "\n# not carried over\n";
            for (key, value, why) in &self.lost {
                text += &format!("# {}\n", inline(&format!("{key}: {value}: {why}")));
            }
        }
        text
    }
}

/// Checks that the result is a valid configuration: a refused value is reported with its line in the result.
fn check(result: &str, path: &Path) -> Result<(), Refusal> {
    let all: Vec<_> = TABLE.iter().collect();
    let options = yaml::parse(result, path).and_then(|layer| Settings::resolve(&all, vec![layer]));
    match options.and_then(|s| Options::of(&s)) {
        Ok(_) => Ok(()),
        Err(e) => Err(Refusal::configuration(format!("what came out of it is refused: {}", e.line))),
    }
}

/// The key and the value of a line's origin; where the origin has only a key, the value is unchanged.
fn typed(from: &str, value: &str) -> (String, String) {
    let (key, value) = from.split_once(": ").unwrap_or((from, value));
    (key.into(), value.into())
}

/// Whether a value says nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.is_empty() || s == "null",
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
        _ => false,
    }
}

/// A value as one word; lists are joined by commas.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(s) => s.clone(),
        Value::Array(a) => a.iter().map(scalar).collect::<Vec<_>>().join(","),
        v => v.to_string(),
    }
}

/// A value as one short line for messages.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Object(_) => value.to_string(),
        v => scalar(v),
    };
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if one_line.chars().count() > 60 {
        one_line.chars().take(57).chain("...".chars()).collect()
    } else {
        one_line
    }
}

/// A value as YAML: text that is not a plain word is quoted as JSON, which YAML reads.
fn yaml_value(value: &Value) -> String {
    match value {
        Value::String(s) => word(s),
        Value::Array(a) => format!("[{}]", a.iter().map(yaml_value).collect::<Vec<_>>().join(", ")),
        v => v.to_string(),
    }
}

fn word(s: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./%@+".contains(c);
    let starts = s.starts_with(|c: char| c.is_ascii_alphanumeric() || "./_".contains(c));
    if starts && s.chars().all(plain) { s.into() } else { Value::from(s).to_string() }
}

#[cfg(test)]
mod outcomes;
#[cfg(test)]
mod tests;
