//! Received parameters: in pieces, in order, and hashed here over the values in memory, because the hash goes into
//! every result as the proof of the parameters that it was computed with.

use crate::cluster::message::Hash;
use crate::cluster::sum_chunk::little_endian;
use crate::numeric::{fixed, pack};
use std::collections::BTreeMap;
use std::ops::Range;

/// The parameters after a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameters {
    /// Number of optimizer steps they result from.
    pub step: u64,
    /// blake3 over all values, little-endian.
    pub hash: Hash,
    /// The values in the flat layout.
    pub values: Vec<f32>,
}

impl Parameters {
    /// Hashes `values`.
    pub fn new(step: u64, values: Vec<f32>) -> Self {
        let hash = hash(&values);
        Parameters { step, hash, values }
    }
}

/// blake3 over the values as little-endian f32.
pub fn hash(values: &[f32]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    if cfg!(target_endian = "little") {
        hasher.update_rayon(bytemuck::cast_slice(values));
    } else {
        for value in values {
            hasher.update(&value.to_le_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}

/// The pieces received so far.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    step: u64,
    values: Vec<f32>,
    /// Updated while a piece is in the cache and the next one is in transit.
    hasher: blake3::Hasher,
}

impl Arriving {
    /// Adds the next piece; offset 0 starts over. `len` is the length of the flat layout.
    pub fn piece(&mut self, step: u64, offset: u64, bytes: &[u8], len: usize) -> Result<(), String> {
        let (values, rest) = bytes.as_chunks::<4>();
        let count = if rest.is_empty() { values.len() } else { usize::MAX };
        self.expect(step, offset, count, len)?;
        self.hasher.update(bytes);
        self.values.extend(values.iter().map(|v| f32::from_le_bytes(*v)));
        Ok(())
    }

    /// The error is that these `count` of `len` values do not follow those before.
    fn expect(&mut self, step: u64, offset: u64, count: usize, len: usize) -> Result<(), String> {
        if offset == 0 {
            self.step = step;
            self.values.clear();
            self.values.reserve(len);
            self.hasher.reset();
        }
        let fits = count <= len - self.values.len().min(len);
        if step != self.step || offset != self.values.len() as u64 || !fits {
            return Err(format!("a piece of the parameters at {offset} that does not follow the one before"));
        }
        Ok(())
    }

    /// Adds the next `len` values as changes of those of the parameters before.
    pub fn change(
        &mut self,
        step: u64,
        (offset, len): (u64, u32),
        packed: &[u8],
        before: Option<&Parameters>,
    ) -> Result<(), String> {
        let Some(before) = before else {
            return Err(format!("a change of parameters to those after step {step}, which do not follow"));
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let values = before.values.get(from..from.saturating_add(len as usize));
        let values = values.ok_or_else(|| format!("a change of {len} parameters from {offset} on"))?;
        let mut changes = vec![0; values.len()];
        pack::set(packed, &mut changes, i64::MAX).map_err(|e| format!("a change of parameters: {e}"))?;
        self.expect(step, offset, values.len(), before.values.len())?;
        for (value, change) in values.iter().zip(&changes) {
            let next = value + fixed::to_f64(*change) as f32;
            self.values.push(next);
        }
        self.hasher.update(&little_endian(&self.values[from..]));
        Ok(())
    }

    /// Whether all of the parameters after this step have come.
    pub fn is_complete(&self, step: u64, len: usize) -> bool {
        (self.step == step || len == 0) && self.values.len() == len
    }

    /// Completes the parameters; an error if values are missing. A seat that trains nothing gets no pieces.
    pub fn take(&mut self, step: u64, len: usize) -> Result<Parameters, String> {
        match self.is_complete(step, len) {
            true => {
                let hash = *self.hasher.finalize().as_bytes();
                Ok(Parameters { step, hash, values: std::mem::take(&mut self.values) })
            }
            false => Err(format!("{} of {len} parameters came", self.values.len())),
        }
    }
}

/// The parameters that come from relays: each brings its range, in order. Ranges of a later step may overtake others of the
/// step before.
#[derive(Debug)]
pub(super) struct FromRelays {
    /// The values of each relay.
    ranges: Vec<Range<usize>>,
    /// By step.
    coming: BTreeMap<u64, Ranges>,
}

/// The ranges of a step so far.
#[derive(Debug)]
struct Ranges {
    values: Vec<f32>,
    /// The value that each relay brings next.
    next: Vec<usize>,
}

/// Most steps whose parameters may be on their way.
const MOST_STEPS: usize = 3;

impl FromRelays {
    pub fn new(ranges: &[(u64, u64)]) -> Self {
        let ranges = ranges.iter().map(|&(from, to)| from as usize..to as usize).collect();
        FromRelays { ranges, coming: BTreeMap::new() }
    }

    /// Adds the next values of a relay; the error is that it is none that a correct relay sends.
    pub fn piece(&mut self, place: u16, (step, offset): (u64, u64), bytes: &[u8]) -> Result<(), String> {
        let wrong = || format!("the relay {place} sent a part of the parameters that does not belong there");
        let (values, rest) = bytes.as_chunks::<4>();
        let range = self.ranges.get(usize::from(place)).ok_or_else(wrong)?;
        if !self.coming.contains_key(&step) && self.coming.len() >= MOST_STEPS {
            return Err(wrong());
        }
        let len = self.ranges.last().map_or(0, |range| range.end);
        let ranges = self.coming.entry(step).or_insert_with(|| Ranges {
            values: vec![0.0; len],
            next: self.ranges.iter().map(|range| range.start).collect(),
        });
        let next = &mut ranges.next[usize::from(place)];
        if offset != *next as u64 || values.len() > range.end - *next || !rest.is_empty() {
            return Err(wrong());
        }
        let to = &mut ranges.values[*next..*next + values.len()];
        to.iter_mut().zip(values).for_each(|(to, from)| *to = f32::from_le_bytes(*from));
        *next += values.len();
        Ok(())
    }

    /// The parameters after a step once all of them are here; those of earlier steps are dropped.
    pub fn take(&mut self, step: u64) -> Option<Parameters> {
        self.coming.retain(|coming, _| *coming >= step);
        let ranges = self.coming.get(&step)?;
        if ranges.next.iter().zip(&self.ranges).any(|(next, range)| *next < range.end) {
            return None;
        }
        self.coming.remove(&step).map(|ranges| Parameters::new(step, ranges.values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::coarse;
    use crate::numeric::rng::Stream;

    fn packed(changes: &[f32]) -> Vec<u8> {
        let (mut fixed, mut bytes) = (vec![0; changes.len()], Vec::new());
        fixed::set_checked(&mut fixed, changes);
        pack::pack(&fixed, &mut bytes);
        bytes
    }

    #[test]
    fn changes_give_the_bits_of_the_sender() {
        let mut draws = Stream::new(&[3]);
        let mut draw =
            |len: usize, scale: f32| (0..len).map(|_| (draws.unit() - 0.5) * scale).collect::<Vec<f32>>();
        let len = 333;
        let before = Parameters::new(7, draw(len, 0.1));
        let mut changes = draw(len, 1e-3);
        coarse::nearest(&mut changes, 8);
        let after: Vec<f32> =
            before.values.iter().zip(&changes).map(|(value, change)| value + change).collect();
        let mut arriving = Arriving::default();
        for (from, to) in [(0, 200), (200, len)] {
            let place = (from as u64, (to - from) as u32);
            arriving.change(8, place, &packed(&changes[from..to]), Some(&before)).unwrap();
        }
        let got = arriving.take(8, len).unwrap();
        assert_eq!((got.hash, &got.values), (hash(&after), &after));
    }

    #[test]
    fn a_seat_that_trains_nothing_has_parameters_at_every_step() {
        let mut arriving = Arriving::default();
        for step in [0, 1, 7] {
            assert_eq!(arriving.take(step, 0), Ok(Parameters::new(step, Vec::new())));
        }
        assert_eq!(arriving.take(1, 3), Err("0 of 3 parameters came".into()));
    }

    #[test]
    fn changes_that_do_not_follow_are_refused() {
        let before = Parameters::new(7, vec![0.5; 9]);
        let whole = packed(&[0.25; 9]);
        let said =
            |place, bytes: &[u8], before| Arriving::default().change(8, place, bytes, before).unwrap_err();
        assert!(said((0, 9), &whole, None).contains("which do not follow"));
        for place in [(0, 10), (9, 1), (u64::MAX, 1), (0, u32::MAX)] {
            assert!(said(place, &whole, Some(&before)).contains("a change of"), "{place:?}");
        }
        assert!(said((0, 9), &whole[1..], Some(&before)).contains("a packed sum"));
        assert!(said((1, 8), &packed(&[0.25; 8]), Some(&before)).contains("does not follow"));
    }

    #[test]
    fn parameters_from_relays_come_in_any_order_of_ranges() {
        let bytes = |step: u64, range: std::ops::Range<usize>| -> Vec<u8> {
            range.flat_map(|i| (i as f32 + step as f32).to_le_bytes()).collect()
        };
        let mut from = FromRelays::new(&[(0, 3), (3, 3), (3, 7)]);
        from.piece(2, (4, 3), &bytes(4, 3..5)).unwrap();
        from.piece(0, (4, 0), &bytes(4, 0..3)).unwrap();
        // A later step overtakes the rest of this one.
        from.piece(0, (5, 0), &bytes(5, 0..3)).unwrap();
        assert_eq!(from.take(4), None);
        from.piece(2, (4, 5), &bytes(4, 5..7)).unwrap();
        let whole = |step: u64| Parameters::new(step, (0..7).map(|i| i as f32 + step as f32).collect());
        assert_eq!(from.take(4), Some(whole(4)));
        from.piece(2, (5, 3), &bytes(5, 3..7)).unwrap();
        assert_eq!(from.take(5), Some(whole(5)));
        assert_eq!(from.take(5), None);
        for (place, step, offset, bytes) in [
            (3, 6, 0, &[0; 4][..]),
            (0, 6, 1, &[0; 4]),
            (0, 6, 0, &[0; 16]),
            (0, 6, 0, &[0; 5]),
            (1, 6, 3, &[0; 4]),
            (2, 6, u64::MAX, &[0; 4]),
        ] {
            let refused = from.piece(place, (step, offset), bytes).unwrap_err();
            assert!(refused.contains("does not belong there"), "{place} {step} {offset}");
        }
        (7..9).for_each(|step| from.piece(0, (step, 0), &[0; 4]).unwrap());
        assert!(from.piece(0, (9, 0), &[0; 4]).is_err(), "too many steps at once");
    }
}
