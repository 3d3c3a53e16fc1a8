//! Frames out of bytes of any kind, cut in any way: never a panic, never a frame beyond the limit, and what comes
//! out, encoded again, is what went in.
#![no_main]

use finetune::net::Decoder;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, u8, Vec<u8>)| {
    let (limit, cut, bytes) = input;
    let mut decoder = Decoder::new(limit.into());
    let mut again = Vec::new();
    for part in bytes.chunks(usize::from(cut).max(1)) {
        match decoder.space() {
            Ok(space) => space.extend_from_slice(part),
            Err(e) => {
                assert!(e.length > limit.into());
                break;
            }
        }
        while let Ok(Some(frame)) = decoder.next_frame() {
            assert!(frame.len() <= limit.into());
            again.extend_from_slice(&(frame.len() as u32).to_le_bytes());
            again.extend_from_slice(&frame);
        }
    }
    assert!(bytes.starts_with(&again));
});
