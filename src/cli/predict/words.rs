//! Classes of words: the words of a row or of a text, their labels in order, and scores where rows have labels.

use super::{Head, Source, batched, each, softmax};
use crate::cli::invocation::Invocation;
use crate::config::Settings;
use crate::config::refusal::Refusal;
use crate::data::form::{self, Form, Label};
use crate::data::samples::NO_CLASS;
use crate::data::tokenizer::Tokenizer;
use crate::data::{self, DataError, LabelMap, Place, encode};
use crate::model::pending::argmax;
use crate::train::entities::{Entities, mark_entities};
use crate::train::eval::Confusion;
use serde_json::json;

/// Words with their tokens.
pub(super) struct Row {
    words: Vec<String>,
    expected: Vec<Option<u32>>,
    pub(super) ids: Vec<u32>,
    /// The word that begins with each token, else [`NO_CLASS`].
    pub(super) starts: Vec<u32>,
}

/// A word that was labelled.
struct Labelled {
    word: usize,
    label: usize,
    probability: f64,
}

struct Reader<'a> {
    options: &'a data::Options,
    tokenizer: &'a Tokenizer,
    classes: LabelMap,
}

/// Labels the words of every row.
pub(super) fn tag(
    out: &mut Invocation,
    s: &Settings,
    (options, tokenizer, labels): (&data::Options, &Tokenizer, Vec<String>),
    mut head: Head,
) -> Result<(), Refusal> {
    let mut scores = (Confusion::default(), mark_entities(&labels).then(Entities::default));
    let reader = Reader { options, tokenizer, classes: LabelMap { names: labels.clone() } };
    let each =
        |take: &mut dyn FnMut(Row) -> Result<(), Refusal>| each(s, &mut |source| take(reader.row(source)?));
    batched(
        each,
        |row| row.ids.len(),
        |rows| {
            let outputs = head.outputs_of_words(&rows)?;
            let mut outputs = outputs.iter();
            for row in &rows {
                let starts = row.starts.iter().filter(|word| **word != NO_CLASS);
                let labelled = starts.zip(outputs.by_ref()).map(|(word, logits)| {
                    let (label, p) = (argmax(logits), softmax(logits));
                    Labelled { word: *word as usize, label, probability: p[label] }
                });
                let labelled: Vec<Labelled> = labelled.collect();
                count(&mut scores, (row, &labelled), &labels);
                say(out, &labels, (row, &labelled))?;
            }
            Ok(())
        },
    )?;
    conclude(out, scores, &labels)
}

impl Reader<'_> {
    fn row(&self, source: Source) -> Result<Row, Refusal> {
        match source {
            Source::Plain(text) => {
                let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
                self.encoded(Form::Words { tags: vec![None; words.len()], words }, &"a text", |_| Ok(None))
            }
            Source::Row(raw, place) => {
                let fault = |reason: String| Refusal::from(DataError::Row { place: place.clone(), reason });
                let form = form::words(&raw.parse().map_err(fault)?, self.options).map_err(fault)?;
                self.encoded(form, place, |label| self.class(label, place).map(Some))
            }
        }
    }

    fn class(&self, label: &Label, place: &Place) -> Result<u32, Refusal> {
        self.classes.class(label).ok_or_else(|| {
            let allowed = format!("the classes {}", self.classes.names.join(", "));
            DataError::Label { place: place.clone(), label: label.to_string(), allowed }.into()
        })
    }

    fn encoded(
        &self,
        form: Form,
        place: &dyn std::fmt::Display,
        class: impl Fn(&Label) -> Result<Option<u32>, Refusal>,
    ) -> Result<Row, Refusal> {
        let most = self.options.max_seq_len;
        let Form::Words { words, tags } = &form else {
            return Err(Refusal::failure("rows of token classification have words"));
        };
        let bytes = words.iter().map(String::len).sum();
        let encode = || encode::tagged(words, self.tokenizer, (most, |_| true));
        let mut encoded = data::bounded(place, (bytes, most), encode)?;
        encoded.cut(most);
        if encoded.targets() == 0 {
            return Err(Refusal::failure(format!("{place}: it has no word to label: leave it out")));
        }
        let expected =
            tags.iter().map(|tag| tag.as_ref().map_or(Ok(None), &class)).collect::<Result<_, _>>()?;
        Ok(Row { words: words.clone(), expected, ids: encoded.ids, starts: encoded.classes })
    }
}

fn count(
    (confusion, entities): &mut (Confusion, Option<Entities>),
    (row, labelled): (&Row, &[Labelled]),
    labels: &[String],
) {
    let known: Vec<(usize, usize)> =
        labelled.iter().filter_map(|one| Some((row.expected[one.word]? as usize, one.label))).collect();
    known.iter().for_each(|(label, prediction)| confusion.count(*label, *prediction));
    if let Some(entities) = entities {
        let (expected, predicted): (Vec<&str>, Vec<&str>) =
            known.iter().map(|(label, prediction)| (&*labels[*label], &*labels[*prediction])).unzip();
        entities.add(&expected, &predicted);
    }
}

/// A line for each word and an empty one after the row; words beyond --max-seq-len have no label.
fn say(out: &mut Invocation, labels: &[String], (row, labelled): (&Row, &[Labelled])) -> Result<(), Refusal> {
    let of = |word: usize| labelled.iter().find(|one| one.word == word);
    let name = |word: usize| of(word).map(|one| &labels[one.label]);
    let expected = |word: usize| row.expected[word].map(|class| &labels[class as usize]);
    let words = 0..row.words.len();
    if out.json {
        let probability = |word: usize| of(word).map(|one| one.probability);
        let mut line = json!({
            "tokens": row.words, "tags": words.clone().map(name).collect::<Vec<_>>(),
            "probabilities": words.clone().map(probability).collect::<Vec<_>>(),
        });
        if row.expected.iter().any(Option::is_some) {
            line["expected"] = json!(words.map(expected).collect::<Vec<_>>());
        }
        return out.say(&line.to_string());
    }
    for word in words {
        let label = name(word).map_or("-", |name| name);
        let wrong = expected(word).filter(|expected| *expected != label);
        let wrong = wrong.map(|expected| format!("  (label {expected})")).unwrap_or_default();
        out.say(&format!("{}  {label}{wrong}", row.words[word]))?;
    }
    out.say("")
}

fn conclude(
    out: &mut Invocation,
    (confusion, entities): (Confusion, Option<Entities>),
    labels: &[String],
) -> Result<(), Refusal> {
    let Some(scores) = confusion.scores() else { return Ok(()) };
    super::say_scores(out, &scores, (labels, entities.map(|entities| entities.f1())))
}
