//! How the layers of a model are divided among workers that hold it together, from what their devices report.

use crate::cluster::message::{Capacity, Needs};
use crate::model::split::{Pace, alike, arrange};
use std::cmp::Reverse;
use std::ops::Range;

/// What the run's user typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Division {
    /// The layers of each worker, in the order in which they connect.
    Layers(Vec<usize>),
    /// That many workers.
    Seats(usize),
    /// As few workers as have room for the model, up to that many. A worker that has room for all of it holds it alone.
    Auto(usize),
}

/// A seat of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Index of its worker.
    pub worker: usize,
    /// Its layers.
    pub layers: Range<usize>,
    /// Bytes that it needs at least.
    pub needs: u64,
}

/// What waiting workers can do together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Formed {
    /// They are too few.
    No,
    /// A line of some of them.
    Line(Vec<Place>),
    /// The worker of this index holds the whole model.
    Whole(usize),
    /// They are enough, but their memory is too small. The worker of this index has least.
    TooSmall(usize),
}

impl Division {
    /// Most seats of a line.
    pub fn most(&self) -> usize {
        match self {
            Division::Layers(counts) => counts.len(),
            Division::Seats(most) | Division::Auto(most) => *most,
        }
    }

    /// What workers of these capacities form together.
    pub fn form(&self, workers: &[&Capacity]) -> Formed {
        if let (Division::Auto(_), Some(at)) = (self, workers.iter().position(|worker| worker.holds_all())) {
            return Formed::Whole(at);
        }
        let enough = workers.len() >= self.most();
        let measured = match self {
            Division::Layers(counts) if enough => return Formed::Line(typed(counts, workers)),
            Division::Seats(_) if enough => measured(workers),
            Division::Auto(_) => fewest(workers),
            _ => None,
        };
        let smallest = (0..workers.len()).min_by_key(|at| workers[*at].limit);
        match (measured, smallest) {
            (Some(line), _) => Formed::Line(line),
            (None, Some(at)) if enough => Formed::TooSmall(at),
            _ => Formed::No,
        }
    }
}

impl Formed {
    /// The same, unless a worker has too little memory for the number of layers that was typed for it.
    pub fn within(self, workers: &[&Capacity]) -> Formed {
        let Formed::Line(places) = &self else { return self };
        let small = places.iter().find(|place| place.needs > workers[place.worker].limit);
        match small.map(|place| place.worker) {
            Some(worker) => Formed::TooSmall(worker),
            None => self,
        }
    }
}

fn typed(counts: &[usize], workers: &[&Capacity]) -> Vec<Place> {
    let starts = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count)));
    let place = |(at, (start, count)): (usize, (usize, &usize))| {
        let layers = start..start + count;
        let needs = workers[at].needs(counts.len() - 1 - at, &layers);
        Place { worker: at, layers, needs }
    };
    starts.zip(counts).enumerate().map(place).collect()
}

/// The line of the fewest workers, those with most memory, that fits.
fn fewest(workers: &[&Capacity]) -> Option<Vec<Place>> {
    let mut by_room: Vec<usize> = (0..workers.len()).collect();
    by_room.sort_by_key(|at| Reverse(workers[*at].limit));
    (2..=workers.len()).find_map(|count| {
        let mut chosen = by_room[..count].to_vec();
        chosen.sort_unstable();
        let line = measured(&chosen.iter().map(|at| workers[*at]).collect::<Vec<_>>())?;
        Some(line.into_iter().map(|place| Place { worker: chosen[place.worker], ..place }).collect())
    })
}

/// The line of all workers that is fastest and fits.
fn measured(workers: &[&Capacity]) -> Option<Vec<Place>> {
    let paces = workers.iter().map(|worker| Pace { layer: worker.seconds.0, head: worker.seconds.1 });
    let paces = alike(&paces.collect::<Vec<_>>());
    let layers = workers.first()?.layers.len();
    let needs =
        |at: usize, place: usize, range: &Range<usize>| workers[at].needs(workers.len() - 1 - place, range);
    let (order, split) =
        arrange(layers, &paces, &mut |at, place, range| needs(at, place, range) <= workers[at].limit)?;
    let places = order.into_iter().zip(split).enumerate();
    Some(
        places
            .map(|(place, (worker, layers))| Place { worker, needs: needs(worker, place, &layers), layers })
            .collect(),
    )
}

impl Capacity {
    /// Whether a worker may report this of a model of `layers` layers in lines of up to `most` seats.
    pub fn is_possible(&self, layers: usize, most: usize) -> bool {
        let (layer, head) = self.seconds;
        let paces = layer.is_finite() && layer > 0.0 && head.is_finite() && head >= 0.0;
        paces && self.layers.len() == layers && self.needs.len() == most.min(layers)
    }

    /// Bytes of a seat of these layers, with `above` seats above it.
    pub fn needs(&self, above: usize, layers: &Range<usize>) -> u64 {
        let Some((first, later)) = self.needs.get(above) else { return u64::MAX };
        let Needs { one, more } = if layers.start == 0 { first } else { later };
        let further = more.saturating_mul(layers.len().saturating_sub(1) as u64);
        let weights =
            self.layers[layers.clone()].iter().fold(0, |sum: u64, layer| sum.saturating_add(*layer));
        one.saturating_add(further).saturating_add(weights)
    }

    /// Whether the whole model fits.
    fn holds_all(&self) -> bool {
        self.needs(0, &(0..self.layers.len())) <= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with this many seconds for a layer, and room for that many layers.
    fn device(seconds: f64, room: u64) -> Capacity {
        let nothing = Needs { one: 0, more: 0 };
        let needs = vec![(nothing, nothing); 3];
        Capacity { seconds: (seconds, 0.0), limit: 10 * room, layers: vec![10; 12], needs }
    }

    fn line(division: &Division, devices: &[Capacity]) -> Vec<(usize, Range<usize>)> {
        match division.form(&devices.iter().collect::<Vec<_>>()) {
            Formed::Line(places) => places.into_iter().map(|place| (place.worker, place.layers)).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn unlike_devices_get_unlike_numbers_of_layers() {
        let two = Division::Seats(2);
        assert_eq!(line(&two, &[device(1.0, 12), device(1.04, 12)]), [(0, 0..6), (1, 6..12)]);
        assert_eq!(line(&two, &[device(1.0, 12), device(2.0, 12)]), [(0, 0..8), (1, 8..12)]);
        assert_eq!(line(&two, &[device(1.0, 3), device(2.0, 12)]), [(0, 0..3), (1, 3..12)]);
        let little = [device(1.0, 3), device(1.0, 8)];
        assert_eq!(two.form(&little.iter().collect::<Vec<_>>()), Formed::TooSmall(0));
        assert_eq!(two.form(&[&little[0]]), Formed::No);
        let typed = Division::Layers(vec![2, 10]);
        assert_eq!(line(&typed, &[device(1.0, 12), device(2.0, 12)]), [(0, 0..2), (1, 2..12)]);
        let small = [device(1.0, 12), device(2.0, 9)];
        let small: Vec<&Capacity> = small.iter().collect();
        assert_eq!(typed.form(&small).within(&small), Formed::TooSmall(1));
    }

    #[test]
    fn the_seat_with_little_memory_takes_the_place_that_needs_least() {
        let (mut little, large) = (device(1.0, 8), device(1.0, 12));
        little.needs[1].0 = Needs { one: 60, more: 0 };
        assert_eq!(line(&Division::Seats(2), &[little, large]), [(1, 0..6), (0, 6..12)]);
    }

    #[test]
    fn few_workers_hold_the_model_where_their_number_is_open() {
        let auto = Division::Auto(3);
        let form = |rooms: &[u64]| {
            let devices: Vec<Capacity> = rooms.iter().map(|room| device(1.0, *room)).collect();
            auto.form(&devices.iter().collect::<Vec<_>>())
        };
        assert_eq!(form(&[5]), Formed::No);
        assert_eq!(form(&[5, 12]), Formed::Whole(1));
        assert_eq!(form(&[5, 6]), Formed::No);
        let members = |rooms: &[u64]| match form(rooms) {
            Formed::Line(places) => places.into_iter().map(|place| place.worker).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(members(&[5, 6, 1]), [0, 1, 2]);
        assert_eq!(members(&[5, 7]), [0, 1]);
        assert_eq!(members(&[3, 4, 10]), [1, 2], "the fewest, with most memory");
        assert_eq!(members(&[0, 6, 6]), [1, 2], "a device without room for a layer is left out");
        assert_eq!(form(&[5, 4, 1]), Formed::TooSmall(2));
    }

    #[test]
    fn impossible_capacities_are_refused() {
        let good = device(1.0, 12);
        assert!(good.is_possible(12, 3) && device(1.0, 0).is_possible(12, 3));
        assert!(!good.is_possible(11, 3) && !good.is_possible(12, 4));
        for seconds in [(f64::NAN, 0.0), (0.0, 0.0), (-1.0, 0.0), (1.0, f64::INFINITY), (1.0, -1.0)] {
            assert!(!Capacity { seconds, ..good.clone() }.is_possible(12, 3), "{seconds:?}");
        }
        let huge = Needs { one: u64::MAX, more: u64::MAX };
        let huge = Capacity { layers: vec![u64::MAX; 12], needs: vec![(huge, huge); 3], ..good };
        assert_eq!(huge.needs(1, &(0..12)), u64::MAX);
    }
}
