//! Packed sums out of bytes of any kind: never a panic; what is added can be taken back to the bit, what is refused
//! changes nothing, and setting is adding to zero. (Pieces in any order, from anybody: `tests/cluster_reduce.rs`.)
#![no_main]

use finetune::numeric::pack;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, i64, Vec<u8>)| {
    let (len, limit, bytes) = input;
    let before: Vec<i64> = (0..i64::from(len % 1024)).map(|i| i.wrapping_mul(0x1e37_79b9_7f4a_7c15)).collect();
    let mut sum = before.clone();
    let mut set = before.clone();
    match pack::add(&bytes, &mut sum, limit) {
        Ok(()) => {
            assert_eq!(pack::set(&bytes, &mut set, limit), Ok(()));
            let again = before.iter().zip(&set).map(|(b, v)| b.wrapping_add(*v));
            assert!(again.eq(sum.iter().copied()));
            assert!(set.iter().all(|v| v.unsigned_abs() <= limit.max(0) as u64));
            let mut packed = Vec::new();
            pack::pack(&set, &mut packed);
            let mut back = vec![0; set.len()];
            assert_eq!(pack::add(&packed, &mut back, limit), Ok(()));
            assert_eq!(back, set);
            assert_eq!(pack::subtract(&bytes, &mut sum, limit), Ok(()));
            assert_eq!(sum, before);
        }
        Err(refused) => {
            assert_eq!(pack::set(&bytes, &mut set, limit), Err(refused));
            assert!(sum == before && set == before);
        }
    }
});
