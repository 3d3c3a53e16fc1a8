//! Writes a run's page and pictures as files: report.html, and one SVG per picture.

use super::draw::{Chart, Curve, Style, compact, escape};
use super::history::History;
use super::page::{self, Form, Surroundings};
use crate::format::{FormatError, atomic};
use std::path::{Path, PathBuf};

/// Width of a picture file, in pixels.
const WIDTH: f64 = 820.0;

/// Writes report.html and the pictures into `dir`; returns the path of the page.
pub fn write(dir: &Path, history: &History, around: &Surroundings) -> Result<PathBuf, FormatError> {
    for (name, chart) in page::charts(history) {
        atomic::write_file(&dir.join(format!("{name}.svg")), chart.draw(WIDTH, 300.0).alone().as_bytes())?;
    }
    if !history.devices.is_empty() {
        let mut pictures = vec![("timeline", page::lanes(history).draw(WIDTH))];
        if !history.is_alone() {
            pictures.push(("topology", page::topology(history).draw(WIDTH)));
        }
        for (name, picture) in pictures {
            atomic::write_file(&dir.join(format!("{name}.svg")), picture.alone().as_bytes())?;
        }
    }
    let path = dir.join("report.html");
    atomic::write_file(&path, page::document(history, around, Form::File).as_bytes())?;
    Ok(path)
}

/// A configuration key with its value in each run; None if a run does not set it.
pub type Difference = (String, Vec<Option<String>>);

/// A page that compares runs: overlaid curves, results, and the configuration keys that differ (`None`: the
/// configurations are unknown).
pub fn comparison(runs: &[(String, History)], differences: Option<&[Difference]>) -> String {
    let last = runs.iter().map(|(_, h)| h.progress.total_steps).max().unwrap_or(0) as f64;
    let chart = |title: &str, style, points: fn(&History) -> Vec<(f64, f64)>| {
        let curve = |(i, (name, history)): (usize, &(String, History))| Curve {
            name: name.clone(),
            colour: i % 8,
            style,
            points: points(history),
        };
        Chart {
            title: title.into(),
            curves: runs.iter().enumerate().map(curve).collect(),
            last,
            from_zero: false,
        }
    };
    let loss = chart("training loss, smoothed", Style::Line, |h| {
        h.steps.iter().map(|p| (p.step as f64, p.smooth)).collect()
    });
    let eval = chart("evaluation loss", Style::Dots, |h| {
        h.evals.iter().map(|e| (e.step as f64, e.eval_loss)).collect()
    });
    let rows: String = runs.iter().enumerate().map(|(i, (name, h))| row(i, name, h)).collect();
    let head = "<tr><th></th><th>run</th><th>state</th><th>steps</th><th>loss</th><th>eval loss</th>\
                <th>best eval loss</th><th>accuracy</th><th>macro F1</th><th>tokens/s</th></tr>";
    let table = format!(r#"<div class="panel full"><h2>runs</h2><table>{head}{rows}</table></div>"#);
    let different = differences.map(|all| different(runs, all)).unwrap_or_default();
    let body = format!(
        r#"<header><h1>{} runs</h1></header><div class="panels">{table}{different}{}{}</div>"#,
        runs.len(),
        page::panel(&loss),
        page::panel(&eval),
    );
    page::frame("runs · finetune", &body)
}

fn row(i: usize, name: &str, history: &History) -> String {
    let p = &history.progress;
    let number = |value: Option<f64>| value.map_or("–".into(), |v| format!("{v:.4}"));
    let eval = p.eval.as_ref().map(|(_, last)| last);
    let best = history.best_eval().map(|e| format!("{:.4} <small>step {}</small>", e.eval_loss, e.step));
    let cells = [
        swatch(i),
        escape(name),
        history.state().word().into(),
        format!("{} of {}", p.step, p.total_steps),
        number(p.smooth_loss()),
        number(eval.map(|e| e.eval_loss)),
        best.unwrap_or_else(|| "–".into()),
        eval.and_then(|e| e.accuracy).map_or("–".into(), |a| format!("{:.1} %", 100.0 * a)),
        number(eval.and_then(|e| e.macro_f1)),
        if p.seconds > 0.0 { compact(p.tokens as f64 / p.seconds) } else { "–".into() },
    ];
    format!("<tr>{}</tr>", cells.map(|cell| format!("<td>{cell}</td>")).concat())
}

fn swatch(i: usize) -> String {
    format!(
        r#"<svg class="swatch" viewBox="0 0 10 10"><circle class="f{}" cx="5" cy="5" r="4"/></svg>"#,
        i % 8
    )
}

/// The table of differing keys: one row per key, one column per run.
fn different(runs: &[(String, History)], all: &[Difference]) -> String {
    let table = if all.is_empty() {
        r#"<p class="quiet">no difference</p>"#.to_string()
    } else {
        let head: String = runs
            .iter()
            .enumerate()
            .map(|(i, (name, _))| format!("<th>{}{}</th>", swatch(i), escape(name)))
            .collect();
        let cell = |value: &Option<String>| {
            format!("<td>{}</td>", value.as_ref().filter(|v| !v.is_empty()).map_or("–".into(), |v| escape(v)))
        };
        let row = |(key, values): &Difference| {
            format!("<tr><th>{}</th>{}</tr>", escape(key), values.iter().map(cell).collect::<String>())
        };
        let rows: String = all.iter().map(row).collect();
        format!("<table><tr><th></th>{head}</tr>{rows}</table>")
    };
    format!(r#"<div class="panel full"><h2>configuration: keys that differ</h2>{table}</div>"#)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::history::LANE_STEPS;
    use crate::train::event::{Change, Done, Eval, Event, Halt, Part, RunStart, Sample, Shared, Step, What};

    fn step(step: u64, parts: &[(&str, &str)]) -> Event {
        let part = |(worker, device): &(&str, &str)| Part {
            worker: (*worker).into(),
            device: (*device).into(),
            microbatches: 2,
            tokens: 100,
            busy: 0.4,
            spans: vec![],
        };
        let shared =
            Shared { devices: parts.iter().map(part).collect(), sync_seconds: 0.05, ..Shared::default() };
        let shared = (!parts.is_empty()).then_some(shared);
        let loss = 4.0 / step as f64;
        Event::Step(Step {
            step,
            loss,
            grad_norm: 1.0,
            lr: 2e-4,
            tokens: 50,
            total_tokens: 100,
            seconds: 0.5,
            epoch: 0.1,
            shared,
            spans: vec![],
            ..Step::default()
        })
    }

    fn run(parts: &[(&str, &str)]) -> Vec<Event> {
        let notes =
            vec!["output   runs/x".into(), "model    models/<b>m</b> (Llama, bf16 safetensors)".into()];
        let mut events =
            vec![Event::Run(RunStart { total_steps: 3, first_step: 1, notes, ..RunStart::default() })];
        let hostile = "<script>alert(1)</script>\u{1}";
        events.push(Event::Eval(Eval { step: 0, eval_loss: 4.2, ..Eval::default() }));
        events.push(Event::Device(Change {
            step: 0,
            what: What::Joined,
            worker: hostile.into(),
            devices: vec![],
            reason: String::new(),
        }));
        events.push(Event::Sample(Sample {
            step: 0,
            prompt: hostile.into(),
            text: "a \"b\" & c".into(),
            ..Sample::default()
        }));
        events.extend((1..=3).map(|s| step(s, parts)));
        events
    }

    #[test]
    fn report_is_self_contained_and_escapes_all_text() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = run(&[("a", "gpu 0"), ("<b>", "cpu")]);
        events.push(Event::Done(Done { step: 3, complete: true, path: "runs/x".into(), seconds: 1.5 }));
        let around = Surroundings { configuration: "model: </pre><script>".into(), contracts: vec![] };
        let path = write(dir.path(), &History::of(&events), &around).unwrap();
        let html = std::fs::read_to_string(path).unwrap();
        assert!(!html.contains("<script>") && !html.contains("<b>m") && !html.contains('\u{1}'));
        for part in [
            "complete",
            "gpu 0",
            "&lt;script&gt;alert(1)",
            "a &quot;b&quot; &amp; c",
            "evaluation",
            "topology",
        ] {
            assert!(html.contains(part), "{part}");
        }
        // The page loads nothing: its only address is the SVG name space.
        for address in html.split("http").skip(1) {
            assert!(
                address.starts_with("://www.w3.org/2000/svg") || address.starts_with("-equiv"),
                "{address:.40}"
            );
        }
        let mut names: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|f| f.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let want = [
            "grad-norm.svg",
            "learning-rate.svg",
            "loss.svg",
            "report.html",
            "speed.svg",
            "timeline.svg",
            "topology.svg",
        ];
        assert_eq!(names, want);
        for name in &names[..] {
            let text = std::fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(!text.contains("NaN"), "{name}");
        }
    }

    #[test]
    fn state_word_and_fault_reason_are_shown() {
        let word = |events: &[Event]| History::of(events).state().word();
        let mut events = run(&[]);
        assert_eq!((word(&[]), word(&events)), ("waiting", "running"));
        events.push(Event::Fault(Halt { step: 3, code: 3, reason: "step 4: NaN".into() }));
        assert_eq!(word(&events), "halted");
        let html = page::document(&History::of(&events), &Surroundings::default(), Form::File);
        assert!(html.contains("step 4: NaN"));
        for (code, want) in [(3, "halted"), (75, "stopped"), (1, "failed")] {
            events.push(Event::Fault(Halt { step: 3, code, reason: "no space left".into() }));
            assert_eq!(word(&events), want);
        }
        // The run is resumed.
        events.push(Event::Run(RunStart { total_steps: 3, first_step: 4, ..RunStart::default() }));
        assert_eq!(word(&events), "running");
    }

    /// Members exclude peers that were refused, and workers of an earlier process that died.
    #[test]
    fn members_belong_to_the_current_process() {
        let change = |step, what, worker: &str| {
            let (devices, reason) = (vec![], "because".to_string());
            Event::Device(Change { step, what, worker: worker.into(), devices, reason })
        };
        let names = |events: &[Event]| -> Vec<(String, bool)> {
            History::of(events).members().into_iter().map(|(n, m)| (n.to_string(), m.gone)).collect()
        };
        let here = |name: &str, gone| (name.to_string(), gone);
        let run = |first_step| Event::Run(RunStart { total_steps: 9, first_step, ..RunStart::default() });
        let mut events = vec![change(0, What::Joined, "a"), change(0, What::Joined, "b"), run(1)];
        events.push(step(1, &[("a", "cpu"), ("b", "cpu")]));
        events.extend([change(1, What::Refused, "203.0.113.5:4242"), change(1, What::Lost, "b")]);
        assert_eq!(names(&events), [here("a", false), here("b", true)]);
        // The process is killed; new workers join its successor before it computes.
        events.push(step(2, &[("a", "cpu")]));
        events.extend([change(2, What::Joined, "c"), run(3), step(3, &[("c", "cpu")])]);
        assert_eq!(names(&events), [here("c", false)]);
        assert_eq!(History::of(&events).devices.len(), 1);
    }

    #[test]
    fn lanes_show_microbatches_and_links_show_bandwidth() {
        let mut events = run(&[("a", "gpu 0"), ("b", "cpu")]);
        let Some(Event::Step(last)) = events.last_mut() else { panic!() };
        last.shared.as_mut().unwrap().devices[0].spans = vec![(0.0, 0.1), (0.1, 0.25), (0.3, 0.4)];
        let link = Some(crate::train::event::Link { bandwidth: 118e6, round_trip: 2e-4 });
        let (worker, device) = ("a".to_string(), "gpu 0".to_string());
        let speed = crate::train::event::Speed { worker, device, link, ..Default::default() };
        events.push(Event::Speed(speed));
        let history = History::of(&events);
        let lanes = page::lanes(&history);
        let compute = |lane: usize| lanes.lanes[lane].blocks.iter().filter(|b| b.kind == "compute").count();
        assert_eq!((compute(0), compute(1)), (2 + 3, 3), "a block a step, and three of the last");
        assert!(lanes.lanes[0].blocks.windows(2).all(|w| w[0].to <= w[1].from), "{:?}", lanes.lanes[0]);
        let links: Vec<String> = page::topology(&history).nodes.into_iter().map(|n| n.link.1).collect();
        assert!(links.contains(&"118 MB/s".to_string()), "{links:?}");
    }

    #[test]
    fn history_of_a_long_run_is_bounded() {
        let mut history = History::of(&run(&[]));
        for i in 1..=100 {
            history.see(&step(i, &[("a", "cpu")]));
        }
        assert_eq!(history.steps.iter().filter(|p| !p.parts.is_empty()).count(), LANE_STEPS);
        let knock =
            Change { step: 1, what: What::Refused, worker: "x".into(), devices: vec![], reason: "no".into() };
        for _ in 0..20_000 {
            history.see(&Event::Device(knock.clone()));
        }
        assert!(history.changes.len() < 10_000 && history.members().len() == 1);
    }

    #[test]
    fn contracts_of_absent_backends_are_not_in_this_run() {
        let contract = |id: &str| page::Contract {
            id: id.into(),
            statement: "holds".into(),
            enforced: Some("somewhere".into()),
        };
        let contracts = ["F-DP-001", "F-WGPU-001", "F-DP-003"].map(contract).to_vec();
        let around = Surroundings { configuration: String::new(), contracts };
        let count = |classes: &[&str], code: u8, word: &str| {
            let classes = classes.iter().map(|c| c.to_string()).collect();
            let mut history = History::of(&[Event::Run(RunStart { classes, ..RunStart::default() })]);
            history.see(&Event::Fault(Halt { step: 0, code, reason: "x".into() }));
            page::document(&history, &around, Form::File).matches(word).count()
        };
        assert_eq!(count(&["cpu-avx512-f32"], 1, "held so far"), 2);
        assert_eq!(count(&["cpu-avx512-f32"], 1, "not in this run"), 1);
        assert_eq!(count(&["wgpu-x-f32"], 1, "held so far"), 3);
        assert_eq!(count(&["wgpu-x-f32"], 1, "halted the run"), 0);
        assert_eq!(count(&["wgpu-x-f32"], 3, "halted the run"), 1);
    }

    #[test]
    fn runs_are_compared_by_name() {
        let runs = [("a & b".to_string(), History::of(&run(&[]))), ("c".to_string(), History::of(&run(&[])))];
        let html = comparison(&runs, None);
        assert!(html.contains("a &amp; b") && html.contains("2 runs") && html.contains("2.3518"), "{html}");
        assert!(html.contains("4.2000 <small>step 0</small>") && !html.contains("configuration"), "{html}");
        let rate = |text: &str| Some(text.to_string());
        let all = [
            ("learning_rate".to_string(), vec![rate("2e-4"), rate("<1>")]),
            ("rank".into(), vec![rate("8"), None]),
        ];
        let html = comparison(&runs, Some(&all));
        for part in
            ["<th>learning_rate</th><td>2e-4</td><td>&lt;1&gt;</td>", "<th>rank</th><td>8</td><td>–</td>"]
        {
            assert!(html.contains(part), "{part} in {html}");
        }
        assert!(comparison(&runs, Some(&[])).contains("no difference"));
    }
}
