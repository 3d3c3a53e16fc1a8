//! A base whose weights are quantised to blocks while it is loaded, as --quantize requests. The same numbers give the
//! same blocks on every machine, so workers quantise their own copies of the original files.

use super::weights::ModelError;
use crate::families::tensors::is_module;
use crate::numeric::block::{Block, Blocks, Encoding, nest, quantise};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors, Use};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::Path;

/// Quantisation of a base's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipe {
    /// Projections to bitsandbytes' NF4 in blocks of 64; embedding and head keep their type.
    Nf4,
    /// NF4 with magnitudes that are themselves quantised (bitsandbytes' `bnb_4bit_use_double_quant`).
    Nf4Double,
    /// All matrices to ggml's Q8_0.
    Q8,
}

/// Why a base cannot be quantised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantiseError {
    /// Unknown name.
    #[error("{0:?}: expected one of nf4, nf4-double, q8_0")]
    Unknown(String),
    /// The weights are quantised already.
    #[error("the model's weights are quantised already ({tensor} is {encoding}): leave --quantize out")]
    Already {
        /// The first quantised tensor.
        tensor: String,
        /// Its type.
        encoding: &'static str,
    },
    /// The rows are not whole blocks.
    #[error(
        "{tensor}: rows of {cols} numbers are not whole blocks of {elements}, as {block} needs: {way_out}"
    )]
    Ragged {
        /// The tensor.
        tensor: String,
        /// Its inputs.
        cols: usize,
        /// Numbers in a block.
        elements: usize,
        /// The type.
        block: &'static str,
        /// The alternative for the user.
        way_out: &'static str,
    },
}

impl Recipe {
    /// Parses the value of --quantize.
    pub fn named(name: &str) -> Result<Self, QuantiseError> {
        match name.to_lowercase().as_str() {
            "nf4" => Ok(Recipe::Nf4),
            "nf4-double" => Ok(Recipe::Nf4Double),
            "q8_0" => Ok(Recipe::Q8),
            _ => Err(QuantiseError::Unknown(name.to_owned())),
        }
    }

    /// Name for --quantize.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::Nf4 => "nf4",
            Recipe::Nf4Double => "nf4-double",
            Recipe::Q8 => "q8_0",
        }
    }

    /// The type of block.
    pub fn block(self) -> Block {
        match self {
            Recipe::Nf4 | Recipe::Nf4Double => Block::NF4,
            Recipe::Q8 => Block::Q8_0,
        }
    }

    fn takes(self, name: &str) -> bool {
        let Some(path) = name.strip_suffix(".weight") else { return false };
        let last = path.rsplit('.').next().unwrap_or(path);
        is_module(last) || self == Recipe::Q8 && matches!(last, "embed_tokens" | "lm_head")
    }
}

/// A base that is quantised while it is read.
pub struct Quantised<'a> {
    base: Box<dyn Tensors + 'a>,
    recipe: Recipe,
}

impl<'a> Quantised<'a> {
    /// Refuses a base that cannot be quantised. Weights are not read.
    pub fn new(base: impl Tensors + 'a, recipe: Recipe) -> Result<Self, QuantiseError> {
        let block = recipe.block();
        for tensor in base.names().into_iter().filter(|name| recipe.takes(name)) {
            // A file without readable metadata gives its error when the tensor is loaded.
            let Ok(Some(About { shape, encoding })) = base.about(&tensor) else { continue };
            if let Encoding::Blocks(_) = encoding {
                return Err(QuantiseError::Already { tensor, encoding: encoding.name() });
            }
            let (cols, elements) = (shape.last().copied().unwrap_or(0), block.elements());
            if !cols.is_multiple_of(elements) {
                let fits = cols.is_multiple_of(Block::Q8_0.elements());
                let way_out = if fits { "use --quantize q8_0" } else { "leave --quantize out" };
                return Err(QuantiseError::Ragged { tensor, cols, elements, block: block.name(), way_out });
            }
        }
        Ok(Quantised { base: Box::new(base), recipe })
    }
}

impl Tensors for Quantised<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(blocks) = self.blocks(name)? else { return self.base.tensor(name) };
        let mut values = vec![0.0; blocks.rows * blocks.cols];
        blocks.block.widen(&mut values, &blocks.bytes);
        let bytes = Cow::Owned(Dtype::F32.narrow(&values));
        Ok(Some(Tensor { shape: vec![blocks.rows, blocks.cols], dtype: Dtype::F32, bytes }))
    }

    fn blocks(&self, name: &str) -> Result<Option<Blocks>, String> {
        if !self.recipe.takes(name) {
            return self.base.blocks(name);
        }
        let Some(tensor) = self.base.tensor(name)? else { return Ok(None) };
        let &[rows, cols] = &tensor.shape[..] else { return Ok(None) };
        let numbers = tensor.dtype.widen(&tensor.bytes);
        if let Some(index) = numbers.par_iter().position_first(|x| !x.is_finite()) {
            return Err(ModelError::NonFinite { name: name.to_owned(), index }.to_string());
        }
        let mut bytes = quantise(self.recipe.block(), &numbers);
        if let (Recipe::Nf4Double, Some(blocks)) = (self.recipe, &mut bytes) {
            nest(blocks);
        }
        Ok(bytes.map(Into::into).and_then(|bytes| Blocks::new((rows, cols), self.recipe.block(), bytes)))
    }

    fn about(&self, name: &str) -> Result<Option<About>, String> {
        let about = self.base.about(name)?;
        let encoding = Encoding::Blocks(self.recipe.block());
        Ok(about.map(|about| if self.recipe.takes(name) { About { encoding, ..about } } else { about }))
    }

    fn names(&self) -> Vec<String> {
        self.base.names()
    }

    fn advise(&self, name: &str, when: Use) {
        self.base.advise(name, when);
    }

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.base.file_of(name)
    }
}
