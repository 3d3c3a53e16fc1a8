//! Directories, adapters and writes: what is written is read back unchanged, and unusable files are refused by name, in
//! one line, with a remedy.

use finetune::format::peft::{self, AdapterConfig, Extras, TaskType, TensorRef};
use finetune::format::{self, FormatError, atomic};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A folder of these files; contents that begin with `@` name a golden file.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let to = dir.path().join(name);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        match content.strip_prefix('@') {
            Some(golden) => {
                let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden);
                fs::copy(from, to).unwrap();
            }
            None => fs::write(to, content).unwrap(),
        }
    }
    dir
}

const WEIGHTS: (&str, &str) = ("model.safetensors", "@gguf/tiny.safetensors");
const CONFIG: (&str, &str) = ("config.json", r#"{"model_type": "llama", "_name_or_path": "owner/base"}"#);
const TOKENIZER: (&str, &str) = ("tokenizer.json", "{}");

/// Checks the error of opening the folder, and whether it is a configuration error or a failure.
fn check(files: &[(&str, &str)], configuration: bool, said: &[&str]) {
    let dir = folder(files);
    let error = format::open(dir.path()).map(drop).unwrap_err();
    refusal(&error, configuration, said);
    assert!(error.to_string().contains(&*dir.path().to_string_lossy()), "{error}");
}

fn refusal(error: &FormatError, configuration: bool, said: &[&str]) {
    let text = error.to_string();
    assert_eq!((text.lines().count(), error.is_configuration()), (1, configuration), "{text}");
    said.iter().for_each(|s| assert!(text.contains(s), "{text:?} lacks {s:?}"));
}

#[test]
fn unusable_folders_are_refused_by_name() {
    let pickle = ("pytorch_model.bin", "");
    check(&[CONFIG, TOKENIZER, pickle], true, &["pytorch_model.bin", "save_pretrained"]);
    check(&[CONFIG, TOKENIZER, ("pytorch_model.bin.index.json", "{}")], true, &["pytorch_model.bin"]);
    check(&[CONFIG, WEIGHTS], true, &["a model directory without a tokenizer"]);
    check(&[CONFIG, WEIGHTS, ("tokenizer.model", "")], true, &["tokenizer.model", "AutoTokenizer"]);
    check(&[WEIGHTS, TOKENIZER], true, &["without config.json"]);
    check(&[CONFIG, TOKENIZER], true, &["without model.safetensors"]);
    check(&[("adapter_config.json", "{}")], true, &["PEFT adapter", "--adapter"]);
    check(&[("a.gguf", "")], true, &["a.gguf"]);
    check(&[("notes.txt", "")], true, &["not a model directory"]);
    for (config, method) in [
        (r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#, "gptq"),
        (r#"{"quantization_config": {"quant_method": "awq"}}"#, "awq"),
        (r#"{"quantization_config": {"quant_method": "fp8"}}"#, "fp8"),
        (r#"{"quantization_config": {"load_in_4bit": true}}"#, "bitsandbytes"),
        (r#"{"quantization_config": {"quant_method": "mxfp4"}}"#, "quantised with mxfp4"),
        (
            r#"{"model_type": "gpt_oss", "quantization_config": {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}}"#,
            "bitsandbytes beside joined experts",
        ),
    ] {
        check(&[("config.json", config), WEIGHTS, TOKENIZER], true, &[method, ".gguf"]);
    }
    check(&[("config.json", "{"), WEIGHTS, TOKENIZER], false, &["config.json", "not valid JSON"]);
    check(&[("config.json", "[]"), WEIGHTS, TOKENIZER], false, &["not a JSON object"]);
    check(&[CONFIG, TOKENIZER, ("model.safetensors", "x")], false, &["not a safetensors file"]);
    refusal(&format::open(Path::new("/nowhere/at/all")).map(drop).unwrap_err(), false, &["/nowhere/at/all"]);
    let one = folder(&[("weights.bin", "x")]);
    refusal(
        &format::open(&one.path().join("weights.bin")).map(drop).unwrap_err(),
        true,
        &["not a model", ".gguf"],
    );
}

#[test]
fn a_folder_opens_with_its_id_and_template() {
    let named =
        r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#;
    let dir = folder(&[CONFIG, WEIGHTS, TOKENIZER, ("tokenizer_config.json", named)]);
    let model = format::open(dir.path()).unwrap();
    assert_eq!(model.base_id.as_deref(), Some("owner/base"));
    assert_eq!((model.revision, model.kind.as_str()), (None, "f32 safetensors"));
    assert_eq!(model.tokenizer.chat_template.as_deref(), Some("D"));
    assert_eq!(model.tensors.names().len(), 20);
    fs::write(dir.path().join("chat_template.jinja"), "J").unwrap();
    assert_eq!(format::open(dir.path()).unwrap().tokenizer.chat_template.as_deref(), Some("J"));

    let cache = "models--owner--name/snapshots/abc/";
    let files = [CONFIG, WEIGHTS, TOKENIZER].map(|(name, content)| (format!("{cache}{name}"), content));
    let dir = folder(&files.each_ref().map(|(name, content)| (name.as_str(), *content)));
    let model = format::open(&dir.path().join(cache)).unwrap();
    assert_eq!((model.base_id.as_deref(), model.revision.as_deref()), (Some("owner/name"), Some("abc")));
}

#[test]
fn hub_ids_are_distinguished_from_paths() {
    for (text, id) in [
        ("owner/name", true),
        ("Qwen/Qwen2.5-0.5B", true),
        ("/owner/name", false),
        ("./name", false),
        ("../name", false),
        ("owner/name/more", false),
        ("name", false),
        ("src/format", false),
        ("owner/na me", false),
    ] {
        assert_eq!(format::looks_like_id(text), id, "{text}");
    }
}

fn config(task: TaskType) -> AdapterConfig {
    AdapterConfig {
        task,
        base_model_name_or_path: Some("owner/base".into()),
        revision: None,
        r: 2,
        lora_alpha: 32.0,
        lora_dropout: 0.05,
        target_modules: vec!["k_proj".into(), "q_proj".into()],
        layers: Vec::new(),
        rank_pattern: Vec::new(),
        alpha_pattern: Vec::new(),
        token_rows: vec![],
        path: "",
        use_rslora: true,
        use_dora: false,
    }
}

#[test]
fn adapter_round_trips() {
    let dir = tempfile::tempdir().unwrap();
    let a: Vec<f32> = (0..6).map(|i| i as f32 * 0.37 - 1.0).collect();
    let name = |which: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight");
    let (name_a, name_b) = (name("A"), name("B"));
    let tensors = [
        TensorRef { name: &name_b, rows: 3, cols: 2, values: &a },
        TensorRef { name: &name_a, rows: 2, cols: 3, values: &a },
        TensorRef { name: "base_model.model.score.weight", rows: 2, cols: 3, values: &a },
    ];
    let extras = Extras {
        labels: Some(vec!["no".into(), "yes".into()]),
        numbers: false,
        enlarged: None,
        files: vec![("tokenizer.json".into(), b"{}".to_vec())],
    };
    let config = config(TaskType::SeqCls);
    peft::write(dir.path(), &config, &tensors, &extras).unwrap();
    let read = peft::read(dir.path()).unwrap();
    assert_eq!(read.config, config);
    assert_eq!((&read.labels, read.numbers), (&extras.labels, false));
    let other = tempfile::tempdir().unwrap();
    peft::write(other.path(), &config, &tensors, &Extras { numbers: true, ..extras.clone() }).unwrap();
    assert!(peft::read(other.path()).unwrap().numbers);
    let names: Vec<&str> = read.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, [name_a.as_str(), name_b.as_str(), "base_model.model.score.weight"]);
    assert!(read.tensors.iter().all(|t| t.values == a));
    assert_eq!(fs::read_to_string(dir.path().join("tokenizer.json")).unwrap(), "{}");

    let text = fs::read_to_string(dir.path().join("adapter_config.json")).unwrap();
    let keys: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("  \"")?.split('"').next()).collect();
    let mut sorted = keys.clone();
    sorted.sort();
    assert_eq!((keys.len(), &keys), (17, &sorted), "{text}");
    let written: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("peft_type", json!("LORA")),
        ("task_type", json!("SEQ_CLS")),
        ("modules_to_save", json!(["classifier", "score"])),
        ("lora_alpha", json!(32)),
        ("inference_mode", json!(true)),
        ("revision", Value::Null),
    ] {
        assert_eq!(written[key], value, "{key}");
    }
    let raw = fs::read(dir.path().join("adapter_model.safetensors")).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&raw).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
}

/// An adapter_config.json as PEFT writes it, with one entry changed.
fn foreign(change: (&str, Value)) -> Result<peft::Adapter, FormatError> {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["model.layers.0.q_proj", "q_proj"], "rank_pattern": {}, "alpha_pattern": {},
        "modules_to_save": null, "use_dora": false, "megatron_core": "megatron.core", "some_new_key": 1,
        "layers_to_transform": null, "loftq_config": {}, "lora_bias": false, "base_model_name_or_path": "",
    });
    config[change.0] = change.1;
    let dir = tempfile::tempdir().unwrap();
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight";
    let tensors = [TensorRef { name, rows: 2, cols: 1, values: &[1.0, 2.0] }];
    peft::write(dir.path(), &self::config(TaskType::CausalLm), &tensors, &Extras::default()).unwrap();
    fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    peft::read(dir.path())
}

#[test]
fn foreign_adapters_are_read_or_refused_by_name() {
    let plain = foreign(("target_modules", json!(["q_proj", "q_proj"]))).unwrap();
    assert_eq!(plain.config.target_modules, ["q_proj"]);
    assert_eq!(plain.config.base_model_name_or_path, None);
    assert!(plain.tensors[0].name.ends_with("q_proj.lora_A.weight"), "{}", plain.tensors[0].name);
    let ranks = foreign(("rank_pattern", json!({"v_proj": 3, "q_proj": 2}))).unwrap().config.rank_pattern;
    assert_eq!(ranks, [("v_proj".into(), 3), ("q_proj".into(), 2)], "in their order");
    let alphas = foreign(("alpha_pattern", json!({"q_proj": 1.5}))).unwrap().config.alpha_pattern;
    assert_eq!(alphas, [("q_proj".into(), 1.5)]);
    let pattern = foreign(("target_modules", json!(r".*\.layers\.\d+\.self_attn\.(q_proj|k_proj)"))).unwrap();
    let own = ["model.layers.0.self_attn.q_proj"];
    assert_eq!(pattern.config.target_modules, own, "those of the file's tensors");
    for (key, value) in [("layers_to_transform", json!([1])), ("exclude_modules", json!(["k_proj"]))] {
        assert_eq!(foreign((key, value)).unwrap().config.target_modules, own, "{key}");
    }
    for (key, value) in [
        ("peft_type", json!("LOHA")),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["embed_tokens"])),
        ("task_type", json!("SEQ_2_SEQ_LM")),
        ("fan_in_fan_out", json!(true)),
    ] {
        refusal(&foreign((key, value)).unwrap_err(), true, &["adapter_config.json", key]);
    }
    for (key, value) in [
        ("r", json!(0)),
        ("r", json!(3)),
        ("lora_alpha", json!("x")),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!(["q_proj"])),
        ("alpha_pattern", json!({"q_proj": -1.0})),
        ("lora_dropout", json!(1.0)),
        ("target_modules", json!([])),
    ] {
        let error = foreign((key, value)).unwrap_err();
        refusal(&error, false, &["adapter_"]);
    }
    let empty = tempfile::tempdir().unwrap();
    refusal(&peft::read(empty.path()).unwrap_err(), true, &["no adapter_config.json"]);
    let text = config(TaskType::CausalLm).to_json().to_string();
    let old = folder(&[("adapter_config.json", &text), ("adapter_model.bin", "")]);
    refusal(&peft::read(old.path()).unwrap_err(), true, &["adapter_model.bin"]);
}

#[test]
fn non_finite_values_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let tensors =
        [TensorRef { name: "x.lora_A.weight", rows: 2, cols: 2, values: &[0.0, 1.0, f32::NAN, 0.0] }];
    peft::write(dir.path(), &config(TaskType::CausalLm), &tensors, &Extras::default()).unwrap();
    refusal(&peft::read(dir.path()).unwrap_err(), false, &["x.lora_A.weight", "value 2 is NaN"]);
}

#[test]
fn card_describes_the_configuration() {
    let card = peft::card(&config(TaskType::CausalLm), "gguf Q4_1", &Extras::default(), &[]);
    for said in
        ["base_model: owner/base\n", "library_name: peft\n", "gguf Q4_1", "--max-lora-rank 8", "rsLoRA"]
    {
        assert!(card.contains(said), "{said}\n{card}");
    }
    let unnamed = AdapterConfig { base_model_name_or_path: None, r: 17, ..config(TaskType::SeqCls) };
    let extras = Extras { labels: Some(vec!["no".into(), "yes".into()]), ..Extras::default() };
    let card = peft::card(&unnamed, "bf16 safetensors", &extras, &[]);
    for said in ["names no base", "AutoModelForSequenceClassification", "merge it", "no, yes"] {
        assert!(card.contains(said), "{said}\n{card}");
    }
    assert!(!card.contains("base_model:"));
    for (r, most) in
        [(1, Some(1)), (2, Some(8)), (16, Some(16)), (17, Some(32)), (512, Some(512)), (513, None)]
    {
        assert_eq!(peft::max_lora_rank(r), most);
    }
}

/// The card's front matter is valid YAML for any name of the base, and its numbers are valid table cells.
#[test]
fn the_card_is_yaml_and_a_table() {
    let numbers = [("eval loss", "4.4664 -> 1.8083".to_string()), ("devices", "a|b\nc".to_string())];
    for id in ["owner/base", "owner/base: v2 #1", "- x", "null", "a\"b"] {
        let config = AdapterConfig { base_model_name_or_path: Some(id.into()), ..config(TaskType::CausalLm) };
        let card = peft::card(&config, "bf16 safetensors", &Extras::default(), &numbers);
        let front = card.split("---\n").nth(1).unwrap();
        let front: Value = serde_yaml::from_str(front).unwrap_or_else(|e| panic!("{e}: {front}"));
        assert_eq!(front["base_model"], id, "{card}");
        let tags = json!([format!("base_model:adapter:{id}"), "lora", "transformers"]);
        assert_eq!(front["tags"], tags, "{card}");
        let table =
            "## Training\n\n| | |\n|---|---|\n| eval loss | 4.4664 -> 1.8083 |\n| devices | a\\|b\\nc |\n\n";
        assert!(card.contains(table), "{card}");
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

#[test]
fn failed_write_leaves_only_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, folder) = (dir.path().join("file"), dir.path().join("folder"));
    let write = |text: &'static str| {
        atomic::write_dir(&folder, |tmp| -> Result<(), FormatError> {
            atomic::write_file(&tmp.join("sub/a"), text.as_bytes())?;
            if text == "bad" { Err(FormatError::io(tmp, std::io::Error::other("enough"))) } else { Ok(()) }
        })
    };
    for text in ["one", "two"] {
        atomic::write_file(&file, text.as_bytes()).unwrap();
        write(text).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert_eq!(fs::read_to_string(folder.join("sub/a")).unwrap(), text);
        assert_eq!(names(dir.path()), ["file", "folder"]);
    }
    assert!(write("bad").is_err());
    let broken = atomic::write_with(&file, |out| -> Result<(), std::io::Error> {
        out.write_all(b"half")?;
        Err(std::io::Error::other("enough"))
    });
    assert!(broken.is_err());
    assert_eq!(fs::read_to_string(&file).unwrap(), "two");
    assert_eq!(fs::read_to_string(folder.join("sub/a")).unwrap(), "two");
    assert_eq!(names(dir.path()), ["file", "folder"]);
}

#[test]
fn leftovers_of_a_killed_process_are_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    // Killed between the two renames: the old file has its temporary name, the new one is complete but not renamed yet.
    for name in [".out.aaa.tmp.old", ".out.aaa.tmp", ".outer.bbb.tmp"] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("from"), name).unwrap();
    }
    atomic::recover(&out).unwrap();
    assert_eq!(names(dir.path()), [".outer.bbb.tmp", "out"]);
    assert_eq!(fs::read_to_string(out.join("from")).unwrap(), ".out.aaa.tmp.old");
}

/// /dev/full accepts no byte and acts as a full disk.
#[cfg(target_os = "linux")]
#[test]
fn full_disk_is_named() {
    use std::io::Write;
    let cause = fs::OpenOptions::new().write(true).open("/dev/full").unwrap().write_all(b"x").unwrap_err();
    let error = FormatError::io(Path::new("out/checkpoint-3"), cause);
    refusal(&error, false, &["out/checkpoint-3: disk full", "another disk"]);
}

#[test]
fn adapters_that_changed_their_base_are_refused_by_name() {
    let read = |init: Value| {
        let v = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": init,
        });
        AdapterConfig::from_json(Path::new("adapter_config.json"), &v)
    };
    for init in [json!(null), json!(true), json!(false), json!("gaussian"), json!("eva"), json!("orthogonal")]
    {
        assert!(read(init.clone()).is_ok(), "{init}");
    }
    for init in ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "what comes next"] {
        let error = read(json!(init)).unwrap_err();
        let said = error.to_string();
        assert!(error.is_configuration() && said.lines().count() == 1, "{said}");
        assert!(said.contains(init) && said.contains("path_initial_model_for_weight_conversion"), "{said}");
    }
}
