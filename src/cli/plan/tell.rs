//! Output of a plan as text and as JSON: the same facts, each number with its quality.

use super::Outlook;
use super::lines as line;
use super::memory_words::{gives, kept, small, streamed, sum};
use crate::config::groups::Options;
use crate::forecast::profile::{Basis, Pace};
use crate::forecast::team::Expected;
use crate::forecast::time::{Participant, Sent};
use crate::model::memory::{self, Estimate, size};
use crate::report::duration;
use crate::support::plural::count;
use crate::train::island::{self, Islands, Outer};
use serde_json::{Value, json};

/// Seconds of a step that are worth a line of advice.
const NOTICED: f64 = 0.1;

/// The plan as lines of text.
pub fn lines(o: &Outlook, options: &Options) -> Vec<String> {
    let mut lines: Vec<String> = o.notes.iter().map(|note| note_line(note)).collect();
    lines.extend(work(o));
    for (at, expected) in o.team.iter().enumerate() {
        lines.extend(device(o, at, expected, options));
    }
    lines.extend(o.line.iter().flat_map(|line| line::lines(line, &o.counts, options)));
    match o.team.iter().any(|e| e.worker.is_some()) {
        false if o.line.is_some() => {
            lines.push("time     unknown: workers measure their speed when they join".into());
        }
        true => lines.extend(time(o)),
        false if o.team.iter().any(Expected::fits) => {
            lines.push("time     unknown: the card is not here to be measured".into());
        }
        false => {}
    }
    lines.extend(advice(o).into_iter().map(|line| format!("advice   {line}")));
    lines
}

/// A note as a line that begins with `note:` or `warning:`.
pub fn note_line(note: &str) -> String {
    if note.starts_with("note:") || note.starts_with("warning:") {
        note.into()
    } else {
        format!("note: {note}")
    }
}

fn work(o: &Outlook) -> Vec<String> {
    let (p, c, n) = (&o.prepared, &o.counts, &o.prepared.train.counts);
    let mut rows =
        format!("rows     {} read, {}, {} supervised", n.rows, count(n.tokens, "token"), n.supervised);
    if n.dropped > 0 {
        let first = n.first_dropped.as_ref().map(|f| format!(" (first: {f})")).unwrap_or_default();
        rows += &format!("; {} without anything to train on left out{first}", n.dropped);
    }
    rows += &n.weights();
    rows += &n.lengths();
    let about = if c.exact { "" } else { "about " };
    let (least, most) = c.microbatches_per_step;
    let each = if least == most { most.to_string() } else { format!("{least} to {most}") };
    let mut steps = format!(
        "steps    {} ({} per epoch), {about}{} of up to {} ({each} per step), {about}{} tokens",
        c.steps,
        c.steps_per_epoch,
        count(c.microbatches, "microbatch"),
        count(c.longest as u64, "token"),
        c.tokens
    );
    if c.first > 1 {
        steps += &format!("; {} are done, the rest is counted", c.first - 1);
    }
    let mut lines = vec![
        format!("model    {} ({}, {})", p.base.path.display(), p.config.architecture(), p.base.files.kind),
        rows,
        steps,
        format!("adapter  {}: {} trained values", p.spec.with_modules(), o.shape.trained),
    ];
    if let Some(islands) = o.sent.islands {
        let [worker, coordinator] = memory_of_islands(o).map(size);
        lines.push(format!("islands  {islands}"));
        lines.push(format!(
            "         memory they take: up to {worker} on a worker, {coordinator} on the coordinator"
        ));
    }
    if o.sent.delay > 0 {
        lines.push("delay    step s is computed with the parameters after step s - 2".into());
    }
    let named =
        |(name, rows): &(String, usize)| format!("{} {rows}", if name.is_empty() { "unnamed" } else { name });
    let sets = p.eval_sets.iter().map(named).collect::<Vec<_>>().join(", ");
    let sets = if sets.is_empty() { sets } else { format!(" ({sets})") };
    if let Some(eval) = &p.eval {
        lines.push(format!(
            "eval     {}{sets}, {} tokens, {}",
            count(eval.samples.len() as u64, "row"),
            c.eval_tokens,
            count(c.evals, "time")
        ));
    }
    if c.reference > 0 {
        let tokens = count(c.reference, "token");
        lines.push(format!("reference {tokens} of answers, scored once before the first step"));
    }
    lines
}

/// Most bytes that islands were seen to take, on a worker and on the coordinator.
fn memory_of_islands(o: &Outlook) -> [u64; 2] {
    let [worker, coordinator] = island::MEMORY.map(|bytes| bytes * o.shape.trained);
    let has_velocity = o.sent.islands.is_some_and(|islands| islands.outer.momentum > 0.0);
    [worker, coordinator + if has_velocity { 4 * o.shape.trained } else { 0 }]
}

fn device(o: &Outlook, at: usize, e: &Expected, options: &Options) -> Vec<String> {
    let what = e.prospect.as_ref().map(|p| match &p.class {
        Ok(class) => format!(": {class} on {}", p.hardware),
        Err(why) => format!(": {}: {why}", p.hardware),
    });
    let mut lines = vec![format!("device   {}{}", e.name, what.unwrap_or_default())];
    if let Some((keep, takes)) = e.prospect.as_ref().and_then(|p| p.takes) {
        let limit = e.prospect.as_ref().and_then(|p| p.limit);
        let of = gives(limit, options);
        let fits = if e.fits() { "fits" } else { "DOES NOT FIT" };
        lines.push(format!("  memory {fits}: {} = {}; {of}", size(takes.total()), sum(&takes)));
        lines.push(format!("         {}", how_good(&takes)));
        let layers = o.prepared.config.layers;
        lines.push(format!("         {}", kept(keep, layers)));
        lines.extend(streamed(&takes, layers));
    }
    for (at, place) in e.prospect.iter().flat_map(|p| &p.places).enumerate() {
        let (takes, of) = (&place.takes, gives(place.limit, options));
        lines.push(format!("  {}", place.said(at, o.prepared.config.layers)));
        lines.push(format!("         memory fits: {} = {}; {of}", size(takes.total()), sum(takes)));
        lines.push(format!("         {}", kept(place.keep, place.layers.len())));
        lines.extend(streamed(takes, place.layers.len()));
    }
    if let Some(why) = e.prospect.as_ref().and_then(|p| p.unfit.as_ref()) {
        lines.push(format!("         {why}"));
    }
    if let Some(worker) = &e.worker {
        let share = o.place(at).map_or(0.0, |place| 100.0 * o.forecast.shares[place]);
        let idle = o.place(at).map_or(0.0, |place| 100.0 * o.forecast.idle[place]);
        lines.push(format!(
            "  speed  {} in microbatches of {} tokens, {}",
            rate(&worker.pace, o.mean_size()),
            o.mean_size().round(),
            basis(&worker.pace)
        ));
        lines.push(format!("  share  {share:.0} % of the tokens, {idle:.0} % idle"));
        if let (Some(link), Some(said)) = (worker.link, e.link) {
            lines.push(format!(
                "  sync   {:.2} s {} at {:.0} MB/s and {:.1} ms there and back, {said}",
                worker.sync(o.shape.trained, o.sent),
                if o.sent.steps() > 1 { "an exchange" } else { "a step" },
                link.bandwidth / 1e6,
                1e3 * link.round_trip
            ));
            lines.extend(less_sync(worker, o));
        }
    }
    lines
}

/// What options would save, where a step waits for the network.
fn less_sync(worker: &Participant, o: &Outlook) -> Vec<String> {
    let (now, values) = (worker.sync(o.shape.trained, o.sent), o.shape.trained);
    let rounded = worker.sync(values, Sent { sum: 8, update: 8, ..Sent::default() });
    if (Sent { relays: false, ..o.sent }) != Sent::default() || now - rounded <= NOTICED {
        return Vec::new();
    }
    let mut lines = vec![format!(
        "         {rounded:.2} s with --sum-bits 8 --update-bits 8, which round gradients and changes of the adapter"
    )];
    if o.line.is_none() {
        lines.push("         or --delay 1, which computes the next step meanwhile".into());
    }
    // An island for each device.
    let islands = Islands { count: o.forecast.shares.len(), inner: 16, outer: Outer::MEAN };
    if o.line.is_none() && o.counts.microbatches_per_step.0 >= islands.count {
        let apart = worker.sync(values, Sent { islands: Some(islands), ..Sent::default() }) / 16.0;
        let count = islands.count;
        lines.push(format!(
            "         {apart:.2} s with --islands {count} --inner-steps 16, which average adapters every 16 steps"
        ));
    }
    lines
}

/// Quality of the estimate.
fn how_good(e: &Estimate) -> String {
    match e.basis {
        memory::Basis::Measured(line) => format!(
            "measured: {} + {} per token in use at once beside the weights, and 25 % allocator slack",
            size(line.fixed as u64),
            small(line.each)
        ),
        memory::Basis::Counted => "estimated from the shapes of the model: the first run measures it".into(),
    }
}

fn rate(pace: &Pace, tokens: f64) -> String {
    format!("{} tokens/s", figures(tokens / pace.train.at(tokens)))
}

/// Three significant digits: speeds are not more accurate.
fn figures(v: f64) -> String {
    let digits = v.abs().max(1e-9).log10().floor() as i32;
    match digits {
        ..2 => format!("{v:.*}", (2 - digits).clamp(0, 3) as usize),
        _ => {
            let unit = 10f64.powi(digits - 2);
            format!("{:.0}", (v / unit).round() * unit)
        }
    }
}

fn basis(pace: &Pace) -> String {
    let line = format!("{:.1} ms + {:.3} ms per token", 1e3 * pace.train.fixed, 1e3 * pace.train.each);
    match &pace.basis {
        Basis::Measured => format!("measured ({line})"),
        Basis::Scaled { from } => format!("scaled by FLOPs from what was measured on {from} ({line})"),
        Basis::Guess => "a guess: not measured yet (`finetune bench` does)".into(),
    }
}

fn time(o: &Outlook) -> Vec<String> {
    let f = &o.forecast;
    let about = if o.guessed() { "about " } else { "" };
    let mut parts = vec![format!("{} of steps", duration(f.steps))];
    if f.looks > 0.0 {
        parts.push(format!("{} of evaluations and answers", duration(f.looks)));
    }
    if f.reference > 0.0 {
        parts.push(format!("{} of the reference", duration(f.reference)));
    }
    if f.saves > 0.0 {
        let n = o.counts.saves;
        parts.push(format!("{} of {n} checkpoint{}", duration(f.saves), if n == 1 { "" } else { "s" }));
    }
    let mut lines = Vec::new();
    if f.sync > 0.0 {
        let part = 100.0 * f.sync / f.steps.max(1e-12);
        lines.push(format!(
            "sync     {} in all, {part:.0} % of the steps{}",
            duration(f.sync),
            if o.sent.delay == 0 { ", if none of it hides behind computing" } else { "" }
        ));
    }
    lines.push(format!(
        "time     {about}{} at {} tokens/s: {}",
        duration(f.total()),
        figures(f.tokens_per_second),
        parts.join(", ")
    ));
    lines
}

/// Advice for a user who can still change the command.
pub fn advice(o: &Outlook) -> Vec<String> {
    let mut advice = Vec::new();
    for (at, gain) in &o.useless {
        let name = &o.team[*at].name;
        advice.push(match gain {
            g if *g >= 1.0 => format!("leave out {name}: the run takes {} less without it", duration(*g)),
            _ => format!("leave out {name}: the run takes no longer without it"),
        });
    }
    let unfit = o.team.iter().filter(|e| !e.fits());
    if o.team.iter().any(Expected::fits) {
        advice.extend(unfit.map(|e| format!("leave out {}: it cannot take part", e.name)));
    }
    let devices = o.team.iter().filter(|e| e.worker.is_some()).count();
    let (least, _) = o.counts.microbatches_per_step;
    if devices > 1 && least < 2 * devices {
        let plural = if least == 1 { "" } else { "es" };
        let wait = match devices.saturating_sub(least) {
            0 => "some may wait at its end".to_string(),
            1 => "1 waits".to_string(),
            more => format!("{more} wait"),
        };
        let why = "raise --batch-size or lower --micro-batch-tokens";
        advice.push(format!(
            "each step has {least} microbatch{plural} for {devices} devices, so {wait}: {why}"
        ));
    }
    advice
}

/// The plan as JSON.
pub fn json(o: &Outlook, options: &Options) -> Value {
    let (p, c, n, f) = (&o.prepared, &o.counts, &o.prepared.train.counts, &o.forecast);
    let devices = o.team.iter().enumerate().map(|(at, e)| device_json(o, at, e));
    json!({
        "model": {
            "path": p.base.path, "architecture": p.config.architecture(), "weights": p.base.files.kind,
            "shape": o.shape.key, "flops_per_token": o.shape.flops,
        },
        "rows": {
            "read": n.rows, "dropped": n.dropped, "weighted": n.weighted, "truncated": n.truncated, "split": n.split.0,
            "too_long": n.too_long, "tokens": n.tokens,
            "supervised": n.supervised, "trained_on": p.train.samples.len(),
        },
        "eval": { "rows": p.eval.as_ref().map_or(0, |e| e.samples.len()), "tokens": c.eval_tokens, "times": c.evals },
        "reference": { "tokens": c.reference },
        "delay": o.sent.delay,
        "islands": o.sent.islands.map(|islands| {
            let [worker, coordinator] = memory_of_islands(o);
            json!({
                "count": islands.count, "inner_steps": islands.inner,
                "outer_learning_rate": islands.outer.rate, "outer_momentum": islands.outer.momentum,
                "bytes_on_worker": worker, "bytes_on_coordinator": coordinator,
            })
        }),
        "adapter": {
            "rank": p.spec.rank, "target_modules": p.spec.targets, "exceptions": p.spec.exceptions,
            "trained_values": o.shape.trained,
        },
        "steps": {
            "total": c.steps, "first": c.first, "per_epoch": c.steps_per_epoch, "microbatches": c.microbatches,
            "fewest_microbatches": c.microbatches_per_step.0, "most_microbatches": c.microbatches_per_step.1,
            "tokens": c.tokens, "rows": c.rows, "exact": c.exact, "longest_microbatch": c.longest,
            "batch_size": options.optim.batch_size, "checkpoints": c.saves,
        },
        "devices": devices.collect::<Vec<_>>(),
        "line": o.line.as_ref().map(|line| line::json(line, c)),
        "forecast": {
            "tokens_per_second": f.tokens_per_second, "seconds": f.total(), "steps_seconds": f.steps,
            "sync_seconds": f.sync, "look_seconds": f.looks, "reference_seconds": f.reference, "checkpoint_seconds": f.saves, "guessed": o.guessed(),
        },
        "advice": advice(o), "notes": o.notes,
    })
}

fn device_json(o: &Outlook, at: usize, e: &Expected) -> Value {
    let (p, w, place) = (e.prospect.as_ref(), e.worker.as_ref(), o.place(at));
    let memory = p.and_then(|p| p.takes).map(|(keep, t)| {
        json!({
            "total": t.total(), "weights": t.weights, "adapter": t.adapter, "activations": t.kept,
            "workspace": t.scratch, "streamed_layers": t.streamed, "group": t.group,
            "keeps": kept(keep, o.prepared.config.layers),
            "limit": p.and_then(|p| p.limit), "in_use": t.in_use,
            "basis": t.basis.word(),
            "measured_fixed": t.basis.line().map(|line| line.fixed),
            "measured_per_token": t.basis.line().map(|line| line.each),
        })
    });
    let places = p.into_iter().flat_map(|p| &p.places).map(|place| {
        let t = &place.takes;
        json!({
            "name": place.name, "first_layer": place.layers.start, "layers": place.layers.len(),
            "streamed_layers": t.streamed,
            "memory_bytes": {
                "total": t.total(), "weights": t.weights, "adapter": t.adapter, "activations": t.kept,
                "workspace": t.scratch, "limit": place.limit, "keeps": kept(place.keep, place.layers.len()),
            },
        })
    });
    let (said, from) = match w.map(|w| &w.pace.basis) {
        None => (None, None),
        Some(Basis::Measured) => (Some("measured"), None),
        Some(Basis::Scaled { from }) => (Some("scaled by FLOPs"), Some(from)),
        Some(Basis::Guess) => (Some("guess"), None),
    };
    json!({
        "name": e.name, "class": p.and_then(|p| p.class.as_ref().ok()), "hardware": p.map(|p| &p.hardware),
        "fits": e.fits(), "why_not": p.and_then(|p| p.unfit.as_ref()).map(ToString::to_string),
        "memory_bytes": memory, "seats": places.collect::<Vec<_>>(), "basis": said, "scaled_from": from,
        "seconds_per_microbatch": w.map(|w| w.pace.train.fixed), "seconds_per_token": w.map(|w| w.pace.train.each),
        "tokens_per_second": w.map(|w| o.mean_size() / w.pace.train.at(o.mean_size())),
        "share": place.map(|at| o.forecast.shares[at]), "idle": place.map(|at| o.forecast.idle[at]),
        "link": w.and_then(|w| w.link).map(|link| json!({
            "bytes_per_second": link.bandwidth, "round_trip_seconds": link.round_trip, "basis": e.link,
            "sync_seconds_per_step": w.map(|w| w.sync(o.shape.trained, o.sent) / o.sent.steps() as f64),
        })),
        "leave_out": o.useless.iter().any(|(useless, _)| *useless == at),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::decoder::Keep;

    #[test]
    fn checkpointing_is_printed_in_blocks() {
        for (keep, expected) in [
            (Keep::Parts([0, 3, 29]), "3 blocks partly, 29 almost fully"),
            (Keep::Parts([0, 0, 1]), "1 block almost fully, 31 fully"),
            (Keep::Parts([1, 31, 0]), "1 block not, 31 partly"),
            (Keep::Inputs, "32 blocks fully"),
        ] {
            let line = format!("activation checkpointing: {expected} (recomputed in backward)");
            assert_eq!(kept(keep, 32), line);
        }
    }

    #[test]
    fn numbers_have_three_figures() {
        let cases =
            [(1234.0, "1230"), (56.78, "56.8"), (0.01234, "0.012"), (7.0, "7.00"), (98_765.0, "98800")];
        for (v, expected) in cases {
            assert_eq!(figures(v), expected, "{v}");
        }
    }
}
