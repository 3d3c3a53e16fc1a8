//! Rotary embedding: the two dialects, and the angles. Angles are rounded to f32 exactly where transformers rounds them
//! (frequency, then position times frequency), so that long rows agree too; their cosines and sines are computed in f64
//! by `libm`, so that every machine has the same table.

use super::read::Fields;
use super::{ConfigError, key, unsupported};
use crate::families::Family;

/// Mapping of positions to angles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Scaling for longer sequences.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Every frequency is divided by the factor.
    Linear {
        /// At least 1 in practice.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones kept, intermediate ones interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above original / this count as low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below original / this count as high frequencies.
        high_freq_factor: f64,
        /// Sequence length before scaling.
        original: usize,
    },
}

/// Reads the rotary embedding of all layers, and that of sliding layers where the family has a separate one.
pub(super) fn read(fields: &Fields, family: &Family) -> Result<(Rope, Option<Rope>), ConfigError> {
    let Some(local) = family.local_rope_theta else { return Ok((shared(fields)?, None)) };
    if let Some(sections) = fields.object("rope_parameters").map(Fields::of)
        && let Some(full) = sections.object("full_attention").map(Fields::of)
        && let Some(sliding) = sections.object("sliding_attention").map(Fields::of)
    {
        return Ok((of(&full, None, fields)?, Some(of(&sliding, None, fields)?)));
    }
    let local = Rope { theta: theta(fields.number(local)?)?, scaling: RopeScaling::Default };
    Ok((shared(fields)?, Some(local)))
}

/// Reads the rotary embedding of all layers.
fn shared(fields: &Fields) -> Result<Rope, ConfigError> {
    let own = fields.number("rope_theta")?;
    let section = match fields.object("rope_parameters") {
        Some(map) => Some(per_layer_type(&Fields::of(map))?.unwrap_or(Fields::of(map))),
        None => fields.object("rope_scaling").map(Fields::of),
    };
    let Some(section) = section else {
        return Ok(Rope { theta: theta(own)?, scaling: RopeScaling::Default });
    };
    let rope = of(&section, own, fields)?;
    // Implementations prefer different ones of the two names, so the values must be equal.
    if let Some(older) = fields.object("rope_scaling").map(Fields::of)
        && of(&older, Some(rope.theta), fields)? != rope
    {
        return Err(key("rope_scaling", "contradicts rope_parameters: remove the one that is wrong"));
    }
    Ok(rope)
}

fn of(section: &Fields, own: Option<f64>, top: &Fields) -> Result<Rope, ConfigError> {
    Ok(Rope { theta: theta(section.number("rope_theta")?.or(own))?, scaling: scaling(section, top)? })
}

fn theta(value: Option<f64>) -> Result<f64, ConfigError> {
    match value.unwrap_or(10_000.0) {
        theta if theta > 0.0 => Ok(theta),
        theta => Err(key("rope_theta", format!("is {theta}, not positive"))),
    }
}

/// transformers 5 may nest one section per layer type. They must be equal where the family has one rotary embedding.
fn per_layer_type<'a>(sections: &Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    let mut nested = sections.objects();
    let Some((_, first)) = nested.next() else { return Ok(None) };
    match nested.find(|(_, other)| *other != first) {
        Some((name, _)) => Err(unsupported(
            format!("another rotary embedding for layers of type `{name}`"),
            "choose a model with one rotary embedding for all layers",
        )),
        None => Ok(Some(Fields::of(first))),
    }
}

fn scaling(section: &Fields, top: &Fields) -> Result<RopeScaling, ConfigError> {
    let kind = section.text("rope_type")?.or(section.text("type")?).unwrap_or("default");
    let positive = |name: &str| match section.number(name)? {
        Some(x) if x > 0.0 => Ok(x),
        Some(x) => Err(key(name, format!("is {x}, not positive (rope_type {kind})"))),
        None => Err(key(name, format!("is missing (rope_type {kind})"))),
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: positive("factor")? }),
        "llama3" => {
            let name = "original_max_position_embeddings";
            let own = section.optional_size(name, 1..=1 << 31)?.or(top.optional_size(name, 1..=1 << 31)?);
            let original = match own {
                Some(n) => n,
                None => top.size("max_position_embeddings", 1..=1 << 31)?,
            };
            let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
            if high <= low {
                return Err(key("high_freq_factor", format!("is {high}, not above low_freq_factor {low}")));
            }
            let factor = positive("factor")?;
            Ok(RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original })
        }
        other => Err(unsupported(
            format!("rope type `{other}`"),
            "default, linear and llama3 are; choose a model with one of them",
        )),
    }
}

impl Rope {
    /// Returns the D/2 angular frequencies of heads of size D.
    pub fn frequencies(&self, size: usize) -> Vec<f32> {
        let base = |i: usize| {
            let exponent = (2 * i) as f32 / size as f32;
            1.0f32 / libm::pow(self.theta, f64::from(exponent)) as f32
        };
        (0..size / 2).map(|i| self.scaling.apply(base(i))).collect()
    }

    /// Returns [positions, D]: the cosines of the D/2 angles of each position, then their sines.
    pub fn table(&self, positions: usize, size: usize) -> Vec<f32> {
        let frequencies = self.frequencies(size);
        let mut table = Vec::with_capacity(positions * size);
        for position in 0..positions {
            let angle = |f: &f32| f64::from(position as f32 * f);
            table.extend(frequencies.iter().map(|f| libm::cos(angle(f)) as f32));
            table.extend(frequencies.iter().map(|f| libm::sin(angle(f)) as f32));
        }
        table
    }
}

impl RopeScaling {
    fn apply(self, frequency: f32) -> f32 {
        match self {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor as f32,
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original } => {
                let (factor, original) = (factor as f32, original as f32);
                let (low, high) = (low as f32, high as f32);
                let wave = 2.0 * std::f32::consts::PI / frequency;
                if wave > original / low {
                    frequency / factor
                } else if wave < original / high {
                    frequency
                } else {
                    let smooth = (original / wave - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}
