//! Metrics for Prometheus (text exposition format 0.0.4): counters end in `_total`, units are base units.

use super::history::{History, RunState};
use crate::train::event::Eval;
use std::fmt::Write;

/// Content type of the response.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const STATES: [RunState; 7] = [
    RunState::Waiting,
    RunState::Running,
    RunState::Paused,
    RunState::Complete,
    RunState::Stopped,
    RunState::Halted,
    RunState::Failed,
];

/// All metrics of a run.
pub fn text(history: &History) -> String {
    let mut out = Text::default();
    let p = &history.progress;
    let last = history.steps.last();
    out.family("finetune_state", "gauge", "1 for the current state of the run, 0 for the others.");
    for state in STATES {
        let on = f64::from(u8::from(state == history.state()));
        out.sample("finetune_state", &[("state", state.word())], on);
    }
    out.one("finetune_steps_total", "counter", "Optimizer steps taken.", Some(p.step as f64));
    out.one(
        "finetune_planned_steps",
        "gauge",
        "Optimizer steps of the whole run.",
        Some(p.total_steps as f64),
    );
    out.one("finetune_tokens_total", "counter", "Tokens trained on.", Some(p.tokens as f64));
    out.one("finetune_step_seconds_total", "counter", "Wall time of all steps.", Some(p.seconds));
    out.one("finetune_loss", "gauge", "Training loss of the last step.", last.map(|s| s.loss));
    out.one(
        "finetune_smoothed_loss",
        "gauge",
        "Training loss, averaged over about ten steps.",
        p.smooth_loss(),
    );
    out.one(
        "finetune_grad_norm",
        "gauge",
        "L2 norm of the gradient before clipping.",
        last.map(|s| s.grad_norm),
    );
    out.one("finetune_learning_rate", "gauge", "Learning rate of the last step.", last.map(|s| s.lr));
    out.one("finetune_tokens_per_second", "gauge", "Recent tokens per second.", p.speed());
    out.one("finetune_remaining_seconds", "gauge", "Estimated time for the remaining steps.", p.remaining());
    let rewards = last.map(|s| s.rewards).unwrap_or_default();
    for (name, help, value) in [
        (
            "finetune_reward_chosen",
            "Mean reward of the chosen answers of the last step.",
            rewards.rewards_chosen,
        ),
        ("finetune_reward_rejected", "Mean reward of the rejected answers.", rewards.rewards_rejected),
        ("finetune_reward_margin", "Difference of the two.", rewards.margin),
        ("finetune_reward_min", "Lowest reward of a reward model.", rewards.min_reward),
        ("finetune_reward_max", "Highest reward of a reward model.", rewards.max_reward),
    ] {
        if value.is_some() {
            out.one(name, "gauge", help, value);
        }
    }
    evals(&mut out, p.eval.as_ref().map(|(_, last)| last));
    devices(&mut out, history);
    out.0
}

fn evals(out: &mut Text, eval: Option<&Eval>) {
    out.one("finetune_eval_loss", "gauge", "Loss of the last evaluation.", eval.map(|e| e.eval_loss));
    out.one(
        "finetune_eval_accuracy",
        "gauge",
        "Accuracy of the last evaluation.",
        eval.and_then(|e| e.accuracy),
    );
    if let Some(share) = eval.and_then(|e| e.token_accuracy) {
        let help = "Share of supervised tokens that are the most probable ones, in the last evaluation.";
        out.one("finetune_eval_token_accuracy", "gauge", help, Some(share));
    }
    let sets = eval.map_or(&[][..], |e| &e.sets);
    if !sets.is_empty() {
        out.family("finetune_eval_set_loss", "gauge", "Loss of the last evaluation on each set of rows.");
        sets.iter()
            .for_each(|set| out.sample("finetune_eval_set_loss", &[("set", &set.name)], set.eval_loss));
    }
}

fn devices(out: &mut Text, history: &History) {
    let seen: Vec<_> = history.progress.speeds.values().filter_map(|s| Some((s, s.memory?))).collect();
    if !seen.is_empty() {
        let name = "finetune_device_memory_peak_bytes";
        out.family(name, "gauge", "Peak bytes in use for a microbatch, without the frozen weights.");
        for (speed, memory) in seen {
            out.sample(name, &[("worker", &speed.worker), ("device", &speed.device)], memory.most as f64);
        }
    }
    if history.is_alone() {
        return;
    }
    let team = &history.progress.team;
    let (received, sent) = team.bytes();
    out.one(
        "finetune_received_bytes_total",
        "counter",
        "Bytes of gradient sums received.",
        Some(received as f64),
    );
    out.one("finetune_sent_bytes_total", "counter", "Bytes of parameters sent.", Some(sent as f64));
    let here = history.members().values().filter(|m| !m.gone).count();
    out.one("finetune_workers", "gauge", "Workers in the run.", Some(here as f64));
    type Value = fn(&super::DeviceWork) -> f64;
    let families: [(&str, &str, Value); 3] = [
        ("finetune_device_microbatches_total", "Microbatches computed and counted.", |w| {
            w.microbatches as f64
        }),
        ("finetune_device_tokens_total", "Tokens of counted microbatches.", |w| w.tokens as f64),
        ("finetune_device_busy_seconds_total", "Time the device spent computing.", |w| w.busy),
    ];
    for (name, help, value) in families {
        out.family(name, "counter", help);
        for (worker, device, work) in team.devices() {
            out.sample(name, &[("worker", worker), ("device", device)], value(work));
        }
    }
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0 += name;
        for (i, (label, text)) in labels.iter().enumerate() {
            let _ = write!(self.0, "{}{label}=\"{}\"", if i == 0 { '{' } else { ',' }, quoted(text));
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// A family with a single sample; an unknown value is left out.
    fn one(&mut self, name: &str, kind: &str, help: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.family(name, kind, help);
            self.sample(name, &[], value);
        }
    }
}

/// Escapes backslash, quote and line end in a label value; a name may contain any of them.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Event, Part, RunStart, Shared, Step};

    #[test]
    fn step_of_two_devices_is_exported() {
        let part = |worker: &str, tokens| Part {
            worker: worker.into(),
            device: "cpu".into(),
            microbatches: 1,
            tokens,
            busy: 0.25,
            spans: vec![],
        };
        let shared =
            Shared { devices: vec![part("a\"\\\n", 64), part("b", 36)], bytes_in: 1000, ..Shared::default() };
        let step = Step {
            step: 1,
            loss: 2.5,
            grad_norm: 1.0,
            lr: 2e-4,
            tokens: 50,
            total_tokens: 100,
            seconds: 0.5,
            epoch: 0.1,
            shared: Some(shared),
            ..Step::default()
        };
        let run = RunStart { total_steps: 2, first_step: 1, ..RunStart::default() };
        let text = text(&History::of(&[Event::Run(run), Event::Step(step)]));
        for line in [
            "finetune_state{state=\"running\"} 1",
            "finetune_state{state=\"halted\"} 0",
            "finetune_steps_total 1",
            "finetune_planned_steps 2",
            "finetune_loss 2.5",
            "finetune_tokens_per_second 200",
            "finetune_received_bytes_total 1000",
            "finetune_device_tokens_total{worker=\"a\\\"\\\\\\n\",device=\"cpu\"} 64",
            "finetune_device_busy_seconds_total{worker=\"b\",device=\"cpu\"} 0.25",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
        assert!(!text.contains("eval"), "what is not known is left out");
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(text.contains(&format!("# TYPE {name} ")), "{line} has no type");
        }
    }
}
