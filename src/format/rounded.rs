//! Weights rounded to bf16 when read (half to even): the values of a bf16 checkpoint of the same model. A GGUF is
//! compared in this form with a reference made from such a checkpoint.

use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors, Use};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// The tensors of another source, rounded to bf16.
pub struct Bf16(pub Arc<dyn Tensors>);

impl Tensors for Bf16 {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(tensor) = self.0.tensor(name)? else { return Ok(None) };
        if tensor.dtype == Dtype::Bf16 {
            return Ok(Some(tensor));
        }
        let wide = tensor.dtype.widen(&tensor.bytes);
        let bytes = wide.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
        Ok(Some(Tensor { shape: tensor.shape, dtype: Dtype::Bf16, bytes: Cow::Owned(bytes) }))
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn advise(&self, name: &str, when: Use) {
        self.0.advise(name, when);
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.0.file_of(name)
    }
}
