//! The score of entities: a prediction counts if its class and both ends are right. The labels of words are in the format
//! IOB2: `B-PER` begins an entity of the class PER, `I-PER` continues it, `O` is outside. Entities and their F1 are those of
//! seqeval 1.2 in its default mode, which also takes an `I-` without a `B-` before it for a begin.

use std::collections::BTreeSet;

/// Numbers of entities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Entities {
    labelled: u64,
    predicted: u64,
    right: u64,
}

/// Whether these labels mark entities.
pub fn mark_entities(labels: &[String]) -> bool {
    let known = |label: &String| label == "O" || label.starts_with("B-") || label.starts_with("I-");
    labels.iter().all(known) && labels.iter().any(|label| label.starts_with("B-"))
}

impl Entities {
    /// Counts a row: the label and the prediction of each word.
    pub fn add(&mut self, labels: &[&str], predictions: &[&str]) {
        let [labelled, predicted] = [labels, predictions].map(of);
        self.labelled += labelled.len() as u64;
        self.predicted += predicted.len() as u64;
        self.right += labelled.intersection(&predicted).count() as u64;
    }

    /// The F1 of all entities; 0 if there are none.
    pub fn f1(&self) -> f64 {
        2.0 * self.right as f64 / (self.labelled + self.predicted).max(1) as f64
    }
}

/// The entities of a row: class, first word, and the word after the last one.
fn of<'a>(tags: &[&'a str]) -> BTreeSet<(&'a str, usize, usize)> {
    let (mut all, mut open) = (BTreeSet::new(), None);
    for (at, tag) in tags.iter().enumerate() {
        let (prefix, class) = tag.split_once('-').unwrap_or((tag, ""));
        let goes_on = matches!(open, Some((of, _)) if prefix == "I" && of == class);
        if !goes_on {
            all.extend(open.take().map(|(class, from)| (class, from, at)));
            open = (prefix != "O").then_some((class, at));
        }
    }
    all.extend(open.map(|(class, from)| (class, from, tags.len())));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `seqeval.metrics.f1_score` of seqeval 1.2.2 for these rows, alone and together.
    #[test]
    fn f1_is_that_of_seqeval() {
        let rows: [(&str, &str, f64); 7] = [
            ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 1.0),
            ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 0.5),
            ("B-PER B-PER I-PER O", "B-PER I-PER I-PER O", 0.0),
            ("O I-LOC I-LOC O", "O B-LOC I-LOC O", 1.0),
            ("B-PER I-LOC O", "B-PER B-LOC O", 1.0),
            ("B-A I-A I-B I-A", "B-A I-A O O", 0.5),
            ("O O", "O O", 0.0),
        ];
        let mut all = Entities::default();
        for (labels, predictions, want) in rows {
            let split = |text: &'static str| text.split(' ').collect::<Vec<_>>();
            let (labels, predictions) = (split(labels), split(predictions));
            let mut one = Entities::default();
            one.add(&labels, &predictions);
            assert!((one.f1() - want).abs() < 1e-15, "{labels:?} {predictions:?}: {}", one.f1());
            all.add(&labels, &predictions);
        }
        assert!((all.f1() - 2.0 / 3.0).abs() < 1e-15, "{}", all.f1());
    }

    #[test]
    fn other_labels_mark_no_entities() {
        let of = |text: &str| mark_entities(&text.split(' ').map(String::from).collect::<Vec<_>>());
        assert!(of("B-PER I-PER O") && of("B-PER O"));
        assert!(!of("NOUN VERB O") && !of("O") && !of("B-PER E-PER O"));
    }
}
