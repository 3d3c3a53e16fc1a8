//! `finetune predict`: labels and probabilities for texts or rows, and scores where the rows have labels. Rows are
//! computed in bounded microbatches, in the order of the data.

use super::invocation::Invocation;
use super::speaker::{model_name, recipe_of};
use crate::config::Settings;
use crate::config::groups::{self, field_names, whole};
use crate::config::refusal::Refusal;
use crate::data::files::{self, Flow, Raw};
use crate::data::form::{self, Label};
use crate::data::tokenizer::Tokenizer;
use crate::data::{self, DataError, LabelMap, Learn, encode};
use crate::devices::{self, Need};
use crate::model::stage::{Microbatch, Model, Output, Targets, Want};
use crate::report::confusion;
use crate::run::adapter::{self, Loaded};
use crate::run::base_model;
use crate::run::row_sets::eval_sets;
use crate::train::eval::{Confusion, Scores};
use serde_json::{Map, Value, json};
use std::io::BufRead;
use std::path::PathBuf;

/// Maximum tokens of a microbatch; a longer text is a microbatch by itself.
const TOKENS: usize = 2048;

/// A text to be classified.
struct Text {
    text: String,
    ids: Vec<u32>,
    label: Option<u32>,
}

/// Predicts a label for every text.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let dir = s.text("adapter")?.map(PathBuf::from);
    let mut base = base_model::open_as(&model_name(s, dir.as_deref())?, recipe_of(s, dir.as_deref())?)?;
    let tokenizer = base.tokenizer(None)?;
    let Loaded { config, spec, flat, .. } = adapter::load_or_base(dir.as_deref(), &base)?;
    let Some(labels) = config.labels.clone() else {
        let what = dir.as_ref().unwrap_or(&base.path).display();
        let why = "is not a classifier: train one with --task classify, or use `finetune generate`";
        return Err(Refusal::configuration(format!("{what}: {why}")));
    };
    let longest = config.max_positions;
    let max_seq_len = whole(s, "max-seq-len", 1)?.unwrap_or(longest).min(longest);
    let chosen = devices::choose(&groups::devices(s)?)?;
    let mut model = devices::open(&chosen, (&config, &base.files.tensors, &spec), None, Need::SPEECH)?;
    model.set_parameters(&flat)?;
    let options = data::Options {
        task: data::Task::Classify,
        fields: field_names(s)?,
        max_seq_len,
        ..data::Options::default()
    };
    let settings = s.clone();
    let out = inv;
    let mut batch = Batch { waiting: Vec::new(), confusion: Confusion::default(), labels: &labels };
    let reader =
        Reader { options: &options, tokenizer: &tokenizer, classes: LabelMap { names: labels.clone() } };
    reader.each(&settings, &mut |text| {
        let full = batch.waiting.iter().map(|t| t.ids.len()).sum::<usize>() + text.ids.len() > TOKENS;
        if full {
            batch.predict(&mut *model, out)?;
        }
        batch.waiting.push(text);
        Ok(())
    })?;
    batch.predict(&mut *model, out)?;
    match batch.confusion.scores() {
        Some(scores) => say_scores(out, &scores, &labels),
        None => Ok(()),
    }
}

/// Texts of one microbatch.
struct Batch<'a> {
    waiting: Vec<Text>,
    confusion: Confusion,
    labels: &'a [String],
}

impl Batch<'_> {
    fn predict(&mut self, model: &mut dyn Model, out: &mut Invocation) -> Result<(), Refusal> {
        let texts = std::mem::take(&mut self.waiting);
        if texts.is_empty() {
            return Ok(());
        }
        let mut bounds = vec![0];
        let mut ids = Vec::new();
        for t in &texts {
            ids.extend_from_slice(&t.ids);
            bounds.push(ids.len() as u32);
        }
        let rows = (0..texts.len() as u64).collect();
        let targets = Targets::Labels(vec![0; texts.len()]);
        let microbatch = Microbatch { step: 0, rows, ids, bounds, targets };
        let Output::Logits(logits) = model.forward(&microbatch, None, Want::Logits)? else {
            return Err(Refusal::failure("the model gave no logits"));
        };
        for (text, logits) in texts.iter().zip(logits.chunks(self.labels.len())) {
            let p = softmax(logits);
            let best = (0..p.len()).rev().max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap_or(0);
            if let Some(label) = text.label {
                self.confusion.count(label as usize, best);
            }
            self.say(out, text, (&p, best))?;
        }
        Ok(())
    }

    fn say(&self, out: &mut Invocation, text: &Text, (p, best): (&[f64], usize)) -> Result<(), Refusal> {
        if out.json {
            let by_name: Map<String, Value> =
                self.labels.iter().zip(p).map(|(l, p)| (l.clone(), json!(p))).collect();
            let mut line = json!({ "text": text.text, "label": self.labels[best], "probabilities": by_name });
            if let Some(expected) = text.label {
                line["expected"] = json!(self.labels[expected as usize]);
            }
            return out.say(&line.to_string());
        }
        let all: Vec<String> = self.labels.iter().zip(p).map(|(l, p)| format!("{l} {p:.4}")).collect();
        let wrong = text.label.filter(|l| *l as usize != best);
        let wrong = wrong.map(|l| format!("  (label {})", self.labels[l as usize])).unwrap_or_default();
        let shown: String =
            text.text.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect();
        out.say(&format!("{}  [{}]{wrong}  {shown}", self.labels[best], all.join(", ")))
    }
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = logits.iter().map(|l| libm::exp(f64::from(l - max))).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|x| x / sum).collect()
}

fn say_scores(out: &mut Invocation, s: &Scores, labels: &[String]) -> Result<(), Refusal> {
    if out.json {
        let scores = json!({
            "accuracy": s.accuracy, "macro_f1": s.macro_f1, "confusion": s.confusion, "labels": labels,
        });
        return out.say(&scores.to_string());
    }
    out.say(&format!("accuracy {:.4}  macro F1 {:.4}", s.accuracy, s.macro_f1))?;
    confusion::lines(labels, &s.confusion).iter().try_for_each(|line| out.say(line))
}

/// Source of texts.
struct Reader<'a> {
    options: &'a data::Options,
    tokenizer: &'a Tokenizer,
    classes: LabelMap,
}

impl Reader<'_> {
    fn each(&self, s: &Settings, take: &mut dyn FnMut(Text) -> Result<(), Refusal>) -> Result<(), Refusal> {
        for text in s.list("text") {
            take(self.plain(text)?)?;
        }
        let paths: Vec<PathBuf> = s.list("data").iter().map(PathBuf::from).collect();
        for path in eval_sets(&paths)?.iter().flatten() {
            let mut failed = None;
            files::read(path, &mut |row| {
                let text = self.row(row.raw, &row.place);
                match text.and_then(&mut *take) {
                    Ok(()) => Ok(Flow::Continue),
                    Err(e) => {
                        failed = Some(e);
                        Ok(Flow::Stop)
                    }
                }
            })?;
            if let Some(e) = failed {
                return Err(e);
            }
        }
        if s.list("text").is_empty() && paths.is_empty() {
            for line in std::io::stdin().lock().lines() {
                take(self.plain(&line.map_err(|e| Refusal::failure(format!("stdin: {e}")))?)?)?;
            }
        }
        Ok(())
    }

    fn plain(&self, text: &str) -> Result<Text, Refusal> {
        self.text(form::Form::Class { text: text.into(), label: Label::Name(String::new()) }, None)
    }

    /// Parses a row; a row without a label is only predicted.
    fn row(&self, raw: Raw, place: &data::Place) -> Result<Text, Refusal> {
        let fault = |reason: String| Refusal::from(DataError::Row { place: place.clone(), reason });
        let mut value = raw.parse().map_err(fault)?;
        let renamed = self.options.fields.iter().find(|(f, _)| f == "label");
        let column = renamed.map_or("label", |(_, column)| column);
        let unlabelled = value.get(column).is_none_or(|v| v.is_null() || v == "");
        if let (true, Some(map)) = (unlabelled, value.as_object_mut()) {
            map.insert(column.into(), json!(""));
        }
        let form = form::of(&value, self.options).map_err(fault)?;
        let label = match &form {
            form::Form::Class { label, .. } if !unlabelled => Some(self.class(label, place)?),
            _ => None,
        };
        self.text(form, label)
    }

    fn class(&self, label: &Label, place: &data::Place) -> Result<u32, Refusal> {
        self.classes.class(label).ok_or_else(|| {
            let allowed = format!("the classes {}", self.classes.names.join(", "));
            DataError::Label { place: place.clone(), label: label.to_string(), allowed }.into()
        })
    }

    fn text(&self, form: form::Form, label: Option<u32>) -> Result<Text, Refusal> {
        let most = self.options.max_seq_len;
        let form::Form::Class { text, .. } = &form else {
            return Err(Refusal::failure("a classifier's rows have text"));
        };
        let encode = || encode::encode(&form, self.tokenizer, (Learn::Answers, most));
        let (mut encoded, _) = data::bounded(&"a text", (text.len(), most), encode)?;
        encoded.ids.truncate(most);
        let text = text.clone();
        match encoded.ids.is_empty() {
            true => Err(Refusal::failure("a text without tokens cannot be labelled: leave empty texts out")),
            false => Ok(Text { text, ids: encoded.ids, label }),
        }
    }
}
