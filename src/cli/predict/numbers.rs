//! Texts and answers that are scored by a head of numbers.

use super::super::invocation::Invocation;
use crate::config::refusal::Refusal;
use crate::data::form::{self, Said, Scored};
use crate::data::tokenizer::{Skip, Special};
use crate::data::{DataError, Options, Place, Task, Tokenizer, encode};
use crate::numeric::correlation::{pearson, spearman};
use serde_json::{Value, json};

/// A text to be scored.
pub struct Text {
    /// As it is shown.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// The numbers of its label; empty without one.
    values: Vec<f32>,
    side: Option<Side>,
}

/// The answers of a pair, which follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Chosen,
    Rejected,
}

/// The texts of rows, as tokens.
pub struct Reader<'a> {
    /// How rows are read.
    pub options: &'a Options,
    /// The tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Number of outputs.
    pub outputs: usize,
}

impl Reader<'_> {
    /// A plain text. A reward model has learnt texts with their end token.
    pub fn plain(&self, text: &str) -> Result<Vec<Text>, Refusal> {
        let texts = self.texts(Scored::Text(text.to_owned(), Vec::new()))?;
        filled(texts).map_err(Refusal::failure)
    }

    /// The texts of a row.
    pub fn row(&self, value: &Value, place: &Place) -> Result<Vec<Text>, Refusal> {
        let fault = |reason: String| Refusal::from(DataError::Row { place: place.clone(), reason });
        let scored = form::scored(value, self.options).map_err(fault)?;
        if let Scored::Text(_, values) = &scored
            && !values.is_empty()
            && values.len() != self.outputs
        {
            return Err(fault(format!("`label` has {} numbers, the model {}", values.len(), self.outputs)));
        }
        filled(self.texts(scored).map_err(|e| e.at(place))?).map_err(fault)
    }

    fn texts(&self, scored: Scored) -> Result<Vec<Text>, DataError> {
        let most = self.options.max_seq_len;
        match scored {
            Scored::Text(text, _) if self.options.task == Task::Reward => {
                self.answers(Said::Text { prompt: String::new(), answers: vec![text] })
            }
            Scored::Answers(said) => self.answers(said),
            Scored::Text(text, values) => {
                let mut ids = self.tokenizer.beginning(&text, Special::Add, most)?;
                ids.truncate(most);
                Ok(vec![Text { text, ids, values, side: None }])
            }
        }
    }

    fn answers(&self, said: Said) -> Result<Vec<Text>, DataError> {
        let encode::Answered { encoded, .. } =
            encode::answers(&said, self.tokenizer, self.options.max_seq_len)?;
        let (first, second) = encoded.ids.split_at(encoded.second as usize);
        let sides = match first.is_empty() {
            true => vec![(second, None)],
            false => vec![(first, Some(Side::Chosen)), (second, Some(Side::Rejected))],
        };
        let text = |(ids, side): (&[u32], Option<Side>)| {
            let text = self.tokenizer.decode(ids, Skip::Nothing)?;
            Ok(Text { text, ids: ids.to_vec(), values: Vec::new(), side })
        };
        sides.into_iter().map(text).collect()
    }
}

/// The texts, if each has tokens.
fn filled(texts: Vec<Text>) -> Result<Vec<Text>, String> {
    match texts.iter().any(|text| text.ids.is_empty()) {
        true => Err("a text without tokens cannot be scored: leave empty texts out".into()),
        false => Ok(texts),
    }
}

/// What was scored so far.
#[derive(Debug, Default)]
pub struct Tally {
    numbers: Vec<(f64, f64)>,
    chosen: f32,
    pairs: u64,
    right: u64,
}

impl Tally {
    /// Shows the outputs of a text.
    pub fn say(&mut self, out: &mut Invocation, text: &Text, outputs: &[f32]) -> Result<(), Refusal> {
        let both = outputs.iter().zip(&text.values);
        self.numbers.extend(both.map(|(output, number)| (f64::from(*output), f64::from(*number))));
        match (text.side, outputs) {
            (Some(Side::Chosen), [reward, ..]) => self.chosen = *reward,
            (Some(Side::Rejected), [reward, ..]) => {
                self.pairs += 1;
                self.right += u64::from(self.chosen > *reward);
            }
            _ => {}
        }
        let side = text.side.map(|side| if side == Side::Chosen { "chosen" } else { "rejected" });
        if out.json {
            let numbers = |all: &[f32]| match all {
                [one] => json!(one),
                all => json!(all),
            };
            let mut line = json!({"text": text.text, "value": numbers(outputs)});
            if !text.values.is_empty() {
                line["expected"] = numbers(&text.values);
            }
            if let Some(side) = side {
                line["answer"] = json!(side);
            }
            return out.say(&line.to_string());
        }
        let words = |all: &[f32]| all.iter().map(|v| format!("{v:.4}")).collect::<Vec<_>>().join(", ");
        let label = match text.values.is_empty() {
            true => String::new(),
            false => format!("  (label {})", words(&text.values)),
        };
        let side = side.map(|side| format!("  {side}")).unwrap_or_default();
        out.say(&format!("{}{label}{side}  {}", words(outputs), super::shown(&text.text)))
    }

    /// Shows the scores of all texts that had labels, or of all pairs.
    pub fn conclude(&self, out: &mut Invocation) -> Result<(), Refusal> {
        let n = self.numbers.len() as f64;
        let errors = self.numbers.iter().map(|(output, number)| (output - number) * (output - number));
        let mse = errors.sum::<f64>() / n;
        let (pearson, spearman) = (pearson(&self.numbers), spearman(&self.numbers));
        let accuracy = self.right as f64 / self.pairs as f64;
        if n > 0.0 && out.json {
            out.say(&json!({"mse": mse, "pearson": pearson, "spearman": spearman}).to_string())?;
        } else if n > 0.0 {
            let word = |name: &str, value: Option<f64>| value.map(|v| format!("  {name} {v:.4}"));
            let words = [word("pearson", pearson), word("spearman", spearman)];
            out.say(&format!("mse {mse:.4}{}", words.into_iter().flatten().collect::<String>()))?;
        }
        match (self.pairs, out.json) {
            (0, _) => Ok(()),
            (pairs, true) => out.say(&json!({"accuracy": accuracy, "pairs": pairs}).to_string()),
            (pairs, false) => out.say(&format!("accuracy {accuracy:.4}  pairs {pairs}")),
        }
    }
}
