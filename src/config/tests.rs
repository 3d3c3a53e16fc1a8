//! Layers, aliases and errors with their lines.

use super::table::{Opt, TABLE};
use super::*;
use std::path::Path;

fn options() -> Vec<&'static Opt> {
    TABLE.iter().collect()
}

fn flag(key: &str, value: &str) -> Typed {
    Typed { key: key.into(), values: vec![value.into()], source: Origin::Flag }
}

/// Checks the value of `key` in a YAML file, or the error.
fn check(text: &str, key: &str, expected: &str) {
    let layer = yaml::parse(text, Path::new("c.yaml")).unwrap();
    let got = match Settings::resolve(&options(), vec![layer]) {
        Ok(s) => s.list(key).join("|"),
        Err(e) => e.line,
    };
    assert_eq!(got, expected, "{text:?}");
}

#[test]
fn foreign_option_names_set_our_options() {
    check("lora_r: 8", "rank", "8");
    check("num_train_epochs: 3", "epochs", "3");
    check("warmup_ratio: 0.07", "warmup-steps", "7%");
    check("per_device_train_batch_size: 4\ngradient_accumulation_steps: 8", "batch-size", "32");
    check("micro_batch_size: 2\n", "batch-size", "2");
    check("micro_batch_size: 2\nnum_processes: 4", "batch-size", "8");
    let both =
        "c.yaml:2: micro_batch_size: per_device_train_batch_size (c.yaml:1) says the same: leave one out";
    check("per_device_train_batch_size: 2\nmicro_batch_size: 4", "batch-size", both);
    check("num_processes: 4", "batch-size", "8");
    check("num_processes: 4\nbatch_size: 5", "batch-size", "5");
    check("warmup_steps: 0\nwarmup_ratio: 0.1", "warmup-steps", "10%");
    check("warmup_ratio: 0.1\nwarmup_steps: 7", "warmup-steps", "7");
    check("optim: adamw_torch_xla\noptimizer: paged_adamw", "rank", "16");
    check("bf16: true\nload_in_4bit: false\noptim: adamw_torch", "rank", "16");
    check("load_in_4bit: true\nbnb_4bit_quant_type: nf4", "quantize", "nf4");
    check("load_in_4bit: true\nbnb_4bit_use_double_quant: true", "quantize", "nf4-double");
    check("load_in_4bit: false\nbnb_4bit_use_double_quant: false", "quantize", "");
    check("quantize: q8_0\nload_in_4bit: false", "quantize", "q8_0");
    check("lora_target: q_proj, v_proj", "target-modules", "q_proj|v_proj");
    check("target_modules: [q_proj, v_proj]", "target-modules", "q_proj|v_proj");
    check("eval_strategy: epoch\neval_steps: 50", "eval-steps", "epoch");
    check("eval_strategy: steps\neval_steps: 50", "eval-steps", "50");
    check("evaluation_strategy: 'no'\neval_steps: 50", "eval-steps", "0");
    check("save_strategy: epoch", "save-steps", "epoch");
    check("save_strategy: 'no'", "save-steps", "0");
    check("save_strategy: best", "keep-best", "true");
    check("save_strategy: best\nload_best_model_at_end: true", "keep-best", "true");
    check("evals_per_epoch: 4", "eval-steps", "epoch/4");
    check("saves_per_epoch: 1", "save-steps", "epoch");
    check("load_best_model_at_end: true", "keep-best", "true");
    check("metric_for_best_model: eval_loss\ngreater_is_better: false", "best-metric", "eval_loss");
    check("early_stopping_patience: 3\nearly_stopping_threshold: 0.0", "early-stopping", "3");
    check("no_shuffle: true", "shuffle", "false");
    check("no_shuffle: false", "shuffle", "true");
    check("no_packing: yes", "packing", "false");
    check("shuffle: false", "shuffle", "false");
    check("data_files: x.csv", "data", "x.csv");
    check("global_batch_size: 64", "batch-size", "64");
    check("effective_batch_size: 64", "batch-size", "64");
    check("device: cpu", "gpus", "cpu");
    check("compute_dtype: bf16", "dtype", "bf16");
    check("force: true", "overwrite", "true");
    check("expect_devices: 3", "expect-workers", "3");
    check("report_to: tensorboard\nlogging_dir: tb", "tensorboard", "tb");
    check("report_to: [wandb, tensorboard]\nlogging_dir: tb", "tensorboard", "tb");
    check("report_to: wandb\nlogging_dir: tb", "tensorboard", "");
    check("train_on_inputs: true", "learn", "all");
    check("train_on_prompt: true", "learn", "all");
    check("completion_only_loss: false", "learn", "all");
    check("assistant_only_loss: true\ncompletion_only_loss: true", "learn", "answers");
    check("mask_history: true", "learn", "last");
    check("mask_history: false\ntrain_on_inputs: false", "learn", "answers");
    check("chat_template_kwargs: {enable_thinking: false}", "template-args", "enable_thinking=false");
}

/// Messages about other trainers' names in a file.
#[test]
fn foreign_keys_without_effect_give_warnings() {
    for (text, part) in [
        ("report_to: wandb", "warning: report_to wandb (c.yaml:1): nothing is sent there"),
        ("report_to: tensorboard", "(--tensorboard DIR)"),
        ("report_to: none", "report_to (c.yaml:1): metrics.jsonl is always written"),
        ("eval_strategy: epoch\neval_steps: 50", "eval_steps 50 (c.yaml:2): eval_strategy counts instead"),
    ] {
        let layer = yaml::parse(text, Path::new("c.yaml")).unwrap();
        let notes = Settings::resolve(&options(), vec![layer]).unwrap().notes;
        assert!(notes.iter().any(|note| note.contains(part)), "{text}: {notes:?}");
    }
}

#[test]
fn default_alpha_is_twice_the_rank() {
    for (text, alpha, note) in [
        ("seed: 1", "32", false),
        ("rank: 16", "32", false),
        ("rank: 8", "16", true),
        ("lora_r: 64", "128", true),
        ("rank: 1_0", "20", true),
        ("rank: 8\nalpha: 5", "5", false),
        // The scale of rsLoRA does not shrink with the rank.
        ("rank: 64\nrslora: true", "32", false),
        // The adapter decides it.
        ("rank: 8\ninit_adapter: a", "16", false),
    ] {
        let layer = yaml::parse(text, Path::new("c.yaml")).unwrap();
        let s = Settings::resolve(&options(), vec![layer]).unwrap();
        assert_eq!(s.list("alpha"), [alpha], "{text}");
        let said = s.notes.iter().any(|note| note.starts_with(&format!("alpha {alpha} = 2 x rank")));
        assert_eq!(said, note, "{text}: {:?}", s.notes);
        assert_eq!(s.is_given("alpha"), text.contains("alpha"), "{text}");
    }
    check("rank: 99999999999999", "alpha", "");
}

#[test]
fn defaults_of_another_trainer_are_named() {
    for (text, expected) in [
        (
            "model_name_or_path: m\nlora_r: 16\nnum_train_epochs: 2",
            Some(
                "defaults that differ from TRL's (in brackets): dropout 0 (0.05), learning_rate 2e-4 (2e-5), \
                 lr_scheduler cosine (linear), warmup_steps 3% (0), save_steps 100 (500)",
            ),
        ),
        (
            "base_model: m\nsequence_len: 64",
            Some("defaults that differ from Axolotl's (in brackets): long_rows cut (drop)"),
        ),
        ("model: m\nrank: 16", None),
    ] {
        let layer = yaml::parse(text, Path::new("c.yaml")).unwrap();
        let notes = Settings::resolve(&options(), vec![layer]).unwrap().notes;
        let said = notes.iter().find(|note| note.starts_with("defaults that differ"));
        assert_eq!(said.map(String::as_str), expected, "{text}");
    }
}

#[test]
fn conflicting_or_unknown_keys_are_refused() {
    let twice = "c.yaml:2: load_in_4bit: quantize is given as well: leave one out";
    check("quantize: q8_0\nload_in_4bit: true", "quantize", twice);
    check("optim: sgd", "rank", "c.yaml:1: optim: AdamW is the only optimizer");
    check("rnak: 8", "rank", "c.yaml:1: unknown key rnak: did you mean rank?");
    check(
        "hub_model_id: a/b",
        "rank",
        "c.yaml:1: hub_model_id: `finetune push OUT owner/name` uploads the result, once; leave it out",
    );
    check(
        "shuffle: true\nno_shuffle: true",
        "rank",
        "c.yaml:2: shuffle: shuffle is given twice (also: c.yaml:1)",
    );
    check("evals_per_epoch: often", "rank", "c.yaml:1: evals_per_epoch: expected a whole number");
    check(
        "x: 1\n",
        "rank",
        "c.yaml:1: unknown key x: `finetune help options` lists them; keys are written with underscores",
    );
    check(
        "rank: 1\nneftune_noise_alpha: 5",
        "rank",
        "c.yaml:2: neftune_noise_alpha: noise on embeddings is not supported; leave it out",
    );
    check("rank: 8\nlora_r: 16", "rank", "c.yaml:2: rank: rank is given twice (also: c.yaml:1)");
    check(
        "gradient_accumulation_steps: 0",
        "rank",
        "c.yaml:1: gradient_accumulation_steps: expected a whole number above 0",
    );
}

#[test]
fn flag_over_file_over_environment_over_default() {
    let file = yaml::parse("rank: 4\nalpha: 5\n", Path::new("c.yaml")).unwrap();
    let env = variables::environment(|v| match v {
        "FINETUNE_RANK" => Some("1".into()),
        "FINETUNE_ALPHA" => Some("2".into()),
        "FINETUNE_SEED" => Some("3".into()),
        _ => None,
    });
    let s = Settings::resolve(&options(), vec![vec![flag("rank", "8")], file, env]).unwrap();
    let got: Vec<String> = ["rank", "alpha", "seed", "epochs"]
        .iter()
        .map(|n| format!("{} # {}", s.list(n).join(","), s.get(n).unwrap().source))
        .collect();
    assert_eq!(got, ["8 # flag", "5 # c.yaml:2", "3 # environment FINETUNE_SEED", "1 # default"]);
}

#[test]
fn table_aliases_and_flags_agree() {
    let known: Vec<String> = TABLE.iter().map(Opt::key).collect();
    for (theirs, ours) in alias::ALIASES {
        assert!(known.iter().any(|k| k == ours), "{theirs} stands for {ours}, which is no option");
    }
    let mut all: Vec<&str> = alias::all().chain(known.iter().map(String::as_str)).collect();
    let n = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), n, "a name stands in two tables");
    for o in TABLE {
        assert!(o.help.ends_with(|c: char| c.is_alphanumeric() || ")'".contains(c)), "{}", o.name);
    }
}
