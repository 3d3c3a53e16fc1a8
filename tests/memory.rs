//! Memory of the real binary: the bytes of a trained value, the end of a run without enough memory, and the figures of
//! a plan.

mod cli_fixture;

use cli_fixture::{Bench, stderr};
use serde_json::Value;
#[cfg(target_os = "linux")]
use std::process::{Command, Stdio};
#[cfg(target_os = "linux")]
use std::time::Duration;

/// Plans with a separate cache, because measurements of other tests would count.
fn plan(b: &Bench, args: &str) -> Value {
    let mut command = b.command(&format!("plan {args} --json"));
    let out = command.env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
    assert!(out.status.success(), "{}", stderr(&out));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Peak memory of a run, as the system counts it.
#[cfg(target_os = "linux")]
fn peak(b: &Bench, args: &str) -> u64 {
    let mut run = b.command(args).stderr(Stdio::null()).spawn().unwrap();
    let mut peak = 0;
    while run.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
        peak = peak.max(line.split_whitespace().next().map_or(0, |kb| kb.parse().unwrap()));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(run.wait().unwrap().success(), "{args}");
    peak * 1024
}

/// Parameter, two moments, sum of 8 bytes, and the device's parameter and gradient: 28. Rows are short, so that the
/// activations that grow with the rank are a hundredth of that.
#[cfg(target_os = "linux")]
#[test]
fn a_trained_value_takes_28_bytes() {
    let b = Bench::new();
    b.file("short.jsonl", &"{\"prompt\":\"a\",\"completion\":\"b\"}\n".repeat(8));
    let run = |rank: usize| {
        let options =
            "--gpus cpu --dtype f32 --batch-size 1 --micro-batch-tokens 16 --max-steps 3 --save-steps 1";
        peak(&b, &format!("demo --data short.jsonl --rank {rank} {options} -q -o rank{rank}")) as f64
    };
    let bytes = (run(512) - run(128)) / (384.0 * 9728.0);
    assert!((26.0..29.0).contains(&bytes), "{bytes}");
}

/// Runs under `ulimit -v`.
#[cfg(target_os = "linux")]
fn limited(b: &Bench, kilobytes: u64, args: &str) -> (Option<i32>, String) {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -v {kilobytes}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_finetune")]);
    let inner = b.command(args);
    shell.args(inner.get_args()).current_dir(b.dir.path()).stdin(Stdio::null());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let out = shell.output().unwrap();
    (out.status.code(), stderr(&out))
}

#[cfg(target_os = "linux")]
#[test]
fn run_beyond_process_limits_ends_with_one_line() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --gpus cpu --threads 1 --rank 65536 -q -o out";
    for (typed, code, said) in [
        // The limit reduces the free memory that the run sees.
        ("", 78, "needs about "),
        // A typed limit above the real one is trusted until an allocation fails.
        (" --memory-limit 100GB", 1, "error: out of memory: "),
    ] {
        let (ended, text) = limited(&b, 2_000_000, &format!("{run}{typed}"));
        assert_eq!(ended, Some(code), "{typed}: {text}");
        assert!(
            text.lines().last().is_some_and(|last| last.starts_with("error: ") && last.contains(said)),
            "{text}"
        );
    }
}

/// With any amount of memory the process ends with a result or with one line that is no internal error.
#[cfg(target_os = "linux")]
#[test]
fn any_memory_limit_ends_with_a_result_or_one_line() {
    let b = Bench::new();
    let mut ended = [0; 2];
    for kilobytes in (60_000..=400_000).step_by(20_000) {
        let run = format!("demo --data rows.jsonl --gpus cpu --max-steps 1 --rank 4 -q -o out{kilobytes}");
        let (code, text) = limited(&b, kilobytes, &run);
        let line = text.lines().last().unwrap_or_default();
        let said = line.starts_with("error: ") && !text.contains("internal error");
        assert!(code == Some(0) || (matches!(code, Some(1 | 78)) && said), "{kilobytes} kB: {code:?} {text}");
        ended[usize::from(code == Some(0))] += 1;
    }
    assert!(ended.iter().all(|&n| n > 0), "runs that were refused, and that finished: {ended:?}");
}

/// Each remedy that a refusal advises: the options that replace those of the run.
fn advised(line: &str) -> Vec<String> {
    let ways = line.rsplit_once(": use ").map_or("", |(_, ways)| ways);
    let plain = |way: &str| {
        let words = way.replace(" (and --max-seq-len no longer)", "");
        words.replace(" where there is as much", "")
    };
    ways.split(", or ").filter(|way| !way.is_empty()).map(plain).collect()
}

/// The options of `run`, with those of `way` in their place.
fn replaced(run: &str, way: &str) -> String {
    let pairs = |text: &str| -> Vec<(String, String)> {
        let words: Vec<&str> = text.split_whitespace().collect();
        words.chunks(2).map(|pair| (pair[0].into(), pair[1].into())).collect()
    };
    let mut options = pairs(run);
    for (name, value) in pairs(way) {
        options.retain(|(known, _)| *known != name);
        options.push((name, value));
    }
    options.iter().map(|(name, value)| format!(" {name} {value}")).collect()
}

#[test]
fn every_advised_option_of_a_refusal_fits() {
    let b = Bench::new();
    // With an empty cache nothing was measured: the advice follows the shapes.
    let own = |args: &str| b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
    for (run, wanted) in [
        ("--rank 512 --memory-limit 60MB", "--rank --target-modules --memory-limit"),
        ("--rank 512 --memory-limit 30MB", "--rank --memory-limit"),
        ("--rank 16 --micro-batch-tokens 4096 --memory-limit 20MB", "--micro-batch-tokens --memory-limit"),
        ("--rank 64 --quantize nf4 --memory-limit 12MB", "--rank --memory-limit"),
        ("--rank 512 --memory-limit 4MB", "--rank --memory-limit"),
        ("--rank 512 --memory-limit 1MB", ""),
    ] {
        let common = "plan demo --data rows.jsonl --gpus cpu --dtype f32 --offload never";
        let out = own(&format!("{common} {run}"));
        let text = stderr(&out);
        let line = text.lines().last().unwrap_or_default();
        assert_eq!(out.status.code(), Some(78), "{run}: {text}");
        let ways = advised(line);
        for name in wanted.split_whitespace() {
            assert!(ways.iter().any(|way| way.starts_with(name)), "{run}: {name} in {line}");
        }
        assert!(ways.is_empty() == wanted.is_empty(), "{run}: {line}");
        assert!(!run.contains("quantize") || !line.contains("quanti"), "it is quantised: {line}");
        for way in &ways {
            let now = own(&format!("{common}{}", replaced(run, way)));
            assert!(now.status.success(), "{run}, then {way}: {}", stderr(&now));
        }
        if let Some(rank) = ways.iter().find_map(|way| way.strip_prefix("--rank ")?.parse::<u32>().ok()) {
            let more = replaced(run, &format!("--rank {}", rank + 1));
            assert!(!own(&format!("{common}{more}")).status.success(), "{rank} is the largest: {line}");
        }
        // What is advised where layers may be streamed fits too.
        let streams = common.replace("--offload never", "--offload auto");
        let out_auto = own(&format!("{streams} {run}"));
        let ways_auto = advised(stderr(&out_auto).lines().last().unwrap_or_default());
        // Rows here are longer than what 1 MB has room for.
        for way in ways_auto.into_iter().filter(|_| !wanted.is_empty()) {
            let now = own(&format!("{streams}{}", replaced(run, &way)));
            assert!(now.status.success(), "{run} with streamed layers, then {way}: {}", stderr(&now));
        }
        // Its two totals are equal.
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let total = said.split_once("DOES NOT FIT: ").and_then(|(_, rest)| rest.split_once(" =")).unwrap().0;
        assert!(line.contains(&format!("about {total} ")), "{total}: {line}");
    }
}

#[test]
fn a_plan_needs_no_weights() {
    let b = Bench::new();
    let run = |model: &str| {
        plan(&b, &format!("{model} --data rows.jsonl --gpus cpu --dtype f32 --memory-limit 1GB"))
    };
    b.model("whole");
    std::fs::remove_file(b.model("bare").join("model.safetensors")).unwrap();
    let (whole, bare) = (run("whole"), run("bare"));
    assert_eq!(whole["devices"][0]["memory_bytes"], bare["devices"][0]["memory_bytes"]);
    assert_eq!(whole["steps"], bare["steps"]);
    let kind = bare["model"]["weights"].as_str().unwrap();
    assert_eq!(kind, "bf16, estimated from config.json; weights are not here");
    let quantised = plan(&b, "bare --data rows.jsonl --gpus cpu --quantize nf4");
    let bytes = |planned: &Value| planned["devices"][0]["memory_bytes"]["weights"].as_u64().unwrap();
    assert!(bytes(&quantised) < bytes(&bare));
    let streamed = |model: &str| {
        let planned = plan(
            &b,
            &format!("{model} --data rows.jsonl --gpus cpu --dtype f32 --memory-limit 1GB --offload 3"),
        );
        planned["devices"][0]["memory_bytes"].clone()
    };
    assert_eq!(streamed("bare")["streamed_layers"], 3);
    assert_eq!(streamed("bare"), streamed("whole"));
    // A run needs the weights.
    let out = b.run("bare --data rows.jsonl -o out");
    assert!(stderr(&out).contains("without model.safetensors"), "{}", stderr(&out));
}

#[test]
fn absent_card_is_planned_by_its_memory() {
    let b = Bench::new();
    let planned = plan(&b, "demo --data rows.jsonl --assume-gpu 8GB");
    let device = &planned["devices"][0];
    assert!(device["fits"].as_bool().unwrap() && device["tokens_per_second"].is_null(), "{device}");
    assert_eq!(device["memory_bytes"]["limit"], 7_600_000_000u64, "a twentieth is left to the driver");
    let said = b.ok("plan demo --data rows.jsonl --assume-gpu 8GB");
    assert!(said.contains("memory fits") && said.contains("time     unknown"), "{said}");
    let streamed = b.ok("plan demo --data rows.jsonl --assume-gpu 8GB --offload 3");
    assert!(streamed.contains("3 of 4 layers are streamed: read again in each pass"), "{streamed}");
    let small = b.run("plan demo --data rows.jsonl --assume-gpu 8MB --rank 512");
    assert!(small.status.code() == Some(78) && stderr(&small).contains("--rank "), "{}", stderr(&small));
    for (size, why) in [("big", "is not a size"), ("8", "\"8\" is 8 bytes: add a unit, as 8GB")] {
        let refused = b.run(&format!("plan demo --data rows.jsonl --assume-gpu {size}"));
        assert!(refused.status.code() == Some(2) && stderr(&refused).contains(why), "{}", stderr(&refused));
    }
}

/// With streamed layers a run has the bytes of a resident one: of a typed number of layers, of a model that does not
/// fit, in blocks, on two devices, after a resume; so do its answers.
#[test]
fn streamed_layers_change_no_byte() {
    let b = Bench::new();
    let run = |more: &str, out: &str| {
        let options = "--data rows.jsonl --dtype f32 --micro-batch-tokens 128 --max-steps 4 --batch-size 4";
        let out = b.run(&format!("demo {options} --lora-dropout 0.1 {more} -o {out}"));
        assert!(out.status.success(), "{more}: {}", stderr(&out));
        stderr(&out)
    };
    let adapter = |out: &str| b.read(&format!("{out}/adapter_model.safetensors"));
    let said = run("--gpus cpu", "whole");
    assert!(!said.contains("streams"), "{said}");
    // Of its 4 layers.
    for layers in [1, 3, 99] {
        let out = format!("typed{layers}");
        let said = run(&format!("--gpus cpu --offload {layers}"), &out);
        assert!(said.contains(&format!("streams  {} of 4 layers", layers.min(4))), "{said}");
        assert!(adapter(&out) == adapter("whole"), "{layers} layers");
    }
    assert!(b.run("demo --data rows.jsonl --offload some -o no").status.code() == Some(2));
    // The largest limit that a resident model exceeds.
    let planned = |more: &str| {
        let args = format!(
            "plan demo --data rows.jsonl --gpus cpu --dtype f32 --micro-batch-tokens 128 {more} --json"
        );
        let out = b.command(&args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
        out.status.success().then(|| serde_json::from_slice::<Value>(&out.stdout).unwrap())
    };
    let kilobytes = (1..200).map(|i| i * 100).rev();
    let mut limits = kilobytes.map(|kb| format!("--memory-limit {kb}kB"));
    let limit = limits.find(|limit| planned(&format!("{limit} --offload never")).is_none()).unwrap();
    let memory = &planned(&limit).unwrap()["devices"][0]["memory_bytes"];
    assert!(memory["streamed_layers"].as_u64().unwrap() > 0, "{memory}");
    assert!(memory["total"].as_u64() <= memory["limit"].as_u64(), "{memory}");
    let said = run(&format!("--gpus cpu {limit}"), "limited");
    assert!(said.contains("streams") && adapter("limited") == adapter("whole"), "{said}");
    let said = run("--gpu-backend cpu --gpus 0,1 --threads 2 --offload 2", "two");
    assert!(said.contains("streams  2 of 4 layers") && adapter("two") == adapter("whole"), "{said}");
    run("--gpus cpu --quantize nf4", "blocks");
    run("--gpus cpu --quantize nf4 --offload 4", "streamed_blocks");
    assert!(adapter("streamed_blocks") == adapter("blocks"));
    run("--gpus cpu --offload 2 --save-steps 2", "saved");
    std::fs::remove_dir_all(b.path("saved/checkpoint-4")).unwrap();
    b.ok("--resume=saved --offload 3 -q");
    assert!(adapter("saved") == adapter("whole"));
    let answer =
        |more: &str| b.ok(&format!("generate demo --adapter whole --gpus cpu --prompt hello {more}"));
    assert_eq!(answer("--offload 3"), answer(""));
}

#[test]
fn measurements_of_streamed_layers_are_kept_apart() {
    let b = Bench::new();
    let cache = b.path("measured");
    let measured = |args: &str| {
        let out = b.command(args).env("XDG_CACHE_HOME", &cache).output().unwrap();
        assert!(out.status.success(), "{args}: {}", stderr(&out));
        let all = std::fs::read_to_string(cache.join("finetune/profiles.json")).unwrap();
        std::fs::remove_dir_all(&cache).unwrap();
        (stderr(&out), all)
    };
    let options = "demo --data rows.jsonl --dtype f32 --micro-batch-tokens 128 --max-steps 4 --batch-size 4";
    for args in [
        "bench demo --gpus cpu --rows 1 --length 32 --repeats 1 --offload 3",
        &format!("{options} --gpus cpu --offload 3 -o one"),
        &format!("{options} --gpu-backend cpu --gpus 0,1 --offload 3 -o both"),
    ] {
        let (said, all) = measured(args);
        assert!(
            said.contains("streams  3 of 4 layers") && all.contains("3 layers streamed"),
            "{said}\n{all}"
        );
    }
    let (said, all) = measured(&format!("{options} --gpu-backend cpu --gpus 0,1 -o both --overwrite"));
    assert!(!said.contains("streams") && !all.contains("streamed"), "{all}");
}
