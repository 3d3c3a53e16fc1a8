//! Every fault names the device, the verb and the cause; the first fault is latched, and nothing panics.

use crate::{devices, tested_adapters};
use finetune::backend::wgpu::{Harm, Options};
use finetune::backend::{Backend, Fault, Frozen, TokenRows, Wgpu, Write, view, view_mut};
use finetune::numeric::dtype::Dtype;

/// Computes a little, and reads the result.
fn work(gpu: &mut Wgpu) -> Result<Vec<f32>, Fault> {
    let mut x = gpu.memory(1000);
    gpu.fill(view_mut(&mut x, 10, 100), 2.0);
    let w = gpu.weight(Frozen { rows: 3, cols: 100, dtype: Dtype::Bf16, bytes: &[0; 600] })?;
    let mut y = gpu.memory(30);
    gpu.linear(view_mut(&mut y, 10, 3), Write::Set, view(&x, 10, 100), &w);
    let tokens = gpu.tokens(TokenRows { ids: &[0; 4], bounds: &[0, 4], past: 0, short: u32::MAX });
    gpu.embed(view_mut(&mut x, 4, 100), &w, &tokens, 1.0);
    let mut out = vec![1.0; 30];
    gpu.read(view(&y, 10, 3), &mut out)?;
    [x, y].into_iter().for_each(|m| gpu.recycle(m));
    Ok(out)
}

/// The fault of a device after `harm`; the fault is latched.
fn fault_after(harm: impl Fn(&mut Wgpu)) -> Vec<(String, Fault)> {
    let mut all = Vec::new();
    let names = tested_adapters::all().into_iter().map(|tested| tested.adapter.name().to_string());
    for (mut gpu, name) in devices(Options::default()).into_iter().zip(names) {
        assert_eq!(work(&mut gpu), Ok(vec![0.0; 30]), "the device works before");
        harm(&mut gpu);
        let fault = work(&mut gpu).unwrap_err();
        assert_eq!(work(&mut gpu).unwrap_err(), fault, "the first fault is the one that is reported");
        let device = match &fault {
            Fault::Device { device, .. } | Fault::OutOfMemory { device, .. } => device.clone(),
            other => panic!("{other}"),
        };
        assert!(device.contains(&name), "{device}, not {name}");
        assert!(!fault.to_string().contains('\n'), "one line");
        all.push((device, fault));
    }
    all
}

#[test]
fn a_lost_device_is_a_fault() {
    for harm in [|gpu: &mut Wgpu| gpu.breaker().strike(), |gpu: &mut Wgpu| gpu.breaker().vanish()] {
        for (_, fault) in fault_after(harm) {
            assert!(fault.to_string().contains("the device was lost"), "{fault}");
        }
    }
}

/// As on Metal, where the driver ends work early and reports it as done: the results of the read before would be taken
/// for new ones.
#[test]
fn work_that_did_not_run_once_is_a_fault() {
    for harm in [Harm::Dropped, Harm::Truncated, Harm::Repeated] {
        for (_, fault) in fault_after(|gpu: &mut Wgpu| gpu.breaker().harm(harm)) {
            assert!(fault.to_string().contains("reports as done did not run"), "{harm:?}: {fault}");
        }
    }
}

/// Many submissions before the read: the first one is harmed, the others run.
#[test]
fn earlier_work_that_did_not_run_is_a_fault_of_the_read() {
    for mut gpu in devices(Options { rate: Some(1.0), steady: true, ..Options::default() }) {
        let mut x = gpu.memory(1000);
        let mut sums = |gpu: &mut Wgpu| {
            (0..4).for_each(|i| gpu.fill(view_mut(&mut x, 10, 100), i as f32));
            gpu.read(view(&x, 10, 100), &mut [0.0; 1000])
        };
        let before = gpu.traffic().submissions;
        sums(&mut gpu).unwrap();
        assert!(gpu.traffic().submissions - before > 2, "one submission for each op");
        gpu.breaker().harm(Harm::Dropped);
        let fault = sums(&mut gpu).unwrap_err().to_string();
        assert!(fault.contains("reports as done did not run"), "{fault}");
    }
}

/// More frozen bytes than may wait on the host go in a submission of their own.
#[test]
fn lost_upload_of_weights_is_a_fault_of_the_next_read() {
    for mut gpu in devices(Options::default()) {
        let bytes = vec![0; 96 << 20];
        gpu.breaker().harm(Harm::Dropped);
        let frozen = Frozen { rows: 48 << 10, cols: 1 << 10, dtype: Dtype::Bf16, bytes: &bytes };
        let fault = gpu.weight(frozen).map(|_| work(&mut gpu)).and_then(|result| result).unwrap_err();
        assert!(fault.to_string().contains("reports as done did not run"), "{fault}");
    }
}

#[test]
fn kernel_that_does_not_compile_is_named_in_a_fault() {
    for (_, fault) in fault_after(Wgpu::refuse) {
        assert!(fault.to_string().contains("broken: ") && fault.to_string().contains("pars"), "{fault}");
    }
}

#[test]
fn impossible_allocation_is_a_fault_with_its_size() {
    let absurd = 1usize << 40;
    let ask = |gpu: &mut Wgpu| {
        let memory = gpu.memory(absurd);
        gpu.recycle(memory);
    };
    for (device, fault) in fault_after(ask) {
        assert_eq!(fault, Fault::OutOfMemory { device, needed: 4 << 40 });
    }
}

#[test]
fn matrix_beyond_one_binding_is_a_fault_with_advice() {
    for mut gpu in devices(Options { binding_limit: Some(4096), ..Options::default() }) {
        // Attention needs the keys of a row in one binding.
        let heads = finetune::backend::Heads::new(1, 1, 64);
        let [q, k, v] = [0; 3].map(|_| gpu.memory(100 * 64));
        let (mut out, mut lse) = (gpu.memory(100 * 64), gpu.memory(100));
        let tokens = gpu.tokens(TokenRows { ids: &[0; 100], bounds: &[0, 100], past: 0, short: u32::MAX });
        let qkv = finetune::backend::Qkv { q: view(&q, 100, 64), k: view(&k, 100, 64), v: view(&v, 100, 64) };
        gpu.attention(view_mut(&mut out, 100, 64), view_mut(&mut lse, 100, 1), qkv, heads, &tokens);
        let fault = gpu.read(view(&lse, 100, 1), &mut [0.0; 100]).unwrap_err().to_string();
        assert!(fault.contains(": attention: ") && fault.contains("smaller microbatches fit"), "{fault}");
    }
}

#[test]
fn a_weight_of_the_wrong_length_is_a_fault_of_its_device() {
    for mut gpu in devices(Options::default()) {
        let wrong = gpu.weight(Frozen { rows: 3, cols: 5, dtype: Dtype::Bf16, bytes: &[0; 29] });
        assert!(wrong.unwrap_err().to_string().contains("a 3 x 5 matrix takes 30 bytes, not 29"));
        assert!(work(&mut gpu).is_ok(), "nothing is latched: the file is wrong, not the device");
    }
}
