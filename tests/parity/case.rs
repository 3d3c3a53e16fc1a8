//! A parity case: a small model, rows, an initial adapter, and the results of transformers + PEFT + torch.optim.AdamW.
//! Written by `tests/golden/make_parity.py` (token ids in `expected.json`), or with text rows and a tokenizer beside
//! the model.

#![allow(dead_code)] // each test file uses its own part

use finetune::format::{self, peft};
use finetune::model::config::Config;
use finetune::model::enlarged::enlarge;
use finetune::model::layout::{self, Layout};
use finetune::model::lora::{self, LoraSpec, Named, TrainedRows};
use finetune::model::stage::{IGNORE, Microbatch, Targets};
use finetune::model::targets::Choice;
use finetune::numeric::tensor::Tensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct Case {
    pub dir: PathBuf,
    pub config: Config,
    pub tensors: Arc<dyn Tensors>,
    pub lora: LoraSpec,
    pub layout: Layout,
    pub expected: Value,
    rows: Vec<(Vec<u32>, Option<u32>)>,
}

impl Case {
    pub fn open(dir: &Path) -> Case {
        let (config, tensors, _) = format::weights(&dir.join("model")).unwrap();
        let tensors = format::text_model(&config, &tensors).unwrap_or(tensors);
        Case::of(dir, &config, tensors)
    }

    /// A case with a model that is open already.
    pub fn of(dir: &Path, config: &Value, tensors: Arc<dyn Tensors>) -> Case {
        let mut config = Config::from_json(config).unwrap();
        let expected = std::fs::read_to_string(dir.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&expected).unwrap();
        let tensors = match expected["vocabulary"].as_u64() {
            Some(rows) => enlarge(tensors, &mut config, rows as usize).unwrap(),
            None => tensors,
        };
        let adapter = peft::read(&dir.join("adapter_init")).unwrap().config;
        let choice = Choice {
            targets: adapter.target_modules.clone(),
            ranks: adapter.rank_pattern.clone(),
            alphas: adapter.alpha_pattern.iter().map(|(name, alpha)| (name.clone(), *alpha as f32)).collect(),
            ..Choice::default()
        };
        let (rank, alpha, rslora) = (adapter.r, adapter.lora_alpha as f32, adapter.use_rslora);
        let tokens = |module: &str| adapter.token_rows.iter().find(|(name, _)| name == module);
        let tokens = |module| tokens(module).map(|(_, tokens)| tokens.clone()).unwrap_or_default();
        let trained = TrainedRows { embedding: tokens("embed_tokens"), head: tokens("lm_head") };
        let lora = LoraSpec { rank, alpha, rslora, rows: trained, ..LoraSpec::none() };
        let lora = choice.resolve(&config, lora).unwrap();
        let layout = layout::of(&config, &lora, 0..config.layers);
        let rows = rows(dir, &config, &expected);
        Case { dir: dir.to_owned(), config, tensors, lora, layout, expected, rows }
    }

    /// The same with a head that labels tokens with three classes.
    pub fn tagger(self) -> Case {
        let config = self.config.into_tagger(["a", "b", "c"].map(String::from).to_vec()).unwrap();
        let config = Config { tag_dropout: 0.0, ..config };
        let layout = layout::of(&config, &self.lora, 0..config.layers);
        Case { config, layout, ..self }
    }

    /// One of the case's adapters as a flat vector. The head of a tagger has values that are in no file.
    pub fn adapter(&self, name: &str) -> Vec<f32> {
        let adapter = peft::read(&self.dir.join(name)).unwrap();
        let named: Vec<_> = adapter
            .tensors
            .iter()
            .map(|t| Named { name: &t.name, rows: t.rows, cols: t.cols, values: &t.values })
            .collect();
        if !self.config.tags {
            return lora::from_adapter(&self.layout, &named).unwrap();
        }
        let text = Config { labels: None, tags: false, ..self.config.clone() };
        let text = layout::of(&text, &self.lora, 0..text.layers);
        let mut flat = lora::from_adapter(&text, &named).unwrap();
        flat.extend((flat.len()..self.layout.len()).map(|i| (i * 7919 % 97) as f32 / 97.0 - 0.5));
        flat
    }

    pub fn number(&self, key: &str) -> f64 {
        self.expected[key].as_f64().unwrap()
    }

    /// Rows `from..from + n` as one microbatch.
    pub fn microbatch(&self, from: usize, n: usize) -> Microbatch {
        let (mut ids, mut bounds, mut next, mut labels) = (Vec::new(), vec![0], Vec::new(), Vec::new());
        for (row, label) in &self.rows[from..from + n] {
            ids.extend(row);
            next.extend(row[1..].iter().copied().chain([IGNORE]));
            labels.extend(label);
            bounds.push(ids.len() as u32);
        }
        let weight = |row: usize| self.expected["rows"][row]["weight"].as_f64().map(|weight| weight as f32);
        let weights: Vec<f32> = (from..from + n).filter_map(weight).collect();
        let targets = match &self.config.labels {
            Some(_) if self.config.tags => {
                let class = |id: &u32| if id % 3 == 1 { IGNORE } else { id * 5 % 7 % 3 };
                Targets::Classes(ids.iter().map(class).collect())
            }
            Some(_) => Targets::Labels(labels),
            None if weights.is_empty() => Targets::Tokens(next),
            None => Targets::Weighted { targets: next, weights },
        };
        Microbatch { step: 1, rows: (from as u64..(from + n) as u64).collect(), ids, bounds, targets }
    }
}

/// Token ids (with the end token, unless the model is a classifier) and labels.
fn rows(dir: &Path, config: &Config, expected: &Value) -> Vec<(Vec<u32>, Option<u32>)> {
    let label = |row: &Value| config.labels.as_ref().and(row["label"].as_u64()).map(|l| l as u32);
    if let Some(rows) = expected["rows"].as_array() {
        let ids =
            |row: &Value| row["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
        return rows.iter().map(|row| (ids(row), label(row))).collect();
    }
    let tokenizer = tokenizers::Tokenizer::from_file(dir.join("model/tokenizer.json")).unwrap();
    let end = tokenizer.token_to_id("<|end|>").unwrap();
    let lines = std::fs::read_to_string(dir.join("train.jsonl")).unwrap();
    let parse = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let mut ids = tokenizer.encode(row["text"].as_str().unwrap(), true).unwrap().get_ids().to_vec();
        ids.extend(config.labels.is_none().then_some(end));
        (ids, label(&row))
    };
    lines.lines().map(parse).collect()
}

/// The committed cases: at the path of the build, or in the current directory if it was built elsewhere
/// (benches/first_contact.sh).
pub fn golden() -> Vec<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parity");
    cases(if built.exists() { &built } else { Path::new("tests/golden/parity") })
}

/// Calls `check` once for each committed case, with its place in [`golden`] and its folder. There is one thread for each
/// processor, which takes the next case when it is ready; a panic of `check` fails the caller.
pub fn each_golden(check: impl Fn(usize, &Path) + Sync) {
    let (all, next) = (golden(), AtomicUsize::new(0));
    let take = || {
        let number = next.fetch_add(1, Ordering::Relaxed);
        Some((number, all.get(number)?))
    };
    let work = || {
        while let Some((number, dir)) = take() {
            check(number, dir);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
}

/// Every case in a folder.
pub fn cases(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.json").is_file())
        .collect();
    found.sort();
    assert!(!found.is_empty(), "no cases in {}", dir.display());
    found
}
