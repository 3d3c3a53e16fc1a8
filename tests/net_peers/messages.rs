//! The decoder of messages on bytes of any kind: what `fuzz/` does without end, here for a bounded number of
//! cases. Damaged bytes are an error or another message, never a panic and never memory beyond their size.

use finetune::cluster::message::{Bye, Packed, ToCoordinator, ToWorker};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes, and where something comes out, encodes and decodes it again: the same.
fn check<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok((message, _)) = postcard::take_from_bytes::<M>(bytes) {
        let again = postcard::to_stdvec(&message).unwrap();
        let (decoded, rest) = postcard::take_from_bytes::<M>(&again).unwrap();
        assert!(rest.is_empty());
        // Compared as bytes: a loss that is NaN equals nothing.
        assert_eq!(postcard::to_stdvec(&decoded).unwrap(), again);
    }
}

fn samples() -> Vec<Vec<u8>> {
    let piece =
        ToCoordinator::SumPiece { sum: 3, offset: 64, len: 2, packed: Packed::Single(vec![1; 8].into()) };
    let parameters = ToWorker::ParametersPiece { step: 1, offset: 0, bytes: vec![9; 40].into() };
    let bye = ToWorker::Bye(Bye::Out { reason: "silent".into(), again: true });
    let to = |m: &ToCoordinator| postcard::to_stdvec(m).unwrap();
    let from = |m: &ToWorker| postcard::to_stdvec(m).unwrap();
    vec![to(&piece), from(&parameters), from(&bye)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn bytes_of_any_kind(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }

    /// A message's number in front, so that every kind is reached.
    #[test]
    fn every_kind_of_message(kind in 0u8..16, bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let bytes = [&[kind], &bytes[..]].concat();
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }

    #[test]
    fn one_byte_of_a_good_message_is_damaged(which in 0usize..3, at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = samples()[which].clone();
        let at = at.index(bytes.len());
        bytes[at] = to;
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }
}

#[test]
fn every_cut_of_a_good_message_is_an_error() {
    for bytes in samples() {
        for cut in 0..bytes.len() {
            let (to, from) = (
                postcard::from_bytes::<ToCoordinator>(&bytes[..cut]),
                postcard::from_bytes::<ToWorker>(&bytes[..cut]),
            );
            // A short message of another kind may come out; never the long one.
            assert!(!matches!(to, Ok(ToCoordinator::SumPiece { .. })), "{cut}");
            assert!(!matches!(from, Ok(ToWorker::ParametersPiece { .. })), "{cut}");
        }
    }
}

/// A list that announces four thousand million entries in five bytes.
#[test]
fn announced_lengths_reserve_nothing() {
    for kind in 0u8..16 {
        for fill in [0xffu8, 0x80, 0] {
            let bytes = [&[kind][..], &[fill; 8], &[0xff, 0xff, 0xff, 0xff, 0x0f], &[0; 8]].concat();
            check::<ToCoordinator>(&bytes);
            check::<ToWorker>(&bytes);
        }
    }
}
