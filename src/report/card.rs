//! The run's section of a model card, computed from the run's events. The card of a checkpoint shows the numbers so
//! far.

use super::draw::compact;
use super::history::History;
use super::words::{best_words, duration};

/// Names and values in the order of the card; an unknown value is left out. A new number of a run is one more line
/// here.
pub fn card(history: &History) -> Vec<(&'static str, String)> {
    let Some(start) = &history.start else { return Vec::new() };
    let p = &history.progress;
    let held =
        if start.eval_rows > 0 { format!(", {} for evaluation", start.eval_rows) } else { String::new() };
    let total = if p.step < start.total_steps { format!(" of {}", start.total_steps) } else { String::new() };
    let epochs = p.step as f64 / start.steps_per_epoch.max(1) as f64;
    let scored = |value: fn(&crate::train::event::Eval) -> Option<f64>| -> Option<String> {
        let (first, last) = p.eval.as_ref()?;
        Some(match first.step < last.step {
            true => change(value(first)?, value(last)?),
            false => format!("{:.4}", value(last)?),
        })
    };
    let mut classes = p.team.classes();
    if classes.is_empty() {
        classes = start.classes.iter().map(String::as_str).collect();
    }
    let all = [
        ("rows", Some(format!("{}{held}", start.rows))),
        ("steps", Some(format!("{}{total}", p.step))),
        ("epochs", Some(compact(epochs))),
        ("trained values", Some(start.parameters.to_string())),
        (
            "training loss, smoothed",
            p.loss.zip(p.smooth_loss()).map(|((first, _), last)| change(first, last)),
        ),
        ("eval loss", scored(|e| Some(e.eval_loss))),
        ("eval perplexity", scored(|e| e.perplexity)),
        ("eval accuracy", scored(|e| e.accuracy)),
        ("eval token accuracy", scored(|e| e.token_accuracy)),
        ("eval macro F1", scored(|e| e.macro_f1)),
        ("eval entity F1", scored(|e| e.f1)),
        ("eval Pearson correlation", scored(|e| e.pearson)),
        ("eval Spearman correlation", scored(|e| e.spearman)),
        ("result", p.best.as_ref().map(best_words)),
        ("time", Some(duration(p.seconds))),
        ("devices", Some(classes.join(", ")).filter(|names| !names.is_empty())),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn change(before: f64, after: f64) -> String {
    format!("{before:.4} -> {after:.4}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Eval, Event, RunStart, Step};

    #[test]
    fn card_lists_known_numbers_only() {
        let classes = vec!["cpu-avx2-f32".to_string()];
        let run = RunStart {
            total_steps: 6,
            steps_per_epoch: 4,
            rows: 32,
            parameters: 99,
            classes,
            ..Default::default()
        };
        let eval =
            |step, eval_loss, accuracy| Event::Eval(Eval { step, eval_loss, accuracy, ..Eval::default() });
        let step = |step, loss| Event::Step(Step { step, loss, seconds: 30.0, ..Step::default() });
        let mut events = vec![Event::Run(RunStart { eval_rows: 8, ..run }), eval(0, 2.0, Some(0.5))];
        events.extend([step(1, 2.0), step(2, 2.0), eval(2, 1.5, Some(0.75))]);
        let want = [
            ("rows", "32, 8 for evaluation"),
            ("steps", "2 of 6"),
            ("epochs", "0.5"),
            ("trained values", "99"),
            ("training loss, smoothed", "2.0000 -> 2.0000"),
            ("eval loss", "2.0000 -> 1.5000"),
            ("eval accuracy", "0.5000 -> 0.7500"),
            ("time", "1:00"),
            ("devices", "cpu-avx2-f32"),
        ];
        let said = card(&History::of(&events));
        let said: Vec<(&str, &str)> = said.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(said, want);
        events.truncate(2);
        assert!(card(&History::of(&events)).contains(&("eval loss", "2.0000".to_string())));
        assert!(card(&History::default()).is_empty());
    }
}
