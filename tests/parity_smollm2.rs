//! A real model: SmolLM2-135M-Instruct against transformers in f32: ids, mean negative log-likelihood, top logits,
//! greedy tokens, with and without a key/value cache. From a Hugging Face directory in bf16 (FINETUNE_SMOLLM2), and
//! from a Q4_1 .gguf file (FINETUNE_SMOLLM2_GGUF), rounded to bf16 like that directory, or widened to f32.
//! `tests/golden/make_smollm2_logits.py` writes the expected values.

use finetune::backend::Cpu;
use finetune::data::tokenizer::Tokenizer;
use finetune::format::{self, rounded::Bf16};
use finetune::model::config::Config;
use finetune::model::decoder::Build;
use finetune::model::generate::generate;
use finetune::model::lora::LoraSpec;
use finetune::model::stage::{Microbatch, Output, Sampling, Stage, Targets, Want};
use finetune::numeric::tensor::Tensors;
use serde_json::Value;
use stages::Loads;
use std::path::Path;

const NLL_ABSOLUTE: f64 = 1e-4;
const LOGIT_ABSOLUTE: f64 = 2e-3;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn tokenizer(files: &format::TokenizerFiles) -> Tokenizer {
    let (config, map) = (files.tokenizer_config.as_ref(), files.special_tokens_map.as_ref());
    Tokenizer::new(&files.tokenizer_json, config, map, files.chat_template.as_deref()).unwrap()
}

fn logits(model: &mut dyn Stage, rows: &[Vec<u32>]) -> Vec<f32> {
    let Output::Logits(logits) = model.forward(&microbatch(rows), None, Want::Logits).unwrap() else {
        panic!("logits were asked for");
    };
    logits
}

/// Every token but the first of each row is a target.
fn microbatch(rows: &[Vec<u32>]) -> Microbatch {
    let (mut bounds, mut targets) = (vec![0], Vec::new());
    for row in rows {
        bounds.push(bounds[bounds.len() - 1] + row.len() as u32);
        targets.extend(row[1..].iter().copied().chain([finetune::model::stage::IGNORE]));
    }
    let rows_of = (0..rows.len() as u64).collect();
    Microbatch { step: 1, rows: rows_of, ids: rows.concat(), bounds, targets: Targets::Tokens(targets) }
}

const BF16: &str = include_str!("golden/smollm2-135m.json");
const GGUF_F32: &str = include_str!("golden/smollm2-135m-gguf-f32.json");

fn check(path: &Path, files: &format::ModelFiles, tensors: &dyn Tensors, golden: &str) {
    let cases: Vec<Value> = serde_json::from_str(golden).unwrap();
    let config = Config::from_json(&files.config).unwrap();
    let tokenizer = tokenizer(&files.tokenizer);
    config.check_vocabulary(tokenizer.vocab_size()).unwrap();
    let build = Build::whole(&config);
    let mut model = Cpu::new(2).stage((&config, tensors, &LoraSpec::none()), build).unwrap();
    let (mut worst_nll, mut worst_logit) = (0f64, 0f64);
    for case in &cases {
        let want = ids(&case["ids"]);
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            tokenizer.encode(text, finetune::data::tokenizer::Special::Add).unwrap(),
            want,
            "{text:?}"
        );
        let rows = [want];
        let Output::Loss(sums) = model.forward(&microbatch(&rows), None, Want::Loss).unwrap() else {
            panic!("a loss was asked for");
        };
        let nll = (sums.loss / sums.weight - case["mean_nll"].as_f64().unwrap()).abs();
        assert!(nll <= NLL_ABSOLUTE, "{text:?}: mean NLL off by {nll:e}");
        let last = logits(&mut *model, &rows);
        for pair in case["last_logits_top5"].as_array().unwrap() {
            let off = (f64::from(last[pair[0].as_u64().unwrap() as usize]) - pair[1].as_f64().unwrap()).abs();
            assert!(off <= LOGIT_ABSOLUTE, "{text:?}: a logit is off by {off:e}");
            worst_logit = worst_logit.max(off);
        }
        worst_nll = worst_nll.max(nll);
        greedy(&mut *model, &rows[0], &ids(&case["greedy16"]));
    }
    println!("{}: mean NLL within {worst_nll:.1e}, logits within {worst_logit:.1e}", path.display());
}

/// Decoding with the cache equals whole passes over the growing text, and both equal the reference.
fn greedy(model: &mut dyn Stage, prompt: &[u32], want: &[u32]) {
    let stop = Vec::new();
    let sampling = Sampling { max_new_tokens: want.len(), temperature: 0.0, top_p: 1.0, seed: 0, stop };
    let mut seen = Vec::new();
    let each = &mut |id| {
        seen.push(id);
        true
    };
    assert_eq!(generate(model, prompt, &sampling, each).unwrap(), want);
    assert_eq!(seen, want);
    let mut text = prompt.to_vec();
    for &id in &want[..4] {
        let logits = logits(model, &[text.clone()]);
        assert_eq!(finetune::model::pending::argmax(&logits) as u32, id, "without a cache");
        text.push(id);
    }
}

#[test]
fn directory_matches_transformers() {
    let Ok(path) = std::env::var("FINETUNE_SMOLLM2") else {
        println!("skipped: FINETUNE_SMOLLM2 names no SmolLM2-135M-Instruct directory");
        return;
    };
    let files = format::open(Path::new(&path)).unwrap();
    check(Path::new(&path), &files, files.tensors.as_ref(), BF16);
}

#[test]
fn gguf_matches_rounded_to_bf16_and_unrounded() {
    let Ok(path) = std::env::var("FINETUNE_SMOLLM2_GGUF") else {
        println!("skipped: FINETUNE_SMOLLM2_GGUF names no SmolLM2-135M-Instruct .gguf file");
        return;
    };
    let files = format::open(Path::new(&path)).unwrap();
    let again = format::open(Path::new(&path)).unwrap();
    check(Path::new(&path), &files, &Bf16(again.tensors), BF16);
    check(Path::new(&path), &files, files.tensors.as_ref(), GGUF_F32);
}
