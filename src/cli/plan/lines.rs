//! Lines of workers in a plan (`--stages`): what each seat holds, and what goes over each link. Nothing is known about
//! workers that have not joined, so each is assumed to have the same device.

use super::memory_words::{gives, kept, small, sum};
use crate::cluster::coordinator::{Division, Formed, Place};
use crate::config::Settings;
use crate::config::groups::Options;
use crate::config::refusal::Refusal;
use crate::devices::{self, Holder};
use crate::forecast::counts::Counts;
use crate::model::decoder::Keep;
use crate::model::memory::{Estimate, size};
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
    (counts, assumed): (&Counts, Option<u64>),
) -> Result<Option<Line>, Refusal> {
    let Some(plan) = stages::plan(settings, options, prepared)? else { return Ok(None) };
    let model = prepared.model();
    let (device, holder) = devices::expected_seat(assumed, &options.devices, model, counts.longest)?;
    let all = model.0.layers;
    let places = match places(&plan.division, &holder, all)? {
        Some(places) => places,
        None => return Err(settings.refuse("stages", too_small(&plan.division, (&device, &holder), all)?)),
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
    let token = 4 * model.0.hidden as u64;
    Ok(Some(Line { device, limit: holder.limit(), seats: seats?, layers: all, token }))
}

/// The seats of as few equal workers as there must be; `None` if they have no room.
fn places(division: &Division, holder: &Holder, layers: usize) -> Result<Option<Vec<Place>>, Refusal> {
    let capacity = holder.capacity(division.most(), 1.0)?;
    for workers in 1..=division.most() {
        match division.form(&vec![&capacity; workers]) {
            Formed::Line(places) => return Ok(Some(places)),
            Formed::Whole(_) => {
                let needs = capacity.needs(0, &(0..layers));
                return Ok(Some(vec![Place { worker: 0, layers: 0..layers, needs }]));
            }
            Formed::No | Formed::TooSmall(_) => {}
        }
    }
    Ok(None)
}

/// Why no split fits, with the number of workers that have room.
fn too_small(
    division: &Division,
    (device, holder): (&str, &Holder),
    layers: usize,
) -> Result<String, Refusal> {
    let most = division.most();
    let mut more = None;
    for seats in most + 1..=layers.min(stages::MOST) {
        if places(&Division::Seats(seats), holder, layers)?.is_some() {
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
                "  link   {} each way in a microbatch of {}, {} in a step",
                small((line.token * counts.longest as u64) as f64),
                count(counts.longest as u64, "token"),
                small((line.token * tokens(counts)) as f64)
            ));
        }
        let (takes, of) = (&held.takes, gives(line.limit, options));
        let holds = devices::held(at, &held.layers, line.layers);
        lines.push(format!("  seat {} {holds}", at + 1));
        lines.push(format!("         memory fits: {} = {}; {of}", size(takes.total()), sum(takes)));
        lines.push(format!("         {}", kept(held.keep, held.layers.len())));
    }
    lines
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
            "first_layer": held.layers.start, "layers": held.layers.len(),
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
        },
    })
}
