//! A driver's compiled kernels are passed from one device to the next, and change no result.

use crate::devices;
use finetune::backend::wgpu::{Cache, Options};
use finetune::backend::{Backend, Frozen, Wgpu, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;
use std::sync::{Arc, Mutex};

fn product(gpu: &mut Wgpu) -> Vec<f32> {
    let bytes: Vec<u8> = (0..40 * 24).flat_map(|i: u16| (0x3f00 + i % 64).to_le_bytes()).collect();
    let w = gpu.weight(Frozen { rows: 40, cols: 24, dtype: Dtype::Bf16, bytes: &bytes }).unwrap();
    let (mut x, mut y, mut out) = (gpu.memory(7 * 24), gpu.memory(7 * 40), vec![f32::NAN; 7 * 40]);
    gpu.fill(view_mut(&mut x, 7, 24), 0.5);
    gpu.linear(view_mut(&mut y, 7, 40), Write::Set, view(&x, 7, 24), &w);
    gpu.read(view(&y, 7, 40), &mut out).unwrap();
    out
}

#[test]
fn compiled_kernels_are_kept_and_found_again() {
    let kept: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let open = |found: Option<Vec<u8>>| {
        let into = kept.clone();
        let keep = Arc::new(move |bytes: &[u8]| into.lock().unwrap().push(bytes.to_vec()));
        devices(Options { cache: Some(Cache { found, keep }), ..Options::default() })
    };
    for at in 0..open(None).len() {
        let mut first = open(None).remove(at);
        let want = product(&mut first);
        let calls = kept.lock().unwrap().len();
        assert_eq!(product(&mut first), want);
        assert_eq!(kept.lock().unwrap().len(), calls, "nothing new was compiled");
        let Some(found) = kept.lock().unwrap().pop().filter(|bytes| !bytes.is_empty()) else {
            println!("skipped: the driver of {} keeps nothing", first.class());
            continue;
        };
        // The kept bytes, and bytes that another driver or version might have left.
        let other: Vec<u8> = found.iter().map(|byte| byte ^ 0x55).collect();
        for found in [found, other] {
            assert_eq!(product(&mut open(Some(found)).remove(at)), want, "{}", first.class());
        }
        kept.lock().unwrap().clear();
    }
}
