//! config.json out of GGUF metadata, for the architectures that a plain decoder covers. What would change the
//! mathematics and has no place in the configuration is refused by name, never guessed.

use super::order::{Orders, Shared};
use super::reader::Gguf;
use super::value::Value as Meta;
use super::weights::LONG_ROPE;
use crate::families::{self, Bias, Family, FeedForward, Rotated, ScoreScale, TEMPERATURE, Windows};
use crate::format::error::FormatError;
use serde_json::{Value, json};
use std::f64::consts::PI;

/// What the metadata says of the model.
#[derive(Debug)]
pub(super) struct Made {
    pub config: Value,
    /// What the model is.
    pub family: &'static Family,
    /// The orders of its tensors.
    pub orders: Orders,
}

/// YaRN's `mscale_all_dim`.
pub(super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
/// Key/value heads, in some files of each layer.
const KV_HEADS: &str = "attention.head_count_kv";

/// Reads metadata of one architecture, with the file's name in every error.
struct Source<'a> {
    file: &'a Gguf,
    arch: &'a str,
}

impl Source<'_> {
    fn get(&self, key: &str) -> Option<&Meta> {
        self.file.get(&format!("{}.{key}", self.arch))
    }

    fn bad(&self, key: &str) -> FormatError {
        FormatError::malformed(
            self.file.path(),
            format!("metadata {}.{key} is missing or unusable", self.arch),
        )
    }

    fn refuse(&self, what: String) -> FormatError {
        let known = families::names("or");
        let way = format!("use a {known} model, or the Hugging Face directory of this one");
        FormatError::unsupported(self.file.path(), what, way)
    }

    /// A size, at least 1.
    fn size(&self, key: &str) -> Result<usize, FormatError> {
        self.maybe(key)?.ok_or_else(|| self.bad(key))
    }

    fn maybe(&self, key: &str) -> Result<Option<usize>, FormatError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=u64::from(u32::MAX)).contains(&n) => Ok(Some(n as usize)),
                _ => Err(self.bad(key)),
            },
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, FormatError> {
        match self.get(key) {
            None => Ok(default),
            Some(v) => v.as_f64().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| self.bad(key)),
        }
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.tensors().contains_key(tensor)
    }
}

impl Gguf {
    /// Refuses one file of a model that is split into several.
    pub fn refuse_part(&self) -> Result<(), FormatError> {
        if self.get("split.count").and_then(Meta::as_u64).unwrap_or(1) > 1 {
            let way = "join its parts with llama.cpp's `llama-gguf-split --merge`";
            return Err(FormatError::unsupported(self.path(), "one part of a split GGUF", way));
        }
        Ok(())
    }
}

/// The configuration of the model in `file`.
pub(super) fn make(file: &Gguf) -> Result<Made, FormatError> {
    let arch = file.get("general.architecture").and_then(Meta::as_str).unwrap_or("unknown");
    let s = Source { file, arch };
    match file.get("general.type").and_then(Meta::as_str) {
        None | Some("model") => {}
        Some(other) => return Err(s.refuse(format!("a GGUF of type '{other}', not a model"))),
    }
    file.refuse_part()?;
    let Some(family) = families::of_gguf(arch, |key| s.get(key).is_some()) else {
        let traits = [("ssm.inner_size", "state space layers"), ("expert_count", "a mixture of experts")];
        let shown = traits.into_iter().find(|(key, _)| s.get(key).and_then(Meta::as_u64).unwrap_or(0) > 0);
        let shown = shown.map_or(String::new(), |(_, what)| format!(" ({what})"));
        return Err(s.refuse(format!("architecture '{arch}'{shown} is not supported")));
    };
    if let Some(missing) = family.not_in_gguf() {
        return Err(s.refuse(format!("{missing} (architecture '{arch}') is not read from GGUF")));
    }
    if !family.experts && s.get("expert_count").and_then(Meta::as_u64).unwrap_or(0) > 0 {
        return Err(s.refuse("a mixture of experts is not supported".into()));
    }
    let heads = s.size("attention.head_count")?;
    let kv_heads = kv_heads(&s, family)?.unwrap_or(heads);
    let mut config = sizes(&s, family, (heads, kv_heads))?;
    config["model_type"] = json!(family.model_type);
    config["architectures"] = json!([format!("{}ForCausalLM", family.name)]);
    biases(&s, family, &mut config)?;
    rope(&s, family, &mut config)?;
    windows(&s, family, &mut config)?;
    beyond_llama(&s, family, &mut config)?;
    let paired = family.gguf.adjacent_pairs.then_some((heads, kv_heads));
    let shared = if family.delta_rule { delta_rule(&s, &mut config)? } else { None };
    Ok(Made { config, family, orders: Orders { paired, shared } })
}

/// The keys of the delta rules; returns the heads where several share a key head.
fn delta_rule(s: &Source, config: &mut Value) -> Result<Option<Shared>, FormatError> {
    let [taps, key_size, keys, values, inner] =
        ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"]
            .map(|key| s.size(&format!("ssm.{key}")));
    let (taps, key_size, keys, values, inner) = (taps?, key_size?, keys?, values?, inner?);
    if !inner.is_multiple_of(values) || !values.is_multiple_of(keys) {
        return Err(s.bad("ssm.time_step_rank"));
    }
    let every = s.maybe("full_attention_interval")?.unwrap_or(4);
    config["full_attention_interval"] = json!(every);
    for (key, size) in [
        ("conv_kernel_dim", taps),
        ("key_head_dim", key_size),
        ("num_key_heads", keys),
        ("num_value_heads", values),
        ("value_head_dim", inner / values),
    ] {
        config[format!("linear_{key}")] = json!(size);
    }
    let before = keys.checked_mul(2).and_then(|both| both.checked_mul(key_size));
    let before = before.ok_or_else(|| s.bad("ssm.group_count"))?;
    let of = Shared { keys, values: values / keys, before, size: inner / values };
    Ok((of.values > 1).then_some(of))
}

/// Key/value heads; where the file has those of each layer, those of the layers of attention.
fn kv_heads(s: &Source, family: &Family) -> Result<Option<usize>, FormatError> {
    match s.get(KV_HEADS) {
        Some(Meta::Ints(each)) if family.convolutions => {
            let of_layer = each.iter().copied().filter(|heads| *heads != 0).max();
            of_layer.map(|heads| usize::try_from(heads).map_err(|_| s.bad(KV_HEADS))).transpose()
        }
        Some(Meta::Ints(each)) if !each.is_empty() && each.iter().all(|heads| *heads == each[0]) => {
            usize::try_from(each[0]).ok().filter(|heads| *heads > 0).map(Some).ok_or_else(|| s.bad(KV_HEADS))
        }
        _ => s.maybe(KV_HEADS),
    }
}

/// `layer_types`: layers without key/value heads have a convolution.
fn layer_types(s: &Source, config: &Value) -> Result<Vec<&'static str>, FormatError> {
    let (layers, kv) = (config["num_hidden_layers"].as_u64(), config["num_key_value_heads"].as_i64());
    let Some(Meta::Ints(each)) = s.get(KV_HEADS) else { return Err(s.bad(KV_HEADS)) };
    let kind = |heads: &i64| match *heads {
        0 => Ok("conv"),
        own if Some(own) == kv => Ok("full_attention"),
        _ => Err(s.refuse("layers with unlike numbers of key/value heads are not supported".into())),
    };
    match Some(each.len() as u64) == layers {
        true => each.iter().map(kind).collect(),
        false => Err(s.bad(KV_HEADS)),
    }
}

fn sizes(s: &Source, family: &Family, (heads, kv_heads): (usize, usize)) -> Result<Value, FormatError> {
    let hidden = s.size("embedding_length")?;
    let head_dim = match s.maybe("attention.key_length")? {
        Some(d) => d,
        None if hidden % heads == 0 => hidden / heads,
        None => return Err(s.bad("attention.head_count")),
    };
    if s.maybe("attention.value_length")?.is_some_and(|v| v != head_dim) {
        return Err(s.refuse("values and keys of different sizes are not supported".into()));
    }
    let rotary = s.maybe("rope.dimension_count")?;
    if rotary.is_some_and(|n| n > head_dim || n < head_dim && family.partial_rotary.is_none()) {
        return Err(s.refuse("rotary embedding of a part of the head is not supported".into()));
    }
    let embedding = s.file.tensors().get("token_embd.weight").and_then(|info| info.shape.first());
    let vocab = embedding.copied().ok_or_else(|| {
        FormatError::tensor(s.file.path(), "token_embd.weight", "is missing: not a whole model")
    })?;
    // The last layers may predict further tokens.
    let further = match s.get("nextn_predict_layers").map(Meta::as_u64) {
        None | Some(Some(0)) => 0,
        Some(_) => s.size("nextn_predict_layers")?,
    };
    let layers = s.size("block_count")?.checked_sub(further);
    let layers = layers.filter(|layers| *layers > 0).ok_or_else(|| s.bad("nextn_predict_layers"))?;
    let token = |key: &str| s.file.get(&format!("tokenizer.ggml.{key}_token_id")).and_then(Meta::as_u64);
    Ok(json!({
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": s.size(if family.shared_expert { SHARED_SIZE } else { "feed_forward_length" })?,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": s.size("context_length")?,
        family.eps_key: clean(s.number("attention.layer_norm_rms_epsilon", 1e-5)?),
        family.activation_key: family.activation_names()[0],
        "attention_dropout": 0.0,
        "tie_word_embeddings": !s.has("output.weight"),
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
        "torch_dtype": "float32",
        "use_cache": true,
    }))
}

/// What a Llama does not have: what the metadata say, and what llama.cpp takes for granted.
fn beyond_llama(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    for (stored, key) in family.scales_in_gguf().into_iter().flatten() {
        config[key] = json!(clean(s.number(stored, 1.0)?));
    }
    if let FeedForward::Key(key) = family.feed_forward {
        config[key] = config["intermediate_size"].clone();
    }
    if let Rotated::Key(key) = family.rotated {
        let rotates = s.get(families::ROTATES).and_then(Meta::as_bool);
        let rotates = rotates.ok_or_else(|| s.bad(families::ROTATES))?;
        config[key] = json!(rotates.then_some("rope"));
    }
    if family.hybrid {
        // More layers are refused in any configuration.
        let layers = config["num_hidden_layers"].as_u64().unwrap_or(0).min(1 << 13);
        config["layer_types"] = (0..layers).map(|_| "attention").collect();
        config["num_local_experts"] = json!(0);
        config["num_experts_per_tok"] = json!(0);
        // transformers checks the size of Mamba-2 heads also where no layer has any.
        config["mamba_n_heads"] = json!(1);
    }
    if family.experts {
        experts(s, family, config)?;
    }
    if family.convolutions {
        config["layer_types"] = json!(layer_types(s, config)?);
        config["conv_L_cache"] = json!(s.size("shortconv.l_cache")?);
        config["block_auto_adjust_ff_dim"] = json!(false);
    }
    if let (Some(_), Some(size)) = (family.partial_rotary, config["head_dim"].as_f64()) {
        let rotary = s.maybe("rope.dimension_count")?.map_or(size, |n| n as f64);
        config["partial_rotary_factor"] = json!(rotary / size);
    }
    if let ScoreScale::Key(key) = family.score_scale {
        // Of Gemma 3, the one with 62 layers (27B) divides the scores by the square root of hidden size / heads.
        let part = |a: &str, b: &str| Some(config[a].as_u64()? / config[b].as_u64()?.max(1));
        let wide = part("hidden_size", "num_attention_heads");
        let of_27b = config["num_hidden_layers"] == 62;
        config[key] = if of_27b { json!(wide) } else { config["head_dim"].clone() };
    }
    if s.get("final_logit_softcapping").is_some() {
        return Err(s.refuse("a soft cap of the logits is not supported".into()));
    }
    Ok(())
}

/// Inner size of an expert that computes every token.
pub(super) const SHARED_SIZE: &str = "expert_shared_feed_forward_length";

fn experts(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    let [count, inner] = match family.biased_experts {
        true => ["num_local_experts", "intermediate_size"],
        false => ["num_experts", "moe_intermediate_size"],
    };
    config[count] = json!(s.size("expert_count")?);
    config["num_experts_per_tok"] = json!(s.size("expert_used_count")?);
    config[inner] = json!(s.size("expert_feed_forward_length")?);
    if !family.biased_experts {
        // llama.cpp divides the weights of the chosen experts by their sum.
        config["norm_topk_prob"] = json!(true);
    }
    Ok(())
}

/// f32 metadata as it was written by hand: 9.99999974e-06 is 1e-05.
fn clean(x: f64) -> f64 {
    format!("{}", x as f32).parse().unwrap_or(x)
}

fn biases(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    let q = s.has("blk.0.attn_q.bias");
    let alone = family.biases.o == Bias::Never && matches!(family.biases.qkv, Bias::KeyOrTrue(_));
    match family.biases.qkv {
        // config.json says nothing of what every model of the family has.
        Bias::Always if q => Ok(()),
        Bias::Always => Err(s.refuse(format!("{} without biases is not supported", family.name))),
        _ if (q && !alone) != s.has("blk.0.attn_output.bias") => {
            Err(s.refuse(format!("architecture '{}' with biases on a part of attention", s.arch)))
        }
        _ => {
            config["attention_bias"] = json!(q);
            config["mlp_bias"] = json!(s.has("blk.0.ffn_gate.bias"));
            Ok(())
        }
    }
}

fn rope(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    let theta = s.number("rope.freq_base", 10_000.0)?;
    config["rope_theta"] = json!(theta);
    config["rope_scaling"] = match s.get("rope.scaling.type").and_then(Meta::as_str) {
        None | Some("none") => match s.get("rope.scale_linear") {
            None if family.needs_rope_section => json!({"rope_type": "default"}),
            None => Value::Null,
            Some(_) => json!({"rope_type": "linear", "factor": s.number("rope.scale_linear", 1.0)?}),
        },
        Some("linear") => json!({"rope_type": "linear", "factor": s.number("rope.scaling.factor", 1.0)?}),
        Some("yarn") => yarn(s, family)?,
        Some("longrope") if family.long_rope && s.has(LONG_ROPE[0]) => Value::Null,
        Some(other) => return Err(s.refuse(format!("rope scaling '{other}' is not supported"))),
    };
    if family.query_growth.is_some() && config["rope_scaling"]["rope_type"] != "yarn" {
        return Err(
            s.refuse(format!("architecture '{}' without rope scaling by YaRN is not supported", s.arch))
        );
    }
    // Qwen3.5 always has sections; those of a text see one position.
    if s.get("rope.dimension_sections").is_some() && !family.delta_rule {
        return Err(s.refuse("a rotary embedding of images is not supported".into()));
    }
    match LONG_ROPE.map(|name| s.file.values(name)) {
        [None, None] => {}
        [Some(long), Some(short)] if family.long_rope && config["rope_scaling"].is_null() => {
            config["rope_scaling"] = long_rope(s, config, &long, &short)?
        }
        _ => {
            let arch = s.arch;
            return Err(
                s.refuse(format!("rope scaling by LongRoPE (architecture '{arch}') is not supported"))
            );
        }
    }
    if let Some(factors) = s.file.values("rope_freqs.weight") {
        let head_dim = config["head_dim"].as_u64().unwrap_or(0) as usize;
        let found = llama3(&factors, theta, head_dim).ok_or_else(|| {
            s.refuse("rope_freqs.weight holds other factors than Llama 3's, which is not supported".into())
        })?;
        config["rope_scaling"] = found;
    }
    local_rope(s, family, config)
}

/// Windows, and the layers that slide.
fn windows(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    // Phi-3's converter writes 0 where there is no window.
    let zero = s.get(families::WINDOW).and_then(Meta::as_u64) == Some(0);
    if family.windows == Windows::Given && zero {
        config["sliding_window"] = Value::Null;
    } else if let Some(window) = s.maybe(families::WINDOW)? {
        config["sliding_window"] = json!(window);
        config["use_sliding_window"] = json!(true);
    }
    let slides = s.get(families::WINDOW).is_some();
    if !slides && matches!(family.windows, Windows::Pattern(..)) {
        return Err(s.bad(families::WINDOW));
    }
    match s.get(families::SLIDING_LAYERS).map(Meta::as_bools) {
        Some(Some(layers)) if family.gguf_lists_windows => {
            let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
            config["layer_types"] = layers.iter().map(kind).collect();
        }
        None if !slides || family.windows != Windows::Typed => {}
        _ => return Err(s.refuse("an order of sliding layers of its own is not supported".into())),
    }
    Ok(())
}

/// The rotary base of sliding layers.
fn local_rope(s: &Source, family: &Family, config: &mut Value) -> Result<(), FormatError> {
    match family.local_rope_theta {
        Some(_) if family.gguf_lists_windows => {
            // With a flat `rope_theta` transformers gives sliding layers the base 500,000.
            let theta = config["rope_theta"].as_f64().unwrap_or(0.0);
            let sliding = s.number("rope.freq_base_swa", theta)?;
            let mut full = match config["rope_scaling"].take() {
                Value::Null => json!({"rope_type": "default"}),
                scaling => scaling,
            };
            full["rope_theta"] = json!(theta);
            let sliding = json!({"rope_type": "default", "rope_theta": sliding});
            config["rope_parameters"] = json!({"full_attention": full, "sliding_attention": sliding});
        }
        Some(key) => config[key] = json!(s.number("rope.freq_base_swa", 10_000.0)?),
        None => {}
    }
    Ok(())
}

/// The keys of LongRoPE.
fn long_rope(s: &Source, config: &mut Value, long: &[f32], short: &[f32]) -> Result<Value, FormatError> {
    config["original_max_position_embeddings"] = json!(s.size("rope.scaling.original_context_length")?);
    let factors = |all: &[f32]| all.iter().map(|x| clean(f64::from(*x))).collect::<Value>();
    Ok(json!({
        "rope_type": "longrope",
        "long_factor": factors(long),
        "short_factor": factors(short),
        "attention_factor": clean(s.number("rope.scaling.attn_factor", 1.0)?),
    }))
}

/// The keys of YaRN. llama.cpp computes the factor of cosines and sines as transformers does without `attention_factor`,
/// whatever the file says of it.
fn yarn(s: &Source, family: &Family) -> Result<Value, FormatError> {
    let factor = clean(s.number("rope.scaling.factor", 1.0)?);
    let amplitude = 1.0 + 0.1 * libm::log(factor.max(1.0));
    // llama.cpp takes 0 for no multiplier.
    let multiplied = s.get(LOG_MULTIPLIER).is_some_and(|x| x.as_f64() != Some(0.0));
    let usual = |key: &str| match (key, s.get(key).map(Meta::as_f64)) {
        (_, None) => true,
        (LOG_MULTIPLIER, Some(_)) => !multiplied || family.query_growth.is_some(),
        ("rope.scaling.yarn_attn_factor", Some(Some(own))) => (own / amplitude - 1.0).abs() < 1e-6,
        // llama.cpp's own values.
        (_, Some(own)) => own == Some(1.0),
    };
    let others =
        ["rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"];
    if let Some(key) = others.into_iter().chain([LOG_MULTIPLIER]).find(|key| !usual(key)) {
        return Err(s.refuse(format!("rope scaling by YaRN with '{key}' is not supported")));
    }
    let mut all = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": s.size("rope.scaling.original_context_length")?,
        "beta_fast": clean(s.number("rope.scaling.yarn_beta_fast", 32.0)?),
        "beta_slow": clean(s.number("rope.scaling.yarn_beta_slow", 1.0)?),
        // llama.cpp rounds the ends of the ramp for every model.
        "truncate": family.whole_ramp,
    });
    if let Some(growth) = family.query_growth {
        all[growth] = json!(clean(s.number(TEMPERATURE, 0.1)?));
        if multiplied {
            all["mscale"] = json!(1.0);
            all["mscale_all_dim"] = json!(clean(s.number(LOG_MULTIPLIER, 1.0)?));
        }
    }
    Ok(all)
}

/// llama.cpp stores what Llama 3's scaling divides each frequency by. Those models share all parameters but
/// the factor, and the factor is what the lowest frequency is divided by: so the parameters come back exactly,
/// and are checked against every stored number.
fn llama3(stored: &[f32], theta: f64, head_dim: usize) -> Option<Value> {
    let factor = f64::from(*stored.last()?);
    let (low, high, original) = (1.0, 4.0, 8192.0);
    if stored.len() != head_dim / 2 || !(1.0..=1e4).contains(&factor) {
        return None;
    }
    let expected = |i: usize| {
        let wavelength = 2.0 * PI * theta.powf(2.0 * i as f64 / head_dim as f64);
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    let same = |(i, &x): (usize, &f32)| (f64::from(x) / expected(i) - 1.0).abs() < 1e-4;
    stored.iter().enumerate().all(same).then(|| {
        json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The factors as llama.cpp's converter computes them for Llama 3.2 (theta 500000, factor 32, heads of 64).
    #[test]
    fn llama3_rope_parameters_are_recovered() {
        let factors = |factor: f64, original: f64| -> Vec<f32> {
            let one = |i: u32| {
                let freq = 1.0 / 500_000f64.powf(f64::from(2 * i) / 64.0);
                let wavelength = 2.0 * PI / freq;
                if wavelength < original / 4.0 {
                    1.0
                } else if wavelength > original {
                    factor as f32
                } else {
                    let smooth = (original / wavelength - 1.0) / 3.0;
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                }
            };
            (0..32).map(one).collect()
        };
        let found = llama3(&factors(32.0, 8192.0), 500_000.0, 64).map(|v| v["factor"].clone());
        assert_eq!(found, Some(json!(32.0)));
        assert_eq!(llama3(&factors(32.0, 4096.0), 500_000.0, 64), None);
        assert_eq!(llama3(&factors(32.0, 8192.0)[..31], 500_000.0, 64), None);
        assert_eq!(llama3(&[], 500_000.0, 64), None);
    }

    #[test]
    fn epsilon_is_rounded_to_its_decimal() {
        for x in [1e-5, 1e-6, 1.25e-7, 1e-12] {
            assert_eq!(clean(f64::from(x as f32)), x);
        }
    }
}
