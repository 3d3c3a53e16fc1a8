//! All kinds of machines, without their hardware.

use super::*;
use crate::config::table::TABLE;
use crate::config::{Origin, Settings, Typed};
use crate::model::memory::Offload;
use std::collections::BTreeMap;

const ON_THE_CPU: &str = "cpu /1; note: computes on the CPU: no GPU found (finetune devices says why)";
const THROUGH_VULKAN: &str = "note: the NVIDIA card computes through vulkan; \
    --gpu-backend cuda, which has NVIDIA's cards alone, may be faster";
const NONE: &[&str] = &[];
const SOFTWARE: &[&str] = &["software llvmpipe (LLVM 15.0.6, 256 bits)@l"];
const MANY: &[&str] = &[
    "discrete NVIDIA GeForce RTX 4090@01:00.0",
    "discrete NVIDIA GeForce RTX 4090@02:00.0",
    "integrated AMD Radeon Graphics (RADV)@0a:00.0",
    "integrated AMD Radeon Graphics (AMDVLK)@0a:00.0",
    "software llvmpipe (LLVM 15.0.6, 256 bits)@l",
];

const NVIDIA: &[&str] = &["cuda NVIDIA H200@01:00.0", "cuda-old Tesla V100@02:00.0"];

/// Parses `KIND NAME@CARD`.
fn facts(text: &str) -> Facts {
    let (kind, rest) = text.split_once(' ').unwrap();
    let (name, card) = rest.split_once('@').unwrap();
    let (api, features) = match kind {
        "cuda" => ("cuda", vec!["bf16".into()]),
        "cuda-old" => ("cuda", vec![]),
        _ => ("vulkan", vec![]),
    };
    let kind = match kind {
        "discrete" | "cuda" | "cuda-old" => Kind::Discrete,
        "integrated" => Kind::Integrated,
        _ => Kind::Software,
    };
    Facts {
        name: name.into(),
        kind,
        api: api.into(),
        driver: "a driver".into(),
        pci: card.into(),
        card: card.into(),
        features,
        limits: BTreeMap::new(),
    }
}

/// The names of the devices chosen on `machine` for the typed options, or the error.
fn chosen(machine: &[&str], typed: &str) -> String {
    let mut layer: Vec<Typed> = Vec::new();
    for (key, value) in typed.split(' ').filter_map(|option| option.split_once('=')) {
        layer.push(Typed { key: key.replace('-', "_"), values: vec![value.into()], source: Origin::Flag });
    }
    let options: Vec<_> = TABLE.iter().collect();
    let settings = Settings::resolve(&options, vec![layer]).unwrap();
    let facts: Vec<Facts> = machine.iter().map(|text| facts(text)).collect();
    let facts: Vec<&Facts> = facts.iter().collect();
    let options = crate::config::groups::devices(&settings);
    let among = |o: DeviceOptions| {
        let driver = o.backend.unwrap_or("wgpu");
        let seen = (0..facts.len()).collect();
        among(&o, &Cards { driver, facts: &facts, seen, hiding: None, why: &|| "install a driver".into() })
    };
    match options.and_then(among) {
        Ok(chosen) => {
            let name = |p: &Picked| format!("{} /{}", p.name, p.sharing);
            let device =
                |picks: Range<usize>| chosen.picks[picks].iter().map(name).collect::<Vec<_>>().join(" + ");
            let mut said: Vec<String> = chosen.devices().map(device).collect();
            said.extend(chosen.notes);
            said.join("; ")
        }
        Err(e) => format!("{}: {}", e.code(), e.line),
    }
}

#[track_caller]
fn check(machine: &[&str], typed: &str, expected: &str) {
    assert_eq!(chosen(machine, typed), expected, "{typed:?} on {machine:?}");
}

#[test]
fn auto_selects_each_gpu_once_and_no_software_driver() {
    check(
        MANY,
        "",
        &format!(
            "wgpu 0 NVIDIA GeForce RTX 4090 /1; wgpu 1 NVIDIA GeForce RTX 4090 /1; wgpu 2 AMD Radeon Graphics /1; {THROUGH_VULKAN}"
        ),
    );
    check(NONE, "", ON_THE_CPU);
    check(SOFTWARE, "", ON_THE_CPU);
    let said = chosen(SOFTWARE, "gpu-backend=wgpu");
    assert!(said.starts_with("78: --gpu-backend wgpu: no GPU but llvmpipe"), "{said}");
    check(NONE, "gpu-backend=wgpu", "78: --gpu-backend wgpu: no GPU: install a driver");
}

#[test]
fn auto_takes_cuda_where_it_has_every_card() {
    let [h200, v100] = [NVIDIA[0], NVIDIA[1]].map(facts);
    let through = |text: &str| facts(text);
    let same = through("discrete NVIDIA H200@01:00.0");
    let (arc, radeon) = (through("discrete Intel Arc@03:00.0"), through("integrated AMD Radeon@0a:00.0"));
    let part = |name: &str| Gpus::Named(vec![Wanted::Part(name.into())]);
    let index = |at| Gpus::Named(vec![Wanted::Index(at), Wanted::Cpu]);
    let hidden = through("discrete NVIDIA H200@02:00.0");
    for (gpus, cuda, wgpu, expected) in [
        (&Gpus::Auto, vec![&h200], vec![], true),
        (&Gpus::Auto, vec![&h200], vec![&same, &hidden], true),
        (&Gpus::Auto, vec![&h200], vec![&same, &radeon], true),
        (&Gpus::Auto, vec![&h200], vec![&same, &arc], false),
        (&index(0), vec![&h200], vec![&same, &radeon], true),
        (&index(1), vec![&h200], vec![&same, &radeon], false),
        (&index(0), vec![&h200], vec![&same, &arc], false),
        (&part("h200"), vec![&h200], vec![&same, &arc], true),
        (&part("RADEON"), vec![&h200], vec![&same, &radeon], false),
    ] {
        assert_eq!(is_for_cuda(gpus, &cuda, &wgpu), expected, "{gpus:?}, {cuda:?}, {wgpu:?}");
    }
    assert!(are_new(&[&h200]) && !are_new(&[&h200, &v100]) && !are_new(&[]));
}

#[test]
fn devices_are_selected_by_index_by_name_and_twice() {
    check(
        MANY,
        "gpus=1,2",
        &format!("wgpu 1 NVIDIA GeForce RTX 4090 /1; wgpu 2 AMD Radeon Graphics /1; {THROUGH_VULKAN}"),
    );
    check(MANY, "gpus=radeon,cpu", "wgpu 2 AMD Radeon Graphics /1; cpu /1");
    check(MANY, "gpus=amdvlk", "wgpu 3 AMD Radeon Graphics /1");
    let note = "note: llvmpipe (LLVM 15.0.6, 256 bits) is a software driver: --gpus cpu is faster";
    check(
        SOFTWARE,
        "gpus=0,0 gpu-backend=wgpu",
        &format!("wgpu 0 llvmpipe /2; wgpu 0 llvmpipe (2) /2; {note}"),
    );
    check(SOFTWARE, "gpus=LLVM", &format!("wgpu 0 llvmpipe /1; {note}"));
    for cpu in ["gpus=cpu", "gpus=none", "gpu-backend=cpu"] {
        check(MANY, cpu, "cpu /1");
    }
    check(MANY, "gpu-backend=cpu gpus=0,0,2", "cpu 0 /3; cpu 0 (2) /3; cpu 2 /3");
}

#[test]
fn devices_with_a_plus_hold_a_model_together() {
    check(MANY, "gpus=cpu+cpu", "cpu /2 + cpu (2) /2");
    check(
        MANY,
        "gpus=1+2,cpu gpu-backend=wgpu",
        "78: --gpus: cpu is no device of --gpu-backend wgpu: leave --gpu-backend out",
    );
    check(MANY, "gpus=radeon+cpu,cpu", "wgpu 2 AMD Radeon Graphics /1 + cpu /2; cpu (2) /2");
    check(MANY, "gpu-backend=cpu gpus=0+1,2", "cpu 0 /3 + cpu 1 /3; cpu 2 /3");
    check(NVIDIA, "gpu-backend=cuda gpus=v100+0", "cuda 1 Tesla V100 /1 + cuda 0 NVIDIA H200 /1");
    for (typed, seat) in [("cpu+", ""), ("0+auto", "auto"), ("+", "")] {
        let line =
            format!("78: --gpus: {typed}: {seat:?} is no device: a model is divided as in 0+1 or cpu+cpu");
        check(MANY, &format!("gpus={typed}"), &line);
    }
    check(MANY, &format!("gpus={}", ["0"; 65].join("+")), "78: --gpus: 65 are more than 64 devices");
}

#[test]
fn nvidia_card_through_vulkan_gives_a_note() {
    for (machine, typed, expected) in [
        (&["discrete NVIDIA A10@01:00.0"][..], "", true),
        (&["discrete NVIDIA A10@01:00.0"], "gpu-backend=wgpu", false),
        (&["discrete NVIDIA A10@01:00.0"], "gpus=cpu", false),
        (&["discrete NVIDIA GeForce RTX 3060 (NVK GA106)@01:00.0"], "", false),
        (&["discrete AMD Radeon RX 7900@01:00.0"], "", false),
        (NVIDIA, "gpu-backend=cuda", false),
    ] {
        let said = chosen(machine, typed);
        assert_eq!(said.contains(THROUGH_VULKAN), expected, "{typed:?}: {said}");
    }
}

#[test]
fn cuda_is_selected_by_name() {
    check(NVIDIA, "gpu-backend=cuda", "cuda 0 NVIDIA H200 /1; cuda 1 Tesla V100 /1");
    check(NVIDIA, "gpu-backend=cuda gpus=0,0 dtype=bf16", "cuda 0 NVIDIA H200 /2; cuda 0 NVIDIA H200 (2) /2");
    check(NVIDIA, "gpu-backend=cuda gpus=v100", "cuda 1 Tesla V100 /1");
    let line =
        "78: --dtype bf16: cuda 1 Tesla V100 has no bf16 arithmetic: leave --dtype out, or use --gpus cpu";
    check(NVIDIA, "gpu-backend=cuda dtype=bf16", line);
    check(NONE, "gpu-backend=cuda", "78: --gpu-backend cuda: no GPU: install a driver");
    let line = "78: --gpus: there is no device 2; what there is: device 0 NVIDIA H200, device 1 Tesla V100";
    check(NVIDIA, "gpu-backend=cuda gpus=2", line);
}

#[test]
fn ambiguous_or_unknown_devices_give_one_line() {
    check(
        MANY,
        "gpus=4090",
        "78: --gpus: \"4090\" matches 0 NVIDIA GeForce RTX 4090 and 1 NVIDIA GeForce RTX 4090: give the index",
    );
    check(
        SOFTWARE,
        "gpus=1",
        "78: --gpus: there is no device 1; what there is: device 0 llvmpipe (LLVM 15.0.6, 256 bits)",
    );
    check(
        SOFTWARE,
        "gpus=arc",
        "78: --gpus: no device has \"arc\" in its name; what there is: device 0 llvmpipe (LLVM 15.0.6, 256 bits)",
    );
    check(NONE, "gpus=0", "78: --gpus: no GPU: install a driver (the CPU is --gpus cpu)");
    check(NONE, "gpus=arc gpu-backend=wgpu", "78: --gpus: no GPU: install a driver (the CPU is --gpus cpu)");
    check(
        MANY,
        "gpus=0 dtype=bf16",
        "78: --dtype bf16: wgpu 0 NVIDIA GeForce RTX 4090 has no bf16 arithmetic: leave --dtype out, or use --gpus cpu",
    );
    check(
        MANY,
        "gpus=cpu gpu-backend=wgpu",
        "78: --gpus: cpu is no device of --gpu-backend wgpu: leave --gpu-backend out",
    );
    check(
        MANY,
        "gpus=radeon gpu-backend=cpu",
        "78: --gpus: \"radeon\": devices of --gpu-backend cpu have indices below 64, as 0,1",
    );
    check(MANY, "gpus=auto,1", "78: --gpus: auto cannot be combined with other devices");
}

const FOUR: &[&str] = &["discrete A@1", "discrete B@2", "discrete C@3", "discrete D@4"];

#[test]
fn processes_share_the_cards_of_a_machine() {
    check(FOUR, "gpus=1/2", "wgpu 0 A /1; wgpu 1 B /1");
    check(FOUR, "gpus=2/2", "wgpu 2 C /1; wgpu 3 D /1");
    check(FOUR, "gpus=3/3", "wgpu 2 C /1; wgpu 3 D /1");
    // Adapters of one card count once, software adapters never.
    let note = THROUGH_VULKAN;
    check(MANY, "gpus=2/3", &format!("wgpu 1 NVIDIA GeForce RTX 4090 /1; {note}"));
    // More processes than cards: memory is divided.
    check(&FOUR[..2], "gpus=2/4", "wgpu 0 A /2");
    check(&FOUR[..2], "gpus=3/4", "wgpu 1 B /2");
    check(&FOUR[..1], "gpus=3/3", "wgpu 0 A /3");
    check(NONE, "gpus=2/2", ON_THE_CPU);
    check(FOUR, "gpus=2/2 gpu-backend=cpu", "cpu /1");
    for typed in ["0/2", "3/2", "1/", "/2", "a/b", "1/65", "1/0"] {
        let said = chosen(FOUR, &format!("gpus={typed}"));
        assert!(said.contains("is no part: the first of two is 1/2, the second 2/2"), "{typed}: {said}");
    }
    for (count, of) in [(1, 1), (7, 3), (3, 7), (64, 5)] {
        let parts = |at| Part { at, of }.range(count);
        let mut all: Vec<usize> = (0..of).flat_map(parts).collect();
        all.dedup();
        assert_eq!(all, (0..count).collect::<Vec<_>>(), "{count} things in {of} parts");
        let sharing: usize = (0..count).map(|i| Part { at: 0, of }.sharing(count, i)).sum();
        assert_eq!(sharing, (0..of).map(|at| parts(at).len()).sum::<usize>());
    }
}

#[test]
fn cards_that_an_engine_hides_are_left_alone() {
    let machine: Vec<Facts> = [
        "discrete NVIDIA GeForce RTX 4090@02:00.0",
        "discrete NVIDIA GeForce RTX 4090@01:00.0",
        "integrated AMD Radeon Graphics (RADV)@0a:00.0",
        "integrated AMD Radeon Graphics (AMDVLK)@0a:00.0",
    ]
    .map(facts)
    .into();
    let machine: Vec<&Facts> = machine.iter().collect();
    let seen = |name: &str, value: &str| visible(&machine, &|asked| (asked == name).then(|| value.into()));
    let all = || (vec![0, 1, 2, 3], None);
    let hiding = |list: &str| Some(format!("CUDA_VISIBLE_DEVICES={list}"));
    assert_eq!(seen("PATH", "0"), all());
    // By their addresses.
    assert_eq!(seen("CUDA_VISIBLE_DEVICES", "0"), (vec![1, 2, 3], hiding("0")));
    assert_eq!(seen("CUDA_VISIBLE_DEVICES", "1"), (vec![0, 2, 3], hiding("1")));
    assert_eq!(seen("CUDA_VISIBLE_DEVICES", "0,1"), all());
    for none in ["", "-1", "NoDevFiles", "2"] {
        assert_eq!(seen("CUDA_VISIBLE_DEVICES", none), (vec![2, 3], hiding(none)), "{none:?}");
    }
    assert_eq!(seen("CUDA_VISIBLE_DEVICES", "GPU-8f2c"), all(), "Vulkan cannot find it by that name");
    assert_eq!(seen("ROCR_VISIBLE_DEVICES", "0"), all());
    assert_eq!(seen("HIP_VISIBLE_DEVICES", "-1"), (vec![0, 1], Some("HIP_VISIBLE_DEVICES=-1".into())));

    let (seen, hiding) = visible(&machine[..2], &|name| (name == "CUDA_VISIBLE_DEVICES").then(String::new));
    let cards = Cards { driver: "wgpu", facts: &machine[..2], seen, hiding, why: &String::new };
    let of = |backend| {
        let options = DeviceOptions {
            threads: None,
            memory_limit: None,
            dtype: ComputeDtype::Auto,
            offload: Offload::Auto,
            gpus: Gpus::Auto,
            backend,
        };
        among(&options, &cards).map(|chosen| chosen.notes.concat()).unwrap_or_else(|e| e.line)
    };
    assert_eq!(of(None), "note: computes on the CPU: CUDA_VISIBLE_DEVICES= leaves no card");
    assert_eq!(of(Some("wgpu")), "--gpu-backend wgpu: CUDA_VISIBLE_DEVICES= leaves no card");
}
