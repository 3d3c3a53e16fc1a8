//! `finetune plan`: its counts match the run that follows, it writes nothing, and it refuses what a run refuses.

mod cli_fixture;

use cli_fixture::{Bench, classes, numbers, pairs, rows, stderr};
use finetune::model::memory::size;
use finetune::train::island;
use serde_json::{Value, json};

fn plan(b: &Bench, args: &str) -> Value {
    let out = b.ok(&format!("plan {args} --json"));
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// Plans, runs on two devices (whose events count microbatches), and compares.
fn check(args: &str) {
    let b = Bench::new();
    b.file("many.jsonl", &rows(90));
    b.file("classes.jsonl", &classes(60));
    b.file("numbers.jsonl", &numbers(60));
    b.file("pairs.jsonl", &pairs(60));
    let args = format!("{args} --gpu-backend cpu --gpus 0,1 --rank 2 -q");
    let planned = plan(&b, &format!("{args} -o out"));
    assert!(!b.path("out").exists() && !b.path("runs").exists(), "a plan writes nothing");
    b.ok(&format!("{args} -o out"));
    let steps = b.events("out", "step");
    let sum = |of: &dyn Fn(&Value) -> u64| steps.iter().map(of).sum::<u64>();
    let microbatches = sum(&|s| {
        s["shared"]["devices"].as_array().unwrap().iter().map(|d| d["microbatches"].as_u64().unwrap()).sum()
    });
    let start = &b.events("out", "run")[0];
    let counted = [
        ("total", steps.len() as u64),
        ("microbatches", microbatches),
        ("tokens", sum(&|s| s["total_tokens"].as_u64().unwrap())),
        ("per_epoch", start["steps_per_epoch"].as_u64().unwrap()),
        ("checkpoints", b.events("out", "checkpoint").len() as u64),
    ];
    for (name, did) in counted {
        assert_eq!(planned["steps"][name].as_u64(), Some(did), "{name}: {args}");
    }
    assert_eq!(planned["rows"]["trained_on"], start["rows"], "{args}");
    assert_eq!(planned["adapter"]["trained_values"], start["parameters"], "{args}");
    assert_eq!(planned["eval"]["rows"], start["eval_rows"], "{args}");
    let evals = b.events("out", "eval").len() as u64;
    assert_eq!(planned["eval"]["times"].as_u64(), Some(evals), "{args}");
}

#[test]
fn plan_counts_match_a_run() {
    check("demo --data many.jsonl --batch-size 7 --epochs 2 --save-steps 5");
    check("demo --data many.jsonl --eval-split 10% --eval-steps 4 --max-steps 10 --save-steps 0");
    check("demo --data many.jsonl --no-packing --batch-size 16 --no-shuffle --max-steps 3");
    check("demo --data many.jsonl --micro-batch-tokens 40 --max-seq-len 30 --batch-size 20");
    check("demo --data classes.jsonl --task classify --batch-size 9 --epochs 2");
    check("demo --data numbers.jsonl --task regression --batch-size 9 --epochs 2 --eval-split 4");
    check("demo --data pairs.jsonl --task reward --batch-size 9 --epochs 2");
}

/// The reference scores each answer of the plan and of the evaluation once, and none after a resume.
#[test]
fn plan_counts_the_answers_that_a_reference_scores() {
    let b = Bench::new();
    b.file("pairs.jsonl", &pairs(60));
    let args = "demo --data pairs.jsonl --rank 2 --batch-size 6 --gpus cpu -q";
    let counted = |more: &str| {
        let planned = plan(&b, &format!("{args} {more}"));
        let number = |part: &str, key: &str| planned[part][key].as_f64().unwrap();
        let forecast = &planned["forecast"];
        let sum: f64 = ["steps", "look", "reference", "checkpoint"]
            .iter()
            .map(|part| forecast[format!("{part}_seconds")].as_f64().unwrap())
            .sum();
        assert!((sum - number("forecast", "seconds")).abs() < 1e-6, "{forecast}");
        assert_eq!(number("reference", "tokens") > 0.0, number("forecast", "reference_seconds") > 0.0);
        (
            number("reference", "tokens"),
            number("rows", "tokens"),
            number("steps", "tokens"),
            number("eval", "tokens"),
        )
    };
    let (reference, rows, _, _) = counted("--task dpo --epochs 2");
    assert_eq!(reference, rows, "every row once");
    let (reference, rows, steps, eval) = counted("--task dpo --max-steps 3 --eval-split 10");
    assert!(eval > 0.0 && steps < rows, "{steps} of {rows}");
    assert_eq!(reference, steps + eval, "only rows of the plan");
    for without in ["--task orpo", "--task reward"] {
        assert_eq!(counted(without).0, 0.0, "{without}");
    }
    b.ok(&format!("{args} --task dpo --max-steps 2 --save-steps 1 -o out"));
    assert_eq!(counted("--task dpo --max-steps 2 --resume=out/checkpoint-1").0, 0.0);
    let text = b.ok(&format!("plan {args} --task dpo"));
    assert!(text.contains(" tokens of answers, scored once") && text.contains(" of the reference"), "{text}");
}

fn names(b: &Bench) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(b.dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn plan_refuses_what_a_run_refuses_in_the_same_words() {
    let b = Bench::new();
    b.file("taken/run.yaml", "rank: 3\n");
    b.file("c.yaml", "rnak: 8\n");
    let before = names(&b);
    for (args, code) in [
        ("demo --data rows.jsonl --rank 0", 78),
        ("demo --data rows.jsonl --rank many", 2),
        ("demo --data rows.jsonl --max-seq-len 99999", 78),
        ("demo --data nowhere.jsonl", 1),
        ("demo --data rows.jsonl --task classify", 1),
        ("demo --data rows.jsonl --target-modules x_proj", 78),
        ("demo --data rows.jsonl -o taken", 78),
        ("demo --data rows.jsonl --resume=nowhere", 1),
        ("demo --data rows.jsonl --expect-workers 2", 78),
        ("no-such-model --data rows.jsonl", 2),
        ("--config c.yaml", 78),
        ("demo --data rows.jsonl --micro-batch-tokens some", 2),
    ] {
        let (planned, run) = (b.run(&format!("plan {args}")), b.run(args));
        assert_eq!(planned.status.code(), Some(code), "{args}: {}", stderr(&planned));
        let last = |text: &str| text.lines().last().unwrap_or_default().replace("finetune plan", "finetune");
        assert_eq!(last(&stderr(&planned)), last(&stderr(&run)), "{args}");
    }
    assert_eq!(names(&b), before, "nothing was written");
    let refused = |args: &str| b.run(args).status.code();
    assert_eq!(refused("plan demo --data rows.jsonl --link fast"), Some(2));
    assert_eq!(refused("plan --role worker --coordinator h:9000"), Some(78));
}

#[test]
fn plan_rejects_device_without_memory_and_prints_breakdown() {
    let b = Bench::new();
    let out = b.run("plan demo --data rows.jsonl --gpus cpu --offload never --memory-limit 4MB");
    let said = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(78), "{}", stderr(&out));
    assert!(said.contains("DOES NOT FIT") && said.contains("weights 3 MB + LoRA"), "{said}");
    let planned = plan(&b, "demo --data rows.jsonl --gpus cpu");
    let memory = &planned["devices"][0]["memory_bytes"];
    let parts = ["weights", "adapter", "activations", "workspace"].map(|name| memory[name].as_u64().unwrap());
    assert_eq!(memory["total"].as_u64(), Some(parts.iter().sum()), "{memory}");
}

/// The plan counts blocks as blocks: 34 bytes for 32 numbers, 36 bytes for 64 in the projections; bf16 has 2 bytes a
/// number.
#[test]
fn plan_counts_quantised_weights_as_blocks() {
    let b = Bench::new();
    let weights = |more: &str| {
        let planned = plan(&b, &format!("demo --data rows.jsonl --gpus cpu --dtype f32 {more}"));
        planned["devices"][0]["memory_bytes"]["weights"].as_u64().unwrap() as f64
    };
    let (wide, q8, nf4) = (weights(""), weights("--quantize q8_0"), weights("--quantize nf4"));
    assert!(q8 < 0.55 * wide && nf4 < 0.5 * wide, "{wide} {q8} {nf4}");
}

/// A folder without weights says in config.json alone that its experts are in MXFP4, 17 bytes for 32 numbers.
#[test]
fn plan_counts_absent_experts_in_mxfp4_as_blocks() {
    let b = Bench::new();
    let weights = |name: &str, method: Value| {
        let mut layers = 0.0;
        b.model_with(name, "config.json", |config| {
            layers = config["num_hidden_layers"].as_f64().unwrap();
            config["architectures"] = json!(["GptOssForCausalLM"]);
            config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10_000.0});
            (config["num_local_experts"], config["num_experts_per_tok"]) = (json!(16), json!(2));
            (config["hidden_size"], config["intermediate_size"]) = (json!(64), json!(256));
            config["quantization_config"] = method;
        });
        std::fs::remove_file(b.path(name).join("model.safetensors")).unwrap();
        let planned = plan(&b, &format!("./{name} --data rows.jsonl --gpus cpu --dtype f32"));
        let bytes = planned["devices"][0]["memory_bytes"]["weights"].as_f64().unwrap();
        (bytes, layers * 3.0 * 16.0 * 64.0 * 256.0)
    };
    let (plain, values) = weights("plain", Value::Null);
    let (packed, _) = weights("packed", json!({"quant_method": "mxfp4"}));
    let less = (plain - packed) / values;
    assert!((less - (2.0 - 17.0 / 32.0)).abs() < 0.01, "{less} bytes of a value less");
}

#[test]
fn json_plan_has_every_part() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --role coordinator --gpus cpu --expect-workers 3 --link 100mbit";
    let planned = plan(&b, run);
    for (section, keys) in [
        ("model", "path architecture weights shape flops_per_token"),
        ("rows", "read dropped truncated tokens supervised trained_on"),
        ("steps", "total first per_epoch microbatches tokens rows exact longest_microbatch checkpoints"),
        (
            "forecast",
            "tokens_per_second seconds steps_seconds sync_seconds look_seconds checkpoint_seconds guessed",
        ),
        ("eval", "rows tokens times"),
        ("adapter", "rank trained_values"),
    ] {
        for key in keys.split(' ') {
            assert!(!planned[section][key].is_null(), "{section}.{key}: {planned}");
        }
    }
    let devices = planned["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 3, "{planned}");
    assert!(devices[0]["memory_bytes"]["total"].as_u64().unwrap() > 1_000_000);
    let link = &devices[1]["link"];
    assert_eq!(
        (link["bytes_per_second"].as_f64(), link["basis"].as_str()),
        (Some(11e6), Some("as --link says"))
    );
    let share = |d: &Value| d["share"].as_f64().unwrap();
    assert!((devices.iter().map(share).sum::<f64>() - 1.0).abs() < 1e-9);
    assert!(planned["forecast"]["sync_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn plan_uses_measurements_of_earlier_runs() {
    let b = Bench::new();
    // A separate cache: nothing was measured yet.
    let own = |args: &str| {
        let out = b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        out
    };
    let plan = |args: &str| -> Value {
        serde_json::from_slice(&own(&format!("plan {args} --json")).stdout).unwrap()
    };
    let run = "demo --data rows.jsonl --gpus cpu --rank 5 --target-modules q_proj,up_proj --max-steps 6";
    assert_eq!(plan(run)["devices"][0]["basis"].as_str().filter(|b| *b == "measured"), None);
    let out = own(&format!("{run} -o out"));
    for part in ["\nmeasured ", "\nexpected ", ", measured "] {
        assert!(stderr(&out).contains(part), "{part:?} in {}", stderr(&out));
    }
    let (speeds, forecasts) = (b.events("out", "speed"), b.events("out", "forecast"));
    let microbatches = |e: &Value| e["points"]["n"].as_f64().unwrap() - e["trials"].as_f64().unwrap();
    assert_eq!(microbatches(&speeds[0]), 0.0, "before the first step there are trials alone");
    let planned = plan(run);
    let last = speeds.last().unwrap();
    assert_eq!(Some(microbatches(last) as u64), planned["steps"]["microbatches"].as_u64(), "{last}");
    assert_eq!((forecasts.len(), forecasts[0]["step"].as_u64()), (1, Some(0)));
    assert_eq!(planned["devices"][0]["basis"], "measured");
    let other = plan(&run.replace("--rank 5", "--rank 6"));
    assert_eq!(other["devices"][0]["basis"], "scaled by FLOPs");
    let html = String::from_utf8(b.read("out/report.html")).unwrap();
    assert!(html.contains(" expected</em>"), "the report shows what was expected");
    // As if all times had been measured a million times slower: the run counts what it measures itself.
    let file = b.path("cache/finetune/profiles.json");
    let mut profiles: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let points = &mut profiles["records"][0]["measured"]["train"];
    for sum in ["y", "xy"] {
        points[sum] = (points[sum].as_f64().unwrap() * 1e6).into();
    }
    std::fs::write(&file, profiles.to_string()).unwrap();
    let kept = plan(run)["forecast"]["tokens_per_second"].as_f64().unwrap();
    own(&format!("{run} -o again"));
    let forecasts = b.events("again", "forecast");
    assert_eq!((forecasts.len(), forecasts[0]["step"].as_u64()), (1, Some(0)));
    let expected = forecasts[0]["tokens_per_second"].as_f64().unwrap();
    assert!(expected > 100.0 * kept, "{expected} tokens/s where the busy hour says {kept}");
}

/// A line that streams layers is slower than one that does not: each has its own measurements.
#[test]
fn speeds_of_a_line_that_streams_are_stored_apart() {
    let b = Bench::new();
    let own = |args: &str| {
        let out = b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        out.stdout
    };
    let run = "demo --data rows.jsonl --gpus cpu+cpu --threads 2 --rank 5 --max-steps 6";
    own(&format!("{run} --offload 1 -q -o out"));
    let basis = |more: &str| {
        let planned: Value = serde_json::from_slice(&own(&format!("plan {run} {more} --json"))).unwrap();
        planned["devices"][0]["basis"].clone()
    };
    assert_eq!(basis("--offload 1"), "measured");
    assert_ne!(basis(""), "measured");
}

/// Ratio of a run's measured bytes to the estimate from shapes, on the demonstration's model. Reused buffers may be
/// larger than their contents, and small buffers (norms, the table of angles) are not counted: the quarter that an
/// estimate adds covers both.
const ESTIMATE: std::ops::RangeInclusive<f64> = 0.8..=1.25;

#[test]
fn measured_memory_replaces_the_estimate() {
    let b = Bench::new();
    let own = |args: &str| b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
    let memory = |args: &str| -> Value {
        let out = own(&format!("plan {args} --json"));
        let planned: Value =
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&out)));
        planned["devices"][0]["memory_bytes"].clone()
    };
    let run = "demo --data rows.jsonl --gpus cpu --rank 4 --max-steps 3";
    let before = memory(run);
    assert_eq!(before["basis"], "estimated", "{before}");
    let out = own(&format!("{run} -o out"));
    let said = stderr(&out);
    assert!(out.status.success() && said.contains(" kB per token"), "{said}");
    assert!(said.contains("\nmemory   cpu") && said.contains("(estimated), peak"), "{said}");
    let html = String::from_utf8(b.read("out/report.html")).unwrap();
    assert!(html.contains("peak"), "the report has both");
    // A single device has a lane too, and no topology.
    let timeline = String::from_utf8(b.read("out/timeline.svg")).unwrap();
    let blocks = timeline.matches(r#"<rect class="compute""#).count() as u64;
    let spans = |step: &Value| step["spans"].as_array().unwrap().len() as u64;
    let took: u64 = b.events("out", "step").iter().map(spans).sum();
    // The legend has one more block.
    assert_eq!((blocks, b.path("out/topology.svg").exists()), (took + 1, false));
    let (most, expected) = (
        b.events("out", "speed").last().unwrap()["memory"]["most"].as_f64().unwrap(),
        b.events("out", "forecast")[0]["memory"][0]["bytes"].as_f64().unwrap(),
    );
    assert!(ESTIMATE.contains(&(most / expected)), "{most} of {expected}");
    let after = memory(run);
    assert_eq!(after["basis"], "measured", "{after}");
    let ratio = after["in_use"].as_f64().unwrap() / before["in_use"].as_f64().unwrap();
    assert!(ESTIMATE.contains(&ratio), "{after} {before}");
    assert_eq!(memory(&run.replace("--rank 4", "--rank 5"))["basis"], "estimated", "another shape");
    // A measurement a hundred times as large changes the figures; plan and run go on.
    let file = b.path("cache/finetune/profiles.json");
    let mut profiles: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let points = &mut profiles["records"][0]["measured"]["memory"]["points"];
    for sum in ["y", "xy"] {
        points[sum] = (points[sum].as_f64().unwrap() * 100.0).into();
    }
    std::fs::write(&file, profiles.to_string()).unwrap();
    let limited = format!("{run} --memory-limit 40MB");
    let large = memory(&limited);
    assert_eq!(large["basis"], "measured", "{large}");
    assert!(large["in_use"].as_f64().unwrap() > 50.0 * after["in_use"].as_f64().unwrap(), "{large}");
    let out = own(&format!("{limited} -o yes"));
    assert!(out.status.success(), "{}", stderr(&out));
}

#[test]
fn plan_and_run_refuse_in_the_same_words() {
    let b = Bench::new();
    let words = |args: &str| {
        let out = b.run(args);
        assert_eq!(out.status.code(), Some(78), "{args}: {}", stderr(&out));
        let text = stderr(&out);
        text.lines().last().and_then(|line| line.split_once("needs about")).unwrap().1.to_string()
    };
    let small = "demo --data rows.jsonl --gpus cpu --rank 4 --max-steps 3 --offload never --memory-limit 4MB";
    assert_eq!(words(&format!("plan {small}")), words(&format!("{small} -o no")));
}

/// Measurements of earlier runs sharpen the figures of a plan, and decide nothing.
#[test]
fn cached_measurements_never_refuse_a_run() {
    let b = Bench::new();
    let own = |args: &str| b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
    let file = b.path("cache/finetune/profiles.json");
    let run = "demo --data rows.jsonl --gpus cpu --rank 4 --max-steps 1 --micro-batch-tokens 512";
    let two = run.replace("--gpus cpu", "--gpu-backend cpu --gpus 0,1 --threads 2");
    let team = format!("{run} --role coordinator --expect-workers 1");
    for (args, out) in [(run, "one"), (&two, "two")] {
        let out = own(&format!("{args} -q -o {out}"));
        assert!(out.status.success(), "{}", stderr(&out));
    }
    // As if every device had been measured with microbatches of that size, each token taking this many bytes.
    let plant = |bytes: f64| {
        let mut profiles: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for record in profiles["records"].as_array_mut().unwrap() {
            let memory = &mut record["measured"]["memory"];
            let points = serde_json::json!({"n": 2.0, "x": 512.0, "y": 512.0 * bytes, "xx": 512.0 * 512.0, "xy": 512.0 * 512.0 * bytes});
            (memory["points"], memory["tokens"], memory["most"]) = (points, 512.into(), 1.into());
        }
        std::fs::write(&file, profiles.to_string()).unwrap();
    };
    let says = |args: &str, limit: &str| {
        let out = own(&format!("plan {args} --offload never --memory-limit {limit} --json"));
        let planned: Value =
            serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&out)));
        let device = &planned["devices"][0];
        (device["fits"].as_bool().unwrap(), device["memory_bytes"]["basis"].as_str().unwrap().to_string())
    };
    let fits = |basis: &str| (true, basis.to_string());
    // Whatever the cache says of a token, the same runs fit.
    for bytes in [100.0, 1e6] {
        plant(bytes);
        for (args, limit, fits) in [
            (run, "8MB", false),
            (&team, "8MB", false),
            (&two, "16MB", false),
            (&team, "200MB", true),
            (&two, "400MB", true),
        ] {
            assert_eq!(says(args, limit).0, fits, "{args}");
        }
        assert_eq!([says(run, "200MB"), says(&team, "200MB")], [fits("measured"), fits("measured")]);
    }
}

#[test]
fn auto_chooses_a_size_and_resume_keeps_it() {
    let b = Bench::new();
    let run = "demo --data rows.jsonl --gpus cpu --rank 2 --max-steps 3 -q";
    b.ok(&format!("{run} --micro-batch-tokens auto -o one"));
    let yaml = String::from_utf8(b.read("one/run.yaml")).unwrap();
    let line = yaml.lines().find(|l| l.starts_with("  micro_batch_tokens:") && l.contains('#')).unwrap();
    assert!(line.contains("# auto: "), "{line}");
    let notes = b.events("one", "run")[0]["notes"].to_string();
    assert!(notes.contains("--micro-batch-tokens"), "{notes}");
    // The same bytes as with that size typed, and from its run.yaml.
    let size = line.split_whitespace().nth(1).unwrap();
    b.ok(&format!("{run} --micro-batch-tokens {size} -o two"));
    b.ok("--config one/run.yaml -q -o three");
    for other in ["two", "three"] {
        let adapter = |out: &str| b.read(&format!("{out}/adapter_model.safetensors"));
        assert!(adapter("one") == adapter(other), "{other}");
    }
    // A size that auto never chooses: a different size would be refused as another configuration.
    b.ok(&format!("{run} --micro-batch-tokens 300 -o four"));
    b.ok(&format!("{run} --micro-batch-tokens auto --resume=four"));
}

/// The statement about memory belongs to the chosen size, not to one that was tried after it.
#[test]
fn auto_states_the_basis_of_its_memory_figure() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(90));
    let own = |args: &str| {
        let out = b.command(args).env("XDG_CACHE_HOME", b.path("cache")).output().unwrap();
        assert!(out.status.success(), "{}", stderr(&out));
        String::from_utf8(out.stdout).unwrap()
    };
    let run = "demo --data many.jsonl --gpus cpu --rank 2 --batch-size 60";
    own(&format!("{run} --max-steps 1 --micro-batch-tokens 256 -q -o out"));
    // As if a microbatch took no time besides its tokens, so that larger ones save nothing, and memory had been
    // measured with this many tokens.
    for (tokens, word) in [(256, "measured"), (4096, "estimated")] {
        let file = b.path("cache/finetune/profiles.json");
        let mut profiles: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let measured = &mut profiles["records"][0]["measured"];
        let points = &mut measured["train"];
        for (sum, of) in [("y", "x"), ("xy", "xx")] {
            points[sum] = (points[of].as_f64().unwrap() * 1e-3).into();
        }
        measured["memory"]["tokens"] = tokens.into();
        std::fs::write(&file, profiles.to_string()).unwrap();
        let said = own(&format!("plan {run} --micro-batch-tokens auto"));
        let line = said.lines().find(|line| line.contains("--micro-batch-tokens 256: ")).unwrap_or(&said);
        assert!(line.ends_with(&format!("; their memory {word}")), "{line}");
    }
}

#[test]
fn plan_has_the_memory_that_islands_take() {
    let b = Bench::new();
    b.file("many.jsonl", &rows(90));
    let run = "demo --data many.jsonl --rank 2 --batch-size 24 --micro-batch-tokens 64 --islands 2";
    let planned = plan(&b, run);
    let values = planned["adapter"]["trained_values"].as_u64().unwrap();
    let [worker, coordinator] = island::MEMORY.map(|bytes| bytes * values);
    let of = |name: &str| planned["islands"][name].as_u64();
    let got = (of("count"), of("bytes_on_worker"), of("bytes_on_coordinator"));
    assert_eq!(got, (Some(2), Some(worker), Some(coordinator)));
    let said = b.ok(&format!("plan {run}"));
    let (worker, coordinator) = (size(worker), size(coordinator));
    let want = format!("memory they take: up to {worker} on a worker, {coordinator} on the coordinator");
    assert!(said.contains(&want), "{said}");
}

/// On the demonstration's model, because the recipes' models are not available here.
#[test]
fn every_recipe_can_be_planned() {
    let b = Bench::new();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut planned = 0;
    for entry in std::fs::read_dir(root.join("recipes")).unwrap() {
        let path = entry.unwrap().path();
        // The file of machine requirements is not a run.
        if path.extension().is_none_or(|e| e != "yaml") || path.ends_with("gpu-training.yaml") {
            continue;
        }
        let out = b.path("out").display().to_string();
        let args =
            format!("plan demo --max-seq-len 128 --gpus cpu --json -o {out} --config {}", path.display());
        let said = b.command(&args).current_dir(root).output().unwrap();
        assert!(said.status.success(), "{}: {}", path.display(), stderr(&said));
        let plan: Value = serde_json::from_slice(&said.stdout).unwrap();
        assert!(plan["steps"]["total"].as_u64().unwrap() > 0, "{}", path.display());
        planned += 1;
    }
    assert!(planned >= 5, "{planned}");
}
