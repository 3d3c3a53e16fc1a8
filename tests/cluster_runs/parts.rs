//! A worker that holds some layers fetches the parts of the model's files in which they are.

use crate::fleet::{Fleet, RUN};
use crate::random_base;
use finetune::cluster::message::PART;
use finetune::families::{GEMMA3, OLMO2};
use std::path::PathBuf;

const FILE: &str = "model.safetensors";

/// A run over two workers, each with a cache of its own, to its end.
fn run(fleet: &mut Fleet, stages: &str, out: &str) {
    let run = format!("{} --max-steps 2", RUN.replace("demo", "./base"));
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

/// The file of a worker's cache.
fn cached(fleet: &Fleet, name: &str) -> PathBuf {
    let folders = std::fs::read_dir(fleet.bench.path(&format!("cache-{name}"))).unwrap();
    let mut folders = folders.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let folder = folders.next().expect("a folder");
    assert!(folder.to_string_lossy().ends_with(".parts") && folders.next().is_none(), "{folder:?}");
    folder.join(FILE)
}

/// Number of parts that a worker has, and of all.
fn parts(fleet: &Fleet, name: &str) -> (usize, usize) {
    let (here, all) =
        (std::fs::read(cached(fleet, name)).unwrap(), fleet.bench.read(&format!("base/{FILE}")));
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
    // With a head of its own, and with an embedding that the last seat needs too.
    for family in [&OLMO2, &GEMMA3] {
        let mut fleet = Fleet::new();
        random_base::sized(&fleet.bench, family, 256);
        let alone = fleet.alone(&format!("{} --max-steps 2", RUN.replace("demo", "./base")));
        run(&mut fleet, "2+4", "one");
        assert!(fleet.adapter("one") == alone, "{}\n{}", family.name, fleet.all());
        let [(a, all), (b, _)] = ["a", "b"].map(|name| parts(&fleet, name));
        assert!(all > 20 && a * 2 < all && b * 6 < all * 5, "{}: {a} and {b} of {all} parts", family.name);

        // Other layers: each fetches those that it does not have yet.
        run(&mut fleet, "4+2", "two");
        assert!(fleet.adapter("two") == alone, "{}\n{}", family.name, fleet.all());
        let (more, _) = parts(&fleet, "a");
        assert!(more > a && more * 6 < all * 5, "{}: {more} of {all} parts", family.name);
        let added = (more - a) as f64 * PART as f64 / 1e6;
        assert!((fetched(&fleet, "a-two") - added).abs() < 0.4, "{added}\n{}", fleet.all());
        assert_eq!(fetched(&fleet, "b-two"), 0.0, "{}", fleet.all());

        // A damaged part is fetched again, and no other one.
        let path = cached(&fleet, "a");
        let (mut bytes, base) = (std::fs::read(&path).unwrap(), fleet.bench.read(&format!("base/{FILE}")));
        let same =
            |part: &usize| bytes[part * PART..(part + 1) * PART] == base[part * PART..(part + 1) * PART];
        let part = (1..all - 1).filter(same).nth(1).unwrap();
        bytes[part * PART + 7] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        run(&mut fleet, "4+2", "three");
        assert!(fleet.adapter("three") == alone, "{}\n{}", family.name, fleet.all());
        assert!((fetched(&fleet, "a-three") - PART as f64 / 1e6).abs() < 0.1, "{}", fleet.all());
    }
}
