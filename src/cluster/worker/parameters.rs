//! Received parameters: in pieces, in order, and hashed here over the values in memory, because the hash goes into
//! every result as the proof of the parameters that it was computed with.

use crate::cluster::message::Hash;

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
        if offset == 0 {
            self.step = step;
            self.values.clear();
            self.values.reserve(len);
            self.hasher.reset();
        }
        let (values, rest) = bytes.as_chunks::<4>();
        let fits = rest.is_empty() && values.len() <= len - self.values.len().min(len);
        if step != self.step || offset != self.values.len() as u64 || !fits {
            return Err(format!("a piece of the parameters at {offset} that does not follow the one before"));
        }
        self.hasher.update(bytes);
        self.values.extend(values.iter().map(|v| f32::from_le_bytes(*v)));
        Ok(())
    }

    /// Completes the parameters; an error if values are missing.
    pub fn take(&mut self, step: u64, len: usize) -> Result<Parameters, String> {
        match self.step == step && self.values.len() == len {
            true => {
                let hash = *self.hasher.finalize().as_bytes();
                Ok(Parameters { step, hash, values: std::mem::take(&mut self.values) })
            }
            false => Err(format!("{} of {len} parameters came", self.values.len())),
        }
    }
}
