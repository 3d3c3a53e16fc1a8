//! One event as text, one line per fact. Text of a model, a prompt or an unknown peer is kept on one line.

use crate::support::plural::count;
use crate::support::stderr::inline;
use crate::train::best::{Best, Metric};
use crate::train::event::{
    Change, Done, Early, Eval, LineFormed, Rewards, RunStart, Seat, Speed, What, mixed,
};

/// Largest number of classes whose confusion matrix fits a terminal; the report shows larger ones.
pub const SHOWN_CLASSES: usize = 12;

/// The lines of a run's start.
pub fn run_lines(run: &RunStart) -> Vec<String> {
    let mut lines: Vec<String> = run.notes.iter().map(|note| inline(note)).collect();
    if (1..=SHOWN_CLASSES).contains(&run.labels.len()) {
        lines.push(inline(&format!("classes  {}", run.labels.join(", "))));
    }
    let evaluated =
        if run.eval_rows > 0 { format!(", {} for evaluation", run.eval_rows) } else { String::new() };
    let class = run.classes.last().map(|class| format!("; {class}")).unwrap_or_default();
    lines.push(format!(
        "{}{evaluated}; {}, {} per epoch; {} trained values{class}",
        count(run.rows, "row"),
        count(run.total_steps, "step"),
        run.steps_per_epoch,
        run.parameters,
    ));
    if run.first_step > 1 {
        lines.push(format!("resumed after step {}", run.first_step - 1));
    }
    // A note may already contain this line.
    let mixed =
        Some(inline(&mixed(&run.classes))).filter(|line| run.classes.len() > 1 && !lines.contains(line));
    lines.extend(mixed);
    lines
}

/// A line such as `eval after step 2: loss 1.5000  perplexity 2.000`.
pub fn eval_line(eval: &Eval) -> String {
    let first = eval.sets.first().map(|set| format!("{} ", set_name(&set.name))).unwrap_or_default();
    let mut line = format!("eval after step {}: {first}loss {:.4}", eval.step, eval.eval_loss);
    if let Some(perplexity) = eval.perplexity {
        line += &format!("  perplexity {perplexity:.3}");
    }
    line += &eval.token_accuracy.map(|share| format!("  token accuracy {share:.4}")).unwrap_or_default();
    if let (Some(accuracy), Some(f1)) = (eval.accuracy, eval.macro_f1) {
        line += &format!("  accuracy {accuracy:.4}  macro F1 {f1:.4}");
    }
    line += &eval.f1.map(|f1| format!("  entity F1 {f1:.4}")).unwrap_or_default();
    if let (Some(pearson), Some(spearman)) = (eval.pearson, eval.spearman) {
        line += &format!("  pearson {pearson:.4}  spearman {spearman:.4}");
    }
    line += &reward_words(&eval.rewards, eval.accuracy);
    for set in eval.sets.iter().skip(1) {
        line += &format!("; {} loss {:.4}", set_name(&set.name), set.eval_loss);
        line += &set.token_accuracy.map(|share| format!("  token accuracy {share:.4}")).unwrap_or_default();
        line += &set.accuracy.map(|accuracy| format!("  accuracy {accuracy:.4}")).unwrap_or_default();
        line += &set.f1.map(|f1| format!("  entity F1 {f1:.4}")).unwrap_or_default();
    }
    line
}

/// The name of a set of rows in output.
pub fn set_name(name: &str) -> &str {
    if name.is_empty() { "unnamed" } else { name }
}

/// A text such as `  margin 0.1500 (chosen 0.1000, rejected -0.0500)  accuracy 0.75`; empty without rewards.
pub fn reward_words(rewards: &Rewards, accuracy: Option<f64>) -> String {
    let Rewards { rewards_chosen, rewards_rejected, margin, min_reward, max_reward } = *rewards;
    let number = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.4}"));
    if rewards_chosen.or(rewards_rejected).is_none() {
        return String::new();
    }
    let [margin, chosen, rejected] = [margin, rewards_chosen, rewards_rejected].map(number);
    let accuracy = accuracy.map(|share| format!("  accuracy {share:.2}")).unwrap_or_default();
    let range = min_reward.zip(max_reward);
    let range = range.map(|(least, most)| format!(", from {least:.4} to {most:.4}")).unwrap_or_default();
    format!("  margin {margin} (chosen {chosen}, rejected {rejected}{range}){accuracy}")
}

/// A text such as `best eval 0.0240 at step 16`.
pub fn best_words(best: &Best) -> String {
    let name = match best.metric {
        Metric::Loss => String::new(),
        other => format!("{} ", other.name()),
    };
    format!("best eval {name}{:.4} at step {}", best.value, best.step)
}

/// The line about the best evaluation in a run's summary.
pub fn best_line(best: &Best, done: &Done) -> String {
    let adapter = match (best.kept, done.complete) {
        (true, true) => format!("the adapter is that of step {}", best.step),
        (true, false) => format!("checkpoint-{} holds its adapter", best.step),
        (false, _) => "its adapter is not kept (--keep-best)".into(),
    };
    format!("best     {}: {adapter}", best_words(best).trim_start_matches("best "))
}

/// `ended early after step 12: 3 evals in a row were no better than that of step 6 (loss 0.0240): the run is complete`
pub fn early_line(early: &Early, best: &Best) -> String {
    let evals = match early.evals {
        1 => "1 eval was".to_string(),
        n => format!("{n} evals in a row were"),
    };
    let (name, value) = (best.metric.name(), best.value);
    format!(
        "ended early after step {}: {evals} no better than that of step {} ({name} {value:.4}): the run is complete",
        early.step, best.step
    )
}

/// `measured here, cpu 0: 3.1 ms + 1.170 ms per token; 40.1 MB + 690.2 kB per token; 118 MB/s, round trip 0.4 ms`
pub fn speed_line(speed: &Speed) -> String {
    let who = [speed.worker.as_str(), &speed.device].into_iter().filter(|s| !s.is_empty());
    let who = who.collect::<Vec<_>>().join(", ");
    let (fixed, each) = (1e3 * speed.line.fixed, 1e3 * speed.line.each);
    let mut line = format!("measured {who}: {fixed:.1} ms + {each:.3} ms per token");
    if let Some(fit) = speed.memory.and_then(|memory| memory.fit()) {
        let (fixed, each) = (fit.line.fixed / 1e6, fit.line.each / 1e3);
        line += &format!("; {fixed:.1} MB + {each:.1} kB per token");
    }
    if let Some(link) = speed.link {
        let (megabytes, back) = (link.bandwidth / 1e6, 1e3 * link.round_trip);
        line += &format!("; {megabytes:.0} MB/s, round trip {back:.1} ms");
    }
    inline(&line)
}

/// The source of a forecast, as text.
pub fn basis(basis: &str) -> &str {
    if basis == "measured" { "from a measurement" } else { basis }
}

/// A line such as `joined   a (host 1): cpu 0 (cpu-avx512-f32)`.
pub fn change_line(change: &Change) -> String {
    let what = match change.what {
        What::Joined => "joined",
        What::Left => "left",
        What::Lost => "lost",
        What::Refused => "refused",
        What::Expelled => "expelled",
        What::Fallback => "fallback",
        What::Failed => "failed",
        What::Waiting => return inline(&change.reason),
        What::Paused => "paused",
        What::Resumed => "running",
        What::Note => "note",
    };
    // The reason of a line about an unknown peer already begins with its address.
    let worker = if change.reason.starts_with(&change.worker) { "" } else { change.worker.as_str() };
    let parts = [worker, &change.devices.join(", "), &change.reason];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    inline(&format!("{what:<8} {}", parts.join(": ")))
}

/// A time: `0:07`, `12:30`, `3:05:00`.
pub fn duration(seconds: f64) -> String {
    clock(seconds, 0)
}

/// A time with `digits` decimals of a second: `0:07.5`.
pub fn clock(seconds: f64, digits: usize) -> String {
    let power = 10u64.pow(digits as u32);
    let parts = (seconds * power as f64).round() as u64;
    let (s, rest) = (parts / power, parts % power);
    let tail = if digits == 0 { String::new() } else { format!(".{rest:0digits$}") };
    match s / 3600 {
        0 => format!("{}:{:02}{tail}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}{tail}", s / 60 % 60, s % 60),
    }
}

/// The workers that hold the model together, with their layers and memory, in one line.
pub fn line_formed(formed: &LineFormed) -> String {
    let seat = |seat: &Seat| format!("{} {}, {}", inline(&seat.worker), seat.range(), memory_of(seat));
    format!("line     {}", formed.seats.iter().map(seat).collect::<Vec<_>>().join("; "))
}

/// `6 MB of 24.5 GB`: what a seat needs, of what it may use; and the number of its layers that it streams, if any.
pub fn memory_of(seat: &Seat) -> String {
    let limit = seat.limit.map_or_else(String::new, |limit| format!(" of {}", size(limit)));
    let streamed = if seat.streamed > 0 { format!(", {} streamed", seat.streamed) } else { String::new() };
    format!("{}{limit}{streamed}", size(seat.memory))
}

/// A number of bytes: `512 MB`, `1.2 GB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        b if b < 1_000_000_000 => format!("{} MB", b / 1_000_000),
        b => format!("{:.1} GB", b as f64 / 1e9),
    }
}
