//! The check of every export: logits of a short row, from the model in memory and from the written files.

use super::Exported;
use crate::config::groups::DeviceOptions;
use crate::config::refusal::Refusal;
use crate::devices::{self, Chosen, Need};
use crate::model::config::Config;
use crate::model::head;
use crate::model::layout;
use crate::model::lora::LoraSpec;
use crate::model::merge::Merged;
use crate::model::stage::{Microbatch, Output, Targets, Want};
use crate::numeric::tensor::Tensors;
use crate::run::base_model::BaseModel;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens of the compared forward pass.
const PROBE: u32 = 32;

/// Logits of the same row, computed in four ways.
struct Compared {
    /// What the merge is compared with.
    from: &'static str,
    /// Base and adapter, not merged; of DoRA the merged weights in f32.
    adapted: Vec<f32>,
    /// The merged weights in f32.
    unrounded: Vec<f32>,
    /// The merged weights in memory, rounded to the written types.
    source: Vec<f32>,
    /// The written files.
    read: Vec<f32>,
}

impl Compared {
    /// Returns a sentence for the user, or an error.
    ///
    /// The effect of rounding the weights to bf16 or f16 on logits has no useful bound, because it depends on the
    /// model. So rounding is excluded: the merge is compared in f32, the files are compared with the rounded weights.
    fn verdict(&self) -> Result<String, String> {
        let scale = self.adapted.iter().fold(0f32, |m, v| m.max(v.abs()));
        let bound = bound(&self.adapted);
        for (what, one, two) in [
            ("merged in f32 give logits", &self.adapted, &self.unrounded),
            ("as read back give logits", &self.source, &self.read),
        ] {
            let apart = apart(one, two);
            // NaN is never within a bound.
            if one.len() != two.len() || apart.is_nan() || apart > bound {
                return Err(format!("the weights {what} that are {apart:e} off (bound {bound:e})"));
            }
        }
        let rounding = match apart(&self.unrounded, &self.source) {
            0.0 => String::new(),
            moved => format!("; rounding the weights moved them by {moved:.1e}"),
        };
        let apart = apart(&self.adapted, &self.unrounded);
        let from = self.from;
        Ok(format!("read back: logits within {apart:.1e} of {from} (largest {scale:.1}){rounding}"))
    }
}

/// Compares the written model `again` with base and adapter, and with the merge in f32. `out` and `kind` are those of
/// the export, whose report is returned.
pub fn compare(
    from: &Exported,
    unrounded: &Merged,
    again: &BaseModel,
    (out, kind): (&Path, &str),
) -> Result<Value, Refusal> {
    let (base, loaded, devices) = (&from.base, &from.loaded, &from.devices);
    let probe = probe(&loaded.config);
    let weights = (&loaded.config, &*base.files.tensors, &loaded.spec);
    let merged = plain_logits(devices, (&loaded.config, unrounded), &probe)?;
    let (from, adapted) = match loaded.magnitudes.is_empty() {
        true => ("base + adapter", logits(devices, weights, Some(&loaded.flat), &probe)?),
        false => ("the merged weights in f32", merged.clone()),
    };
    let compared = Compared {
        from,
        adapted,
        unrounded: merged,
        // The files hold the numbers of the rounded merge; here they run with the configuration in memory.
        source: plain_logits(devices, (&loaded.config, &*again.files.tensors), &probe)?,
        read: plain_logits(devices, (&again.config, &*again.files.tensors), &probe)?,
    };
    let text = compared
        .verdict()
        .map_err(|why| Refusal::failure(format!("{}: not written: {why}; report this", out.display())))?;
    let moved = apart(&compared.adapted, &compared.read);
    let weights = &again.files.kind;
    Ok(json!({ "kind": kind, "weights": weights, "largest_difference": moved, "compared": text }))
}

/// Largest allowed difference between logits computed from the same numbers in different ways.
pub fn bound(logits: &[f32]) -> f32 {
    1e-4 * logits.iter().fold(0f32, |m, v| m.max(v.abs())).max(1.0)
}

/// The largest difference; NaN where any difference is NaN.
pub fn apart(one: &[f32], two: &[f32]) -> f32 {
    let larger = |m: f32, d: f32| if m.is_nan() || d.is_nan() { f32::NAN } else { m.max(d) };
    one.iter().zip(two).fold(0.0, |m, (a, b)| larger(m, (a - b).abs()))
}

/// A fixed row of token ids.
pub fn probe(config: &Config) -> Microbatch {
    let ids: Vec<u32> = (0..PROBE).map(|i| (i * 7919 + 11) % config.vocab as u32).collect();
    let none = || Targets::Tokens(vec![crate::model::stage::IGNORE; ids.len()]);
    let targets = head::targets(config, (1, ids.len())).unwrap_or_else(none);
    Microbatch { step: 0, rows: vec![0], bounds: vec![0, PROBE], ids, targets }
}

/// Logits of weights without an adapter. A merged classifier has its head like a base with a head of its own.
pub fn plain_logits(
    devices: &DeviceOptions,
    (config, tensors): (&Config, &dyn Tensors),
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    let none = LoraSpec::none();
    let head = match &config.labels {
        Some(_) => {
            let layout = layout::of(config, &none, 0..config.layers);
            Some(crate::model::decoder::initial_parameters(&layout, &none, tensors)?)
        }
        None => None,
    };
    logits(devices, (config, tensors, &none), head.as_deref(), probe)
}

/// Logits of a model with the given values of its adapter.
pub fn logits(
    devices: &DeviceOptions,
    weights: (&Config, &dyn Tensors, &LoraSpec),
    flat: Option<&[f32]>,
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    let chosen = devices::choose(devices)?;
    let (config, _, lora) = weights;
    if chosen.is_one_cpu() && !lora.rows.shared(config) {
        return by_layers(&chosen, weights, flat, probe);
    }
    let mut model = devices::open(&chosen, weights, None, Need::SPEECH)?;
    if let Some(flat) = flat {
        model.set_parameters(flat)?;
    }
    match model.forward(probe, None, Want::Logits)? {
        Output::Logits(logits) => Ok(logits),
        _ => Err(Refusal::failure("the model gave no logits")),
    }
}

/// Holds one layer in memory at a time, because merged weights are in f32 even for a quantised base. The bits equal
/// those of the whole model.
fn by_layers(
    chosen: &Chosen,
    (config, tensors, lora): (&Config, &dyn Tensors, &LoraSpec),
    flat: Option<&[f32]>,
    probe: &Microbatch,
) -> Result<Vec<f32>, Refusal> {
    devices::fits_by_layers(chosen, (config, tensors, lora), PROBE as usize)?;
    let (mut hidden, mut from) = (None, 0);
    for layer in 0..config.layers {
        let mut stage = devices::layer(chosen, (config, tensors, lora), layer)?;
        if let Some(flat) = flat.filter(|_| !stage.layout().is_empty()) {
            let to = from + stage.layout().len();
            let own = flat.get(from..to).ok_or_else(|| Refusal::failure("the adapter has too few values"))?;
            stage.set_parameters(own)?;
            from = to;
        }
        match stage.forward(probe, hidden.as_deref(), Want::Logits)? {
            Output::Hidden(values) => hidden = Some(values),
            Output::Logits(logits) => return Ok(logits),
            Output::Loss(_) | Output::Scores(_) => break,
        }
    }
    Err(Refusal::failure("the model gave no logits"))
}

/// Refuses, before anything is written, an export that exceeds --memory-limit even with one layer at a time: the base
/// with its adapter, or the merged weights.
pub fn fits(source: &Exported, merged: Option<&Merged>) -> Result<(), Refusal> {
    let chosen = devices::choose(&source.devices)?;
    let loaded = &source.loaded;
    if !chosen.is_one_cpu() {
        return Ok(());
    }
    let none = LoraSpec::none();
    let (tensors, lora): (&dyn Tensors, _) = match merged {
        Some(merged) => (merged, &none),
        None => (&*source.base.files.tensors, &loaded.spec),
    };
    devices::fits_by_layers(&chosen, (&loaded.config, tensors, lora), PROBE as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of the four ways with a difference above rounding, and with NaN.
    #[test]
    fn inaccurate_merge_is_reported() {
        let good = || Compared {
            from: "base + adapter",
            adapted: vec![20.0, -3.0],
            unrounded: vec![20.001, -3.0],
            source: vec![20.3, -3.1],
            read: vec![20.3, -3.1],
        };
        let said = good().verdict().unwrap();
        assert!(said.contains("within 1.0e-3") && said.contains("moved them by 3.0e-1"), "{said}");
        for bad in [20.01, f32::NAN, f32::INFINITY] {
            let mut c = good();
            c.unrounded[0] = bad;
            assert!(c.verdict().unwrap_err().contains("merged in f32"));
            let mut c = good();
            c.read[1] = bad;
            assert!(c.verdict().unwrap_err().contains("as read back"));
        }
        assert!(Compared { read: vec![20.3], ..good() }.verdict().is_err());
        assert!(
            Compared { adapted: vec![f32::NAN; 2], unrounded: vec![f32::NAN; 2], ..good() }
                .verdict()
                .is_err()
        );
    }
}
