//! A tensor on the host, as a file gives it.

use super::dtype::Dtype;
use std::borrow::Cow;

/// Borrowed out of a memory map, or widened.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    /// Outermost first.
    pub shape: Vec<usize>,
    /// Encoding.
    pub dtype: Dtype,
    /// Little endian, row-major; not necessarily aligned.
    pub bytes: Cow<'a, [u8]>,
}

/// Tensors by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`).
pub trait Tensors: Send + Sync {
    /// The tensor of that name, None if there is none; an error names the file and what is wrong with it.
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String>;

    /// Every name, sorted.
    fn names(&self) -> Vec<String>;
}
