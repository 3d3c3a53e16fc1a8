//! The hash of a microbatch's result, by which two devices of a class are compared: the gradient in fixed point, and the
//! loss, weight, targets and rewards. What a sum adds is hashed, not how it was sent.

use super::message::{Hash, Packed};
use super::sum_chunk::{self, SumChunkError};
use crate::numeric::fixed::{self, CELL};
use crate::train::sum::Scalars;
use rayon::prelude::*;

/// The hash of a checked gradient and its scalars.
pub fn of_gradient(gradient: &[f32], scalars: &Scalars) -> Hash {
    let cell = |values: &[f32]| {
        let mut cell = vec![0; values.len()];
        fixed::set_checked(&mut cell, values);
        of_cell(&cell)
    };
    of(&gradient.par_chunks(CELL).map(cell).collect::<Vec<_>>(), scalars)
}

/// The hash of a sum of one microbatch whose pieces cover a layout of `len` values.
pub fn of_pieces(pieces: &[Packed], len: usize, cap: i64, scalars: &Scalars) -> Result<Hash, SumChunkError> {
    let cell = |(index, packed): (usize, &Packed)| {
        let mut cell = vec![0; sum_chunk::cell_len(len, index)];
        sum_chunk::set(packed, &mut cell, cap)?;
        Ok(of_cell(&cell))
    };
    let cells = pieces.par_iter().enumerate().map(cell).collect::<Result<Vec<_>, SumChunkError>>()?;
    Ok(of(&cells, scalars))
}

fn of_cell(values: &[i64]) -> Hash {
    if cfg!(target_endian = "little") {
        return *blake3::hash(bytemuck::cast_slice(values)).as_bytes();
    }
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    *blake3::hash(&bytes).as_bytes()
}

fn of(cells: &[Hash], scalars: &Scalars) -> Hash {
    let Scalars { loss, weight, targets, rewards } = scalars;
    let mut hasher = blake3::Hasher::new_derive_key("finetune microbatch 1");
    for cell in cells {
        hasher.update(cell);
    }
    for value in [*loss, *weight, rewards.sums[0], rewards.sums[1]] {
        hasher.update(&value.to_le_bytes());
    }
    for value in [*targets, rewards.counts[0], rewards.counts[1], rewards.pairs, rewards.right] {
        hasher.update(&value.to_le_bytes());
    }
    for value in rewards.range.iter().flatten() {
        hasher.update(&value.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::ToCoordinator;
    use crate::train::sum::RewardSums;

    fn pieces(messages: impl Iterator<Item = ToCoordinator>) -> Vec<Packed> {
        let piece = |message| match message {
            ToCoordinator::SumPiece { packed, .. } => packed,
            other => panic!("{other:?}"),
        };
        messages.map(piece).collect()
    }

    #[test]
    fn the_digest_is_that_of_what_counts() {
        let cap = fixed::cap(3);
        for len in [1, CELL, CELL + 7] {
            let gradient: Vec<f32> = (0..len).map(|i| i as f32 * 1e-3).collect();
            let scalars = Scalars { loss: 5, weight: 3, targets: 3, ..Scalars::default() };
            let whole = of_gradient(&gradient, &scalars);
            let single = pieces(sum_chunk::of_gradient(1, &gradient));
            assert_eq!(of_pieces(&single, len, cap, &scalars), Ok(whole));
            let mut sums = crate::train::sum::Sums::new(len);
            sums.add_gradient(&gradient, cap).unwrap();
            let packed = pieces(sum_chunk::of_sum(1, &sums));
            assert_eq!(of_pieces(&packed, len, cap, &scalars), Ok(whole), "in the other form");
            // A difference below the unit of sums does not count; the lowest bit that counts does.
            let first = |value: f32| of_gradient(&[&[value], &gradient[1..]].concat(), &scalars);
            assert_eq!(first(2f32.powi(-42)), whole);
            assert_ne!(first(2f32.powi(-40)), whole);
            let last = |value: f32| of_gradient(&[&gradient[..len - 1], &[value]].concat(), &scalars);
            assert_ne!(last(gradient[len - 1] + 2f32.powi(-12)), whole);
            let rewarded = |change: fn(&mut RewardSums)| {
                let mut rewards = RewardSums::default();
                change(&mut rewards);
                Scalars { rewards, ..scalars }
            };
            for other in [
                Scalars { loss: 6, ..scalars },
                Scalars { weight: 6, ..scalars },
                Scalars { targets: 6, ..scalars },
                rewarded(|r| r.sums[0] = 1),
                rewarded(|r| r.sums[1] = 1),
                rewarded(|r| r.counts[0] = 1),
                rewarded(|r| r.counts[1] = 1),
                rewarded(|r| r.pairs = 1),
                rewarded(|r| r.right = 1),
                rewarded(|r| r.range = Some([0, 0])),
                rewarded(|r| r.range = Some([0, 1])),
            ] {
                assert_ne!(of_gradient(&gradient, &other), whole);
            }
        }
    }
}
