//! The SPIR-V of kernels, but for those with cooperative matrices, through Khronos' validator (spirv-tools): drivers may
//! assume that what they get is valid, so a text that naga writes wrongly can crash them.

use crate::{assert_fine, parsed};
use finetune::backend::wgpu::{Entry, catalogue};
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use std::io::Write;
use std::process::{Command, Stdio};

/// What wgpu asks of naga: on a device with Vulkan 1.1, and on one with 1.3 and without checks, as a proved kernel.
const TARGETS: [(&str, (u8, u8), BoundsCheckPolicy); 2] =
    [("vulkan1.1", (1, 3), BoundsCheckPolicy::Restrict), ("vulkan1.3", (1, 6), BoundsCheckPolicy::Unchecked)];

/// What the validator says against a kernel.
fn complaint(entry: &Entry) -> Option<String> {
    let (module, info) = parsed(&entry.text).unwrap();
    TARGETS.iter().find_map(|&(target, lang_version, policy)| {
        let checks = BoundsCheckPolicies { index: policy, buffer: policy, ..Default::default() };
        let options = spv::Options {
            lang_version,
            flags: spv::WriterFlags::empty(),
            bounds_check_policies: checks,
            zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
            force_loop_bounding: policy == BoundsCheckPolicy::Restrict,
            ..Default::default()
        };
        let words = spv::write_vec(&module, &info, &options, None).unwrap();
        let said = validated(&words, target);
        (!said.is_empty()).then(|| format!("{} for {target}: {said}", entry.name))
    })
}

/// What the validator says of a module; nothing if it is valid.
fn validated(words: &[u32], target: &str) -> String {
    let mut child = Command::new("spirv-val");
    child
        .args(["--target-env", target, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    drop(stdin);
    let done = child.wait_with_output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    assert_eq!(done.status.success(), said.is_empty(), "{}", String::from_utf8_lossy(&said));
    String::from_utf8_lossy(&said).into_owned()
}

/// Whether there is a validator.
fn is_there() -> bool {
    let found = Command::new("spirv-val").arg("--version").output().is_ok();
    if !found {
        assert!(std::env::var_os("FINETUNE_NEED_SPIRV").is_none(), "no spirv-val");
        println!("skipped: no spirv-val");
    }
    found
}

#[test]
fn every_kernel_without_cooperative_matrices_is_valid_spirv() {
    if !is_there() {
        return;
    }
    let (mut entries, _) = catalogue();
    // Spirv-tools 2023.1 does not know cooperative matrices.
    entries.retain(|entry| !entry.name.starts_with("product_coop"));
    assert_fine(&entries, complaint);
}

#[test]
fn invalid_module_is_noticed() {
    if !is_there() {
        return;
    }
    let (module, info) = parsed(&catalogue().0[0].text).unwrap();
    let mut words = spv::write_vec(&module, &info, &spv::Options::default(), None).unwrap();
    assert_eq!(validated(&words, TARGETS[0].0), "");
    // Its last instruction, the end of a function, is missing.
    words.pop();
    assert!(validated(&words, TARGETS[0].0).contains("FunctionEnd"), "{}", validated(&words, TARGETS[0].0));
}
