//! `finetune bench`: the speed of a model on this machine. A few microbatches are trained and a few tokens decoded with
//! a timer around every verb, and peaks are measured in the same run. On a GPU, whose verbs return before they have
//! computed, only whole passes are timed.
//!
//! The roofline is the time of the frozen products alone at the measured peak: no computation of the same gradient is
//! faster. Rows are random tokens, because the time does not depend on their values.

use super::invocation::Invocation;
use crate::backend::Taken;
use crate::config::demo;
use crate::config::groups;
use crate::config::refusal::Refusal;
use crate::devices::{self, Profiled};
use crate::forecast::profile::{self, Measured, ModelShape, Profiles};
use crate::model::config::Config;
use crate::model::decoder::initial_parameters;
use crate::model::generate::generate;
use crate::model::head;
use crate::model::layout;
use crate::model::lora::LoraSpec;
use crate::model::memory::{InUse, Used};
use crate::model::stage::{IGNORE, Microbatch, Sampling, Targets};
use crate::numeric::line::Points;
use crate::numeric::rng::Stream;
use crate::run::base_model;
use crate::run::folder;
use serde_json::{Value, json};
use std::time::Instant;

/// Verbs that multiply by frozen weights.
const FROZEN: [&str; 5] = ["linear", "linear_grad", "lora_linear", "lora_linear_grad", "lm_head_loss"];
/// Number of decoded tokens, and of prompt tokens before them.
const DECODED: usize = 32;
const PROMPT: usize = 16;

/// Measurements of one pass.
struct Pass {
    seconds: f64,
    tokens: usize,
    verbs: Vec<(&'static str, Taken)>,
    /// Device memory in use before the pass, and its peak.
    memory: Option<(InUse, InUse)>,
}

impl Pass {
    fn add_to(&self, used: &mut Used) {
        if let Some((rest, most)) = self.memory {
            used.rest(rest);
            used.add(self.tokens as f64, most);
        }
    }
}

/// Profiles a model.
pub fn run(inv: &mut Invocation) -> Result<(), Refusal> {
    let s = &inv.settings;
    let base = base_model::open_as(s.text("model")?.unwrap_or(demo::NAME), groups::recipe(s)?)?;
    let config = &base.config;
    let whole = |name, least| groups::filled(s, name, groups::whole(s, name, least)?);
    let (rows, repeats) = (whole("rows", 1)?, whole("repeats", 1)?);
    let length = whole("length", 2)?.min(config.max_positions);
    let lora = LoraSpec {
        rank: whole("rank", 1)?,
        alpha: 32.0,
        targets: config.family.modules().into_iter().map(String::from).collect(),
        ..LoraSpec::none()
    };
    let tensors = &base.files.tensors;
    let mut profiled =
        devices::profile(&devices::choose(&groups::devices(s)?)?, (config, tensors, &lora), rows * length)?;
    let layout = layout::of(config, &lora, 0..config.layers);
    let flat = initial_parameters(&layout, &lora, tensors)?;
    profiled.model.set_parameters(&flat)?;
    let (mut points, mut used) = (Points::default(), Used::default());
    let mut pass = |rows| -> Result<Pass, Refusal> {
        let pass = train(&mut profiled, &microbatch(config, rows, length), repeats)?;
        let copies = profiled.model.together() as f64;
        points.add(pass.tokens as f64 / copies, pass.seconds / copies);
        pass.add_to(&mut used);
        Ok(pass)
    };
    let training = pass(rows)?;
    for fewer in smaller(rows) {
        pass(fewer)?;
    }
    let model = folder::stem(s.text("model")?.unwrap_or(demo::NAME));
    let shape = ModelShape::of(&model, (config, &lora), &base.files.kind)?;
    let device = profile::device(&profiled.model.class(), &profiled.hardware);
    let measured = Measured { train: points, memory: used, ..Measured::default() };
    Profiles::keep("", &device, &shape, &measured);
    let decoding = if config.labels.is_none() { Some(decode(&mut profiled, config)?) } else { None };
    let facts = json!({
        "model": base.path, "class": profiled.model.class(), "hardware": profiled.hardware,
        "threads": profiled.peaks.map(|(_, threads)| threads),
        "rows": rows, "length": length,
        "peak_gflops": profiled.peaks.map(|(p, _)| p.flops / 1e9),
        "peak_gbytes": profiled.peaks.map(|(p, _)| p.bytes / 1e9),
        "fixed_bytes": used.fit().map(|f| f.line.fixed), "bytes_per_token": used.fit().map(|f| f.line.each),
        "fixed_ms": points.line().map(|l| 1e3 * l.fixed), "ms_per_token": points.line().map(|l| 1e3 * l.each),
        "training": report(&training, &profiled), "decoding": decoding.map(|d| report(&d, &profiled)),
    });
    if inv.json {
        return inv.say(&facts.to_string());
    }
    tell(inv, &facts)
}

/// Smaller numbers of rows that are also measured, to fit a line through the times.
fn smaller(rows: usize) -> Vec<usize> {
    let mut smaller = vec![rows / 4, rows / 2];
    smaller.retain(|n| *n > 0);
    smaller.dedup();
    smaller
}

fn microbatch(config: &Config, rows: usize, length: usize) -> Microbatch {
    let mut draws = Stream::new(&[7]);
    let ids: Vec<u32> = (0..rows * length).map(|_| draws.below(config.vocab as u32)).collect();
    let next = |row: &[u32]| row[1..].iter().copied().chain([IGNORE]).collect::<Vec<_>>();
    let of_head = head::targets(config, (rows, ids.len()));
    let targets = of_head.unwrap_or_else(|| Targets::Tokens(ids.chunks(length).flat_map(next).collect()));
    let bounds = (0..=rows).map(|r| (r * length) as u32).collect();
    Microbatch { step: 1, rows: (0..rows as u64).collect(), ids, bounds, targets }
}

/// Returns the fastest of several forward and backward passes of as many microbatches as the device computes together,
/// after a warm-up pass.
fn train(p: &mut Profiled, batch: &Microbatch, repeats: usize) -> Result<Pass, Refusal> {
    let copies = p.model.together();
    let mut best: Option<Pass> = None;
    for repeat in 0..=repeats {
        p.notes.take();
        let rest = p.model.in_use().and_then(|_| p.model.in_use());
        let started = Instant::now();
        let mut all = std::iter::repeat_n(batch, copies).cloned();
        p.model.gradients(&mut || all.next(), &mut |_, _, _| ())?;
        let seconds = started.elapsed().as_secs_f64();
        // The memory of several microbatches is not that of one.
        let memory = rest.zip(p.model.in_use()).filter(|_| copies == 1);
        let verbs = p.notes.take().into_iter().collect();
        if repeat > 0 && best.as_ref().is_none_or(|b| seconds < b.seconds) {
            best = Some(Pass { seconds, tokens: copies * batch.ids.len(), verbs, memory });
        }
    }
    best.ok_or_else(|| Refusal::failure("nothing was measured"))
}

/// Decodes one token after the other. The first one includes the prompt and is not counted.
fn decode(p: &mut Profiled, config: &Config) -> Result<Pass, Refusal> {
    let prompt = &microbatch(config, 1, PROMPT.min(config.longest_text(1).saturating_sub(2)).max(1)).ids;
    let tokens = DECODED.min(config.longest_text(prompt.len()).saturating_sub(prompt.len() + 1)).max(1);
    let (max_new_tokens, stop) = (tokens + 1, Vec::new());
    let sampling = Sampling { max_new_tokens, temperature: 0.0, top_p: 1.0, seed: 0, stop };
    let notes = p.notes.clone();
    let mut started = None;
    generate(&mut *p.model, prompt, &sampling, &mut |_| {
        if started.is_none() {
            notes.take();
            started = Some(Instant::now());
        }
        true
    })?;
    let seconds = started.map_or(f64::NAN, |s: Instant| s.elapsed().as_secs_f64());
    Ok(Pass { seconds, tokens, verbs: p.notes.take().into_iter().collect(), memory: None })
}

fn report(pass: &Pass, p: &Profiled) -> Value {
    let tokens_per_second = pass.tokens as f64 / pass.seconds;
    let Some((peaks, _)) = p.peaks else {
        return json!({
            "tokens": pass.tokens, "seconds": pass.seconds, "tokens_per_second": tokens_per_second,
        });
    };
    let frozen = pass.verbs.iter().filter(|(name, _)| FROZEN.contains(name));
    // Few rows are bound by the bytes of the weights, many by their arithmetic.
    let least: f64 = frozen.map(|(_, t)| (t.flops / peaks.flops).max(t.bytes / peaks.bytes)).sum();
    let mut verbs = pass.verbs.clone();
    verbs.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let rows: Vec<Value> = verbs
        .iter()
        .map(|(name, t)| {
            let (flops, bytes) = (t.flops / t.seconds, t.bytes / t.seconds);
            json!({
                "verb": name, "calls": t.calls, "seconds": t.seconds, "share": t.seconds / pass.seconds,
                "gflops": flops / 1e9, "of_peak_gflops": flops / peaks.flops,
                "gbytes": bytes / 1e9, "of_peak_gbytes": bytes / peaks.bytes,
            })
        })
        .collect();
    let inside: f64 = pass.verbs.iter().map(|(_, t)| t.seconds).sum();
    json!({
        "tokens": pass.tokens, "seconds": pass.seconds, "tokens_per_second": tokens_per_second,
        "roofline_tokens_per_second": pass.tokens as f64 / least, "of_roofline": least / pass.seconds,
        "outside_verbs_seconds": pass.seconds - inside, "verbs": rows,
    })
}

fn number(v: &Value, name: &str) -> f64 {
    v[name].as_f64().unwrap_or(f64::NAN)
}

/// Prints what was measured, and on which device.
fn tell_device(inv: &mut Invocation, facts: &Value) -> Result<(), Refusal> {
    let text = |name: &str| facts[name].as_str().unwrap_or_default().to_string();
    match facts["threads"].is_null() {
        true => inv.say(&format!(
            "{} on {}: its verbs return before they have computed, so whole passes are timed",
            text("class"),
            text("hardware")
        ))?,
        false => inv.say(&format!(
            "{}, {} threads: at most {:.0} GFLOP/s (its kernel in the first cache), {:.1} GB/s (copying)",
            text("class"),
            facts["threads"],
            number(facts, "peak_gflops"),
            number(facts, "peak_gbytes"),
        ))?,
    }
    inv.say(&format!(
        "a microbatch takes {:.1} ms and {:.3} ms per token; `finetune plan` uses these numbers",
        number(facts, "fixed_ms"),
        number(facts, "ms_per_token"),
    ))?;
    if !facts["bytes_per_token"].is_null() {
        inv.say(&format!(
            "and has {:.1} MB and {:.1} kB per token in use beside the weights",
            number(facts, "fixed_bytes") / 1e6,
            number(facts, "bytes_per_token") / 1e3,
        ))?;
    }
    Ok(())
}

/// Prints the facts as tables.
fn tell(inv: &mut Invocation, facts: &Value) -> Result<(), Refusal> {
    tell_device(inv, facts)?;
    let training = format!("training, {} x {} tokens", facts["rows"], facts["length"]);
    for (what, pass) in [(training.as_str(), &facts["training"]), ("decoding", &facts["decoding"])] {
        if pass.is_null() {
            continue;
        }
        if pass["verbs"].is_null() {
            inv.say(&format!("{what}: {:.1} tokens/s", number(pass, "tokens_per_second")))?;
            continue;
        }
        inv.say(&format!(
            "\n{what}: {:.1} tokens/s, {:.0} % of the roofline of {:.1}",
            number(pass, "tokens_per_second"),
            100.0 * number(pass, "of_roofline"),
            number(pass, "roofline_tokens_per_second"),
        ))?;
        inv.say("verb               calls        ms  share   GFLOP/s of peak     GB/s of peak")?;
        for v in pass["verbs"].as_array().into_iter().flatten() {
            inv.say(&format!(
                "{:<17} {:>6.0} {:>9.2} {:>5.1}% {:>9.1} {:>6.1}% {:>8.1} {:>6.1}%",
                v["verb"].as_str().unwrap_or_default(),
                number(v, "calls"),
                1e3 * number(v, "seconds"),
                100.0 * number(v, "share"),
                number(v, "gflops"),
                100.0 * number(v, "of_peak_gflops"),
                number(v, "gbytes"),
                100.0 * number(v, "of_peak_gbytes"),
            ))?;
        }
        inv.say(&format!("{:<24} {:>9.2}", "outside verbs", 1e3 * number(pass, "outside_verbs_seconds")))?;
    }
    Ok(())
}
