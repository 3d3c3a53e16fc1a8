//! `finetune predict`: labels and probabilities for texts or rows, or for each of their words, or the numbers of a regression or a reward model, and
//! scores where the rows have labels. Rows are computed in bounded microbatches, in the order of the data.

mod numbers;
mod words;

use super::invocation::Invocation;
use super::speaker::{as_trained, model_name, recipe_of, task_of, template_of};
use crate::config::Settings;
use crate::config::groups::{self, field_names, whole};
use crate::config::refusal::Refusal;
use crate::data::files::{self, Flow, Raw};
use crate::data::form::{self, Label};
use crate::data::samples::NO_CLASS;
use crate::data::tokenizer::Tokenizer;
use crate::data::{self, DataError, LabelMap, Learn, encode};
use crate::devices::{self, Need};
use crate::model::stage::{IGNORE, Microbatch, Model, Output, Targets, Want};
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

/// Predicts a label for every text, or scores it.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let dir = inv.settings.text("adapter")?.map(PathBuf::from);
    if let Some(dir) = &dir {
        as_trained(&mut inv.settings, dir, &["task"])?;
    }
    let s = &inv.settings;
    let mut base = base_model::open_as(&model_name(s, dir.as_deref())?, recipe_of(s, dir.as_deref())?)?;
    base.add_tokens_of(dir.as_deref())?;
    let template = template_of(s, dir.as_deref())?;
    let tokenizer = base.tokenizer_with(template.as_deref(), &groups::template_args(s)?)?;
    let Loaded { config, spec, flat, .. } = adapter::load_or_base(dir.as_deref(), &base)?;
    let Some(labels) = config.labels.clone() else {
        let what = dir.as_ref().unwrap_or(&base.path).display();
        let why = "is not a classifier: train one with --task classify or token-classification, or use `finetune generate`";
        return Err(Refusal::configuration(format!("{what}: {why}")));
    };
    let max_seq_len =
        whole(s, "max-seq-len", 1)?.unwrap_or_else(|| config.longest_text(1)).min(config.max_positions);
    let (task, _) = groups::task(s)?;
    let task = task_of(&config, task);
    let chosen = devices::choose(&groups::devices(s)?)?;
    let mut model = devices::open(&chosen, (&config, &base.files.tensors, &spec), None, Need::SPEECH)?;
    model.set_parameters(&flat)?;
    let options = data::Options { task, fields: field_names(s)?, max_seq_len, ..data::Options::default() };
    let settings = s.clone();
    let head = Head { model: &mut *model, outputs: labels.len() };
    match task {
        data::Task::Classify => label(inv, &settings, (&options, &tokenizer, labels), head),
        data::Task::Tag => words::tag(inv, &settings, (&options, &tokenizer, labels), head),
        _ => score(inv, &settings, (&options, &tokenizer), head),
    }
}

/// A model whose head is asked for its outputs.
struct Head<'a> {
    model: &'a mut dyn Model,
    outputs: usize,
}

impl Head<'_> {
    /// The outputs of each text.
    fn outputs(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>, Refusal> {
        let (mut ids, mut bounds) = (Vec::new(), vec![0]);
        for text in texts {
            ids.extend_from_slice(text);
            bounds.push(ids.len() as u32);
        }
        self.logits((ids, bounds), Targets::Labels(vec![0; texts.len()]))
    }

    /// The outputs of each word that has a token, row after row.
    fn outputs_of_words(&mut self, rows: &[words::Row]) -> Result<Vec<Vec<f32>>, Refusal> {
        let (mut ids, mut bounds, mut classes) = (Vec::new(), vec![0], Vec::new());
        for row in rows {
            ids.extend_from_slice(&row.ids);
            bounds.push(ids.len() as u32);
            classes.extend(row.starts.iter().map(|word| if *word == NO_CLASS { IGNORE } else { 0 }));
        }
        self.logits((ids, bounds), Targets::Classes(classes))
    }

    fn logits(
        &mut self,
        (ids, bounds): (Vec<u32>, Vec<u32>),
        targets: Targets,
    ) -> Result<Vec<Vec<f32>>, Refusal> {
        let rows = (0..bounds.len() as u64 - 1).collect();
        let microbatch = Microbatch { step: 0, rows, ids, bounds, targets };
        match self.model.forward(&microbatch, None, Want::Logits)? {
            Output::Logits(logits) => Ok(logits.chunks(self.outputs).map(<[f32]>::to_vec).collect()),
            _ => Err(Refusal::failure("the model gave no logits")),
        }
    }
}

/// Collects texts up to the size of a microbatch, and gives them to `done`.
fn batched<T>(
    each: impl FnOnce(&mut dyn FnMut(T) -> Result<(), Refusal>) -> Result<(), Refusal>,
    tokens: impl Fn(&T) -> usize,
    mut done: impl FnMut(Vec<T>) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let (mut waiting, mut held) = (Vec::new(), 0);
    each(&mut |text| {
        let more = tokens(&text);
        if held + more > TOKENS && held > 0 {
            held = 0;
            done(std::mem::take(&mut waiting))?;
        }
        held += more;
        waiting.push(text);
        Ok(())
    })?;
    if waiting.is_empty() { Ok(()) } else { done(waiting) }
}

/// Scores every text.
fn score(
    out: &mut Invocation,
    s: &Settings,
    (options, tokenizer): (&data::Options, &Tokenizer),
    mut head: Head,
) -> Result<(), Refusal> {
    let reader = numbers::Reader { options, tokenizer, outputs: head.outputs };
    let (mut tally, most) = (numbers::Tally::default(), options.max_seq_len);
    let each = |take: &mut dyn FnMut(numbers::Text) -> Result<(), Refusal>| {
        each(s, &mut |source| {
            let texts = match source {
                Source::Plain(text) => data::bounded(&"a text", (text.len(), most), || reader.plain(text))?,
                Source::Row(raw, place) => {
                    let fault = |reason| Refusal::from(DataError::Row { place: place.clone(), reason });
                    data::bounded(place, (raw.bytes(), most), || {
                        reader.row(&raw.parse().map_err(fault)?, place)
                    })?
                }
            };
            texts.into_iter().try_for_each(&mut *take)
        })
    };
    batched(
        each,
        |text| text.ids.len(),
        |texts| {
            let outputs = head.outputs(&texts.iter().map(|text| &text.ids[..]).collect::<Vec<_>>())?;
            let mut both = texts.iter().zip(&outputs);
            both.try_for_each(|(text, outputs)| tally.say(out, text, outputs))
        },
    )?;
    tally.conclude(out)
}

/// Labels every text.
fn label(
    out: &mut Invocation,
    s: &Settings,
    (options, tokenizer, labels): (&data::Options, &Tokenizer, Vec<String>),
    mut head: Head,
) -> Result<(), Refusal> {
    let mut confusion = Confusion::default();
    let reader = Reader { options, tokenizer, classes: LabelMap { names: labels.clone() } };
    let each = |take: &mut dyn FnMut(Text) -> Result<(), Refusal>| {
        each(s, &mut |source| match source {
            Source::Plain(text) => take(reader.plain(text)?),
            Source::Row(raw, place) => take(reader.row(raw, place)?),
        })
    };
    batched(
        each,
        |text| text.ids.len(),
        |texts| {
            let outputs = head.outputs(&texts.iter().map(|text| &text.ids[..]).collect::<Vec<_>>())?;
            for (text, logits) in texts.iter().zip(outputs) {
                let p = softmax(&logits);
                let best = (0..p.len()).rev().max_by(|a, b| p[*a].total_cmp(&p[*b])).unwrap_or(0);
                if let Some(label) = text.label {
                    confusion.count(label as usize, best);
                }
                say(out, &labels, text, (&p, best))?;
            }
            Ok(())
        },
    )?;
    match confusion.scores() {
        Some(scores) => say_scores(out, &scores, (&labels, None)),
        None => Ok(()),
    }
}

fn say(
    out: &mut Invocation,
    labels: &[String],
    text: &Text,
    (p, best): (&[f64], usize),
) -> Result<(), Refusal> {
    if out.json {
        let by_name: Map<String, Value> = labels.iter().zip(p).map(|(l, p)| (l.clone(), json!(p))).collect();
        let mut line = json!({ "text": text.text, "label": labels[best], "probabilities": by_name });
        if let Some(expected) = text.label {
            line["expected"] = json!(labels[expected as usize]);
        }
        return out.say(&line.to_string());
    }
    let all: Vec<String> = labels.iter().zip(p).map(|(l, p)| format!("{l} {p:.4}")).collect();
    let wrong = text.label.filter(|l| *l as usize != best);
    let wrong = wrong.map(|l| format!("  (label {})", labels[l as usize])).unwrap_or_default();
    out.say(&format!("{}  [{}]{wrong}  {}", labels[best], all.join(", "), shown(&text.text)))
}

/// The beginning of a text, on one line.
fn shown(text: &str) -> String {
    text.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = logits.iter().map(|l| libm::exp(f64::from(l - max))).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|x| x / sum).collect()
}

fn say_scores(
    out: &mut Invocation,
    s: &Scores,
    (labels, f1): (&[String], Option<f64>),
) -> Result<(), Refusal> {
    if out.json {
        let mut scores = json!({
            "accuracy": s.accuracy, "macro_f1": s.macro_f1, "confusion": s.confusion, "labels": labels,
        });
        if let Some(f1) = f1 {
            scores["f1"] = json!(f1);
        }
        return out.say(&scores.to_string());
    }
    let f1 = f1.map(|f1| format!("  entity F1 {f1:.4}")).unwrap_or_default();
    out.say(&format!("accuracy {:.4}  macro F1 {:.4}{f1}", s.accuracy, s.macro_f1))?;
    confusion::lines(labels, &s.confusion).iter().try_for_each(|line| out.say(line))
}

/// Where a text comes from.
enum Source<'a> {
    /// An argument, or a line of stdin.
    Plain(&'a str),
    /// A row of --data.
    Row(Raw, &'a data::Place),
}

/// Gives the texts of --text, the rows of --data, or without both the lines of stdin.
fn each(s: &Settings, take: &mut dyn FnMut(Source) -> Result<(), Refusal>) -> Result<(), Refusal> {
    for text in s.list("text") {
        take(Source::Plain(text))?;
    }
    let paths: Vec<PathBuf> = s.list("data").iter().map(PathBuf::from).collect();
    for path in eval_sets(&paths)?.iter().flatten() {
        let mut failed = None;
        files::read(path, &mut |row| match take(Source::Row(row.raw, &row.place)) {
            Ok(()) => Ok(Flow::Continue),
            Err(e) => {
                failed = Some(e);
                Ok(Flow::Stop)
            }
        })?;
        if let Some(e) = failed {
            return Err(e);
        }
    }
    if s.list("text").is_empty() && paths.is_empty() {
        for line in std::io::stdin().lock().lines() {
            take(Source::Plain(&line.map_err(|e| Refusal::failure(format!("stdin: {e}")))?))?;
        }
    }
    Ok(())
}

/// Source of texts with labels.
struct Reader<'a> {
    options: &'a data::Options,
    tokenizer: &'a Tokenizer,
    classes: LabelMap,
}

impl Reader<'_> {
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
