//! A tensor in host memory, as read from a file.

use super::block::{Blocks, Encoding};
use super::dtype::Dtype;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// A tensor, borrowed from a memory map or owned.
#[derive(Debug, Clone)]
pub struct Tensor<'a> {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: Dtype,
    /// Little endian, row-major; not necessarily aligned.
    pub bytes: Cow<'a, [u8]>,
}

/// Implements [`Tensors`] for a pointer to a source.
macro_rules! pass_on {
    ([$($generic:tt)*] $pointer:ty, $this:ident => $shared:expr) => {
        impl $($generic)* Tensors for $pointer {
            fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
                (**self).tensor(name)
            }

            fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
                (**self).blocks(name)
            }

            fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
                (**self).block_parts(name)
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

            fn advise(&self, name: &str, when: Use) {
                (**self).advise(name, when);
            }

            fn shared(&self) -> Option<Arc<dyn Tensors>> {
                let $this = self;
                $shared
            }
        }
    };
}

pass_on!([<T: Tensors + ?Sized>] Box<T>, this => (**this).shared());
pass_on!([<T: Tensors + ?Sized>] &T, this => (**this).shared());
pass_on!([] Arc<dyn Tensors>, this => Some(this.clone()));

/// When the values of a tensor are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Next: a file may be read ahead.
    Soon,
    /// Not soon: memory may be freed.
    Later,
}

/// Shape and encoding of a tensor, known without reading its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Encoding in the file.
    pub encoding: Encoding,
}

/// A source of tensors, by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`).
pub trait Tensors: Send + Sync {
    /// The tensor `name`, or None if it does not exist; an error names the file and the cause.
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String>;

    /// The matrix `name` in blocks, or None if it does not exist or is not stored in blocks. [`Tensors::tensor`]
    /// returns the same values widened.
    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        let _ = name;
        Ok(None)
    }

    /// The matrix of [`Tensors::blocks`] in parts whose rows follow each other. A source overrides this if its file has
    /// several tensors for one matrix: each part then shares the bytes of the file.
    fn block_parts(&self, name: &str) -> Result<Option<Vec<Blocks>>, String> {
        Ok(self.blocks(name)?.map(|whole| vec![whole]))
    }

    /// Shape and encoding of a tensor, without reading its values. A source that stores blocks must override this.
    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let tensor = self.tensor(name)?;
        Ok(tensor.map(|t| About { shape: t.shape, encoding: Encoding::Plain(t.dtype) }))
    }

    /// All names, sorted.
    fn names(&self) -> Vec<String>;

    /// The file that contains, or should contain, the tensor `name`, for messages. None if there is no file.
    fn file_of(&self, name: &str) -> Option<&Path> {
        let _ = name;
        None
    }

    /// Says when the tensor `name` will be read; nothing depends on it but time and memory.
    fn advise(&self, name: &str, when: Use) {
        let _ = (name, when);
    }

    /// An owner of the same tensors, for reads after this borrow has ended; `None` if there is none.
    fn shared(&self) -> Option<Arc<dyn Tensors>> {
        None
    }
}
