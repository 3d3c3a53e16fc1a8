//! Data from a network: frames, messages, packed sums. A decoded value encodes to the same bytes again.

use crate::every_message::{self, at_the_edges};
use crate::mutate::{self, Dice};
use crate::weights::file;
use crate::{Files, Format};
use bytes::Bytes;
use finetune::cluster::codec::Bulky;
use finetune::cluster::link::{decode, encode};
use finetune::cluster::message::{ToCoordinator, ToWorker};
use finetune::config::refusal::Refusal;
use finetune::net::{Decoder, Endpoint, TooLong};
use finetune::numeric::pack;
use serde::{Serialize, de::DeserializeOwned};
use std::path::Path;
use std::sync::LazyLock;

pub const FORMATS: &[Format] = &[
    Format { name: "frames", share: 3, whole: frames, damage: in_the_frames, read: read_frames },
    Format { name: "messages", share: 8, whole: messages, damage: in_a_message, read: read_message },
    Format { name: "sums", share: 3, whole: sums, damage: in_the_sums, read: read_sums },
    Format { name: "address", share: 1, whole: address, damage: in_the_address, read: read_address },
];

/// Longest frame here.
const LIMIT: usize = 4096;

fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes(), body].concat()
}

fn frames() -> Files {
    vec![file("frames", [frame(b""), frame(b"one"), frame(&[7; 300]), frame(&[8; LIMIT])].concat())]
}

fn in_the_frames(dice: &mut Dice, _: &Files) -> Files {
    let mut out = Vec::new();
    for _ in 0..dice.below(6) {
        let body = vec![dice.byte(); dice.below(400)];
        let announced = if dice.one_in(4) { dice.number() as u32 } else { body.len() as u32 };
        out.extend(announced.to_le_bytes());
        out.extend(body);
    }
    if dice.one_in(3) {
        mutate::bytes(dice, &mut out);
    }
    vec![file("frames", out)]
}

fn read_frames(folder: &Path) -> Result<(), Refusal> {
    let bytes = std::fs::read(folder.join("frames")).map_err(Refusal::failure)?;
    let long = |e: TooLong| Refusal::failure(format!("a frame of {} bytes", e.length));
    for cut in [1, 7, 5000] {
        let (mut decoder, mut again) = (Decoder::new(LIMIT), Vec::new());
        for part in bytes.chunks(cut) {
            decoder.space().map_err(long)?.extend_from_slice(part);
            while let Some(body) = decoder.next_frame().map_err(long)? {
                assert!(body.len() <= LIMIT);
                again.extend(frame(&body));
            }
        }
        assert!(bytes.starts_with(&again));
    }
    Ok(())
}

/// Every kind of message, and each of them with a number at a limit.
static MESSAGES: LazyLock<Vec<Bytes>> = LazyLock::new(|| {
    let mut all: Vec<Bytes> = Vec::new();
    for message in every_message::from_worker() {
        all.push(encode(&message).unwrap().whole());
        all.extend(at_the_edges(&message));
    }
    for message in every_message::from_coordinator() {
        all.push(encode(&message).unwrap().whole());
        all.extend(at_the_edges(&message));
    }
    all
});

fn messages() -> Files {
    vec![file("message", MESSAGES[0].to_vec())]
}

fn in_a_message(dice: &mut Dice, _: &Files) -> Files {
    let mut bytes = dice.pick(&MESSAGES).to_vec();
    match dice.below(5) {
        0 => {}
        1 => mutate::bytes(dice, &mut bytes),
        2 => bytes[0] = dice.below(18) as u8,
        3 => {
            let end = dice.below(bytes.len());
            bytes.truncate(end);
        }
        _ => {
            let at = dice.below(bytes.len());
            bytes.splice(at..at + 1, dice.pick(&every_message::EDGES).iter().copied()).for_each(drop);
        }
    }
    vec![file("message", bytes)]
}

fn heard<M: Serialize + DeserializeOwned + Bulky>(frame: &Bytes) -> Result<(), String> {
    let message = decode::<M>(frame)?;
    let again = encode(&message).unwrap().whole();
    // Compared as bytes, because a NaN loss equals nothing.
    assert_eq!(encode(&decode::<M>(&again).unwrap()).unwrap().whole(), again);
    Ok(())
}

fn read_message(folder: &Path) -> Result<(), Refusal> {
    let bytes: Bytes = std::fs::read(folder.join("message")).map_err(Refusal::failure)?.into();
    let (one, other) = (heard::<ToCoordinator>(&bytes), heard::<ToWorker>(&bytes));
    one.or(other).map_err(Refusal::failure)
}

/// Number of values in the sums of these tests, and the largest value.
const VALUES: usize = 200;
const LARGEST: i64 = 1 << 40;

fn sums() -> Files {
    let (values, mut packed) =
        ((0..VALUES as i64).map(|i| i * i * 99_991 - 5).collect::<Vec<_>>(), Vec::new());
    pack::pack(&values, &mut packed);
    vec![file("sum", packed)]
}

fn in_the_sums(dice: &mut Dice, whole: &Files) -> Files {
    let mut bytes = whole[0].1.clone().unwrap();
    match dice.below(3) {
        // The widths of blocks come first.
        0 => bytes[dice.below(4)] = dice.byte(),
        1 => {
            let values: Vec<i64> = (0..VALUES).map(|_| dice.number() as i64 >> dice.below(60)).collect();
            bytes.clear();
            pack::pack(&values, &mut bytes);
        }
        _ => mutate::bytes(dice, &mut bytes),
    }
    vec![file("sum", bytes)]
}

fn read_sums(folder: &Path) -> Result<(), Refusal> {
    let bytes = std::fs::read(folder.join("sum")).map_err(Refusal::failure)?;
    let (mut sum, mut set) = (vec![3i64; VALUES], vec![9i64; VALUES]);
    let added = pack::add(&bytes, &mut sum, LARGEST);
    assert_eq!(pack::check(&bytes, VALUES, LARGEST), added);
    assert_eq!(pack::set(&bytes, &mut set, LARGEST), added);
    if added.is_ok() {
        assert!(set.iter().zip(&sum).all(|(set, sum)| set + 3 == *sum && set.abs() <= LARGEST));
        assert_eq!(pack::subtract(&bytes, &mut sum, LARGEST), Ok(()));
    }
    assert!(sum.iter().all(|v| *v == 3));
    added.map_err(Refusal::failure)
}

fn address() -> Files {
    vec![file("address", "example.org:9000")]
}

fn in_the_address(dice: &mut Dice, _: &Files) -> Files {
    let known = [
        "example.org:9000",
        "[::1]:9000",
        "127.0.0.1",
        "[fe80::1%eth0]:1",
        ":9000",
        "host",
        "::1",
        "a:65535",
    ];
    let mut text = dice.word(&known).to_string();
    (0..1 + dice.below(3)).for_each(|_| text = mutate::text(dice, &text));
    vec![file("address", text)]
}

fn read_address(folder: &Path) -> Result<(), Refusal> {
    let text = std::fs::read_to_string(folder.join("address")).map_err(Refusal::failure)?;
    let endpoint = Endpoint::parse(&text, 9000).map_err(Refusal::failure)?;
    assert_eq!(Endpoint::parse(&endpoint.to_string(), 9000).as_ref(), Ok(&endpoint), "{text:?}");
    Ok(())
}
