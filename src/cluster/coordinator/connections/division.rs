//! How the layers of a model are divided among workers that hold it together, from what their devices report.

use crate::cluster::message::{Capacity, Needs};
use crate::model::memory::{freed, needed};
use crate::model::split::{MANY, Pace, Question, WORTH, Way, alike};
use crate::train::event::Link;
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
    /// Where they have no room together, the fastest of those that stream layers.
    Auto(usize),
}

/// Whether workers whose number is open wait for more of them before they stream layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// Others may come soon.
    ForMore,
    /// None has come for a while.
    NoLonger,
}

/// What workers of a line send each other, and where they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Between {
    /// Bytes of the longest microbatch that go from seat to seat, in each direction.
    pub bytes: u64,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// The host of each worker; workers without one have no network between them.
    pub hosts: Vec<String>,
}

impl Default for Between {
    /// Workers on one machine.
    fn default() -> Self {
        Between { bytes: 0, microbatches: MANY, hosts: Vec::new() }
    }
}

impl Between {
    /// The link between two workers, from what each measured to the coordinator: the slower of both, and half of both
    /// round trips.
    pub fn way(&self, workers: &[&Capacity], a: usize, b: usize) -> Way {
        let [one, other] = [a, b].map(|at| (self.hosts.get(at), workers[at].link));
        match (one, other) {
            ((one, Some(here)), (other, Some(there))) if one != other => Way {
                occupied: self.bytes as f64 / here.bandwidth.min(there.bandwidth),
                delay: (here.round_trip + there.round_trip) / 2.0,
            },
            _ => Way::default(),
        }
    }
}

/// A seat of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Index of its worker.
    pub worker: usize,
    /// Its layers.
    pub layers: Range<usize>,
    /// Number of them that it streams.
    pub streamed: usize,
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
    pub fn form(&self, workers: &[&Capacity], between: &Between, waits: Waits) -> Formed {
        let enough = workers.len() >= self.most();
        let measured = match self {
            Division::Layers(counts) if enough => return Formed::Line(typed(counts, workers)),
            Division::Seats(_) if enough => measured(workers, between).map(|(line, _)| line),
            Division::Auto(_) => {
                let all: Vec<Capacity> = workers.iter().map(|worker| worker.without_streaming()).collect();
                let resident: Vec<&Capacity> = all.iter().collect();
                if let Some(at) = resident.iter().position(|worker| worker.holds_all()) {
                    return Formed::Whole(at);
                }
                match (fewest(&resident, between), enough || waits == Waits::NoLonger) {
                    (None, true) => fastest(workers, between),
                    (line, _) => line,
                }
            }
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

impl Place {
    /// The whole model on a worker.
    pub fn whole(worker: &Capacity) -> Self {
        Place::new((0, worker), 0, 0..worker.layers.len())
    }

    /// The place of a worker with that many seats above it. It needs more than it has if it has no room.
    pub(super) fn new((worker, capacity): (usize, &Capacity), above: usize, layers: Range<usize>) -> Self {
        let streamed = capacity.streams(above, &layers).unwrap_or(capacity.most_streamed(&layers));
        Place { worker, streamed, needs: capacity.needs(above, &layers, streamed), layers }
    }
}

fn typed(counts: &[usize], workers: &[&Capacity]) -> Vec<Place> {
    let starts = counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count)));
    let place = |(at, (start, count)): (usize, (usize, &usize))| {
        Place::new((at, workers[at]), counts.len() - 1 - at, start..start + count)
    };
    starts.zip(counts).enumerate().map(place).collect()
}

/// Most workers of which every choice is tried.
const CHOSEN: usize = 6;

/// The fastest line of the fewest workers that fits.
fn fewest(workers: &[&Capacity], between: &Between) -> Option<Vec<Place>> {
    (2..=workers.len()).find_map(|count| of_some(count, workers, between)).map(|(line, _)| line)
}

/// The fastest line that fits. Another worker must make it faster.
fn fastest(workers: &[&Capacity], between: &Between) -> Option<Vec<Place>> {
    let lines = (2..=workers.len()).filter_map(|count| of_some(count, workers, between));
    lines.reduce(|best, more| if more.1 < WORTH * best.1 { more } else { best }).map(|(line, _)| line)
}

/// The fastest line of that many workers that fits; of many workers, those with most memory.
fn of_some(count: usize, workers: &[&Capacity], between: &Between) -> Option<(Vec<Place>, f64)> {
    let mut by_room: Vec<usize> = (0..workers.len()).collect();
    by_room.sort_by_key(|at| Reverse(workers[*at].limit));
    let choices =
        if workers.len() <= CHOSEN { choices(&by_room, count) } else { vec![by_room[..count].to_vec()] };
    let mut best: Option<(Vec<Place>, f64)> = None;
    for mut chosen in choices {
        chosen.sort_unstable();
        let hosts = chosen.iter().filter_map(|at| between.hosts.get(*at).cloned()).collect();
        let between = Between { hosts, ..*between };
        let capacities: Vec<&Capacity> = chosen.iter().map(|at| workers[*at]).collect();
        let Some((line, seconds)) = measured(&capacities, &between) else { continue };
        if best.as_ref().is_none_or(|(_, before)| seconds < WORTH * before) {
            let of_all = |place: Place| Place { worker: chosen[place.worker], ..place };
            best = Some((line.into_iter().map(of_all).collect(), seconds));
        }
    }
    best
}

/// All choices of that many, the first ones first.
fn choices(of: &[usize], count: usize) -> Vec<Vec<usize>> {
    match (count, of) {
        (0, _) => vec![vec![]],
        (_, []) => vec![],
        (_, [first, rest @ ..]) => {
            let with = choices(rest, count - 1).into_iter().map(|others| [&[*first], &others[..]].concat());
            with.chain(choices(rest, count)).collect()
        }
    }
}

/// The line of all workers that is fastest and fits, and the seconds of its steps.
fn measured(workers: &[&Capacity], between: &Between) -> Option<(Vec<Place>, f64)> {
    let paces = workers.iter().map(|worker| Pace { layer: worker.seconds.0, head: worker.seconds.1 });
    let paces = alike(&paces.collect::<Vec<_>>());
    let question = Question {
        layers: workers.first()?.layers.len(),
        paces: &paces,
        ways: &[],
        microbatches: between.microbatches,
    };
    let found = question.arrange(&|a, b| between.way(workers, a, b), &mut |at, place, range| {
        let streamed = workers[at].streams(workers.len() - 1 - place, range)?;
        Some(workers[at].reads(streamed))
    })?;
    let places = found.order.into_iter().zip(found.split).enumerate();
    let place = |(place, (worker, layers)): (usize, (usize, Range<usize>))| {
        Place::new((worker, workers[worker]), workers.len() - 1 - place, layers)
    };
    Some((places.map(place).collect(), found.seconds))
}

/// Most seconds that a worker may report.
const SLOWEST: f64 = 1e12;

impl Capacity {
    /// Whether a worker may report this of a model of `layers` layers in lines of up to `most` seats.
    pub fn is_possible(&self, layers: usize, most: usize) -> bool {
        let (layer, head) = self.seconds;
        // Within these bounds every step has a finite time, so that one worker cannot make all splits impossible.
        let paces = layer > 0.0 && layer <= SLOWEST && (0.0..=SLOWEST).contains(&head);
        let sane = |link: Link| {
            link.bandwidth.is_finite() && link.bandwidth >= 1.0 && (0.0..=SLOWEST).contains(&link.round_trip)
        };
        paces
            && (0.0..=SLOWEST).contains(&self.reading)
            && self.link.is_none_or(sane)
            && self.layers.len() == layers
            && self.needs.len() == most.min(layers)
    }

    /// Bytes of a seat of these layers that streams `streamed` of them, with `above` seats above it.
    pub fn needs(&self, above: usize, layers: &Range<usize>, streamed: usize) -> u64 {
        let Some((first, later)) = self.needs.get(above) else { return u64::MAX };
        let Needs { one, more } = if layers.start == 0 { first } else { later };
        let further = more.saturating_mul(layers.len().saturating_sub(1) as u64);
        let weights =
            self.layers[layers.clone()].iter().fold(0, |sum: u64, layer| sum.saturating_add(*layer));
        let all = one.saturating_add(further).saturating_add(weights);
        all.saturating_sub(freed(self.bounds(layers), streamed))
    }

    /// Bytes of the smallest and of the largest layer.
    fn bounds(&self, layers: &Range<usize>) -> (u64, u64) {
        let sizes = self.layers[layers.clone()].iter().copied();
        sizes.clone().min().zip(sizes.max()).unwrap_or_default()
    }

    /// Most of these layers that it streams.
    fn most_streamed(&self, layers: &Range<usize>) -> usize {
        layers.len().min(self.streams.1 as usize)
    }

    /// The fewest of these layers that it streams as a seat with `above` seats above it; `None` if it has no room for
    /// them. It streams as many when it opens them (`model::memory`).
    pub fn streams(&self, above: usize, layers: &Range<usize>) -> Option<usize> {
        let missing = self.needs(above, layers, 0).saturating_sub(self.limit);
        let fewest = layers.len().min(self.streams.0 as usize);
        needed(self.bounds(layers), missing, (fewest, self.most_streamed(layers)))
    }

    /// Seconds in which that many layers are read for a microbatch.
    pub fn reads(&self, streamed: usize) -> f64 {
        streamed as f64 * self.reading
    }

    /// The same device if it streams no layer that it need not.
    fn without_streaming(&self) -> Self {
        Capacity { streams: (self.streams.0, self.streams.0), ..self.clone() }
    }

    /// Whether the whole model fits.
    fn holds_all(&self) -> bool {
        self.streams(0, &(0..self.layers.len())).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with this many seconds for a layer, and room for that many layers.
    fn device(seconds: f64, room: u64) -> Capacity {
        let nothing = Needs { one: 0, more: 0 };
        let needs = vec![(nothing, nothing); 3];
        let (limit, layers, streams, reading) = (10 * room, vec![10; 12], (0, 0), 0.0);
        Capacity { seconds: (seconds, 0.0), limit, layers, needs, streams, reading, link: None }
    }

    fn line(division: &Division, devices: &[Capacity]) -> Vec<(usize, Range<usize>)> {
        match division.form(&devices.iter().collect::<Vec<_>>(), &Between::default(), Waits::ForMore) {
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
        assert_eq!(
            two.form(&little.iter().collect::<Vec<_>>(), &Between::default(), Waits::ForMore),
            Formed::TooSmall(0)
        );
        assert_eq!(two.form(&[&little[0]], &Between::default(), Waits::ForMore), Formed::No);
        let typed = Division::Layers(vec![2, 10]);
        assert_eq!(line(&typed, &[device(1.0, 12), device(2.0, 12)]), [(0, 0..2), (1, 2..12)]);
        let small = [device(1.0, 12), device(2.0, 9)];
        let small: Vec<&Capacity> = small.iter().collect();
        assert_eq!(
            typed.form(&small, &Between::default(), Waits::ForMore).within(&small),
            Formed::TooSmall(1)
        );
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
            auto.form(&devices.iter().collect::<Vec<_>>(), &Between::default(), Waits::ForMore)
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

    /// Workers on hosts of their own, with these megabytes per second and seconds of a round trip to the coordinator.
    fn linked(division: &Division, workers: &[(f64, u64, (f64, f64))]) -> Vec<(usize, Range<usize>)> {
        let link = |(megabytes, round_trip)| Link { bandwidth: 1e6 * megabytes, round_trip };
        let devices = workers
            .iter()
            .map(|(seconds, room, way)| Capacity { link: Some(link(*way)), ..device(*seconds, *room) });
        let devices: Vec<Capacity> = devices.collect();
        let hosts = (0..workers.len()).map(|at| at.to_string()).collect();
        let between = Between { bytes: 4_000_000, microbatches: 8, hosts };
        match division.form(&devices.iter().collect::<Vec<_>>(), &between, Waits::ForMore) {
            Formed::Line(places) => places.into_iter().map(|place| (place.worker, place.layers)).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_slow_link_moves_the_cut_and_the_order() {
        let (near, slow, far) = ((100.0, 0.001), (0.2, 0.001), (100.0, 20.0));
        let two = |way| linked(&Division::Seats(2), &[(1.0, 12, near), (2.0, 12, way)]);
        assert_eq!(two(near), [(0, 0..8), (1, 8..12)]);
        // The link takes 20 s in each direction, more than both seats.
        assert_eq!(two(slow), [(0, 0..11), (1, 11..12)]);
        assert_eq!(two(far), [(0, 0..11), (1, 11..12)]);
        // A worker between two others sends twice as much as one at an end.
        let three = |ways: [(f64, f64); 3]| linked(&Division::Seats(3), &ways.map(|way| (1.0, 12, way)));
        let order = |ways| three(ways).into_iter().map(|(worker, _)| worker).collect::<Vec<_>>();
        assert_eq!(order([near, near, near]), [0, 1, 2]);
        assert_eq!(order([near, slow, near]), [0, 2, 1]);
        assert_eq!(order([near, near, slow]), [0, 1, 2]);
        // Two of three have room: the one behind a slow link is left out.
        let auto = |ways: [(f64, f64); 3]| linked(&Division::Auto(3), &ways.map(|way| (1.0, 7, way)));
        assert_eq!(auto([near, near, near]), [(0, 0..6), (1, 6..12)]);
        assert_eq!(auto([near, slow, near]), [(0, 0..6), (2, 6..12)]);
    }

    /// The layers of each seat, and how many of them it streams.
    fn streaming(
        division: &Division,
        devices: &[(f64, u64, f64)],
        waits: Waits,
    ) -> Vec<(usize, Range<usize>, usize)> {
        let one = |(seconds, room, reading): &(f64, u64, f64)| Capacity {
            streams: (0, 12),
            reading: *reading,
            ..device(*seconds, *room)
        };
        let devices: Vec<Capacity> = devices.iter().map(one).collect();
        match division.form(&devices.iter().collect::<Vec<_>>(), &Between::default(), waits) {
            Formed::Line(places) => {
                assert!(places.iter().all(|place| place.needs <= devices[place.worker].limit), "{places:?}");
                places.into_iter().map(|place| (place.worker, place.layers, place.streamed)).collect()
            }
            Formed::No => vec![],
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn seats_stream_layers_where_memory_or_time_asks_for_it() {
        let two = |devices: [(f64, u64, f64); 2]| streaming(&Division::Seats(2), &devices, Waits::ForMore);
        // One layer is on the device while two or more are streamed.
        assert_eq!(two([(1.0, 5, 0.5), (1.0, 5, 0.5)]), [(0, 0..6, 2), (1, 6..12, 2)]);
        assert_eq!(two([(1.0, 5, 0.5), (1.0, 7, 0.5)]), [(0, 0..5, 0), (1, 5..12, 0)]);
        // The slow worker has room for all that the fast one has not: reading is the lesser evil, or not.
        assert_eq!(two([(1.0, 4, 0.1), (4.0, 12, 0.1)]), [(0, 0..10, 7), (1, 10..12, 0)]);
        assert_eq!(two([(1.0, 4, 99.0), (4.0, 12, 99.0)]), [(0, 0..4, 0), (1, 4..12, 0)]);
        let typed = Division::Layers(vec![8, 4]);
        let places = streaming(&typed, &[(1.0, 5, 0.5), (1.0, 5, 0.5)], Waits::ForMore);
        assert_eq!(places, [(0, 0..8, 4), (1, 8..12, 0)]);
    }

    #[test]
    fn workers_whose_number_is_open_stream_once_none_comes() {
        let auto = |rooms: &[u64], waits| {
            let devices: Vec<(f64, u64, f64)> = rooms.iter().map(|room| (1.0, *room, 0.5)).collect();
            streaming(&Division::Auto(8), &devices, waits)
        };
        assert_eq!(auto(&[4, 4], Waits::ForMore), []);
        assert_eq!(auto(&[4], Waits::NoLonger), [], "a worker alone does not stream the model");
        assert_eq!(auto(&[4, 4], Waits::NoLonger), [(0, 0..6, 3), (1, 6..12, 3)]);
        let three = [(0, 0..4, 0), (1, 4..8, 0), (2, 8..12, 0)];
        assert_eq!(auto(&[4, 4, 4], Waits::ForMore), three);
        assert_eq!(auto(&[3, 3, 3], Waits::NoLonger).len(), 3, "the fastest line, not the shortest");
        assert_eq!(auto(&[7, 7, 7], Waits::NoLonger).len(), 2, "no more than hold it without streaming");
    }

    #[test]
    fn impossible_capacities_are_refused() {
        let good = device(1.0, 12);
        assert!(good.is_possible(12, 3) && device(1.0, 0).is_possible(12, 3));
        assert!(!good.is_possible(11, 3) && !good.is_possible(12, 4));
        for seconds in [(f64::NAN, 0.0), (0.0, 0.0), (-1.0, 0.0), (1.0, f64::INFINITY), (1.0, -1.0)] {
            assert!(!Capacity { seconds, ..good.clone() }.is_possible(12, 3), "{seconds:?}");
        }
        for (bandwidth, round_trip) in [(0.0, 1.0), (f64::NAN, 1.0), (1.0, -1.0), (1.0, f64::INFINITY)] {
            let link = Some(Link { bandwidth, round_trip });
            assert!(!Capacity { link, ..good.clone() }.is_possible(12, 3), "{link:?}");
        }
        for reading in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(!Capacity { reading, ..good.clone() }.is_possible(12, 3), "{reading}");
        }
        let huge = Needs { one: u64::MAX, more: u64::MAX };
        let huge = Capacity { layers: vec![u64::MAX; 12], needs: vec![(huge, huge); 3], ..good };
        assert_eq!(huge.needs(1, &(0..12), 0), u64::MAX);
    }
}
