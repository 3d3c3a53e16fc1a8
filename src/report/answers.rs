//! Rows of the evaluation that the model answered: how many answers were right, and the first and the last answers
//! next to the expected ones.

use crate::support::stderr::inline;
use crate::train::event::Sample;

/// Maximum number of rows that a summary shows.
const SHOWN: usize = 10;
/// Maximum number of characters of a text in a summary.
const WIDTH: usize = 90;

/// The answers to rows so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answers {
    /// The step of the last answer, and the number of its answers so far.
    last: (u64, usize),
    rows: Vec<Row>,
}

/// The first and the last answer to a row.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    first: Sample,
    last: Sample,
}

impl Answers {
    /// Adds an answer; the answers of a step have the order of the rows. A prompt that is no row is left out.
    pub fn see(&mut self, sample: &Sample) {
        if sample.expected.is_none() {
            return;
        }
        let (step, seen) = self.last;
        let at = if step == sample.step { seen } else { 0 };
        self.last = (sample.step, at + 1);
        match self.rows.get_mut(at) {
            Some(row) => row.last = sample.clone(),
            None => self.rows.push(Row { first: sample.clone(), last: sample.clone() }),
        }
    }

    /// The answers of the last step that has answers.
    fn current(&self) -> &[Row] {
        &self.rows[..self.last.1]
    }

    /// Number of right answers after `step`, as `9 of 10 rows right`.
    pub fn after(&self, step: u64) -> Option<String> {
        let rows = self.current();
        let known = !rows.is_empty() && self.last.0 == step;
        known.then(|| format!("{} of {} rows right", right(rows, |row| &row.last), rows.len()))
    }

    /// The rows of a complete run with their answers before and after.
    pub fn lines(&self) -> Vec<String> {
        let rows = self.current();
        let mut lines = Vec::new();
        for Row { first, last } in rows.iter().take(SHOWN) {
            lines.push(format!("asked    {}", short(&first.prompt)));
            if first.step == 0 {
                lines.push(format!("  before {}", short(&first.text)));
            }
            let wrong = last.expected.as_ref().filter(|_| last.right == Some(false));
            let mark = if wrong.is_none() { "  (right)" } else { "  (wrong)" };
            lines.push(format!("  after  {}{mark}", short(&last.text)));
            lines.extend(wrong.map(|expected| format!("  row    {}", short(expected))));
        }
        if rows.len() > SHOWN {
            lines.push(format!("         ... and {} more in metrics.jsonl", rows.len() - SHOWN));
        }
        lines
    }

    /// Number of right answers before and after, as `0 of 10 right before training, 9 of 10 after`.
    pub fn counted(&self) -> Option<String> {
        let rows = self.current();
        let n = rows.len();
        let (before, after) = (right(rows, |row| &row.first), right(rows, |row| &row.last));
        // A resumed run may have begun to ask later.
        let text = match rows.iter().all(|row| row.first.step == 0) {
            true => format!("{before} of {n} right before training, {after} of {n} after"),
            false => format!("{after} of {n} right"),
        };
        (n > 0).then_some(text)
    }
}

fn right(rows: &[Row], which: impl Fn(&Row) -> &Sample) -> usize {
    rows.iter().filter(|row| which(row).right == Some(true)).count()
}

/// A text on one line, cut after [`WIDTH`] characters.
fn short(text: &str) -> String {
    let line = inline(text.trim());
    match line.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(step: u64, prompt: &str, text: &str, expected: &str) -> Sample {
        let (prompt, text) = (prompt.into(), text.into());
        let right = Some(text == expected);
        Sample { step, prompt, text, expected: Some(expected.into()), right }
    }

    #[test]
    fn first_and_last_answers_of_each_row_are_compared() {
        let mut answers = Answers::default();
        let said = [
            sample(0, "one", "no\nidea", "1"),
            sample(0, "two", &"x".repeat(100), "2"),
            Sample { step: 0, prompt: "no row".into(), ..Sample::default() },
            sample(4, "one", "0", "1"),
            sample(4, "two", "1", "2"),
            sample(9, "one", "1", "1"),
            sample(9, "two", "3", "2"),
        ];
        for (i, sample) in said.iter().enumerate() {
            answers.see(sample);
            let after = answers.after(sample.step);
            if i == 6 {
                assert_eq!(after.as_deref(), Some("1 of 2 rows right"));
            }
        }
        assert_eq!(answers.after(4), None);
        assert_eq!(answers.counted().unwrap(), "0 of 2 right before training, 1 of 2 after");
        let cut = format!("  before {}...", "x".repeat(90));
        assert_eq!(
            answers.lines(),
            [
                "asked    one",
                "  before no\\nidea",
                "  after  1  (right)",
                "asked    two",
                &cut,
                "  after  3  (wrong)",
                "  row    2"
            ]
        );
    }

    #[test]
    fn summary_shows_ten_rows() {
        let mut answers = Answers::default();
        assert_eq!((answers.lines(), answers.counted()), (vec![], None));
        (0..12).for_each(|i| answers.see(&sample(0, &i.to_string(), "a", "a")));
        let lines = answers.lines();
        assert_eq!((lines.len(), lines[30].as_str()), (31, "         ... and 2 more in metrics.jsonl"));
    }
}
