//! What is trained: which modules carry an adapter, of what rank and scale.

/// The seven projections of a decoder block, in model order.
pub const MODULES: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// A LoRA configuration after its targets were resolved against a model.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// R, at least 1.
    pub rank: usize,
    /// Scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
    pub alpha: f32,
    /// rsLoRA.
    pub rslora: bool,
    /// Probability of dropping an input of A, in [0, 1).
    pub dropout: f32,
    /// Suffixes out of [`MODULES`], in model order, without repeats.
    pub targets: Vec<String>,
    /// Keys dropout masks and the initial A.
    pub seed: u64,
}

impl LoraSpec {
    /// What the product of B and A is multiplied by.
    pub fn scale(&self) -> f32 {
        let r = self.rank as f32;
        self.alpha / if self.rslora { r.sqrt() } else { r }
    }
}
