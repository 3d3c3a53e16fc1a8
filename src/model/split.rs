//! Split of a model's layers among the seats of a line, by the time of a step. The slowest seat or link sets the pace of a
//! line, and memory is a wall: a seat never gets layers that it has no room for. Streaming moves the wall, and costs the
//! time of reading.

use std::ops::Range;

/// Seconds of a seat.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// For a layer.
    pub layer: f64,
    /// For the head.
    pub head: f64,
}

impl Pace {
    /// The pace of a device that does `speed` per second, where a layer and the head cost that much.
    pub fn of((layer, head): (f64, f64), speed: f64) -> Self {
        Pace { layer: layer / speed, head: head / speed }
    }
}

/// Seconds of a link between two seats, in each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Way {
    /// In which the values of a microbatch occupy the link.
    pub occupied: f64,
    /// Until they arrive after that.
    pub delay: f64,
}

/// A model and the seats of a line.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Layers of the model.
    pub layers: usize,
    /// The seats, in the order of the line.
    pub paces: &'a [Pace],
    /// The links above each of them; one that is not listed takes no time.
    pub ways: &'a [Way],
    /// Microbatches of a step.
    pub microbatches: usize,
}

/// A number of microbatches for which the slowest seat alone decides.
pub const MANY: usize = 1_000_000;
/// Paces that differ by less than this share count as equal: measurements vary by that much.
const ALIKE: f64 = 0.1;
/// Most seats of which every order is tried.
const ORDERED: usize = 5;
/// A step of other seats, or of another order, must be faster by this factor.
pub const WORTH: f64 = 0.99;
/// Times that differ by less than this share are equal but for the order of their additions.
const EQUAL: f64 = 1e-9;

/// Most microbatches of a seat with that many seats above it that wait for their backward pass: one in each seat above it
/// and itself, and one on each way between them, so that sending takes no time from computing.
pub fn depth(above: usize) -> usize {
    2 * above + 1
}

/// The same paces, where those of devices that are about equally fast are equal.
pub fn alike(paces: &[Pace]) -> Vec<Pace> {
    let mut order: Vec<usize> = (0..paces.len()).collect();
    order.sort_by(|a, b| paces[*a].layer.total_cmp(&paces[*b].layer));
    let (mut equal, mut first): (Vec<Pace>, Option<usize>) = (paces.to_vec(), None);
    for at in order {
        match first {
            Some(first) if paces[at].layer * (1.0 - ALIKE) <= equal[first].layer => equal[at] = equal[first],
            _ => first = Some(at),
        }
    }
    equal
}

/// Seats in an order, and the seconds of a step with them.
#[derive(Debug, Clone, PartialEq)]
pub struct Arranged {
    /// Indices into the paces that were given.
    pub order: Vec<usize>,
    /// The layers of each, in this order.
    pub split: Vec<Range<usize>>,
    /// Seconds of a step.
    pub seconds: f64,
}

/// Seconds of reading by index of the seat, place in the line, and layers; `None` if it has no room for them.
type Reads<'a> = dyn FnMut(usize, usize, &Range<usize>) -> Option<f64> + 'a;

impl Question<'_> {
    /// The order of the seats in which a step is fastest. The given order stays unless another one is faster. `way` gives
    /// the link between two seats by their indices; `reads` gets an index, the place in the line, and the layers
    /// ([`Question::split`]).
    pub fn arrange(&self, way: &dyn Fn(usize, usize) -> Way, reads: &mut Reads<'_>) -> Option<Arranged> {
        let mut best: Option<Arranged> = None;
        for order in orders(self.paces.len()) {
            let paces: Vec<Pace> = order.iter().map(|at| self.paces[*at]).collect();
            let ways: Vec<Way> = order.windows(2).map(|pair| way(pair[0], pair[1])).collect();
            let question = Question { paces: &paces, ways: &ways, ..*self };
            let limit = best.as_ref().map_or(f64::INFINITY, |before| WORTH * before.seconds);
            let split = question.within(limit, &mut |place, range| reads(order[place], place, range));
            if let Some((split, seconds)) = split.filter(|(_, seconds)| *seconds < limit) {
                best = Some(Arranged { order, split, seconds });
            }
        }
        best
    }
}

/// The orders that are tried, the given one first.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count > ORDERED {
        return vec![(0..count).collect()];
    }
    let longer = |order: Vec<usize>| {
        let rest: Vec<usize> = (0..count).filter(|at| !order.contains(at)).collect();
        rest.into_iter().map(move |at| [&order[..], &[at]].concat())
    };
    (0..count).fold(vec![vec![]], |orders, _| orders.into_iter().flat_map(longer).collect())
}

/// The seats of a line from some seat up.
#[derive(Debug, Clone, Default)]
struct Upper {
    /// Seconds of a microbatch through them, to the last seat and back.
    cycle: f64,
    /// Seconds between two microbatches.
    period: f64,
    /// Sum of squared seconds of the seats: more even ones have a smaller one.
    squares: f64,
    /// The first layer of each seat, the last seat first.
    starts: Vec<usize>,
}

impl Upper {
    /// Whether no line with `other` is better than the same with this.
    fn is_as_good_as(&self, other: &Upper) -> bool {
        let [cycle, period] = [(self.cycle, other.cycle), (self.period, other.period)]
            .map(|(mine, theirs)| (mine <= theirs * (1.0 + EQUAL), mine < theirs * (1.0 - EQUAL)));
        cycle.0 && period.0 && (cycle.1 || period.1 || self.squares <= other.squares)
    }

    /// Adds it to those of the same layers, unless one of them is as good.
    fn enter(self, known: &mut Vec<Upper>) {
        if !known.iter().any(|other| other.is_as_good_as(&self)) {
            known.retain(|other| !self.is_as_good_as(other));
            known.push(self);
        }
    }
}

impl Question<'_> {
    /// Seconds of a seat with these layers, if it reads none of them.
    pub fn seconds(&self, seat: usize, layers: &Range<usize>) -> f64 {
        let Pace { layer, head } = self.paces[seat];
        layers.len() as f64 * layer + if layers.end == self.layers { head } else { 0.0 }
    }

    /// Seconds of a step in which each seat takes `seconds` for a microbatch: the first one passes all seats and comes
    /// back, and the others follow at the pace of the slowest seat, in computing or in sending. A seat that waits for the
    /// way back of as many microbatches as its depth is slow too.
    pub fn step(&self, seconds: &[f64]) -> f64 {
        let seats = seconds.iter().enumerate().rev();
        self.of(&seats.fold(Upper::default(), |upper, (seat, seconds)| self.under(&upper, seat, *seconds)))
    }

    fn of(&self, whole: &Upper) -> f64 {
        whole.cycle + self.microbatches.saturating_sub(1) as f64 * whole.period
    }

    /// A seat under others, without the starts of layers.
    fn under(&self, upper: &Upper, seat: usize, seconds: f64) -> Upper {
        let above = self.paces.len() - 1 - seat;
        let way = self.ways.get(seat).copied().filter(|_| above > 0).unwrap_or_default();
        let cycle = upper.cycle + seconds + 2.0 * (way.occupied + way.delay);
        // The seat above sends on both of its links: hidden states up and gradients down.
        let beyond = self.ways.get(seat + 1).filter(|_| above > 1).map_or(0.0, |way| way.occupied);
        let links = way.occupied + beyond;
        let period = upper.period.max(seconds).max(links).max(cycle / depth(above) as f64);
        Upper { cycle, period, squares: upper.squares + seconds * seconds, starts: Vec::new() }
    }

    /// The layers of each seat with which a step is fastest; among equals, the most even ones. `None` if no split fits.
    /// Each seat gets a layer where there are enough. `reads` gives the seconds in which a seat of these layers reads
    /// those that it streams, for both passes of a microbatch; `None` if it has no room for them.
    pub fn split(
        &self,
        reads: &mut dyn FnMut(usize, &Range<usize>) -> Option<f64>,
    ) -> Option<Vec<Range<usize>>> {
        self.within(f64::INFINITY, reads).map(|(split, _)| split)
    }

    /// Whether a step takes that long at least, with these seats above `seat` and layers from `start` on.
    fn reaches(&self, limit: f64, upper: &Upper, (seat, start): (usize, usize)) -> bool {
        if limit == f64::INFINITY {
            return false;
        }
        let (below, start) = (&self.paces[..seat], start as f64);
        let fastest = below.iter().map(|pace| pace.layer).fold(f64::INFINITY, f64::min);
        let together: f64 = below.iter().map(|pace| 1.0 / pace.layer).sum();
        let (cycle, period) = if seat == 0 { (0.0, 0.0) } else { (start * fastest, start / together) };
        self.of(&Upper { cycle: upper.cycle + cycle, period: upper.period.max(period), ..Upper::default() })
            >= limit
    }

    /// The same with the seconds of a step, if they are less than `limit`.
    fn within(
        &self,
        limit: f64,
        reads: &mut dyn FnMut(usize, &Range<usize>) -> Option<f64>,
    ) -> Option<(Vec<Range<usize>>, f64)> {
        let (last, least) = (self.paces.len().checked_sub(1)?, usize::from(self.layers >= self.paces.len()));
        // By the first layer of the seats above.
        let mut above: Vec<Vec<Upper>> = vec![Vec::new(); self.layers + 1];
        above[self.layers] = vec![Upper::default()];
        for seat in (0..=last).rev() {
            let mut below: Vec<Vec<Upper>> = vec![Vec::new(); self.layers + 1];
            for (end, uppers) in above.iter().enumerate().filter(|(_, uppers)| !uppers.is_empty()) {
                // The head belongs to the last seat, which is the only one that ends with the last layer.
                let least = if seat == last { least.max(1) } else { least };
                let most = if seat == 0 { 1 } else { (end + 1).saturating_sub(least) };
                for start in (0..most).filter(|start| start + least <= end) {
                    if let Some(read) = reads(seat, &(start..end)) {
                        let seconds = self.seconds(seat, &(start..end)) + read;
                        for upper in uppers {
                            let more = self.under(upper, seat, seconds);
                            if !self.reaches(limit, &more, (seat, start)) {
                                let starts = [&upper.starts[..], &[start]].concat();
                                Upper { starts, ..more }.enter(&mut below[start]);
                            }
                        }
                    }
                }
            }
            above = below;
        }
        let better = |a: &Upper, b: &Upper| {
            let (mine, theirs) = (self.of(a), self.of(b));
            mine < theirs * (1.0 - EQUAL) || mine <= theirs * (1.0 + EQUAL) && a.squares < b.squares
        };
        let best = above.swap_remove(0).into_iter().reduce(|a, b| if better(&b, &a) { b } else { a })?;
        let ends = best.starts.iter().rev().skip(1).copied().chain([self.layers]);
        let split = best.starts.iter().rev().copied().zip(ends).map(|(start, end)| start..end).collect();
        Some((split, self.of(&best)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::rng::Stream;

    /// All ends of `seats` seats from `start` on.
    fn all(start: usize, layers: usize, seats: usize, least: usize) -> Vec<Vec<usize>> {
        if seats == 1 {
            return if start + least <= layers { vec![vec![layers]] } else { vec![] };
        }
        let tails = |end: usize| {
            all(end, layers, seats - 1, least).into_iter().map(move |tail| [vec![end], tail].concat())
        };
        (start + least..layers).flat_map(tails).collect()
    }

    fn ranges(ends: &[usize]) -> Vec<Range<usize>> {
        [0].into_iter().chain(ends.iter().copied()).zip(ends).map(|(start, end)| start..*end).collect()
    }

    /// Seconds of a step, written down from the rules of the seats; `reads` as in a split. `None` if a seat has no room.
    fn step(
        question: &Question,
        ranges: &[Range<usize>],
        reads: &dyn Fn(usize, &Range<usize>) -> Option<f64>,
    ) -> Option<f64> {
        let one = |(seat, r): (usize, &Range<usize>)| Some(question.seconds(seat, r) + reads(seat, r)?);
        let seconds: Vec<f64> = ranges.iter().enumerate().map(one).collect::<Option<_>>()?;
        let way = |seat: usize| question.ways.get(seat).copied().unwrap_or_default();
        let seats = ranges.len();
        let cycle = |from: usize| {
            let ways = (from..seats - 1).map(|seat| 2.0 * (way(seat).occupied + way(seat).delay));
            seconds[from..].iter().sum::<f64>() + ways.sum::<f64>()
        };
        let slowest =
            (0..seats).map(|seat| seconds[seat].max(cycle(seat) / (2 * (seats - 1 - seat) + 1) as f64));
        let up = |seat: usize| if seat + 1 < seats { way(seat).occupied } else { 0.0 };
        let sends = (0..seats).map(|seat| up(seat) + seat.checked_sub(1).map_or(0.0, up));
        let period = slowest.chain(sends).fold(0.0, f64::max);
        Some(cycle(0) + (question.microbatches - 1) as f64 * period)
    }

    #[test]
    fn split_is_as_fast_as_the_best_of_all_splits() {
        let mut draws = Stream::new(&[11]);
        let (mut split, mut refused, mut streamed) = (0, 0, 0);
        for _ in 0..2000 {
            let (layers, seats) = (1 + draws.below(9) as usize, 1 + draws.below(4) as usize);
            let head = f64::from(draws.below(5));
            let paces: Vec<Pace> =
                (0..seats).map(|_| Pace::of((1.0, head), f64::from(1 + draws.below(8)))).collect();
            let mut second = || 0.5 * f64::from(draws.below(9));
            let ways: Vec<Way> = (1..seats).map(|_| Way { occupied: second(), delay: second() }).collect();
            let ways = if draws.below(3) == 0 { vec![] } else { ways };
            let microbatches = [1, 2, 4, 16, MANY][draws.below(5) as usize];
            let question = Question { layers, paces: &paces, ways: &ways, microbatches };
            // Memory: a size for each layer, embedding and head, and room on each seat.
            let sizes: Vec<u32> = (0..layers + 2).map(|_| 1 + draws.below(6)).collect();
            let rooms: Vec<u32> = (0..seats).map(|_| 4 + draws.below(24)).collect();
            // Some seats may read layers of which they have no room for more than one.
            let may: Vec<bool> = (0..seats).map(|_| draws.below(3) == 0).collect();
            let second = 0.25 * f64::from(draws.below(9));
            let reads = |seat: usize, range: &Range<usize>| {
                let first = if range.start == 0 { sizes[layers] } else { 0 };
                let last = if range.end == layers { sizes[layers + 1] } else { 0 };
                let needs = |streamed: usize| {
                    let (away, kept) = sizes[range.clone()].split_at(streamed);
                    kept.iter().sum::<u32>() + away.iter().max().unwrap_or(&0) + first + last
                };
                let most = if may[seat] { range.len() } else { 0 };
                let streamed = (0..=most).find(|streamed| needs(*streamed) <= rooms[seat])?;
                Some(streamed as f64 * second)
            };
            let possible = all(0, layers, seats, usize::from(layers >= seats));
            let best = possible.iter().filter_map(|ends| step(&question, &ranges(ends), &reads));
            let best = best.min_by(f64::total_cmp);
            let found = question.split(&mut |seat, range| reads(seat, range));
            let seconds = found.as_ref().and_then(|ranges| step(&question, ranges, &reads));
            assert!(
                seconds.is_some() == best.is_some()
                    && seconds.zip(best).is_none_or(|(a, b)| (a / b - 1.0).abs() < 1e-8),
                "{found:?} {seconds:?} {best:?} {question:?} {sizes:?} {rooms:?}"
            );
            if let Some(found) = found {
                assert!(found[0].start == 0 && found[seats - 1].end == layers);
                let read = found.iter().enumerate().filter_map(|(seat, range)| reads(seat, range));
                streamed += usize::from(read.sum::<f64>() > 0.0);
                assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start));
                split += 1;
            } else {
                refused += 1;
            }
        }
        assert!(split > 500 && refused > 100 && streamed > 100, "{split} {refused} {streamed}");
    }

    #[test]
    fn equal_seats_get_equal_parts() {
        let split = |layers, speeds: &[f64]| {
            let paces: Vec<Pace> = speeds.iter().map(|speed| Pace::of((1.0, 0.0), *speed)).collect();
            Question { layers, paces: &paces, ways: &[], microbatches: MANY }
                .split(&mut |_, _| Some(0.0))
                .unwrap()
        };
        assert_eq!(split(30, &[1.0, 1.0]), [0..15, 15..30]);
        assert_eq!(split(30, &[2.0, 1.0]), [0..20, 20..30]);
        assert_eq!(split(7, &[1.0, 1.0, 1.0]).iter().map(|r| r.len()).max(), Some(3));
        let few = split(2, &[100.0, 100.0, 5.0]);
        assert!(
            few[..2].iter().all(|seat| seat.end < 2) && few[2].end == 2,
            "the head is in the last seat: {few:?}"
        );
        assert_eq!(split(1, &[2.0, 1.0]), [0..0, 0..1]);
    }

    /// A line of `seats` with a link of every pair.
    fn drawn(draws: &mut Stream, seats: usize) -> Vec<Vec<Way>> {
        let mut second = || f64::from(draws.below(7));
        let mut row = || (0..seats).map(|_| Way { occupied: second(), delay: second() }).collect::<Vec<_>>();
        let one_way: Vec<Vec<Way>> = (0..seats).map(|_| row()).collect();
        let both = |a: usize, b: usize| one_way[a.min(b)][a.max(b)];
        (0..seats).map(|a| (0..seats).map(|b| both(a, b)).collect()).collect()
    }

    #[test]
    fn order_is_as_fast_as_the_best_of_all_orders() {
        let mut draws = Stream::new(&[12]);
        let (mut moved, mut refused) = (0, 0);
        for _ in 0..500 {
            let (layers, seats) = (3 + draws.below(5) as usize, 2 + draws.below(2) as usize);
            let paces: Vec<Pace> =
                (0..seats).map(|_| Pace::of((1.0, 3.0), f64::from(1 + draws.below(6)))).collect();
            let links = drawn(&mut draws, seats);
            let microbatches = [1, 4, MANY][draws.below(3) as usize];
            // A seat holds more the nearer it is to the first one, and the first one the embedding too.
            let rooms: Vec<usize> = (0..seats).map(|_| 2 + draws.below(12) as usize).collect();
            let reads = |at: usize, place: usize, range: &Range<usize>| {
                let needs = range.len() * (seats - place) + if place == 0 { 2 } else { 0 };
                (needs <= rooms[at]).then_some(0.0)
            };
            let seconds = |order: &[usize], split: &[Range<usize>]| {
                let paces: Vec<Pace> = order.iter().map(|at| paces[*at]).collect();
                let ways: Vec<Way> = order.windows(2).map(|pair| links[pair[0]][pair[1]]).collect();
                let room = |place: usize, range: &Range<usize>| reads(order[place], place, range);
                step(&Question { layers, paces: &paces, ways: &ways, microbatches }, split, &room)
            };
            let ends = all(0, layers, seats, 1);
            let orders = orders(seats);
            let best = orders.iter().flat_map(|order| {
                ends.iter().filter_map(|ends| seconds(order, &ranges(ends))).collect::<Vec<_>>()
            });
            let best = best.min_by(f64::total_cmp);
            let question = Question { layers, paces: &paces, ways: &[], microbatches };
            let found =
                question.arrange(&|a, b| links[a][b], &mut |at, place, range| reads(at, place, range));
            match (found, best) {
                (Some(Arranged { order, split, seconds: expected }), Some(best)) => {
                    let found = seconds(&order, &split).expect("each seat has room");
                    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
                    assert!(found * WORTH <= best * (1.0 + 1e-9), "{order:?} {split:?} {found} {best}");
                    moved += usize::from(!order.is_sorted());
                }
                (None, None) => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(moved > 50 && refused > 20, "{moved} {refused}");
    }

    #[test]
    fn a_slow_link_moves_the_cut_to_the_faster_seat() {
        let paces = [1.0, 2.0].map(|layer| Pace { layer, head: 0.0 });
        let split = |occupied: f64, delay: f64| {
            let ways = [Way { occupied, delay }];
            Question { layers: 12, paces: &paces, ways: &ways, microbatches: 8 }
                .split(&mut |_, _| Some(0.0))
                .unwrap()
        };
        assert_eq!(split(0.0, 0.0), [0..8, 8..12]);
        assert_eq!(split(4.0, 0.1), [0..8, 8..12], "hidden behind the seats");
        assert_eq!(split(7.0, 0.1), [0..9, 9..12], "three microbatches do not fill the way to and fro");
        assert_eq!(split(20.0, 0.1), [0..11, 11..12], "the link is slower than both seats");
        assert_eq!(split(1.0, 9.0), [0..11, 11..12], "far away");
    }

    #[test]
    fn devices_that_are_about_equally_fast_get_equal_parts() {
        let paces = [1.0, 1.05, 2.0, 0.96].map(|layer| Pace { layer, head: 3.0 * layer });
        let equal: Vec<f64> = alike(&paces).iter().map(|pace| pace.layer).collect();
        assert_eq!(equal, [0.96, 0.96, 2.0, 0.96]);
    }
}
