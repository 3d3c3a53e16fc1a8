//! Every option of a command, resolved: layers are translated by the same rules (`alias`), then the highest layer with
//! a value wins.

use super::alias;
use super::dialects::{self, Dialect};
use super::refusal::{Refusal, nearest};
use super::table::{self, Opt, TABLE, Takes};
use super::typed::{Origin, Typed, place};
use std::collections::BTreeMap;
use std::str::FromStr;

/// Default of --alpha with --rslora.
const RSLORA_ALPHA: u32 = 32;

/// A value and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// One value, or all values of a list; empty where the value is determined later.
    pub values: Vec<String>,
    /// Source of the values.
    pub source: Origin,
}

/// Every option of a command, resolved.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    values: BTreeMap<&'static str, Setting>,
    /// Notes about keys of other trainers; a warning begins with that word.
    pub notes: Vec<String>,
}

impl Settings {
    /// Resolves `layers` (the first one with a value wins) for the options of a command.
    pub fn resolve(options: &[&'static Opt], layers: Vec<Vec<Typed>>) -> Result<Self, Refusal> {
        let mut s = Settings::default();
        let trainer = Dialect::guess(layers.iter().flatten().map(|t| t.key.as_str()));
        for layer in layers {
            let mut spoken: BTreeMap<&'static str, (String, Setting)> = BTreeMap::new();
            for typed in translate(options, layer, &mut s.notes)? {
                let Some(opt) = options.iter().find(|o| o.key() == typed.key) else {
                    // The environment and files may contain options that this verb does not have.
                    match table::find(&typed.key.replace('_', "-")) {
                        Some(_) => continue,
                        None => return Err(unknown(&typed)),
                    }
                };
                let setting = Setting { values: split(opt, typed.values), source: typed.source };
                if let Some((_, before)) = spoken.get(opt.name) {
                    let why = format!("{} is given twice (also: {})", opt.key(), before.source);
                    return Err(setting.refuse(opt.name, why));
                }
                spoken.insert(opt.name, (typed.key, setting));
            }
            for (name, (_, setting)) in spoken {
                s.values.entry(name).or_insert(setting);
            }
        }
        for opt in options {
            let values = match opt.default {
                "" => Vec::new(),
                d => split(opt, vec![d.to_string()]),
            };
            s.values.entry(opt.name).or_insert(Setting { values, source: Origin::Default });
        }
        s.default_alpha();
        s.notes.extend(trainer.and_then(|trainer| s.other_defaults(trainer)));
        Ok(s)
    }

    /// A note about defaults that differ from those of the trainer whose names were given.
    fn other_defaults(&self, trainer: Dialect) -> Option<String> {
        let differs = |(key, theirs): &(&str, &str)| {
            let ours =
                self.get(&key.replace('_', "-")).filter(|s| s.source == Origin::Default)?.values.concat();
            (ours != *theirs).then(|| format!("{key} {ours} ({theirs})"))
        };
        let all: Vec<String> = trainer.defaults().iter().filter_map(differs).collect();
        let name = trainer.name();
        (!all.is_empty())
            .then(|| format!("defaults that differ from {name}'s (in brackets): {}", all.join(", ")))
    }

    /// The default of --alpha follows from --rank. rsLoRA's scale is meant to keep its numerator at any rank.
    fn default_alpha(&mut self) {
        if self.is_given("alpha") || !self.values.contains_key("alpha") {
            return;
        }
        let rslora = self.switch("rslora").unwrap_or_default();
        // An invalid rank is refused where it is read.
        let Ok(Some(rank)) = self.parse::<u32>("rank", "a number") else { return };
        let alpha = if rslora { RSLORA_ALPHA.to_string() } else { (2 * u64::from(rank)).to_string() };
        let elsewhere =
            self.is_given("init-adapter") || self.list("role").iter().any(|role| role == "worker");
        if !rslora && rank != 16 && !elsewhere {
            self.notes.push(format!(
                "alpha {alpha} = 2 x rank {rank} (earlier versions: 32); --alpha sets another"
            ));
        }
        self.put("alpha", vec![alpha], Origin::Default);
    }

    /// The setting with that name (with dashes).
    pub fn get(&self, name: &str) -> Option<&Setting> {
        self.values.get(name)
    }

    /// Sets a computed value.
    pub fn put(&mut self, name: &'static str, values: Vec<String>, source: Origin) {
        self.values.insert(name, Setting { values, source });
    }

    /// Whether the user gave a value.
    pub fn is_given(&self, name: &str) -> bool {
        self.get(name).is_some_and(|s| s.source != Origin::Default)
    }

    /// The values; empty where there are none.
    pub fn list(&self, name: &str) -> &[String] {
        self.get(name).map_or(&[], |s| &s.values)
    }

    /// The single value.
    pub fn text(&self, name: &str) -> Result<Option<&str>, Refusal> {
        match self.get(name) {
            None => Ok(None),
            Some(s) if s.values.len() > 1 => Err(s.refuse(name, "expected one value")),
            // `-o "$OUT"` with an empty OUT gives an empty path, which must not mean the current folder.
            Some(s) if s.values.iter().any(|v| v.trim().is_empty()) && s.source == Origin::Flag => {
                Err(self.refuse(name, "is empty: give a value, or leave it out"))
            }
            Some(s) => Ok(s.values.first().map(String::as_str)),
        }
    }

    /// The single value, parsed; `what` describes the type in errors.
    pub fn parse<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>, Refusal> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.replace('_', "").parse() {
            Ok(v) => Ok(Some(v)),
            Err(_) => Err(self.malformed(name, format!("{text:?} is not {what}"))),
        }
    }

    /// The value of a switch.
    pub fn switch(&self, name: &str) -> Result<bool, Refusal> {
        match self.text(name)?.unwrap_or("false").to_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Ok(true),
            "false" | "no" | "off" | "0" => Ok(false),
            other => Err(self.malformed(name, format!("{other:?} is neither true nor false"))),
        }
    }

    /// Refusal of a value that does not parse: wrong usage for a flag, else an invalid configuration.
    pub fn malformed(&self, name: &str, why: String) -> Refusal {
        let r = self.refuse(name, why);
        match self.get(name).map(|s| &s.source) {
            Some(Origin::Flag) => Refusal::usage(r.line),
            _ => r,
        }
    }

    /// Refusal of a value that parses but is invalid.
    pub fn refuse(&self, name: &str, why: impl std::fmt::Display) -> Refusal {
        match self.get(name) {
            Some(s) => s.refuse(name, why),
            None => Refusal::configuration(format!("--{name}: {why}")),
        }
    }
}

impl Setting {
    fn refuse(&self, name: &str, why: impl std::fmt::Display) -> Refusal {
        Refusal::configuration(match &self.source {
            Origin::File { path, line } => {
                format!("{}:{line}: {}: {why}", path.display(), name.replace('-', "_"))
            }
            Origin::Variable(v) => format!("{v}: {why}"),
            Origin::Flag | Origin::Computed(_) | Origin::Default => format!("--{name}: {why}"),
        })
    }
}

fn split(opt: &Opt, values: Vec<String>) -> Vec<String> {
    match opt.takes {
        Takes::Commas(_) => values
            .iter()
            .flat_map(|v| v.split(','))
            .map(|v| v.trim().to_string())
            .filter(|v| !v.is_empty())
            .collect(),
        _ => values,
    }
}

/// Translates one layer to our keys.
fn translate(options: &[&Opt], layer: Vec<Typed>, notes: &mut Vec<String>) -> Result<Vec<Typed>, Refusal> {
    let mut out = Vec::new();
    let mut factors: Vec<Typed> = Vec::new();
    let layer = alias::learnt(alias::four_bits(alias::one_warmup(layer, notes), notes), notes);
    for mut t in alias::tensorboard(alias::strategies(layer, notes), notes) {
        if options.iter().any(|o| o.key() == t.key) {
            // A verb's own option may have a name with another meaning in a file.
            out.push(t);
        } else if let Some(ours) = alias::ours(&t.key) {
            t.key = ours.into();
            out.push(t);
        } else if alias::BATCH_FACTORS.contains(&t.key.as_str()) {
            factors.push(t);
        } else if let Some(opt) = alias::negated(&t.key) {
            out.push(alias::inverted(t, opt));
        } else if let Some(ours) = alias::per_epoch(&t.key) {
            out.push(alias::times(t, ours)?);
        } else if t.key == alias::WARMUP_RATIO {
            out.push(alias::warmup(t, notes)?);
        } else if let Some(meaning) = alias::foreign(&t.key, &t.values.join(",")) {
            match meaning {
                alias::Meaning::Explained(why) => notes.push(format!("{} ({}): {why}", t.key, t.source)),
                alias::Meaning::Warned(why) => {
                    notes.push(format!("warning: {} {} ({}): {why}", t.key, t.values.join(","), t.source));
                }
                alias::Meaning::NotBuilt(why) => return Err(place(&t, why)),
            }
        } else {
            out.push(t);
        }
    }
    if let [only] = &factors[..]
        && only.key == alias::PROCESSES
    {
        notes.push(format!("{} ({}): batch_size counts the rows of all processes", only.key, only.source));
        factors.clear();
    }
    // Names of two trainers for the same number.
    let same = |key: &str| factors.iter().find(|f| f.key == key);
    if let (Some(one), Some(other)) = (same("per_device_train_batch_size"), same("micro_batch_size")) {
        return Err(place(other, &format!("{} ({}) says the same: leave one out", one.key, one.source)));
    }
    if !factors.is_empty() {
        out.push(batch(factors, notes)?);
    }
    Ok(out)
}

/// per_device_train_batch_size x gradient_accumulation_steps x num_processes = batch_size.
fn batch(factors: Vec<Typed>, notes: &mut Vec<String>) -> Result<Typed, Refusal> {
    let mut product: u64 = 1;
    for f in &factors {
        let n: u64 = f
            .values
            .concat()
            .parse()
            .ok()
            .filter(|n| *n > 0)
            .ok_or_else(|| place(f, "expected a whole number above 0"))?;
        product = product.checked_mul(n).ok_or_else(|| place(f, "the batch is too large"))?;
    }
    let terms: Vec<String> = factors.iter().map(|f| format!("{} {}", f.key, f.values.concat())).collect();
    let sentence = terms.join(" x ");
    notes.push(format!("batch_size {product} = {sentence}"));
    let source = match factors.into_iter().next_back() {
        Some(Typed { source: Origin::Flag, .. }) | None => Origin::Computed(format!("flags: {sentence}")),
        Some(f) => Origin::Computed(format!("{}: {sentence}", f.source)),
    };
    Ok(Typed { key: "batch_size".into(), values: vec![product.to_string()], source })
}

fn unknown(t: &Typed) -> Refusal {
    let keys: Vec<String> = TABLE.iter().map(Opt::key).collect();
    let known = keys.iter().map(String::as_str).chain(alias::all());
    if let Some(why) = dialects::explanation(&t.key, &t.values.join(",")) {
        return place(t, &why);
    }
    let hint = match nearest(&t.key, known) {
        Some(n) => format!("did you mean {n}?"),
        None => "`finetune help options` lists them; keys are written with underscores".into(),
    };
    let line = match &t.source {
        Origin::Flag => format!("unknown option --{}: {hint}", t.key.replace('_', "-")),
        source => format!("{source}: unknown key {}: {hint}", t.key),
    };
    Refusal::configuration(line)
}
