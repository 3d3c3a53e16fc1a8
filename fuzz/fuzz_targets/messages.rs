//! Messages out of bytes of any kind: never a panic; what is understood is, encoded again, understood the same, and
//! bulk that it holds is a part of the frame.
#![no_main]

use finetune::cluster::codec::{Bulky, decode, encode};
use finetune::cluster::message::{ToCoordinator, ToWorker};
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};

fn check<M: Serialize + DeserializeOwned + Bulky>(bytes: &[u8]) {
    let frame = bytes.to_vec().into();
    let Ok(message) = decode::<M>(&frame) else { return };
    if let Some(bulk) = message.bulk().filter(|bulk| !bulk.is_empty()) {
        assert!(frame.as_ptr_range().contains(&bulk.as_ptr()));
    }
    // NaN is not itself, so bytes are compared.
    let text = encode(&message).unwrap().whole();
    let again = decode::<M>(&text).unwrap();
    assert_eq!(encode(&again).unwrap().whole(), text);
}

fuzz_target!(|bytes: &[u8]| {
    check::<ToCoordinator>(bytes);
    check::<ToWorker>(bytes);
});
