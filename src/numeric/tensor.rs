//! A tensor on the host, as a file gives it.

use super::block::{Blocks, Encoding};
use super::dtype::Dtype;
use std::borrow::Cow;
use std::path::Path;

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

/// Pointers to a source of tensors are sources themselves.
macro_rules! pass_on {
    ($($pointer:ty),*) => {$(
        impl<T: Tensors + ?Sized> Tensors for $pointer {
            fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
                (**self).tensor(name)
            }

            fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
                (**self).blocks(name)
            }

            fn about(&self, name: &str) -> Result<Option<About>, String> {
                (**self).about(name)
            }

            fn names(&self) -> Vec<String> {
                (**self).names()
            }

            fn file_of(&self, name: &str) -> Option<&Path> {
                (**self).file_of(name)
            }
        }
    )*};
}

pass_on!(Box<T>, &T);

/// What is known of a tensor without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// Outermost first.
    pub shape: Vec<usize>,
    /// As it is stored.
    pub encoding: Encoding,
}

/// Tensors by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`).
pub trait Tensors: Send + Sync {
    /// The tensor of that name, None if there is none; an error names the file and what is wrong with it.
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String>;

    /// The matrix of that name in its blocks, None where there is none or its numbers are stored one by one.
    /// [`Tensors::tensor`] gives the same numbers widened.
    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        let _ = name;
        Ok(None)
    }

    /// What is known of it without reading it. A source that stores blocks overrides this.
    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let tensor = self.tensor(name)?;
        Ok(tensor.map(|t| About { shape: t.shape, encoding: Encoding::Plain(t.dtype) }))
    }

    /// Every name, sorted.
    fn names(&self) -> Vec<String>;

    /// The file in which the tensor of that name lies, or should lie: for messages. None where there is no file.
    fn file_of(&self, name: &str) -> Option<&Path> {
        let _ = name;
        None
    }
}
