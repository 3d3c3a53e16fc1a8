//! A base whose weights are put into blocks while it is loaded: what --quantize asks for. The same numbers give the
//! same blocks on every machine, so that workers quantise for themselves what they have as the files are.

use super::lora::MODULES;
use super::weights::ModelError;
use crate::numeric::block::{Block, Blocks, Encoding, nest, quantise};
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{About, Tensor, Tensors};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::Path;

/// What becomes of a base's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipe {
    /// Projections to bitsandbytes' NF4 in blocks of 64; embedding and head stay as they are.
    Nf4,
    /// The same with magnitudes that are quantised once more, as bitsandbytes' `bnb_4bit_use_double_quant` asks.
    Nf4Double,
    /// All matrices to ggml's Q8_0.
    Q8,
}

/// Why a base cannot be quantised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantiseError {
    /// Nothing of that name.
    #[error("{0:?}: expected one of nf4, nf4-double, q8_0")]
    Unknown(String),
    /// Once is enough.
    #[error("the model's weights are quantised already ({tensor} is {encoding}): leave --quantize out")]
    Already {
        /// The first tensor that is.
        tensor: String,
        /// Its type.
        encoding: &'static str,
    },
    /// Rows that blocks do not fill.
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
        /// What to do.
        way_out: &'static str,
    },
}

impl Recipe {
    /// What --quantize says.
    pub fn named(name: &str) -> Result<Self, QuantiseError> {
        match name.to_lowercase().as_str() {
            "nf4" => Ok(Recipe::Nf4),
            "nf4-double" => Ok(Recipe::Nf4Double),
            "q8_0" => Ok(Recipe::Q8),
            _ => Err(QuantiseError::Unknown(name.to_owned())),
        }
    }

    /// As --quantize has it.
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
        MODULES.contains(&last) || self == Recipe::Q8 && matches!(last, "embed_tokens" | "lm_head")
    }
}

/// A base, quantised where it is read.
pub struct Quantised<'a> {
    base: Box<dyn Tensors + 'a>,
    recipe: Recipe,
}

impl<'a> Quantised<'a> {
    /// Refuses what cannot be quantised; no weight is read.
    pub fn new(base: Box<dyn Tensors + 'a>, recipe: Recipe) -> Result<Self, QuantiseError> {
        let block = recipe.block();
        for tensor in base.names().into_iter().filter(|name| recipe.takes(name)) {
            // A file that cannot say what it holds says so when it is loaded.
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
        Ok(Quantised { base, recipe })
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

    fn file_of(&self, name: &str) -> Option<&Path> {
        self.base.file_of(name)
    }
}
