//! Split of a model's layers among the seats of a line. The slowest seat sets the pace of a line, and memory is a wall:
//! a seat never gets layers that it has no room for.

use std::ops::Range;

/// A model and the seats of a line.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Layers of the model.
    pub layers: usize,
    /// Cost of a layer, and of the head, in the same unit.
    pub costs: (f64, f64),
    /// Cost per second that each seat computes, in the order of the line.
    pub speeds: &'a [f64],
}

impl Question<'_> {
    /// Seconds of a seat with these layers.
    pub fn seconds(&self, seat: usize, layers: &Range<usize>) -> f64 {
        let (layer, head) = self.costs;
        let head = if layers.end == self.layers { head } else { 0.0 };
        (layers.len() as f64 * layer + head) / self.speeds[seat]
    }

    /// The layers of each seat for which the slowest seat is fastest; among equals, the most even ones. `None` if no
    /// split fits. Each seat gets a layer where there are enough.
    pub fn split(&self, fits: &mut dyn FnMut(usize, &Range<usize>) -> bool) -> Option<Vec<Range<usize>>> {
        let least = usize::from(self.layers >= self.speeds.len());
        // By the number of layers below a seat: the slowest time, the sum of squared times, and the ends of all seats.
        let mut below: Vec<Option<(f64, f64, Vec<usize>)>> = vec![None; self.layers + 1];
        below[0] = Some((0.0, 0.0, Vec::new()));
        for seat in 0..self.speeds.len() {
            let mut above: Vec<Option<(f64, f64, Vec<usize>)>> = vec![None; self.layers + 1];
            for (start, before) in below.iter().enumerate() {
                let Some((slowest, squares, ends)) = before else { continue };
                // The head belongs to the last seat, which is the only one that ends with the last layer.
                let count = self.layers + usize::from(seat + 1 == self.speeds.len());
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
            let speeds: Vec<f64> = (0..seats).map(|_| f64::from(1 + draws.below(8))).collect();
            let question = Question { layers, costs: (1.0, f64::from(draws.below(5))), speeds: &speeds };
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
            Question { layers, costs: (1.0, 0.0), speeds }.split(&mut |_, _| true).unwrap()
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
}
