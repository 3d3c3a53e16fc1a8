//! The attention of each layer, and the subset of it that the backends compute.

use super::read::Fields;
use super::{ConfigError, Heads, key, unsupported};
use crate::families::{Family, ScoreScale};

/// The attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Number of query heads, number of key/value heads, and head size.
    pub heads: Heads,
    /// Tokens that a token sees, itself included; `None` for all tokens of its row up to itself.
    pub window: Option<usize>,
    /// Factor of the scores q k.
    pub scale: f32,
    /// Scores become cap * tanh(score / cap).
    pub soft_cap: Option<f32>,
}

impl AttentionSpec {
    /// Returns the heads for a backend. Backends divide scores by sqrt(head size): another scale is multiplied into the
    /// queries ([`AttentionSpec::query_factor`]). A soft cap is refused here.
    pub fn supported(&self) -> Result<Heads, ConfigError> {
        match self.soft_cap {
            Some(cap) => Err(unsupported(
                format!("a soft cap of attention scores ({cap})"),
                "no backend computes it; use another base",
            )),
            None => Ok(Heads { window: self.window, ..self.heads }),
        }
    }

    /// Factor of the queries that gives scores this scale on a backend that divides them by sqrt(head size). The factor
    /// is exactly 1 where the scales are equal.
    pub fn query_factor(&self) -> f32 {
        self.scale / AttentionSpec::usual_scale(self.heads)
    }

    /// 1 / sqrt(head size).
    pub fn usual_scale(heads: Heads) -> f32 {
        root(heads.size as f64)
    }
}

/// 1 / sqrt(x), rounded once.
fn root(x: f64) -> f32 {
    (1.0 / x.sqrt()) as f32
}

/// Reads scale and soft cap of the scores.
pub(super) fn read(
    fields: &Fields,
    family: &Family,
    heads: Heads,
) -> Result<(f32, Option<f32>), ConfigError> {
    let positive = |name: &str| match fields.number(name)? {
        Some(x) if x <= 0.0 => Err(key(name, format!("is {x}, not positive"))),
        other => Ok(other),
    };
    let scale = match family.score_scale {
        ScoreScale::HeadSize => AttentionSpec::usual_scale(heads),
        ScoreScale::Key(name) => root(positive(name)?.ok_or_else(|| key(name, "is missing"))?),
        ScoreScale::Factor(name) => positive(name)?.unwrap_or(1.0) as f32,
    };
    let soft_cap = family.soft_cap.map(positive).transpose()?.flatten();
    Ok((scale, soft_cap.map(|cap| cap as f32)))
}
