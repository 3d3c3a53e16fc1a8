//! Received parameters: in pieces, in order, and hashed here over the values in memory, because the hash goes into
//! every result as the proof of the parameters that it was computed with.

use crate::cluster::message::{Changed, Hash};
use crate::cluster::sum_chunk::little_endian;
use crate::numeric::fixed::CELL;
use crate::numeric::{difference, fixed, pack};
use bytes::Bytes;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Display;
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

/// An error for bytes that do not unpack.
fn wrong(reason: impl Display) -> String {
    format!("a change of parameters: {reason}")
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

    /// Adds the next `len` values, computed from those of the parameters before.
    pub fn change(
        &mut self,
        step: u64,
        (offset, len): (u64, u32),
        changed: &Changed,
        before: Option<&Parameters>,
    ) -> Result<(), String> {
        let Some(before) = before else {
            return Err(format!("a change of parameters to those after step {step}, which do not follow"));
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let values = before.values.get(from..from.saturating_add(len as usize));
        let values = values.ok_or_else(|| format!("a change of {len} parameters from {offset} on"))?;
        let mut next = Vec::with_capacity(values.len());
        match changed {
            Changed::Added(packed) => {
                let mut changes = vec![0; values.len()];
                pack::set(packed, &mut changes, i64::MAX).map_err(wrong)?;
                let add = |(value, change): (&f32, &i64)| value + fixed::to_f64(*change) as f32;
                next.extend(values.iter().zip(&changes).map(add));
            }
            Changed::Bits(packed) => difference::unpack(packed, values, &mut next).map_err(wrong)?,
        }
        self.expect(step, offset, values.len(), before.values.len())?;
        self.values.append(&mut next);
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

/// The parameters that come from relays: each brings its range, in order. Parts of a later step may overtake others of the
/// step before, so they stay packed until the parameters of the step before are complete.
#[derive(Debug)]
pub(super) struct FromRelays {
    /// The values of each relay.
    ranges: Vec<Range<usize>>,
    /// By step.
    coming: BTreeMap<u64, Step>,
}

/// The parts of a step so far, of each relay.
type Step = Vec<Parts>;

#[derive(Debug, Default)]
struct Parts {
    /// Number of values, and their packing.
    packed: Vec<(usize, Bytes)>,
    /// Number of values of all of them.
    values: usize,
}

/// Most steps whose parameters may be on their way.
const MOST_STEPS: usize = 3;

impl FromRelays {
    pub fn new(ranges: &[(u64, u64)]) -> Self {
        let ranges = ranges.iter().map(|&(from, to)| from as usize..to as usize).collect();
        FromRelays { ranges, coming: BTreeMap::new() }
    }

    /// Adds the next cell of a relay. The error is that a correct relay does not send it, or that the others are
    /// [`MOST_STEPS`] steps behind.
    pub fn piece(
        &mut self,
        place: u16,
        (step, offset, len): (u64, u64, u32),
        packed: Bytes,
    ) -> Result<(), String> {
        let wrong = || format!("the relay {place} sent a part of the parameters that does not belong there");
        let range = self.ranges.get(usize::from(place)).ok_or_else(wrong)?;
        if !self.coming.contains_key(&step) && self.coming.len() >= MOST_STEPS {
            return Err(wrong());
        }
        let coming =
            self.coming.entry(step).or_insert_with(|| self.ranges.iter().map(|_| Parts::default()).collect());
        let (parts, len) = (&mut coming[usize::from(place)], len as usize);
        let next = range.start + parts.values;
        let cell = CELL.min(range.end - next);
        if offset != next as u64 || len == 0 || len != cell || packed.len() > difference::most(len) {
            return Err(wrong());
        }
        parts.values += len;
        parts.packed.push((len, packed));
        Ok(())
    }

    /// The parameters after a step, once all steps after those that are `held` are here. The error is that bytes of a relay
    /// do not unpack.
    pub fn take(&mut self, step: u64, held: &Parameters) -> Result<Option<Parameters>, String> {
        self.coming.retain(|coming, _| *coming > held.step);
        let mut values: Option<Vec<f32>> = None;
        let complete =
            |coming: &Step| coming.iter().zip(&self.ranges).all(|(parts, of)| parts.values == of.len());
        if !(held.step..step).all(|before| self.coming.get(&(before + 1)).is_some_and(complete)) {
            return Ok(None);
        }
        while let Some(first) = self.coming.first_entry().filter(|first| *first.key() <= step) {
            let next = unpacked(&first.remove(), values.as_ref().unwrap_or(&held.values))?;
            values = Some(next);
        }
        Ok(values.map(|values| Parameters::new(step, values)))
    }
}

/// The values after a step, from the `old` ones before it.
fn unpacked(coming: &Step, old: &[f32]) -> Result<Vec<f32>, String> {
    let mut at = 0;
    let parts = coming
        .iter()
        .enumerate()
        .flat_map(|(place, parts)| parts.packed.iter().map(move |(len, packed)| (place, *len, packed)));
    let parts: Vec<_> = parts
        .map(|(place, len, packed)| {
            at += len;
            (place, at - len..at, packed)
        })
        .collect();
    let values = parts.into_par_iter().map(|(place, range, packed)| {
        let mut values = Vec::new();
        let old = old.get(range).ok_or("parameters of another model")?;
        difference::unpack(packed, old, &mut values)
            .map_err(|e| format!("the relay {place}: {}", wrong(e)))?;
        Ok(values)
    });
    Ok(values.collect::<Result<Vec<_>, String>>()?.concat())
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

    fn differences(new: &[f32], old: &[f32]) -> Vec<u8> {
        let of = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mut bytes = Vec::new();
        difference::pack(&of(new), &of(old), &mut bytes);
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
        let added = |range: Range<usize>| Changed::Added(packed(&changes[range]).into());
        let bits = |range: Range<usize>| {
            Changed::Bits(differences(&after[range.clone()], &before.values[range]).into())
        };
        for changed in [&added as &dyn Fn(Range<usize>) -> Changed, &bits] {
            let mut arriving = Arriving::default();
            for range in [0..200, 200..len] {
                let place = (range.start as u64, range.len() as u32);
                arriving.change(8, place, &changed(range), Some(&before)).unwrap();
            }
            let got = arriving.take(8, len).unwrap();
            assert_eq!((got.hash, &got.values), (hash(&after), &after));
        }
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
        let said = |place, bytes: &[u8], before| {
            let changed = Changed::Added(bytes.to_vec().into());
            Arriving::default().change(8, place, &changed, before).unwrap_err()
        };
        assert!(said((0, 9), &whole, None).contains("which do not follow"));
        for place in [(0, 10), (9, 1), (u64::MAX, 1), (0, u32::MAX)] {
            assert!(said(place, &whole, Some(&before)).contains("a change of"), "{place:?}");
        }
        assert!(said((0, 9), &whole[1..], Some(&before)).contains("a packed sum"));
        assert!(said((1, 8), &packed(&[0.25; 8]), Some(&before)).contains("does not follow"));
        let bits = Changed::Bits(vec![33; 40].into());
        let said = Arriving::default().change(8, (0, 9), &bits, Some(&before)).unwrap_err();
        assert_eq!(said, "a change of parameters: a block of 33 bits");
    }

    const LEN: usize = 2 * CELL + 7;
    /// Of three relays, the second has no values.
    const RANGES: [(u64, u64); 3] = [(0, CELL as u64), (CELL as u64, CELL as u64), (CELL as u64, LEN as u64)];
    const SECOND: Range<usize> = CELL..2 * CELL;
    const LAST: Range<usize> = 2 * CELL..LEN;

    /// The parameters after a step, and the parts of them that relays send.
    fn after(step: u64) -> Parameters {
        Parameters::new(step, (0..LEN).map(|i| i as f32 + step as f32).collect())
    }

    fn part(step: u64, range: Range<usize>) -> ((u64, u64, u32), Bytes) {
        let of = |step| after(step).values[range.clone()].to_vec();
        ((step, range.start as u64, range.len() as u32), differences(&of(step), &of(step - 1)).into())
    }

    #[test]
    fn parameters_from_relays_come_in_any_order_of_ranges() {
        let mut from = FromRelays::new(&RANGES);
        let mut piece = |place, (at, packed)| from.piece(place, at, packed).unwrap();
        piece(2, part(4, SECOND));
        piece(0, part(4, 0..CELL));
        // A later step overtakes the rest of this one.
        piece(0, part(5, 0..CELL));
        assert_eq!(from.take(4, &after(3)), Ok(None));
        let mut piece = |place, (at, packed)| from.piece(place, at, packed).unwrap();
        piece(2, part(4, LAST));
        assert_eq!(from.take(4, &after(2)), Ok(None), "those before are not held yet");
        assert_eq!(from.take(4, &after(3)), Ok(Some(after(4))));
        let mut piece = |place, (at, packed)| from.piece(place, at, packed).unwrap();
        [5, 6]
            .into_iter()
            .for_each(|step| [SECOND, LAST].into_iter().for_each(|of| piece(2, part(step, of))));
        piece(0, part(6, 0..CELL));
        // Two steps at once.
        assert_eq!(from.take(6, &after(4)), Ok(Some(after(6))));
        assert_eq!(from.take(6, &after(4)), Ok(None));
    }

    #[test]
    fn parts_that_do_not_belong_to_a_relay_are_refused() {
        let mut from = FromRelays::new(&RANGES);
        let packed = |bytes: usize| Bytes::from(vec![0; bytes]);
        let cell = CELL as u64;
        let whole = CELL as u32;
        // Blocks of 8 values without a bit.
        let unchanged = packed(CELL / 8);
        for (place, at, bytes) in [
            (3, (6, 0, whole), 1),
            (0, (6, 1, whole), 1),
            (0, (6, 0, whole + 1), 1),
            (0, (6, 0, 1), 1),
            (0, (6, 0, 0), 0),
            (0, (6, 0, whole), difference::most(CELL) + 1),
            (1, (6, cell, 0), 0),
            (1, (6, cell, 1), 1),
            (2, (6, u64::MAX, whole), 1),
        ] {
            let refused = from.piece(place, at, packed(bytes)).unwrap_err();
            assert!(refused.contains("does not belong there"), "{place} {at:?}");
        }
        (7..9).for_each(|step| from.piece(0, (step, 0, whole), unchanged.clone()).unwrap());
        assert!(from.piece(0, (9, 0, whole), packed(1)).is_err(), "too many steps at once");
        // Bytes that are no packing.
        from.piece(2, (7, cell, whole), packed(2)).unwrap();
        from.piece(2, (7, 2 * cell, 7), packed(2)).unwrap();
        assert!(from.take(7, &after(6)).unwrap_err().contains("the relay 2: a change of parameters"));
    }
}
