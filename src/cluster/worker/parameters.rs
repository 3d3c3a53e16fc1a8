//! Received parameters: in pieces, in order, and hashed here over the values in memory, because the hash goes into
//! every result as the proof of the parameters that it was computed with.

use crate::cluster::message::Hash;
use crate::cluster::sum_chunk::little_endian;
use crate::numeric::{fixed, pack};

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

    /// Completes the parameters; an error if values are missing. A seat that trains nothing gets no pieces.
    pub fn take(&mut self, step: u64, len: usize) -> Result<Parameters, String> {
        match (self.step == step || len == 0) && self.values.len() == len {
            true => {
                let hash = *self.hasher.finalize().as_bytes();
                Ok(Parameters { step, hash, values: std::mem::take(&mut self.values) })
            }
            false => Err(format!("{} of {len} parameters came", self.values.len())),
        }
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
}
