//! The wire format of a sum: one message per cell of [`CELL`] values, in order. Each can be added to a total without
//! waiting for the others, and subtracted from it exactly.

use super::message::{Packed, ToCoordinator};
use crate::numeric::fixed::{self as exact, BadValue, CELL};
use crate::numeric::pack::{self, PackError};
use crate::train::sum::Sums;
use bytes::Bytes;

/// A piece that no correct worker sends.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SumChunkError {
    /// The piece is not the next cell.
    #[error("a sum's piece has {len} values from {offset} on, where {want_len} from {want} on were due")]
    Place {
        /// First value of the piece.
        offset: u64,
        /// Number of its values.
        len: u32,
        /// First value of the next cell.
        want: u64,
        /// Number of values of the next cell.
        want_len: usize,
    },
    /// A single microbatch's gradient with the wrong size.
    #[error("a gradient's piece has {got} bytes instead of {want}")]
    Size {
        /// Bytes of the piece.
        got: usize,
        /// Bytes of the cell.
        want: usize,
    },
    /// Bytes that are not a valid packing.
    #[error(transparent)]
    Packing(#[from] PackError),
    /// A value that its worker should have reported before it announced the microbatch.
    #[error("a gradient's piece holds {}, which no sum can", .0.value)]
    Value(BadValue),
}

/// Number of values in cell `index` of a flat layout of `len`.
pub fn cell_len(len: usize, index: usize) -> usize {
    len.saturating_sub(index * CELL).min(CELL)
}

/// The pieces of a running sum, packed lazily.
pub fn of_sum(sum: u64, sums: &Sums) -> impl Iterator<Item = ToCoordinator> {
    sums.cells().iter().enumerate().map(move |(index, cell)| fixed(sum, index, cell))
}

/// The pieces of a sum of a single microbatch, in fewer bytes.
pub fn of_gradient(sum: u64, gradient: &[f32]) -> impl Iterator<Item = ToCoordinator> {
    gradient.chunks(CELL).enumerate().map(move |(index, cell)| single(sum, index, cell))
}

/// The pieces of a sum of a single microbatch whose gradient was rounded to few bits.
pub fn of_rounded(sum: u64, gradient: &[f32]) -> impl Iterator<Item = ToCoordinator> {
    let mut total = Vec::new();
    gradient.chunks(CELL).enumerate().map(move |(index, cell)| {
        total.resize(cell.len(), 0);
        exact::set_checked(&mut total, cell);
        fixed(sum, index, &total)
    })
}

/// One cell of a running sum.
pub fn fixed(sum: u64, index: usize, cell: &[i64]) -> ToCoordinator {
    let mut bytes = Vec::new();
    pack::pack(cell, &mut bytes);
    message(sum, index, cell.len(), Packed::Fixed(bytes.into()))
}

/// One cell of the gradient of a single microbatch.
pub fn single(sum: u64, index: usize, cell: &[f32]) -> ToCoordinator {
    message(sum, index, cell.len(), Packed::Single(little_endian(cell)))
}

/// Values as little-endian bytes.
pub fn little_endian(values: &[f32]) -> Bytes {
    match cfg!(target_endian = "little") {
        true => Bytes::copy_from_slice(bytemuck::cast_slice(values)),
        false => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn message(sum: u64, index: usize, len: usize, packed: Packed) -> ToCoordinator {
    ToCoordinator::SumPiece { sum, offset: (index * CELL) as u64, len: len as u32, packed }
}

/// Adds a piece to its cell, completely or not at all. `cap` is that of a single microbatch. The limit of a packed
/// sum is known only when the sum is complete: see [`within`].
pub fn add(packed: &Packed, cell: &mut [i64], cap: i64) -> Result<(), SumChunkError> {
    match packed {
        Packed::Fixed(bytes) => Ok(pack::add(bytes, cell, i64::MAX)?),
        Packed::Single(bytes) => {
            exact::add(cell, &floats(bytes, cell.len())?, cap).map_err(SumChunkError::Value)
        }
    }
}

/// Overwrites a cell with a piece; with zeros if [`add`] would fail.
pub fn set(packed: &Packed, cell: &mut [i64], cap: i64) -> Result<(), SumChunkError> {
    let set = match packed {
        Packed::Fixed(bytes) => pack::set(bytes, cell, i64::MAX).map_err(SumChunkError::from),
        Packed::Single(bytes) => floats(bytes, cell.len()).and_then(|values| {
            exact::check(&values, cap).map_err(SumChunkError::Value)?;
            exact::set_checked(cell, &values);
            Ok(())
        }),
    };
    if set.is_err() {
        cell.fill(0);
    }
    set
}

/// Subtracts what [`add`] added; no effect if that was an error.
pub fn subtract(packed: &Packed, cell: &mut [i64], cap: i64) -> Result<(), SumChunkError> {
    match packed {
        Packed::Fixed(bytes) => Ok(pack::subtract(bytes, cell, i64::MAX)?),
        Packed::Single(bytes) => {
            let values = floats(bytes, cell.len())?;
            exact::check(&values, cap).map_err(SumChunkError::Value)?;
            exact::subtract_checked(cell, &values);
            Ok(())
        }
    }
}

/// Checks that no value of an added piece of `len` values exceeds `limit` in magnitude.
pub fn within(packed: &Packed, len: usize, limit: i64) -> Result<(), SumChunkError> {
    match packed {
        Packed::Fixed(bytes) => Ok(pack::check(bytes, len, limit)?),
        Packed::Single(_) => Ok(()), // checked against its cap when it was added
    }
}

/// Checks that a piece holds `len` values.
pub fn check(packed: &Packed, len: usize) -> Result<(), SumChunkError> {
    match packed {
        Packed::Fixed(bytes) => Ok(pack::check(bytes, len, i64::MAX)?),
        Packed::Single(bytes) if bytes.len() == 4 * len => Ok(()),
        Packed::Single(bytes) => Err(SumChunkError::Size { got: bytes.len(), want: 4 * len }),
    }
}

fn floats(bytes: &Bytes, len: usize) -> Result<Vec<f32>, SumChunkError> {
    if bytes.len() != 4 * len {
        return Err(SumChunkError::Size { got: bytes.len(), want: 4 * len });
    }
    Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}
