//! Rotary embedding: the two dialects, and the angles. Angles are rounded to f32 exactly where transformers rounds them
//! (frequency, then position times frequency), so that long rows agree too; their cosines and sines are computed in f64
//! by `libm`, so that every machine has the same table.

use super::read::Fields;
use super::{Config, ConfigError, key, unsupported};
use crate::families::{Family, Rotated};
use std::sync::Arc;

/// The base of sliding layers where config.json gives none.
const LOCAL: f64 = 10_000.0;

/// Mapping of positions to angles.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Scaling for longer sequences.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// Nothing is rotated: all frequencies are 0.
    Off,
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
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): frequencies that turn less than `slow` times within the original
    /// length are divided by the factor, those that turn more than `fast` times are kept, with a ramp between.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Turns above which a frequency is kept.
        fast: f64,
        /// Turns below which a frequency is divided.
        slow: f64,
        /// Sequence length before scaling.
        original: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
        /// Whether the ends of the ramp are whole indices of frequencies.
        truncate: bool,
        /// Queries at position p are multiplied by 1 + growth * ln(1 + floor(p / original)).
        growth: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency is divided by its factor; rows beyond the original
    /// length have other factors, from their first token on.
    Long {
        /// Of each frequency, in rows up to the original length.
        short: Arc<[f32]>,
        /// Of each frequency, in longer rows.
        long: Arc<[f32]>,
        /// Sequence length before scaling.
        original: usize,
        /// Factor of cosines and sines.
        amplitude: f64,
    },
}

/// Reads the rotary embedding of all layers, and that of sliding layers where the family has a separate one.
pub(super) fn read(fields: &Fields, family: &Family) -> Result<(Rope, Option<Rope>), ConfigError> {
    let default = family.rope_theta;
    let Some(local) = family.local_rope_theta else { return Ok((shared(fields, family)?, None)) };
    let base = if local == "rope_theta" { default } else { LOCAL };
    if let Some(sections) = fields.object("rope_parameters").map(Fields::of)
        && let Some(full) = sections.object("full_attention").map(Fields::of)
        && let Some(sliding) = sections.object("sliding_attention").map(Fields::of)
    {
        return Ok((of(&full, (default, family), fields)?, Some(of(&sliding, (base, family), fields)?)));
    }
    let local = Rope { theta: theta(fields.number(local)?, base)?, scaling: RopeScaling::Default };
    Ok((shared(fields, family)?, Some(local)))
}

/// Reads which layers are rotated.
pub(super) fn rotated(fields: &Fields, family: &Family, layers: usize) -> Result<Vec<bool>, ConfigError> {
    match family.rotated {
        Rotated::All => return Ok(vec![true; layers]),
        Rotated::Key(name) => return Ok(vec![fields.text(name)? == Some("rope"); layers]),
        Rotated::Listed => {}
    }
    let name = "no_rope_layers";
    let Some(list) = fields.list(name)? else {
        let every = fields.optional_size("no_rope_layer_interval", 1..=1 << 31)?.unwrap_or(4);
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(every)).collect());
    };
    let bits: Option<Vec<bool>> = list.iter().map(|v| Some(v.as_u64()? != 0)).collect();
    match bits {
        Some(bits) if bits.len() >= layers => Ok(bits[..layers].to_vec()),
        _ => Err(key(name, format!("is not a list of a 0 or 1 for each of {layers} layers"))),
    }
}

/// Reads how many values of a head are rotated.
pub(super) fn rotary(fields: &Fields, family: &Family, size: usize) -> Result<usize, ConfigError> {
    let name = "partial_rotary_factor";
    let sections = ["rope_parameters", "rope_scaling"].map(|section| fields.object(section).map(Fields::of));
    let own = sections.iter().flatten().map(|section| section.number(name)).find_map(Result::transpose);
    let own = own.transpose()?.or(fields.number(name)?);
    match (own, family.partial_rotary) {
        (None | Some(1.0), None) => Ok(size),
        (Some(f), None) => {
            Err(unsupported(format!("{name} {f}"), "only whole heads are rotated; use another base"))
        }
        (own, Some(default)) => {
            let factor = own.unwrap_or(default);
            let rotary = (size as f64 * factor) as usize;
            if !(0.0..=1.0).contains(&factor) || rotary == 0 || !rotary.is_multiple_of(2) {
                let what =
                    format!("is {factor}: {rotary} of {size} values of a head cannot be rotated in pairs");
                return Err(key(name, what));
            }
            Ok(rotary)
        }
    }
}

/// The place in the files of each row of a head, in an order in which rotary pairs are half a head apart; `None` where
/// they are there in the files. Pairs that are not rotated come last.
pub(super) fn order(size: usize, rotary: usize, family: &Family) -> Option<Vec<usize>> {
    let adjacent = family.adjacent_pairs;
    if rotary == size && !adjacent {
        return None;
    }
    let pair = |i: usize| {
        let (first, pairs) = if i < rotary / 2 { (0, rotary / 2) } else { (rotary, (size - rotary) / 2) };
        let i = i - first / 2;
        if adjacent { [first + 2 * i, first + 2 * i + 1] } else { [first + i, first + i + pairs] }
    };
    Some([0, 1].into_iter().flat_map(|half| (0..size / 2).map(move |i| pair(i)[half])).collect())
}

/// Reads the rotary embedding of all layers.
fn shared(fields: &Fields, family: &Family) -> Result<Rope, ConfigError> {
    let own = fields.number("rope_theta")?.unwrap_or(family.rope_theta);
    let section = match fields.object("rope_parameters") {
        Some(map) => Some(per_layer_type(&Fields::of(map))?.unwrap_or(Fields::of(map))),
        None => fields.object("rope_scaling").map(Fields::of),
    };
    let Some(section) = section else {
        if family.needs_rope_section {
            return Err(key("rope_parameters", "is missing"));
        }
        return Ok(Rope { theta: theta(Some(own), own)?, scaling: RopeScaling::Default });
    };
    let rope = of(&section, (own, family), fields)?;
    // Implementations prefer different ones of the two names, so the values must be equal.
    if let Some(older) = fields.object("rope_scaling").map(Fields::of)
        && of(&older, (rope.theta, family), fields)? != rope
    {
        return Err(key("rope_scaling", "contradicts rope_parameters: remove the one that is wrong"));
    }
    Ok(rope)
}

fn of(section: &Fields, (own, family): (f64, &Family), top: &Fields) -> Result<Rope, ConfigError> {
    Ok(Rope { theta: theta(section.number("rope_theta")?, own)?, scaling: scaling(section, family, top)? })
}

fn theta(value: Option<f64>, default: f64) -> Result<f64, ConfigError> {
    match value.unwrap_or(default) {
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

fn scaling(section: &Fields, family: &Family, top: &Fields) -> Result<RopeScaling, ConfigError> {
    let kind = section.text("rope_type")?.or(section.text("type")?).unwrap_or("default");
    let positive = |name: &str| match section.number(name)? {
        Some(x) if x > 0.0 => Ok(x),
        Some(x) => Err(key(name, format!("is {x}, not positive (rope_type {kind})"))),
        None => Err(key(name, format!("is missing (rope_type {kind})"))),
    };
    if let Some(growth) = family.query_growth.filter(|growth| kind != "yarn" && section.mentions(growth)) {
        return Err(key(growth, format!("is not supported with rope_type {kind}")));
    }
    if family.long_rope && kind != "default" {
        return long(section, kind, top);
    }
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: positive("factor")? }),
        "yarn" => yarn(section, family, (positive("factor")?, original(section, top)?)),
        "llama3" => {
            let original = original(section, top)?;
            let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
            if high <= low {
                return Err(key("high_freq_factor", format!("is {high}, not above low_freq_factor {low}")));
            }
            let factor = positive("factor")?;
            Ok(RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original })
        }
        other => Err(unsupported(
            format!("rope type `{other}`"),
            "default, linear, llama3 and yarn are; choose a model with one of them",
        )),
    }
}

fn long(section: &Fields, kind: &str, top: &Fields) -> Result<RopeScaling, ConfigError> {
    if !["longrope", "su", "yarn"].contains(&kind) {
        return Err(unsupported(format!("rope type `{kind}`"), "this family has default and longrope"));
    }
    let factors = |name: &str| {
        let list = section.list(name)?.ok_or_else(|| key(name, format!("is missing (rope_type {kind})")))?;
        let each = list.iter().map(|v| v.as_f64().filter(|x| *x > 0.0 && x.is_finite()).map(|x| x as f32));
        let all = each.collect::<Option<Arc<[f32]>>>();
        all.ok_or_else(|| key(name, "is not a list of positive numbers"))
    };
    let (short, long) = (factors("short_factor")?, factors("long_factor")?);
    let original = top.size("original_max_position_embeddings", 2..=1 << 31)?;
    let longest = top.size("max_position_embeddings", 1..=1 << 31)?;
    let factor = section.number("factor")?.unwrap_or(longest as f64 / original as f64);
    let amplitude = match section.number("attention_factor")? {
        Some(own) if own > 0.0 => own,
        Some(own) => return Err(key("attention_factor", format!("is {own}, not positive"))),
        None if factor <= 1.0 => 1.0,
        None => (1.0 + libm::log(factor) / libm::log(original as f64)).sqrt(),
    };
    // A number of 32 bits, as in the table and in GGUF files.
    let amplitude = f64::from(amplitude as f32);
    Ok(RopeScaling::Long { short, long, original, amplitude })
}

/// The sequence length before scaling.
fn original(section: &Fields, top: &Fields) -> Result<usize, ConfigError> {
    let name = "original_max_position_embeddings";
    let own = section.optional_size(name, 1..=1 << 31)?.or(top.optional_size(name, 1..=1 << 31)?);
    own.map_or_else(|| top.size("max_position_embeddings", 1..=1 << 31), Ok)
}

fn yarn(
    section: &Fields,
    family: &Family,
    (factor, original): (f64, usize),
) -> Result<RopeScaling, ConfigError> {
    let or = |name: &str, default: f64| -> Result<f64, ConfigError> {
        Ok(section.number(name)?.filter(|x| *x != 0.0).unwrap_or(default))
    };
    let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * libm::log(factor) + 1.0 };
    let amplitude =
        match (section.number("attention_factor")?, or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?) {
            (Some(own), ..) => own,
            (None, above, below) if above != 0.0 && below != 0.0 => magnitude(above) / magnitude(below),
            _ => magnitude(1.0),
        };
    let (fast, slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
    let truncate = section.flag("truncate")?.unwrap_or(true);
    if !(amplitude > 0.0 && fast > slow && slow > 0.0) {
        return Err(key("beta_fast", format!("is {fast}, beta_slow {slow}, attention_factor {amplitude}")));
    }
    let growth = family.query_growth.map(|key| section.number(key)).transpose()?.flatten().unwrap_or(0.0);
    Ok(RopeScaling::Yarn { factor, fast, slow, original, amplitude, truncate, growth })
}

impl Config {
    /// Most tokens of a text that is continued from a prompt.
    pub fn longest_text(&self, prompt: usize) -> usize {
        longest_text(self.max_positions, self.rope.short_rows(), prompt)
    }
}

/// Most tokens of a text that is continued from a prompt, where rows have at most `longest` tokens. A text that begins as
/// a short row stays one: the keys of its tokens have the angles of short rows.
pub fn longest_text(longest: usize, short: Option<usize>, prompt: usize) -> usize {
    short.filter(|short| prompt <= *short).map_or(longest, |short| short.min(longest))
}

impl Rope {
    /// Returns the D/2 angular frequencies of heads of size D, with LongRoPE those of rows up to the original length.
    pub fn frequencies(&self, size: usize) -> Vec<f32> {
        match &self.scaling {
            RopeScaling::Long { short, .. } => self.divided(size, short),
            _ => self.divided(size, &[]),
        }
    }

    /// Frequencies with these divisors, 1 where there is none.
    fn divided(&self, size: usize, divisors: &[f32]) -> Vec<f32> {
        let base = |i: usize| {
            let exponent = (2 * i) as f32 / size as f32;
            let divisor = divisors.get(i).copied().unwrap_or(1.0);
            1.0f32 / (divisor * libm::pow(self.theta, f64::from(exponent)) as f32)
        };
        let ramp = self.ramp(size);
        (0..size / 2).map(|i| self.scaling.apply(base(i), ramp(i))).collect()
    }

    /// Returns [positions, D]: the cosines of the D/2 angles of each position, then their sines. The positions of rows
    /// beyond the original length begin at [`Rope::short_rows`].
    pub fn table(&self, positions: usize, size: usize) -> Vec<f32> {
        let short = self.frequencies(size);
        let long = match &self.scaling {
            RopeScaling::Long { long, .. } => self.divided(size, long),
            _ => Vec::new(),
        };
        let first = self.short_rows().unwrap_or(positions);
        let mut table = Vec::with_capacity(positions * size);
        for row in 0..positions {
            let (position, frequencies) = if row < first { (row, &short) } else { (row - first, &long) };
            let angle = |f: &f32| f64::from(position as f32 * f);
            table.extend(frequencies.iter().map(|f| libm::cos(angle(f)) as f32));
            table.extend(frequencies.iter().map(|f| libm::sin(angle(f)) as f32));
        }
        if let RopeScaling::Yarn { amplitude, .. } | RopeScaling::Long { amplitude, .. } = self.scaling {
            table.iter_mut().for_each(|x| *x *= amplitude as f32);
        }
        table
    }

    /// Tokens up to which a row has the first angles of the table; `None` where rows of any length have them.
    pub fn short_rows(&self) -> Option<usize> {
        if let RopeScaling::Long { original, .. } = self.scaling { Some(original) } else { None }
    }

    /// Whether queries grow with their position.
    pub fn grows(&self) -> bool {
        matches!(self.scaling, RopeScaling::Yarn { growth, .. } if growth != 0.0)
    }

    /// The factor of queries at a position.
    pub fn growth_at(&self, position: usize) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { growth, original, .. } => {
                (1.0 + growth * libm::log(1.0 + (position / original) as f64)) as f32
            }
            _ => 1.0,
        }
    }

    /// The part by which YaRN divides frequency i: 0 at high frequencies, 1 at low ones.
    fn ramp(&self, size: usize) -> impl Fn(usize) -> f32 {
        let (mut low, mut high) = (0.0, 0.0);
        if let RopeScaling::Yarn { fast, slow, original, truncate, .. } = self.scaling {
            let turns = std::f64::consts::TAU;
            let index = |n: f64| {
                size as f64 * libm::log(original as f64 / (n * turns)) / (2.0 * libm::log(self.theta))
            };
            (low, high) = (index(fast), index(slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(size as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
        }
        move |i| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0)
    }
}

impl RopeScaling {
    /// Refuses another number of factors than that of the frequencies.
    pub(super) fn check(&self, frequencies: usize) -> Result<(), ConfigError> {
        let RopeScaling::Long { short, long, .. } = self else { return Ok(()) };
        match [("short_factor", short), ("long_factor", long)].iter().find(|of| of.1.len() != frequencies) {
            Some((name, all)) => {
                Err(key(name, format!("has {} numbers for {frequencies} frequencies", all.len())))
            }
            None => Ok(()),
        }
    }

    fn apply(&self, frequency: f32, ramp: f32) -> f32 {
        match *self {
            RopeScaling::Default | RopeScaling::Long { .. } => frequency,
            RopeScaling::Off => 0.0,
            RopeScaling::Yarn { factor, .. } => {
                let kept = 1.0 - ramp;
                frequency / factor as f32 * (1.0 - kept) + frequency * kept
            }
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
