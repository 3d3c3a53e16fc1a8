//! Contents of the page: names, measured times, and the content security policy.

use super::*;
use crate::train::event::{
    Change, Eval, Event, HERE, LineFormed, LinePart, Part, RunStart, Seat, SeatPart, Shared, Step, What,
};

fn step(step: u64, workers: &[&str], hidden_seconds: f64) -> Event {
    let part = |worker: &&str| Part {
        worker: (*worker).into(),
        device: "cpu 0".into(),
        microbatches: 1,
        tokens: 100,
        busy: 0.5,
        spans: vec![(0.0, 0.5)],
    };
    let devices = workers.iter().map(part).collect();
    let shared = Shared { devices, sync_seconds: 0.4, hidden_seconds, ..Shared::default() };
    Event::Step(Step { step, seconds: 1.0, shared: Some(shared), ..Step::default() })
}

fn change(step: u64, what: What, worker: &str) -> Event {
    Event::Device(Change { step, what, worker: worker.into(), devices: vec![], reason: "why".into() })
}

/// Times at which links were busy, by lane.
fn transfers(events: &[Event]) -> Vec<Vec<(f64, f64)>> {
    let round = |v: f64| (v * 1e3).round() / 1e3;
    let of = |lane: crate::report::draw::Lane| {
        let blocks = lane.blocks.iter().filter(|b| b.kind == "transfer");
        blocks.map(|b| (round(b.from), round(b.to))).collect()
    };
    lanes(&History::of(events)).lanes.into_iter().map(of).collect()
}

#[test]
fn transfers_that_computation_does_not_hide_are_drawn() {
    let two = [HERE, "a"];
    assert_eq!(
        transfers(&[step(1, &two, 0.0)]),
        [vec![], vec![(0.6, 1.0)]],
        "the process itself has no link"
    );
    assert_eq!(transfers(&[step(1, &two, 0.3)]), [vec![], vec![(0.9, 1.0)]], "most of it was hidden");
    assert_eq!(transfers(&[step(1, &two, 0.4)]), [vec![], vec![]]);
    let mut alone = step(1, &two, 0.0);
    if let Event::Step(Step { shared: Some(shared), .. }) = &mut alone {
        shared.parameter_seconds = 0.1;
        shared.devices.iter_mut().for_each(|part| part.spans = vec![(0.15, 0.5)]);
    }
    assert_eq!(transfers(&[alone]), [vec![], vec![(0.0, 0.1), (0.7, 1.0)]], "parameters begin a step");
    let lost = [
        change(0, What::Joined, "a"),
        Event::Run(RunStart { total_steps: 3, first_step: 1, ..RunStart::default() }),
        step(1, &two, 0.3),
        step(2, &two, 0.3),
        change(1, What::Lost, "a"),
        step(3, &[HERE], 0.3),
    ];
    assert_eq!(transfers(&lost), [vec![], vec![(0.9, 1.0)]], "nothing after it was lost");
    let gone = &lanes(&History::of(&lost)).lanes[1];
    assert_eq!(gone.there, (Some(0.0), Some(1.0)), "the second step was its last");
}

/// A single device in one process: its microbatches are shown, and no network.
#[test]
fn single_device_has_a_lane_and_no_topology() {
    let run = RunStart { total_steps: 2, classes: vec!["cpu-avx2-f32".into()], ..RunStart::default() };
    let step = |step| {
        let spans = vec![(0.0, 0.4), (0.5, 0.75)];
        Event::Step(Step { step, seconds: 1.0, total_tokens: 100, spans, ..Step::default() })
    };
    let history = History::of(&[Event::Run(run), step(1), step(2)]);
    let lanes = lanes(&history);
    let blocks: Vec<(f64, f64)> = lanes.lanes[0].blocks.iter().map(|b| (b.from, b.to)).collect();
    assert_eq!(lanes.lanes.len(), 1);
    assert_eq!(lanes.lanes[0].name, "cpu-avx2-f32");
    assert_eq!(blocks, [(0.0, 0.4), (0.5, 0.75), (1.0, 1.4), (1.5, 1.75)]);
    assert!(lanes.lanes[0].blocks[0].tip.contains("2 microbatches, 100 tokens, 0.65 s of 1.00 s"));
    let html = body(&history, &Surroundings::default());
    assert!(html.contains("cpu-avx2-f32") && !html.contains("coordinator"), "{html}");
}

/// The gaps in the lanes of its seats are the bubble of a line.
#[test]
fn each_seat_of_a_line_has_a_lane() {
    let seat = |worker: &str, first_layer, layers| Seat {
        worker: worker.into(),
        device: "cpu 0".into(),
        first_layer,
        layers,
        streamed: 0,
        memory: 1,
        limit: None,
    };
    let formed = |seats: [Seat; 2]| {
        let (worker, seats) = ("a + b".into(), seats.to_vec());
        Event::Line(LineFormed { step: 0, worker, seats, token_bytes: 8 })
    };
    let part = |worker: &str, spans: &[(f64, f64)]| SeatPart {
        worker: worker.into(),
        device: "cpu 0".into(),
        microbatches: 1,
        busy: 0.4,
        spans: spans.to_vec(),
    };
    let step = |number, seats: Vec<SeatPart>| {
        let mut event = step(number, &[HERE, "a + b"], 0.4);
        if let Event::Step(Step { shared: Some(shared), .. }) = &mut event {
            shared.lines = vec![LinePart { worker: "a + b".into(), seats }];
        }
        event
    };
    let both = vec![part("a", &[(0.0, 0.1), (0.5, 0.8)]), part("b", &[(0.1, 0.2), (0.2, 0.5)])];
    let first = [formed([seat("a", 0, 2), seat("b", 2, 2)]), step(1, both)];
    let drawn = |events: &[Event]| -> Vec<(String, Vec<(f64, f64)>)> {
        let lanes = lanes(&History::of(events)).lanes.into_iter();
        let blocks = |lane: &crate::report::draw::Lane| {
            lane.blocks.iter().map(|block| (block.from, block.to)).collect()
        };
        lanes.map(|lane| (lane.name.clone(), blocks(&lane))).collect()
    };
    let want = [
        ("here, cpu 0", vec![(0.0, 0.5)]),
        ("a, layers 0 to 1", vec![(0.0, 0.1), (0.5, 0.8)]),
        ("b, layers 2 to 3", vec![(0.1, 0.2), (0.2, 0.5)]),
    ];
    assert_eq!(drawn(&first), want.map(|(name, blocks)| (name.to_owned(), blocks)));
    // Another split, and a step in which the first seat did nothing.
    let [line, event] = first;
    let later =
        [line, event, formed([seat("a", 0, 3), seat("b", 3, 1)]), step(2, vec![part("b", &[(0.0, 0.3)])])];
    let names: Vec<String> = drawn(&later).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["here, cpu 0", "a, layers 0 to 1", "b, layers 2 to 3", "b, layer 3"]);
}

#[test]
fn class_names_are_escaped() {
    let labels = vec!["safe, mostly".to_string(), "<bad>".to_string()];
    let eval = Eval {
        step: 1,
        accuracy: Some(0.5),
        macro_f1: Some(0.25),
        confusion: Some(vec![vec![1, 0], vec![1, 0]]),
        ..Eval::default()
    };
    let events = [Event::Run(RunStart { labels, ..RunStart::default() }), Event::Eval(eval)];
    let html = body(&History::of(&events), &Surroundings::default());
    for part in ["<th>safe, mostly</th>", "<th>&lt;bad&gt;</th>", "macro F1", "0.250"] {
        assert!(html.contains(part), "{part} in {html}");
    }
}

#[test]
fn page_policy_allows_only_its_own_script() {
    let page = |form| document(&History::default(), &Surroundings::default(), form);
    let (file, live) = (page(Form::File), page(Form::Live));
    for html in [&file, &live] {
        assert!(html.contains("base-uri 'none'; form-action 'none'") && html.contains("default-src 'none'"));
        assert!(!html.contains("script-src 'unsafe-inline'"));
    }
    assert!(!file.contains("script-src") && !file.contains("connect-src"));
    assert!(live.contains("script-src 'sha256-") && live.contains("connect-src 'self'"));
}

#[test]
fn model_is_named_after_its_folder() {
    for (note, want) in [
        ("models/tiny (Llama, bf16 safetensors)", "tiny"),
        ("/x/demo-1/model (Llama)", "demo-1"),
        ("model", "model"),
        ("base.gguf (Llama)", "base.gguf"),
    ] {
        assert_eq!(model_name(note), want);
    }
}
