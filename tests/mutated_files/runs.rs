//! The files of runs: checkpoints with right and wrong checksums, metrics.jsonl.

use crate::mutate::{self, Dice};
use crate::weights::{file, of, safetensors_file};
use crate::{Files, Format};
use finetune::config::refusal::Refusal;
use finetune::format::FormatError;
use finetune::format::safetensors::{self, Spec};
use finetune::model::layout::Layout;
use finetune::numeric::dtype::Dtype;
use finetune::report::{self, History, Metrics, page::Surroundings};
use finetune::train::checkpoint::{self, Identity, Saving, State};
use finetune::train::event::{self, Event, What};
use finetune::train::optim;
use std::path::Path;

pub const FORMATS: &[Format] = &[
    Format { name: "checkpoint", share: 3, whole: saved, damage: in_the_checkpoint, read: read_saved },
    Format { name: "metrics", share: 1, whole: metrics, damage: in_the_metrics, read: read_metrics },
];

fn layout() -> Layout {
    let mut layout = Layout::default();
    layout.push("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 2, 4);
    layout.push("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", 4, 2);
    layout
}

fn identity() -> Identity {
    Identity::default().with("rows", "abc").with("learning_rate", 2e-4).with("seed", 1)
}

/// The files of checkpoint-4 and of the older checkpoint-2.
fn saved() -> Files {
    let dir = tempfile::tempdir().unwrap();
    let adapter = |to: &Path, values: &[f32]| -> Result<(), FormatError> {
        let layout = layout();
        let tensors: Vec<(Spec, Vec<u8>)> = layout
            .entries()
            .iter()
            .map(|entry| {
                let spec =
                    Spec { name: entry.name.clone(), dtype: Dtype::F32, shape: vec![entry.rows, entry.cols] };
                (spec, Dtype::F32.bytes_of(&values[entry.range()]).into_owned())
            })
            .collect();
        let tensors: Vec<(Spec, &[u8])> =
            tensors.iter().map(|(spec, bytes)| (spec.clone(), &bytes[..])).collect();
        safetensors::write(&to.join("adapter_model.safetensors"), &tensors)
    };
    let output = dir.path().to_owned();
    let mut saving = Saving {
        output,
        every: 2,
        limit: None,
        identity: identity(),
        adapter: &adapter,
        stands: &|| true,
        last: None,
    };
    let mut files = Files::new();
    for step in [2, 4] {
        let mut state = State::new(vec![0.5; layout().len()], optim::Options::default());
        (state.step, state.looked, state.classes) = (step, Some(step), vec!["cpu".into()]);
        state.remember(&Event::Step(event::Step { step, loss: 1.5, ..Default::default() }), 4);
        let path = saving.write(&state, 4).unwrap().unwrap();
        for entry in std::fs::read_dir(path).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            files.push(file(&format!("checkpoint-{step}/{name}"), std::fs::read(&path).unwrap()));
        }
    }
    files
}

fn in_the_checkpoint(dice: &mut Dice, whole: &Files) -> Files {
    let parts = [
        "run_state.json",
        "trainer_state.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "blake3sums",
    ];
    let mut damaged = Files::new();
    for _ in 0..1 + dice.below(2) {
        let name = format!("checkpoint-4/{}", dice.word(&parts));
        let bytes = of(whole, &name);
        let content = match () {
            () if dice.one_in(12) => None,
            () if name.ends_with(".json") => {
                Some(mutate::json(dice, &serde_json::from_slice(bytes).unwrap()))
            }
            () if name.ends_with(".safetensors") => Some(safetensors_file(dice, bytes)),
            () => Some(mutate::lines(dice, std::str::from_utf8(bytes).unwrap()).into_bytes()),
        };
        damaged.retain(|(other, _)| *other != name);
        damaged.push((name, content));
    }
    // In most cases the checksums are updated to match the changed files.
    if !damaged.iter().any(|(name, _)| name.ends_with("blake3sums")) && !dice.one_in(4) {
        let now = |name: &str| match damaged.iter().find(|(n, _)| n == name) {
            Some((_, content)) => content.clone(),
            None => Some(of(whole, name).to_vec()),
        };
        let mut sums = String::new();
        for part in &parts[..4] {
            if let Some(bytes) = now(&format!("checkpoint-4/{part}")) {
                sums += &format!("{}  {part}\n", blake3::hash(&bytes).to_hex());
            }
        }
        damaged.push(file("checkpoint-4/blake3sums", sums));
    }
    damaged
}

fn read_saved(folder: &Path) -> Result<(), Refusal> {
    let found = checkpoint::find(folder)?;
    let state = found.load(&layout(), optim::Options::default(), &identity())?;
    assert_eq!(state.parameters.len(), layout().len());
    // If only the newer checkpoint is damaged, the older one can be used.
    match found.passed_over.first() {
        Some(line) => Err(Refusal::failure(line)),
        None => Ok(()),
    }
}

fn change(what: What) -> Event {
    Event::Device(event::Change {
        step: 0,
        what,
        worker: "b".into(),
        devices: vec!["cpu 0 (cpu)".into()],
        reason: "why".into(),
    })
}

fn step(step: u64) -> Event {
    let part = |worker: &str| event::Part {
        worker: worker.into(),
        device: "cpu 0".into(),
        microbatches: 3,
        tokens: 60,
        busy: 0.5,
        spans: vec![(0.0, 0.4)],
    };
    let shared = event::Shared {
        devices: vec![part("here"), part("b")],
        classes: [("cpu".into(), 6)].into(),
        bytes_in: 9,
        ..Default::default()
    };
    Event::Step(event::Step {
        step,
        loss: 2.0,
        lr: 1e-3,
        seconds: 0.5,
        tokens: 50,
        total_tokens: 60,
        epoch: 0.5,
        shared: Some(shared),
        ..Default::default()
    })
}

fn metrics() -> Files {
    let events = [
        Event::Run(event::RunStart {
            total_steps: 4,
            steps_per_epoch: 2,
            first_step: 1,
            rows: 8,
            classes: vec!["cpu".into()],
            labels: vec!["no".into(), "yes".into()],
            notes: vec!["note".into()],
            ..Default::default()
        }),
        change(What::Joined),
        Event::Speed(event::Speed {
            worker: "b".into(),
            device: "cpu 0".into(),
            link: Some(event::Link { bandwidth: 1e6, round_trip: 0.01 }),
            ..Default::default()
        }),
        Event::Forecast(event::Forecast {
            tokens_per_second: 100.0,
            seconds: 2.0,
            basis: "measured".into(),
            memory: vec![event::Takes { bytes: 5, ..Default::default() }],
            ..Default::default()
        }),
        step(1),
        step(2),
        Event::Eval(event::Eval {
            step: 2,
            eval_loss: 1.0,
            accuracy: Some(0.5),
            macro_f1: Some(0.4),
            confusion: Some(vec![vec![1, 2], vec![3, 4]]),
            ..Default::default()
        }),
        Event::Sample(event::Sample {
            step: 2,
            prompt: "p".into(),
            text: "t".into(),
            expected: Some("t".into()),
            right: Some(true),
        }),
        Event::Checkpoint(event::Saved { step: 2, path: "checkpoint-2".into() }),
        change(What::Lost),
        step(3),
        Event::Fault(event::Halt { step: 3, code: 3, reason: "NaN".into() }),
        Event::Done(event::Done { step: 3, complete: false, path: "out".into(), seconds: 2.0 }),
    ];
    let lines: String = events.iter().map(|event| serde_json::to_string(event).unwrap() + "\n").collect();
    vec![file("metrics.jsonl", lines)]
}

/// Damages some lines as JSON, or the order of lines.
pub fn damage_lines(dice: &mut Dice, whole: &str) -> Vec<u8> {
    let mut lines: Vec<Vec<u8>> = whole.lines().map(|line| line.as_bytes().to_vec()).collect();
    for _ in 0..1 + dice.below(3) {
        let (at, other) = (dice.below(lines.len()), dice.below(lines.len()));
        match dice.below(8) {
            0 => lines.swap(at, other),
            1 => lines.insert(at, lines[other].clone()),
            2 => mutate::bytes(dice, &mut lines[at]),
            _ => match serde_json::from_slice(&lines[at]) {
                Ok(value) => lines[at] = mutate::json(dice, &value),
                Err(_) => lines[at].clear(),
            },
        }
    }
    lines.join(&b"\n"[..])
}

fn in_the_metrics(dice: &mut Dice, whole: &Files) -> Files {
    let text = std::str::from_utf8(of(whole, "metrics.jsonl")).unwrap();
    vec![file("metrics.jsonl", damage_lines(dice, text))]
}

/// Reads metrics as `report` does, and as a resumed run does.
fn read_metrics(folder: &Path) -> Result<(), Refusal> {
    let path = folder.join("metrics.jsonl");
    let history = History::of(&report::read(&path)?);
    std::hint::black_box(report::comparison(
        &[("a".into(), history.clone()), ("b".into(), History::default())],
        None,
    ));
    report::write(folder, &history, &Surroundings { configuration: "rank: 4\n".into(), contracts: vec![] })?;
    drop(Metrics::resume(&path, 2, Some(2))?);
    Ok(())
}
