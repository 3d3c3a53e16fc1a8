//! Warnings about suspicious rows: each gives the number of rows, the consequence and the remedy. Warnings do not stop
//! a run; `--max-dropped` does.

use crate::data::{Corpus, Tokenizer};

/// Counts of suspicious rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Survey {
    rows: u64,
    dropped: u64,
    first_dropped: String,
    truncated: u64,
    max_seq_len: usize,
    duplicates: u64,
    /// Untruncated rows of text, and those of them without a supervised end token (`endless`).
    whole: u64,
    endless: u64,
    /// Rows that begin with two beginning-of-text tokens.
    twice: u64,
    /// Rows that train an empty think block, and rows whose reasoning the template leaves out.
    empty_thoughts: u64,
    lost_thoughts: u64,
    /// A class with nearly all rows, and its number of rows.
    one_sided: Option<(String, u64)>,
}

/// All warnings. `(stop, most)`: tokens that end an answer, and the longest row that is not truncated.
pub fn all(corpus: &Corpus, tokenizer: &Tokenizer, limits: (&[u32], usize)) -> Vec<String> {
    sentences(&survey(corpus, tokenizer, limits))
}

/// The warnings of a training run, without those that its other lines contain.
pub fn of_a_run(corpus: &Corpus, tokenizer: &Tokenizer, limits: (&[u32], usize)) -> Vec<String> {
    let survey = survey(corpus, tokenizer, limits);
    sentences(&Survey { dropped: 0, truncated: 0, duplicates: 0, ..survey })
}

fn survey(corpus: &Corpus, tokenizer: &Tokenizer, (stop, most): (&[u32], usize)) -> Survey {
    let c = &corpus.counts;
    let begin = tokenizer.bos_token().and_then(|token| tokenizer.token_to_id(token));
    let mut survey = Survey {
        rows: c.rows,
        dropped: c.dropped,
        first_dropped: c.first_dropped.as_ref().map(|place| place.to_string()).unwrap_or_default(),
        truncated: c.truncated,
        empty_thoughts: c.empty_thoughts,
        lost_thoughts: c.lost_thoughts,
        max_seq_len: most,
        duplicates: corpus.samples.duplicates(),
        one_sided: one_sided(corpus),
        ..Survey::default()
    };
    for sample in corpus.samples.iter() {
        let ids = sample.ids;
        survey.twice +=
            u64::from(begin.is_some() && ids.len() > 1 && Some(ids[0]) == begin && ids[0] == ids[1]);
        let has_head = sample.label.is_some() || !sample.values.is_empty() || !sample.classes.is_empty();
        if !has_head && ids.len() < most {
            survey.whole += 1;
            let ends = (0..ids.len()).any(|i| sample.supervised(i) && stop.contains(&ids[i]));
            survey.endless += u64::from(!ends);
        }
    }
    survey
}

fn one_sided(corpus: &Corpus) -> Option<(String, u64)> {
    let labels = corpus.labels.as_ref()?;
    let mut counts = vec![0u64; labels.names.len()];
    for label in corpus.samples.iter().filter_map(|s| s.label) {
        *counts.get_mut(label as usize)? += 1;
    }
    let (i, most) = counts.iter().copied().enumerate().max_by_key(|(_, n)| *n)?;
    (most * 10 > 9 * corpus.samples.len() as u64).then(|| (labels.names[i].clone(), most))
}

fn sentences(s: &Survey) -> Vec<String> {
    let of = |n: u64, all: u64| format!("{n} of {all} rows ({})", percent(n, all));
    let mut out = Vec::new();
    if s.dropped > 0 {
        out.push(format!(
            "nothing to train on in {} (first: {}): they are left out; --max-dropped 1% would refuse them",
            of(s.dropped, s.rows),
            s.first_dropped
        ));
    }
    if s.endless > 0 {
        out.push(format!(
            "no end token is trained on in {}: the model will not know when to stop; the chat template must close the \
             assistant's turn with its end-of-turn token (another one: --chat-template FILE, or chatml)",
            of(s.endless, s.whole)
        ));
    }
    if s.truncated > 0 {
        out.push(format!(
            "{} are cut at {} tokens and lose their end: raise --max-seq-len, or shorten them",
            of(s.truncated, s.rows),
            s.max_seq_len
        ));
    }
    if s.empty_thoughts > 0 {
        out.push(format!(
            "an empty think block is trained on in {}: the model learns not to reason; --template-args \
             enable_thinking=false makes it a part of the prompt where the template knows this variable",
            of(s.empty_thoughts, s.rows)
        ));
    }
    if s.lost_thoughts > 0 {
        out.push(format!(
            "the chat template leaves out reasoning of {}: many templates keep that of the last turn only (--learn last)",
            of(s.lost_thoughts, s.rows)
        ));
    }
    if s.twice > 0 {
        out.push(format!(
            "{} begin with the token of beginning twice: take it out of the text, the tokenizer adds it",
            of(s.twice, s.rows)
        ));
    }
    if s.duplicates > 0 {
        out.push(format!("{} repeat an earlier one, token for token", of(s.duplicates, s.rows)));
    }
    if let Some((name, n)) = &s.one_sided {
        out.push(format!(
            "{} are labelled {name}: always predicting it scores nearly as well; --class-weights balances it",
            of(*n, s.rows - s.dropped.min(s.rows))
        ));
    }
    out
}

/// A share such as `12 %`; a nonzero share is never shown as 0 %.
fn percent(n: u64, all: u64) -> String {
    let p = 100.0 * n as f64 / all.max(1) as f64;
    if p > 0.0 && p < 0.95 { format!("{p:.1} %") } else { format!("{p:.0} %") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(survey: Survey, want: &[&str]) {
        let got = sentences(&Survey { rows: 50, whole: 50, max_seq_len: 64, ..survey });
        assert_eq!(got.len(), want.len(), "{got:?}");
        for (line, part) in got.iter().zip(want) {
            assert!(line.contains(part), "{line}: {part}");
        }
    }

    #[test]
    fn suspicious_rows_give_warnings() {
        let none = Survey::default;
        check(none(), &[]);
        let dropped = Survey { dropped: 6, first_dropped: "a.jsonl:3: its text is empty".into(), ..none() };
        check(dropped, &["nothing to train on in 6 of 50 rows (12 %) (first: a.jsonl:3: its text is empty)"]);
        check(Survey { endless: 50, ..none() }, &["no end token is trained on in 50 of 50 rows (100 %)"]);
        check(
            Survey { truncated: 5, duplicates: 1, ..none() },
            &["5 of 50 rows (10 %) are cut at 64", "(2 %) repeat"],
        );
        check(Survey { twice: 50, ..none() }, &["token of beginning twice"]);
        check(
            Survey { empty_thoughts: 5, ..none() },
            &["empty think block is trained on in 5 of 50 rows (10 %)"],
        );
        check(Survey { lost_thoughts: 1, ..none() }, &["leaves out reasoning of 1 of 50 rows (2 %)"]);
        check(
            Survey { one_sided: Some(("safe".into(), 48)), ..none() },
            &["48 of 50 rows (96 %) are labelled safe"],
        );
        assert_eq!(percent(1, 1000), "0.1 %");
    }
}
