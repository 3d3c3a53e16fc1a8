//! What a device can hold of a model as a seat of a line of workers: the coordinator splits the layers by it.

use super::building::Whole;
use super::line::{Room, speed};
use super::seat::Seat;
use crate::cluster::message::{Capacity, Needs};
use crate::cluster::worker::depth;
use crate::model::split::Pace;
use crate::model::weights::ModelError;
use std::ops::Range;

/// The capacity of a device in a line of up to `most` seats.
pub fn of(seat: &Seat, whole: &Whole, most: usize) -> Result<Capacity, ModelError> {
    let all = whole.config.layers;
    let room = |above: usize| Room::new(seat, whole, (depth(above), depth(above)));
    let mut last = room(0)?;
    let layers: Vec<u64> = (0..all).map(|at| last.packed.layer(at)).collect();
    let besides = |room: &mut Room, range: Range<usize>| -> Result<u64, ModelError> {
        Ok(room.least(&range)?.saturating_sub(layers[range].iter().sum()))
    };
    let needs = |room: &mut Room, one: Range<usize>, two: Range<usize>| -> Result<Needs, ModelError> {
        let one = besides(room, one)?;
        let two = if two.len() < all { besides(room, two)? } else { one };
        Ok(Needs { one, more: two.saturating_sub(one) })
    };
    let whole_model = Needs { one: besides(&mut last, 0..all)?, more: 0 };
    let mut seats = vec![(whole_model, needs(&mut last, all - 1..all, all.saturating_sub(2)..all)?)];
    for above in 1..most.min(all) {
        let mut room = room(above)?;
        let first = needs(&mut room, 0..1, 0..2)?;
        // Between the first and the last seat of a model of three layers there is one of one layer.
        let between = if all > 2 { needs(&mut room, 1..2, 1..all.min(3))? } else { first };
        seats.push((first, between));
    }
    let pace = Pace::of(last.costs()?, 1e9 * speed(seat)?);
    Ok(Capacity { seconds: (pace.layer, pace.head), limit: last.limit.bytes(), layers, needs: seats })
}
