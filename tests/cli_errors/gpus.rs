//! Requested devices that are missing or unsuitable: one line each, on the real binary.

use crate::check;
use crate::cli_fixture::{Bench, stderr};
use crate::tested_adapters;

#[test]
fn contradictory_device_options_are_refused() {
    let b = Bench::new();
    for (command, code, parts) in [
        ("--gpus 0,auto", 78, "--gpus .. auto cannot be combined"),
        ("--gpus cpu,cpu,cpu --gpu-backend wgpu", 78, "--gpus .. leave --gpu-backend out"),
        ("--gpus radeon --gpu-backend cpu", 78, "--gpus .. indices"),
        ("--gpus cpu --gpu-backend cuda", 78, "--gpus .. leave --gpu-backend out"),
        ("--gpu-backend metal", 78, "--gpu-backend .. auto, cuda, wgpu or cpu"),
    ] {
        check(&b, command, code, parts);
    }
}

/// Each reason why no GPU is found has its own line, on any machine.
#[test]
#[cfg(target_os = "linux")]
fn missing_gpu_is_explained() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --max-steps 1";
    let said = |command: &str, variables: &[(&str, &str)]| {
        let mut c = b.command(&format!("{run} {command} -o out"));
        c.envs(variables.iter().copied());
        let out = c.output().unwrap();
        let text = stderr(&out);
        assert!(!b.path("out").exists() || out.status.success(), "{text}");
        (out.status.code(), text)
    };
    let nowhere = [("VK_DRIVER_FILES", "/nowhere.json"), ("VK_ICD_FILENAMES", "/nowhere.json")];
    if said("--gpus 0", &nowhere).1.contains("libvulkan.so.1") {
        assert!(std::env::var_os("FINETUNE_NEED_VULKAN").is_none(), "no Vulkan loader");
        return eprintln!("skipped: no Vulkan loader");
    }
    // A Vulkan loader that cannot be loaded comes before the system's own.
    b.bytes("lib/libvulkan.so.1", b"");
    let lib = b.path("lib").display().to_string();
    let no_loader = [("LD_LIBRARY_PATH", lib.as_str())];
    for (command, variables, parts) in [
        (
            "--gpu-backend wgpu",
            &nowhere[..],
            "--gpu-backend wgpu: no GPU .. VK_DRIVER_FILES=/nowhere.json .. unset",
        ),
        ("--gpus 0", &nowhere[..], "--gpus .. no GPU .. VK_DRIVER_FILES .. --gpus cpu"),
        ("--gpus arc --gpu-backend wgpu", &nowhere[..], "--gpus .. no GPU .. unset VK_DRIVER_FILES"),
        ("--gpu-backend wgpu", &no_loader[..], "the Vulkan loader .. apt install libvulkan1"),
        ("--role worker --coordinator 127.0.0.1:9 --insecure --gpus 7", &nowhere[..], "--gpus .. no GPU"),
        ("--role coordinator --insecure --bind 127.0.0.1:0 --gpus 7", &nowhere[..], "--gpus .. no GPU"),
    ] {
        let (code, text) = said(command, variables);
        let last = text.lines().last().unwrap_or_default();
        assert_eq!(code, Some(78), "{command}: {text}");
        assert!(last.starts_with("error: ") && text.matches("error: ").count() == 1, "{command}: {text}");
        let missing: Vec<&str> = parts.split(" .. ").filter(|part| !last.contains(part)).collect();
        assert!(missing.is_empty(), "{missing:?} in {command}: {text}");
    }
    // `auto` continues without a GPU and says so; with the CPU named no GPU is searched for.
    let (code, text) = said("", &nowhere);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("note: computes on the CPU: no GPU found (finetune devices says why)\n"), "{text}");
    let mut devices = b.command("devices");
    let out = devices.envs(nowhere).output().unwrap();
    let list = format!("{}{}", stderr(&out), String::from_utf8_lossy(&out.stdout));
    assert!(out.status.success() && list.contains("VK_DRIVER_FILES=/nowhere.json"), "{list}");
    let (code, text) = said("--overwrite --gpus cpu", &nowhere);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("GPU"), "{text}");
}

/// On one adapter of tests/tested_adapters: a missing index, a missing name, an ambiguous name, and a model that does not
/// fit.
#[test]
fn unusable_gpu_selections_are_refused() {
    let b = Bench::new();
    let Some(tested) = tested_adapters::one() else { return };
    let (it, name) = (tested.options(), tested.adapter.name().split(" (").next().unwrap());
    let run = "demo --data rows.jsonl --max-steps 1 -o out";
    for (options, parts) in [
        ("--gpus 63", "--gpus .. there is no device 63 .. 0 ".to_string()),
        ("--gpus nothing-like-it", format!("--gpus .. \"nothing-like-it\" .. {name}")),
        (&format!("{it} --dtype bf16"), format!("--dtype bf16 .. {name} .. --gpus cpu")),
        (
            &format!("{it} --memory-limit 500kB"),
            format!("{name} .. it has 1 MB .. the weights alone do not fit"),
        ),
        (
            &format!("{it} --offload never --memory-limit 20MB --micro-batch-tokens 512"),
            format!("{name} .. use --micro-batch-tokens"),
        ),
    ] {
        check(&b, &format!("{run} {options}"), 78, &parts);
    }
    if finetune::backend::wgpu::adapters().len() > 1 {
        check(&b, &format!("{run} --gpus e"), 78, "--gpus .. \"e\" matches .. give the index");
    }
}
