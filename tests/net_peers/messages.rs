//! The decoder of messages on arbitrary bytes: the endless fuzzing of `fuzz/`, here for a bounded number of cases.
//! Damaged bytes give an error or another message, never a panic and never memory beyond their size.

use finetune::cluster::codec::{Bulky, decode, encode};
use finetune::cluster::message::{Bye, Packed, ToCoordinator, ToWorker};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes as a connection does, and checks that a decoded message encodes and decodes to the same. Remaining bytes are
/// refused, and bulk is a part of the frame.
fn check<M: Serialize + DeserializeOwned + Bulky>(bytes: &[u8]) {
    let frame = bytes.to_vec().into();
    let plain = postcard::take_from_bytes::<M>(bytes);
    let whole = matches!(&plain, Ok((_, [])));
    let decoded = decode::<M>(&frame);
    assert_eq!(decoded.is_ok(), whole, "what is left over is no message");
    let Ok(message) = decoded else { return };
    if let Some(bulk) = message.bulk().filter(|bulk| !bulk.is_empty()) {
        assert!(frame.as_ptr_range().contains(&bulk.as_ptr()), "it was copied");
    }
    let again = encode(&message).unwrap().whole();
    // Compared as bytes, because a NaN loss equals nothing.
    assert_eq!(encode(&decode::<M>(&again).unwrap()).unwrap().whole(), again);
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
    fn random_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }

    /// The kind of the message comes first, so that every kind is tested.
    #[test]
    fn random_messages_are_decoded_or_refused(kind in 0u8..16, bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let bytes = [&[kind], &bytes[..]].concat();
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }

    #[test]
    fn damaged_byte_is_decoded_or_refused(which in 0usize..3, at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = samples()[which].clone();
        let at = at.index(bytes.len());
        bytes[at] = to;
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }
}

#[test]
fn every_truncated_message_is_an_error() {
    for bytes in samples() {
        for cut in 0..bytes.len() {
            let (to, from) = (
                postcard::from_bytes::<ToCoordinator>(&bytes[..cut]),
                postcard::from_bytes::<ToWorker>(&bytes[..cut]),
            );
            // The cut may decode as a short message of another kind, never as the long one.
            assert!(!matches!(to, Ok(ToCoordinator::SumPiece { .. })), "{cut}");
            assert!(!matches!(from, Ok(ToWorker::ParametersPiece { .. })), "{cut}");
        }
    }
}

/// Lists that announce four thousand million entries in five bytes, at every position where a message may hold a list.
/// An allocation of that size would show in the memory of this process.
#[test]
fn announced_lengths_allocate_nothing() {
    let reserved = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or(" 0 kB").to_string();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    };
    let before = reserved();
    lengths();
    // Other tests of this process run at the same time; a list of that length takes 16,000 MB.
    let more = reserved() - before;
    assert!(more < 4000, "{more} MB were reserved");
}

fn lengths() {
    for (kind, at) in (0u8..16).flat_map(|kind| (1..12).map(move |at| (kind, at))) {
        let bytes = [&[kind][..], &vec![0; at], &[0xff, 0xff, 0xff, 0xff, 0x0f], &[1; 8]].concat();
        check::<ToCoordinator>(&bytes);
        check::<ToWorker>(&bytes);
    }
    for kind in 0u8..16 {
        for fill in [0xffu8, 0x80, 0] {
            let bytes = [&[kind][..], &[fill; 8], &[0xff, 0xff, 0xff, 0xff, 0x0f], &[0; 8]].concat();
            check::<ToCoordinator>(&bytes);
            check::<ToWorker>(&bytes);
        }
    }
}
