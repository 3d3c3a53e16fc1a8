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
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::ToCoordinator;

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
            let gradient: Vec<f32> = (0..len).map(|i| (i as f32 - 9.0) * 1e-3).collect();
            let scalars = Scalars { loss: 5, weight: 3, targets: 3, ..Scalars::default() };
            let whole = of_gradient(&gradient, &scalars);
            let single = pieces(sum_chunk::of_gradient(1, &gradient));
            assert_eq!(of_pieces(&single, len, cap, &scalars), Ok(whole));
            let mut sums = crate::train::sum::Sums::new(len);
            sums.add_gradient(&gradient, cap).unwrap();
            let packed = pieces(sum_chunk::of_sum(1, &sums));
            assert_eq!(of_pieces(&packed, len, cap, &scalars), Ok(whole), "in the other form");
            // A difference below the unit of sums does not count; the lowest bit that counts does.
            let mut near = gradient.clone();
            near[0] += 1e-16;
            assert_eq!(of_gradient(&near, &scalars), whole);
            near[len - 1] = f32::from_bits(gradient[len - 1].to_bits() ^ (1 << 20));
            assert_ne!(of_gradient(&near, &scalars), whole);
            for other in [
                Scalars { loss: 6, ..scalars },
                Scalars { weight: 6, ..scalars },
                Scalars { targets: 6, ..scalars },
                Scalars {
                    rewards: crate::train::sum::RewardSums { right: 1, ..Default::default() },
                    ..scalars
                },
            ] {
                assert_ne!(of_gradient(&gradient, &other), whole);
            }
        }
    }
}
