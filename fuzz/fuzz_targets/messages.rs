//! Messages out of bytes of any kind: never a panic; what is understood is, encoded again, understood the same.
#![no_main]

use finetune::cluster::message::{ToCoordinator, ToWorker};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = postcard::from_bytes::<ToCoordinator>(bytes) {
        let text = postcard::to_stdvec(&message).unwrap();
        let again = postcard::from_bytes::<ToCoordinator>(&text).unwrap();
        assert_eq!(postcard::to_stdvec(&again).unwrap(), text);
    }
    if let Ok(message) = postcard::from_bytes::<ToWorker>(bytes) {
        let text = postcard::to_stdvec(&message).unwrap();
        let again = postcard::from_bytes::<ToWorker>(&text).unwrap();
        assert_eq!(postcard::to_stdvec(&again).unwrap(), text);
    }
});
