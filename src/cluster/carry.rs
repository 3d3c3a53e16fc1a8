//! The messages between two workers. In a line hidden states go up, their gradients go down, in pieces of at most
//! [`PIECE`] bytes. Relays send parts of sums and of parameters to each other.

use super::codec::{Bulky, in_place};
use super::link::{Link, Liveness, Spoken};
use super::message::{LeaseId, PIECE, Packed};
use crate::model::wire::Wire;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// A message between two workers, in either direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Carry {
    /// The first message of both sides.
    Hello {
        /// The key of the line, or of the set of relays.
        key: [u8; 16],
        /// The sender's place in it.
        place: u16,
    },
    /// A part of hidden states (upwards; of a microbatch or of new tokens), or of the gradient of a microbatch's hidden
    /// states (downwards). The parts of one lease arrive in order.
    Values {
        /// The lease of the microbatch.
        lease: LeaseId,
        /// Bytes that follow after this part.
        rest: u64,
        /// Little-endian values in the type of the line.
        #[serde(with = "in_place")]
        bytes: Bytes,
    },
    /// Nothing more of this lease will come: the seat below frees what it keeps for it.
    Drop {
        /// The lease of the microbatch or prompt.
        lease: LeaseId,
    },
    /// Asks whether the other side is alive.
    Ping {
        /// Counts up.
        number: u64,
    },
    /// Answers [`Carry::Ping`].
    Pong {
        /// Number of the ping.
        number: u64,
    },
    /// The next token of a prompt, on its way down to the first seat.
    Token {
        /// The lease of the prompt.
        lease: LeaseId,
        /// The token.
        id: u32,
    },
    /// A part of the sender's sum, of the receiver's range of values. Parts arrive in order.
    SumPiece {
        /// The number of the sum.
        sum: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// The values of a cell.
        packed: Packed,
    },
    /// A part of the parameters, of the sender's range of values. Parts arrive in order.
    Spread {
        /// Number of optimizer steps that these parameters result from.
        step: u64,
        /// Index of the first value in the flat layout.
        offset: u64,
        /// Number of values.
        len: u32,
        /// Differences from the parameters before: `numeric::difference`.
        #[serde(with = "in_place")]
        packed: Bytes,
    },
}

/// The end of a connection between two workers.
pub type CarryLink = Link<Carry, Carry>;

impl Carry {
    /// The parts of `values` of a microbatch, in order.
    pub fn parts(lease: LeaseId, values: &Bytes) -> impl Iterator<Item = Carry> + '_ {
        let count = values.len().div_ceil(PIECE).max(1);
        (0..count).map(move |at| {
            let (from, to) = (at * PIECE, values.len().min((at + 1) * PIECE));
            Carry::Values { lease, rest: (values.len() - to) as u64, bytes: values.slice(from..to) }
        })
    }
}

impl Bulky for Carry {
    fn bulk(&self) -> Option<&Bytes> {
        match self {
            Carry::Values { bytes, .. }
            | Carry::Spread { packed: bytes, .. }
            | Carry::SumPiece { packed: Packed::Fixed(bytes) | Packed::Single(bytes), .. } => Some(bytes),
            _ => None,
        }
    }
}

impl Spoken for Carry {
    type Other = Carry;

    fn beat(number: u64) -> Self {
        Carry::Ping { number }
    }

    fn liveness(&self) -> Liveness<Carry> {
        match *self {
            Carry::Ping { number } => Liveness::Asks(Carry::Pong { number }),
            Carry::Pong { .. } => Liveness::Answers,
            _ => Liveness::NotAbout,
        }
    }

    fn is_farewell(&self) -> bool {
        false
    }
}

/// Puts the parts of values together.
#[derive(Debug)]
pub struct Assembly {
    wire: Wire,
    lease: LeaseId,
    bytes: Vec<u8>,
    /// Bytes that are still to come.
    rest: u64,
}

impl Assembly {
    /// An empty assembly for values of this type.
    pub fn new(wire: Wire) -> Self {
        Assembly { wire, lease: 0, bytes: Vec::new(), rest: 0 }
    }

    /// Adds a part. Returns the values once they are complete; the error is one line. `most` bounds their bytes.
    pub fn add(
        &mut self,
        lease: LeaseId,
        (rest, bytes): (u64, &Bytes),
        most: usize,
    ) -> Result<Option<Vec<f32>>, String> {
        let len = bytes.len() as u64;
        let fits = match self.rest {
            0 => rest.saturating_add(len) <= most as u64,
            due => lease == self.lease && rest.saturating_add(len) == due,
        };
        if !fits || len == 0 || rest.saturating_add(len) % self.wire.size() as u64 != 0 && self.rest == 0 {
            return Err(format!(
                "it sent {len} bytes of values with {rest} to come, which do not belong there"
            ));
        }
        if self.rest == 0 {
            self.bytes.clear();
        }
        (self.lease, self.rest) = (lease, rest);
        self.bytes.extend_from_slice(bytes);
        Ok((rest == 0).then(|| self.wire.values(&self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_arrive_from_their_parts() {
        for wire in [Wire::F32, Wire::Bf16] {
            let mut assembly = Assembly::new(wire);
            for count in [1, 5, PIECE / 4, PIECE / 4 + 1, PIECE] {
                let values: Vec<f32> = (0..count).map(|i| (i % 64) as f32 - 7.5).collect();
                let (bytes, mut got) = (wire.bytes(&values).into(), None);
                for part in Carry::parts(9, &bytes) {
                    let Carry::Values { lease, rest, bytes } = part else { panic!("{part:?}") };
                    assert_eq!(got, None);
                    got = assembly.add(lease, (rest, &bytes), 4 * PIECE).unwrap();
                }
                assert!(got == Some(values), "{wire:?} {count}");
            }
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let part = |n: usize| Bytes::from(vec![0u8; n]);
        let refused = |parts: &[(LeaseId, u64, usize)]| {
            let mut assembly = Assembly::new(Wire::F32);
            parts.iter().any(|(lease, rest, n)| assembly.add(*lease, (*rest, &part(*n)), 64).is_err())
        };
        assert!(!refused(&[(1, 4, 8), (1, 0, 4), (2, 0, 64)]));
        assert!(refused(&[(1, 0, 0)]), "no bytes");
        assert!(refused(&[(1, 0, 6)]), "no whole values");
        assert!(refused(&[(1, 4, 64)]), "more than a microbatch has");
        assert!(refused(&[(1, u64::MAX, 8)]), "a length without bound");
        assert!(refused(&[(1, 8, 8), (2, 0, 8)]), "another microbatch in between");
        assert!(refused(&[(1, 8, 8), (1, 8, 8)]), "a repeated part");
    }
}
