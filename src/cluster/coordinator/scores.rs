//! Checks scores and answers before the machine counts them: a correct worker never sends a result that the
//! microbatch cannot give. Also makes the text of workers safe for a terminal.

use super::super::message::{Device, ToCoordinator, Trouble, Work};
use super::super::plain::plain;
use crate::model::preference::{Aim, Answers, Rewards};
use crate::model::stage::{IGNORE, LossSums, Microbatch, Targets};
use crate::numeric::fixed::to_fixed;

/// Whether `message` can be the result of `work` with this number of classes. The error is one line for display.
pub(super) fn check(message: &ToCoordinator, work: &Work, classes: usize) -> Result<(), String> {
    match (message, work) {
        (ToCoordinator::Score { sums, .. }, Work::Eval(batch)) => score(sums, batch, (classes, false)),
        (ToCoordinator::Score { sums, .. }, Work::Predict(batch)) => score(sums, batch, (classes, true)),
        (ToCoordinator::Answer { ids, .. }, Work::Prompt { sampling, .. }) => {
            match ids.len() <= sampling.max_new_tokens {
                true => Ok(()),
                false => Err(format!("it answered with {} of {} tokens", ids.len(), sampling.max_new_tokens)),
            }
        }
        // A result of another kind than requested is handled by the machine.
        _ => Ok(()),
    }
}

/// The same message with every text reduced to one line of bounded length.
pub(super) fn readable(mut message: ToCoordinator) -> ToCoordinator {
    let line = |text: &mut String| *text = plain(text);
    let device = |device: &mut Device| {
        line(&mut device.name);
        line(&mut device.class);
    };
    match &mut message {
        ToCoordinator::Ready { devices, refused } => {
            devices.iter_mut().for_each(device);
            refused.iter_mut().for_each(line);
        }
        ToCoordinator::Fallback { now, reason, .. } => {
            device(now);
            line(reason);
        }
        ToCoordinator::Leave { reason } => line(reason),
        ToCoordinator::Fault {
            fault: Trouble::Device { reason: text } | Trouble::Value { tensor: text, .. },
            ..
        } => {
            line(text);
        }
        _ => {}
    }
    message
}

/// With `tokens` there is a prediction for each supervised target of a language model, else for each class.
fn score(sums: &LossSums, batch: &Microbatch, (classes, tokens): (usize, bool)) -> Result<(), String> {
    let (most, predicted) = match &batch.targets {
        Targets::Tokens(targets) if tokens => {
            (targets.len(), targets.iter().filter(|target| **target != IGNORE).count())
        }
        Targets::Tokens(targets) | Targets::Weighted { targets, .. } => (targets.len(), 0),
        Targets::Labels(labels) => (labels.len(), labels.len()),
        Targets::Classes(classes) => {
            (classes.len(), classes.iter().filter(|class| **class != IGNORE).count())
        }
        Targets::Answers(_) | Targets::Ranked(_) => (batch.ids.len(), 0),
        Targets::Numbers(numbers) => (numbers.len(), 0),
    };
    let scored = match &batch.targets {
        Targets::Answers(Answers { aim: Aim::Score, .. }) => batch.rows.len(),
        Targets::Numbers(numbers) => numbers.len(),
        _ => 0,
    };
    if sums.rows.len() != scored || sums.rows.iter().any(|r| !r.is_finite()) {
        return Err(format!("it scored {} answers of {scored}", sums.rows.len()));
    }
    let Rewards { sums: rewards, counts, pairs, right, range } = sums.rewards;
    let rows = batch.rows.len() as u64;
    let ranked = matches!(batch.targets, Targets::Ranked(_));
    let ordered = range.is_none_or(|[least, most]| ranked && least <= most);
    let possible = right <= pairs && ordered && counts.iter().chain([&pairs]).all(|n| *n <= rows);
    if !possible
        || rewards.iter().chain(range.iter().flatten()).any(|reward| to_fixed(*reward, i64::MAX).is_none())
    {
        return Err(format!("it gave rewards that {rows} answers cannot have"));
    }
    // A correct worker reports such a loss as a bad value instead.
    let fits = |value| to_fixed(value, i64::MAX).is_some();
    if !fits(sums.loss) || !fits(sums.weight) || sums.weight < 0.0 {
        return Err(format!("it scored a loss of {} over a weight of {}", sums.loss, sums.weight));
    }
    if sums.targets > most as u64 {
        return Err(format!("it scored {} targets of {most}", sums.targets));
    }
    if sums.predictions.len() != predicted {
        let what = if tokens { "targets" } else { "rows" };
        return Err(format!("it made {} predictions for {predicted} {what}", sums.predictions.len()));
    }
    // Tokens have no such check: an id beyond the vocabulary equals no target, so it only counts as wrong.
    if matches!(batch.targets, Targets::Tokens(_)) {
        return Ok(());
    }
    match sums.predictions.iter().find(|&&p| p as usize >= classes) {
        Some(class) => Err(format!("it predicted class {class} of {classes}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::preference::Ranking;
    use crate::model::stage::Sampling;

    fn work(targets: Targets) -> Work {
        Work::Eval(Microbatch { step: 1, rows: vec![0, 1], ids: vec![1, 2], bounds: vec![0, 1, 2], targets })
    }

    fn check(work: &Work, targets: u64, predictions: &[u32], part: &str) {
        let (loss, weight, predictions) = (1.0, 1.0, predictions.to_vec());
        let sums = LossSums { loss, weight, targets, predictions, ..LossSums::default() };
        let message = ToCoordinator::Score { lease: 1, sums, parameters: [0; 32], micros: 1 };
        match super::check(&message, work, 3) {
            Ok(()) => assert_eq!(part, ""),
            Err(line) => assert!(!part.is_empty() && line.contains(part), "{line}"),
        }
    }

    #[test]
    fn impossible_scores_are_refused() {
        let (text, classes) = (work(Targets::Tokens(vec![1, IGNORE])), work(Targets::Labels(vec![0, 2])));
        check(&text, 1, &[], "");
        check(&text, 3, &[], "3 targets of 2");
        check(&text, 1, &[0], "1 predictions for 0 rows");
        let Work::Eval(batch) = &text else { unreachable!() };
        check(&Work::Predict(batch.clone()), 1, &[9], "");
        check(&Work::Predict(batch.clone()), 1, &[], "0 predictions for 1 targets");
        check(&classes, 2, &[2, 0], "");
        check(&classes, 2, &[2], "1 predictions for 2 rows");
        check(&classes, 2, &[2, u32::MAX], "class 4294967295 of 3");
        let of_numbers = |rows: &[f64], range| {
            let rewards = Rewards { range, ..Rewards::default() };
            LossSums {
                loss: 1.0,
                weight: 2.0,
                targets: 2,
                rows: rows.to_vec(),
                rewards,
                ..LossSums::default()
            }
        };
        let ranked = work(Targets::Ranked(Ranking { margins: vec![0.0], centre: 0.0 }));
        let numbers = work(Targets::Numbers(vec![0.5, 1.0]));
        for (work, sums, part) in [
            (&numbers, of_numbers(&[1.0, 2.0], None), ""),
            (&numbers, of_numbers(&[1.0], None), "1 answers of 2"),
            (&numbers, of_numbers(&[1.0, 2.0], Some([0.0, 1.0])), "rewards"),
            (&ranked, of_numbers(&[], Some([0.0, 1.0])), ""),
            (&ranked, of_numbers(&[], Some([1.0, 0.0])), "rewards"),
            (&text, of_numbers(&[], Some([0.0, 1.0])), "rewards"),
        ] {
            let message = ToCoordinator::Score { lease: 1, sums, parameters: [0; 32], micros: 1 };
            let line = super::check(&message, work, 1).err().unwrap_or_default();
            assert!(line.contains(part) && line.is_empty() == part.is_empty(), "{part:?}: {line}");
        }
        let bad =
            [(f64::NAN, 1.0), (1.0, f64::INFINITY), (1e300, 1.0), (1.0, -1.0), (f64::NEG_INFINITY, 0.0)];
        for (loss, weight) in bad {
            let sums = LossSums { loss, weight, targets: 1, ..LossSums::default() };
            let message = ToCoordinator::Score { lease: 1, sums, parameters: [0; 32], micros: 1 };
            let line = super::check(&message, &text, 3).unwrap_err();
            assert!(line.contains("it scored a loss of"), "{line}");
        }
        let sampling = Sampling { max_new_tokens: 2, temperature: 0.0, top_p: 1.0, seed: 0, stop: vec![] };
        let prompt = Work::Prompt { ids: vec![1], sampling };
        let answer = |n| ToCoordinator::Answer { lease: 1, ids: vec![0; n], parameters: [0; 32] };
        assert!(super::check(&answer(2), &prompt, 0).is_ok());
        assert!(super::check(&answer(3), &prompt, 0).is_err());
    }

    #[test]
    fn text_of_a_worker_stays_on_its_line() {
        let bad = "cpu\x1b[2J\n".to_string() + &"x".repeat(5000);
        let devices = vec![Device { name: bad.clone(), class: bad.clone() }];
        let messages = [
            ToCoordinator::Ready { devices: devices.clone(), refused: vec![bad.clone()] },
            ToCoordinator::Leave { reason: bad.clone() },
            ToCoordinator::Fault { lease: 1, fault: Trouble::Device { reason: bad.clone() } },
            ToCoordinator::Fallback { device: 0, now: devices[0].clone(), reason: bad },
        ];
        for message in messages {
            let shown = format!("{:?}", readable(message));
            // `Debug` doubles a backslash of the text itself: a single one would stand for a raw character.
            let raw = shown.replace("\\\\", "");
            assert!(!raw.contains("\\n") && !raw.contains("\\u{1b}") && shown.len() < 3300, "{shown}");
        }
    }
}
