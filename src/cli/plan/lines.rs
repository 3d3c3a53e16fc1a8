//! Lines of workers in a plan (`--stages`): what each seat holds, and what goes over each link. Nothing is known about
//! workers that have not joined, so each is assumed to have the same device.

use super::memory_words::{gives, kept, small, streamed, sum};
use crate::cluster::coordinator::{Division, Formed, LinePlan, Place, Waits};
use crate::cluster::message::Capacity;
use crate::config::Settings;
use crate::config::groups::Options;
use crate::config::refusal::Refusal;
use crate::devices::{self, Holder, Speed};
use crate::forecast::counts::Counts;
use crate::forecast::link;
use crate::forecast::profile::Link;
use crate::model::decoder::Keep;
use crate::model::memory::{Estimate, size};
use crate::model::split::{Pace, Question, Way};
use crate::run::prepare::Prepared;
use crate::run::stages;
use crate::support::plural::count;
use serde_json::{Value, json};
use std::ops::Range;

/// A line of workers.
pub struct Line {
    /// The device that each worker is assumed to have.
    device: String,
    limit: Option<u64>,
    seats: Vec<Held>,
    layers: usize,
    /// Bytes that go over each link in each direction, for a token.
    token: u64,
    link: Link,
    /// Seconds in which the longest microbatch goes over a link in one direction.
    travels: f64,
    /// Seconds of a step, and of the same step if links took no time; `None` if the speed of the device is unknown.
    step: Option<(f64, f64)>,
}

/// What a seat holds.
struct Held {
    layers: Range<usize>,
    keep: Keep,
    takes: Estimate,
}

/// The line of the options; `None` where each worker holds the whole model.
pub fn line(
    (settings, options): (&Settings, &Options),
    prepared: &Prepared,
    (counts, assumed, link): (&Counts, Option<u64>, Option<Link>),
) -> Result<Option<Line>, Refusal> {
    let Some(plan) = stages::plan(settings, options, (prepared, counts))? else { return Ok(None) };
    let model = prepared.model();
    let (device, holder, speed) = devices::expected_seat(assumed, &options.devices, model, counts.longest)?;
    let (all, link) = (model.0.layers, link.unwrap_or(link::ASSUMED));
    let rate = speed.unwrap_or(Speed::ASSUMED);
    let worker = Capacity { link: Some(link), ..holder.capacity(plan.division.most(), rate)? };
    let places = match places(&plan, &plan.division, &worker) {
        Some(places) => places,
        None => return Err(settings.refuse("stages", too_small(&plan, (&device, &holder, rate), &worker)?)),
    };
    let held = |(at, Place { layers, needs, .. }): (usize, &Place)| {
        let place = format!("layers {} to {}", layers.start, layers.end - 1);
        if holder.limit().is_some_and(|limit| *needs > limit) {
            let has = holder.limit().map_or(String::new(), size);
            let why = format!("{place} need {} on a worker with {device}, which has {has}", size(*needs));
            return Err(settings.refuse("stages", why));
        }
        let (keep, takes) = holder.choose(places.len() - 1 - at, layers)?;
        Ok(Held { layers: layers.clone(), keep, takes })
    };
    let seats: Result<Vec<Held>, Refusal> = places.iter().enumerate().map(held).collect();
    let way = plan.between(vec!["a".into(), "b".into()]).way(&[&worker, &worker], 0, 1);
    let paces = vec![Pace { layer: worker.seconds.0, head: worker.seconds.1 }; places.len()];
    let step = |ways: &[Way]| {
        let question = Question { layers: all, paces: &paces, ways, microbatches: plan.microbatches };
        let one =
            |(at, place): (usize, &Place)| question.seconds(at, &place.layers) + worker.reads(place.streamed);
        question.step(&places.iter().enumerate().map(one).collect::<Vec<_>>())
    };
    let step = speed.map(|_| (step(&vec![way; places.len() - 1]), step(&[])));
    let (limit, token, travels) = (holder.limit(), plan.token_bytes(), way.occupied + way.delay);
    Ok(Some(Line { device, limit, seats: seats?, layers: all, token, link, travels, step }))
}

/// The seats of as few equal workers as there must be; `None` if they have no room.
fn places(plan: &LinePlan, division: &Division, worker: &Capacity) -> Option<Vec<Place>> {
    let form = |workers: usize, waits| {
        let between = plan.between((0..workers).map(|at| at.to_string()).collect());
        match division.form(&vec![worker; workers], &between, waits) {
            Formed::Line(places) => Some(places),
            Formed::Whole(_) => Some(vec![Place::whole(worker)]),
            Formed::No | Formed::TooSmall(_) => None,
        }
    };
    let more = |waits| (1..=division.most()).find_map(|workers| form(workers, waits));
    more(Waits::ForMore).or_else(|| more(Waits::NoLonger))
}

/// Why no split fits, with the number of workers that have room.
fn too_small(
    plan: &LinePlan,
    (device, holder, rate): (&str, &Holder, Speed),
    worker: &Capacity,
) -> Result<String, Refusal> {
    let most = plan.division.most();
    let mut more = None;
    for seats in most + 1..=worker.layers.len().min(stages::MOST) {
        let worker = Capacity { link: worker.link, ..holder.capacity(seats, rate)? };
        if places(plan, &Division::Seats(seats), &worker).is_some() {
            more = Some(seats);
            break;
        }
    }
    let has = holder.limit().map_or("too little memory".into(), size);
    let way = match more {
        Some(seats) => format!("use --stages {seats}, or devices with more memory"),
        None => "use devices with more memory, smaller --micro-batch-tokens, or --quantize nf4".into(),
    };
    Ok(format!(
        "{} with {device}, {has} each, have no room for the model: {way}",
        count(most as u64, "worker")
    ))
}

/// The line as lines of text.
pub fn lines(line: &Line, counts: &Counts, options: &Options) -> Vec<String> {
    let together = match line.seats.len() {
        1 => "1 worker that holds the whole model, if it".into(),
        seats => format!("{seats} workers that hold the model together, if each"),
    };
    let mut lines = vec![format!("line     {together} has {}", line.device)];
    for (at, held) in line.seats.iter().enumerate() {
        if at > 0 {
            lines.push(format!(
                "  link   {} each way in a microbatch of {}, {} in a step; {} each way at {}/s and {:.1} ms there and back",
                small((line.token * counts.longest as u64) as f64),
                count(counts.longest as u64, "token"),
                small((line.token * tokens(counts)) as f64),
                seconds(line.travels),
                small(line.link.bandwidth),
                1e3 * line.link.round_trip,
            ));
        }
        let (takes, of) = (&held.takes, gives(line.limit, options));
        let holds = devices::held(at, &held.layers, line.layers);
        lines.push(format!("  seat {} {holds}", at + 1));
        lines.push(format!("         memory fits: {} = {}; {of}", size(takes.total()), sum(takes)));
        lines.push(format!("         {}", kept(held.keep, held.layers.len())));
        lines.extend(streamed(takes, held.layers.len()));
    }
    if let (Some((step, without)), 2..) = (line.step, line.seats.len()) {
        let links = seconds(step - without);
        lines.push(format!("  step   {} of passes, {links} of it for links (--link)", seconds(step)));
    }
    lines
}

fn seconds(s: f64) -> String {
    if s < 1.0 { format!("{:.1} ms", 1e3 * s) } else { format!("{s:.1} s") }
}

/// Mean tokens of a step.
fn tokens(counts: &Counts) -> u64 {
    counts.tokens / (counts.steps + 1).saturating_sub(counts.first).max(1)
}

/// The line as JSON.
pub fn json(line: &Line, counts: &Counts) -> Value {
    let seat = |held: &Held| {
        let t = &held.takes;
        json!({
            "first_layer": held.layers.start, "layers": held.layers.len(), "streamed_layers": t.streamed,
            "memory_bytes": {
                "total": t.total(), "weights": t.weights, "adapter": t.adapter, "activations": t.kept,
                "workspace": t.scratch, "limit": line.limit, "keeps": kept(held.keep, held.layers.len()),
            },
        })
    };
    json!({
        "device": line.device,
        "seats": line.seats.iter().map(seat).collect::<Vec<_>>(),
        "links": {
            "count": line.seats.len() - 1, "bytes_per_token_each_way": line.token,
            "bytes_per_step_each_way": line.token * tokens(counts),
            "bandwidth": line.link.bandwidth, "round_trip": line.link.round_trip, "seconds_each_way": line.travels,
        },
        "step_seconds": line.step.map(|(step, _)| step),
        "step_seconds_without_links": line.step.map(|(_, without)| without),
    })
}
