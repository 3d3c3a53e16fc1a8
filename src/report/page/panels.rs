//! The panels of the page: head, tiles, curves, devices.

use crate::report::draw::{Block, Chart, Curve, Lane, Lanes, Node, Style, Svg, Topology, compact, escape};
use crate::report::history::{History, LANE_STEPS, Point, RunState};
use crate::report::words::{best_words, duration, memory_of, set_name, size};
use crate::train::event::{Eval, HERE, LineFormed, Rewards, Seat};

/// Each picture is drawn for a wide and for a narrow window; the style sheet shows one of them.
const WIDE: f64 = 720.0;
const HALF: f64 = 480.0;
const THIRD: f64 = 330.0;
const NARROW: f64 = 340.0;

pub fn head(history: &History) -> String {
    let state = history.state();
    let name = history.note("model").map_or("waiting for the run", super::model_name);
    let output = history.note("output").unwrap_or_default();
    let reason =
        history.halt.as_ref().map(|halt| format!(r#"<p class="fault">{}</p>"#, escape(&halt.reason)));
    let early = history.progress.early.as_ref().map(|line| format!("<p>{}</p>", escape(line)));
    format!(
        r#"<header><h1>{}</h1><span class="state {word}">{word}</span><p>{}</p></header>{}"#,
        escape(name),
        escape(output),
        reason.or(early).unwrap_or_default(),
        word = state.word(),
    )
}

pub fn tiles(history: &History) -> String {
    let p = &history.progress;
    let share = 100.0 * p.step as f64 / p.total_steps.max(1) as f64;
    let first = |pair: Option<f64>, text: &str| pair.map(|v| format!("{text} {v:.4}")).unwrap_or_default();
    let eval = p.eval.as_ref();
    let left = match history.state() {
        RunState::Running | RunState::Paused => p.remaining().map(|s| ("time left", duration(s), "of ")),
        _ => None,
    };
    let elapsed = history.done.as_ref().map_or(p.seconds, |d| d.seconds);
    let (what, time, of) = left.unwrap_or_else(|| ("time", duration(elapsed), ""));
    let expected = p.forecast.as_ref().map(|f| format!("{of}{} expected", duration(f.seconds)));
    let steps = format!(r#"<i class="bar"><b style="width:{share:.1}%"></b></i>"#);
    let mut tiles = vec![
        tile("step", &format!("{} <small>of {}</small>", p.step, p.total_steps), &steps),
        tile("loss", &number(p.smooth_loss()), &first(p.loss.map(|l| l.0), "from")),
        tile(
            "tokens/s",
            &p.speed().map_or("–".into(), |v| format!("{v:.0}")),
            &match &p.forecast {
                Some(f) => format!("{:.0} expected", f.tokens_per_second),
                None => format!("{} tokens", compact(p.tokens as f64)),
            },
        ),
        tile(what, &time, &expected.unwrap_or_default()),
    ];
    if let Some((before, after)) = eval {
        let best = p.best.as_ref().map(best_words);
        let below = best.unwrap_or_else(|| first(Some(before.eval_loss), "from"));
        tiles.insert(2, tile("eval loss", &number(Some(after.eval_loss)), &below));
        if let (Some(a), Some(b)) = (before.accuracy, after.accuracy) {
            let (value, from) = (format!("{:.1} %", 100.0 * b), format!("from {:.1} %", 100.0 * a));
            tiles.insert(3, tile("accuracy", &value, &from));
        }
        if let (Some(a), Some(b)) = (before.macro_f1, after.macro_f1) {
            tiles.insert(4, tile("macro F1", &format!("{b:.3}"), &format!("from {a:.3}")));
        }
        if let (Some(a), Some(b)) = (before.f1, after.f1) {
            tiles.insert(5, tile("entity F1", &format!("{b:.3}"), &format!("from {a:.3}")));
        }
    }
    format!(r#"<div class="tiles">{}</div>"#, tiles.concat())
}

fn tile(name: &str, value: &str, below: &str) -> String {
    format!(r#"<div class="tile"><span>{name}</span><strong>{value}</strong><em>{below}</em></div>"#)
}

fn number(value: Option<f64>) -> String {
    value.map_or("–".into(), |v| format!("{v:.4}"))
}

/// The charts of a run, by file name.
pub fn charts(history: &History) -> Vec<(&'static str, Chart)> {
    let last = history.progress.total_steps as f64;
    let of = |value: fn(&Point) -> f64| -> Vec<(f64, f64)> {
        history.steps.iter().map(|p| (p.step as f64, value(p))).collect()
    };
    let curve = |name: &str, colour, style, points| Curve { name: name.into(), colour, style, points };
    let one = |title: &str, colour, from_zero, value| Chart {
        title: title.into(),
        curves: vec![curve("", colour, Style::Line, of(value))],
        last,
        from_zero,
    };
    let mut loss = vec![
        curve("", 0, Style::Faint, of(|p| p.loss)),
        curve("training, smoothed", 0, Style::Line, of(|p| p.smooth)),
    ];
    if !history.evals.is_empty() {
        let points = history.evals.iter().map(|e| (e.step as f64, e.eval_loss)).collect();
        loss.push(curve("evaluation", 1, Style::Dots, points));
        let names = history.evals.last().map_or(&[][..], |eval| &eval.sets);
        for (at, set) in names.iter().enumerate().skip(1).take(6) {
            let of = |e: &Eval| Some((e.step as f64, e.sets.get(at)?.eval_loss));
            loss.push(curve(
                set_name(&set.name),
                at + 1,
                Style::Dots,
                history.evals.iter().filter_map(of).collect(),
            ));
        }
    }
    let loss = Chart { title: "loss".into(), curves: loss, last, from_zero: false };
    let compares = history.steps.iter().any(|p| p.rewards != Rewards::default());
    let rewards = compares.then(|| {
        let curves = vec![
            curve("chosen", 2, Style::Line, of(|p| p.rewards.rewards_chosen.unwrap_or(f64::NAN))),
            curve("rejected", 4, Style::Line, of(|p| p.rewards.rewards_rejected.unwrap_or(f64::NAN))),
            curve("margin", 0, Style::Line, of(|p| p.rewards.margin.unwrap_or(f64::NAN))),
        ];
        ("rewards", Chart { title: "rewards".into(), curves, last, from_zero: true })
    });
    let mut charts = vec![
        ("loss", loss),
        ("speed", one("tokens per second", 2, true, |p| p.tokens_per_second)),
        ("learning-rate", one("learning rate", 3, true, |p| p.lr)),
        ("grad-norm", one("gradient norm, before clipping", 4, true, |p| p.grad_norm)),
    ];
    charts.extend(rewards);
    charts
}

pub fn curves(history: &History) -> String {
    let panel = |(i, (_, chart)): (usize, (&str, Chart))| {
        let (class, width, height) =
            if i == 0 { ("panel full", WIDE * 1.4, 280.0) } else { ("panel", THIRD, 180.0) };
        format!(
            r#"<div class="{class}">{}</div>"#,
            both(chart.draw(width, height), chart.draw(NARROW, 200.0))
        )
    };
    format!(
        r#"<div class="panels thirds">{}</div>"#,
        charts(history).into_iter().enumerate().map(panel).collect::<String>()
    )
}

/// The narrow picture is for phones, which have no pointer: it has no tooltips.
pub fn both(wide: Svg, narrow: Svg) -> String {
    let narrow = narrow.without_tips();
    format!(r#"<div class="wide">{}</div><div class="narrow">{}</div>"#, wide.inline(), narrow.inline())
}

/// Device activity in the last steps, with a block for each microbatch. If single microbatches were not recorded, a
/// step is one block with the compute time of the device.
pub fn lanes(history: &History) -> Lanes {
    let steps = &history.steps[history.steps.len().saturating_sub(LANE_STEPS)..];
    let name =
        |(worker, device): &(String, String)| match worker.is_empty() || history.is_seat(worker, device) {
            true => device.clone(),
            false => format!("{worker}, {device}"),
        };
    let mut lanes: Vec<Lane> = history
        .devices
        .iter()
        .map(|d| Lane { name: name(d), blocks: vec![], there: history.presence(&d.0) })
        .collect();
    for point in steps {
        for (place, part) in &point.parts {
            let busy = part.busy.min(point.seconds);
            let tip = format!(
                "step {}: {} microbatches, {} tokens, {:.2} s of {:.2} s",
                point.step, part.microbatches, part.tokens, busy, point.seconds
            );
            let lane = &mut lanes[*place];
            let worker = &history.devices[*place].0;
            let linked = !worker.is_empty() && worker != HERE;
            let mut to = point.began;
            // Parameters arrive before the first microbatch begins.
            let first = part.spans.first().map_or(0.0, |span| span.0);
            let passed = point.began + point.parameters.min(first).min(point.seconds);
            if linked && passed > to {
                let tip = format!("step {}: parameters in transit for {:.3} s", point.step, point.parameters);
                lane.blocks.push(Block { from: to, to: passed, kind: "transfer", tip });
                to = passed;
            }
            let whole = [(0.0, busy)];
            for (from, until) in if part.spans.is_empty() { &whole[..] } else { &part.spans } {
                // The compute time that a device reports and the arrival time of its answer can overlap slightly.
                let from = (point.began + from).max(to);
                let end = (point.began + until).min(point.began + point.seconds);
                if end > from {
                    lane.blocks.push(Block { from, to: end, kind: "compute", tip: tip.clone() });
                    to = end;
                }
            }
            // Transfers of sums that no computation hides end the step, for all devices behind a link that are still
            // present.
            let end = point.began + point.seconds;
            let from = (end - point.sync).max(to);
            let linked = linked && lane.there.1.is_none_or(|gone| gone >= end);
            if linked && end > from && point.sync > 0.0 {
                let tip = format!("step {}: sums in transit for {:.3} s", point.step, point.sync);
                lane.blocks.push(Block { from, to: end, kind: "transfer", tip });
            }
        }
    }
    let marks = steps.iter().map(|p| p.began + p.seconds).collect();
    Lanes { title: "device activity, last steps".into(), lanes, marks }
}

/// The network of a run's workers.
pub fn topology(history: &History) -> Topology {
    let (bytes_in, bytes_out) = history.progress.team.bytes();
    let centre = ("coordinator".into(), format!("{} in, {} out", size(bytes_in), size(bytes_out)));
    let tokens = |worker: &str| -> u64 {
        history.progress.team.devices().filter(|(w, ..)| *w == worker).map(|(_, _, work)| work.tokens).sum()
    };
    let all = history.progress.team.devices().map(|(_, _, work)| work.tokens).sum::<u64>().max(1);
    let nodes = history.members().into_iter().map(|(name, member)| Node {
        name: name.into(),
        detail: if member.gone { member.reason.into() } else { member.devices.join(", ") },
        link: (format!("{:.0} %", 100.0 * tokens(name) as f64 / all as f64), bandwidth(history, name)),
        here: !member.gone,
        seats: seats(history, name, tokens(name)),
    });
    Topology { centre, nodes: nodes.collect() }
}

/// The workers behind a name that hold the model together: name, a line about it, and a text for the link to the next.
fn seats(history: &History, name: &str, tokens: u64) -> Vec<(String, String, String)> {
    let Some(LineFormed { seats, token_bytes, .. }) = history.lines.get(name) else { return Vec::new() };
    let step = token_bytes * tokens / history.steps.len().max(1) as u64;
    let seat = |seat: &Seat| {
        let detail = format!("{}, {}: {}", seat.device, seat.range(), memory_of(seat));
        (seat.worker.clone(), detail, format!("{} each way a step", size(step)))
    };
    seats.iter().map(seat).collect()
}

/// The measured bandwidth of the link to a worker.
fn bandwidth(history: &History, worker: &str) -> String {
    let links = history.progress.speeds.iter().filter(|((w, _), _)| w == worker).find_map(|(_, s)| s.link);
    links.map_or(String::new(), |link| format!("{:.0} MB/s", link.bandwidth / 1e6))
}

/// The fitted time of a microbatch on a device: fixed milliseconds, and milliseconds per token.
fn fit(history: &History, worker: &str, device: &str) -> String {
    let speed = history.progress.speeds.get(&(worker.to_string(), device.to_string()));
    let fitted = speed.map(|s| format!("{:.1} + {:.3}", 1e3 * s.line.fixed, 1e3 * s.line.each));
    fitted.unwrap_or_else(|| "–".into())
}

/// Expected and peak memory of the devices.
fn memory(history: &History) -> String {
    let lines = history
        .progress
        .memory_compared()
        .into_iter()
        .map(|line| format!(r#"<p class="quiet">{}</p>"#, escape(&line)));
    lines.collect()
}

pub fn devices(history: &History) -> String {
    if history.devices.is_empty() {
        return String::new();
    }
    let memory = memory(history);
    let drawn = lanes(history);
    let lanes = both(drawn.draw(WIDE * 1.4), drawn.draw(NARROW));
    // A single device has no links, and the lane above already shows its work.
    if history.is_alone() {
        return format!(r#"<div class="panels"><div class="panel full">{lanes}{memory}</div></div>"#);
    }
    let topology = topology(history);
    let row = |(worker, device, work): (&str, &str, &crate::report::team::DeviceWork)| {
        format!(
            r#"<tr><td>{}</td><td>{}</td><td class="less">{}</td><td>{}</td><td>{:.0}</td><td class="less">{}</td><td>{:.0} %</td></tr>"#,
            escape(worker),
            escape(device),
            work.microbatches,
            compact(work.tokens as f64),
            work.tokens as f64 / work.busy.max(1e-9),
            fit(history, worker, device),
            work.idle()
        )
    };
    let rows: String = history.progress.team.devices().map(row).collect();
    format!(
        r#"<div class="panels"><div class="panel full">{lanes}{memory}</div><div class="panel">{}</div><div class="panel"><h2>devices</h2><table class="devices"><tr><th>worker</th><th>device</th><th class="less">microbatches</th><th>tokens</th><th>tokens/s</th><th class="less" title="time of a microbatch: fixed, and for each token">ms + ms/token</th><th>idle</th></tr>{rows}</table></div></div>"#,
        both(topology.draw(HALF), topology.draw(NARROW)),
    )
}
