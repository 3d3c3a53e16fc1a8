//! Rows as a model sees them: counts, lengths, warnings, and some rows with their supervised text in colour.

use super::{delimiters, options, print};
use crate::cli::invocation::Invocation;
use crate::config::groups::{filled, new_tokens, template_args, whole, within};
use crate::config::refusal::Refusal;
use crate::data::preview::{self, Piece};
use crate::data::{self, Corpus, Sample, Tokenizer};
use crate::run::base_model;
use crate::run::row_warnings;
use crate::support::plural::count;
use crate::support::stderr::printable;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::path::PathBuf;

/// Names of the rows of a pair.
const ANSWERS: [&str; 2] = ["chosen: ", "rejected: "];
/// Number of longest rows that are listed.
const LONGEST: usize = 5;

/// Describes rows. More rows without supervised tokens than --max-dropped allows are a failure, reported last.
pub fn run(inv: &mut Invocation, paths: &[PathBuf]) -> Result<(), Refusal> {
    let s = &inv.settings;
    let mut base = base_model::open(s.text("model")?.unwrap_or_default())?;
    base.add_tokens(&new_tokens(s)?)?;
    let tokenizer = base.tokenizer_with(s.text("chat-template")?, &template_args(s)?)?;
    let options = options(s, Some(&base))?;
    let shown = filled(s, "rows", whole(s, "rows", 0)?)?;
    let corpus = data::load(paths, &options, &tokenizer)?;
    let warnings = row_warnings::all(&corpus, &tokenizer, (&base.stop_ids(&tokenizer), options.max_seq_len));
    let mut facts = facts(&corpus);
    facts.extend(delimiters(paths));
    if inv.json {
        facts.push(("warnings", json!(warnings)));
        facts.push(("rows_shown", rows_as_json(&corpus, &tokenizer, shown)?));
        print(inv, &facts)?;
        return within(&inv.settings, &corpus.counts);
    }
    print(inv, &facts)?;
    for line in histogram(&lengths(&corpus)) {
        inv.say(&line)?;
    }
    let paint = Paint::detect();
    for i in 0..shown.min(corpus.samples.len()) {
        let sample = corpus.samples.get(i);
        inv.say(&headline(&sample, &corpus))?;
        for (row, name) in sample.rows().zip(ANSWERS) {
            let pieces = preview::preview(&sample, row, &tokenizer)?;
            let text: String = pieces.iter().map(|p| paint.piece(p)).collect();
            let name = if sample.second.is_some() { name } else { "" };
            inv.say_as_it_is(&format!("{name}{text}"))?;
        }
    }
    for warning in &warnings {
        inv.say(&format!("warning: {warning}"))?;
    }
    within(&inv.settings, &corpus.counts)
}

fn facts(corpus: &Corpus) -> Vec<(&'static str, Value)> {
    let c = &corpus.counts;
    let lengths = lengths(corpus);
    let mut facts =
        vec![("rows", json!(c.rows)), ("dropped", json!(c.dropped)), ("truncated", json!(c.truncated))];
    if c.split.0 > 0 {
        facts.push(("split", json!(format!("{} into {}", c.split.0, c.split.1))));
    }
    if c.too_long > 0 {
        facts.push(("too_long", json!(c.too_long)));
    }
    facts.extend([
        ("tokens", json!(c.tokens)),
        (if corpus.is_labelled() { "labelled" } else { "supervised" }, json!(c.supervised)),
        ("duplicates", json!(corpus.samples.duplicates())),
        ("shortest", json!(lengths.first())),
        ("median", json!(lengths.get(lengths.len() / 2))),
        ("longest", json!(longest(corpus))),
        ("hash", json!(corpus.hash)),
    ]);
    if let Some(labels) = &corpus.labels {
        let mut counts = vec![0; labels.names.len()];
        let classes =
            corpus.samples.iter().flat_map(|s| s.label.into_iter().chain(s.classes.iter().copied()));
        classes.for_each(|class| counts.get_mut(class as usize).into_iter().for_each(|n| *n += 1));
        let what = if corpus.samples.have_classes() { "word" } else { "row" };
        let named = labels.names.iter().zip(&mut counts);
        let named = named.map(|(name, n)| format!("{name} ({})", count(*n, what)));
        facts.push(("labels", json!(named.collect::<Vec<_>>())));
    }
    if let Some(first) = &c.first_dropped {
        facts.push(("first_dropped", json!(first.to_string())));
    }
    facts
}

/// `row 812 (198 tokens)`, longest first; earlier rows first among equals.
fn longest(corpus: &Corpus) -> Vec<String> {
    let mut order: Vec<usize> = (0..corpus.samples.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(corpus.samples.tokens(i)), i));
    let tokens = |i: usize| count(corpus.samples.tokens(i) as u64, "token");
    let say = |&i: &usize| format!("row {} ({})", corpus.samples.get(i).row, tokens(i));
    order.iter().take(LONGEST).map(say).collect()
}

fn headline(sample: &Sample, corpus: &Corpus) -> String {
    let name = |l: u32| corpus.labels.as_ref().and_then(|all| all.names.get(l as usize)).cloned();
    let learnt = match sample.label {
        Some(l) => format!("label {}", name(l).unwrap_or_else(|| l.to_string())),
        None if !sample.values.is_empty() => {
            let what = if sample.second.is_some() { "margin" } else { "label" };
            format!("{what} {}", sample.values.iter().map(f32::to_string).collect::<Vec<_>>().join(", "))
        }
        None => format!("{} supervised", sample.supervised_targets()),
    };
    format!("--- row {}: {}, {learnt}", sample.row, count(sample.ids.len() as u64, "token"))
}

fn rows_as_json(corpus: &Corpus, tokenizer: &Tokenizer, shown: usize) -> Result<Value, Refusal> {
    let row = |i: usize| {
        let sample = corpus.samples.get(i);
        let pieces = |row| -> Result<Vec<Value>, Refusal> {
            let pieces = preview::preview(&sample, row, tokenizer)?;
            let piece = |p: &Piece| json!({ "text": p.text, "supervised": p.supervised, "tokens": p.tokens });
            Ok(pieces.iter().map(piece).collect())
        };
        let mut rows = sample.rows();
        Ok(match (rows.next(), rows.next()) {
            (Some(chosen), Some(rejected)) => {
                json!({ "row": sample.row, "chosen": pieces(chosen)?, "rejected": pieces(rejected)? })
            }
            _ => json!({ "row": sample.row, "label": sample.label, "pieces": pieces(0..sample.ids.len())? }),
        })
    };
    let rows: Result<Vec<Value>, Refusal> = (0..shown.min(corpus.samples.len())).map(row).collect();
    rows.map(Value::from)
}

fn lengths(corpus: &Corpus) -> Vec<usize> {
    let mut lengths: Vec<usize> = (0..corpus.samples.len()).map(|i| corpus.samples.tokens(i)).collect();
    lengths.sort();
    lengths
}

/// At most ten bars of equal width in tokens.
fn histogram(sorted: &[usize]) -> Vec<String> {
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let step = ((last - first) / 10 + 1).max(1);
    let bins = (last - first) / step + 1;
    let mut counts = vec![0usize; bins];
    sorted.iter().for_each(|l| counts[(l - first) / step] += 1);
    let most = counts.iter().max().copied().unwrap_or(1).max(1);
    let wide = format!("{last} - {last}").len();
    let bar = |(i, n): (usize, &usize)| {
        let from = first + i * step;
        let to = (from + step - 1).min(*last);
        let bar = "#".repeat((n * 40).div_ceil(most));
        let range = if from == to { from.to_string() } else { format!("{from} - {to}") };
        format!("{range:<wide$} tokens {n:>7} {bar}").trim_end().to_string()
    };
    counts.iter().enumerate().map(bar).collect()
}

/// Marking of supervised text.
enum Paint {
    Colours,
    Brackets,
}

impl Paint {
    fn detect() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        if wanted && std::io::stdout().is_terminal() { Paint::Colours } else { Paint::Brackets }
    }

    fn piece(&self, piece: &Piece) -> String {
        let text = printable(&piece.text);
        match (self, piece.supervised) {
            (Paint::Colours, true) => format!("\x1b[32m{text}\x1b[0m"),
            (Paint::Colours, false) => format!("\x1b[2m{text}\x1b[0m"),
            (Paint::Brackets, true) => format!("⟦{text}⟧"),
            (Paint::Brackets, false) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_every_row() {
        let lengths: Vec<usize> = (3..=57).chain([57, 57]).collect();
        let bars = histogram(&lengths);
        assert!(bars.len() <= 10, "{bars:?}");
        let counted: usize = bars
            .iter()
            .map(|b| {
                b.split("tokens").nth(1).unwrap().split_whitespace().next().unwrap().parse::<usize>().unwrap()
            })
            .sum();
        assert_eq!(counted, lengths.len());
        assert!(bars[0].starts_with("3 - 8 ") && bars.last().unwrap().starts_with("57  "), "{bars:?}");
        assert!(histogram(&[]).is_empty());
        assert_eq!(histogram(&[4]), ["4     tokens       1 ########################################"]);
    }
}
