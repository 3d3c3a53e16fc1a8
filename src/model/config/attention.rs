//! Attention, described layer by layer, and how much of a description the backends compute.

use super::read::Fields;
use super::{ConfigError, Heads, key, unsupported};
use crate::families::{Family, ScoreScale};

/// The attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Query heads, key/value heads and the size of one.
    pub heads: Heads,
    /// Tokens that a token sees, itself included; `None` for its whole row so far.
    pub window: Option<usize>,
    /// What scores q k are multiplied by.
    pub scale: f32,
    /// Scores become cap * tanh(score / cap).
    pub soft_cap: Option<f32>,
}

impl AttentionSpec {
    /// What a backend is given. Backends divide scores by sqrt(head size) and let a token see its whole row so far:
    /// another scale goes into the queries ([`AttentionSpec::query_factor`]), rows longer than a window are refused by
    /// [`Config::check_sequence`](super::Config::check_sequence), a soft cap is refused here.
    pub fn supported(&self) -> Result<Heads, ConfigError> {
        match self.soft_cap {
            Some(cap) => Err(unsupported(
                format!("a soft cap of attention scores ({cap})"),
                "no backend computes it; use another base",
            )),
            None => Ok(self.heads),
        }
    }

    /// What queries are multiplied by, for scores of this scale on a backend that divides them by sqrt(head size).
    /// Exactly 1 where that is the scale.
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

/// Scale and soft cap of the scores.
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
    };
    let soft_cap = family.soft_cap.map(positive).transpose()?.flatten();
    Ok((scale, soft_cap.map(|cap| cap as f32)))
}
