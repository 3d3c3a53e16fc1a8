//! Positions of the tensors in a file of weights whose beginning alone is here, so that parts of the rest can be fetched.

use std::collections::BTreeMap;
use std::ops::Range;

/// Positions of the tensors of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Positions {
    /// By their Hugging Face names, as far as those say which layer a tensor is of, and whether it is embedding or head.
    pub tensors: BTreeMap<String, Range<usize>>,
    /// Bytes that are read to know the configuration and the shapes of the tensors.
    pub shapes: Vec<Range<usize>>,
}

/// What the beginning of a file says.
#[derive(Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The positions of all tensors.
    All(Positions),
    /// This many bytes must be here to know more.
    Needs(u64),
}
