//! A real tokenizer with its real template: FINETUNE_SMOLLM2 names the directory. Ids and masks are compared with those
//! of transformers (tests/golden/make_smollm2.py). FINETUNE_ROWS=N also times N rows and prints their memory.

use finetune::data::plan::{Plan, PlanOptions};
use finetune::data::tokenizer::Special;
use finetune::data::{self, Learn, Options, Tokenizer, encode, form};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

fn smollm2() -> Option<Tokenizer> {
    let Ok(dir) = std::env::var("FINETUNE_SMOLLM2") else {
        eprintln!("skipped: FINETUNE_SMOLLM2 names no directory");
        return None;
    };
    let read = |name: &str| std::fs::read_to_string(Path::new(&dir).join(name));
    let config = serde_json::from_str(&read("tokenizer_config.json").unwrap()).unwrap();
    let template = read("chat_template.jinja").ok();
    Some(Tokenizer::new(&read("tokenizer.json").unwrap(), Some(&config), None, template.as_deref()).unwrap())
}

/// Resident memory of this process in MB.
fn resident(field: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap_or("0");
    line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

#[test]
fn ids_and_masks_equal_transformers() {
    let Some(tokenizer) = smollm2() else { return };
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string("tests/golden/smollm2.json").unwrap()).unwrap();
    for case in golden["texts"].as_array().unwrap() {
        let ids = tokenizer.encode(case["text"].as_str().unwrap(), Special::Add).unwrap();
        assert_eq!(json!(ids), case["ids"], "{}", case["text"]);
    }
    for case in golden["talks"].as_array().unwrap() {
        let form = form::of(case, &Options::default()).unwrap();
        let (encoded, _) = encode::encode(&form, &tokenizer, (Learn::Answers, usize::MAX)).unwrap();
        assert_eq!(json!(encoded.ids), case["ids"], "{}", case["messages"]);
        let mask: Vec<u8> = encoded.mask.iter().map(|&m| u8::from(m)).collect();
        assert_eq!(json!(mask), case["mask"], "{}", case["messages"]);
    }
}

#[test]
fn many_rows_fit_into_memory() {
    let Some(tokenizer) = smollm2() else { return };
    let rows: usize = std::env::var("FINETUNE_ROWS").map_or(2000, |n| n.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for i in 0..rows {
        let question =
            format!("What is number {i} of the command lines that list files in folder {}?", i % 977);
        let answer = format!("It is `ls -la /folder/{}/{i}`, which prints one line for each file.", i % 977);
        let row = serde_json::json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]});
        writeln!(file, "{row}").unwrap();
    }
    file.flush().unwrap();
    let (before, start) = (resident("VmRSS"), Instant::now());
    let corpus = data::load(&[path], &Options::default(), &tokenizer).unwrap();
    let (seconds, after) = (start.elapsed().as_secs_f64(), resident("VmRSS"));
    let tokens = corpus.counts.tokens;
    eprintln!(
        "{rows} rows, {tokens} tokens in {seconds:.1} s ({:.0} rows/s, {:.2} M tokens/s); resident {before:.0} -> {after:.0} MB, \
         peak {:.0} MB; ids alone {:.0} MB",
        rows as f64 / seconds,
        tokens as f64 / seconds / 1e6,
        resident("VmHWM"),
        tokens as f64 * 4.0 / 1048576.0,
    );
    assert_eq!(corpus.samples.len(), rows);
    let start = Instant::now();
    let options = PlanOptions {
        batch_size: 8,
        epochs: 2,
        max_steps: None,
        micro_batch_tokens: None,
        packing: true,
        shuffle: true,
        seed: 1,
    };
    let plan = Plan::new(&corpus.samples, &options);
    let first = plan.step(1).rows().count();
    eprintln!("plan and its first step: {:.3} s", start.elapsed().as_secs_f64());
    assert_eq!(first, 8);
    // about 4 bytes a token, 28 bytes a row, and space for one chunk of rows and the caches of the threads
    let bound = (tokens as f64 * 4.25 + rows as f64 * 28.0) / 1048576.0 + 200.0;
    assert!(after - before < bound, "{:.0} MB more, bound {bound:.0}", after - before);
}
