//! A worker that holds some layers fetches the parts of the model's files in which they are.

use crate::fleet::{Fleet, RUN};
use crate::random_base;
use finetune::cluster::message::PART;
use finetune::families::{GEMMA3, GPT_OSS, LLAMA, OLMO2, QWEN3_MOE};
use finetune::format::safetensors;
use finetune::numeric::block::{Block, NF4_LEVELS, quantise};
use finetune::numeric::tensor::Tensors;
use serde_json::json;
use std::path::PathBuf;

const FILE: &str = "model.safetensors";

/// A run of few steps.
fn steps(model: &str) -> String {
    format!("{} --max-steps 2", RUN.replace("demo", model))
}

/// A run over two workers, each with a cache of its own, to its end.
fn run(fleet: &mut Fleet, run: &str, (stages, out): (&str, &str)) {
    let at = fleet.at().to_owned();
    let coordinator = format!("{run} --role coordinator --bind {at} --stages {stages} -o {out}");
    fleet.process(&format!("coordinator-{out}"), &coordinator);
    fleet.wait_for(&format!("coordinator-{out}"), "listens on");
    for name in ["a", "b"] {
        let how = format!("--role worker --coordinator {at} --model-cache cache-{name} --threads 1");
        fleet.process(&format!("{name}-{out}"), &format!("{how} --join-timeout 60s"));
        // The order of connection decides who holds the first layers.
        fleet.wait_for(&format!("{name}-{out}"), "waits for its place");
    }
    for name in ["coordinator", "a", "b"] {
        fleet.all_end(&[&format!("{name}-{out}")], 0);
    }
}

/// A file of a worker's cache.
fn cached(fleet: &Fleet, name: &str, file: &str) -> PathBuf {
    let folders = std::fs::read_dir(fleet.bench.path(&format!("cache-{name}"))).unwrap();
    let mut folders = folders.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let folder = folders.next().expect("a folder");
    assert!(folder.to_string_lossy().ends_with(".parts") && folders.next().is_none(), "{folder:?}");
    folder.join(file)
}

/// Number of parts that a worker has, and of all.
fn parts(fleet: &Fleet, name: &str, file: &str) -> (usize, usize) {
    let plain = file.rsplit('/').next().unwrap();
    let (here, all) = (std::fs::read(cached(fleet, name, plain)).unwrap(), fleet.bench.read(file));
    assert_eq!(here.len(), all.len());
    let same = here.chunks(PART).zip(all.chunks(PART)).filter(|(here, all)| here == all).count();
    (same, all.len().div_ceil(PART))
}

/// Megabytes that a worker has said that it fetches.
fn fetched(fleet: &Fleet, name: &str) -> f64 {
    let said = fleet.said(name);
    let lines = said.lines().filter_map(|line| line.split_once("from the coordinator: "));
    lines.map(|(_, rest)| rest.split(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[test]
fn workers_fetch_the_parts_of_their_layers_alone() {
    // With a head of its own, with an embedding that the last seat needs too, and with joined experts.
    for family in [&OLMO2, &GEMMA3, &GPT_OSS] {
        let mut fleet = Fleet::new();
        random_base::sized(&fleet.bench, family, 256);
        let (steps, file) = (steps("./base"), format!("base/{FILE}"));
        let alone = fleet.alone(&steps);
        run(&mut fleet, &steps, ("2+4", "one"));
        assert!(fleet.adapter("one") == alone, "{}\n{}", family.name, fleet.all());
        let [(a, all), (b, _)] = ["a", "b"].map(|name| parts(&fleet, name, &file));
        assert!(all > 20 && a * 2 < all && b * 6 < all * 5, "{}: {a} and {b} of {all} parts", family.name);

        // Other layers: each fetches those that it does not have yet.
        run(&mut fleet, &steps, ("4+2", "two"));
        assert!(fleet.adapter("two") == alone, "{}\n{}", family.name, fleet.all());
        let (more, _) = parts(&fleet, "a", &file);
        assert!(more > a && more * 6 < all * 5, "{}: {more} of {all} parts", family.name);
        let added = (more - a) as f64 * PART as f64 / 1e6;
        assert!((fetched(&fleet, "a-two") - added).abs() < 0.4, "{added}\n{}", fleet.all());
        assert_eq!(fetched(&fleet, "b-two"), 0.0, "{}", fleet.all());

        // A damaged part is fetched again, and no other one.
        let path = cached(&fleet, "a", FILE);
        let (mut bytes, base) = (std::fs::read(&path).unwrap(), fleet.bench.read(&file));
        let same =
            |part: &usize| bytes[part * PART..(part + 1) * PART] == base[part * PART..(part + 1) * PART];
        let part = (1..all - 1).filter(same).nth(1).unwrap();
        bytes[part * PART + 7] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        run(&mut fleet, &steps, ("4+2", "three"));
        assert!(fleet.adapter("three") == alone, "{}\n{}", family.name, fleet.all());
        assert!((fetched(&fleet, "a-three") - PART as f64 / 1e6).abs() < 0.1, "{}", fleet.all());
    }
}

/// The header of a GGUF is longer than a part, and says its length piece by piece. Rows of q and k are paired (Llama), the
/// experts of a layer are one tensor, the head is the embedding or a matrix of its own.
#[test]
fn workers_fetch_the_parts_of_a_gguf_alone() {
    for (family, kind) in [(&LLAMA, "bf16"), (&LLAMA, "q8_0"), (&GEMMA3, "q8_0"), (&QWEN3_MOE, "q8_0")] {
        let mut fleet = Fleet::new();
        random_base::sized(&fleet.bench, family, 256);
        fleet.bench.ok(&format!("{} -q -o first", steps("./base")));
        fleet.bench.ok(&format!("export first --to merged-gguf --outtype {kind} -o m.gguf"));
        let steps = steps("./m.gguf");
        let alone = fleet.alone(&steps);
        run(&mut fleet, &steps, ("2+4", "one"));
        assert!(fleet.adapter("one") == alone, "{} {kind}\n{}", family.name, fleet.all());
        let [(a, all), (b, _)] = ["a", "b"].map(|name| parts(&fleet, name, "m.gguf"));
        let what = format!("{} {kind}: {a} and {b} of {all} parts", family.name);
        assert!(all > 12 && a * 3 < 2 * all && b * 10 < 9 * all, "{what}");

        run(&mut fleet, &steps, ("4+2", "two"));
        assert!(fleet.adapter("two") == alone, "{} {kind}\n{}", family.name, fleet.all());
        assert!(parts(&fleet, "a", "m.gguf").0 > a, "{what}");
        assert_eq!(fetched(&fleet, "b-two"), 0.0, "{}", fleet.all());
    }
}

/// The base as bitsandbytes stores it in NF4: numbers, then bytes, each by name.
fn in_nf4(fleet: &Fleet) {
    let base = safetensors::open(&fleet.bench.path(&format!("base/{FILE}"))).unwrap();
    let mut tensors: Vec<random_base::Raw> = Vec::new();
    for name in base.names() {
        let tensor = base.get(&name).unwrap();
        let (shape, bytes) = (tensor.shape.clone(), tensor.bytes.to_vec());
        let is_matrix = name.contains("_proj") && shape.len() == 2;
        if !is_matrix {
            tensors.push((name, "BF16", shape, bytes));
            continue;
        }
        let blocks = quantise(Block::NF4, &tensor.dtype.widen(&bytes)).unwrap();
        let blocks = blocks.as_chunks::<36>().0;
        let (scales, codes): (Vec<&[u8]>, Vec<&[u8]>) = blocks.iter().map(|block| block.split_at(4)).unzip();
        let (scales, codes) = (scales.concat(), codes.concat());
        let levels = NF4_LEVELS.iter().flat_map(|level| level.to_le_bytes()).collect();
        let state = json!({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape});
        let state = state.to_string().into_bytes();
        tensors.push((format!("{name}.absmax"), "F32", vec![scales.len() / 4], scales));
        tensors.push((format!("{name}.quant_map"), "F32", vec![16], levels));
        let to_state = format!("{name}.quant_state.bitsandbytes__nf4");
        tensors.push((to_state, "U8", vec![state.len()], state));
        tensors.push((name, "U8", vec![codes.len(), 1], codes));
    }
    let method = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    random_base::store(&fleet.bench, tensors, method);
}

/// Each worker reads the shapes of all matrices, which are in tensors of their own.
#[test]
fn workers_fetch_the_parts_of_a_checkpoint_in_nf4_alone() {
    let mut fleet = Fleet::new();
    random_base::sized(&fleet.bench, &LLAMA, 768);
    let steps = format!("{} --max-steps 1", RUN.replace("demo", "./base").replace("size 24", "size 6"));
    let quantised = fleet.bench.ok(&format!("{steps} --quantize nf4 -q -o loaded"));
    drop(quantised);
    in_nf4(&fleet);
    let alone = fleet.alone(&steps);
    assert!(alone == fleet.adapter("loaded"), "the checkpoint is not what --quantize nf4 makes");
    run(&mut fleet, &steps, ("2+4", "one"));
    assert!(fleet.adapter("one") == alone, "{}", fleet.all());
    let [(a, all), (b, _)] = ["a", "b"].map(|name| parts(&fleet, name, &format!("base/{FILE}")));
    assert!(all > 40 && a * 10 < 8 * all && b * 100 < 98 * all, "{a} and {b} of {all} parts");
}

#[test]
fn workers_fetch_the_parts_of_experts_in_mxfp4_alone() {
    let mut fleet = Fleet::new();
    random_base::sized(&fleet.bench, &GPT_OSS, 256);
    random_base::in_mxfp4(&fleet.bench);
    let steps = steps("./base");
    let alone = fleet.alone(&steps);
    run(&mut fleet, &steps, ("2+4", "one"));
    assert!(fleet.adapter("one") == alone, "{}", fleet.all());
    let [(a, all), (b, _)] = ["a", "b"].map(|name| parts(&fleet, name, &format!("base/{FILE}")));
    assert!(all > 12 && a * 10 < 8 * all && b * 100 < 98 * all, "{a} and {b} of {all} parts");
}
