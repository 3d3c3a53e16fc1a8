//! Split of a model's layers among the seats of a line. The slowest seat sets the pace of a line, and memory is a wall:
//! a seat never gets layers that it has no room for.

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

/// A model and the seats of a line.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Layers of the model.
    pub layers: usize,
    /// The seats, in the order of the line.
    pub paces: &'a [Pace],
}

/// Paces that differ by less than this share count as equal: measurements vary by that much.
const ALIKE: f64 = 0.1;
/// Most seats of which every order is tried.
const ORDERED: usize = 5;
/// The slowest seat of another order must be faster by this factor.
const WORTH: f64 = 0.99;

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

/// The order of the seats for which the slowest is fastest, as indices into `paces`, and the layers of each. The given
/// order stays unless another one is faster. `fits` gets an index into `paces`, the place in the line, and the layers.
pub fn arrange(
    layers: usize,
    paces: &[Pace],
    fits: &mut dyn FnMut(usize, usize, &Range<usize>) -> bool,
) -> Option<(Vec<usize>, Vec<Range<usize>>)> {
    let mut best: Option<(f64, Vec<usize>, Vec<Range<usize>>)> = None;
    for order in orders(paces.len()) {
        let ordered: Vec<Pace> = order.iter().map(|at| paces[*at]).collect();
        let question = Question { layers, paces: &ordered };
        let Some(split) = question.split(&mut |place, range| fits(order[place], place, range)) else {
            continue;
        };
        let slowest = split.iter().enumerate().map(|(seat, range)| question.seconds(seat, range));
        let slowest = slowest.fold(0.0, f64::max);
        if best.as_ref().is_none_or(|(before, ..)| slowest < WORTH * before) {
            best = Some((slowest, order, split));
        }
    }
    best.map(|(_, order, split)| (order, split))
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

impl Question<'_> {
    /// Seconds of a seat with these layers.
    pub fn seconds(&self, seat: usize, layers: &Range<usize>) -> f64 {
        let Pace { layer, head } = self.paces[seat];
        layers.len() as f64 * layer + if layers.end == self.layers { head } else { 0.0 }
    }

    /// The layers of each seat for which the slowest seat is fastest; among equals, the most even ones. `None` if no
    /// split fits. Each seat gets a layer where there are enough.
    pub fn split(&self, fits: &mut dyn FnMut(usize, &Range<usize>) -> bool) -> Option<Vec<Range<usize>>> {
        let least = usize::from(self.layers >= self.paces.len());
        // By the number of layers below a seat: the slowest time, the sum of squared times, and the ends of all seats.
        let mut below: Vec<Option<(f64, f64, Vec<usize>)>> = vec![None; self.layers + 1];
        below[0] = Some((0.0, 0.0, Vec::new()));
        for seat in 0..self.paces.len() {
            let mut above: Vec<Option<(f64, f64, Vec<usize>)>> = vec![None; self.layers + 1];
            for (start, before) in below.iter().enumerate() {
                let Some((slowest, squares, ends)) = before else { continue };
                // The head belongs to the last seat, which is the only one that ends with the last layer.
                let count = self.layers + usize::from(seat + 1 == self.paces.len());
                for (end, best) in above.iter_mut().enumerate().take(count).skip(start + least) {
                    let seconds = self.seconds(seat, &(start..end));
                    let time = (slowest.max(seconds), squares + seconds * seconds);
                    let faster =
                        best.as_ref().is_none_or(|(slowest, squares, _)| time < (*slowest, *squares));
                    if faster && fits(seat, &(start..end)) {
                        *best = Some((time.0, time.1, [&ends[..], &[end]].concat()));
                    }
                }
            }
            below = above;
        }
        let (_, _, ends) = below.pop()??;
        let starts = [0].into_iter().chain(ends.iter().copied());
        Some(starts.zip(&ends).map(|(start, end)| start..*end).collect())
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

    #[test]
    fn split_is_as_fast_as_the_best_of_all_splits() {
        let mut draws = Stream::new(&[11]);
        let (mut split, mut refused) = (0, 0);
        for _ in 0..2000 {
            let (layers, seats) = (1 + draws.below(9) as usize, 1 + draws.below(4) as usize);
            let head = f64::from(draws.below(5));
            let paces: Vec<Pace> =
                (0..seats).map(|_| Pace::of((1.0, head), f64::from(1 + draws.below(8)))).collect();
            let question = Question { layers, paces: &paces };
            // Memory: a size for each layer, embedding and head, and room on each seat.
            let sizes: Vec<u32> = (0..layers + 2).map(|_| 1 + draws.below(6)).collect();
            let rooms: Vec<u32> = (0..seats).map(|_| 4 + draws.below(24)).collect();
            let fits = |seat: usize, range: &Range<usize>| {
                let first = if range.start == 0 { sizes[layers] } else { 0 };
                let last = if range.end == layers { sizes[layers + 1] } else { 0 };
                sizes[range.clone()].iter().sum::<u32>() + first + last <= rooms[seat]
            };
            let slowest = |ranges: &[Range<usize>]| {
                ranges.iter().enumerate().map(|(seat, r)| question.seconds(seat, r)).fold(0.0, f64::max)
            };
            let stands = |ranges: &Vec<Range<usize>>| ranges.iter().enumerate().all(|(s, r)| fits(s, r));
            let possible = all(0, layers, seats, usize::from(layers >= seats));
            let best = possible.iter().map(|ends| ranges(ends)).filter(stands).map(|r| slowest(&r));
            let best = best.min_by(f64::total_cmp);
            let found = question.split(&mut |seat, range| fits(seat, range));
            assert_eq!(
                found.as_ref().map(|ranges| slowest(ranges)),
                best,
                "{question:?} {sizes:?} {rooms:?}"
            );
            if let Some(found) = found {
                assert!(stands(&found) && found[0].start == 0 && found[seats - 1].end == layers);
                assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start));
                split += 1;
            } else {
                refused += 1;
            }
        }
        assert!(split > 500 && refused > 100, "{split} {refused}");
    }

    #[test]
    fn equal_seats_get_equal_parts() {
        let split = |layers, speeds: &[f64]| {
            let paces: Vec<Pace> = speeds.iter().map(|speed| Pace::of((1.0, 0.0), *speed)).collect();
            Question { layers, paces: &paces }.split(&mut |_, _| true).unwrap()
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

    #[test]
    fn order_is_as_fast_as_the_best_of_all_orders() {
        let mut draws = Stream::new(&[12]);
        let (mut moved, mut refused) = (0, 0);
        for _ in 0..500 {
            let (layers, seats) = (3 + draws.below(5) as usize, 2 + draws.below(2) as usize);
            let paces: Vec<Pace> =
                (0..seats).map(|_| Pace::of((1.0, 3.0), f64::from(1 + draws.below(6)))).collect();
            // A seat holds more the nearer it is to the first one, and the first one the embedding too.
            let rooms: Vec<usize> = (0..seats).map(|_| 2 + draws.below(12) as usize).collect();
            let fits = |at: usize, place: usize, range: &Range<usize>| {
                range.len() * (seats - place) + if place == 0 { 2 } else { 0 } <= rooms[at]
            };
            let slowest = |order: &[usize], ranges: &[Range<usize>]| {
                let seconds = order.iter().zip(ranges).map(|(at, range)| {
                    let head = if range.end == layers { paces[*at].head } else { 0.0 };
                    range.len() as f64 * paces[*at].layer + head
                });
                seconds.fold(0.0, f64::max)
            };
            let ends = all(0, layers, seats, 1);
            let orders = orders(seats);
            let best = orders.iter().flat_map(|order| {
                let all = ends.iter().map(|ends| ranges(ends));
                let stands = |ranges: &Vec<Range<usize>>| {
                    ranges.iter().enumerate().all(|(place, range)| fits(order[place], place, range))
                };
                all.filter(stands).map(|ranges| slowest(order, &ranges)).collect::<Vec<_>>()
            });
            let best = best.min_by(f64::total_cmp);
            match (arrange(layers, &paces, &mut |at, place, range| fits(at, place, range)), best) {
                (Some((order, split)), Some(best)) => {
                    assert!(slowest(&order, &split) * WORTH <= best, "{order:?} {split:?} {best}");
                    assert!(split.iter().enumerate().all(|(place, range)| fits(order[place], place, range)));
                    moved += usize::from(!order.is_sorted());
                }
                (None, None) => refused += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(moved > 50 && refused > 20, "{moved} {refused}");
    }

    #[test]
    fn devices_that_are_about_equally_fast_get_equal_parts() {
        let paces = [1.0, 1.05, 2.0, 0.96].map(|layer| Pace { layer, head: 3.0 * layer });
        let equal: Vec<f64> = alike(&paces).iter().map(|pace| pace.layer).collect();
        assert_eq!(equal, [0.96, 0.96, 2.0, 0.96]);
    }
}
