//! Reads the written file again before it gets its final name: every number, and the token ids of texts. The comparison
//! has no tolerance: a difference is a fault.

use super::super::Exported;
use crate::config::refusal::Refusal;
use crate::data::tokenizer::Special;
use crate::format::gguf::order::{self, Orders};
use crate::format::gguf::{decode, encode};
use crate::model::merge::Merged;
use crate::numeric::block::Encoding;
use crate::numeric::dtype::Dtype;
use crate::numeric::tensor::{Tensor, Tensors};
use crate::run::base_model::BaseModel;
use crate::support::waiting::WRITING;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Texts that tokenizers split differently; the last one has the form of a chat.
const TEXTS: [&str; 3] = [
    "Hello  world, it's 3 33 333 1234567 o'clock!!\n\n\t tabs, we'll SEE\r\n",
    " \u{e9}t\u{e9} \u{1f680} \u{6211}\u{60f3} \u{41d}\u{435}\u{449}\u{43e} def f(x):\n    return x+1  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n<|eot_id|><s>[INST] a [/INST]</s>",
];

/// The merged model with every number rounded to the file's types.
pub struct Rounded<'a> {
    /// The merged model in f32.
    pub merged: &'a Merged<'a>,
    /// Types by Hugging Face name, one for each tensor of the file that has a share of its rows; `None` for a share that
    /// is not written again.
    pub kinds: BTreeMap<String, Vec<Option<Encoding>>>,
    /// The orders of tensors in the file, in which their blocks are.
    pub orders: Orders,
    /// The same where only the replaced rows are rounded.
    pub rows: BTreeMap<String, Encoding>,
}

impl Rounded<'_> {
    fn with_rounded_rows(
        &self,
        name: &str,
        tensor: Tensor,
        kind: Encoding,
    ) -> Result<Tensor<'static>, String> {
        let mut values = tensor.dtype.widen(&tensor.bytes);
        for (row, own) in self.merged.replaced(name).into_iter().flatten() {
            values[row * own.len()..(row + 1) * own.len()]
                .copy_from_slice(&decode(kind, &encode(kind, own)?));
        }
        let bytes = Cow::Owned(Dtype::F32.narrow(&values));
        Ok(Tensor { shape: tensor.shape, dtype: Dtype::F32, bytes })
    }
}

impl Tensors for Rounded<'_> {
    fn tensor(&self, name: &str) -> Result<Option<Tensor<'_>>, String> {
        let Some(tensor) = self.merged.tensor(name)? else { return Ok(None) };
        if let Some(&kind) = self.rows.get(name) {
            return self.with_rounded_rows(name, tensor, kind).map(Some);
        }
        let Some(kinds) = self.kinds.get(name) else { return Ok(Some(tensor)) };
        let (family, order) = (self.merged.config.family, self.orders.of(name));
        let rows = tensor.shape[0] / kinds.len();
        let mut values = tensor.dtype.widen(&tensor.bytes);
        let size = values.len() / kinds.len();
        for (values, kind) in values.chunks_exact_mut(size.max(1)).zip(kinds) {
            let Some(kind) = *kind else { continue };
            order::to_file(family, name, values);
            let stored = order.stored(values, rows);
            values.copy_from_slice(&order.restored(&decode(kind, &encode(kind, &stored)?), rows));
            order::from_file(family, name, values);
        }
        let bytes = Cow::Owned(Dtype::F32.narrow(&values));
        Ok(Some(Tensor { shape: tensor.shape, dtype: Dtype::F32, bytes }))
    }

    fn names(&self) -> Vec<String> {
        self.merged.names()
    }
}

/// Checks that every number of the file equals the one in memory.
pub fn same(again: &BaseModel, rounded: &Rounded, out: &Path) -> Result<(), Refusal> {
    for name in again.files.tensors.names() {
        WRITING.add(1);
        let values = |t: &dyn Tensors| -> Result<Option<Vec<f32>>, Refusal> {
            Ok(t.tensor(&name).map_err(Refusal::failure)?.map(|t| t.dtype.widen(&t.bytes)))
        };
        // A base without a head has no prefix `model.` in its names.
        let bare = name.strip_prefix("model.").unwrap_or(&name);
        let one = match values(rounded)? {
            Some(values) => Some(values),
            None => rounded.tensor(bare).map_err(Refusal::failure)?.map(|t| t.dtype.widen(&t.bytes)),
        };
        if one != values(&*again.files.tensors)? {
            return Err(Refusal::failure(format!(
                "{}: not written: {name} reads back otherwise; report this",
                out.display()
            )));
        }
    }
    Ok(())
}

/// Checks that the file's tokenizer gives the same ids as the tokenizer of the training.
pub fn same_ids(source: &Exported, mut again: BaseModel, out: &Path) -> Result<(), Refusal> {
    let other = again.tokenizer(None)?;
    for text in TEXTS {
        for special in [Special::Add, Special::Omit] {
            if source.tokenizer.encode(text, special)? != other.encode(text, special)? {
                let way = "use --to merged and llama.cpp's convert_hf_to_gguf.py";
                return Err(Refusal::configuration(format!(
                    "{}: not written: its tokenizer would give other ids for {text:?}: {way}",
                    out.display()
                )));
            }
        }
    }
    Ok(())
}
